"""SIGN (Frasca et al. 2020), as in PyG's examples/sign.py."""

from typing import Any

from ...config import TrainConfig
from ...model import Layer, LayerMemory, PropagatedModel, linear_memory, linear_weights


class Model(PropagatedModel):
    """A linear layer for each hop, ReLU and dropout; then a linear layer on all hops together."""

    weights = staticmethod(linear_weights)

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Memory of a layer that keeps ReLU's results of all hops, dropout's masks, and all hops
        side by side."""
        copies = 2 + layer.dropout  # arrays as large as the layer's output
        saved = copies * layer.item * layer.targets * layer.outputs
        return linear_memory(layer, saved, item=layer.item)

    @staticmethod
    def widths(depth: int, features: int, hidden: int, classes: int) -> list[tuple[int, int]]:
        joined = (depth + 1) * hidden  # all hops side by side; `features` has all hops, too
        return [(features // (depth + 1), joined), (joined, classes)]

    @staticmethod
    def network(config: TrainConfig, num_features: int, num_classes: int) -> Any:
        from ..hop_networks import SIGN

        return SIGN(config, num_features, num_classes)
