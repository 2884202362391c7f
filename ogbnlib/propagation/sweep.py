"""One hop over a store: the mean over each node's in-neighbors, in one pass over the graph, for some
columns of all nodes in RAM. Each thread takes the next slice of nodes."""

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
    out: Array  # float32 [nodes, columns], means
    degrees: Array  # int64 [nodes]
    total: Array  # float32 [columns], sum of a node whose edges go on in the next piece


@kernel
def _row_of(rows: _Rows, node: int) -> int:
    return node if len(rows.words) == 0 else rank(rows.words, rows.word_ranks, node)


@kernel
def _begin(part: _Slice, at: int, rows: _Rows, loops: bool) -> None:
    part.degrees[at] = 1 if loops else 0
    row = _row_of(rows, part.first + at)
    for c in range(len(part.total)):
        part.total[c] = widened(rows.values[row, c]) if loops else np.float32(0)


@kernel
def _add_edges(part: _Slice, at: int, rows: _Rows, loops: bool, piece: Array, begin: int) -> int:
    # Sums are float32, in the order of the edges. So the result depends neither on the pieces nor
    # on the number of columns at a time.
    total = part.total
    values = rows.values
    count = 0
    for e in range(max(part.ptr[at] - begin, 0), min(part.ptr[at + 1] - begin, len(piece))):
        source = piece[e]
        if source < 0 or source >= rows.num_nodes:
            return e
        if loops and source == part.first + at:
            continue
        row = _row_of(rows, source)
        for c in range(len(total)):
            total[c] += widened(values[row, c])
        count += 1
    part.degrees[at] += count
    return -1


@kernel
def _sweep(
    part: _Slice, at: int, rows: _Rows, wanted: Array, loops: bool, piece: Array, begin: int
) -> int:
    """Continue a slice at its node `at`, over the edges in `piece`, which begins at edge `begin`.

    Only the nodes in `wanted` are computed, or all nodes if `wanted` is empty. Returns the node to
    continue with in the next piece, or -1 - p if `piece[p]` is out of range.
    """
    end = begin + len(piece)
    while at < len(part.ptr) - 1:
        is_wanted = len(wanted) == 0 or has(wanted, part.first + at)
        if is_wanted:
            if part.ptr[at] >= begin:
                _begin(part, at, rows, loops)
            wrong = _add_edges(part, at, rows, loops, piece, begin)
            if wrong >= 0:
                return -1 - wrong
        if part.ptr[at + 1] > end:
            break
        if is_wanted:
            divisor = np.float32(max(1, part.degrees[at]))
            for c in range(len(part.total)):
                part.out[at, c] = part.total[c] / divisor
        at += 1
    return at


@kernel
def _survey(
    ptr: Array,
    first: int,
    piece: Array,
    begin: int,
    at: int,
    inside: Array,
    reached: Array,
    num_nodes: int,
    loops: Array,
) -> int:
    """Add the sources of edges into `inside` to `reached`, and count each node's self-loops.

    `ptr` has the edge offsets of nodes from `first` on, `at` the place in it to go on from; `piece`
    has the sources of the edges from `begin` on. `inside` and `reached` are the words of sets of
    nodes, both empty for no set. Returns the same kind of value as `_sweep`.
    """
    for e in range(len(piece)):
        while ptr[at + 1] <= begin + e:
            at += 1
        source = piece[e]
        if source < 0 or source >= num_nodes:
            return -1 - e
        loops[at] += source == first + at
        if len(inside) and has(inside, first + at):
            put(reached, source)
    return at


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
                if len(futures) > THREADS:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


_NO_WORDS = np.empty(0, np.uint64)
_NO_RANKS = np.empty(0, np.int32)


