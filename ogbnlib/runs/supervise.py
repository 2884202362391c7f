"""A command in a child process inside a limit: started, relayed, recorded, and ended with all its
processes."""

import contextlib
import errno
import fcntl
import functools
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import clock
from ..display import Live
from ..errors import InputError, remedy_of
from ..files import open_to_write, write_all
from ..memory.limits import Limit, Watchdog
from ..memory.reading import huge_pages
from ..memory.record import Record, RunPaths
from ..memory.recorder import Recorder
from ..memory.signals import FORWARDED, Forward, block_stop_signals, handled, resume, suspend
from ..memory.tree import MARKS_VARIABLE, Tree, adopting, new_mark
from ..memory.written import Written
from .exit_codes import STOPPED
from .folder import standing

# For the trainer alone; another command runs as it is. glibc's malloc keeps much freed memory
# (mallopt(3)): two arenas for all threads, not eight per core, let a run finish with 40 MB less.
# Blocks from 4 MiB on come from mmap and go back at once, where the default threshold grows to 32
# MiB: 75 MB less at the peak of [15, 10, 5] x 1024. Setting it fixes the other threshold at 128
# KiB, above which free memory at the heap's end goes back: then every step of [3, 2] x 128 asks for
# the same pages again, which takes 15 % of its time. 8 MiB is what malloc itself would choose,
# twice 4.
MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(2**22),
    "MALLOC_TRIM_THRESHOLD_": str(2**23),
}
# torch then asks for huge pages (2 MB) for its large tensors, which the kernel else maps 4 KB at a
# time: a step of [15, 10, 5] x 1024 x 256 takes 0.58 instead of 0.85 CPU seconds, with the same
# losses and the same peak, 1026 and 1028 MB. With them the threshold of 4 MiB costs 4 % of a step
# and saves 33 MB, against 32 MiB 6 % and 78 MB.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
GRACE_S = 120.0  # for a checkpoint, when a run must stop because its folder can't be written
# of the output, for its last words: a traceback through DataLoader workers or ranks takes 5,000
TAIL_BYTES = 2**15
STOP_S = 4.0  # for a checkpoint, when a person waits for the end


