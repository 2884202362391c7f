"""A folder of a user's files gives the store of the same arrays, or a sentence with file and row."""

import bz2
import gzip
import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from conftest import left_in
from ogb_layout import write_raw

from ogbnlib import InputError, TrainConfig, convert, train
from ogbnlib.graph.store import Store
from ogbnlib.graph.writer import verify_store
from ogbnlib.sources import source
from ogbnlib.sources.convert import open_source

Arrays = dict[str, Any]
SMALL = 40  # nodes
SPLITS = ("train", "valid", "test")


def small_graph() -> Arrays:
    rng = np.random.default_rng(1)
    ids = rng.permutation(SMALL)
    y = rng.integers(0, 3, SMALL)
    y[ids[30:]] = -1
    parts = np.split(ids[:30], [20, 25])
    return {
        "edge_index": rng.integers(0, SMALL, (2, 90)),
        "x": np.round(rng.standard_normal((SMALL, 3)), 3).astype(np.float32),
        "y": y,
        "splits": {split: np.sort(part) for split, part in zip(SPLITS, parts, strict=True)},
    }


@pytest.fixture(scope="module")
def small() -> Arrays:
    return small_graph()


def lines(*columns: Any, header: str = "", sep: str = ",", end: str = "\n") -> str:
    rows = [sep.join(map(str, row)) for row in zip(*columns, strict=True)]
    return "".join(f"{row}{end}" for row in ([header] if header else []) + rows)


def parquet(**columns: Any) -> pa.Table:
    return pa.table(columns)


def write_small(folder: Path, small: Arrays, files: dict[str, Any]) -> Path:
    """Write `small` as .npy files, but for the roles in `without` and of the names in `files`."""
    arrays = {"edges": small["edge_index"], "features": small["x"], "labels": small["y"]}
    missing = {*files.get("without", "").split(), *(name.split(".")[0] for name in files)}
    missing |= {name.split("/")[0] for name in files}
    folder.mkdir()
    for role, values in {**arrays, **small["splits"]}.items():
        if role not in missing:
            np.save(folder / f"{role}.npy", values)
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True, parents=True)
        if isinstance(content, pa.Table):
            pyarrow.parquet.write_table(content, file)
        elif isinstance(content, bytes):
            file.write_bytes(content)
        elif isinstance(content, str) and name != "without":
            data = content.encode()
            file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        elif name != "without":
            np.save(file, content)
    return folder


def read_all(source: Any) -> Arrays:
    edges = [np.stack(pair) for pair in source.edge_chunks(2**20)]
    return {
        "edge_index": np.concatenate(edges, axis=1),
        "x": np.concatenate(list(source.x_chunks())).astype(np.float32),
        "y": np.concatenate(list(source.label_chunks())),
        "splits": source.read_splits(),
    }


