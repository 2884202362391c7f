"""Readers of a user's files, one a format: columns in pieces, in bounded memory. Import it on use: it
imports pyarrow.

A column is a stream of arrow arrays. Columns without names are called "1", "2", ...
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import re
import reprlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from ...errors import InputError, format_bytes, naming
from ...graph.npz import Array, Mapped, Member, member_names
from .formats import files_of, format_of

_BLOCK_BYTES = 2**22  # of text at a time, and of the longest line
_BOM = b"\xef\xbb\xbf"
_SOURCE = "source"
_TARGET = "target"


def is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


class Reader:
    """The columns of one file.

    Attributes:
        names: of the columns.
        header: whether the file has these names.
        typed: whether values have types, and a name is never mistaken for a value.
    """

    header = typed = True

    def __init__(self, file: Path, names: Sequence[str]) -> None:
        self.file = file
        self.names = list(names)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
        """Yield arrow arrays of the next values of each of `columns`, about `rows` at a time."""
        raise NotImplementedError

    @cached_property
    def num_rows(self) -> int:
        """The number of rows; by default the file is read for it."""
        return sum(len(values) for (values,) in self.arrays(self.names[:1], 2**17))

    def place(self, row: int) -> tuple[Path, int]:
        """Return the file of a row, and the row's number in it."""
        return self.file, row


# ------------------------------------------------------------------------------------------ arrays


@dataclass(frozen=True)
class _Column:
    """A column in the values of an array, in order of memory: from `skip` on, of each `width` values
    the one at `pick`, or all of them as a list."""

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
        # In memory, the transpose of an array in Fortran order is in C order.
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


class _ArrayReader(Reader):
    """An .npy file of one column, of both ends of edges, or of rows of features; or an .npz archive
    of one such array, or of columns of one length."""

    def __init__(self, file: Path, role: str) -> None:
        columns_of_file = dict[str, _Column]()
        lengths = list[int]()
        members = [""] if file.suffix == ".npy" else member_names(file)
        for member in members:
            with self._open(file, member) as stream:
                # the columns of an archive of several arrays
                several = len(members) > 1
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
        self.header = self.typed = len(members) > 1
        self._columns = columns_of_file
        self._length = lengths[0]

    @property
    def num_rows(self) -> int:
        return self._length

    @staticmethod
    def _open(file: Path, member: str) -> Mapped | Member:
        return Member(file, member) if member else Mapped(file)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
        chosen = [self._columns[name] for name in columns]
        with contextlib.ExitStack() as opened:
            streams: list[Any] = [
                opened.enter_context(self._open(self.file, column.member)) for column in chosen
            ]
            for stream, column in zip(streams, chosen, strict=True):
                stream.skip(column.skip)
            for begin in range(0, self._length, rows):
                count = min(rows, self._length - begin)
                yield [
                    _arrow(stream.read(count * column.width), column)
                    for stream, column in zip(streams, chosen, strict=True)
                ]
            for stream, column in zip(streams, chosen, strict=True):
                if column.skip + self._length * column.width == math.prod(stream.shape):
                    stream.finish()


def _arrow(values: Array, column: _Column) -> Any:
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    if column.pick is None:
        return pa.FixedSizeListArray.from_arrays(pa.array(native), column.width)
    return pa.array(np.ascontiguousarray(native[column.pick :: column.width]))


