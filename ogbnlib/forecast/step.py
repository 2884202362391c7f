"""A training step's memory: the model's state and bounds on the activations, from sizes alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..config import HOP_MODELS, MODELS, TrainConfig
from ..sampling.budget import BatchShape


def taken_for(config: TrainConfig) -> str:
    """The model of ours whose figures are given: sage for one of the user's own, of the same layers and widths.

    Or sign, where it learns from propagated features.
    """
    return config.model if config.model in MODELS else "sign" if config.loading == "propagated" else "sage"


def parameter_count(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Weights of the model. A layer of `SAGEConv` has two matrices, of `GCNConv` one, of `GATConv` attention too."""
    model = taken_for(config)
    total = 0
    layers = layer_widths(config, num_features, num_classes)
    for i, (width, out) in enumerate(layers):
        if model == "sage":
            total += 2 * width * out + out
        elif model == "gcn" or model in HOP_MODELS:
            total += width * out + out
        else:
            wide = out * config.heads if i == len(layers) - 1 else out
            total += width * wide + 2 * wide + out
    if model == "sagn":  # biases of one of its first layers only, and two vectors of attention
        total -= (config.hops - 1) * config.hidden_channels
    return total


def layer_widths(config: TrainConfig, num_features: int, num_classes: int) -> list[tuple[int, int]]:
    """(in, out) of each layer, all heads together but for the last one's, and all hops' together."""
    if config.loading == "propagated":
        width, wide = num_features // (config.hops + 1), (config.hops + 1) * config.hidden_channels
        if taken_for(config) == "sgc":
            return [(width, num_classes)]
        if taken_for(config) == "sign":
            return [(width, wide), (wide, num_classes)]
        return [(width, wide + config.hidden_channels), (config.hidden_channels, num_classes)]
    hidden = [config.hidden_channels] * (len(config.num_neighbors) - 1)
    return list(itertools.pairwise([num_features, *hidden, num_classes]))


