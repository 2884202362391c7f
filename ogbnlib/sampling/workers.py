"""DataLoader workers that never outlive their trainer, and whose death is reported.

torch notices a dead worker, but then waits for the others, and some never end: a process that was
killed while it held a queue's lock never releases the lock. So on every error all workers are ended
by SIGKILL.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection, parent_process, popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from ..errors import InputError
from ..memory.signals import block_stop_signals, die_with_parent, take_over

_started: set["_Worker"] = set()  # by this process, and not known to have ended


class WorkerDied(RuntimeError):
    """A DataLoader worker ended by itself, with `exit_code`, or 128 + N after signal N."""

    def __init__(self, pid: int, code: int):  # -N: ended by signal N
        end = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        super().__init__(f"a DataLoader worker (process {pid}) ended {end}")
        self.exit_code = code if code > 0 else 128 - code


class _Worker(ForkProcess):
    """Forked process that dies with its parent, and that `terminate` ends by SIGKILL."""

    class _Popen(popen_fork.Popen):  # the name is multiprocessing's
        def terminate(self) -> None:
            """Kill the worker, for torch and for multiprocessing: workers ignore SIGTERM."""
            with _unwatched():
                self.kill()
                self.wait(5)

    def start(self) -> None:
        _forget_ended()  # else the set grows with each pass over a loader
        with block_stop_signals():  # blocked until `_begin` ignores them
            super().start()
        _started.add(self)


def _forget_ended() -> None:
    _started.difference_update([worker for worker in _started if worker.exitcode is not None])


class _Context(ForkContext):
    Process = _Worker  # the class of the workers that a DataLoader starts


def worker_arguments(num_workers: int) -> dict[str, Any]:
    """Arguments that a `DataLoader` needs besides `num_workers`."""
    if num_workers == 0:
        return {}
    return {"multiprocessing_context": _Context(), "worker_init_fn": _begin}


def _begin(worker_id: int) -> None:  # in each new worker
    trainer = parent_process()
    hook = sys.excepthook
    assert trainer is not None
    _started.clear()  # siblings of this worker
    take_over(signal.SIG_IGN)  # stop signals go to the whole group; the trainer ends its workers
    die_with_parent(signal.SIGKILL, trainer.pid)
    # The thread that sends a batch's memory would print a traceback if the trainer ended meanwhile.
    sys.excepthook = lambda kind, *error: (
        None if issubclass(kind, (OSError, EOFError)) else hook(kind, *error)
    )


@contextlib.contextmanager
def workers_ended() -> Iterator[None]:
    """End all workers if an error occurs inside; raise `WorkerDied` if one had ended by itself."""
    _forget_ended()  # workers of an earlier run do not matter for this run's errors
    try:
        yield
    except BaseException as error:
        while True:
            # Again if torch's handler of SIGCHLD raises, at any line until `_kill` has replaced it.
            with contextlib.suppress(RuntimeError):
                # Bad data, KeyboardInterrupt and the like need no dead worker as their cause: do
                # not wait for one. With bad data, one that is dead already is still reported.
                is_clear = isinstance(error, InputError) or not isinstance(error, Exception)
                # Errors of a dying worker's queues arrive before the kernel reports its death.
                died = _kill(wait_s=0.0 if is_clear else 1.0)
                break
        if died and isinstance(error, Exception):
            raise WorkerDied(*next(iter(died.items()))) from None  # one of them
        text = str(error).rstrip()
        if isinstance(error, InputError) and "in DataLoader worker process" in text:
            # torch adds the worker's traceback, whose last line has the message
            raise InputError(text.rpartition("InputError: ")[2]) from None
        raise


def _kill(wait_s: float) -> dict[int, int]:
    """Wait up to `wait_s` seconds for a worker to end by itself, then kill all; return the exit
    codes, by process id, of those that had failed before."""
    with _unwatched():
        workers = list(_started)
        ended = connection.wait([worker.sentinel for worker in workers], wait_s)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(1)  # so that its exit code is known
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
    main = threading.current_thread() is threading.main_thread()  # others can't set a handler
    handler: Any = None  # torch's, if it was replaced
    # again until both lines of the loop are done, as torch's handler may raise at any line
    while main and (handler is None or signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL):
        with contextlib.suppress(RuntimeError):  # a worker has just ended
            # getsignal returns None for a handler of C code
            handler = handler or signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)
