"""GraphSAGE, GCN and GAT on bipartite layers, and SGC, SIGN and SAGN on propagated features.

A batch lists its nodes hop by hop, seeds first, and its edges hop by hop. So layer `i` of `L` needs
the edges of the first `L - i` hops: it reads the nodes within `L - i` hops of a seed and writes
those within `L - i - 1`. PyG's default forward computes every layer on every sampled node; leaving
that out made training 7 times faster on [15, 10, 5].
"""

import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import spmm

from ..config import TrainConfig
from ..errors import InputError
from ..graph.store import Store
from ..propagation.sage import Layers, bounds_of, torch_threads

# A loss and its gradient by the scores that it gets; see `step.loss_and_gradient`.
Differentiate: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
_PIECE_NODES = 2**20  # 8 MB of offsets in memory at a time
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# oneDNN and ATen each cache 1024 products compiled for one shape, but sampled batches hardly ever
# repeat a shape: under bf16 on the CPU 600 MB were never used again. Both read these variables at
# the first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "16")
# torch says this once per process; the one product used here is tested against the dense formula.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def _csr(edges: Tensor, num_targets: int, num_sources: int, values: Tensor | None = None) -> Tensor:
    """Return edges, ascending by target, as a sparse [num_targets, num_sources] matrix of `values`
    (default: ones)."""
    # A sparse product reads each neighbor's features in place; with an edge list PyG first copies
    # them out, an array of [num_edges, channels]: 1.5 times slower for a layer of 574,000 edges and
    # 128 features.
    values = torch.ones(edges.size(1), device=edges.device) if values is None else values
    size = num_targets, num_sources
    return torch.sparse_csr_tensor(
        index2ptr(edges[1], num_targets), edges[0], values, size, check_invariants=False
    )


def _ascending(edge_index: Tensor, num_sampled_edges: list[int]) -> Tensor:
    """Sort the edges of each hop by target."""
    by_hop = torch.split(edge_index, num_sampled_edges, 1)
    return torch.cat([hop[:, hop[1].argsort(stable=True)] for hop in by_hop], 1)


