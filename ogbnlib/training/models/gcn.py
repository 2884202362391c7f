"""GCN (Kipf and Welling 2017), as PyG implements it."""

from typing import Any

from ...model import Layer, LayerMemory, SampledModel, layer_memory, linear_weights


class Model(SampledModel):
    """Sum over the neighbors and the node itself, each divided by the square roots of the degrees
    of both ends."""

    transforms_sources = True
    exact_weights = ("lin.weight", "bias")
    weights = staticmethod(linear_weights)

    @staticmethod
    def edge_bytes(layer: Layer) -> int:
        # Traffic, to forecast times: a float32 row [out] that is added up for each edge, and one of
        # the gradient. No array has them all.
        return 2 * 4 * layer.edges * layer.outputs

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Memory of a layer that keeps the sparse matrix, its self-loops and the output."""
        matrix = 4 * layer.edges + 12 * layer.targets  # values [E]; bounds int64 [T], loops [T]
        # Three arrays [S, out], the products of the sources and twice their gradient; and the
        # transposed matrix, 16 bytes an edge.
        scratch = (12 + layer.copy) * layer.sources * layer.outputs + 16 * layer.edges
        return layer_memory(
            layer,
            matrix + layer.copy * layer.sources * layer.inputs,
            scratch,
            matrix,
            masks=2 if layer.half else 3,  # half: dropout's result is the next layer's `copy`
        )

    @staticmethod
    def conv(inputs: int, outputs: int, *, heads: int, last: bool) -> Any:
        from ..convolutions import SparseGCNConv

        return SparseGCNConv(inputs, outputs)

    @staticmethod
    def prepare(edge_index: Any, num_nodes: int) -> Any:
        """Return each node's 1 / sqrt(degree) in the subgraph, with one self-loop, float32 [N]."""
        # As in PyG's untrimmed forward. With degrees from each layer's own edges, the outermost
        # nodes had degree 1, and accuracy on amazon_photo fell from 0.95 to 0.68 at a fan-out of
        # [-1, -1].
        source, target = edge_index
        between_nodes = (source != target).float()  # 0 for a self-loop, which counts once below
        return between_nodes.new_ones(num_nodes).index_add_(0, target, between_nodes).rsqrt()

    @staticmethod
    def adjacency(edges: Any, num_targets: int, num_sources: int, shared: Any) -> tuple[Any, ...]:
        from ..convolutions import csr

        source, target = edges
        # `shared` is the result of `prepare`; a self-loop of the graph counts in the second array
        values = shared[source] * shared[target] * (source != target)
        return csr(edges, num_targets, num_sources, values), shared[:num_targets, None].square()
