"""Rows of nodes on disk, in files of several columns (features) each, and one hop over columns in
RAM."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import DTypeLike

from ..graph.node_set import NodeSet
from ..graph.npz import CHUNK_BYTES, Array, load
from ..graph.store import Store
from ..graph.store_format import HEADER_BYTES
from ..io.disk_array import DiskArray
from .sweep import Edges, in_order

Done = Callable[[int], object]  # called with the number of bytes read since the last call


def pick(members: NodeSet | None, first: int, values: Array) -> Array:
    """Return the rows of `members` (None: all) among `values`, the rows of nodes from `first` on."""
    if members is None:
        return values
    return values[members.contains(np.arange(first, first + len(values)))]


class Columns:
    """Rows of `members` (None for all nodes, of which there are `num_nodes`), ascending, with their
    columns spread over several files in order.

    `decode(rows [n, width of a file], columns)` returns these columns of the rows, [n, columns].
    """

    def __init__(
        self, files: Sequence[DiskArray], dtype: np.dtype[np.generic], num_nodes: int, members: NodeSet | None = None,
        decode: Callable[[Array, slice], Array] = lambda rows, columns: rows[:, columns],
    ) -> None:  # fmt: skip
        self.files = files
        self.dtype = dtype
        self.num_nodes = num_nodes
        self.members = members
        self._decode = decode
        widths = [file.row_bytes // dtype.itemsize for file in files]
        self._begins = [0, *itertools.accumulate(widths)]  # first column of each file, and the end
        self.num_rows = files[0].num_rows
        self.width = self._begins[-1]
        self.nbytes = self.num_rows * self.width * dtype.itemsize
        # nodes to read at a time: 4 MB, of int8 2 MB, which are widened to 8 MB of float32
        self.step = max(1, CHUNK_BYTES // 2 // (self.width * max(2, dtype.itemsize)))

    @classmethod
    def features(cls, store: Store) -> Self:
        return cls(
            [store.disk_array("x")], store.feature_dtype, store.num_nodes, decode=store.decode
        )

    @classmethod
    def open(cls, folder: Path, name: str, num_nodes: int, members: NodeSet | None) -> Self:
        """Open the files `NAME-FIRST.npy`; FIRST is the file's first column."""
        paths = sorted(
            folder.glob(f"{name}-*.npy"), key=lambda path: int(path.stem.rpartition("-")[2])
        )
        maps = {path: load(path) for path in paths}  # for their shapes and dtype
        files = [
            DiskArray(path, HEADER_BYTES, rows.strides[0], len(rows)) for path, rows in maps.items()
        ]
        return cls(files, maps[paths[0]].dtype, num_nodes, members)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _rows_of(self, first: int, end: int) -> list[int]:
        # the rows (begin, end) of the members among the nodes `first` to `end`, end excluded
        if self.members is None:
            return [first, end]
        return self.members.ranks(np.array([first, end])).tolist()

    def rows(
        self, first: int, end: int, columns: slice = slice(None), targets: NodeSet | None = None
    ) -> Array:
        """Return the rows of members (and of `targets`, if set) among the nodes `first` to `end`,
        float32 [n, columns]."""
        begin, stop = self._rows_of(first, end)
        low, high, _ = columns.indices(self.width)
        parts = []  # the columns of each file
        for file, (left, right) in zip(self.files, itertools.pairwise(self._begins), strict=True):
            if low < right and high > left:  # the file has some of the columns
                values = file.rows(begin, stop, self.dtype).reshape(stop - begin, right - left)
                parts.append(self._decode(values, slice(max(low - left, 0), high - left)))
        rows = np.concatenate(parts, 1, dtype=np.float32)
        if targets is None:
            return rows
        return rows[targets.contains(pick(self.members, first, np.arange(first, end)))]

    def hop(
        self, edges: Edges, targets: NodeSet | None, width: int, dtype: DTypeLike,
        prepare: Callable[[int, int], Array], *, loops: bool, done: Done,
    ) -> Generator[tuple[int, Array, Array], None, None]:  # fmt: skip
        """Read `width` columns of all members into RAM; yield `Edges.sweep` of them for `targets`.

        `prepare(first, end)` returns these columns for the members among nodes `first` to `end`.
        """
        values = np.empty((self.num_rows, width), dtype)
        firsts = range(0, self.num_nodes, self.step)

        def fill(first: int) -> None:
            end = min(first + self.step, self.num_nodes)
            values[slice(*self._rows_of(first, end))] = prepare(first, end)

        with contextlib.closing(in_order(firsts, fill)) as filled:
            for _ in filled:
                done(self.nbytes // len(firsts))
        yield from edges.sweep(values, self.members, targets, loops=loops, done=done)
