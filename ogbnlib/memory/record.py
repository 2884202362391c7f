"""The record of a run: the files of its folder, the kinds of its events, and their summary.

`Record` takes events and samples one by one and keeps only the summary, so it is as small after a
week as after a minute.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import printable
from ..files import decode_json
from .growth import Growth
from .reading import Reading


class RunPaths:
    """Paths of the files in a run's folder, whether they exist or not."""

    def __init__(self, folder: str | os.PathLike[str]):
        folder = Path(folder)
        self.config = folder / "config.json"  # the resolved TrainConfig; a watched command has none
        self.events = folder / "events.jsonl"  # one JSON object per line
        self.timeline = folder / "timeline.csv"  # one line per kept sample
        self.metrics = folder / "metrics.csv"  # one line per epoch
        self.result = folder / "result.json"  # how the last attempt ended
        self.output = folder / "output.log"  # what the child printed
        self.progress = folder / "progress.json"  # progress of the current phase
        self.checkpoint = folder / "checkpoint.pt"
        self.best = folder / "best.pt"  # with keep="best": the best model on valid so far
        self.model = folder / "model.py"  # copy of the user's own model file
        self.lock = folder / ".lock"  # locked while the run is at work; the file stays


F1_COLUMNS = ("train_macro_f1", "valid_macro_f1", "test_macro_f1")  # release 0.2.0 wrote none
METRIC_COLUMNS = (
    *("epoch", "loss", "train", "valid", "test", "time_s", "eval_time_s"),
    *F1_COLUMNS,
)
SAMPLE_COLUMNS = ("time_s", *(field.name for field in fields(Reading)))
ADDED_COLUMNS = ("stalled_s",)  # release 0.2.0 wrote none

Event = dict[str, Any]
# Kinds of events with the fields that readers rely on. Other kinds and fields are kept as they are.
# "part": named memory that the run now uses (0 bytes: freed); "graph": the same for the graph that
# a loader of PyG keeps. "call" and "returned": a call that `memory.calls` records. "resumed": data
# set and checkpoint were accepted.
_NEEDED = {
    "begin": ["phase"],
    "end": ["phase"],
    "mark": ["name"],
    "part": ["name", "bytes"],
    "graph": ["name", "bytes"],
    "call": ["call", "line"],
    "cuda": ["allocated_bytes"],
    "cuda_oom": ["message"],
    "rank ended": ["rank", "exit_code"],
    "processes": ["text"],
}
# endings of the fields whose values are numbers
_NUMERIC = ("bytes", "_s", "_retries", "rank", "exit_code")
_LAST_KEPT = ("dataset", "cuda_oom", "rank ended", "resumed", "finished", "processes")
# fields of an event "end" -> their names in `Phase.info`
_END_FIELDS = {
    "failed": "failed",
    "peak_rss_bytes": "peak_rss_bytes",
    "held_bytes": "end_held_bytes",
}
BOUNDARIES = ("start", "begin", "end")  # events at which one phase ends and another begins


def parse_events(data: bytes) -> Iterator[Event]:
    """Yield the events in these lines; skip damaged lines and lines that a kill cut off."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            event = decode_json(line)
            if _is_sound(event):
                yield event


def _is_sound(event: Event) -> bool:  # it has all needed fields, with the right types
    needed = {"time_s", "event", *_NEEDED.get(event.get("event", ""), [])}
    known = {name: value for name, value in event.items() if value is not None}
    numbers = [value for name, value in known.items() if name.endswith(_NUMERIC)]
    texts = [known[name] for name in needed & known.keys() if not name.endswith(_NUMERIC)]
    return (
        needed <= known.keys()
        and all(isinstance(text, str) for text in texts)
        # `type`, because True is an instance of int
        and all(type(number) in (int, float) for number in numbers)
        and isinstance(event.get("command") or [], list)  # of a "start"
    )


def phase_label(name: str, info: Mapping[str, Any]) -> str:
    return printable(f"{name} {info['epoch']}" if "epoch" in info else name)  # "train epoch 3"


@dataclass
class Phase:
    """A phase of a run; times are seconds since the record's origin."""

    name: str
    start_s: float
    depth: int  # number of phases around it
    attempt: int  # number of the start or resumption of the run, from 1
    info: dict[str, Any]  # other fields of its event "begin", and those of `_END_FIELDS`
    end_s: float | None = None  # None while it is open, or if its end was not recorded
    # `end_s`; without one, the end of an outer phase or the start of the next attempt
    until_s: float = math.inf

    @property
    def label(self) -> str:
        return phase_label(self.name, self.info)


