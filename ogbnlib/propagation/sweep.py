"""One hop over a store: for each node the sum or mean of its in-neighbors' rows, the graph read once, in order.

The rows of all nodes are in RAM, a few columns at a time; `row.npy` and `colptr.npy` go by in pieces, past the page
cache. Every thread takes the next slice of nodes, reads what it needs of them and computes it while others read.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..graph.bits import NodeSet, has, kernel, put, rank
from ..graph.disk import disk_array
from ..graph.npz import Array
from ..graph.store import Store

SLICE_NODES, PIECE_EDGES = 2**16, 2**18
# One more than cores: while one waits for the disk the others compute.
THREADS = min(8, len(os.sched_getaffinity(0))) + 1

Item = TypeVar("Item")
Result = TypeVar("Result")


@intrinsic
def _value(typing_context, held):  # type: ignore[no-untyped-def]
    """A held value as float32: itself, or that of a float16's bits, as numba has no float16 on a CPU.

    The conversion is one instruction for eight values (vcvtph2ps).
    """

    def widen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if held == types.float32:
            return arguments[0]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(held), widen


@kernel
def _sweep(
    ptr: Any, first: Any, piece: Any, begin: Any, at: Any, wanted: Any, loops: Any, mean: Any, held: Any, words: Any,
    before: Any, num_nodes: Any, total: Any, out: Any, count: Any,
) -> Any:  # fmt: skip
    """Go on with the columns of a slice, from column `at`, over the edges from position `begin` on in `piece`.

    Returns the column whose edges go on behind the piece, or -1 - p for a source out of range at `piece[p]`. Sums run
    in the order of the edges, in float32, so that they are the same for any pieces and any number of columns at once.
    """
    width, end = held.shape[1], begin + len(piece)
    dense = len(words) == 0
    while at < len(ptr) - 1:
        node = first + at
        if len(wanted) and not has(wanted, node):
            if ptr[at + 1] > end:
                break
            at += 1
            continue
        start = max(ptr[at], begin)
        if start == ptr[at]:
            count[at] = 1 if loops else 0
            own = node if dense else rank(words, before, node)
            for c in range(width):
                total[c] = _value(held[own, c]) if loops else np.float32(0)
        for e in range(start, min(ptr[at + 1], end)):
            source = piece[e - begin]
            if source < 0 or source >= num_nodes:
                return -1 - (e - begin)
            if loops and source == node:
                continue
            place = source if dense else rank(words, before, source)
            for c in range(width):
                total[c] += _value(held[place, c])
            count[at] += 1
        if ptr[at + 1] > end:
            break
        divisor = np.float32(max(1, count[at]) if mean else 1)
        for c in range(width):
            out[at, c] = total[c] / divisor
        at += 1
    return at


@kernel
def _survey(ptr: Any, first: Any, piece: Any, begin: Any, at: Any, inside: Any, reached: Any, num_nodes: Any) -> Any:
    """Add to `reached` the sources of the edges into `inside`; (the column to go on with, self-loops seen).

    A negative column is -1 - p for a source out of range at `piece[p]`.
    """
    loops = 0
    for e in range(len(piece)):
        while ptr[at + 1] <= begin + e:
            at += 1
        source = piece[e]
        if source < 0 or source >= num_nodes:
            return -1 - e, loops
        loops += source == first + at
        if len(inside) and has(inside, first + at):
            put(reached, source)
    return at, loops


@kernel
def _count_loops(ptr: Any, first: Any, piece: Any, begin: Any, at: Any, loops: Any) -> Any:
    for e in range(len(piece)):
        while ptr[at + 1] <= begin + e:
            at += 1
        loops[at] += piece[e] == first + at
    return at


def in_order(items: Iterable[Item], work: Callable[[Item], Result]) -> Generator[Result, None, None]:
    """`work` of each item by `THREADS` threads, in the order of the items, few of them ahead of who takes them.

    To be closed by who uses it, as threads are to end before the files that they read are closed.
    """
    ahead: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) > THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


@dataclass(frozen=True)
class Rows:
    """Rows of some columns in RAM: of all nodes, or of the `members` of a set alone, one after the other.

    `values` is float32, or float16 [n, columns].
    """

    values: Array
    members: NodeSet | None = None

    @property
    def held(self) -> Array:
        return self.values.view(np.uint16) if self.values.dtype == np.float16 else self.values


_NO_WORDS, _NO_RANKS = np.empty(0, np.uint64), np.empty(0, np.int32)


class Edges:
    """The in-edges of a store's nodes, as a stream.

    Attributes:
        has_loops: bool [slices]: whether a slice of `SLICE_NODES` nodes has edges from a node to itself; known once the
            graph was `surveyed`.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.num_nodes = store, store.num_nodes
        self._colptr, self._row = disk_array(store, "colptr"), disk_array(store, "row")
        self.slices = range(0, store.num_nodes, SLICE_NODES)
        self.has_loops = np.ones(len(self.slices), bool)

    def close(self) -> None:
        self._colptr.close()
        self._row.close()

    @property
    def nbytes(self) -> int:
        """Bytes read by a sweep."""
        return self.store.files["colptr"].bytes + self.store.files["row"].bytes

    def _offsets(self, first: int, end: int) -> Array:
        """colptr[first:end + 1], the caller's."""
        return self._colptr.rows(first, end + 1, np.dtype("<i8")).copy()

    def _pieces(self, ptr: Array) -> Iterator[tuple[int, Array]]:
        """The edges of some columns in pieces, each with its position in row; one at least; until the next is taken."""
        dtype = np.dtype(self.store.files["row"].dtype)
        for begin in range(int(ptr[0]), max(int(ptr[-1]), int(ptr[0]) + 1), PIECE_EDGES):
            end = min(begin + PIECE_EDGES, int(ptr[-1]))
            yield begin, self._row.rows(begin, end, dtype)

    def _out_of_range(self, position: int, source: int) -> Exception:
        return self.store.damaged("row", f"expected ids from 0 to {self.num_nodes - 1}, found {source} at {position}")

    def survey(self, inside: NodeSet | None, done: Callable[[int], object]) -> NodeSet | None:
        """`inside` and the sources of all edges into it; None for all nodes. In order, for the checksums.

        Raises:
            InputError: for a checksum that is not that of store.json; for an id out of range.
        """
        reached = None if inside is None else NodeSet(self.num_nodes)
        words = _NO_WORDS if inside is None else inside.words
        target = _NO_WORDS if reached is None else reached.words
        for _, values in self.store.chunks("colptr", checked=True):
            done(values.nbytes)
        self.has_loops[:] = False
        at, slice_of, ptr = 0, -1, np.zeros(1, np.int64)
        for begin, values in self.store.chunks("row", checked=True):
            position = 0
            while position < len(values):
                while begin + position >= ptr[-1]:
                    slice_of, at = slice_of + 1, 0
                    ptr = self._offsets(self.slices[slice_of], self._end(self.slices[slice_of]))
                part = values[position : position + int(min(ptr[-1] - begin - position, len(values)))]
                at, loops = _survey(
                    ptr, self.slices[slice_of], part, begin + position, at, words, target, self.num_nodes
                )
                if at < 0:
                    raise self._out_of_range(begin + position - 1 - at, int(part[-1 - at]))
                self.has_loops[slice_of] |= loops > 0
                position += len(part)
            done(values.nbytes)
        if reached is not None and inside is not None:
            reached.words |= inside.words
        return reached

    def _end(self, first: int) -> int:
        return min(first + SLICE_NODES, self.num_nodes)

    def degrees(self, first: int, end: int, loops: bool) -> Array:
        """In-degrees int64 of the nodes from `first` up to `end`; where `loops`, with one self-loop each."""
        ptr = self._offsets(first, end)
        degrees = np.diff(ptr)
        if not loops:
            return degrees
        if self.has_loops[first // SLICE_NODES : -(-end // SLICE_NODES)].any():
            own, at = np.zeros(end - first, np.int64), 0
            for begin, piece in self._pieces(ptr):
                at = _count_loops(ptr, first, piece, begin, at, own)
            degrees -= own
        return degrees + 1

    def sweep(
        self, rows: Rows, wanted: NodeSet | None, *, loops: bool, mean: bool, done: Callable[[int], object]
    ) -> Generator[tuple[int, Array, Array], None, None]:
        """(first node, float32 [m, columns], degrees [m]) slice by slice: sums over in-neighbors, or means.

        Args:
            wanted: nodes whose rows are computed; those of others are left as they come. None for all.
            loops: count each node among its own neighbors, once.
        """
        words, before = _NO_WORDS, _NO_RANKS
        if rows.members is not None:
            words, before = rows.members.words, rows.members.before
        targets = _NO_WORDS if wanted is None else wanted.words

        def one(first: int) -> tuple[int, Array, Array]:
            ptr, at = self._offsets(first, self._end(first)), 0
            out = np.empty((len(ptr) - 1, rows.values.shape[1]), np.float32)
            count, total = np.zeros(len(out), np.int64), np.empty(out.shape[1], np.float32)
            for begin, piece in self._pieces(ptr):
                at = _sweep(
                    ptr, first, piece, begin, at, targets, loops, mean, rows.held, words, before, self.num_nodes,
                    total, out, count,
                )  # fmt: skip
                if at < 0:
                    raise self._out_of_range(begin - 1 - at, int(piece[-1 - at]))
            return first, out, count

        with contextlib.closing(in_order(self.slices, one)) as slices:
            for first, out, count in slices:
                yield first, out, count
                done(self.nbytes * len(out) // self.num_nodes)
