"""Tables in a user's files, one class per format, read in pieces in bounded memory.

Import this module only when needed: it imports pyarrow.
"""

import contextlib
import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from ..errors import InputError, format_bytes, naming
from ..graph.npz import load, slices
from .columns import Table
from .formats import COMPRESSIONS, ending, files_of, format_of

_BLOCK_BYTES = 2**22  # bytes of text that are read at a time, and the most in one line


def is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


class _ArrayTable(Table):
    """An .npy file: both ends of the edges [2, E] or [E, 2], values [N], or rows [N, F] of numbers.

    The rows [N, F] are one column of lists.
    """

    header = False

    def __init__(self, file: Path, role: str) -> None:
        array = load(file)
        if array.ndim == 2 and role == "edges" and 2 in array.shape:
            columns = list(array if array.shape[0] == 2 else array.T)  # sources and targets
        elif role == "edges" or array.ndim not in (1, 2) or 0 in array.shape[1:]:
            expected = "edges [2, E] or [E, 2]" if role == "edges" else "[N] or [N, F]"
            raise InputError(f"{file}: expected {expected}, found an array {[*array.shape]}")
        else:
            columns = [array.reshape(-1) if array.shape[1:] == (1,) else array]  # [N, 1] as [N]
        super().__init__(file, [str(i + 1) for i in range(len(columns))])
        self._columns = dict(zip(self.names, columns, strict=True))
        self.num_rows = len(columns[0])

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        pieces = [slices(self._columns[name], rows) for name in columns]
        for batch in zip(*pieces, strict=True):
            yield [_to_arrow(values) for values in batch]


def _to_arrow(values: np.ndarray) -> pa.Array:
    # [n] as numbers, [n, F] as lists; arrow takes contiguous arrays in the machine's byte order
    native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    if values.ndim == 1:
        return pa.array(native)
    return pa.FixedSizeListArray.from_arrays(pa.array(native.reshape(-1)), values.shape[1])


def _too_long(file: Path) -> InputError:
    return InputError(
        f"{file}: expected a table of short lines, "
        f"found a line longer than {format_bytes(_BLOCK_BYTES)}, or a quote without its end"
    )


def _lines(file: Path) -> Iterator[str]:
    # "utf-8-sig" leaves out the mark with which Excel begins a file
    with io.TextIOWrapper(_decompressed(file), "utf-8-sig", errors="replace") as stream:
        while line := stream.readline(_BLOCK_BYTES):
            if len(line) == _BLOCK_BYTES:
                raise _too_long(file)
            yield line


def _head(file: Path) -> tuple[int, str, list[str]]:
    """Return the number of comments and blank lines at the beginning of a text file, and the
    separator and the fields of the line after them."""
    lines = _lines(file)
    num_skipped = 0
    first = next(lines, "")  # "" at the end of the file
    while first and first.lstrip()[:1] in ("", "#", "%"):
        num_skipped += 1
        first = next(lines, "")
    unquoted = re.sub(r'"[^"]*"', '""', first.strip("\r\n "))  # signs in quotes separate nothing
    # the names in a .csv file may have blanks
    signs = "\t,;" if ending(file.name).startswith(".csv") else "\t,; "
    separator = next((sign for sign in signs if sign in unquoted), ",")
    # a quoted name may span lines
    fields = next(csv.reader(itertools.chain([first], lines), delimiter=separator), [])
    return num_skipped, separator, [text.strip() for text in fields]


def _decompressed(file: Path) -> pa.NativeFile:
    compression = COMPRESSIONS.get(file.suffix.lower())
    if compression and not file.stat().st_size:
        raise InputError(f"{file}: expected text packed by {compression}, found an empty file")
    return pa.input_stream(str(file), compression=compression)


