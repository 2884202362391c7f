"""A user's own files give the store of the same arrays, or one sentence that names the file and the
row."""

import bz2
import gzip
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import left_in

from ogbnlib import InputError, convert, open_dataset, write_raw
from ogbnlib.graph.writer import verify_store
from ogbnlib.sources.files.own_files import open_tables
from ogbnlib.sources.resolve import DataRequest, resolve

Arrays = dict[str, Any]
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
        "splits": {
            "train": np.sort(ids[:20]),
            "valid": np.sort(ids[20:25]),
            "test": np.sort(ids[25:30]),
        },
    }


def lines(*columns: Any, header: str = "", sep: str = ",", end: str = "\n") -> str:
    rows = [sep.join(map(str, row)) for row in zip(*columns, strict=True)]
    return "".join(f"{row}{end}" for row in ([header] if header else []) + rows)


def parquet(**columns: Any) -> pa.Table:
    return pa.table(columns)


def write_small(folder: Path, small: Arrays, files: dict[str, Any]) -> Path:
    """The folder of `small` in .npy files, but for `files`: by name, text, bytes, an array or an
    arrow table."""
    own = {
        "edges": small["edge_index"],
        "features": small["x"],
        "labels": small["y"],
        **small["splits"],
    }
    own |= {"nodes": None, "splits": None}
    folder.mkdir()
    for role, values in own.items():
        instead = files.get("without", "").split()
        if (
            values is not None
            and role not in instead
            and not any(re.split("[./]", name)[0] == role for name in files)
        ):
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
        "edge_index": np.concatenate(
            [np.stack(pair) for pair in source.edge_chunks(2**20)], axis=1
        ),
        "x": np.concatenate(list(source.x_chunks())),
        "y": np.concatenate(list(source.label_chunks())),
        "splits": source.read_splits(),
    }


