"""Rows of an array in a file, read by index or in order, past the page cache."""

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, naming
from ..files import StrPath
from ..kernels import Array, kernel, prefetch
from .blocks import BLOCK, block_buffer, read_blocks

CHUNK_BYTES = 8 * 2**20  # of one read
_THREADS = 3  # with reads of 8 MiB more threads gain nothing, measured on an NVMe-like disk


@kernel
def _group_by_chunk(
    index: Array, span: int, stride: int, offset: int, shift: int, num_bytes: int, order: Array
) -> tuple[int, Array, Array, Array]:
    """Sort the places i of `index` into `order` by the chunk of the file, of 2**shift bytes, in
    which row index[i] begins (counting sort). Each place needs `span` rows from index[i] on.

    Row r begins at byte offset + r * stride of the `num_bytes` of the file. Returns the first i
    whose rows are not in the file, or -1; `bounds`, where `order[bounds[c]:bounds[c + 1]]` are the
    places of chunk c; and for each chunk its first needed row and the end of its needed rows.
    """
    num_chunks = (num_bytes >> shift) + 1
    bounds = np.zeros(num_chunks + 2, np.int64)  # at c + 2 the number of places in chunk c
    low = np.full(num_chunks, 2**62)  # above any row
    high = np.zeros(num_chunks, np.int64)
    for i in range(len(index)):
        row = index[i]
        end = index[i] + span
        if row < 0 or offset + end * stride > num_bytes:
            return i, bounds, low, high
        # a shift, as a division would take as long as all the rest
        c = (offset + row * stride) >> shift
        bounds[c + 2] += 1
        low[c] = min(low[c], row)
        high[c] = max(high[c], end)
    bounds = bounds.cumsum()  # now at c + 1 the next free place in `order` of chunk c
    for i in range(len(index)):
        c = (offset + index[i] * stride) >> shift
        order[bounds[c + 1]] = i
        bounds[c + 1] += 1
    return -1, bounds[:-1], low, high


@kernel
def _pick(words: Array, first: int, index: Array, order: Array, stride: int, out: Array) -> None:
    """Fill row i of `out`, for each i in `order`, with the words from row index[i] on.

    Rows have `stride` words, and `words`, 1-D, begins with row `first`.
    """
    # A chunk needs one in hundreds of the items of a large index. Without prefetching each read
    # missed the caches, which took half the time.
    for e in range(len(order)):
        if e + 32 < len(order):
            prefetch(index, order[e + 32])  # 16 steps before its row is prefetched
            prefetch(words, (index[order[e + 16]] - first) * stride)
        i = order[e]
        at = (index[i] - first) * stride
        for w in range(out.shape[1]):
            out[i, w] = words[at + w]  # may overwrite index[i], see `DiskArray.read`


