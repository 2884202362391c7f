"""Rows of a file, fetched by index in one ascending pass, past the page cache."""

from __future__ import annotations

import math
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..graph.bits import kernel
from ..graph.npz import Array

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

        with ThreadPoolExecutor(_THREADS) as pool:
            self.bytes_read += sum(pool.map(pick, np.flatnonzero(np.diff(bounds)).tolist()))

    def _read(self, begin: int, end: int) -> memoryview:
        """The blocks of the file from byte `begin`, where one begins, that hold it up to `end`; until the next call."""
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
