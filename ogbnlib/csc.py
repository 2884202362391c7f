"""From edges to CSC: a stable counting sort that never holds the edge list, and the mending of an unstable one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numba import njit

from .config import InputError
from .npz import Array

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
