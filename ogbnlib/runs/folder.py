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
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel, FiniteFloat, ValidationError

from ..config import TrainConfig
from ..errors import InputError, clear_errors, format_bytes, shortened
from ..files import home, warn_if_remote, whereabouts
from ..memory.recorder import COLUMNS, EVENTS, TIMELINE, parse_events
from ..memory.tally import Growth, Tally
from ..progress import Count, Live, details, read_count, seconds
from . import timeline as read
from .diagnosis import Diagnosis, ended, explain, held_peak_bytes, labelled_html

if TYPE_CHECKING:
    import pandas as pd

CONFIG, RESULT, METRICS, PROGRESS = "config.json", "result.json", "metrics.csv", "progress.json"
OUTPUT, CHECKPOINT, LOCK = "output.log", "checkpoint.pt", ".lock"
TORN_FILES = ".*.part"  # what a kill left of files that are written whole or not at all
PREVIOUS, DAMAGED, BEST = "checkpoint.previous.pt", "checkpoint.damaged.pt", "best.pt"
MODEL = "model.py"  # the code of a model of the user's own
CONFIG_VARIABLE = (
    "OGBNLIB_CONFIG"  # tells a child the config of a run to resume, whose config.json is still the old one
)
METRIC_COLUMNS = ("epoch", "loss", "train", "valid", "test", "time_s", "eval_time_s")


class RunEnded(RuntimeError):
    """A run that did not finish. The text is its exit code, a colon and its diagnosis."""


@clear_errors()
def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: expected a run's {what}, found no such file; pass the folder of a run") from None


RunLike: TypeAlias = "Run | str | os.PathLike[str]"
Runs: TypeAlias = "Mapping[str, RunLike] | Iterable[RunLike]"


def named(runs: Runs) -> dict[str, Run]:
    """Runs or their folders by the names given, or by those of their folders, with their paths where names repeat.

    Raises:
        InputError: for what is not the folder of a run.
    """
    if isinstance(runs, Mapping):
        return {name: Run.open(run) for name, run in runs.items()}
    opened = [Run.open(run) for run in ([runs] if isinstance(runs, str | os.PathLike | Run) else runs)]
    names = [run.run_dir.name for run in opened]
    unique = len({*names}) == len(names)
    return {run.run_dir.name if unique else str(run.run_dir): run for run in opened}


class _Outer(BaseModel):
    limit_bytes: FiniteFloat | None
    cgroup: str


class _Result(BaseModel):
    """What is relied on of a result.json; a newer one may have more."""

    exit_code: int | None = None
    duration_s: float = 0.0
    memory_limit_bytes: FiniteFloat | None = None
    peak_bytes: FiniteFloat | None = None
    sampled_peaks_bytes: dict[str, FiniteFloat] = {}
    outer_limit: _Outer | None = None
    growth: Growth | None = None
    diagnosis: Diagnosis | None = None


