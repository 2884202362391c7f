"""One memory reading of a process tree, split by what the bytes are.

Resident memory is not one number. Anonymous pages (`malloc`, tensors) can only be freed by the process; file pages
(page cache, mapped files) are taken back by the kernel under pressure; shared pages (`/dev/shm`) are counted once per
process by RSS although they exist once. Every reading here keeps the three apart, and the cgroup's own count, which is
what an out-of-memory kill goes by, beside them.

Nothing here promises to see spikes shorter than the sampling interval: for those there is the kernel's own peak
counter (`Cgroup.peak_bytes`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LIMIT_VARIABLE = "OGBNLIB_MEMORY_LIMIT_BYTES"  # a run's memory_limit, for engines whose limit no cgroup shows
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as the largest page-aligned int64, about 2**63


@dataclass(frozen=True)
class Reading:
    """Bytes held by a process tree at one moment; None where the kernel gives no answer.

    `rss_*` are sums over processes, so pages that forked workers share are counted once per worker; `pss_*` divide
    each shared page among its users and add up to what exists. `cgroup_*` count the whole cgroup, page cache included;
    `cgroup_file_bytes` excludes shared memory.
    """

    num_processes: int | None = None
    rss_anon_bytes: int | None = None
    rss_file_bytes: int | None = None
    rss_shmem_bytes: int | None = None
    pss_bytes: int | None = None
    pss_anon_bytes: int | None = None
    pss_file_bytes: int | None = None
    pss_shmem_bytes: int | None = None
    cgroup_usage_bytes: int | None = None
    cgroup_anon_bytes: int | None = None
    cgroup_file_bytes: int | None = None
    cgroup_shmem_bytes: int | None = None
    cgroup_peak_bytes: int | None = None
    cgroup_limit_bytes: int | None = None


def process_tree(pid: int) -> list[int]:
    """`pid` and its living descendants, from `/proc/PID/task/*/children` (no scan of all processes)."""
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        try:
            tasks = os.listdir(f"/proc/{current}/task")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append(current)
        for task in tasks:
            try:
                queue += [int(child) for child in Path(f"/proc/{current}/task/{task}/children").read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread ended between the two calls
    return found


def _fields(path: str, wanted: Iterable[bytes], unit: int = 1) -> dict[bytes, int] | None:
    """`NAME VALUE` or `NAME: VALUE kB` lines as integers; None when the file is gone or not ours to read."""
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    names = set(wanted)
    values = {}
    for line in lines:
        words = line.split()
        if len(words) >= 2 and (name := words[0].rstrip(b":")) in names:
            values[name] = int(words[1]) * unit
    return values


def _sum_over(pids: Iterable[int], file: str, names: tuple[bytes, ...]) -> list[int | None]:
    rows = [row for pid in pids if (row := _fields(f"/proc/{pid}/{file}", names, 1024))]
    # A field that this kernel does not give is unknown, not zero.
    return [sum(row[name] for row in rows) if rows and all(name in row for row in rows) else None for name in names]


def read_rss(pids: Iterable[int]) -> tuple[int | None, int | None, int | None]:
    """Sums of RssAnon, RssFile and RssShmem in bytes; about 40 us per process."""
    anon, file, shmem = _sum_over(pids, "status", (b"RssAnon", b"RssFile", b"RssShmem"))
    return anon, file, shmem


def own_memory() -> tuple[int, int, int]:
    """This process's RssAnon + RssShmem, its whole RSS, and the highest RSS since `reset_peak`, in bytes."""
    wanted = (b"RssAnon", b"RssShmem", b"VmRSS", b"VmHWM")
    values = _fields("/proc/self/status", wanted, 1024) or {}
    anon, shmem, rss, peak = (values.get(name, 0) for name in wanted)
    return anon + shmem, rss, max(peak, rss)


def reset_peak() -> None:
    """Set the kernel's high-water mark of this process's RSS to its present RSS (proc(5), /proc/PID/clear_refs).

    Without effect on kernels built without CONFIG_PROC_PAGE_MONITOR: a phase's peak is then the peak so far.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def read_pss(pids: Iterable[int]) -> tuple[int | None, int | None, int | None, int | None]:
    """Sums of Pss, Pss_Anon, Pss_File and Pss_Shmem in bytes.

    The kernel walks every page table for it: about 10 ms per resident GB, so it is sampled less often.
    """
    names = (b"Pss", b"Pss_Anon", b"Pss_File", b"Pss_Shmem")
    total, anon, file, shmem = _sum_over(pids, "smaps_rollup", names)
    return total, anon, file, shmem


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup directory, v1 or v2 (`/sys/fs/cgroup/...`). Every method returns None where a file is absent."""

    path: Path
    version: int

    def _read(self, v1: str, v2: str) -> int | None:
        try:
            text = (self.path / (v1 if self.version == 1 else v2)).read_text().strip()
        except OSError:
            return None
        return None if text == "max" or int(text) >= _UNLIMITED else int(text)

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


