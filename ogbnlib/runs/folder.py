"""The folder of a run: one run each, one process at a time, nothing in it ever overwritten.

`Run` alone knows what its files are called (`memory.recorder` writes two of them) and reads each of them once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import TrainConfig
from ..errors import InputError, clear_errors
from ..files import home, warn_if_remote
from ..memory.recorder import COLUMNS, EVENTS, TIMELINE, parse_events
from ..memory.tally import Tally
from . import timeline as read
from .diagnosis import Diagnosis, ended, explain, held_peak_bytes

if TYPE_CHECKING:
    import pandas as pd

CONFIG, RESULT, METRICS = "config.json", "result.json", "metrics.csv"
OUTPUT, CHECKPOINT, LOCK = "output.log", "checkpoint.pt", ".lock"
# Values that may differ between a run and its resumption: none of them changes the weights an epoch ends with, but
# `accumulate`, which keeps a step's size where the number of ranks is another.
RESUMABLE = {
    "accumulate",
    *("dataset", "data_dir", "download", "loading", "lookahead"),
    *("num_workers", "persistent_workers", "pin_memory", "device"),
    *("activation_checkpointing", "empty_cache_every", "expandable_segments", "max_cuda_memory", "cuda_snapshot"),
    *("epochs", "train_eval", "eval_every", "eval_splits", "eval_batch_size"),
    *("checkpoint_every_s", "release_every", "num_threads", "progress"),
}


class RunEnded(RuntimeError):
    """A run that did not finish. The text is its exit code, a colon and its diagnosis."""


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: expected a run's {what}, found no such file; pass the folder of a run") from None


class Run:
    """A run by its folder, as `sandbox.run` returns it and `Run.open` finds it again, however it ended.

    Each file is read when it is first asked for, and not again; what is `known` of it already is not read at all.
    """

    def __init__(self, run_dir: str | os.PathLike[str], **known: Any):
        self.run_dir = home(run_dir)
        vars(self).update(known)

    @classmethod
    @clear_errors()
    def open(cls, run_dir: str | os.PathLike[str]) -> Run:
        """The run in a folder.

        Raises:
            InputError: when it is not the folder of a run.
        """
        if not any((home(run_dir) / name).is_file() for name in (CONFIG, EVENTS, TIMELINE)):
            raise InputError(f"{run_dir}: expected the folder of a run ({CONFIG}, {EVENTS}), found neither in it")
        return cls(run_dir)

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r}, {ended(self.result)})"

    # What its files hold ----------------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> TrainConfig:
        """The resolved config; `InputError` for the run of another command than the trainer."""
        return TrainConfig.load(self.run_dir / CONFIG)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The events of all attempts in order, `time_s` as in the file (`time.time()`)."""
        return list(parse_events(_read(self.run_dir / EVENTS, "events")))

    @cached_property
    def phases(self) -> list[read.Phase]:
        """The phases of all attempts in order of their start."""
        return read.phases_of(self.events, self._origin_s)

    @cached_property
    def parts(self) -> dict[str, int]:
        """The named parts that the last attempt held when it ended, in bytes."""
        return self.tally.parts if self.events else {}

    @cached_property
    def samples(self) -> pd.DataFrame:
        """timeline.csv as it is, `time_s` in `time.time()` seconds; `timeline` has more."""
        return read.csv_table(_read(self.run_dir / TIMELINE, "timeline"), COLUMNS).astype(float)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """The samples that were kept, each with the phase it fell in, see `timeline.timeline_table`."""
        phases, cuda = (self.phases, self.cuda) if self._events_or_none else ([], read.cuda_table([], 0.0))
        return read.timeline_table(self.samples, phases, cuda, self._origin_s)

    @cached_property
    def cuda(self) -> pd.DataFrame:
        """The readings of GPU memory that were kept, see `timeline.cuda_table`; no rows for a run that used no GPU."""
        return read.cuda_table(self.events, self._origin_s)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """metrics.csv, one row per epoch; empty when none was finished. A torn last line is left out."""
        path = self.run_dir / METRICS
        return read.csv_table(path.read_bytes() if path.is_file() else b"")

    @cached_property
    def result(self) -> dict[str, Any]:
        """result.json; empty where the watching process is at work, or did not live to write it."""
        path = self.run_dir / RESULT
        try:
            result: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise InputError(f"{path}: expected JSON, found something else ({error})") from None
        return result

    # What they say ----------------------------------------------------------------------------------------------------

    @property
    def _events_or_none(self) -> list[dict[str, Any]]:
        return self.events if (self.run_dir / EVENTS).is_file() else []

    @property
    def _origin_s(self) -> float:
        """When the run began, in `time.time()` seconds."""
        if events := self._events_or_none:
            return float(events[0]["time_s"])
        return float(self.samples["time_s"].iloc[0]) if len(self.samples) else 0.0

    @cached_property
    def tally(self) -> Tally:
        """What the last attempt came to, read back from events and samples."""
        samples = self.samples if (self.run_dir / TIMELINE).is_file() else read.csv_table(b"", COLUMNS)
        return read.tally_of(self._events_or_none, samples)

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What ended the last attempt; works after a SIGKILL of run or watcher."""
        if "diagnosis" in self.result:
            return Diagnosis(**self.result["diagnosis"])
        config = None  # of another command, or of another version
        with contextlib.suppress(InputError):
            config = self.config
        return explain(self.run_dir, config, self.result, self.tally)

    @cached_property
    def phase_memory(self) -> pd.DataFrame:
        """See `timeline.phase_memory`."""
        return read.phase_memory(self.phases)

    @property
    def exit_code(self) -> int | None:
        """128 + N after signal N; None without a result."""
        return self.result.get("exit_code")

    @property
    def peak_bytes(self) -> int:
        """The most memory at once: the cgroup's own counter, page cache included, else the largest sample."""
        return int(self.result.get("peak_bytes") or 0)

    @property
    def held_peak_bytes(self) -> int:
        """The most anonymous + shared memory in any sample: what can't be taken back, unlike the page cache."""
        return held_peak_bytes(self.result)

    @property
    def rss_peak_bytes(self) -> int:
        """The most RSS in any sample, summed over the run's processes: what top and htop show as RES."""
        if peak := self.result.get("sampled_peaks_bytes", {}).get("rss_bytes"):
            return int(peak)
        return int(self.samples[[f"rss_{part}_bytes" for part in read.PARTS]].sum(axis=1).max())

    @property
    def is_finished(self) -> bool:
        """Whether the last attempt came to the end of the last epoch."""
        # A kill between the writing of a new config.json and its attempt leaves an older attempt's result.
        return self.exit_code == 0 and len(self.metrics) == self.config.epochs

    def require_finished(self) -> Run:
        """This run, where it finished: for a notebook that has no use for the rest of its cells otherwise.

        Raises:
            RunEnded: when the exit code is not 0; `papermill --engine ogbnlib` then exits with that code.
        """
        if self.exit_code != 0:
            raise RunEnded(f"{self.exit_code}: {self.diagnosis}")
        return self


