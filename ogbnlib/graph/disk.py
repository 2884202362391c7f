"""Rows of a file read by index or in order, and temporary files of arrays, both past the page
cache."""

import contextlib
import errno
import fcntl
import functools
import itertools
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, naming
from ..files import BLOCK, Stream, block_buffer, read_blocks, replaced, whole_blocks
from .bits import kernel, prefetch
from .npz import Array
from .sort import group_by_chunk
from .store import Store
from .store_format import HEADER_BYTES

CHUNK_BYTES = 8 * 2**20
_WRITE_BYTES = 4 * 2**20
_THREADS = 3  # with reads of 8 MiB more threads gain nothing, measured on an NVMe-like disk


@kernel
def _pick(
    words: Any, first: Any, index: Any, order: Any, stride: Any, offset: Any, out: Any
) -> None:
    """Copy rows out of `words`, which begins with word `first` of the file; all sizes in words."""
    # One of many chunks has one in hundreds of a large index: each read misses the caches, which
    # took half the time.
    for e in range(len(order)):
        if e + 32 < len(order):
            prefetch(index, order[e + 32])
            prefetch(words, offset + index[order[e + 16]] * stride - first)
        i = order[e]
        at = offset + index[i] * stride - first
        for w in range(out.shape[1]):
            out[i, w] = words[at + w]


