"""Rows of nodes on disk, in files of several columns each, and one hop over columns in RAM."""

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

Done = Callable[[int], object]


def pick(members: NodeSet | None, first: int, values: Array) -> Array:
    """Return the rows of `members` (None: all) among `values`, the rows of nodes from `first` on."""
    if members is None:
        return values
    return values[members.contains(np.arange(first, first + len(values)))]


class Columns:
    """Rows of `members` (None for all nodes), with their columns spread over several files."""

    def __init__(
        self, files: Sequence[DiskArray], dtype: np.dtype[np.generic], num_nodes: int, members: NodeSet | None = None,
        decode: Callable[[Array, slice], Array] = lambda rows, columns: rows[:, columns],
    ) -> None:  # fmt: skip
        self.files = files
        self.dtype = dtype
        self.num_nodes = num_nodes
        self.members = members
        self._decode = decode
        self._begins = [
            0,
            *itertools.accumulate(file.row_bytes // dtype.itemsize for file in files),
        ]
        self.num_rows = files[0].num_rows
        self.width = self._begins[-1]
        # number of nodes to read at a time
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
        arrays = {path: load(path) for path in paths}
        files = [
            DiskArray(path, HEADER_BYTES, array.strides[0], len(array))
            for path, array in arrays.items()
        ]
        return cls(files, arrays[paths[0]].dtype, num_nodes, members)

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.width * self.dtype.itemsize

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _places(self, first: int, end: int) -> list[int]:
        if self.members is None:
            return [first, end]
        return [int(rank) for rank in self.members.ranks(np.array([first, end]))]

    def rows(
        self, first: int, end: int, columns: slice = slice(None), targets: NodeSet | None = None
    ) -> Array:
        """Return the float32 rows of members among the nodes `first` to `end`, and in `targets`."""
        begin, stop = self._places(first, end)
        low, high, _ = columns.indices(self.width)
        parts = []
        for file, (start, until) in zip(self.files, itertools.pairwise(self._begins), strict=True):
            if low < until and high > start:
                values = file.rows(begin, stop, self.dtype).reshape(stop - begin, until - start)
                parts.append(self._decode(values, slice(max(low - start, 0), high - start)))
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
            values[slice(*self._places(first, end))] = prepare(first, end)

        with contextlib.closing(in_order(firsts, fill)) as filled:
            for _ in filled:
                done(self.nbytes // len(firsts))
        yield from edges.sweep(values, self.members, targets, loops=loops, done=done)
