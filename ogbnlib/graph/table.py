"""Columns of a .npy, .csv, .csv.gz or .parquet file, and node ids in them. Import it on use: it imports pyarrow.

pyarrow reads in pieces and keeps the order of the rows. DuckDB joined the same ids in three times the memory, and had
to sort.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from ..errors import InputError
from .npz import Array, load

BATCH_ROWS, _BLOCK_BYTES = 2**17, 2**22
LONGEST_NAME = 256  # bytes; `node_name` has the width of the longest name for every node
RELABEL = "if ids are names or leave gaps, give --relabel and a file nodes with the id of each row of the features"
_MISSING = ("", "nan", "-nan", "na", "n/a", "#n/a", "null", "none", "<na>")  # in any case, among numbers and labels


def is_number(text: str) -> bool:
    """Whether a csv field is a number or missing."""
    with contextlib.suppress(ValueError):
        float(text.strip() or "nan")
        return True
    return False


class Table:
    """Columns of a .npy, .csv, .csv.gz or .parquet file, read in bounded memory.

    Attributes:
        names: the names of the columns; "1", "2" and so on for a file without a header.
        first: the fields of the first line of a csv file.

    Args:
        is_data: whether the fields of the first line of a csv file are data; else they are column names.
        pair: an .npy file holds two columns as [2, E], not one as [N].
    """

    def __init__(self, file: Path, is_data: Callable[[list[str]], bool], pair: bool = False) -> None:
        self.file, self.header, self.first = file, file.suffix == ".parquet", list[str]()
        self._array: Array | None = None
        with self._damage():
            if self.header:
                self.names = self._parquet().schema_arrow.names
            elif file.suffix == ".npy":
                array = load(file)
                array = array.reshape(1, -1) if array.ndim and array.size == len(array) and not pair else array
                if array.ndim != 2 or len(array) != 1 + pair:
                    expected = "[2, E]; transpose it" if pair else "[N]"
                    raise InputError(f"{file}: found an array {list(array.shape)}, expected {expected}")
                self._array, self.names = array, ["1", "2"][: len(array)]
            else:
                self.first = next((fields for _, fields in self._lines()), [])
                if not self.first:
                    raise InputError(f"{file}: expected a table, found an empty file")
                self.header = not is_data(self.first)
                self.names = self.first if self.header else [str(i + 1) for i in range(len(self.first))]
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise InputError(f"{file}: expected each column's name once, found {twice[0]!r} again; rename one")

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, EOFError, zlib.error, csv.Error) as error:
            raise InputError(f"{self.file}: damaged or not a table: {str(error).strip().splitlines()[0]}") from None

    def _parquet(self) -> Any:
        # With a buffer, a row group is read page by page; without one, each of its columns is held whole.
        return pa.parquet.ParquetFile(self.file, buffer_size=2**20, pre_buffer=False)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """(line, fields) of a csv file's rows: slow, for the header and the line of a mistake."""
        opened: Any = gzip.open if self.file.suffix == ".gz" else open
        with opened(self.file, "rt", newline="", encoding="utf-8-sig", errors="replace") as lines:
            reader = csv.reader(lines)
            yield from ((reader.line_num, [text.strip() for text in fields]) for fields in reader if fields)

    def where(self, row: int) -> str:
        """Return the place of a row, for messages: in a csv file its line, found by reading up to it."""
        if self.file.suffix in (".npy", ".parquet"):
            return f"{self.file}, row {row}"
        return f"{self.file}, line {next(islice(self._lines(), row + self.header, None), (row + 1,))[0]}"

    def batches(self, columns: Sequence[str]) -> Iterator[list[Piece]]:
        """Yield the next rows of `columns`; fields of csv files are text."""
        begin = 0
        with self._damage():
            for batch in self._arrays([self.names.index(name) for name in columns]):
                yield [Piece(self, name, _plain(values), begin) for name, values in zip(columns, batch, strict=True)]
                begin += len(batch[0])

    def column(self, name: str) -> Iterator[Piece]:
        """Yield the pieces of one column."""
        return (piece for (piece,) in self.batches([name]))

    def _arrays(self, columns: list[int]) -> Iterator[list[Any]]:
        if self._array is not None:
            for begin in range(0, self._array.shape[1], BATCH_ROWS):
                rows = [np.ascontiguousarray(self._array[i, begin : begin + BATCH_ROWS]) for i in columns]
                yield [pa.array(row.astype(row.dtype.newbyteorder("="), copy=False)) for row in rows]
        elif self.file.suffix == ".parquet":
            names = [self.names[i] for i in columns]
            for batch in self._parquet().iter_batches(BATCH_ROWS, columns=names):
                yield [batch.column(name) for name in names]
        else:
            # The header is read as data, because a quoted name may span lines.
            texts, skip = {f"f{i}": pa.string() for i in columns}, int(self.header)
            for batch in pa.csv.open_csv(
                self.file,
                read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, autogenerate_column_names=True),
                parse_options=pa.csv.ParseOptions(newlines_in_values=True),
                convert_options=pa.csv.ConvertOptions(column_types=texts, include_columns=list(texts)),
            ):
                yield [column.slice(skip) for column in batch.columns]
                skip = 0

    @cached_property
    def num_rows(self) -> int:
        """The number of rows; a csv file is read for it."""
        if self._array is not None:
            return int(self._array.shape[1])
        if self.file.suffix == ".parquet":
            return int(self._parquet().metadata.num_rows)
        return sum(len(piece.values) for piece in self.column(self.names[0]))

    def one_of(self, names: Sequence[str]) -> str | None:
        """Return the column with one of these names, in any case."""
        return next((own for name in names for own in self.names if own.lower() == name.lower()), None)


