"""GraphSAGE with mean aggregation (Hamilton et al. 2017), as PyG implements it."""

import math
from typing import Any

from ...model import Layer, LayerMemory, SampledModel, layer_memory

# Rows of a layer that a thread takes at a time: their product takes 8 ms, and stays in the cache.
PART_ROWS = 4096


class Model(SampledModel):
    """Sum of the neighbors' mean and the node itself, each multiplied by a matrix of its own."""

    fused = True
    exact_weights = ("lin_l.weight", "lin_l.bias", "lin_r.weight")

    @staticmethod
    def weights(layer: Layer) -> int:
        return 2 * layer.inputs * layer.outputs + layer.outputs

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        return _fused_memory(layer) if layer.fused else _memory(layer)

    @staticmethod
    def edge_bytes(layer: Layer) -> int:
        # Traffic, to forecast times: a row [inputs] that is added up for each edge and, as x needs
        # no gradient, from the second layer on one of the gradient.
        return 4 * layer.edges * layer.inputs * (2 - layer.first)

    @staticmethod
    def conv(inputs: int, outputs: int, *, heads: int, last: bool) -> Any:
        from ..convolutions import MeanSAGEConv

        return MeanSAGEConv(inputs, outputs)

    @staticmethod
    def adjacency(edges: Any, num_targets: int, num_sources: int, shared: Any) -> tuple[Any, ...]:
        from ..convolutions import csr

        return (csr(edges, num_targets, num_sources),)


def _fused_memory(layer: Layer) -> LayerMemory:
    """Memory of a fused layer, which keeps the output, the mean and the targets' own features.

    Mean and features share an array [targets, 2 * inputs], which their gradients overwrite.
    """
    # The two float32 matrices: a copy, and for each part of `PART_ROWS` rows their gradient.
    scratch = 8 * layer.inputs * layer.outputs * (1 + math.ceil(layer.targets / PART_ROWS))
    if not layer.first:
        # the gradient of the input, and int64 [edges] and [sources] that sort edges by source
        scratch += layer.item * layer.inputs * layer.sources + 8 * (layer.edges + layer.sources)
    elif layer.dropout and not layer.last:
        scratch += layer.item * layer.targets * layer.outputs  # dropout's mask
    kept = layer.targets * (2 * layer.item * layer.inputs + 8)  # mean, features; int64 bounds
    return layer_memory(layer, kept, scratch, item=layer.item, masks=1)


def _memory(layer: Layer) -> LayerMemory:
    """Memory of a layer that keeps the mean of neighbors, a sparse matrix and the output."""
    matrix = 4 * layer.edges + 8 * layer.targets  # float32 values of edges, int64 bounds of targets
    if layer.first:
        products = 4 * layer.targets * layer.inputs + matrix  # the mean is float32
        # two more arrays as large as the output, and under autocast a 16-bit copy of the input
        scratch = layer.targets * (2 * layer.item * layer.outputs + layer.copy * layer.inputs)
    else:
        products = layer.item * layer.targets * layer.inputs + matrix
        # twice the gradient of the input; one of them takes the room of dropout's result
        room = layer.item * layer.dropout
        scratch = (8 + layer.copy - room) * layer.sources * layer.inputs
    if layer.edge_list:
        scratch += 8 * layer.edges * layer.inputs  # a row for each edge, and its gradient
    return layer_memory(layer, products, scratch, matrix, item=layer.item)
