"""Memory cgroups, v1 and v2: the kernel's counters and the lowest limit on this process."""

import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..environment import LIMIT_VARIABLE
from ..errors import MB


def read_whole(path: str) -> bytes | None:
    """Return the content of a kernel file, or None if it is gone or not readable.

    4 us faster than `Path.read_bytes`, which takes 12 us.
    """
    try:
        with io.FileIO(path) as file:
            return file.readall()
    except OSError:
        return None


def read_fields(path: str, names: Iterable[bytes], unit: int = 1) -> dict[bytes, int] | None:
    """Return the values of named lines, times `unit`; None if the file is gone or not readable."""
    data = read_whole(path)
    if data is None:
        return None
    text = b"\n" + data  # so that the first line, too, follows a newline
    values = {}
    # The kernel writes "NAME VALUE" in a cgroup and "NAME: VALUE kB" in /proc.
    for name in names:  # a search: splitting all lines took most of a sample's time
        at = max(text.find(b"\n%b " % name), text.find(b"\n%b:" % name))  # -1 if not found
        if at >= 0:
            begin = at + len(name) + 2  # behind the newline, the name and its blank or colon
            # the first word of the next 40 bytes; no number is that long
            values[name] = int(text[begin : begin + 40].split(None, 1)[0]) * unit
    return values


