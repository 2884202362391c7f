"""The facts about a model that config, forecast, trainer and predictions use; imports no torch.

A model is one file of `training/models` with a class `Model`, derived from `SampledModel` or
`PropagatedModel`; the file's name is the model's name. The class is used without an instance. Its
methods import torch only to make layers, so a forecast imports no torch.
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
    inputs: int
    outputs: int  # of all heads together but for the last layer's
    first: bool
    last: bool
    heads: int
    hops: int  # of propagated features
    half: bool  # 16-bit precision
    dropout: bool
    fused: bool  # by `training.fused_sage`: on the CPU
    edge_list: bool  # in place of a sparse matrix, as `forward(x, edge_index)` gets it

    @property
    def item(self) -> int:
        """Bytes of a number in products."""
        return 2 if self.half else 4

    @property
    def copy(self) -> int:
        """Bytes of a number in the half-width copy of an input, 0 where there is none."""
        return 2 * self.half


class LayerMemory(NamedTuple):
    """Bytes of one layer in a training step."""

    # for the backward pass, the output included; the first layer's x belongs to the batch
    saved: int
    # the part of `saved` that activation checkpointing keeps: the output and the sparse matrix
    checkpointed: int
    peak: int  # the most that the forward or the backward pass has alive


class BaseModel:
    """The part that models on sampled and on propagated features share."""

    propagated: bool
    has_heads = False  # whether `heads` must divide `hidden_channels`
    fused = False  # whether `training.fused_sage` computes its layers on the CPU
    # The names of a layer's weights [in, out] for neighbors, its bias, and its weights for the node
    # itself, where inference can count all neighbors layer by layer: the mean of neighbors, or with
    # two names GCN's sum with self-loops. Empty for a model without such layers.
    exact_weights: tuple[str, ...] = ()

    @staticmethod
    def weights(layer: Layer) -> int:
        """Number of a layer's weights."""
        raise NotImplementedError

    @staticmethod
    def memory(layer: Layer) -> LayerMemory:
        """Bytes of a layer in a training step; `tests/training/test_activations.py` measures them."""
        raise NotImplementedError

    @staticmethod
    def widths(depth: int, features: int, hidden: int, classes: int) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer; `depth` is the number of fan-outs, or of hops."""
        return list(itertools.pairwise([features, *[hidden] * (depth - 1), classes]))


class SampledModel(BaseModel):
    """A model on sampled subgraphs: one convolution for each entry of `num_neighbors`."""

    propagated = False

    @staticmethod
    def conv(inputs: int, outputs: int, *, heads: int, last: bool) -> nn.Module:
        """Return a layer, an `nn.Module`, called as `layer((x, x of the targets), *adjacency)`."""
        raise NotImplementedError

    @staticmethod
    def prepare(edge_index: Tensor, num_nodes: int) -> Tensor | None:
        """Return what all layers of a batch share, from all of its edges; None by default."""
        return None

    @staticmethod
    def adjacency(
        edges: Tensor, num_targets: int, num_sources: int, shared: Any
    ) -> tuple[Any, ...]:
        """Return a layer's arguments after x, from its edges int64 [2, E], ascending by target."""
        return (edges,)


class PropagatedModel(BaseModel):
    """A model on propagated features [N, (hops + 1) * F], without the graph."""

    propagated = True

    @staticmethod
    def network(
        num_features: int, num_classes: int, *, hops: int, hidden: int, heads: int, dropout: float
    ) -> nn.Module:
        """Return the `nn.Module`, called with rows of propagated features [B, (hops + 1) * F]."""
        raise NotImplementedError


# With sampled neighbors, [rows, channels] is float32 where nothing else is stated. Autocast halves
# products, adds half-width copies of inputs, and leaves sums in float32. The last layer's output is
# there twice more for the loss.


def layer_memory(
    layer: Layer, products: int, scratch: int, matrix: int = 0, *, item: int = 4, masks: int = 3
) -> LayerMemory:
    """Bytes of a layer from its products, its scratch space and its sparse matrix."""
    if layer.last:
        item = 4
    out = layer.targets * layer.outputs * item
    saved = products + out + 8 * layer.targets
    peak = products + out + scratch
    if layer.last:
        peak += 2 * out
    elif layer.dropout:
        # Dropout keeps its mask and its result in addition to the output.
        saved += (masks - 1) * out
    return LayerMemory(saved, out + matrix, max(saved, peak))


def linear_weights(layer: Layer) -> int:
    """Weights and bias of a linear layer."""
    return layer.inputs * layer.outputs + layer.outputs


def linear_memory(layer: Layer, saved: int = 0) -> LayerMemory:
    """A last layer keeps its output and takes it twice more; the first one keeps `saved` and takes
    twice its rows."""
    rows = 4 * layer.targets * layer.outputs
    if layer.last:
        return LayerMemory(rows, rows, 3 * rows)
    if layer.half:
        saved += 2 * layer.targets * layer.inputs * (layer.hops + 1)
    return LayerMemory(saved, rows, saved + 2 * rows)
