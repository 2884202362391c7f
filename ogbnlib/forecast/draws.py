"""Batches drawn from a store, for the nodes and edges that they really have: numpy alone, within
about a second.

Neighbors come from random numbers of their own; every neighbor of a node is equally likely, as in a
run.
"""

import contextlib
import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ..graph.npz import Array
from ..graph.store import GraphSize, Store, open_store
from .budget import BatchShape

_EDGES = 2**19  # read at one hop, at most: 0.2 s
_DRAWS = (2, 8)  # batches of a split: as many as have `_EDGES` edges together, within these bounds
# With all neighbors of a hop one node of many decides the largest batch. So the edges of as many
# batches are counted as need so many reads, 0.5 s, and the heaviest are drawn whole.
_COUNTED_EDGES, _COUNTED_BATCHES, _HEAVIEST = 2**22, 2**12, 2
# a graph that may not be in memory has 15,000 random reads a second
_COLD_BYTES, _COLD_NODES = 2**31, 2**11


@dataclass(frozen=True)
class Batches:
    """The batches of a pass."""

    mean: BatchShape
    largest: BatchShape  # expected of as many batches as a run has
    # "drawn", "extrapolated" from the part of a batch that was drawn, or "degrees" of a graph not
    # seen
    source: str
    # With the node of the highest degree in it, where not every batch was counted: of a graph not
    # seen, any node.
    bound: BatchShape

    @classmethod
    def of(cls, batch: BatchShape, source: str = "drawn") -> Self:
        """All of one shape."""
        return cls(batch, batch, source, batch)


def draw_batches(
    store: Store,
    split: str,
    num_seeds: int,
    num_neighbors: Sequence[int],
    *,
    training: bool,
    num_batches: int,
) -> Batches:
    """Batches of `num_seeds` seeds of a split: any seeds in training, consecutive ones in an
    evaluation.

    A store whose offsets or ids are out of range is an `InputError`.
    """
    fan_out = tuple(num_neighbors)
    where = store.path, store.crc32, split, num_seeds, fan_out, training
    with _sound(store):
        shapes = _drawn(*where)
    # The largest of n batches lies as far above the mean as the largest of n normal values: 3.7
    # deviations for 10,000.
    above = max(1.0, statistics.NormalDist().inv_cdf(1 - 1 / (num_batches + 1)))
    mean, large = [], []
    nodes, edges = (
        [shape.hop_nodes for shape, _ in shapes],
        [shape.hop_edges for shape, _ in shapes],
    )
    for counts, limit in ((nodes, store.num_nodes), (edges, store.num_edges)):
        means, totals = np.mean(counts, axis=0), np.sum(counts, axis=1)
        spread = float(np.std(totals, ddof=1)) if len(totals) > 1 else 0.0
        total = max(1.0, float(np.mean(totals)))
        mean.append(_rounded(means * min(1.0, limit / total)))
        large.append(_rounded(means * min(1.0 + above * spread / total, limit / total)))
    source = "extrapolated" if any(cut for _, cut in shapes) else "drawn"
    largest = bound = BatchShape(*large)
    if -1 in fan_out:
        with _sound(store):
            heaviest, complete = _heaviest(*where)
        largest = bound = max([heaviest] if complete else [heaviest, largest], key=_weight)
        if not complete:
            highest = _highest_degree(store.path, store.crc32)
            bound = with_hub(largest, fan_out, store, highest)
    return Batches(BatchShape(*mean), largest, source, bound)


@contextlib.contextmanager
def _sound(store: Store) -> Iterator[None]:
    """Turn the errors of offsets and ids out of range into the store's own."""
    try:
        yield
    except (IndexError, ValueError):
        problem = "expected ids and offsets within the graph, found others"
        raise store.damaged("row", problem) from None


def _weight(shape: BatchShape) -> int:
    return shape.num_nodes + shape.num_edges


