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

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numba import uint64

from .config import InputError
from .sampler import CSCSampler, absorb, chosen_positions, kernel

Array = np.ndarray[Any, Any]

_BLOCK = 4096  # O_DIRECT reads whole blocks
CHUNK_BYTES = 8 * 2**20
_THREADS = 3  # more reads in flight gain nothing at 8 MiB each, measured on an NVMe-like disk


@kernel
def _group(index: Any, stride: Any, offset: Any, chunk_bytes: Any, num_chunks: Any) -> Any:
    """Counting sort of rows by the chunk of the file in which they begin: `(order, bounds)`."""
    bounds = np.zeros(num_chunks + 2, np.int64)
    for i in range(len(index)):
        bounds[(offset + index[i] * stride) // chunk_bytes + 2] += 1
    for c in range(2, num_chunks + 2):
        bounds[c] += bounds[c - 1]
    order = np.empty(len(index), np.int64)
    for i in range(len(index)):
        c = (offset + index[i] * stride) // chunk_bytes + 1
        order[bounds[c]] = i
        bounds[c] += 1
    return order, bounds[:-1]


@kernel
def _pick(words: Any, first: Any, index: Any, order: Any, stride: Any, offset: Any, out: Any) -> None:
    """Copy rows out of one chunk. `words` holds it from word `first` of the file on; all sizes in words."""
    width = out.shape[1]
    for o in range(len(order)):
        i = order[o]
        at = offset + index[i] * stride - first
        for w in range(width):
            out[i, w] = words[at + w]


class DiskArray:
    """Rows of one array in a file, fetched by index in one ascending pass over the chunks that hold any of them.

    Args:
        path: The file.
        offset: Where its first row begins, in bytes.
        row_bytes: Distance between two rows.
        num_rows: Number of rows.
        chunk_bytes: Bytes per read, a multiple of 4,096; three buffers of this size are held.

    Reads bypass the page cache (O_DIRECT) where the file system allows it, so that a pass over 28 GB neither evicts
    what is worth keeping nor counts against a memory cgroup; `direct` says whether it does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int,
        row_bytes: int,
        num_rows: int,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self.chunk_bytes = chunk_bytes
        self.path, self.offset, self.row_bytes, self.num_rows = Path(path), offset, row_bytes, num_rows
        self.num_bytes = self.path.stat().st_size
        self.bytes_read = 0
        self._file, self.direct = -1, True
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(self._file, [mmap.mmap(-1, _BLOCK)], 0)
        except OSError:  # tmpfs and some network file systems have no O_DIRECT
            self.close()
            self._file, self.direct = os.open(path, os.O_RDONLY), False
        self._local = threading.local()
        self._lock = threading.Lock()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close  # for a loader that is dropped without being closed

    def _buffer(self, size: int) -> mmap.mmap:
        """Page-aligned memory of this thread, as O_DIRECT needs it."""
        held = getattr(self._local, "buffer", None)
        if held is None or len(held) < size:
            held = self._local.buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cast(mmap.mmap, held)

    def fetch(self, index: Array, out: Array) -> None:
        """`out[i]` becomes the bytes at row `index[i]`.

        Args:
            index: int64 [n], in any order; repeats are allowed.
            out: Any dtype [n, width], C order; may be wider than a row (two offsets of a colptr that overlap).

        Raises:
            InputError: when the file ends before a row does.
        """
        if not len(index):
            return
        width = out.dtype.itemsize * math.prod(out.shape[1:])
        low, last = int(index.min()), self.offset + int(index.max()) * self.row_bytes + width
        if low < 0:
            raise InputError(f"{self.path}: expected rows from 0 to {self.num_rows - 1}, asked for was {low}")
        if last > self.num_bytes:
            raise InputError(f"{self.path}: expected a row at byte {last}, found the file's end at {self.num_bytes}")
        unit = math.gcd(self.offset, self.row_bytes, width, 8)
        word = np.dtype(f"u{unit}")
        target = out.reshape(len(out), -1).view(word)
        chunk = self.chunk_bytes
        tail = -(-width // _BLOCK) * _BLOCK  # a row may reach into the next chunk
        order, bounds = _group(index, self.row_bytes, self.offset, chunk, -(-self.num_bytes // chunk))
        sizes = unit, chunk + tail

        def pick(c: int) -> None:
            self._pick_chunk(c * chunk, sizes, index, order[bounds[c] : bounds[c + 1]], word, target)

        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(pick, np.flatnonzero(np.diff(bounds)).tolist()):
                pass

    def _pick_chunk(
        self, begin: int, sizes: tuple[int, int], index: Array, order: Array, word: np.dtype[Any], target: Array
    ) -> None:
        unit, length = sizes
        # Only the stretch that is needed: a chunk at the edge of what is wanted may hold a single row.
        first = self.offset + int(index[order].min()) * self.row_bytes
        last = self.offset + int(index[order].max()) * self.row_bytes + target.shape[1] * unit
        begin = max(begin, first // _BLOCK * _BLOCK)
        length = min(length, -(-(last - begin) // _BLOCK) * _BLOCK)
        buffer = self._buffer(length)
        view, got = memoryview(buffer)[:length], 0
        while got < last - begin:
            step = os.preadv(self._file, [view[got:]], begin + got)
            if step == 0:
                raise InputError(f"{self.path}: expected {last} bytes, found the file's end while reading")
            got += step
        if not self.direct:
            os.posix_fadvise(self._file, begin, length, os.POSIX_FADV_DONTNEED)
        with self._lock:
            self.bytes_read += length
        words = np.frombuffer(buffer, dtype=word, count=length // unit)
        _pick(words, begin // unit, index, order, self.row_bytes // unit, self.offset // unit, target)


@dataclass
class SampledBatch:
    """One sampled batch in compact form. `node` int64 [num_nodes] global ids, seeds first; `row`, `col` int32 local."""

    first: int
    node: Array
    row: Array
    col: Array
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]


class _Growing:
    """A batch of a window between two hops."""

    def __init__(self, seeds: Array, first: int, num_nodes: int):
        local = seeds.copy()
        no_table = np.empty(0, np.uint64)
        status, stop, self.node, self.count, *_ = absorb(
            no_table, uint64(0), np.empty(0, np.int64), 0, local, num_nodes
        )
        if status:
            raise InputError(f"input_nodes: expected seeds from 0 to {num_nodes - 1}, found {seeds[stop]}")
        if self.count < len(seeds):
            raise InputError("input_nodes: expected each seed once per batch, found one twice")
        self.first, self.begin = first, 0
        self.rows: list[Array] = []
        self.cols: list[Array] = []
        self.hop_nodes = [self.count]

    @property
    def frontier(self) -> Array:
        return cast(Array, self.node[self.begin : self.count])

    def finished(self) -> SampledBatch:
        return SampledBatch(
            self.first,
            self.node[: self.count].copy(),
            np.concatenate(self.rows),
            np.concatenate(self.cols),
            self.hop_nodes,
            [len(row) for row in self.rows],
        )


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
    batches = [_Growing(ids, first, num_nodes) for ids, first in zip(seeds, firsts, strict=True)]
    keys = [sampler.batch_key(first, epoch) for first in firsts]
    no_table = np.empty(0, np.uint64)
    for hop, k in enumerate(sampler.num_neighbors):
        frontier = np.concatenate([batch.frontier for batch in batches])
        ends = np.empty((len(frontier), 2), np.int64)
        colptr.fetch(frontier, ends)
        start, degree = ends[:, 0].copy(), ends[:, 1] - ends[:, 0]
        if len(degree) and (degree.min() < 0 or start.min() < 0 or ends[:, 1].max() > row.num_rows):
            raise InputError(f"{colptr.path}: expected ascending offsets up to {row.num_rows}, found others")
        del ends
        ids = sampler.original_ids(frontier)
        positions, at = [], 0
        for batch, key in zip(batches, keys, strict=True):
            part = slice(at, at + batch.count - batch.begin)
            chosen, target = chosen_positions(key, hop, ids[part], start[part], degree[part], k, batch.begin)
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
            batch.begin = batch.count
            status, _, batch.node, batch.count, *_ = absorb(
                no_table, uint64(0), batch.node, batch.count, local, num_nodes
            )
            if status:
                raise InputError(f"{row.path}: expected ids from 0 to {num_nodes - 1}, found others; verify the store")
            batch.rows.append(local.astype(np.int32))
            batch.hop_nodes.append(batch.count - batch.begin)
    return [batch.finished() for batch in batches]


@kernel
def _mark(bitmap: Any, nodes: Any) -> None:
    for i in range(len(nodes)):
        node = uint64(nodes[i])
        bitmap[node >> uint64(6)] |= uint64(1) << (node & uint64(63))


@kernel
def _ones(word: Any) -> Any:
    """Bits set in a uint64 (Warren, Hacker's Delight, 2nd edition, figure 5-2)."""
    word = word - ((word >> uint64(1)) & uint64(0x5555555555555555))
    word = (word & uint64(0x3333333333333333)) + ((word >> uint64(2)) & uint64(0x3333333333333333))
    word = (word + (word >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * uint64(0x0101010101010101)) >> uint64(56))


@kernel
def _rank(bitmap: Any) -> Any:
    """`(ones before each word, the ids that are set, ascending)`."""
    before = np.empty(len(bitmap), np.int32)
    total = 0
    for w in range(len(bitmap)):
        before[w] = total
        total += _ones(bitmap[w])
    ids = np.empty(total, np.int64)
    at = 0
    for w in range(len(bitmap)):
        word = bitmap[w]
        bit = 0
        while word != uint64(0):
            if word & uint64(1):
                ids[at] = w * 64 + bit
                at += 1
            word >>= uint64(1)
            bit += 1
    return before, ids


@kernel
def _slots(bitmap: Any, before: Any, nodes: Any) -> Any:
    slots = np.empty(len(nodes), np.int64)
    for i in range(len(nodes)):
        node = uint64(nodes[i])
        word = bitmap[node >> uint64(6)]
        below = (uint64(1) << (node & uint64(63))) - uint64(1)
        slots[i] = before[node >> uint64(6)] + _ones(word & below)
    return slots


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
        # A bitmap finds the distinct ids among 12 million in one second where sorting them takes ten.
        self._bitmap = np.zeros(x.num_rows // 64 + 1, np.uint64)
        for batch in batches:
            _mark(self._bitmap, batch.node)
        self._before, ids = _rank(self._bitmap)
        self.features = np.empty((len(ids), num_features), dtype)
        x.fetch(ids, self.features)

    def __iter__(self) -> Iterator[tuple[SampledBatch, Array]]:
        """Each batch with the rows of `features` that are its nodes'."""
        for batch in self.batches:
            yield batch, _slots(self._bitmap, self._before, batch.node)


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
