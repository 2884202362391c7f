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

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import uint64

from ..errors import InputError
from ..graph.bits import NodeSet
from ..graph.npz import Array
from .choice import chosen_positions
from .disk import _BLOCK, DiskArray
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


def sample_window(
    sampler: CSCSampler,
    seeds: Sequence[Array],
    firsts: Sequence[int],
    epoch: int,
    colptr: DiskArray,
    row: DiskArray,
    row_dtype: np.dtype[Any],
) -> list[SampledBatch]:
    """Sample many batches together, with one pass over `colptr` and one over `row` per hop.

    Args:
        sampler: Decides fan-outs and choices; its own arrays are not read, except for `node_id`.
        seeds: One int64 array of global ids per batch.
        firsts: The position of each batch's first seed, which identifies the batch.
        epoch: The epoch that the batches belong to.

    Raises:
        InputError: for seeds that occur twice in a batch or are out of range, and for a damaged graph.
    """
    num_nodes = colptr.num_rows - 1
    batches = [SampledBatch(np.empty(0, np.int64), []) for _ in seeds]
    for batch, ids in zip(batches, seeds, strict=True):
        if (bad := batch.add(ids.copy(), num_nodes)) is not None:
            raise InputError(f"input_nodes: expected seeds from 0 to {num_nodes - 1}, found {ids[bad]}")
        if len(batch.node) < len(ids):
            raise InputError("input_nodes: expected each seed once per batch, found one twice")
    keys = [sampler.batch_key(first, epoch) for first in firsts]
    for hop, k in enumerate(sampler.num_neighbors):
        frontier = np.concatenate([batch.frontier for batch in batches])
        ends = np.empty((len(frontier), 2), np.int64)
        colptr.fetch(frontier, ends)
        start, degree = ends[:, 0].copy(), ends[:, 1] - ends[:, 0]
        if len(degree) and (degree.min() < 0 or start.min() < 0 or ends[:, 1].max() > row.num_rows):
            raise colptr.damaged(f"expected ascending offsets up to {row.num_rows}, found others")
        del ends
        ids = sampler.original_ids(frontier)
        positions, at = [], 0
        for batch, key in zip(batches, keys, strict=True):
            new = batch.num_sampled_nodes[-1]
            part = slice(at, at + new)
            begin, at_hop = len(batch.node) - new, 0 if sampler.fixed else hop
            chosen, target = chosen_positions(key, at_hop, ids[part], start[part], degree[part], k, begin)
            positions.append(chosen)
            batch.cols.append(target.astype(np.int32))
            at = part.stop
        wanted = np.concatenate(positions)
        del positions, start, degree, frontier, ids
        found = np.empty((len(wanted), 1), row_dtype)
        row.fetch(wanted, found)
        values = found[:, 0].astype(np.int64)
        del wanted, found
        at = 0
        for batch in batches:
            local = values[at : at + len(batch.cols[-1])]
            at += len(local)
            if batch.add(local, num_nodes) is not None:
                raise row.damaged(f"expected ids from 0 to {num_nodes - 1}, found others")
            batch.rows.append(local.astype(np.int32))
    for batch in batches:
        batch.node = batch.node.copy()  # without the room for repeats behind it
    return batches


class Window:
    """The features of all nodes of a window, each once, ascending by id; anonymous memory.

    Attributes:
        features: [distinct nodes, num_features] in the store's dtype.
        positions: For each batch, where its seeds stand among the loader's input nodes.
    """

    def __init__(
        self,
        batches: list[SampledBatch],
        positions: Sequence[Any],
        x: DiskArray,
        num_features: int,
        dtype: np.dtype[Any],
    ):
        self.batches, self.positions = batches, positions
        self._nodes = NodeSet(x.num_rows)
        for batch in batches:
            self._nodes.add(batch.node)
        ids = self._nodes.members()
        self.features = np.empty((len(ids), num_features), dtype)
        x.fetch(ids, self.features)

    def __iter__(self) -> Iterator[tuple[SampledBatch, Array]]:
        """Each batch with the rows of `features` that are its nodes'."""
        for batch in self.batches:
            yield batch, self._nodes.ranks(batch.node)


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
        sampled = sample_window(sampler, [one], [0], 0, colptr, row, np.dtype(np.int32))
        for batch, slots in Window(sampled, [one], x, 4, np.dtype(np.float16)):
            assert len(batch.node) == len(slots)
        for array in (colptr, row, x):
            array.close()
