"""Tables of a user's files, one class per format, read in pieces in bounded memory.

Import this module only when needed: it imports pyarrow.
"""

import contextlib
import csv
import itertools
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from ...errors import InputError, format_bytes, naming
from ...graph.npz import Array, Mapped, Member, member_names
from .columns import Table
from .formats import COMPRESSIONS, ending, files_of, format_of

_BLOCK_BYTES = 2**22  # bytes of text that are read at a time, and the most in one line
_BOM = b"\xef\xbb\xbf"
_SOURCE = "source"
_TARGET = "target"
_SCIPY = {"sparse": "scipy.sparse.load_npz", "matrix": "scipy.io.mmread"}
# For each of scipy's matrix formats, the members with the row and the column of each entry.
_SPARSE = {"coo": ("row", "col"), "csr": ("indptr", "indices"), "csc": ("indices", "indptr")}


def is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


# ------------------------------------------------------------------------------------------ arrays


@dataclass(frozen=True)
class _Column:
    """Place of a column's values in an array, in order of memory.

    They begin after `skip` values. Of each `width` values, the column has the one at `pick`, or all
    of them as a list if `pick` is None.
    """

    member: str
    skip: int = 0
    width: int = 1
    pick: int | None = 0


def _columns_of(stream: Mapped | Member, member: str, role: str) -> tuple[list[_Column], int]:
    """Return the columns of one array, and the number of rows."""
    shape = stream.shape
    if role == "edges":
        if len(shape) != 2 or 2 not in shape:
            raise InputError(
                f"{stream.where}: expected edges [2, E] or [E, 2], found an array {list(shape)}"
            )
        if shape == (2, 2):
            print(f"{stream.where}: its shape [2, 2] is read as [2, E]", file=sys.stderr)
        num_edges = shape[1] if shape[0] == 2 else shape[0]
        # [2, E] in Fortran order and [E, 2] in C order alternate sources and targets in memory.
        if (shape[0] == 2) == stream.fortran_order:
            return [_Column(member, 0, 2, end) for end in (0, 1)], num_edges
        return [_Column(member, end * num_edges) for end in (0, 1)], num_edges
    if len(shape) == 1 or shape[1:] == (1,):
        return [_Column(member)], shape[0]
    if role != "features" or len(shape) != 2 or 0 in shape:
        expected = "features [N, F]" if role == "features" else "[N]"
        raise InputError(f"{stream.where}: found an array {list(shape)}, expected {expected}")
    if stream.fortran_order:
        raise InputError(
            f"{stream.where}: expected rows (C order), found columns (Fortran order); save np.ascontiguousarray"
        )
    return [_Column(member, 0, shape[1], None)], shape[0]


class _ArrayTable(Table):
    """An .npy file or an .npz archive.

    An .npy file has one column, both ends of the edges, or rows of features. An archive has one
    such array, or columns of equal length.
    """

    def __init__(self, file: Path, role: str) -> None:
        columns_of_file = dict[str, _Column]()
        members = [""] if format_of(file) == "array" else member_names(file)
        several = len(members) > 1
        lengths = []
        for member in members:
            stream = _stream(file, member)
            # in an archive of several arrays, each is a column
            if several and len(stream.shape) != 1:
                raise InputError(
                    f"{stream.where}: expected one array, or columns [N] of one length, found "
                    f"members {', '.join(members)}; save it alone as .npy"
                )
            columns, length = _columns_of(stream, member, "" if several else role)
            names = [member] if several else [str(i + 1) for i in range(len(columns))]
            columns_of_file |= dict(zip(names, columns, strict=True))
            lengths.append(length)
        if len({*lengths}) != 1:
            raise InputError(f"{file}: expected columns of one length, found {lengths}")
        super().__init__(file, [*columns_of_file])
        self.header = self.typed = several
        self._columns = columns_of_file
        self.num_rows = lengths[0]

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        pieces = [self._pieces(self._columns[name], rows) for name in columns]
        return map(list, zip(*pieces, strict=True))

    def _pieces(self, column: _Column, rows: int) -> Iterator[pa.Array]:
        end = column.skip + self.num_rows * column.width
        stream = _stream(self.file, column.member)
        for values in stream.pieces(rows * column.width, column.skip, end):
            native = values.astype(values.dtype.newbyteorder("="), copy=False)
            if column.pick is None:
                yield pa.FixedSizeListArray.from_arrays(pa.array(native), column.width)
            else:
                yield pa.array(np.ascontiguousarray(native[column.pick :: column.width]))


