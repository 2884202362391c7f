"""The network of sampled models: bipartite layers that compute only the nodes that seeds need.

A batch lists its nodes hop by hop, seeds first, and its edges hop by hop. So layer `i` of `L` needs
the edges of the first `L - i` hops. It reads the nodes within `L - i` hops of a seed and writes the
nodes within `L - i - 1` hops. PyG's default forward computes every layer on every sampled node;
leaving out unneeded nodes made training 7 times faster with num_neighbors [15, 10, 5].
"""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from ..config import TrainConfig
from ..errors import InputError
from ..registry import MODELS
from .fused_sage import Layers, bounds_of, torch_threads

# Function from scores to a loss and its gradient with respect to the scores; see
# `learner.loss_and_gradient`.
Differentiate: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# oneDNN and ATen each cache 1024 products, each compiled for one shape. Sampled batches hardly ever
# repeat a shape: with bf16 on the CPU, 600 MB were never used again. Both libraries read these
# variables at the first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "16")


class GNN(nn.Module):
    """The convolutions of a sampled model, with ReLU and dropout between them.

    With `activation_checkpointing` the backward pass computes each layer again from its input (Chen
    et al. 2016), with the same dropout and gradients.
    """

    def __init__(self, config: TrainConfig, num_features: int, num_classes: int):
        super().__init__()
        self.kind = MODELS[config.model].load()  # a `model.SampledModel`, used as a class
        self.dropout = config.dropout
        self.dtype = DTYPES[config.precision]
        self.checkpointing = config.activation_checkpointing
        depth = len(config.num_neighbors)
        widths = self.kind.widths(depth, num_features, config.hidden_channels, num_classes)
        self.convs = nn.ModuleList(
            self.kind.conv(inputs, outputs, heads=config.heads, last=layer == depth - 1)
            for layer, (inputs, outputs) in enumerate(widths)
        )

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
            edge_index: int64 [2, num_edges], local ids, row 0 sources and row 1 targets, hop by
                hop.
            num_sampled_nodes: Nodes discovered at each hop, the seeds first; num_layers + 1
                numbers.
            num_sampled_edges: Edges sampled at each hop; num_layers numbers.
        """
        if not torch.is_grad_enabled() and self.fuses(x):
            layers = self._fused(x, edge_index, num_sampled_nodes)
            with torch_threads(1):
                scores, _ = layers.forward("nothing")  # keeps nothing for a backward pass
            return scores.float()
        # Our samplers list edges ascending by target, hop by hop, so a layer's edges are already in
        # CSR order.
        if not bool((edge_index[1].diff() >= 0).all()):
            raise InputError("edge_index: expected edges ascending by target, found others")
        x = x.float()
        shared = self.kind.prepare(edge_index, len(x))  # for all layers, such as gcn's degrees
        compute: Callable[..., Tensor] = self._layer
        if self.checkpointing and torch.is_grad_enabled():
            compute = functools.partial(checkpoint, self._layer, use_reentrant=False)
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for layer in range(len(self.convs)):
                hops = len(self.convs) - layer  # x loses the outermost hop in each layer
                num_targets = sum(num_sampled_nodes[:hops])
                edges = edge_index[:, : sum(num_sampled_edges[:hops])]
                adjacency = self.kind.adjacency(edges, num_targets, len(x), shared)
                x = compute(layer, x, num_targets, *adjacency)  # [num_targets, outputs]
        return x.float()

    def fuses(self, x: Tensor) -> bool:
        """Whether `fused_sage.Layers` can compute this network for features `x`.

        They can for GraphSAGE on the CPU, in fp32 or bf16 and without hooks, which `Layers` would
        not call. On a GPU the layers are sparse products.
        """
        if not self.kind.fused or self.dtype == torch.float16 or x.device.type != "cpu":
            return False
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return x.dtype in (torch.float16, torch.float32) and not any(
            getattr(module, name) for module in self.modules() for name in hooks
        )

    def _fused(self, x: Tensor, edge_index: Tensor, num_sampled_nodes: list[int]) -> Layers:
        """Return the fused layers of a batch; `InputError` if an id is outside of its layer or the
        edges are not ascending by target."""
        # number of nodes that each layer writes: the first all but the outermost hop
        targets = [sum(num_sampled_nodes[:hops]) for hops in range(len(self.convs), 0, -1)]
        bounds = np.empty(targets[0] + 1, np.int64)  # filled by `bounds_of`
        col, target = edge_index.contiguous().numpy()
        if not bounds_of(col, target, np.array([len(x), *targets]), bounds):
            raise InputError(
                f"edge_index: expected sources below {len(x)} and targets below {targets[0]}, "
                "ascending, hop by hop as num_sampled_nodes says, found others"
            )
        layers: Any = self.convs
        return Layers(
            x,
            bounds,
            col,
            targets,
            dropout=self.dropout if self.training else 0.0,
            weights=[
                value
                for conv in layers
                for value in (conv.lin_l.weight, conv.lin_l.bias, conv.lin_r.weight)
            ],
            dtype=self.dtype,
            threads=torch.get_num_threads(),
        )

    def add_gradients(self, batch: Data, differentiate: Differentiate) -> Tensor:
        """Add the gradients of a batch's loss to those of the weights; return the loss.

        `differentiate` computes the loss from the seeds' scores; `fuses` must accept the batch. The
        gradients are PyG's, bit for bit in float32 layers of at most `PART_ROWS` nodes.
        """
        layers = self._fused(batch.x, batch.edge_index, batch.num_sampled_nodes)
        # no_grad leaves out `differentiate`, which may use autograd for another loss
        with torch_threads(1):
            with torch.no_grad():
                scores, tape = layers.forward("input" if self.checkpointing else "all")
            loss, gradient = differentiate(scores.float())
            del scores
            with torch.no_grad():
                gradients = layers.backward(tape, gradient)
                for weight, weight_gradient in zip(layers.weights, gradients, strict=True):
                    if weight.grad is None:
                        weight.grad = weight_gradient.contiguous()  # of half a product: copied
                    else:  # an earlier batch of the same step
                        weight.grad.add_(weight_gradient)
        return loss

    def _layer(self, layer: int, x: Tensor, num_targets: int, *adjacency: Tensor) -> Tensor:
        # x: [num_sources, inputs], the targets first
        out: Tensor = self.convs[layer]((x, x[:num_targets]), *adjacency)
        if layer == len(self.convs) - 1:
            return out  # scores
        return F.dropout(F.relu(out), p=self.dropout, training=self.training)
