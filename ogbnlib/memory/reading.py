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
import functools
import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import format_bytes
from .cgroup import Cgroup, _fields, effective_limit, read_whole
from .cuda import cuda_in_use, cuda_reading


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

    def held(self) -> tuple[int, int, int] | None:
        """Anonymous, shared and file bytes of the tree, each page counted once; None where that is not known.

        The cgroup's count where there is one, else PSS, which is not in every reading; RSS where it is one process
        alone, and where the kernel gives no PSS. No process of a tree that was killed has an RSS any more: what its
        cgroup still counts then is being given back.
        """
        if self.rss_anon_bytes is None:
            return None
        source = "cgroup"
        if self.cgroup_anon_bytes is None:
            source = "rss" if (self.num_processes or 1) <= 1 or not _gives_pss() else "pss"
        anon, shmem, file = (getattr(self, f"{source}_{part}_bytes") for part in ("anon", "shmem", "file"))
        return None if anon is None else (anon, shmem or 0, file or 0)

    @property
    def held_bytes(self) -> int | None:
        """Anonymous + shared memory, as `held` has it: what can't be taken back, unlike the page cache."""
        held = self.held()
        return None if held is None else held[0] + held[1]


@functools.cache
def _gives_pss() -> bool:
    """Whether this kernel tells the parts of PSS, as Linux does since 5.2."""
    return read_pss([os.getpid()])[1] is not None


def process_tree(pid: int) -> list[int]:
    """`pid` and its living descendants, from `/proc/PID/task/*/children`.

    psutil's `children(recursive=True)` reads the parents of all processes of the machine: 35 ms for a tree of 5 among
    438, where this takes 0.09 ms and a sample is due every 20 ms; 77 ms against 27 ms for a tree of 301.
    """
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        try:
            tasks = os.listdir(f"/proc/{current}/task")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append(current)
        for task in tasks:  # one that has ended between the two calls has no children any more
            queue += [int(child) for child in (read_whole(f"/proc/{current}/task/{task}/children") or b"").split()]
    return found


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


def read_memory(pid: int, *, cgroup: Cgroup | None = None, pss: bool = False) -> Reading:
    """One reading of `pid` and its descendants, and of `cgroup` where there is one."""
    # The cgroup first: processes that still have an RSS afterwards were not being killed while it was read.
    counted: tuple[int | None, ...] = ()
    if cgroup:
        counted = cgroup.usage_bytes(), *cgroup.parts(), cgroup.peak_bytes(), cgroup.limit_bytes()
    pids = process_tree(pid)
    shares = read_pss(pids) if pss else (None,) * 4
    return Reading(len(pids), *read_rss(pids), *shares, *counted)


def memory_now() -> str:
    """What this process and its children hold now, of which limit, and of the GPU where it is used: a line to print.

    Anonymous + shared memory, each page once; `file` is page cache and mapped files, which the kernel takes back.
    """
    reading = read_memory(os.getpid(), pss=True)
    limit, source = effective_limit()
    anon, shmem, file = reading.held() or (0, 0, 0)
    text = f"{format_bytes(anon + shmem)} held of {format_bytes(limit)} ({source}): {format_bytes(anon)} anonymous, "
    text += f"{format_bytes(shmem)} shared; beside it {format_bytes(file)} file"
    if gpu := cuda_reading():
        parts = (f"{format_bytes(gpu[f'{part}_bytes'])} {part}" for part in ("allocated", "reserved", "free"))
        text += f"; GPU: {', '.join(parts)}"
    return text


def own_disk_bytes() -> dict[str, int]:
    """Bytes that this process has had read from and written to disks so far (proc(5), /proc/PID/io); {} where unknown.

    What the page cache served is not among them; its writes are counted when they are made, to the cache.
    """
    counted = _fields("/proc/self/io", (b"read_bytes", b"write_bytes"), 1) or {}
    return {name.decode(): value for name, value in counted.items()}


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
    if torch := cuda_in_use():
        reserved = torch.cuda.memory_reserved()
        torch.cuda.synchronize()
        synchronized = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        given |= {"synchronize": reserved - synchronized, "empty_cache": synchronized - torch.cuda.memory_reserved()}
    return given
