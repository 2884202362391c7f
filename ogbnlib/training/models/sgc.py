"""SGC (Wu et al. 2019), as in PyG's `SGConv`."""

from typing import Any

from ...config import TrainConfig
from ...model import PropagatedModel, linear_memory, linear_weights


class Model(PropagatedModel):
    """A linear layer on the last hop."""

    weights = staticmethod(linear_weights)
    memory = staticmethod(linear_memory)

    @staticmethod
    def widths(depth: int, features: int, hidden: int, classes: int) -> list[tuple[int, int]]:
        return [(features // (depth + 1), classes)]

    @staticmethod
    def network(config: TrainConfig, num_features: int, num_classes: int) -> Any:
        from ..hop_networks import SGC

        return SGC(config, num_features, num_classes)
