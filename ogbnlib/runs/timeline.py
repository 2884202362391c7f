"""What the files of a run say: samples with their phases, events, metrics. A torn line is dropped and counted."""

from __future__ import annotations

import io
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..forecast.audit import kind_of
from ..memory.recorder import _TORN, COLUMNS, EVENTS, TIMELINE

if TYPE_CHECKING:
    import pandas as pd


CUDA_COLUMNS = (
    *("allocated_bytes", "reserved_bytes", "free_bytes", "largest_free_bytes", "alloc_retries", "ooms"),
    *("peak_allocated_bytes", "peak_reserved_bytes"),
)


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


def measured_phases(run_dir: str | os.PathLike[str]) -> dict[str, int]:
    """The most anonymous + shared bytes in any of the last attempt's samples of each kind of phase, "" between phases.

    The cgroup's count where there is one.
    """
    table, events = read_timeline(run_dir), read_events(run_dir)
    began_s = last_attempt(events)[0]["time_s"] - events[0]["time_s"] if events else 0.0
    table = table[table["time_s"] >= began_s]
    source = "cgroup" if table["cgroup_anon_bytes"].notna().any() else "rss"
    held = table[f"{source}_anon_bytes"] + table[f"{source}_shmem_bytes"]
    peaks = held.groupby(table["phase"].map(kind_of)).max().dropna()
    return {str(kind): int(peak) for kind, peak in peaks.items()}


def measured_parts(run_dir: str | os.PathLike[str]) -> dict[str, int]:
    """The largest size that the last attempt marked for each named part, in bytes."""
    parts: dict[str, int] = {}
    for event in last_attempt(read_events(run_dir)):
        if event["event"] == "part":
            parts[event["name"]] = max(parts.get(event["name"], 0), event["bytes"])
    return parts
