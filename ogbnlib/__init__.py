"""Train graph neural networks on ogbn-papers100M within the memory you have.

The public names are imported on first use, so that `import ogbnlib`, the planner and the command line's help
do not pay for importing torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_HOME = {
    "InputError": "errors",
    "TrainConfig": "config",
    "release_memory": "memory.reading",
    "read_timeline": "runs.timeline",
    "synthesize": "sources.synth",
    "synthesize_store": "sources.synth",
    "write_raw": "sources.ogb",
    "convert": "sources.convert",
    "open_store": "graph.store",
    "open_dataset": "sources.catalog",
    "prepare_dataset": "sources.catalog",
    "size_of": "sources.catalog",
    "run": "runs.sandbox",
    "Run": "runs.sandbox",
    "diagnose": "runs.sandbox",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
