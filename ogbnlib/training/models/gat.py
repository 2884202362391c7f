"""GAT (Velickovic et al. 2018), as PyG implements it."""

from typing import Any

from ...model import Layer, LayerMemory, SampledModel, layer_memory


class Model(SampledModel):
    """Sum of neighbors weighted by attention; the last layer averages its heads, the other layers
    concatenate them."""

    has_heads = True
    transforms_sources = True

    @staticmethod
    def weights(layer: Layer) -> int:
        """Count the weights: a matrix, two attention vectors and the bias."""
        wide = _width(layer)
        return layer.inputs * wide + 2 * wide + layer.outputs  # an attention vector has all heads

    @staticmethod
    def edge_bytes(layer: Layer) -> int:
        # Not traffic but time, as the bytes that a Zen 4 core copies meanwhile. The softmax's 40
        # operations on one number, and short products, take 0.2 us for each edge and head: 2.6 KB.
        # Calls of these operations took 3 of the 7.4 ms of a step of [3, 2] x 128 x 16: 20 MB in
        # each of its two layers. Forecasts were 0.81 to 0.99 of the times of four shapes.
        return 2600 * layer.heads * (layer.edges + layer.targets) + 20_000_000

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Memory with one array for all edges, which PyG's GATConv fills with its messages.

        S is the number of the layer's sources, T of its targets, and E of its edges with a
        self-loop for each target. H is the number of columns of all heads together.
        """
        wide = _width(layer)  # H
        edges = layer.edges + layer.targets  # E
        # The layer keeps the products of sources [S, H] and of targets [T, H], and messages [E, H].
        products = layer.item * (layer.sources + layer.targets + edges) * wide
        # It also keeps both ends of each edge, two int64, and four float32 for each edge and head:
        # LeakyReLU's input, the softmax's exponentials and their sums, and the attention.
        products += edges * (16 + 16 * layer.heads)
        # Autocast makes a 16-bit copy of the input for the sources and one for the targets.
        products += 2 * layer.copy * layer.sources * layer.inputs
        # The backward pass adds at most three float32 arrays [E, H] of gradients, and under
        # autocast two 16-bit ones, as measured by tests/training/test_activations.py.
        return layer_memory(layer, products, (12 + 2 * layer.copy) * edges * wide)

    @staticmethod
    def conv(inputs: int, outputs: int, *, heads: int, last: bool) -> Any:
        from torch_geometric.nn import GATConv

        if last:
            return GATConv(inputs, outputs, heads=heads, concat=False)  # the mean of the heads
        return GATConv(inputs, outputs // heads, heads=heads)


def _width(layer: Layer) -> int:  # columns of all heads together
    return layer.outputs * layer.heads if layer.last else layer.outputs
