"""Run the trainer, or any command, in a child process under a real memory limit, and come back whatever happens to it.

The parent records the child's memory, relays its output and writes `result.json`; an out-of-memory kill is a result.
What the limit covers: the child and every process it starts, with the page cache they fill where it is a cgroup. What
it does not cover: CPU time, disk, GPU memory, and files already cached by others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import TrainConfig, check_config
from ..errors import InputError, clear_errors, format_bytes, parse_bytes, shortened
from ..files import home, next_run_dir
from ..forecast.sizes import RUNTIME_BYTES, GraphSize, raw_bytes, size_of
from ..forecast.step import try_model
from ..marks import RUN_VARIABLE
from ..memory.cgroup import LIMIT_VARIABLE, counting_cgroup, effective_limit
from ..memory.cuda import allocator_environment, check_precision, resolve_device
from ..memory.limits import Limit, make_limit
from ..memory.signals import PARENT_VARIABLE, InterruptCounter, handled
from ..progress import Live, check_notebook, doing, drawn, in_notebook, is_kernel_ending
from ..registry import MODELS
from ..sources.catalog import locate_for
from .attempt import Attempt
from .diagnosis import resumption
from .folder import CONFIG_VARIABLE, Run, own_run_dir, standing
from .supervise import MALLOC, Outcome, supervise


@clear_errors()
def watch(
    argv: Sequence[str] | int,
    memory_limit: str | int | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    limit_by: str = "auto",
    echo: bool = True,
) -> Run:
    """Run any command in a child process, recorded and limited as `run` does it; inside, `ogbnlib.phase` names moments.

    It has this process's environment and working directory, and its standard input unless that is a terminal or a
    notebook's; its two outputs come back as one.

    Args:
        argv: The command and its arguments; what begins with an option is this Python's: `["-m", "ogbnlib", ...]`. Or
            the number of a process that runs already, which is then recorded until it ends, without a limit.
        run_dir: The new or empty folder to record it in. Without it, a new one under `runs_dir` called `name`, or by
            the script.

    Raises:
        InputError: for a bad limit, or a command that is not there, before anything is written.
        KeyboardInterrupt: when interrupted; the command is ended (a process of before goes on) and `result.json`
            written first.
    """
    if isinstance(argv, int):
        if memory_limit is not None:
            raise InputError("memory_limit: expected none for a process that runs already, which is only recorded")
        return _watch_process(argv, home(run_dir) if run_dir else next_run_dir(runs_dir, name or f"process-{argv}"))
    limit_bytes, notes = _attainable(memory_limit, say=echo)
    argv = [sys.executable, *argv] if argv[:1] and argv[0].startswith("-") else [*argv]
    if not argv or shutil.which(argv[0]) is None:
        hint = "; put `python` before a script" if argv and Path(argv[0]).is_file() else ""
        raise InputError(f"argv: expected a command that can be run, got {argv}{hint}")
    limit, refused = make_limit(limit_bytes, limit_by)
    script = next((word for word in argv if word.endswith((".py", ".sh"))), argv[0])
    folder = home(run_dir) if run_dir is not None else next_run_dir(runs_dir, name or Path(script).stem)
    with contextlib.closing(limit), own_run_dir(None, folder, resume=False) as (before, _):
        attempt = Attempt(before, memory_limit_bytes=limit_bytes, limit_by=limit.name, command=argv)
        more = {"limits_refused": refused, "notes": notes}
        how: dict[str, Any] = {
            "echo": echo,
            "how": "auto",
            "stdin": subprocess.DEVNULL if os.isatty(0) or in_notebook() else None,
        }
        return _carry_out(attempt, argv, limit, more, **how)


def _watch_process(pid: int, folder: Path) -> Run:
    """Record a process that is none of ours until it ends, or until this one is interrupted."""
    import psutil

    try:
        process = psutil.Process(pid)
        if pid == os.getpid() or not _goes_on(process):
            raise psutil.NoSuchProcess(pid)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        raise InputError(f"pid: expected the number of another process that runs, got {pid}") from None
    with own_run_dir(None, folder, resume=False) as (before, _):
        attempt, cgroup, interrupted = Attempt(before, watched_pid=pid), counting_cgroup(pid), False
        kills = cgroup.oom_kills() if cgroup else None
        attempt.recorder.start(pid)
        try:
            with Live(lambda: standing(folder, attempt.recorder.tally, None), apart=True):
                while _goes_on(process):
                    time.sleep(0.1)
        except KeyboardInterrupt:
            interrupted = True
        attempt.recorder.stop()
        after = cgroup.oom_kills() if cgroup else None
        struck = None if kills is None or after is None else after - kills
        done = attempt.end(None, watched_pid=pid, kills_around=struck, interrupted=interrupted)
    if interrupted:
        raise shortened(KeyboardInterrupt(f"{folder}: interrupted; the process goes on, unrecorded"))
    return done


def _goes_on(process: Any) -> bool:
    """Whether a process has not ended, nor its number been given to another one."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@clear_errors()
