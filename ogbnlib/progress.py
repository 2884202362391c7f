"""How far work is, for who waits: a person has one line that updates itself, a log one line a step and every 30 s."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError, format_bytes, is_interactive

LINE_EVERY_S = 30.0
_BAR_EVERY_S, _DRAWN_EVERY_S = 0.5, 2.0
_SPEED_AFTER_S = 0.5  # before that it is none: what was cached, divided by next to nothing
_CELLS = 10  # of the bar that shows how full the memory is


def seconds(number: float) -> str:
    """`47 s`, `2 min 05 s`, `12 min`, `3.4 h`."""
    if number < 100:
        return f"{number:.0f} s"
    if number < 600:  # of what is going on, minutes alone would stand still
        return f"{number // 60:.0f} min {number % 60:02.0f} s"
    return f"{number / 60:.0f} min" if number < 6000 else f"{number / 3600:.1f} h"


@dataclass
class Count:
    """What is done of a piece of work: bytes, or batches of an epoch with the loss so far."""

    total: float
    unit: str = "bytes"
    what: str | None = None  # where it is not the step itself
    phase: str | None = None  # of the run that it belongs to
    done: float = 0
    per_s: float = 0.0
    loss: float | None = None
    run_left_s: float | None = None  # of the whole run
    began_s: float = field(default_factory=time.time)

    def add(self, number: float) -> None:
        self.done += number
        took_s = time.time() - self.began_s
        self.per_s = self.done / took_s if took_s > _SPEED_AFTER_S else 0.0

    @property
    def left_s(self) -> float | None:
        return max(0.0, self.total - self.done) / self.per_s if self.per_s else None

    def __str__(self) -> str:
        if self.unit == "bytes":
            what = f"{self.what} " if self.what else ""
            words = [f"{what}{format_bytes(self.done)} of {format_bytes(self.total)}", f"{format_bytes(self.per_s)}/s"]
        else:
            words = [f"{self.done:,.0f}/{self.total:,.0f}", f"{self.per_s:.1f} it/s"]
        words = words if self.per_s else words[:1]  # no speed yet
        words += [f"loss {self.loss:.2f}"] if self.loss is not None else []
        words += [f"{seconds(self.left_s)} left"] if self.left_s is not None else []
        words += [f"run {seconds(self.run_left_s)}"] if self.run_left_s is not None else []
        return ", ".join(words)


def read_count(path: Path) -> Count | None:
    """What a trainer has written there; None where it wrote none, or is just writing."""
    try:
        count = Count(**json.loads(path.read_bytes()))
        str(count)
    except (OSError, ValueError, TypeError):
        return None
    return count


def details(count: Count | None, held_bytes: int | None, limit_bytes: int | None = None) -> str:
    """`3,100/9,432, 61.7 it/s, loss 1.68, 90 s left, 1.20 GB of 4.00 GB [###.......]`."""
    words = [] if count is None else [str(count)]
    if held_bytes is not None and limit_bytes:
        full = min(_CELLS, round(_CELLS * held_bytes / limit_bytes))
        words.append(f"{format_bytes(held_bytes)} of {format_bytes(limit_bytes)} [{full * '#':.<{_CELLS}}]")
    elif held_bytes is not None:
        words.append(format_bytes(held_bytes))
    return ", ".join(words)


class _Steady(io.FileIO):
    """A descriptor that drops what it can't write, from the first refusal on, and remembers why."""

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        while self.refusal is None:
            try:
                if (written := super().write(data)) is not None:
                    return written
                select.select([], [self], [])  # it does not block: somebody who shares it has set it so
            except OSError as error:
                self.refusal = error
        return len(data)


def _refusal(stream: Any) -> OSError | None:
    return getattr(getattr(getattr(stream, "buffer", None), "raw", None), "refusal", None)


