"""Columns of a user's own files, and node ids in them.

Import this module only when needed: it imports pyarrow and pandas. pyarrow reads files in pieces
and keeps the order of the rows. 50 M edges between 5 M nodes named by text take 457 MB of memory.
DuckDB, limited to 400 MB, took 1.3 GB to join the same ids and changed the order of the rows.
"""

from __future__ import annotations

import contextlib
import re
import reprlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import InputError, naming
from ...graph.array_checks import from_one
from ...graph.npz import Array

_TEXTS = (
    "large_string",
    "string_view",
    "binary_view",
    "binary",
    "large_binary",
    "fixed_size_binary",
)
BATCH_ROWS = 2**17
_MOST_SHOWN = 20  # columns in a message
LONGEST_NAME = 256  # bytes; in `node_name` each node takes the width of the longest name
# words for a missing value, in upper or lower case
_MISSING = ("", "nan", "-nan", "na", "n/a", "#n/a", "null", "none", "<na>")


class Table:
    """The columns of a user's file, or of its parts, read in bounded memory.

    `readers` has a subclass for each format.

    Attributes:
        names: the columns' names; columns without names are called "1", "2", ...
        header: whether the file itself contains these names.
        typed: whether values have types, so that a name can't be mistaken for a value.
    """

    header = typed = True

    def __init__(self, file: Path, names: Sequence[str]) -> None:
        self.file = file
        self.names = list(names)

    def arrays(self, columns: Sequence[str], rows: int) -> Iterator[list[pa.Array]]:
        """Yield the next values of each of `columns`, about `rows` at a time."""
        raise NotImplementedError

    @cached_property
    def num_rows(self) -> int:
        """The number of rows; by default the file is read to count them."""
        with naming(self.file, "a table"):
            return sum(len(values) for (values,) in self.arrays(self.names[:1], BATCH_ROWS))

    def place(self, row: int) -> tuple[Path, int]:
        """Return the file of a row, and the row's number in it."""
        return self.file, row

    def batches(self, columns: Sequence[str], rows: int = BATCH_ROWS) -> Iterator[list[Piece]]:
        """Yield the next rows of `columns`: at most `rows`, or from a text file those in 4 MB."""
        begin = 0
        with naming(self.file, "a table"):
            for batch in self.arrays(columns, rows):
                yield [
                    Piece(self, name, values, begin).decoded()
                    for name, values in zip(columns, batch, strict=True)
                ]
                begin += len(batch[0])

    def refusal(self, expected: str, hint: str) -> InputError:
        """Return the error for columns other than `expected`, with 20 names at most and `hint`."""
        columns = [repr(name) for name in self.names[:_MOST_SHOWN]]
        if len(self.names) > _MOST_SHOWN:
            columns.append(f"... ({len(self.names)})")
        return InputError(
            f"{self.file}: expected {expected}, found columns {', '.join(columns)}; {hint}"
        )


@dataclass(frozen=True)
class Piece:
    """Consecutive values of a column; `begin` is the row number of the first one."""

    table: Table
    name: str
    values: pa.Array
    begin: int

    def decoded(self) -> Piece:
        """Return the piece with dictionary-encoded values decoded, and with text as strings."""
        values = self.values
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        piece = replace(self, values=values)
        if str(values.type).startswith(_TEXTS):
            return replace(piece, values=piece.cast("string", "text in UTF-8"))
        return piece

    def refuse(
        self, wrong: Sequence[bool] | Array | pa.Array, expected: str, hint: str = ""
    ) -> None:
        """Raise an `InputError` that names the first row where `wrong` is true, if there is any."""
        rows = np.flatnonzero(wrong)
        if len(rows):
            at = int(rows[0])
            file, row = self.table.place(self.begin + at)
            value = reprlib.repr(self.values[at].as_py())
            raise InputError(
                f"{file}, column {self.name!r}, row {row}: expected {expected}, found {value}{hint}"
            )

    def cast(self, kind: str, expected: str, hint: str = "") -> pa.Array:
        """Return the values as int64, double or string.

        Among numbers, missing values become null, and 3.0 is the whole number 3. The error about a
        value that can't be cast ends with `hint`.
        """
        values = _cast(self.values, kind)
        if values is None:
            rows = range(len(self.values))
            first = next(row for row in rows if _cast(self.values.slice(row, 1), kind) is None)
            if not pa.types.is_string(self.values.type):
                hint = f" ({self.values.type}){hint}"
            self.refuse(np.equal(rows, first), expected, hint)
        return values


