"""Every format gives its columns in bounded memory, or one sentence that names the file."""

import bz2
import gzip
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import scipy.io
import scipy.sparse

from ogbnlib import InputError
from ogbnlib.sources.files.readers import open_table

N, E = 50, 400


@pytest.fixture
def matrix() -> Any:
    rng = np.random.default_rng(3)
    ends = np.unique(rng.integers(0, N, (2, E)), axis=1)
    return scipy.sparse.coo_matrix((np.ones(ends.shape[1]), ends), (N, N))


def edges_of(path: Path, rows: int = 7) -> list[tuple[int, int]]:
    """The edges of a file in their order, read a few rows at a time."""
    reader = open_table(path, "edges")
    pieces = [
        np.stack([np.asarray(end.cast("int64")) for end in ends], axis=1)
        for ends in reader.arrays(reader.names[:2], rows)
    ]
    pairs = np.concatenate([np.empty((0, 2), int), *pieces])
    assert len(pairs) == reader.num_rows
    return [(int(source), int(target)) for source, target in pairs]


# ------------------------------------------------------------------------------- matrices of scipy


@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
@pytest.mark.parametrize("compressed", [True, False])
def test_a_matrix_that_scipy_saved_is_edges_from_row_to_column(
    tmp_path: Path, matrix: Any, kind: str, compressed: bool
) -> None:
    stored = matrix.asformat(kind)
    scipy.sparse.save_npz(tmp_path / "edges.npz", stored, compressed=compressed)
    order = stored.tocoo()
    expected = list(zip(order.row.tolist(), order.col.tolist(), strict=True))
    assert edges_of(tmp_path / "edges.npz") == expected


