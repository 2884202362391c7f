"""OGB's layouts, as OGB and numpy read them, and its official data sets."""

import io
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import flip, left_in, official_csv, random_arrays
from ogb_layout import write_raw
from web import Remote

from ogbnlib import convert
from ogbnlib.errors import InputError
from ogbnlib.sources import official
from ogbnlib.sources.convert import open_source
from ogbnlib.sources.folder import open_official
from ogbnlib.sources.ogb import read_split_dict

small_chunks = pytest.mark.parametrize("file_chunks", [256], indirect=True)
pytestmark = [pytest.mark.usefixtures("file_chunks"), small_chunks]
N, E, F, C = 40, 300, 5, 4


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
        content: dict[str, Any] = {name[:-4]: archive.read(name) for name in archive.namelist()}
    content.update(members)
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, value in content.items():
            if isinstance(value, np.ndarray):
                buffer = io.BytesIO()
                np.save(buffer, value)
                value = buffer.getvalue()
            if value is not None:
                archive.writestr(f"{name}.npy", value)


@pytest.mark.parametrize("part", [".", "raw"])
def test_a_graph_in_ogbs_csv_layout_is_a_data_set(
    tmp_path: Path, graph: dict[str, Any], part: str
) -> None:
    folder = official_csv(tmp_path, **graph).rename(tmp_path / "ogbn_mine")
    (folder / "RELEASE_v1.txt").unlink()
    shutil.move(folder / "split" / "time", folder / "split" / "mine")
    store = convert(folder / part, tmp_path / "store", progress=False)
    assert (store.name, store.num_edges, store.num_classes) == ("ogbn_mine", E, C)
    x = graph["x"].astype(np.float64).round(3).astype(np.float32)
    np.testing.assert_array_equal(store.x, x)
    np.testing.assert_array_equal(store.splits["valid"], graph["splits"]["valid"])
    (folder / "raw" / "node-feat.csv.gz").unlink()
    with pytest.raises(InputError, match=r"node-feat.csv.gz: "):
        open_source(folder)


def test_what_ogbs_dataset_saver_writes_is_a_data_set(
    tmp_path: Path, graph: dict[str, Any]
) -> None:
    folder = write_raw(tmp_path / "toy", **graph).path
    shutil.rmtree(folder / "split")
    (folder / "split" / "random").mkdir(parents=True)
    torch.save(graph["splits"], folder / "split" / "random" / "split_dict.pt")
    for path in (folder, folder / "raw"):
        store = convert(path, tmp_path / f"store-{path.name}", progress=False)
        assert store.num_seeds == {"train": 20, "valid": 2, "test": 4}
    (folder / "dataset.yaml").write_text("undirected: true\n")
    assert convert(folder, tmp_path / "both", progress=False).undirected
    assert not convert(folder, tmp_path / "one", undirected=False, progress=False).undirected
    with pytest.raises(InputError, match="undirected: "):
        convert(tmp_path / "both", tmp_path / "c", undirected=False, progress=False)


def test_code_in_a_file_of_splits_is_never_run(tmp_path: Path) -> None:
    torch.save({"train": Path("x"), "valid": np.arange(3)}, tmp_path / "split_dict.pt")
    with pytest.raises(InputError, match=r"split_dict.pt: "):
        read_split_dict(tmp_path / "split_dict.pt")


def read_all(path: Path) -> None:
    dataset = open_source(path)
    for chunks in (dataset.x_chunks(), dataset.edge_chunks(7), dataset.label_chunks()):
        list(chunks)
    dataset.read_splits()


BAD_MEMBERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no node_feat": ("data", {"node_feat": None}, "node_feat"),
    "edge beyond the last node": ("data", {"edge_index": np.array([[0, 1], [2, N]])}, "edge 1"),
    "edges without a shape": ("data", {"edge_index": np.array(1)}, r"shapes \(\), "),
    "columns": ("data", {"node_feat": np.ones((N, F), order="F")}, r"expected rows \(C order\)"),
    "pickled": ("data", {"node_feat": np.array([None])}, "node_feat: .*pickled"),
    "other length": ("data", {"node_feat": np.ones((N - 1, F))}, "arrays of 39 nodes"),
    "label too large": ("node-label", {"node_label": np.full(N, C)}, "node_label: .*node 0"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_a_bad_member_is_named_with_its_file(folder: Path, case: str) -> None:
    name, members, match = BAD_MEMBERS[case]
    file = folder / "raw" / f"{name}.npz"
    rewrite(file, **members)
    with pytest.raises(InputError, match=match) as error:
        read_all(folder)
    assert str(file.parent) in str(error.value)
    file.write_bytes(b" <!DOCTYPE html><p>no such bucket</p>")
    with pytest.raises(InputError, match=rf"{name}.npz.*damage"):
        read_all(folder)


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
    # Low bits near the end of the member: still a plausible value, in an array of plausible shape.
    begin = entry.header_offset + 30 + len(entry.filename) + len(entry.extra)
    flip(file, begin + entry.compress_size - 8)
    with pytest.raises(InputError, match=member) as error:
        read_all(folder)
    assert str(file) in str(error.value)


def test_an_official_data_set_of_both_directions_is_undirected(
    tmp_path: Path, graph: dict[str, Any]
) -> None:
    folder = official_csv(tmp_path, **graph).rename(tmp_path / "ogbn_products")
    (folder / "split" / "time").rename(folder / "split" / "sales_ranking")
    source = open_official("ogbn-products", folder)
    assert (source.name, source.num_classes) == ("ogbn-products", 47)
    assert source.options.undirected


@pytest.fixture
def remote(
    tmp_path: Path, graph: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Remote]:
    """ogbn-arxiv on a server of this test's own."""
    official_csv(tmp_path / "remote", **graph).rename(tmp_path / "remote" / "arxiv")
    archive = shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path / "remote", "arxiv")
    with Remote(Path(archive).read_bytes()) as server:
        monkeypatch.setattr(official, "_SERVER", server.url.rpartition("/")[0])
        yield server


def test_a_download_says_its_size_and_asks_nothing(
    tmp_path: Path, graph: dict[str, Any], remote: Remote, capsys: pytest.CaptureFixture[str]
) -> None:
    root, lines = tmp_path / "root", list[str]()
    assert official.fetch("ogbn-arxiv", root, lines.append) == root / "ogbn_arxiv"
    assert re.search(r"arxiv.zip: \d+ kB .* \d+ kB of disk", lines[0])
    shown = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["download", "unpack"]
    assert [entry.name for entry in root.iterdir()] == ["ogbn_arxiv"]
    chunks = open_official("ogbn-arxiv", root / "ogbn_arxiv").edge_chunks(7)
    np.testing.assert_array_equal(np.hstack([*map(np.stack, chunks)]), graph["edge_index"])
    official.fetch("ogbn-arxiv", root, lines.append)
    assert len(lines) == len(remote.asked) == 1


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE")
def test_ogbs_own_class_opens_the_folder(
    tmp_path: Path, graph: dict[str, Any], remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `download` writes; test_synth.py opens that of `synth --format raw`."""
    from ogb.nodeproppred import NodePropPredDataset

    official.fetch("ogbn-arxiv", tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # as in test_synth.py
    dataset = NodePropPredDataset("ogbn-arxiv", root=str(tmp_path))
    np.testing.assert_array_equal(dataset[0][0]["edge_index"], graph["edge_index"])
    for name, ids in dataset.get_idx_split().items():
        np.testing.assert_array_equal(ids, graph["splits"][name])


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
