"""The memory timeline of a run: samples appended by the watching process, phases marked by the trainer.

`timeline.csv` has one line per sample, `events.jsonl` one JSON object per line. Both are appended line by line with no
buffering in this process, so whatever kills the run, all lines but perhaps the last are whole; the readers here drop a
torn line and say so in `DataFrame.attrs`. Times are `time.time()` seconds in the files, so that an interrupted run's
later attempts append to the same files, and seconds since the run began in what the readers return.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import InputError
from .cuda import cuda_reading
from .memory import Cgroup, Reading, own_memory, read_memory, reset_peak

if TYPE_CHECKING:
    import pandas as pd

TIMELINE, EVENTS = "timeline.csv", "events.jsonl"
RUNS_VARIABLE = "OGBNLIB_RUNS_LOG"  # a file to which each attempt of a run adds its folder; for a watcher outside
CUDA_COLUMNS = (
    *("allocated_bytes", "reserved_bytes", "free_bytes", "largest_free_bytes", "alloc_retries", "ooms"),
    *("peak_allocated_bytes", "peak_reserved_bytes"),
)
COLUMNS = ("time_s", *(field.name for field in fields(Reading)))


_TORN = " torn\n"  # closes a line that a kill cut off: without it half a number in the last column would pass for one


def _open_for_append(path: Path) -> io.TextIOWrapper:
    """Open for appending whole lines; a torn last line left by a kill is marked as such, not deleted."""
    file = open(path, "a+b", buffering=0)  # noqa: SIM115 (the caller keeps it)
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(_TORN.encode())
    return io.TextIOWrapper(file, write_through=True)


class EventLog:
    """Appends to `events.jsonl`; one `write` call per line. With `run_dir=None` it marks nothing.

    Events: `start` of an attempt, `begin` and `end` of a phase, `part` (a named piece of memory the run now holds),
    `cuda` (see `cuda.cuda_reading`), `cuda_oom` (an allocation on the GPU that failed), `empty_cache`, `note` (a choice
    that was taken).

    Both ends of a phase carry this process's own `held_bytes` (RssAnon + RssShmem) at that moment, and its end the
    exact `peak_rss_bytes` reached inside it: the kernel's high-water mark, reset at the beginning through
    /proc/self/clear_refs (proc(5), "5"), so no spike is too short for it. Workers are not in these two.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self._file = _open_for_append(Path(run_dir) / EVENTS) if run_dir is not None else None
        self._lock = threading.Lock()
        self._last_cuda_s = self._last_largest_s = 0.0
        self._peaks: list[int] = []  # of the open phases: resetting the mark for an inner one must not lose the outer's

    def mark(self, event: str, **info: Any) -> None:
        if self._file is None:
            return
        line = json.dumps({"time_s": round(time.time(), 4), "event": event, **info}) + "\n"
        with self._lock:
            self._file.write(line)

    @contextlib.contextmanager
    def phase(self, name: str, **info: Any) -> Iterator[None]:
        """Everything inside belongs to phase `name`; phases nest, and the innermost open one is where a kill fell."""
        if self._file is None:
            yield
            return
        held, rss, peak = own_memory()
        self._peaks = [max(outer, peak) for outer in self._peaks]
        reset_peak()
        self._peaks.append(0)
        self.mark("begin", phase=name, held_bytes=held, rss_bytes=rss, **info)
        self.cuda(force=True)
        failed = {}
        try:
            yield
        except BaseException as error:
            failed = {"failed": type(error).__name__}
            raise
        finally:
            self.cuda(force=True, largest=True)
            held, _, peak = own_memory()
            self._peaks = [max(outer, peak) for outer in self._peaks]
            self.mark("end", phase=name, held_bytes=held, peak_rss_bytes=self._peaks.pop(), **failed)
            reset_peak()

    def part(self, name: str, size_bytes: int) -> None:
        """The run now holds `size_bytes` under this name; 0 says that it was given back."""
        self.mark("part", name=name, bytes=int(size_bytes))

    def cuda(self, force: bool = False, largest: bool = False) -> None:
        """Record this process's GPU memory, at most ten times a second unless `force`; free without CUDA.

        The largest free block is looked for once a second, and whenever `largest` is asked for.
        """
        now = time.monotonic()
        if self._file is None or not (force or now - self._last_cuda_s >= 0.1):
            return
        largest = largest or now - self._last_largest_s >= 1.0
        if (reading := cuda_reading(largest)) is not None:
            self._last_cuda_s = now
            self._last_largest_s = now if largest else self._last_largest_s
            self.mark("cuda", **reading)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Recorder:
    """A thread that appends a reading of `pid`'s process tree to `timeline.csv` every `interval_s`.

    `cgroup` is asked anew for each sample, as systemd makes a scope only after the child has begun.

    PSS makes the kernel walk page tables, so it is read once a second at most, and never for more than about 5 % of
    the time. `on_sample`, when given, sees each reading as it is taken (the watchdog limit hangs on it). An error in
    the thread, a full disk say, calls `on_error` and is raised by `stop`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        pid: int,
        *,
        cgroup: Callable[[], Cgroup | None] = lambda: None,
        interval_s: float = 0.05,
        on_sample: Callable[[Reading], None] | None = None,
        on_error: Callable[[], None] | None = None,
    ):
        self._on_error = on_error
        self._pid, self._cgroup, self._interval_s, self._on_sample = pid, cgroup, interval_s, on_sample
        path = Path(run_dir) / TIMELINE
        self._file = _open_for_append(path)
        if path.stat().st_size == 0:
            self._file.write(",".join(COLUMNS) + "\n")
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._next_pss_s = 0.0
        self._thread = threading.Thread(target=self._loop, name="memory-recorder", daemon=True)

    def start(self) -> Recorder:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take one last sample, end the thread, close the file."""
        self._stop.set()
        self._thread.join()
        self._file.close()
        if self._error is not None:
            raise self._error

    def sample(self) -> Reading:
        begin = time.monotonic()
        pss = begin >= self._next_pss_s
        reading = read_memory(self._pid, cgroup=self._cgroup(), pss=pss)
        if pss:
            self._next_pss_s = begin + max(1.0, 20 * (time.monotonic() - begin))
        values = ["" if value is None else str(value) for value in asdict(reading).values()]
        self._file.write(f"{time.time():.4f},{','.join(values)}\n")
        if self._on_sample is not None:
            self._on_sample(reading)
        return reading

    def _loop(self) -> None:
        try:
            while True:
                begin = time.monotonic()
                self.sample()
                if self._stop.wait(max(0.0, self._interval_s - (time.monotonic() - begin))):
                    if Path(f"/proc/{self._pid}").exists():
                        self.sample()
                    return
        except BaseException as error:
            self._error = error
            if self._on_error is not None:
                self._on_error()


