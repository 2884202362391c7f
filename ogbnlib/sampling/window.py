"""Batches from a graph on disk: sampled and gathered many at a time, so that the disk is read in ascending passes.

Page-faulting row by row gives about 10 batches of 128 x [3, 2] a second on a graph larger than memory, whatever the
disk could do when read in order. So a *window* of consecutive batches is prepared at once. At each hop the offsets and
the neighbors that all of its batches need are fetched in one pass over `colptr` and one over `row`, and at the end the
features of all its nodes in one pass over `x`, each row once. Ginex (VLDB 2022), DiskGNN (SIGMOD 2025) and AGNES rest
on the same idea. Because the choice of neighbors is a function of (seed, epoch, batch, hop, node) alone, a window's
batches are those that `CSCSampler` draws one by one.

Where the store fits into the page cache there is nothing to gain, and batches are drawn one by one from the maps.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import uint64

from ..errors import InputError
from ..graph.bits import NodeSet
from ..graph.disk import _BLOCK, DiskArray
from ..graph.npz import Array
from .choice import chosen_positions
from .sampler import CSCSampler, absorb


@dataclass
class SampledBatch:
    """One batch in compact form, grown hop by hop.

    `node` int64 [num_nodes] global ids, seeds first; `rows`, `cols` int32 local ids, one array for each hop's edges.
    """

    node: Array
    num_sampled_nodes: list[int]
    rows: list[Array] = field(default_factory=list)
    cols: list[Array] = field(default_factory=list)

    @property
    def num_sampled_edges(self) -> list[int]:
        return [len(row) for row in self.rows]

    @property
    def frontier(self) -> Array:
        """The nodes that the last hop discovered."""
        return self.node[len(self.node) - self.num_sampled_nodes[-1] :]

    def add(self, ids: Array, num_nodes: int) -> int | None:
        """Turn the next hop's global ids into local ones, in place; the place of the first that is out of range."""
        before, no_table = len(self.node), np.empty(0, np.uint64)
        bad, stop, node, count, *_ = absorb(no_table, uint64(0), self.node, before, ids, num_nodes)
        self.node = node[:count]
        self.num_sampled_nodes.append(count - before)
        return stop if bad else None


@dataclass(frozen=True)
class Seeds:
    """What a window is to hold: the seeds of its batches, and what decides their neighbors.

    Attributes:
        positions: For each batch, where its seeds stand among the loader's input nodes, int64; the first tells the
            batch from the others of its epoch.
        ids: For each batch the seeds, int64 global ids.
    """

    sampler: CSCSampler
    epoch: int
    positions: Sequence[Any]
    ids: Sequence[Array]


def sample_windows(windows: Sequence[Seeds], colptr: DiskArray, row: DiskArray) -> list[list[SampledBatch]]:
    """Sample all batches of some windows together, with one pass over `colptr` and one over `row` per hop.

    The samplers decide fan-outs, of which all have equally many, and choices; their own arrays are not read, except for
    `node_id`.

    Raises:
        InputError: for seeds that occur twice in a batch or are out of range, and for a damaged graph.
    """
    num_nodes, row_dtype = colptr.num_rows - 1, np.dtype(f"i{row.row_bytes}")
    drawn = [
        (window.sampler, window.sampler.batch_key(int(positions[0]), window.epoch), ids)
        for window in windows
        for positions, ids in zip(window.positions, window.ids, strict=True)
    ]
    batches = [SampledBatch(np.empty(0, np.int64), []) for _ in drawn]
    for batch, (_, _, ids) in zip(batches, drawn, strict=True):
        if (bad := batch.add(ids.copy(), num_nodes)) is not None:
            raise InputError(f"input_nodes: expected seeds from 0 to {num_nodes - 1}, found {ids[bad]}")
        if len(batch.node) < len(ids):
            raise InputError("input_nodes: expected each seed once per batch, found one twice")
    for hop in range(len(drawn[0][0].num_neighbors)):
        wanted = _choose(drawn, batches, hop, colptr, row)
        found = np.empty((len(wanted), 1), row_dtype)
        row.fetch(wanted, found)
        del wanted
        at = 0
        for batch in batches:
            local = found[at : at + len(batch.cols[-1]), 0].astype(np.int64)
            at += len(local)
            if batch.add(local, num_nodes) is not None:
                raise row.damaged(f"expected ids from 0 to {num_nodes - 1}, found others")
            batch.rows.append(local.astype(np.int32))
            batch.node = batch.node.copy()  # without the room for repeats behind it
    remaining = iter(batches)
    return [list(itertools.islice(remaining, len(window.ids))) for window in windows]


