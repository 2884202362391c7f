"""Columns of a user's own files, and node ids in them. Import it on use: it imports pyarrow and
pandas.

pyarrow reads in pieces and keeps the order of the rows. 50 M edges between 5 M nodes named by text
take 457 MB. DuckDB, with a limit of 400 MB, joined the same ids in 1.3 GB, and in another order.
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
LONGEST_NAME = 256  # bytes; `node_name` has the width of the longest name for every node
# in any case, among numbers and labels
_MISSING = ("", "nan", "-nan", "na", "n/a", "#n/a", "null", "none", "<na>")


class Table:
    """The columns of a user's file, or of its parts, read in bounded memory; a subclass for each
    format is in `readers`.

    Attributes:
        names: of the columns; those without names are called "1", "2", ...
        header: whether the file has these names.
        typed: whether values have types, and a name is never mistaken for a value.
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
        """The number of rows; by default the file is read for it."""
        with naming(self.file, "a table"):
            return sum(len(values) for (values,) in self.arrays(self.names[:1], BATCH_ROWS))

    def place(self, row: int) -> tuple[Path, int]:
        """Return the file of a row, and the row's number in it."""
        return self.file, row

    def batches(self, columns: Sequence[str], rows: int = BATCH_ROWS) -> Iterator[list[Piece]]:
        """Yield the next rows of `columns`, at most `rows`; of a csv file those in 4 MB."""
        begin = 0
        with naming(self.file, "a table"):
            for batch in self.arrays(columns, rows):
                yield [
                    Piece(self, name, values, begin).decoded()
                    for name, values in zip(columns, batch, strict=True)
                ]
                begin += len(batch[0])

    def refusal(self, expected: str, hint: str) -> InputError:
        """Return the error for columns that are neither known nor named."""
        columns = [repr(name) for name in self.names[:_MOST_SHOWN]]
        if len(self.names) > _MOST_SHOWN:
            columns.append(f"... ({len(self.names)})")
        return InputError(
            f"{self.file}: expected {expected}, found columns {', '.join(columns)}; {hint}"
        )


@dataclass(frozen=True)
class Piece:
    """Consecutive values of a column, and the number of the first one's row."""

    table: Table
    name: str
    values: pa.Array
    begin: int

    def decoded(self) -> Piece:
        """Return the values without their dictionary, if they have one, and text as strings."""
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
        """Cast to int64, double or string; missing values become null, and 3.0 is the whole number
        3. An error about a value ends with `hint`."""
        values = _cast(self.values, kind)
        if values is None:
            rows = range(len(self.values))
            first = next(row for row in rows if _cast(self.values.slice(row, 1), kind) is None)
            if not pa.types.is_string(self.values.type):
                hint = f" ({self.values.type}){hint}"
            self.refuse(np.equal(rows, first), expected, hint)
        return values


def _cast(values: pa.Array, kind: str) -> pa.Array | None:
    """Return values as another type, None if one of them has no equal there."""
    if pa.types.is_string(values.type) and kind != "string":
        # most columns have no missing values, whose search takes longer than the cast
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
        # arrow takes True for 1, a date for a number of days
        if pa.types.is_boolean(values.type) or pa.types.is_temporal(values.type):
            return None
        # Beyond 2**53, several whole numbers are the same float.
        if pa.types.is_floating(values.type) and (pc.max(pc.abs(values)).as_py() or 0) > 2**53:
            return None
    with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return values.cast(kind, safe=kind != "double")
    return None


def numbers(values: pa.Array) -> Array:
    """An arrow array of numbers as numpy; NaN for nulls."""
    return values.to_numpy(zero_copy_only=False)


def without_missing(values: pa.Array) -> pa.Array:
    """Text stripped, with null for the words that mean "missing"."""
    values = pc.utf8_trim_whitespace(values)
    missing = pc.is_in(pc.utf8_lower(values), value_set=pa.array(_MISSING))
    return pc.if_else(missing, pa.scalar(None, pa.string()), values)


def name_keys(piece: Piece, kind: str, expected: str) -> Array:
    """Return names, none of which may be missing, as 64-bit numbers: those of the kind "int64" as
    they are, of "string" hashed."""
    keys = piece.cast(kind, expected)
    if kind == "int64":
        piece.refuse(keys.is_null(), expected)
        return numbers(keys)
    piece.refuse(np.asarray(keys.fill_null("")) == "", expected)
    return hashes(numbers(keys))


