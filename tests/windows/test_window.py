"""Reading rows in passes is indexing, and a window's batches are those drawn one by one."""

import contextlib
import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import csc_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.sampler import NodeSamplerInput

from ogbnlib.errors import InputError
from ogbnlib.io.disk_array import CHUNK_BYTES, DiskArray
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.windows.window import Seeds, Window, sample_windows

BLOCK = 4096
ONE_FOLDER = [HealthCheck.function_scoped_fixture]
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": ONE_FOLDER}


@contextlib.contextmanager
def on_disk(
    folder: Path, *arrays: np.ndarray, offset: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[list[DiskArray]]:
    """Each array in a file of its own, `offset` bytes in, as a `DiskArray`."""
    opened = []
    try:
        for number, array in enumerate(arrays):
            path = folder / f"{number}.bin"
            path.write_bytes(os.urandom(offset) + array.tobytes())
            row_bytes = array.itemsize * math.prod(array.shape[1:])
            opened.append(DiskArray(path, offset, row_bytes, len(array), chunk_bytes))
        yield opened
    finally:
        for disk in opened:
            disk.close()


def random_rows(num_rows: int, width: int, dtype: Any) -> np.ndarray:
    """Any bytes make a float16; they are compared as bytes."""
    size = num_rows * width * np.dtype(dtype).itemsize
    data = np.random.default_rng(num_rows + width).bytes(size)
    return np.frombuffer(data, dtype).reshape(num_rows, width)


def fetched(disk: DiskArray, index: Any, like: np.ndarray) -> np.ndarray:
    index = np.asarray(index, np.int64)
    out = np.empty((len(index), *like.shape[1:]), like.dtype)
    disk.read(index, out)
    return out


def assert_fetches(disk: DiskArray, rows: np.ndarray, index: Any) -> None:
    assert fetched(disk, index, rows).tobytes() == rows[np.asarray(index, np.int64)].tobytes()


@pytest.fixture(params=[BLOCK, CHUNK_BYTES], ids="chunks of {}".format)
def chunk_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@settings(max_examples=100, **PATIENT)
@given(
    width=st.integers(1, 6000),
    num_rows=st.integers(1, 60),
    offset=st.integers(0, 3 * BLOCK),
    chunks=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_fetching_is_indexing_for_any_width_offset_and_chunk(
    tmp_path: Path, width: int, num_rows: int, offset: int, chunks: int, data: st.DataObject
) -> None:
    rows = random_rows(num_rows, width, np.uint8)
    index = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=80))
    size = chunks * BLOCK
    with on_disk(tmp_path, rows, offset=offset, chunk_bytes=size) as (disk,):
        assert_fetches(disk, rows, index)


def test_two_offsets_that_overlap_are_fetched_as_a_pair(chunk_bytes: int, tmp_path: Path) -> None:
    colptr = np.random.default_rng(0).integers(0, 2**60, 5001)
    # 511: across a block
    nodes = np.random.default_rng(1).permutation(np.r_[np.arange(5000), 4999, 0, 511, 511])
    for offset in (0, BLOCK):
        with on_disk(tmp_path, colptr, offset=offset, chunk_bytes=chunk_bytes) as (disk,):
            pairs = np.empty((len(nodes), 2), np.int64)
            disk.read(nodes, pairs)
        np.testing.assert_array_equal(pairs, np.stack([colptr[nodes], colptr[nodes + 1]], axis=1))