# names in memory.stat, under v1 and v2, of anonymous memory, page cache and shared memory
_PARTS = {1: (b"total_rss", b"total_cache", b"total_shmem"), 2: (b"anon", b"file", b"shmem")}
_SIZES = {  # file names under v1 and v2
    # this cgroup's own limit; a parent may have a lower one, see `effective_limit`
    "limit": ("memory.limit_in_bytes", "memory.max"),
    # highest usage so far, counted by the kernel (v2 since Linux 5.19)
    "peak": ("memory.max_usage_in_bytes", "memory.peak"),
    # the usage above which v2 slows processes down instead of killing them; v1 has no such file
    "high": ("memory.high", "memory.high"),
}


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup, identified by its directory (`/sys/fs/cgroup/...`).

    Methods that read numbers return None where the kernel's file is absent.
    """

    path: Path
    version: int  # 1 or 2
    mount: Path  # the mount point of its hierarchy, an ancestor of `path` or `path` itself

    def size(self, name: Literal["limit", "peak", "high"]) -> int | None:
        """Return a size of `_SIZES` in bytes; None also for a limit that is not set."""
        text = read_whole(f"{self.path}/{_SIZES[name][self.version - 1]}")
        # v2 writes "no limit" as "max", v1 as the largest page-aligned int64, about 2**63.
        if text is None or text.strip() == b"max" or int(text) >= 2**60:
            return None
        return int(text)

    @property
    def has_limit(self) -> bool:
        """Whether this cgroup has a limit of its own, or a `memory.high`."""
        return self.size("limit") is not None or self.size("high") is not None

    def count(self, event: Literal["oom_kill", "oom", "high"]) -> int | None:
        """Return the number of events in this cgroup, under v2 also in the cgroups inside it.

        `oom_kill`: the kernel's out-of-memory killer ended a process. With `memory.oom.group`, the
        first of the killed processes is mostly counted twice. `oom` (v2): there was no memory left
        below a limit. `high` (v2): processes were slowed down because of a `memory.high`.
        """
        file = ("memory.oom_control", "memory.events")[self.version - 1]
        name = event.encode()
        return (read_fields(f"{self.path}/{file}", [name]) or {}).get(name)

    def met_its_limit(self, ooms_before: int) -> bool:
        """Return whether usage reached this cgroup's own limit.

        Under v2: since its `oom` events numbered `ooms_before`. Under v1: at any time.
        """
        limit = self.size("limit")
        if self.version == 2:
            return limit is not None and (self.count("oom") or 0) > ooms_before
        peak = self.size("peak")
        # Minus 2**21: a charge of several pages fails below the limit. `memory.failcnt` does not
        # help, since it stays 0 on recent kernels.
        return limit is not None and peak is not None and peak > limit - 2**21

    def parts(self) -> tuple[int | None, int | None, int | None]:
        """Return anonymous, file (without shared memory) and shared bytes, children included."""
        names = _PARTS[self.version]
        values = read_fields(f"{self.path}/memory.stat", names) or {}
        if len(values) < len(names):  # the cgroup is gone, or the kernel counts less
            return None, None, None
        anon, file, shmem = (values[name] for name in names)
        return anon, max(file - shmem, 0), shmem  # both versions count shared memory as cache

    def stalled_s(self) -> float | None:
        """Return the seconds so far in which a process in this cgroup waited for memory (PSI)."""
        text = read_whole(f"{self.path}/memory.pressure") or b""
        line = re.search(rb"^some .*total=(\d+)", text)  # "some": at least one process waited
        return int(line[1]) / 1e6 if line else None  # the kernel counts microseconds

    def lineage(self) -> Iterator["Cgroup"]:
        """Yield this cgroup and its ancestors up to the mount point; all their limits apply."""
        for path in (self.path, *self.path.parents):
            yield replace(self, path=path)
            if path == self.mount:
                return

    def pids(self) -> list[int]:
        return [int(word) for word in (read_whole(f"{self.path}/cgroup.procs") or b"").split()]


def find_cgroup(pid: int | str = "self") -> Cgroup | None:
    """Return the memory cgroup that counts a process; None if no memory controller is mounted."""
    paths: dict[int, str] = {}  # version -> path of the process's cgroup in its hierarchy
    for line in os.fsdecode(read_whole(f"/proc/{pid}/cgroup") or b"").splitlines():
        _, controllers, path = line.split(":", 2)  # "4:memory:/a/b" under v1, "0::/a/b" under v2
        if "memory" in controllers.split(","):
            paths[1] = path
        elif not controllers:
            paths[2] = path
    # v1 first: a hybrid host has v1 memory and a v2 tree without the memory controller
    for version, root, mount in sorted(_mounts(), key=lambda mount: mount[0]):
        if version not in paths:
            continue
        # In a container without its own cgroup namespace, the path is the host's and not visible
        # here. Then the mount point is the container's cgroup.
        folder = mount / os.path.relpath(paths[version], root)
        if ".." in folder.parts or not folder.is_dir():
            folder = mount
        for group in Cgroup(folder, version, mount).lineage():
            # The host's root cgroup of v2 lists the controller but has none of its files.
            has_files = (group.path / "memory.current").exists()
            usable = read_whole(f"{group.path}/cgroup.controllers") or b""
            if version == 1 or has_files or b"memory" in usable.split():
                return group  # else it does not count memory, but an ancestor does
    return None


def _mounts() -> Iterator[tuple[int, str, Path]]:
    """Yield version, root and mount point of each v2 mount and each v1 memory mount.

    `root` is the path in the hierarchy of the cgroup that is visible at the mount point.
    """
    # A line is "ID PARENT MAJOR:MINOR ROOT MOUNT_POINT ... - TYPE SOURCE OPTIONS" (proc(5)).
    for line in os.fsdecode(read_whole("/proc/self/mountinfo") or b"").splitlines():
        mounted, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        root, mount = mounted.split()[3:5]
        if kind == "cgroup2":
            yield 2, root, Path(mount)
        elif kind == "cgroup" and "memory" in options.split()[-1].split(","):
            yield 1, root, Path(mount)


def effective_limit() -> tuple[int, str]:
    """Return the lowest memory limit of this process, in bytes, and its source.

    Sources are the cgroups around it, the run's `memory_limit`, Slurm and the host's RAM.
    """
    import psutil

    group = find_cgroup()
    # Slurm's MB are 2**20 bytes, and its --mem=0 means all memory of the node.
    node_bytes = _number("SLURM_MEM_PER_NODE") * MB
    cpus_bytes = _number("SLURM_MEM_PER_CPU") * MB * max(1, _number("SLURM_CPUS_ON_NODE"))
    limits = [
        (psutil.virtual_memory().total, "the host's RAM"),
        (_number(LIMIT_VARIABLE), "memory_limit"),
        (node_bytes, "Slurm --mem (SLURM_MEM_PER_NODE)"),
        (cpus_bytes, "Slurm --mem-per-cpu (SLURM_MEM_PER_CPU)"),
        *(
            (cgroup.size("limit") or 0, f"memory cgroup v{cgroup.version} {cgroup.path}")
            for cgroup in (group.lineage() if group else ())
        ),
    ]
    return min(limit for limit in limits if limit[0] > 0)  # 0 is no limit


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0  # 0 if unset or not a number
