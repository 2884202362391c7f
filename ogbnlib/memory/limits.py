"""Four ways to put a process tree under a real memory limit, strictest first.

| `limit_by` | killer | counts page cache | needs |
|---|---|---|---|
| `cgroup v2`, `cgroup v1` | kernel | yes, reclaimed first | a writable cgroup (root or delegated) |
| `systemd-run` | kernel | yes | a systemd user session with the memory controller delegated |
| `watchdog` | this library, SIGKILL | no: anonymous + shared only | nothing |

RLIMIT_AS is not one of them: it counts mappings instead of memory, and leads to a MemoryError
instead of a kill.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from typing import Any

from ..errors import GB, InputError, format_bytes
from .cgroup import Cgroup, find_cgroup
from .reading import Reading, read_memory
from .tree import Tree

KINDS = ("cgroup v2", "cgroup v1", "systemd-run", "watchdog")
# Under `ulimit -v`. Imports map 1.1 GB with 2 processors, and more with more; below that, OpenBLAS
# and torch hang or end in tracebacks.
_ADDRESS_BYTES = 2 * GB


def check_addresses() -> None:
    """Refuse a `ulimit -v` under which torch or numba can't be imported."""
    address_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= address_bytes < _ADDRESS_BYTES:  # -1 is no limit
        raise InputError(
            f"ulimit -v: expected at least {format_bytes(_ADDRESS_BYTES)} of addresses for Python "
            f"and torch, got {format_bytes(address_bytes)}; start this from a shell without it"
        )


class Limit:
    """Memory limit of one process tree; `limit_bytes=None` records without limiting.

    Start `limit.command(argv)`, set `tree`, and pass each reading to `check`. Call `ended` after
    the command's end, and `close` when the tree is gone.
    """

    name = "none"
    longest_pause_s = 0.25  # between two readings
    cgroup: Cgroup | None = None  # the tree's own; a watchdog's tree has none
    killed_by: str | None = None  # "kernel" or "watchdog"; None without a kill
    _outer: Cgroup | None = None  # the outer cgroup whose limit caused the kernel's kill
    # a cgroup around the tree; its kill counter is used although it includes other processes
    _around: Cgroup | None = None
    _kills_before = 0  # out-of-memory kills counted before the tree was watched

    def __init__(self, limit_bytes: int | None):
        self.limit_bytes = limit_bytes
        self.tree: Tree | None = None  # set by the caller after the start of the command
        # cgroups whose limits apply to the tree, innermost first -> their events until its start
        self._events_before: dict[Cgroup, dict[str, int]] = {}

    def command(self, argv: list[str]) -> list[str]:
        return argv  # subclasses put words before it, which apply their limit

    def check(self, reading: Reading) -> Reading | None:
        """Kill the tree if it passed the limit or if the kernel killed one of its processes.

        Return the reading, or None after a kill.
        """
        # The kernel picks one process. If that is a DataLoader worker, its parent would soon die of
        # a confusing error. So the whole tree is killed, as by `memory.oom.group` under v2.
        if self.tree and not self.killed_by and self.cgroup and self.cgroup.count("oom_kill"):
            self._blame_kernel()
            self.tree.kill()
        return None if self.killed_by else reading

    def stalled_s(self) -> float | None:
        """Return the seconds so far in which a process of the tree, or else of the v2 cgroup around
        it, waited for memory."""
        cgroup = self.cgroup or self._around
        return cgroup.stalled_s() if cgroup else None

    def oom_kills(self) -> int | None:
        # `_around` first: the counter of systemd's scope vanishes with the scope
        counter = self._around or self.cgroup
        kills = counter.count("oom_kill") if counter else None
        return None if kills is None else kills - self._kills_before

    def ended(self, by_sigkill: bool) -> None:
        """Detect an out-of-memory kill that ended the tree before the next reading.

        `by_sigkill`: a SIGKILL that this process did not send ended the command or its worker.
        """
        # The first process can exit with status 0 although a child was killed. A counter that
        # includes other processes proves nothing without a SIGKILL in the tree.
        if self.killed_by is None and (by_sigkill or not self._around) and self.oom_kills():
            self._blame_kernel()

    def evidence(self) -> dict[str, Any]:
        """Return facts about the end, see `runs.cause.Facts`; call it after `ended`."""
        kills = self.oom_kills()
        # without proof that the kernel killed in the tree, kills in `_around` hit other processes
        of_others = self._around and self.killed_by != "kernel"
        outer = None
        if self._outer is not None:
            # The tree has ended, so this memory is that of other processes, once Linux has freed the
            # tree's pages.
            time.sleep(1)
            anon, _, shmem = self._outer.parts()
            outer = {
                "limit_bytes": self._outer.size("limit"),
                "cgroup": str(self._outer.path),
                "others_bytes": (anon or 0) + (shmem or 0),
            }
        slowdowns = {  # by a `memory.high`, since the tree's start
            group: (group.count("high") or 0) - before["high"]
            for group, before in self._events_before.items()
        }
        return {
            "killed_by": self.killed_by,
            "oom_kills": None if of_others else kills,
            "kills_around": (kills or 0) if of_others else 0,
            "outer_limit": outer,
            "throttled": [
                {"cgroup": str(group.path), "high_bytes": group.size("high"), "times": times}
                for group, times in slowdowns.items()
                if times > 0
            ],
        }

    def _count_from_now(self, innermost: Cgroup, around: Cgroup | None = None) -> None:
        """Store the event counts of `innermost` and of its ancestors, to be subtracted later."""
        self._events_before = {
            group: {"oom": group.count("oom") or 0, "high": group.count("high") or 0}
            for group in innermost.lineage()
        }
        self._around = around  # before `oom_kills`, which counts there
        self._kills_before = self.oom_kills() or 0  # which subtracts this, 0 so far

    def _blame_kernel(self) -> None:  # also sets `_outer`, if the limit is not the tree's own
        self.killed_by = "kernel"
        if self.cgroup is not None and not self.cgroup.path.exists():
            return  # its counters are gone
        # v2 also counts an event in all cgroups above, so the nearest cgroup with a new event is
        # the one whose limit was reached.
        counts = self._events_before.items()
        met = next((group for group, before in counts if group.met_its_limit(before["oom"])), None)
        if met != self.cgroup:
            self._outer = met  # None if no limit is known to have been reached

    def close(self) -> None:
        """Release the limit's resources."""