def run(
    config: TrainConfig | None = None,
    memory_limit: str | int | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    resume: bool = False,
    limit_by: str = "auto",
    echo: bool = True,
    live: bool = False,
    num_ranks: int = 1,
) -> Run:
    """Train in a child process under a memory limit and return what happened, an out-of-memory kill included.

    Args:
        config: What to train; None for what the run to resume was trained with, so that
            `run(run_dir="runs/a", resume=True)` goes on after any interruption.
        memory_limit: "2 GB" or bytes; None records without a limit, or resumes under the one that the run had. Where
            less can be had here, that is the limit.
        run_dir: The run's folder, new or empty (or the run to resume). Without it, a new folder under `runs_dir`
            called `name`, or by data set and policy.
        resume: Go on from the run's last checkpoint, or start a run in a new or empty folder. A run of this very config
            that has finished is returned as it is.
        limit_by: "auto", or one of `limits.KINDS`.
        echo: Relay the child's output; it is in `output.log` either way.
        live: In a notebook, draw its memory as it grows.
        num_ranks: Processes on this machine that train together (`training.distributed`), under the one limit.

    Raises:
        InputError: for bad input, before the child is started.
        KeyboardInterrupt: when interrupted; the child is ended and `result.json` written first.
    """
    if config is not None:
        check_config(config)
    if live:
        check_notebook()
    limit_bytes, notes = _attainable(memory_limit, say=echo)
    if config is None:
        if run_dir is None or not resume:
            raise InputError("config: expected one, or the folder of a run with resume=True to go on with its own")
        config = Run.open(run_dir).config
    if num_ranks < 1:
        raise InputError(f"num_ranks: expected at least 1, got {num_ranks}")
    size = check_inputs(config)
    name = name or f"{Path(os.path.abspath(config.dataset)).name}-{config.loading}"
    folder = home(run_dir) if run_dir is not None else next_run_dir(runs_dir, name)
    tried: dict[str, str] = {}
    if config.model not in MODELS:
        with doing(f"trying out {config.model}", config.progress):
            tried = try_model(config, size, run_dir=folder if resume else None)
    limit, refused = make_limit(limit_bytes, limit_by)
    own, stack = own_run_dir(config, folder, resume=resume), contextlib.ExitStack()
    with contextlib.closing(limit), own as (before, lock), _own_tmp() as (tmp, tmp_lock), stack:
        with contextlib.suppress(InputError):  # of a damaged metrics.csv, which the trainer writes anew
            if before.is_finished and before.config == config:
                return before
        if resume and memory_limit is None and before.memory_limit_bytes:
            limit_bytes, notes = _attainable(before.memory_limit_bytes, say=echo, as_before=True)
            limit.close()
            limit, refused = make_limit(limit_bytes, limit_by)
            stack.callback(limit.close)
        attempt = Attempt(before, config, memory_limit_bytes=limit_bytes, limit_by=limit.name, notes=notes)
        options = [
            "--locked",
            *(["--resume"] if resume else []),
            *(["--ranks", str(num_ranks)] if num_ranks > 1 else []),
        ]
        argv = [sys.executable, "-m", "ogbnlib.training.child", str(folder), *options]
        progress = "none" if config.progress == "none" else "relayed"
        env = {"OGBNLIB_PROGRESS": progress, PARENT_VARIABLE: str(os.getpid()), "TMPDIR": str(tmp)}
        env |= {name: value for name, value in MALLOC.items() if name not in os.environ}
        env[CONFIG_VARIABLE] = config.model_dump_json()
        env |= allocator_environment(config, os.environ) | tried
        more = {"limits_refused": refused, "notes": notes, "with_forecast": True}
        how: dict[str, Any] = {"echo": echo, "how": config.progress, "holds_back": True, "inherited": (lock, tmp_lock)}
        with drawn(lambda: Run(folder)._repr_html_()) if live else contextlib.nullcontext():
            return _carry_out(attempt, argv, limit, more, env, **how)


def _attainable(memory_limit: str | int | None, *, say: bool, as_before: bool = False) -> tuple[int | None, list[str]]:
    """The limit in bytes, or the lower one that holds here anyway, and what is to be noted of it.

    Args:
        as_before: It is that of a run which is resumed without another one.
    """
    if memory_limit is None:
        return None, []
    wanted, (available, source), notes = parse_bytes(memory_limit), effective_limit(), []
    if as_before:
        notes.append(f"memory_limit: {format_bytes(wanted)} as before; give another one to change it")
    if wanted > available:
        notes.append(f"memory_limit: {format_bytes(wanted)} is above {source}: the limit is {format_bytes(available)}")
        wanted = available
    if say:
        print(*notes, sep="\n", end="\n" if notes else "", flush=True)
    return wanted, notes


