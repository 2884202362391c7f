"""Batches: their sizes, the memory that they take, and some of them drawn from a store.

Batches are drawn with numpy alone, within about a second, to get their real numbers of nodes and
edges. The random numbers are not those of a run, but every neighbor of a node is equally likely, as
in a run.
"""

import functools
import math
import mmap
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..graph.npz import Array
from ..graph.store import GraphSize, Store, open_store

# Limits of the batches that wait for the model under loading=store, by number and by size,
# whichever is reached first; at least one group waits.
QUEUE_BATCHES = 4
QUEUE_BYTES = 256 * 2**20
# drawn together: 11 of [3, 2] x 128; for more bytes malloc asks Linux each time
GROUP_BATCHES = 16
GROUP_BYTES = 2**22
# Most edges read at one hop, which takes 0.4 s. Batches of [15, 10, 5] x 1024 (num_neighbors x
# batch_size) with reverse edges are drawn whole.
_EDGES = 2**20
# Batches drawn of a split: within these bounds, as many as have half of `_EDGES` edges together.
# One is enough for a graph that may not be in memory, as it has 50,000 random reads a second.
_FEWEST = 2
_MOST = 8
# Where a hop takes all neighbors, a single node of high degree decides the largest batch. So edges
# are counted in as many batches as these reads allow, 0.5 s, and the heaviest batches are drawn.
_COUNTED_EDGES = 2**22
_COUNTED_BATCHES = 2**12
_HEAVIEST = 2
_COLD_BYTES = 2**31


@dataclass(frozen=True)
class BatchShape:
    """Nodes discovered (seeds first) and edges sampled at each hop: expected values or those of a
    drawn batch."""

    hop_nodes: tuple[int, ...]
    hop_edges: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return sum(self.hop_nodes)

    @property
    def num_edges(self) -> int:
        return sum(self.hop_edges)


@dataclass(frozen=True)
class Batches:
    """The batches of a pass over a split."""

    mean: BatchShape
    largest: BatchShape  # the expected largest of as many batches as a run has
    # "drawn", "extrapolated" from the part of a batch that was drawn, or "degrees": computed from
    # degrees, without a store
    source: str
    # `largest`; if a hop takes all neighbors and not every batch was counted, with the node of the
    # highest degree added. Without a store, this node may have all edges.
    bound: BatchShape

    @classmethod
    def of(cls, batch: BatchShape, source: str = "drawn") -> Self:
        """Return batches that all have one shape."""
        return cls(batch, batch, source, batch)


def batch_bytes(batch: BatchShape, num_features: int, itemsize: int) -> int:
    """Bytes of a batch as the model gets it: x, n_id int64 and edge_index int64 [2, E]."""
    return batch.num_nodes * (num_features * itemsize + 8) + batch.num_edges * 16


