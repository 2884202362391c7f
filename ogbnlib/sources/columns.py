"""Tables, the roles of their columns, and pieces of values, cast with the place of a bad value.

Import this module only when needed: it imports pyarrow and pandas.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError, naming
from ..graph.npz import Array
from .labels import most_exact

# beginnings of arrow's types of text, which `Piece.decoded` casts to "string"
_TEXTS = ("large_string", "string_view", "binary", "large_binary", "fixed_size_binary")
BATCH_ROWS = 2**17  # 1 MB of a column of numbers


class Table:
    """The columns of a file, or of its parts, read in bounded memory.

    `tables` has a subclass for each format.

    Attributes:
        names: the columns' names; columns without names are called "1", "2", ...
        header: whether the file itself contains these names.
        index: names of columns that pandas wrote for the index of a frame.
        roles: the role of each column by its name, in the order of the file; set by the caller.
    """

    header = True
    index: Sequence[str] = ()
    roles: Mapping[str, str] = {}

    def __init__(self, file: Path, names: Sequence[str]) -> None:
        self.file = file
        self.names = list(names)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        """Yield the next values of each of `columns`, one array a column, about `rows` at a time."""
        raise NotImplementedError

    @cached_property
    def num_rows(self) -> int:
        """The number of rows; by default the file is read to count them."""
        with naming(self.file, "a table"):
            return sum(len(values) for (values,) in self.arrays(self.names[:1], BATCH_ROWS))

    def location(self, row: int) -> tuple[Path, int]:
        """Return the file of a row, and the row's number in it."""
        return self.file, row

    def batches(self, columns: Sequence[str], rows: int = BATCH_ROWS) -> Iterator[list[Piece]]:
        """Yield the next rows of `columns`: at most `rows`, or from a text file those in 4 MB."""
        begin = 0  # row
        with naming(self.file, "a table"):
            for batch in self.arrays(columns, rows):
                yield [
                    Piece(self, name, values, begin).decoded()
                    for name, values in zip(columns, batch, strict=True)
                ]
                begin += len(batch[0])

    def pieces(self, column: str) -> Iterator[Piece]:
        return (piece for (piece,) in self.batches([column]))

    def all(self, *roles: str) -> list[str]:
        """Return the names of the columns with one of these roles."""
        return [name for name, role in self.roles.items() if role in roles]

    def first(self, *roles: str) -> str | None:  # None: no column has one of these roles
        return next(iter(self.all(*roles)), None)


@dataclass(frozen=True)
class Piece:
    """Consecutive values of a column."""

    table: Table
    name: str  # of the column
    values: pa.Array
    begin: int  # the row of the first value, from 0 on
    width: int = 1  # values in a row: more than 1 for the values of lists

    def decoded(self) -> Piece:
        """Return the piece with text as strings, and each code of a dictionary as its value."""
        values = self.values
        if pa.types.is_dictionary(values.type):  # such as a pandas categorical
            values = values.dictionary_decode()
        if str(values.type).startswith(_TEXTS):
            values = replace(self, values=values).cast("string", "text in UTF-8")
        return replace(self, values=values)

    def refuse(
        self, wrong: Sequence[bool] | Array | pa.Array, expected: str, hint: str = ""
    ) -> None:
        """Raise an `InputError` that names the first row where `wrong` is true, if there is any."""
        positions = np.flatnonzero(wrong)
        if len(positions):
            first = int(positions[0])
            file, row = self.table.location(self.begin + first // self.width)
            value = reprlib.repr(self.values[first].as_py())  # shortened if it is long
            raise InputError(
                f"{file}, column {self.name!r}, row {row}: expected {expected}, found {value}{hint}"
            )

    def cast(self, kind: str, expected: str, hint: str = "") -> pa.Array:
        """Return the values as "int64", "double" or "string"; an empty cell of numbers as null.

        The error about the first value that can't be cast ends with `hint`.
        """
        values = _cast(self.values, kind)
        if values is None:
            rows = np.arange(len(self.values))
            # one by one, as arrow does not say which value it can't cast
            first = next(row for row in rows if _cast(self.values.slice(row, 1), kind) is None)
            if not pa.types.is_string(self.values.type):
                hint = f" ({self.values.type}){hint}"
            self.refuse(rows == first, expected, hint)
        return values

    def keys(self, kind: str, expected: str) -> Array:
        """Return a 64-bit number for each name: for the `kind` "int64" the name itself, for
        "string" its hash, uint64; refuse a missing name."""
        keys = self.cast(kind, expected)
        if kind == "int64":
            self.refuse(keys.is_null(), expected)
            return numbers(keys)
        self.refuse(np.asarray(keys.fill_null("")) == "", expected)  # an empty cell or text
        return hashes(numbers(keys))

    def flags(self) -> Array:
        """Return the booleans of a mask of true, false, 1, 0 or empty cells, in any case."""
        expected = "true or false"
        words = pc.utf8_lower(pc.fill_null(self.cast("string", expected), ""))
        is_true = pc.is_in(words, value_set=pa.array(["true", "1", "1.0"]))
        is_flag = pc.or_(is_true, pc.is_in(words, value_set=pa.array(["false", "0", "0.0", ""])))
        self.refuse(pc.invert(is_flag), expected)
        return numbers(is_true)


def _cast(values: pa.Array, kind: str) -> pa.Array | None:
    """Return the values as arrow's type `kind`, or None if one of them can't be cast."""
    if pa.types.is_string(values.type) and kind != "string":
        # most columns have no empty cells, and to find them takes longer than to cast
        with contextlib.suppress(pa.ArrowInvalid):
            return values.cast(kind)
        text = _without_empty(values)
        for number in (kind, "double"):  # whole numbers may be written as "3.0"
            with contextlib.suppress(pa.ArrowInvalid):
                return _cast(text.cast(number), kind)
        if kind == "double":
            with contextlib.suppress(pa.ArrowInvalid):
                return text.cast("bool").cast("double")  # True and False, as pandas writes them
        return None
    if kind == "int64":
        # arrow would cast True to 1, and a date to a number of days
        if pa.types.is_boolean(values.type) or pa.types.is_temporal(values.type):
            return None
        if pa.types.is_floating(values.type):
            most = most_exact(np.dtype(values.type.to_pandas_dtype()))  # beyond it, floats round
            values = values.cast("double")  # `pc.abs` takes no float16
            largest = pc.max(pc.abs(values)).as_py() or 0  # None if all are null
            if largest > most:
                return None
    with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return values.cast(kind, safe=kind != "double")  # a double may round a large int64
    return None


def _without_empty(values: pa.Array) -> pa.Array:
    trimmed = pc.utf8_trim_whitespace(values)
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)


def numbers(values: pa.Array) -> Array:
    """Return an arrow array of numbers as a numpy array, with NaN for nulls."""
    return values.to_numpy(zero_copy_only=False)


def hashes(names: Array) -> Array:
    """Return a uint64 hash of each name. Text and its UTF-8 bytes have the same hash."""
    return pd.util.hash_array(names.astype(object, copy=False), categorize=False)  # few repeats
