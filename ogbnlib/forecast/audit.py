"""Forecast and measurement of a run side by side."""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields

from ..config import TrainConfig
from ..errors import InputError
from ..graph.store import GraphSize, Store
from ..sources.resolve import graph_for
from .run_forecast import PROPAGATE, Forecast, PhaseForecast, predict


def kind_of(phase: str) -> str:
    """The name of a phase in forecast and timeline: `final valid` -> `eval valid`, `train epoch 3`
    -> `train`."""
    if phase.startswith("train epoch"):
        return "train"
    return re.sub(r" \(\w+\)$", "", re.sub(r"^final ", "eval ", phase))


def measured_by_kind(peaks: Mapping[str, int]) -> dict[str, int]:
    """The highest of the peaks of a run's phases, by kind; "" is the time between phases."""
    return {
        kind: max(peak for name, peak in peaks.items() if kind_of(name) == kind)
        for kind in map(kind_of, peaks)
    }


def predicted_by_kind(forecast: Forecast) -> dict[str, PhaseForecast]:
    """The phase of each kind with the most memory in use."""
    by_kind: dict[str, list[PhaseForecast]] = {}
    for phase in forecast.phases:
        by_kind.setdefault(kind_of(phase.name), []).append(phase)
    return {
        kind: max(phases, key=lambda phase: phase.held_bytes) for kind, phases in by_kind.items()
    }


def graph_of_run(
    config: TrainConfig, event: Mapping[str, object] | None, phases: Collection[str]
) -> GraphSize:
    """The graph of a run: its store, if that still has the size in the run's event `dataset`, else
    that size.

    Raises `InputError` or `OSError` where neither is known. After the phase `propagate` of a run,
    it is the graph that was propagated over.
    """
    size = None
    if event is not None:
        size = GraphSize(**{item.name: event[item.name] for item in fields(GraphSize)})  # type: ignore[arg-type]  # as it was written
    try:
        graph = graph_for(config)
    except (InputError, OSError):
        if size is None:
            raise
        return size
    if PROPAGATE in phases:
        return graph.size if isinstance(graph, Store) else graph
    if size is None or (isinstance(graph, Store) and graph.size == size):
        return graph  # whose batches are drawn
    return size


def audit(
    config: TrainConfig,
    memory_limit_bytes: int | None,
    measured: Mapping[str, int],
    marked: Mapping[str, int],
    event: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The entry `forecast` of result.json: predicted and measured, where a phase that a run did not
    reach has None.

    `measured` has the peak in phases of each name, "" between phases, and `marked` the largest size
    of each named part; `event` is the run's `dataset`, None reads the size from its files.
    """
    try:
        size = graph_of_run(config, event, measured)
    except (InputError, OSError) as error:
        return {"skipped": str(error)}
    forecast = predict(config, size, memory_limit_bytes=memory_limit_bytes)
    peaks = measured_by_kind(measured)
    parts = {
        name: max(phase.parts.get(name, 0) for phase in forecast.phases)
        for name in marked
        if any(name in phase.parts for phase in forecast.phases)
    }
    return {
        "peak_phase": forecast.peak.name,
        "peak_bytes": {
            "predicted": forecast.peak_bytes,
            "measured": max(measured.values(), default=None),
        },
        "phases": {
            kind: {
                "predicted": phase.held_bytes,
                "measured": peaks.get(kind),
                "parts": dict(phase.parts),
            }
            for kind, phase in predicted_by_kind(forecast).items()
        },
        "parts": {
            name: {"predicted": part, "measured": marked[name]} for name, part in parts.items()
        },
    }
