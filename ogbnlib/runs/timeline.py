"""What the files of a run say: samples with their phases, events, metrics. A torn line is dropped and counted.

Everything here is linear in what is read, and takes what `folder.Run` has read already.
"""

from __future__ import annotations

import heapq
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..memory.reading import Reading
from ..memory.recorder import COLUMNS, TORN
from ..memory.tally import Tally, phase_label

if TYPE_CHECKING:
    import pandas as pd

Event = dict[str, Any]
CUDA_COLUMNS = (
    *("allocated_bytes", "reserved_bytes", "free_bytes", "largest_free_bytes", "alloc_retries", "ooms"),
    *("peak_allocated_bytes", "peak_reserved_bytes"),
)
PARTS = ("anon", "shmem", "file")


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
        return phase_label(self.name, self.info)


# Events ---------------------------------------------------------------------------------------------------------------


def phases_of(events: Iterable[Event], origin_s: float) -> list[Phase]:
    """The phases of all attempts in order of their start."""
    phases: list[Phase] = []
    open_: list[int] = []
    attempt = 0
    for event in events:
        at = event["time_s"] - origin_s
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
                old = phases[index] = replace(phases[index], until_s=at)
                if old.name == event["phase"]:
                    info = dict(old.info)
                    info |= {key: event[key] for key in ("failed", "peak_rss_bytes") if key in event}
                    info |= {"end_held_bytes": event["held_bytes"]} if "held_bytes" in event else {}
                    phases[index] = replace(old, end_s=at, info=info)
                    break
    return phases


def phase_memory(phases: Sequence[Phase]) -> pd.DataFrame:
    """What each finished phase of the last attempt kept and what it needed on the way, from the kernel's own counters.

    Columns: `phase`, `duration_s`, `kept_bytes` (RssAnon + RssShmem at the end less at the beginning) and
    `transient_bytes` (the highest resident memory inside less that at the beginning; file pages that the phase mapped
    count too). The trainer's process alone: workers are not in it.
    """
    import pandas as pd

    needed = ("held_bytes", "rss_bytes", "end_held_bytes", "peak_rss_bytes")
    rows = [
        {
            "phase": phase.label,
            "duration_s": phase.end_s - phase.start_s,
            "kept_bytes": phase.info["end_held_bytes"] - phase.info["held_bytes"],
            "transient_bytes": phase.info["peak_rss_bytes"] - phase.info["rss_bytes"],
        }
        for phase in phases
        if phase.attempt == phases[-1].attempt and phase.end_s is not None and all(map(phase.info.get, needed))
    ]
    return pd.DataFrame(rows, columns=["phase", "duration_s", "kept_bytes", "transient_bytes"])


def cuda_table(events: Iterable[Event], origin_s: float) -> pd.DataFrame:
    """The readings of GPU memory that were kept, see `cuda.cuda_reading`.

    Columns: `time_s` since the run began, `cuda_allocated_bytes`, `cuda_reserved_bytes`, `cuda_unallocated_bytes`
    (reserved less allocated), `cuda_free_bytes`, `cuda_largest_free_bytes`, `cuda_alloc_retries`, `cuda_ooms`,
    `cuda_peak_allocated_bytes` and `cuda_peak_reserved_bytes`; NaN where the run's version did not record them.
    """
    import pandas as pd

    cuda = pd.DataFrame([event for event in events if event["event"] == "cuda"])
    cuda = cuda.reindex(columns=["time_s", *CUDA_COLUMNS]).astype(float)
    cuda["time_s"] -= origin_s
    cuda = cuda.sort_values("time_s", ignore_index=True)  # a clock may have been set back
    cuda.columns = pd.Index(["time_s", *(f"cuda_{name}" for name in CUDA_COLUMNS)])
    cuda["cuda_largest_free_bytes"] = cuda["cuda_largest_free_bytes"].ffill()  # not looked for in every reading
    cuda.insert(3, "cuda_unallocated_bytes", cuda["cuda_reserved_bytes"] - cuda["cuda_allocated_bytes"])
    return cuda


# Tables ---------------------------------------------------------------------------------------------------------------


def whole_lines(data: bytes) -> tuple[list[str], int]:
    """The whole lines of a CSV that a kill may have torn, header first, and the number of torn lines left out."""
    lines = data.decode("ascii", errors="replace").splitlines(keepends=True)
    commas = lines[0].count(",") if lines else 0
    whole = [line for line in lines if line.endswith("\n") and not line.endswith(TORN) and line.count(",") == commas]
    return whole, len(lines) - len(whole)