class _CgroupLimit(Limit):
    """Limit by a new child of a writable memory cgroup, with `limit_bytes` and no swap."""

    cgroup: Cgroup

    def __init__(self, limit_bytes: int | None, parent: Cgroup):
        super().__init__(limit_bytes)
        self.name = f"cgroup v{parent.version}"
        path = parent.path / f"ogbnlib-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        self.cgroup = replace(parent, path=path)
        # Swap would only delay the kill. The order counts: v1 refuses a limit of memory + swap
        # (memsw) below that of memory.
        values = {"memory.max": limit_bytes, "memory.swap.max": 0, "memory.oom.group": 1}
        if parent.version == 1:
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            values = dict.fromkeys(names, limit_bytes)
        try:
            for name, value in values.items():
                # without swap accounting the swap files, "sw" in both versions, are absent
                if limit_bytes is not None and ("sw" not in name or (path / name).exists()):
                    (path / name).write_text(str(value))
        except OSError:
            path.rmdir()
            raise
        self._count_from_now(self.cgroup)

    def command(self, argv: list[str]) -> list[str]:
        # The shell enters the cgroup before it becomes the program, so that every byte is charged
        # there. A preexec_fn would do the same but is unsafe in a process with threads, such as a
        # Jupyter kernel.
        enter = 'echo $$ > "$1" && shift && exec "$@"'  # $0 is "watch", $1 the file cgroup.procs
        return ["/bin/sh", "-c", enter, "watch", str(self.cgroup.path / "cgroup.procs"), *argv]

    def close(self) -> None:
        # A dying process leaves its cgroup within milliseconds, or later if it is large.
        for _ in range(100):  # with the pause below, at most 5 s
            for pid in self.cgroup.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.cgroup.path.rmdir()
            if not self.cgroup.path.exists():
                return
            time.sleep(0.05)
        print(
            f"warning: {self.cgroup.path} could not be removed, processes are left in it",
            file=sys.stderr,
        )


class _SystemdLimit(Limit):
    """Limit by a scope of the user's own systemd (`systemd-run --user --scope`)."""

    name = "systemd-run"

    def command(self, argv: list[str]) -> list[str]:
        # --collect: systemd unloads the scope even after a failure, such as a kill
        start = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
        if self.limit_bytes:  # without one, the scope only counts memory
            start += ["-p", f"MemoryMax={self.limit_bytes}", "-p", "MemorySwapMax=0"]
        return [*start, "--", *argv]

    def check(self, reading: Reading) -> Reading | None:
        # systemd-run enters the scope some time after its start. Until then it is in the cgroup of
        # this process.
        if self.cgroup is None and self.tree:
            scope = find_cgroup(self.tree.pid)
            if scope is not None and scope != find_cgroup():
                self.cgroup = scope
                # The scope and its counter vanish with the scope's last process. v2 counts the
                # scope's kills in the parent cgroup too.
                self._count_from_now(scope, around=replace(scope, path=scope.path.parent))
        return super().check(reading)


