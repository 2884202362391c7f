"""Every format gives its columns in bounded memory, or one sentence that names the file."""

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from ogbnlib import InputError
from ogbnlib.sources.tables import open_table


def test_comments_at_the_beginning_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "edges.txt"
    file.write_text("# a\n#b\n\n% c\n1 2 \n3 4 \n")  # KONECT's lines end with a blank
    table = open_table(file)
    for _ in range(2):
        assert sum(len(ends[0]) for ends in table.arrays(["1", "2"], 9)) == 2
    file.write_text('name,"a # b"\n#1,2\n')
    table = open_table(file)
    assert (table.names, table.num_rows) == (["name", "a # b"], 1)


@pytest.mark.parametrize(
    ("name", "text", "names", "rows"),
    [
        ("a.csv", "label\nMachine Learning\n", ["label"], 1),
        ("a.csv", 'id,"a;b\tc"\n3,4\n', ["id", "a;b\tc"], 1),
        ("a.tsv", "id\tname, long\n3\tx\n", ["id", "name, long"], 1),
        ("a.tsv", "\tx\n0\t1\n", ["", "x"], 1),
        ("a.txt", "3\n4\n", ["1"], 2),
        ("a.txt", "% bip\n1 2 0.5 1234\n", ["1", "2", "3", "4"], 1),
        ("a.csv", "src,dst\n", ["src", "dst"], 0),
        ("a.csv", "0,1\n4,5\n", ["1", "2"], 2),
        ("a.txt", "# a\n# b", ["1"], 0),
        ("a.csv", "", ["1"], 0),
    ],
)
def test_the_first_line_has_separator_and_header(
    tmp_path: Path, name: str, text: str, names: list[str], rows: int
) -> None:
    (tmp_path / name).write_text(text)
    table = open_table(tmp_path / name)
    assert (table.names, table.num_rows) == (names, rows)
    if table.header:
        assert open_table(tmp_path / name, header=False).num_rows == rows + 1


def test_a_row_of_a_part_is_named_with_its_file(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"part-{i}.csv").write_text("a,b\n" + "1,2\n" * i)
    table = open_table(tmp_path)
    assert [len(values[0]) for values in table.arrays(["a"], 9)] == [0, 1, 2]
    assert table.location(2) == (tmp_path / "part-2.csv", 1)
    values: list[Any] = [[None, None], [1, 2], [1.5, None], ["x", "y"]]
    for i, column in enumerate(values):
        (tmp_path / "other").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pa.table({"a": column}), tmp_path / "other" / f"{i}.parquet")
    table = open_table(tmp_path / "other")
    with pytest.raises(InputError, match=r"3.parquet, column 'a', row 0: "):
        [piece.cast("double", "a number") for piece in table.pieces("a")]


def test_parts_of_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,b\n1,2\n")
    (tmp_path / "1.csv").write_text("b,a\n1,2\n")
    with pytest.raises(InputError, match=r"1.csv: .*0.csv, a, b; .*b, a"):
        open_table(tmp_path)
    (tmp_path / "1.csv").unlink()
    (tmp_path / "README.md").write_text("notes\n")
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(InputError, match=r"README\.md"):
        open_table(tmp_path)
    (tmp_path / "deeper").mkdir()
    with pytest.raises(InputError, match="found deeper"):
        open_table(tmp_path)


REFUSED = {
    "raw.npy": (np.arange(9.0).tobytes(), r"np.memmap\('raw.npy', 'float32', 'r'"),
    "empty.npy": (b"", "empty.npy: "),
    "a.csv": (b"1,2\n3,4\n" + b"5" * 2**24, "longer than 4 MB"),
    "b.csv": (b"1,2\n3,4\n" + b'"5\n' + b"6\n" * 2**23, "longer than 4 MB, or a quote"),
    "c.csv.gz": (b"1,2\n", "c.csv.gz: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    content, sentence = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence) as error:
        assert open_table(tmp_path / name, role="edges").num_rows
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("name", ["edges.txt.gz", "edges/0.txt.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    count = 2**24
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress(b"# a graph\n" + b"1 2\n" * count, 1))
    code = """
import sys
from pathlib import Path
from ogbnlib.sources import tables
tables._BLOCK_BYTES = 2**18
def peak(): return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
table = tables.open_table(Path(sys.argv[1]))
count = sum(len(ends[0]) for ends in table.arrays(table.names, 2**17))
print(count, (peak() - before) // 2**10)
"""
    argv = [sys.executable, "-c", code, str(file.parent if "/" in name else file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    num_rows, grown_mb = map(int, done.stdout.split())
    assert num_rows == count
    assert grown_mb < 160  # both columns as int64 take 256 MB, and more as text
