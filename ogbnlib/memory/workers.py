"""DataLoader workers that never outlive their trainer and whose death is reported in one sentence.

torch notices a dead worker, but then waits for the others, and some never end: a process that was
killed while it held a queue's lock never releases the lock. So on every error all workers are ended
by SIGKILL.
"""

import contextlib
import errno
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection, parent_process, popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from ..errors import InputError
from .signals import block_stop_signals, die_with_parent, take_over

_started: set["_Worker"] = set()
_FULL = "/dev/shm is full (docker run --shm-size=8g)"


class WorkerDied(RuntimeError):
    """A DataLoader worker failed for a reason other than its data.

    `exit_code` is 128 + N after signal N.
    """

    def __init__(self, text: str, exit_code: int = 1):
        super().__init__(f"{text}; go on with num_workers=0 (--resume --set num_workers=0)")
        self.exit_code = exit_code


class _Worker(ForkProcess):
    """Forked process that dies with its parent, and that `terminate` ends by SIGKILL."""

    class _Popen(popen_fork.Popen):  # the name is multiprocessing's
        def terminate(self) -> None:
            """Kill the worker, since workers ignore SIGTERM.

            torch calls this, and so does multiprocessing when a process exits.
            """
            with _unwatched():
                self.kill()
                self.wait(5)

    def start(self) -> None:
        _forget_ended()
        with block_stop_signals():  # blocked until `_begin` ignores them
            super().start()
        _started.add(self)


def _forget_ended() -> None:
    _started.difference_update([worker for worker in _started if worker.exitcode is not None])


class _Context(ForkContext):
    Process = _Worker


def worker_arguments(num_workers: int) -> dict[str, Any]:
    """Arguments that a `DataLoader` needs besides `num_workers`."""
    if num_workers == 0:
        return {}
    return {"multiprocessing_context": _Context(), "worker_init_fn": _begin}


def _begin(worker_id: int) -> None:
    trainer = parent_process()
    hook = sys.excepthook
    assert trainer is not None
    _started.clear()  # siblings of this worker
    take_over(signal.SIG_IGN)
    die_with_parent(signal.SIGKILL, trainer.pid)
    # The thread that sends a batch's memory would print a traceback if the trainer ended meanwhile.
    sys.excepthook = lambda kind, *error: (
        None if issubclass(kind, (OSError, EOFError)) else hook(kind, *error)
    )


@contextlib.contextmanager
def workers_ended() -> Iterator[None]:
    """End all workers if an error occurs inside, and shorten an error that began in a worker."""
    _forget_ended()  # workers of an earlier run do not matter for this run's errors
    try:
        yield
    except BaseException as error:
        while True:
            # torch's handler of SIGCHLD may raise at any line until `_kill` has replaced it.
            with contextlib.suppress(RuntimeError):
                clear = isinstance(error, InputError) or not isinstance(error, Exception)
                # Errors of a dying worker's queues arrive before the kernel reports its death.
                died = _kill(wait_s=0.0 if clear else 1.0)
                break
        shortened = _shortened(error, died)
        if shortened is None:
            raise
        raise shortened from None


def _kill(wait_s: float) -> dict[int, int]:
    """Kill all workers; return the exit codes, by process id, of those that had failed before.

    First wait up to `wait_s` seconds for a worker to end by itself.
    """
    with _unwatched():
        workers = list(_started)
        ended = connection.wait([worker.sentinel for worker in workers], wait_s)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(1)
        died = {worker.pid: worker.exitcode for worker in workers if worker.pid and worker.exitcode}
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(5)
        _started.clear()
        return died


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Keep torch's handler of SIGCHLD from raising an error for each worker that ends inside."""
    main = threading.current_thread() is threading.main_thread()
    handler: Any = None
    while main and (handler is None or signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL):
        with contextlib.suppress(RuntimeError):  # raised for a worker that ends just now
            handler = handler or signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _shortened(error: BaseException, died: dict[int, int]) -> Exception | None:
    """Return the error to raise in place of a worker's error; None for all other errors."""
    text = str(error).rstrip()
    if died and isinstance(error, Exception):
        pid, code = next(iter(died.items()))
        who = f"a DataLoader worker (process {pid})"
        if code > 0:
            return WorkerDied(f"{who} ended with exit code {code}")
        cause = f": {_FULL}, or a mapped file shrank" if code == -signal.SIGBUS else ""
        return WorkerDied(f"{who} was ended by {signal.Signals(-code).name}{cause}", 128 - code)
    if (
        isinstance(error, OSError)
        and error.errno == errno.ENOSPC
        and shutil.disk_usage("/dev/shm").free < 2**16
    ):
        return WorkerDied(f"{_FULL}: {text}")  # the queues' semaphores did not fit
    if "in DataLoader worker process" not in text.partition("\n")[0]:
        return None
    cause = text.rpartition("\n")[2]
    if isinstance(error, InputError):
        return InputError(cause.partition("InputError: ")[2])
    if isinstance(error, MemoryError):
        return WorkerDied(f"a DataLoader worker found no memory left ({cause})")
    if "shm" in cause or "shared memory" in cause or "No space left on device" in cause:
        return WorkerDied(f"{_FULL}: {cause}")
    return None