class Record:
    """Summary of a run's last attempt, from its events and samples in order of time.

    Times of phases are relative to `origin_s`. Each phase of any attempt is appended to `history`.
    """

    def __init__(self, *, origin_s: float = 0.0, history: list[Phase] | None = None):
        self._origin_s = origin_s
        self._history = history
        self.attempt = 0  # number of starts and resumptions so far
        self._reset()

    def _reset(self, began_s: float | None = None) -> None:  # in `time.time()` seconds
        # peak of the memory in use (anonymous + shared) by phase name, "" between phases
        self.phases: dict[str, int] = {}
        self.parts: dict[str, int] = {}  # named parts in use now, in bytes
        self.largest_parts: dict[str, int] = {}  # the largest size of each part so far
        # maximum of each sampled column, of `rss_bytes` (sum of RSS), and of `held_bytes` (in use)
        self.peaks: dict[str, int] = {}
        self.held_bytes: int | None = None  # anonymous + shared memory at the last sample
        self.start: Event = {}  # the attempt's event "start"
        # the last event of each kind in `_LAST_KEPT`; the first "rank ended"
        self.events: dict[str, Event] = {}
        self.duration_s = 0.0  # from the start to the last sample
        self._num_processes: int | None = None  # of the last sample
        self._began_s = began_s  # None until a first event or sample
        # memory in use after each epoch, in bytes; for phases ("end epoch", "end train epoch") and
        # marks ("mark epoch") separately: an epoch may have both
        self._levels: dict[str, list[int]] = {}
        self._open: list[Phase] = []  # open phases, the outermost first
        # the innermost phase that an exception left, as long as no event of a phase follows
        self.failed: Phase | None = None
        self.newest: Phase | None = None  # the phase that began last
        self._calls: list[Event] = []  # recorded calls that have not returned
        self._graphs = set[str]()  # names of the parts that are graphs of PyG's loaders
        # seconds in which a process waited for memory; None if the kernel does not count them
        self.stalled_s: float | None = None
        self._stalled_before_s: float | None = None  # the kernel's count at the first sample

    @property
    def phase(self) -> Phase | None:
        """The innermost phase that is open; None if none is."""
        innermost = self._open[-1:]  # a copy: other threads than the recorder's read it too
        return innermost[0] if innermost else None

    @property
    def call(self) -> Event | None:
        """The innermost recorded call that has not returned."""
        return self._calls[-1] if self._calls else None

    @property
    def graphs(self) -> dict[str, int]:
        """Bytes of the graph that each living loader of PyG keeps, by the loader's name."""
        return {name: size for name, size in self.parts.items() if name in self._graphs}

    @property
    def is_command(self) -> bool:
        """Whether the attempt ran a watched command, not the trainer."""
        return "command" in self.start

    @property
    def held_peak_bytes(self) -> int | None:
        return self.peaks.get("held_bytes")

    @property
    def growth(self) -> Growth | None:
        """Growth over the phases, or over the marks, that are named as epochs, such as "epoch" or
        "train epoch 3"; None without any."""
        levels = max(self._levels.values(), key=len, default=[])  # the kind with most epochs
        return Growth.of(levels) if levels else None

    def event(self, event: Event) -> None:
        """Take the next event."""
        kind = event["event"]
        now_s = event["time_s"] - self._origin_s
        if kind in ("end", "mark"):
            self._add_level(event)
        if kind in ("begin", "mark"):
            self.failed = None  # the script handled the exception and went on
        if kind == "start":
            for phase in self._open:  # a kill of the earlier attempt left them open
                phase.until_s = now_s
            self._reset(event["time_s"])
            self.attempt += 1
            self.start = event
        elif kind == "begin":
            self._begin(event, now_s)
        elif kind == "end":
            self._end(event, now_s)
        elif kind in ("part", "graph"):
            self._set_part(event)
        elif kind == "call":
            self._calls.append(event)
        elif kind == "returned":
            self._calls = self._calls[:-1]  # may be empty, if the event of the call was lost
        elif kind in _LAST_KEPT and not (kind == "rank ended" and kind in self.events):
            self.events[kind] = event  # of ranks the first: the others end because of it

    def _begin(self, event: Event, now_s: float) -> None:
        known = ("time_s", "event", "phase")
        info = {name: value for name, value in event.items() if name not in known}
        phase = Phase(event["phase"], now_s, len(self._open), self.attempt, info)
        self.newest = phase
        self._open.append(phase)
        if self._history is not None:  # the caller collects the phases of all attempts
            self._history.append(phase)

    def _set_part(self, event: Event) -> None:
        name = event["name"]
        size = int(event["bytes"])
        self.parts.pop(name, None)
        if size:  # 0 means freed
            self.parts[name] = size
        self.largest_parts[name] = max(self.largest_parts.get(name, 0), size)
        if event["event"] == "graph":
            self._graphs.add(name)

    def _add_level(self, event: Event) -> None:  # a mark, or the end of a phase
        name = event["phase" if event["event"] == "end" else "name"].lower()
        # "epoch", "epoch 3", "train epoch 3", "training epochs"
        epoch = re.fullmatch(r"((train\w* )?epoch)s?( \d+)?", name)
        # A single process knows its own memory exactly. The last sample counts all processes.
        held_bytes = event.get("held_bytes") if (self._num_processes or 1) <= 1 else self.held_bytes
        if held_bytes is not None and epoch:
            self._levels.setdefault(f"{event['event']} {epoch[1]}", []).append(held_bytes)

    def _end(self, event: Event, now_s: float) -> None:
        if event["phase"] not in [phase.name for phase in self._open]:
            return  # it began before this attempt, or its begin was lost
        while self._open:
            phase = self._open.pop()
            phase.until_s = now_s
            if phase.name == event["phase"]:
                break  # the ends of the phases inside it were lost
        phase.end_s = now_s
        phase.info |= {_END_FIELDS[name]: event[name] for name in _END_FIELDS if name in event}
        # One exception ends several phases, from the innermost to the outermost: keep the first.
        failed = self.failed
        if "failed" not in event:
            self.failed = None
        elif failed is None or failed.info["failed"] != event["failed"]:
            self.failed = phase

    def sample(self, time_s: float, reading: Reading) -> None:
        """Take the next reading of the process tree, taken at `time_s` in `time.time()` seconds."""
        if self._began_s is None:  # no event "start" came before
            self._began_s = time_s
        self.duration_s = max(0.0, time_s - self._began_s)  # the clock may be set back
        self._num_processes = reading.num_processes
        if reading.stalled_s is not None:
            if self._stalled_before_s is None:
                self._stalled_before_s = reading.stalled_s
            self.stalled_s = round(reading.stalled_s - self._stalled_before_s, 3)
        values = vars(reading).items()
        sizes = {name: n for name, n in values if n is not None and name.endswith("_bytes")}
        if reading.rss_anon_bytes is not None:
            sizes["rss_bytes"] = reading.rss_sum_bytes + (reading.rss_file_bytes or 0)
        held_bytes = reading.held_bytes
        if held_bytes is not None:  # None of a killed tree, or if only PSS could tell
            self.held_bytes = held_bytes
            sizes["held_bytes"] = held_bytes
            name = self._open[-1].name if self._open else ""
            self.phases[name] = max(self.phases.get(name, 0), held_bytes)
        self.peaks |= {name: max(self.peaks.get(name, 0), size) for name, size in sizes.items()}
