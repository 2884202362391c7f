"""The promises of ogbnlib.sources.ogb: OGB's layout both ways, equal to what OGB, numpy and PyG
make of it."""

import dataclasses
import gzip
import io
import re
import shutil
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import left_in, official_csv, random_arrays
from ogb_layout import meta_dict, write_raw
from web import Remote

from ogbnlib.errors import InputError
from ogbnlib.graph import npz
from ogbnlib.graph.store import Store
from ogbnlib.sources import official
from ogbnlib.sources.folder import open_official
from ogbnlib.sources.official import locate_official
from ogbnlib.sources.ogb import open_raw

N, E, F, C = 40, 300, 5, 4


@pytest.fixture(autouse=True)
def _no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("input() was called")

    monkeypatch.setattr("builtins.input", refuse)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "CHUNK_BYTES", 256)


@pytest.fixture
def graph() -> dict[str, Any]:
    return random_arrays(N, E, F, C)


@pytest.fixture
def folder(tmp_path: Path, graph: dict[str, Any]) -> Path:
    return write_raw(tmp_path / "data", **graph).path


def rewrite(
    file: Path, compression: int = zipfile.ZIP_DEFLATED, **members: np.ndarray | bytes | None
) -> None:
    """Replace, add or (None) drop members of an .npz file."""
    with zipfile.ZipFile(file) as archive:
        content: dict[str, Any] = {
            name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()
        }
    content.update(members)
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, value in content.items():
            if isinstance(value, np.ndarray):
                buffer = io.BytesIO()
                np.save(buffer, value)
                value = buffer.getvalue()
            if value is not None:
                archive.writestr(f"{name}.npy", value)


# ------------------------------------------------------------------------------------------------ both ways, and OGB


def test_ogbs_own_class_opens_the_folder(folder: Path, graph: dict[str, Any]) -> None:
    from ogb.nodeproppred import NodePropPredDataset

    dataset = NodePropPredDataset("mine", meta_dict=meta_dict(folder))
    opened, labels = dataset[0]
    np.testing.assert_array_equal(opened["edge_index"], graph["edge_index"])
    np.testing.assert_array_equal(opened["node_feat"], graph["x"])
    np.testing.assert_array_equal(labels.ravel(), np.where(graph["y"] < 0, np.nan, graph["y"]))
    for name, ids in dataset.get_idx_split().items():
        np.testing.assert_array_equal(ids, graph["splits"][name])
    assert dataset.num_classes == C


# ------------------------------------------------------------------------------------------------ refusals


def changed(graph: dict[str, Any], name: str, index: Any, value: Any) -> dict[str, Any]:
    array = graph[name].astype(float) if value != value or value == 0.5 else graph[name].copy()
    array[index] = value
    return {**graph, name: array}


def split(graph: dict[str, Any], **ids: Any) -> dict[str, Any]:
    return {**graph, "splits": {**graph["splits"], **ids}}