def queue(one: int) -> tuple[int, int]:
    """Number of batches of `one` bytes in a group, which is drawn together, and of groups in a
    queue."""
    together = max(1, min(GROUP_BATCHES, GROUP_BYTES // max(1, one)))
    return together, max(1, min(QUEUE_BATCHES // together, QUEUE_BYTES // max(1, together * one)))


def num_queued(one_bytes: int, num_left: int = 3 * GROUP_BATCHES) -> int:
    """Number of waiting batches of `one_bytes`, at most `num_left`: in the queue, in the thread
    that fills it, and in the group that the model has begun."""
    together, groups = queue(one_bytes)
    return min(together * (groups + 2) - 1, num_left)


@dataclass(frozen=True)
class _Request:
    """Everything that decides which batches are drawn; `crc32` tells a store from one that replaced
    it."""

    path: Path
    crc32: int
    split: str
    num_seeds: int
    num_neighbors: tuple[int, ...]
    training: bool


def draw_batches(
    store: Store,
    split: str,
    num_seeds: int,
    num_neighbors: Sequence[int],
    *,
    training: bool,
    num_batches: int,
) -> Batches:
    """Draw batches of `num_seeds` seeds: random ones of a split in training, consecutive ones in an
    evaluation.

    Raises `InputError` if offsets or ids of the store are out of range.
    """
    fan_out = tuple(num_neighbors)
    request = _Request(store.path, store.crc32, split, num_seeds, fan_out, training)
    try:
        shapes = _drawn(request)
        if -1 in fan_out:
            heaviest, complete = _heaviest(request)
    except (IndexError, ValueError):
        raise store.damaged(
            "row", "expected ids and offsets within the graph, found others"
        ) from None
    # The largest of n batches lies as far above the mean as the largest of n normal values: 3.7
    # standard deviations for 10,000.
    above = max(1.0, statistics.NormalDist().inv_cdf(1 - 1 / (num_batches + 1)))
    nodes = [shape.hop_nodes for shape, _ in shapes]
    edges = [shape.hop_edges for shape, _ in shapes]
    mean_nodes, most_nodes = _mean_and_most(nodes, store.num_nodes, above)
    mean_edges, most_edges = _mean_and_most(edges, store.num_edges, above)
    largest = bound = BatchShape(most_nodes, most_edges)
    if -1 in fan_out:
        largest = bound = max([heaviest] if complete else [heaviest, largest], key=_weight)
        if not complete:
            bound = with_hub(largest, fan_out, store, _highest_degree(store.path, store.crc32))
    source = "extrapolated" if any(cut for _, cut in shapes) else "drawn"
    return Batches(BatchShape(mean_nodes, mean_edges), largest, source, bound)


def _mean_and_most(
    counts: list[tuple[int, ...]], limit: int, above: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The mean counts of each hop, and the counts of a batch `above` standard deviations larger;
    `limit` is the most in all hops together."""
    means = np.mean(counts, axis=0)
    totals = np.sum(counts, axis=1)
    spread = float(np.std(totals, ddof=1)) if len(totals) > 1 else 0.0
    total = max(1.0, float(np.mean(totals)))
    most = means * min(1.0 + above * spread / total, limit / total)
    return _rounded(means * min(1.0, limit / total)), _rounded(most)


def _weight(shape: BatchShape) -> int:
    return shape.num_nodes + shape.num_edges


def with_hub(
    shape: BatchShape, num_neighbors: Sequence[int], size: GraphSize, degree: int
) -> BatchShape:
    """Add a node with `degree` neighbors to a batch, in the last hop that takes all neighbors."""
    hop = _last_full_hop(num_neighbors)
    nodes = [*shape.hop_nodes]
    edges = [*shape.hop_edges]
    edges[hop] += max(0, min(degree, size.num_edges - shape.num_edges))
    nodes[hop + 1] += max(0, min(degree, size.num_nodes - shape.num_nodes))
    return BatchShape(tuple(nodes), tuple(edges))


def _last_full_hop(num_neighbors: Sequence[int]) -> int:
    return max(hop for hop, k in enumerate(num_neighbors) if k < 0)


@functools.lru_cache(maxsize=64)
def _highest_degree(path: Path, crc32: int) -> int:
    """The largest number of in-neighbors of a node, by one pass over `colptr`."""
    highest = last = 0
    for _, offsets in open_store(path).chunks("colptr"):
        highest = max(highest, int(np.diff(offsets, prepend=last).max(initial=0)))
        last = int(offsets[-1])
    return highest


def _batches(ids: Array, size: int) -> list[Array]:
    return [ids[begin : begin + size] for begin in range(0, len(ids), size)]


@functools.lru_cache(maxsize=512)
def _heaviest(request: _Request) -> tuple[BatchShape, bool]:
    """The largest of the counted batches, and whether exactly these batches come in a run.

    They do in an evaluation that takes all neighbors at every hop, if all its batches are counted
    and none is extrapolated. For training, more batches are counted than a short run has, as two
    hubs (nodes of very high degree) may meet in any batch.
    """
    store = open_store(request.path)
    store.advise_random()
    random = np.random.default_rng(1)
    fan_out = request.num_neighbors
    batches = _seeds_of_batches(request, store, random)
    counted = list[tuple[int, int]]()
    read = 0
    for number, seeds in enumerate(batches[: _FEWEST if _is_cold(store) else _COUNTED_BATCHES]):
        if read > _COUNTED_EDGES:
            break
        edges, own = _count(store, seeds, fan_out[: _last_full_hop(fan_out) + 1], random)
        counted.append((edges, number))
        read += own
    shapes = [
        _draw(store, batches[number], fan_out, random, _EDGES if _is_cold(store) else 4 * _EDGES)
        for _, number in sorted(counted, reverse=True)[:_HEAVIEST]
    ]
    is_fixed = not request.training and all(k < 0 for k in fan_out)
    complete = len(counted) == len(batches) and is_fixed and not any(cut for _, cut in shapes)
    return max((shape for shape, _ in shapes), key=_weight), complete


def _seeds_of_batches(request: _Request, store: Store, random: np.random.Generator) -> list[Array]:
    """The seeds of each batch of `request`; for training, of the batches of several epochs."""
    ids = store.splits[request.split]
    batches = _batches(ids, request.num_seeds)
    if request.training:
        orders = [random.permutation(ids) for _ in range(-(-_COUNTED_BATCHES // len(batches)))]
        batches = [batch for order in orders for batch in _batches(order, request.num_seeds)]
    if not _is_cold(store) and request.num_neighbors[0] < 0:
        # batches with the largest first hop come first
        first = [_degrees(store, seeds).sum() for seeds in batches]
        batches = [batches[number] for number in np.argsort(first, kind="stable")[::-1]]
    return batches


def _rounded(values: Sequence[float] | Array) -> tuple[int, ...]:
    return tuple(round(float(value)) for value in values)


def _distinct(ids: Array) -> Array:
    ids = np.sort(ids)  # `np.unique` takes ten times as long (numpy 2.3)
    return ids[np.append(True, ids[1:] != ids[:-1])[: len(ids)]]


@functools.lru_cache(maxsize=512)
def _drawn(request: _Request) -> list[tuple[BatchShape, bool]]:
    """Shapes of some batches, and whether each was extrapolated."""
    store = open_store(request.path)
    store.advise_random()
    random = np.random.default_rng(0)
    ids = store.splits[request.split]
    size = request.num_seeds
    full = len(ids) // max(1, size)
    shapes = list[tuple[BatchShape, bool]]()
    num_draws = _MOST
    fewest = 1 if _is_cold(store) else _FEWEST
    while len(shapes) < (num_draws if request.training else min(num_draws, full)):
        if request.training:
            seeds = random.choice(ids, size, replace=False)
        else:
            begin = len(shapes) * full // num_draws * size
            seeds = ids[begin : begin + size]
        shapes.append(_draw(store, seeds, request.num_neighbors, random, _EDGES))
        read = sum(min(edges, _EDGES) for edges in shapes[-1][0].hop_edges)
        num_draws = min(num_draws, max(fewest, _EDGES // 2 // max(1, read)))
    return shapes


def _is_cold(store: Store) -> bool:
    return store.files["colptr"].bytes + store.files["row"].bytes > _COLD_BYTES


def _degrees(store: Store, nodes: Array) -> Array:
    return np.asarray(store.colptr[nodes + 1] - store.colptr[nodes])


def _hop(
    store: Store, frontier: Array, k: int, random: np.random.Generator, most_edges: int
) -> tuple[Array, float]:
    """Sources of a hop's edges, or of about `most_edges` of them, and the number of all its
    edges."""
    if _is_cold(store):
        _read_ahead(store.colptr, frontier)
    start = store.colptr[frontier]
    degree = store.colptr[frontier + 1] - start
    picks = degree if k < 0 else np.minimum(degree, k)
    total = float(picks.sum())
    if total > most_edges:  # read the edges of some of the nodes only
        order = random.permutation(len(picks))
        order = order[: max(1, int(np.searchsorted(np.cumsum(picks[order]), most_edges)))]
        start = start[order]
        degree = degree[order]
        picks = picks[order]
    # Positions are evenly spread from a random one on: each of d neighbors is among the k with
    # probability k / d.
    first = np.repeat(np.cumsum(picks) - picks, picks)
    steps = np.arange(len(first)) - first + np.repeat(random.random(len(picks)), picks)
    spread = np.repeat(degree / np.maximum(picks, 1), picks)
    places = np.repeat(start, picks) + (steps * spread).astype(np.int64)
    if _is_cold(store):
        _read_ahead(store.row, places)
    return np.asarray(store.row[places]), total


def _read_ahead(array: Any, places: Array) -> None:
    """Have Linux read the pages of some items of a memory map at once: three to four times as fast
    as one page fault after the other."""
    for page in _distinct(places * array.itemsize // mmap.PAGESIZE).tolist():
        array._mmap.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, mmap.PAGESIZE)


def _count(
    store: Store, seeds: Array, num_neighbors: tuple[int, ...], random: np.random.Generator
) -> tuple[int, int]:
    """Number of edges of a batch, and of the edges and degrees read; in the last hop only degrees
    are read."""
    seen = np.zeros(store.num_nodes, bool)
    seen[seeds] = True
    frontier = np.sort(seeds)
    counted = 0.0
    read = 0
    for k in num_neighbors[:-1]:
        ids, total = _hop(store, frontier, k, random, _EDGES)
        frontier = _distinct(ids[~seen[ids]])
        seen[frontier] = True
        counted += total
        read += len(ids)
    return int(counted + _degrees(store, frontier).sum()), read + len(frontier)


def _draw(
    store: Store,
    seeds: Array,
    num_neighbors: tuple[int, ...],
    random: np.random.Generator,
    most_edges: int,
) -> tuple[BatchShape, bool]:
    """Draw one batch; return its shape, and whether it was extrapolated, as a hop reads about
    `most_edges` edges at most."""
    cut = False
    seen = np.zeros(store.num_nodes, bool)
    seen[seeds] = True
    frontier = np.sort(seeds)
    nodes = [float(len(seeds))]
    edges = list[float]()
    for k in num_neighbors:
        if len(frontier) > most_edges:
            frontier = random.choice(frontier, most_edges, replace=False)
        ids, total = _hop(store, frontier, k, random, most_edges)
        edges.append(nodes[-1] * total / max(1, len(frontier)))
        whole = edges[-1] / max(1, len(ids))
        ids = ids[~seen[ids]]
        frontier = _distinct(ids)
        seen[frontier] = True
        distinct = float(len(frontier))
        if whole > 1.001 and distinct:
            # D distinct nodes among m edges grow to D * (M / m) ** b among all M edges, with the b
            # that holds between m / 4 and m. This gives too many rather than too few.
            cut = True
            quarter = max(1, len(ids) // 4)
            growth = math.log(distinct / len(_distinct(ids[:quarter])))
            distinct *= whole ** (growth / math.log(max(2.0, len(ids) / quarter)))
        nodes.append(min(distinct, store.num_nodes - min(sum(nodes), store.num_nodes)))
    return BatchShape(_rounded(nodes), _rounded(edges)), cut
