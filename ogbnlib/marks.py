"""Named phases and moments of any script, recorded by its watcher: `watch`, `run`, or a notebook's
`%%memory`.

Without a watcher `phase` and `mark` return at once and import nothing: `with phase("...")` takes
1 us. In a run only the first process that calls them is recorded, because phases of several
processes would overlap.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .environment import RUN_VARIABLE

if TYPE_CHECKING:
    from .memory.recorder import EventLog

# reentrant: collected garbage may make a note in the middle of a mark
_claiming = _thread.RLock()


class _MarkedRun:
    """The run in which this process records its marks; `folder` is None without a watcher."""

    log: EventLog | None = None  # open only in the process whose marks are recorded
    lock = -1

    def __init__(self, folder: str | None):
        self.folder = folder


_run = _MarkedRun(os.environ.get(RUN_VARIABLE))


@contextlib.contextmanager
def phase(name: str, epoch: int | str | None = None) -> Iterator[None]:
    """Record the block under `with phase("build loaders"):`, or a function under `@phase("load")`,
    as a phase.

    Phases nest. `Run.record.growth` compares memory between the ends of phases named "epoch".
    """
    log = _claim() if _run.folder is not None else None
    if log is None:
        yield
        return
    recorded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    with _never_raise():
        info = {} if epoch is None else {"epoch": _plain(epoch)}
        recorded = log.phase(str(_plain(name)), **info)
        recorded.__enter__()

    def end(*raised: Any) -> None:
        with _never_raise():
            recorded.__exit__(*raised)

    with contextlib.ExitStack() as stack:
        stack.push(end)
        yield


def mark(name: str, /, **info: object) -> None:
    """Record a moment of the run. `Run.record.growth` compares memory between moments named "epoch":
    `mark("epoch", loss=...)`.

    Also reads the GPU's memory, if torch has used a GPU; `mark("cuda")` does nothing else.
    """
    log = _claim() if _run.folder is not None else None
    if log is None:
        return
    from .memory.reading import own_memory

    with _never_raise():
        log.cuda(force=True)
        if name != "cuda" or info:
            log.mark(
                "mark",
                name=str(_plain(name)),
                held_bytes=own_memory()[0],
                info={key: _plain(value) for key, value in info.items()},
            )


def note(kind: str, **fields: object) -> None:
    """Record an event of this process, with its fields as they are."""
    log = _claim() if _run.folder is not None else None
    if log is not None:
        with _never_raise():
            log.mark(kind, **fields)


@contextlib.contextmanager
def attached(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Record the marks that this process makes inside the block in the run of `folder`."""
    global _run
    outer = _run
    _run = _MarkedRun(os.fspath(folder))
    try:
        yield
    finally:
        if _run.log is not None:
            with _never_raise():
                _run.log.close()
        _forget()
        _run = outer


def _claim() -> EventLog | None:
    with _claiming:
        run = _run
        if run.log is not None or run.folder is None:
            return run.log
        import fcntl

        from .files import open_to_write
        from .memory.recorder import EventLog

        # Processes started through multiprocessing, such as DataLoader workers, mark nothing.
        multiprocessing = sys.modules.get("multiprocessing.process")
        with _never_raise():
            if multiprocessing is not None and multiprocessing.parent_process() is not None:
                raise BlockingIOError  # as flock does; `_never_raise` then stops marking silently
            # The first process of a watched command gets the lock: others would mix up its phases.
            run.lock = open_to_write(os.path.join(run.folder, ".marks"))
            fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            run.log = EventLog(run.folder)
            os.register_at_fork(after_in_child=_forget)
    return _run.log


@contextlib.contextmanager
def _never_raise() -> Iterator[None]:
    """Never crash the user's script because an event can't be written; print the error once and
    mark nothing more."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, BlockingIOError):  # raised where another process marks
            print(
                f"ogbnlib: the marks of this process are not recorded any more: {error}",
                file=sys.stderr,
            )
        _forget()


def _forget() -> None:
    """Stop marking without writing anything: this process may be a fork of the one that marks."""
    global _run
    if _run.log is not None:
        _run.log.close(forget=True)
    if _run.lock >= 0:
        os.close(_run.lock)
    _run = _MarkedRun(None)


def _plain(value: object) -> object:
    """Return a value for JSON: None, a finite number (also from a one-element tensor), or text."""
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):  # several elements, a lost device, any class
            value = value.item()
    if isinstance(value, int | float):
        return value if math.isfinite(value) else str(value)
    return value if value is None else str(value)
