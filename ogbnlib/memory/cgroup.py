"""Memory cgroups, v1 and v2: the kernel's counters and the lowest limit on this process."""

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..environment import LIMIT_VARIABLE
from ..errors import format_bytes


def read_whole(path: str) -> bytes | None:
    """Read a file of the kernel; None if it is gone or not readable. Faster than `Path.read_bytes`,
    by 4 us of 12."""
    try:
        with io.FileIO(path) as file:
            return file.readall()
    except OSError:
        return None


def read_fields(path: str, names: Iterable[bytes], unit: int = 1) -> dict[bytes, int] | None:
    """Integers of the lines `NAME VALUE` or `NAME: VALUE kB`; None if the file is gone or not
    readable."""
    if (data := read_whole(path)) is None:
        return None
    values, text = {}, b"\n" + data
    for name in names:  # searched, because splitting all lines took most of a sample's time
        at = max(text.find(b"\n%b " % name), text.find(b"\n%b:" % name))
        if at >= 0:
            begin = at + len(name) + 2
            values[name] = int(text[begin : begin + 40].split(None, 1)[0]) * unit
    return values


@dataclass(frozen=True)
class Cgroup:
    """Directory of a memory cgroup (`/sys/fs/cgroup/...`). Methods return None where a file is
    absent."""

    path: Path
    version: int

    def _read(self, v1: str, v2: str) -> int | None:
        text = read_whole(f"{self.path}/{v1 if self.version == 1 else v2}")
        # v1 writes "no limit" as the largest page-aligned int64, about 2**63.
        return None if text is None or text.strip() == b"max" or int(text) >= 2**60 else int(text)

    def usage_bytes(self) -> int | None:
        return self._read("memory.usage_in_bytes", "memory.current")

    def limit_bytes(self) -> int | None:
        """This directory's own limit; a parent may have a lower one (see `effective_limit`)."""
        return self._read("memory.limit_in_bytes", "memory.max")

    def peak_bytes(self) -> int | None:
        """Highest usage so far, counted by the kernel (v2 since Linux 5.19)."""
        return self._read("memory.max_usage_in_bytes", "memory.peak")

    def oom_kills(self) -> int | None:
        """Number of processes in this cgroup that the kernel's out-of-memory killer ended."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return (read_fields(f"{self.path}/{name}", [b"oom_kill"]) or {}).get(b"oom_kill")

    def ooms(self) -> int:
        """Number of times v2 found no memory below this directory's limit or one inside it."""
        return (read_fields(f"{self.path}/memory.events", [b"oom"]) or {}).get(b"oom", 0)

    def high_bytes(self) -> int | None:
        """The usage above which v2 slows this directory's processes down instead of killing them."""
        return self._read("", "memory.high") if self.version == 2 else None

    def highs(self) -> int:
        """Number of times v2 slowed processes down for this directory's `memory.high` or one inside
        it."""
        return (read_fields(f"{self.path}/memory.events", [b"high"]) or {}).get(b"high", 0)

    def met_its_limit(self, ooms_before: int) -> bool:
        """Whether usage reached this directory's own limit: since `ooms` was read, or under v1 at
        any time."""
        if self.version == 2:
            return self.ooms() > ooms_before
        limit, peak = self.limit_bytes(), self.peak_bytes()
        # A charge of several pages fails below the limit. `memory.failcnt` stays 0 on recent
        # kernels.
        return limit is not None and peak is not None and peak > limit - 2**21

    def parts(self) -> tuple[int | None, int | None, int | None]:
        """Anonymous, file (without shared memory) and shared bytes, children included."""
        names = (
            (b"total_rss", b"total_cache", b"total_shmem")
            if self.version == 1
            else (b"anon", b"file", b"shmem")
        )
        values = read_fields(f"{self.path}/memory.stat", names) or {}
        if len(values) < len(names):
            return None, None, None
        anon, file, shmem = (values[name] for name in names)
        return anon, max(file - shmem, 0), shmem  # both versions count shared memory as cache

    def pids(self) -> list[int]:
        return [int(word) for word in (read_whole(f"{self.path}/cgroup.procs") or b"").split()]


