"""A training step's memory: the model's state and the activations, from sizes alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..config import TrainConfig
from ..sampling.budget import Batch


def parameter_count(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Weights of the model. A layer of `SAGEConv` has two matrices, of `GCNConv` one, of `GATConv` attention too."""
    total = 0
    layers = layer_widths(config, num_features, num_classes)
    for i, (width, out) in enumerate(layers):
        if config.model == "sage":
            total += 2 * width * out + out
        elif config.model == "gcn":
            total += width * out + out
        else:
            wide = out * config.heads if i == len(layers) - 1 else out
            total += width * wide + 2 * wide + out
    return total


def layer_widths(config: TrainConfig, num_features: int, num_classes: int) -> list[tuple[int, int]]:
    """(in, out) of each layer, all heads together but for the last one's."""
    hidden = [config.hidden_channels] * (len(config.num_neighbors) - 1)
    return list(itertools.pairwise([num_features, *hidden, num_classes]))


def model_state_bytes(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Parameters, gradients and Adam's two moments, float32 (Kingma and Ba 2015): 16 bytes a weight."""
    return 16 * parameter_count(config, num_features, num_classes)


@dataclass(frozen=True)
class LayerStep:
    """One layer of a training step, in bytes.

    Attributes:
        kept: For the backward pass.
        given: What of that is an input, which is kept under activation checkpointing as well; the first layer's x is
            the batch's own and in neither.
        out: Its output; its gradient is as large.
        forward: The most that its forward pass has alive, `kept` included.
        backward: What its backward pass has alive beside the gradient of its output.
    """

    kept: int
    given: int
    out: int
    forward: int
    backward: int


def layer_steps(config: TrainConfig, batch: Batch, num_features: int, num_classes: int) -> list[LayerStep]:
    """The layers of a step, first to last.

    Layer i of L reads the S nodes within L - i hops, over E edges, and writes the T within L - i - 1; `in` and H are
    the widths of its input and output, of all heads in gat; F = E + S in gcn and E + T in gat, which add self-loops.
    An element of a product takes w bytes: 4, or 2 under autocast, which also keeps half-width copies of float32 inputs.

    - sage keeps the mean of the neighbors w [T, in], the output after ReLU w [T, H], and from the second layer on the
      sparse matrix, 4 bytes an edge and 8 a target; under autocast also 2 [T, in] of the first layer's own rows.
      Forward: the mean and 3 [T, H]. Backward: the gradient of the input twice, [S, in]. Under autocast the sparse
      product is float32: its operand and result in the forward pass, and one more gradient, come on top.
    - gcn keeps 20 F of indices and weights and the output after ReLU, float32 always; under autocast 2 [S, in].
      Forward and backward: 2 [S, H] and 2 [F, H], float32: PyG gathers a row for each edge and weighs it.
    - gat keeps w [S + T + F, H], 16 F of indices, 16 F for each head of attention, and the output after ReLU, float32;
      under autocast 2 [S + T, in]. Backward: 3 more [F, H] in float32, 4 under autocast.
    - Dropout keeps its mask and its output beside the output after ReLU; gcn and gat under autocast the mask alone.
      The last layer keeps log-probabilities and labels instead.

    What is kept is exact (tests compare it with the saved-tensor hooks of `activations`); the rest reproduces the CPU
    allocator's own record, which the process's resident memory followed within 3 % (torch 2.13, PyG 2.8).
    """
    hops, layers = len(config.num_neighbors), layer_widths(config, num_features, num_classes)
    half = config.precision != "fp32"
    w = 2 if half else 4
    steps: list[LayerStep] = []
    for i, (width, channels) in enumerate(layers):
        last = i == len(layers) - 1
        s, t, e = (
            sum(batch.hop_nodes[: hops - i + 1]),
            sum(batch.hop_nodes[: hops - i]),
            sum(batch.hop_edges[: hops - i]),
        )
        h = channels * config.heads if last and config.model == "gat" else channels
        wide = w if config.model == "sage" else 4  # aggregated in float32, and ReLU keeps that
        out = t * channels * (4 if last else wide)
        masked = 0 if last or not config.dropout else 1 if half and config.model != "sage" else 2
        tail = out * (1 + masked) + (8 * t if last else 0)
        matrix = 4 * e + 8 * t
        if config.model == "sage":
            mean = w * t * width
            kept = mean + (2 * t * width if half and i == 0 else 0) + (matrix if i else 0) + tail
            given = matrix
            forward = max(kept, mean + 3 * w * t * h)
            if half:
                forward = max(forward, 6 * t * width + w * t * h, 4 * (s + t) * width if i else 0)
            # The mask of the layer before is still there then, its output after dropout is not.
            backward = (8 + (2 if half else 0) - (w if config.dropout else 0)) * s * width if i else 0
        elif config.model == "gcn":
            f = e + s
            rows = 8 * (s + f) * h
            kept = 20 * f + (2 * s * width if half else 0) + tail
            given, forward, backward = 0, kept - tail + rows, kept - tail + rows - out
        else:
            f = e + t
            kept = w * (s + t + f) * h + 16 * f * (1 + config.heads) + (2 * (s + t) * width if half else 0) + tail
            given, forward = 0, kept - tail + 4 * (f + t) * h
            backward = kept - tail + (16 if half else 12) * f * h - out
        steps.append(LayerStep(kept, given + (steps[-1].out if steps else 0), out, forward, backward))
    return steps


def saved_bytes(config: TrainConfig, batch: Batch, num_features: int, num_classes: int) -> int:
    """What autograd keeps between the passes over one batch; the batch's own x and the parameters are not in it.

    Under activation checkpointing that is the layers' inputs, log-probabilities and labels. Autocast keeps a half-width
    copy of the weights as well, but for checkpointed layers. `accumulate` changes nothing: each batch's graph is freed
    by its own backward pass.
    """
    steps = layer_steps(config, batch, num_features, num_classes)
    if config.activation_checkpointing:
        return sum(step.given for step in steps) + steps[-1].out + 8 * batch.hop_nodes[0]
    copies = 2 * parameter_count(config, num_features, num_classes) if config.precision != "fp32" else 0
    return sum(step.kept for step in steps) + copies


def activation_bytes(
    config: TrainConfig, batch: Batch, num_features: int, num_classes: int, training: bool = True
) -> int:
    """What one step computes, at its peak; the input x itself is the batch's, and gradients of weights the model's.

    The most of: a layer's forward pass on top of what the layers before it keep, and a layer's backward pass with the
    gradient of its output on top of the same. Under activation checkpointing the layers keep their inputs alone, but a
    layer is computed again while the gradient of its output is there. See `layer_steps`. Without a backward pass: the
    widest layer and its input.
    """
    steps = layer_steps(config, batch, num_features, num_classes)
    if not training:
        inputs = [0, *(step.out for step in steps)]
        return max(given + step.forward for given, step in zip(inputs, steps, strict=False))
    peak = before = 0
    for step in steps:
        if config.activation_checkpointing:
            before += step.given
            peak = max(peak, before + step.out + max(step.forward, step.backward))
        else:
            peak = max(peak, before + step.forward, before + step.out + step.backward)
            before += step.kept
    return max(peak, saved_bytes(config, batch, num_features, num_classes))
