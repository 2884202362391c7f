"""Run training, or any command, in a child process under a real memory limit.

An out-of-memory kill is a result, not an error. The limit covers the child and all its processes; a
cgroup's limit also covers the page cache that they fill.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .. import kernel_cache, memory
from ..config import TrainConfig, check_config
from ..display import drawn, in_notebook
from ..environment import (
    CONFIG_VARIABLE,
    LIMIT_VARIABLE,
    PARENT_VARIABLE,
    RUN_VARIABLE,
    WATCHED_VARIABLE,
)
from ..errors import MB, InputError, clear_errors, format_bytes, parse_bytes, shortened
from ..files import StrPath
from ..forecast.fitting import WILL_NOT_FIT, verdict
from ..forecast.memory_parts import RUNTIME_BYTES, raw_bytes
from ..forecast.pass_memory import STEP
from ..forecast.planner import Advice
from ..forecast.run_forecast import predict
from ..forecast.step_memory import try_model
from ..graph.store import GraphSize
from ..launcher import check_precision, resolve_device
from ..memory.cgroup import effective_limit
from ..memory.killed import Action
from ..memory.limits import Limit, check_addresses, make_limit
from ..memory.malloc import trainer_environment
from ..memory.reading import read_memory
from ..memory.signals import STOP_SIGNALS, Stopped, handled
from ..memory.tree import Tree
from ..progress import doing
from ..registry import MODELS
from ..sources.resolve import check_trainable, find_store, size_of
from .attempt import Attempt, check_content, open_run_dir, refuse_foreign_code
from .cause import Facts
from .codes import STOPPED
from .folder import Run
from .names import next_run_dir
from .render import Diagnosis
from .supervise import supervise
from .texts import last_words

# The folder of `sitecustomize.py`, with which each Python of a watched command starts.
_HOOK = str(Path(memory.__file__).parent / "hook")


@clear_errors()
def watch(
    argv: Sequence[str],
    memory_limit: str | int | None = None,
    *,
    run_dir: StrPath | None = None,
    name: str | None = None,
    runs_dir: StrPath = "runs",
    limit_by: str = "auto",
    echo: bool = True,
) -> Run:
    """Run any command in a child process, recorded and limited as by `run`.

    A script names its phases with `ogbnlib.phase`. Standard output and error of the command come
    back as one. Processes that it leaves behind, daemons too, count as its own and are ended with
    it.

    Args:
        argv: The command and its arguments. If it begins with an option, this Python runs it:
            `["-m", "ogbnlib", ...]`.
        run_dir: The new or empty folder for the record; by default a new one under `runs_dir`,
            named `name` or after the script.

    Raises:
        Stopped: as for `run`.
    """
    limit_bytes = _attainable(memory_limit)
    argv = [sys.executable, *argv] if argv and argv[0].startswith("-") else [*argv]
    # not looked up: this Python, in a folder that this user may not be allowed to read
    if not argv or (argv[0] != sys.executable and shutil.which(argv[0]) is None):
        raise InputError(
            f"argv: expected a command that can be run (`python` before a script), got {argv}"
        )
    script = next((word for word in argv if word.endswith((".py", ".sh"))), argv[0])

    def is_done(run: Run) -> bool:  # a command has no checkpoint to go on from
        return run.record.start.get("command") == argv and not _was_stopped(run)

    folder_name = name or Path(script).stem
    earlier = _choose_folder(run_dir, runs_dir, folder_name, limit_bytes, is_done)
    if run_dir is None and earlier.run_dir.exists():  # a requeued job executes a notebook again
        return earlier
    limit, _ = make_limit(limit_bytes, limit_by)
    with (
        contextlib.closing(limit),
        open_run_dir(None, earlier.run_dir, resume=False) as (before, _),
    ):
        attempt = Attempt(before, memory_limit_bytes=limit_bytes, limit_by=limit.name, command=argv)
        paths = [_HOOK, *filter(None, [os.environ.get("PYTHONPATH")])]
        folder = str(attempt.run_dir.resolve())
        env = {"PYTHONPATH": os.pathsep.join(paths), WATCHED_VARIABLE: folder}
        return _carry_out(attempt, argv, limit, env=env, echo=echo)


@clear_errors()
def run(
    config: TrainConfig | None = None,
    memory_limit: str | int | None = None,
    *,
    run_dir: StrPath | None = None,
    name: str | None = None,
    runs_dir: StrPath = "runs",
    resume: bool = False,
    limit_by: str = "auto",
    echo: bool = True,
    live: bool = False,
    num_ranks: int = 1,
) -> Run:
    """Train in a child process under a memory limit; return the run, even if it ran out of memory.

    Bad input is refused before the child is started. An interruption ends the child, and is raised
    after `result.json` is written. A stop signal to this process does the same and raises
    `Stopped`, as in `train`. In a notebook, a run that by forecast needs more memory than the job
    or the machine has is not started; its forecast is printed.

    Args:
        config: The parameters of the run; None to resume a run with its own config:
            `run(run_dir="runs/a", resume=True)`.
        memory_limit: "2 GB" or bytes. None sets no limit, or keeps that of the run to resume.
        run_dir: The run's folder, new or empty, or that of the run to resume; by default a new
            folder under `runs_dir`, named `name` or after data set and loading policy.
        resume: Go on from the run's last checkpoint, or start a run in a new or empty folder. A
            finished run with the same config is returned as it is.
        limit_by: "auto", or one of `limits.KINDS`.
        echo: Relay the child's output, which is in `output.log` in any case. If False, a log still
            gets a progress line every 30 s.
        live: In a notebook, draw the run's memory as it grows.
        num_ranks: Processes on this machine that train together, under one common limit.
    """
    config = _check_arguments(config, run_dir, resume, live, num_ranks)
    limit_bytes = _attainable(memory_limit, run_dir if resume else None)
    if limit_bytes is not None and limit_bytes < RUNTIME_BYTES:
        raise InputError(
            f"memory_limit: expected more than the {format_bytes(RUNTIME_BYTES)} that Python and "
            f"torch take, whatever the data, got {format_bytes(limit_bytes)}; "
            "`python -m ogbnlib plan` forecasts what a run needs"
        )
    check_addresses()
    name = name or f"{Path(os.path.abspath(config.dataset)).name}-{config.loading}"
    earlier = _choose_folder(
        run_dir, runs_dir, name, limit_bytes, lambda run: _has_config(run, config)
    )
    if run_dir is None and earlier.run_dir.exists():  # a requeued job executes a notebook again
        if not _was_stopped(earlier):
            return earlier
        resume = True
    return _train(
        config, earlier, limit_bytes, limit_by, num_ranks, resume=resume, echo=echo, live=live
    )


def _check_arguments(
    config: TrainConfig | None, run_dir: StrPath | None, resume: bool, live: bool, num_ranks: int
) -> TrainConfig:
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
    return config


def _train(
    config: TrainConfig,
    earlier: Run,
    limit_bytes: int | None,
    limit_by: str,
    num_ranks: int,
    *,
    resume: bool,
    echo: bool,
    live: bool,
) -> Run:
    """Train in the folder of `earlier`, a new run or the one to resume, in a child under the limit.

    A finished run is returned as it is; in a notebook a run that surely won't fit is not started.
    """
    folder = earlier.run_dir
    check_content(folder, resume=resume)  # before kernels are compiled, which takes minutes
    size = check_inputs(config)
    if resume:
        refuse_foreign_code(config, folder)
    env = _prepare_code(config, size, folder if resume else None, "auto" if echo else "none")
    limit, _ = make_limit(limit_bytes, limit_by)
    # From here on this process holds the limit and the folder's lock, released in reverse order.
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(limit))
        before, lock = stack.enter_context(open_run_dir(config, folder, resume=resume))
        with contextlib.suppress(InputError):  # of a damaged metrics.csv, which is written again
            if before.is_finished and _has_config(before, config):
                return before
        # before `Attempt`, which deletes the earlier result: a forecast may raise
        too_large = _too_large_to_start(config, limit_bytes)
        attempt = Attempt(before, config, memory_limit_bytes=limit_bytes, limit_by=limit.name)
        if too_large:
            attempt.recorder.stop()
            return attempt.end(
                None,  # no exit code
                with_forecast=True,
                memory_limit_bytes=limit_bytes,
                not_started=too_large,
            )
        argv = [sys.executable, "-m", "ogbnlib.training.child", str(folder)]
        if resume:
            argv.append("--resume")
        if num_ranks > 1:
            argv += ["--ranks", str(num_ranks)]
        tmp = tempfile.TemporaryDirectory(  # in which PyG leaves a generated file for each process
            prefix="ogbnlib-", suffix=".tmp", ignore_cleanup_errors=True
        )
        env |= {
            PARENT_VARIABLE: str(os.getpid()),
            CONFIG_VARIABLE: config.model_dump_json(),  # changed values of a resumed run, too
            "TMPDIR": stack.enter_context(tmp),
            **trainer_environment(os.environ),
        }
        if live:
            stack.enter_context(drawn(lambda: Run(folder)._repr_html_()))
        # With `lock` the folder stays locked until the trainer, too, has ended.
        return _carry_out(attempt, argv, limit, env=env, echo=echo, inherited=(lock,))


def _choose_folder(
    run_dir: StrPath | None,
    runs_dir: StrPath,
    name: str,
    limit_bytes: int | None,
    is_same: Callable[[Run], bool],  # whether a run is of the same config or command
) -> Run:
    """Choose the run's folder: `run_dir`, else a new one below `runs_dir`.

    When a requeued job executes a notebook again (see `next_run_dir`), the earlier execution may
    have left a run for which `is_same` is true. Its folder is used if that run was stopped or had
    the same limit.
    """
    if run_dir is not None:
        return Run(run_dir)
    while True:  # name, name-2, ... until one is new, or an earlier execution's
        run = Run(next_run_dir(runs_dir, name, again=True))
        is_open = _was_stopped(run) or run.memory_limit_bytes == limit_bytes
        if not run.run_dir.exists() or (is_open and is_same(run)):
            return run


def _has_config(run: Run, config: TrainConfig) -> bool:  # num_threads="auto" equals any number
    return run.known_config == config.continuing(run.known_config or config)


def _was_stopped(run: Run) -> bool:  # None: no result, or not started; 130: Ctrl-C
    return run.exit_code in (None, STOPPED, 130, *(128 + number for number in STOP_SIGNALS))


def _prepare_code(
    config: TrainConfig, size: GraphSize, run_dir: Path | None, display: str
) -> dict[str, str]:
    """Try out the user's own model and compile the kernels, as far as the run needs that.

    Returns the environment variable with the trial's result. `run_dir` is the run to resume.
    """
    trial: dict[str, str] = {}
    if config.model not in MODELS:
        with doing(f"trying out {config.model}", display):
            trial = try_model(config, size, run_dir=run_dir)
    # "propagated" has no fan-out: its trainer compiles, for which its forecast leaves room
    if config.fan_out(training=True):
        _compile_kernels(display)
    return trial


@functools.cache  # tried once in a process, even if it failed
def _compile_kernels(display: str) -> None:
    """Compile the kernels of a training in another process, unless they are on disk."""
    # A trainer that compiles the kernels itself keeps about 100 MB more than one that loads them.
    # The forecast of a run with sampling leaves no room for these 100 MB.
    marker = kernel_cache.complete_marker()
    if marker is None or marker.is_file():
        return
    # The kernels are the same for every fan-out.
    code = "import ogbnlib.training.train as train; train.compile_all([1])"
    with doing("compiling the sampling kernels", display):
        subprocess.run(  # if it fails, the trainer meets the same error and reports it
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def _attainable(memory_limit: str | int | None, before: StrPath | None = None) -> int | None:
    """Return the limit in bytes, or the lower one that applies here anyway; None means no limit.

    Without `memory_limit` it is the limit of the run in `before`.
    """
    if memory_limit is None and before is not None:
        memory_limit = Run(before).memory_limit_bytes
    if memory_limit is None:
        return None
    requested = parse_bytes(memory_limit)
    available, source = effective_limit()
    if requested > available:
        lower = f"is above {source}: the limit is {format_bytes(available)}"
        print(f"memory_limit: {format_bytes(requested)} {lower}", file=sys.stderr)
    return min(requested, available)


def _too_large_to_start(config: TrainConfig, limit_bytes: int | None) -> Diagnosis | None:
    """Return the diagnosis of a notebook's run that by forecast uses up the job's memory, so that
    the notebook's kernel may be killed, too; None if the run may start."""
    available, source = effective_limit()
    # what this process, the notebook's kernel, leaves of the job's or the machine's memory
    room_bytes = available - (read_memory(Tree(os.getpid())).held_bytes or 0)
    if not in_notebook() or (limit_bytes is not None and limit_bytes <= room_bytes):
        return None  # the kill of a run with a lower limit of its own ends nothing else
    forecast = predict(config, memory_limit_bytes=room_bytes)
    if verdict(forecast, room_bytes) != WILL_NOT_FIT:
        return None
    on_gpu = resolve_device(config.device).type == "cuda"  # there the step takes no RAM
    peak_bytes = max(
        phase.held_bytes - on_gpu * phase.parts.get(STEP, 0) for phase in forecast.phases
    )
    if peak_bytes - forecast.margin_bytes <= room_bytes:  # may fit; only a sure kill is refused
        return None
    advice = Advice(forecast, None)
    sizes = {"forecast_bytes": forecast.peak_bytes, "room_bytes": room_bytes}
    phase = forecast.peak.name
    facts = Facts("not started", sizes=sizes, duration_s=0.0, phase=phase, limit_by=source)
    smaller = Action("lower limit", {"limit_bytes": room_bytes, "sbatch": advice.sbatch})
    refused = Diagnosis("not started", facts, (smaller,))
    print(f"{refused}\n\n{advice}\n", flush=True)
    return refused