@clear_errors()
def diagnose(run_dir: str | os.PathLike[str]) -> Diagnosis:
    """Say what ended the run in `run_dir`, from its files alone; works after a SIGKILL of run or watcher.

    Raises:
        InputError: when `run_dir` is not the folder of a run.
    """
    return Run.open(run_dir).diagnosis


# Its owner ------------------------------------------------------------------------------------------------------------


def _check_kind(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that is none for this run, without reading anything in it."""
    existing = (run_dir / CONFIG).is_file()
    if resume:
        if not existing:
            raise InputError(f"{run_dir}: expected a run to resume ({CONFIG}), found none; start it without resume")
    elif run_dir.is_dir() and any(path.name != LOCK for path in run_dir.iterdir()):
        what = "a run" if existing else "other files"
        raise InputError(
            f"{run_dir}: expected a new or empty folder, found {what} in it; resume it or name another one"
        )
    elif run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"{run_dir}: expected a folder for the run, found a file")


def _check_resumption(config: TrainConfig, run: Run) -> None:
    changed = [
        f"{name} was {getattr(run.config, name)!r}, now {getattr(config, name)!r}"
        for name in TrainConfig.model_fields
        if name not in RESUMABLE and getattr(run.config, name) != getattr(config, name)
    ]
    if changed:
        raise InputError(f"{run.run_dir}: can't resume with other values ({'; '.join(changed)}); use a new run_dir")
    if len(run.metrics) and config.epochs < (done := run.metrics["epoch"].max()):
        raise InputError(f"epochs: the run is already at epoch {done:.0f}, got epochs={config.epochs}")


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Keep other processes from training in `run_dir` meanwhile; yields the descriptor that holds the lock.

    A child that inherits the descriptor holds the lock too. The kernel lets go of it with the last of them, however
    they end (flock(2)); the file stays behind and means nothing by itself. The `filelock` library does not give its
    descriptor away, and unlocks it for all who have inherited it when the first of them lets go.

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
def own_run_dir(config: TrainConfig, run_dir: Path, *, resume: bool) -> Iterator[tuple[Run, int]]:
    """Make or reopen the folder of a run, and keep others out of it inside the block; nothing in it is lost.

    Yields the run as it was before, but for config.json, which is the new one, and the lock's descriptor.

    Raises:
        InputError: when another process trains in the folder, when it holds another run, or when `resume` finds none
            or one that the config does not continue; nothing but the lock's own file is written then.
    """
    _check_kind(run_dir, resume=resume)
    run_dir.mkdir(parents=True, exist_ok=True)
    warn_if_remote(run_dir, "its lock may not keep out a second run from another machine; start none")
    with clear_errors(run_dir), locked(run_dir) as lock:
        _check_kind(run_dir, resume=resume)  # again: another process may have been faster
        run = Run(run_dir)
        if resume:
            _check_resumption(config, run)
        for path in run_dir.glob(".*.part"):  # what a kill left of a file: whoever wrote it had the lock
            path.unlink()
        config.save(run_dir / CONFIG)
        yield run, lock