@pytest.mark.parametrize("lost", [1, 40 * BLOCK])
@pytest.mark.parametrize("when", ["before it is opened", "after"])
def test_a_truncated_file_is_named(tmp_path: Path, lost: int, when: str) -> None:
    rows = random_rows(1024, 64, "float32")  # 64 blocks
    path = tmp_path / "x.npy"
    path.write_bytes(rows.tobytes())
    if when == "before it is opened":
        os.truncate(path, rows.nbytes - lost)
    with contextlib.closing(DiskArray(path, 0, 256, 1024, BLOCK)) as disk:
        os.truncate(path, rows.nbytes - lost)
        with pytest.raises(InputError, match=r"x\.npy: "):
            fetched(disk, np.arange(1024), rows)
        assert_fetches(disk, rows, np.arange((rows.nbytes - lost) // 256)[::-1])


@pytest.mark.parametrize("refused", ["open", "read"])
def test_without_o_direct_rows_come_through_the_page_cache(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_preadv, direct = os.open, os.preadv, set()

    def fake_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        fd = real_open(path, flags, *more, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def fake_preadv(fd: int, *more: Any) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_preadv(fd, *more)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "preadv", fake_preadv)
    rows = random_rows(3000, 127, "float16")
    with on_disk(tmp_path, rows, offset=BLOCK, chunk_bytes=chunk_bytes) as (disk,):
        assert not disk.direct
        assert_fetches(disk, rows, np.random.default_rng(0).integers(3000, size=2000))
        disk.close()  # may be repeated
    assert len(os.listdir("/proc/self/fd")) == before


def sample_window(
    sampler: CSCSampler, seeds: list[np.ndarray], firsts: list[int], epoch: int, *disks: DiskArray
) -> Any:
    """Each batch's nodes, edges and sizes of hops; the one window has each of the nodes once."""
    positions = [np.arange(at, at + len(ids)) for at, ids in zip(firsts, seeds, strict=True)]
    asked = Seeds(sampler, epoch, positions, seeds)
    window = Window.pack(asked, sample_windows([asked], *disks)[0])
    assert window.slots.dtype == window.edges.dtype == np.int32
    np.testing.assert_array_equal(window.ids, np.unique(window.ids[window.slots]))
    for number, expected in enumerate(positions):
        place, _, n_id, edges, [sizes] = window.batches(number, number + 1)
        assert place.tolist() == expected.tolist()
        yield n_id.tolist(), edges.reshape(2, -1).tolist(), *sizes


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Multigraphs with self-loops, isolated nodes and some hubs; seeds in batches."""
    num_nodes = draw(st.integers(1, 40))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, st.one_of(node, st.just(draw(node)))), max_size=150))
    return {
        "num_nodes": num_nodes,
        "edges": edges,
        "seeds": draw(st.lists(node, min_size=1, max_size=num_nodes, unique=True)),
        "fanouts": draw(st.lists(st.sampled_from([-1, 1, 2, 3, 40]), min_size=1, max_size=3)),
        "dtype": draw(st.sampled_from([np.int32, np.int64])),
        "batch_size": draw(st.integers(1, 12)),
        "window_batches": draw(st.integers(1, 5)),
        "epoch": draw(st.integers(0, 10)),
        "seed": draw(st.integers(0, 2**31)),
        "num_threads": draw(st.sampled_from([1, 32])),
    }


@settings(max_examples=60, **PATIENT)
@given(problem=problems())
def test_windows_have_the_batches_drawn_one_by_one(tmp_path: Path, problem: dict[str, Any]) -> None:
    edges = np.array(problem["edges"], problem["dtype"]).reshape(-1, 2).T
    colptr, row = csc_of(edges, problem["num_nodes"])
    sampler = CSCSampler(colptr, row, problem["fanouts"], seed=problem["seed"])
    seeds, size = np.array(problem["seeds"], np.int64), problem["batch_size"]
    firsts = list(range(0, len(seeds), size))
    sampled: list[Any] = []
    threads = patch("ogbnlib.windows.window.sampling_threads", lambda: problem["num_threads"])
    with threads, on_disk(tmp_path, colptr, row) as disks:
        for begin in range(0, len(firsts), problem["window_batches"]):
            part = firsts[begin : begin + problem["window_batches"]]
            cut = [seeds[first : first + size] for first in part]
            sampled += sample_window(sampler, cut, part, problem["epoch"], *disks)
    sampler.set_epoch(problem["epoch"])
    for batch, first in zip(sampled, firsts, strict=True):
        places = torch.arange(first, min(first + size, len(seeds)))
        out = sampler.sample_from_nodes(NodeSamplerInput(places, torch.from_numpy(seeds)[places]))
        edges = [out.row.tolist(), out.col.tolist()]
        assert batch == (out.node.tolist(), edges, out.num_sampled_nodes, out.num_sampled_edges)


@pytest.mark.parametrize("room_bytes", [1, 10**9])
@pytest.mark.parametrize(
    ("num_rows", "width", "dtype", "offset"),
    [(4000, 3, "int8", 0), (60, 6501, "float16", 128), (30_000, 128, "float16", BLOCK)],
)
def test_dealing_gives_each_list_its_rows_in_order(
    tmp_path: Path, num_rows: int, width: int, dtype: str, room_bytes: int, offset: int
) -> None:
    rows, rng = random_rows(num_rows, width, dtype), np.random.default_rng(0)
    sizes = (0, 1, num_rows // 30, num_rows, 0, 5)
    wanted = [np.unique(rng.integers(0, num_rows, size)).astype(np.int32) for size in sizes]
    wanted.append(np.array([num_rows - 1], np.int32))
    given: list[list[np.ndarray]] = [[] for _ in wanted]

    def put(number: int, before: int, part: np.ndarray) -> None:
        assert before == sum(map(len, given[number]))
        given[number].append(part.copy())

    with on_disk(tmp_path, rows, offset=offset, chunk_bytes=4 * BLOCK) as (disk,):
        disk.sweep(np.concatenate(wanted), np.cumsum([0, *map(len, wanted)]), room_bytes, put)
        assert disk.bytes_read < 1.2 * rows.nbytes + 8 * BLOCK  # once
    for ids, parts in zip(wanted, given, strict=True):
        assert b"".join(part.tobytes() for part in parts) == rows[ids].tobytes()
