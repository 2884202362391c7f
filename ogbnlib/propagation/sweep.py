"""One hop over a store: the mean over each node's in-neighbors, in one pass over the graph.

Some columns of all nodes are in RAM. Each thread takes the next slice of nodes, reads its edges and
computes its means.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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


@kernel
def _sweep(
    ptr: Array, first: int, piece: Array, begin: int, at: int, wanted: Array, loops: bool, values: Array,
    words: Array, word_ranks: Array, num_nodes: int, total: Array, out: Array, count: Array,
) -> int:  # fmt: skip
    """Continue a slice at its node `at`, over the edges in `piece`, which begins at edge `begin`.

    `ptr` has the offsets of the slice (colptr), and `first` is the slice's first node. `values` has
    a row for each member of the set (`words`, `word_ranks`), or for each node if `words` is empty.
    Only the nodes in `wanted` are computed, or all nodes if `wanted` is empty. `total`, one row,
    and `count` carry the sum and the degree of a node whose edges go on in the next piece. Means go
    to `out`, which has a row for each node of the slice.

    Returns the node to continue with in the next piece, or -1 - p if `piece[p]` is out of range.
    """
    # Sums are float32, in the order of the edges. So the result depends neither on the pieces nor
    # on the number of columns at a time.
    width = values.shape[1]
    end = begin + len(piece)
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
            node_row = node if dense else rank(words, word_ranks, node)
            for c in range(width):
                total[c] = widened(values[node_row, c]) if loops else np.float32(0)
        for e in range(start, min(ptr[at + 1], end)):
            source = piece[e - begin]
            if source < 0 or source >= num_nodes:
                return -1 - (e - begin)
            if loops and source == node:
                continue
            source_row = source if dense else rank(words, word_ranks, source)
            for c in range(width):
                total[c] += widened(values[source_row, c])
            count[at] += 1
        if ptr[at + 1] > end:
            break
        divisor = np.float32(max(1, count[at]))
        for c in range(width):
            out[at, c] = total[c] / divisor
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

    `inside` and `reached` are the words of sets of nodes, both empty for no set. Returns the
    same kind of value as `_sweep`.
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
    """Yield `work(item)` in the order of the items, computed by `THREADS` threads.

    Close this generator before the files that the threads read.
    """
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
        self.slices = range(0, store.num_nodes, SLICE_NODES)
        # by slice, whether a node has an edge to itself; `needed` finds out
        self._has_loops = np.ones(len(self.slices), bool)

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
        """Yield the edges between the offsets `ptr` in pieces, at least one.

        Each piece comes with the position of its first edge in `row`.
        """
        dtype = np.dtype(self.store.files["row"].dtype)
        for begin in range(int(ptr[0]), max(int(ptr[-1]), int(ptr[0]) + 1), PIECE_EDGES):
            yield begin, self._row.rows(begin, min(begin + PIECE_EDGES, int(ptr[-1])), dtype)

    def _check(self, at: int, piece: Array) -> None:
        if at < 0:
            raise self.store.damaged(
                "row", f"found the id {int(piece[-1 - at])}, which is no node's"
            )

    def needed(
        self, wanted: NodeSet | None, hops: int, done: Callable[[int], object]
    ) -> list[NodeSet | None]:
        """Return the nodes that each hop must compute so that the last one gives `wanted`.

        None stands for all nodes. The graph is read in order, once per hop but the last. It is read
        at least once, to check its checksums.
        """
        needed = [wanted]
        for _ in range(max(1, hops - 1)):
            inside = needed[0]
            reached = None if inside is None else NodeSet(self.num_nodes)
            words = _NO_WORDS if inside is None else inside.words
            target = _NO_WORDS if reached is None else reached.words
            for _, values in self.store.chunks("colptr", checked=True):
                done(values.nbytes)
            self._has_loops[:] = False
            at = 0
            number = -1
            first = 0
            ptr = np.zeros(1, np.int64)
            for begin, values in self.store.chunks("row", checked=True):
                position = 0
                while position < len(values):
                    while begin + position >= ptr[-1]:
                        at = 0
                        number += 1
                        first = self.slices[number]
                        ptr = self._offsets(first, first + SLICE_NODES)
                        loops = np.zeros(len(ptr) - 1, np.int64)
                    part = values[
                        position : position + int(min(ptr[-1] - begin - position, len(values)))
                    ]
                    at = _survey(
                        ptr, first, part, begin + position, at, words, target, self.num_nodes, loops
                    )
                    self._check(at, part)
                    self._has_loops[number] |= loops.any()
                    position += len(part)
                done(values.nbytes)
            if reached is not None and inside is not None:
                reached.words |= inside.words
            needed.insert(0, reached)
        return needed[-hops:]

    def degrees(self, first: int, end: int, loops: bool) -> Array:
        """Return the in-degrees of the nodes `first` to `end`, int64 [end - first].

        With `loops`, each node has exactly one self-loop. Until `needed` has been called, every
        slice is read as if it had self-loops.
        """
        ptr = self._offsets(first, end)
        degrees = np.diff(ptr)
        if not loops:
            return degrees
        # Few slices have self-loops; only their edges are read.
        if self._has_loops[first // SLICE_NODES : -(-end // SLICE_NODES)].any():
            self_loops = np.zeros(end - first, np.int64)
            at = 0
            for begin, piece in self._pieces(ptr):
                at = _survey(
                    ptr, first, piece, begin, at, _NO_WORDS, _NO_WORDS, self.num_nodes, self_loops
                )
                self._check(at, piece)
            degrees -= self_loops
        return degrees + 1

    def sweep(
        self, values: Array, members: NodeSet | None, wanted: NodeSet | None, *, loops: bool,
        done: Callable[[int], object],
    ) -> Generator[tuple[int, Array, Array], None, None]:  # fmt: skip
        """Yield (first node, means of in-neighbors float32 [m, columns], degrees [m]),
        slice by slice.

        `values`, float16 or float32 [n, columns], has the rows of `members`. The means of nodes
        outside `wanted` are left uninitialised. None stands for all nodes. With `loops`, each node
        is its own neighbor, once.
        """
        words = _NO_WORDS
        word_ranks = _NO_RANKS
        if members is not None:
            words = members.words
            word_ranks = members.word_ranks
        targets = _NO_WORDS if wanted is None else wanted.words
        if values.dtype == np.float16:
            values = values.view(np.uint16)

        # With many columns, a slice of `SLICE_NODES` nodes would be as large as all the columns.
        step = max(1, min(SLICE_NODES, SLICE_BYTES // (4 * values.shape[1])))

        def compute(first: int) -> tuple[int, Array, Array]:
            ptr = self._offsets(first, first + step)
            at = 0
            out = np.empty((len(ptr) - 1, values.shape[1]), np.float32)
            count = np.zeros(len(out), np.int64)
            total = np.empty(out.shape[1], np.float32)
            for begin, piece in self._pieces(ptr):
                at = _sweep(
                    ptr, first, piece, begin, at, targets, loops, values, words, word_ranks,
                    self.num_nodes, total, out, count,
                )  # fmt: skip
                self._check(at, piece)
            return first, out, count

        with contextlib.closing(in_order(range(0, self.num_nodes, step), compute)) as slices:
            for first, out, count in slices:
                yield first, out, count
                done(self.nbytes * len(out) // self.num_nodes)