def with_hub(
    shape: BatchShape, num_neighbors: Sequence[int], size: GraphSize, degree: int
) -> BatchShape:
    """A batch that has a node with `degree` neighbors more in its last hop of all neighbors."""
    hop = max(hop for hop, k in enumerate(num_neighbors) if k < 0)
    nodes, edges = [*shape.hop_nodes], [*shape.hop_edges]
    edges[hop] += max(0, min(degree, size.num_edges - shape.num_edges))
    nodes[hop + 1] += max(0, min(degree, size.num_nodes - shape.num_nodes))
    return BatchShape(tuple(nodes), tuple(edges))


@functools.lru_cache(maxsize=64)
def _highest_degree(path: Path, crc32: int) -> int:
    """The most in-neighbors of a node, by one pass over the offsets."""
    store, highest, last = open_store(path), 0, 0
    for _, offsets in store.chunks("colptr"):
        highest = max(highest, int(np.diff(offsets, prepend=last).max(initial=0)))
        last = int(offsets[-1])
    return highest


@functools.lru_cache(maxsize=512)
def _heaviest(
    path: Path,
    crc32: int,
    split: str,
    num_seeds: int,
    num_neighbors: tuple[int, ...],
    training: bool,
) -> tuple[BatchShape, bool]:
    """The batch with the most edges among those that can be counted, and whether these are all that
    a run has, with the neighbors that it draws.

    Of training more batches are counted than a short run has: two hubs may meet in any of them.
    """
    store, random = open_store(path), np.random.default_rng(1)
    store.advise_random()
    ids = store.splits[split]
    batches = [ids[begin : begin + num_seeds] for begin in range(0, len(ids), num_seeds)]
    if training:
        orders = [random.permutation(ids) for _ in range(-(-_COUNTED_BATCHES // len(batches)))]
        batches = [
            order[begin : begin + num_seeds]
            for order in orders
            for begin in range(0, len(ids), num_seeds)
        ]
    hops = max(hop for hop, k in enumerate(num_neighbors) if k < 0)
    if not _is_cold(store) and num_neighbors[0] < 0:  # those with the largest first hop first
        first = [_degrees(store, seeds).sum() for seeds in batches]
        batches = [batches[number] for number in np.argsort(first, kind="stable")[::-1]]
    counted, read = list[tuple[int, int]](), 0
    for number, seeds in enumerate(batches[:_COUNTED_BATCHES]):
        if read > _COUNTED_EDGES or (_is_cold(store) and number >= _DRAWS[0]):
            break
        edges, own = _count(store, seeds, num_neighbors[: hops + 1], random)
        counted.append((edges, number))
        read += own
    shapes = [
        _draw(store, batches[number], num_neighbors, random, 8 * _EDGES)
        for _, number in sorted(counted, reverse=True)[:_HEAVIEST]
    ]
    is_fixed = not training and all(k < 0 for k in num_neighbors)
    complete = len(counted) == len(batches) and is_fixed and not any(cut for _, cut in shapes)
    return max((shape for shape, _ in shapes), key=_weight), complete


def _rounded(values: Sequence[float] | Array) -> tuple[int, ...]:
    return tuple(round(float(value)) for value in values)


def _distinct(ids: Array) -> Array:
    ids = np.sort(ids)  # `np.unique` takes ten times as long (numpy 2.3)
    return ids[np.append(True, ids[1:] != ids[:-1])[: len(ids)]]


@functools.lru_cache(maxsize=512)
def _drawn(
    path: Path,
    crc32: int,
    split: str,
    num_seeds: int,
    num_neighbors: tuple[int, ...],
    training: bool,
) -> list[tuple[BatchShape, bool]]:
    """Shapes of some batches, and whether each was extrapolated; `crc32` tells a store from one
    that replaced it."""
    store = open_store(path)
    store.advise_random()
    ids, random = store.splits[split], np.random.default_rng(0)
    full, shapes, num_draws = (
        len(ids) // max(1, num_seeds),
        list[tuple[BatchShape, bool]](),
        _DRAWS[1],
    )
    while len(shapes) < (num_draws if training else min(num_draws, full)):
        begin = len(shapes) * full // num_draws * num_seeds
        seeds = (
            random.choice(ids, num_seeds, replace=False)
            if training
            else ids[begin : begin + num_seeds]
        )
        shapes.append(_draw(store, seeds, num_neighbors, random, _EDGES))
        read = sum(min(edges, _EDGES) for edges in shapes[-1][0].hop_edges)
        num_draws = min(num_draws, max(_DRAWS[0], _EDGES // max(1, read)))
    return shapes


def _is_cold(store: Store) -> bool:
    """Whether a graph may not be in memory."""
    return store.files["colptr"].bytes + store.files["row"].bytes > _COLD_BYTES


def _degrees(store: Store, nodes: Array) -> Array:
    return np.asarray(store.colptr[nodes + 1] - store.colptr[nodes])


def _hop(
    store: Store, frontier: Array, k: int, random: np.random.Generator, most_edges: int
) -> tuple[Array, float]:
    """Sources of a hop's edges, or of `most_edges` of them, and how many of all edges these are."""
    start = store.colptr[frontier]
    degree = store.colptr[frontier + 1] - start
    picks = degree if k < 0 else np.minimum(degree, k)
    total = float(picks.sum())
    if total > most_edges:  # as many are read, of some of the hop's nodes
        order = random.permutation(len(picks))
        order = order[: max(1, int(np.searchsorted(np.cumsum(picks[order]), most_edges)))]
        start, degree, picks = start[order], degree[order], picks[order]
    # Evenly spread positions from a random one on: each of d neighbors is among k of them with
    # probability k / d.
    first = np.repeat(np.cumsum(picks) - picks, picks)
    steps = np.arange(len(first)) - first + np.repeat(random.random(len(picks)), picks)
    spread = np.repeat(degree / np.maximum(picks, 1), picks)
    places = np.repeat(start, picks) + (steps * spread).astype(np.int64)
    return np.asarray(store.row[places]), total


def _count(
    store: Store, seeds: Array, num_neighbors: tuple[int, ...], random: np.random.Generator
) -> tuple[int, int]:
    """Edges of a batch, of whose last hop only the degrees are read; and the edges that were
    read."""
    seen = np.zeros(store.num_nodes, bool)
    seen[seeds] = True
    frontier, counted, read = np.sort(seeds), 0.0, 0
    for k in num_neighbors[:-1]:
        ids, total = _hop(store, frontier, k, random, _EDGES)
        frontier = _distinct(ids[~seen[ids]])
        seen[frontier] = True
        counted, read = counted + total, read + len(ids)
    return int(counted + _degrees(store, frontier).sum()), read + len(frontier)


def _draw(
    store: Store,
    seeds: Array,
    num_neighbors: tuple[int, ...],
    random: np.random.Generator,
    most_edges: int,
) -> tuple[BatchShape, bool]:
    """One batch, and whether it was too large to be drawn whole: `most_edges` are read in a hop."""
    most, cut = _COLD_NODES if _is_cold(store) else most_edges, False
    seen = np.zeros(store.num_nodes, bool)
    seen[seeds] = True
    frontier, nodes, edges = np.sort(seeds), [float(len(seeds))], list[float]()
    for k in num_neighbors:
        if len(frontier) > most:
            frontier = random.choice(frontier, most, replace=False)
        ids, total = _hop(store, frontier, k, random, most_edges)
        edges.append(nodes[-1] * total / max(1, len(frontier)))
        whole = edges[-1] / max(1, len(ids))
        ids = ids[~seen[ids]]
        new = _distinct(ids)
        seen[new] = True
        distinct = float(len(new))
        if whole > 1.001 and distinct:
            # Distinct nodes D among m edges grow to D * (M / m) ** b among all M, with the b that
            # holds between m / 4 and m: rather too many.
            cut, quarter = True, max(1, len(ids) // 4)
            growth = math.log(distinct / len(_distinct(ids[:quarter]))) / math.log(
                max(2.0, len(ids) / quarter)
            )
            distinct *= whole**growth
        nodes.append(min(distinct, store.num_nodes - min(sum(nodes), store.num_nodes)))
        frontier = new
    return BatchShape(_rounded(nodes), _rounded(edges)), cut
