"""Calls of a model: the arguments that `forward` gets, and a random batch to try the model on."""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

from .network import DTYPES, GNN

# Parameter of `forward` -> the batch's counts by hop, by which PyG's layers skip unneeded nodes.
_COUNTS = {
    "num_sampled_nodes": "num_sampled_nodes",
    "num_sampled_nodes_per_hop": "num_sampled_nodes",
    "num_sampled_edges": "num_sampled_edges",
    "num_sampled_edges_per_hop": "num_sampled_edges",
}


class Call(NamedTuple):
    """Calling convention of a model.

    A `Call` is called with model, batch and device, and returns the scores of the batch's seeds,
    float32 [batch_size, num_classes].
    """

    # What each parameter of `forward` gets: "x", "edge_index", "num_sampled_nodes",
    # "num_sampled_edges", or "batch": a PyG `Data` with these four, `n_id` and `batch_size`.
    arguments: Mapping[str, str]
    dtype: torch.dtype  # of autocast around the call; float32 for `GNN`, which applies its own

    @classmethod
    def of(cls, model: nn.Module, precision: str) -> Self:
        """Choose the arguments by the names of forward's parameters."""
        parameters = {
            name: parameter
            for name, parameter in inspect.signature(model.forward).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        needed = [  # without a default
            name for name, parameter in parameters.items() if parameter.default is parameter.empty
        ]
        dtype = torch.float32 if isinstance(model, GNN) else DTYPES[precision]
        # `forward(x)` of a model without edges, or `forward(batch)` of any name
        if len(needed) == 1 and "edge_index" not in parameters:
            return cls({needed[0]: "x" if needed == ["x"] else "batch"}, dtype)
        arguments = {}
        # Jumping knowledge joins the outputs of all layers, so no layer may skip nodes.
        if not (isinstance(model, BasicGNN) and hasattr(model, "jk")):
            arguments = {name: _COUNTS[name] for name in parameters if name in _COUNTS}
        tensors = ["x", "edge_index"]
        names = [name for name in parameters if name not in arguments]
        if parameters.keys() >= {*tensors}:
            names = tensors
        # With names that differ from PyG's, as in `forward(features, edges)`, the order decides.
        return cls(arguments | dict(zip(names, tensors, strict=False)), dtype)

    def scores(self, model: nn.Module, batch: Data, device: torch.device) -> Tensor:
        """Return the model's whole output, which may have rows for nodes other than the seeds."""
        inputs = {  # by the names in `arguments`
            "x": batch.x.to(device, non_blocking=True),
            "edge_index": batch.edge_index.to(device, non_blocking=True),
            "num_sampled_nodes": batch.num_sampled_nodes,
            "num_sampled_edges": batch.num_sampled_edges,
        }
        # Widen float16 features after the copy, so that half as many bytes move to the GPU. `GNN`
        # widens them itself, while it reads them.
        if type(model) is not GNN:
            inputs["x"] = inputs["x"].float()
        if "batch" in self.arguments.values():
            inputs["batch"] = Data(
                **inputs, n_id=batch.n_id.to(device), batch_size=batch.batch_size
            )
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return model(**{name: inputs[value] for name, value in self.arguments.items()})

    def __call__(self, model: nn.Module, batch: Data, device: torch.device) -> Tensor:
        return self.scores(model, batch, device)[: batch.batch_size].float()


def random_batch(hop_nodes: Sequence[int], hop_edges: Sequence[int], num_features: int) -> Data:
    """Return a random batch in the layout of PyG's loaders, float32 `x`.

    `hop_nodes` has the numbers of new nodes by hop, seeds first. `hop_edges`, one entry shorter,
    has the numbers of edges from hops up to h + 1 to nodes of hop h.
    """
    draw = torch.Generator().manual_seed(0)
    ends = [*itertools.accumulate(hop_nodes)]  # nodes of hop h are ends[h - 1] to ends[h] - 1
    edges = [torch.empty(2, 0, dtype=torch.int64)]  # `cat` needs a tensor even without hops
    for hop, count in enumerate(hop_edges):
        target = torch.randint(ends[hop] - hop_nodes[hop], ends[hop], (count,), generator=draw)
        source = torch.randint(ends[hop + 1], (count,), generator=draw)
        edges.append(torch.stack([source, target.sort().values]))  # by target, as sampled
    return Data(
        x=torch.randn(ends[-1], num_features, generator=draw),
        y=torch.zeros(hop_nodes[0], dtype=torch.int64),
        input_id=torch.arange(hop_nodes[0]),
        edge_index=torch.cat(edges, dim=1),
        n_id=torch.arange(ends[-1]),
        batch_size=hop_nodes[0],
        num_sampled_nodes=list(hop_nodes),
        num_sampled_edges=list(hop_edges),
    )
