"""Windows: consecutive batches from a graph on disk that are sampled together, in ascending passes
over its files.

Page faults row by row give about 10 batches of 128 x [3, 2] a second on a graph larger than
memory. For all of its batches, which `CSCSampler` would draw one by one, a window needs one pass
over `colptr` and one over `row` at each hop, and one pass over `x`. Ginex (VLDB 2022), DiskGNN
(SIGMOD 2025) and AGNES rest on the same idea.

`sample_windows` draws the batches (`Sampled`). `Window.pack` then stores each distinct node once,
and for each node of a batch its place, a *slot*, in that list. Features are read once per window.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from numba import uint64
from torch import Tensor

from ..graph.edge_sort import restore_input_order
from ..graph.neighbors import DONE, absorb, choose_all, count_chosen
from ..graph.node_set import NodeSet
from ..io.blocks import BLOCK
from ..io.disk_array import DiskArray
from ..kernels import Array, kernel, prefetch
from ..launcher import sampling_threads
from ..sampling.sampler import CSCSampler, Hops
from .hot_rows import HotRows


class Seeds(NamedTuple):
    """The seeds of a window's batches, with the sampler and epoch that decide their neighbors."""

    sampler: CSCSampler
    epoch: int
    # for each batch int64 places among the loader's nodes; the first identifies the batch
    positions: Sequence[Tensor | Array]
    ids: Sequence[Array]  # for each batch int64 global ids


@kernel
def _to_degrees(columns: Array, num_edges: int) -> bool:
    # int64 [n, 2], first edge and end of each node: replaces the end by the degree; False if damaged
    for i in range(len(columns)):
        if not 0 <= columns[i, 0] <= columns[i, 1] <= num_edges:
            return False
        columns[i, 1] -= columns[i, 0]
    return True


@kernel
def _grow(
    nodes: Array, bounds: Array, ids: Array, id_bounds: Array, num_nodes: int, grown: Array
) -> tuple[bool, Array]:
    """Copy the nodes of each batch to `grown`, followed by the new nodes among its ids, and replace
    these ids by local ones, in place.

    The global ids of batch b are `ids[id_bounds[b] : id_bounds[b + 1]]`, its nodes those from
    `bounds[b]` to `bounds[b + 1]`. `grown` has room for all nodes and all ids. Returns `(whether
    all ids are below num_nodes, bounds of each batch's nodes in grown)`.
    """
    new_bounds = np.zeros(len(bounds), np.int64)
    table = np.empty(0, np.uint64)  # memory of the hash table from global to local ids
    # one array for all batches, because pages are slow when first written; `absorb` needs int64
    values = np.empty(np.max(np.diff(id_bounds)), np.int64)
    for b in range(len(bounds) - 1):
        batch_nodes = grown[new_bounds[b] :]
        count = bounds[b + 1] - bounds[b]
        batch_nodes[:count] = nodes[bounds[b] : bounds[b + 1]]
        batch_ids = ids[id_bounds[b] : id_bounds[b + 1]]
        values[: len(batch_ids)] = batch_ids
        status, _, count, table, _ = absorb(  # uint64(0): make a new table in that memory
            table, uint64(0), batch_nodes, count, values[: len(batch_ids)], num_nodes
        )
        if status != DONE:
            return False, new_bounds
        batch_ids[:] = values[: len(batch_ids)]
        new_bounds[b + 1] = new_bounds[b] + count
    return True, new_bounds


@kernel
def decode_rows(codes: Array, ids: Array, scale: Array, offset: Array, out: Array) -> None:
    """Decode the rows `codes[ids]`, int8, into `out`, float32 [number, F]; see `Int8Columns`.

    Taking and decoding the 205,000 rows of a batch of [15, 10, 5] x 1024 takes 26 ms here; with
    numpy it took 72 ms.
    """
    for i in range(len(ids)):
        if i + 16 < len(ids):  # ahead by 16 rows, in cache lines of 64 bytes
            for c in range(0, codes.shape[1], 64):
                prefetch(codes, ids[i + 16] * codes.shape[1] + c)
        row = codes[ids[i]]
        decoded = out[i]
        for c in range(len(decoded)):
            decoded[c] = np.float32(row[c]) * scale[c] + offset[c]


class _HopEdges(NamedTuple):
    """The edges of one hop, batch after batch, ascending by target."""

    # int32 places among the batch's nodes; in the last hop global ids, see `Sampled`
    sources: Array
    targets: Array  # int32 places among the batch's nodes
    bounds: Array  # int64 [batches + 1], first edge of each batch