class _SparseReader(Reader):
    """Edges in a matrix that scipy.sparse.save_npz wrote: from row to column, without the values."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, [_SOURCE, _TARGET, "data"])
        with Member(file, "format") as member:
            self._format = bytes(member.read(1)[0].item()).decode(errors="replace")
        with Member(file, "shape") as member:
            shape = member.read(2).tolist()
        if self._format not in ("coo", "csr", "csc"):
            raise InputError(
                f"{file}: expected a scipy matrix of the format coo, csr or csc, "
                f"found {self._format}; save .tocoo()"
            )
        if shape[0] != shape[1]:
            raise InputError(f"{file}: expected a square matrix of N nodes, found {shape}")
        with Member(file, "data") as member:
            self._length = member.shape[0]

    @property
    def num_rows(self) -> int:
        return self._length

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
        read = self._pairs if self._format == "coo" else self._compressed
        for source, target in read(rows):
            ends = {_SOURCE: source, _TARGET: target}
            yield [pa.array(ends[name]) for name in columns]

    def _pairs(self, rows: int) -> Iterator[tuple[Array, Array]]:
        with Member(self.file, "row") as source, Member(self.file, "col") as target:
            for begin in range(0, self._length, rows):
                count = min(rows, self._length - begin)
                yield source.read(count), target.read(count)
            source.finish()
            target.finish()

    def _compressed(self, rows: int) -> Iterator[tuple[Array, Array]]:
        with Member(self.file, "indptr") as member:
            offsets = member.read(member.shape[0])  # 4 or 8 bytes a node
            member.finish()
        if offsets[0] != 0 or offsets[-1] != self._length or (np.diff(offsets) < 0).any():
            raise InputError(f"{self.file}, member indptr: expected rising offsets, found others")
        with Member(self.file, "indices") as member:
            for begin in range(0, self._length, rows):
                end = min(begin + rows, self._length)
                inner = member.read(end - begin)
                outer = np.searchsorted(offsets, np.arange(begin, end), side="right") - 1
                yield (outer, inner) if self._format == "csr" else (inner, outer)
            member.finish()


# -------------------------------------------------------------------------------------------- text


class _Lines:
    """A stage before the csv parser: bounds the length of lines, drops comments and the first `skip`
    other lines, and leaves one blank between fields."""

    def __init__(self, where: Path, mark: bytes, blanks: bool, skip: int) -> None:
        self.where = where
        self.mark = mark
        self.blanks = blanks
        self.skip = skip
        self.comments = 0
        self._rest = b""
        self._begun = False
        self._comment = re.compile(rb"^[ \t]*%s.*\n?" % mark, re.MULTILINE) if mark else None

    def __call__(self, block: Any) -> bytes:
        """Return the whole lines of a block; an empty block is the end."""
        data = self._rest + bytes(block)
        if not self._begun:
            data = data.removeprefix(_BOM)
            self._begun = True
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        cut = end if len(block) else len(data)
        if not len(block) and cut:
            data = data + b"\n"
            cut = cut + 1  # arrow refuses a first line without an end
        data, self._rest = data[:cut], data[cut:]
        if len(self._rest) > _BLOCK_BYTES:
            raise _too_long(self.where)
        if self._comment and self.mark in data:
            data, count = self._comment.subn(b"", data)
            self.comments += count
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
    """Return the sign that begins a comment line: "#" or "%" if the file begins with it."""
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
            text = lines(block)
            if text.strip():
                decoded = (line.decode(errors="replace") for line in text.splitlines(keepends=True))
                yield from filter(str.strip, decoded)


def _inflated(file: Path) -> Any:
    return pa.input_stream(str(file), compression="detect")


def _separator(file: Path, first: str, second: str) -> str:
    """Return what separates the fields of a text file's first line: a tab, comma, semicolon or blank.

    In a .csv file blanks separate numbers alone: a name may have several words.
    """
    bare = re.sub(r'"[^"]*"', '""', first.rstrip("\r\n"))
    for sign in ("\t", ",", ";"):
        if sign in bare:
            return sign
    if ".csv" not in file.suffixes:
        return " " if " " in bare.strip() else ","
    fields = [line.split() for line in (first, second)]
    numeric = any(len(line) > 1 and all(map(is_number, line)) for line in fields)
    lengths = {len(line) for line in fields if line}
    return " " if numeric and len(lengths) == 1 else ","


class _TextReader(Reader):
    """Text: csv files and edge lists; every field is text.

    The first line is the header if no field of it is a number. The first line that is no comment
    tells the separator.
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
            rows = csv.reader(itertools.chain(start, lines), delimiter=self.separator)
            fields = next(rows, [])
        first = [text.strip() for text in fields]
        if not first and role != "split":  # an empty file is an empty split
            raise InputError(f"{file}: expected a table, found an empty file")
        self.empty = not first
        # pandas' names for columns without a name
        count = [str(i) for i in range(len(first))]
        self.header = not any(map(is_number, first)) or (role == "features" and first == count)
        super().__init__(file, first if self.header else [str(i + 1) for i in range(len(first))])
        if self.empty:
            self.header = False
            self.names = ["1"]
        if role == "edges" and first == ["0", "1"]:
            print(
                f"{file}: 0,1 is read as an edge; if it is a header, remove the line",
                file=sys.stderr,
            )
        self._told = False

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
        if self.empty:
            return
        # The header is read as data, because a quoted name may span lines.
        skip = int(self.header)
        for batch in self._batches([self.names.index(name) for name in columns]):
            yield [column.slice(skip) for column in batch.columns]
            skip = 0

    def _batches(self, columns: Sequence[int]) -> Iterator[Any]:
        texts = {f"f{i}": pa.string() for i in columns}
        stream = _inflated(self.file)
        lines = _Lines(self.file, self.mark, self.separator == " ", self.skip)
        try:
            yield from pa.csv.open_csv(
                pa.TransformInputStream(stream, lines),
                read_options=pa.csv.ReadOptions(
                    block_size=_BLOCK_BYTES, autogenerate_column_names=True
                ),
                parse_options=pa.csv.ParseOptions(
                    delimiter=self.separator, newlines_in_values=True
                ),
                convert_options=pa.csv.ConvertOptions(
                    column_types=texts, include_columns=list(texts)
                ),
            )
        except pa.ArrowInvalid as error:
            # arrow's words for a row that does not end within two blocks
            if "straddling" in str(error):
                raise _too_long(self.file) from None
            self._refuse_bad_row()
            raise
        if lines.comments and not self._told:
            self._told = True
            print(
                f"{self.file}: {lines.comments} comment line{'s' if lines.comments > 1 else ''}"
                f" ({self.mark.decode()}) skipped",
                file=sys.stderr,
            )

    def _refuse_bad_row(self) -> None:
        """Refuse the first row that arrow can't read, which it doesn't name."""
        lines = _head(self.file, self.mark)
        fields_of: Iterator[list[str]] = csv.reader(lines, delimiter=self.separator)
        if self.separator == " ":
            fields_of = map(str.split, lines)
        with contextlib.suppress(csv.Error, OSError):
            for row, fields in enumerate(filter(None, fields_of), -int(self.header) - self.skip):
                text = self.separator.join(fields)
                expected = ""
                if row >= 0 and len(fields) != len(self.names):
                    expected = f"{len(self.names)} columns, found {len(fields)}"
                elif "\ufffd" in text:
                    expected = "text in UTF-8, found other bytes"
                if expected:
                    content = reprlib.repr(text)
                    raise InputError(f"{self.file}, row {row}: expected {expected}: {content}")