def read_memory(pid: int, *, cgroup: Cgroup | None = None, pss: bool = False) -> Reading:
    """One reading of `pid` and its descendants, and of `cgroup` where there is one."""
    pids = process_tree(pid)
    anon, file, shmem = read_rss(pids)
    total, *pss_parts = read_pss(pids) if pss else (None,) * 4
    cg_anon, cg_file, cg_shmem = cgroup.parts() if cgroup else (None,) * 3
    return Reading(
        num_processes=len(pids),
        rss_anon_bytes=anon,
        rss_file_bytes=file,
        rss_shmem_bytes=shmem,
        pss_bytes=total,
        pss_anon_bytes=pss_parts[0],
        pss_file_bytes=pss_parts[1],
        pss_shmem_bytes=pss_parts[2],
        cgroup_usage_bytes=cgroup.usage_bytes() if cgroup else None,
        cgroup_anon_bytes=cg_anon,
        cgroup_file_bytes=cg_file,
        cgroup_shmem_bytes=cg_shmem,
        cgroup_peak_bytes=cgroup.peak_bytes() if cgroup else None,
        cgroup_limit_bytes=cgroup.limit_bytes() if cgroup else None,
    )


def effective_limit() -> tuple[int, str]:
    """The bytes this process may use and where that number comes from: the lowest of cgroup, Slurm and host."""
    import psutil

    host = psutil.virtual_memory().total
    limits = [(host, "the host's RAM")]
    if given := os.environ.get(LIMIT_VARIABLE):
        limits.append((int(given), "memory_limit"))
    if found := find_cgroup():
        cgroup, mount = found
        path = cgroup.path
        while True:
            if (limit := Cgroup(path, cgroup.version).limit_bytes()) is not None:
                limits.append((limit, f"memory cgroup v{cgroup.version} {path}"))
            if path in (mount, path.parent):
                break
            path = path.parent
    slurm = {name: os.environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")}
    if slurm["MEM_PER_NODE"].isdigit():  # in MB, as Slurm writes it for its jobs
        limits.append((int(slurm["MEM_PER_NODE"]) * 2**20, "Slurm --mem (SLURM_MEM_PER_NODE)"))
    elif slurm["MEM_PER_CPU"].isdigit():
        cpus = int(slurm["CPUS_ON_NODE"]) if slurm["CPUS_ON_NODE"].isdigit() else 1
        limits.append((int(slurm["MEM_PER_CPU"]) * 2**20 * cpus, "Slurm --mem-per-cpu (SLURM_MEM_PER_CPU)"))
    return min((limit for limit in limits if limit[0] > 0), key=lambda limit: limit[0])


def cuda_memory() -> tuple[int, int] | None:
    """(allocated, reserved) bytes of this process on the current GPU; None when CUDA was not used here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def malloc_trim() -> bool:
    """Ask glibc to give free heap pages back; False on a C library without `malloc_trim` (musl, macOS)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


def release_memory() -> dict[str, int | None]:
    """Give back what can be given back, and say what each step gave: bytes by step, None where a step is impossible.

    `gc` and `malloc_trim` are measured by the fall of this process's RssAnon + RssShmem (PyG keeps a loader's CSC in
    shared memory where it has workers). `synchronize` waits for queued kernels, without which `empty_cache` cannot free
    their blocks; both are measured by the fall of reserved GPU memory. Negative numbers mean that the step cost memory.
    """
    before = own_memory()[0]
    gc.collect()
    after_gc = own_memory()[0]
    trimmed = malloc_trim()
    given: dict[str, int | None] = {
        "gc": before - after_gc,
        "malloc_trim": after_gc - own_memory()[0] if trimmed else None,
        "synchronize": None,
        "empty_cache": None,
    }
    if cuda := cuda_memory():
        import torch

        torch.cuda.synchronize()
        synchronized = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        given["synchronize"] = cuda[1] - synchronized
        given["empty_cache"] = synchronized - torch.cuda.memory_reserved()
    return given
