"""Conversion of edges to CSC by a stable external counting sort, without the edge list in RAM."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..io.blocks import Stream
from ..kernels import kernel
from .npz import Array
from .store_format import index_dtype
from .writer import ArrayWriter

_MAX_BUCKETS = 256  # ranges; with more, the pieces of a chunk are too short to read one by one


@kernel
def _partition(src: Array, dst: Array, shift: int, starts: Array, out: Array) -> None:
    """Sort edges stably by their range of destinations, `dst >> shift`, into rows (dst - first dst
    of the range, src) of `out`. `starts`, all zeros, gets each range's first row, and the end."""
    for v in dst:
        starts[(v >> shift) + 1] += 1
    starts[:] = starts.cumsum()
    free = starts[:-1].copy()  # the next free row of each range
    mask = (1 << shift) - 1
    for i in range(len(dst)):
        number = dst[i] >> shift
        out[free[number], 0] = dst[i] & mask
        out[free[number], 1] = src[i]
        free[number] += 1


class Pairs(Stream):
    """Edges on disk, as rows (dst - first dst of its range, src); each range of destinations can be
    read alone. Each chunk is written in one piece, sorted by range; RAM has only the beginning of
    each range in each chunk."""

    def __init__(
        self, path: Path, num_cols: int, shift: int, dtype: type[np.signedinteger[Any]]
    ) -> None:
        self.num_cols = num_cols  # destinations are below
        self.shift = shift  # a range has 2**shift destinations, the last one perhaps fewer
        self.num_ranges = -(-num_cols >> shift)  # rounded up
        self.dtype = np.dtype(dtype)
        self.pair_bytes = 2 * self.dtype.itemsize
        super().__init__(path)
        # for each chunk its first byte, and each range's first pair in it, int64 [num_ranges + 1]
        self._chunks: list[tuple[int, Array]] = []

    def add(self, src: Array, dst: Array) -> None:
        """Append a chunk of edges, integers [n]; memory for a copy of it is needed meanwhile."""
        starts = np.zeros(self.num_ranges + 1, np.int64)
        out = np.empty((len(src), 2), self.dtype)
        _partition(src, dst, self.shift, starts, out)
        self._chunks.append((self.size, starts))  # it begins at the present end of the file
        self.append(out.reshape(-1).view(np.uint8).data)

    def count(self, number: int) -> int:
        """Return the number of pairs in range `number`."""
        return sum(int(starts[number + 1] - starts[number]) for _, starts in self._chunks)

    def pieces(self, number: int, most: int) -> Iterator[Array]:
        """Yield the pairs of range `number` in order, [n, 2], at most `most` at a time; the next
        ones overwrite them."""
        out = np.empty((min(most, self.count(number)), 2), self.dtype)
        filled = 0
        for offset, starts in self._chunks:
            begin, end = starts[number : number + 2].tolist()  # the range's pairs in this chunk
            while begin < end:
                take = min(end - begin, len(out) - filled)
                part = out[filled : filled + take]
                self.fill(part.reshape(-1).view(np.uint8).data, offset + begin * self.pair_bytes)
                begin += take
                filled += take
                if filled == len(out):
                    yield out
                    filled = 0
        if filled:
            yield out[:filled]


@kernel
def _csc(num_cols: int, col: Array, row: Array, unique: bool) -> tuple[Array, Array]:
    """Convert edges in RAM, `row` to `col`, to CSC, colptr and row, by a stable counting sort; with
    `unique`, every column is sorted and its duplicates are dropped. Ids are not checked."""
    ptr = np.zeros(num_cols + 2, np.int64)  # at v + 2 the degree of column v
    out = np.empty(len(row), row.dtype)
    for v in col:
        ptr[v + 2] += 1
    for v in range(2, num_cols + 2):
        ptr[v] += ptr[v - 1]
    for i in range(len(col)):  # ptr[v + 1] is the next free place of column v
        out[ptr[col[i] + 1]] = row[i]
        ptr[col[i] + 1] += 1
    colptr = ptr[:-1]  # each place has moved to the end of its column
    if not unique:
        return colptr, out
    count = 0  # edges that stay; they move forward in `out`
    begin = colptr[0]
    for v in range(num_cols):
        end = colptr[v + 1]  # replaced below
        last = -1  # no id
        out[begin:end].sort()
        for i in range(begin, end):
            if out[i] != last:
                last = out[i]
                out[count] = last
                count += 1
        colptr[v + 1] = count
        begin = end
    return colptr, out[:count]