@dataclass
class Sampled:
    """The batches of a window, one after the other in every array; anonymous memory.

    Until `grow` is called, the sources of the last hop's edges are global ids, and the hop's new
    nodes are missing.
    """

    row: DiskArray  # the store's, for its number of edges and for errors
    num_nodes: int  # of the graph
    nodes: Array  # int64, each batch's global ids, seeds first, then hop by hop
    bounds: Array  # int64 [batches + 1], first node of each batch
    # numbers of new nodes, int64 [batches], for the seeds and then for each hop
    hop_nodes: list[Array] = field(default_factory=list)
    hop_edges: list[_HopEdges] = field(default_factory=list)

    @classmethod
    def of(cls, seeds: Seeds, num_nodes: int, row: DiskArray) -> Self:
        """Begin with the seeds alone. A seed that comes again in a batch is a node of its own."""
        counts = np.array([len(batch_ids) for batch_ids in seeds.ids])
        return cls(row, num_nodes, np.concatenate(seeds.ids), np.cumsum([0, *counts]), [counts])

    def grow(self) -> None:
        """Append the last hop's nodes and make its sources local ids; call once for each hop."""
        hop = self.hop_edges[-1]
        old_counts = np.diff(self.bounds)
        grown = np.empty(len(self.nodes) + len(hop.sources), np.int64)  # if each is a new node
        are_valid, self.bounds = _grow(
            self.nodes, self.bounds, hop.sources, hop.bounds, self.num_nodes, grown
        )
        if not are_valid:
            raise self.row.damaged(f"expected ids from 0 to {self.num_nodes - 1}, found others")
        self.nodes = grown[: self.bounds[-1]]
        self.hop_nodes.append(np.diff(self.bounds) - old_counts)
        self.hop_edges[-1] = hop._replace(sources=hop.sources.astype(np.int32, copy=False))


def sample_windows(windows: Sequence[Seeds], colptr: DiskArray, row: DiskArray) -> list[Sampled]:
    """Sample all batches of some windows together, with one pass over `colptr` and one over `row`
    per hop. Their samplers have the same store and equally many hops."""
    sampled = [Sampled.of(window, colptr.num_rows - 1, row) for window in windows]
    ends = itertools.accumulate(len(window.ids) for window in windows)
    spans = list(itertools.pairwise([0, *ends]))  # of each window in the list of all batches
    for hop in range(len(windows[0].sampler.num_neighbors)):
        if hop:  # the hop before left its new nodes to be appended
            _in_threads(Sampled.grow, sampled)
        places, targets, bounds = _choose_edges(hop, windows, sampled, spans, colptr)
        dtype = np.dtype(f"i{row.row_bytes}")
        is_same = places.itemsize == dtype.itemsize  # then reuse the memory of the places
        neighbors = places.view(dtype) if is_same else np.empty(len(places), dtype)
        row.read(places, neighbors)  # global ids of the sources
        del places  # frees it if the neighbors are in memory of their own
        for sample, (begin, end) in zip(sampled, spans, strict=True):
            edges = slice(bounds[begin], bounds[end])
            own_bounds = bounds[begin : end + 1] - bounds[begin]
            sample.hop_edges.append(_HopEdges(neighbors[edges], targets[edges], own_bounds))
        del neighbors  # `grow` may copy the sources to int32, and so free this memory
    return sampled


def _choose_edges(
    hop: int,
    windows: Sequence[Seeds],
    sampled: Sequence[Sampled],
    spans: list[tuple[int, int]],  # (begin, end) of each window in the list of all batches
    colptr: DiskArray,
) -> tuple[Array, Array, Array]:
    """Choose the edges of all batches at one hop: return their places in `row` (uint32, or int64
    from 2**32 edges on), their local targets int32, and the first edge of each batch."""
    num_edges = sampled[0].row.num_rows
    frontiers = [  # for each batch the nodes of the last hop, whose neighbors are sampled
        sample.nodes[end - count : end]
        for sample in sampled
        for end, count in zip(sample.bounds[1:], sample.hop_nodes[-1], strict=True)
    ]
    frontier = np.concatenate(frontiers)
    columns = np.empty((len(frontier), 2), np.int64)  # first edge and end, then degree, in `row`
    colptr.read(frontier, columns)
    if not _to_degrees(columns, num_edges):
        raise colptr.damaged(f"expected ascending offsets up to {num_edges}, found others")
    splits = np.cumsum([len(nodes) for nodes in frontiers[:-1]])
    starts = np.split(columns[:, 0], splits)
    degrees = np.split(columns[:, 1], splits)
    batches = [(window, int(seeds[0])) for window in windows for seeds in window.positions]
    fanouts = [window.sampler.num_neighbors[hop] for window, _ in batches]
    bounds = np.cumsum([0, *map(count_chosen, degrees, fanouts)])
    places = np.empty(bounds[-1], np.uint32 if num_edges < 2**32 else np.int64)
    targets = np.empty(bounds[-1], np.int32)
    num_nodes = np.concatenate([np.diff(sample.bounds) for sample in sampled])  # of each batch

    def choose(begin: int, end: int) -> None:
        for b in range(begin, end):
            window, first_seed = batches[b]
            edges = slice(bounds[b], bounds[b + 1])
            choose_all(
                window.sampler.batch_key(first_seed, window.epoch),
                0 if window.sampler.fixed else hop,  # fixed: the same neighbors at all hops
                frontiers[b],
                starts[b],
                degrees[b],
                fanouts[b],
                num_nodes[b] - len(frontiers[b]),  # local id of the frontier's first node
                places[edges],
                targets[edges],
            )

    _in_threads(choose, *zip(*spans, strict=True))  # a call for each window
    return places, targets, bounds


