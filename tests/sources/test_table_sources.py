"""The promises of ogbnlib.sources.tables: files of one's own give the store that the same arrays give."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from conftest import left_in
from torch_geometric.data import Data, HeteroData

from ogbnlib import InputError, convert, open_dataset, write_raw
from ogbnlib.graph.store import Store
from ogbnlib.graph.writer import verify_store
from ogbnlib.sources.catalog import locate
from ogbnlib.sources.tables import open_tables

N, E, F, C = 300, 3000, 6, 5
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def graph() -> Arrays:
    rng = np.random.default_rng(0)
    ids = rng.permutation(N)
    y = np.full(N, -1)
    y[ids[:150]] = rng.integers(0, C, 150)
    y[ids[0]] = C - 1
    return {
        "edge_index": rng.integers(0, N, (2, E)),
        "x": rng.standard_normal((N, F)).astype(np.float32),
        "y": y,
        "splits": {"train": np.sort(ids[:80]), "valid": ids[80:110], "test": ids[110:150]},
    }


@pytest.fixture(scope="module")
def expected(graph: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("raw")
    return convert(write_raw(folder / "raw", **graph), folder / "store", progress=False)


def write_table(path: Path, columns: dict[str, Any], header: bool = True) -> None:
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=700)
        return
    with gzip.open(path, "wb") if path.suffix == ".gz" else open(path, "wb") as file:
        pyarrow.csv.write_csv(table, file, pyarrow.csv.WriteOptions(include_header=header, quoting_style="none"))


def write_npy(folder: Path, graph: Arrays) -> Path:
    folder.mkdir()
    np.save(folder / "edges.npy", graph["edge_index"])
    np.save(folder / "features.npy", graph["x"])
    np.save(folder / "labels.npy", graph["y"])
    for name, ids in graph["splits"].items():
        np.save(folder / f"{name}.npy", ids)
    return folder


def replace(folder: Path, role: str, ending: str, columns: dict[str, Any], **how: Any) -> None:
    for old in folder.glob(f"{role}.*"):
        old.unlink()
    write_table(folder / f"{role}{ending}", columns, **how)


@pytest.fixture
def folder(tmp_path: Path, graph: Arrays) -> Path:
    return write_npy(tmp_path / "own", graph)


def assert_same(store: Store, expected: Store, but: tuple[str, ...] = ()) -> None:
    assert verify_store(store.path) == []
    for name, info in expected.files.items():
        if name not in but:
            assert store.files[name] == info, name  # CRC-32 of the data among it


def names(kind: str) -> Any:
    """A name for each node: text of several lengths, or whole numbers that leave gaps."""
    numbers = np.unique(np.random.default_rng(1).integers(-(10**11), 10**12, N))[::-1].copy()
    assert len(numbers) == N
    return np.array([f"nö{n % 1000}-{i}" for i, n in enumerate(numbers)]) if kind == "text" else numbers


TABLES: dict[str, Callable[[Path, Arrays], object]] = {
    "npy": lambda folder, g: None,
    "int32 edges": lambda folder, g: np.save(folder / "edges.npy", g["edge_index"].astype(np.int32)),
    "float64 features": lambda folder, g: np.save(folder / "features.npy", g["x"].astype(np.float64)),
    "columns by name": lambda folder, g: replace(
        folder, "edges", ".parquet", {"w": np.ones(E), "dst": g["edge_index"][1], "src": g["edge_index"][0]}
    ),
    "masks": lambda folder, g: [
        np.save(folder / f"{name}.npy", np.isin(np.arange(N), g["splits"][name])) for name in ("train",)
    ],
    "a table of features": lambda folder, g: replace(
        folder, "features", ".parquet", {f"x{i}": g["x"][:, i] for i in range(F)}
    ),
    "a column of lists": lambda folder, g: replace(folder, "features", ".parquet", {"x": list(g["x"])}),
    "labels with ids": lambda folder, g: replace(
        folder, "labels", ".csv", {"node": np.flatnonzero(g["y"] >= 0)[::-1], "y": g["y"][g["y"] >= 0][::-1]}
    ),
    "NaN labels": lambda folder, g: np.save(folder / "labels.npy", np.where(g["y"] < 0, np.nan, g["y"])),
    "tables of splits": lambda folder, g: [
        replace(folder, name, ending, {"node": g["splits"][name]}, **how)
        for name, ending, how in (
            ("train", ".csv", {}),
            ("valid", ".parquet", {}),
            ("test", ".csv.gz", {"header": False}),
        )
    ],
}
for ending in (".csv", ".csv.gz", ".parquet"):
    for header in (True, False):
        TABLES[f"edges{ending}{'' if header else ' without a header'}"] = (
            lambda folder, g, ending=ending, header=header: replace(
                folder, "edges", ending, dict(zip(("source", "target"), g["edge_index"], strict=True)), header=header
            )
        )


@pytest.mark.parametrize("name", TABLES)
def test_files_of_ones_own_give_the_store_that_their_arrays_give(
    name: str, folder: Path, graph: Arrays, expected: Store, tmp_path: Path
) -> None:
    TABLES[name](folder, graph)
    assert_same(convert(folder, tmp_path / "store", progress=False), expected)


@pytest.mark.parametrize("kind", ["text", "numbers"])
@pytest.mark.parametrize("ending", [".npy", ".csv.gz", ".parquet"])
def test_names_become_ids_and_are_kept(
    kind: str, ending: str, folder: Path, graph: Arrays, expected: Store, tmp_path: Path
) -> None:
    called = names(kind)
    edges, splits = called[graph["edge_index"]], {name: called[ids] for name, ids in graph["splits"].items()}
    if ending == ".npy":
        np.save(folder / "edges.npy", edges)
        np.save(folder / "nodes.npy", called)
        for name, ids in splits.items():
            np.save(folder / f"{name}.npy", ids)
    else:
        replace(folder, "edges", ending, {"source": edges[0], "target": edges[1]})
        replace(folder, "features", ".parquet", {"id": called, **{f"x{i}": graph["x"][:, i] for i in range(F)}})
        known = np.flatnonzero(graph["y"] >= 0)[::-1]
        replace(folder, "labels", ending, {"id": called[known], "label": graph["y"][known]})
        for name, ids in splits.items():
            replace(folder, name, ending, {"anything": ids}, header=name != "valid")
    store = convert(open_tables(folder, relabel=True), tmp_path / "store", progress=False)
    assert_same(store, expected)
    assert store.node_name is not None
    found = store.node_name if kind == "numbers" else [name.decode() for name in store.node_name.tolist()]
    np.testing.assert_array_equal(found, called)
    kept = convert(open_tables(folder), tmp_path / "kept", keep_hops=1, progress=False)
    assert kept.node_name is not None
    np.testing.assert_array_equal(kept.node_name, store.node_name[kept.node_id])


def test_features_of_any_number_type_become_float32_and_float16_stays(
    folder: Path, graph: Arrays, tmp_path: Path
) -> None:
    for dtype in (np.int8, np.uint16, np.int64, bool, np.float16, ">f8"):
        values = (np.abs(graph["x"]) * 20).astype(dtype)
        np.save(folder / "features.npy", values)
        store = convert(folder, tmp_path / f"store-{np.dtype(dtype).name}", progress=False)
        assert store.feature_dtype == (np.float16 if dtype is np.float16 else np.float32)
        np.testing.assert_array_equal(store.x, values.astype(np.float32))


def test_a_folder_is_a_data_set_that_is_converted_once(
    folder: Path, graph: Arrays, expected: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(folder, "edges", ".csv", dict(zip(("a", "b"), graph["edge_index"], strict=True)))
    size = locate(str(folder))
    assert (size.num_nodes, size.num_edges, size.num_classes) == (N, E, C)
    assert "column a is taken for the sources" in capsys.readouterr().err
    said: list[str] = []
    store = open_dataset(str(folder), say=said.append)
    assert_same(store, expected)
    assert store.path == folder.with_name("own.store")
    assert "converting it, once" in said[0]
    assert open_dataset(str(folder), say=said.append) == store
    assert len(said) == 1
    np.save(folder / "labels.npy", graph["y"][::-1].copy())
    with pytest.raises(InputError, match="it changed since"):
        open_dataset(str(folder), say=said.append)


def csv_of(edges: Any, header: str = "source,target\n") -> str:
    return header + "".join(f"{a},{b}\n" for a, b in edges)


def bad_cases(folder: Path, graph: Arrays) -> dict[str, tuple[Callable[[], object], str]]:
    def save(name: str, values: Any) -> Callable[[], object]:
        return lambda: np.save(folder / name, values)

    def table(name: str, text: str) -> Callable[[], object]:
        def write() -> None:
            (folder / f"{name.partition('.')[0]}.npy").unlink()
            (folder / name).write_text(text)

        return write

    def edges(text: str) -> Callable[[], object]:
        return table("edges.csv", text)

    x, y, pairs = graph["x"], graph["y"], graph["edge_index"].T
    nan = x.copy()
    nan[7, 2] = np.nan
    return {
        "text ids": (
            edges(csv_of([(1, 2), (3, "a17")])),
            r"edges.csv, line 3: expected a node id, found 'a17'; .* --relabel",
        ),
        "ids out of range": (edges(csv_of([(1, 2), (3, N)])), rf"edges.csv, line 3: .*0 to {N - 1}.*{N}.*--relabel"),
        "no header, out of range": (edges(csv_of([(1, 2), (-1, 3)], "")), r"edges.csv, line 2: .*found -1.*--relabel"),
        "an empty cell": (edges(csv_of([(1, 2), (3, "")])), r"edges.csv, line 3: .*found 'none'"),
        "three cells": (edges(csv_of([(1, 2), (3, "4,5")])), r"edges.csv: .*Expected 2 columns, got 3"),
        "one column": (edges("source\n1\n"), r"edges.csv: expected a column of sources and one of dest"),
        "half a pair": (
            edges(csv_of(pairs, "source,weight\n")),
            r"expected columns source and target, found source, w",
        ),
        "an empty file": (edges(""), r"edges.csv: expected a table, found an empty file"),
        "[E, 2]": (save("edges.npy", pairs), r"edges.npy: expected node ids \[2, E\], .*transpose"),
        "float edges": (save("edges.npy", graph["edge_index"] * 1.0), r"edges.npy: expected node ids"),
        "text edges": (save("edges.npy", graph["edge_index"].astype(str)), r"edges.npy, edge 0: .*--relabel"),
        "ids beyond": (save("edges.npy", graph["edge_index"] + 1), rf"edges.npy, edge \d+: .*found {N}.*--relabel"),
        "text features": (save("features.npy", x.astype(str)), r"features.npy: expected features \[N, F\]"),
        "flat features": (save("features.npy", x[:, 0]), r"features.npy: expected features \[N, F\]"),
        "NaN": (save("features.npy", nan), r"features.npy: expected finite values, found 1 .* row 7"),
        "fewer labels": (save("labels.npy", y[:-1]), rf"labels.npy: expected {N} labels.*found {N - 1}"),
        "one label": (save("labels.npy", np.array(3)), r"labels.npy: expected one number a node"),
        "half labels": (save("labels.npy", np.where(y == 1, 0.5, y)), r"labels.npy: expected whole labels"),
        "no labels": (save("labels.npy", np.full(N, -1)), r"labels.npy: expected at least one label"),
        "a short mask": (save("train.npy", np.ones(N - 1, bool)), r"train.npy: expected node ids \[n\] or a mask"),
        "a split beyond": (save("test.npy", np.array([0, N])), rf"test.npy, entry 1: .*found {N}"),
        "a split without label": (save("test.npy", np.flatnonzero(y < 0)), r"test.*: expected labelled nodes"),
        "fewer names": (save("nodes.npy", np.arange(N - 1)), rf"nodes.npy: expected {N} names.*found {N - 1}"),
        "a name twice": (save("nodes.npy", np.arange(N) // 2), r"nodes.npy, row 1: expected each node once, found 0"),
        "an unknown name": (save("nodes.npy", np.arange(N) + 5), r"train.npy, entry \d+: expected one of the .* nodes"),
        "pickles": (save("labels.npy", np.array([None] * N)), r"labels.npy: expected a numpy array without objects"),
        "text among numbers": (
            table("features.csv", "a,b\n" + "1,2\n" * N + "1,x\n"),
            r"features.csv, column b: expected num",
        ),
        "fewer features": (table("features.csv", "a\n" + "1\n" * (N - 1)), rf"expected {N - 1} labels.*found {N}"),
        "an empty split": (table("train.csv", ""), r"train.csv: expected a table, found an empty file"),
        "labels of text": (
            table("labels.csv", "label\n" + "cat\n" * N),
            r"labels.csv, line 2: expected a number, found 'cat'",
        ),
        "a label twice": (
            table("labels.csv", "id,y\n1,1\n1,2\n"),
            r"labels.csv, line 3: expected each node once, found 1 again",
        ),
        "not gzipped": (
            table("labels.csv.gz", "label\n1\n"),
            r"labels.csv.gz: expected a sound table, found .*gzipped",
        ),
        "no test": (lambda: (folder / "test.npy").unlink(), r"own: expected files of test \(.npy"),
        "edges twice": (
            lambda: (folder / "edges.csv").touch(),
            r"own: expected one file of edges, found edges.npy, edges",
        ),
        "garbage": (lambda: (folder / "labels.npy").write_bytes(b"x" * 99), r"labels.npy: expected a numpy array"),
    }


@pytest.mark.parametrize(
    "case", bad_cases(Path(), {"x": np.ones((N, F)), "y": np.ones(N), "edge_index": np.ones((2, E))})
)
def test_what_is_wrong_with_a_file_is_one_sentence_and_nothing_is_left(
    case: str, folder: Path, graph: Arrays, tmp_path: Path
) -> None:
    spoil, sentence = bad_cases(folder, graph)[case]
    spoil()
    with pytest.raises(InputError, match=sentence) as error:
        convert(folder, tmp_path / "store", progress=False)
    assert "\n" not in str(error.value)
    assert left_in(tmp_path) == ["own"]


def test_files_may_be_named_one_by_one_and_so_may_the_columns(
    folder: Path, graph: Arrays, expected: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = graph["edge_index"]
    write_table(tmp_path / "who.csv", {"cited": dst, "citing": src, "weight": np.ones(E)})
    source = open_tables(folder, edges=tmp_path / "who.csv", edge_columns=["citing", "cited"])
    assert capsys.readouterr().err == ""
    assert_same(convert(source, tmp_path / "store", progress=False, origin=source.origin), expected)
    open_tables(folder, edges=tmp_path / "who.csv")
    said = capsys.readouterr().err
    assert "column cited is taken for the sources" in said
    assert "columns beyond the first two are not kept" in said
    with pytest.raises(InputError, match=r"who.csv: expected two of its columns, cited, citing, weight, found no from"):
        open_tables(folder, edges=tmp_path / "who.csv", edge_columns=["from", "cited"])
    with pytest.raises(InputError, match="unknown role of a file 'edge': did you mean 'edges'"):
        open_tables(folder, edge=tmp_path / "who.csv")


def test_relabel_asks_for_the_names_where_there_are_none(folder: Path) -> None:
    with pytest.raises(InputError, match=r"--relabel: expected the id of each row of features.npy: a file nodes"):
        open_tables(folder, relabel=True)


def test_a_split_table_in_masks_and_damaged_parquet_are_told_apart(folder: Path, tmp_path: Path) -> None:
    (folder / "edges.npy").unlink()
    (folder / "edges.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match=r"edges.parquet: expected a sound table"):
        convert(folder, tmp_path / "store", progress=False)


# PyG's Data ----------------------------------------------------------------------------------------------------------


def data_of(graph: Arrays, **more: Any) -> Data:
    masks = {"train_mask": "train", "val_mask": "valid", "test_mask": "test"}
    found = {mask: torch.from_numpy(np.isin(np.arange(N), graph["splits"][split])) for mask, split in masks.items()}
    arrays = {name: torch.from_numpy(graph[name]) for name in ("edge_index", "x", "y")}
    return Data(**{**arrays, **found, **more})


def test_a_data_becomes_the_store_of_its_arrays_and_reads_back_equal(
    graph: Arrays, expected: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_of(graph, edge_attr=torch.ones(E, 1))
    store = Store.from_data(data, tmp_path / "store", progress=False)
    assert_same(store, expected, but=("train", "valid", "test"))
    assert "does not keep edge_attr" in capsys.readouterr().err
    for mask, split in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        np.testing.assert_array_equal(store.splits[split], data[mask].nonzero().ravel())
    order = np.argsort(graph["edge_index"][1], kind="stable")
    np.testing.assert_array_equal(store.read_edge_index(), graph["edge_index"][:, order])
    np.testing.assert_array_equal(store.x, data.x)
    np.testing.assert_array_equal(store.y, data.y)
    given = Store.from_data(data, tmp_path / "given", splits=graph["splits"], feature_dtype="float16", progress=False)
    assert_same(given, expected, but=("x",))


def test_a_data_that_can_not_be_a_store_is_refused_in_a_sentence(graph: Arrays, tmp_path: Path) -> None:
    cases = {
        "got a HeteroData": HeteroData(),
        "found no x$": data_of(graph, x=None),
        r"found no val_mask; pass splits=": data_of(graph, val_mask=None),
        r"data.train_mask: expected booleans \[N\], got torch.bool \[300, 10\]": data_of(
            graph, train_mask=torch.ones(N, 10, dtype=torch.bool)
        ),
        r"y: expected one label": data_of(graph, y=torch.ones(N, 7)),
        r"edge_index: expected node ids": data_of(graph, edge_index=torch.full((2, 3), N)),
    }
    for sentence, data in cases.items():
        with pytest.raises(InputError, match=sentence):
            Store.from_data(data, tmp_path / "store", progress=False)
    assert left_in(tmp_path) == []