class Watchdog(Limit):
    """SIGKILL from this process once the tree's anonymous + shared memory passes the limit.

    The sum of RSS is compared first because it is cheap, but it counts pages shared by forked
    workers once per worker. So PSS decides. Reading PSS walks the page tables, so it takes at most
    5 % of the time, unless the sum has grown by half of the memory left. Between two samples
    (20 ms) the tree can overshoot: a `memset` fills about 100 MB in that time. The kill counter of
    `around`, this process's cgroup, includes other processes.
    """

    name = "watchdog"
    _next_pss_s = 0.0  # PSS is not read before this time, in `time.monotonic()` seconds,
    _next_pss_bytes = 0  # unless the sum of RSS has reached this size

    def __init__(self, limit_bytes: int | None, around: Cgroup | None = None):
        super().__init__(limit_bytes)
        if around is not None:
            self._count_from_now(around, around)  # the tree has no cgroup of its own

    def check(self, reading: Reading) -> Reading | None:
        if self.limit_bytes is None or self.killed_by or self.tree is None:
            return super().check(reading)
        sum_bytes = reading.rss_sum_bytes  # never below the memory in use
        # The time to fill the memory left at 20 GB/s, at least 20 ms.
        fill_s = (self.limit_bytes - sum_bytes) / (20 * 2**30)
        self.longest_pause_s = min(Limit.longest_pause_s, max(0.02, fill_s))
        begin_s = time.monotonic()
        is_too_soon = begin_s < self._next_pss_s and sum_bytes < self._next_pss_bytes
        if sum_bytes <= self.limit_bytes or is_too_soon:
            return reading
        # Two readings in a row must pass the limit: the first may count a worker that has ended.
        for _ in range(2):
            reading = read_memory(self.tree)
            if reading.held_bytes is None:  # several processes: only PSS tells
                reading = read_memory(self.tree, pss=True)
            in_use = reading.held_bytes or 0
            if in_use <= self.limit_bytes:
                self._next_pss_s = begin_s + 20 * (time.monotonic() - begin_s)  # 5 % of the time
                self._next_pss_bytes = sum_bytes + (self.limit_bytes - in_use) // 2
                return reading
        self.killed_by = "watchdog"
        self.tree.kill()
        return reading  # so that the record's peak shows how far memory passed the limit


def _try_cgroup(limit_bytes: int | None, name: str) -> Limit | str:  # or why it is impossible
    # Under v2 a cgroup that has processes can't pass the memory controller on to children, so its
    # ancestors are tried too, up to the first one with a limit: a job must not escape its own
    # allocation.
    own = find_cgroup()
    if own is None or name != f"cgroup v{own.version}":
        return f"no memory controller under {name}"
    reasons = []
    for parent in own.lineage():  # the own cgroup first
        try:
            if name == "cgroup v2":  # whose children get the memory controller only from `parent`
                # Moving from one child to another takes the right to write to `parent`.
                os.close(os.open(parent.path / "cgroup.procs", os.O_WRONLY))
                control = parent.path / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    control.write_text("+memory")
            return _CgroupLimit(limit_bytes, parent)
        except OSError as error:
            reasons.append(f"{parent.path}: {error.strerror}")
        if name == "cgroup v1" or parent.has_limit:  # v1 has no such rule
            break
    return "; ".join(reasons)


def _try_systemd(limit_bytes: int | None) -> Limit | str:  # or why it is impossible
    if shutil.which("systemd-run") is None:
        return "systemd-run is not installed"
    outer = _left_by_a_scope()
    if outer:
        return f"its scope would leave the limit of {outer.path}"
    trial = _SystemdLimit(2**30).command(["true"])  # with 1 GB
    try:
        done = subprocess.run(
            trial, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return "systemd-run did not answer within 10 s"
    if done.returncode != 0:
        return (done.stderr.strip() or "systemd-run failed").splitlines()[-1]
    return _SystemdLimit(limit_bytes)


def _left_by_a_scope() -> Cgroup | None:
    """Return the nearest limited cgroup that contains this process but not the user's scopes."""
    own = find_cgroup()
    # where systemd puts the scopes that `systemd-run --user` starts
    scopes = f"user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service/app.slice"
    for group in own.lineage() if own else ():
        if group.has_limit and not (group.mount / scopes).is_relative_to(group.path):
            return group
    return None


def make_limit(limit_bytes: int | None, limit_by: str = "auto") -> tuple[Limit, list[str]]:
    """Return the strictest possible limit, and the reason why each stricter one is impossible.

    Without `limit_bytes`, a cgroup is still used for the kernel's own count of the peak.
    `limit_by` is "auto" or one of `KINDS`.
    """
    if limit_by != "auto" and limit_by not in KINDS:
        raise InputError(f"limit_by: expected auto or one of {', '.join(KINDS)}, got {limit_by!r}")
    around = find_cgroup()
    if limit_bytes is None and limit_by == "auto" and "SLURM_JOB_ID" in os.environ and around:
        # A cgroup below the job's would hide an out-of-memory kill from Slurm: under v1, Slurm
        # counts only kills in the job's cgroup, and the state would not become OUT_OF_MEMORY.
        limit_by = "watchdog"
    refused: list[str] = []
    for name in KINDS if limit_by == "auto" else [limit_by]:
        if name == "watchdog":
            return Watchdog(limit_bytes, around), refused
        limit = _try_systemd(limit_bytes) if "systemd" in name else _try_cgroup(limit_bytes, name)
        if isinstance(limit, Limit):
            return limit, refused
        refused.append(f"{name}: {limit}")  # `limit` is the reason
    raise InputError(  # `limit_by` names a kind that is impossible; a watchdog always is possible
        f"limit_by: {refused[0]}; a limit of {format_bytes(limit_bytes)} is impossible with it "
        "here, use limit_by='auto'"
    )
