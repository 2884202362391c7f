"""A command in a child process inside a limit: started, relayed, recorded, and ended with all that it leaves behind."""

from __future__ import annotations

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..memory.limits import Limit, kill_tree
from ..memory.recorder import Recorder
from ..memory.signals import FORWARDED, Forward, InterruptCounter, block_stop_signals, handled
from ..memory.tally import Tally
from ..progress import Live
from .diagnosis import STOPPED
from .folder import OUTPUT, standing

# For our trainer; another command is to be seen as it is. glibc's malloc keeps much of what is freed (mallopt(3)). Two
# arenas for all threads, not eight per core: a run under 40 MB of head-room finished that was killed before. Blocks
# from 4 MiB on come from mmap and go back at once, where the default raises that size to 32 MiB as it goes: 75 MB less
# at the peak of [15, 10, 5] x 1024, at the same speed.
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(4 * 2**20)}
GRACE_S = 120.0  # for a checkpoint, once a run has been told to stop because its folder can't be written
STOP_S = 4.0  # for a checkpoint, once a person has pressed stop, who is waiting for the end
# How torch tells of a worker that was killed (torch.utils.data, signal_handling); its trainer then ends by itself.
_WORKER_KILLED = re.compile(r"worker \(pid\S* \d+\) is killed by signal: Killed")


@dataclass
class Outcome:
    """How a supervised process tree ended. `exit_code` is 128 + N after signal N; `evidence` is `Limit.evidence`."""

    exit_code: int
    tail: str
    tally: Tally
    evidence: dict[str, Any]
    peak_bytes: int | None
    interrupted: bool = False
    unwritable: str | None = None  # why the command was told to stop, where its samples or output could not be kept


class _Unwritable:
    """Has a trainer stop in order, by SIGTERM, because something about it can't be written; SIGKILL after a while.

    Another command goes on: its work is worth more than its recording.
    """

    said: str | None = None
    _timer: threading.Timer | None = None

    def __init__(self, pid: int, *, stops: bool):
        self._pid, self._stops = pid, stops

    def __call__(self, error: OSError) -> None:
        if self.said is None:
            then = "make room there, or mend it, and go on with --resume" if self._stops else "it was not recorded on"
            self.said = f"{error.filename}: {error.strerror}; {then}"
            print(f"error: {self.said}", file=sys.stderr, flush=True)
            if not self._stops:
                return
            self._timer = threading.Timer(GRACE_S, kill_tree, [self._pid])
            self._timer.start()
            os.kill(self._pid, signal.SIGTERM)

    def end(self) -> None:
        """To be called before the process is waited for."""
        if self._timer is not None:
            self._timer.cancel()


class _Stopping:
    """Ends a command that was interrupted: by SIGTERM, which a trainer answers with a checkpoint between two batches,
    and by SIGKILL after some seconds or on a second press.
    """

    def __init__(self, pid: int, presses: InterruptCounter, live: Live | None):
        self._pid, self._presses, self._live, self._until_s = pid, presses, live, 0.0

    def __call__(self) -> None:
        if not self._presses.number:
            return
        if not self._until_s:
            self._until_s = time.monotonic() + STOP_S
            if self._live is None:
                print("stopping ...", file=sys.stderr)
            else:
                self._live.write("stopping ...\n")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
        elif self._presses.number > 1 or time.monotonic() > self._until_s:
            kill_tree(self._pid)


