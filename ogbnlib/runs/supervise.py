"""Run a command in a child process under a limit: relay and record it, end all its processes."""

import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..display import Live
from ..environment import MARKS_VARIABLE
from ..files import open_to_write, write_all
from ..memory.limits import Limit
from ..memory.record import RunPaths
from ..memory.recorder import Recorder
from ..memory.signals import FORWARDED, Forward, block_stop_signals, handled
from ..memory.tree import Tree, adopting
from .codes import STOPPED
from .folder import standing

# Bytes of the output's end, for its last words: a traceback through DataLoader workers or ranks
# takes 5,000.
TAIL_BYTES = 2**15
STOP_S = 4.0  # for a checkpoint, when a person waits for the end
LEAD_S = 300.0  # for a checkpoint after a stop signal; the job scripts' --signal leaves 120 s


@dataclass
class Outcome:
    """The end of a supervised process tree."""

    exit_code: int  # 128 + N after signal N
    tail: str  # the last `TAIL_BYTES` of the output
    # `Limit.evidence` with `kernel_peak_bytes` and `unwritable`: arguments of `Attempt.end`
    evidence: dict[str, Any]
    forwarded: int = 0  # the last signal that was passed on, 0 without one


def supervise(
    argv: list[str],
    run_dir: Path,
    limit: Limit,
    *,
    recorder: Recorder | None = None,
    env: Mapping[str, str] | None = None,  # added to this process's own environment
    interrupts: Sequence[int] = (),  # to which the caller's handler of SIGINT adds
    echo: bool = True,  # relay output (output.log has it anyway)
    # if True, its stop signals stay blocked until it calls `signals.take_over`
    is_trainer: bool = False,
    inherited: tuple[int, ...] = (),  # file descriptors that the command inherits
    stdin: int | None = subprocess.DEVNULL,
) -> Outcome:
    """Run a command inside `limit`, record it in `run_dir` until it ends, and end all its
    processes.

    In the main thread, signals that would end this process are passed on to the child. An entry in
    `interrupts` stops the child in order, a second one at once. A trainer is killed if it goes on
    for `LEAD_S` after a signal, or until a second one.
    """
    recorder = recorder or Recorder(run_dir)
    forward = Forward()
    # the marks of the outer process trees, and at the end the new tree's own
    marks = f"{os.environ.get(MARKS_VARIABLE, '')}:{uuid.uuid4().hex}"
    variables = {"PYTHONUNBUFFERED": "1", MARKS_VARIABLE: marks, **(env or {})}
    with (
        adopting(),  # the command's daemons, so that they can be found and ended
        handled(forward, FORWARDED),
        contextlib.closing(limit),  # a caller may close it again
        open(RunPaths(run_dir).output, "ab", opener=open_to_write) as log,
    ):
        with contextlib.ExitStack() as stack:
            stack.callback(recorder.stop)
            with block_stop_signals() if is_trainer else contextlib.nullcontext():
                process = subprocess.Popen(
                    limit.command(argv),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=inherited,
                    # Ctrl-C reaches the parent alone, which then ends the child in order
                    start_new_session=True,
                    env={**os.environ, **variables},
                )
            # At the end, in reverse order: signals are passed on no more, all processes are
            # killed, the command is waited for, and the recorder stops.
            stack.enter_context(process)
            tree = Tree(process.pid, marks.rpartition(":")[2])
            stack.callback(tree.end)
            stack.callback(forward.end)
            child = _Child(process, tree, limit, recorder, forward, interrupts, is_trainer)
            tail = child.follow(log, run_dir, echo)
        return child.outcome(tail)  # before the limit, which has the evidence, is closed


