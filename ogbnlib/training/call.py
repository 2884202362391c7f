"""How a model is called: the arguments of `forward` by their names, and a random batch to try it."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

from .network import DTYPES, GNN


class Call(NamedTuple):
    """A model's calling convention, for the scores of a batch's seeds, float32 [batch_size,
    num_classes]."""

    # For each parameter of `forward`: "x", "edge_index", "num_sampled_nodes", "num_sampled_edges"
    # (with PyG's ending `_per_hop` or without), or "batch": a PyG `Data` of all these, `n_id` and
    # `batch_size`.
    arguments: Mapping[str, str]
    dtype: torch.dtype  # of autocast around the call; our own models apply theirs inside

    @classmethod
    def of(cls, model: nn.Module, precision: str) -> Self:
        """Choose the arguments by the names of forward's parameters."""
        parameters = inspect.signature(model.forward).parameters
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names = [name for name, parameter in parameters.items() if parameter.kind not in variable]
        needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
        # Jumping knowledge joins the outputs of all layers, so each layer must compute all nodes.
        joins = isinstance(model, BasicGNN) and hasattr(model, "jk")
        counts = [] if joins else ["num_sampled_nodes", "num_sampled_edges"]
        arguments = {
            name: count for count in counts for name in (count, f"{count}_per_hop") if name in names
        }
        if len(needed) == 1 and "edge_index" not in names:
            arguments = {needed[0]: "x" if needed == ["x"] else "batch"}
        else:
            tensors = ["x", "edge_index"]
            others = [name for name in names if name not in arguments]
            arguments |= zip(tensors if {*tensors} <= {*names} else others, tensors, strict=False)
        return cls(arguments, torch.float32 if isinstance(model, GNN) else DTYPES[precision])

    def scores(self, model: Callable[..., Any], batch: Data, device: torch.device) -> Any:
        """Return the model's own output, which may have rows for other nodes than the seeds."""
        # Widen float16 features after the copy: half the bytes cross to the GPU. `GNN` widens them
        # while it reads.
        x = batch.x.to(device, non_blocking=True)
        known = {"x": x if type(model) is GNN else x.float()}
        known |= {"edge_index": batch.edge_index.to(device, non_blocking=True)}
        known |= {name: batch[name] for name in ("num_sampled_nodes", "num_sampled_edges")}
        if "batch" in self.arguments.values():
            known["batch"] = Data(**known, n_id=batch.n_id.to(device), batch_size=batch.batch_size)
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return model(**{name: known[value] for name, value in self.arguments.items()})

    def __call__(self, model: Callable[..., Any], batch: Data, device: torch.device) -> Tensor:
        scores: Tensor = self.scores(model, batch, device)[: batch.batch_size]
        return scores.float()


def random_batch(hop_nodes: Sequence[int], hop_edges: Sequence[int], num_features: int) -> Data:
    """A batch with these numbers of nodes (seeds first) and edges per hop."""
    draw, ends = torch.Generator().manual_seed(0), [*itertools.accumulate(hop_nodes)]
    edges = [torch.empty(2, 0, dtype=torch.int64)]
    for hop, count in enumerate(hop_edges):
        target = (
            torch.randint(ends[hop] - hop_nodes[hop], ends[hop], (count,), generator=draw)
            .sort()
            .values
        )
        edges.append(torch.stack([torch.randint(ends[hop + 1], (count,), generator=draw), target]))
    return Data(
        x=torch.randn(ends[-1], num_features, generator=draw),
        edge_index=torch.cat(edges, dim=1),
        n_id=torch.arange(ends[-1]),
        batch_size=hop_nodes[0],
        num_sampled_nodes=list(hop_nodes),
        num_sampled_edges=list(hop_edges),
    )