@kernel
def _per_unit(index: Any, unit_rows: Any, num_units: Any) -> Any:
    counts = np.zeros(num_units, np.int64)
    for i in index:
        counts[i // unit_rows] += 1
    return counts


@kernel
def _deal(
    words: Any, low: Any, high: Any, index: Any, begin: Any, end: Any, place: Any, out: Any
) -> None:
    """Copy the rows from `low` to `high` of each list from `words`, which begins with row `low`, to
    `out[place:]`."""
    width = words.shape[1]
    line = 64 // words.itemsize
    for c in range(len(begin)):
        i = begin[c] + np.searchsorted(index[begin[c] : end[c]], low)
        while i < end[c] and index[i] < high:
            # 152 ns for a row of 256 bytes without it, 51 with it
            if i + 8 < end[c] and index[i + 8] < high:
                for w in range(0, width, line):
                    prefetch(words, (index[i + 8] - low) * width + w)
            for w in range(width):
                out[place[c] + i - begin[c], w] = words[index[i] - low, w]
            i += 1


def _ranges(counts: Array, room: int) -> list[int]:
    """Bounds of ranges of units with at most `room` rows; a unit with more rows is a range of its
    own."""
    bounds = [0]
    rows = 0
    for number, count in enumerate(counts.tolist()):
        if number > bounds[-1] and rows + count > room:
            bounds.append(number)
            rows = 0
        rows += count
    return [*bounds, len(counts)]


def _pieces(units: list[int], most: int) -> list[tuple[int, int]]:
    """Runs of consecutive units, at most `most` in each."""
    pieces: list[tuple[int, int]] = []
    for number in units:
        if pieces and pieces[-1][1] == number and number - pieces[-1][0] < most:
            pieces[-1] = pieces[-1][0], number + 1
        else:
            pieces.append((number, number + 1))
    return pieces


def _hand_out(
    put: Callable[[int, int, Array], None], out: Array, first: Array, place: Array, sizes: Array
) -> None:
    for c in np.flatnonzero(sizes).tolist():
        put(c, int(first[c]), out[place[c] : place[c] + sizes[c]].view(np.uint8))


class Interrupted(Exception):
    """A pass ended early because its `DiskArray` was `abandoned`."""


# Reads bypass the page cache (O_DIRECT) where the file system allows it. A pass over 28 GB then
# neither evicts useful pages nor counts against a memory cgroup.
class DiskArray:
    """Rows of one array in a file, read in order or by index, each pass ascending in the file.

    `chunk_bytes`, of one read, is a power of two. Once `abandoned` is set, every read raises
    `Interrupted`.
    """

    # by all passes; of the running pass, done and in total
    bytes_read = 0
    progress = (0, 0)

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int,
        row_bytes: int,
        num_rows: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.descriptor = -1
        self.path = Path(path)
        self.offset = offset
        self.row_bytes = row_bytes
        self.num_rows = num_rows
        self.num_bytes = self.path.stat().st_size
        self.abandoned = threading.Event()
        self.direct = True
        self._local = threading.local()
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(self.descriptor, [block_buffer(BLOCK)], 0)
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
        return InputError(
            f"{self.path}: {problem}; run `python -m ogbnlib verify {self.path.parent}`"
        )

    def _check_end(self, end: int) -> None:
        if end > self.num_bytes:
            raise self.damaged(
                f"expected a row at byte {end}, found the file's end at {self.num_bytes}"
            )

    def rows(self, begin: int, end: int, dtype: np.dtype[Any]) -> Array:
        """Return the values in rows `begin` to `end`, 1-D, in a buffer that this thread's next call
        overwrites."""
        first, last = (self.offset + row * self.row_bytes for row in (begin, end))
        if not 0 <= begin <= end:
            raise self.damaged(f"expected ascending rows, found {begin} to {end}")
        if first == last:
            return np.empty(0, dtype)
        buffer = self._read(first // BLOCK * BLOCK, last)
        return np.frombuffer(buffer, dtype, (last - first) // dtype.itemsize, first % BLOCK)

    def _read(self, begin: int, end: int, room_bytes: int = 0) -> memoryview:
        """Read the blocks from byte `begin` (a block's first) to `end` into this thread's buffer of
        `room_bytes`."""
        if self.abandoned.is_set():
            raise Interrupted
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < end - begin:
            buffer = self._local.buffer = block_buffer(max(end - begin, room_bytes))
        if (view := read_blocks(self.descriptor, buffer, begin, end - begin)) is None:
            raise self.damaged(f"expected {end} bytes, found the file's end")
        if not self.direct:
            os.posix_fadvise(self.descriptor, begin, len(view), os.POSIX_FADV_DONTNEED)
        return view

    def fetch(self, index: Array, out: Array) -> None:
        """Copy the bytes at row `index[i]` to `out[i]`, in one ascending pass over the file.

        `index` may be in any order, with repeats; `out`, in C order, may be wider than a row (two
        offsets of a colptr), and lie in the memory of `index` if its items are as large.
        """
        if not len(index):
            return
        width = out.dtype.itemsize * math.prod(out.shape[1:])
        unit = math.gcd(self.offset, self.row_bytes, width, 8)
        word = np.dtype(f"u{unit}")
        target = out.reshape(len(out), -1).view(word)
        stride = self.row_bytes // unit
        offset = self.offset // unit

        def pick(buffer: memoryview, begin: int, which: Array) -> None:
            _pick(np.frombuffer(buffer, word), begin // unit, index, which, stride, offset, target)

        self.visit(index, -(-width // self.row_bytes), pick)

    def visit(
        self, index: Array, counts: Array | int, take: Callable[[memoryview, int, Array], None]
    ) -> None:
        """Read `counts[i]` rows from row `index[i]` on, for all i in any order, in one ascending
        pass over the file.

        `take` is called in threads with a piece of the file, the place of its first byte, and which
        i lie in the piece.
        """
        counts = np.broadcast_to(counts, len(index))
        shift = self.chunk_bytes.bit_length() - 1
        order = np.empty(len(index), np.uint32 if len(index) < 2**32 else np.int64)
        where = self.row_bytes, self.offset, shift, self.num_bytes
        bad, bounds, first, last = group_by_chunk(index, counts, *where, order)
        if bad >= 0:
            self._check_end(self.offset + int(index[bad] + counts[bad]) * self.row_bytes)
            raise self.damaged(
                f"expected rows from 0 to {self.num_rows - 1}, found an index of {index[bad]}"
            )

        def read(c: int) -> int:
            # Read from the first to the last row needed: a chunk may have only one.
            begin, end = (self.offset + int(row[c]) * self.row_bytes for row in (first, last))
            # It may end in the next chunk, and a whole number of huge pages is aligned to them.
            buffer = self._read(begin // BLOCK * BLOCK, end, 2 * self.chunk_bytes)
            take(buffer, begin // BLOCK * BLOCK, order[bounds[c] : bounds[c + 1]])
            return len(buffer)

        chunks = np.flatnonzero(np.diff(bounds)).tolist()
        self.progress = 0, len(chunks) * self.chunk_bytes
        with ThreadPoolExecutor(_THREADS) as pool:
            self._count(pool.map(read, chunks))
        self.progress = 0, 0

    def deal(
        self, index: Array, bounds: Array, room_bytes: int, put: Callable[[int, int, Array], None]
    ) -> None:
        """Fetch the rows of several lists in one pass over the file, and hand them out some at a
        time.

        Args:
            index: int32 or int64 [n], list after list, each ascending; `bounds` has where each list
                begins.
            room_bytes: for rows on their way to `put`; the rows of 1 MB of the file are the least.
            put: called in a thread with a list's number, how many of its rows came before, and its
                next rows, uint8 [k, row_bytes].
        """
        self._check_end(self.offset + (int(index.max(initial=-1)) + 1) * self.row_bytes)
        word = np.dtype(f"u{math.gcd(self.offset, self.row_bytes, 8)}")
        unit = max(1, 2**20 // self.row_bytes)  # rows
        counts = _per_unit(index, unit, -(-self.num_rows // unit))
        self.progress = 0, int(np.count_nonzero(counts)) * unit * self.row_bytes
        width = self.row_bytes // word.itemsize
        before = bounds[:-1].copy()
        ends = bounds[1:]
        rows = min(len(index), room_bytes // 2 // self.row_bytes)
        # one is filled while the other is put
        buffers = [np.empty((rows, width), word) for _ in range(2)]
        with ThreadPoolExecutor(_THREADS) as pool, ThreadPoolExecutor(1) as writer:
            putting: Future[Any] = writer.submit(int)
            for begin, end in itertools.pairwise(
                _ranges(counts, room_bytes // 2 // self.row_bytes)
            ):
                # for another dtype numpy copies the list
                row = index.dtype.type(min(end * unit, self.num_rows))
                sizes = np.array(
                    [index[i:j].searchsorted(row) for i, j in zip(before, ends, strict=True)],
                    np.int64,
                )
                upto = before + sizes
                place = np.cumsum(sizes) - sizes
                if len(buffers[0]) < sizes.sum():  # where many lists need the same rows
                    buffers[0] = np.empty((int(sizes.sum()), width), word)

                def read(
                    piece: tuple[int, int],
                    lists: tuple[Array, Array, Array] = (before, upto, place),
                ) -> int:
                    low = piece[0] * unit
                    high = min(piece[1] * unit, self.num_rows)
                    at, end = (self.offset + row * self.row_bytes for row in (low, high))
                    buffer = self._read(at // BLOCK * BLOCK, end, 2 * self.chunk_bytes)
                    words = np.frombuffer(buffer, word, (end - at) // word.itemsize, at % BLOCK)
                    _deal(words.reshape(-1, width), low, high, index, *lists, buffers[0])
                    return len(buffer)

                filled = (np.flatnonzero(counts[begin:end]) + begin).tolist()
                self._count(
                    pool.map(
                        read, _pieces(filled, max(1, self.chunk_bytes // unit // self.row_bytes))
                    )
                )
                putting.result()
                putting = writer.submit(
                    _hand_out, put, buffers[0], before - bounds[:-1], place, sizes
                )
                buffers.reverse()
                before = upto
            putting.result()
        self.progress = 0, 0

    def _count(self, reads: Iterator[int]) -> None:
        with naming(self.path):
            for size in reads:
                self.bytes_read += size
                self.progress = self.progress[0] + size, self.progress[1]


def disk_array(store: Store, name: str, chunk_bytes: int = CHUNK_BYTES) -> DiskArray:
    """Open array `name` of a store; raises `InputError` as `Store.check_open`."""
    info = store.files[name]
    row_bytes = np.dtype(info.dtype).itemsize * math.prod(info.shape[1:])
    try:
        array = DiskArray(
            store.file_path(name), HEADER_BYTES, row_bytes, info.shape[0], chunk_bytes
        )
    except FileNotFoundError:
        raise replaced(store.file_path(name)) from None
    store.check_open(name, array.descriptor)
    return array


class DiskFull(OSError):
    """A window can't be written to disk, or read from there."""


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskFull(error.errno, error.strerror, str(folder)) from None


class SpoolFile(Stream):
    """A file of arrays without a name; the kernel deletes it with its last user, at the latest with
    this process.

    Each array begins with a block. Blocks bypass the page cache (O_DIRECT) where the file system
    allows it: a GB costs 0.03 CPU seconds to write and 0.12 to read, and through the page cache
    0.54 and 0.6.
    """

    most_dirty_bytes = 128 * 2**20

    def __init__(self, folder: Path, num_bytes: int = 0):
        self.folder = folder
        self._buffer = memoryview(b"")
        # where arrays go on, and what their last block has so far
        self._ends: dict[int, bytes] = {}
        with disk_errors(folder), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            super().__init__(os.dup(file.fileno()))
            if num_bytes:
                os.posix_fallocate(self.fileno(), 0, num_bytes)
            flags = fcntl.fcntl(self, fcntl.F_GETFL)
            try:  # overlayfs takes the flag, and refuses to write
                fcntl.fcntl(self, fcntl.F_SETFL, flags | os.O_DIRECT)
                os.pwrite(self.fileno(), block_buffer(BLOCK), 0)
                self.most_dirty_bytes = 2**62
            except OSError:  # as in `DiskArray`
                fcntl.fcntl(self, fcntl.F_SETFL, flags)

    def store(self, array: Array) -> Callable[[], Array]:
        """Write an array behind the others and return the function that reads it."""
        offset = whole_blocks(self.size)
        self.put(array.reshape(-1).view(np.uint8).data, offset)
        self.finish()
        return functools.partial(self.load, offset, array.shape, array.dtype)

    def put(self, data: Any, offset: int) -> None:
        """Write a part of an array, at a block or where its last part ended; `finish` writes an
        incomplete block."""
        view = memoryview(data)
        head = self._ends.pop(offset, b"")
        if not self._buffer:
            self._buffer = block_buffer(_WRITE_BYTES)
        with disk_errors(self.folder):
            while len(head) + len(view) >= BLOCK:
                size = min(len(self._buffer), (len(head) + len(view)) // BLOCK * BLOCK)
                take = size - len(head)
                self._buffer[: len(head)], self._buffer[len(head) : size] = head, view[:take]
                super().put(self._buffer[:size], offset - len(head))
                head = b""
                view = view[take:]
                offset = offset + take
        if head or view:
            self._ends[offset + len(view)] = b"".join([head, view])

    def finish(self) -> None:
        """Write all incomplete blocks."""
        ends = self._ends
        self._ends = {}
        for end, head in ends.items():
            self.put(head.ljust(BLOCK, b"\0"), end - len(head))
        self._buffer = memoryview(b"")

    def load(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array from byte `offset` on, in memory of its own."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        with disk_errors(self.folder):
            if (blocks := read_blocks(self.fileno(), block_buffer(size), offset, size)) is None:
                raise OSError(errno.EIO, "temporary file ends early", self.name)
        os.posix_fadvise(self.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
        return np.frombuffer(blocks, dtype, count).reshape(shape)
