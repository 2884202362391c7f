"""Progress of work in bytes or batches, in the format of tqdm."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .display import Live
from .errors import format_bytes
from .files import parse_json, read_whole


def seconds(value: float) -> str:
    """Format a duration with two digits, seconds with at most two decimals: `0.35 s`, `47 s`,
    `2.8 min`, `12 min`, `3.4 h`."""
    if value < 99.5:  # from here on `.2g` would give 1e+02
        return f"{round(value, 2):.2g} s"
    if value < 5970:  # 99.5 min
        return f"{value / 60:.2g} min"
    return f"{value / 3600:.1f} h"


@dataclass
class Count:
    """Progress of a piece of work in bytes or batches; the content of a run's progress.json."""

    total: float
    unit: str = "bytes"
    what: str | None = None  # name of the work, if it differs from the step's
    phase: str | None = None  # phase of the run
    done: float = 0
    loss: float | None = None  # loss of the epoch so far
    began_s: float = field(default_factory=time.time)

    def __str__(self) -> str:
        from tqdm import tqdm

        is_bytes = self.unit == "bytes"
        line: str = tqdm.format_meter(
            self.done,
            self.total,
            time.time() - self.began_s,
            prefix=self.what or "",
            postfix="" if self.loss is None else f"loss {self.loss:.2f}",
            ascii=True,
            unit="B" if is_bytes else "it",
            unit_scale=is_bytes,
            unit_divisor=1024,
        )
        return line


Progress = bool | Callable[[Count], object]  # whether to show it, or a function to call with it


def read_count(path: Path) -> Count | None:
    """Read a progress.json; None if it is missing, half written or has other content."""
    with contextlib.suppress(OSError, ValueError, TypeError, ArithmeticError):
        count = Count(**parse_json(read_whole(path), path, "a count"))
        str(count)  # fails if a value is not a number
        return count
    return None


def details(count: Count | None, held_bytes: int | None, limit_bytes: int | None = None) -> str:
    """Return ` 33%|###3   | 3100/9432 [00:50<01:42, 61.70it/s, loss 1.68], 1.20 GB of 4.00 GB`."""
    memory = "" if held_bytes is None else format_bytes(held_bytes)
    if memory and limit_bytes:
        memory += f" of {format_bytes(limit_bytes)}"
    return ", ".join(filter(None, [str(count or ""), memory]))


@contextlib.contextmanager
def doing(work: str, display: str = "auto") -> Iterator[None]:
    """Show the time spent on work whose progress can't be counted."""
    begin = time.monotonic()
    with Live(lambda: (work, seconds(round(time.monotonic() - begin))), display):
        yield


@contextlib.contextmanager
def counted(
    work: str,
    total: int,
    progress: Progress,
    unit: str = "bytes",
    check: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[int], None]]:
    """Count the `unit`s ("bytes" or "batches") of a work; yields a function to call with each number
    done, which first calls `check`, whose exception ends the work."""
    count = Count(total, unit)

    def done(number: int) -> None:
        check()  # first: after a stop signal nothing more is counted
        count.done += number
        if callable(progress):
            progress(count)

    with Live(lambda: (work, str(count)), "auto" if progress is True else "none"):
        yield done
