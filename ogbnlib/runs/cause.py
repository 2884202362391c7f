"""End of a run or a Slurm job: a cause from a closed list, facts, and actions.

`codes` and `texts` recognise a cause, `diagnosis` and `slurm` add the facts of a run or a job, and
`render` alone turns them into sentences.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import FiniteFloat

from ..memory.growth import Growth
from ..memory.killed import KilledBy

Cause: TypeAlias = Literal[
    "finished",
    "not started",
    "at work",
    "not finished",
    "no result",
    "never started",
    "bad input",
    "error",
    "diverged",
    "stopped at a checkpoint",
    "interrupted",
    "out of memory",
    "memory limit met, cause unknown",
    "out of GPU memory",
    "SIGKILL, cause unknown",
    "SIGTERM",
    "SIGHUP",
    "SIGUSR1",
    "worker died, cause unknown",
    "lost another rank, cause unknown",
    "time limit",
    "preempted",
    "cancelled",
    "node failure",
    "pending",
    "running",
    "unknown",
]
# Causes that an exit code alone leaves open: evidence in the output decides.
OPEN_CAUSES = ("error", "SIGKILL, cause unknown", "never started")


UNKNOWN: tuple[object, ...] = (None, "", {}, [], ())  # values of facts and arguments
_Number: TypeAlias = int | FiniteFloat


@dataclass(frozen=True)
class Facts:
    """Known facts of an end, as in result.json. Unknown values are in `UNKNOWN`, sizes in
    bytes."""

    # how the end was recognised: an exit code, a state of Slurm, or the name of a line in `texts`
    sign: str = ""
    who: str = ""  # the process that ended, unless it is the command itself, such as "rank 1"
    line: str = ""  # the line of a text that proves the cause
    sizes: Mapping[str, _Number] = field(default_factory=dict)  # sizes and counts for the sentences
    exit_code: int | None = None  # 128 + N after signal N

    # of a run
    duration_s: _Number | None = None
    phase: str | None = None  # the innermost phase that was open, or that an exception left
    memory_limit_bytes: int | None = None
    limit_by: str | None = None  # kind of the limit, see `limits.KINDS`
    killed_by: str | None = None  # "kernel" or "watchdog"
    # The kernel's counter. With memory.oom.group, which a limit under cgroup v2 sets, the first
    # killed process counts twice, unless it has ended before the others are killed.
    oom_kills: int | None = None
    kills_around: int | None = None  # in a cgroup that other processes share
    outer_limit: KilledBy | None = None  # of a cgroup around the run, if it met that one
    held_bytes: _Number | None = None  # anonymous + shared memory in the last sample
    # the kernel's counter, with page cache, else the largest sample, by `peak_source`
    peak_bytes: _Number | None = None
    peak_source: str | None = None
    sampled_peaks_bytes: Mapping[str, _Number] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)  # named parts of memory in use
    processes: str = ""  # the three largest, as of the last growth of a command's memory
    last_output: str | None = None  # the line of the output that tells most about the end
    unwritable: str | None = None  # why samples or output could not be recorded
    damage: str = ""  # the data set's damaged file, looked for after a SIGBUS
    rank: int | None = None  # the first rank to end
    rank_exit_code: int | None = None
    growth: Growth | None = None
    stalled_s: _Number | None = None  # time in which a process waited for memory (PSI)
    # cgroups whose `memory.high` slowed the run down: `cgroup`, `high_bytes` and `times`
    throttled: list[dict[str, Any]] = field(default_factory=list)

    # of a Slurm job
    job: Mapping[str, str] = field(default_factory=dict)  # by sacct's names
    run_dir: str = ""
    log_line: str = ""  # the line of its log that tells most about the end
    unasked: str = ""  # why neither sacct nor scontrol answered

    @property
    def held_peak_bytes(self) -> int | None:
        """Peak of anonymous + shared memory in any sample."""
        peak = self.sampled_peaks_bytes.get("held_bytes")
        return None if peak is None else int(peak)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in UNKNOWN}
