"""Windows: consecutive batches from a graph on disk that are sampled together, in ascending passes
over its files.

Page faults row by row give about 10 batches of 128 x [3, 2] a second on a graph larger than memory.
A window needs one pass over `colptr` and one over `row` at each hop, for all of its batches, and
one over `x`. Ginex (VLDB 2022), DiskGNN (SIGMOD 2025) and AGNES rest on the same idea. A window has
the batches that `CSCSampler` draws one by one.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numba import uint64
from torch import Tensor

from ..errors import InputError
from ..files import BLOCK
from ..graph.bits import NodeSet, kernel, prefetch
from ..graph.disk import DiskArray
from ..graph.npz import Array
from ..graph.sort import restore_input_order
from ..launcher import job_cores, local_ranks
from .choice import choose_all, count_chosen
from .sampler import CSCSampler, Hops, absorb


class Seeds(NamedTuple):
    """The seeds of a window's batches, with the sampler and epoch that decide their neighbors."""

    sampler: CSCSampler
    epoch: int
    # for each batch int64 places among the loader's nodes; the first identifies the batch
    positions: Sequence[Any]
    ids: Sequence[Array]  # for each batch int64 global ids


@kernel
def _to_degrees(ends: Any, num_edges: Any) -> Any:
    """Replace the end of each column (begin, end) by its degree; return whether all lie within
    `num_edges`."""
    for i in range(len(ends)):
        if not 0 <= ends[i, 0] <= ends[i, 1] <= num_edges:
            return False
        ends[i, 1] -= ends[i, 0]
    return True


@kernel
def _choose_share(arguments: Any, first: Any, last: Any) -> None:
    """Choose the edges of batches `first` to `last` at one hop; a batch's frontier begins at its
    node `begin[b]`."""
    keys, hops, fanouts, ids, start, degree, parts, begin, bounds, places, targets = arguments
    for b in range(first, last):
        i = parts[b]
        j = parts[b + 1]
        e = bounds[b]
        end = bounds[b + 1]
        columns = ids[i:j], start[i:j], degree[i:j]
        choose_all(keys[b], hops[b], *columns, fanouts[b], begin[b], places[e:end], targets[e:end])


@kernel
def _grown(nodes: Any, bounds: Any, ids: Any, parts: Any, num_nodes: Any, grown: Any) -> Any:
    """Copy the nodes of each batch b to `grown`, and the new ones of `ids[parts[b] : parts[b + 1]]`
    behind them.

    These ids become local ones. Returns `(place of the first id out of range or -1, bounds of each
    batch's nodes)`.
    """
    begin = np.zeros(len(bounds), np.int64)
    table = np.empty(0, np.uint64)
    # one for all batches, as pages are slow when first written
    values = np.empty(np.max(np.diff(parts)), np.int64)
    for b in range(len(bounds) - 1):
        own = grown[begin[b] :]
        count = bounds[b + 1] - bounds[b]
        mine = ids[parts[b] : parts[b + 1]]
        own[:count], values[: len(mine)] = nodes[bounds[b] : bounds[b + 1]], mine
        bad, stop, count, table, _ = absorb(
            table, uint64(0), own, count, values[: len(mine)], num_nodes
        )
        if bad:
            return parts[b] + stop, begin
        mine[:], begin[b + 1] = values[: len(mine)], begin[b] + count
    return -1, begin


@kernel
def take_rows(rows: Any, ids: Any, out: Any) -> None:
    """Copy `rows[ids]` to `out`, both uint8 [number, bytes], with one thread: torch's
    `index_select` starts its own."""
    for i in range(len(ids)):
        if i + 16 < len(ids):  # 51 MB in 3.6 instead of 4.3 ms
            for c in range(0, rows.shape[1], 64):
                prefetch(rows, ids[i + 16] * rows.shape[1] + c)
        row = rows[ids[i]]
        into = out[i]
        for c in range(len(into)):
            into[c] = row[c]


