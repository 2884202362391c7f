"""Training, or any command, in a child process under a real memory limit; an out-of-memory kill is
a result.

The limit covers the child and all its processes, and the page cache they fill if it is a cgroup.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import TrainConfig, check_config
from ..display import drawn, in_notebook
from ..errors import (
    MB,
    InputError,
    check_working_folder,
    clear_errors,
    format_bytes,
    masked,
    parse_bytes,
    shortened,
)
from ..files import home, next_run_dir
from ..forecast.passes import STEP
from ..forecast.phases import predict
from ..forecast.planner import WILL_NOT_FIT, Advice, verdict
from ..forecast.remedies import memory_remedy
from ..forecast.sizes import RUNTIME_BYTES, raw_bytes
from ..forecast.step import try_model
from ..graph import kernel_cache
from ..graph.store import GraphSize
from ..marks import RUN_VARIABLE
from ..memory.cgroup import LIMIT_VARIABLE, effective_limit
from ..memory.cuda import allocator_environment, check_precision, resolve_device
from ..memory.limits import Limit, make_limit
from ..memory.reading import read_memory
from ..memory.recorder import RUNS_VARIABLE
from ..memory.signals import PARENT_VARIABLE, STOP_SIGNALS, handled
from ..progress import doing
from ..registry import MODELS
from ..sources.names import check_store, locate, options_of, size_of
from .attempt import CONFIG_VARIABLE, Attempt, announce_code, open_run_dir
from .diagnosis import Diagnosis
from .evidence import last_words
from .exit_codes import STOPPED, resumption
from .folder import Run, RunEnded
from .supervise import supervise, trainer_environment


@clear_errors()
def watch(
    argv: Sequence[str],
    memory_limit: str | int | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    limit_by: str = "auto",
    echo: bool = True,
) -> Run:
    """Run any command in a child process, recorded and limited like `run`; inside, `ogbnlib.phase`
    names moments.

    Its standard output and error come back as one. Processes that it leaves behind, daemons too,
    count as its own and are ended with it.

    Args:
        argv: The command and its arguments. If it begins with an option, this Python runs it:
            `["-m", "ogbnlib", ...]`.
        run_dir: The new or empty folder for the record; by default a new one under `runs_dir`,
            named `name` or after the script.
    """
    limit_bytes, notes = _attainable(memory_limit, say=echo)
    if _is_trainer(argv):
        check_trainer_limit(limit_bytes)
    argv = [sys.executable, *argv] if argv[:1] and argv[0].startswith("-") else [*argv]
    if not argv or shutil.which(argv[0]) is None:
        raise InputError(
            f"argv: expected a command that can be run (`python` before a script), got {masked(argv)}"
        )
    name = (
        name or Path(next((word for word in argv if word.endswith((".py", ".sh"))), argv[0])).stem
    )
    folder = home(run_dir) if run_dir is not None else next_run_dir(runs_dir, name, again=True)
    # of the notebook's execution before the job was requeued
    while run_dir is None and folder.exists():
        earlier = Run(folder)
        if earlier.record.start.get("command") == masked(argv) and _has_ended(earlier, limit_bytes):
            return earlier
        folder = next_run_dir(runs_dir, name, again=True)
    limit, refused = make_limit(limit_bytes, limit_by)
    with contextlib.closing(limit), open_run_dir(None, folder, resume=False) as (before, _):
        command = masked(argv)  # what is recorded; the values are executed as they are
        attempt = Attempt(
            before, memory_limit_bytes=limit_bytes, limit_by=limit.name, command=command
        )
        stdin = subprocess.DEVNULL if os.isatty(0) or in_notebook() else None
        more = {"limits_refused": refused, "notes": notes}
        done = _carry_out(attempt, argv, limit, more, echo=echo, how="auto", stdin=stdin)
    if echo and (left := done.result.get("left_behind")):
        ended = f"ended what the command left behind: {', '.join(left)}"
        print(f"note: {ended}; to keep a daemon, start it outside of watch", file=sys.stderr)
    return done


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
    trust: bool = False,
) -> Run:
    """Train in a child process under a memory limit and return what happened, an out-of-memory kill
    included.

    Bad input is refused before the child is started; an interruption ends the child and writes
    `result.json` first. In a notebook, a run that would need more than the job or the machine has
    is not started; its forecast is printed.

    Args:
        config: What to train; None to resume a run with its own config: `run(run_dir="runs/a",
            resume=True)`.
        memory_limit: "2 GB" or bytes. None sets no limit, or keeps that of the run to resume.
        run_dir: The run's folder, new or empty, or the run to resume; by default a new folder under
            `runs_dir`, named `name` or after data set and policy.
        resume: Go on from the run's last checkpoint, or start a run in a new or empty folder. A run
            of the same config that has finished is returned as it is.
        limit_by: "auto", or one of `limits.KINDS`.
        echo: Relay the child's output, in `output.log` in any case; without it, a log has a
            progress line every 30 s.
        live: In a notebook, draw its memory as it grows.
        num_ranks: Processes on this machine that train together, under the one limit.
        trust: Allow the code of a model (model.py) in a run's folder of another user.
    """
    if live and not in_notebook():
        raise InputError("live: expected a notebook to draw in, found none; leave it out")
    if config is None:
        if run_dir is None or not resume:
            raise InputError(
                "config: expected one, or the folder of a run with resume=True to go on with its own"
            )
        config = Run.open(run_dir).config
    check_config(config)
    if num_ranks < 1:
        raise InputError(f"num_ranks: expected at least 1, got {num_ranks}")
    name = name or f"{Path(os.path.abspath(config.dataset)).name}-{config.loading}"
    folder = home(run_dir) if run_dir is not None else next_run_dir(runs_dir, name, again=True)
    before_bytes = Run(folder).memory_limit_bytes if resume and memory_limit is None else None
    limit_bytes, notes = _attainable(
        before_bytes or memory_limit, say=echo, as_before=bool(before_bytes)
    )
    check_trainer_limit(limit_bytes)
    # of the notebook's execution before the job was requeued
    while run_dir is None and folder.exists():
        earlier, same = Run(folder), False
        with contextlib.suppress(InputError):  # of another version, or of a watched command
            same = earlier.config == config
        if same and _has_ended(earlier, limit_bytes):
            return earlier
        if resume := same and not _has_ended(earlier, earlier.memory_limit_bytes):
            break
        folder = next_run_dir(runs_dir, name, again=True)
    size = check_inputs(config)
    if resume:
        quiet = not echo or config.progress == "none"
        announce_code(config, folder, trust, (lambda text: None) if quiet else print)
    kernel_cache.folder()  # its place, for the children, whose TMPDIR is another
    tried: dict[str, str] = {}
    if config.model not in MODELS:
        with doing(f"trying out {config.model}", config.progress):
            tried = try_model(config, size, run_dir=folder if resume else None)
    if not config.propagated:  # a propagation's forecast has room for compiling
        _compile_kernels(config.progress)
    limit, refused = make_limit(limit_bytes, limit_by)
    with (
        contextlib.closing(limit),
        open_run_dir(config, folder, resume=resume) as (before, lock),
        _own_tmp() as tmp,
    ):
        # of a damaged metrics.csv; the trainer writes another
        with contextlib.suppress(InputError):
            if before.is_finished and before.config == config:
                return before
        reason = _too_large_to_start(config, size, limit_bytes)
        attempt = Attempt(
            before, config, memory_limit_bytes=limit_bytes, limit_by=limit.name, notes=notes
        )
        if reason:
            attempt.recorder.stop()
            return attempt.end(
                None, with_forecast=True, memory_limit_bytes=limit_bytes, diagnosis=reason
            )
        argv = [sys.executable, "-m", "ogbnlib.training.child", str(folder), "--locked"]
        argv += ["--resume"] if resume else []
        argv += ["--ranks", str(num_ranks)] if num_ranks > 1 else []
        env = {
            "OGBNLIB_PROGRESS": "none" if config.progress == "none" else "relayed",
            "TMPDIR": tmp,
        }
        env |= {PARENT_VARIABLE: str(os.getpid()), CONFIG_VARIABLE: config.model_dump_json()}
        env |= trainer_environment(os.environ) | allocator_environment(config, os.environ) | tried
        more = {"limits_refused": refused, "notes": notes, "with_forecast": True}
        how: dict[str, Any] = {
            "echo": echo,
            "how": config.progress,
            "holds_back": True,
            "inherited": (lock,),
        }
        with drawn(lambda: Run(folder)._repr_html_()) if live else contextlib.nullcontext():
            return _carry_out(attempt, argv, limit, more, env=env, **how)


def _own_tmp() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for a trainer and its children: PyG leaves a generated file for each
    process in it."""
    base = tempfile.gettempdir()
    # workers make sockets below it, whose paths may have 107 characters
    base = base if len(base) <= 50 else "/tmp"
    return tempfile.TemporaryDirectory(
        dir=base, prefix="ogbnlib-", suffix=".tmp", ignore_cleanup_errors=True
    )


