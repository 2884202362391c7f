"""SAGN (Sun et al. 2021), without its batch norm, label model and self-training."""

from typing import Any

from ...model import Layer, LayerMemory, PropagatedModel, linear_memory


class Model(PropagatedModel):
    """A linear layer for each hop, their sum weighed by attention, and a linear layer of the node's own
    features; then ReLU, dropout and a linear layer."""

    has_heads = True

    @staticmethod
    def weights(layer: Layer) -> int:
        """The first layer's hops have no bias; its own features have one, and attention is two
        vectors."""
        if layer.last:
            return layer.inputs * layer.outputs + layer.outputs
        return layer.inputs * layer.outputs + 3 * _hidden(layer)

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Keeps all hops side by side, their attention, and the ReLU's and the dropout's results of
        their sum."""
        columns = layer.outputs + 3 * (layer.hops + 1) * layer.heads + 2 * _hidden(layer)
        return linear_memory(layer, 4 * layer.targets * columns)

    @staticmethod
    def widths(depth: int, features: int, hidden: int, classes: int) -> list[tuple[int, int]]:
        return [(features // (depth + 1), (depth + 2) * hidden), (hidden, classes)]

    @staticmethod
    def network(
        num_features: int, num_classes: int, *, hops: int, hidden: int, heads: int, dropout: float
    ) -> Any:
        from ..hop_networks import SAGN

        return SAGN(num_features, num_classes, hops, hidden, heads, dropout)


def _hidden(layer: Layer) -> int:
    return layer.outputs // (layer.hops + 2)
