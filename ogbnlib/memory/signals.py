"""Stop signals: SIGUSR1, SIGTERM and SIGHUP ask a run to stop at its next batch boundary, with a
checkpoint.

Slurm sends the first two before a time limit, at preemption and on scancel; a closed terminal sends
SIGHUP.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from ..environment import PARENT_VARIABLE

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
# Passed on to a watched command; otherwise any of them would end only its watcher.
FORWARDED = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR2)


class Stopped(BaseException):
    """Raised after a signal stopped the run at a batch boundary and its checkpoint was written.

    `run` is the `Run` of a child process, with its result; None if this process was training.
    Like `KeyboardInterrupt`, it is not an `Exception`. So a sweep with `except Exception` around
    each training ends too, and does not go on during Slurm's grace period.
    """

    def __init__(self, message: str, run: Any = None):
        super().__init__(message)
        self.run = run

    def _render_traceback_(self) -> list[str]:  # one line in a notebook
        return [f"{type(self).__name__}: {self}"]


class StopRequest:
    """Handler that keeps the number of the last signal, 0 before the first."""

    number = 0

    def __call__(self, number: int, frame: object = None) -> None:
        self.number = number


class Forward(StopRequest):
    """Handler that passes signals on to a process, including the last one from before its start."""

    def __init__(self) -> None:
        self._pid: int | None = None  # None before the process's start and after its end
        self.times_s: list[float] = []  # of stop signals, in `time.monotonic()` seconds

    def __call__(self, number: int, frame: object = None) -> None:
        self.number = number
        if number in STOP_SIGNALS:
            self.times_s.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            if self._pid is not None:  # else `begin` sends it, or the process has ended
                os.kill(self._pid, number)

    def begin(self, pid: int) -> None:
        self._pid = pid
        if self.number:  # a signal that came before the process's start
            os.kill(pid, self.number)

    def end(self) -> None:
        """Call this before waiting for the process: afterwards its id may belong to another one."""
        self._pid = None


@contextlib.contextmanager
def handled(
    handler: Callable[[int, object], object], numbers: Iterable[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """Send signals to `handler` inside the context.

    Without effect outside the main thread: Python lets only that thread set handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    replaced = _without_nohup(numbers) if is_main else []
    earlier = {number: signal.signal(number, handler) for number in replaced}
    try:
        yield
    finally:
        for number, old in earlier.items():
            # None is a handler that C code installed, which Python can't set again
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _without_nohup(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    # nohup makes a process ignore SIGHUP, a shell without job control SIGTSTP. Keep it so.
    can_be_ignored = (signal.SIGHUP, signal.SIGTSTP)
    ignored = [n for n in can_be_ignored if signal.getsignal(n) == signal.SIG_IGN]
    return [number for number in numbers if number not in ignored]


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """Make a process started inside keep its stop signals pending until it calls `take_over`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # returns the mask before it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def take_over(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Send stop signals to `handler` for the rest of this process's life, pending ones first.

    Workers use `signal.SIG_IGN`: Slurm signals every process of a job, but workers must not end
    before the last batch.
    """
    for number in _without_nohup(STOP_SIGNALS):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def end_in_order(number: int, frame: object) -> NoReturn:
    """Handler that ends this process by `SystemExit(signal)`, so that its files are removed."""
    take_over(signal.SIG_IGN)  # a closed terminal sends two signals
    # Python drops an exception within a destructor. Then the kernel ends this process, still before
    # Slurm's SIGKILL, 30 s after the signal.
    signal.alarm(25)
    raise SystemExit(signal.Signals(number))


def die_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Make the kernel send signal `number` to this process when its parent dies (prctl(2)).

    `parent` is its process id, by default that in `PARENT_VARIABLE`, else of the present parent.
    """
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    # Remove the variable, because the children of this process have another parent.
    expected = os.environ.pop(PARENT_VARIABLE, str(os.getppid()))
    if os.getppid() != (parent or int(expected)):
        os._exit(128 + number)  # the parent died before prctl
