"""A folder is a data set by its files' names or by a published layout, and one that is none is told the
nearest way."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import official_csv, random_arrays

from ogbnlib import InputError, convert, open_dataset
from ogbnlib.sources.convert import open_source
from ogbnlib.sources.files.layouts import find_files, splits_in_order
from ogbnlib.sources.files.node_labels import read_split_dict
from ogbnlib.sources.files.own_files import open_tables

N, E, F, C = 40, 300, 5, 4


@pytest.fixture
def graph() -> dict[str, Any]:
    return random_arrays(N, E, F, C)


@pytest.fixture
def igb(tmp_path: Path, graph: dict[str, Any]) -> Path:
    """IGB's folders: edges [E, 2], float32 labels of 19 and of 2,983 classes, no files of splits."""
    processed = tmp_path / "tiny" / "processed"
    for name in ("paper", "paper__cites__paper"):
        (processed / name).mkdir(parents=True)
    np.save(processed / "paper__cites__paper" / "edge_index.npy", graph["edge_index"].T.copy())
    np.save(processed / "paper" / "node_feat.npy", graph["x"])
    for number, name in enumerate(("19", "2K")):
        labels = (np.arange(N) + number) % C
        np.save(processed / "paper" / f"node_label_{name}.npy", labels.astype(np.float32))
    mapping = np.array({"1": 1}, dtype=object)
    np.save(processed / "paper" / "paper_id_index_mapping.npy", mapping, allow_pickle=True)
    return processed.parent


