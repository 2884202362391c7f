"""Shared memory that a process tree filled by write(2): files in /dev/shm and memfds.

RSS and PSS count mapped pages only. A memory cgroup counts these pages; without one they are found
here. A file belongs to the tree if a member has it open or had. Of the other files, which were
closed between two looks, those of this user count that appeared since the start and that no process
outside of the tree uses: the kernel does not record who made them. Two looks must agree, since
DataLoader's workers hand a batch over in a file that no process has open for a moment.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import MB
from .cgroup import read_fields, read_whole

_FOLDER = "/dev/shm"
_FileId = tuple[int, int]  # device and inode


def _shmem_bytes() -> int:
    """All shared memory of this machine."""
    return (read_fields("/proc/meminfo", [b"Shmem"], 1024) or {}).get(b"Shmem", 0)


def _lying() -> dict[_FileId, os.stat_result]:
    """The files in /dev/shm."""
    files = {}
    for folder, _, names in os.walk(_FOLDER):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                files[status.st_dev, status.st_ino] = status
    return files


def _open_files(pids: Iterable[int]) -> Iterator[os.stat_result]:
    """The files in /dev/shm, removed ones too, and the memfds that these processes have open."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith((_FOLDER + "/", "/memfd:")):
                        yield os.stat(entry.path)


def _mapped(pids: Iterable[int], figure: bytes) -> dict[_FileId, int]:
    """`Rss` or `Pss` of each file in /dev/shm and each memfd that these processes map."""
    sizes: dict[_FileId, int] = {}
    for pid in pids:
        current: _FileId | None = None
        for line in (read_whole(f"/proc/{pid}/smaps") or b"").splitlines():
            words = line.split(None, 5)
            if len(words) == 6 and not words[0].endswith(b":"):
                current = None
                if words[5].startswith((_FOLDER.encode() + b"/", b"/memfd:")):
                    major, minor = (int(part, 16) for part in words[3].split(b":"))
                    current = os.makedev(major, minor), int(words[4])
                    sizes.setdefault(current, 0)
            elif len(words) == 5 and not words[0].endswith(b":"):
                current = None  # an anonymous mapping
            elif current and words[0] == figure:
                sizes[current] += int(words[1]) * 1024
    return sizes


class Written:
    """Bytes that a tree wrote to shared memory and that none of its processes maps."""

    def __init__(self) -> None:
        self._before = set(_lying())
        self._ours: set[_FileId] = set()  # decided once, until the file is gone
        self._others: set[_FileId] = set()  # decided once, and not looked at again
        self._unused: set[_FileId] = set()  # by any process at the last look
        self._shmem_bytes = _shmem_bytes()
        self._bytes = 0
        self._due_s = 0.0

    def read(self, pids: list[int]) -> int:
        """Return the bytes; looked for at most 5 % of the time, once the machine's figure changed."""
        begin_s = time.monotonic()
        shmem_bytes = _shmem_bytes()
        is_same = abs(shmem_bytes - self._shmem_bytes) < MB and not self._unused
        if begin_s < self._due_s or is_same:
            return self._bytes
        self._shmem_bytes = shmem_bytes
        begin_cpu_s = time.thread_time()
        self._bytes = self._look(pids)
        self._due_s = begin_s + 20 * (time.thread_time() - begin_cpu_s)
        return self._bytes

    def _look(self, pids: list[int]) -> int:
        """Decide about new files; return the bytes of the tree's that no member maps."""
        files = {(status.st_dev, status.st_ino): status for status in _open_files(pids)}
        self._ours |= files.keys() - self._before
        lying = _lying()
        files |= lying
        of_this_user = {file for file, status in lying.items() if status.st_uid == os.geteuid()}
        unknown = of_this_user - self._before - self._ours - self._others
        if unknown:
            used = self._used_outside(pids)
            self._others |= unknown & used
            unknown -= used
            self._ours |= unknown & self._unused
        self._unused = unknown - self._ours
        self._ours &= files.keys()
        sizes = {file: files[file].st_blocks * 512 for file in self._ours}
        if not any(sizes.values()):
            return 0
        # the Pss of several processes adds up to each page once
        mapped = _mapped(pids, b"Rss:" if len(pids) == 1 else b"Pss:")
        return sum(max(0, size - mapped.get(file, 0)) for file, size in sizes.items())

    def _used_outside(self, pids: list[int]) -> set[_FileId]:
        """The files that other processes than these have open or map."""
        outside = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {*pids}
        files = {(status.st_dev, status.st_ino) for status in _open_files(outside)}
        return files | _mapped(outside, b"Pss:").keys()
