"""Progress reporting: one line that updates itself for a person, a line a step and every 30 s in a log."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import format_bytes, is_interactive

LINE_EVERY_S = 30.0
_BAR_EVERY_S, _DRAWN_EVERY_S = 0.5, 2.0


def seconds(number: float) -> str:
    """Format a duration: `47 s`, `2 min 05 s`, `12 min`, `3.4 h`."""
    if number < 100:
        return f"{number:.0f} s"
    if number < 600:
        return f"{number // 60:.0f} min {number % 60:02.0f} s"
    return f"{number / 60:.0f} min" if number < 6000 else f"{number / 3600:.1f} h"


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
    began_s: float = field(default_factory=time.time)

    def add(self, number: float) -> None:
        self.done += number
        took_s = time.time() - self.began_s
        self.per_s = self.done / took_s if took_s > 0.5 else 0.0  # cached data in a shorter time is no speed

    def __str__(self) -> str:
        from tqdm import tqdm

        rest = [f"loss {self.loss:.2f}"] if self.loss is not None else []
        rest += [f"run {seconds(self.run_left_s)}"] if self.run_left_s is not None else []
        scale = {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if self.unit == "bytes" else {}
        shown = {"prefix": self.what or "", "rate": self.per_s, "postfix": ", ".join(rest), "ascii": True}
        return str(tqdm.format_meter(self.done, self.total, time.time() - self.began_s, **scale, **shown))


def read_count(path: Path) -> Count | None:
    """Read progress.json; None if it is missing, half written or not one."""
    try:
        count = Count(**json.loads(path.read_bytes()))
        str(count)
    except (OSError, ValueError, TypeError):
        return None
    return count


def details(count: Count | None, held_bytes: int | None, limit_bytes: int | None = None) -> str:
    """` 33%|###3      | 3100/9432 [00:50<01:42, 61.70it/s, loss 1.68], 1.20 GB of 4.00 GB`."""
    words = [] if count is None else [str(count)]
    if held_bytes is not None:
        words.append(format_bytes(held_bytes) + (f" of {format_bytes(limit_bytes)}" if limit_bytes else ""))
    return ", ".join(words)


class _SafeFile(io.FileIO):
    """File that drops all output from its first failed write on."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return len(data) if self.error else super().write(data)
        except OSError as error:
            self.error = error
            return len(data)


def _safe_stream(stream: Any) -> Any:
    if stream is None:  # closed before Python started
        return open(os.devnull, "w")
    if type(stream) is not io.TextIOWrapper:  # a notebook's or a test's
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_SafeFile(stream.fileno(), "w", closefd=False))
    # File names need not be valid text: a message with one must be printable all the same.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True)


@contextlib.contextmanager
def steady_output() -> Iterator[Callable[[], OSError | None]]:
    """Drop output that can't be written; yields a function that returns standard output's first error, or None."""
    before = sys.stdout, sys.stderr
    streams = stdout, _ = sys.stdout, sys.stderr = _safe_stream(sys.stdout), _safe_stream(sys.stderr)
    try:
        yield lambda: getattr(getattr(getattr(stdout, "buffer", None), "raw", None), "error", None)
    finally:
        for stream in streams:
            with contextlib.suppress(ValueError):  # closed inside
                stream.flush()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def _repeated(function: Callable[[], object], every_s: float) -> Iterator[None]:
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(every_s):
            function()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Live:
    """Progress line, shown while the context is open.

    Args:
        text: Returns the name of the present step and its details.
        how: "bar": one line, cleared in the end. "lines", for logs: a line for each kind of step that takes a second,
            and one every 30 s. "none": nothing. "auto": "bar" if a person watches.
        apart: Lines go to standard error, as another command writes to standard output.
    """

    def __init__(self, text: Callable[[], tuple[str, str]], how: str = "auto", *, apart: bool = False):
        self.how = how if how != "auto" else "bar" if is_interactive() else "lines"
        self._text, self._apart = text, apart
        self._lock, self._stack = threading.Lock(), contextlib.ExitStack()
        self._visible, self._at_line_start, self._last_s = False, True, 0.0
        self._kinds: set[str] = set()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Live:
        from tqdm import tqdm

        self._stack.enter_context(steady_output())
        # A bar must not get into the file to which standard output goes; a notebook shows stderr as a mistake.
        to_stderr = sys.stderr.isatty() if self.how == "bar" else self._apart and not in_notebook()
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._draw = tqdm.status_printer(self._stream)
        if self.how != "none":
            self._show()
            self._stack.callback(self._clear)
            self._stack.enter_context(_repeated(self._show, _BAR_EVERY_S if self.how == "bar" else 1.0))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def write(self, output: bytes | str) -> None:
        """Write other output in place of the line, which is shown again below it."""
        data = output.encode() if isinstance(output, str) else output
        with self._lock:
            self._clear()
            if hasattr(sys.stdout, "buffer"):
                sys.stdout.flush()
                sys.stdout.buffer.write(data)
            else:  # a notebook's
                sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()
            self._at_line_start, self._last_s = data.endswith(b"\n"), time.monotonic()

    def _show(self) -> None:
        step, more = self._text()
        line, kind = f"{step}: {more}" if more else step, re.sub(r"\d+", "", step)
        with self._lock:
            if self.how == "bar" and self._at_line_start:
                self._draw(line[: shutil.get_terminal_size().columns - 1] if self._stream.isatty() else line)
                self._visible = True
            elif self.how == "lines" and (kind not in self._kinds or time.monotonic() - self._last_s >= LINE_EVERY_S):
                self._kinds.add(kind)
                self._last_s = time.monotonic()
                print(line, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._visible:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()
            self._visible = False


@contextlib.contextmanager
def doing(what: str, how: str = "auto") -> Iterator[None]:
    """Show the time spent on work whose progress can't be counted."""
    begin = time.monotonic()
    with Live(lambda: (what, seconds(time.monotonic() - begin)), how):
        yield


@contextlib.contextmanager
def counted(
    what: str, total: int, progress: bool | Callable[[Count], object], unit: str = "bytes"
) -> Iterator[Callable[[int], None]]:
    """Count work on `total` units, shown or passed to `progress`; yields a function to call with each number done."""
    count = Count(total, unit)

    def done(number: int) -> None:
        count.add(number)
        if callable(progress):
            progress(count)

    with Live(lambda: (what, str(count)), "auto" if progress is True else "none"):
        yield done


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel")


@contextlib.contextmanager
def drawn(html: Callable[[], str]) -> Iterator[None]:
    """Show HTML in the running cell, updated every 2 s and at the end."""
    from IPython.display import HTML, display

    handle = display(HTML(html()), display_id=True)
    try:
        with _repeated(lambda: handle.update(HTML(html())), _DRAWN_EVERY_S):
            yield
    finally:
        handle.update(HTML(html()))
