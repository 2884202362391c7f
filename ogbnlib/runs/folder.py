"""The folder of a run: one run each, one process at a time, nothing in it ever overwritten."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..config import TrainConfig
from ..errors import InputError
from .timeline import read_metrics

CONFIG, OUTPUT, CHECKPOINT, LOCK = "config.json", "output.log", "checkpoint.pt", ".lock"
# Values that may differ between a run and its resumption: none of them changes the weights an epoch ends with, but
# `accumulate`, which keeps a step's size where the number of ranks is another.
RESUMABLE = {
    "accumulate",
    *("dataset", "data_dir", "download", "loading", "lookahead"),
    *("num_workers", "persistent_workers", "pin_memory", "device"),
    *("activation_checkpointing", "empty_cache_every", "expandable_segments", "max_cuda_memory", "cuda_snapshot"),
    *(
        "epochs",
        "train_eval",
        "eval_every",
        "eval_splits",
        "eval_batch_size",
        "checkpoint_every_s",
        "release_every",
        "num_threads",
        "progress",
    ),
}


def prepare_run_dir(config: TrainConfig, run_dir: Path, *, resume: bool) -> TrainConfig:
    """Make or reopen the folder of a run and write its resolved config; nothing already there is lost.

    Raises:
        InputError: when the folder holds another run, or `resume` finds none or one that the config does not continue.
    """
    _check(config, run_dir, resume=resume)
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save(run_dir / CONFIG)
    return config


def _check(config: TrainConfig, run_dir: Path, *, resume: bool) -> None:
    existing = (run_dir / CONFIG).is_file()
    if resume:
        if not existing:
            raise InputError(f"{run_dir}: expected a run to resume (config.json), found none; start it without resume")
        old = TrainConfig.load(run_dir / CONFIG)
        changed = [
            f"{name} was {getattr(old, name)!r}, now {getattr(config, name)!r}"
            for name in TrainConfig.model_fields
            if name not in RESUMABLE and getattr(old, name) != getattr(config, name)
        ]
        if changed:
            raise InputError(f"{run_dir}: can't resume with other values ({'; '.join(changed)}); use a new run_dir")
        done = read_metrics(run_dir)
        if len(done) and config.epochs < done["epoch"].max():
            raise InputError(
                f"epochs: the run is already at epoch {done['epoch'].max():.0f}, got epochs={config.epochs}"
            )
    elif run_dir.is_dir() and any(path.name != LOCK for path in run_dir.iterdir()):
        what = "a run" if existing else "other files"
        raise InputError(
            f"{run_dir}: expected a new or empty folder, found {what} in it; resume it or name another one"
        )
    elif run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"{run_dir}: expected a folder for the run, found a file")


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Keep other processes from training in `run_dir` meanwhile; yields the descriptor that holds the lock.

    A child that inherits the descriptor holds the lock too. The kernel lets go of it with the last of them, however
    they end (flock(2)); the file stays behind and means nothing by itself.

    Raises:
        InputError: when another process holds it.
    """
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise InputError(
                f"{run_dir}: expected no other process to train in it, found {holder or 'one'}; "
                "wait for its end, or name another run_dir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            warnings.warn(f"{run_dir}: its file system has no locks, so a second run is not refused", stacklevel=2)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def own_run_dir(config: TrainConfig, run_dir: Path, *, resume: bool) -> Iterator[int]:
    """`prepare_run_dir`, and the folder `locked` inside the block; yields the lock's descriptor.

    Raises:
        InputError: as both do; nothing but the lock's own file is written then.
    """
    _check(config, run_dir, resume=resume)
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir) as lock:
        prepare_run_dir(config, run_dir, resume=resume)  # checks again: another process may have been faster
        yield lock
