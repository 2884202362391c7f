"""Output to a terminal, a log or a notebook, whose full or closed file never ends the work."""

import codecs
import contextlib
import html
import io
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TextIO

from .errors import printable

# Pictures are transparent. This grey has a contrast of 4.3 on white and on a dark theme's #111111.
GREY = "#797979"
# Settings of matplotlib for pictures on a page of any colour.
ON_ANY_THEME = {
    "axes.facecolor": "none",
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}

_LINE_EVERY_S = 30.0  # between progress lines of a log
_SHOWN_EVERY_S = 0.5  # between updates of a terminal's progress line
_DRAWN_EVERY_S = 2.0  # between updates of HTML in a cell


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "IPython" in sys.modules and hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def html_card(rows: Mapping[str, str]) -> str:
    """Return a table with one row for each name and value."""
    cells = (
        f'<tr><th style="text-align:left;vertical-align:top">{name}</th>'
        f'<td style="text-align:left">{html.escape(printable(text))}</td></tr>'
        for name, text in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


class _SafeFile(io.FileIO):
    """File that drops all output from its first failed write on."""

    error: OSError | None = None  # of the first failed write: a full disk, a closed pipe

    def write(self, data: Any) -> int:  # the caller must see all bytes as written
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return len(data)


def _safe_stream(stream: TextIO | None) -> TextIO:
    """Return a stream to the same file descriptor that never raises when it is written."""
    if stream is None:  # closed before Python started
        return open(os.devnull, "w")
    if type(stream) is not io.TextIOWrapper:  # the stream of a notebook or a test
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_SafeFile(stream.fileno(), "w", closefd=False))
    # A file name may be invalid text; a message with such a name must still be printable.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True)


@contextlib.contextmanager
def steady_output() -> Iterator[Any]:
    """Drop output that can't be written; yields the raw file of standard output, if it has one."""
    stdout = _safe_stream(sys.stdout)
    stderr = _safe_stream(sys.stderr)
    # a `_SafeFile`, unless a notebook or a test has replaced the stream
    file = getattr(getattr(stdout, "buffer", None), "raw", None)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            yield file
        finally:
            for stream in (stdout, stderr):
                with contextlib.suppress(ValueError):  # the block has closed it
                    stream.flush()


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


@contextlib.contextmanager
def drawn(content: Callable[[], str]) -> Iterator[None]:
    """Show HTML in the running cell, updated every 2 s and at the end."""
    from IPython.display import HTML, display

    handle = display(HTML(content()), display_id=True)
    try:
        with _repeated(lambda: handle.update(HTML(content())), _DRAWN_EVERY_S):
            yield
    finally:
        handle.update(HTML(content()))


class Live:
    """Progress line, shown while the context is open.

    Args:
        text: Returns the name of the present step and its details.
        how: "bar": one line, cleared in the end. "lines", for logs: a line every 30 s. "none":
            nothing. "auto": "bar" if a person watches, else "lines".
    """

    def __init__(self, text: Callable[[], tuple[str, str]], how: str = "auto"):
        # A terminal or JupyterLab means that a person watches; papermill sets no session name.
        if how == "auto":
            how = "bar" if sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ else "lines"
        self.how = how
        self._text = text
        self._stack = contextlib.ExitStack()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # chunks may split letters
        self._lock = threading.Lock()  # one writer at a time: the line's thread, or `write`
        self._at_line_start = True  # False while other output has begun a line and not ended it
        self._last_s = -math.inf  # monotonic time of the last output in a log

    def __enter__(self) -> Self:
        from tqdm import tqdm

        self._stack.enter_context(steady_output())  # first: replaces the streams used below
        # Standard output may go to a file. A notebook shows stderr like an error.
        to_stderr = sys.stderr.isatty() or (self.how == "lines" and not in_notebook())
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._draw = tqdm.status_printer(self._stream)  # overwrites the line, and clears its rest
        if self.how != "none":
            self._show()
            self._stack.callback(self._clear)  # runs after the thread of the next line has ended
            self._stack.enter_context(_repeated(self._show, _SHOWN_EVERY_S))
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
            else:  # a notebook's stream
                sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()
            self._at_line_start = data.endswith(b"\n")
            self._last_s = time.monotonic()

    def _show(self) -> None:
        step, details = self._text()
        line = printable(": ".join(filter(None, [step, details]))).replace("\n", " ")
        with self._lock:
            if self.how == "bar" and self._at_line_start:
                if self._stream.isatty():
                    line = line[: shutil.get_terminal_size().columns - 1]
                else:  # a notebook, which keeps the last line if its kernel is restarted
                    line = f"{time.strftime('%H:%M:%S')} {line}"
                self._draw(line)
            elif self.how == "lines" and time.monotonic() - self._last_s >= _LINE_EVERY_S:
                self._last_s = time.monotonic()
                print(line, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self.how == "bar" and self._at_line_start:
            self._draw("")
            print(end="\r", file=self._stream, flush=True)  # other output begins at the left