def _unescaped(field: str) -> str:
    """A path in /proc/self/mountinfo, where a blank is `\\040` (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def find_cgroup(pid: int | str = "self") -> tuple[Cgroup, Path] | None:
    """Memory cgroup of a process and its mount point; None if no memory controller is mounted."""
    lines, mounted = (
        os.fsdecode(read_whole(f"/proc/{file}") or b"")
        for file in (f"{pid}/cgroup", "self/mountinfo")
    )
    mounts: dict[int, list[tuple[str, Path]]] = {1: [], 2: []}
    for line in mounted.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split()[-1].split(",")):
            root, point = map(_unescaped, before.split()[3:5])
            mounts[2 if kind == "cgroup2" else 1].append((root, Path(point)))
    # a hybrid host has v1 memory and a v2 tree without the memory controller
    for version in (1, 2):
        for line in lines.splitlines():
            _, controllers, inside = line.split(":", 2)
            if ("memory" not in controllers.split(",")) if version == 1 else controllers:
                continue
            for root, mount in mounts[version]:
                # In a container without its own cgroup namespace the path is the host's and not
                # visible: then the mount point is the container's cgroup.
                path = mount / os.path.relpath(inside, root)
                path = path if ".." not in path.parts and path.is_dir() else mount
                if version == 1 or (path / "memory.current").exists():
                    return Cgroup(path, version), mount
    return None


def lineage(cgroup: Cgroup, mount: Path) -> Iterator[Cgroup]:
    """Yield `cgroup` and its ancestors up to the mount point: all their limits apply to it."""
    for path in (cgroup.path, *cgroup.path.parents):
        yield Cgroup(path, cgroup.version)
        if path == mount:
            return


@dataclass(frozen=True)
class Throttle:
    """A cgroup whose `memory.high` slowed a run down, without a kill."""

    cgroup: str
    high_bytes: int
    times: int

    def __str__(self) -> str:
        return (
            f"It was slowed down {self.times} times: its memory passed memory.high "
            f"({format_bytes(self.high_bytes)}) of the cgroup {self.cgroup}, above which the kernel "
            "makes processes wait; raise it (MemoryHigh= of systemd) or use less."
        )


def high_events() -> dict[str, int]:
    """How often each cgroup around this process that has a `memory.high` has slowed processes down
    so far."""
    pair = find_cgroup()
    cgroups = lineage(*pair) if pair else ()
    return {str(one.path): one.highs() for one in cgroups if one.high_bytes() is not None}


def throttled_since(before: Mapping[str, int]) -> list[Throttle]:
    """The cgroups of `high_events` that have slowed processes down since then."""
    cgroups = [(Cgroup(Path(path), 2), count) for path, count in before.items()]
    return [
        Throttle(str(one.path), one.high_bytes() or 0, one.highs() - count)
        for one, count in cgroups
        if one.highs() > count
    ]


def counting_cgroup(pid: int) -> Cgroup | None:
    """Nearest cgroup of `pid` with an oom_kill counter: the kernel counts a kill in the victim's
    own."""
    pair = find_cgroup(pid)
    return next(
        (group for group in (lineage(*pair) if pair else ()) if group.oom_kills() is not None), None
    )


def effective_limit() -> tuple[int, str]:
    """Return the memory limit of this process in bytes and its source: the lowest of cgroup, Slurm
    and host."""
    import psutil

    limits = [(psutil.virtual_memory().total, "the host's RAM")]
    if value := os.environ.get(LIMIT_VARIABLE):
        limits.append((int(value), "memory_limit"))
    if pair := find_cgroup():
        for cgroup in lineage(*pair):
            if (limit := cgroup.limit_bytes()) is not None:
                limits.append((limit, f"memory cgroup v{cgroup.version} {cgroup.path}"))
    node, cpu, cpus = (
        os.environ.get(f"SLURM_{name}", "")
        for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")
    )
    if node.isdigit():  # Slurm's MB are 2**20 bytes
        limits.append((int(node) * 2**20, "Slurm --mem (SLURM_MEM_PER_NODE)"))
    elif cpu.isdigit():
        number = int(cpus) if cpus.isdigit() else 1
        limits.append((int(cpu) * 2**20 * number, "Slurm --mem-per-cpu (SLURM_MEM_PER_CPU)"))
    return min(limit for limit in limits if limit[0] > 0)  # --mem=0 is all memory of the node
