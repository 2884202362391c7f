"""Memory cgroups, v1 and v2: what the kernel counts, and the lowest limit that holds this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT_VARIABLE = "OGBNLIB_MEMORY_LIMIT_BYTES"  # a run's memory_limit, for engines whose limit no cgroup shows
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as the largest page-aligned int64, about 2**63


def read_whole(path: str) -> bytes | None:
    """A file of the kernel's; None when it is gone or not ours to read. `Path.read_text` takes three times as long."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    data = b""
    try:
        while chunk := os.read(descriptor, 2**16):
            data += chunk
        return data
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _fields(path: str, wanted: Iterable[bytes], unit: int = 1) -> dict[bytes, int] | None:
    """`NAME VALUE` or `NAME: VALUE kB` lines as integers; None when the file is gone or not ours to read."""
    if (data := read_whole(path)) is None:
        return None
    values, text = {}, b"\n" + data
    for name in wanted:  # a line looked for, not all lines taken apart: most of a sample's time was that
        at = max(text.find(b"\n%b " % name), text.find(b"\n%b:" % name))
        if at >= 0:
            begin = at + len(name) + 2
            values[name] = int(text[begin : begin + 40].split(None, 1)[0]) * unit
    return values


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup directory, v1 or v2 (`/sys/fs/cgroup/...`). Every method returns None where a file is absent."""

    path: Path
    version: int

    def _read(self, v1: str, v2: str) -> int | None:
        text = read_whole(f"{self.path}/{v1 if self.version == 1 else v2}")
        return None if text is None or text.strip() == b"max" or int(text) >= _UNLIMITED else int(text)

    def usage_bytes(self) -> int | None:
        return self._read("memory.usage_in_bytes", "memory.current")

    def limit_bytes(self) -> int | None:
        """This directory's own limit; its parents may have a lower one (see `effective_limit`)."""
        return self._read("memory.limit_in_bytes", "memory.max")

    def peak_bytes(self) -> int | None:
        """The highest usage so far, counted by the kernel (v2 since Linux 5.19)."""
        return self._read("memory.max_usage_in_bytes", "memory.peak")

    def oom_kills(self) -> int | None:
        """Processes that the kernel's OOM killer has killed in this cgroup."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        values = _fields(str(self.path / name), [b"oom_kill"])
        return None if values is None else values.get(b"oom_kill")

    def ooms(self) -> int:
        """How often v2 found no memory left under this directory's limit, or one below it; 0 under v1."""
        return (_fields(str(self.path / "memory.events"), [b"oom"]) or {}).get(b"oom", 0)

    def met_its_limit(self, ooms_before: int) -> bool:
        """Whether usage came up to this directory's own limit: since `ooms` was asked, or under v1 at any time."""
        if self.version == 2:
            return self.ooms() > ooms_before
        limit, peak = self.limit_bytes(), self.peak_bytes()
        # A charge of some pages at once may have failed below it. `memory.failcnt` stays 0 on recent kernels.
        return limit is not None and peak is not None and peak > limit - 2**21

    def parts(self) -> tuple[int | None, int | None, int | None]:
        """Anonymous, file (without shared memory) and shared bytes, children included."""
        names = (b"total_rss", b"total_cache", b"total_shmem") if self.version == 1 else (b"anon", b"file", b"shmem")
        values = _fields(str(self.path / "memory.stat"), names)
        if not values or any(name not in values for name in names):
            return None, None, None
        anon, file, shmem = (values[name] for name in names)
        return anon, max(file - shmem, 0), shmem  # both versions count shared memory as cache

    def pids(self) -> list[int]:
        try:
            return [int(word) for word in (self.path / "cgroup.procs").read_text().split()]
        except OSError:
            return []


def _mounts() -> list[tuple[int, str, Path]]:
    """(version, root inside the hierarchy, mount point) of each mounted memory-capable cgroup hierarchy."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            found.append((2, root, Path(point)))
        elif kind == "cgroup" and "memory" in options.split()[-1].split(","):
            found.append((1, root, Path(point)))
    return found


def find_cgroup(pid: int | str = "self") -> tuple[Cgroup, Path] | None:
    """The memory cgroup of a process and the mount point above it; None where no memory controller is mounted.

    A hybrid host (v1 memory beside a v2 tree without the memory controller) answers with v1.
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        mounts = _mounts()
    except OSError:
        return None
    for version in (1, 2):
        for line in lines:
            _, controllers, inside = line.split(":", 2)
            if (version == 1 and "memory" not in controllers.split(",")) or (version == 2 and controllers):
                continue
            for kind, root, point in mounts:
                if kind != version:
                    continue
                # In a container without its own cgroup namespace the path is the host's and is not visible here:
                # the mount point itself is then the container's cgroup.
                relative = os.path.relpath(inside, root)
                path = point / relative if not relative.startswith("..") else point
                path = path if path.is_dir() else point
                if version == 1 or (path / "memory.current").exists():
                    return Cgroup(path, version), point
    return None


def lineage(cgroup: Cgroup, mount: Path) -> Iterator[Cgroup]:
    """`cgroup` and those it lies in, whose limits hold for it too, up to the mount point."""
    path = cgroup.path
    while True:
        yield Cgroup(path, cgroup.version)
        if path in (mount, path.parent):
            return
        path = path.parent


def counting_cgroup(pid: int) -> Cgroup | None:
    """The nearest cgroup of `pid` with an oom_kill counter.

    The kernel counts a kill in the victim's own cgroup, whichever ancestor's limit was hit. Under v2 ancestors count it
    as well, but they also count kills elsewhere below them, a run under its own limit for one; so the nearest decides.
    """
    found = find_cgroup(pid)
    cgroups = lineage(*found) if found else ()
    return next((cgroup for cgroup in cgroups if cgroup.oom_kills() is not None), None)


def effective_limit() -> tuple[int, str]:
    """The bytes this process may use and where that number comes from: the lowest of cgroup, Slurm and host."""
    import psutil

    host = psutil.virtual_memory().total
    limits = [(host, "the host's RAM")]
    if given := os.environ.get(LIMIT_VARIABLE):
        limits.append((int(given), "memory_limit"))
    if found := find_cgroup():
        for cgroup in lineage(*found):
            if (limit := cgroup.limit_bytes()) is not None:
                limits.append((limit, f"memory cgroup v{cgroup.version} {cgroup.path}"))
    slurm = {name: os.environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")}
    if slurm["MEM_PER_NODE"].isdigit():  # in MB, as Slurm writes it for its jobs
        limits.append((int(slurm["MEM_PER_NODE"]) * 2**20, "Slurm --mem (SLURM_MEM_PER_NODE)"))
    elif slurm["MEM_PER_CPU"].isdigit():
        cpus = int(slurm["CPUS_ON_NODE"]) if slurm["CPUS_ON_NODE"].isdigit() else 1
        limits.append((int(slurm["MEM_PER_CPU"]) * 2**20 * cpus, "Slurm --mem-per-cpu (SLURM_MEM_PER_CPU)"))
    return min((limit for limit in limits if limit[0] > 0), key=lambda limit: limit[0])
