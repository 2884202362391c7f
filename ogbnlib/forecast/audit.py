"""What a run says about its forecast: predicted against measured peak, phases and parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config import TrainConfig
from ..errors import InputError
from ..graph.store import Store
from ..sources.catalog import graph_for
from .phases import PhaseForecast, predict
from .sizes import GraphSize


def kind_of(phase: str) -> str:
    """The name under which forecast and timeline meet: epochs are one phase, and so are evaluations of a split.

    `train epoch 3` -> `train`; `final valid` -> `eval valid`; `build valid loader (eval)` -> `build valid loader`.
    """
    if phase.startswith("train epoch"):
        return "train"
    return re.sub(r" \(\w+\)$", "", re.sub(r"^final ", "eval ", phase))


def audit(
    config: TrainConfig,
    memory_limit_bytes: int | None,
    measured: Mapping[str, int],
    marked: Mapping[str, int],
    size: GraphSize | None = None,
) -> dict[str, Any]:
    """The entry `forecast` of result.json.

    `peak_bytes`, `phases` and `parts` each hold `predicted` and `measured`; what a run did not come to is None. Where
    the data set's size is not to be had, `skipped` says why instead.

    Args:
        measured: The most held in phases of each name, "" between phases.
        marked: The largest size of each named part.
        size: The data set's, as the run found it; None reads it from its files.
    """
    try:
        graph = graph_for(config)
        if size is None or (isinstance(graph, Store) and graph.size == size):
            size = graph  # whose batches are drawn
    except InputError as error:
        if size is None:
            return {"skipped": str(error)}
    forecast = predict(config, size, memory_limit_bytes=memory_limit_bytes)
    held: dict[str, int] = {}
    for name, peak in measured.items():
        held[kind_of(name)] = max(held.get(kind_of(name), 0), peak)
    highest: dict[str, PhaseForecast] = {}
    parts: dict[str, int] = {}
    for phase in forecast.phases:
        kind = kind_of(phase.name)
        highest[kind] = max(highest.get(kind, phase), phase, key=lambda phase: phase.held_bytes)
        parts |= {name: max(size, parts.get(name, 0)) for name, size in phase.parts.items()}
    return {
        "peak_phase": forecast.peak.name,
        "peak_bytes": {"predicted": forecast.peak_bytes, "measured": max(measured.values(), default=None)},
        "phases": {
            kind: {"predicted": phase.held_bytes, "measured": held.get(kind), "parts": dict(phase.parts)}
            for kind, phase in highest.items()
        },
        "parts": {name: {"predicted": parts[name], "measured": most} for name, most in marked.items() if name in parts},
    }
