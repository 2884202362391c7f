"""One hop over a store: the mean over each node's in-neighbors, in one pass over the graph, for some
columns of all nodes in RAM. Each thread takes the next *slice*, consecutive nodes, and reads their
edges from disk in *pieces*. A node's edges may lie in several pieces."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from ..graph.node_set import NodeSet, has, put, rank
from ..graph.npz import Array
from ..graph.store import Store
from ..io.half_floats import widened
from ..kernels import kernel
from .plan import SLICE_BYTES, THREADS

SLICE_NODES = 2**16  # nodes of a slice; their offsets in memory take 512 kB
PIECE_EDGES = 2**18  # edges of a slice in memory at a time: 1 MB of int32

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Rows(NamedTuple):
    """Columns in memory, with a row for each member of a set of nodes."""

    values: Array  # float32, or the bits of float16 [members, columns]
    words: Array  # of the set; empty for all nodes
    word_ranks: Array
    num_nodes: int  # of the graph


class _Slice(NamedTuple):
    """The result for consecutive nodes, from the pieces of their edges."""

    first: int  # node
    ptr: Array  # int64 [nodes + 1], offsets of their edges in the graph
    means: Array  # float32 [nodes, columns]
    degrees: Array  # int64 [nodes]
    total: Array  # float32 [columns], sum of a node whose edges go on in the next piece


@kernel
def _row_of(rows: _Rows, node: int) -> int:  # its rank in the set; its id without a set
    return node if len(rows.words) == 0 else rank(rows.words, rows.word_ranks, node)


@kernel
def _add_edges(nodes: _Slice, i: int, rows: _Rows, loops: bool, piece: Array, begin: int) -> int:
    # Adds a node's neighbors in this piece, see `_sweep`; returns the place of an id out of range,
    # or -1. Sums are float32, in the order of the edges. So the result depends neither on the
    # pieces nor on the number of columns at a time.
    total = nodes.total
    values = rows.values
    count = 0
    if nodes.ptr[i] >= begin:  # the node's edges begin here
        nodes.degrees[i] = 1 if loops else 0  # with `loops`, each node is its own neighbor, once
        row = _row_of(rows, nodes.first + i)
        for c in range(len(total)):
            total[c] = widened(values[row, c]) if loops else np.float32(0)
    for e in range(max(nodes.ptr[i] - begin, 0), min(nodes.ptr[i + 1] - begin, len(piece))):
        source = piece[e]
        if source < 0 or source >= rows.num_nodes:
            return e
        if loops and source == nodes.first + i:  # counted already
            continue
        row = _row_of(rows, source)
        for c in range(len(total)):
            total[c] += widened(values[row, c])
        count += 1
    nodes.degrees[i] += count
    return -1


@kernel
def _sweep(
    nodes: _Slice, i: int, rows: _Rows, wanted: Array, loops: bool, piece: Array, begin: int
) -> int:
    """Continue a slice at its node `i`, counted from its first, over the edges in `piece`, whose
    sources (int32 or int64) are those of the graph's edges from number `begin` on.

    Only the nodes in `wanted`, words of a `NodeSet`, are computed, or all nodes if it is empty.
    Returns the node to continue with in the next piece, or -1 - p if `piece[p]` is out of range.
    """
    end = begin + len(piece)
    while i < len(nodes.ptr) - 1:
        is_wanted = len(wanted) == 0 or has(wanted, nodes.first + i)
        if is_wanted:
            wrong = _add_edges(nodes, i, rows, loops, piece, begin)
            if wrong >= 0:
                return -1 - wrong
        if nodes.ptr[i + 1] > end:  # the edges go on in the next piece
            break
        if is_wanted:
            divisor = np.float32(max(1, nodes.degrees[i]))
            for c in range(len(nodes.total)):
                nodes.means[i, c] = nodes.total[c] / divisor
        i += 1
    return i


@kernel
def _survey(
    ptr: Array,  # as in `_Slice`
    first: int,  # node of the slice
    piece: Array,  # as in `_sweep`
    begin: int,
    i: int,  # the place in `ptr` to go on from
    inside: Array,  # words of a set of nodes; empty for no set
    reached: Array,  # words of the set to add to; empty with `inside`
    num_nodes: int,
    num_loops: Array,  # int64 [nodes], counted up
) -> int:
    """Add the sources of edges into `inside` to `reached`, and count each node's self-loops.
    Returns the same kind of value as `_sweep`."""
    for e in range(len(piece)):
        while ptr[i + 1] <= begin + e:  # the edge is of a later node
            i += 1
        source = piece[e]
        if source < 0 or source >= num_nodes:
            return -1 - e
        num_loops[i] += source == first + i
        if len(inside) and has(inside, first + i):
            put(reached, source)
    return i


def in_order(
    items: Iterable[Item], work: Callable[[Item], Result]
) -> Generator[Result, None, None]:
    """Yield `work(item)` in the order of the items, computed by `THREADS` threads; close this
    generator before the files that they read."""
    futures: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for item in items:
                futures.append(pool.submit(work, item))
                if len(futures) > THREADS:  # bounds the results in memory, see `NUM_SLICES`
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:  # after an error, or if the caller leaves early
            pool.shutdown(cancel_futures=True)


# words and ranks in place of those of a `NodeSet`, for all nodes or for no set
_NO_WORDS = np.empty(0, np.uint64)
_NO_RANKS = np.empty(0, np.int32)


class Edges:
    """The in-edges of a store's nodes, read from disk as a stream."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.num_nodes = store.num_nodes
        self._colptr = store.disk_array("colptr")
        self._row = store.disk_array("row")
        self._without_loops = set[tuple[int, int]]()  # (first node, end) of slices, see `degrees`
        self.nbytes = store.files["colptr"].bytes + store.files["row"].bytes  # read by a sweep

    def close(self) -> None:
        self._colptr.close()
        self._row.close()

    def _offsets(self, first: int, end: int) -> Array:
        # int64 [nodes + 1], of the nodes `first` to `end`; a copy: the next read uses the buffer
        return self._colptr.rows(first, min(end, self.num_nodes) + 1, np.dtype("<i8")).copy()

    def _pieces(self, ptr: Array) -> Iterator[tuple[int, Array]]:
        # (first edge's number, sources); without edges one empty piece, so that means are set
        dtype = np.dtype(self.store.files["row"].dtype)
        for begin in range(int(ptr[0]), max(int(ptr[-1]), int(ptr[0]) + 1), PIECE_EDGES):
            yield begin, self._row.rows(begin, min(begin + PIECE_EDGES, int(ptr[-1])), dtype)

    def _check(self, status: int, piece: Array) -> None:  # status: of `_sweep` or `_survey`
        if status < 0:
            wrong = int(piece[-1 - status])
            raise self.store.damaged("row", f"found the id {wrong}, which is no node's")

    def _surveyed(self, first: int, ptr: Array, inside: Array, reached: Array) -> Array:
        # the number of each node's self-loops, int64 [nodes]; see `_survey`
        num_loops = np.zeros(len(ptr) - 1, np.int64)
        i = 0
        for begin, piece in self._pieces(ptr):
            i = _survey(ptr, first, piece, begin, i, inside, reached, self.num_nodes, num_loops)
            self._check(i, piece)
        return num_loops

    def needed(
        self, wanted: NodeSet | None, hops: int, done: Callable[[int], object]
    ) -> list[NodeSet | None]:
        """Return the nodes that each hop must compute so that the last one gives `wanted`; None
        stands for all. Reads the graph to verify its checksums, and once per hop but the last."""
        for name in ("colptr", "row"):
            for _, values in self.store.chunks(name, checked=True):
                done(values.nbytes)
        if wanted is None:
            return [None] * hops
        needed = [wanted]  # of the last hop; those of the hop before come in front
        for _ in range(hops - 1):
            reached = NodeSet(self.num_nodes)
            for first in range(0, self.num_nodes, SLICE_NODES):
                ptr = self._offsets(first, first + SLICE_NODES)
                self._surveyed(first, ptr, needed[0].words, reached.words)
                done(self.nbytes * (len(ptr) - 1) // self.num_nodes)
            reached.words |= needed[0].words  # each hop's result also has rows of these nodes
            needed.insert(0, reached)
        return [*needed]

    def degrees(self, first: int, end: int, loops: bool) -> Array:
        """Return the in-degrees of the nodes `first` to `end`, int64 [end - first]; with `loops`,
        each node has exactly one self-loop."""
        ptr = self._offsets(first, end)
        degrees = np.diff(ptr)
        if not loops:
            return degrees
        # a slice without self-loops is remembered, so that its edges are read only once
        if (first, end) not in self._without_loops:
            num_loops = self._surveyed(first, ptr, _NO_WORDS, _NO_WORDS)
            if num_loops.any():
                return degrees - num_loops + 1
            self._without_loops.add((first, end))
        return degrees + 1

    def sweep(
        self, values: Array, members: NodeSet | None, wanted: NodeSet | None, *, loops: bool,
        done: Callable[[int], object],
    ) -> Generator[tuple[int, Array, Array], None, None]:  # fmt: skip
        """Yield (first node, means of in-neighbors float32 [m, columns], degrees [m]) of slices.

        `values`, float16 or float32 [n, columns], has the rows of `members`. Means outside `wanted`
        are not initialised, degrees there are 0. None stands for all nodes. With `loops`, each node
        is its own neighbor, once.
        """
        if values.dtype == np.float16:
            values = values.view(np.uint16)  # numba has no float16
        rows = _Rows(values, _NO_WORDS, _NO_RANKS, self.num_nodes)
        if members is not None:
            rows = _Rows(values, members.words, members.word_ranks, self.num_nodes)
        targets = _NO_WORDS if wanted is None else wanted.words
        width = values.shape[1]
        # The means of a slice take at most `SLICE_BYTES`, however many the columns.
        step = max(1, min(SLICE_NODES, SLICE_BYTES // (4 * width)))  # nodes of a slice

        def compute(first: int) -> tuple[int, Array, Array]:
            ptr = self._offsets(first, first + step)
            means = np.empty((len(ptr) - 1, width), np.float32)
            degrees = np.zeros(len(means), np.int64)
            nodes = _Slice(first, ptr, means, degrees, np.empty(width, np.float32))
            i = 0  # the node of the slice to go on with
            for begin, piece in self._pieces(ptr):
                i = _sweep(nodes, i, rows, targets, loops, piece, begin)
                self._check(i, piece)
            return first, means, degrees

        with contextlib.closing(in_order(range(0, self.num_nodes, step), compute)) as slices:
            for first, means, degrees in slices:
                yield first, means, degrees
                done(self.nbytes * len(means) // self.num_nodes)