def _carry_out(
    attempt: Attempt,
    argv: list[str],
    limit: Limit,
    *,
    echo: bool,
    env: Mapping[str, str] | None = None,
    inherited: tuple[int, ...] = (),
) -> Run:
    """Run a child and write the attempt's result; a trainer inherits the folder's lock.

    Raises `KeyboardInterrupt` after an interrupt, and `Stopped` after a stop signal.
    """
    config = attempt.config
    variables = {**(env or {}), RUN_VARIABLE: str(attempt.run_dir.resolve())}
    if limit.limit_bytes is not None:
        variables[LIMIT_VARIABLE] = str(limit.limit_bytes)
    # a command may read a pipe or file; in a terminal its new session could not read
    reads_input = config is None and not os.isatty(0) and not in_notebook()
    interrupts: list[int] = []  # a SIGINT for each Ctrl-C
    # an interrupt ends the child in order, and is raised only after the result is written
    with handled(lambda number, frame: interrupts.append(number), [signal.SIGINT]):
        outcome = supervise(
            argv,
            attempt.run_dir,
            limit,
            recorder=attempt.recorder,
            env=variables,
            interrupts=interrupts,
            echo=echo,
            is_trainer=config is not None,
            inherited=inherited,
            stdin=None if reads_input else subprocess.DEVNULL,
        )
        code = outcome.exit_code
        words = last_words(outcome.tail, killed=code == 137) if code else ""
        done = attempt.end(
            code,
            with_forecast=True,
            memory_limit_bytes=limit.limit_bytes,
            limit_by=None if limit.limit_bytes is None else limit.name,
            last_output=words or None,
            **outcome.evidence,
        )
    if interrupts:
        raise shortened(
            KeyboardInterrupt(f"{attempt.run_dir}: interrupted; {done.diagnosis.remedy}")
        )
    if outcome.forwarded in STOP_SIGNALS:
        # No further run may begin: Slurm's SIGKILL follows. Exit code 75 requeues the job.
        name = signal.Signals(outcome.forwarded).name
        raise Stopped(f"{name} stopped the run {done.run_dir}. {done.diagnosis}", done)
    return done


def scaled_limit(
    memory_limit: str | int, dataset: str, allocation: str = "128 GB", full: str = "ogbn-papers100M"
) -> int:
    """Return a memory limit in bytes that is as tight for `dataset` as `allocation` is for `full`.

    "auto" scales `allocation` by the sizes of edge list and features, and adds the fixed cost of
    Python and torch. A data set with at least as many edges as `full` gets `allocation` itself. Any
    other `memory_limit` is returned in bytes.
    """
    if memory_limit != "auto":
        return parse_bytes(memory_limit)
    size = size_of(dataset)
    full_size = size_of(full)
    allocated = parse_bytes(allocation, "allocation")
    if size.num_edges >= full_size.num_edges:
        return allocated
    # 20 MB, because machines differ by that much
    return allocated * raw_bytes(size) // raw_bytes(full_size) + RUNTIME_BYTES + 20 * MB


def check_inputs(config: TrainConfig) -> GraphSize:
    """Refuse bad input by the headers of the data set's files; return the data set's size."""
    if config.device == "cuda":
        resolve_device(config.device)  # raises without a usable GPU
    check_precision(config.precision, config.device)
    store = find_store(config.dataset)
    check_trainable(store, config)
    return store.size
