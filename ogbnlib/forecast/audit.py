"""Comparison of a run's forecast with its measurement, and the remedy for an out-of-memory kill:
settings that `plan` calls FITS, or a larger limit."""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields

from ..config import Resume, TrainConfig
from ..errors import InputError
from ..graph.store import GraphSize, Store
from ..memory.killed import Action, KilledBy
from ..memory.record import Record
from ..sources.resolve import size_of
from .fitting import assignments, changes_that_fit, smallest_limit
from .memory_parts import RUNTIME_BYTES
from .run_forecast import PROPAGATE, Forecast, PhaseForecast, predict
from .step_memory import is_measured


def _kind_of(phase: str) -> str:
    # One name for a run's phases and a forecast's: "train" for "train epoch 3", "eval valid" for
    # "final valid", "build valid loader" for "build valid loader (eval)".
    if phase.startswith("train epoch"):
        return "train"
    return re.sub(r" \(\w+\)$", "", re.sub(r"^final ", "eval ", phase))


def _measured_by_kind(peaks: Mapping[str, int]) -> dict[str, int]:
    # from peaks in bytes by phase name, the highest of each kind
    return {
        kind: max(peak for name, peak in peaks.items() if _kind_of(name) == kind)
        for kind in map(_kind_of, peaks)
    }


def _predicted_by_kind(forecast: Forecast) -> dict[str, PhaseForecast]:
    # the phase of each kind that takes most
    return {
        kind: max(
            (phase for phase in forecast.phases if _kind_of(phase.name) == kind),
            key=lambda phase: phase.held_bytes,
        )
        for kind in (_kind_of(phase.name) for phase in forecast.phases)
    }


def _graph_of_run(
    config: TrainConfig, event: Mapping[str, object] | None, phases: Collection[str]
) -> GraphSize:
    """The graph of a run, before propagation: its data set, or the size in the run's event
    `dataset` if that is gone. Raises `InputError` or `OSError` if no size is known."""
    try:
        graph = size_of(config.dataset)
    except (InputError, OSError):  # gone, moved or damaged
        if event is None:
            raise
        # the fields with which the event was written
        return GraphSize(**{item.name: event[item.name] for item in fields(GraphSize)})  # type: ignore[arg-type]
    # With a store, `predict` would skip `propagate`, as the propagated features exist by now.
    return graph.size if isinstance(graph, Store) and PROPAGATE in phases else graph


def audit(
    config: TrainConfig,
    memory_limit_bytes: int | None,
    measured: Mapping[str, int],
    event: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The entry `forecast` of result.json: predicted and measured bytes, None for a phase that the
    run did not reach.

    Args:
        measured: Peak in bytes by phase name, "" between phases.
        event: The run's event `dataset`, for the size if the data set's files are gone.
    """
    try:
        size = _graph_of_run(config, event, measured)
    except (InputError, OSError) as error:
        return {"skipped": str(error)}
    forecast = predict(config, size, memory_limit_bytes=memory_limit_bytes)
    peaks = _measured_by_kind(measured)
    highest = max(measured.values(), default=None)
    return {
        "peak_phase": forecast.peak.name,
        "peak_bytes": {"predicted": forecast.peak_bytes, "measured": highest},
        "phases": {
            kind: {
                "predicted": phase.held_bytes,
                "measured": peaks.get(kind),
                "parts": dict(phase.parts),
            }
            for kind, phase in _predicted_by_kind(forecast).items()
        },
    }


# In these phases only Python, torch and kernels are in memory; "" is the time before the first.
# The peak measured between later phases, also "", may include data and is not compared.
_BEFORE_DATA = ("", "open", "compile kernels")


def memory_remedy(config: TrainConfig, record: Record, killed: KilledBy) -> tuple[Action, ...]:
    """Actions after a kill: the smallest changes that fit its limit, and the smallest limit."""
    growth = record.growth
    if growth and growth.verdict == "climbs":  # no setting helps against a leak
        return (Action("find leak", {"slope_bytes": growth.slope_bytes}),)
    try:
        size = _graph_of_run(config, record.events.get("dataset"), record.phases)
        if not is_measured(config, size):  # the user's own model, whose step is unknown here
            return (Action("try model", {"model": config.model}),)
        limit_bytes = killed.left_bytes  # the part that other processes leave to this run
        forecast = predict(config, size, memory_limit_bytes=limit_bytes)
        unforeseen = _unforeseen_bytes(forecast, record, limit_bytes)
        need_bytes = smallest_limit(config, size, unforeseen)
        return (*_by_change(forecast, size, unforeseen, limit_bytes), killed.raised(need_bytes))
    except (InputError, OSError) as error:  # the data set is gone, or damaged
        return (Action("name data", {"error": str(error)}),)


def _by_change(
    forecast: Forecast, size: GraphSize, unforeseen: int, limit_bytes: int
) -> list[Action]:
    # One action for each of the two smallest changes that fit the limit.
    config = forecast.config
    actions = []
    for changes, changed in changes_that_fit(config, size, limit_bytes, unforeseen)[:2]:
        arguments = {
            # whether a resumed run may change all of these parameters
            "how": "go on" if all(map(Resume.of, changes)) else "start again",
            "changes": assignments(changes),
            "peak_bytes": changed.peak_bytes + unforeseen,
        }
        actions.append(Action("set", arguments))
    return actions or [Action("nothing fits", {"limit_bytes": limit_bytes})]


def _unforeseen_bytes(forecast: Forecast, record: Record, limit_bytes: int) -> int:
    """The most bytes that any phase took beyond its forecast. The phase of the kill needed
    at least the limit, even if all samples are lower."""
    expected = dict.fromkeys(_BEFORE_DATA, RUNTIME_BYTES) | {
        kind: phase.held_bytes for kind, phase in _predicted_by_kind(forecast).items()
    }
    measured = _measured_by_kind({name: peak for name, peak in record.phases.items() if name})
    last = record.phase or record.newest  # the phase of the kill: open, or the last that began
    kind_of_kill = _kind_of(last.name) if last else ""
    measured[kind_of_kill] = max(measured.get(kind_of_kill, 0), limit_bytes)
    # a phase without a forecast, such as a checkpoint, is compared with the peak of the whole run
    peak_bytes = forecast.peak_bytes
    return max(0, *(peak - expected.get(kind, peak_bytes) for kind, peak in measured.items()))
