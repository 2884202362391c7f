"""Files whose pages soon leave the page cache, and reads and writes of whole blocks past it."""

import contextlib
import errno
import io
import mmap
import os
from pathlib import Path
from typing import Any

from ..errors import format_bytes
from ..files import write_all

DROP_BYTES = 32 * 2**20  # most bytes of a file not yet on disk, and of one write


class Stream(io.FileIO):
    """A new file, by path or open descriptor, whose written pages soon leave the page cache."""

    # Dirty pages (not yet on disk) count against a memory cgroup, and can't be freed at once.
    most_dirty_bytes = DROP_BYTES

    def __init__(self, file: Path | int) -> None:
        super().__init__(file, "r+" if isinstance(file, int) else "x+")  # x: a path must be new
        self.size = 0  # end of the last byte written
        self._dirty_bytes = 0

    def append(self, data: Any) -> None:  # bytes, or a memoryview of uint8
        self.put(data, self.size)

    def put(self, data: Any, offset: int) -> None:
        """Write all of `data` (bytes) from byte `offset` on."""
        view = memoryview(data)
        for begin in range(0, len(view), DROP_BYTES):
            part = view[begin : begin + DROP_BYTES]
            write_all(self.fileno(), part, offset + begin)
            self.size = max(self.size, offset + begin + len(part))
            self._dirty_bytes += len(part)
            if self._dirty_bytes >= self.most_dirty_bytes:
                self.drop()

    def drop(self) -> None:
        """Write everything to disk and drop it from the page cache."""
        os.fdatasync(self.fileno())  # first, because only clean pages can be dropped
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._dirty_bytes = 0

    def fill(self, view: memoryview, offset: int) -> None:
        """Read the bytes from `offset` on until `view` is full."""
        while len(view):
            count = os.preadv(self.fileno(), [view], offset)
            if not count:
                raise OSError(errno.EIO, "temporary file ends early", self.name)
            view = view[count:]  # the part still to fill
            offset += count


BLOCK = 4096  # O_DIRECT, which bypasses the page cache, reads and writes whole blocks


def whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK  # bytes, rounded up


def block_buffer(num_bytes: int) -> memoryview:
    """Return page-aligned memory for O_DIRECT, in whole blocks; from 2 MB on in huge pages."""
    # One request to the disk covers only a few pages. Three threads with 8 MB each read 0.7 GB/s
    # into pages of 4 KB and 1.9 GB/s into huge pages, at a fifth of the CPU time.
    try:
        buffer = mmap.mmap(
            -1, whole_blocks(max(1, num_bytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # -1: no file; at least one byte, as mmap refuses an empty map
    except OSError:
        raise MemoryError(
            f"Unable to allocate {format_bytes(num_bytes)} to read or write a file"
        ) from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        if len(buffer) >= 2**21:
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


def read_blocks(descriptor: int, buffer: memoryview, begin: int, size: int) -> memoryview | None:
    """Read `size` bytes from byte `begin` (a block's first) on into `buffer`, in whole blocks;
    return these blocks, or None if the file ends before byte `begin + size`."""
    view = buffer[: whole_blocks(size)]
    done = 0  # bytes read
    while done < size:
        reached = done + os.preadv(descriptor, [view[done:]], begin + done)
        if reached < size:  # a read may be short; at the end of the file it adds no whole block
            reached -= reached % BLOCK  # O_DIRECT continues at whole blocks only
            if reached == done:
                return None
        done = reached
    return view
