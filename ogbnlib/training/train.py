"""Training in this process; `sandbox.run` starts a child process for it.

On the CPU a run is a pure function of its config, resumed or not, under every loading policy; see
`checkpoint`.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from .. import kernel_cache
from ..config import TrainConfig, check_config
from ..errors import InputError, clear_errors, naming
from ..files import home
from ..forecast.memory_parts import has_own_dtype, hop_size
from ..forecast.pass_memory import MODEL, Pass
from ..graph.store import Store
from ..launcher import job_cores, local_ranks, resolve_device
from ..memory.cuda import cuda_reading, oom_sizes
from ..memory.recorder import EventLog
from ..memory.signals import Stopped, StopRequest, handled
from ..memory.tree import Tree
from ..registry import MODELS
from ..runs.attempt import Attempt, open_run_dir, refuse_foreign_code
from ..runs.codes import exit_code_of
from ..runs.folder import Run
from ..runs.sandbox import check_inputs
from ..sampling.policies import Loaders
from ..sampling.workers import workers_ended
from ..sources.resolve import find_store
from ..windows.window import compile_kernels
from . import gpu
from .checkpoint import Checkpointer, Row, fingerprint
from .custom_model import find_code, make_model
from .distributed import Ranks, join
from .fused_sage import compile_layer
from .learner import Learner, balanced_weights
from .trainer import Progress, Trainer


@dataclass
class TrainResult:
    """Result of a training: the model, and one dict per epoch (keys `METRIC_COLUMNS`, None where
    not evaluated)."""

    history: list[Row]
    model: nn.Module


def compile_all(num_neighbors: list[int]) -> None:
    """Compile the kernels of sampling and of the layers, or load them from disk."""
    compile_kernels(num_neighbors)
    compile_layer()
    marker = kernel_cache.complete_marker()
    if marker is not None:
        with contextlib.suppress(OSError):  # then the next run compiles or loads them again
            marker.touch()


@clear_errors()
@torch.random.fork_rng(devices=[])  # restores the caller's random state, but not a GPU's
def train(
    config: TrainConfig,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    progress: bool = True,
) -> TrainResult:
    """Train in this process.

    Args:
        config: The run's parameters.
        run_dir: The run's folder; None keeps nothing on disk.
        resume: Go on from the run's last checkpoint, or start a run in a new or empty folder.
        progress: Show a bar in a terminal or JupyterLab, else lines.

    Raises:
        InputError: for bad input, before anything is written; for a folder in use by another
            process; for a full disk.
        Diverged: when the loss or a weight is no longer finite; the last checkpoint is finite.
        torch.OutOfMemoryError: when the GPU's memory ran out; the run's folder has the event
            `cuda_oom`.
        Stopped: after SIGUSR1, SIGTERM or SIGHUP, at the next batch boundary, with a checkpoint
            written. These signals are handled here only in the main thread.
    """
    check_config(config)
    gpu.prepare_allocator(config)
    stop = StopRequest()
    folder = None if run_dir is None else home(run_dir)
    with handled(stop), join(config.device) as ranks, contextlib.ExitStack() as stack:
        with ranks.together():
            size = check_inputs(config)
            if folder is None and (resume or config.keep == "best"):
                raise InputError(
                    "run_dir: expected a folder to resume or to keep best.pt, got none"
                )
            if folder is not None and resume:
                refuse_foreign_code(config, folder)
            if config.model not in MODELS:  # a trial, before anything is written
                num_features = hop_size(size, config).num_features
                make_model(config, num_features, size.num_classes, folder if resume else None)
        with ranks.together():  # the others wait until the first one has prepared the folder
            if folder is not None and ranks.first:
                run, _lock = stack.enter_context(open_run_dir(config, folder, resume=resume))
                stack.enter_context(_record_attempt(run, config))
        with naming(folder):  # in errors without a path, such as a full disk's
            display = "auto" if progress else "none"
            return train_prepared(config, folder, stop, ranks, resume=resume, display=display)


@contextlib.contextmanager
def _record_attempt(run: Run, config: TrainConfig) -> Iterator[None]:
    attempt = Attempt(run, config)
    code = 0
    attempt.recorder.start(Tree(os.getpid()))  # memory of this process and its workers
    try:
        yield
    except BaseException as error:
        code = exit_code_of(error)
        raise
    finally:
        attempt.recorder.stop()
        attempt.end(code)  # writes result.json


def train_prepared(
    config: TrainConfig,
    run_dir: Path | None,
    stop: StopRequest,
    ranks: Ranks,
    *,
    resume: bool,
    display: str,
) -> TrainResult:
    """Train in a folder that the caller has prepared and locked, as one of `ranks`; see `train`.

    A signal that sets the number of `stop` ends the run at the next batch boundary. `display` is as
    for `Progress`.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # restore it at the end
        log = EventLog(run_dir if ranks.first else None)
        stack.callback(log.close)
        stack.callback(gpu.end, config)
        progress = Progress(display, log, run_dir) if ranks.first else Progress("none", log)
        stack.callback(progress.close)
        stack.enter_context(progress.live)
        stack.enter_context(_recorded_cuda_oom(log))
        store = _open(config, log, progress, stop, ranks)
        config = _set_threads(config, store, run_dir if resume else None)
        asked = config  # what config.json keeps
        config = _without_empty_splits(config, store, progress)
        if config.fan_out(training=True):  # else features are propagated, and nothing is sampled
            with log.phase("compile kernels"):
                compile_all(list(config.num_neighbors))
        waiting = functools.partial(_wait, progress, ranks, stop)
        loaders = config.policy.load()(store, config, log, ranks.rank, ranks.num_ranks, waiting)
        # `workers_ended` kills DataLoader workers after an error; twice, because torch's handler
        # of SIGCHLD may raise while the inner one begins to end.
        with contextlib.closing(loaders), workers_ended(), workers_ended():
            model = _make_model(config, run_dir, ranks, loaders, progress)
            device = resolve_device(config.device)
            progress.note(*gpu.begin(config, device.type))
            weights = balanced_weights(loaders.labels["train"], loaders.num_classes)
            learner = Learner(config, model, device, ranks, log, weights)
            ranks.limit_waits(store.nbytes)  # the long wait, for propagated features, is over
            checkpointer = Checkpointer(run_dir, fingerprint(store, config), learner)
            trainer = Trainer(loaders, checkpointer, progress, stop)
            if resume:
                with ranks.together():
                    trainer.state, notes = checkpointer.restore()
                progress.note(*notes)
            with ranks.together(), naming(run_dir):  # after all ranks have accepted to resume
                if resume and ranks.first:
                    checkpointer.take_over(trainer.state, asked)
                elif run_dir is not None and ranks.first:
                    asked.save(Run(run_dir).paths.config)
            trainer.run()
            log.mark("finished")
        return TrainResult(trainer.state.history, learner.model)