class _Mean(torch.autograd.Function):
    """The mean over neighbors of half-width features, summed and returned in float32."""

    # torch 2.13 has no sparse CSR product of mixed types, and on the CPU none of half-width ones
    # (pytorch/pytorch#41069). Its own product would keep the widened features for the backward
    # pass.

    @staticmethod
    def forward(ctx: Any, adjacency: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(adjacency)
        ctx.dtype = x.dtype
        return spmm(adjacency, x.float(), "mean")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (adjacency,) = ctx.saved_tensors
        degrees = adjacency.crow_indices().diff().clamp(min=1)
        return None, torch.sparse.mm(adjacency.t(), grads[0].float() / degrees[:, None]).to(
            ctx.dtype
        )


class _SAGE(SAGEConv):  # type: ignore[misc]
    """`SAGEConv` that computes the mean over neighbors in float32, also under autocast."""

    def message_and_aggregate(self, adj_t: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(x[0].device.type, enabled=False):
            if x[0].dtype == torch.float32:
                return spmm(adj_t, x[0], "mean")
            return _Mean.apply(adj_t, x[0])  # type: ignore[no-untyped-call]


class _GCN(GCNConv):  # type: ignore[misc]
    """`GCNConv` as a sparse product with the normalised adjacency, whose rows are the layer's
    targets alone."""

    # PyG's own has no bipartite form, and copies a row of features for each edge. Sums are float32
    # under autocast, too.

    def forward(self, x: tuple[Tensor, Tensor], adjacency: Tensor, loops: Tensor) -> Tensor:
        h = self.lin(x[0])
        with torch.autocast(h.device.type, enabled=False):
            h = h.float()
            out: Tensor = spmm(adjacency, h, "sum") + loops * h[: len(loops)] + self.bias
        return out


class GNN(nn.Module):
    """The model of a config: one convolution per entry of `num_neighbors`, with ReLU and dropout
    between them.

    Sources: GraphSAGE with mean aggregation (Hamilton et al. 2017), GCN (Kipf and Welling 2017),
    GAT (Velickovic et al. 2018), all as PyG implements them.

    With `activation_checkpointing` the backward pass computes each layer again from its input (Chen
    et al. 2016), with the same dropout and gradients.
    """

    def __init__(self, config: TrainConfig, num_features: int, num_classes: int):
        super().__init__()
        self.model, self.dropout, self.dtype = (
            config.model,
            config.dropout,
            DTYPES[config.precision],
        )
        self.checkpointing = config.activation_checkpointing
        hidden, depth = config.hidden_channels, len(config.num_neighbors)
        self.convs = nn.ModuleList()
        for layer, (width, out) in enumerate(
            itertools.pairwise([num_features, *[hidden] * (depth - 1), num_classes])
        ):
            if config.model == "gat":
                # The last layer averages its heads, as in the paper; the others concatenate to
                # hidden_channels.
                last, heads = layer == depth - 1, config.heads
                conv: nn.Module = GATConv(
                    width, out if last else out // heads, heads=heads, concat=not last
                )
            else:
                conv = (_GCN if config.model == "gcn" else _SAGE)(width, out)
            self.convs.append(conv)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        num_sampled_nodes: list[int],
        num_sampled_edges: list[int],
    ) -> Tensor:
        """Class scores of the seeds, float32 [num_sampled_nodes[0], num_classes], not normalised.

        Args:
            x: float32 or float16 [num_nodes, num_features], features of all sampled nodes, seeds
                first, hop by hop.
            edge_index: int64 [2, num_edges], local ids, source above target, hop by hop.
            num_sampled_nodes: Nodes discovered at each hop, the seeds first; num_layers + 1
                numbers.
            num_sampled_edges: Edges sampled at each hop; num_layers numbers.
        """
        if not torch.is_grad_enabled() and self.fuses(x):
            layers = self._fused(x, edge_index, num_sampled_nodes, num_sampled_edges)
            with torch_threads(1):
                return layers.forward("nothing")[0].float()
        # Our samplers list edges ascending by target, hop by hop, so a layer's edges are already in
        # CSR order.
        if not bool((edge_index[1].diff() >= 0).all()):
            edge_index = _ascending(edge_index, num_sampled_edges)
        x = x.float() if x.dtype == torch.float16 else x
        if self.model == "gcn":
            # 1 / sqrt(degree) in the whole subgraph, with one self-loop each, as in PyG's untrimmed
            # forward. Counted in each layer's own edges, the outermost nodes have degree 1, and
            # accuracy on amazon_photo fell from 0.95 to 0.68 at a fan-out of [-1, -1].
            source, target = edge_index
            others = (source != target).float()
            scale = torch.ones(len(x), device=x.device).index_add_(0, target, others).rsqrt()
            del others
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for layer in range(len(self.convs)):
                hops = len(self.convs) - layer
                num_targets, edges = (
                    sum(num_sampled_nodes[:hops]),
                    edge_index[:, : sum(num_sampled_edges[:hops])],
                )
                if self.model == "gat":
                    adjacency: tuple[Tensor, ...] = (edges,)
                elif self.model == "sage":
                    adjacency = (_csr(edges, num_targets, len(x)),)
                else:
                    source, target = edges
                    # an existing self-loop counts once
                    weights = scale[source] * scale[target] * (source != target)
                    adjacency = (
                        _csr(edges, num_targets, len(x), weights),
                        scale[:num_targets, None].square(),
                    )
                if self.checkpointing and torch.is_grad_enabled():
                    x = checkpoint(
                        self._layer, layer, x, num_targets, *adjacency, use_reentrant=False
                    )
                else:
                    x = self._layer(layer, x, num_targets, *adjacency)
        return x.float()

    def fuses(self, x: Tensor) -> bool:
        """Whether `Layers` compute these: GraphSAGE's as made here, on the CPU. On a GPU they are
        sparse products."""
        if self.model != "sage" or self.dtype == torch.float16 or x.device.type != "cpu":
            return False
        convs: Any = self.convs
        weights = (
            weight
            for conv in convs
            if type(conv) is _SAGE
            for weight in (conv.lin_l.weight, conv.lin_r.weight)
        )
        plain = sum(
            weight.is_leaf and weight.dtype == torch.float32 for weight in weights
        ) == 2 * len(convs)
        return plain and x.dtype in (torch.float16, torch.float32)

    def _fused(
        self, x: Tensor, edge_index: Tensor, num_sampled_nodes: list[int], *num_sampled_edges: Any
    ) -> Layers:
        targets = [sum(num_sampled_nodes[:hops]) for hops in range(len(self.convs), 0, -1)]
        bounds, sizes = np.empty(targets[0] + 1, np.int64), np.array([len(x), *targets])
        col, target = edge_index.contiguous().numpy()
        if not bounds_of(col, target, sizes, bounds):
            col, target = _ascending(edge_index, *num_sampled_edges).numpy()
            if not bounds_of(col, target, sizes, bounds):
                ids = f"sources below {len(x)} and targets below {targets[0]}, hop by hop as num_sampled_nodes says"
                raise InputError(f"edge_index: expected {ids}, found others")
        layers: Any = self.convs
        weights = [
            value
            for conv in layers
            for value in (conv.lin_l.weight, conv.lin_l.bias, conv.lin_r.weight)
        ]
        dropout, threads = self.dropout if self.training else 0.0, torch.get_num_threads()
        return Layers(x, bounds, col, targets, dropout, weights, self.dtype, threads)

    def add_gradients(self, batch: Data, differentiate: Differentiate) -> Tensor:
        """Add the weights' gradients of a loss, which `differentiate` computes from the seeds'
        scores; return the loss.

        As PyG's layers and autograd do it, in two thirds of the time of a small step, and with
        float32 layers of at most `PART_ROWS` nodes bit for bit; for batches that `fuses` accepts.
        """
        layers = self._fused(
            batch.x, batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges
        )
        with torch_threads(1):
            with torch.no_grad():
                scores, tape = layers.forward("input" if self.checkpointing else "all")
            loss, gradient = differentiate(scores.float())
            del scores
            with torch.no_grad():
                gradients = layers.backward(tape, gradient)
                for value, own in zip(layers.weights, gradients, strict=True):
                    if not value.requires_grad:
                        continue
                    if value.grad is None:
                        value.grad = own.contiguous()
                    else:
                        value.grad.add_(own)
        return loss

    def _layer(self, layer: int, x: Tensor, num_targets: int, *adjacency: Tensor) -> Tensor:
        hidden, out = (
            layer < len(self.convs) - 1,
            self.convs[layer]((x, x[:num_targets]), *adjacency),
        )
        out = F.relu(out) if hidden else out
        return F.dropout(out, p=self.dropout, training=self.training) if hidden else out


class HopModel(nn.Module):
    """Scores from propagated features [B, (hops + 1) * F]: what 0, 1, ... hops bring to each node.

    - sgc: a linear layer on the last hop (Wu et al. 2019, as PyG's `SGConv`).
    - sign: a linear layer for each hop, ReLU and dropout; then one on all of them (Frasca et al.
      2020, as in PyG's examples/sign.py).
    - sagn: a linear layer for each hop; their sum, weighed node by node with the softmax of
      LeakyReLU(a h_0 + b h_k) in each of `heads`, and a linear layer of the node's own features;
      then ReLU, dropout and a linear layer (Sun et al. 2021, without its batch norm, label model
      and self-training).
    """

    def __init__(self, config: TrainConfig, num_features: int, num_classes: int):
        super().__init__()
        self.model, self.dropout, self.heads = config.model, config.dropout, config.heads
        self.num_rows = config.hops + 1
        width, hidden = num_features // self.num_rows, config.hidden_channels
        if self.model == "sgc":
            self.out = nn.Linear(width, num_classes)
            return
        self.hops = nn.ModuleList(
            nn.Linear(width, hidden, bias=self.model == "sign") for _ in range(self.num_rows)
        )
        self.out = nn.Linear(hidden * (self.num_rows if self.model == "sign" else 1), num_classes)
        if self.model == "sagn":
            self.own = nn.Linear(width, hidden)
            self.attention = nn.Parameter(torch.empty(2, self.heads, hidden // self.heads))
            nn.init.xavier_normal_(self.attention, gain=nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), self.num_rows, -1)
        if self.model == "sgc":
            return self.out(x[:, -1])
        rows = [hop(x[:, k]) for k, hop in enumerate(self.hops)]
        if self.model == "sign":
            return self.out(
                torch.cat([F.dropout(row.relu(), self.dropout, self.training) for row in rows], 1)
            )
        heads = torch.stack(rows, 1).view(len(x), self.num_rows, self.heads, -1)
        own, other = self.attention
        scores = (heads[:, :1] * own).sum(-1, keepdim=True) + (heads * other).sum(-1, keepdim=True)
        attended = (F.leaky_relu(scores, 0.2).softmax(1) * heads).sum(1).flatten(1)
        return self.out(
            F.dropout((attended + self.own(x[:, 0])).relu(), self.dropout, self.training)
        )


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


def degree_histogram(store: Store) -> Tensor:
    """Count the nodes with 0, 1, 2, ... neighbors, int64 [largest degree + 1]: the argument `deg`
    of PyG's PNA."""
    counts = np.zeros(1, np.int64)
    for begin in range(0, store.num_nodes, _PIECE_NODES):
        piece = np.bincount(np.diff(store.colptr[begin : begin + _PIECE_NODES + 1]))
        counts = np.pad(counts, (0, max(0, len(piece) - len(counts))))
        counts[: len(piece)] += piece
    return torch.from_numpy(counts)
