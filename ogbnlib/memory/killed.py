"""The limit that an out-of-memory kill was for, and the ways to raise it."""

from dataclasses import dataclass

from ..errors import GB, MB
from .cgroup import effective_limit

# Ways to need less memory in a script.
NEEDING_LESS = "fewer workers, arrays mapped with numpy.load(mmap_mode='r')"
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
        """The way to ask for the `need_bytes` of the run."""
        total = need_bytes + self.others_bytes
        # rounded up, so that it is enough when it is read again
        size = f"{-(-total // GB)} GB" if total >= 10 * GB else f"{-(-total // MB)} MB"
        if self.cgroup:
            return f"give the cgroup {self.cgroup} {size} (a Slurm job by --mem)"
        if self.limit_bytes is None:
            return f"use a machine, or a job, with {size} of memory"
        return f"raise memory_limit to {size}"