@contextlib.contextmanager
def _recorded_cuda_oom(log: EventLog) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:  # here the failed step's tensors are still alive
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        text = first_line.partition(" If reserved but unallocated")[0]  # without torch's advice
        # the reading comes last, because only it knows of a cap by `max_cuda_memory`
        sizes = {**oom_sizes(text), **(cuda_reading() or {})}
        log.mark("cuda_oom", message=text, **sizes)
        raise


def _open(
    config: TrainConfig, log: EventLog, progress: Progress, stop: StopRequest, ranks: Ranks
) -> Store:
    def check() -> None:  # called between pieces of a propagation
        if stop.number:
            raise Stopped(
                "stopped while features were propagated; go on with resume=True (--resume)"
            )

    with log.phase("open"), ranks.together():
        graph = find_store(config.dataset)
        loaders = config.policy.load()  # the policy's class
        store: Store = loaders.trained_store(  # one rank propagates features, the others wait
            graph, config, log, say=progress.say, progress=progress.keep, check=check
        )
    is_ignored = config.feature_dtype not in ("float32", store.feature_dtype)
    if is_ignored and has_own_dtype(config, store):
        progress.note(f"feature_dtype: {store.path} is {store.feature_dtype}; convert it again")
    log.mark("dataset", path=str(store.path), **asdict(store.size))
    log.mark("note", ranks=ranks.num_ranks)
    return store


def _without_empty_splits(config: TrainConfig, store: Store, progress: Progress) -> TrainConfig:
    empty = [split for split in config.eval_splits if not store.num_seeds[split]]
    if empty:
        progress.note(
            f"{store.path}: the {' and the '.join(empty)} split has no nodes: it is not evaluated"
        )
    return config.without_empty_splits(store.num_seeds)


def _set_threads(config: TrainConfig, store: Store, resumed: Path | None) -> TrainConfig:
    if resumed is not None:  # the folder of a run, which goes on with its number of threads
        config = config.continuing(Run(resumed).config)
    if config.num_threads == "auto":  # one for small expected steps, all `cores` for large ones
        train = Pass.over(config, store.size, "train", training=True)
        cores = max(1, job_cores() // local_ranks())  # of this process
        config = config.replace(num_threads=train.computation(train.batch).threads(cores))
    if isinstance(config.num_threads, int):  # None: torch's own choice
        torch.set_num_threads(config.num_threads)
    return config


def _wait(
    progress: Progress, ranks: Ranks, stop: StopRequest, reading: tuple[str, int, int] | None
) -> bool:  # whether to end the wait for a batch; see `sampling.policies.Waiting`
    if reading is not None:
        progress.reading(*reading)
    # several ranks stop together, at the end of a step
    return ranks.num_ranks == 1 and bool(stop.number)


def _make_model(
    config: TrainConfig, run_dir: Path | None, ranks: Ranks, loaders: Loaders, progress: Progress
) -> nn.Module:
    with ranks.together():  # the first rank copies a custom model's file, then all execute the copy
        if run_dir and ranks.first and config.model not in MODELS:
            progress.note(*find_code(config, run_dir, keep=True)[1])
    with ranks.together():
        model = make_model(
            config, loaders.num_features, loaders.num_classes, run_dir, progress.note
        )
    # recorded with gradients and Adam's two moments, which exist from the first step on
    loaders.log.part(MODEL, 4 * sum(value.nbytes for value in model.parameters()))
    return model
