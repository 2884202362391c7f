"""Shared memory that a process tree filled by write(2): files in /dev/shm and memfds.

RSS and PSS count mapped pages only. A memory cgroup counts written pages, too; without a cgroup,
this module finds them. A file belongs to the tree if a member has or had it open. The kernel does
not record who made a file that was closed again between two scans. Such a file counts if this user
owns it, if it appeared since the start, and if no process outside the tree uses it. Two scans in a
row must agree, since DataLoader workers hand a batch over in a file that no process has open for a
moment.
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
    """Return the shared memory in use on this machine, in bytes."""
    return (read_fields("/proc/meminfo", [b"Shmem"], 1024) or {}).get(b"Shmem", 0)


def _lying() -> dict[_FileId, os.stat_result]:
    """Return the status of each file in /dev/shm."""
    files = {}
    for folder, _, names in os.walk(_FOLDER):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                files[status.st_dev, status.st_ino] = status
    return files


def _open_files(pids: Iterable[int]) -> Iterator[os.stat_result]:
    """Yield the status of files in /dev/shm, removed ones too, and memfds that `pids` have open."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith((_FOLDER + "/", "/memfd:")):
                        yield os.stat(entry.path)


def _mapped(pids: Iterable[int], figure: bytes) -> dict[_FileId, int]:
    """Return `Rss` or `Pss`, in bytes, of each file in /dev/shm and each memfd that `pids` map."""
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
        self._ours: set[_FileId] = set()  # files of the tree; decided once, until the file is gone
        self._others: set[_FileId] = set()  # other files; decided once and not checked again
        self._unused: set[_FileId] = set()  # new files that no process used at the last scan
        self._shmem_bytes = _shmem_bytes()
        self._bytes = 0
        self._due_s = 0.0

    def read(self, pids: list[int]) -> int:
        """Return the bytes as of the last scan, after a new scan if one is due.

        A scan is due if the machine's shared memory changed by 1 MB or a file awaits its second
        scan. Scans take at most 5 % of the time.
        """
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
        """Decide which new files are the tree's; return its files' bytes that no member maps."""
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
        # the sum of Pss over several processes counts each page once
        mapped = _mapped(pids, b"Rss:" if len(pids) == 1 else b"Pss:")
        return sum(max(0, size - mapped.get(file, 0)) for file, size in sizes.items())

    def _used_outside(self, pids: list[int]) -> set[_FileId]:
        """Return the files that processes other than `pids` have open or map."""
        outside = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {*pids}
        files = {(status.st_dev, status.st_ino) for status in _open_files(outside)}
        return files | _mapped(outside, b"Pss:").keys()
