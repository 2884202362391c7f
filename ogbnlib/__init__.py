"""Train graph neural networks on ogbn-papers100M within the memory you have.

The public names are imported on first use, so that `import ogbnlib`, the planner and the command line's help
do not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from .marks import mark as mark  # not on first use: each use is to cost nothing where nobody watches
from .marks import phase as phase

__version__ = "0.1.0"
_NAMES = {
    "config": "TrainConfig",
    "errors": "InputError format_bytes parse_bytes",
    "files": "next_run_dir",
    "memory.reading": "memory_now read_memory release_memory",
    "graph.store": "Store open_store",
    "sources.convert": "convert",
    "sources.ogb": "write_raw",
    "sources.tables": "open_tables",
    "sources.synth": "synthesize synthesize_store",
    "sources.catalog": "open_dataset prepare_dataset size_of",
    "sampling.sampler": "CSCSampler",
    "propagation.hops": "propagate",
    "forecast.phases": "predict",
    "forecast.planner": "ladder plan recommend step_table",
    "runs.folder": "Run diagnose",
    "runs.sandbox": "measure_runtime_bytes run scaled_limit watch",
    "training.train": "train",
    "inference": "predict_nodes",
    "notebook.plots": "epoch_times plot_accuracy plot_cuda plot_forecast plot_knobs plot_peaks plot_runs plot_timeline",
    "notebook.engine": "begin_notebook",
    "notebook.magics": "load_ipython_extension",
    "notebook.tables": "best_epochs compare_cuda compare_runs compare_steps forecast_table loader_costs"
    " phase_seconds released",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {"beliefs": "notebook.beliefs", "claims": "notebook.claims", "runs": "runs"}
__all__ = sorted([*_HOME, *_MODULES, "mark", "phase", "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
