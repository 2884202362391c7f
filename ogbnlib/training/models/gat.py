"""GAT (Velickovic et al. 2018), as PyG implements it."""

from typing import Any

from ...model import Layer, LayerMemory, SampledModel, layer_memory


class Model(SampledModel):
    """Neighbors weighed by attention; the last layer averages its heads, the others join them."""

    has_heads = True

    @staticmethod
    def weights(layer: Layer) -> int:
        """A matrix, two vectors of attention and the bias."""
        wide = _width(layer)
        return layer.inputs * wide + 2 * wide + layer.outputs

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Keeps [S + 2 T + E, H], 16 bytes an edge for each head and once more, and the output; takes
        3 [E, H]."""
        wide = _width(layer)
        edges = layer.edges + layer.targets  # self-loops
        products = layer.item * (layer.sources + layer.targets + edges) * wide
        products += 16 * edges * (1 + layer.heads)
        products += 2 * layer.copy * layer.sources * layer.inputs
        return layer_memory(layer, products, (12 + 2 * layer.copy) * edges * wide)

    @staticmethod
    def conv(inputs: int, outputs: int, *, heads: int, last: bool) -> Any:
        from torch_geometric.nn import GATConv

        return GATConv(inputs, outputs if last else outputs // heads, heads=heads, concat=not last)


def _width(layer: Layer) -> int:
    return layer.outputs * layer.heads if layer.last else layer.outputs
