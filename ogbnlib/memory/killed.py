"""The limit that caused an out-of-memory kill, and the ways to raise it."""

from dataclasses import dataclass

from ..errors import GB, MB
from .cgroup import effective_limit

# Things that a loop often keeps in memory without need.
KEPT = "a loss that is added up without .item(), outputs or batches in a list"


@dataclass(frozen=True)
class KilledBy:
    """The limit that a run reached: its own, one of a cgroup around it, or the machine's memory."""

    limit_bytes: int | None = None  # None for the machine
    cgroup: str = ""  # the cgroup around the run that has the limit; "" for the run's own limit
    others_bytes: int = 0  # memory of other processes below the same limit

    @property
    def left_bytes(self) -> int:
        """Bytes that the limit leaves for the run."""
        if self.limit_bytes is None:
            import psutil

            return min(effective_limit()[0], psutil.virtual_memory().available)
        return max(0, self.limit_bytes - self.others_bytes)

    def raised(self, need_bytes: int) -> str:
        """Return advice, as text, on how to get `need_bytes` for the run."""
        total = need_bytes + self.others_bytes
        # rounded up, so that a limit set to this text is enough
        size = f"{-(-total // GB)} GB" if total >= 10 * GB else f"{-(-total // MB)} MB"
        if self.cgroup:
            return f"give the cgroup {self.cgroup} {size} (a Slurm job by --mem)"
        if self.limit_bytes is None:
            return f"use a machine, or a job, with {size} of memory"
        return f"raise memory_limit to {size}"