BAD_ARGUMENTS = {
    "edge_index too large": (lambda g: changed(g, "edge_index", (1, 7), N), "edge_index"),
    "x NaN": (lambda g: changed(g, "x", (3, 1), np.nan), "x: .*row 3"),
    "y fraction": (lambda g: changed(g, "y", 2, 0.5), "y: .*node 2"),
    "y stray": (
        lambda g: changed(g, "y", 3, 15_000_000),
        r"y: .* the label 15000000; .*num_classes",
    ),
    "split too large": (lambda g: split(g, test=np.array([N])), r"splits\['test'\]"),
    "split overlap": (
        lambda g: split(g, test=np.array([26, 3])),
        r"splits\['test'\]: .*train, found 1 such as 3",
    ),
    "split unlabelled": (
        lambda g: split(g, test=np.array([35])),
        r"splits\['test'\]: .*label such as 35",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_named_and_nothing_is_written(
    tmp_path: Path, graph: dict[str, Any], case: str
) -> None:
    spoil, match = BAD_ARGUMENTS[case]
    with pytest.raises(InputError, match=match):
        Store.from_arrays(tmp_path / "data", **spoil(graph), progress=False)
    assert left_in(tmp_path) == []


def read_all(path: Path) -> None:
    dataset = open_raw(path)
    for chunks in (dataset.x_chunks(), dataset.edge_chunks(7), dataset.label_chunks()):
        list(chunks)
    dataset.read_splits()


BAD_MEMBERS: dict[str, tuple[str, Any, str]] = {
    "no archive": ("data", None, "data.npz.*damage"),
    "no node_feat": ("data", lambda g: {"node_feat": None}, "node_feat"),
    "edge beyond the last node": (
        "data",
        lambda g: {"edge_index": changed(g, "edge_index", (1, 123), N)["edge_index"]},
        "edge 123",
    ),
    "node_feat in columns": (
        "data",
        lambda g: {"node_feat": np.asfortranarray(g["x"])},
        r"expected rows \(C order\)",
    ),
    "node_feat pickled": (
        "data",
        lambda g: {"node_feat": np.array([None])},
        "node_feat: .*pickled",
    ),
    "node_feat of other length": (
        "data",
        lambda g: {"node_feat": g["x"][1:]},
        "arrays of 39 nodes",
    ),
    "label too large": (
        "node-label",
        lambda g: {"node_label": g["y"] + 1.0},
        "node_label: .*node 0",
    ),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_a_bad_member_is_named_with_its_file(
    folder: Path, graph: dict[str, Any], case: str
) -> None:
    which, spoil, match = BAD_MEMBERS[case]
    file = folder / "raw" / f"{which}.npz"
    if spoil is None:
        file.write_bytes(b" <!DOCTYPE html><p>no such bucket</p>")
    else:
        rewrite(file, **spoil(graph))
    with pytest.raises(InputError, match=match) as error:
        read_all(folder)
    assert str(file.parent) in str(error.value)


@pytest.mark.parametrize(
    ("member", "compression"),
    [("edge_index", zipfile.ZIP_DEFLATED), ("node_feat", zipfile.ZIP_STORED)],
)
def test_a_flipped_bit_is_found_while_streaming(
    folder: Path, member: str, compression: int
) -> None:
    file = folder / "raw" / "data.npz"
    rewrite(file, compression)
    with zipfile.ZipFile(file) as archive:
        entry = archive.getinfo(f"{member}.npy")
    content = bytearray(file.read_bytes())
    # Low bits near the end of the member: still a plausible value, in an array of plausible shape.
    content[
        entry.header_offset + 30 + len(entry.filename) + len(entry.extra) + entry.compress_size - 8
    ] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match=member) as error:
        read_all(folder)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("content", [b"1\n", b"1"])
def test_a_split_of_more_lines_than_nodes_is_refused_before_it_is_in_memory(
    folder: Path, content: bytes
) -> None:
    file = folder / "split" / "time" / "train.csv.gz"
    file.write_bytes(gzip.compress(content * 2**22))
    tracemalloc.start()
    with pytest.raises(InputError, match=f"{file}: "):
        open_raw(folder).read_splits()
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


# ------------------------------------------------------------------------------------------------ official names


BAD_CSV = {
    "raw/edge": (gzip.compress(b"src,dst\n1,2\n"), "column '1', row 0: .*'src'"),
    "raw/node-feat": (gzip.compress(bytes(range(200)))[:-30], "damage"),
    "split/time/test": (gzip.compress(b"1\n")[:-9], "damage"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_a_bad_file_of_an_official_data_set_is_named(
    tmp_path: Path, graph: dict[str, Any], name: str
) -> None:
    content, match = BAD_CSV[name]
    file = official_csv(tmp_path, **graph) / f"{name}.csv.gz"
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"{file}.*{match}"):
        list(open_official(locate_official("ogbn-arxiv", tmp_path)).edge_chunks(64))


def test_an_official_data_set_of_both_directions_is_undirected(
    tmp_path: Path, graph: dict[str, Any]
) -> None:
    folder = official_csv(tmp_path, **graph).rename(tmp_path / "ogbn_products")
    (folder / "split" / "time").rename(folder / "split" / "sales_ranking")
    source = open_official(locate_official("ogbn-products", tmp_path))
    assert (source.name, source.num_classes) == ("ogbn-products", 47)
    assert source.options.undirected


@pytest.fixture
def remote(
    tmp_path: Path, graph: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Remote]:
    """ogbn-arxiv on a server of this test's own, and ogb's table that names it."""
    official_csv(tmp_path / "remote", **graph).rename(tmp_path / "remote" / "arxiv")
    archive = Path(
        shutil.make_archive(str(tmp_path / "arxiv"), "zip", tmp_path / "remote", "arxiv")
    )
    with Remote(archive.read_bytes()) as server:
        located = official.locate_official

        def locate(name: str, root: Path) -> official.Located:
            found = located(name, root)
            return dataclasses.replace(found, meta={**found.meta, "url": server.url})

        monkeypatch.setattr(official, "locate_official", locate)
        yield server


def test_a_download_says_its_size_and_asks_nothing(
    tmp_path: Path, graph: dict[str, Any], remote: Remote, capsys: pytest.CaptureFixture[str]
) -> None:
    root, lines = tmp_path / "root", list[str]()
    assert official.fetch("ogbn-arxiv", root, lines.append) == root / "ogbn_arxiv"
    assert re.search(r"arxiv.zip: \d+ kB .* \d+ kB of disk", lines[0])
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["download", "unpack"]
    assert [entry.name for entry in root.iterdir()] == ["ogbn_arxiv"]
    chunks = open_official(locate_official("ogbn-arxiv", root)).edge_chunks(7)
    np.testing.assert_array_equal(np.hstack([*map(np.stack, chunks)]), graph["edge_index"])
    official.fetch("ogbn-arxiv", root, lines.append)
    assert len(lines) == len(remote.asked) == 1


def test_a_download_that_breaks_off_goes_on_where_it_stopped(
    tmp_path: Path, remote: Remote
) -> None:
    root, lines = tmp_path / "root", list[str]()
    remote.stop_after = 1024
    with pytest.raises(InputError, match=r"arxiv\.zip .*resumes"):
        official.fetch("ogbn-arxiv", root, lines.append)
    assert left_in(root) == [".ogbn_arxiv.zip.part"]
    remote.stop_after = None
    official.fetch("ogbn-arxiv", root, lines.append)
    assert remote.asked == [None, "bytes=1024-"]
    assert "1 kB" in lines[1]
    assert left_in(root) == ["ogbn_arxiv"]


def test_what_is_no_archive_or_needs_more_disk_is_refused(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    with monkeypatch.context() as full:
        usage = shutil._ntuple_diskusage(10, 10, 100)  # type: ignore[attr-defined]
        full.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(InputError, match="disk space"):
            official.fetch("ogbn-arxiv", root)
    assert left_in(root) == []
    remote.content = b"<html>no such bucket</html>"
    with pytest.raises(InputError, match=r"arxiv\.zip: .*damage"):
        official.fetch("ogbn-arxiv", root)
    assert left_in(root) == []