@contextlib.contextmanager
def _own_tmp() -> Iterator[tuple[Path, int]]:
    """A temporary folder for a trainer and all that it starts, and the descriptor that holds its lock.

    PyG leaves a generated file in it for each process that makes a convolution. It goes with the run; where the parent
    was killed the next run takes it away, as nobody holds its lock any more.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= 50 else "/tmp"  # workers make sockets below it, whose paths may have 107 characters
    for old in Path(base).glob("ogbnlib-????????.tmp"):
        with contextlib.suppress(OSError), _opened(old) as descriptor:  # another user's, or of a run that goes on
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - old.stat().st_mtime > 1:  # else it may be about to be locked
                shutil.rmtree(old)
    made = tempfile.TemporaryDirectory(dir=base, prefix="ogbnlib-", suffix=".tmp")
    with made as folder, _opened(Path(folder)) as descriptor:
        with contextlib.suppress(OSError):  # a file system without locks, where none is taken away either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield Path(folder), descriptor


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _carry_out(
    attempt: Attempt,
    argv: list[str],
    limit: Limit,
    more: dict[str, Any],
    env: Mapping[str, str] | None = None,
    **how: Any,
) -> Run:
    """Have a child do the work and write the attempt's result, with `more` in it; `how` is for `supervise`."""
    env = {**(env or {}), RUN_VARIABLE: str(attempt.run_dir.resolve())}
    if limit.limit_bytes is not None:
        env[LIMIT_VARIABLE] = str(limit.limit_bytes)
    presses = InterruptCounter()
    with handled(presses, [signal.SIGINT]):  # what was computed is written down first
        outcome = supervise(argv, attempt.run_dir, limit, recorder=attempt.recorder, env=env, **how)
        done = _ended(attempt, limit, outcome, more)
    if outcome.interrupted or presses.number:
        then = f"go on with {resumption(done.run_dir, done.result)}" if attempt.config else done.diagnosis.remedy
        raise shortened(KeyboardInterrupt(f"{attempt.run_dir}: interrupted; {then}"))
    return done


def _ended(attempt: Attempt, limit: Limit, outcome: Outcome, more: dict[str, Any]) -> Run:
    words = [line.strip() for line in outcome.tail.replace("\r", "\n").splitlines() if line.strip()]
    told = [line for line in words if line.startswith("error: ")] or (words if outcome.exit_code != 137 else [])
    shrunk = _shrunk(attempt.config) if outcome.exit_code == 128 + signal.SIGBUS else None
    return attempt.end(
        outcome.exit_code,
        memory_limit_bytes=limit.limit_bytes,
        limit_by=limit.name if limit.limit_bytes is not None else None,
        kernel_peak_bytes=outcome.peak_bytes,
        interrupted_by="a restart or shutdown of the notebook's kernel" if is_kernel_ending() else None,
        last_output=outcome.unwritable or shrunk or (told[-1] if told and outcome.exit_code != 0 else None),
        **outcome.evidence,
        **more,
    )


def _shrunk(config: TrainConfig | None) -> str | None:
    """What is wrong with the data set's files after a SIGBUS, which a mapped one sends that has become shorter."""
    try:
        if config is not None:
            locate_for(config)
    except InputError as error:
        return f"error: {error}"
    return None


def measure_runtime_bytes() -> int:
    """Return the anonymous + shared memory of Python and torch in a training process: a constant."""
    return RUNTIME_BYTES


def scaled_limit(
    memory_limit: str | int,
    dataset: str,
    allocation: str = "128 GB",
    runtime_bytes: int = RUNTIME_BYTES,
    full: str = "ogbn-papers100M",
) -> int:
    """The limit, in bytes, under which a data set meets what `full`, a larger one, meets under `allocation`.

    "auto" is the share of `allocation` that its edge list and features are of the full one's, plus the interpreter's
    own memory, which does not shrink with the data: `runtime_bytes`, by default `RUNTIME_BYTES`. Anything else is
    taken as it is.

    Raises:
        InputError: for a bad size, or a data set that is not there.
    """
    if memory_limit != "auto":
        return parse_bytes(memory_limit)
    share = parse_bytes(allocation, "allocation") * raw_bytes(size_of(dataset)) // raw_bytes(size_of(full))
    return share + runtime_bytes


def check_inputs(config: TrainConfig) -> GraphSize:
    """Refuse what can be seen to be wrong without loading data, before a run's folder is made; the data set's size.

    Raises:
        InputError: for a missing or damaged data set (from its headers), or a GPU that is not there (the
            one check that imports torch, only when `device="cuda"` or `precision="fp16"`).
    """
    if config.device == "cuda":
        resolve_device(config.device)
    check_precision(config.precision, config.device)
    size = locate_for(config)
    if config.epochs and not size.num_seeds["train"]:
        raise InputError(f"{config.dataset}: expected nodes in the train split to train on, found none")
    needed = "early_stopping" if config.early_stopping else "keep=best" if config.keep == "best" else ""
    if needed and not size.num_seeds["valid"]:
        raise InputError(f"{needed}: expected nodes in the valid split, found none in {config.dataset}; leave it out")
    return size