# Values --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Consecutive values of a column: an arrow array that knows its place in the file."""

    table: Table
    name: str
    values: Any
    begin: int = 0  # the number of the first value's row
    per_row: int = 1  # values, for flattened lists

    def __getitem__(self, rows: slice) -> Piece:
        return replace(self, values=self.values[rows], begin=self.begin + rows.start // self.per_row)

    @property
    def rows(self) -> Array:
        """The numbers of the rows."""
        return np.arange(self.begin, self.begin + len(self.values))

    def refuse(self, wrong: Any, expected: str, hint: str = "") -> None:
        """Raise an `InputError` that names the first row where `wrong` is true, if there is any."""
        wrong = np.asarray(wrong)
        if wrong.any():
            at = int(wrong.argmax())
            column = f", column {self.name!r}" if self.table.header else ""
            place = f"{self.table.where(self.begin + at // self.per_row)}{column}"
            raise InputError(f"{place}: expected {expected}, found {reprlib.repr(self.values[at].as_py())}{hint}")

    def cast(self, kind: str, expected: str, hint: str = "") -> Any:
        """Cast to int64, double or string; missing values become null, and 3.0 is the whole number 3."""
        try:
            return _cast(self.values, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if len(self.values) == 1:
                self.refuse([True], expected, hint)
            middle = len(self.values) // 2
            middle -= middle % self.per_row if middle > self.per_row else 0
            halves = self[0:middle], self[middle : len(self.values)]
            return pa.concat_arrays([half.cast(kind, expected, hint) for half in halves])


def _plain(values: Any) -> Any:
    """An arrow array without dictionaries, with one type of text."""
    if hasattr(values, "dictionary_decode"):
        values = values.dictionary_decode()
    other_text = ("large_string", "string_view", "binary", "large_binary", "fixed_size_binary")
    return values.cast("string") if str(values.type).startswith(other_text) else values


def numbers(values: Any) -> Array:
    """An arrow array of numbers as numpy; NaN for nulls."""
    return values.to_numpy(zero_copy_only=False)


def without_missing(values: Any) -> Any:
    """Text stripped, with null for the words that mean "missing"."""
    values = pc.utf8_trim_whitespace(values)
    missing = pc.is_in(pc.utf8_lower(values), value_set=pa.array(_MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), values)


def _cast(values: Any, kind: str) -> Any:
    if pa.types.is_string(values.type) and kind != "string":
        for text in (values, without_missing(values)):
            with contextlib.suppress(pa.ArrowInvalid):
                return text.cast(kind)
        values = text.cast("double")
    if kind == "int64" and (pa.types.is_boolean(values.type) or pa.types.is_temporal(values.type)):
        raise pa.ArrowInvalid("arrow would take True for 1, and a date for a number of days")
    # Beyond 2**53, several whole numbers are the same float.
    if kind == "int64" and pa.types.is_floating(values.type) and (pc.max(pc.abs(values)).as_py() or 0) > 2**53:
        raise pa.ArrowInvalid("not exact")
    return values.cast(kind, safe=kind != "double")


# Node ids ------------------------------------------------------------------------------------------------------------


class Nodes:
    """Map from node ids to row numbers. Ids are row numbers already, or names: text or any whole numbers.

    Names take about 50 bytes a node, as 64-bit numbers in pandas' index; text is hashed. Two of ten million texts have
    the same hash with a chance of 3e-6, and are refused then.

    Args:
        rows: the file whose rows are the nodes, for messages.
        names: the table and its column with the name of each node, in the order of the rows.
    """

    def __init__(self, num_nodes: int, rows: str, names: tuple[Table, str] | None = None) -> None:
        self.num_nodes, self.names, self.kind, self._width = num_nodes, names, "int64", 1
        self._expected, self._hint = f"node ids from 0 to {num_nodes - 1}, the rows of {rows}", f"; {RELABEL}"
        if names is None:
            return
        table, column = names
        if not all(_are_whole(piece.values) for piece in table.column(column)):
            self.kind = "string"
        self._expected, self._hint = "the name of a node", ""
        keys = [np.empty(0, np.int64 if self.kind == "int64" else np.uint64)]
        for piece in table.column(column):
            keys.append(self._keys(piece))
            if self.kind == "string":
                width = pc.max(pc.binary_length(piece.values.cast("string"))).as_py()
                self._width = max(self._width, width or 1)
        if (count := sum(map(len, keys))) != num_nodes:
            hint = "" if table.header else "; is its first line a header? then call it node_id, or give --id-column"
            raise InputError(f"{table.file}: expected {num_nodes} names, one a row of {rows}, found {count}{hint}")
        if self._width > LONGEST_NAME:
            raise InputError(f"{table.file}: expected names of {LONGEST_NAME} bytes at most, found {self._width}")
        self._index = pd.Index(np.concatenate(keys))
        if not self._index.is_unique:
            row = int(self._index.duplicated().argmax())
            raise InputError(f"{table.where(row)}: expected each node once, found one of the rows above again")
        self._expected = f"one of the {num_nodes} nodes in {table.file.name}"

    def _keys(self, piece: Piece) -> Array:
        """Whole numbers, or hashes of text."""
        keys = piece.cast(self.kind, self._expected, self._hint)
        missing = keys.is_null() if self.kind == "int64" else np.asarray(keys.fill_null("")) == ""
        piece.refuse(missing, self._expected, self._hint)
        return numbers(keys) if self.kind == "int64" else pd.util.hash_array(numbers(keys), categorize=False)

    def known(self, texts: Sequence[str]) -> bool:
        """Whether any of these csv fields can be an id."""
        texts = [text for text in texts if text]
        if self.kind == "int64":
            return any(map(is_number, texts))
        keys = pd.util.hash_array(np.array(texts, object), categorize=False)
        return bool((self._index.get_indexer(keys) >= 0).any())

    def __call__(self, piece: Piece) -> Array:
        """Return int64 rows of ids."""
        ids = self._keys(piece)
        if self.names is not None:
            ids = self._index.get_indexer(ids)
        piece.refuse((ids < 0) | (ids >= self.num_nodes), self._expected, self._hint)
        return ids.astype(np.int64, copy=False)

    def chunks(self) -> tuple[np.dtype[Any], Iterator[Array]]:
        """Return the dtype of the names, int64 or UTF-8 bytes of fixed width, and the names in order of the nodes."""
        assert self.names is not None
        table, column = self.names
        pieces = (piece.cast(self.kind, self._expected) for piece in table.column(column))
        if self.kind == "int64":
            return np.dtype("<i8"), map(numbers, pieces)
        dtype = np.dtype(f"S{self._width}")
        return dtype, (np.array([text.encode() for text in names.to_pylist()], dtype) for names in pieces)


def _are_whole(values: Any) -> bool:
    """Whether names are whole numbers, written as int64 writes them: "007" and "7" are two names."""
    with contextlib.suppress(pa.ArrowInvalid):
        return values.type != "string" or values.cast("int64").cast("string").equals(values)
    return False