class Edges:
    """The in-edges of a store's nodes, read from disk as a stream."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.num_nodes = store.num_nodes
        self._colptr = store.disk_array("colptr")
        self._row = store.disk_array("row")
        self._without_loops = set[tuple[int, int]]()  # slices of nodes

    def close(self) -> None:
        self._colptr.close()
        self._row.close()

    @property
    def nbytes(self) -> int:
        """Bytes that a sweep reads from disk."""
        return self.store.files["colptr"].bytes + self.store.files["row"].bytes

    def _offsets(self, first: int, end: int) -> Array:
        return self._colptr.rows(first, min(end, self.num_nodes) + 1, np.dtype("<i8")).copy()

    def _pieces(self, ptr: Array) -> Iterator[tuple[int, Array]]:
        # at least one, each with the position of its first edge in `row`
        dtype = np.dtype(self.store.files["row"].dtype)
        for begin in range(int(ptr[0]), max(int(ptr[-1]), int(ptr[0]) + 1), PIECE_EDGES):
            yield begin, self._row.rows(begin, min(begin + PIECE_EDGES, int(ptr[-1])), dtype)

    def _check(self, at: int, piece: Array) -> None:
        if at < 0:
            raise self.store.damaged(
                "row", f"found the id {int(piece[-1 - at])}, which is no node's"
            )

    def _surveyed(self, first: int, ptr: Array, inside: Array, reached: Array) -> Array:
        loops = np.zeros(len(ptr) - 1, np.int64)
        at = 0
        for begin, piece in self._pieces(ptr):
            at = _survey(ptr, first, piece, begin, at, inside, reached, self.num_nodes, loops)
            self._check(at, piece)
        return loops

    def needed(
        self, wanted: NodeSet | None, hops: int, done: Callable[[int], object]
    ) -> list[NodeSet | None]:
        """Return the nodes that each hop must compute so that the last one gives `wanted`; None
        stands for all. Reads the graph to verify its checksums, and once per hop but the last."""
        for name in ("colptr", "row"):
            for _, values in self.store.chunks(name, checked=True):
                done(values.nbytes)
        needed = [wanted]
        for _ in range(hops - 1):
            inside = needed[0]
            reached = None
            if inside is not None:
                reached = NodeSet(self.num_nodes)
                for first in range(0, self.num_nodes, SLICE_NODES):
                    ptr = self._offsets(first, first + SLICE_NODES)
                    self._surveyed(first, ptr, inside.words, reached.words)
                    done(self.nbytes * (len(ptr) - 1) // self.num_nodes)
                reached.words |= inside.words
            needed.insert(0, reached)
        return needed

    def degrees(self, first: int, end: int, loops: bool) -> Array:
        """Return the in-degrees of the nodes `first` to `end`, int64 [end - first]; with `loops`,
        each node has exactly one self-loop."""
        ptr = self._offsets(first, end)
        degrees = np.diff(ptr)
        if not loops:
            return degrees
        if (first, end) not in self._without_loops:  # then no further read of the graph
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
        are not initialised. None stands for all nodes. With `loops`, each node is its own neighbor,
        once.
        """
        if values.dtype == np.float16:
            values = values.view(np.uint16)
        rows = _Rows(values, _NO_WORDS, _NO_RANKS, self.num_nodes)
        if members is not None:
            rows = _Rows(values, members.words, members.word_ranks, self.num_nodes)
        targets = _NO_WORDS if wanted is None else wanted.words
        # With many columns, a slice of `SLICE_NODES` nodes would be as large as all the columns.
        step = max(1, min(SLICE_NODES, SLICE_BYTES // (4 * values.shape[1])))

        def compute(first: int) -> tuple[int, Array, Array]:
            ptr = self._offsets(first, first + step)
            out = np.empty((len(ptr) - 1, values.shape[1]), np.float32)
            total = np.empty(out.shape[1], np.float32)
            part = _Slice(first, ptr, out, np.zeros(len(out), np.int64), total)
            at = 0
            for begin, piece in self._pieces(ptr):
                at = _sweep(part, at, rows, targets, loops, piece, begin)
                self._check(at, piece)
            return first, out, part.degrees

        with contextlib.closing(in_order(range(0, self.num_nodes, step), compute)) as slices:
            for first, out, count in slices:
                yield first, out, count
                done(self.nbytes * len(out) // self.num_nodes)