class Run:
    """A run by its folder, as `sandbox.run` returns it and `Run.open` finds it again, however it ended.

    Each file is read when it is first asked for, and not again; what is `known` of it already is not read at all.
    """

    def __init__(self, run_dir: str | os.PathLike[str], **known: Any):
        self.run_dir = home(run_dir)
        vars(self).update(known)

    @classmethod
    @clear_errors()
    def open(cls, run_dir: RunLike) -> Run:
        """The run in a folder; a `Run` is given back as it is.

        Raises:
            InputError: when it is not the folder of a run.
        """
        if isinstance(run_dir, Run):
            return run_dir
        if not any((home(run_dir) / name).is_file() for name in (CONFIG, EVENTS, TIMELINE)):
            found = "neither in it" if home(run_dir).is_dir() else f"no such folder{whereabouts(run_dir)}"
            raise InputError(f"{run_dir}: expected the folder of a run ({CONFIG}, {EVENTS}), found {found}")
        return cls(run_dir)

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r}, {self.state})"

    def _repr_html_(self) -> str:
        """A small card."""
        try:
            status, held = self.status, read.held_memory(self.timeline)
            peak, limit_bytes = format_bytes(self.held_peak_bytes), status["memory_limit_bytes"]
            within = f" of {format_bytes(limit_bytes)}" if limit_bytes else ""
            rows = {"run": str(self.run_dir), "state": self.state}
            rows |= {"phase": status["phase"] or ("starting" if self.is_at_work else "before the first")}
            rows |= {"peak": f"{peak} held{within}", "time": seconds(status["duration_s"])}
            if len(evaluated := self.metrics.dropna(subset="valid")):
                for which, row in (("last", evaluated.iloc[-1]), ("best", evaluated.loc[evaluated["valid"].idxmax()])):
                    accuracies = f"valid {row['valid']:.4f}, test {row['test']:.4f} after epoch {row['epoch']:.0f}"
                    rows[f"{which} accuracy"] = accuracies
        except InputError as error:
            return labelled_html({"run": str(self.run_dir), "damaged": str(error)})
        return labelled_html(rows) + (read.sketch(held, limit_bytes) if len(held) else "")

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
        path = self.run_dir / TIMELINE
        return read.csv_table(_read(path, "timeline"), COLUMNS, path).astype(float)

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
    @clear_errors()
    def metrics(self) -> pd.DataFrame:
        """metrics.csv, one row per epoch; empty when none was finished."""
        path = self.run_dir / METRICS
        table = read.csv_table(path.read_bytes() if path.is_file() else b"", METRIC_COLUMNS, path)
        if (epochs := table["epoch"].tolist()) != [*range(1, len(table) + 1)]:
            raise InputError(
                f"{path}: expected a line for each epoch from 1 on, found {epochs}: edited or damaged; resume the run, "
                "which writes it anew from its checkpoint, or move it away"
            )
        return table

    @cached_property
    def result(self) -> dict[str, Any]:
        """result.json; empty where the watching process is at work, or did not live to write it."""
        path = self.run_dir / RESULT
        try:
            result: dict[str, Any] = json.loads(path.read_bytes())
            _Result.model_validate(result)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            found: object = error
            if isinstance(error, ValidationError):
                wrong = error.errors()[0]
                found = " ".join([*(str(part) for part in wrong["loc"]), wrong["msg"]])
            raise InputError(
                f"{path}: expected the result of a run, found something else ({found}): edited or damaged; move it "
                "away to have the rest of the run diagnosed"
            ) from None
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
        if told := _Result.model_validate(self.result).diagnosis:
            return told
        config = None  # of another command, or of another version
        with contextlib.suppress(InputError):
            config = self.config
        return explain(self.run_dir, config, self.result, self.tally, self.is_at_work)

    @property
    def is_at_work(self) -> bool:
        """Whether a process trains, or watches a command, in the folder at this moment: it holds the folder's lock."""
        return not self.result and is_locked(self.run_dir)

    @property
    def state(self) -> str:
        """How the last attempt ended, in a few words, or "at work"."""
        return "at work" if self.is_at_work else ended(self.result)

    @property
    def status(self) -> dict[str, Any]:
        """How it stands now: state, phase and since when (`time.time()` seconds), limit and what is held, in bytes.

        `progress` is what is done of the phase at work: `done` of `total`, `per_s`, the `loss` of a training epoch so
        far, `run_left_s` of the whole run; None where nothing is counted.
        """
        phase, start = self.tally.phase, self.tally.events.get("start", {})
        count = _counted(self.run_dir, self.tally) if self.is_at_work else None
        return {
            "state": self.state,
            "progress": None if count is None else asdict(count),
            "phase": phase.label if phase else None,
            "phase_since_s": phase.began_s if phase else None,
            "held_bytes": self.tally.held_bytes,
            "held_peak_bytes": self.tally.held_peak_bytes,
            "memory_limit_bytes": start.get("memory_limit_bytes"),
            "duration_s": self.tally.duration_s,
        }

    def follow(self) -> Run:
        """Show how the run stands, as `run` does, until it is no longer at work; returns it as it then is."""

        def text() -> tuple[str, str]:
            now = Run(self.run_dir)
            return standing(self.run_dir, now.tally, now.status["memory_limit_bytes"])

        try:
            with Live(text) if self.is_at_work else contextlib.nullcontext():
                while Run(self.run_dir).is_at_work:
                    time.sleep(0.5)
        except KeyboardInterrupt:
            raise shortened(KeyboardInterrupt(f"{self.run_dir}: no longer followed; the run goes on")) from None
        return Run(self.run_dir)

    @property
    def growth(self) -> Growth | None:
        """Whether memory levels off or climbs, from epoch to epoch or over time, see `tally.Tally.growth`."""
        return _Result.model_validate(self.result).growth or self.tally.growth

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
        return int(self.result.get("peak_bytes") or self.held_peak_bytes)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit of the last attempt; None where it had none."""
        if self.result:
            return self.result.get("memory_limit_bytes")
        starts = [event for event in self._events_or_none if event["event"] == "start"]
        return starts[-1].get("memory_limit_bytes") if starts else None

    @property
    def held_peak_bytes(self) -> int:
        """The most anonymous + shared memory in any sample: what can't be taken back, unlike the page cache."""
        return held_peak_bytes(self.result) if self.result else self.tally.held_peak_bytes or 0

    @property
    def rss_peak_bytes(self) -> int:
        """The most RSS in any sample, summed over the run's processes: what top and htop show as RES."""
        if peak := self.result.get("sampled_peaks_bytes", {}).get("rss_bytes"):
            return int(peak)
        return int(self.samples[[f"rss_{part}_bytes" for part in read.PARTS]].sum(axis=1).max())

    @property
    def is_finished(self) -> bool:
        """Whether the last attempt came to the end of the last epoch, or of that which early stopping made it."""
        return self.exit_code == 0 and self.config.is_over(self.metrics["valid"])

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