def same(found: Arrays, expected: Arrays) -> None:
    for name in ("edge_index", "x", "y"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    for split, ids in expected["splits"].items():
        np.testing.assert_array_equal(np.sort(found["splits"][split]), ids, err_msg=split)


def feather(**columns: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.feather.write_feather(pa.table(columns), out)
    return out.getvalue()


def right_files(g: Arrays) -> list[dict[str, Any]]:
    """Files that all give the arrays of `small`, by canonical names or a `dataset.yaml`."""
    src, dst = g["edge_index"]
    x, y, ids = g["x"], g["y"], np.arange(SMALL)
    split_of = np.full(SMALL, "", object)
    for split, nodes in g["splits"].items():
        split_of[nodes] = "val" if split == "valid" else split
    table = lines(src, dst, header="source,target")
    names = np.array([f"n{i}" for i in ids])
    named = lines(names[src], names[dst], header="source,target")
    splits = g["splits"].items()
    by_name = {f"{split}.csv": lines(names[nodes], header="node_id") for split, nodes in splits}
    masks = {split: np.isin(ids, nodes) for split, nodes in g["splits"].items()}
    mixed = np.random.default_rng(0).permutation(SMALL)
    no_splits = "train valid test"
    twelve = np.array_split(g["edge_index"], 12, axis=1)
    parts = {
        f"edges/part.{i}.csv.gz": lines(*part, header="src,dst") for i, part in enumerate(twelve)
    }
    halves = enumerate(np.split(g["edge_index"], [50, 50], axis=1))
    name = "edges.parquet/part-{:05d}.snappy.parquet"
    spark = {name.format(i): parquet(src=half[0], dst=half[1]) for i, half in halves}
    return [
        {"edges.csv": lines(dst, src, header=" Target ,SOURCE", end="\r\n")},
        {"edges.csv": "\ufeff" + lines(src * 1.0, [f'" {i} "' for i in dst])},
        {"edges.csv.gz": gzip.compress(table[:99].encode()) + gzip.compress(table[99:].encode())},
        {"edges.csv": lines(np.ones(90), src, dst, header="weight,src,dst")},
        # Edge lists: comments, separators, compression
        {"edges.txt": lines(src, dst, sep=" ", end="\r\n")},
        {"edges.tsv": lines(src, dst, header="src\tdst", sep="\t")},
        {"edges.txt.gz": "# SNAP\n# From\tTo\n" + lines(src, dst, sep="\t")},
        {"edges.csv.gz": f"# a\n\n# b\n{table}"},
        {"edges.txt.bz2": bz2.compress(f"%\n{lines(src, dst)}".encode())},
        {"edges.csv.zst": pa.compress(table.encode(), "zstd", asbytes=True), "labels.txt": lines(y)},
        # Arrays in other shapes, Arrow, and parts in the order of their names
        {"edges.npy": np.ascontiguousarray(g["edge_index"].T)},
        {"edges.npy": np.asfortranarray(g["edge_index"].astype(">i4"))},
        {"edges.feather": feather(source=src, target=dst)},
        {"features.feather": feather(x=list(x))},
        {**spark, "edges.parquet/_SUCCESS": b"", "edges.parquet/.part-00000.crc": b""},
        parts,
        {"edges/a.csv": table, "edges/b.csv": b"", "edges/c.csv": "source,target\n"},
        {f"features/{i}.csv": lines(*x[i // 2 * 10 :][: 10 - i % 2 * 10].T, header="a,b,c") for i in range(8)},
        {"features.parquet": parquet(x=pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3))},
        {"edges.parquet": parquet(source=pa.array(src.astype(str)).dictionary_encode(), target=dst)},
        # Tables of nodes, masks and names
        {
            "without": f"features labels {no_splits}",
            "nodes.csv": lines(ids, *x.T, y, split_of, header="id,a,b,c,label,split"),
        },
        {"labels.csv": lines(y[mixed], mixed, header="label,node_id")},
        {"labels.csv": lines(np.where(y >= 0, y.astype(str), '""'), header="label")},
        {"without": no_splits, "splits.csv": lines(mixed, split_of[mixed], header="node_id,split")},
        {f"{split}.npy": mask for split, mask in masks.items()},
        {"edges.csv": named, "features.csv": lines(names, *x.T, header="node_id,a,b,c"), **by_name},
        {
            "edges.csv": named.replace("n7", "NA"),
            "nodes.csv": lines(names, header="id").replace("n7", "NA"),
            **{name: text.replace("n7", "NA") for name, text in by_name.items()},
        },
        {
            "edges.csv": lines(src * 10.0, dst * 10),
            "nodes.csv": lines(ids * 10),
            **{f"{split}.npy": nodes * 10 for split, nodes in g["splits"].items()},
        },
        # Declared
        {
            "without": f"edges features labels {no_splits}",
            "cites.tsv": lines(names[dst], names[src], np.ones(90), sep="\t"),
            "more.csv": lines(*x.T[1:], masks["test"], header="emb_2,emb_3,out"),
            "papers.parquet": parquet(paper=names, v1=x[:, 0], topic=y, **masks, __index_level_0__=ids),
            "dataset.yaml": "files:\n"
            "  cites.tsv: {header: none, 1: target, 2: source, 3: weight}\n"
            "  papers.parquet: {paper: name, v1: feature, topic: label, train: train, valid: valid,\n"
            "    test: test, '*': left out}\n"
            "  more.csv: {'emb_*': feature, out: left out}\n",
        },
        {
            "without": "edges",
            "a b/1.el": lines(src[:40], dst[:40], sep=" "),
            "a b/2.el": lines(src[40:], dst[40:], sep=" "),
            "dataset.yaml": "files:\n  'a b/*.el': {header: none, 1: source, 2: target}\n"
            "  features.npy: features\n  labels.npy: labels\n"
            "  train.npy: train\n  valid.npy: valid\n  test.npy: test\n",
        },
    ]  # fmt: skip


@pytest.mark.parametrize("files", right_files(small_graph()))
def test_files_of_any_kind_give_the_same_arrays(
    files: Arrays, small: Arrays, tmp_path: Path
) -> None:
    source = open_source(write_small(tmp_path / "own", small, files))
    same(read_all(source), small)
    assert source.num_classes == 3


@pytest.mark.parametrize("kind", ["text", "numbers"])
def test_the_store_is_that_of_the_arrays(kind: str, small: Arrays, tmp_path: Path) -> None:
    (src, dst), ids = small["edge_index"], np.arange(SMALL)
    names = ids[::-1] * 10**9 - 5
    if kind == "text":
        names = np.array([f"nö{'x' * (i % 7)}-{i}" for i in ids])
    files: Arrays = {
        f"{split}.csv": lines(names[nodes], header="id") for split, nodes in small["splits"].items()
    }
    files["edges.parquet"] = parquet(source=names[src], target=names[dst])
    files["nodes.npy"] = names
    files["labels.csv.gz"] = lines(names[::-1], small["y"][::-1], header="id,label")
    folder = write_small(tmp_path / "own", small, files)
    store = convert(folder, tmp_path / "store", progress=False)
    expected = convert(write_raw(tmp_path / "raw", **small), tmp_path / "expected", progress=False)
    assert verify_store(store.path) == []
    # CRC-32 of the data among them
    assert {name: store.files[name] for name in expected.files} == expected.files
    np.testing.assert_array_equal(np.asarray(store.node_name), names)


def test_coras_content_and_cites_lose_no_line(small: Arrays, tmp_path: Path) -> None:
    ids = np.array([f"{100157 + 7 * i}" if i % 3 else f"skiabc{i}" for i in range(SMALL)])
    src, dst = ids[small["edge_index"]]
    words = (small["x"] > 0.8).astype(int)
    classes = [f"class {label}" for label in small["y"]]
    files = {f"{split}.csv": lines(ids[nodes]) for split, nodes in small["splits"].items()}
    files["cora.content"] = lines(ids, *words.T, classes, sep="\t")
    # two names of text: not a header
    files["cora.cites"] = f"skiabc0\tskiabc3\n{lines(dst, src, sep=chr(9))}nobody97\tskiabc0\n"
    files["without"] = "edges features labels"
    folder = write_small(tmp_path / "own", small, files)
    with pytest.raises(InputError, match="draft"):
        open_source(folder)
    draft = folder / "dataset.yaml"
    assert "    skiabc3: TODO" in draft.read_text()
    text = "drop_unknown: true\nfiles:\n  cora.cites: {header: none, 1: target, 2: source}\n"
    text += "  cora.content: {header: none, 1: name, 5: label, '*': feature}\n"
    text += "".join(f"  {name}.csv: {{header: none, 1: {name}}}\n" for name in SPLITS)
    draft.write_text(text)
    store = convert(folder, tmp_path / "store", progress=False)
    assert (store.num_edges, store.summary["dropped_edges"], store.num_classes) == (91, 1, 4)
    source, target = store.read_edge_index()
    assert 3 in source[target == 0]  # citing to cited


def test_snaps_edge_list_under_its_own_name(small: Arrays, tmp_path: Path) -> None:
    names = np.arange(SMALL) * 1001 + 99
    content = (
        f"# Directed\n# FromNodeId\tToNodeId\n{lines(*names[small['edge_index']], sep=chr(9))}"
    )
    files = {"without": "edges", "com-mine.ungraph.txt.gz": content, "nodes.npy": names}
    folder = write_small(tmp_path / "own", small, files)
    with pytest.raises(InputError, match="draft"):
        open_source(folder)
    text = (folder / "dataset.yaml").read_text()
    for name, role in (("1", "source"), ("2", "target")):
        assert f"    {name}: TODO" in text
        text = text.replace(f"    {name}: TODO", f"    {name}: {role}")
    (folder / "dataset.yaml").write_text(text)
    same(read_all(open_source(folder)), small)


def test_numbers_of_any_type_become_float32_and_float16_stays(
    small: Arrays, tmp_path: Path
) -> None:
    for number, dtype in enumerate((np.int8, np.uint16, np.int64, bool, np.float16, ">f8")):
        values = (np.abs(small["x"]) * 20).astype(dtype)
        source = open_source(write_small(tmp_path / str(number), small, {"features.npy": values}))
        assert source.feature_dtype == (np.float16 if dtype is np.float16 else np.float32)
        expected = values.astype(np.float32)
        np.testing.assert_array_equal(np.concatenate([*source.x_chunks()]), expected)
    flags = small["x"][:, 0] > 0
    content = lines(flags, small["x"][:, 1], header="is_new,b")
    source = open_source(write_small(tmp_path / "flags", small, {"features.csv": content}))
    np.testing.assert_array_equal(next(source.x_chunks())[:, 0], flags)


def test_columns_keep_the_order_of_the_file(small: Arrays, tmp_path: Path) -> None:
    order = ["w10", "w9", "w2", "w1"]
    frame = pd.DataFrame(np.arange(4 * SMALL).reshape(SMALL, 4), columns=order)
    folder = write_small(tmp_path / "own", small, {"words.parquet": b""})
    frame.to_parquet(folder / "words.parquet")
    files = ["edges", "features", "labels", *SPLITS]
    roles = "".join(f"  {name}.npy: {name}\n" for name in files)
    (folder / "dataset.yaml").write_text(f"files:\n  words.parquet: {{'w*': feature}}\n{roles}")
    source = open_source(folder)
    np.testing.assert_array_equal(next(source.x_chunks())[:, :4], frame.to_numpy())
    np.testing.assert_array_equal(next(source.x_chunks())[:, 4:], small["x"])
    assert source.feature_names[:4] == order


def test_splits_may_be_rows_if_no_id_is_a_name(
    small: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = small["edge_index"]
    names = np.arange(SMALL) + 100
    files = {"edges.csv": lines(names[src], names[dst], header="src,dst"), "nodes.npy": names}
    folder = write_small(
        tmp_path / "own",
        small,
        {**files, "README.md": "# Our graph", "dataset.yaml": "undirected: false"},
    )
    np.save(folder / "year.npy", names)
    same(read_all(open_source(folder)), small)
    notes = capsys.readouterr().err.splitlines()
    assert f"{folder / 'train.npy'}: read as row" in notes[1]
    assert notes[0].endswith("no role: year.npy")
    # a name among them, no row
    for wrong, problem in (([1, 2, 103], "row 0: "), ([1, 2, SMALL], "row 2: .*rows of nodes.npy")):
        np.save(folder / "train.npy", np.array(wrong))
        with pytest.raises(InputError, match=f"train.npy, .*{problem}"):
            open_source(folder)


@pytest.mark.parametrize("role", ["labels", "features", "train", ""])
def test_rows_beside_reordered_ids_are_refused(role: str, small: Arrays, tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(SMALL)
    x, y = small["x"][order].T, small["y"][order]
    files: Arrays = {"without": "features labels"}
    files["nodes.csv"] = lines(order, *x, y, header="node_id,a,b,c,label")
    if role == "labels":
        files = {"without": "features", "nodes.csv": lines(order, *x, header="node_id,a,b,c")}
    elif role == "features":
        files = {"without": "labels", "nodes.csv": lines(order, y, header="node_id,label")}
    elif role == "train":
        files |= {f"{s}.npy": np.isin(np.arange(SMALL), ids) for s, ids in small["splits"].items()}
    folder = write_small(tmp_path / "own", small, files)
    if role:
        with pytest.raises(InputError, match=rf"(?s)nodes.csv.*{role}.npy has rows.*row i"):
            open_source(folder)
        return
    store = convert(folder, tmp_path / "store", progress=False)  # ids of a split are names
    names = np.asarray(store.node_name)
    for split, ids in small["splits"].items():
        assert sorted(names[store.splits[split]]) == ids.tolist()
    np.testing.assert_array_equal(store.y, small["y"][names])


def wrong_files(g: Arrays) -> list[tuple[dict[str, Any], str]]:
    """Files, and the one sentence that refuses them."""
    (src, dst), x, y, ids = g["edge_index"], g["x"], g["y"], np.arange(SMALL)
    edges, no_splits = "source,target\n1,2\n", "train valid test"
    beyond = {f"{split}.npy": g["splits"][split] + 5 for split in ("valid", "test")}
    lists = pa.array([[1.0]] + [[1.0, 2.0]] * 39, pa.list_(pa.float64()))
    roles = "\n".join(f"  {name}.npy: {name}" for name in ("edges", "labels", *g["splits"]))
    roles = f"files:\n  features.parquet: {{x: feature}}\n{roles}\n"
    texts = [["1", "2"]] * 7 + [["1", "oops"]] * 33
    part = np.isin(ids, g["splits"]["train"])
    halves = {"labels.npy": ids % 3, "valid.npy": ids[~part], "test.npy": ids[:0]}
    halves["features.csv"] = lines(part * 1, *x.T, header="part,a,b,c")
    typo = ["1"] * 38 + ["l", "0"]
    return [
        # Numbers
        ({"features.parquet": parquet(x=lists)}, r"row 1: expected a list of 1 numbers, found"),
        ({"features.parquet": parquet(x=[[1.0, None]] * SMALL)}, "found nan"),
        ({"features.parquet": parquet(x=texts)}, "names do not decide .*features.parquet: 'x'"),
        ({"features.parquet": parquet(x=texts), "dataset.yaml": roles}, "'x', row 7: .*'oops'"),
        ({"features.csv": lines(["oops", *x[1:, 0]], *x.T[1:], header="a,b,c")}, "'a', row 0: .* number, found 'oops'"),
        ({"features.csv": lines(["-1,341"] * 40, ids, header="a;b", sep=";")}, "row 0: .*'-1,341'"),
        ({"features.csv": lines(['"1.5, 2"'] * 40, x[:, 0], header="a,b")}, "row 0: .*'1.5, 2'"),
        ({"features.csv": lines(["", *x[1:, 0]], *x.T[1:], header="a,b,c")}, "found nan in row 0"),
        ({"features.npy": np.where(x == x[7, 2], np.nan, x)}, "found nan in row 7"),
        ({"features.csv": lines(*x.T, header="a,b,a")}, "each column's name once, found 'a' again"),
        ({"features.csv": lines(ids[::-1], *x.T, header="id,a,b,c"), "nodes.npy": ids}, "row 0: .*order.*'39'"),
        (halves, "features.csv, column 'part': .*`left out`"),
        # Edges
        ({"edges.csv": edges + "-1,2\n"}, r"edges.csv, column 'source', row 1: .*found '-1'"),
        ({"edges.csv": edges + "1,9223372036854775808\n"}, "column 'target', row 1: .*'9223372036854775808'"),
        ({"edges.csv": edges + "1.5,2\n"}, "column 'source', .*1.5"),
        ({"edges.csv": edges + '3,""\n'}, "column 'target', row 1: .*found ''"),
        ({"edges.csv": "101,102\n103,\n", "nodes.npy": ids + 100}, "column '2', row 1: .*found ''"),
        ({"edges.parquet": parquet(source=[1.0, np.nan], target=[1, 2])}, "row 1: .*found nan"),
        ({"edges.parquet": parquet(source=[True, False], target=[1, 2])}, r"found True \(bool\)"),
        ({"edges.npy": np.full((2, 90), 2049, np.float16), "nodes.npy": ids + 2040}, r"row 0: .*2048.0 \(halffloat\)"),
        ({"labels.npy": np.full(SMALL, 2049, np.float16)}, "row 0: .* 2047 in float16"),
        ({"edges.csv": "source,target\nn1,n1\n", "nodes.csv": "node_id\nn1\n"}, "nodes.csv: expected 40 rows.*found 1"),
        # Labels
        ({"labels.csv": "label\n" + "1\n" * 38 + "3.5\n1\n"}, "row 38: expected whole labels .*3.5"),
        ({"labels.csv": "label\n\n" + "1\n" * 39}, r"40 rows, .*found 39; blank lines"),
        ({"labels.csv": lines(typo, header="label")}, "row 38: expected a number, .*found 'l'"),
        ({"labels.csv": "label\ncs.LG\n3\n" + "cs.AI\n" * 38}, "row 1: expected text, .*found '3'"),
        ({"labels.npy": np.eye(3)[y]}, "expected one label a node, found 3 columns; .*values"),
        ({"labels.csv": "id,label\n1,1\n1,2\n"}, "column 'id', row 1: expected each node once, found '1'"),
        ({"nodes.csv": lines(["a", *['""'] * 39], header="node_id")}, "row 1: .*found ''"),
        ({"nodes.csv": lines([f"n{'x' * 61 * i}" for i in ids], header="id")}, "row 17: .*1024 .* 23 names are longer"),
        # Splits
        ({"train.csv.gz": "0\n" * 50}, "train.csv.gz: expected at most 40 rows, .* found 50"),
        ({"train.npy": ids[:30] % 2 == 0}, "train.npy: expected 40 rows, .*found 30"),
        ({"train.npy": ids % 2}, "train.npy: expected each node once, .*a mask has true and false"),
        ({"nodes.npy": ids + 5, **beyond}, r"train.npy, .* row \d+: expected one of the .* nodes"),
        ({"without": no_splits, "splits.csv": "node_id,split\n1,train\n2,holdout\n"}, "row 1: .*found 'holdout'"),
        # Files
        ({"edges.csv": edges + "3\n"}, "edges.csv: .*Row #3: Expected 2 columns, got 1: 3"),
        ({"edges.csv.gz": gzip.compress(lines(src, dst).encode())[:-9]}, "edges.csv.gz: .*damage .*Truncated"),
        ({"edges.csv": edges.encode() + b"\xe9,2\n"}, "edges.csv, column 'source', row 1: expected text in UTF-8"),
        ({"edges.parquet": b"PAR1 and nothing else"}, "edges.parquet: expected a table, found damage"),
        ({"dataset.yaml": "drop_unknown: true\n"}, "drop_unknown: expected a column of names"),
        ({"dataset.yaml": "standardize: yes"}, "line 1: standardize: expected true, false or a list.*'yes'"),
        ({"dataset.yaml": "standardize: [label]", "features.csv": lines(*x.T, header="a,b,c")}, "'b', 'c'.*'label'"),
        ({"dataset.yaml": "standardize: true", "train.npy": ids[:0]}, "standardize: expected nodes in the train split"),
        ({"dataset.yaml": "standardize: true", "features.npy": np.where(x == x[7, 2], np.nan, x)}, "nan in row 7"),
    ]  # fmt: skip


@pytest.mark.parametrize(("files", "sentence"), wrong_files(small_graph()))
def test_a_wrong_file_is_refused_in_a_sentence(
    files: Arrays, sentence: str, small: Arrays, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        convert(write_small(tmp_path / "own", small, files), tmp_path / "store", progress=False)
    assert "\n" not in str(error.value)
    assert left_in(tmp_path) == ["own"]


def test_features_are_standardized_on_the_train_nodes(
    small: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_SLICE_VALUES", 12)  # slices of four rows
    x = small["x"].astype(float) * [1, 1e4, 0] + [0, 1e6, 0.1]  # the last column is constant
    table, *parts = (lines(*rows.T, header="a,b1,c") for rows in (x, x[:20], x[20:]))
    mean, deviation = np.zeros(3), np.ones(3)
    for files, option, column in (  # each standardizes one column more
        ({"features/0.csv": parts[0], "features/1.csv": parts[1]}, "['b*']", 1),
        ({"features.csv": table}, "[a, b1]", 0),
        ({"features.parquet": parquet(lists=x.tolist())}, "[lists]", 2),
        ({"features.npy": x}, "true", 2),
    ):
        train = x[small["splits"]["train"], column]
        mean[column], deviation[column] = train.mean(), train.std() if column < 2 else 1
        description = {"dataset.yaml": f"standardize: {option}\n"}
        folder = write_small(tmp_path / option, small, files | description)
        store = convert(folder, tmp_path / f"{option}.store", progress=False)
        scale = store.origin["standardized"]
        np.testing.assert_allclose([*scale.values()], [mean, deviation], rtol=1e-12)
        np.testing.assert_allclose(store.x, (x - mean) / deviation, rtol=1e-6, atol=1e-6)
    assert convert(store, tmp_path / "8", feature_dtype="int8").origin["standardized"] == scale
    with pytest.raises(InputError, match="is standardized; convert the original data"):
        convert(store, tmp_path / "again", standardize=True)


def test_standardized_columns_train_where_raw_scales_fail_in_little_memory(tmp_path: Path) -> None:
    y = np.arange(400_000) % 4
    x = np.random.default_rng(0).normal(0, 0.3, (len(y), 32)) + np.eye(4, 32)[y]
    x *= [*[1] * 31, 1e6]
    splits = dict(zip(SPLITS, np.split(np.arange(3000), [1000, 2000]), strict=True))
    graph: Any = {"edge_index": np.arange(1000).repeat(2).reshape(2, 1000), "splits": splits}
    for which in (False, True):
        tracemalloc.start()
        store = Store.from_arrays(tmp_path / f"{which}", x=x, y=y, standardize=which, **graph)
        peak = tracemalloc.get_traced_memory()[1]  # the first one has imports and kernels, too
        tracemalloc.stop()
        config = TrainConfig.create({"dataset": str(store.path), "epochs": 3, "device": "cpu"})
        assert (train(config).history[-1]["valid"] > 0.7) == which
    assert peak < x.nbytes / 2


def test_classes_are_names_as_written(small: Arrays, tmp_path: Path) -> None:
    areas = np.array(["cs.LG", "None", "CS.LG"])
    called = [areas[label] if label >= 0 else "" for label in small["y"]]
    rows = np.random.default_rng(0).permutation(SMALL)
    by_kind = {
        "labels.csv": lines(rows, [called[row] for row in rows], header="node_id,label"),
        "labels.parquet": parquet(label=pa.array([name or None for name in called]).dictionary_encode()),
        "labels.npy": np.array(called),
    }  # fmt: skip
    for name, content in by_kind.items():
        folder = write_small(tmp_path / name, small, {name: content})
        store = convert(folder, tmp_path / f"store of {name}", progress=False)
        assert verify_store(store.path) == []
        names = store.class_names
        assert names == sorted(areas)
        assert [names[label] if label >= 0 else "" for label in store.y] == called


def test_edges_of_other_names_are_left_out_and_counted(small: Arrays, tmp_path: Path) -> None:
    src, dst = small["edge_index"] + 100
    files = {"edges.csv": lines(src, dst) + "7,101\n-5,7\n", "nodes.npy": np.arange(SMALL) + 100}
    files["test.csv"] = "node_id\n"  # an empty split
    folder = write_small(tmp_path / "own", small, files)
    with pytest.raises(InputError, match="found '7'; drop_unknown"):
        convert(folder, tmp_path / "new", progress=False)
    (folder / "dataset.yaml").write_text("drop_unknown: true\n")
    store = convert(folder, tmp_path / "new", progress=False)
    assert (store.num_edges, store.summary["dropped_edges"], store.num_seeds["test"]) == (90, 2, 0)


def test_unlabelled_nodes_leave_the_splits_and_not_the_graph(small: Arrays, tmp_path: Path) -> None:
    bare = np.flatnonzero(small["y"] < 0)
    tests = np.r_[small["splits"]["test"], bare]
    folder = write_small(tmp_path / "own", small, {"test.npy": tests})
    with pytest.raises(InputError, match=r"without a label .*; drop_unlabelled"):
        convert(folder, tmp_path / "new", progress=False)
    (folder / "dataset.yaml").write_text("drop_unlabelled: true\nfeature_dtype: float16\n")
    store = convert(folder, tmp_path / "new", progress=False)
    assert (store.num_nodes, store.num_seeds["test"]) == (SMALL, 5)
    assert (store.summary["dropped_seeds"], store.feature_dtype) == (10, np.float16)
