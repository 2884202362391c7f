"""From edges to CSC: a stable counting sort that never holds the edge list, and the mending of an unstable one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from ..errors import InputError
from ..files import Stream
from .npz import Array

_MAX_BUCKETS = 256  # more would make the pieces of a chunk too short to read back in sequence


# Pairs on disk, by range of destinations -----------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _partition(src, dst, both, shift, starts, out):  # type: ignore[no-untyped-def]
    """Sort a chunk of edges by `dst >> shift`, stably, into rows (dst within its range, src) of `out`.

    `starts` int64 [ranges + 1] is zero on entry and tells where each range begins on return.
    """
    mask = (1 << shift) - 1
    for i in range(len(src)):
        starts[(dst[i] >> shift) + 1] += 1
        if both:
            starts[(src[i] >> shift) + 1] += 1
    for b in range(1, len(starts)):
        starts[b] += starts[b - 1]
    at = starts[:-1].copy()
    for i in range(len(src)):
        for way in range(2 if both else 1):
            col, value = (dst[i], src[i]) if way == 0 else (src[i], dst[i])
            place = at[col >> shift]
            out[place, 0] = col & mask
            out[place, 1] = value
            at[col >> shift] = place + 1


class _Pairs:
    """Edges on disk, as rows (dst - first dst of its range, src), so that each range of destinations can be read alone.

    A chunk is written in one piece, sorted by range; what is held in RAM is where each range begins in each chunk.
    """

    def __init__(self, path: Path, num_cols: int, shift: int, dtype: type[np.signedinteger[Any]]) -> None:
        self.num_cols, self.shift, self.num_ranges = num_cols, shift, -(-num_cols >> shift)
        self.dtype, self.pair_bytes = np.dtype(dtype), 2 * np.dtype(dtype).itemsize
        self._stream = Stream(path)
        self._chunks: list[tuple[int, Array]] = []

    def append(self, src: Array, dst: Array, both: bool = False) -> None:
        starts = np.zeros(self.num_ranges + 1, np.int64)
        out = np.empty(((2 if both else 1) * len(src), 2), self.dtype)
        _partition(src, dst, both, self.shift, starts, out)
        self._chunks.append((self._stream.size, starts))
        self._stream.append(out.reshape(-1).view(np.uint8).data)

    def written(self) -> None:
        self._stream.drop()

    def width(self, number: int) -> int:
        return min(1 << self.shift, self.num_cols - (number << self.shift))

    def count(self, number: int) -> int:
        return sum(int(starts[number + 1] - starts[number]) for _, starts in self._chunks)

    def pieces(self, number: int, most: int) -> Iterator[Array]:
        """The pairs of one range in order, [n, 2], at most `most` at a time."""
        out, filled = np.empty((min(most, self.count(number)), 2), self.dtype), 0
        for offset, starts in self._chunks:
            begin, end = int(starts[number]), int(starts[number + 1])
            while begin < end:
                take = min(end - begin, len(out) - filled)
                target = out[filled : filled + take].reshape(-1).view(np.uint8).data
                at = offset + begin * self.pair_bytes
                while len(target):
                    got = os.preadv(self._stream.fd, [target], at)
                    if not got:
                        raise OSError(errno.EIO, "temporary file ends early", str(self._stream.path))
                    target, at = target[got:], at + got
                begin, filled = begin + take, filled + take
                if filled == len(out):
                    yield out
                    filled = 0
        if filled:
            yield out[:filled]

    def read(self, number: int) -> Array:
        """All pairs of one range, [n, 2]."""
        return next(self.pieces(number, self.count(number)), np.empty((0, 2), self.dtype))

    def delete(self) -> None:
        self._stream.close()
        self._stream.path.unlink()


def plan_shift(num_cols: int, num_pairs: int, edge_bytes: int, workspace: int) -> int:
    """The power of two of destinations that make a range, so that a range of average size is sorted within `workspace`.

    A range takes `edge_bytes` per pair and 8 bytes per destination; a quarter is left for ranges above the average.
    """
    wanted = 1 + (num_pairs * edge_bytes + num_cols * 8) * 5 // (4 * workspace)
    wanted = min(wanted, _MAX_BUCKETS // 2)  # widths are powers of two: there may be almost twice as many
    return max(0, (num_cols // wanted).bit_length() - 1) if wanted > 1 else (num_cols - 1).bit_length()


Chunks = Iterable[tuple[Array, Array]]


def index_dtype(num_nodes: int) -> type[np.signedinteger[Any]]:
    """The dtype of node ids in `row`: int32, or int64 from 2**31 nodes on."""
    return np.int32 if num_nodes < 2**31 else np.int64


@njit(cache=True, nogil=True)
def first_outside(src, dst, num_nodes):  # type: ignore[no-untyped-def]
    for i in range(len(src)):
        if src[i] < 0 or src[i] >= num_nodes or dst[i] < 0 or dst[i] >= num_nodes:
            return i
    return -1


@njit(cache=True, nogil=True)
def _count(col, ptr):  # type: ignore[no-untyped-def]
    for v in col:
        ptr[v + 2] += 1


@njit(cache=True, nogil=True)
def _place(src, dst, undirected, ptr, row):  # type: ignore[no-untyped-def]
    """ptr[v + 1] is the next free place of column v; False when the columns were counted on other edges."""
    for i in range(len(src)):
        for way in range(2 if undirected else 1):
            col, value = (dst[i], src[i]) if way == 0 else (src[i], dst[i])
            place = ptr[col + 1]
            if place >= len(row):
                return False
            row[place] = value
            ptr[col + 1] = place + 1
    return True


@njit(cache=True, nogil=True)
def _sort_and_compact(colptr, row):  # type: ignore[no-untyped-def]
    """Sort every column, drop repeats and close the gaps, all in place; returns the number of edges left."""
    kept, begin = 0, colptr[0]
    for v in range(len(colptr) - 1):
        end = colptr[v + 1]
        column = row[begin:end]
        column.sort()
        last = -1
        for i in range(begin, end):
            if row[i] != last:
                last = row[i]
                row[kept] = last
                kept += 1
        colptr[v + 1] = kept
        begin = end
    return kept


def csc_from_chunks(
    num_nodes: int, num_edges: int, chunks: Callable[[], Chunks], undirected: bool = False
) -> tuple[Array, Array]:
    """The CSC form of a graph that arrives in chunks, by a stable counting sort; the COO is never held.

    Edge (src -> dst) goes to column dst and `row` holds src, in the order of arrival. That is PyG's `to_csc` with a
    stable sort; torch's default sort, which it uses without pyg-lib, is not. With `undirected` the graph is that of
    PyG's `to_undirected`: both directions, each column sorted and without repeats.

    Args:
        num_edges: the number of edges that `chunks` hands out, before reverse edges are added.
        chunks: called twice; each time the same edges, as pairs of equally long whole-number arrays.

    Returns:
        colptr int64 [num_nodes + 1] and row int32 (int64 from 2**31 nodes on) [E], in RAM. The peak is those two and a
        chunk; with `undirected`, row takes 2 * num_edges values until repeats are dropped.

    Raises:
        InputError: when an id is not from 0 to num_nodes - 1, or the number of edges is another.
    """
    ptr = np.zeros(num_nodes + 2, np.int64)

    def checked() -> Chunks:
        seen = 0
        for src, dst in chunks():
            bad = -1 if len(src) == len(dst) else min(len(src), len(dst))
            bad = first_outside(src, dst, num_nodes) if bad < 0 else bad
            if bad >= 0:
                raise InputError(f"edge_index: expected pairs of ids below {num_nodes}; edge {seen + bad} is not")
            seen += len(src)
            if seen > num_edges:
                break
            yield src, dst
        if seen != num_edges:
            raise InputError(f"edge_index: expected {num_edges} edges, found {'more' if seen > num_edges else seen}")

    for src, dst in checked():
        _count(dst, ptr)
        if undirected:
            _count(src, ptr)
    np.cumsum(ptr, out=ptr)
    row = np.empty(int(ptr[-1]), index_dtype(num_nodes))
    for src, dst in checked():
        if not _place(src, dst, undirected, ptr, row):
            raise InputError("edge_index: expected the same edges on both passes, found others on the second")
    colptr = ptr[:-1]
    if undirected:
        kept = _sort_and_compact(colptr, row)
        row.resize(kept, refcheck=False)  # gives the tail back without a copy
    return colptr, row


def csc_from_pairs(num_cols: int, col: Array, row: Array, unique: bool = False) -> tuple[Array, Array]:
    """The CSC form of edges held in RAM, by a stable counting sort; ids are trusted to be in range.

    Args:
        col, row: equally long whole-number arrays, strided ones too; column ids below `num_cols`.
        unique: sort every column and drop its repeats.

    Returns:
        colptr int64 [num_cols + 1] and a new array of the kept values of `row`, in its dtype.
    """
    ptr = np.zeros(num_cols + 2, np.int64)
    _count(col, ptr)
    np.cumsum(ptr, out=ptr)
    out = np.empty(len(row), row.dtype)
    _place(row, col, False, ptr, out)
    colptr = ptr[:-1]
    if unique:
        out = out[: _sort_and_compact(colptr, out)]
    return colptr, out


@njit(cache=True, nogil=True)
def restore_input_order(colptr, row, perm):  # type: ignore[no-untyped-def]
    """Put each column of a CSC back into the order in which its edges came, in place.

    PyG's `to_csc` sorts with `torch.sort(stable=False)` where pyg-lib is absent, which can shuffle the edges of a
    column; `perm` (int64 [E], the input position of each edge) says where they belong. Where nothing was shuffled it
    costs one pass over `perm`.
    """
    for v in range(len(colptr) - 1):
        begin, end = colptr[v], colptr[v + 1]
        ascending = True
        for i in range(begin + 1, end):
            if perm[i] < perm[i - 1]:
                ascending = False
                break
        if not ascending:
            order = np.argsort(perm[begin:end])
            row[begin:end] = row[begin:end][order]
            perm[begin:end] = perm[begin:end][order]
