"""One file of columns, .npy, .csv, .csv.gz or .parquet, and the node ids in it; pyarrow and pandas are imported on use.

pyarrow reads in pieces and keeps the order of the rows; joins in DuckDB took three times the memory, and a sort.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .npz import Array, load

BATCH_ROWS, _BLOCK_BYTES, LONGEST_NAME = 2**17, 2**22, 256  # the last in bytes
RELABEL = "where ids are names, or leave gaps, give --relabel, and a file nodes with the id of each row of the features"
_MISSING = ("", "nan", "-nan", "na", "n/a", "#n/a", "null", "none", "<na>")  # in any case, among numbers and labels

Where = Callable[[int], str]  # how a sentence names a row


def is_number(text: str) -> bool:
    """Whether a field of a csv file is a number, or a missing one."""
    with contextlib.suppress(ValueError):
        float(text.strip() or "nan")
        return True
    return False


class Table:
    """Columns of a .npy, .csv, .csv.gz or .parquet file, read in bounded memory.

    Attributes:
        names: of the columns; "1", "2" and so on where the file has none, which `header` tells.

    Args:
        is_data: tells from the fields of a csv file's first line whether they are data; else they are column names.
        shape: of an .npy file, for the sentence that refuses another; "node ids [2, E]" is two columns, others are one.

    Raises:
        InputError: for a file that can't be read, is empty, or has two columns of one name.
    """

    def __init__(self, file: Path, is_data: Callable[[list[str]], bool], shape: str) -> None:
        self.file, self.header, self._parquet = file, False, file.suffix == ".parquet"
        self.first: list[str] = []  # the fields of a csv file's first line, where these are data
        self._array = self._mapped(shape) if file.suffix == ".npy" else None
        with self._damage():
            if self._parquet:
                self.header, self.names = True, [str(name) for name in self._parquet_file().schema_arrow.names]
            else:
                first = (
                    next((fields for _, fields in self._lines()), None) if self._array is None else self._array[:, 0:0]
                )
                if first is None:
                    raise InputError(f"{file}: expected a table, found an empty file")
                self.header = self._array is None and not is_data(list(first))
                self.names = list(first) if self.header else [str(number + 1) for number in range(len(first))]
                self.first = [] if self.header or self._array is not None else list(first)
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise InputError(f"{file}: expected each column's name once, found {twice[0]!r} again; rename one")

    def _mapped(self, shape: str) -> Array:
        """An .npy file as [columns, rows]."""
        array = load(self.file)
        pair = shape.endswith("[2, E]")
        fits = array.ndim == 2 and len(array) == 2 if pair else array.ndim > 0 and array.shape[1:] in {(), (1,)}
        if fits and array.dtype.kind in "iufbSU":
            return array if pair else array.reshape(1, -1)
        hint = "; transpose it" if pair and array.shape[1:] == (2,) else ""
        raise InputError(f"{self.file}: expected {shape}, found {array.dtype} {list(array.shape)}{hint}")

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, EOFError, zlib.error, csv.Error) as error:
            if isinstance(error, pa.ArrowInvalid) and not self._parquet:
                for line, fields in self._lines():
                    if len(fields) != len(self.names):
                        found = f"expected {len(self.names)} columns, found {len(fields)}"
                        raise InputError(f"{self.file}, line {line}: {found}") from None
                    if any("\ufffd" in text for text in fields):
                        raise InputError(f"{self.file}, line {line}: expected UTF-8, found other bytes") from None
            found = str(error).strip().partition("\n")[0]
            raise InputError(f"{self.file}: expected a sound table, found otherwise: {found}") from None

    def _parquet_file(self) -> Any:
        import pyarrow.parquet

        # A row group is read page by page; without a buffer each of its columns would be held whole.
        return pyarrow.parquet.ParquetFile(self.file, buffer_size=2**20, pre_buffer=False)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """(line, fields) of a csv file's rows, slowly: for its first one, and to name the line of a mistake."""
        opened: Any = gzip.open if self.file.suffix == ".gz" else open
        with opened(self.file, "rt", newline="", encoding="utf-8-sig", errors="replace") as lines:
            reader = csv.reader(lines)
            yield from ((reader.line_num, [text.strip() for text in fields]) for fields in reader if fields)

    def where(self, row: int) -> str:
        """How a sentence names a row: in a csv file by its line, which takes a pass over what is before it."""
        if self._array is not None or self._parquet:
            return f"{self.file}, {'row' if self._parquet else 'entry'} {row}"
        return f"{self.file}, line {next(islice(self._lines(), row + self.header, None), (row + 1,))[0]}"

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
        """(the first row's number, `columns` as arrow arrays) in pieces; all that csv has is text.

        Raises:
            InputError: for a file that can't be read.
        """
        begin = 0
        with self._damage():
            for batch in self._pieces([self.names.index(name) for name in columns]):
                yield begin, [_plain(column) for column in batch]
                begin += len(batch[0])

    def _pieces(self, columns: list[int]) -> Iterator[list[Any]]:
        import pyarrow as pa
        import pyarrow.csv as read

        if self._array is not None:
            for begin in range(0, self._array.shape[1], BATCH_ROWS):
                rows = [np.ascontiguousarray(self._array[i, begin : begin + BATCH_ROWS]) for i in columns]
                yield [pa.array(row.astype(row.dtype.newbyteorder("="), copy=False)) for row in rows]
        elif self._parquet:
            names = [self.names[i] for i in columns]
            for batch in self._parquet_file().iter_batches(BATCH_ROWS, columns=names):
                yield [batch.column(name) for name in names]
        else:
            # The header is read as data, because a quoted name may span lines.
            texts, skip = {f"f{i}": pa.string() for i in columns}, int(self.header)
            for batch in read.open_csv(
                self.file,
                read_options=read.ReadOptions(block_size=_BLOCK_BYTES, autogenerate_column_names=True),
                parse_options=read.ParseOptions(newlines_in_values=True),
                convert_options=read.ConvertOptions(column_types=texts, include_columns=list(texts)),
            ):
                yield [column.slice(skip) for column in batch.columns]
                skip = 0

    @cached_property
    def num_rows(self) -> int:
        """Of a csv file only a pass over it tells."""
        if self._array is not None:
            return int(self._array.shape[1])
        if self._parquet:
            return int(self._parquet_file().metadata.num_rows)
        return sum(len(batch[0]) for _, batch in self.batches(self.names[:1]))

    def one_of(self, names: Sequence[str]) -> str | None:
        """The column with one of these names, in any case."""
        return next((found for name in names for found in self.names if found.lower() == name.lower()), None)