@dataclass
class _Child:
    """A started command with its limit and recorder."""

    process: subprocess.Popen[bytes]
    tree: Tree
    limit: Limit
    recorder: Recorder
    forward: Forward
    interrupts: Sequence[int]
    is_trainer: bool
    stop_until_s: float | None = None  # when SIGKILL follows the SIGTERM of an interrupt
    unwritable: str | None = None  # why samples or output could not be written

    def follow(self, log: BinaryIO, run_dir: Path, echo: bool) -> str:
        """Record the command and relay its output, also to `log`, until it ends; return the
        output's tail."""
        self.forward.begin(self.process.pid)  # sends it the last signal that came before
        self.limit.tree = self.tree
        self.recorder.start(self.tree, self.limit, on_unwritable=self._note_unwritable)
        text = functools.partial(standing, run_dir, self.recorder.record, self.limit.limit_bytes)
        with (
            handled(self._suspend, [signal.SIGTSTP]),
            handled(lambda number, frame: self.tree.signal(signal.SIGCONT), [signal.SIGCONT]),
            Live(text) as live,
        ):
            return self._relay(log, live, echo)

    def outcome(self, tail: str) -> Outcome:
        """The end of the command, when all its processes are gone and the recorder has stopped."""
        status = self.process.returncode
        code = 128 - status if status < 0 else status
        # torch's report of a killed DataLoader worker (torch.utils.data, signal_handling). The
        # trainer then ends by itself.
        worker_killed = re.search(r"worker \(pid\S* \d+\) is killed by signal: Killed", tail)
        # `_stop_if_asked` may have sent the SIGKILL
        is_own_kill = self.interrupts or (code == 137 and self._is_overdue())
        failed = code not in (0, STOPPED) and not is_own_kill
        # a SIGKILL that was not sent from here may be the kernel's, which its counter shows
        self.limit.ended(failed and (code == 137 or worker_killed is not None))
        evidence = self.limit.evidence()
        if evidence["killed_by"]:
            code = 137  # also where the killer chose a worker, or the parent ended first
        elif self.interrupts:
            code = 130  # as after SIGINT
        elif is_own_kill:
            code = 128 + self.forward.number  # the signal that it did not react to
        evidence["unwritable"] = self.unwritable
        if self.limit.cgroup:
            evidence["kernel_peak_bytes"] = self.limit.cgroup.size("peak")
        return Outcome(code, tail, evidence, self.forward.number)

    def _relay(self, log: BinaryIO, live: Live, echo: bool) -> str:
        """Copy the command's output to the log, and to `live` with `echo`, until it ends; return
        the output's tail."""
        tail = b""
        for data in _output(self.process, lambda: self._stop_if_asked(live)):
            tail = (tail + data)[-TAIL_BYTES:]
            try:  # a full disk must not end the work
                write_all(log.fileno(), data)
            except OSError as error:
                # write(2) does not name the file
                self._note_unwritable(OSError(error.errno, error.strerror, log.name))
            if echo:
                live.write(data)
        return tail.decode(errors="replace")

    def _note_unwritable(self, error: OSError) -> None:
        """Report once that the record has gaps; the work is worth more than its record."""
        if self.unwritable is None:
            self.unwritable = f"{error.filename}: {error.strerror}"
            print(f"error: {self.unwritable}; the record has gaps", file=sys.stderr, flush=True)

    def _suspend(self, number: int, frame: object) -> None:
        """Handle Ctrl-Z, which reaches this process alone: stop the command, then this process."""
        # SIGTSTP would be discarded in the command's session, which no shell controls.
        self.tree.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _stop_if_asked(self, live: Live) -> None:
        """After an interrupt send SIGTERM, on which a trainer writes a checkpoint. SIGKILL follows
        after `STOP_S`, or at a second interrupt. Also kill a trainer that is overdue."""
        if self._is_overdue():
            self.tree.kill()
        if not self.interrupts:
            return
        if self.stop_until_s is None:
            self.stop_until_s = time.monotonic() + STOP_S
            live.write("stopping ...\n")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.tree.pid, signal.SIGTERM)
        elif len(self.interrupts) > 1 or time.monotonic() > self.stop_until_s:
            self.tree.kill()

    def _is_overdue(self) -> bool:
        """Whether a trainer goes on after a stop signal's time, or after a second signal."""
        times_s = self.forward.times_s
        if not self.is_trainer or not times_s:
            return False
        # Slurm and the job script may send the same signal within milliseconds.
        is_repeated = times_s[-1] - times_s[0] > STOP_S
        return is_repeated or time.monotonic() - times_s[0] > LEAD_S


def _output(process: subprocess.Popen[bytes], each_time: Callable[[], None]) -> Iterator[bytes]:
    """Yield the output of a process until it ends; call `each_time` every 0.05 s or sooner.

    The process is not waited for, so that its process id stays reserved.
    """
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    is_open = True
    ended_s = None
    while True:
        # A command may close its output and go on.
        readable, _, _ = select.select([pipe] if is_open else [], [], [], 0.05)  # seconds
        each_time()
        data = os.read(pipe, 65536) if readable else b""  # all that a pipe can hold
        is_open = is_open and (bool(data) or not readable)  # readable without data: its end
        if data:
            yield data
        # An orphaned worker may keep the pipe open for ever. So reading also stops half a second
        # after the process's end, with at least one read after it.
        if ended_s is not None and (not is_open or time.monotonic() - ended_s > 0.5):
            return
        if ended_s is None and os.waitid(  # WNOWAIT leaves the ended process unwaited for
            os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
        ):
            ended_s = time.monotonic()
