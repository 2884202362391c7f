"""Tables of a run, without torn lines: samples with phases, GPU readings, memory of each phase."""

import heapq
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import InputError
from ..files import LARGEST
from ..memory.reading import Reading
from ..memory.record import SAMPLE_COLUMNS, Event, Phase, Record
from ..memory.recorder import TORN

_CUDA_COLUMNS = [
    "allocated_bytes",
    "reserved_bytes",
    "free_bytes",
    "alloc_retries",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
]


def record_of(events: Iterable[Event], samples: pd.DataFrame) -> Record:
    """Rebuild the record that the run's own recorder had at its end, from events and samples."""
    record = Record()
    time, *names = SAMPLE_COLUMNS
    # (time_s, order, event or sample). `Recorder.add` has this order at the same time: other events
    # (0), a sample (1), the end of a phase (2).
    moments = ((event["time_s"], 2 if event["event"] == "end" else 0, event) for event in events)
    rows = samples[[time, *names]].itertuples(index=False)
    sampled = ((time_s, 1, dict(zip(names, values, strict=True))) for time_s, *values in rows)
    for time_s, order, item in heapq.merge(moments, sampled, key=lambda moment: moment[:2]):
        if order == 1:
            known = {name: value for name, value in item.items() if value == value}  # no NaN
            counts = {name: int(value) for name, value in known.items() if name != "stalled_s"}
            record.sample(time_s, Reading(**(known | counts)))
        else:
            record.event(item)
    return record


def phase_memory(phases: Sequence[Phase]) -> pd.DataFrame:
    """Memory that each finished phase of the last attempt kept, and needed in between.

    From the kernel's counters for the trainer's process alone, without workers. `kept_bytes` is
    RssAnon + RssShmem at the phase's end minus that at its beginning, `transient_bytes` the highest
    RSS inside the phase minus the RSS at its beginning.
    """
    rows = []
    needed = ("held_bytes", "rss_bytes", "end_held_bytes", "peak_rss_bytes")
    for phase in phases:
        sizes = [phase.info.get(name) or 0 for name in needed]  # 0: not recorded
        if phase.attempt == phases[-1].attempt and phase.end_s is not None and all(sizes):
            begin_held, begin_rss, end_held, peak_rss = sizes
            duration_s = phase.end_s - phase.start_s
            rows.append((phase.label, duration_s, end_held - begin_held, peak_rss - begin_rss))
    return pd.DataFrame(rows, columns=["phase", "duration_s", "kept_bytes", "transient_bytes"])


def cuda_table(events: Iterable[Event], origin_s: float) -> pd.DataFrame:
    """The recorded readings of GPU memory, one row each.

    `time_s` is in seconds since the run began. The other columns are named `cuda_` + the names of
    `cuda.cuda_reading`.
    """
    cuda = (
        pd.DataFrame([event for event in events if event["event"] == "cuda"])
        .reindex(columns=["time_s", *_CUDA_COLUMNS])
        .astype(float)
        .sort_values("time_s", ignore_index=True)  # a clock may have been set back
        .rename(columns={name: f"cuda_{name}" for name in _CUDA_COLUMNS})
    )
    cuda["time_s"] -= origin_s
    return cuda


def csv_table(
    data: bytes, columns: Sequence[str], path: Path, optional: Sequence[str] = ()
) -> pd.DataFrame:
    """Read a CSV of numbers without its torn lines.

    Empty data give an empty table with `columns`. Missing columns of `optional` are NaN; other
    content is an `InputError`.
    """
    if not data:
        return pd.DataFrame(columns=[*columns], dtype=float)
    lines = data.decode("ascii", errors="replace").splitlines(keepends=True)
    commas = lines[0].count(",")  # of the header
    # A resumed run ends a line that a kill cut off, even inside its last number, with TORN.
    whole = [
        line
        for line in lines
        if line.endswith("\n") and not line.endswith(TORN) and line.count(",") == commas
    ]
    try:
        # "round_trip" keeps the losses of the checkpoint; pandas' default parser may change their
        # last digit.
        text = "".join(whole)
        types = dict.fromkeys(columns, float)  # fails for texts
        table = pd.read_csv(io.StringIO(text), float_precision="round_trip", dtype=types)
        for name in optional:
            table[name] = table.get(name, np.nan)
        numbers = table[[*columns]]  # fails for missing columns
        if (numbers.abs() > LARGEST).any(axis=None) or numbers[columns[0]].isna().any():
            raise ValueError(f"a number above {LARGEST:.1e}, or a line without {columns[0]}")
        # a kill tears one line in an attempt, so a file with more torn lines is another one
        if len(lines) > 2 * len(whole):
            raise ValueError(f"{len(lines) - len(whole)} lines with another number of values")
    except (ValueError, KeyError) as error:
        raise InputError(
            f"{path}: expected the columns {','.join(columns)} in numbers, found other content "
            f"({error}). Move the file away to see the rest of the run."
        ) from None
    return table