def same(found: Arrays, expected: Arrays) -> None:
    for name in ("edge_index", "x", "y"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    for split, ids in expected["splits"].items():
        np.testing.assert_array_equal(np.sort(found["splits"][split]), ids, err_msg=split)


def right_files(g: Arrays) -> list[dict[str, Any]]:
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
    by_name = {
        f"{split}.csv": lines([names[i] for i in nodes], header="node")
        for split, nodes in g["splits"].items()
    }
    shuffled = np.random.default_rng(0).permutation(SMALL)
    no_splits = "train valid test"
    return [
        {"edges.csv": lines(dst, src, header=" Target ,SOURCE", end="\r\n")},
        {"edges.csv": "\ufeff" + lines(src * 1.0, [f'" {i} "' for i in dst])},
        {"edges.csv": "\n" + table.replace("\n", "\n\n").rstrip("\n")},
        {"edges.csv.gz": gzip.compress(table[:99].encode()) + gzip.compress(table[99:].encode())},
        {"edges.csv": lines(np.ones(90), src, dst), "options": {"edge_columns": ["2", "3"]}},
        # Edge lists: comments, separators, compression
        {"edges.csv": lines(src, dst, sep="\t")},
        {"edges.csv": lines(src, dst, sep=" ", end="  \r\n")},
        {"edges.csv": lines(src, dst, header="src dst", sep="  ")},
        {"edges.tsv": lines(src, dst, header="src\tdst", sep="\t")},
        {"edges.txt": lines(src, dst, header="source;target", sep=";")},
        {"edges.edgelist": "\ufeff% sym\n%90\n" + lines(src, dst, sep=" \t ")},
        {"edges.txt.gz": "# SNAP\n# From\tTo\n" + lines(src, dst, sep="\t") + "# end"},
        {
            "edges.csv.gz": f"# a\n\n# b\n{table[:99]}{table[99:].replace(chr(10), f'{chr(10)}#c{chr(10)}')}"
        },
        {"edges.txt.bz2": bz2.compress(f"#\n{lines(src, dst)}".encode())},
        {"edges.csv.zst": packed(table, "zstd"), "labels.txt": lines(y)},
        # Arrays in other shapes and archives
        {"edges.npy": np.ascontiguousarray(g["edge_index"].T)},
        {"edges.npy": np.asfortranarray(g["edge_index"])},
        {"edges.npz": npz(edge_index=np.asfortranarray(g["edge_index"])), "labels.npz": npz(y=y)},
        {"edges.npz": npz(arr_0=g["edge_index"].T.astype(">i4")), "features.npz": npz(x=x)},
        {"edges.npz": npz(w=np.ones(90), dst=dst, src=src)},
        # Arrow
        {"edges.feather": arrow(src=src, dst=dst), "labels.arrow": arrow(stream=True, y=y)},
        {"features.feather": arrow(x=list(x), compression="lz4")},
        {
            "nodes.feather": arrow(node_id=np.array(names)),
            "edges.feather": arrow(src=np.array(names)[src], dst=np.array(names)[dst]),
            **{
                f"{split}.arrow": arrow(stream=True, node_id=np.array(names)[nodes])
                for split, nodes in g["splits"].items()
            },
        },
        {"without": no_splits, "splits.feather": arrow(split=split_of.astype(str))},
        # Parts, in order of names
        {
            "edges.parquet/part-00000-a.snappy.parquet": parquet(src=src[:50], dst=dst[:50]),
            "edges.parquet/part-00001-a.snappy.parquet": parquet(src=src[:0], dst=dst[:0]),
            "edges.parquet/part-00002-a.snappy.parquet": parquet(src=src[50:], dst=dst[50:]),
            **{f"edges.parquet/{name}": b"" for name in ("_SUCCESS", ".part-00000-a.crc")},
        },
        {
            f"edges/part.{i}.csv.gz": lines(
                src[i * 8 : i * 8 + 8], dst[i * 8 : i * 8 + 8], header=head
            )
            for i, head in enumerate(["src,dst"] * 12)
        },
        {
            f"edges/part-{i:05d}": lines(src[i * 30 : i * 30 + 30], dst[i * 30 : i * 30 + 30])
            for i in range(3)
        },
        {
            "edges.csv/a.csv": lines(src[:40], dst[:40], header="src,dst"),
            "edges.csv/b.csv": lines(src[40:], dst[40:]),
            "edges.csv/c.csv": b"",
        },
        {"features/part-0.npy": x[:7], "features/part-1.npy": x[7:]},
        {"edges/part-0.npy": g["edge_index"][:, :50].T, "edges/part-1.npy": g["edge_index"].T[50:]},
        {f"features/{i}.csv": lines(*x[i * 10 : i * 10 + 10].T, header="a,b,c") for i in range(4)},
        {
            "some/part-1.csv": lines(src[:40], dst[:40]),
            "some/part-2.csv": lines(src[40:], dst[40:]),
            "options": {"edges": "{folder}/some/part-*.csv"},
        },
        {
            "without": "edges features labels train valid",
            **{
                "edge_index.npy": g["edge_index"].astype(str),
                "x.npy": x,
                "y.npy": y.astype(np.float32),
            },
            **{
                "train_mask.npy": np.isin(ids, g["splits"]["train"]),
                "val.npy": g["splits"]["valid"],
            },
        },
        {
            "edges.parquet": parquet(
                source=pa.array(src.astype(str)).dictionary_encode(),
                target=pa.array(dst).cast(pa.decimal128(20, 0)),
                __index_level_0__=np.arange(90),
            )
        },
        {"features.parquet": parquet(x=pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3))},
        {"features.csv": lines(*x.T, header="0,1,2")},
        # Lists in a field of text
        {"features.csv": lines([f'"{list(map(float, row))}"' for row in x], header="x")},
        {"features.csv": lines([f'"{" ".join(map(str, row))}"' for row in x], ids, header="x,id")},
        {
            "features.tsv": lines(
                ids, ["|".join(map(str, row)) for row in x], header="id\tx", sep="\t"
            )
        },
        {"features.csv": lines([f'"{row}\n"' for row in x], header="x")},  # as numpy prints rows
        # One table with everything
        {
            "without": f"features labels {no_splits}",
            "nodes.csv": lines(ids, *x.T, y, split_of, header="id,a,b,c,label,split"),
        },
        {
            "without": f"features labels {no_splits}",
            "nodes.parquet": parquet(
                **{"name": names, "x": list(x), "topic": y},
                **{f"{split}_mask": np.isin(ids, nodes) for split, nodes in g["splits"].items()},
            ),
            "edges.tsv": named.replace(",", "\t"),
            "options": {"id_column": "name", "label_columns": ["topic"]},
        },
        {
            "features.csv": lines(*x.T, ids, header="a,b,c,paper_id"),
            "options": {"id_column": "paper_id"},
        },
        {"labels.csv": lines(y[shuffled], shuffled, header="label,node_id")},
        {
            "labels.csv": lines(y[shuffled], shuffled, header="t,paper"),
            "options": {"label_columns": ["paper", "t"]},
        },
        {
            "labels.csv": lines(ids // 2, y, header="rank,topic"),
            "options": {"label_columns": ["topic"]},
        },
        {"labels.csv": lines(np.where(some, y.astype(str), '""'), header="y")},
        {"labels.parquet": parquet(topic=pa.array([int(v) if v >= 0 else None for v in y]))},
        {
            "without": no_splits,
            "splits.csv": lines(shuffled, split_of[shuffled], header="node_id,split"),
        },
        {
            "train.npy": np.isin(ids, g["splits"]["train"]).astype(np.int64),
            "valid.csv": lines(np.isin(ids, g["splits"]["valid"]).astype(int), header="mask"),
            "test.csv": lines(np.isin(ids, g["splits"]["test"]), header="test_mask"),
        },
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
    ]


def packed(text: str, codec: str) -> bytes:
    return pa.compress(text.encode(), codec, asbytes=True)


def npz(**members: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **members)
    return out.getvalue()


def arrow(stream: bool = False, compression: str | None = None, **columns: Any) -> bytes:
    table, out = pa.table(columns), io.BytesIO()
    write = pa.ipc.new_stream if stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with write(out, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=30)
    return out.getvalue()


def no_arrays() -> Arrays:
    zeros = np.zeros(SMALL, int)
    splits = dict.fromkeys(("train", "valid", "test"), zeros[:1])
    return {
        "edge_index": np.zeros((2, 90), int),
        "x": np.zeros((SMALL, 3)),
        "y": zeros,
        "splits": splits,
    }


@pytest.mark.parametrize("number", range(len(right_files(no_arrays()))))
def test_files_of_any_kind_give_the_same_arrays(number: int, small: Arrays, tmp_path: Path) -> None:
    files = right_files(small)[number]
    options = files.pop("options", {})
    if "edges" in options:
        options["edges"] = options["edges"].format(folder=tmp_path / "own")
    source = open_tables(write_small(tmp_path / "own", small, files), **options)
    same(read_all(source), small)
    assert source.num_classes == 3


@pytest.mark.parametrize("kind", ["npy", "csv", "text names", "number names"])
def test_the_store_is_that_of_the_arrays(kind: str, small: Arrays, tmp_path: Path) -> None:
    (src, dst), ids = small["edge_index"], np.arange(SMALL)
    names = (
        np.array([f"nö{'x' * (i % 7)}-{i}" for i in ids])
        if kind == "text names"
        else ids[::-1] * 10**9 - 5
    )
    files: Arrays = {}
    if kind == "csv":
        files = {"edges.csv.gz": lines(src, dst), "features.parquet": parquet(x=list(small["x"]))}
    elif kind != "npy":
        files = {
            f"{split}.csv": lines(names[nodes], header="node")
            for split, nodes in small["splits"].items()
        }
        files |= {
            "edges.parquet": parquet(source=names[src], target=names[dst]),
            "nodes.npy": names,
        }
        files["labels.csv.gz"] = lines(names[::-1], small["y"][::-1], header="id,label")
    store = convert(
        open_tables(write_small(tmp_path / "own", small, files)), tmp_path / "store", progress=False
    )
    expected = convert(write_raw(tmp_path / "raw", **small), tmp_path / "expected", progress=False)
    assert verify_store(store.path) == []
    # CRC-32 of the data among them
    assert {name: store.files[name] for name in expected.files} == expected.files
    if kind.endswith("names"):
        assert store.node_name is not None
        np.testing.assert_array_equal(store.node_name, names)


def test_features_of_any_number_type_become_float32_and_float16_stays(
    small: Arrays, tmp_path: Path
) -> None:
    for number, dtype in enumerate((np.int8, np.uint16, np.int64, bool, np.float16, ">f8")):
        values = (np.abs(small["x"]) * 20).astype(dtype)
        source = open_tables(write_small(tmp_path / str(number), small, {"features.npy": values}))
        assert source.feature_dtype == (np.float16 if dtype is np.float16 else np.float32)
        np.testing.assert_array_equal(
            np.concatenate([*source.x_chunks()]), values.astype(np.float32)
        )


def test_true_and_false_are_one_and_zero_among_features(small: Arrays, tmp_path: Path) -> None:
    flags = small["x"] > 0
    table = np.stack([flags[:, 0], small["x"][:, 1]], axis=1).astype(np.float32)
    files: list[Arrays] = [
        {"features.csv": lines(flags[:, 0], small["x"][:, 1], header="is_new,b")},
        {"features.csv": lines(np.char.lower(flags[:, 0].astype(str)), small["x"][:, 1])},
        {"features.parquet": parquet(is_new=flags[:, 0], b=small["x"][:, 1])},
    ]
    for number, content in enumerate(files):
        source = open_tables(write_small(tmp_path / str(number), small, content))
        np.testing.assert_array_equal(np.concatenate([*source.x_chunks()]), table)


def test_the_table_of_nodes_serves_only_roles_without_a_file(
    small: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = lines(np.arange(SMALL), small["x"][:, 0] * 9, small["y"], header="id,z,label")
    files = {"without": "labels", "nodes.csv": table}
    same(read_all(open_tables(write_small(tmp_path / "own", small, files))), small)
    assert "nodes.csv: id 'id'; label 'label'; left out 'z'" in capsys.readouterr().err
    files = {"without": "features labels", "nodes.csv": lines(np.arange(SMALL), header="id")}
    with pytest.raises(InputError, match=r"nodes.csv: .*found columns 'id'; .*label"):
        open_tables(write_small(tmp_path / "ids", small, files))


def test_a_folder_is_a_data_set_that_is_converted_once(
    small: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edges = lines(np.ones(90), *small["edge_index"], header="w,src,dst")
    folder = write_small(tmp_path / "own", small, {"edges.csv": edges})
    size = resolve(DataRequest(folder)).size
    assert (size.num_nodes, size.num_edges, size.num_classes) == (SMALL, 90, 3)
    assert "edges.csv: source 'src'; target 'dst'; left out 'w'" in capsys.readouterr().err
    texts: list[str] = []
    store = open_dataset(str(folder), say=texts.append)
    assert store.path == folder.with_name("own.store")
    assert open_dataset(str(folder), say=texts.append) == store
    assert len(texts) == 2
    np.save(folder / "labels.npy", small["y"][::-1].copy())
    with pytest.raises(InputError, match="it changed since"):
        open_dataset(str(folder), say=texts.append)


def test_a_folder_of_parts_is_converted_once_and_a_change_of_a_part_is_refused(
    small: Arrays, tmp_path: Path
) -> None:
    src, dst = small["edge_index"]
    parts = {f"edges/part-{i}.csv": lines(src[i::2], dst[i::2]) for i in range(2)}
    folder = write_small(tmp_path / "own", small, parts)
    store = open_dataset(str(folder), say=lambda _: None)
    assert {"edges/part-0.csv", "edges/part-1.csv"} <= {*store.origin["files"]}
    assert open_dataset(str(folder), say=lambda _: None) == store
    (folder / "edges" / "part-2.csv").write_text("1,2\n")
    with pytest.raises(InputError, match="it changed since"):
        open_dataset(str(folder), say=lambda _: None)


def test_splits_may_be_rows_of_named_nodes_if_no_id_is_a_name(
    small: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = small["edge_index"]
    for kind, names in (
        ("text", np.array([f"n{i}" for i in range(SMALL)])),
        ("gaps", np.arange(SMALL) + 100),
    ):
        edges = {"edges.csv": lines(names[src], names[dst], header="src,dst"), "nodes.npy": names}
        same(read_all(open_tables(write_small(tmp_path / kind, small, edges))), small)
        said = f"{tmp_path / kind / 'train.npy'}: read as row numbers: none of its ids is a name"
        assert said in capsys.readouterr().err
    np.save(tmp_path / "gaps" / "train.npy", np.array([1, 2, 103]))  # a name among them
    with pytest.raises(InputError, match=r"train.npy, .*row 0: expected one of the 40 nodes"):
        open_tables(tmp_path / "gaps")
    np.save(tmp_path / "gaps" / "train.npy", np.array([1, 2, SMALL]))  # no row
    with pytest.raises(InputError, match=r"train.npy, .*row 0: expected one of the 40 nodes"):
        open_tables(tmp_path / "gaps")


def wrong_files(g: Arrays) -> list[tuple[dict[str, Any], str]]:
    """Files, and the one sentence that refuses them."""
    (src, dst), x, y, ids = g["edge_index"], g["x"], g["y"], np.arange(SMALL)
    edges, no_splits = "source,target\n1,2\n", "train valid test"
    beyond = {f"{split}.npy": g["splits"][split] + 5 for split in ("valid", "test")}

    def of_lists(first: Any) -> dict[str, Any]:
        return {
            "features.parquet": parquet(
                x=pa.array([first] + [[1.0, 2.0]] * 39, pa.list_(pa.float64()))
            )
        }

    return [
        # Columns that are neither known nor named
        (
            {"labels.csv": lines(y, ids[::-1], header="label,paper_id")},
            r"a column node_id, .*--label-columns paper_id,label",
        ),
        (
            {"labels.csv": lines(np.where(y > 0, "a", "b"))},
            "found columns '[ab]'; .*--label-columns",
        ),
        (
            {"labels.csv": "label\n1\n", "options": {"label_columns": ["no"]}},
            "columns no, .*--label-columns",
        ),
        (
            {"features.csv": lines(ids, *x.T, header="paper_id,w0,w1,w2")},
            r"features.csv: .*not 'paper_id', .*--id-col",
        ),
        (
            {"features.csv": lines(ids[::-1], *x.T)},
            r"different whole numbers in column '1'.*--id-column",
        ),
        ({"features.csv": lines(*x.T, header="a,b,a")}, "each column's name once, found 'a' again"),
        (
            {"edges.csv": lines(src, dst, header="cited,citing")},
            r"columns source and target, .*--edge-columns",
        ),
        (
            {"edges.csv": "source,target\nn1,n1\n", "nodes.csv": "node_id\nn1\n"},
            "expected 40 names.*found 1",
        ),
        ({"train.csv": "n1\n"}, "one column node_id or mask.*--id-column"),
        # Values
        (of_lists([1.0]), r"row 1: expected a list of 1 numbers, found .1.0, 2.0"),
        ({"features.parquet": parquet(x=[[1.0, None]] * SMALL)}, "found NaN"),
        (
            {"features.csv": "x\n" + '"[1, 2]"\n' * 39 + '"[1]"\n'},
            r"column 'x', row 39: expected a list of 2 numbers, found '\[1\]'",
        ),
        (
            {"features.csv": "x\n" + '"1 2"\n' * 39 + '"1 two"\n'},
            "column 'x', row 39: expected a number, found 'two'",
        ),
        (
            {"features.csv": lines([*x[1:, 0], "oops"], *x.T[1:], header="a,b,c")},
            "column 'a', row 39: expected a number, found 'oops'",
        ),
        (
            {"features.csv": lines(["", *x[1:, 0]], *x.T[1:], header="a,b,c")},
            "found NaN or Inf, the first in row 0",
        ),
        ({"features.npy": np.where(x == x[7, 2], np.nan, x)}, "found NaN .* row 7"),
        (
            {"features.csv": lines(ids[::-1], *x.T, header="id,a,b,c"), "nodes.npy": ids},
            "row 0: .*order .*'39'",
        ),
        (
            {"edges.csv": edges + "-1,2\n"},
            r"edges.csv, column 'source', row 1: .*\(--relabel\), found '-1'",
        ),
        (
            {"edges.csv": edges + "1,9223372036854775808\n"},
            "column 'target', row 1: .*'9223372036854775808'",
        ),
        ({"edges.csv": edges + "1.5,2\n"}, "column 'source', .*1.5"),
        ({"edges.csv": edges + '3,""\n'}, "column 'target', row 1: .*found ''"),
        ({"edges.parquet": parquet(source=[1, None], target=[1, 2])}, "row 1: .*found None"),
        ({"edges.parquet": parquet(source=[True, False], target=[1, 2])}, r"found True \(bool\)"),
        (
            {"labels.csv": "label\n" + "1\n" * 38 + "3.5\n1\n"},
            "row 38: expected whole labels .*3.5",
        ),
        ({"labels.csv": "label\n\n" + "1\n" * 39}, r"40 rows, .*found 39; blank lines"),
        (
            {"labels.csv": "label\ncs.LG\n3\n" + "cs.LG\n" * 38},
            "of text or of numbers, found both: 3, cs.LG",
        ),
        (
            {"labels.csv": "id,y\n1,1\n1,2\n"},
            "column 'id', row 1: expected each node once, found '1'",
        ),
        ({"nodes.csv": lines([*ids[:-1], 3], header="node_id")}, "row 39: expected each node once"),
        ({"nodes.csv": lines(["a", *['""'] * 39], header="node_id")}, "row 1: .*found ''"),
        (
            {"nodes.csv": lines([f"n{'x' * 300}{i}" for i in ids], header="id")},
            "256 bytes at most, found 303",
        ),
        ({"train.csv.gz": "0\n" * 50}, "train.csv.gz: found a mask of 50 rows, expected 40"),
        ({"train.csv.gz": "3\n" * 50}, "train.csv.gz: expected at most 40 rows, .* found 50"),
        ({"labels.csv.gz": "id,y\n" + "0,1\n" * 50}, "labels.csv.gz: expected at most 40 rows"),
        ({"nodes.npy": ids + 5, **beyond}, r"train.npy, .* row \d+: expected one of the .* nodes"),
        (
            {"train.csv": lines(np.arange(30) % 2, header="mask")},
            "train.csv: found a mask of 30 rows, expected 40",
        ),
        (
            {"without": no_splits, "splits.csv": "node_id,split\n1,train\n2,holdout\n"},
            "row 1: .*found 'holdout'",
        ),
        ({"without": no_splits, "splits.csv": "split\ntrain\n"}, "40 rows, .*found 1"),
        # Files
        (
            {"splits.csv": "node_id,split\n1,train\n"},
            "expected either splits or train, valid and test",
        ),
        ({"val.npy": ids}, r"expected one file of valid, found valid.npy, val.npy"),
        ({"without": no_splits}, "expected files of train, valid, test"),
        ({"without": "features"}, r"expected files of features .*--features ones, or degree"),
        ({"edges.csv": edges + "3\n"}, "edges.csv, row 1: expected 2 columns, found 1: '3'"),
        (
            {"edges.csv.gz": gzip.compress(lines(src, dst).encode())[:-9]},
            "edges.csv.gz: expected a table, found damage .*Truncated",
        ),
        (
            {"edges.csv": edges.encode() + b"\xe9,2\n"},
            "edges.csv, column 'source', row 1: expected text in UTF-8",
        ),
        (
            {"edges.parquet": b"PAR1 and nothing else"},
            "edges.parquet: expected a table, found damage",
        ),
        ({"options": {"relabel": True}}, "--relabel: .*expected a file nodes"),
    ]


@pytest.mark.parametrize("number", range(len(wrong_files(no_arrays()))))
def test_a_wrong_file_is_refused_in_a_sentence_and_nothing_is_left(
    number: int, small: Arrays, tmp_path: Path
) -> None:
    files, sentence = wrong_files(small)[number]
    options = files.pop("options", {})
    with pytest.raises(InputError, match=sentence) as error:
        convert(
            open_tables(write_small(tmp_path / "own", small, files), **options),
            tmp_path / "store",
            progress=False,
        )
    assert "\n" not in str(error.value)
    assert left_in(tmp_path) == ["own"]


def test_labels_may_be_text_and_their_names_are_kept(small: Arrays, tmp_path: Path) -> None:
    areas = np.array(["cs.LG", "astro-ph", "math.ÄÖ"])  # in another order than that of the alphabet
    called = [areas[label] if label >= 0 else "" for label in small["y"]]
    rows = np.random.default_rng(0).permutation(SMALL)
    files = {
        "labels.csv": lines(rows, [called[row] for row in rows], header="node_id,label"),
        "labels.parquet": pa.table(
            {"subject": pa.array([name or None for name in called]).dictionary_encode()}
        ),
        "labels.npy": np.array(called),
    }
    for number, (name, content) in enumerate(files.items()):
        folder = write_small(tmp_path / f"own{number}", small, {name: content})
        store = convert(folder, tmp_path / f"store{number}", progress=False)
        assert verify_store(store.path) == []
        assert store.label_name is not None
        names = store.label_name.tolist()
        assert names == sorted(areas)
        assert [names[label] if label >= 0 else "" for label in store.y] == called


def test_a_graph_without_features_has_ones_or_degrees(small: Arrays, tmp_path: Path) -> None:
    folder = write_small(tmp_path / "own", small, {"without": "features"})
    same(read_all(open_tables(folder, features="ones")), {**small, "x": np.ones((SMALL, 1))})
    degrees = np.stack(
        [np.bincount(end, minlength=SMALL) for end in small["edge_index"][::-1]], axis=1
    )
    same(
        read_all(open_tables(folder, features="degree")),
        {**small, "x": np.log1p(degrees.astype(np.float32))},
    )
    (folder / "labels.npy").unlink()
    (folder / "labels.csv").write_text(lines(np.arange(SMALL), small["y"], header="id,label"))
    with pytest.raises(
        InputError, match="expected, without features, a file nodes, or a label for each node"
    ):
        open_tables(folder, features="ones")
    np.save(folder / "nodes.npy", np.arange(SMALL))
    assert open_tables(folder, features="ones").num_nodes == SMALL


def test_endings_in_capitals_are_those_in_small_letters(tmp_path: Path) -> None:
    small = tmp_path / "small"
    large = tmp_path / "LARGE"
    for folder, upper in ((small, str), (large, str.upper)):
        folder.mkdir()
        edges = b"source,target\nb,a\na,b\n"
        (folder / f"edges{upper('.csv.gz')}").write_bytes(gzip.compress(edges))
        np.save(folder / "x.npy", np.eye(2, dtype=np.float16))
        (folder / "x.npy").rename(folder / f"features{upper('.npy')}")
        (folder / f"labels{upper('.txt')}").write_text("label\nx\ny\n")
        (folder / f"nodes{upper('.tsv')}").write_text("node_id\na\nb\n")
        (folder / f"splits{upper('.csv')}").write_text("node_id,split\na,train\nb,test\n")
    one, other = (
        convert(folder, tmp_path / folder.name / "s", progress=False) for folder in (small, large)
    )
    assert one.files == other.files
    assert other.feature_dtype == np.float16
