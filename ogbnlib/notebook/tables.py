"""Tables for people: runs side by side, beside their forecast, and what loaders and releases took and gave."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pandas as pd

from ..errors import GB, MB
from ..forecast.phases import predict
from ..forecast.sizes import RUNTIME_BYTES, size_of, trained_edges
from ..runs.folder import Run, RunLike, Runs, named
from ..runs.timeline import Phase


def compare_runs(runs: Runs) -> pd.DataFrame:
    """One row per run: how and where it ended, peak of anonymous + shared memory in GB, times, last metrics.

    Args:
        runs: Names to runs or their folders, or these alone: `compare_runs(["runs/a", "runs/b"])`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, run in named(runs).items():
        rows[name] = {
            "ended": run.state,
            "in phase": "" if run.exit_code == 0 else run.diagnosis.phase or "",
            "peak GB": round(run.held_peak_bytes / GB, 3),
            "run s": round(run.result.get("duration_s", run.tally.duration_s), 1),
        }
        if len(metrics := run.metrics):
            epoch_s, eval_s = metrics["time_s"].mean(), metrics["eval_time_s"].sum()
            rows[name] |= {"epoch s": round(epoch_s, 2), "eval s": round(eval_s, 2)}
            rows[name] |= metrics[["loss", "valid", "test"]].iloc[-1].add_prefix("last ")
    return pd.DataFrame(rows.values(), pd.Index(rows, name="run", tupleize_cols=False))


def forecast_table(runs: Runs, full: str = "ogbn-papers100M", *, runtime_bytes: int = RUNTIME_BYTES) -> pd.DataFrame:
    """One row per run: its predicted peak beside the measured one, and the forecast of the same settings on `full`.

    Peaks are anonymous + shared memory; the columns that end in "MB" and "GB" are 2**20 and 2**30 bytes. The error is
    that of the prediction, relative to the measurement; both are NaN where a run was killed, whose peak is the limit's.

    Args:
        full: A data set whose size is known, or a folder; nothing of it is loaded.
        runtime_bytes: Of the process at rest, when another machine's is known.

    Raises:
        InputError: when a size cannot be read.
    """
    rows = {}
    for name, run in named(runs).items():
        limit_bytes = run.result.get("memory_limit_bytes")
        here = predict(run.config, memory_limit_bytes=limit_bytes, runtime_bytes=runtime_bytes)
        there = predict(run.config.replace(dataset=full), size_of(full), runtime_bytes=runtime_bytes)
        measured = run.held_peak_bytes if run.exit_code == 0 else float("nan")
        rows[name] = {
            "predicted MB": round(here.peak_bytes / MB),
            "measured MB": round(measured / MB, 0),
            "error %": round(100 * (here.peak_bytes / measured - 1), 1),
            "epoch s": round(run.metrics["time_s"].iloc[-1], 2) if len(run.metrics) else float("nan"),
            f"{full} GB": round(there.peak_bytes / GB, 2),
            "its peak in": there.peak.name,
        }
    return pd.DataFrame(rows.values(), pd.Index(rows, name="setting", tupleize_cols=False))


def loader_costs(run: RunLike) -> pd.DataFrame:
    """What building each loader took, kept, and needed on the way, in MB and in bytes per edge.

    One row for each `build ... loader` phase of the run, and for the shared CSC where there is one; from the kernel's
    own counters (`Run.phase_memory`), not from samples.
    """
    run = Run.open(run)
    table, edges = run.phase_memory, trained_edges(size_of(run.config.dataset), run.config.undirected)
    table = table[table["phase"].str.startswith("build")].reset_index(drop=True)
    for column in ("kept", "transient"):
        size = table.pop(f"{column}_bytes")
        table[f"{column} MB"] = (size / MB).round(1)
        table[f"{column} bytes per edge"] = (size / edges).round(2)
    return table.rename(columns={"duration_s": "seconds"}).round({"seconds": 2}).set_index("phase")