def timeline_table(
    samples: pd.DataFrame, phases: Sequence[Phase], cuda: pd.DataFrame, origin_s: float
) -> pd.DataFrame:
    """Add to `samples` the phase of each and the last GPU reading before it.

    The phase is the innermost one, "" between phases. `time_s` becomes seconds since the run began.
    """
    table = samples.assign(time_s=samples["time_s"] - origin_s).sort_values("time_s")
    labels = np.full(len(table), "", dtype=object)
    first = np.searchsorted(table["time_s"], [phase.start_s for phase in phases])
    end = np.searchsorted(table["time_s"], [phase.until_s for phase in phases], side="right")
    for phase, i, j in zip(phases, first, end, strict=True):  # rows i to j - 1
        labels[i:j] = phase.label  # inner phases come later and overwrite outer ones
    # joins to each sample the last reading at or before it
    table = pd.merge_asof(table.assign(phase=labels), cuda, on="time_s")
    # without columns that no sample has; of an empty table they all would go
    return table.dropna(axis="columns", how="all") if len(table) else table


def held_memory(table: pd.DataFrame) -> pd.DataFrame:
    """Memory in use in a timeline's samples: `time_s`, `anon`, `shmem` and `file`, in bytes, as in
    `Reading.held_bytes`."""
    table = table.reindex(columns=SAMPLE_COLUMNS)
    by_cgroup = table["cgroup_anon_bytes"].notna().any()
    # PSS counts a page that processes share once, RSS in each of them; old kernels have no PSS
    needs_pss = (table["num_processes"] > 1) & table["pss_anon_bytes"].notna().any()
    memory = pd.DataFrame({"time_s": table["time_s"]})
    for part in ("anon", "shmem", "file"):
        by_process = table[f"pss_{part}_bytes"].where(needs_pss, table[f"rss_{part}_bytes"])
        memory[part] = table[f"cgroup_{part}_bytes"] if by_cgroup else by_process
    memory = memory.fillna({"shmem": 0.0, "file": 0.0})
    # the cgroup of a killed tree still counts pages that are being freed
    is_alive = table["rss_anon_bytes"].notna()
    return memory[is_alive & memory["anon"].notna()]


def sketch(held: pd.DataFrame, limit_bytes: float | None) -> str:
    """Draw anonymous + shared memory over time as a small SVG, the limit as a dashed line."""
    width = 240.0
    height = 48.0
    sizes = held["anon"] + held["shmem"]
    times = held["time_s"]
    # bytes at the upper edge; 1.0 and 1e-3 keep a run of a single sample from a division by 0
    top = 1.1 * max(float(sizes.max()), limit_bytes or 0.0, 1.0)
    x = width * times / max(float(times.max()), 1e-3)
    points = " ".join(
        f"{i:.1f},{height * (1 - size / top):.1f}" for i, size in zip(x, sizes, strict=True)
    )
    lines = f'<polygon points="0,{height} {points} {x.max():.1f},{height}" fill="#3b6fb6"/>'
    if limit_bytes:
        y = height * (1 - limit_bytes / top)
        lines += f'<line x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c0392b" stroke-dasharray="4"/>'
    return f'<svg width="{width}" height="{height}" style="background:#f4f4f4">{lines}</svg>'
