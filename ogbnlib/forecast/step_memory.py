"""A training step's memory: the model's state and bounds on its activations, from sizes alone.

A step of the user's own model is measured once (`own_model_step`), and scaled.
"""

import json
import os
from dataclasses import dataclass

from ..config import TrainConfig
from ..environment import STEP_VARIABLE
from ..files import home
from ..graph.store import GraphSize
from ..model import BaseModel, Layer, LayerMemory
from ..registry import MODELS
from .batches import BatchShape
from .memory_parts import hop_size


def formula_of(config: TrainConfig) -> str:
    """The name of the registered model whose formulas are used: for the user's own one sage or,
    propagated, sign."""
    return config.model if config.model in MODELS else config.policy.formula


def formulas_of(config: TrainConfig) -> type[BaseModel]:
    """The registered model whose formulas are used."""
    kind: type[BaseModel] = MODELS[formula_of(config)].load()
    return kind


def _depth(config: TrainConfig) -> int:
    """Layers of a model on sampled subgraphs, or hops of propagated features."""
    return config.hops if config.policy.uses_hops else len(config.num_neighbors)


@dataclass(frozen=True)
class Trial:
    """A measured step of the user's own model."""

    state_bytes: int
    # peaks, as multiples of the formulas'
    training: float
    evaluation: float


trials: dict[str, Trial] = {}  # of this process, by `trial_key`


def trial_key(config: TrainConfig, num_features: int, num_classes: int) -> str:
    """All that a trial depends on: the model and its code, but not the batch."""
    file = home(config.model.rpartition(":")[0])
    stamp = file.stat().st_mtime_ns if file.is_file() else 0
    names = ("model", "model_args", "hidden_channels", "dropout", "precision")
    values = [getattr(config, name) for name in names]
    shape = (formula_of(config), _depth(config), num_features, num_classes)
    return json.dumps([*values, *shape, stamp])


def _trial(config: TrainConfig, num_features: int, num_classes: int) -> Trial | None:
    """The measured step of the config's model; None for a registered one, and for one without a
    trial."""
    if config.model in MODELS:
        return None
    key = trial_key(config, num_features, num_classes)
    measured = json.loads(os.environ.get(STEP_VARIABLE, "{}"))
    if key not in trials and measured.get("key") == key:
        trials[key] = Trial(**measured["trial"])
    return trials.get(key)


def is_measured(config: TrainConfig, size: GraphSize) -> bool:
    """Whether the step of the config's model is known: by formulas or by a trial."""
    size = hop_size(size, config)
    return config.model in MODELS or _trial(config, size.num_features, size.num_classes) is not None


# From which on a second thread gains: on two cores a step of [3, 2] x 128 x 16 (0.02 GFLOP) ran at
# 551 batches/s with one thread and at 375 with two, which wait for each other in a loop (GraphSAGE
# no longer has a second one there); one of [15, 10, 5] x 1024 x 64 (7 GFLOP) ran at 4.5 and 7.4.
LARGE_FLOPS = 5e8


def fuses(config: TrainConfig, on_gpu: bool = False) -> bool:
    """Whether `training.fused_sage.Layers` train the model, which read float16 features in place; see
    `GNN.fuses`."""
    return config.model in MODELS and formulas_of(config).fused and not on_gpu


def layers_of(
    config: TrainConfig,
    batch: BatchShape,
    num_features: int,
    num_classes: int,
    on_gpu: bool = False,
) -> list[Layer]:
    """The layers of a step, first to last.

    Layer i of L reads the nodes within L - i hops of a seed and writes those within L - i - 1; the
    user's own model computes every layer for all nodes, from an edge list, as `forward(x,
    edge_index)` does.
    """
    is_own = config.model not in MODELS
    depth = _depth(config)
    widths = formulas_of(config).widths(depth, num_features, config.hidden_channels, num_classes)
    layers = []
    for i, (inputs, outputs) in enumerate(widths):
        # propagated features have no hops, and may have more layers than hops
        reach = depth + 1 if is_own else max(1, depth - i)
        layer = Layer(
            sources=sum(batch.hop_nodes[: reach + 1]),
            targets=sum(batch.hop_nodes[:reach]),
            edges=sum(batch.hop_edges[:reach]),
            inputs=inputs,
            outputs=outputs,
            first=i == 0,
            last=i == len(widths) - 1,
            heads=config.heads,
            hops=config.hops,
            half=config.precision != "fp32",
            dropout=config.dropout > 0,
            fused=fuses(config, on_gpu),
            edge_list=is_own,
        )
        layers.append(layer)
    return layers


