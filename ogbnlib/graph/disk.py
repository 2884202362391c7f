"""Rows of a file, fetched by index in one ascending pass, past the page cache."""

from __future__ import annotations

import functools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import replaced
from .bits import kernel
from .checks import HEADER_BYTES
from .npz import Array
from .store import Store

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


@kernel
def _per_unit(index: Any, unit_rows: Any, num_units: Any) -> Any:
    counts = np.zeros(num_units, np.int64)
    for i in index:
        counts[i // unit_rows] += 1
    return counts


@kernel
def _first_at_least(index: Any, begin: Any, end: Any, row: Any) -> Any:
    while begin < end:
        middle = (begin + end) // 2
        if index[middle] < row:
            begin = middle + 1
        else:
            end = middle
    return begin


@kernel
def _bounds(index: Any, begin: Any, end: Any, row: Any) -> Any:
    """For each list, ascending in `index[begin:end]`, the first place of `row` or a later one."""
    out = np.empty(len(begin), np.int64)
    for c in range(len(begin)):
        out[c] = _first_at_least(index, begin[c], end[c], row)
    return out


@kernel
def _deal(words: Any, first: Any, index: Any, begin: Any, end: Any, low: Any, high: Any, place: Any, out: Any) -> None:
    """Copy the rows from `low` to `high` that each list wants; `place` is where its `begin` goes. `words` [rows, width]
    begins with row `first`."""
    width = out.shape[1]
    for c in range(len(begin)):
        i = _first_at_least(index, begin[c], end[c], low)
        while i < end[c] and index[i] < high:
            o, row = place[c] + i - begin[c], index[i] - first
            for w in range(width):
                out[o, w] = words[row, w]
            i += 1


def _stretches(counts: Array, room: int) -> Iterator[tuple[int, int]]:
    """Consecutive units, from and to, that hold at most `room` of what is counted; a unit that holds more is alone."""
    begin = held = 0
    for unit, count in enumerate(counts.tolist()):
        if unit > begin and held + count > room:
            yield begin, unit
            begin, held = unit, 0
        held += count
    yield begin, len(counts)


def _pieces(counts: Array, first: int, most: int) -> list[tuple[int, int]]:
    """Runs of at most `most` units that hold anything, from and to; the first unit has number `first`."""
    pieces: list[tuple[int, int]] = []
    for unit in (np.flatnonzero(counts) + first).tolist():
        if pieces and pieces[-1][1] == unit and unit - pieces[-1][0] < most:
            pieces[-1] = pieces[-1][0], unit + 1
        else:
            pieces.append((unit, unit + 1))
    return pieces


def disk_array(store: Store, name: str, chunk_bytes: int = CHUNK_BYTES) -> DiskArray:
    """Open array `name` of a store for reads past the page cache; raises `InputError` as `Store.check_open`."""
    info = store.files[name]
    row_bytes = np.dtype(info.dtype).itemsize * math.prod(info.shape[1:])
    try:
        array = DiskArray(store.file_path(name), HEADER_BYTES, row_bytes, info.shape[0], chunk_bytes)
    except FileNotFoundError:
        raise replaced(store.file_path(name)) from None
    store.check_open(name, array.descriptor)
    return array


class Interrupted(Exception):
    """A pass was ended because nobody waits for it any more."""


class DiskArray:
    """Rows of one array in a file, fetched by index in one ascending pass over the chunks that hold any of them.

    Args:
        path: The file.
        offset: Where its first row begins, in bytes.
        row_bytes: Distance between two rows.
        num_rows: Number of rows.
        chunk_bytes: Bytes per read, a multiple of 4,096; three buffers of this size are held.

    Once `abandoned` is set a pass ends at its next read, with `Interrupted`. `progress` is what the running pass has
    read and will have read, in bytes.

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
        self.chunk_bytes, self._file = chunk_bytes, -1
        self.path, self.offset, self.row_bytes, self.num_rows = Path(path), offset, row_bytes, num_rows
        self.num_bytes = self.path.stat().st_size
        self.bytes_read = 0
        self.abandoned = threading.Event()
        self.progress = 0, 0
        self.direct = True
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(self._file, [mmap.mmap(-1, _BLOCK)], 0)
        except OSError:  # tmpfs and some network file systems have no O_DIRECT
            self.close()
            self._file, self.direct = os.open(path, os.O_RDONLY), False
        self._local = threading.local()

    @property
    def descriptor(self) -> int:
        """The open file's; -1 once it is closed."""
        return self._file

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close  # for a loader that is dropped without being closed

    def damaged(self, problem: str) -> InputError:
        """The error that says what is wrong with this file of a store."""
        return InputError(f"{self.path}: {problem}; run `python -m ogbnlib verify {self.path.parent}`")

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
            raise self.damaged(f"expected rows from 0 to {self.num_rows - 1}, asked for was {low}")
        if last > self.num_bytes:
            raise self.damaged(f"expected a row at byte {last}, found the file's end at {self.num_bytes}")
        unit = math.gcd(self.offset, self.row_bytes, width, 8)
        word = np.dtype(f"u{unit}")
        target, stride, offset = out.reshape(len(out), -1).view(word), self.row_bytes // unit, self.offset // unit
        chunk = self.chunk_bytes
        order, bounds = _group(index, self.row_bytes, self.offset, chunk, -(-self.num_bytes // chunk))

        def pick(c: int) -> int:
            """Copy out the rows that begin in chunk `c` of the file; returns how many bytes were read."""
            rows = order[bounds[c] : bounds[c + 1]]
            # Only the stretch that is needed: a chunk at the edge of what is wanted may hold a single row.
            begin = (self.offset + int(index[rows].min()) * self.row_bytes) // _BLOCK * _BLOCK
            end = self.offset + int(index[rows].max()) * self.row_bytes + width  # may lie in the next chunk
            buffer = self._read(begin, end)
            words = np.frombuffer(buffer, dtype=word, count=len(buffer) // unit)
            _pick(words, begin // unit, index, rows, stride, offset, target)
            return len(buffer)

        chunks = np.flatnonzero(np.diff(bounds)).tolist()
        self.progress = 0, len(chunks) * chunk
        with ThreadPoolExecutor(_THREADS) as pool:
            self._count(pool.map(pick, chunks))
        self.progress = 0, 0

    def deal(self, index: Array, bounds: Array, room_bytes: int, put: Callable[[int, int, Array], None]) -> None:
        """Fetch the rows of several lists in one pass over the file, and hand them out some at a time.

        Args:
            index: int32 or int64 [n], list after list, each ascending.
            bounds: int64 [lists + 1], where each list begins in `index`.
            room_bytes: For rows on their way to `put`; at least what 1 MB of the file holds for all lists is taken.
            put: Called, in a thread, with a list's number, how many of its rows it has been given before, and its next
                rows, uint8 [k, row_bytes].

        Raises:
            InputError: when the file ends before a row does.
        """
        if len(index) and (last := self.offset + (int(index.max()) + 1) * self.row_bytes) > self.num_bytes:
            raise self.damaged(f"expected a row at byte {last}, found the file's end at {self.num_bytes}")
        word = np.dtype(f"u{math.gcd(self.offset, self.row_bytes, 8)}")
        unit = max(1, 2**20 // self.row_bytes)  # rows
        counts = _per_unit(index, unit, -(-self.num_rows // unit))
        self.progress = 0, int(np.count_nonzero(counts)) * unit * self.row_bytes
        width, before, ends = self.row_bytes // word.itemsize, bounds[:-1].copy(), bounds[1:]
        held = [np.empty((0, width), word) for _ in range(2)]  # one is filled while the other is put

        def hand_out(out: Array, first: Array, place: Array, sizes: Array) -> None:
            for c in np.flatnonzero(sizes).tolist():
                put(c, int(first[c]), out[place[c] : place[c] + sizes[c]].view(np.uint8))

        with ThreadPoolExecutor(_THREADS) as pool, ThreadPoolExecutor(1) as writer:
            putting: Future[Any] = writer.submit(int)
            for begin, end in _stretches(counts, room_bytes // 2 // self.row_bytes):
                upto = _bounds(index, before, ends, end * unit)
                sizes = upto - before
                place = np.cumsum(sizes) - sizes
                if len(held[0]) < sizes.sum():
                    held[0] = np.empty((int(sizes.sum()), width), word)
                pieces = _pieces(counts[begin:end], begin, max(1, self.chunk_bytes // unit // self.row_bytes))
                pick = functools.partial(self._deal_piece, unit, index, before, upto, place, held[0])
                self._count(pool.map(pick, pieces))
                putting.result()
                putting = writer.submit(hand_out, held[0], before - bounds[:-1], place, sizes)
                held.reverse()
                before = upto
            putting.result()
        self.progress = 0, 0

    def _deal_piece(
        self, unit: int, index: Array, before: Array, upto: Array, place: Array, out: Array, piece: tuple[int, int]
    ) -> int:
        low, high = piece[0] * unit, min(piece[1] * unit, self.num_rows)
        begin, end = (self.offset + row * self.row_bytes for row in (low, high))
        buffer = self._read(begin // _BLOCK * _BLOCK, end)
        words = np.frombuffer(buffer, out.dtype, (end - begin) // out.dtype.itemsize, begin % _BLOCK)
        _deal(words.reshape(high - low, -1), low, index, before, upto, low, high, place, out)
        return len(buffer)

    def _count(self, reads: Iterator[int]) -> None:
        for size in reads:
            self.bytes_read += size
            self.progress = self.progress[0] + size, self.progress[1]

    def rows(self, begin: int, end: int, dtype: np.dtype[Any]) -> Array:
        """The values in the rows from `begin` up to `end`, 1-D; this thread's until its next call of this object."""
        first, last = (self.offset + row * self.row_bytes for row in (begin, end))
        if not 0 <= begin <= end or last > self.num_bytes:
            raise self.damaged(f"expected rows up to byte {last}, found the file's end at {self.num_bytes}")
        if first == last:
            return np.empty(0, dtype)
        skipped = first % _BLOCK
        buffer = self._read(first - skipped, last)
        return np.frombuffer(buffer, dtype, (last - first) // dtype.itemsize, skipped)

    def _read(self, begin: int, end: int) -> memoryview:
        """The blocks of the file from byte `begin`, where one begins, that hold it up to `end`; until the next call."""
        if self.abandoned.is_set():
            raise Interrupted
        length = -(-(end - begin) // _BLOCK) * _BLOCK
        held = getattr(self._local, "buffer", None)
        if held is None or len(held) < length:  # page-aligned memory of this thread, as O_DIRECT needs it
            held = self._local.buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view, got = memoryview(held)[:length], 0
        while got < end - begin:
            reached = got + os.preadv(self._file, [view[got:]], begin + got)
            if reached < end - begin:
                reached -= reached % _BLOCK  # O_DIRECT goes on at whole blocks only
                if reached == got:
                    raise self.damaged(f"expected {end} bytes, found the file's end while reading")
            got = reached
        if not self.direct:
            os.posix_fadvise(self._file, begin, length, os.POSIX_FADV_DONTNEED)
        return view