@kernel
def _per_unit(index: Array, unit_rows: int, num_units: int) -> Array:
    counts = np.zeros(num_units, np.int64)  # rows of `index` in each unit of `unit_rows` rows
    for i in index:
        counts[i // unit_rows] += 1
    return counts


@kernel
def _deal(
    words: Array, low: int, high: int, index: Array, begin: Array, end: Array, out_begin: Array,
    out: Array,
) -> None:  # fmt: skip
    """Copy from `words`, rows `low` to `high` of the file, those that each list c needs. The list's
    rows, `index[begin[c]:end[c]]`, ascend and lie in `out` from row out_begin[c] on."""
    width = words.shape[1]
    line = 64 // words.itemsize  # words in a cache line of 64 bytes
    for c in range(len(begin)):
        i = begin[c] + np.searchsorted(index[begin[c] : end[c]], low)
        while i < end[c] and index[i] < high:
            # A row of 256 bytes takes 152 ns without prefetching, 51 with it.
            if i + 8 < end[c] and index[i + 8] < high:
                for w in range(0, width, line):
                    prefetch(words, (index[i + 8] - low) * width + w)
            for w in range(width):
                out[out_begin[c] + i - begin[c], w] = words[index[i] - low, w]
            i += 1


def _ranges(counts: Array, room: int) -> list[int]:
    # cut all units into ranges with at most `room` needed rows, or of a single unit; return bounds
    bounds = [0]
    rows = 0  # needed in the last range so far
    for unit, count in enumerate(counts.tolist()):
        if unit > bounds[-1] and rows + count > room:
            bounds.append(unit)
            rows = 0
        rows += count
    return [*bounds, len(counts)]


def _pieces(units: Array, most: int) -> list[Array]:
    # split ascending unit numbers into runs without a gap, and these into reads of `most` units
    runs = np.split(units, np.flatnonzero(np.diff(units) != 1) + 1)
    return [run[begin : begin + most] for run in runs for begin in range(0, len(run), most)]


def _hand_out(
    put: Callable[[int, int, Array], None], out: Array, first: Array, out_begin: Array, sizes: Array
) -> None:
    # Rows out_begin[c] to out_begin[c] + sizes[c] of `out` are list c's, which has first[c] already.
    for c in np.flatnonzero(sizes).tolist():
        put(c, int(first[c]), out[out_begin[c] : out_begin[c] + sizes[c]].view(np.uint8))


class Interrupted(Exception):
    """A pass ended early because its `DiskArray` was `abandoned`."""


class DiskArray:
    """Rows of one array in a file, read in ascending order: by index (`read`), those of several
    lists in one pass (`sweep`), or consecutive ones (`rows`).

    `chunk_bytes`, the size of one read, is a power of two. Once `abandoned` is set, every read
    raises `Interrupted`. Reads bypass the page cache (O_DIRECT) where the file system allows it. A
    pass over 28 GB then neither evicts useful pages nor counts against a memory cgroup.
    """

    bytes_read = 0  # by all passes
    progress = (0, 0)  # bytes of the running pass: read so far, and of the whole pass; else zeros

    def __init__(
        self,
        path: StrPath,
        offset: int,  # byte at which row 0 begins
        row_bytes: int,
        num_rows: int,
        chunk_bytes: int = CHUNK_BYTES,
        abandoned: threading.Event | None = None,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.descriptor = -1  # none is open
        self.path = Path(path)
        self.offset = offset
        self.row_bytes = row_bytes
        self.num_rows = num_rows
        self.num_bytes = self.path.stat().st_size
        self.abandoned = abandoned or threading.Event()
        self.direct = True
        self._local = threading.local()  # `buffer`, into which its thread reads
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(self.descriptor, [block_buffer(BLOCK)], 0)  # some refuse only to read
        except OSError:  # some network file systems, and tmpfs before Linux 6.6, have no O_DIRECT
            self.close()
            self.descriptor = os.open(path, os.O_RDONLY)
            self.direct = False

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close  # for a loader that is dropped without being closed

    def damaged(self, problem: str) -> InputError:
        """Return the error for wrong content; `problem` has the expected and the actual value."""
        return InputError(
            f"{self.path}: {problem}; run `python -m ogbnlib verify {self.path.parent}`"
        )

    def _check_row(self, row: int) -> None:  # that it ends within the file
        end = self._byte_of(row + 1)
        if end > self.num_bytes:
            raise self.damaged(
                f"expected a row at byte {end}, found the file's end at {self.num_bytes}"
            )

    def _byte_of(self, row: int) -> int:
        return self.offset + row * self.row_bytes

    def rows(self, begin: int, end: int, dtype: np.dtype[np.generic]) -> Array:
        """Return the values in rows `begin` to `end` (not included), 1-D; the next read in this
        thread overwrites them."""
        if not 0 <= begin <= end:
            raise self.damaged(f"expected ascending rows, found {begin} to {end}")
        return self._span(begin, end, dtype)[0] if end > begin else np.empty(0, dtype)

    def _span(
        self, begin: int, end: int, dtype: np.dtype[np.generic], room_bytes: int = 0
    ) -> tuple[Array, int]:
        # the values in rows `begin` to `end`, as in `rows`, and the number of bytes read for them
        first_byte = self._byte_of(begin)
        size = self._byte_of(end) - first_byte
        buffer = self._read(first_byte // BLOCK * BLOCK, first_byte + size, room_bytes)
        return np.frombuffer(buffer, dtype, size // dtype.itemsize, first_byte % BLOCK), len(buffer)

    def _read(self, begin: int, end: int, room_bytes: int = 0) -> memoryview:
        """Read the blocks from byte `begin` (a block's first) to `end` into this thread's buffer; a
        new buffer has at least `room_bytes`."""
        if self.abandoned.is_set():
            raise Interrupted
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < end - begin:
            buffer = self._local.buffer = block_buffer(max(end - begin, room_bytes))
        view = read_blocks(self.descriptor, buffer, begin, end - begin)
        if view is None:
            raise self.damaged(f"expected {end} bytes, found the file's end")
        if not self.direct:  # the read went through the page cache
            os.posix_fadvise(self.descriptor, begin, len(view), os.POSIX_FADV_DONTNEED)
        return view

    def read(self, index: Array, out: Array) -> None:
        """Copy the bytes from row `index[i]` on to `out[i]`, in one ascending pass over the file.

        `index` may be in any order, with repeats. `out`, in C order, may be wider than a row, such
        as for two offsets of a colptr, and may share the memory of an `index` of as large items.
        """
        if not len(index):
            return
        width = out.dtype.itemsize * math.prod(out.shape[1:])  # bytes of out[i]
        word = self._word(width)
        target = out.reshape(len(out), -1).view(word)
        span = -(-width // self.row_bytes)  # rows of the file to read for out[i]
        order = np.empty(len(index), np.uint32 if len(index) < 2**32 else np.int64)
        shift = self.chunk_bytes.bit_length() - 1
        wrong, bounds, first, last = _group_by_chunk(
            index, span, self.row_bytes, self.offset, shift, self.num_bytes, order
        )
        if wrong >= 0:
            self._check_row(int(index[wrong]) + span - 1)
            raise self.damaged(  # by a negative row, as its end is in the file
                f"expected rows from 0 to {self.num_rows - 1}, found an index of {index[wrong]}"
            )

        def read_chunk(c: int) -> int:
            # Only from the first to the last row needed. The buffer has two chunks: the last row may
            # end in the next one, and a whole number of huge pages is aligned to such pages.
            row = int(first[c])
            words, num_bytes = self._span(row, int(last[c]), word, 2 * self.chunk_bytes)
            chosen = order[bounds[c] : bounds[c + 1]]
            _pick(words, row, index, chosen, self.row_bytes // word.itemsize, target)
            return num_bytes

        chunks = np.flatnonzero(np.diff(bounds)).tolist()  # those with a needed row
        self.progress = 0, len(chunks) * self.chunk_bytes
        with ThreadPoolExecutor(_THREADS) as pool:
            self._count(pool.map(read_chunk, chunks))
        self.progress = 0, 0

    def _word(self, width: int = 8) -> np.dtype[np.generic]:
        # the largest unsigned integer of which offset, rows and `width` bytes are whole multiples
        return np.dtype(f"u{math.gcd(self.offset, self.row_bytes, width, 8)}")

    def sweep(
        self, index: Array, bounds: Array, room_bytes: int, put: Callable[[int, int, Array], None]
    ) -> None:
        """Read the rows of several lists in one pass over the file, and pass them to `put` in
        pieces.

        Args:
            index: int32 or int64 [n], the lists one after the other, each ascending.
            bounds: Where each list begins in `index`, and n.
            room_bytes: Memory for rows on their way to `put`, at least those of 1 MB of the file.
            put: Called in a thread with a list's number, the number of its rows passed before, and
                its next rows, uint8 [k, row_bytes].
        """
        self._check_row(int(index.max(initial=-1)))
        word = self._word()
        unit = max(1, 2**20 // self.row_bytes)  # rows in 1 MB, at least one
        counts = _per_unit(index, unit, -(-self.num_rows // unit))
        most_units = max(1, self.chunk_bytes // unit // self.row_bytes)  # in one read
        width = self.row_bytes // word.itemsize  # words in a row
        room = room_bytes // 2 // self.row_bytes  # rows in each of two buffers
        # one is filled while the rows of the other are put
        buffers = [np.empty((min(len(index), room), width), word) for _ in range(2)]
        begins = bounds[:-1]  # where the rest of each list begins in `index`
        self.progress = 0, int(np.count_nonzero(counts)) * unit * self.row_bytes
        with ThreadPoolExecutor(_THREADS) as pool, ThreadPoolExecutor(1) as writer:
            putting: Future[Any] = writer.submit(int)  # nothing is put yet
            for begin, end in itertools.pairwise(_ranges(counts, room)):
                # end of the range, in the lists' dtype: for another one numpy would copy each list
                row = index.dtype.type(min(end * unit, self.num_rows))
                lists = zip(begins, bounds[1:], strict=True)
                sizes = np.array([index[i:j].searchsorted(row) for i, j in lists], np.int64)
                out_begin = np.cumsum(sizes) - sizes  # where each list's rows begin in the buffer
                if len(buffers[0]) < sizes.sum():  # one unit whose rows many lists need
                    buffers[0] = np.empty((int(sizes.sum()), width), word)
                deal = functools.partial(
                    self._deal_rows, unit, index, begins, begins + sizes, out_begin, buffers[0]
                )
                needed = np.flatnonzero(counts[begin:end]) + begin
                self._count(pool.map(deal, _pieces(needed, most_units)))
                putting.result()  # the other buffer is free; an error of `put` is raised
                putting = writer.submit(
                    _hand_out, put, buffers[0], begins - bounds[:-1], out_begin, sizes
                )
                buffers.reverse()
                begins = begins + sizes
            putting.result()
        self.progress = 0, 0

    def _deal_rows(
        self, unit: int, index: Array, begin: Array, end: Array, out_begin: Array, out: Array,
        units: Array,
    ) -> int:  # fmt: skip
        # in a thread: read the rows of consecutive `units` and `_deal` them; return bytes read
        low = int(units[0]) * unit
        high = min((int(units[-1]) + 1) * unit, self.num_rows)
        words, num_bytes = self._span(low, high, out.dtype, 2 * self.chunk_bytes)
        _deal(words.reshape(-1, out.shape[1]), low, high, index, begin, end, out_begin, out)
        return num_bytes

    def _count(self, sizes: Iterator[int]) -> None:  # bytes of finished reads, or their error
        with naming(self.path):
            for size in sizes:
                self.bytes_read += size
                self.progress = self.progress[0] + size, self.progress[1]
