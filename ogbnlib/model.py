"""The facts about a model that config, forecast, trainer and predictions use; imports no torch.

A model is one file of `training/models`, named as the model, with a class `Model` derived from
`SampledModel` or `PropagatedModel`, which is used without an instance. Its methods import torch only
to make layers, so a forecast imports no torch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn


class Layer(NamedTuple):
    """One layer of a training step."""

    sources: int  # nodes that it reads
    targets: int  # nodes that it writes
    edges: int
    inputs: int  # columns that it reads, of one hop if it reads propagated features
    outputs: int  # columns that it writes, of all heads together, in the last layer of one
    first: bool
    last: bool
    heads: int
    hops: int  # of propagated features
    half: bool  # 16-bit precision
    dropout: bool
    fused: bool  # computed by `training.fused_sage`, on the CPU
    edge_list: bool  # whether the layer gets edge_index in place of a sparse matrix

    @property
    def item(self) -> int:
        """Bytes of a number in the products of matrices."""
        return 2 if self.half else 4

    @property
    def copy(self) -> int:
        """Bytes of a number in autocast's 16-bit copy of an input; 0 without autocast."""
        return 2 * self.half


class LayerMemory(NamedTuple):
    """Bytes of one layer in a training step."""

    saved: int  # for the backward pass: with the output, without x of the first layer
    checkpointed: int  # part of `saved` with activation checkpointing: output and sparse matrix
    peak: int  # the most at any time of the forward or the backward pass


class BaseModel:
    """Base class of models on sampled subgraphs and on propagated features."""

    propagated: bool
    can_checkpoint = False  # whether `activation_checkpointing` can compute its layers twice
    has_heads = False  # whether `heads` must divide `hidden_channels`
    transforms_sources = False  # whether its matrices multiply a layer's sources, not its targets
    fused = False  # whether `training.fused_sage` computes its layers on the CPU
    # Names of a layer's parameters, if `inference.exact` can compute it with all neighbors: the
    # weights of neighbors, the bias, and the weights of the node itself. Such a layer takes the mean
    # of neighbors; with only the first two names, GCN's sum with self-loops.
    exact_weights: tuple[str, ...] = ()

    @staticmethod
    def weights(layer: Layer) -> int:
        """Number of a layer's weights."""
        raise NotImplementedError

    @staticmethod
    def edge_bytes(layer: Layer) -> int:
        """Bytes that a training step writes for a layer's edges on top of `memory`, and time of
        other work on edges as the bytes of a copy; to forecast times."""
        return 0

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Bytes of a layer in a training step, measured by `tests/training/test_activations.py`."""
        raise NotImplementedError

    @staticmethod
    def widths(depth: int, features: int, hidden: int, classes: int) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer; `depth` is the number of fan-outs, or of hops."""
        return list(itertools.pairwise([features, *[hidden] * (depth - 1), classes]))


class SampledModel(BaseModel):
    """A model on sampled subgraphs: one convolution for each entry of `num_neighbors`."""

    propagated = False
    can_checkpoint = True

    @staticmethod
    def conv(inputs: int, outputs: int, *, heads: int, last: bool) -> nn.Module:
        """Return a layer, an `nn.Module`, called as `layer((x, x of the targets), *adjacency)`."""
        raise NotImplementedError

    @staticmethod
    def prepare(edge_index: Tensor, num_nodes: int) -> Tensor | None:
        """Return a tensor for all layers of a batch, from its edges int64 [2, E]; default: None."""
        return None

    @staticmethod
    def adjacency(
        edges: Tensor, num_targets: int, num_sources: int, shared: Any
    ) -> tuple[Any, ...]:  # shared: the result of `prepare`
        """Return a layer's arguments after x, from its edges int64 [2, E], ascending by target."""
        return (edges,)


class PropagatedModel(BaseModel):
    """A model on propagated features [N, (hops + 1) * F], without the graph."""

    propagated = True

    @staticmethod
    def network(config: Any, num_features: int, num_classes: int) -> nn.Module:
        """Return the `nn.Module`, called with rows of propagated features [B, (hops + 1) * F]."""
        raise NotImplementedError


# In the formulas of sampled models an array [rows, channels] is float32 unless stated otherwise.
# Autocast halves the bytes of products, adds 16-bit copies of inputs, and leaves sums in float32.
# The loss needs two more arrays as large as the last layer's output.
def layer_memory(
    layer: Layer, products: int, scratch: int, matrix: int = 0, *, item: int = 4, masks: int = 3
) -> LayerMemory:
    """Bytes of a layer, from the bytes `products` that it keeps without its output (with those of
    its sparse `matrix`) and those that it frees again, `scratch`.

    `item` is the bytes of a number of its output. With dropout the layer keeps `masks` arrays as
    large as its output: by default the output, dropout's mask, and dropout's result.
    """
    if layer.last:
        item = 4  # scores are float32
    out = layer.targets * layer.outputs * item
    saved = products + out + 8 * layer.targets  # 8: int64 labels, which only the last layer keeps
    peak = products + out + scratch
    if layer.last:
        peak += 2 * out  # of the loss
    elif layer.dropout:
        saved += (masks - 1) * out
    return LayerMemory(saved, out + matrix, max(saved, peak))


def linear_weights(layer: Layer) -> int:
    """Number of weights and biases of a linear layer."""
    return layer.inputs * layer.outputs + layer.outputs


def linear_memory(layer: Layer, saved: int = 0, *, item: int = 4) -> LayerMemory:
    """Bytes of a linear layer, whose output has `item` bytes a number, 4 in the last layer.

    The last layer keeps its output, another one `saved` bytes; the peak has two outputs more.
    """
    out = (4 if layer.last else item) * layer.targets * layer.outputs
    if layer.last:
        return LayerMemory(out, out, 3 * out)
    saved += layer.copy * layer.targets * layer.inputs * (layer.hops + 1)  # of x, all hops
    return LayerMemory(saved, out, saved + 2 * out)
