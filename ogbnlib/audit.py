"""What a run says about its forecast: predicted against measured peak, phases and parts, from the run's own files."""

from __future__ import annotations

import os
import re
from typing import Any

from .config import InputError, TrainConfig
from .footprint import size_of
from .forecast import PhasePlan, Plan, predict
from .timeline import last_attempt, read_events, read_timeline


def kind_of(phase: str) -> str:
    """The name under which forecast and timeline meet: epochs are one phase, and so are evaluations of a split.

    `train epoch 3` -> `train`; `final valid` -> `eval valid`; `build valid loader (eval)` -> `build valid loader`.
    """
    if phase.startswith("train epoch"):
        return "train"
    return re.sub(r" \(\w+\)$", "", re.sub(r"^final ", "eval ", phase))


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


def predicted_phases(plan: Plan) -> dict[str, PhasePlan]:
    """The forecast's highest phase of each kind."""
    peaks: dict[str, PhasePlan] = {}
    for phase in plan.phases:
        kind = kind_of(phase.name)
        if kind not in peaks or phase.held_bytes > peaks[kind].held_bytes:
            peaks[kind] = phase
    return peaks


def audit(run_dir: str | os.PathLike[str], config: TrainConfig, memory_limit_bytes: int | None) -> dict[str, Any]:
    """The entry `forecast` of result.json.

    `peak_bytes`, `phases` and `parts` each hold `predicted` and `measured`; what a run did not come to is None. Where
    the data set's size is not to be had, `skipped` says why instead.
    """
    try:
        plan = predict(config, size_of(config.dataset), memory_limit_bytes=memory_limit_bytes)
    except InputError as error:
        return {"skipped": str(error)}
    measured, marked = measured_phases(run_dir), measured_parts(run_dir)
    phases = {
        kind: {"predicted": phase.held_bytes, "measured": measured.get(kind), "parts": dict(phase.parts)}
        for kind, phase in predicted_phases(plan).items()
    }
    expected: dict[str, int] = {}
    for phase in plan.phases:
        for name, size in phase.parts.items():
            expected[name] = max(expected.get(name, 0), size)
    return {
        "peak_phase": plan.peak.name,
        "peak_bytes": {"predicted": plan.peak_bytes, "measured": max(measured.values(), default=None)},
        "phases": phases,
        "parts": {
            name: {"predicted": expected[name], "measured": size} for name, size in marked.items() if name in expected
        },
    }