def model_state_bytes(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Parameters, gradients and Adam's two moments, float32 (Kingma and Ba 2015): 16 bytes a weight."""
    return 16 * parameter_count(config, num_features, num_classes)


@dataclass(frozen=True)
class LayerStep:
    """One layer of a training step, in bytes.

    Attributes:
        kept: For the backward pass, its output included; the first layer's x is the batch's own and not in it.
        given: What of that activation checkpointing keeps: its output, which the next layer reads, and the matrix.
        peak: The most that its forward or its backward pass has alive.
    """

    kept: int
    given: int
    peak: int


def layer_steps(config: TrainConfig, batch: BatchShape, num_features: int, num_classes: int) -> list[LayerStep]:
    """Bounds for the layers of a step, first to last.

    Layer i of L reads the S nodes within L - i hops, over E edges, and writes the T within L - i - 1; `in` and H are
    the widths of its input and output, of all heads in gat. [rows, columns] is in float32 if nothing else is said.

    - sage keeps the mean of the neighbors [T, in], the sparse matrix, and the output. Beside that it takes two more
      outputs in the first layer, and in later ones the gradient of the input twice, [S, in].
    - gcn keeps the sparse matrix, its self-loops and the output, and takes 3 [S, H] and 16 bytes an edge: products of
      the sources, their gradient twice, and the matrix transposed.
    - gat keeps [S + T + E, H], 16 bytes an edge for each head and once more, and the output, and takes 3 [E, H].
    - Dropout keeps its mask and its result beside the output; in sage the result makes room for the gradient, in gcn
      under autocast it is the next layer's copy.
    - Autocast halves what sage and gat keep, but not the outputs of gcn and gat; it adds copies of the inputs in half
      width, and its sums are in float32 all the same.
    - The loss takes the last layer's output twice more.
    - Models of propagated features: `_hop_steps`.
    - A model of the user's own is taken for a sage that computes every layer for all S nodes, as forward(x, edge_index)
      does, from PyG's rows of an edge list, [E, in] and their gradient.
    """
    if config.loading == "propagated":
        return _hop_steps(config, batch.hop_nodes[0], num_features, num_classes)
    hops, layers, model = len(config.num_neighbors), layer_widths(config, num_features, num_classes), taken_for(config)
    half, dropout = config.precision != "fp32", config.dropout > 0
    w, copy = (2, 2) if half else (4, 0)  # bytes of an element of a product, and of its input's copy
    steps: list[LayerStep] = []
    for i, (width, channels) in enumerate(layers):
        last = i == hops - 1
        reach = hops - i if config.model == model else hops + 1
        s, t, e = sum(batch.hop_nodes[: reach + 1]), sum(batch.hop_nodes[:reach]), sum(batch.hop_edges[:reach])
        out = (w if model == "sage" and not last else 4) * t * channels
        matrix = 0
        if model == "sage":
            matrix = 4 * e + 8 * t
            products = (w if i else 4) * t * width + matrix
            gradients = 8 + copy - (w if dropout else 0)
            scratch = gradients * s * width if i else t * (2 * w * channels + copy * width)
            scratch += 8 * e * width if config.model != model else 0
        elif model == "gcn":
            matrix = 4 * e + 12 * t
            products = matrix + copy * s * width
            scratch = (12 + copy) * s * channels + 16 * e
        else:
            h = channels * config.heads if last else channels
            products = w * (s + 2 * t + e) * h + 16 * (e + t) * (1 + config.heads) + 2 * copy * s * width
            scratch = (12 + 2 * copy) * (e + t) * h
        masked = 2 if half and model == "gcn" else 3
        kept = products + out * (masked if dropout and not last else 1) + 8 * t
        peak = products + out * (3 if last else 1) + scratch
        steps.append(LayerStep(kept, out + matrix, max(kept, peak)))
    return steps


def _hop_steps(config: TrainConfig, num_seeds: int, num_features: int, num_classes: int) -> list[LayerStep]:
    """sign keeps the ReLU's results of all hops, the dropout's with their mask, and all of them side by side.

    sagn keeps all hops side by side, their weights, and the ReLU's and the dropout's results of their sum. Both take
    twice the first of these on the way back.
    """
    out = 4 * num_seeds * num_classes
    last = LayerStep(out, out, 3 * out)
    if taken_for(config) == "sgc":
        return [last]
    rows = 4 * num_seeds * layer_widths(config, num_features, num_classes)[0][1]
    copy = 2 * num_seeds * num_features if config.precision != "fp32" else 0
    kept = (4 if config.dropout else 3) * rows
    if taken_for(config) == "sagn":
        kept = rows + 4 * num_seeds * (3 * (config.hops + 1) * config.heads + 2 * config.hidden_channels)
    return [LayerStep(kept + copy, rows, kept + copy + 2 * rows), last]


def saved_bytes(config: TrainConfig, batch: BatchShape, num_features: int, num_classes: int) -> int:
    """What autograd keeps between the passes over one batch; the batch's own x and the parameters are not in it.

    Under activation checkpointing that is the layers' inputs, log-probabilities and labels. Autocast keeps a half-width
    copy of the weights as well, but for checkpointed layers. `accumulate` changes nothing: each batch's graph is freed
    by its own backward pass.

    Measured with hooks on saved tensors in all models, precisions and shapes that the tests have, it was met within 1 %
    or up to 25 % too high.
    """
    steps = layer_steps(config, batch, num_features, num_classes)
    if config.activation_checkpointing:
        return sum(step.given for step in steps) + 8 * batch.hop_nodes[0]
    copies = 2 * parameter_count(config, num_features, num_classes) if config.precision != "fp32" else 0
    return sum(step.kept for step in steps) + copies


def activation_bytes(
    config: TrainConfig, batch: BatchShape, num_features: int, num_classes: int, training: bool = True
) -> int:
    """What one step computes, at its peak; the input x itself is the batch's, and gradients of weights the model's.

    The most of: a layer's pass on top of what the layers before it keep. Under activation checkpointing they keep their
    outputs alone, but a layer is computed again while the gradient of its output is there. Without a backward pass: a
    layer's pass and its input.

    The CPU allocator's own record (torch 2.13, PyG 2.8) was 5 % higher at the most and 25 % lower, in steps of more
    than a few MB; under checkpointing, autocast and dropout together sage took 8 % more.
    """
    steps = layer_steps(config, batch, num_features, num_classes)
    peak = before = 0
    for step in steps:
        if not training:
            peak, before = max(peak, before + step.peak), step.given
        elif config.activation_checkpointing:
            peak, before = max(peak, before + step.given + step.peak), before + step.given
        else:
            peak, before = max(peak, before + step.peak), before + step.kept
    return max(peak, before)
