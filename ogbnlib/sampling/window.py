"""Batches from a graph on disk: sampled and gathered many at a time, so that the disk is read in ascending passes.

Page-faulting row by row gives about 10 batches of 128 x [3, 2] a second on a graph larger than memory, whatever the
disk could do when read in order. So a *window* of consecutive batches is prepared at once. At each hop the offsets and
the neighbors that all of its batches need are fetched in one pass over `colptr` and one over `row`, and at the end the
features of all its nodes in one pass over `x`, each row once. Ginex (VLDB 2022), DiskGNN (SIGMOD 2025) and AGNES rest
on the same idea. Because the choice of neighbors is a function of (seed, epoch, batch, hop, node) alone, a window's
batches are those that `CSCSampler` draws one by one.

Where the store fits into the page cache there is nothing to gain, and batches are drawn one by one from the maps.

An evaluation has the same batches every time, so its windows are kept on disk, in a `Spool`, and the store is read for
them once: a pass over papers100M reads 36 GB, whatever it picks; what two evaluations of valid pick is 0.3 GB.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numba import uint64

from ..errors import InputError, format_bytes
from ..files import Stream, file_system
from ..graph.bits import NodeSet
from ..graph.npz import Array
from .budget import Windows
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


# Kept for the next evaluation -----------------------------------------------------------------------------------------

_SPARED_BYTES = 5 * 2**30  # of a disk, for its other users
_IN_MEMORY = ("tmpfs", "ramfs")  # what lies there is memory that can't be taken back


def spool_bytes(spool: str | int, folder: Path, sharers: int = 1) -> int:
    """Bytes that each of `sharers` processes may keep in `folder`: a given size, or a quarter of what the disk has free
    and never its last 5 GB; 0 where "auto" finds a folder that lies in memory.
    """
    if spool == "off":
        return 0
    if spool != "auto":
        return int(spool) // sharers
    free = shutil.disk_usage(folder).free
    return 0 if file_system(folder) in _IN_MEMORY else max(0, min(free // 4, free - _SPARED_BYTES)) // sharers


@dataclass(frozen=True)
class _Kept:
    """Where a window lies in the file, and what of it is small enough to stay in RAM."""

    offset: int
    num_ids: int
    hops: list[tuple[list[int], list[int]]]  # of each batch: nodes and edges of each hop
    positions: Sequence[Any]


class _Features:
    """The features of a window that was kept, in the place of the store's `DiskArray`."""

    def __init__(self, spool: Spool, offset: int):
        self.num_rows, self._spool, self._offset = spool.num_nodes, spool, offset

    def fetch(self, index: Array, out: Array) -> None:
        self._spool._read(self._offset, out)


class Spool:
    """Windows in a file without a name, which the kernel deletes when this process ends, however it does.

    Args:
        folder: where the file is.
        room_bytes: what may be written to it; windows beyond are prepared anew each time.
        windows: how the loader that fills it reads the store; those that use it must read alike.
        num_nodes: of the graph.
    """

    def __init__(self, folder: Path, room_bytes: int, windows: Windows, num_nodes: int):
        self.windows, self.num_nodes, self._room = windows, num_nodes, room_bytes
        path = folder / f".ogbnlib-{uuid.uuid4().hex}.spool"
        self._file = Stream(path)
        path.unlink()
        self._kept: dict[tuple[int, int, int], _Kept] = {}

    def add(self, place: tuple[int, int, int], window: Window) -> None:
        """Keep the window at `place`, where there is room; a disk that is full is said, and then no more is kept."""
        batches, features = window.batches, np.ascontiguousarray(window.features)
        nodes = np.concatenate([batch.node for batch in batches])
        edges = np.concatenate([part for batch in batches for pair in (batch.rows, batch.cols) for part in pair])
        offset = self._file.size
        if offset + features.nbytes + nodes.nbytes + edges.nbytes > self._room:
            return
        try:
            for array in (nodes, edges, features):
                self._file.append(array.reshape(-1).view(np.uint8).data)
            self._file.drop()
        except InputError as error:
            self._room = 0
            warnings.warn(f"spool: {error}; evaluations read the store again for what is not kept", stacklevel=2)
            return
        hops = [(batch.num_sampled_nodes, batch.num_sampled_edges) for batch in batches]
        self._kept[place] = _Kept(offset, len(features), hops, window.positions)

    def get(self, place: tuple[int, int, int], num_features: int, dtype: np.dtype[Any]) -> Window | None:
        """The window at `place` as it was, read from the file; None where it was not kept."""
        if (kept := self._kept.get(place)) is None:
            return None
        nodes = np.empty(sum(sum(of_nodes) for of_nodes, _ in kept.hops), np.int64)
        edges = np.empty(2 * sum(sum(of_edges) for _, of_edges in kept.hops), np.int32)
        self._read(kept.offset, nodes)
        self._read(kept.offset + nodes.nbytes, edges)
        batches, at, edge = [], 0, 0
        for of_nodes, of_edges in kept.hops:
            ends = np.cumsum([0, *of_edges, *of_edges]) + edge
            parts = [edges[begin:end] for begin, end in itertools.pairwise(ends)]
            rows, cols = parts[: len(of_edges)], parts[len(of_edges) :]
            batches.append(SampledBatch(nodes[at : at + sum(of_nodes)], of_nodes, rows, cols))
            at, edge = at + sum(of_nodes), int(ends[-1])
        features: Any = _Features(self, kept.offset + nodes.nbytes + edges.nbytes)
        return Window(batches, kept.positions, features, num_features, dtype)

    def _read(self, offset: int, out: Array) -> None:
        view = out.reshape(-1).view(np.uint8).data
        while len(view):
            got = os.preadv(self._file.fileno(), [view], offset)
            if not got:
                raise InputError(f"{self._file.name}: it became shorter while it was used; set spool=off")
            view, offset = view[got:], offset + got
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self._file.size

    def __str__(self) -> str:
        return f"{len(self._kept)} windows, {format_bytes(self.num_bytes)} on disk"

    def close(self) -> None:
        self._file.close()


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
