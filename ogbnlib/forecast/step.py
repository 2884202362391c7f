"""A training step's memory: the model's state and bounds on the activations, from sizes alone.

A step of a model of the user's own is measured once, on a small random batch in another process, and scaled.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import HOP_MODELS, MODELS, TrainConfig
from ..errors import InputError
from ..files import home
from ..graph.store import GraphSize
from ..propagation.plan import hop_size
from ..sampling.budget import BatchShape
from .sizes import expected_batch


def taken_for(config: TrainConfig) -> str:
    """The model of ours whose figures are given: sage for one of the user's own, of the same layers and widths.

    Or sign, where it learns from propagated features.
    """
    return config.model if config.model in MODELS else "sign" if config.loading == "propagated" else "sage"


# A model of the user's own ------------------------------------------------------------------------------------------

_TRIAL_EDGES = 2**14  # of the random batch: a step of it takes a fraction of a second
STEP_VARIABLE = "OGBNLIB_MEASURED_STEP"  # the `Trial` of a run's model, for its trainer


@dataclass(frozen=True)
class Trial:
    """What a model of the user's own takes, measured on a small random batch.

    Attributes:
        state_bytes: Parameters, gradients and Adam's two moments.
        training, evaluation: The peak of a step, as a multiple of `activation_bytes` for the model it is taken for.
    """

    state_bytes: int
    training: float
    evaluation: float


_trials: dict[str, Trial] = {}


def _trial_key(config: TrainConfig, num_features: int, num_classes: int) -> str:
    """What a trial depends on: the model and its code, but not the batch."""
    file = home(config.model.rpartition(":")[0])
    stamp = file.stat().st_mtime_ns if file.is_file() else 0
    names = ("model", "model_args", "hidden_channels", "heads", "dropout", "precision", "hops")
    layers = 0 if config.loading == "propagated" else len(config.num_neighbors)
    return json.dumps([*(getattr(config, name) for name in names), layers, num_features, num_classes, stamp])


def _trial(config: TrainConfig, num_features: int, num_classes: int) -> Trial | None:
    """The measured step of the config's model; None for a model of ours, and for one that was not tried out."""
    if config.model in MODELS:
        return None
    key = _trial_key(config, num_features, num_classes)
    if key not in _trials and (measured := json.loads(os.environ.get(STEP_VARIABLE, "{}"))).get("key") == key:
        _trials[key] = Trial(**measured["trial"])
    return _trials.get(key)


def is_measured(config: TrainConfig, size: GraphSize) -> bool:
    """Whether the step of the config's model is known: it is ours, or was tried out."""
    size = hop_size(size, config) if config.loading == "propagated" else size
    return config.model in MODELS or _trial(config, size.num_features, size.num_classes) is not None


def try_model(config: TrainConfig, size: GraphSize, run_dir: Path | None = None) -> dict[str, str]:
    """Have a process of its own make the user's model, try it and measure a step, for the forecasts from here on.

    The random batch has the proportions of a training batch that is expected from mean degrees.

    Args:
        run_dir: Has the model's code where a run is resumed.

    Returns:
        The environment variable that hands the measurement on to a trainer.

    Raises:
        InputError: in that process's words, where the model can't be found, made or trained.
    """
    whole = config.loading == "propagated"
    size = hop_size(size, config) if whole else size
    sizes, batch = (size.num_features, size.num_classes), BatchShape((_TRIAL_EDGES,), ())
    if not whole:
        batch = expected_batch(size, config.undirected, config.batch_size, config.num_neighbors)
    scale = min(1.0, _TRIAL_EDGES / max(1, batch.num_nodes, batch.num_edges))
    nodes, edges = (tuple(max(2, round(scale * n)) for n in counts) for counts in (batch.hop_nodes, batch.hop_edges))
    small, key = BatchShape(nodes, edges), _trial_key(config, *sizes)
    measured = _measured(config, sizes, small, run_dir)
    _trials.pop(key, None)
    plain = [activation_bytes(config, small, *sizes, training) for training in (True, False)]
    _trials[key] = Trial(
        measured["state_bytes"],
        measured["training_bytes"] / max(1, plain[0]),
        measured["evaluation_bytes"] / max(1, plain[1]),
    )
    return {STEP_VARIABLE: json.dumps({"key": key, "trial": asdict(_trials[key])})}


def _measured(config: TrainConfig, sizes: tuple[int, int], batch: BatchShape, run_dir: Path | None) -> dict[str, int]:
    """What `training.child --try` writes for a batch of these nodes and edges."""
    with tempfile.TemporaryDirectory() as tmp:
        file, words = Path(tmp, "step.json"), Path(tmp, "stderr")
        argv = [sys.executable, "-m", "ogbnlib.training.child", "--try", *map(str, sizes)]
        argv += [json.dumps(asdict(batch)), str(file), *([] if run_dir is None else [str(run_dir)])]
        env = {**os.environ, "OGBNLIB_CONFIG": config.model_dump_json(), "TMPDIR": tmp}
        # Files, not pipes: what the model has started may hold a pipe open for ever.
        with open(words, "w") as stderr:
            quiet = subprocess.DEVNULL
            code = subprocess.run(argv, env=env, stdin=quiet, stdout=quiet, stderr=stderr).returncode
        if code == 0 and file.is_file():  # else its code has ended the process
            measured: dict[str, int] = json.loads(file.read_bytes())
            return measured
        lines = [line for line in words.read_text(errors="replace").splitlines() if line.strip()] if code > 0 else []
        lines = lines or [f"its code ended the process with exit code {code}, where it was expected to return"]
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise InputError(reasons[-1] if reasons else f"{config.model}: trying it out failed: {lines[-1]}")


# From sizes alone ---------------------------------------------------------------------------------------------------


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
    if (trial := _trial(config, num_features, num_classes)) is not None:
        return trial.state_bytes
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
    peak = max(peak, before)
    if (trial := _trial(config, num_features, num_classes)) is not None:
        peak = int(peak * (trial.training if training else trial.evaluation))
    return peak