def supervise(
    argv: list[str],
    run_dir: Path,
    limit: Limit,
    *,
    recorder: Recorder | None = None,
    env: Mapping[str, str] | None = None,
    echo: bool = True,
    how: str = "none",
    holds_back: bool = False,
    inherited: tuple[int, ...] = (),
    stdin: int | None = subprocess.DEVNULL,
) -> Outcome:
    """Run a command inside `limit`, recorded in `run_dir` until it ends, and end all that it leaves behind.

    Signals that would end this process are passed on to the child meanwhile, if this is the main thread, and SIGINT
    ends it in order, at once when it comes again. A command that can't be executed ends with 126, or 127 where it or
    its interpreter is not there, as in a shell.

    Args:
        recorder: One of `run_dir`, where it has one already.
        env: Beside this process's own environment.
        echo: Relay the output; it is in `output.log` either way.
        how: What is shown of it meanwhile, as `Live` takes it.
        holds_back: The command calls `signals.take_over`; until then it keeps stop signals waiting.
        inherited: Descriptors.
        stdin: As `subprocess.Popen` takes it.
    """
    recorder, forward, presses = recorder or Recorder(run_dir), Forward(), InterruptCounter()
    with handled(forward, FORWARDED), handled(presses, [signal.SIGINT]):
        try:
            with block_stop_signals() if holds_back else contextlib.nullcontext():
                process = subprocess.Popen(
                    limit.command(argv),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                    start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the child in order
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                )
        except BaseException as error:
            evidence = limit.evidence()
            limit.close()  # no process was started in it
            recorder.stop()
            if not isinstance(error, OSError):
                raise
            code, said = 127 if error.errno == errno.ENOENT else 126, f"error: {argv[0]}: {error.strerror}"
            return Outcome(code, said, recorder.tally, evidence, None)
        forward.begin(process.pid)
        unwritable = _Unwritable(process.pid, stops=holds_back)
        tail, status = "", -signal.SIGKILL
        try:
            limit.pid = process.pid
            recorder.start(
                process.pid,
                cgroup=lambda: limit.cgroup,
                longest_pause_s=limit.longest_pause_s,
                check=limit.check,
                on_error=lambda: kill_tree(process.pid),  # a run whose memory nobody watches must not go on
                on_unwritable=unwritable,
            )
            text = functools.partial(standing, run_dir, recorder.tally, limit.limit_bytes)
            with Live(text, how, every_step=echo, apart=not holds_back) as live:
                stopping = _Stopping(process.pid, presses, live if how != "none" else None)
                show = functools.partial(_show, live, recorder) if echo else lambda data: False
                tail = _relay(process, run_dir / OUTPUT, show, unwritable, stopping)
        finally:
            forward.end()
            unwritable.end()
            kill_tree(process.pid)
            try:
                status = process.wait()
            finally:
                interrupted = presses.number > 0
                evidence, peak = _close(process, limit, recorder, 0 if interrupted else status, tail)
    code = 130 if interrupted else 128 - status if status < 0 else status
    if evidence["killed_by"]:
        evidence |= {"ended_with": status} if status >= 0 else {}
        code = 137  # a worker was picked by the killer, or its parent ended first: the tree died of the same cause
    return Outcome(code, tail, recorder.tally, evidence, peak, interrupted, unwritable.said)


class _Log:
    """output.log, appended to as long as it can be."""

    def __init__(self, path: Path, unwritable: _Unwritable):
        self._path, self._unwritable = path, unwritable

    def __enter__(self) -> _Log:
        try:
            self._file = open(self._path, "ab", buffering=0)
        except OSError as error:
            self._unwritable(error)
            self._file = open(os.devnull, "ab", buffering=0)
        return self

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self._unwritable(OSError(error.errno, error.strerror, str(self._path)))

    def __exit__(self, *raised: object) -> None:
        self._file.close()


def _close(
    process: subprocess.Popen[bytes], limit: Limit, recorder: Recorder, status: int, tail: str
) -> tuple[dict[str, Any], int | None]:
    """Let go of everything; what the limit knows of the end, and the peak that the kernel counted."""
    assert process.stdout is not None
    process.stdout.close()
    try:
        recorder.stop()
    finally:
        by_sigkill = status in (-signal.SIGKILL, 128 + signal.SIGKILL) or bool(_WORKER_KILLED.search(tail))
        limit.ended(0 if status == STOPPED else status, by_sigkill)
        evidence = limit.evidence()
        peak = limit.cgroup.peak_bytes() if limit.cgroup else None
        limit.close()
    return evidence, peak


def _show(live: Live, recorder: Recorder, data: bytes) -> bool:
    """Relay output; False, and noted in the run's folder, once nobody takes it any more."""
    live.write(data)
    if (refusal := live.refusal()) is None:
        return True
    with contextlib.suppress(OSError):
        text = f"standard output: {refusal.strerror}; from here on the output is in {OUTPUT} alone"
        recorder.log.mark("note", text=text)
    return False


def _relay(
    process: subprocess.Popen[bytes],
    log_path: Path,
    show: Callable[[bytes], bool],
    unwritable: _Unwritable,
    stopping: Callable[[], object],
) -> str:
    """Copy the output to the log, and to `show` until that is False, until the child ends; returns its last lines."""
    assert process.stdout is not None
    descriptor, tail, pause_s, ended_s, pending, shown = process.stdout.fileno(), b"", 0.2, 0.0, 0, True
    with _Log(log_path, unwritable) as log:
        while True:
            readable, _, _ = select.select([] if descriptor < 0 else [descriptor], [], [], pause_s)
            stopping()
            data = os.read(descriptor, 65536) if readable else b""
            if data:
                log.write(data)
                tail, pending = (tail + data)[-4000:], pending - len(data)
                shown = shown and show(data)
            elif readable:  # closed, which is nearly always the end; but a command may go on without
                descriptor, pause_s = -1, 0.001
            else:
                pause_s = min(0.2, 2 * pause_s)
            # It is not waited for here: its number stays its own until then.
            if not ended_s and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended_s = time.monotonic()
                if descriptor >= 0:
                    (pending,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
            # An orphaned worker may hold the pipe open for ever: half a second of silence is the end, or of its words.
            if ended_s and (descriptor < 0 or (time.monotonic() - ended_s > 0.5 and (not readable or pending <= 0))):
                break
    return tail.decode(errors="replace")