@functools.cache
def _compile_kernels(how: str) -> None:
    """Compile the kernels of a training in another process, unless they are on disk."""
    # A trainer that compiles them itself keeps about 100 MB more than one that loads them, which no
    # forecast counts.
    if kernel_cache.folder() is None or kernel_cache.is_complete():
        return
    code = "import ogbnlib.training.train as train; train.compile_all([1])"
    with doing("compiling the sampling kernels", how):
        # If it fails, the trainer meets the same error and reports it.
        subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def _attainable(
    memory_limit: str | int | None, *, say: bool, as_before: bool = False
) -> tuple[int | None, list[str]]:
    """The limit in bytes, or the lower one that holds here anyway, and notes on it."""
    if memory_limit is None:
        return None, []
    requested, (available, source), notes = parse_bytes(memory_limit), effective_limit(), []
    limit_text = f"memory_limit: {format_bytes(requested)}"
    if as_before:
        notes.append(f"{limit_text} as before; give another one to change it")
    if requested > available:
        notes.append(f"{limit_text} is above {source}: the limit is {format_bytes(available)}")
    if say:
        print(*notes, sep="\n", end="\n" if notes else "", flush=True)
    return min(requested, available), notes


def check_trainer_limit(limit_bytes: float | None) -> None:
    """Refuse a memory limit under which no training can begin, whatever its data."""
    if limit_bytes is not None and limit_bytes < RUNTIME_BYTES:
        fixed = f"the {format_bytes(RUNTIME_BYTES)} that Python and torch take, whatever the data"
        raise InputError(
            f"memory_limit: expected more than {fixed}, got {format_bytes(limit_bytes)}; "
            "`python -m ogbnlib plan` forecasts what a run needs"
        )


