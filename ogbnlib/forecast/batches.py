"""Batches: their sizes, the memory that they take, and some of them drawn from a store.

The kernel of the sampler draws some batches within about a second, to get their real numbers of
nodes and edges. Those of an evaluation are batches of the run.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ..graph.npz import Array
from ..graph.store import GraphSize, Store, open_store

# Limits of the batches that wait for the model under loading=store, by number and by size,
# whichever is reached first; at least one group waits.
QUEUE_BATCHES = 4
QUEUE_BYTES = 256 * 2**20
# Limits of a group, batches drawn together: 11 of [3, 2] x 128. Above 4 MiB malloc calls mmap.
GROUP_BATCHES = 16
GROUP_BYTES = 2**22
# Most edges that the kernel draws at one hop: 0.7 s; of a cold graph 5 s, at 50,000 random reads a
# second. A batch of [15, 10, 5] x 1024 with reverse edges has 0.7 million.
_EDGES = 2**23
_COLD_EDGES = 2**18
_COLD_BYTES = 2**31  # a larger graph is cold: it may not be in memory
# Batches drawn of a split, as many as have `_DRAWN_EDGES` together; of a cold graph one.
_DRAWN_EDGES = 2**21
_FEWEST = 2
_MOST = 8
# Where a hop takes all neighbors, a single node of high degree decides the largest batch. So edges
# are counted in as many batches as these reads allow, 0.5 s, and the heaviest are drawn.
_COUNTED_EDGES = 2**22
_COUNTED_BATCHES = 2**12
_HEAVIEST = 2


@dataclass(frozen=True)
class BatchShape:
    """Numbers of nodes discovered and edges sampled at each hop, expected or of a drawn batch."""

    hop_nodes: tuple[int, ...]  # seeds, then new nodes of each hop
    hop_edges: tuple[int, ...]  # of each hop: one number fewer than `hop_nodes`
    is_extrapolated: bool = False  # from a part of the batch that was drawn

    @property
    def num_nodes(self) -> int:
        return sum(self.hop_nodes)

    @property
    def num_edges(self) -> int:
        return sum(self.hop_edges)

    @property
    def num_rows(self) -> int:  # a measure of work: a layer computes a row for each node and edge
        return self.num_nodes + self.num_edges


@dataclass(frozen=True)
class Batches:
    """The batches of a pass over a split."""

    mean: BatchShape
    largest: BatchShape  # the expected largest of as many batches as a run has
    source: str  # "drawn", "extrapolated" from a part of a batch, or "degrees" without a store
    # `largest`; if a hop takes all neighbors and not every batch was counted, with the node of the
    # highest degree added. Without a store, this node may have all edges.
    bound: BatchShape

    @classmethod
    def of(cls, batch: BatchShape) -> Self:
        """Return batches that all have one shape."""
        return cls(batch, batch, "drawn", batch)


def batch_bytes(batch: BatchShape, num_features: int, itemsize: int) -> int:
    """Bytes of a batch as the model gets it: x, n_id int64 and edge_index int64 [2, E]."""
    return batch.num_nodes * (num_features * itemsize + 8) + batch.num_edges * 16


def queue(bytes_each: int) -> tuple[int, int]:
    """Number of batches of `bytes_each` drawn together as a group, and of groups in a queue."""
    bytes_each = max(1, bytes_each)  # a divisor
    together = max(1, min(GROUP_BATCHES, GROUP_BYTES // bytes_each))
    groups = min(QUEUE_BATCHES // together, QUEUE_BYTES // (together * bytes_each))
    return together, max(1, groups)


def num_queued(bytes_each: int, num_left: int = 3 * GROUP_BATCHES) -> int:
    """Most batches of `bytes_each` that wait while one is in use, if `num_left` are left: in the
    queue, in the thread that fills it, and in the group of the batch in use."""
    together, groups = queue(bytes_each)
    return min(together * (groups + 2) - 1, num_left)  # 47 at most: the default is no bound


@dataclass(frozen=True)
class Draw:
    """The values that decide which batches are drawn from a store."""

    num_seeds: int  # of a batch
    num_neighbors: tuple[int, ...]  # by hop; -1: all
    training: bool
    seed: int  # that of the run, with the one of the split's stream added


class _Drawn(NamedTuple):
    shapes: list[BatchShape]  # of some batches, each as likely as any other
    heaviest: BatchShape | None  # where a hop takes all neighbors
    is_complete: bool  # whether all batches of a run were counted


def draw_batches(store: Store, nodes: str | Array, draw: Draw, num_batches: int) -> Batches | None:
    """Draw batches of a split or of node ids: random ones in training, else consecutive ones.

    Returns None if the neighborhood of a single seed is too large. Raises `InputError` if offsets
    or ids of the store are out of range.
    """
    drawn = (
        _of_split(store.path, store.crc32, nodes, draw)  # cached for later forecasts
        if isinstance(nodes, str)
        else _of_nodes(store, nodes, draw)
    )
    if drawn is None:
        return None
    # The largest of n batches lies as far above the mean as the largest of n normal values: 3.7
    # standard deviations for 10,000, and never less than 1.
    above = max(1.0, statistics.NormalDist().inv_cdf(1 - 1 / (num_batches + 1)))
    hop_nodes = [shape.hop_nodes for shape in drawn.shapes]
    hop_edges = [shape.hop_edges for shape in drawn.shapes]
    mean_nodes, most_nodes = _mean_and_most(hop_nodes, store.num_nodes, above)
    mean_edges, most_edges = _mean_and_most(hop_edges, store.num_edges, above)
    largest = bound = BatchShape(most_nodes, most_edges)
    if drawn.heaviest is not None:
        if drawn.is_complete and not drawn.heaviest.is_extrapolated:
            largest = bound = drawn.heaviest  # no estimate: the run has this batch
        else:
            largest = max(drawn.heaviest, largest, key=lambda shape: shape.num_rows)
            degree = _highest_degree(store.path, store.crc32)
            bound = with_hub(largest, draw.num_neighbors, store, degree)
    is_extrapolated = any(one.is_extrapolated for one in (*drawn.shapes, largest))
    source = "extrapolated" if is_extrapolated else "drawn"
    return Batches(BatchShape(mean_nodes, mean_edges), largest, source, bound)


def _mean_and_most(
    counts: list[tuple[int, ...]], limit: int, above: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # From counts per hop of some batches: those of the mean batch, and of one that lies `above`
    # standard deviations over it. The total of neither exceeds `limit`, the graph's.
    means = np.mean(counts, axis=0)  # by hop
    totals = np.sum(counts, axis=1)  # by batch
    deviation = float(np.std(totals, ddof=1)) if len(totals) > 1 else 0.0
    total = max(1.0, float(np.mean(totals)))
    most = means * min(1.0 + above * deviation / total, limit / total)
    return _rounded(means * min(1.0, limit / total)), _rounded(most)


def _rounded(values: Sequence[float] | Array) -> tuple[int, ...]:
    return tuple(round(float(value)) for value in values)


def with_hub(
    shape: BatchShape, num_neighbors: Sequence[int], size: GraphSize, degree: int
) -> BatchShape:
    """Add a node with `degree` neighbors to a batch, in the last hop that takes all neighbors."""
    hop = _last_full_hop(num_neighbors)
    nodes = [*shape.hop_nodes]  # nodes[hop + 1] are found by edges[hop]
    edges = [*shape.hop_edges]
    # a batch has no more than the whole graph
    edges[hop] += max(0, min(degree, size.num_edges - shape.num_edges))
    nodes[hop + 1] += max(0, min(degree, size.num_nodes - shape.num_nodes))
    return BatchShape(tuple(nodes), tuple(edges))


def _last_full_hop(num_neighbors: Sequence[int]) -> int:
    return max(hop for hop, k in enumerate(num_neighbors) if k < 0)  # -1: all neighbors


@functools.lru_cache(maxsize=64)
def _highest_degree(path: Path, crc32: int) -> int:
    highest = last = 0  # `last`: the offset before a chunk
    for _, offsets in open_store(path).chunks("colptr"):  # int64, of consecutive nodes
        highest = max(highest, int(np.diff(offsets, prepend=last).max(initial=0)))
        last = int(offsets[-1])
    return highest


# `crc32` tells a store from one that replaced it.
@functools.lru_cache(maxsize=512)
def _of_split(path: Path, crc32: int, split: str, draw: Draw) -> _Drawn | None:
    store = open_store(path)
    store.advise_random()
    return _of_nodes(store, store.splits[split], draw)


def _of_nodes(store: Store, ids: Array, draw: Draw) -> _Drawn | None:
    shapes = list[BatchShape]()  # of batches from all over `ids`, the seeds of a pass
    fewest = 1 if _is_cold(store) else _FEWEST
    for seeds in _spread(ids, draw):
        num_edges = sum(shape.num_edges for shape in shapes)
        if len(shapes) >= fewest and num_edges > _DRAWN_EDGES:
            break
        shape = _shape(store, draw, seeds)
        if shape is None:
            return None
        shapes.append(shape)
    heaviest = None
    is_complete = False
    if -1 in draw.num_neighbors:
        batches = _batches(ids, draw, _COUNTED_BATCHES)
        edges = _count(store, draw, batches[:_FEWEST] if _is_cold(store) else batches)
        numbers = np.argsort(edges, kind="stable")[::-1][:_HEAVIEST]  # of those with most edges
        drawn = filter(None, [_shape(store, draw, batches[number]) for number in numbers])
        heaviest = max(drawn, key=lambda shape: shape.num_rows, default=None)
        # the edges of all hops were counted, in all batches of the run: training draws others
        is_last_full = draw.num_neighbors[-1] < 0
        is_complete = is_last_full and not draw.training and len(edges) == len(batches)
    return _Drawn(shapes, heaviest, is_complete)


def _batches(ids: Array, draw: Draw, count: int) -> list[Array]:
    # seeds of all batches of an evaluation, which ignores `count`, or of `count` random ones
    size = draw.num_seeds
    if not draw.training:
        return [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    random = np.random.default_rng(draw.seed)
    return [ids[random.choice(len(ids), size, replace=False)] for _ in range(count)]


def _spread(ids: Array, draw: Draw) -> list[Array]:
    # Seeds of at most `_MOST` batches from all over the split, without a smaller last batch.
    whole = [seeds for seeds in _batches(ids, draw, _MOST) if len(seeds) == draw.num_seeds]
    count = min(_MOST, len(whole))
    return [whole[number * len(whole) // count] for number in range(count)]


def _is_cold(store: Store) -> bool:
    return store.files["colptr"].bytes + store.files["row"].bytes > _COLD_BYTES


def _sample(
    store: Store, draw: Draw, seeds: Array, num_neighbors: Sequence[int]
) -> tuple[Array, BatchShape] | None:
    # The nodes (global ids, hop by hop) and shape of one batch; None if a hop has too many edges.
    from ..graph.neighbors import DONE, TOO_MANY, bad_column, batch_key, sample_all

    # epoch 0 and first position 0, as an evaluation has them; the kernel takes a seed as uint64
    key = batch_key(np.uint64(draw.seed & (2**64 - 1)), 0, 0)
    status, culprit, nodes, _, hop_nodes, hop_edges = sample_all(
        np.asarray(store.colptr),
        np.asarray(store.row),
        seeds,
        len(seeds),  # batch size: one batch has them all
        np.array(num_neighbors, np.int64),
        np.array([key], np.uint64),
        not draw.training,  # an evaluation draws the same neighbors for a node at all hops
        0,  # nodes expected: the kernel sizes its table by itself
        _COLD_EDGES if _is_cold(store) else _EDGES,
    )
    if status == TOO_MANY:
        return None
    if status != DONE:
        raise bad_column(str(store.path), store.num_nodes, culprit)
    return nodes, BatchShape(tuple(hop_nodes[0].tolist()), tuple(hop_edges[0].tolist()))


def _shape(store: Store, draw: Draw, seeds: Array) -> BatchShape | None:
    """The shape of a batch, extrapolated from some of its seeds if it is too large to be drawn;
    None if even a few seeds are."""
    count = len(seeds)
    sampled = _sample(store, draw, seeds, draw.num_neighbors)
    while sampled is None:
        count //= 2
        if count < 2:  # two sizes are needed to extrapolate
            return None
        sampled = _sample(store, draw, seeds[:count], draw.num_neighbors)
    if count == len(seeds):
        return sampled[1]
    fewer = _sample(store, draw, seeds[: count // 2], draw.num_neighbors)
    assert fewer is not None  # a part of a batch that could be drawn
    return _extrapolated(fewer[1], sampled[1], len(seeds))


def _count(store: Store, draw: Draw, batches: Sequence[Array]) -> list[int]:
    """Number of edges of each batch up to the last hop that takes all neighbors, of which only
    degrees are read. Ends after `_COUNTED_EDGES`, or at a batch that is too large to draw."""
    counts = list[int]()
    num_read = 0  # edges, and offsets of nodes
    fan_outs = draw.num_neighbors[: _last_full_hop(draw.num_neighbors)]  # of the hops before it
    for seeds in batches:
        sampled = _sample(store, draw, seeds, fan_outs)
        if sampled is None or num_read > _COUNTED_EDGES:
            break
        nodes, shape = sampled
        frontier = nodes[len(nodes) - shape.hop_nodes[-1] :]  # found last: all their edges count
        degrees = store.colptr[frontier + 1] - store.colptr[frontier]
        counts.append(shape.num_edges + int(degrees.sum()))
        num_read += shape.num_edges + len(frontier)
    return counts


def _extrapolated(fewer: BatchShape, drawn: BatchShape, num_seeds: int) -> BatchShape:
    # The number of nodes grows with a power of the number of seeds that falls as batches grow. The
    # power between the two drawn batches gives too many nodes rather than too few.
    seeds = drawn.hop_nodes[0]  # twice those of `fewer`
    times = num_seeds / seeds
    ratio = math.log(times) / math.log(seeds / fewer.hop_nodes[0])  # doublings still to come
    nodes = [
        count * min(times, (count / max(1, low)) ** ratio)  # at most in proportion to seeds
        for low, count in zip(fewer.hop_nodes, drawn.hop_nodes, strict=True)
    ]
    # each node keeps its number of edges; the nodes of the last hop have none
    frontiers = zip(drawn.hop_edges, nodes, drawn.hop_nodes, strict=False)
    edges = [count * grown / max(1, frontier) for count, grown, frontier in frontiers]
    return BatchShape(_rounded(nodes), _rounded(edges), is_extrapolated=True)