def step_flops(config: TrainConfig, batch: BatchShape, num_features: int, num_classes: int) -> int:
    """Floating-point operations of the products in one training step."""
    # 4 * T * in * H for a layer's two matrices, as much again twice for the backward pass but for
    # the first input.
    layers = layers_of(config, batch, num_features, num_classes)
    return sum(
        4 * layer.targets * layer.inputs * layer.outputs * (2 if layer.first else 3)
        for layer in layers
    )


def choose_threads(
    config: TrainConfig, batch: BatchShape, num_features: int, num_classes: int, cores: int
) -> int:
    """Threads of torch: those of the config, where "auto" means one for small steps and `cores` for
    large ones."""
    if config.num_threads != "auto":
        return config.num_threads or cores
    return cores if step_flops(config, batch, num_features, num_classes) >= LARGE_FLOPS else 1


def parameter_count(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Number of the model's weights."""
    weights = formulas_of(config).weights
    return sum(
        weights(layer) for layer in layers_of(config, BatchShape((), ()), num_features, num_classes)
    )


def model_state_bytes(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Parameters, gradients and Adam's two moments, float32 (Kingma and Ba 2015): 16 bytes a
    weight."""
    trial = _trial(config, num_features, num_classes)
    if trial is not None:
        return trial.state_bytes
    return 16 * parameter_count(config, num_features, num_classes)


def layer_memory(
    config: TrainConfig,
    batch: BatchShape,
    num_features: int,
    num_classes: int,
    on_gpu: bool = False,
) -> list[LayerMemory]:
    """Bounds for the layers of a step, first to last, see `model.BaseModel.memory`."""
    memory = formulas_of(config).memory
    return [memory(layer) for layer in layers_of(config, batch, num_features, num_classes, on_gpu)]


# Measured in all models, precisions and shapes of the tests (with hooks on tensors that autograd
# saves), this was met within 1 % or up to 25 % too high.
def saved_bytes(
    config: TrainConfig,
    batch: BatchShape,
    num_features: int,
    num_classes: int,
    on_gpu: bool = False,
) -> int:
    """Bytes saved between the two passes over one batch, without the batch's own x and the
    parameters."""
    layers = layer_memory(config, batch, num_features, num_classes, on_gpu)
    if config.activation_checkpointing:  # the layers' inputs, log-probabilities and labels
        return sum(layer.checkpointed for layer in layers) + 8 * batch.hop_nodes[0]
    # Autocast keeps a half-width copy of the weights as well.
    copies = 0
    if config.precision != "fp32":
        copies = 2 * parameter_count(config, num_features, num_classes)
    return sum(layer.saved for layer in layers) + copies


# The CPU allocator's own record (torch 2.13, PyG 2.8) was at most 5 % higher and 25 % lower, in
# steps of more than a few MB; with checkpointing, autocast and dropout together sage took 8 % more.
def activation_bytes(
    config: TrainConfig,
    batch: BatchShape,
    num_features: int,
    num_classes: int,
    training: bool = True,
    on_gpu: bool = False,
) -> int:
    """The peak of one step's computation, without the batch's own x and the gradients of
    weights."""
    # A layer's peak comes on top of the bytes that earlier layers keep. Under activation
    # checkpointing these keep their outputs alone, but a layer is computed again while the gradient
    # of its output is in memory. An evaluation holds a layer and its input.
    peak = 0
    before = 0
    for layer in layer_memory(config, batch, num_features, num_classes, on_gpu):
        again = layer.checkpointed if training and config.activation_checkpointing else 0
        peak = max(peak, before + again + layer.peak)
        if training:
            before += again or layer.saved
        else:
            before = layer.checkpointed
    peak = max(peak, before)
    trial = _trial(config, num_features, num_classes)
    if trial is None:
        return peak
    return int(peak * (trial.training if training else trial.evaluation))
