"""SAGN (Sun et al. 2021), without its batch norm, label model and self-training."""

from typing import Any

from ...config import TrainConfig
from ...model import Layer, LayerMemory, PropagatedModel, linear_memory, linear_weights


class Model(PropagatedModel):
    """Linear layers of all hops, summed with attention weights, plus a linear layer of the node's
    own features; then ReLU, dropout and a linear layer."""

    has_heads = True

    @staticmethod
    def weights(layer: Layer) -> int:
        """Count the weights: in the first layer the hops have no bias, the node's own features have
        one, and attention has two vectors."""
        if layer.last:
            return linear_weights(layer)
        return layer.inputs * layer.outputs + 3 * _hidden(layer)

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Memory of a layer that keeps all hops side by side, their attention, and the results of
        ReLU and dropout on their sum."""
        # 3: score, LeakyReLU's result (freed again) and share; 2: results of ReLU and dropout
        columns = layer.outputs + 3 * (layer.hops + 1) * layer.heads + 2 * _hidden(layer)
        return linear_memory(layer, 4 * layer.targets * columns)  # float32

    @staticmethod
    def widths(depth: int, features: int, hidden: int, classes: int) -> list[tuple[int, int]]:
        # the first layer writes `hidden` columns for each hop, and for the node's own features
        return [(features // (depth + 1), (depth + 2) * hidden), (hidden, classes)]

    @staticmethod
    def network(config: TrainConfig, num_features: int, num_classes: int) -> Any:
        from ..hop_networks import SAGN

        return SAGN(config, num_features, num_classes)


def _hidden(layer: Layer) -> int:  # hidden_channels, of the first layer; see `Model.widths`
    return layer.outputs // (layer.hops + 2)
