"""The limit that an out-of-memory kill was for, and the ways to raise it."""

from dataclasses import dataclass

from ..errors import GB, MB
from .cgroup import effective_limit

# Ways to keep memory in a loop without a need.
KEPT = "a loss that is added up without .item(), outputs or batches in a list"


@dataclass(frozen=True)
class KilledBy:
    """The limit that a run met: its own, that of a cgroup around it, or the machine's memory."""

    limit_bytes: int | None = None  # None for the machine
    cgroup: str = ""  # of a limit around the run's own
    others_bytes: int = 0  # memory of other processes below the same limit

    @property
    def left_bytes(self) -> int:
        """Bytes for the run."""
        if self.limit_bytes is None:
            import psutil

            return min(effective_limit()[0], psutil.virtual_memory().available)
        return max(0, self.limit_bytes - self.others_bytes)

    def raised(self, need_bytes: int) -> str:
        """Where to ask for the `need_bytes` of the run."""
        size = _rounded_up(need_bytes + self.others_bytes)
        if self.cgroup:
            return f"give the cgroup {self.cgroup} {size} (a Slurm job by --mem)"
        if self.limit_bytes is None:
            return f"use a machine, or a job, with {size} of memory"
        return f"raise memory_limit to {size}"


def _rounded_up(num_bytes: int) -> str:
    """A size that is at least `num_bytes` when it is read again."""
    if num_bytes >= 10 * GB:
        return f"{-(-num_bytes // GB)} GB"
    return f"{-(-num_bytes // MB)} MB"
