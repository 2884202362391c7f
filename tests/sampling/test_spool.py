"""Promises of `spool`: an evaluation is read from the store once, its batches stay what they were, no file stays."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.files import Stream
from ogbnlib.graph.store import Store, open_store
from ogbnlib.runs.folder import Run
from ogbnlib.sampling import window as module
from ogbnlib.sampling.budget import Windows
from ogbnlib.sampling.choice import EpochSampler
from ogbnlib.sampling.loader import StoreLoader
from ogbnlib.sampling.policies import set_epoch
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.sampling.window import Spool, spool_bytes
from ogbnlib.training.train import train

WINDOWS = Windows(3, True, 0, 2**20)
GB = 2**30


@pytest.fixture
def store(tiny_store: Path) -> Store:
    return open_store(tiny_store)


@pytest.fixture
def evaluate(store: Store) -> Iterator[Callable[[Spool | None], tuple[list[Data], list[dict[str, Any]], int]]]:
    """One evaluation of the train split by a loader of its own: batches, what its windows took, bytes of the store."""
    loaders: list[StoreLoader] = []

    def run(spool: Spool | None) -> tuple[list[Data], list[dict[str, Any]], int]:
        ids = torch.from_numpy(store.splits["train"])
        loader = StoreLoader(
            store,
            CSCSampler(store.colptr, store.row, [4, 3], seed=3, fixed=True),
            ids,
            torch.from_numpy(np.array(store.y[ids.numpy()])),
            WINDOWS,
            batch_size=16,
            sampler=EpochSampler(len(ids), shuffle=False, seed=3),
        )
        loaders.append(loader)
        loader.spool, seen = spool, []
        loader.on_window = lambda **info: seen.append(info)
        set_epoch(loader, 0)
        return list(loader), seen, loader._bytes_read()

    yield run
    for loader in loaders:
        loader.close()


def assert_equal(batches: list[Data], others: list[Data]) -> None:
    assert len(batches) == len(others) == 8
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys():  # noqa: SIM118  # not a dict
            same = torch.equal(one[name], other[name]) if torch.is_tensor(one[name]) else one[name] == other[name]
            assert same, name
            assert not torch.is_tensor(one[name]) or one[name].dtype == other[name].dtype, name


def test_the_second_evaluation_reads_nothing_of_the_store(evaluate: Any, store: Store, tmp_path: Path) -> None:
    plain, _, _ = evaluate(None)
    spool = Spool(tmp_path, GB, WINDOWS, store.num_nodes)
    first, _, read = evaluate(spool)
    second, seen, read_again = evaluate(spool)
    assert_equal(first, plain)
    assert_equal(second, plain)
    assert read > 0
    assert read_again == 0
    assert ["spool_s" in window for window in seen] == [True] * 3
    spool.close()


def test_the_file_has_no_name_and_goes_with_its_process(evaluate: Any, store: Store, tmp_path: Path) -> None:
    spool = Spool(tmp_path, GB, WINDOWS, store.num_nodes)
    evaluate(spool)
    assert spool.num_bytes > 1000
    assert not list(tmp_path.iterdir())
    assert os.fstat(spool._file.fileno()).st_nlink == 0
    spool.close()


@pytest.mark.parametrize("lacking", [1, GB])
def test_windows_beyond_the_room_are_read_from_the_store_again(
    evaluate: Any, store: Store, tmp_path: Path, lacking: int
) -> None:
    ample = Spool(tmp_path, GB, WINDOWS, store.num_nodes)
    plain, _, _ = evaluate(ample)
    room = max(0, ample.num_bytes - lacking)
    ample.close()
    spool = Spool(tmp_path, room, WINDOWS, store.num_nodes)
    evaluate(spool)
    second, seen, read = evaluate(spool)
    assert_equal(second, plain)
    assert read > 0
    assert spool.num_bytes <= room
    assert ["spool_s" in window for window in seen] == [room > 0, room > 0, False]
    spool.close()


def test_a_full_disk_is_said_and_the_evaluation_goes_on(
    evaluate: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = evaluate(None)
    spool, append, calls = Spool(tmp_path, GB, WINDOWS, store.num_nodes), Stream.append, [0]

    def full(self: Stream, data: Any) -> None:
        calls[0] += 1
        if calls[0] > 4:  # in the middle of the second window
            raise InputError("no space left on device")
        append(self, data)

    monkeypatch.setattr(Stream, "append", full)
    with pytest.warns(UserWarning, match=r"spool: .*no space left.*read the store again"):
        first, _, _ = evaluate(spool)
    second, seen, _ = evaluate(spool)
    assert_equal(first, plain)
    assert_equal(second, plain)
    assert ["spool_s" in window for window in seen] == [True, False, False]
    assert calls[0] == 5
    spool.close()


def test_auto_takes_a_quarter_of_the_free_disk_never_its_last_5_gb_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, kind = namedtuple("usage", "total used free"), ["ext4"]
    monkeypatch.setattr(module, "file_system", lambda folder: kind[0])
    for free, room in ((100 * GB, 25 * GB), (6 * GB, GB), (4 * GB, 0)):
        monkeypatch.setattr(module.shutil, "disk_usage", lambda folder, free=free: usage(0, 0, free))
        assert spool_bytes("auto", tmp_path) == room
        assert spool_bytes("auto", tmp_path, sharers=2) == room // 2
        assert spool_bytes("off", tmp_path) == 0
        assert spool_bytes(3 * GB, tmp_path) == 3 * GB
    kind[0] = "tmpfs"
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage(0, 0, 100 * GB))
    assert spool_bytes("auto", tmp_path) == 0
    assert spool_bytes(3 * GB, tmp_path) == 3 * GB


def test_a_run_scores_the_same_with_and_without(tiny_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """Lookahead is small, so that windows are taken; the store itself would fit into memory."""
    asked = {"loading": "store", "lookahead": "20 kB", "epochs": 3, "train_eval": "every_epoch"}
    folder = tmp_path / "scratch"
    folder.mkdir()
    results = {
        spool: train(tiny_config(**asked, spool=spool, spool_dir=str(folder)), tmp_path / f"run-{spool}").history
        for spool in ("off", "1 GB")
    }
    names = ("loss", "train", "valid", "test")
    with_spool, without = ([[row[name] for name in names] for row in rows] for rows in results.values())
    assert with_spool == without
    windows = [event for event in Run(tmp_path / "run-1 GB").events if event["event"] == "window"]
    for split in ("valid", "test"):
        reads = [window for window in windows if window["loader"] == split]
        assert 0 < sum("bytes_read" in window for window in reads) == len(reads) / 3
    assert not list(folder.iterdir())