# Values --------------------------------------------------------------------------------------------------------------


def _plain(values: Any) -> Any:
    """An arrow array without dictionaries; text as string."""
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    is_text = any(test(values.type) for test in (pa.types.is_large_string, pa.types.is_binary, pa.types.is_string_view))
    return values.cast(pa.string()) if is_text or pa.types.is_fixed_size_binary(values.type) else values


def numbers(values: Any) -> Array:
    """An arrow array of numbers as numpy; NaN for nulls."""
    return values.to_numpy(zero_copy_only=False)


def without_missing(values: Any) -> Any:
    """Text stripped, and null where it says that there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = pc.utf8_trim_whitespace(values)
    missing = pc.is_in(pc.utf8_lower(values), value_set=pa.array(_MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), values)


def cast(values: Any, kind: str, where: Where, begin: int, expected: str) -> Any:
    """An arrow array as int64, double or string; whole numbers may be written as 3.0, and what is missing is null.

    Args:
        begin: the number of the first value's row.

    Raises:
        InputError: for a value that is not `expected`, naming its row.
    """
    import pyarrow as pa

    try:
        return _cast(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if len(values) == 1:
            raise InputError(f"{where(begin)}: expected {expected}, found {values[0].as_py()!r}") from None
        middle = len(values) // 2
        halves = ((values[:middle], begin), (values[middle:], begin + middle))
        return pa.concat_arrays([cast(half, kind, where, first, expected) for half, first in halves])


def _cast(values: Any, kind: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    types = pa.types
    if not len(values):
        return pa.array([], kind)
    if types.is_string(values.type) and kind != "string":
        with contextlib.suppress(pa.ArrowInvalid):
            return values.cast(kind)
        values = without_missing(values)
        with contextlib.suppress(pa.ArrowInvalid):
            return values.cast(kind)
        values = values.cast("double")
    is_real = types.is_floating(values.type) or types.is_decimal(values.type)
    fits = types.is_boolean(values.type) if kind == "double" else types.is_string(values.type)
    if not (is_real or fits or types.is_integer(values.type) or types.is_null(values.type)):
        raise pa.ArrowNotImplementedError(f"{values.type} is no {kind}")
    if is_real and kind == "int64" and (pc.max(pc.abs(values)).as_py() or 0) > 2**53:
        raise pa.ArrowInvalid("several whole numbers are one float there")
    return values.cast(kind, safe=kind != "double")


# Node ids ------------------------------------------------------------------------------------------------------------


class Nodes:
    """From node ids in a file to rows: the numbers of rows themselves, or names, which are text or whole numbers.

    Names are held as 64-bit numbers, hashes of text, in pandas' index: about 50 bytes a node. That two of ten million
    texts have one hash has a chance of 3e-6, and is found.

    Args:
        rows: what the ids are the rows of, for sentences.
        names: the table and its column with the name of each node, in their order.

    Raises:
        InputError: for names that are missing, too long or there twice, or not as many as nodes.
    """

    def __init__(self, num_nodes: int, rows: str, names: tuple[Table, str] | None = None) -> None:
        self.num_nodes, self.rows, self.names, self.kind, self._width = num_nodes, rows, names, "int64", 1
        if names is None:
            return
        import pandas as pd

        table, column = names
        try:
            keys = self._read(table, column)
        except _NotWhole:
            self.kind = "string"
            keys = self._read(table, column)
        if len(keys) != num_nodes:
            header = len(keys) == num_nodes + 1 and not table.header
            hint = "; is its first line a header? then call it node_id, or name it with --id-column" if header else ""
            expected = f"expected {num_nodes} names, one for each row of {rows}"
            raise InputError(f"{table.file}: {expected}, found {len(keys)}{hint}")
        if self._width > LONGEST_NAME:
            raise InputError(f"{table.file}: expected names of {LONGEST_NAME} bytes at most, found {self._width}")
        self._index = pd.Index(keys)
        if not self._index.is_unique:
            at = int(self._index.duplicated().argmax())
            twice = next(v[at - b].as_py() for b, (v,) in table.batches([column]) if at < b + len(v))
            raise InputError(f"{table.where(at)}: expected each node once, found {twice} again")

    def _read(self, table: Table, column: str) -> Array:
        """The keys of all names; whole numbers are written as such, as "007" and "7" are two names."""
        import pyarrow.compute as pc

        keys = [np.empty(0, np.uint64 if self.kind == "string" else np.int64)]
        for begin, (values,) in table.batches([column]):
            if self.kind == "int64":
                try:
                    whole = cast(values, "int64", str, begin, "")
                except InputError:
                    raise _NotWhole from None
                if values.type == "string" and not whole.null_count and not values.equals(whole.cast("string")):
                    raise _NotWhole
            elif len(values):
                self._width = max(self._width, pc.max(pc.binary_length(_cast(values, "string"))).as_py() or 1)
            keys.append(self._keys(values, table.where, begin, "a node"))
        return np.concatenate(keys)

    def _keys(self, values: Any, where: Where, begin: int, expected: str) -> Array:
        """What nodes are found by: whole numbers themselves, hashes of text."""
        import pandas as pd

        keys = cast(values, self.kind, where, begin, expected)
        missing = np.asarray(keys.is_null()) if self.kind == "int64" else np.asarray(keys.fill_null("")) == ""
        if missing.any():
            raise InputError(f"{where(begin + int(missing.argmax()))}: expected {expected}, found none")
        return numbers(keys) if self.kind == "int64" else pd.util.hash_array(numbers(keys), categorize=False)

    def known(self, texts: Sequence[str]) -> bool:
        """Whether one of these fields of a csv file can be an id."""
        import pyarrow as pa

        if self.kind == "int64":
            return any(text and is_number(text) for text in texts)
        texts = [text for text in texts if text]
        return bool((self._index.get_indexer(self._keys(pa.array(texts, "string"), str, 0, "")) >= 0).any())

    def __call__(self, values: Any, where: Where, begin: int) -> Array:
        """int64 rows of an arrow array of ids, the first of them in the file's row `begin`.

        Raises:
            InputError: naming the row of the file, for what is no node.
        """
        if self.names is None:
            expected = f"node ids from 0 to {self.num_nodes - 1}, the rows of {self.rows}"
            try:
                ids = self._keys(values, where, begin, expected)
            except InputError as error:
                raise InputError(f"{error}; {RELABEL}") from None
            wrong = (ids < 0) | (ids >= self.num_nodes)
        else:
            expected = f"one of the {self.num_nodes} nodes in {self.names[0].file.name}"
            ids = self._index.get_indexer(self._keys(values, where, begin, expected))
            wrong = ids < 0
        if wrong.any():
            at, hint = int(wrong.argmax()), "" if self.names else f"; {RELABEL}"
            raise InputError(f"{where(begin + at)}: expected {expected}, found {values[at].as_py()!r}{hint}")
        return ids.astype(np.int64, copy=False)

    def chunks(self) -> tuple[np.dtype[Any], Iterator[Array]]:
        """The names' dtype, int64 or UTF-8 bytes of fixed width, and the names in the order of the nodes."""
        assert self.names is not None
        table, column = self.names
        found = (cast(values, self.kind, table.where, begin, "") for begin, (values,) in table.batches([column]))
        if self.kind == "int64":
            return np.dtype("<i8"), map(numbers, found)
        dtype = np.dtype(f"S{self._width}")
        return dtype, (np.array([text.encode() for text in names.to_pylist()], dtype) for names in found)


class _NotWhole(Exception):
    """Names that are not all whole numbers."""
