"""Train graph neural networks on ogbn-papers100M within the memory you have.

Public names are imported on first use, so that `import ogbnlib`, the planner and the command line's
help do not import torch.
"""

import importlib
import sys
import warnings
from typing import Any

from .marks import mark as mark  # eager: without a watcher a call must cost nothing
from .marks import phase as phase

__version__ = "0.2.0"
if sys.platform != "linux":
    warnings.warn(
        f"ogbnlib needs Linux, found {sys.platform}: use WSL 2 or a Linux container", stacklevel=2
    )
_NAMES = {
    "config": "TrainConfig",
    "errors": "InputError",
    "memory.reading": "release_memory",
    "graph.store": "Store open_store",
    "sources.convert": "convert",
    "sampling.sampler": "CSCSampler",
    "sampling.pyg_stores": "sample_without_pyg_lib",
    "propagation.hops": "propagate",
    "forecast.planner": "plan",
    "runs.folder": "Run",
    "runs.sandbox": "run watch",
    "training.train": "train",
    "inference.predictions": "predict",
    "notebook.magics": "load_ipython_extension",
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_MODULE, "mark", "phase", "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        module = f"{__name__}.{_MODULE[name]}"
        # On TAB, jedi asks for the type of every name. It gets none whose module is not loaded yet:
        # most modules import torch, which takes seconds.
        by_jedi = str(sys._getframe(1).f_globals.get("__name__")).startswith("jedi.")
        if module not in sys.modules and name != "TrainConfig" and by_jedi:
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