def trainer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of malloc and torch's allocator for a trainer, but for those that `environ` has
    already."""
    values = {**MALLOC, HUGE_PAGES: "1"} if huge_pages() in ("always", "madvise") else MALLOC
    return {name: value for name, value in values.items() if name not in environ}


@dataclass
class Outcome:
    """The end of a supervised process tree. `exit_code` is 128 + N after signal N; `evidence` is
    `Limit.evidence`."""

    exit_code: int
    tail: str
    record: Record
    evidence: dict[str, Any]
    peak_bytes: int | None
    interrupted: bool = False
    # why the command had to stop: its samples or output could not be written
    unwritable: str | None = None
    forwarded: int = 0  # the last signal that was passed on, 0 without one


class _Unwritable:
    """Handler of a folder that can't be written: SIGTERM for a trainer, and SIGKILL after
    `GRACE_S`."""

    # Another command goes on: its work is worth more than its record.
    message: str | None = None

    def __init__(self, tree: Tree, *, stops: bool):
        self._pid, self._stops, self.timer = tree.pid, stops, threading.Timer(GRACE_S, tree.kill)

    def __call__(self, error: OSError) -> None:
        if self.message is not None:
            return
        then = "the command is no longer recorded"
        if self._stops:
            then = "free some space there and go on with --resume"
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                then = f"{remedy_of(error.errno)}, then go on with --resume"
        self.message = f"{error.filename}: {error.strerror}; {then}"
        print(f"error: {self.message}", file=sys.stderr, flush=True)
        if self._stops:
            self.timer.start()
            os.kill(self._pid, signal.SIGTERM)


def supervise(
    argv: list[str],
    run_dir: Path,
    limit: Limit,
    *,
    recorder: Recorder | None = None,
    env: Mapping[str, str] | None = None,  # added to this process's own environment
    echo: bool = True,  # relay the output and each kind of step; it is in `output.log` in any case
    how: str = "none",  # the kind of live line, see `Live`
    # for a trainer: until it calls `signals.take_over` its stop signals are blocked
    holds_back: bool = False,
    inherited: tuple[int, ...] = (),  # file descriptors
    stdin: int | None = subprocess.DEVNULL,
) -> Outcome:
    """Run a command inside `limit`, record it in `run_dir` until it ends, and end all its
    processes.

    In the main thread, signals that would end this process are passed on to the child, and SIGINT
    stops it in order, a second one at once. A command that can't be executed ends with 126 or 127,
    as in a shell.
    """
    recorder, forward, interrupts = recorder or Recorder(run_dir), Forward(), list[int]()
    marks, written = new_mark(), Written()
    with (
        adopting(),
        handled(forward, FORWARDED),
        handled(lambda number, frame: interrupts.append(number), [signal.SIGINT]),
        handled(lambda number, frame: suspend(limit.tree), [signal.SIGTSTP]),
        handled(lambda number, frame: resume(limit.tree), [signal.SIGCONT]),
    ):
        try:
            with block_stop_signals() if holds_back else contextlib.nullcontext():
                process = subprocess.Popen(
                    limit.command(argv),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                    # Ctrl-C reaches the parent alone, which then ends the child in order
                    start_new_session=True,
                    env={
                        **os.environ,
                        "PYTHONUNBUFFERED": "1",
                        MARKS_VARIABLE: marks,
                        clock.CLOCK_VARIABLE: repr(clock.boot_s),
                        **(env or {}),
                    },
                )
        except BaseException as error:
            evidence = limit.evidence()
            limit.close()  # no process was started in it
            recorder.stop()
            if not isinstance(error, OSError):
                raise
            code, message = (
                127 if error.errno == errno.ENOENT else 126,
                f"error: {argv[0]}: {error.strerror}",
            )
            return Outcome(code, message, recorder.record, evidence, None)
        assert process.stdout is not None
        tree = Tree(process.pid, marks.rpartition(":")[2])
        tree.written = written
        forward.begin(process.pid)
        unwritable = _Unwritable(tree, stops=holds_back)
        tail, status, left = "", -signal.SIGKILL, list[str]()
        try:
            limit.tree = tree
            recorder.start(
                tree,
                limit,
                on_error=tree.kill,  # a run without a watchdog must not go on
                on_unwritable=unwritable,
            )
            text = functools.partial(standing, run_dir, recorder.record, limit.limit_bytes)
            with _guarded(limit), Live(text, how, apart=not holds_back, steps=echo) as live:
                stop = functools.partial(_stop_if_asked, tree, interrupts, [], live)
                show = live.write if echo else lambda data: None
                tail = _relay(
                    process.pid,
                    process.stdout.fileno(),
                    RunPaths(run_dir).output,
                    show,
                    unwritable,
                    stop,
                )
                left = tree.names_left()
        finally:
            forward.end()
            unwritable.timer.cancel()  # before the process is waited for
            tree.end()
            try:
                status = process.wait()
            finally:
                process.stdout.close()
                interrupted = bool(interrupts)
                evidence, peak = _close(limit, recorder, 0 if interrupted else status, tail)
    code = 130 if interrupted else 128 - status if status < 0 else status
    if evidence["killed_by"]:
        evidence |= {"ended_with": status} if status >= 0 else {}
        code = 137  # also where the killer chose a worker, or the parent ended first
    elif left and not interrupted:
        evidence["left_behind"] = left
    return Outcome(
        code, tail, recorder.record, evidence, peak, interrupted, unwritable.message, forward.number
    )


@contextlib.contextmanager
def _guarded(limit: Limit) -> Iterator[None]:
    """Have another process stop the tree whenever this one is stopped, under a watchdog: the kernel
    goes on to limit."""
    if limit.tree is None or limit.limit_bytes is None or not isinstance(limit, Watchdog):
        yield
        return
    quiet = subprocess.DEVNULL
    # In a session of its own, since a signal to this process's group must not stop it.
    guard = subprocess.Popen(
        limit.tree.guard_command(), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def _stop_if_asked(tree: Tree, interrupts: list[int], until_s: list[float], live: Live) -> None:
    """After an interrupt send SIGTERM, which a trainer answers with a checkpoint; then SIGKILL."""
    if interrupts and not until_s:
        until_s.append(time.monotonic() + STOP_S)
        live.write("stopping ...\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(tree.pid, signal.SIGTERM)
    elif len(interrupts) > 1 or (until_s and time.monotonic() > until_s[0]):
        tree.kill()


def _close(
    limit: Limit, recorder: Recorder, status: int, tail: str
) -> tuple[dict[str, Any], int | None]:
    """Close recorder and limit; return the limit's evidence and the kernel's peak."""
    try:
        recorder.stop()
    finally:
        # torch's report of a killed worker (torch.utils.data, signal_handling); its trainer then
        # ends by itself.
        worker_killed = re.search(r"worker \(pid\S* \d+\) is killed by signal: Killed", tail)
        by_sigkill = status in (-signal.SIGKILL, 128 + signal.SIGKILL) or worker_killed is not None
        limit.ended(0 if status == STOPPED else status, by_sigkill)
        evidence = limit.evidence()
        peak = limit.cgroup.peak_bytes() if limit.cgroup else None
        limit.close()
    return evidence, peak


def _relay(
    pid: int,
    pipe: int,
    path: Path,
    show: Callable[[bytes], object],
    unwritable: _Unwritable,
    stop: Callable[[], None],
) -> str:
    """Copy the child's output from a pipe to the log and to `show` until it ends; return its
    tail."""
    tail, pause_s, ended_s, pending, log = b"", 0.2, 0.0, 0, -1
    try:
        log = open_to_write(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        unwritable(error)
    except InputError:  # somebody's link has taken its place
        unwritable(OSError(errno.EPERM, "expected a file of your own", str(path)))
    try:
        while True:
            readable, _, _ = select.select([] if pipe < 0 else [pipe], [], [], pause_s)
            stop()
            data = os.read(pipe, 65536) if readable else b""
            if data:
                try:
                    write_all(log, data)
                except OSError as error:
                    unwritable(OSError(error.errno, error.strerror, str(path)))
                tail, pending = (tail + data)[-TAIL_BYTES:], pending - len(data)
                show(data)
            elif readable:
                # Closed, which is nearly always the end; but a command may go on without output.
                pipe, pause_s = -1, 0.001
            else:
                pause_s = min(0.2, 2 * pause_s)
            # WNOWAIT keeps the process number reserved until `supervise` has ended the whole tree.
            if not ended_s and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended_s = time.monotonic()
                if pipe >= 0:
                    (pending,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
            # An orphaned worker may keep the pipe open for ever: half a second of silence, or of
            # its output, ends it.
            if ended_s and (
                pipe < 0 or (time.monotonic() - ended_s > 0.5 and (not readable or pending <= 0))
            ):
                return tail.decode(errors="replace")
    finally:
        if log >= 0:
            os.close(log)