@dataclass
class Sampled:
    """The batches of a window, one after the other in every array; anonymous memory.

    The sources of the last hop's edges are global ids, and its nodes are missing, until `grow` is
    called.
    """

    row: DiskArray
    num_nodes: int  # of the graph
    nodes: Array  # int64, each batch's global ids, seeds first, then hop by hop
    bounds: Array  # int64 [batches + 1], of each batch's nodes
    # for the seeds and each hop, new nodes, int64 [batches]
    hop_nodes: list[Array] = field(default_factory=list)
    # For each hop, the edges' sources and targets, int32 places among the batch's nodes, ascending
    # by target, and the bounds of each batch's edges, int64 [batches + 1].
    hop_edges: list[tuple[Array, Array, Array]] = field(default_factory=list)

    def add(self, parts: Array, ids: Array) -> int:
        """Append a hop's nodes, whose ids become local ones; return the place of the first out of
        range or -1."""
        before = np.diff(self.bounds)
        grown = np.empty(len(self.nodes) + parts[-1] - parts[0], np.int64)
        bad, self.bounds = _grown(self.nodes, self.bounds, ids, parts, self.num_nodes, grown)
        self.nodes = grown[: self.bounds[-1]]
        self.hop_nodes.append(np.diff(self.bounds) - before)
        return int(bad)

    def grow(self) -> None:
        """Append the nodes of the last hop."""
        sources, targets, bounds = self.hop_edges[-1]
        if self.add(bounds, sources) >= 0:
            raise self.row.damaged(f"expected ids from 0 to {self.num_nodes - 1}, found others")
        self.hop_edges[-1] = sources.astype(np.int32, copy=False), targets, bounds


def sample_windows(windows: Sequence[Seeds], colptr: DiskArray, row: DiskArray) -> list[Sampled]:
    """Sample all batches of some windows together, with one pass over `colptr` and one over `row`
    per hop.

    The windows' samplers are over the same store, have equally many hops and sample in the same
    way.
    """
    num_nodes = colptr.num_rows - 1
    seeds = [ids for window in windows for ids in window.ids]
    ids = np.concatenate(seeds)
    parts = np.cumsum([0, *map(len, seeds)])
    # batches
    shares = list(
        itertools.pairwise(itertools.accumulate((len(one.ids) for one in windows), initial=0))
    )
    empty = [(np.empty(0, np.int64), np.zeros(len(window.ids) + 1, np.int64)) for window in windows]
    sampled = [Sampled(row, num_nodes, *arrays) for arrays in empty]
    for one, (begin, end) in zip(sampled, shares, strict=True):
        if (bad := one.add(parts[begin : end + 1], ids)) >= 0:
            raise InputError(
                f"input_nodes: expected seeds from 0 to {num_nodes - 1}, found {ids[bad]}"
            )
    if sum(len(one.nodes) for one in sampled) < len(ids):
        raise InputError("input_nodes: expected each seed once per batch, found one twice")
    batches = [
        (one.sampler, one.epoch, int(positions[0]))
        for one in windows
        for positions in one.positions
    ]
    keys = np.array([sampler.batch_key(seed, epoch) for sampler, epoch, seed in batches], np.uint64)
    for hop in range(len(windows[0].sampler.num_neighbors)):
        if hop:
            in_threads(Sampled.grow, sampled)
        last = ((one.nodes, zip(one.bounds[1:], one.hop_nodes[-1], strict=True)) for one in sampled)
        frontier = np.concatenate(
            [nodes[end - n : end] for nodes, batches in last for end, n in batches]
        )
        sizes = np.concatenate([one.hop_nodes[-1] for one in sampled])
        begin = np.concatenate([np.diff(one.bounds) for one in sampled]) - sizes
        parts = np.append(0, np.cumsum(sizes))
        ends = np.empty((len(frontier), 2), np.int64)
        colptr.fetch(frontier, ends)
        if not _to_degrees(ends, row.num_rows):
            raise colptr.damaged(f"expected ascending offsets up to {row.num_rows}, found others")
        start, degree = ends.T
        hops = np.array([0 if sampler.fixed else hop for sampler, *_ in batches])
        fanouts = np.array([sampler.num_neighbors[hop] for sampler, *_ in batches])
        columns = zip(itertools.pairwise(parts.tolist()), fanouts, strict=True)
        bounds = np.cumsum([0, *(count_chosen(degree[i:j], k) for (i, j), k in columns)])
        places = np.empty(bounds[-1], np.uint32 if row.num_rows < 2**32 else np.int64)
        targets = np.empty(len(places), np.int32)
        arguments = (
            keys,
            hops,
            fanouts,
            frontier,
            start,
            degree,
            parts,
            begin,
            bounds,
            places,
            targets,
        )
        in_threads(functools.partial(_choose_share, arguments), *zip(*shares, strict=True))
        del frontier, ends, start, degree, arguments
        dtype = np.dtype(f"i{row.row_bytes}")
        parts = bounds
        neighbors = (
            places.view(dtype)
            if places.itemsize == dtype.itemsize
            else np.empty(len(places), dtype)
        )
        row.fetch(places, neighbors)
        del places
        for one, (begin, end) in zip(sampled, shares, strict=True):
            edges = slice(parts[begin], parts[end])
            one.hop_edges.append(
                (neighbors[edges], targets[edges], parts[begin : end + 1] - parts[begin])
            )
        del neighbors
    return sampled


