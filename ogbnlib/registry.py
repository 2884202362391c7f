"""Names of models, loading policies and methods of stores and runs, with the places of their code.

The code is imported on first use, so that config, forecast and stores import no torch.
"""

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any


@dataclass(frozen=True)
class _Entry:
    """A registered class, by its dotted path `module:Class`."""

    path: str

    def load(self) -> Any:
        """Import the class."""
        return pkgutil.resolve_name(self.path)


# Each file of this folder is a model with the file's name; see `ogbnlib.model`.
_MODEL_FILES = Path(__file__).parent / "training" / "models"
MODELS = {
    module.name: _Entry(f"ogbnlib.training.models.{module.name}:Model")
    for module in pkgutil.iter_modules([str(_MODEL_FILES)])
}


@dataclass(frozen=True)
class Policy(_Entry):
    """One loading policy; `sampling.policies` says what its class does."""

    reads_disk: bool = False  # features stay in a store, in its own dtype
    formula: str = "sage"  # the model whose formulas forecast a step of the user's own model
    smaller: tuple[str, ...] = ()  # policies of less memory, the same batches; the fastest first
    samples: bool = True  # batches are sampled subgraphs, not rows of propagated features

    def hops(self, config: Any) -> int | None:
        """Return the number of hops that a run's features have; None for a graph's own features."""
        return None if self.samples else config.hops


_SAMPLED = "ogbnlib.sampling.policies"
POLICIES = {
    "eager": Policy(f"{_SAMPLED}:EagerLoaders", smaller=("shared", "store")),
    "lazy": Policy(f"{_SAMPLED}:LazyLoaders", smaller=("shared", "store")),
    "shared": Policy(f"{_SAMPLED}:SharedLoaders", smaller=("store",)),
    "store": Policy("ogbnlib.windows.policy:StoreLoaders", reads_disk=True),
    "propagated": Policy(
        "ogbnlib.propagation.policy:PropagatedLoaders",
        reads_disk=True,
        formula="sign",
        samples=False,
    ),
}


class _Method(_Entry):
    """Method of a store or a run: a function that takes the object, in a package that imports the
    object's own package."""

    def __get__(self, item: object, owner: type | None = None) -> Any:
        function = self.load()  # item is None: taken from the class, as in Store.from_data
        return function if item is None else MethodType(function, item)


STORE_METHODS = {
    "from_data": _Method("ogbnlib.sources.pyg_data:from_data"),  # called on the class
    "from_arrays": _Method("ogbnlib.sources.arrays:store_from_arrays"),  # called on the class
    "ids": _Method("ogbnlib.sources.node_names:ids"),
    "to_data": _Method("ogbnlib.sampling.pyg_stores:to_data"),
    "feature_store": _Method("ogbnlib.sampling.pyg_stores:StoreFeatures"),
    "graph_store": _Method("ogbnlib.sampling.pyg_stores:StoreGraph"),
    "sampler": _Method("ogbnlib.sampling.pyg_stores:sampler"),
    "loader": _Method("ogbnlib.windows.own_loop:loader"),
}
RUN_METHODS = {"report": _Method("ogbnlib.inference.report:report")}