def _cast(values: pa.Array, kind: str) -> pa.Array | None:
    """Return the values as another type, or None if one of them can't be cast."""
    if pa.types.is_string(values.type) and kind != "string":
        # most columns have no missing values, and to find them takes longer than to cast
        for text in (values, without_missing(values)):
            with contextlib.suppress(pa.ArrowInvalid):
                return text.cast(kind)
        with contextlib.suppress(pa.ArrowInvalid):
            return _cast(text.cast("double"), kind)
        if kind == "double":
            with contextlib.suppress(pa.ArrowInvalid):
                return text.cast("bool").cast("double")  # True and False, as pandas writes them
        return None
    if kind == "int64":
        # arrow would cast True to 1, and a date to a number of days
        if pa.types.is_boolean(values.type) or pa.types.is_temporal(values.type):
            return None
        # Beyond 2**53, several whole numbers are the same float.
        if pa.types.is_floating(values.type) and (pc.max(pc.abs(values)).as_py() or 0) > 2**53:
            return None
    with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return values.cast(kind, safe=kind != "double")
    return None


def numbers(values: pa.Array) -> Array:
    """Return an arrow array of numbers as a numpy array, with NaN for nulls."""
    return values.to_numpy(zero_copy_only=False)


def without_missing(values: pa.Array) -> pa.Array:
    """Return the text without blanks at its ends, and null for words that mean "missing"."""
    values = pc.utf8_trim_whitespace(values)
    missing = pc.is_in(pc.utf8_lower(values), value_set=pa.array(_MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), values)


def name_keys(piece: Piece, kind: str, expected: str) -> Array:
    """Return a 64-bit number for each name: the name itself if `kind` is "int64", or its hash if
    `kind` is "string". A missing name is refused."""
    keys = piece.cast(kind, expected)
    if kind == "int64":
        piece.refuse(keys.is_null(), expected)
        return numbers(keys)
    piece.refuse(np.asarray(keys.fill_null("")) == "", expected)
    return hashes(numbers(keys))


def hashes(names: Array) -> Array:
    """Return a uint64 hash of each name. Text and its UTF-8 bytes have the same hash."""
    return pd.util.hash_array(names.astype(object, copy=False), categorize=False)


FLAGS = ("false", "0", "0.0", "true", "1", "1.0")  # the second half means yes