def _in_threads(work: Callable[..., object], *items: Iterable[object]) -> None:
    with ThreadPoolExecutor(sampling_threads()) as pool:
        list(pool.map(work, *items))  # a list, to raise the errors of all calls


@dataclass
class Window:
    """Some batches and the features of all their nodes, each node once; anonymous memory."""

    positions: Sequence[Tensor | Array]  # as in `Seeds`
    hops: Hops
    ids: Array  # int32 (int64 from 2**31 nodes on) [distinct nodes], global, ascending
    slots: Array  # int32 [nodes], the place in `ids` of each node, batch after batch
    # int32 [2 * edges], for each batch all sources, then all targets, as places among its nodes
    edges: Array
    # [distinct nodes, num_features], the store's dtype; empty until they are read
    features: Array = field(default_factory=lambda: np.empty(0))

    @classmethod
    def pack(cls, seeds: Seeds, sampled: Sampled) -> Self:
        """Append the last hop's nodes to `sampled`, and make a window without features.

        `sampled` is used up: a second call would append the nodes again.
        """
        sampled.grow()
        distinct = NodeSet(sampled.num_nodes, sampled.nodes)
        ids = distinct.members()  # first, as it also computes the ranks
        slots = distinct.ranks(sampled.nodes).astype(np.int32, copy=False)
        hop_nodes = np.transpose(sampled.hop_nodes)  # [batches, hops + 1]
        hop_edges = np.transpose([np.diff(hop.bounds) for hop in sampled.hop_edges])
        hops = list(zip(hop_nodes.tolist(), hop_edges.tolist(), strict=True))
        # for each batch, the sources of all hops, then their targets
        parts = [
            hop[side][hop.bounds[b] : hop.bounds[b + 1]]
            for b in range(len(seeds.ids))
            for side in (0, 1)  # fields of `_HopEdges`: sources, targets
            for hop in sampled.hop_edges
        ]
        return cls(seeds.positions, hops, ids, slots, np.concatenate(parts))

    def batches(self, begin: int, end: int) -> tuple[Tensor, Array, Array, Array, Hops]:
        """Return positions, slots, ids, edges and hops of the batches from `begin` to `end`; ids
        and edges are int64."""
        (first_node, first_edge), (end_node, end_edge) = self._bounds[[begin, end]]
        slots = self.slots[first_node:end_node]
        n_id = self.ids.take(slots).astype(np.int64)
        edge_index = self.edges[first_edge:end_edge].astype(np.int64)
        positions = torch.as_tensor(np.concatenate(self.positions[begin:end]))
        return positions, slots, n_id, edge_index, self.hops[begin:end]

    @functools.cached_property
    def _bounds(self) -> Array:
        # int64 [batches + 1, 2], where each batch begins in `slots` and in `edges`
        sizes = [(sum(nodes), 2 * sum(edges)) for nodes, edges in self.hops]
        return np.cumsum([(0, 0), *sizes], axis=0)


def compile_kernels(num_neighbors: Sequence[int]) -> None:
    """Compile the policies' kernels, or load them from disk: a few seconds once, and 60 MB of LLVM
    in every process. A phase of its own, on a one-node graph: later phases show the data alone."""
    empty = np.empty(0, np.int64)
    offsets = np.zeros(2, np.int64)
    node = np.zeros(1, np.int64)
    restore_input_order(offsets, empty, empty)  # for loaders with PyG's own CSC
    for dtype in (np.int32, np.int64):  # of `row`
        no_ids = empty.astype(dtype)
        column = np.empty(1, np.float32)
        decode_rows(np.empty((1, 1), np.int8), no_ids, column, column, column.reshape(1, 1))
        sampler = CSCSampler(offsets, no_ids, num_neighbors)  # compiles `sample_all`
    with tempfile.NamedTemporaryFile() as file:  # zeros are a graph of one node without edges
        file.write(bytes(BLOCK))
        file.flush()
        # two offsets, two int32 ids, two rows of four float16; closed when they are dropped
        colptr, row, x = (DiskArray(file.name, 0, row_bytes, 2) for row_bytes in (8, 4, 8))
        for dtype in (np.int32, np.int64):  # words of 4 and of 8 bytes
            row.read(node, np.empty((1, 1), dtype))
        seeds = Seeds(sampler, 0, [node], [node])
        window = Window.pack(seeds, sample_windows([seeds], colptr, row)[0])
        x.read(window.ids, np.empty((1, 4), np.float16))
        x.sweep(window.ids, np.array([0, 1]), 2**20, lambda *_: None)
        hot = HotRows.chosen([window.ids] * 2, 1, 4, np.dtype(np.float16), 2**10)  # * 2: hot
        hot.insert(window.ids, np.empty((1, 4), np.float16), len(hot.ids))