def _is_trainer(argv: Sequence[str]) -> bool:
    """Whether a command is this package's own `train`."""
    words = [*argv]
    return any(words[i : i + 3] == ["-m", "ogbnlib", "train"] for i in range(len(words)))


def _has_ended(run: Run, limit_bytes: int | None) -> bool:
    """Whether a run of a notebook's earlier execution has ended under this limit, other than by a
    stop signal."""
    going_on = (None, STOPPED, 130, *(128 + number for number in STOP_SIGNALS))
    return run.exit_code not in going_on and run.memory_limit_bytes == limit_bytes


def _too_large_to_start(
    config: TrainConfig, size: GraphSize, limit_bytes: int | None
) -> Diagnosis | None:
    """Explain why a notebook's run is not started: it would be killed for the memory of the job,
    and the kernel too."""
    available, source = effective_limit()
    room_bytes = available - (read_memory(os.getpid()).held_bytes or 0)
    if not in_notebook() or (limit_bytes is not None and limit_bytes <= room_bytes):
        return None  # the kill of a run with a lower limit of its own ends nothing else
    forecast = predict(config, size, memory_limit_bytes=room_bytes)
    if verdict(forecast, room_bytes) == WILL_NOT_FIT:
        # slower and better: by batches drawn from the store
        forecast = predict(config, memory_limit_bytes=room_bytes)
    if verdict(forecast, room_bytes) != WILL_NOT_FIT:
        return None
    on_gpu = resolve_device(config.device).type == "cuda"  # where the step is not in RAM
    peak_bytes = max(
        phase.held_bytes - on_gpu * phase.parts.get(STEP, 0) for phase in forecast.phases
    )
    if peak_bytes - forecast.margin_bytes <= room_bytes:
        return None
    advice = Advice(forecast, None)
    peak, room = format_bytes(forecast.peak_bytes), format_bytes(room_bytes)
    remedy = (
        f"give it a memory_limit below {room} to see it killed, or ask for more: {advice.sbatch}"
    )
    text = f"Not started: by forecast it takes {peak} in phase '{forecast.peak.name}', and {source} leaves {room} "
    text += f"beside this notebook. Next: {remedy}."
    print(f"{text}\n\n{advice}\n", flush=True)
    return Diagnosis(text, "not started", None, None, remedy=remedy)