class _MatrixReader(_TextReader):
    """Edges in a file of Matrix Market: from row to column, counted from 1 there and from 0 here.

    The format (https://math.nist.gov/MatrixMarket/formats.html) has a banner, comments, a line of
    sizes and a line for each entry. Of a symmetric matrix it holds one triangle, read in both
    directions.
    """

    header = True
    typed = True
    skip = 1

    def __init__(self, file: Path) -> None:
        with _inflated(file) as stream:
            banner = stream.read(100).split(b"\n")[0].decode(errors="replace").lower().split()
        if banner[:3] != ["%%matrixmarket", "matrix", "coordinate"] or len(banner) != 5:
            expected = "the banner %%MatrixMarket matrix coordinate FIELD SYMMETRY"
            raise InputError(f"{file}: expected {expected}, found {' '.join(banner)!r}")
        self.mark = b"%"
        size = next(_head(file, self.mark), "").split()
        if len(size) != 3 or not all(text.isdecimal() for text in size) or size[0] != size[1]:
            expected = "a square matrix, a line of rows, columns and entries"
            raise InputError(f"{file}: expected {expected}, found {' '.join(size)!r}")
        self._entries = int(size[2])
        self.separator = " "
        self.empty = size[2] == "0"
        self.is_mirrored = banner[4] != "general"
        self._told = True  # the banner is no comment
        values = {"pattern": [], "complex": ["real", "imaginary"]}.get(banner[3], ["weight"])
        Reader.__init__(self, file, [_SOURCE, _TARGET, *values])
        if self.is_mirrored:
            print(f"{file}: {banner[4]}: each edge is read in both directions", file=sys.stderr)

    @cached_property
    def num_rows(self) -> int:
        return super().num_rows if self.is_mirrored else self._entries

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
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


class _ParquetReader(Reader):
    """A parquet file, read page by page."""

    def __init__(self, file: Path) -> None:
        self.file = file
        super().__init__(file, self._open().schema_arrow.names)

    def _open(self) -> Any:
        # With a buffer, a row group is read page by page; without one, each of its columns is held
        # whole.
        return pa.parquet.ParquetFile(self.file, buffer_size=2**20, pre_buffer=False)

    @property
    def num_rows(self) -> int:
        return int(self._open().metadata.num_rows)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
        for batch in self._open().iter_batches(rows, columns=list(columns)):
            yield [batch.column(name) for name in columns]