@pytest.mark.parametrize("name", ["edges.mtx", "edges.mtx.gz", "edges.mtx.bz2"])
@pytest.mark.parametrize("field", ["pattern", "integer", "real"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_matrix_market_is_edges_and_of_a_symmetric_matrix_in_both_directions(
    tmp_path: Path,
    matrix: Any,
    name: str,
    field: str,
    symmetric: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if symmetric:
        matrix = ((matrix + matrix.T) > 0).astype(float).tocoo()
    out = io.BytesIO()
    kind = "symmetric" if symmetric else "general"
    scipy.io.mmwrite(out, matrix, field=field, comment="a comment\nand more", symmetry=kind)
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(out.getvalue()))
    expected = sorted(zip(matrix.row.tolist(), matrix.col.tolist(), strict=True))
    assert sorted(edges_of(tmp_path / name)) == expected
    said = f"{tmp_path / name}: symmetric: each edge is read in both directions"
    assert (said in capsys.readouterr().err) == symmetric
    weights = [] if field == "pattern" else ["weight"]
    assert open_table(tmp_path / name, "edges").names == ["source", "target", *weights]


# -------------------------------------------------------------------------------------------- text


def test_comment_lines_are_skipped_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "edges.txt"
    file.write_text("# a\n#b\n\n1\t2\n# in between\n3\t4\n")
    reader = open_table(file, "edges")
    for _ in range(2):
        assert sum(len(ends[0]) for ends in reader.arrays(["1", "2"], 9)) == 2
    assert capsys.readouterr().err == f"{file}: lines that begin with # are skipped\n"
    file.write_text('name,"a # b"\n#1,2\n')  # no comments: the file does not begin with one
    reader = open_table(file)
    assert (reader.names, reader.num_rows) == (["name", "a # b"], 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "text", "names", "rows"),
    [
        ("a.csv", "label\nMachine Learning\n", ["label"], 1),
        ("a.csv", "first name\nMachine Learning\n", ["first name"], 1),
        ("a.csv", "1;2\n3;4\n", ["1", "2"], 2),
        ("a.csv", 'id,"a;b\tc"\n3,4\n', ["id", "a;b\tc"], 1),
        ("a.tsv", "id\tname, long\n3\tx\n", ["id", "name, long"], 1),
        ("a.txt", "3\n4\n", ["1"], 2),
        ("a.edges", "% bip\n1 2 0.5 1234\n", ["1", "2", "3", "4"], 1),
        ("a.csv", "src,dst\n", ["src", "dst"], 0),
        ("a.csv", "src dst", ["src dst"], 0),
        ("a.txt", "# a\n# b", ["1"], 0),
        ("a.csv", "", ["1"], 0),
    ],
)
def test_the_separator_comes_from_the_first_line(
    tmp_path: Path, name: str, text: str, names: list[str], rows: int
) -> None:
    (tmp_path / name).write_text(text)
    reader = open_table(tmp_path / name, "split")
    assert (reader.names, reader.num_rows) == (names, rows)


# -------------------------------------------------------------------------------------------- parts


def test_a_row_of_a_part_is_named_with_its_file(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"part-{i}.csv").write_text("a,b\n" + "1,2\n" * i)
    reader = open_table(tmp_path)
    assert [len(values[0]) for values in reader.arrays(["a"], 9)] == [0, 1, 2]
    assert reader.place(0) == (tmp_path / "part-1.csv", 0)
    assert reader.place(2) == (tmp_path / "part-2.csv", 1)


def test_parts_of_other_columns_or_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,b\n1,2\n")
    (tmp_path / "1.csv").write_text("b,a\n1,2\n")
    with pytest.raises(InputError, match=r"1.csv: expected the columns of 0.csv, a, b; found b, a"):
        open_table(tmp_path)
    (tmp_path / "1.csv").unlink()
    (tmp_path / "README.md").touch()
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(InputError, match=r"found README.md; name the parts by a pattern"):
        open_table(tmp_path)
    (tmp_path / "README.md").unlink()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(InputError, match=r"found other; name the parts by a pattern"):
        open_table(tmp_path)
    values: list[Any] = [[None, None], [1, 2], [1.5, None], ["x", "y"]]
    for i, column in enumerate(values):
        pyarrow.parquet.write_table(pa.table({"a": column}), other / f"{i}.parquet")
    table = open_table(other)
    with pytest.raises(InputError, match=r"3.parquet, column 'a', row 0: expected a number"):
        [piece.cast("double", "a number") for (piece,) in table.batches(["a"])]


# -------------------------------------------------------------------------------------- refusals


def npz(**members: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **members)
    return out.getvalue()


def saved(matrix: Any) -> bytes:
    out = io.BytesIO()
    scipy.sparse.save_npz(out, matrix)
    return out.getvalue()


def feather_1() -> bytes:
    out = io.BytesIO()
    pyarrow.feather.write_feather(pa.table({"a": [1]}), out, version=1)
    return out.getvalue()


BANNER = b"%%MatrixMarket matrix coordinate real general\n"
eye = scipy.sparse.eye(4, 5)
REFUSED = {
    "raw.npy": (
        np.arange(9.0).tobytes(),
        r"np.memmap\('raw.npy', 'float32', 'r', shape=\(N, F\)\)",
    ),
    "square.npy": (npz(a=np.ones(3))[:0] + b"", "expected a numpy array"),
    "a.npz": (
        npz(a=np.ones((3, 3))),
        r"expected edges \[2, E\] or \[E, 2\], found an array \[3, 3\]",
    ),
    "b.npz": (npz(a=np.ones(3), b=np.ones(2)), "columns of one length, found .3, 2."),
    "c.npz": (npz(a=np.ones(3), b=np.ones((2, 2))), "member b: expected one array, or columns"),
    "d.npz": (npz(a=np.array([{}], dtype=object)), "pickled objects, which are never loaded"),
    "e.npz": (b"PK and nothing else", "expected a sound .npz file, found damage"),
    "f.npz": (saved(eye.tocsr()), r"expected a square matrix of N nodes, found \[4, 5\]"),
    "g.npz": (saved(scipy.sparse.eye(4).tobsr()), "coo, csr, csc, found bsr; save .tocoo"),
    "a.mtx": (b"%%MatrixMarket matrix array real general\n2 2\n1\n1\n", "matrix coordinate FIELD"),
    "b.mtx": (BANNER + b"2 3 1\n1 1 1\n", "a square matrix, .* found '2 3 1'"),
    "c.mtx": (BANNER + b"2 2 3\n1 1 1\n", "expected 3 entries, found 1"),
    "d.mtx": (BANNER + b"2 2 1\n0 1 1\n", "rows and columns from 1 on, found less"),
    "e.mtx": (BANNER + b"2 2 1\n1 x 1\n", "e.mtx: expected whole numbers after entry 0"),
    "a.feather": (feather_1(), "expected Feather's version 2, found 1"),
    "b.feather": (b"nothing of it", "b.feather: expected a table, found damage"),
    "a.csv": (b"1,2\n3,4\n" + b"5" * 2**24, "a line longer than 4 MB"),
    "b.csv": (b"1,2\n3,4\n" + b'"5\n' + b"6\n" * 2**23, "a line longer than 4 MB, or a quote"),
    "c.csv.gz": (b"1,2\n", "c.csv.gz: expected a table, found damage"),
    "c.txt": ("1 2\n".encode("utf-16"), "expected UTF-8, found UTF-16; save it as UTF-8"),
    "d.txt": (b"#" * 2**23, "a line longer than 4 MB"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_can_not_be_edges_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    content, sentence = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence) as error:
        edges_of(tmp_path / name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert str(tmp_path / name) in str(error.value)


def test_a_matrix_is_no_table_of_features(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(saved(eye))
    (tmp_path / "x.mtx").write_bytes(BANNER)
    line = r"np.save\('x.npy', scipy.sparse.load_npz\('x.npz'\).toarray\(\)\)"
    with pytest.raises(InputError, match=line):
        open_table(tmp_path / "x.npz", "features")
    with pytest.raises(InputError, match="read as edges alone"):
        open_table(tmp_path / "x.mtx", "features")


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("name", ["edges.txt.gz", "edges.npz", "edges.mtx.gz", "edges/0.csv.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    file, count = tmp_path / name, 2**24
    file.parent.mkdir(exist_ok=True)
    if name == "edges.npz":
        np.savez_compressed(file, edge_index=np.ones((count, 2), np.int64))
    else:
        text = (BANNER + b"9 9 %d\n" % count) if "mtx" in name else b"# a graph\n"
        text += (b"1 2 3\n" if "mtx" in name else b"1 2\n") * count
        file.write_bytes(gzip.compress(text, 1))
    code = """
import sys
from pathlib import Path
from ogbnlib.sources.files import readers
readers._BLOCK_BYTES = 2**18
def peak(): return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
reader = readers.open_table(Path(sys.argv[1]), "edges")
count = sum(len(ends[0]) for ends in reader.arrays(reader.names[:2], 2**17))
print(count, (peak() - before) // 2**10)
"""
    path = file.parent if "/" in name else file
    argv = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    found, grown_mb = map(int, done.stdout.split())
    assert found == count
    assert grown_mb < 160  # both columns as int64 take 256 MB, and more as text
