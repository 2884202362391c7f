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

from ogbnlib import InputError, TrainConfig, convert, open_dataset, train, write_raw
from ogbnlib.__main__ import app
from ogbnlib.graph.store import Store, open_store
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
            # Among names a header must be known, or the first name, misspelt, would be taken for one.
            column = "anything" if kind == "numbers" else "node"
            replace(folder, name, ending, {column: ids}, header=name != "valid")
    store = convert(open_tables(folder, relabel=True), tmp_path / "store", progress=False)
    assert_same(store, expected)
    assert store.node_name is not None
    found = store.node_name if kind == "numbers" else [name.decode() for name in store.node_name.tolist()]
    np.testing.assert_array_equal(found, called)


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
    replace(folder, "edges", ".csv", {"w": np.ones(E), **dict(zip(("src", "dst"), graph["edge_index"], strict=True))})
    size = locate(str(folder))
    assert (size.num_nodes, size.num_edges, size.num_classes) == (N, E, C)
    assert "edges.csv: left out: column 'w'" in capsys.readouterr().err
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

    def archive() -> None:
        with open(folder / "features.npy", "wb") as file:
            np.savez(file, x=graph["x"])

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
            r"edges.csv, line 3: expected node ids from 0 to 299, .* found 'a17'; .* --relabel",
        ),
        "ids out of range": (edges(csv_of([(1, 2), (3, N)])), rf"edges.csv, line 3: .*0 to {N - 1}.*{N}.*--relabel"),
        "no header, out of range": (
            edges(csv_of([(1, 2), (-1, 3)], "")),
            r"edges.csv, line 2: .*found '-1'.*--relabel",
        ),
        "an empty cell": (edges(csv_of([(1, 2), (3, "")])), r"edges.csv, line 3: .*found none"),
        "three cells": (edges(csv_of([(1, 2), (3, "4,5")])), r"edges.csv, line 3: expected 2 columns, found 3"),
        "one column": (edges("source\n1\n"), r"edges.csv: expected a column of sources and one of targets"),
        "half a pair": (
            edges(csv_of(pairs, "source,weight\n")),
            r"edges.csv: expected columns source and target, .*, found columns 'source', 'weight'; .*--edge-columns",
        ),
        "an empty file": (edges(""), r"edges.csv: expected a table, found an empty file"),
        "[E, 2]": (save("edges.npy", pairs), r"edges.npy: expected node ids \[2, E\], .*transpose"),
        "an archive": (archive, r"features.npy: expected one numpy array, found an .npz archive"),
        "float edges": (save("edges.npy", graph["edge_index"] + 0.5), r"edges.npy, entry 0: expected node ids"),
        "text edges": (
            save("edges.npy", np.char.add("a", graph["edge_index"].astype(str))),
            r"edges.npy, entry 0: .*--relabel",
        ),
        "ids beyond": (save("edges.npy", graph["edge_index"] + 1), rf"edges.npy, entry \d+: .*found {N}.*--relabel"),
        "text features": (save("features.npy", x.astype(str)), r"features.npy: expected features \[N, F\]"),
        "flat features": (save("features.npy", x[:, 0]), r"features.npy: expected features \[N, F\]"),
        "NaN": (save("features.npy", nan), r"features.npy: expected finite values, found 1 .* row 7"),
        "fewer labels": (save("labels.npy", y[:-1]), rf"labels.npy: expected {N} labels.*found {N - 1}"),
        "one label": (save("labels.npy", np.array(3)), r"labels.npy: expected one label a node"),
        "half labels": (save("labels.npy", np.where(y == 1, 0.5, y)), r"labels.npy, entry \d+: expected whole labels"),
        "no labels": (save("labels.npy", np.full(N, -1)), r"labels.npy: expected at least one label"),
        "a short mask": (save("train.npy", np.ones(N - 1, bool)), r"train.npy: expected node ids \[n\] or a mask"),
        "a split beyond": (save("test.npy", np.array([0, N])), rf"test.npy, entry 1: .*found {N}"),
        "a split without label": (save("test.npy", np.flatnonzero(y < 0)), r"test.*: expected labelled nodes"),
        "fewer names": (save("nodes.npy", np.arange(N - 1)), rf"nodes.npy: expected {N} names.*found {N - 1}"),
        "a name twice": (save("nodes.npy", np.arange(N) // 2), r"nodes.npy, entry 1: expected each node once, found 0"),
        "an unknown name": (save("nodes.npy", np.arange(N) + 5), r"train.npy, entry \d+: expected one of the .* nodes"),
        "pickles": (save("labels.npy", np.array([None] * N)), r"labels.npy: expected a numpy array without objects"),
        "text among numbers": (
            table("features.csv", "a,b\n" + "1,2\n" * (N - 1) + "1,x\n"),
            rf"features.csv, line {N + 1}, column 'b': expected a number, found 'x'",
        ),
        "fewer features": (table("features.csv", "a\n" + "1\n" * (N - 1)), rf"expected {N - 1} labels.*found {N}"),
        "an empty split": (table("train.csv", ""), r"train.csv: expected a table, found an empty file"),
        "labels of text": (
            table("labels.csv", "label\n1\n" + "cat\n" * (N - 1)),
            r"labels.csv, line 3: expected a label, found 'cat'",
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
    assert capsys.readouterr().err == f"{tmp_path / 'who.csv'}: left out: column 'weight'\n"
    assert_same(convert(source, tmp_path / "store", progress=False, origin=source.origin), expected)
    with pytest.raises(InputError, match=r"found columns 'cited', 'citing', 'weight'; .*--edge-columns"):
        open_tables(folder, edges=tmp_path / "who.csv")
    with pytest.raises(InputError, match=r"who.csv: expected two of its columns, cited, citing, weight, found no from"):
        open_tables(folder, edges=tmp_path / "who.csv", edge_columns=["from", "cited"])
    with pytest.raises(InputError, match=r"who.csv: expected two of its columns, .*, found cited twice"):
        open_tables(folder, edges=tmp_path / "who.csv", edge_columns=["cited", "cited"])
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


# All that files may be -----------------------------------------------------------------------------------------------

SMALL = 40  # nodes


@pytest.fixture(scope="module")
def small() -> Arrays:
    rng = np.random.default_rng(1)
    ids = rng.permutation(SMALL)
    y = rng.integers(0, 3, SMALL)
    y[ids[30:]] = -1
    return {
        "edge_index": rng.integers(0, SMALL, (2, 90)),
        "x": np.round(rng.standard_normal((SMALL, 3)), 3).astype(np.float32),
        "y": y,
        "splits": {"train": np.sort(ids[:20]), "valid": np.sort(ids[20:25]), "test": np.sort(ids[25:30])},
    }


def lines(*columns: Any, header: str = "", sep: str = ",", end: str = "\n") -> str:
    rows = [sep.join(map(str, row)) for row in zip(*columns, strict=True)]
    return "".join(f"{row}{end}" for row in ([header] if header else []) + rows)


def parquet(**columns: Any) -> pa.Table:
    return pa.table(columns)


def write_small(folder: Path, small: Arrays, files: dict[str, Any]) -> Path:
    """The folder of `small` in .npy files, but for `files`: by name, text, bytes, an array or an arrow table."""
    own = {"edges": small["edge_index"], "features": small["x"], "labels": small["y"], **small["splits"]}
    own |= {"nodes": None, "splits": None}
    folder.mkdir()
    for role, values in own.items():
        instead = files.get("without", "").split()
        if values is not None and role not in instead and not any(name.split(".")[0] == role for name in files):
            np.save(folder / f"{role}.npy", values)
    for name, content in files.items():
        if name == "without":
            continue
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        if isinstance(content, pa.Table):
            pyarrow.parquet.write_table(content, folder / name)
        elif isinstance(content, str | bytes):
            data = content.encode() if isinstance(content, str) else content
            packed = name.endswith(".gz") and isinstance(content, str)
            (folder / name).write_bytes(gzip.compress(data) if packed else data)
        else:
            np.save(folder / name, content)
    return folder


def read_all(source: Any) -> Arrays:
    return {
        "edge_index": np.concatenate([np.stack(pair) for pair in source.edge_chunks()], axis=1),
        "x": np.concatenate(list(source.x_chunks())),
        "y": np.concatenate(list(source.label_chunks())),
        "splits": source.read_splits(),
    }


def same(found: Arrays, expected: Arrays) -> None:
    for name in ("edge_index", "x", "y"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    for split, ids in expected["splits"].items():
        np.testing.assert_array_equal(np.sort(found["splits"][split]), ids, err_msg=split)


def right_files(g: Arrays) -> dict[str, dict[str, Any]]:
    """Files that all give the arrays of `small`; `options` among them."""
    src, dst = g["edge_index"]
    x, y, ids = g["x"], g["y"], np.arange(SMALL)
    some = y >= 0
    split_of = np.full(SMALL, "", object)
    for split, nodes in g["splits"].items():
        split_of[nodes] = "val" if split == "valid" else split
    table = lines(src, dst, header="source,target")
    names = [f"n{i}" for i in ids]
    named = lines([names[i] for i in src], [names[i] for i in dst], header="source,target")
    by_name = {f"{split}.csv": lines([names[i] for i in nodes]) for split, nodes in g["splits"].items()}
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3)
    shuffled = np.random.default_rng(0).permutation(SMALL)
    return {
        "swapped columns": {"edges.csv": lines(dst, src, header="target,source")},
        "capitals and spaces": {"edges.csv": lines(src, dst, header=" Source , TARGET ")},
        "floats as ids": {"edges.csv": lines(src * 1.0, dst * 1.0, header="source,target")},
        "spaces around ids": {"edges.csv": lines(src, [f" {i} " for i in dst])},
        "quoted fields": {"edges.csv": lines([f'"{i}"' for i in src], dst, header='"source","target"')},
        "CRLF": {"edges.csv": lines(src, dst, header="source,target", end="\r\n")},
        "a BOM": {"edges.csv": "\ufeff" + table},
        "a BOM without header": {"edges.csv": "\ufeff" + lines(src, dst)},
        "blank lines": {"edges.csv": "\n" + table.replace("\n", "\n\n")},
        "no newline at the end": {"edges.csv": table.rstrip("\n")},
        "two gzip members": {"edges.csv.gz": gzip.compress(table[:99].encode()) + gzip.compress(table[99:].encode())},
        "trailing commas": {"edges.csv": lines(src, dst, [""] * 90, header="source,target,")},
        "text digits in npy": {"edges.npy": g["edge_index"].astype(str)},
        "whole floats in npy": {"edges.npy": g["edge_index"] * 1.0},
        "big-endian": {"edges.npy": g["edge_index"].astype(">i4")},
        "PyG's names": {
            "without": "edges features labels train valid",
            "edge_index.npy": g["edge_index"],
            "x.npy": x,
            "y.npy": y,
            "train_mask.npy": np.isin(ids, g["splits"]["train"]),
            "val.npy": g["splits"]["valid"],
        },
        "categories": {"edges.parquet": parquet(source=pa.array(src.astype(str)).dictionary_encode(), target=dst)},
        "decimals and large strings": {
            "edges.parquet": parquet(
                source=pa.array(src).cast(pa.decimal128(20, 0)),
                target=pa.array(dst.astype(str)).cast(pa.large_string()),
            )
        },
        "uint64 and double": {"edges.parquet": parquet(source=src.astype(np.uint64), target=dst * 1.0)},
        "pandas' index beside": {"edges.parquet": parquet(source=src, target=dst, __index_level_0__=np.arange(90))},
        "positions": {"edges.csv": lines(np.ones(90), src, dst), "options": {"edge_columns": ["2", "3"]}},
        "features of fixed lists": {"features.parquet": parquet(x=fixed)},
        "features of large lists": {"features.parquet": parquet(x=pa.array(list(x)).cast(pa.large_list(pa.float32())))},
        "decimal features": {
            "features.parquet": parquet(
                **{f"f{i}": pa.array([f"{value:.3f}" for value in x[:, i]]).cast(pa.decimal128(9, 3)) for i in range(3)}
            )
        },
        "a header of 0, 1, 2": {"features.csv": lines(*x.T, header="0,1,2")},
        "a feature with a dot": {"features.parquet": pa.table({"a.1": x[:, 0], "a": x[:, 1], "a.1.b": x[:, 2]})},
        "ids and features": {"features.csv": lines(ids, *x.T, header="node_id,a,b,c")},
        "a named id": {"features.csv": lines(*x.T, ids, header="a,b,c,paper_id"), "options": {"id_column": "paper_id"}},
        "an id beside nodes": {"features.csv": lines(ids, *x.T, header="node,a,b,c"), "nodes.npy": ids},
        "labels before ids": {"labels.csv": lines(y[shuffled], shuffled, header="label,node_id")},
        "named label columns": {
            "labels.csv": lines(y[shuffled], shuffled, header="topic,paper"),
            "options": {"label_columns": ["paper", "topic"]},
        },
        "one named label column": {
            "labels.csv": lines(ids[::-1], y, header="rank,topic"),
            "options": {"label_columns": ["topic"]},
        },
        "labels by a named id": {
            "labels.csv": lines(y[shuffled], shuffled, header="y,idx"),
            "options": {"id_column": "idx"},
        },
        "float labels": {"labels.csv": lines(np.where(some, y * 1.0, np.nan), header="label")},
        "-1 as a float": {"labels.npy": y.astype(np.float32)},
        "quoted empty labels": {"labels.csv": lines(np.where(some, y.astype(str), '""'), header="y")},
        "nullable labels": {"labels.parquet": parquet(label=pa.array([int(v) if v >= 0 else None for v in y]))},
        "only known labels": {"labels.csv": lines(ids[some], y[some])},
        "a splits file": {
            "without": "train valid test",
            "splits.csv": lines(shuffled, split_of[shuffled], header="node_id,split"),
        },
        "a splits file without ids": {
            "without": "train valid test",
            "splits.parquet": parquet(split=[s or None for s in split_of]),
        },
        "a splits file without names": {
            "without": "train valid test",
            "splits.csv": lines(ids[split_of != ""], [s.title() for s in split_of[split_of != ""]]),
        },
        "OGB's split folder": {
            "without": "train valid test",
            "split/other/train.csv": "1\n",
            **{f"split/time/{split}.csv.gz": lines(nodes) for split, nodes in g["splits"].items()},
        },
        "a split folder": {
            "without": "train valid test",
            **{f"split/{split}.csv": lines(nodes, header="id") for split, nodes in g["splits"].items()},
        },
        "masks of 0 and 1": {
            "train.npy": np.isin(ids, g["splits"]["train"]).astype(np.int64),
            "valid.csv": lines(np.isin(ids, g["splits"]["valid"]).astype(int), header="mask"),
            "test.csv": lines(np.isin(ids, g["splits"]["test"]), header="test_mask"),
        },
        "a mask in parquet": {"train.parquet": parquet(mask=np.isin(ids, g["splits"]["train"]))},
        "text names": {"edges.csv": named, "nodes.csv": lines(names, header="node_id"), **by_name},
        "names taken from features": {
            "edges.csv": named,
            "features.csv": lines(names, *x.T, header="who,a,b,c"),
            **by_name,
        },
        "names such as NA": {
            "edges.csv": named.replace("n7", "NA"),
            "nodes.csv": lines(names, header="id").replace("n7", "NA"),
            **{name: text.replace("n7", "NA") for name, text in by_name.items()},
        },
        "numbers as names": {
            "edges.csv": lines(src * 10.0, dst * 10),
            "nodes.csv": lines(ids * 10),
            **{f"{split}.npy": nodes * 10 for split, nodes in g["splits"].items()},
        },
    }


def no_arrays() -> Arrays:
    zeros = np.zeros(SMALL, int)
    none = {"train": zeros[:1], "valid": zeros[:1], "test": zeros[:1]}
    return {"edge_index": np.zeros((2, 90), int), "x": np.zeros((SMALL, 3)), "y": zeros, "splits": none}


@pytest.mark.parametrize("name", right_files(no_arrays()))
def test_files_of_any_make_give_the_same_arrays(name: str, small: Arrays, tmp_path: Path) -> None:
    files = right_files(small)[name]
    options = files.pop("options", {})
    source = open_tables(write_small(tmp_path / "own", small, files), **options)
    same(read_all(source), small)
    assert source.num_classes == 3


def wrong_files(g: Arrays) -> dict[str, tuple[dict[str, Any], str]]:
    """Files, and the one sentence that refuses them."""
    (src, dst), x, y, ids = g["edge_index"], g["x"], g["y"], np.arange(SMALL)
    edges = "source,target\n1,2\n"
    gz = gzip.compress(lines(src, dst).encode())
    lists = [[1.0], [1.0, 2.0], [1.0, 2.0, 3.0]] + [[1.0]] * 37
    index = ".*pandas' index"

    def of_lists(first: Any) -> dict[str, Any]:
        return {"features.parquet": parquet(x=pa.array([first] + [[1.0, 2.0]] * 39, pa.list_(pa.float64())))}

    return {
        "labels by row with an id": (
            {"labels.csv": lines(y, ids[::-1], header="label,paper_id")},
            r"labels.csv: expected columns node_id and label, found columns 'label', 'paper_id'; .*--label-columns",
        ),
        "labels with idx": ({"labels.csv": lines(y, ids[::-1], header="label,idx")}, "--label-columns"),
        "labels without a label": ({"labels.csv": lines(ids, header="node_id")}, "--label-columns"),
        "labels with pandas' index": ({"labels.csv": lines(ids, y, header=",label")}, "labels.csv" + index),
        "an unknown --label-columns": (
            {"labels.csv": lines(y, header="label"), "options": {"label_columns": ["no"]}},
            r"labels.csv: expected one or two of its columns, label, found no no",
        ),
        "an unknown --id-column": ({"options": {"id_column": "no"}}, "--id-column: expected a column 'no' in"),
        "an id as a feature": (
            {"features.csv": lines(ids, *x.T, header="paper_id,w0,w1,w2")},
            r"features.csv: expected columns of features, not 'paper_id', .*--id-column",
        ),
        "a camel id": ({"features.csv": lines(*x.T, ids, header="w0,w1,w2,paperId")}, "--id-column"),
        "an id without a name": (
            {"features.csv": lines(ids[::-1], *x.T)},
            r"different whole numbers in column '1'.*--id-column",
        ),
        "an id of another name": (
            {"features.csv": lines(ids[::-1] + 99, *x.T, header="paper,a,b,c")},
            "'paper'.*--id-column",
        ),
        "a label as a feature": ({"features.csv": lines(*x.T, y, header="a,b,c,label")}, "not 'label'"),
        "features with pandas' index": ({"features.csv": lines(ids, *x.T, header=",a,b,c")}, "features.csv" + index),
        "an unnamed column": ({"features.csv": lines(ids, *x.T, header="Unnamed: 0,a,b,c")}, "features.csv" + index),
        "an index in parquet": (
            {"features.parquet": parquet(a=x[:, 0], __index_level_0__=ids)},
            "features.parquet" + index,
        ),
        "weights as sources": (
            {"edges.csv": lines(np.ones(90), src, dst, header="weight,citing,cited")},
            r"edges.csv: expected columns source and target, .* 'weight', 'citing', 'cited'; .*--edge-columns",
        ),
        "two columns of other names": ({"edges.csv": lines(src, dst, header="cited,citing")}, "--edge-columns"),
        "three without names": (
            {"edges.csv": lines(np.ones(90), src, dst)},
            "found columns 3, without names; .*--edge-columns",
        ),
        "lists of other lengths": (
            {"features.parquet": parquet(x=lists)},
            r"features.parquet, row 1: expected a list of 1 numbers, found one of 2",
        ),
        "lists that shift": (of_lists([1.0]), r"row 1: expected a list of 1 numbers, found one of 2"),
        "an empty first list": (of_lists([]), r"features.parquet, row 0: expected a list of numbers, found \[\]"),
        "no first list": (of_lists(None), r"features.parquet, row 0: expected a list of numbers, found None"),
        "no lists": (
            {"features.parquet": parquet(x=pa.array([], pa.list_(pa.float64())))},
            "expected a row for each node, found none",
        ),
        "lists of lists": (
            {"features.parquet": parquet(x=[[[1.0]]] * SMALL)},
            r"row 0: expected a number, found \[1.0\]",
        ),
        "a list with a null": ({"features.parquet": parquet(x=[[1.0, None]] * SMALL)}, "found 40 NaN"),
        "an empty table": ({"features.csv": "a,b\n"}, "expected a row for each node, found none"),
        "a bad first feature": (
            {"features.csv": lines(["oops", *x[1:, 0]], *x.T[1:], header="a,b,c"), "nodes.npy": ids},
            r"features.csv, line 2, column 'a': expected a number, found 'oops'",
        ),
        "a bad later feature": (
            {"features.csv": lines([*x[1:, 0], "oops"], *x.T[1:], header="a,b,c"), "nodes.npy": ids},
            r"features.csv, line 41, column 'a': expected a number, found 'oops'",
        ),
        "a bad feature after blanks": (
            {"features.csv": "a,b\n\n1,2\n\n" + "1,2\n" * 38 + "x,2\n"},
            "features.csv, line 43, column 'a'",
        ),
        "an empty feature": (
            {"features.csv": lines(["", *x[1:, 0]], *x.T[1:], header="a,b,c")},
            "found 1 NaN or Inf, the first in row 0",
        ),
        "dates as features": (
            {"features.parquet": parquet(a=pa.array([1] * SMALL, pa.timestamp("s")))},
            "row 0.*expected a number",
        ),
        "a column twice": (
            {"features.csv": lines(*x.T, header="a,b,a")},
            "features.csv: expected each column's name once, found 'a' again",
        ),
        "features in another order": (
            {"features.csv": lines(ids[::-1], *x.T, header="id,a,b,c"), "nodes.npy": ids},
            r"features.csv, line 2: expected the nodes in the order of their names, found 39 out of order",
        ),
        "negative": ({"edges.csv": edges + "-1,2\n"}, r"edges.csv, line 3: .*0 to 39, .*found '-1'"),
        "past the end": ({"edges.csv": edges + "\n\n1,40\n"}, r"edges.csv, line 5: .*found '40'"),
        "too large": (
            {"edges.csv": edges + "1,9223372036854775808\n"},
            r"edges.csv, line 3: .*found '9223372036854775808'",
        ),
        "too large in parquet": (
            {"edges.parquet": parquet(source=pa.array([1, 2**63], pa.uint64()), target=[1, 2])},
            r"edges.parquet, row 1: .*found 9223372036854775808",
        ),
        "half an id": ({"edges.csv": edges + "1.5,2\n"}, r"edges.csv, line 3: .*found '1.5'"),
        "a null": ({"edges.parquet": parquet(source=[1, None], target=[1, 2])}, r"edges.parquet, row 1: .*found none"),
        "NaN": ({"edges.parquet": parquet(source=[1.0, np.nan], target=[1, 2])}, r"edges.parquet, row 1: .*found nan"),
        "booleans as ids": (
            {"edges.parquet": parquet(source=[True, False], target=[1, 2])},
            r"edges.parquet, row 0: .*found True",
        ),
        "too few cells": ({"edges.csv": edges + "3\n"}, r"edges.csv, line 3: expected 2 columns, found 1"),
        "cut off": ({"edges.csv.gz": gz[:-9]}, r"edges.csv.gz: expected a sound table, found otherwise: "),
        "Latin-1": (
            {"edges.csv": edges.encode() + b"\xe9,2\n"},
            r"edges.csv, line 3: expected UTF-8, found other bytes",
        ),
        "tabs": (
            {"edges.csv": lines(src, dst, sep="\t")},
            r"edges.csv: expected a column of sources and one of targets, by commas",
        ),
        "a label of 3.5": (
            {"labels.csv": "label\n" + "1\n" * 38 + "3.5\n1\n"},
            r"labels.csv, line 40: expected whole labels .*found '?3.5",
        ),
        "a label of -2": ({"labels.csv": "label\n-2\n" + "1\n" * 39}, r"labels.csv, line 2: expected whole labels"),
        "a blank label": (
            {"labels.csv": "label\n\n" + "1\n" * 39},
            r"labels.csv: expected 40 labels, .*found 39; blank lines",
        ),
        "text and numbers": (
            {"labels.csv": "label\ncs.LG\n3\n" + "cs.LG\n" * 38},
            r"labels.csv, line 3: expected a label of text as before it, found '3'",
        ),
        "labels of no node": ({"labels.csv": "node_id,label\n1,2\n40,1\n"}, r"labels.csv, line 3: .*0 to 39"),
        "a stray label": ({"labels.csv": "label\n" + "1\n" * 39 + "5000\n"}, r"--num-classes"),
        "more classes than said": (
            {"options": {"num_classes": 2}},
            r"labels.npy, entry \d+: expected whole labels from 0 to 1",
        ),
        "a node twice": (
            {"nodes.csv": lines([*ids[:-1], 3], header="node_id")},
            r"nodes.csv, line 41: expected each node once, found 3 again",
        ),
        "no name": (
            {"nodes.csv": lines(["a", *['""'] * 39], header="node_id")},
            r"nodes.csv, line 3: expected a node, found none",
        ),
        "names of two columns": (
            {"nodes.csv": lines(ids, ids, header="node idx,paper id")},
            "nodes.csv: expected a column node_id, .*--id-column",
        ),
        "a name of 300 bytes": (
            {"nodes.csv": lines([f"n{i}" + "x" * (300 if i == 7 else 0) for i in ids])},
            "256 bytes at most, found 302",
        ),
        "an unknown first name": (
            {
                "nodes.csv": lines([f"n{i}" for i in ids]),
                "edges.csv": "n1,n2\n",
                "labels.npy": y,
                "train.csv": "m1\nn2\n",
            },
            r"train.csv: expected in the first line a node, or node_id, found columns 'm1'",
        ),
        "a split with a mask": (
            {"train.csv": lines(ids, ids % 2, header="node_id,train")},
            "train.csv: expected one column, node ids",
        ),
        "a mask of others": (
            {"train.csv": lines(np.arange(30) % 2, header="mask")},
            "train.csv: expected node ids .n. or a mask of 40 booleans, found a mask of 30",
        ),
        "a split that is a label": ({"train.csv": "node_id\nyes\n"}, r"train.csv, line 2: .*found 'yes'"),
        "an unknown split": (
            {"without": "train valid test", "splits.csv": "node_id,split\n1,train\n2,holdout\n"},
            r"splits.csv, line 3: expected train, valid, test or an empty cell, found 'holdout'",
        ),
        "splits of fewer nodes": (
            {"without": "train valid test", "splits.csv": "split\ntrain\n"},
            "splits.csv: expected the splits of 40 nodes, found 1",
        ),
        "splits and train": (
            {"splits.csv": "node_id,split\n1,train\n"},
            "expected either splits or train, valid and test",
        ),
        "valid and val": ({"val.npy": ids}, r"expected one file of valid, found valid.npy, val.npy"),
        "two split folders": (
            {"without": "train valid test", "split/a/train.csv": "1\n", "split/b/train.csv": "1\n"},
            "expected a folder time, or just one, found a, b",
        ),
        "no splits at all": ({"without": "train valid test"}, r"expected files of train \(.*valid \(.*test \("),
        "no features": ({"without": "features"}, r"expected files of features .*--features ones, or degree"),
    }


@pytest.mark.parametrize("name", wrong_files(no_arrays()))
def test_what_a_file_can_not_be_is_one_sentence(name: str, small: Arrays, tmp_path: Path) -> None:
    files, sentence = wrong_files(small)[name]
    options = files.pop("options", {})
    with pytest.raises(InputError, match=sentence) as error:
        read_all(open_tables(write_small(tmp_path / "own", small, files), **options))
    assert "\n" not in str(error.value)


def test_labels_may_be_text_and_their_names_are_kept(small: Arrays, tmp_path: Path) -> None:
    areas = np.array(["cs.LG", "astro-ph", "math.ÄÖ"])  # in another order than that of the alphabet
    called = [areas[label] if label >= 0 else "" for label in small["y"]]
    rows = np.random.default_rng(0).permutation(SMALL)
    files = {
        "labels.csv": lines(rows, [called[row] for row in rows], header="node_id,label"),
        "labels.parquet": pa.table({"subject": pa.array([name or None for name in called]).dictionary_encode()}),
        "labels.npy": np.array(called),
    }
    for number, (name, content) in enumerate(files.items()):
        folder = write_small(tmp_path / f"own{number}", small, {name: content})
        store = convert(folder, tmp_path / f"store{number}", progress=False)
        assert verify_store(store.path) == []
        assert store.label_name is not None
        names = [name.decode() for name in store.label_name.tolist()]
        assert names == sorted(areas)
        assert [names[label] if label >= 0 else "" for label in store.y] == called


def test_a_graph_without_features_has_ones_or_degrees(small: Arrays, tmp_path: Path) -> None:
    folder = write_small(tmp_path / "own", small, {"without": "features"})
    same(read_all(open_tables(folder, features="ones")), {**small, "x": np.ones((SMALL, 1))})
    degrees = np.stack([np.bincount(end, minlength=SMALL) for end in small["edge_index"][::-1]], axis=1)
    same(read_all(open_tables(folder, features="degree")), {**small, "x": np.log1p(degrees.astype(np.float32))})
    (folder / "labels.npy").unlink()
    (folder / "labels.csv").write_text(lines(np.arange(SMALL), small["y"], header="id,label"))
    with pytest.raises(InputError, match="expected, without features, a file nodes, or a label for each node"):
        open_tables(folder, features="ones")
    np.save(folder / "nodes.npy", np.arange(SMALL))
    assert open_tables(folder, features="ones").num_nodes == SMALL


def test_a_split_may_be_empty_but_not_the_one_to_train_on(
    small: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = np.full(SMALL, '""', object)
    words[np.flatnonzero(small["y"] >= 0)] = "train"
    folder = write_small(
        tmp_path / "own",
        small,
        {"without": "train valid test", "splits.csv": lines(words, header="split").replace("\n\n", '\n""\n""\n')},
    )
    store = convert(folder, tmp_path / "store", progress=False)
    assert {split: len(ids) for split, ids in store.splits.items()} == {"train": 30, "valid": 0, "test": 0}
    assert verify_store(store.path) == []
    config: Arrays = {"dataset": str(store.path), "num_neighbors": [2], "epochs": 1, "batch_size": 8}
    for loading in ("eager", "store"):
        done = train(TrainConfig.create(config, loading=loading))
        assert done.history[0]["test"] is None
        assert "the valid and the test split has no nodes: it is not evaluated" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"early_stopping: expected nodes in the valid split, found none in .*store"):
        train(TrainConfig.create(config, early_stopping=2))
    others = {**{split: np.arange(0) for split in small["splits"]}, "test": small["splits"]["test"]}
    empty = convert(write_small(tmp_path / "none", {**small, "splits": others}, {}), tmp_path / "no", progress=False)
    with pytest.raises(InputError, match="no: expected nodes in the train split to train on, found none"):
        train(TrainConfig.create(config, dataset=str(empty.path)))


def test_named_columns_and_made_features_come_in_by_the_command_line(
    small: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = small["edge_index"]
    ids = np.arange(SMALL)
    files = {
        "edges.csv": lines(np.ones(90), src, dst, header="weight,citing,cited"),
        "labels.csv": lines(small["y"][::-1], ids[::-1], header="topic,paper"),
        "features.csv": lines(ids, *small["x"].T, header="paper_id,a,b,c"),
        "valid.csv": lines(small["splits"]["valid"], header="paper_id"),
    }
    write_small(tmp_path / "own", small, files)
    (tmp_path / "own" / "valid.csv").rename(tmp_path / "held_out.csv")
    monkeypatch.chdir(tmp_path)
    given = "--edge-columns citing,cited --label-columns paper,topic --id-column paper_id --num-classes 7"
    given += " --val held_out.csv"
    app(["convert", "own", "store", *given.split()], standalone_mode=False)
    assert "left out: column 'weight'" in capsys.readouterr().err
    store = open_store(tmp_path / "store")
    assert store.num_classes == 7
    same({**small, "x": store.x, "y": store.y, "splits": store.splits}, small)
    app(
        ["convert", "own", "ones", *given.split(), "--features", "ones", "--nodes", "own/features.csv"],
        standalone_mode=False,
    )
    assert open_store(tmp_path / "ones").num_features == 1
    with pytest.raises(InputError, match="ogbn-arxiv is not there"):
        app(["convert", "ogbn-arxiv", "new", "--data-dir", "elsewhere"], standalone_mode=False)


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
    data.train_mask = data.train_mask.to(torch.uint8)
    splits = {"val" if split == "valid" else split: ids for split, ids in graph["splits"].items()}
    splits["test"] = data.test_mask.long()
    assert_same(Store.from_data(data, tmp_path / "masks", progress=False), store)
    assert (
        Store.from_data(data, tmp_path / "val", splits=splits, progress=False).splits["valid"].tolist()
        == splits["val"].tolist()
    )
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
