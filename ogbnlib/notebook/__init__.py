"""Notebook helpers, imported on first use: `begin_notebook`, which every notebook calls first, its
data and limits, tables, plots and verdicts."""

import importlib
from typing import Any

_NAMES = {  # module below `ogbnlib` -> the names that it defines
    "notebook.engine": "begin_notebook",
    "notebook.plots": "epoch_times plot_accuracy plot_forecast plot_parts plot_runs plot_timeline",
    "notebook.tables": "best_epochs compare_runs compare_steps forecast_table loader_costs"
    " memory_in_use",
    "sources.synth": "prepare_dataset",
    "runs.sandbox": "scaled_limit",
    "forecast.planner": "ladder",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:  # Python asks it for names that this module lacks
    if name in _HOME:
        return getattr(importlib.import_module(f"ogbnlib.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
