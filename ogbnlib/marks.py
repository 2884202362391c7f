"""Names for the moments of anybody's script, kept by whoever watches it: `watch`, `run`, or a notebook's `%%memory`.

Where nobody watches, both calls return at once and import nothing: 0.4 us for `with phase("...")`.

One process of a run marks, the first that does: phases of several would lie across each other. It holds a lock beside
the events, and what it forks or starts through multiprocessing, DataLoader workers for one, marks nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory.recorder import EventLog

RUN_VARIABLE = "OGBNLIB_RUN_DIR"  # the folder of the run that this process belongs to
_claiming = _thread.allocate_lock()
_folder = os.environ.get(RUN_VARIABLE)  # None where nobody watches
_log: EventLog | None = None
_lock = -1


def phase(name: str, epoch: int | str | None = None) -> _Phase:
    """Everything inside `with phase("build loaders"):`, or a function under `@phase("load")`, is that phase of the run.

    Phases nest.

    Args:
        name: What diagnosis and timeline call it. The ends of those called "epoch" are what `Run.growth` compares.
        epoch: Its number, where it is one of many.
    """
    return _Phase(name, epoch)


def mark(name: str, /, **info: Any) -> None:
    """Note a moment in the run's events; those of `mark("epoch", loss=...)` are what `Run.growth` compares.

    Each reads the GPU's memory too, where torch has used one; `mark("cuda")` alone does nothing else.

    Args:
        info: Is kept beside the name: numbers, tensors of one element, texts.
    """
    if _folder is None or (log := _claim()) is None:
        return
    from .memory.reading import own_memory

    with _kept():
        log.cuda(force=True)
        if name != "cuda" or info:
            plain = {key: _plain(value) for key, value in info.items()}
            log.mark("mark", name=str(_plain(name)), held_bytes=own_memory()[0], info=plain)


@contextlib.contextmanager
def attached(folder: str | os.PathLike[str]) -> Iterator[None]:
    """The marks of this process go to the run in `folder` inside, and to whom they went before afterwards."""
    global _folder, _log, _lock
    before, (_folder, _log, _lock) = (_folder, _log, _lock), (os.fspath(folder), None, -1)
    try:
        yield
    finally:
        _stop()
        _folder, _log, _lock = before


class _Phase(contextlib.ContextDecorator):
    """A phase that looks for the run's watcher when it is entered, so that a function may be decorated before."""

    _entered: tuple[contextlib.AbstractContextManager[None], ...] = ()  # the innermost first

    def __init__(self, name: object, epoch: object):
        self._name, self._epoch = name, epoch

    def _recreate_cm(self) -> _Phase:  # a call of a decorated function has a phase of its own
        return _Phase(self._name, self._epoch)

    def __enter__(self) -> None:
        if _folder is None:
            return
        with _kept():
            if (log := _claim()) is not None:
                info = {} if self._epoch is None else {"epoch": _plain(self._epoch)}
                entered = log.phase(str(_plain(self._name)), **info)
                entered.__enter__()
                self._entered = entered, *self._entered

    def __exit__(self, *raised: Any) -> None:
        if self._entered:
            innermost, *outer = self._entered
            self._entered = tuple(outer)
            with _kept():
                innermost.__exit__(*raised)


def _claim() -> EventLog | None:
    """The log of the run that this process belongs to, if it is the one that marks."""
    global _log, _lock
    with _claiming:
        if _log is not None or _folder is None:
            return _log
        import fcntl

        from .memory.recorder import EventLog

        multiprocessing = sys.modules.get("multiprocessing.process")
        with _kept():
            if multiprocessing is not None and multiprocessing.parent_process() is not None:
                raise BlockingIOError
            _lock = os.open(os.path.join(_folder, ".marks"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _log = EventLog(_folder)
            os.register_at_fork(after_in_child=_forget)
    return _log


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """A script must not end of what can't be written about it; it is said once, unless another process marks."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, BlockingIOError):
            print(f"ogbnlib: the marks of this process are not kept any more: {error}", file=sys.stderr)
        _forget()


def _stop() -> None:
    if _log is not None:
        with _kept():
            _log.close()
    _forget()


def _forget() -> None:
    """Mark nothing more in this process, and write nothing either: it may be a fork of the one that marks."""
    global _folder, _log, _lock
    if _log is not None:
        _log.forget()
    if _lock >= 0:
        os.close(_lock)
    _folder, _log, _lock = None, None, -1


def _plain(value: Any) -> Any:
    """What JSON can hold: the number in a tensor or array of one element, the text of whatever else."""
    with contextlib.suppress(Exception):  # several elements, a lost device, whatever class
        value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, bool | str) or (isinstance(value, int | float) and abs(value) < math.inf):
        return value
    try:
        return str(value)
    except Exception:
        return type(value).__name__