def _counted(run_dir: Path, tally: Tally) -> Count | None:
    """What the trainer counts of the phase that goes on."""
    count = read_count(run_dir / PROGRESS)
    return count if count is not None and tally.phase is not None and count.phase == tally.phase.label else None


def standing(run_dir: Path, tally: Tally, limit_bytes: int | None) -> tuple[str, str]:
    """Where a run at work stands, for `Live`: its name and phase; counts and what it holds."""
    more = details(_counted(run_dir, tally), tally.held_bytes, limit_bytes)
    if tally.phase:
        return f"{run_dir.name}: {tally.phase.label}", more
    if tally.events.get("start", {}).keys() & {"command", "watched_pid"}:  # which may never name a phase
        return f"{run_dir.name}: at work", ", ".join([seconds(tally.duration_s), *([more] if more else [])])
    return f"{run_dir.name}: starting", more


# Its owner ------------------------------------------------------------------------------------------------------------


def _check_kind(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that is none for this run, without reading anything in it."""
    existing = (run_dir / CONFIG).is_file()
    if resume and existing:
        return
    if run_dir.is_dir() and any(path.name != LOCK and not path.match(TORN_FILES) for path in run_dir.iterdir()):
        what, remedy = ("a run", "resume it or name") if existing else ("other files", "name")
        raise InputError(f"{run_dir}: expected a new or empty folder, found {what} in it; {remedy} another one")
    if run_dir.exists() and not run_dir.is_dir():
        raise InputError(f"{run_dir}: expected a folder for the run, found a file")


def check_changes(before: Mapping[str, Any], config: TrainConfig, run_dir: Path) -> list[str]:
    """A sentence for each value that counts from here on and has a meaning for the figures.

    Args:
        before: the values that the run had, as JSON has them.

    Raises:
        InputError: naming each value that may not be another one.
    """
    refused, notes = config.changes(before)
    if refused:
        raise InputError(f"{run_dir}: can't resume with other values ({'; '.join(refused)}); use a new run_dir")
    return notes


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
            for _ in range(10):  # `is_locked` may just be looking
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.01)
            else:
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


def is_locked(run_dir: Path) -> bool:
    """Whether a process holds the lock of a run's folder, on this machine or, on a file system that tells, another."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDONLY)
    except OSError:
        return False  # a run of before there were locks, or another user's, whose end is not ours to see
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def own_run_dir(config: TrainConfig | None, run_dir: Path, *, resume: bool) -> Iterator[tuple[Run, int]]:
    """Make or reopen the folder of a run, and keep others out of it inside the block; nothing in it is lost.

    Yields the run as it was before, and the lock's descriptor. A new run's config.json is written here, a resumed one's
    by the trainer, once it has accepted data set and checkpoint. Without a config it is that of another command.
    `resume` in a new or empty folder starts a new run, so that one command serves every attempt of a Slurm job.

    Raises:
        InputError: when another process trains in the folder, when it holds another run or other files, or when
            `resume` finds a run that the config does not continue; nothing but the lock's own file is written then.
    """
    _check_kind(run_dir, resume=resume)
    run_dir.mkdir(parents=True, exist_ok=True)
    warn_if_remote(run_dir, "its lock may not keep out a second run from another machine; start none")
    with clear_errors(run_dir), locked(run_dir) as lock:
        _check_kind(run_dir, resume=resume)  # again: another process may have been faster
        run = Run(run_dir)
        resumed = (run_dir / CONFIG).is_file()
        if resumed and config is not None:
            check_changes(run.config.model_dump(mode="json"), config, run_dir)
            done = 0
            with contextlib.suppress(InputError):  # of a damaged metrics.csv; the checkpoint knows too
                done = len(run.metrics)
            if config.epochs < done:
                raise InputError(f"epochs: the run is already at epoch {done}, got epochs={config.epochs}")
        for torn in run_dir.glob(TORN_FILES):
            torn.unlink(missing_ok=True)
        if config is not None and not resumed:
            config.save(run_dir / CONFIG)
        yield run, lock
