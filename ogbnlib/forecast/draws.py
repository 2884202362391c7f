"""Batches drawn from a store, for the nodes and edges that they really have: numpy alone, within
about a second.

Neighbors come from random numbers of their own; every neighbor of a node is equally likely, as in a
run.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ..graph.npz import Array
from ..graph.store import Store, open_store
from .budget import BatchShape

_EDGES = 2**19  # read at one hop, at most: 0.2 s
_DRAWS = (2, 8)  # batches of a split: as many as have `_EDGES` edges together, within these bounds
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

    @classmethod
    def of(cls, batch: BatchShape, source: str = "drawn") -> Self:
        """All of one shape."""
        return cls(batch, batch, source)


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
    shapes = _drawn(store.path, store.crc32, split, num_seeds, tuple(num_neighbors), training)
    # The largest of n batches lies as far above the mean as the largest of n normal values: 3.7
    # deviations for 10,000.
    above = max(1.0, statistics.NormalDist().inv_cdf(1 - 1 / (num_batches + 1)))
    mean, largest = [], []
    nodes, edges = (
        [shape.hop_nodes for shape, _ in shapes],
        [shape.hop_edges for shape, _ in shapes],
    )
    for counts, limit in ((nodes, store.num_nodes), (edges, store.num_edges)):
        means, totals = np.mean(counts, axis=0), np.sum(counts, axis=1)
        spread = float(np.std(totals, ddof=1)) if len(totals) > 1 else 0.0
        total = max(1.0, float(np.mean(totals)))
        mean.append(_rounded(means * min(1.0, limit / total)))
        largest.append(_rounded(means * min(1.0 + above * spread / total, limit / total)))
    source = "extrapolated" if any(cut for _, cut in shapes) else "drawn"
    return Batches(BatchShape(*mean), BatchShape(*largest), source)


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
        try:
            shapes.append(_draw(store, seeds, num_neighbors, random))
        except (IndexError, ValueError):
            raise store.damaged(
                "row", "expected ids and offsets within the graph, found others"
            ) from None
        read = sum(min(edges, _EDGES) for edges in shapes[-1][0].hop_edges)
        num_draws = min(num_draws, max(_DRAWS[0], _EDGES // max(1, read)))
    return shapes


def _draw(
    store: Store, seeds: Array, num_neighbors: tuple[int, ...], random: np.random.Generator
) -> tuple[BatchShape, bool]:
    """One batch, and whether it was too large to be drawn whole."""
    cold = store.files["colptr"].bytes + store.files["row"].bytes > _COLD_BYTES
    most, cut = _COLD_NODES if cold else _EDGES, False
    seen = np.zeros(store.num_nodes, bool)
    seen[seeds] = True
    frontier, nodes, edges = np.sort(seeds), [float(len(seeds))], list[float]()
    for k in num_neighbors:
        if len(frontier) > most:
            frontier = random.choice(frontier, most, replace=False)
        start = store.colptr[frontier]
        degree = store.colptr[frontier + 1] - start
        picks = degree if k < 0 else np.minimum(degree, k)
        edges.append(nodes[-1] * float(picks.mean()) if len(picks) else 0.0)
        if picks.sum() > _EDGES:  # as many are read, of some of the hop's nodes
            order = random.permutation(len(picks))
            order = order[: max(1, int(np.searchsorted(np.cumsum(picks[order]), _EDGES)))]
            start, degree, picks = start[order], degree[order], picks[order]
        # Evenly spread positions from a random one on: each of d neighbors is among k of them with
        # probability k / d.
        first = np.repeat(np.cumsum(picks) - picks, picks)
        steps = np.arange(len(first)) - first + np.repeat(random.random(len(picks)), picks)
        places = np.repeat(start, picks) + (
            steps * np.repeat(degree / np.maximum(picks, 1), picks)
        ).astype(np.int64)
        ids = store.row[places]
        ids = ids[~seen[ids]]
        new = _distinct(ids)
        seen[new] = True
        whole, distinct = edges[-1] / max(1, len(places)), float(len(new))
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
