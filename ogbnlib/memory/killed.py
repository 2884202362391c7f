"""The limit that caused an out-of-memory kill, and actions that help, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import GB, MB
from .cgroup import effective_limit


@dataclass(frozen=True)
class Action:
    """Something to do next: its id, and arguments that JSON can hold. `runs.render` words it."""

    id: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KilledBy:
    """The limit that a run reached: its own, one of a cgroup around it, or the machine's memory."""

    limit_bytes: int | None = None  # None for the machine
    cgroup: str = ""  # the cgroup around the run that has the limit; "" for the run's own limit
    others_bytes: int = 0  # memory of other processes below the same limit

    @property
    def left_bytes(self) -> int:
        """Bytes that the limit leaves for the run."""
        if self.limit_bytes is None:  # the machine's memory
            import psutil

            return min(effective_limit()[0], psutil.virtual_memory().available)
        return max(0, self.limit_bytes - self.others_bytes)

    def raised(self, need_bytes: int | None = None) -> Action:
        """Return the action to raise this limit until the run has `need_bytes`, if known."""
        option = "the limit"  # of the cgroup
        if not self.cgroup:
            is_machine = self.limit_bytes is None
            option = "the memory of the machine or job" if is_machine else "memory_limit"
        arguments = {"option": option, "cgroup": self.cgroup}
        if need_bytes is not None:
            total = need_bytes + self.others_bytes
            arguments["limit"] = f"{-(-total // MB)} MB"  # rounded up, so that this limit is enough
            if total >= 10 * GB:
                arguments["limit"] = f"{-(-total // GB)} GB"
        return Action("raise limit", arguments)