def released(run: RunLike) -> pd.DataFrame:
    """What each call of `release_memory` in a run gave back, step by step in MB (negative: the step cost memory).

    NaN where a step is impossible, as CUDA's are on a CPU.
    """
    events = [event for event in Run.open(run).events if event["event"] == "release"]
    table = pd.DataFrame(events, columns=["after", "gc", "malloc_trim", "synchronize", "empty_cache"])
    for step in table.columns[1:]:
        table[f"{step} MB"] = (table.pop(step).astype(float) / MB).round(1)
    return table


def compare_cuda(runs: Runs) -> pd.DataFrame:
    """One row per run on a GPU: peaks of allocated and reserved memory in GB, retried allocations, seconds an epoch.

    The peaks are torch's own (`torch.cuda.max_memory_allocated`) at the ends of phases; "unallocated GB" is the most
    that was reserved beyond what was allocated in any reading. NaN for a run that used no GPU.
    """
    rows = {}
    for name, run in named(runs).items():
        table, metrics = run.cuda, run.metrics
        emptied = [event for event in run.events if event["event"] == "empty_cache"]
        rows[name] = {
            "ended": run.state,
            "allocated GB": table[["cuda_allocated_bytes", "cuda_peak_allocated_bytes"]].max().max() / GB,
            "reserved GB": table[["cuda_reserved_bytes", "cuda_peak_reserved_bytes"]].max().max() / GB,
            "unallocated GB": table["cuda_unallocated_bytes"].max() / GB,
            "retries": table["cuda_alloc_retries"].max(),
            "empty_cache s": sum(event["took_s"] for event in emptied),
            "epoch s": metrics["time_s"].mean() if len(metrics) else float("nan"),
        }
    return pd.DataFrame.from_dict(rows, orient="index").round(3)


def compare_steps(runs: Runs) -> pd.DataFrame:
    """One row per run: what a training step adds at its highest, in MB, an epoch's seconds, both to the first run's.

    On a GPU what torch allocated there; else the trainer's own high-water mark within an epoch less what it held before
    (`Run.phase_memory`), the batch and its sampling included.
    """
    runs = named(runs)
    allocated, rows = compare_cuda(runs)["allocated GB"] * 2**10, {}
    for name, run in runs.items():
        phases = run.phase_memory
        inside = phases.loc[phases["phase"].str.startswith("train epoch"), "transient_bytes"].max() / MB
        step = inside if allocated.isna()[name] else allocated[name]
        rows[name] = {"step MB": step, "epoch s": run.metrics["time_s"].mean()}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table[["to plain", "time to plain"]] = table[["step MB", "epoch s"]] / table.iloc[0]
    return table.round(3)


def best_epochs(runs: Runs) -> pd.DataFrame:
    """One row per run: the epoch of its best valid accuracy, both accuracies in it, epochs trained, peak in GB.

    NaN for a run that was never evaluated.
    """
    rows = {}
    for name, run in named(runs).items():
        best = run.metrics.sort_values("valid", ascending=False, kind="stable").dropna(subset="valid").head(1)
        found = {"best epoch": best["epoch"].max(), "valid": best["valid"].max(), "test": best["test"].max()}
        rows[name] = {**found, "epochs trained": len(run.metrics), "peak GB": round(run.held_peak_bytes / GB, 3)}
    return pd.DataFrame.from_dict(rows, orient="index")


def phase_seconds(runs: Runs) -> pd.DataFrame:
    """Seconds that each run spent in each kind of phase, epochs summed, without the phases inside it."""
    columns = {}
    for name, run in named(runs).items():
        own: defaultdict[str, float] = defaultdict(float)
        entered: dict[int, Phase] = {}  # the last one at each depth
        for phase in run.phases:
            entered[phase.depth] = phase
            if phase.end_s is None:
                continue
            own[phase.name] += phase.end_s - phase.start_s
            if (outer := entered.get(phase.depth - 1)) and outer.end_s is not None:
                own[outer.name] -= phase.end_s - phase.start_s
        columns[name] = own
    return pd.DataFrame(columns).fillna(0.0).round(3)