def _stream(file: Path, member: str) -> Mapped | Member:
    return Member(file, member) if member else Mapped(file)


class _SparseTable(Table):
    """Edges from row to column of a matrix by scipy.sparse.save_npz; its values are not read."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, [_SOURCE, _TARGET, "data"])
        self._format = bytes(self._all("format")[0].item()).decode(errors="replace")
        shape = self._all("shape").tolist()
        if self._format not in _SPARSE:
            raise InputError(
                f"{file}: expected a scipy matrix of the format {', '.join(_SPARSE)}, "
                f"found {self._format}; save .tocoo()"
            )
        if shape[0] != shape[1]:
            raise InputError(f"{file}: expected a square matrix of N nodes, found {shape}")
        self.num_rows = Member(file, "data").shape[0]

    def _all(self, member: str) -> Array:
        return np.concatenate([*Member(self.file, member).pieces(2**20)])

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        members = dict(zip((_SOURCE, _TARGET), _SPARSE[self._format], strict=True))
        ends = [self._ends(members[name], rows) for name in columns]
        return (list(map(pa.array, pieces)) for pieces in zip(*ends, strict=True))

    def _ends(self, member: str, rows: int) -> Iterator[Array]:
        if member != "indptr":
            yield from Member(self.file, member).pieces(rows)
            return
        offsets = self._all(member)  # 4 or 8 bytes a node
        if offsets[0] != 0 or offsets[-1] != self.num_rows or (np.diff(offsets) < 0).any():
            raise InputError(f"{self.file}, member indptr: expected rising offsets, found others")
        for begin in range(0, self.num_rows, rows):
            edges = np.arange(begin, min(begin + rows, self.num_rows))
            yield np.searchsorted(offsets, edges, side="right") - 1


# -------------------------------------------------------------------------------------------- text


class _Lines:
    """Filter for blocks of text before the csv parser.

    It refuses too long lines, and drops comments (after `mark`) and the first `skip` other lines.
    With `blanks` it leaves one blank between fields.
    """

    def __init__(self, where: Path, mark: bytes, blanks: bool, skip: int) -> None:
        self.where = where
        self.mark = mark
        self.blanks = blanks
        self.skip = skip
        self._rest = b""
        self._comment = (
            re.compile(rb"^(%s)?[ \t]*%s.*\n?" % (_BOM, mark), re.MULTILINE) if mark else None
        )

    def __call__(self, block: bytes | pa.Buffer) -> bytes:
        """Return the lines that this block completes; an empty block means the end of the file."""
        data = self._rest + bytes(block)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not len(block) and data:
            data += b"\n"  # arrow refuses a first line without a newline
            end = len(data)
        self._rest = data[end:]
        data = data[:end]
        if len(self._rest) > _BLOCK_BYTES:
            raise _too_long(self.where)
        if self._comment and self.mark in data:
            data = self._comment.sub(b"", data)
        while self.skip and data:
            line, _, data = data.partition(b"\n")
            self.skip -= bool(line.strip())
        if self.blanks:
            data = data.replace(b"\t", b" ")
            while b"  " in data:
                data = data.replace(b"  ", b" ")
            for padded, bare in ((b" \r", b"\r"), (b" \n", b"\n"), (b"\n ", b"\n")):
                data = data.replace(padded, bare)
            data = data.removeprefix(b" ").removesuffix(b" ")
        return data


def _too_long(file: Path) -> InputError:
    return InputError(
        f"{file}: expected a table of short lines, "
        f"found a line longer than {format_bytes(_BLOCK_BYTES)}, or a quote without its end"
    )


def _mark(file: Path) -> bytes:
    """Return the sign of comment lines: "#" or "%" if the file begins with it, else nothing."""
    with _inflated(file) as stream:
        while block := stream.read(2**16):
            if block.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise InputError(f"{file}: expected UTF-8, found UTF-16; save it as UTF-8")
            text = block.removeprefix(_BOM).lstrip()
            if text:
                return text[:1] if text[:1] in b"#%" else b""
    return b""


def _head(file: Path, mark: bytes) -> Iterator[str]:
    """Yield the lines of a text file that are neither blank nor comments."""
    lines = _Lines(file, mark, False, 0)
    with _inflated(file) as stream:
        block = b" "
        while block:
            block = stream.read(2**16)
            for line in lines(block).splitlines(keepends=True):
                text = line.decode(errors="replace").removeprefix("\ufeff")
                if text.strip():
                    yield text


def _inflated(file: Path) -> pa.NativeFile:
    return pa.input_stream(str(file), compression=COMPRESSIONS.get(file.suffix.lower()))


def _separator(file: Path, first: str, second: str) -> str:
    """Return the field separator of a text file, by its first two lines: tab, comma, semicolon or
    blank.

    In a .csv file, blanks separate only numbers, because a name may have several words.
    """
    bare = re.sub(r'"[^"]*"', '""', first.rstrip("\r\n"))
    for sign in ("\t", ",", ";"):
        if sign in bare:
            return sign
    if not ending(file.name).startswith(".csv"):
        return " " if " " in bare.strip() else ","
    fields = [line.split() for line in (first, second)]
    numeric = any(len(line) > 1 and all(map(is_number, line)) for line in fields)
    return " " if numeric and len({len(line) for line in fields if line}) == 1 else ","


class _TextTable(Table):
    """A text file, such as csv or an edge list; every field is read as text.

    The first line that is not a comment decides the separator. It is the header if none of its
    fields is a number.
    """

    typed = False
    skip = 0

    def __init__(self, file: Path, role: str) -> None:
        self.mark = _mark(file)
        lines = _head(file, self.mark)
        start = list(itertools.islice(lines, 2))
        self.separator = _separator(file, *(start + ["", ""])[:2])
        if self.separator == " ":
            fields = start[0].split()
        else:
            fields = next(csv.reader(itertools.chain(start, lines), delimiter=self.separator), [])
        first = [text.strip() for text in fields]
        if not first and role != "split":  # an empty file is an empty split
            raise InputError(f"{file}: expected a table, found an empty file")
        self.empty = not first
        first = first or ["0"]  # one column without a name
        if self.mark:
            print(
                f"{file}: lines that begin with {self.mark.decode()} are skipped", file=sys.stderr
            )
        # 0, 1, 2, ...: the header that pandas writes for columns without names
        count = [str(i) for i in range(len(first))]
        self.header = not any(map(is_number, first)) or (role == "features" and first == count)
        super().__init__(file, first if self.header else [str(i + 1) for i in range(len(first))])
        if role == "edges" and first == ["0", "1"]:
            print(
                f"{file}: 0,1 is read as an edge; if it is a header, remove the line",
                file=sys.stderr,
            )

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        if self.empty:
            return
        # The header is read as data, because a quoted name may span lines.
        skip = int(self.header)
        for batch in self._batches([self.names.index(name) for name in columns]):
            yield [column.slice(skip) for column in batch.columns]
            skip = 0

    def _batches(self, columns: Sequence[int]) -> Iterator[pa.RecordBatch]:
        texts = {f"f{i}": pa.binary() for i in columns}
        lines = _Lines(self.file, self.mark, self.separator == " ", self.skip)
        wrong: list[pa.csv.InvalidRow] = []

        def keep(row: pa.csv.InvalidRow) -> str:
            wrong.append(row)
            return "error"

        try:
            yield from pa.csv.open_csv(
                pa.TransformInputStream(_inflated(self.file), lines),
                # With several threads, arrow does not number the invalid rows.
                read_options=pa.csv.ReadOptions(
                    block_size=_BLOCK_BYTES, autogenerate_column_names=True, use_threads=False
                ),
                parse_options=pa.csv.ParseOptions(
                    delimiter=self.separator,
                    newlines_in_values=True,
                    invalid_row_handler=keep,
                ),
                convert_options=pa.csv.ConvertOptions(
                    column_types=texts, include_columns=list(texts)
                ),
            )
        except pa.ArrowInvalid as error:
            # arrow's words for a row that does not end within two blocks
            if "straddling" in str(error):
                raise _too_long(self.file) from None
            for row in wrong:
                raise InputError(
                    f"{self.file}, row {row.number - 1 - self.header}: expected "
                    f"{row.expected_columns} columns, found {row.actual_columns}: "
                    f"{reprlib.repr(row.text)}"
                ) from None
            raise


class _MatrixTable(_TextTable):
    """Edges from row to column of a Matrix Market file, which counts from 1; ids here begin at 0.

    The format (https://math.nist.gov/MatrixMarket/formats.html) has a banner, comments, a line of
    sizes and a line for each entry. A symmetric matrix is stored as one triangle, whose edges are
    read in both directions.
    """

    header = False
    skip = 1

    def __init__(self, file: Path) -> None:
        with _inflated(file) as stream:
            banner = stream.read(100).split(b"\n")[0].decode(errors="replace").lower().split()
        if banner[:3] != ["%%matrixmarket", "matrix", "coordinate"] or len(banner) != 5:
            raise InputError(
                f"{file}: expected the banner %%MatrixMarket matrix coordinate FIELD SYMMETRY, "
                f"found {' '.join(banner)!r}"
            )
        self.mark = b"%"
        size = next(_head(file, self.mark), "").split()
        if len(size) != 3 or not all(text.isdecimal() for text in size) or size[0] != size[1]:
            raise InputError(
                f"{file}: expected a square matrix, a line of rows, columns and entries, found "
                f"{' '.join(size)!r}"
            )
        self._entries = int(size[2])
        self.separator = " "
        self.empty = size[2] == "0"
        self.is_mirrored = banner[4] != "general"
        values = {"pattern": [], "complex": ["real", "imaginary"]}.get(banner[3], ["weight"])
        Table.__init__(self, file, [_SOURCE, _TARGET, *values])
        if self.is_mirrored:
            print(f"{file}: {banner[4]}: each edge is read in both directions", file=sys.stderr)

    @cached_property
    def num_rows(self) -> int:
        return super().num_rows if self.is_mirrored else self._entries

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        count = 0
        for batch in [] if self.empty else self._batches([0, 1]):
            with naming(self.file, f"whole numbers after entry {count}"):
                source, target = (np.asarray(column.cast("int64")) - 1 for column in batch.columns)
            count += len(source)
            if min(source.min(initial=0), target.min(initial=0)) < 0:
                raise InputError(f"{self.file}: expected rows and columns from 1 on, found less")
            if self.is_mirrored:
                off_diagonal = source != target
                source, target = (
                    np.concatenate([source, target[off_diagonal]]),
                    np.concatenate([target, source[off_diagonal]]),
                )
            ends = {_SOURCE: source, _TARGET: target}
            yield [pa.array(ends[name]) for name in columns]
        if count != self._entries:
            raise InputError(f"{self.file}: expected {self._entries} entries, found {count}")


# --------------------------------------------------------------------------------- parquet and arrow


class _ParquetTable(Table):
    """A parquet file, read page by page."""

    def __init__(self, file: Path) -> None:
        # With a buffer, a row group is read page by page; without one, each of its columns is in
        # memory as a whole.
        self._open = partial(pa.parquet.ParquetFile, file, buffer_size=2**20, pre_buffer=False)
        opened = self._open()
        super().__init__(file, opened.schema_arrow.names)
        self.num_rows = opened.metadata.num_rows

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        for batch in self._open().iter_batches(rows, columns=list(columns)):
            yield [batch.column(name) for name in columns]


class _ArrowTable(Table):
    """An Arrow (Feather) file or a stream of Arrow record batches, memory-mapped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with open(file, "rb") as stream:
            magic = stream.read(6)
        if magic.startswith(b"FEA1"):
            raise InputError(f"{file}: expected Feather's version 2, found 1; save the table again")
        self._is_file = magic == b"ARROW1"
        super().__init__(file, self._open([]).schema.names)

    def _open(self, columns: Sequence[int]) -> pa.RecordBatchReader | pa.ipc.RecordBatchFileReader:
        options = pa.ipc.IpcReadOptions(included_fields=sorted(columns))
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opened(pa.memory_map(str(self.file)), options=options)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        batches = self._open([self.names.index(name) for name in columns])
        if self._is_file:
            batches = map(batches.get_batch, range(batches.num_record_batches))
        for batch in batches:
            for begin in range(0, batch.num_rows, rows):
                yield [batch.column(name).slice(begin, rows) for name in columns]


# ------------------------------------------------------------------------------------------- parts


class _PartsTable(Table):
    """Several files with the same columns, read one after the other."""

    def __init__(self, path: Path, files: Sequence[Path], role: str) -> None:
        # Spark writes an empty file for a partition without rows.
        filled = [file for file in files if file.stat().st_size] or files[:1]
        self._parts = [open_table(file, role) for file in filled]
        first = self._parts[0]
        super().__init__(path, first.names)
        self.header = first.header
        self.typed = first.typed
        for part in self._parts[1:]:
            # the Unix command split(1) leaves the header in the first part only
            if first.header and not part.header and len(part.names) == len(first.names):
                part.names = first.names
            if part.names != first.names:
                raise InputError(
                    f"{part.file}: expected the columns of {first.file.name}, "
                    f"{', '.join(first.names)}; found {', '.join(part.names)}"
                )
        self._begins = [0]  # first row of each part read so far, for `place`

    @cached_property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self._parts)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        begin = 0
        self._begins = []
        for part in self._parts:
            self._begins.append(begin)
            with naming(part.file, "a table"):
                for values in part.arrays(columns, rows):
                    begin += len(values[0])
                    yield values

    def place(self, row: int) -> tuple[Path, int]:
        at = int(np.searchsorted(self._begins, row, side="right")) - 1
        return self._parts[at].place(row - self._begins[at])