class EdgeSort:
    """External sort of an edge list into CSC: all edges (`num_read`) go to disk as pairs, then range
    by range into `row` and `colptr`.

    Sorting takes `workspace` bytes of memory, or more for a single node with more edges. With
    `undirected`, every edge is taken both ways; columns are then sorted and have no duplicates.
    `done` is called with the bytes of edges read (16 each), then with those of pairs sorted.
    """

    def __init__(
        self, folder: Path, num_nodes: int, num_edges: int, *, undirected: bool, workspace: int,
        done: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.folder = folder
        self.undirected = undirected
        self.workspace = workspace
        self.done = done
        # 128 bytes an edge have room for two chunks, both directions of one, and their pairs
        self.chunk_edges = max(1, min(2**20, workspace // 128))
        self.num_read = 0
        self._dtype = index_dtype(num_nodes)
        self._numbers = itertools.count(1)  # of the files of pairs
        self._edge_bytes = 3 * np.dtype(self._dtype).itemsize  # a pair, and its entry in row
        self._pairs = self._new_pairs(num_nodes, num_edges * (2 if undirected else 1))

    def _new_pairs(self, num_cols: int, num_pairs: int, widest: int = 63) -> Pairs:
        # `widest` is the largest log2(columns) of a range; 63 is no bound. If a range is split
        # again, it is below that of all `num_cols` columns, so that splitting ends.
        # An average range, with 8 bytes per destination, fits into the workspace with a quarter of
        # its size to spare, for larger ranges.
        num_ranges = 1 + (num_pairs * self._edge_bytes + num_cols * 8) * 5 // (4 * self.workspace)
        # widths are powers of two: there may be almost twice as many
        num_ranges = min(num_ranges, _MAX_BUCKETS // 2)
        # a single range has all columns, others have the average number at most
        shift = (num_cols - 1 if num_ranges == 1 else num_cols // num_ranges // 2).bit_length()
        path = self.folder / f"pairs-{next(self._numbers)}.tmp"
        return Pairs(path, num_cols, min(shift, widest), self._dtype)

    def read(self, chunks: Iterable[tuple[Array, Array]]) -> None:
        """Write all edges to disk, from chunks of `src` and `dst`, int64."""
        for src, dst in chunks:
            if self.undirected:
                self._pairs.add(np.concatenate([src, dst]), np.concatenate([dst, src]))
            else:
                self._pairs.add(src, dst)
            self.num_read += len(src)
            self.done(16 * len(src))
        self._pairs.drop()  # from the page cache

    def write(self, row: ArrayWriter, colptr: ArrayWriter) -> None:
        """Write the leading 0 of `colptr` and all columns; delete the pairs."""
        colptr.write(np.zeros(1, np.int64))
        self._write(self._pairs, row, colptr)

    def _write(self, pairs: Pairs, row: ArrayWriter, colptr: ArrayWriter) -> None:
        for number in range(pairs.num_ranges):
            width = min(1 << pairs.shift, pairs.num_cols - (number << pairs.shift))  # columns
            count = pairs.count(number)
            if width == 1 or count * self._edge_bytes + width * 8 <= self.workspace:
                part = next(pairs.pieces(number, count), np.empty((0, 2), self._dtype))  # all
                ptr, sources = _csc(width, part[:, 0], part[:, 1], self.undirected)
                colptr.write(ptr[1:] + row.length)  # ends in the whole `row`, before it grows
                row.write(sources)
                self.done(count * pairs.pair_bytes)
            else:  # far more edges than an average range has: split it as all edges were split
                parts = self._new_pairs(width, count, (width - 1).bit_length() - 1)
                for piece in pairs.pieces(number, self.chunk_edges):
                    parts.add(piece[:, 1], piece[:, 0])
                parts.drop()  # from the page cache
                self._write(parts, row, colptr)
        pairs.close()
        os.unlink(pairs.name)


@kernel
def restore_input_order(colptr: Array, row: Array, perm: Array) -> None:
    """Restore the input order of the edges in each column of a CSC, in place, from `perm`, the
    position in the input of each edge in `row`; `perm` ascends in each column afterwards."""
    # Without pyg-lib, PyG's `to_csc` uses `torch.sort(stable=False)`, which can shuffle the edges
    # of a column.
    for v in range(len(colptr) - 1):
        begin = colptr[v]
        end = colptr[v + 1]
        for i in range(begin + 1, end):  # few columns are shuffled: sort those
            if perm[i] < perm[i - 1]:
                order = np.argsort(perm[begin:end])
                row[begin:end] = row[begin:end][order]
                perm[begin:end] = perm[begin:end][order]
                break
