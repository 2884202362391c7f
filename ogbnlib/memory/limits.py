"""Four ways to hold a process tree under a real memory limit, the strictest available first.

| `limit_by` | who kills | counts page cache | needs |
|---|---|---|---|
| `cgroup v2`, `cgroup v1` | the kernel | yes, and reclaims it first | a writable memory cgroup (root, or delegated) |
| `systemd-run` | the kernel | yes | a systemd user session with the memory controller delegated |
| `watchdog` | this library, SIGKILL | no: anonymous + shared only | nothing |

RLIMIT_AS is not among them: it counts mappings instead of memory and answers with MemoryError instead of a kill.

The kernel's out-of-memory killer picks one process. Where that is a DataLoader worker, its parent would go on to die of
a confusing error, so the whole tree is ended with it, as `memory.oom.group` does under v2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import InputError, format_bytes
from .cgroup import Cgroup, find_cgroup, lineage
from .reading import Reading, process_tree, read_memory

KINDS = ("cgroup v2", "cgroup v1", "systemd-run", "watchdog")


def kill_tree(pid: int) -> None:
    """SIGKILL `pid`, its descendants, and what its process group still holds after losing its parent.

    Descendants are found first: they lose their parent when it dies. `pid` must not have been waited for, or its number
    might name another group by now.
    """
    for member in process_tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    if pid != os.getpgid(0):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


class Limit:
    """A limit around one process tree. `limit_bytes=None` records without limiting.

    Use: `argv = limit.command(argv)`, start it, set `pid`, give each reading to `limit.check`, which may have it taken
    anew, and the exit status to `limit.ended`, and `close()` when the tree is gone.

    Attributes:
        cgroup: The tree's own, and nobody else's.
        killed_by: None, "kernel" or "watchdog".
        outer: After a kill by the kernel, the cgroup around this one whose limit was met, where it was not this one's.
    """

    name = "none"
    cgroup: Cgroup | None = None
    killed_by: str | None = None
    outer: Cgroup | None = None
    _counts_others = False  # whether `oom_kills` counts other processes than the tree's too

    def __init__(self, limit_bytes: int | None):
        self.limit_bytes = limit_bytes
        self.pid: int | None = None
        self._limits: list[tuple[Cgroup, int]] = []

    def command(self, argv: list[str]) -> list[str]:
        return argv

    def check(self, reading: Reading) -> Reading | None:
        """Look at one reading; ends the tree where a limit was passed or one of its members was killed.

        Returns:
            The reading to record, the deciding one; None of a tree that was ended before: what is left is no measure.
        """
        return None if self.killed_by else reading

    def longest_pause_s(self) -> float:
        """Seconds that may pass from one sample to the next."""
        return 0.25

    def oom_kills(self) -> int | None:
        return self.cgroup.oom_kills() if self.cgroup else None

    def ended(self, status: int, by_sigkill: bool) -> None:
        """Tell an out-of-memory kill that no reading came upon: the tree ended too soon after it.

        Args:
            status: Of the tree's first process. One that ends with 0 hides the kill of a child, which counts as well.
            by_sigkill: Whether a process of the tree is known to have died of SIGKILL. Where the counter counts others
                too it proves nothing without that.
        """
        if self.killed_by is None and self.oom_kills() and ((status and by_sigkill) or not self._counts_others):
            self._blame_kernel()

    def evidence(self) -> dict[str, Any]:
        """What it knows of the end, for result.json.

        `kills_around`: how many processes the kernel killed meanwhile in a cgroup that counts others than the tree too.
        """
        kills, around = self.oom_kills(), 0
        if self._counts_others and self.killed_by != "kernel":
            kills, around = None, kills or 0
        outer = self.outer and {"limit_bytes": self.outer.limit_bytes(), "cgroup": str(self.outer.path)}
        return {"killed_by": self.killed_by, "oom_kills": kills, "kills_around": around, "outer_limit": outer}

    def _watch_limits(self, cgroups: Iterable[Cgroup]) -> None:
        self._limits = [(group, group.ooms()) for group in cgroups if group.limit_bytes() is not None]

    def _blame_kernel(self) -> None:
        self.killed_by = "kernel"
        if self.cgroup is not None and not self.cgroup.path.exists():
            return  # and whether it was met, with it
        # v2 counts it for the cgroups around the one whose limit was met too: the nearest is the one.
        met = next((group for group, before in self._limits if group.met_its_limit(before)), None)
        if met is not None and (self.cgroup is None or met.path != self.cgroup.path):
            self.outer = met

    def _follow(self, kills: int | None) -> None:
        """End the whole tree once the kernel has killed one of its members."""
        if kills and self.killed_by is None and self.pid is not None:
            self._blame_kernel()
            kill_tree(self.pid)

    def close(self) -> None:
        """Free what the limit holds; a cgroup ends whatever process is left in it."""


def _remove_dead(parent: Path) -> None:
    """Remove the cgroups of runs whose parent was killed; rmdir(2) refuses one that has a process in it."""
    for path in parent.glob("ogbnlib-[0-9]*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                path.rmdir()


class CgroupLimit(Limit):
    """A child directory in a memory cgroup that is ours to write, with `limit_bytes` and no swap."""

    def __init__(self, limit_bytes: int | None, parent: Cgroup, mount: Path):
        super().__init__(limit_bytes)
        self.name = f"cgroup v{parent.version}"
        _remove_dead(parent.path)
        path = parent.path / f"ogbnlib-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        self.cgroup = Cgroup(path, parent.version)
        try:
            self._set_limits(path, parent.version)
        except OSError:
            path.rmdir()
            raise
        self._watch_limits(lineage(self.cgroup, mount))

    def _set_limits(self, path: Path, version: int) -> None:
        if self.limit_bytes is None:
            return
        if version == 1:
            (path / "memory.limit_in_bytes").write_text(str(self.limit_bytes))
            if (path / "memory.memsw.limit_in_bytes").exists():  # memory + swap: swap would only delay the kill
                (path / "memory.memsw.limit_in_bytes").write_text(str(self.limit_bytes))
        else:
            (path / "memory.max").write_text(str(self.limit_bytes))
            if (path / "memory.swap.max").exists():
                (path / "memory.swap.max").write_text("0")
            (path / "memory.oom.group").write_text("1")

    def command(self, argv: list[str]) -> list[str]:
        # The shell moves itself in before it becomes the program, so that every byte is charged here. A preexec_fn
        # would do the same but is unsafe in a process with threads, which a Jupyter kernel is.
        assert self.cgroup is not None
        enter = 'echo $$ > "$1" && shift && exec "$@"'
        return ["/bin/sh", "-c", enter, "watch", str(self.cgroup.path / "cgroup.procs"), *argv]

    def check(self, reading: Reading) -> Reading | None:
        self._follow(self.oom_kills())
        return super().check(reading)

    def close(self) -> None:
        assert self.cgroup is not None
        for _ in range(100):  # a dying process leaves its cgroup within milliseconds; large ones take longer
            for pid in self.cgroup.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                self.cgroup.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)
        print(f"warning: {self.cgroup.path} still holds processes and stays behind", file=sys.stderr)


class SystemdLimit(Limit):
    """`systemd-run --user --scope`: a cgroup made by the user's own systemd."""

    name = "systemd-run"
    _counts_others = True  # once the scope is gone
    _seen_kills: int | None = None
    _slice: tuple[Cgroup, int] | None = None  # with its kills before

    def command(self, argv: list[str]) -> list[str]:
        limits = []
        if self.limit_bytes is not None:
            limits = ["-p", f"MemoryMax={self.limit_bytes}", "-p", "MemorySwapMax=0"]
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", *limits, "--", *argv]

    def check(self, reading: Reading) -> Reading | None:
        # The scope exists only once systemd-run has moved the process: look until its cgroup is not ours any more.
        if self.cgroup is None and self.pid is not None and (found := find_cgroup(self.pid)):
            own = find_cgroup()
            if own is None or found[0] != own[0]:
                self.cgroup = found[0]
                self._watch_limits(lineage(*found))
                around = Cgroup(found[0].path.parent, found[0].version)
                self._slice = around, around.oom_kills() or 0
        if self.cgroup is not None and (kills := self.cgroup.oom_kills()) is not None:
            self._seen_kills = kills  # the scope vanishes with its last process, so the count is kept as it is seen
            self._follow(kills)
        return super().check(reading)

    def oom_kills(self) -> int | None:
        # The scope, and its counter, are gone with its last process; v2 counts a child's kills in its parent too, as it
        # does those of all its other children.
        counts = [] if self._seen_kills is None else [self._seen_kills]
        if self._slice and (after := self._slice[0].oom_kills()) is not None:
            counts.append(after - self._slice[1])
        return max(counts, default=None)


