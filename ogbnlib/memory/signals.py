"""SIGUSR1, SIGTERM and SIGHUP ask a run to stop at its next batch boundary, with a checkpoint.

Slurm sends the first two before a time limit (`--signal=USR1@300`), at preemption and on scancel, a terminal that is
closed the third; the kernel sends SIGTERM to a child whose parent died. A handler here only notes the number, or passes
it on: nothing is written inside one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR2)  # to a command: whatever else would end its watcher alone
PARENT_VARIABLE = "OGBNLIB_PARENT"  # the number of the process that is to be outlived by no child that it starts


class Stopped(RuntimeError):
    """A run stopped at a batch boundary because a signal asked for it; its checkpoint is written, resume to go on."""


class StopRequest:
    """A handler that remembers. `number` is the last signal's, 0 while none has come."""

    number = 0

    def __call__(self, number: int, frame: object = None) -> None:
        self.number = number


class Presses:
    """A handler of SIGINT that counts: Ctrl-C, or a notebook's stop button. It interrupts nothing by itself."""

    number = 0

    def __call__(self, number: int, frame: object = None) -> None:
        self.number += 1


class Forward:
    """A handler that passes signals on to one process; those that come before it is started wait for it."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._waiting: list[int] = []

    def __call__(self, number: int, frame: object = None) -> None:
        if self._pid is None:
            self._waiting.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def begin(self, pid: int) -> None:
        self._pid = pid
        for number in self._waiting:
            self(number)

    def end(self) -> None:
        """To be called before `pid` is waited for: its number may be another process's afterwards."""
        self._pid = None


@contextlib.contextmanager
def handled(handler: Callable[[int, object], None], numbers: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """The stop signals, or others, go to `handler` inside, to whom they went before afterwards.

    Without effect on other threads than the main one, where Python allows no handler. SIGHUP stays ignored where it is,
    as nohup has it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _heeded(numbers)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A process started inside keeps stop signals waiting until it calls `take_over`, through all its imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_over(handler: Callable[[int, object], None]) -> None:
    """The stop signals go to `handler` for the rest of this process, those that were held back first."""
    for number in _heeded(STOP_SIGNALS):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore() -> None:
    """Stop signals change nothing from here on, up to the very end of this process.

    For workers, as Slurm signals every process of a job, and they must outlive the last batch: torch has them exit on
    SIGTERM, which its trainer reports as an error instead of stopping. They end when their loader does, or their
    trainer.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Have the kernel send signal `number` to this process when its parent dies (Linux, prctl(2)), however it does.

    Args:
        parent: Its process number; by default as `PARENT_VARIABLE` tells, or whoever it is now.
    """
    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(pr_set_pdeathsig, number)
    # Taken out: what this process starts has another parent.
    told = os.environ.pop(PARENT_VARIABLE, str(os.getppid()))
    if os.getppid() != (int(told) if parent is None else parent):
        os._exit(128 + number)  # it died before the line above
