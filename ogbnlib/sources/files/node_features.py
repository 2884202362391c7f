"""Features or targets in a user's file: an array, or columns of numbers or of lists."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import InputError
from ...graph.npz import CHUNK_BYTES, Array, load, slices
from .columns import Columns, Nodes, Piece, numbers, option
from .readers import is_number

_FEW = 20  # in fewer rows, the whole numbers of a feature may all differ by chance


def _feature(piece: Piece) -> Array:
    """Return a column of features as float64."""
    hint = f"; a column of text is no feature: {option('--leave-out', piece.name)}"
    return numbers(piece.cast("double", "a number", hint))


def _split_lists(values: pa.Array) -> pa.Array:
    """Split text such as "[0.5, 1]" or "0.5 1" into lists of text, null for ""; return other arrays
    unchanged."""
    if not pa.types.is_string(values.type):
        return values
    words = pc.replace_substring_regex(values, r"[\[\](){},;|\s]+", " ")
    words = pc.utf8_trim_whitespace(words)
    return pc.if_else(pc.equal(words, ""), None, pc.utf8_split_whitespace(words))


def _is_list(values: pa.Array) -> bool:
    """Whether values are lists, or text with several numbers each, judged by the first value."""
    if hasattr(values.type, "value_type"):
        return True
    words = _split_lists(values[:1])[0].as_py() if pa.types.is_string(values.type) else None
    return words is not None and len(words) > 1 and all(map(is_number, words))


class Features:
    """A file of features or targets: an array, or the columns with the role `role`.

    The role is "feature", or "value" for targets. An array is [N, F], or also [N] for targets.
    """

    def __init__(self, file: Path, columns: Columns | None, role: str = "feature") -> None:
        self.file = file
        self.row_shape: tuple[int, ...] = ()  # of one node's targets
        self._role = role
        self.own: str | None = None
        self.columns: list[str] = []
        self._array: Array | None = None
        self._list = False
        if columns is not None:
            self._open(columns)
            return
        array = load(file)
        self.row_shape = array.shape[1:]
        expected = "features [N, F], numbers"
        if role == "value":
            expected = "numbers [N] or [N, T]"
            array = array[:, None] if array.ndim == 1 else array
        if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiub":
            raise InputError(f"{file}: expected {expected}, found {array.dtype} {[*array.shape]}")
        self._array = array
        self.num_rows, self.width = array.shape

    def _open(self, columns: Columns) -> None:
        self.table = table = columns.table
        self.own = columns.one("id")
        self.columns = columns.all(self._role)
        if not self.columns:
            raise table.refusal(
                "columns of numbers, or one of lists",
                "add the features, or convert with --features ones",
            )
        first = next((batch for batch in table.batches(self.columns) if len(batch[0].values)), None)
        if first is None:
            raise InputError(f"{self.file}: expected a row for each node, found none")
        self.num_rows = table.num_rows
        self.width = len(first)
        self._list = any(_is_list(piece.values) for piece in first)
        if self._list:
            if len(first) > 1:
                hint = option("--leave-out", *self.columns[1:])
                raise table.refusal("columns of numbers, or one of lists", hint)
            values = _split_lists(first[0].values[:1])[0].as_py()
            first[0].refuse([not values], "a list of numbers")
            self.width = len(values)
        elif (
            self._role == "feature"
            and not self.own
            and len(first) > 1
            and len(first[0].values) >= _FEW
        ):
            self._refuse_ids(first)
        self.row_shape = (self.width,) if self._list or self.width > 1 else ()

    def _refuse_ids(self, first: list[Piece]) -> None:
        """Refuse columns that look like ids: whole numbers from 0 on, all different.

        The first column must not have such numbers, nor any other if all are within the row
        numbers. `first` has the first rows of each column, at least `_FEW`.
        """
        for piece in first:
            values = _feature(piece)
            whole = (values == np.floor(values)).all() and values.min() >= 0
            in_range = piece is first[0] or values.max() <= self.num_rows
            if whole and in_range and len(np.unique(values)) == len(values):
                raise self.table.refusal(
                    f"features, not different whole numbers in column {piece.name!r}, ids?",
                    f"if it holds node ids: {option('--id-column', piece.name)}; "
                    f"else {option('--leave-out', piece.name)}, or save the features as .npy",
                )

    def chunks(self, nodes: Nodes) -> Iterator[Array]:
        """Yield rows of features [n, F] in the order of `nodes`: in an array's own dtype, from
        columns as float64."""
        rows = max(1, CHUNK_BYTES // (8 * self.width))
        if self._array is not None:
            yield from slices(self._array, rows)
            return
        for pieces in self.table.batches([*self.columns, *([self.own] if self.own else [])], rows):
            if self.own:
                ids = pieces.pop()
                wrong = nodes(ids) != np.arange(ids.begin, ids.begin + len(ids.values))
                ids.refuse(wrong, "the nodes in the order of their names")
            if self._list:
                lists = _split_lists(pieces[0].values)
                lengths = numbers(
                    pc.if_else(lists.is_null(), -1, pc.list_value_length(lists)).fill_null(-1)
                )
                pieces[0].refuse(lengths != self.width, f"a list of {self.width} numbers")
                yield self._rows_of(pieces[0], lists)
            else:
                yield np.stack([_feature(piece) for piece in pieces], axis=1)

    def _rows_of(self, piece: Piece, lists: pa.Array) -> Array:
        """Return lists of equal length as rows [n, F] of float64."""
        if pa.types.is_string(piece.values.type):
            # column by column, so that an error names the row of the wrong value
            columns = [replace(piece, values=pc.list_element(lists, i)) for i in range(self.width)]
            return np.stack([numbers(part.cast("double", "a number")) for part in columns], axis=1)
        flat = replace(piece, values=lists.flatten())
        return numbers(flat.cast("double", "a number")).reshape(-1, self.width)

    @property
    def names(self) -> list[str]:
        """The name of each feature; [] for an array or a column of lists."""
        return [] if self._list else self.columns
