"""Layers that use a sparse matrix of edges, with one row for each target of the layer.

PyG's own layers copy a row of features for each edge, or have no bipartite form.
"""

import warnings

import torch
from torch import Tensor
from torch_geometric.index import index2ptr
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import spmm

# torch warns once per process; the sparse product used here is tested against the dense formula.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def csr(edges: Tensor, num_targets: int, num_sources: int, values: Tensor | None = None) -> Tensor:
    """Return edges, int64 [2, num_edges] ascending by target, as a sparse CSR matrix [num_targets,
    num_sources] of `values`, float32 [num_edges] (default: ones)."""
    # A sparse product reads neighbors' features in place. With an edge list, PyG first copies them
    # to [num_edges, channels]: 1.5 times slower for a layer of 574,000 edges and 128 features.
    values = torch.ones(edges.size(1), device=edges.device) if values is None else values
    return torch.sparse_csr_tensor(
        index2ptr(edges[1], num_targets),
        edges[0],
        values,
        (num_targets, num_sources),
        check_invariants=False,  # else each layer would pass over all its edges once more
    )


class MeanSAGEConv(SAGEConv):  # type: ignore[misc]
    """`SAGEConv` that computes the mean over neighbors in float32, also under autocast."""

    def message_and_aggregate(self, adj_t: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        # PyG calls this where it gets a sparse matrix, here of `csr`; x: (sources, targets).
        # torch 2.13 has no sparse CSR product of mixed types, and on the CPU none of 16-bit types
        # (pytorch/pytorch#41069). On a GPU autograd keeps no widened copy for the backward pass.
        with torch.autocast(x[0].device.type, enabled=False):
            return spmm(adj_t, x[0].float(), "mean")


class SparseGCNConv(GCNConv):  # type: ignore[misc]
    """`GCNConv` as a sparse product with the normalised adjacency matrix, one row per target; sums
    are float32, also under autocast."""

    def forward(self, x: tuple[Tensor, Tensor], adjacency: Tensor, loops: Tensor) -> Tensor:
        # x: (sources, targets); loops: weights of self-loops, float32 [num_targets, 1]; both
        # come from `Model.adjacency` in models/gcn.py
        h = self.lin(x[0])
        with torch.autocast(h.device.type, enabled=False):
            h = h.float()
            return spmm(adjacency, h, "sum") + loops * h[: len(loops)] + self.bias