def hashes(names: Array) -> Array:
    """Return a uint64 for each name, of text or of its UTF-8 bytes."""
    return pd.util.hash_array(names.astype(object, copy=False), categorize=False)


FLAGS = ("false", "0", "0.0", "true", "1", "1.0")  # the second half means yes


def flags(piece: Piece, expected: str = "true or false") -> pa.Array:
    """Return booleans of true, false, 1 and 0 in any case; null for other values."""
    places = pc.index_in(pc.utf8_lower(piece.cast("string", expected)), value_set=pa.array(FLAGS))
    return pc.greater_equal(places, len(FLAGS) // 2)


class Nodes:
    """Map from node ids to row numbers. Ids are row numbers already, or names: text or any whole
    numbers.

    Names take about 50 bytes a node, as 64-bit numbers in pandas' index; text is hashed. Two of ten
    million texts have the same hash with a chance of 3e-6, and are refused then.

    `rows` is the file whose rows are the nodes, for messages; `names` the table and its column with
    the names in order.
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
        # "007" and "7" are two names: whole numbers are as int64 writes them
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
        """Return int64 rows of ids, -1 for a name that no node has."""
        return self(piece) if self.names is None else self._index.get_indexer(self._keys(piece))

    def __call__(self, piece: Piece) -> Array:
        """Return int64 rows of ids."""
        if self.names is None:
            ids = self._keys(piece)
            hint = from_one(ids, self.num_nodes)
        else:
            ids = self.find(piece)
            hint = "; --drop-unknown leaves out edges of other names"
        piece.refuse((ids < 0) | (ids >= self.num_nodes), self._expected, hint)
        return ids.astype(np.int64, copy=False)

    def are_rows(self, pieces: Iterable[Piece]) -> bool:
        """Whether ids can only be row numbers, although the nodes have names: every id is a row
        number, and none is a name."""
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
        """Return the dtype of the names, int64 or UTF-8 bytes of fixed width, and the names in
        order of the nodes."""
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
_MOST_OF_ROLE = {"feature": 4, "value": 4, "left out": 20}  # names of one role; more are counted


def option(name: str, *columns: str) -> str:
    """Return an option of the command line that names columns."""
    return f"{name} {shlex.quote(','.join(columns))}"


def plain(name: str) -> str:
    """Return a name for comparisons: "Train_Mask" and "trainmask" are the same."""
    return re.sub(r"[\W_]+", "", name).lower()


@dataclass(eq=False)
class Columns:
    """The columns of one file with their roles; `uses` are the roles of the file itself."""

    table: Table
    uses: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)  # the column of each split
    notes: dict[str, str] = field(default_factory=dict)  # why a column is left out

    def leave_out(self, names: Iterable[str]) -> None:
        """Give the columns that the user leaves out this role."""
        columns = [column for column in map(self.find, names) if column is not None]
        self.roles |= dict.fromkeys(columns, "left out")
        self.notes |= dict.fromkeys(columns, " (--leave-out)")

    def all(self, role: str) -> list[str]:
        return [name for name in self.table.names if self.roles.get(name) == role]

    def one(self, role: str) -> str | None:
        return next(iter(self.all(role)), None)

    @property
    def free(self) -> list[str]:
        """The columns without a role yet."""
        return [name for name in self.table.names if name not in self.roles]

    @property
    def alone(self) -> str | None:
        """The only column, which needs no name; but the header of a csv file may be a value."""
        is_sure = not self.table.header or self.table.typed
        return self.free[0] if is_sure and len(self.free) == 1 else None

    def find(self, name: str | None) -> str | None:
        """Return the column that the user calls `name`: exactly so, else in any case."""
        if name is None or name in self.table.names:
            return name
        return next((own for own in self.table.names if own.lower() == name.lower()), None)

    def only(self, names: Iterable[str], what: str) -> str | None:
        """Return the free column with one of these names, None if there is none; two are
        refused."""
        known = {plain(name) for name in names}
        columns = [name for name in self.free if plain(name) in known]
        if len(columns) > 1:
            raise self.table.refusal(
                f"one column of {what}, not {' and '.join(map(repr, columns))}",
                f"leave the wrong one out, such as {option('--leave-out', columns[1])}",
            )
        return columns[0] if columns else None

    def mask(self, split: str) -> str | None:
        """Return the free column that is the mask of a split by its name."""
        return self.only(
            (name for name, own in MASK_NAMES.items() if own == split), f"mask of {split}"
        )

    def describe(self) -> str:
        """Return one line: the roles, and the columns of each."""
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