class _TextTable(Table):
    """A text file, such as csv or an edge list; every field is read as text.

    Its first line after comments decides the separator. It is the header if `header` is true, or
    if `header` is None and none of its fields is a number, or they are 0, 1, 2, ..., which pandas
    writes for columns without names.
    """

    def __init__(self, file: Path, header: bool | None) -> None:
        self._skipped, self._separator, fields = _head(file)
        self._width = len(fields)  # 0 for a file without rows
        if self._separator == " " and not fields[-1]:
            fields.pop()  # KONECT's lines end with a blank, so arrow finds an empty last field
        if header is None:
            is_count = len(fields) > 2 and fields == [str(i) for i in range(len(fields))]
            header = is_count or not any(map(is_number, fields))
        self.header = header and self._width > 0
        names = fields if self.header else [str(i + 1) for i in range(max(1, len(fields)))]
        super().__init__(file, names)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        if not self._width:
            return
        # columns f0, f1, ... of bytes: `Piece.decoded` names the row of a text that is not UTF-8
        types = {f"f{self.names.index(name)}": pa.binary() for name in columns}
        # The header is read as data, because a quoted name may span lines.
        header_rows = int(self.header)  # of the next batch: 1 in the first one, 0 in others
        try:
            reader = pa.csv.open_csv(
                _decompressed(self.file),
                # With several threads, arrow does not number the invalid rows.
                read_options=pa.csv.ReadOptions(
                    block_size=_BLOCK_BYTES,
                    skip_rows=self._skipped,
                    column_names=[f"f{i}" for i in range(self._width)],
                    use_threads=False,
                ),
                parse_options=pa.csv.ParseOptions(
                    delimiter=self._separator, newlines_in_values=True
                ),
                convert_options=pa.csv.ConvertOptions(column_types=types, include_columns=[*types]),
            )
            for batch in reader:
                yield [column.slice(header_rows) for column in batch.columns]
                header_rows = 0
        except pa.ArrowInvalid as error:
            # arrow's words for a row that does not end within two blocks
            if "straddling" in str(error):
                raise _too_long(self.file) from None
            raise


def _index_of(schema: pa.Schema) -> list[str]:  # names of columns that are a pandas index
    columns = (schema.pandas_metadata or {}).get("index_columns", [])
    return [name for name in columns if isinstance(name, str)]  # pandas has a dict for a range


class _ParquetTable(Table):
    def __init__(self, file: Path) -> None:
        # With a buffer, a row group is read page by page; without one, each of its columns is in
        # memory as a whole.
        self._open = partial(pa.parquet.ParquetFile, file, buffer_size=2**20, pre_buffer=False)
        opened = self._open()
        super().__init__(file, opened.schema_arrow.names)
        self.index = _index_of(opened.schema_arrow)
        self.num_rows = opened.metadata.num_rows

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        for batch in self._open().iter_batches(rows, columns=list(columns)):
            yield [batch.column(name) for name in columns]


class _FeatherTable(Table):
    """A Feather file (an Arrow file), memory-mapped."""

    def __init__(self, file: Path) -> None:
        schema = pa.ipc.open_file(pa.memory_map(str(file))).schema
        super().__init__(file, schema.names)
        self.index = _index_of(schema)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        # other columns are not decompressed
        options = pa.ipc.IpcReadOptions(included_fields=[*map(self.names.index, columns)])
        batches = pa.ipc.open_file(pa.memory_map(str(self.file)), options=options)
        for batch in map(batches.get_batch, range(batches.num_record_batches)):
            for begin in range(0, batch.num_rows, rows):
                yield [batch.column(name).slice(begin, rows) for name in columns]


class _PartsTable(Table):
    """Files with the same columns, one below the other."""

    def __init__(self, path: Path, files: Sequence[Path], header: bool | None, role: str) -> None:
        # Spark writes an empty file for a partition without rows.
        filled = [file for file in files if file.stat().st_size] or files[:1]
        self._parts = [open_table(file, header, role) for file in filled]
        first = self._parts[0]
        super().__init__(path, first.names)  # those of the other parts are compared below
        self.header = first.header
        self.index = first.index
        for part in self._parts[1:]:
            if part.names != first.names:
                raise InputError(
                    f"{part.file}: expected the columns of {first.file.name}, "
                    f"{', '.join(first.names)}; found {', '.join(part.names)}"
                )

    @cached_property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self._parts)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        for part in self._parts:
            with naming(part.file, "a table"):
                yield from part.arrays(columns, rows)

    def location(self, row: int) -> tuple[Path, int]:
        """Return the file of a row, and the row's number in it; parts before it are counted."""
        for part in self._parts:
            if row < part.num_rows:
                break
            row -= part.num_rows  # now counted from the beginning of the next part
        return part.location(row)


def open_table(path: Path, header: bool | None = None, role: str = "") -> Table:
    """Return the table of a file, of a folder of parts or of a pattern.

    Args:
        header: whether the first line of text is a header; by default its fields decide.
        role: the role of an array; "edges" has two columns.
    """
    with naming(path, "a table"):
        files = files_of(path)  # [path] for a file
        kind = format_of(path)
        table: Table
        if files != [path]:
            table = _PartsTable(path, files, header, role)
        elif kind == "array":
            table = _ArrayTable(path, role)
        elif kind == "parquet":
            table = _ParquetTable(path)
        elif kind == "feather":
            table = _FeatherTable(path)
        else:  # text, or a file of an unknown ending
            table = _TextTable(path, header)
    repeated = [name for name in table.names if table.names.count(name) > 1]
    if repeated:
        raise InputError(
            f"{path}: expected each column's name once, found {repeated[0]!r} again; rename one"
        )
    return table