def in_threads(work: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
    """Return `list(map(work, *items))`, by a thread for each of this process's cores, 4 at most:
    each holds a batch."""
    with ThreadPoolExecutor(min(4, max(1, job_cores() // local_ranks()))) as pool:
        return list(pool.map(work, *items))


@dataclass
class Window:
    """Some batches and the features of all their nodes, each once; anonymous memory."""

    positions: Sequence[Any]  # as in `Seeds`
    hops: Hops
    ids: Array  # int32 (int64 from 2**31 nodes on) [distinct nodes], global, ascending
    slots: Array  # int32 [nodes], the place in `ids` of each node, batch after batch
    # int32 [2 * edges], for each batch all sources, then all targets, as places among the batch's
    # nodes
    edges: Array
    # [distinct nodes, num_features], the store's dtype
    features: Array = field(default_factory=lambda: np.empty(0))

    @classmethod
    def pack(cls, seeds: Seeds, sampled: Sampled) -> Self:
        """Append the last hop's nodes to `sampled`, and make a window without features."""
        sampled.grow()
        distinct = NodeSet(sampled.num_nodes)
        distinct.add(sampled.nodes)
        ids = distinct.members()
        slots = distinct.ranks(sampled.nodes).astype(np.int32, copy=False)
        counts = np.array([np.diff(bounds) for _, _, bounds in sampled.hop_edges])
        hops = zip(np.array(sampled.hop_nodes).T.tolist(), counts.T.tolist(), strict=True)
        # Of each batch the sources of all hops, then their targets; a hop's bounds are behind these
        # two.
        order = ((b, side) for b in range(len(seeds.ids)) for side in (0, 1))
        parts = [
            hop[side][hop[2][b] : hop[2][b + 1]] for b, side in order for hop in sampled.hop_edges
        ]
        return cls(seeds.positions, list(hops), ids, slots, np.concatenate(parts))

    def batches(self, begin: int, end: int) -> tuple[Tensor, Array, Array, Array, Hops]:
        """Positions, slots, ids, edges and hops of the batches from `begin` to `end`; ids and edges
        int64."""
        nodes, edges = (self._bounds[[begin, end], side] for side in (0, 1))
        slots = self.slots[slice(*nodes)]
        n_id = self.ids.take(slots).astype(np.int64)
        edge_index = self.edges[slice(*edges)].astype(np.int64)
        return (
            torch.as_tensor(np.concatenate(self.positions[begin:end])),
            slots,
            n_id,
            edge_index,
            self.hops[begin:end],
        )

    @functools.cached_property
    def _bounds(self) -> Array:
        return np.cumsum(
            [(0, 0), *((sum(nodes), 2 * sum(edges)) for nodes, edges in self.hops)], axis=0
        )


def compile_kernels(num_neighbors: list[int]) -> None:
    """Compile the policies' kernels, or load them from disk: a few seconds once, 60 MB of LLVM in
    every process.

    Done on an empty graph before data is loaded, so that the figures of later phases are the data's
    alone.
    """
    empty = np.empty(0, np.int64)
    offsets = np.zeros(2, np.int64)
    one = np.zeros(1, np.int64)
    restore_input_order(offsets, empty, empty)
    for dtype in (np.int32, np.int64):
        take_rows(np.empty((1, 1), np.uint8), one[:0].astype(dtype), np.empty((1, 1), np.uint8))
        sampler = CSCSampler(offsets, np.empty(0, dtype), num_neighbors)
    with tempfile.NamedTemporaryFile() as file:  # a graph of one node on disk
        file.write(bytes(BLOCK))
        file.flush()
        colptr, row, x = (DiskArray(file.name, 0, size, 2) for size in (8, 4, 8))
        for dtype in (np.int32, np.int64):
            row.fetch(one, np.empty((1, 1), dtype))
        seeds = Seeds(sampler, 0, [one], [one])
        window = Window.pack(seeds, sample_windows([seeds], colptr, row)[0])
        x.fetch(window.ids, np.empty((1, 4), np.float16))
        x.deal(window.ids, np.array([0, 1]), 2**20, lambda *_: None)
        for array in (colptr, row, x):
            array.close()