def _choose(
    drawn: Sequence[tuple[CSCSampler, np.uint64, Array]],
    batches: Sequence[SampledBatch],
    hop: int,
    colptr: DiskArray,
    row: DiskArray,
) -> Array:
    """The places in `row` that all batches want at this hop, int64; each batch is given the targets of its own."""
    frontier = np.concatenate([batch.frontier for batch in batches])
    ends = np.empty((len(frontier), 2), np.int64)
    colptr.fetch(frontier, ends)
    start, degree = ends[:, 0].copy(), ends[:, 1] - ends[:, 0]
    del ends
    if len(degree) and (degree.min() < 0 or start.min() < 0 or (start + degree).max() > row.num_rows):
        raise colptr.damaged(f"expected ascending offsets up to {row.num_rows}, found others")
    bounds = np.cumsum([0, *(batch.num_sampled_nodes[-1] for batch in batches)])
    parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds.tolist())]
    most = [np.iinfo(np.int64).max if (k := sampler.num_neighbors[hop]) < 0 else k for sampler, _, _ in drawn]
    sizes = [int(np.minimum(degree[part], k).sum()) for part, k in zip(parts, most, strict=True)]
    wanted, at = np.empty(sum(sizes), np.int64), 0
    for batch, part, (sampler, key, _), size in zip(batches, parts, drawn, sizes, strict=True):
        ids = sampler.original_ids(frontier[part])
        at_hop, begin = 0 if sampler.fixed else hop, len(batch.node) - len(ids)
        k = sampler.num_neighbors[hop]
        wanted[at : at + size], target = chosen_positions(key, at_hop, ids, start[part], degree[part], k, begin)
        batch.cols.append(target.astype(np.int32))
        at += size
    return wanted


@dataclass
class Window:
    """Some batches and the features of all their nodes, each once; anonymous memory.

    Attributes:
        positions: As in `Seeds`.
        hops: For each batch, its nodes of each hop, seeds first, and its edges of each hop.
        ids: int32 (int64 from 2**31 nodes on) [distinct nodes], global, ascending.
        slots: int32 [nodes], the place in `ids` of each node, batch after batch.
        edges: int32 [2 * edges], batch after batch all sources, then all targets, as places among the batch's nodes.
        features: [distinct nodes, num_features] in the store's dtype.
    """

    positions: Sequence[Any]
    hops: list[tuple[list[int], list[int]]]
    ids: Array
    slots: Array
    edges: Array
    features: Array

    @classmethod
    def pack(cls, seeds: Seeds, batches: list[SampledBatch], num_nodes: int) -> Window:
        """Without the features."""
        distinct = NodeSet(num_nodes)
        for batch in batches:
            distinct.add(batch.node)
        ids = distinct.members().astype(np.int32 if num_nodes < 2**31 else np.int64)
        slots = np.concatenate([distinct.ranks(batch.node).astype(np.int32) for batch in batches])
        edges = np.concatenate([part for batch in batches for part in (*batch.rows, *batch.cols)])
        hops = [(batch.num_sampled_nodes, batch.num_sampled_edges) for batch in batches]
        return cls(seeds.positions, hops, ids, slots, edges, np.empty(0))

    def batches(self) -> Iterator[tuple[Any, Array, Array, list[int], list[int]]]:
        """Of each batch its positions, slots and edges [2, num_edges], and how many nodes and edges each hop has."""
        node = edge = 0
        for positions, (of_nodes, of_edges) in zip(self.positions, self.hops, strict=True):
            nodes, edges = sum(of_nodes), 2 * sum(of_edges)
            parts = self.slots[node : node + nodes], self.edges[edge : edge + edges].reshape(2, -1)
            yield positions, *parts, of_nodes, of_edges
            node, edge = node + nodes, edge + edges


def compile_lookahead() -> None:
    """Compile, or load from disk, the kernels of this module, on a graph of one node that lies in a temporary file."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(_BLOCK))
        file.flush()
        sampler = CSCSampler(np.zeros(2, np.int64), np.empty(0, np.int32), [1])
        colptr, row, x = (DiskArray(file.name, 0, size, 2) for size in (8, 4, 8))
        one = np.zeros(1, np.int64)
        for dtype in (np.int32, np.int64):
            row.fetch(one, np.empty((1, 1), dtype))
        seeds = Seeds(sampler, 0, [one], [one])
        (sampled,) = sample_windows([seeds], colptr, row)
        window = Window.pack(seeds, sampled, 1)
        x.fetch(window.ids, np.empty((1, 4), np.float16))
        x.deal(window.ids, np.array([0, 1]), 2**20, lambda *_: None)
        for array in (colptr, row, x):
            array.close()
