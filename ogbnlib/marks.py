"""Named phases and moments of a script, recorded by its watcher: `watch`, `run` or `%%memory`.

Without a watcher `with phase("...")` takes 1 us and imports nothing. Only one process of a run
at a time is recorded, the first that calls them, because phases of several would overlap.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .environment import RUN_VARIABLE

if TYPE_CHECKING:
    from .memory.recorder import EventLog

# Reentrant: in the middle of a mark Python may collect a loader's graph, whose finalizer calls
# `note`. `_thread` is built in, so that a script without a watcher pays for no import.
_claiming = _thread.RLock()


class _MarkedRun:
    """The run in which this process records its marks; `folder` is None without a watcher."""

    log: EventLog | None = None  # open only in the process whose marks are recorded
    lock = -1  # descriptor of the folder's file .marks, locked while `log` is open; -1: not open

    def __init__(self, folder: str | None):
        self.folder = folder


_run = _MarkedRun(os.environ.get(RUN_VARIABLE))


@contextlib.contextmanager
def phase(name: str, epoch: int | str | None = None) -> Iterator[None]:
    """Record a block, `with phase("build loaders"):`, or a function, `@phase("load")`, as a phase.

    Phases nest. `Run.record.growth` compares memory between the ends of phases named "epoch".
    """
    log = _claim()
    if log is None:
        yield
        return
    info = {} if epoch is None else {"epoch": str(epoch)}
    recorded = log.phase(str(name), **info)

    def end(*raised: Any) -> None:  # the exception of the block, if any; it goes on after this
        with _never_raise():
            recorded.__exit__(*raised)

    with contextlib.ExitStack() as stack:
        with _never_raise():  # around the two writes alone: the block's own errors are the user's
            recorded.__enter__()
            stack.push(end)
        yield


def mark(name: str) -> None:
    """Record a moment of the run, and the GPU's memory if torch has used a GPU. `Run.record.growth`
    compares memory between moments named "epoch"."""
    log = _claim()
    if log is None:
        return
    from .memory.reading import own_memory

    with _never_raise():
        log.cuda(force=True)  # also if the last reading is recent
        log.mark("mark", name=str(name), held_bytes=own_memory()[0])  # anonymous + shared memory


def note(kind: str, **fields: object) -> None:
    """Record an event of this process for `memory.calls`; `fields` as in `memory.record`."""
    log = _claim()
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
        _forget()
        _run = outer


def _claim() -> EventLog | None:
    """Return the run's log, open from the first call on; None if this process must not mark."""
    if _run.folder is None:  # without a watcher
        return None
    with _claiming:
        run = _run
        if run.log is not None or run.folder is None:  # opened before, or given up by a thread
            return run.log
        import fcntl

        from .files import open_to_write
        from .memory.recorder import EventLog

        # Processes started through multiprocessing, such as DataLoader workers, mark nothing.
        multiprocessing = sys.modules.get("multiprocessing.process")
        with _never_raise():
            if multiprocessing is not None and multiprocessing.parent_process() is not None:
                raise BlockingIOError  # as flock does; `_never_raise` then stops marking silently
            run.lock = open_to_write(os.path.join(run.folder, ".marks"))
            fcntl.flock(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            run.log = EventLog(run.folder)
            os.register_at_fork(after_in_child=_forget)  # a fork must not mark with this lock
    return _run.log  # None after an error: `_forget` has replaced `_run`


@contextlib.contextmanager
def _never_raise() -> Iterator[None]:
    """Print an error of the block instead of ending the user's script, and mark nothing more."""
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
        _run.log.close()
    if _run.lock >= 0:
        os.close(_run.lock)
    _run = _MarkedRun(None)