class _ArrowReader(Reader):
    """An Arrow (Feather) file, or a stream of Arrow's record batches, mapped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with open(file, "rb") as stream:
            magic = stream.read(6)
        if magic.startswith(b"FEA1"):
            raise InputError(f"{file}: expected Feather's version 2, found 1; save the table again")
        self._is_file = magic == b"ARROW1"
        super().__init__(file, self._open([]).schema.names)

    def _open(self, columns: Sequence[int]) -> Any:
        options = pa.ipc.IpcReadOptions(included_fields=sorted(columns))
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opened(pa.memory_map(str(self.file)), options=options)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
        opened = self._open([self.names.index(name) for name in columns])
        count = opened.num_record_batches if self._is_file else 0
        batches = (opened.get_batch(i) for i in range(count)) if self._is_file else iter(opened)
        for batch in batches:
            for begin in range(0, batch.num_rows, rows):
                yield [batch.column(name).slice(begin, rows) for name in columns]


# ------------------------------------------------------------------------------------------- parts


def _kind(values: Any) -> str:
    """A rough type that values of one column have in every part."""
    kind = str(getattr(values.type, "value_type", values.type))
    if kind == "null":
        return ""
    return "text" if "string" in kind or "binary" in kind or "utf8" in kind else "numbers"


class _PartsReader(Reader):
    """Several files one after the other, with the same columns."""

    def __init__(self, path: Path, files: Sequence[Path], role: str) -> None:
        # The role "split" alone accepts an empty file; such parts are dropped below.
        readers = [open_reader(file, role if file.stat().st_size else "split") for file in files]
        # Spark writes a part without a byte for a partition without a row.
        self._readers = [reader for reader in readers if reader.file.stat().st_size] or readers[:1]
        first = self._readers[0]
        super().__init__(path, first.names)
        self.header = first.header
        self.typed = first.typed
        for reader in self._readers[1:]:
            # the Unix command split(1) leaves the header in the first part alone
            if first.header and not reader.header and len(reader.names) == len(first.names):
                reader.names = list(first.names)
            if reader.names != first.names:
                raise InputError(
                    f"{reader.file}: "
                    f"expected the columns of {first.file.name}, {', '.join(first.names)}; "
                    f"found {', '.join(reader.names)}"
                )
        self._begins = [0]  # the row at which each part read so far begins, for `place`

    @cached_property
    def num_rows(self) -> int:
        return sum(reader.num_rows for reader in self._readers)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[Any]]:
        kinds = dict[str, str]()
        begin = 0
        self._begins = []
        for reader in self._readers:
            self._begins.append(begin)
            with naming(reader.file, "a table"):
                for values in reader.arrays(columns, rows):
                    for name, array in zip(columns, values, strict=True):
                        kind = _kind(array)
                        if kind and kinds.setdefault(name, kind) != kind:
                            raise InputError(
                                f"{reader.file}, column {name!r}: "
                                f"expected {kinds[name]} as in the parts before, found {array.type}"
                            )
                    begin += len(values[0])
                    yield values

    def place(self, row: int) -> tuple[Path, int]:
        at = int(np.searchsorted(self._begins, row, side="right")) - 1
        return self._readers[at].place(row - self._begins[at])


def open_reader(path: Path, role: str = "") -> Reader:
    """Return the reader of a file, of a folder of parts or of a pattern; `role` is edges, features,
    split or ""."""
    files = files_of(path)
    if files != [path]:
        return _PartsReader(path, files, role)
    kind = format_of(path)
    with naming(path, "a table"):
        if kind == "archive" and {"format", "shape", "data"} <= {*member_names(path)}:
            if role != "edges":
                raise InputError(
                    f"{path}: a sparse matrix is read as edges alone; in Python: "
                    f"np.save({path.stem + '.npy'!r}, scipy.sparse.load_npz({path.name!r}).toarray())"
                )
            return _SparseReader(path)
        if kind == "matrix":
            if role != "edges":
                raise InputError(f"{path}: a file of Matrix Market is read as edges alone")
            return _MatrixReader(path)
        if kind == "parquet":
            return _ParquetReader(path)
        if kind == "arrow":
            return _ArrowReader(path)
        if kind == "text":
            return _TextReader(path, role)
        return _ArrayReader(path, role)
