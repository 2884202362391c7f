"""What a run says about its forecast: predicted against measured peak, phases and parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .phases import Forecast, PhaseForecast


def kind_of(phase: str) -> str:
    """The name under which forecast and timeline meet: epochs are one phase, and so are evaluations of a split.

    `train epoch 3` -> `train`; `final valid` -> `eval valid`; `build valid loader (eval)` -> `build valid loader`.
    """
    if phase.startswith("train epoch"):
        return "train"
    return re.sub(r" \(\w+\)$", "", re.sub(r"^final ", "eval ", phase))


def audit(forecast: Forecast, measured: Mapping[str, int], marked: Mapping[str, int]) -> dict[str, Any]:
    """The entry `forecast` of result.json.

    `peak_bytes`, `phases` and `parts` each hold `predicted` and `measured`; what a run did not come to is None.

    Args:
        measured: The most held in each kind of phase (`kind_of`), and outside of any under "".
        marked: The largest size of each named part.
    """
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
            kind: {"predicted": phase.held_bytes, "measured": measured.get(kind), "parts": dict(phase.parts)}
            for kind, phase in highest.items()
        },
        "parts": {name: {"predicted": parts[name], "measured": size} for name, size in marked.items() if name in parts},
    }