def open_table(path: Path, role: str = "") -> Table:
    """Return the table of a file, of a folder of parts or of a pattern.

    The roles "edges", "features" and "split" change how a file is read; other roles do not.
    """
    with naming(path, "a table"):
        table = _open(path, role)
    twice = [name for name in table.names if table.names.count(name) > 1]
    if twice:
        raise InputError(
            f"{path}: expected each column's name once, found {twice[0]!r} again; rename one"
        )
    return table


# Formats whose tables are read the same way for every role.
_TABLES: dict[str | None, Callable[[Path], Table]] = {
    "sparse": _SparseTable,
    "matrix": _MatrixTable,
    "parquet": _ParquetTable,
    "arrow": _ArrowTable,
}


def _open(path: Path, role: str) -> Table:
    files = files_of(path)
    if files != [path]:
        return _PartsTable(path, files, role)
    kind = format_of(path)
    if kind == "archive" and {"format", "shape", "data"} <= {*member_names(path)}:
        kind = "sparse"
    if kind in ("sparse", "matrix") and role != "edges":
        raise InputError(
            f"{path}: a sparse matrix is read as edges alone; for features, in Python: "
            f"np.save({path.stem + '.npy'!r}, {_SCIPY[kind]}({path.name!r}).toarray())"
        )
    if kind in _TABLES:
        return _TABLES[kind](path)
    return _TextTable(path, role) if kind == "text" else _ArrayTable(path, role)
