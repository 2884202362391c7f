"""Progress of work in bytes or batches, in the words of tqdm."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import clock
from .display import Live
from .errors import format_bytes


def seconds(value: float) -> str:
    """Format a duration: `47 s`, `12 min`, `3.4 h`."""
    return (
        f"{value:.0f} s"
        if value < 100
        else f"{value / 60:.0f} min"
        if value < 6000
        else f"{value / 3600:.1f} h"
    )


@dataclass
class Count:
    """Progress of a piece of work in bytes or batches; the content of a run's progress.json."""

    total: float
    unit: str = "bytes"
    what: str | None = None  # if it differs from the name of the step
    phase: str | None = None  # phase of the run
    done: float = 0
    per_s: float = 0.0
    loss: float | None = None  # of the epoch so far
    run_left_s: float | None = None  # remaining time of the whole run
    began_s: float = field(default_factory=clock.now)

    def add(self, number: float) -> None:
        self.done += number
        took_s = clock.now() - self.began_s
        # cached data in a shorter time is no speed
        self.per_s = self.done / took_s if took_s > 0.5 else 0.0

    def __str__(self) -> str:
        from tqdm import tqdm

        rest = [f"loss {self.loss:.2f}"] if self.loss is not None else []
        rest += [f"run {seconds(self.run_left_s)}"] if self.run_left_s is not None else []
        scale = (
            {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if self.unit == "bytes" else {}
        )
        shown = {
            "prefix": self.what or "",
            "rate": self.per_s,
            "postfix": ", ".join(rest),
            "ascii": True,
        }
        return str(
            tqdm.format_meter(self.done, self.total, clock.now() - self.began_s, **scale, **shown)
        )


Progress = bool | Callable[[Count], object]  # whether to show it, or a function to call instead


def read_count(path: Path) -> Count | None:
    """Read progress.json; None if it is missing, half written or not one."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        count = Count(**json.loads(path.read_bytes()))
        return count if str(count) else None
    return None


def details(count: Count | None, held_bytes: int | None, limit_bytes: int | None = None) -> str:
    """` 33%|###3      | 3100/9432 [00:50<01:42, 61.70it/s, loss 1.68], 1.20 GB of 4.00 GB`."""
    limit = f" of {format_bytes(limit_bytes)}" if limit_bytes else ""
    memory = "" if held_bytes is None else format_bytes(held_bytes) + limit
    return ", ".join(filter(None, ["" if count is None else str(count), memory]))


@contextlib.contextmanager
def doing(what: str, how: str = "auto") -> Iterator[None]:
    """Show the time spent on work whose progress can't be counted."""
    begin = time.monotonic()
    with Live(lambda: (what, seconds(time.monotonic() - begin)), how):
        yield


@contextlib.contextmanager
def counted(
    what: str,
    total: int,
    progress: Progress,
    unit: str = "bytes",
    check: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[int], None]]:
    """Count work on `total` units, shown or passed to `progress`; yields a function to call with
    each number done.

    Each call begins with `check`, whose exception ends the work.
    """
    count = Count(total, unit)

    def done(number: int) -> None:
        check()
        count.add(number)
        if callable(progress):
            progress(count)

    with Live(lambda: (what, str(count)), "auto" if progress is True else "none"):
        yield done
