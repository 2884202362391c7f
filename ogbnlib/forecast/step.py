"""A training step's memory: the model's state and bounds on its activations, from sizes alone.

A step of the user's own model is measured once, on a small random batch in another process, and
scaled.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..environment import CONFIG_VARIABLE, STEP_VARIABLE
from ..errors import InputError
from ..files import home
from ..graph import kernel_cache
from ..graph.store import GraphSize
from ..model import BaseModel, Layer, LayerMemory
from ..registry import MODELS
from .budget import BatchShape
from .sizes import expected_batch, hop_size


def formula_of(config: TrainConfig) -> str:
    """The name of the registered model whose formulas are used: for the user's own one sage or,
    propagated, sign."""
    if config.model in MODELS:
        return config.model
    return "sign" if config.propagated else "sage"


def formulas_of(config: TrainConfig) -> type[BaseModel]:
    """The registered model whose formulas are used."""
    kind: type[BaseModel] = MODELS[formula_of(config)].load()
    return kind


_TRIAL_EDGES = 2**14  # in the random batch, whose step takes a fraction of a second
# Measured steps: "state_bytes", and the peaks in "training" and "evaluation" as multiples of the
# formulas'.
_trials: dict[str, dict[str, Any]] = {}


def _trial_key(config: TrainConfig, num_features: int, num_classes: int) -> str:
    """All that a trial depends on: the model and its code, but not the batch."""
    file = home(config.model.rpartition(":")[0])
    stamp = file.stat().st_mtime_ns if file.is_file() else 0
    names = ("model", "model_args", "hidden_channels", "dropout", "precision", "hops")
    layers = 0 if config.propagated else len(config.num_neighbors)
    return json.dumps(
        [*(getattr(config, name) for name in names), layers, num_features, num_classes, stamp]
    )


def _trial(config: TrainConfig, num_features: int, num_classes: int) -> dict[str, Any] | None:
    """The measured step of the config's model; None for a registered one, and for one without a
    trial."""
    if config.model in MODELS:
        return None
    key = _trial_key(config, num_features, num_classes)
    if (
        key not in _trials
        and (measured := json.loads(os.environ.get(STEP_VARIABLE, "{}"))).get("key") == key
    ):
        _trials[key] = measured["trial"]
    return _trials.get(key)


def is_measured(config: TrainConfig, size: GraphSize) -> bool:
    """Whether the step of the config's model is known: by formulas or by a trial."""
    size = hop_size(size, config) if config.propagated else size
    return config.model in MODELS or _trial(config, size.num_features, size.num_classes) is not None


def try_model(config: TrainConfig, size: GraphSize, run_dir: Path | None = None) -> dict[str, str]:
    """Measure a step of the user's model in another process, for all later forecasts.

    Returns the environment variable that hands the measurement to a trainer. `run_dir` has the
    model's code where a run is resumed. Raises InputError with that process's message, when the
    model can't be found, created or trained.
    """
    batch = BatchShape((_TRIAL_EDGES,), ())
    if config.propagated:
        size = hop_size(size, config)
    else:
        batch = expected_batch(size, config.undirected, config.batch_size, config.num_neighbors)
    channels = size.num_features, size.num_classes
    scale = min(1.0, _TRIAL_EDGES / max(1, batch.num_nodes, batch.num_edges))
    nodes, edges = (
        tuple(max(2, round(scale * n)) for n in counts)
        for counts in (batch.hop_nodes, batch.hop_edges)
    )
    small, key = BatchShape(nodes, edges), _trial_key(config, *channels)
    kernel_cache.folder()  # its place, for the child, whose TMPDIR is another
    with tempfile.TemporaryDirectory() as tmp:
        file, log = Path(tmp, "step.json"), Path(tmp, "stderr")
        argv = [sys.executable, "-m", "ogbnlib.training.child", "--try", *map(str, channels)]
        argv += [json.dumps(asdict(small)), str(file), *([] if run_dir is None else [str(run_dir)])]
        env = {**os.environ, CONFIG_VARIABLE: config.model_dump_json(), "TMPDIR": tmp}
        # Files, not pipes: a process that the model has started may hold a pipe open for ever.
        with open(log, "w") as stderr:
            quiet = subprocess.DEVNULL
            code = subprocess.run(
                argv, env=env, stdin=quiet, stdout=quiet, stderr=stderr
            ).returncode
        if code or not file.is_file():  # without an error the model's code has ended the process
            lines = (
                [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                if code > 0
                else []
            )
            lines = lines or [
                f"its code ended the process with exit code {code}, where it was expected to return"
            ]
            reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            raise InputError(
                reasons[-1] if reasons else f"{config.model}: trying it out failed: {lines[-1]}"
            )
        measured: dict[str, int] = json.loads(file.read_bytes())
    _trials.pop(key, None)
    trial: dict[str, Any] = {"state_bytes": measured["state_bytes"]}
    for name in ("training", "evaluation"):
        trial[name] = measured[f"{name}_bytes"] / max(
            1, activation_bytes(config, small, *channels, name == "training")
        )
    _trials[key] = trial
    return {STEP_VARIABLE: json.dumps({"key": key, "trial": trial})}


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
    own, propagated = config.model not in MODELS, config.propagated
    depth = config.hops if propagated else len(config.num_neighbors)
    widths = formulas_of(config).widths(depth, num_features, config.hidden_channels, num_classes)
    layers = []
    for i, (inputs, outputs) in enumerate(widths):
        reach = 1 if propagated else depth + 1 if own else depth - i
        sizes = (
            sum(batch.hop_nodes[: reach + 1]),
            sum(batch.hop_nodes[:reach]),
            sum(batch.hop_edges[:reach]),
        )
        first, last, half = i == 0, i == len(widths) - 1, config.precision != "fp32"
        numbers = *sizes, inputs, outputs, first, last, config.heads, config.hops
        layers.append(Layer(*numbers, half, config.dropout > 0, fuses(config, on_gpu), own))
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
    if (trial := _trial(config, num_features, num_classes)) is not None:
        return int(trial["state_bytes"])
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
    copies = (
        2 * parameter_count(config, num_features, num_classes) if config.precision != "fp32" else 0
    )
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
    peak = before = 0
    for layer in layer_memory(config, batch, num_features, num_classes, on_gpu):
        again = layer.checkpointed if training and config.activation_checkpointing else 0
        peak = max(peak, before + again + layer.peak)
        before = before + (again or layer.saved) if training else layer.checkpointed
    peak = max(peak, before)
    if (trial := _trial(config, num_features, num_classes)) is not None:
        peak = int(peak * trial["training" if training else "evaluation"])
    return peak