@dataclass(frozen=True)
class Phase:
    """A stretch of a run, in seconds since the run began.

    `end_s` is None when its attempt ended inside it; `until_s` is then the next attempt's start, or infinity.
    """

    name: str
    start_s: float
    end_s: float | None
    until_s: float
    depth: int
    attempt: int
    info: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name} {self.info['epoch']}" if "epoch" in self.info else self.name


def read_events(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events in order; lines torn by a kill are left out. Times are as in the file (`time.time()`)."""
    path = Path(run_dir) / EVENTS
    if not path.is_file():
        raise InputError(f"{path}: expected a run's events, found no such file; pass the folder of a run")
    events = []
    for line in path.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "time_s" in event and "event" in event:
            events.append(event)
    return events


def last_attempt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events from the last `start` on; all of them where there is none."""
    begin = max((i for i, event in enumerate(events) if event["event"] == "start"), default=0)
    return events[begin:]


def _origin(events: list[dict[str, Any]]) -> float:
    return float(events[0]["time_s"]) if events else 0.0


def read_phases(run_dir: str | os.PathLike[str]) -> list[Phase]:
    """The phases of all attempts in order of their start."""
    events = read_events(run_dir)
    origin = _origin(events)
    phases: list[Phase] = []
    open_: list[int] = []
    attempt = 0
    for event in events:
        at = event["time_s"] - origin
        if event["event"] == "start":
            for index in open_:
                phases[index] = replace(phases[index], until_s=at)
            attempt, open_ = attempt + 1, []
        elif event["event"] == "begin":
            info = {key: value for key, value in event.items() if key not in ("time_s", "event", "phase")}
            open_.append(len(phases))
            phases.append(Phase(event["phase"], at, None, math.inf, len(open_) - 1, attempt, info))
        elif event["event"] == "end":
            while open_:
                index = open_.pop()
                old = phases[index]
                if old.name == event["phase"]:
                    info = dict(old.info)
                    info |= {key: event[key] for key in ("failed", "peak_rss_bytes") if key in event}
                    info |= {"end_held_bytes": event["held_bytes"]} if "held_bytes" in event else {}
                    phases[index] = replace(old, end_s=at, until_s=at, info=info)
                    break
    return phases


def phase_memory(run_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """What each finished phase of the last attempt kept and what it needed on the way, from the kernel's own counters.

    Columns: `phase`, `duration_s`, `kept_bytes` (RssAnon + RssShmem at the end less at the beginning) and
    `transient_bytes` (the highest resident memory inside less that at the beginning; file pages that the phase mapped
    count too). The trainer's process alone: workers are not in it.
    """
    import pandas as pd

    phases = read_phases(run_dir)
    rows = [
        {
            "phase": phase.label,
            "duration_s": phase.end_s - phase.start_s,
            "kept_bytes": phase.info["end_held_bytes"] - phase.info["held_bytes"],
            "transient_bytes": phase.info["peak_rss_bytes"] - phase.info["rss_bytes"],
        }
        for phase in phases
        if phase.attempt == phases[-1].attempt and phase.end_s is not None and "end_held_bytes" in phase.info
    ]
    return pd.DataFrame(rows, columns=["phase", "duration_s", "kept_bytes", "transient_bytes"])


def read_parts(run_dir: str | os.PathLike[str]) -> dict[str, int]:
    """The named parts that the last attempt held when it ended, in bytes."""
    events = last_attempt(read_events(run_dir))
    parts = {event["name"]: int(event["bytes"]) for event in events if event["event"] == "part"}
    return {name: size for name, size in parts.items() if size}


def read_csv_lines(path: Path) -> tuple[list[str], int]:
    """The whole lines of a CSV that a kill may have torn, header first, and the number of torn lines left out."""
    text = path.read_bytes().decode("ascii", errors="replace")
    lines = text.splitlines(keepends=True)
    commas = lines[0].count(",") if lines else 0
    whole = [line for line in lines if line.endswith("\n") and not line.endswith(_TORN) and line.count(",") == commas]
    return whole, len(lines) - len(whole)


def read_timeline(run_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """The samples of a run with the phase each fell in.

    Columns: `time_s` since the run began, those of `memory.Reading` in bytes (NaN where not read), `phase` (innermost,
    "" between phases), and the last marked `cuda_allocated_bytes`, `cuda_reserved_bytes`, `cuda_unallocated_bytes`
    (reserved less allocated), `cuda_free_bytes`, `cuda_largest_free_bytes`, `cuda_alloc_retries`, `cuda_ooms`,
    `cuda_peak_allocated_bytes` and `cuda_peak_reserved_bytes` (see `cuda.cuda_reading`; NaN without CUDA, and where the
    run's version did not record them).
    `attrs["torn_lines"]` counts lines that a kill tore and that are left out.

    Raises:
        InputError: when `run_dir` holds no timeline.csv.
    """
    import pandas as pd

    path = Path(run_dir) / TIMELINE
    if not path.is_file():
        raise InputError(f"{path}: expected a run's timeline, found no such file; pass the folder of a run")
    lines, torn = read_csv_lines(path)
    # pandas reads `time_s` and counts as floats: integers above 2**53 bytes do not occur.
    table = (
        pd.read_csv(io.StringIO("".join(lines)), dtype=float)
        if lines
        else pd.DataFrame(columns=list(COLUMNS), dtype=float)
    )
    events = read_events(run_dir) if (Path(run_dir) / EVENTS).is_file() else []
    origin = _origin(events) if events else (table["time_s"].iloc[0] if len(table) else 0.0)
    table["time_s"] -= origin

    table["phase"] = ""
    for phase in read_phases(run_dir) if events else []:
        inside = (table["time_s"] >= phase.start_s) & (table["time_s"] <= phase.until_s)
        table.loc[inside, "phase"] = phase.label
    cuda = _cuda_table(events, origin)
    table = pd.merge_asof(table.sort_values("time_s"), cuda, on="time_s")
    table.attrs["torn_lines"] = torn
    return table


def _cuda_table(events: list[dict[str, Any]], origin: float) -> pd.DataFrame:
    import pandas as pd

    cuda = pd.DataFrame(
        [
            {"time_s": event["time_s"] - origin, **{f"cuda_{name}": event.get(name) for name in CUDA_COLUMNS}}
            for event in events
            if event["event"] == "cuda"
        ],
        columns=["time_s", *(f"cuda_{name}" for name in CUDA_COLUMNS)],
        dtype=float,
    ).sort_values("time_s", ignore_index=True)  # a clock may have been set back
    cuda["cuda_largest_free_bytes"] = cuda["cuda_largest_free_bytes"].ffill()  # not looked for in every reading
    cuda.insert(3, "cuda_unallocated_bytes", cuda["cuda_reserved_bytes"] - cuda["cuda_allocated_bytes"])
    return cuda


def read_cuda(run_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """The readings of GPU memory as they were marked, with the columns that `read_timeline` has of them.

    No rows for a run that used no GPU.
    """
    events = read_events(run_dir)
    return _cuda_table(events, _origin(events))


def read_metrics(run_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """`metrics.csv`, one row per evaluation; empty when none was finished. A torn last line is left out."""
    import pandas as pd

    path = Path(run_dir) / "metrics.csv"
    if not path.is_file():
        return pd.DataFrame()
    lines, torn = read_csv_lines(path)
    table = pd.read_csv(io.StringIO("".join(lines))) if lines else pd.DataFrame()
    table.attrs["torn_lines"] = torn
    return table