def _carry_out(
    attempt: Attempt, argv: list[str], limit: Limit, more: dict[str, Any], **how: Any
) -> Run:
    """Run a child and write the attempt's result, with `more` in it; `how` is for `supervise`."""
    env = how.pop("env", {}) | {RUN_VARIABLE: str(attempt.run_dir.resolve())}
    if limit.limit_bytes is not None:
        env[LIMIT_VARIABLE] = str(limit.limit_bytes)
    interrupts: list[int] = []
    # the result is written first
    with handled(lambda number, frame: interrupts.append(number), [signal.SIGINT]):
        outcome = supervise(argv, attempt.run_dir, limit, recorder=attempt.recorder, env=env, **how)
        more |= {"memory_limit_bytes": limit.limit_bytes, "kernel_peak_bytes": outcome.peak_bytes}
        more["limit_by"] = limit.name if limit.limit_bytes is not None else None
        words = ""
        if outcome.exit_code != 0:
            words = last_words(outcome.tail, killed=outcome.exit_code == 137)
        more["last_output"] = outcome.unwritable or words or None
        done = attempt.end(outcome.exit_code, remedy_of=memory_remedy, **outcome.evidence, **more)
    if outcome.interrupted or interrupts:
        resume = f"go on with {resumption(done.run_dir, done.memory_limit_bytes)}"
        then = resume if attempt.config else done.diagnosis.remedy
        raise shortened(KeyboardInterrupt(f"{attempt.run_dir}: interrupted; {then}"))
    if outcome.forwarded in STOP_SIGNALS and RUNS_VARIABLE in os.environ and in_notebook():
        # The next cell must not begin: papermill's engine ends with this code, and the job goes
        # back to the queue.
        sender = signal.Signals(outcome.forwarded).name
        raise RunEnded(
            f"{STOPPED}: {sender} stopped the notebook in the run {done.run_dir}. {done.diagnosis}"
        )
    return done


def scaled_limit(
    memory_limit: str | int, dataset: str, allocation: str = "128 GB", full: str = "ogbn-papers100M"
) -> int:
    """The limit, in bytes, that means for a data set what `allocation` means for `full`, a larger
    one.

    "auto" scales `allocation` by the sizes of edge list and features, and adds what Python and
    torch take. For a data set with as many edges as `full`, or more, it is `allocation` itself. Any
    other `memory_limit` is returned in bytes.
    """
    if memory_limit != "auto":
        return parse_bytes(memory_limit)
    size, full_size = size_of(dataset), size_of(full)
    if size.num_edges >= full_size.num_edges:
        return parse_bytes(allocation, "allocation")
    share = parse_bytes(allocation, "allocation") * raw_bytes(size) // raw_bytes(full_size)
    return share + RUNTIME_BYTES + 20 * MB  # machines differ by so much


def check_inputs(config: TrainConfig) -> GraphSize:
    """Refuse bad input from its headers alone, before a run's folder is made; return the data set's
    size."""
    check_working_folder()
    if config.device == "cuda":
        resolve_device(config.device)
    check_precision(config.precision, config.device)
    size = locate(config.dataset, **options_of(config))
    check_store(size, config)
    if config.epochs and not size.num_seeds["train"]:
        raise InputError(
            f"{config.dataset}: expected nodes in the train split to train on, found none"
        )
    needed = (
        "early_stopping" if config.early_stopping else "keep=best" if config.keep == "best" else ""
    )
    if needed and not size.num_seeds["valid"]:
        raise InputError(
            f"{needed}: expected nodes in the valid split, found none in {config.dataset}; leave it out"
        )
    return size
