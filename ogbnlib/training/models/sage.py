"""GraphSAGE with mean aggregation (Hamilton et al. 2017), as PyG implements it."""

from typing import Any

from ...model import Layer, LayerMemory, SampledModel, layer_memory

# Rows of a layer that a thread takes at a time: their product takes 8 ms, and stays in the cache.
PART_ROWS = 4096


class Model(SampledModel):
    """The mean of the neighbors and the node itself, each by a matrix of its own."""

    fused = True
    exact_weights = ("lin_l.weight", "lin_l.bias", "lin_r.weight")

    @staticmethod
    def weights(layer: Layer) -> int:
        return 2 * layer.inputs * layer.outputs + layer.outputs

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        return _fused_memory(layer) if layer.fused else _memory(layer)

    @staticmethod
    def conv(inputs: int, outputs: int, *, heads: int, last: bool) -> Any:
        from ..convolutions import MeanSAGEConv

        return MeanSAGEConv(inputs, outputs)

    @staticmethod
    def adjacency(edges: Any, num_targets: int, num_sources: int, shared: Any) -> tuple[Any, ...]:
        from ..convolutions import csr

        return (csr(edges, num_targets, num_sources),)


def _fused_memory(layer: Layer) -> LayerMemory:
    """Keeps the mean and the targets' own features, [T, 2 in], whose memory their gradients take, and
    the output."""
    # The two matrices are copied side by side, and each part has their gradient.
    scratch = 8 * layer.inputs * layer.outputs * (1 + -(-layer.targets // PART_ROWS))
    if not layer.first:
        # the gradient of the input, for which the edges are sorted by source
        scratch += layer.item * layer.inputs * layer.sources + 8 * (layer.edges + layer.sources)
    elif layer.dropout and not layer.last:
        scratch += layer.item * layer.targets * layer.outputs
    return layer_memory(
        layer,
        2 * layer.targets * (layer.item * layer.inputs + 4),
        scratch,
        item=layer.item,
        masks=1,
    )


def _memory(layer: Layer) -> LayerMemory:
    """Keeps the mean of the neighbors [T, in], the sparse matrix and the output."""
    matrix = 4 * layer.edges + 8 * layer.targets
    if layer.first:
        products = 4 * layer.targets * layer.inputs + matrix
        # two more outputs
        scratch = layer.targets * (2 * layer.item * layer.outputs + layer.copy * layer.inputs)
    else:
        products = layer.item * layer.targets * layer.inputs + matrix
        # twice the gradient of the input [S, in]; dropout's result makes room for one
        room = layer.item if layer.dropout else 0
        scratch = (8 + layer.copy - room) * layer.sources * layer.inputs
    if layer.edge_list:
        scratch += 8 * layer.edges * layer.inputs  # [E, in] and its gradient
    return layer_memory(layer, products, scratch, matrix, item=layer.item)