@pytest.mark.parametrize("given", [".", "processed"])
def test_igbs_folder_has_its_loaders_labels_and_splits(
    igb: Path, given: str, graph: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_source(igb / given)
    assert source.name == "tiny"
    ends = np.concatenate([np.stack(pair) for pair in source.edge_chunks(64)], axis=1)
    np.testing.assert_array_equal(ends, graph["edge_index"])
    np.testing.assert_array_equal(next(source.label_chunks()), np.arange(N) % C)
    splits = {name: (ids[0], ids[-1]) for name, ids in source.read_splits().items()}
    assert splits == {"train": (0, 23), "valid": (24, 31), "test": (32, 39)}
    expected = "node_label_19.npy is read, not node_label_2K.npy; --labels names another"
    assert expected in capsys.readouterr().err


def test_arrays_without_a_header_of_igbs_large_sizes_are_read(igb: Path) -> None:
    paper = igb / "processed" / "paper"
    x = np.random.default_rng(0).random((N, 1024), np.float32)
    x.tofile(paper / "node_feat.npy")
    np.load(paper / "node_label_19.npy").tofile(paper / "node_label_19.npy")
    source = open_source(igb)
    np.testing.assert_array_equal(np.concatenate(list(source.x_chunks())), x)
    np.testing.assert_array_equal(next(source.label_chunks()), np.arange(N) % C)
    x[:, :1000].tofile(paper / "node_feat.npy")
    with pytest.raises(InputError, match=r"node_feat.npy: expected a file of np.save"):
        open_source(igb)


def test_a_user_chooses_among_igbs_labels_and_may_bring_splits(igb: Path) -> None:
    labels = igb / "processed" / "paper" / "node_label_2K.npy"
    split = {}
    for name in ("train", "valid", "test"):
        split[name] = igb / f"{name}.npy"
        np.save(split[name], np.arange(3) + 3 * len(split))
    source = open_tables(igb, labels=labels, **split)
    np.testing.assert_array_equal(next(source.label_chunks()), (np.arange(N) + 1) % C)
    assert source.read_splits()["valid"].tolist() == [6, 7, 8]
    with pytest.raises(InputError, match="expected files of valid, test"):
        open_tables(igb, train=split["train"])


def test_only_the_labelled_nodes_of_igbs_largest_size_are_in_splits() -> None:
    bounds = splits_in_order(269_346_174, Path("node_label_19.npy"))
    assert bounds["test"] == (136_278_514 + 45_426_171, 227_130_858)
    assert splits_in_order(100_000_000, Path("node_label_19.npy"))["test"][1] == 100_000_000


@pytest.mark.parametrize("given", [".", "raw"])
def test_a_graph_of_ones_own_in_ogbs_csv_layout_is_a_data_set(
    tmp_path: Path, graph: dict[str, Any], given: str
) -> None:
    folder = official_csv(tmp_path, **graph).rename(tmp_path / "ogbn_mine")
    (folder / "RELEASE_v1.txt").unlink()
    (folder / "raw" / "node_year.csv.gz").write_bytes(gzip.compress(b"2015\n" * N))
    shutil.move(folder / "split" / "time", folder / "split" / "mine")
    store = convert(folder / given, tmp_path / "store", progress=False)
    assert (store.name, store.num_edges, store.num_classes) == ("ogbn_mine", E, C)
    np.testing.assert_array_equal(
        store.x, graph["x"].astype(np.float64).round(3).astype(np.float32)
    )
    np.testing.assert_array_equal(store.splits["valid"], graph["splits"]["valid"])
    assert (
        open_dataset(str(folder / given), say=lambda _: None).path == tmp_path / "ogbn_mine.store"
    )
    ones = open_tables(folder, features="ones")
    assert (ones.num_features, ones.num_nodes) == (1, N)


def write_mag(root: Path, graph: dict[str, Any], name: str = "ogbn_mag") -> Path:
    """ogbn-mag's folders: the csv files of its papers in folders of their own."""
    own = official_csv(root / "csv", **graph)
    folder = root / name
    places = {
        "raw/edge": "raw/relations/paper___cites___paper/edge",
        "raw/num-edge-list": "raw/relations/paper___cites___paper/num-edge-list",
        "raw/node-feat": "raw/node-feat/paper/node-feat",
        "raw/node-label": "raw/node-label/paper/node-label",
        **{f"split/time/{name}": f"split/time/paper/{name}" for name in graph["splits"]},
    }
    for old, new in places.items():
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (own / f"{old}.csv.gz").rename(folder / f"{new}.csv.gz")
    writes = folder / "raw" / "relations" / "author___writes___paper"
    writes.mkdir()
    (writes / "edge.csv.gz").write_bytes(gzip.compress(b"7,1\n"))
    (folder / "raw" / "triplet-type-list.csv.gz").write_bytes(gzip.compress(b"author,writes,paper"))
    (folder / "RELEASE_v2.txt").touch()
    return folder


@pytest.mark.parametrize("given", ["mine", "mine/raw", "ogbn-mag"])
def test_the_papers_of_ogbn_mag_are_a_data_set_by_folder_or_name(
    tmp_path: Path, graph: dict[str, Any], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_mag(tmp_path, graph, given.split("/")[0].replace("-", "_"))
    name = given if given == "ogbn-mag" else tmp_path / given
    source = open_source(name, tmp_path)
    ends = np.concatenate([np.stack(pair) for pair in source.edge_chunks(64)], axis=1)
    np.testing.assert_array_equal(ends, graph["edge_index"])
    np.testing.assert_array_equal(source.read_splits()["valid"], graph["splits"]["valid"])
    assert source.num_classes == (349 if given == "ogbn-mag" else C)
    expected = f"{folder}: papers and their citations are read, not authors"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("transposed", [False, True])
def test_the_papers_of_mag240m_are_a_data_set(
    tmp_path: Path, graph: dict[str, Any], transposed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    processed = tmp_path / "mag240m_kddcup2021" / "processed"
    for name in ("paper", "paper___cites___paper"):
        (processed / name).mkdir(parents=True)
    edges = graph["edge_index"].T.copy() if transposed else graph["edge_index"]
    np.save(processed / "paper___cites___paper" / "edge_index.npy", edges)
    np.save(processed / "paper" / "node_feat.npy", graph["x"].astype(np.float16))
    labels = np.where(graph["y"] < 0, np.nan, graph["y"]).astype(np.float32)
    np.save(processed / "paper" / "node_label.npy", labels)
    ids = dict(graph["splits"])
    torch.save(
        {"train": ids["train"], "valid": ids["valid"], "test-whole": np.arange(30, N)},
        processed.parent / "split_dict.pt",
    )
    store = convert(processed.parent, tmp_path / "store", progress=False)
    assert (store.num_edges, store.feature_dtype, store.num_classes) == (E, np.float16, C)
    assert store.num_seeds == {"train": 20, "valid": 2, "test": 0}
    np.testing.assert_array_equal(store.y, graph["y"])
    assert "and test, whose labels are not published" in capsys.readouterr().err
    (processed.parent / "split_dict.pt").unlink()
    with pytest.raises(InputError, match="expected files of train, valid, test"):
        open_source(processed.parent)


def test_code_in_a_file_of_splits_is_never_run(tmp_path: Path) -> None:
    torch.save({"train": Path("x"), "valid": np.arange(3)}, tmp_path / "split_dict.pt")
    with pytest.raises(InputError, match=r"split_dict.pt: expected a dict of train and valid"):
        read_split_dict(tmp_path / "split_dict.pt")


def test_reverse_edges_that_ogb_adds_are_named(
    tmp_path: Path, graph: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = official_csv(tmp_path, **graph).rename(tmp_path / "ogbn_products")
    open_source(folder)
    assert "OGB adds reverse edges to ogbn-products: add --undirected" in capsys.readouterr().err


def test_one_of_several_files_of_a_role_is_named(tmp_path: Path) -> None:
    (tmp_path / "edges").mkdir()
    (tmp_path / "edges" / "part-0.csv").write_text("0,1\n")
    said: list[str] = []
    files = {role: tmp_path / f"{role}.csv" for role in ("edges", "features", "labels", "splits")}
    for file in files.values():
        file.touch()
    assert find_files(tmp_path, say=said.append) == files
    assert said == [f"{tmp_path}: edges.csv is read, not edges; --edges names another"]
    files["edges"].unlink()
    assert find_files(tmp_path)["edges"] == tmp_path / "edges"
    (tmp_path / "edges.txt").touch()
    with pytest.raises(InputError, match=r"one file of edges, found edges, edges.txt"):
        find_files(tmp_path)


FOLDERS: dict[str, tuple[list[str], str]] = {
    "empty": ([], "found nothing; expected in it are edges, features"),
    "other": (["README.md", "notes/a.doc"], r"found README.md, notes/; expected .*write_raw"),
    "tables": (["cites.csv", "papers.csv"], "found cites.csv, papers.csv; .*--edges FILE"),
    "below": (["mine/edges.npy", "a.md"], "found a.md, mine/; name .*below/mine"),
    "many": ([f"{i}.dat" for i in range(30)], r"0.dat, 1.dat, .* and 22 more; expected in it"),
    "torch": (
        ["graph.pt"],
        r"from_data\(torch.load\('.*graph.pt', weights_only=False\), 'graph_st",
    ),
    "pyg": (
        ["processed/data.pt", "processed/pre_filter.pt"],
        r"data.pt, .*from_data\(dataset\[0\], 'pyg_",
    ),
    "hetero": (
        ["raw/triplet-type-list.csv.gz"],
        "several kinds of nodes in OGB's layout; only one",
    ),
    "edges.xlsx": (["edges.xlsx", "features.npy"], "edges.xlsx: save it in one of these formats"),
    "train.pt": (
        ["edges.npy", "features.npy", "labels.npy", "train.pt", "valid.npy", "test.npy"],
        r"files of train .*train.pt: in Python: np.save\('train.npy', torch.load\('train.pt'\)",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_without_a_data_set_is_told_its_content_and_the_nearest_way(
    tmp_path: Path, case: str
) -> None:
    names, sentence = FOLDERS[case]
    folder = tmp_path / case
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises(InputError, match=sentence) as error:
        open_source(folder)
    assert "\n" not in str(error.value)


def test_the_folder_raw_of_the_binary_layout_names_its_parent(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "data.npz").touch()
    with pytest.raises(InputError, match=f"OGB's binary layout; name {tmp_path}$"):
        open_source(tmp_path / "raw")


FILES = {
    "graph.pt": r"a file of torch; in Python.*from_data\(torch.load\('.*graph.pt'",
    "cites.csv": "found a file; name its folder, and the file with --edges .*cites.csv",
    "a.zip": "expected a data set folder, found a file; unpack an archive",
    "gone": "found no such folder; the working folder",
}


@pytest.mark.parametrize("name", FILES)
def test_a_path_that_is_no_folder_is_told_the_nearest_way(tmp_path: Path, name: str) -> None:
    if name != "gone":
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=FILES[name]):
        open_source(tmp_path / name)


CHOSEN = {
    "train_id.pt": r"np.save\('train_id.npy', torch.load\('train_id.pt'\).numpy\(\)\)",
    "ids.xlsx": "ids.xlsx: expected a file of train .*; save it in one of these formats",
    "gone.csv": "gone.csv: expected a file of train, found none; the working folder",
    "gone/part-*.csv": r"part-\*.csv: expected a file of train, found none",
    "folder": "folder: expected a file of train .*; expected parts of train in this folder",
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_named_file_that_can_not_be_read_is_told_the_nearest_way(
    tmp_path: Path, name: str
) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    elif not name.startswith("gone"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=CHOSEN[name]):
        find_files(tmp_path, {"train": tmp_path / name})


def test_all_files_that_are_missing_or_unreadable_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "x.mat").touch()
    chosen = {"edges": tmp_path / "links.csv", "features": tmp_path / "x.mat"}
    with pytest.raises(InputError) as caught:
        find_files(tmp_path, chosen)
    text = str(caught.value)
    assert text.startswith("3 mistakes:")
    for sentence in (
        "links.csv: expected a file of edges, found none",
        "x.mat: expected a file of features",
        f"{tmp_path}: expected files of labels, train, valid, test",
    ):
        assert sentence in text


def test_the_working_folder_without_a_data_set_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", ""):
        with pytest.raises(InputError, match="expected a data set, found nothing"):
            open_source(name)
