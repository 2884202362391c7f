"""Notebook helpers, imported on first use: tables, plots, verdicts, and `begin_notebook`, which
every notebook calls first."""

import importlib
from typing import Any

_NAMES = {
    "engine": "begin_notebook",
    "plots": "epoch_times plot_accuracy plot_cuda plot_forecast plot_parts plot_peaks plot_runs"
    " plot_timeline",
    "tables": "best_epochs compare_cuda compare_runs compare_steps forecast_table loader_costs phase_seconds released"
    " sampled_nodes step_table",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
