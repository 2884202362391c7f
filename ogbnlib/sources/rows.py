"""Rows of features, or of values to predict, in the tables of a user's files."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..graph.npz import CHUNK_BYTES, Array
from .columns import Columns, Piece, numbers
from .names import Nodes
from .node_values import nodes_of


class Rows:
    """The columns of one table that have a role: columns of numbers, or of lists of numbers.

    Attributes:
        width: the number of values in a row.
        names: the name of each value.
        row_shape: the shape of a row; () for a single column of numbers.
        dtype: float16 for an array of float16, else float32.
    """

    def __init__(self, columns: Columns, role: str) -> None:
        self._columns = columns
        self._names = columns.all(role)
        self.table = columns.table
        self.num_rows = self.table.num_rows
        first = next(
            (batch for batch in self.table.batches(self._names) if len(batch[0].values)), None
        )
        if first is None:
            raise InputError(f"{self.table.file}: expected a row for each node, found none")
        self._widths = [_width(piece) for piece in first]
        self.names: list[str] = []
        for name, width in zip(self._names, self._widths, strict=True):
            if width:
                self.names += [f"{name}[{i}]" for i in range(width)]
            else:
                self.names.append(name)
        self.width = len(self.names)
        self.row_shape = () if self._widths == [0] else (self.width,)
        value_type = getattr(first[0].values.type, "value_type", None)
        is_half = len(first) == 1 and value_type == pa.float16()
        self.dtype = np.dtype(np.float16 if is_half else np.float32)

    def chunks(self, nodes: Nodes) -> Iterator[Array]:
        """Yield rows [n, width] in the order of `nodes`; refuse rows in another order."""
        rows = max(1, CHUNK_BYTES // (8 * self.width))
        ids = self._columns.first("id", "name")
        find = nodes_of(self._columns, nodes)
        for pieces in self.table.batches([*self._names, *filter(None, [ids])], rows):
            if ids:
                piece = pieces.pop()
                wrong = find(piece) != np.arange(piece.begin, piece.begin + len(piece.values))
                piece.refuse(wrong, "the nodes in their order")
            parts = [
                _lists(piece, width) if width else _number(piece)
                for piece, width in zip(pieces, self._widths, strict=True)
            ]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _width(piece: Piece) -> int:
    if not hasattr(piece.values.type, "value_type"):
        return 0
    values = piece.values[0].as_py()
    piece.refuse([not values], "a list of numbers")
    return len(values)


def _number(piece: Piece) -> Array:
    return numbers(piece.cast("double", "a number"))[:, None]


def _lists(piece: Piece, width: int) -> Array:
    """Return lists of one length as rows [n, width], numbers in their own dtype."""
    lists = piece.values
    lengths = pc.list_value_length(lists).fill_null(-1)
    piece.refuse(pc.not_equal(lengths, width), f"a list of {width} numbers")
    flat = lists.flatten()
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        flat = Piece(piece.table, piece.name, flat, piece.begin * width).cast("double", "a number")
    return numbers(flat).reshape(-1, width)


def joined(parts: Sequence[Rows], nodes: Nodes) -> Iterator[Array]:
    """Yield the rows of several tables side by side; the tables have equally many rows."""
    streams = [part.chunks(nodes) for part in parts]
    if len(streams) == 1:
        yield from streams[0]
        return
    pending = [np.empty((0, part.width)) for part in parts]
    while True:
        pending = [
            rows if len(rows) else next(stream, rows)
            for rows, stream in zip(pending, streams, strict=True)
        ]
        count = min(map(len, pending))
        if not count:
            return
        yield np.concatenate([rows[:count] for rows in pending], axis=1)
        pending = [rows[count:] for rows in pending]