class Watchdog(Limit):
    """SIGKILL from this process once the tree's anonymous + shared memory passes the limit; none without a limit.

    The sum of RSS is compared first because it is cheap; as it counts pages that forked workers share once per worker,
    PSS decides, which the kernel walks page tables for. So PSS is read at most 5 % of the time, or once the sum has
    grown by half of what was left. Two readings in a row must pass the limit, each of the processes there are by then:
    workers that end in between leave their pages to nobody.

    Between two samples (20 ms) the tree can overshoot: a `memset` fills about 100 MB in that time.

    Args:
        around: The cgroup that this process is in, a Slurm job's for one, and its mount. Reading its kill counter needs
            no rights; it counts whoever else is in it too.
    """

    name = "watchdog"
    _counts_others = True
    _next_s = 0.0
    _next_sum = 0
    _left_bytes = 2**60

    def __init__(self, limit_bytes: int | None, around: tuple[Cgroup, Path] | None = None):
        super().__init__(limit_bytes)
        self.around = around[0] if around else None
        self._kills_before = (self.around and self.around.oom_kills()) or 0
        self._watch_limits(lineage(*around) if around else ())

    def oom_kills(self) -> int | None:
        after = self.around.oom_kills() if self.around else None
        return None if after is None else after - self._kills_before

    def longest_pause_s(self) -> float:
        """No longer than it takes to fill what is left, at 20 GB/s, but 20 ms."""
        return min(super().longest_pause_s(), max(0.02, self._left_bytes / (20 * 2**30)))

    def check(self, reading: Reading) -> Reading | None:
        if self.limit_bytes is None or self.killed_by or self.pid is None:
            return super().check(reading)
        summed = (reading.rss_anon_bytes or 0) + (reading.rss_shmem_bytes or 0)
        self._left_bytes = self.limit_bytes - summed
        begin_s = time.monotonic()
        if summed <= self.limit_bytes or (begin_s < self._next_s and summed < self._next_sum):
            return reading
        for _ in range(2):
            reading = read_memory(self.pid)
            if reading.held_bytes is None:  # several processes
                reading = read_memory(self.pid, pss=True)
            if (held := reading.held_bytes or 0) <= self.limit_bytes:
                self._next_s = begin_s + 20 * (time.monotonic() - begin_s)
                self._next_sum = summed + (self.limit_bytes - held) // 2
                return reading
        self.killed_by = "watchdog"
        kill_tree(self.pid)
        return reading


