"""Node ids in a user's files: row numbers, or names that a table defines."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..graph.array_checks import from_one
from ..graph.npz import Array
from .columns import Piece, Table, name_keys, numbers

LONGEST_NAME = 256  # bytes; in `node_name` each node takes the width of the longest name


class Nodes:
    """Map from node ids to row numbers.

    Ids are row numbers, or names: text or any whole numbers. A pandas index holds the names as
    64-bit numbers, about 50 bytes a node; text is hashed. Among ten million texts, two have the
    same hash with a probability of 3e-6, and are then refused.

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
            f"node ids from 0 to {num_nodes - 1}, the rows of {rows}; "
            "names need a column of names in a table of nodes"
        )
        if names is None:
            return
        table, column = names
        if table.num_rows != num_nodes:
            raise InputError(
                f"{table.file}: expected {num_nodes} names, one a row of {rows}, found {table.num_rows}"
            )
        self._choose_kind(table, column)
        self._expected = "the name of a node"
        keys = [np.empty(0, np.int64 if self.kind == "int64" else np.uint64)]
        for piece in table.pieces(column):
            keys.append(self._keys(piece))
            if self.kind == "string":
                lengths = pc.binary_length(piece.values.cast("string"))
                self._width = max(self._width, pc.max(lengths).as_py() or 1)
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

    def _choose_kind(self, table: Table, column: str) -> None:
        # "007" and "7" are two names: text is read as whole numbers only if int64 prints it so
        for piece in table.pieces(column):
            with contextlib.suppress(pa.ArrowInvalid):
                values = piece.values
                if not pa.types.is_string(values.type) or values.cast("int64").cast(
                    "string"
                ).equals(values):
                    continue
            self.kind = "string"
            break

    @property
    def are_reordered(self) -> bool:
        """Whether the names are the row numbers in another order than that of the rows."""
        if self.names is None or self.kind == "string":
            return False
        rows = np.arange(self.num_nodes)
        values = self._index.to_numpy()
        return not np.array_equal(values, rows) and np.array_equal(np.sort(values), rows)

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
            hint = "; drop_unknown: true in dataset.yaml leaves out edges of other names"
        piece.refuse((ids < 0) | (ids >= self.num_nodes), self._expected, hint)
        return ids.astype(np.int64, copy=False)

    def chunks(self) -> tuple[np.dtype[Any], Iterator[Array]] | None:
        """Return the names' dtype, int64 or UTF-8 bytes of fixed width, and pieces of the names in
        the order of the nodes; None if the nodes have no names."""
        if self.names is None:
            return None
        table, column = self.names
        pieces = (piece.cast(self.kind, self._expected) for piece in table.pieces(column))
        if self.kind == "int64":
            return np.dtype("<i8"), map(numbers, pieces)
        dtype = np.dtype(f"S{self._width}")
        return dtype, (
            np.array([text.encode() for text in names.to_pylist()], dtype) for names in pieces
        )