def csv_table(data: bytes, columns: Sequence[str], path: Path | None = None) -> pd.DataFrame:
    """A CSV of numbers, without its torn lines, which `attrs["torn_lines"]` counts; `columns` where it is empty.

    Raises:
        InputError: naming `path`, where it has not these columns, where a value is no number, or where most lines have
            not as many values as the first.
    """
    import pandas as pd

    lines, torn = whole_lines(data)
    try:
        # Counts are read as floats: integers above 2**53 bytes do not occur.
        table = pd.read_csv(io.StringIO("".join(lines))) if data else pd.DataFrame(columns=[*columns])
        table[[*columns]].astype(float)
        if torn > len(lines):
            raise ValueError(f"{torn} lines with another number of values")
    except (ValueError, KeyError) as error:
        raise InputError(
            f"{path}: expected the columns {','.join(columns)} in numbers, found something else ({error}): edited or "
            "damaged; move it away to see the rest of the run"
        ) from None
    table.attrs["torn_lines"] = torn
    return table


def timeline_table(samples: pd.DataFrame, phases: Sequence[Phase], cuda: pd.DataFrame, origin_s: float) -> pd.DataFrame:
    """`samples` with the phase that each fell in and the last reading of the GPU before it.

    Columns: `time_s` since the run began, those of `Reading` in bytes (NaN where not read), `phase` (innermost, ""
    between phases), and those of `cuda_table`; without those that hold nothing, such as a GPU's on a machine that has
    none. `attrs["torn_lines"]` counts lines that a kill tore and that are left out.
    """
    import numpy as np
    import pandas as pd

    table = samples.assign(time_s=samples["time_s"] - origin_s).sort_values("time_s")
    labels = np.full(len(table), "", dtype=object)
    first = np.searchsorted(table["time_s"], [phase.start_s for phase in phases])
    end = np.searchsorted(table["time_s"], [phase.until_s for phase in phases], side="right")
    for phase, i, j in zip(phases, first, end, strict=True):
        labels[i:j] = phase.label  # inner ones come later, and over what holds them
    table = pd.merge_asof(table.assign(phase=labels), cuda, on="time_s")
    table = table.dropna(axis="columns", how="all") if len(table) else table
    table.attrs = dict(samples.attrs)
    return table


def held_memory(table: pd.DataFrame) -> pd.DataFrame:
    """The held memory in the samples of a timeline: `time_s`, `anon`, `shmem` and `file`, in bytes.

    As `Reading.held` has it, each page counted once: the cgroup's count where the run had one of its own, else PSS,
    else the RSS of a process that is alone. Samples that do not tell are left out.
    """
    import pandas as pd

    table = table.reindex(columns=COLUMNS)
    source = pd.Series("rss", table.index)
    if table["pss_anon_bytes"].notna().any():
        source[table["num_processes"] > 1] = "pss"
    if table["cgroup_anon_bytes"].notna().any():
        source[:] = "cgroup"
    held = pd.DataFrame({"time_s": table["time_s"]})
    for part in PARTS:
        columns = [table[f"{kind}_{part}_bytes"].where(source == kind, 0.0) for kind in ("rss", "pss", "cgroup")]
        held[part] = sum(columns) if part == "anon" else sum(columns).fillna(0.0)
    return held[table["rss_anon_bytes"].notna() & held["anon"].notna()]


def sketch(held: pd.DataFrame, limit_bytes: float | None) -> str:
    """What `held_memory` has, anonymous + shared, as a small picture (SVG) with the limit as a dashed line."""
    width, height, sizes, times = 240.0, 48.0, held["anon"] + held["shmem"], held["time_s"]
    top = 1.1 * max(float(sizes.max()), limit_bytes or 0.0, 1.0)
    x = width * times / max(float(times.max()), 1e-3)
    points = " ".join(f"{i:.1f},{height * (1 - size / top):.1f}" for i, size in zip(x, sizes, strict=True))
    lines = f'<polygon points="0,{height} {points} {x.max():.1f},{height}" fill="#3b6fb6"/>'
    if limit_bytes:
        y = height * (1 - limit_bytes / top)
        lines += f'<line x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c0392b" stroke-dasharray="4"/>'
    return f'<svg width="{width}" height="{height}" style="background:#f4f4f4">{lines}</svg>'


def tally_of(events: Sequence[Event], samples: pd.DataFrame) -> Tally:
    """The last attempt's `Tally`, as a recorder that lived to its end would have had it."""
    tally, names = Tally(), [field.name for field in fields(Reading)]
    # In the order in which a recorder takes them, see `tally.precedes`: a phase's end after a sample of that moment.
    marked = ((event["time_s"], 2 if event["event"] == "end" else 0, event) for event in events)
    rows = samples[["time_s", *names]].itertuples(index=False)
    taken = ((time_s, 1, dict(zip(names, values, strict=True))) for time_s, *values in rows)
    for time_s, kind, item in heapq.merge(marked, taken, key=lambda each: each[:2]):
        if kind == 1:
            tally.sample(time_s, Reading(**{name: int(value) for name, value in item.items() if value == value}))
        else:
            tally.event(item)
    return tally