def _try_cgroup(limit_bytes: int | None, version: int) -> CgroupLimit | str:
    """The limit, or why it can't be had.

    Under v2 a cgroup with processes of its own can't hand the memory controller to children, so its ancestors are
    tried too, but never past one that has a limit: a job must not escape its own allocation.
    """
    found = find_cgroup()
    if not found or found[0].version != version:
        return f"no memory controller under cgroup v{version}"
    reasons = []
    for parent in lineage(*found):
        try:
            if version == 2:
                control = parent.path / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    control.write_text("+memory")
            return CgroupLimit(limit_bytes, parent, found[1])
        except OSError as error:
            reasons.append(f"{parent.path}: {error.strerror}")
        if version == 1 or parent.limit_bytes() is not None:
            break
    return "; ".join(reasons)


def _try_systemd(limit_bytes: int | None) -> SystemdLimit | str:
    if shutil.which("systemd-run") is None:
        return "systemd-run is not installed"
    probe = SystemdLimit(2**30).command(["true"])
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return "systemd-run did not answer within 10 s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["systemd-run failed"])[-1]
    return SystemdLimit(limit_bytes)


def make_limit(limit_bytes: int | None, limit_by: str = "auto") -> tuple[Limit, list[str]]:
    """The strictest limit that can be had here, and why each stricter one could not.

    Args:
        limit_bytes: The limit, or None to record without one (a cgroup still gives the kernel's own peak).
        limit_by: "auto" or one of `KINDS`, which is then the only one tried.

    Raises:
        InputError: when the named kind is unknown or can't be used here, with the reason.
    """
    if limit_by != "auto" and limit_by not in KINDS:
        raise InputError(f"limit_by: expected auto or one of {', '.join(KINDS)}, got {limit_by!r}")
    refused: list[str] = []
    if limit_bytes is None and limit_by == "auto" and "SLURM_JOB_ID" in os.environ and (found := find_cgroup()):
        # A cgroup below the job's would hide an out-of-memory kill from Slurm, which under v1 counts those in its own
        # only, and the job would not be OUT_OF_MEMORY.
        return Watchdog(None, found), refused
    for name in KINDS if limit_by == "auto" else (limit_by,):
        answer: Limit | str
        if name == "watchdog":
            answer = Watchdog(limit_bytes, find_cgroup())
        elif name == "systemd-run":
            answer = _try_systemd(limit_bytes)
        else:
            answer = _try_cgroup(limit_bytes, int(name[-1]))
        if isinstance(answer, Limit):
            return answer, refused
        refused.append(f"{name}: {answer}")
    raise InputError(
        f"limit_by: {refused[0]}; a limit of {format_bytes(limit_bytes)} can't be set with it here, use limit_by='auto'"
    )
