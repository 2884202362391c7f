"""Memory readings of a process tree, split into anonymous, file and shared bytes.

Only the process can free anonymous pages (`malloc`, tensors). The kernel takes file pages (page
cache, mapped files) back under pressure. RSS counts a shared page (`/dev/shm`) once per process.
"""

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import format_bytes
from .cgroup import Cgroup, read_fields, read_whole
from .cuda import cuda_in_use
from .tree import Tree


@dataclass(frozen=True)
class Reading:
    """Memory of a process tree at one moment, in bytes; None where the kernel gives no answer.

    `rss_*` count pages shared by forked workers once per worker, `pss_*` once.
    `cgroup_file_bytes` excludes shared memory. `stalled_s` is the seconds so far in which a process
    waited for memory, see `Limit.stalled_s`.
    """

    num_processes: int | None = None
    rss_anon_bytes: int | None = None
    rss_file_bytes: int | None = None
    rss_shmem_bytes: int | None = None
    pss_anon_bytes: int | None = None
    pss_file_bytes: int | None = None
    pss_shmem_bytes: int | None = None
    cgroup_anon_bytes: int | None = None
    cgroup_file_bytes: int | None = None
    cgroup_shmem_bytes: int | None = None
    stalled_s: float | None = None

    @property
    def held_bytes(self) -> int | None:
        """Anonymous + shared bytes, each page counted once. The kernel can't take them back.

        From the cgroup, else from PSS or RSS. None if unknown.
        """
        if self.rss_anon_bytes is None:
            return None  # a killed tree, whose cgroup still counts pages that are being freed
        # RSS serves a single process and kernels without PSS. Where PSS is needed but this reading
        # has none, the result is unknown.
        source = "pss"
        if self.cgroup_anon_bytes is not None:
            source = "cgroup"
        elif (self.num_processes or 1) <= 1 or not _gives_pss():
            source = "rss"
        anon = getattr(self, f"{source}_anon_bytes")
        shmem = getattr(self, f"{source}_shmem_bytes") or 0  # old kernels do not count it
        return None if anon is None else anon + shmem

    @property
    def rss_sum_bytes(self) -> int:
        """RssAnon + RssShmem of all processes, which counts a shared page once per process."""
        return (self.rss_anon_bytes or 0) + (self.rss_shmem_bytes or 0)


@functools.cache
def _gives_pss() -> bool:  # Linux splits PSS into parts since 5.2
    return read_sums([os.getpid()], "smaps_rollup")[0] is not None


# Fields of two files in /proc/PID. `status` takes 40 us. For `smaps_rollup` the kernel walks the
# page tables, which takes about 10 ms per resident GB.
_FIELDS = {
    "status": (b"RssAnon", b"RssFile", b"RssShmem"),
    "smaps_rollup": (b"Pss_Anon", b"Pss_File", b"Pss_Shmem"),
}


def read_sums(pids: Iterable[int], file: str) -> list[int | None]:
    """Return the sums over processes of the `_FIELDS` of a file in /proc/PID, in bytes; None for a
    sum that this kernel does not give."""
    names = _FIELDS[file]
    rows = [read_fields(f"/proc/{pid}/{file}", names, 1024) for pid in pids]  # field -> bytes
    living = [row for row in rows if row]  # an ended process has no file, or no field in it
    present = {name for name in names if living and all(name in row for row in living)}
    return [sum(row[name] for row in living) if name in present else None for name in names]


def list_processes(pids: Iterable[int]) -> str:
    """Return the three largest processes (RssAnon + RssShmem): "python 4711 with 1.20 GB, ..."."""
    rows = []  # (bytes, pid, name)
    for pid in pids:
        sizes = read_fields(f"/proc/{pid}/status", (b"RssAnon", b"RssShmem"), 1024)
        name = read_whole(f"/proc/{pid}/comm")
        if sizes and name:  # else it has ended
            rows.append((sum(sizes.values()), pid, os.fsdecode(name).strip()))
    largest = sorted(rows, reverse=True)[:3]
    return ", ".join(f"{name} {pid} with {format_bytes(size)}" for size, pid, name in largest)


def own_memory() -> tuple[int, int, int]:
    """Return this process's RssAnon + RssShmem, its RSS, and its highest RSS since the last reset
    of the kernel's peak, in bytes."""
    names = (b"RssAnon", b"RssShmem", b"VmRSS", b"VmHWM")
    values = read_fields("/proc/self/status", names, 1024) or {}
    anon, shmem, rss, peak = (values.get(name, 0) for name in names)
    return anon + shmem, rss, max(peak, rss)  # peak: 0 if the kernel has no VmHWM


def read_memory(tree: Tree, *, cgroup: Cgroup | None = None, pss: bool = False) -> Reading:
    """Read the memory of a process tree, and of `cgroup` if there is one."""
    # Each line reads three sizes: anonymous, file, shared. The cgroup first: a process that has an
    # RSS afterwards was not being killed meanwhile; `held_bytes` discards a reading without an RSS.
    counted = cgroup.parts() if cgroup else ()
    pids = tree.pids()
    rss = read_sums(pids, "status")
    shares: list[int | None] = read_sums(pids, "smaps_rollup") if pss else [None] * 3
    return Reading(len(pids), *rss, *shares, *counted)  # in the order of its fields


def malloc_trim() -> None:
    """Return free heap pages to the kernel (glibc)."""
    ctypes.CDLL(None).malloc_trim(0)


def release_memory() -> dict[str, int | None]:
    """Free unused memory; return the bytes freed by each step, None for an impossible step.

    `last_error` drops the traceback of the last error, which keeps all variables of a failed cell;
    `%debug` has none afterwards. This step, `gc` and `malloc_trim` are measured by this process's
    RssAnon + RssShmem, the others by reserved GPU memory.
    """
    freed: dict[str, int | None] = {}
    steps: dict[str, Callable[[], object]] = {
        "gc": gc.collect,
        "last_error": _drop_last_error,
        "malloc_trim": malloc_trim,
    }
    for name, step in steps.items():
        held_bytes = own_memory()[0]
        step()
        freed[name] = held_bytes - own_memory()[0]
    torch = cuda_in_use()
    # Wait for queued kernels: `empty_cache` could not free their blocks.
    for name in ("synchronize", "empty_cache"):
        freed[name] = None  # impossible without CUDA
        if torch:
            reserved = torch.cuda.memory_reserved()  # bytes, those of torch's cache included
            getattr(torch.cuda, name)()
            freed[name] = reserved - torch.cuda.memory_reserved()
    return freed


def _drop_last_error() -> None:
    error = getattr(sys, "last_value", None)  # set by Python and IPython for an uncaught error
    if error is None:
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        setattr(sys, name, None)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.tb = None  # for `%debug`
    errors = [error]  # and all errors that led to it; each keeps the variables of its frames
    for error in errors:  # other references to an error, such as IPython's, stay valid
        error.__traceback__ = None
        earlier = (error.__cause__, error.__context__)
        errors += [e for e in earlier if e is not None and all(e is not known for known in errors)]
    gc.collect()  # frames and their variables often form cycles