def flags(piece: Piece, expected: str = "true or false") -> pa.Array:
    """Return true, false, 1 and 0 as booleans, in upper or lower case; null for other values."""
    places = pc.index_in(pc.utf8_lower(piece.cast("string", expected)), value_set=pa.array(FLAGS))
    return pc.greater_equal(places, len(FLAGS) // 2)


class Nodes:
    """Map from node ids to row numbers.

    Ids are either row numbers already, or names: text or any whole numbers. A pandas index holds
    the names as 64-bit numbers, about 50 bytes a node; text is hashed. Among ten million texts, two
    have the same hash with a probability of 3e-6, and are then refused.

    Args:
        rows: the file whose rows are the nodes, for messages.
        names: the table and the column with the names in row order; None if ids are row numbers.
    """

    def __init__(self, num_nodes: int, rows: str, names: tuple[Table, str] | None = None) -> None:
        self.num_nodes = num_nodes
        self.names = names
        self.kind = "int64"
        self._width = 1
        self._expected = (
            f"node ids from 0 to {num_nodes - 1}, the rows of {rows}; or a file nodes with the id "
            "of each row (--relabel)"
        )
        if names is None:
            return
        table, column = names
        if table.num_rows != num_nodes:
            raise InputError(
                f"{table.file}: expected {num_nodes} names, one a row of {rows}, found {table.num_rows}"
            )
        # "007" and "7" are two names: text is read as whole numbers only if int64 prints it so
        for (piece,) in table.batches([column]):
            with contextlib.suppress(pa.ArrowInvalid):
                values = piece.values
                if not pa.types.is_string(values.type) or values.cast("int64").cast(
                    "string"
                ).equals(values):
                    continue
            self.kind = "string"
            break
        self._expected = "the name of a node"
        keys = [np.empty(0, np.int64 if self.kind == "int64" else np.uint64)]
        for (piece,) in table.batches([column]):
            keys.append(self._keys(piece))
            if self.kind == "string":
                self._width = max(
                    self._width, pc.max(pc.binary_length(piece.values.cast("string"))).as_py() or 1
                )
        if self._width > LONGEST_NAME:
            raise InputError(
                f"{table.file}: expected names of {LONGEST_NAME} bytes at most, found {self._width}"
            )
        self._index = pd.Index(np.concatenate(keys))
        if not self._index.is_unique:
            row = int(self._index.duplicated().argmax())
            raise InputError(
                f"{table.file}, row {row}: expected each node once, found one of the rows above again"
            )
        self._expected = f"one of the {num_nodes} nodes in {table.file.name}"

    def _keys(self, piece: Piece) -> Array:
        return name_keys(piece, self.kind, self._expected)

    def find(self, piece: Piece) -> Array:
        """Return the row of each id, int64; -1 for a name that no node has."""
        return self(piece) if self.names is None else self._index.get_indexer(self._keys(piece))

    def __call__(self, piece: Piece) -> Array:
        """Return the row of each id, int64; refuse an id that no node has."""
        if self.names is None:
            ids = self._keys(piece)
            hint = from_one(ids, self.num_nodes)
        else:
            ids = self.find(piece)
            hint = "; --drop-unknown leaves out edges of other names"
        piece.refuse((ids < 0) | (ids >= self.num_nodes), self._expected, hint)
        return ids.astype(np.int64, copy=False)

    def are_rows(self, pieces: Iterable[Piece]) -> bool:
        """Whether the ids must be row numbers although the nodes have names: there are ids, each is
        a row number, and none is a name."""
        count = 0
        for piece in pieces:
            try:
                rows = numbers(piece.cast("int64", ""))
                names = self._index.get_indexer(self._keys(piece))
            except InputError:
                return False
            if (names >= 0).any() or (rows < 0).any() or (rows >= self.num_nodes).any():
                return False
            count += len(rows)
        return count > 0

    def chunks(self) -> tuple[np.dtype[Any], Iterator[Array]] | None:
        """Return the names' dtype, int64 or UTF-8 bytes of fixed width, and pieces of the names in
        the order of the nodes; None if the nodes have no names."""
        if self.names is None:
            return None
        table, column = self.names
        pieces = (piece.cast(self.kind, self._expected) for (piece,) in table.batches([column]))
        if self.kind == "int64":
            return np.dtype("<i8"), map(numbers, pieces)
        dtype = np.dtype(f"S{self._width}")
        return dtype, (
            np.array([text.encode() for text in names.to_pylist()], dtype) for names in pieces
        )


SPLIT_OF = {
    "train": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "test": "test",
}
MASK_NAMES = {
    **{f"{word}mask": split for word, split in SPLIT_OF.items()},
    **{f"is{word}": split for word, split in SPLIT_OF.items()},
}
# Most entries for a role in a message; with more columns, the last entry is their number.
_MOST_OF_ROLE = {"feature": 4, "value": 4, "left out": 20}


def option(name: str, *columns: str) -> str:
    """Return a command-line option that names columns."""
    return f"{name} {shlex.quote(','.join(columns))}"


def plain(name: str) -> str:
    """Return a name for comparisons: "Train_Mask" and "trainmask" are the same."""
    return re.sub(r"[\W_]+", "", name).lower()


@dataclass(eq=False)
class Columns:
    """The columns of one file and their roles; `uses` has the roles of the file itself."""

    table: Table
    uses: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)  # the mask column of each split
    notes: dict[str, str] = field(default_factory=dict)  # why a column is left out

    def leave_out(self, names: Iterable[str]) -> None:
        """Give the role "left out" to the columns that the user names."""
        columns = [column for column in map(self.find, names) if column is not None]
        self.roles |= dict.fromkeys(columns, "left out")
        self.notes |= dict.fromkeys(columns, " (--leave-out)")

    def all(self, role: str) -> list[str]:
        return [name for name in self.table.names if self.roles.get(name) == role]

    def one(self, role: str) -> str | None:
        return next(iter(self.all(role)), None)

    @property
    def free(self) -> list[str]:
        """The columns that have no role yet."""
        return [name for name in self.table.names if name not in self.roles]

    @property
    def alone(self) -> str | None:
        """The only column without a role, whatever its name, or None.

        None for text with a header, too, because the header could be a value.
        """
        is_sure = not self.table.header or self.table.typed
        return self.free[0] if is_sure and len(self.free) == 1 else None

    def find(self, name: str | None) -> str | None:
        """Return the column `name`, else one that differs only in upper and lower case, else
        None."""
        if name is None or name in self.table.names:
            return name
        return next((own for own in self.table.names if own.lower() == name.lower()), None)

    def only(self, names: Iterable[str], what: str) -> str | None:
        """Return the column without a role that has one of these names, or None. Two such columns
        are refused."""
        known = {plain(name) for name in names}
        columns = [name for name in self.free if plain(name) in known]
        if len(columns) > 1:
            raise self.table.refusal(
                f"one column of {what}, not {' and '.join(map(repr, columns))}",
                f"leave the wrong one out, such as {option('--leave-out', columns[1])}",
            )
        return columns[0] if columns else None

    def mask(self, split: str) -> str | None:
        """Return the column without a role that is named like a split's mask, or None."""
        return self.only(
            (name for name, own in MASK_NAMES.items() if own == split), f"mask of {split}"
        )

    def describe(self) -> str:
        """Return one line with the roles and the columns of each role."""
        parts = []
        roles = ("id", "source", "target", "feature", "label", "value", "split", "mask", "left out")
        for role in roles:
            texts = [repr(name) + self.notes.get(name, "") for name in self.all(role)]
            most = _MOST_OF_ROLE.get(role, len(texts))
            if len(texts) > most:
                texts = [*texts[: most - 1], f"... ({len(texts)} columns)"]
            if texts:
                parts.append(f"{role} {', '.join(texts)}")
        return f"{self.table.file}: {'; '.join(parts)}"