def _steady(stream: Any, descriptor: int) -> Any:
    """The stream over a `_Steady` descriptor; a notebook's, or a test's, as it is."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if stream is not None and (type(stream) is not io.TextIOWrapper or type(raw) is not io.FileIO):
        return stream
    if stream is not None:
        descriptor = stream.fileno()
        with contextlib.suppress(OSError):
            stream.flush()
    # Names on a disk need not be text: a sentence with one must be written all the same.
    written, encoding = io.BufferedWriter(_Steady(descriptor, "w", closefd=False)), getattr(stream, "encoding", None)
    return io.TextIOWrapper(written, encoding, "backslashreplace", line_buffering=True)


@contextlib.contextmanager
def steady_output() -> Iterator[Callable[[], OSError | None]]:
    """Inside, nothing ends because it can't be printed: a full quota, a closed terminal, `| head`.

    Standard output and error drop all from their first refusal on. Yields what tells that of standard output, or None.
    """
    before, now = (sys.stdout, sys.stderr), (_steady(sys.stdout, 1), _steady(sys.stderr, 2))
    sys.stdout, sys.stderr = now
    try:
        yield lambda: _refusal(now[0])
    finally:
        for stream in now:
            with contextlib.suppress(ValueError):  # closed by whoever
                stream.flush()
        sys.stdout, sys.stderr = before


class Live:
    """Shows what `text` says, a step and its details, from the moment it is entered until it is left.

    Args:
        how: "bar" for a person: one line, twice a second, which is gone in the end. "lines" for a log: one for each
            kind of step that takes a second, and every 30 s. "none": nothing. "auto" finds out who reads.
        every_step: Without it a log has the first step's line, and then those of every 30 s.
        apart: A log's lines go to standard error, as the output between them is another command's; not in a notebook,
            which shows that as a mistake.
    """

    def __init__(
        self, text: Callable[[], tuple[str, str]], how: str = "auto", *, every_step: bool = True, apart: bool = False
    ):
        self.how = how if how != "auto" else "bar" if is_interactive() else "lines"
        self._text, self._every_step, self._apart = text, every_step, apart
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._width, self._at_margin = 0, True  # of the line that is to be seen; whether a new one can begin
        self._kinds: set[str] = set()
        self._last_s = 0.0
        self._steady = contextlib.ExitStack()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Live:
        self.refusal = self._steady.enter_context(steady_output())
        # A terminal's line must not get into a file to which the output goes; a notebook has no terminal.
        to_stderr = sys.stderr.isatty() if self.how == "bar" else self._apart and not in_notebook()
        self._stream = sys.stderr if to_stderr else sys.stdout
        if self.how != "none":
            self._show()
            self._thread = threading.Thread(target=self._go_on, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._clear()
        self._steady.close()

    def write(self, output: bytes | str) -> None:
        """Put other output where the line was, as it is; the line comes again below it."""
        data = output.encode() if isinstance(output, str) else output
        with self._lock:
            self._clear()
            if hasattr(sys.stdout, "buffer"):
                sys.stdout.flush()
                sys.stdout.buffer.write(data)
            else:  # a notebook's
                sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()
            self._at_margin, self._last_s = data.endswith(b"\n"), time.monotonic()

    def _go_on(self) -> None:
        while not self._stop.wait(_BAR_EVERY_S if self.how == "bar" else 1.0):
            self._show()

    def _show(self) -> None:
        step, more = self._text()
        line, kind = f"{step}: {more}" if more else step, re.sub(r"\d+", "", step)
        with self._lock:
            if self.how == "bar" and self._at_margin:
                columns = shutil.get_terminal_size().columns - 1 if self._stream.isatty() else 1000
                line = line[:columns]
                self._stream.write(f"\r{line:<{self._width}}")
                self._stream.flush()
                self._width = len(line)
            elif self.how == "lines":
                new = kind not in self._kinds and (self._every_step or not self._kinds)
                if new or time.monotonic() - self._last_s >= LINE_EVERY_S:
                    self._kinds.add(kind)
                    self._last_s = time.monotonic()
                    print(line, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._width:
            self._stream.write(f"\r{'':<{self._width}}\r")
            self._stream.flush()
            self._width = 0


@contextlib.contextmanager
def doing(what: str, how: str = "auto") -> Iterator[None]:
    """Work of which nothing can be counted but the time it takes."""
    begin = time.monotonic()
    with Live(lambda: (what, seconds(time.monotonic() - begin)), how):
        yield


@contextlib.contextmanager
def counted(
    what: str, total: int, progress: bool | Callable[[Count], object], unit: str = "bytes"
) -> Iterator[Callable[[int], None]]:
    """Work on bytes, or so many of something else; yields what is to be told how many are done.

    Args:
        progress: Whether to show it; a function is told of each change instead.
    """
    count = Count(total, unit)
    shown = Live(lambda: (what, str(count)), "auto" if progress is True else "none")

    def done(number: int) -> None:
        count.add(number)
        if callable(progress):
            progress(count)

    with shown:
        yield done


def _shell() -> object:
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def in_notebook() -> bool:
    return hasattr(_shell(), "kernel")


def is_kernel_ending() -> bool:
    """Whether this is a notebook's kernel that has been asked to end; JupyterLab interrupts it first."""
    return in_notebook() and bool(getattr(_shell(), "exit_now", False))


def check_notebook() -> None:
    """Refuse to draw where there is no cell to draw in."""
    if not in_notebook():
        raise InputError("live: expected a notebook to draw in, found none; leave it out")


@contextlib.contextmanager
def drawn(html: Callable[[], str]) -> Iterator[None]:
    """Shows what `html` says in the notebook's cell that runs, anew every 2 s and in the end."""
    from IPython.display import HTML, display

    handle, ended = display(HTML(html()), display_id=True), threading.Event()

    def go_on() -> None:
        while not ended.wait(_DRAWN_EVERY_S):
            handle.update(HTML(html()))

    thread = threading.Thread(target=go_on, name="drawing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        handle.update(HTML(html()))
