"""A run, read from the files of its folder; each file is read once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..config import TrainConfig
from ..display import html_card
from ..errors import InputError, clear_errors, naming
from ..files import StrPath, decode_json, home, is_held, read_whole, whereabouts
from ..memory.record import (
    ADDED_COLUMNS,
    F1_COLUMNS,
    METRIC_COLUMNS,
    SAMPLE_COLUMNS,
    Event,
    Phase,
    Record,
    RunPaths,
    parse_events,
)
from ..progress import Count, details, read_count, seconds
from ..registry import RUN_METHODS
from .diagnosis import explain, read_diagnosis, read_facts
from .render import Diagnosis

if TYPE_CHECKING:
    import pandas as pd

RunLike: TypeAlias = "Run | str | os.PathLike[str]"
Runs: TypeAlias = "Mapping[str, RunLike] | Iterable[RunLike]"


def _tables() -> Any:
    """Import `timeline`, and with it pandas, only on use: watching a command needs neither."""
    from . import timeline

    return timeline


class RunEnded(RuntimeError):
    """Error for a run that did not finish. The text is its exit code, a colon and its diagnosis."""


def is_run(folder: StrPath) -> bool:
    """Whether a folder belongs to a run, of a training or of a watched command."""
    paths = RunPaths(folder)
    return paths.config.is_file() or paths.events.is_file()


def named(runs: Runs) -> dict[str, Run]:
    """Open runs and return them by name.

    Names are the mapping's keys, else the folders' names, or the folders' paths if names repeat.
    """
    if isinstance(runs, Mapping):
        return {name: Run.open(run) for name, run in runs.items()}
    several = [runs] if isinstance(runs, str | os.PathLike | Run) else runs
    opened = [Run.open(run) for run in several]
    by_name = {run.run_dir.name: run for run in opened}
    return by_name if len(by_name) == len(opened) else {str(run.run_dir): run for run in opened}


class Run:
    """A run by its folder, as `run` returns it and `Run.open` finds it again, however it ended.

    An attempt is one start or resumption of the run, a phase a named step in it. Each file is read
    on first use. Properties given in `known` need no file.
    """

    def __init__(self, run_dir: StrPath, **known: object):
        self.run_dir = home(run_dir)  # as given, for display
        self._folder = self.run_dir.absolute()  # remains right when the working folder changes
        self.paths = RunPaths(self._folder)
        vars(self).update(known)  # where `cached_property` looks first

    report = RUN_METHODS["report"]  # `inference.report`, which is imported on use

    @cached_property
    def config(self) -> TrainConfig:
        """The resolved config; `InputError` for the run of a watched command."""
        return TrainConfig.load(self.paths.config)

    @property
    def known_config(self) -> TrainConfig | None:
        """The config; None for a watched command, or a run of another version."""
        with contextlib.suppress(InputError):
            return self.config
        return None

    @cached_property
    def events(self) -> list[Event]:
        """The events of all attempts in order, `time_s` in `time.time()` seconds."""
        return list(parse_events(_content(self.paths.events)))

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases of all attempts in order of their start, in seconds since the run began."""
        phases: list[Phase] = []
        record = Record(origin_s=self._origin_s, history=phases)
        for event in self.events:
            record.event(event)
        return phases

    @cached_property
    def samples(self) -> pd.DataFrame:
        """timeline.csv as float64: `SAMPLE_COLUMNS`, `time_s` in `time.time()` seconds."""
        path = self.paths.timeline
        return _tables().csv_table(_content(path), SAMPLE_COLUMNS, path, optional=ADDED_COLUMNS)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """The recorded samples with phases and GPU readings, see `timeline.timeline_table`."""
        return _tables().timeline_table(self.samples, self.phases, self.cuda, self._origin_s)

    @cached_property
    def cuda(self) -> pd.DataFrame:
        """The recorded readings of GPU memory, see `timeline.cuda_table`; empty without a GPU."""
        return _tables().cuda_table(self.events, self._origin_s)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """metrics.csv, one row per epoch; empty if no epoch was finished.

        NaN stands for a split that was not evaluated, and for columns that version 0.2.0 did not
        write.
        """
        path = self.paths.metrics
        table = _tables().csv_table(_content(path), METRIC_COLUMNS, path, optional=F1_COLUMNS)
        epochs = table["epoch"].tolist()
        if epochs != [*range(1, len(table) + 1)]:  # a line was torn, or the file was edited
            raise InputError(
                f"{path}: expected a line for each epoch from 1 on, found {epochs}. Resume the run, "
                "which rewrites the file."
            )
        return table.astype({"epoch": int})

    @property
    def best_epoch(self) -> pd.Series | None:
        """The first row of `metrics` with the best accuracy on valid; None without any."""
        evaluated = self.metrics.dropna(subset="valid")
        return evaluated.loc[evaluated["valid"].idxmax()] if len(evaluated) else None

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of result.json; empty while the run works, or if its watcher was killed."""
        path = self.paths.result
        data = _content(path)
        if not data:
            return {}
        with naming(path, "the result of a run", "move the file away to have the rest diagnosed"):
            result = decode_json(data)
            read_diagnosis(result) or read_facts(result)  # raises ValueError for wrong types
        return result

    @cached_property
    def record(self) -> Record:
        """The record of the last attempt, from events and samples."""
        return _tables().record_of(self.events, self.samples)

    @property
    def _origin_s(self) -> float:
        # `time.time()` of the first event, else of the first sample, else 0
        times_s = [event["time_s"] for event in self.events[:1]] or [*self.samples["time_s"][:1]]
        return float([*times_s, 0.0][0])

    @classmethod
    @clear_errors()
    def open(cls, run_dir: RunLike) -> Run:
        """The run in a folder; a `Run` is returned as it is."""
        if isinstance(run_dir, Run):
            return run_dir
        if not is_run(home(run_dir)):
            problem = f"no such folder{whereabouts()}"
            raise InputError(
                f"{run_dir}: expected the folder of a run (config.json, events.jsonl), found "
                f"{'neither in it' if home(run_dir).is_dir() else problem}"
            )
        return cls(run_dir)

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r}, {self.state})"

    def _repr_html_(self) -> str:
        rows = {"run": str(self.run_dir)}
        sketch = ""
        try:  # a damaged file must not hide the rows before it
            rows["state"] = self.state
            rows["diagnosis"] = str(self.diagnosis)
            best = self.best_epoch
            if best is not None:
                accuracies = f"valid {best['valid']:.4f}, test {best['test']:.4f}"
                rows["best epoch"] = f"{accuracies} after epoch {best['epoch']:.0f}"
            memory = _tables().held_memory(self.timeline)
            if len(memory):
                sketch = _tables().sketch(memory, self.memory_limit_bytes)
        except InputError as error:
            rows["damaged"] = str(error)
        return f"{html_card(rows)}{sketch}"

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The cause of the last attempt's end; works after a SIGKILL of run or watching process."""
        facts = read_facts(self.result)
        return read_diagnosis(self.result) or explain(
            self._folder, self.known_config, facts, self.record, self.is_at_work
        )

    @property
    def is_at_work(self) -> bool:
        """Whether a process trains or watches a command here now: it holds the folder's lock."""
        with contextlib.suppress(OSError):  # another user's lock, or a file system without locks
            return not self.result and is_held(self.paths.lock)
        return False

    @property
    def state(self) -> str:
        """The end of the last attempt in a few words, or "at work"."""
        if not self.result:
            return "at work" if self.is_at_work else "no result"
        cause = self.diagnosis.cause
        code = self.exit_code
        return f"{cause}, exit code {code}" if code else cause

    @property
    def status(self) -> dict[str, Any]:
        """The run's state now, and its facts; `progress` is the open phase's `progress.Count`."""
        count = _count(self._folder, self.record) if self.is_at_work else None
        facts = self.diagnosis.facts.to_dict()
        return {"state": self.state, "progress": count and asdict(count), **facts}

    @property
    def parts(self) -> dict[str, int]:
        """Named parts of memory in use when the last attempt ended, in bytes."""
        return self.record.parts

    @cached_property
    def phase_memory(self) -> pd.DataFrame:
        """Memory of each phase, see `timeline.phase_memory`."""
        return _tables().phase_memory(self.phases)

    @property
    def exit_code(self) -> int | None:
        """The last attempt's exit code, 128 + N after signal N; None without a result."""
        return read_facts(self.result).exit_code

    @property
    def peak_bytes(self) -> int:
        """Peak memory: the cgroup's own counter, page cache included, else the largest sample."""
        return int(read_facts(self.result).peak_bytes or self.held_peak_bytes)

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit of the last attempt; None without one."""
        if self.result:
            return read_facts(self.result).memory_limit_bytes
        return self.record.start.get("memory_limit_bytes")

    @property
    def held_peak_bytes(self) -> int:
        """Peak of anonymous + shared memory in any sample, without the page cache."""
        return read_facts(self.result).held_peak_bytes or self.record.held_peak_bytes or 0

    @property
    def rss_peak_bytes(self) -> int:
        """Peak RSS in any sample, summed over the run's processes: the RES of top and htop."""
        return int(self.diagnosis.facts.sampled_peaks_bytes.get("rss_bytes", 0))

    @property
    def is_finished(self) -> bool:
        """Whether the last attempt reached the last epoch, or was ended by early stopping."""
        return self.exit_code == 0 and self.config.is_over(self.metrics["valid"])

    def require_finished(self) -> Run:
        """Return this run if it finished, else raise `RunEnded`.

        `papermill --engine ogbnlib` then exits with the run's exit code.
        """
        if self.exit_code != 0:
            raise RunEnded(f"{self.exit_code}: {self.diagnosis}")
        return self


@clear_errors()
def _content(path: Path) -> bytes:  # with clear errors for the public properties of a run
    return read_whole(path) if path.exists() else b""


def _count(run_dir: Path, record: Record) -> Count | None:
    # the trainer's count of batches or bytes, unless it is of an earlier phase than the open one
    count = read_count(RunPaths(run_dir).progress)
    phase = record.phase.label if record.phase else ""
    return count if count and count.phase == phase else None


def standing(run_dir: Path, record: Record, limit_bytes: int | None) -> tuple[str, str]:
    """The two parts of a run's progress line: its name and phase; its count and memory in use."""
    more = details(_count(run_dir, record), record.held_bytes, limit_bytes)
    # a trainer is between two phases for a moment only
    phase = record.phase or (None if record.is_command else record.newest)
    if phase:
        return f"{run_dir.name}: {phase.label}", more
    if record.is_command:  # which may never name a phase
        return f"{run_dir.name}: at work", f"{seconds(record.duration_s)}, {more}".strip(", ")
    return f"{run_dir.name}: starting", more
