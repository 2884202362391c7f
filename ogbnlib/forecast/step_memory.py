"""A training step's memory: the model's state and bounds on its activations, from sizes alone.

For the user's own model, steps on two small random batches are measured in another process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..environment import CONFIG_VARIABLE, STEP_VARIABLE
from ..errors import MB, InputError
from ..files import home
from ..graph.store import GraphSize
from ..memory.malloc import trainer_environment
from ..model import BaseModel, Layer
from ..registry import MODELS
from .batches import BatchShape
from .machine import Machine
from .memory_parts import expected_batch, hop_size


def _formulas_of(config: TrainConfig) -> type[BaseModel]:
    # The model class with the formulas for memory and operations: for the user's own model that of
    # "sage", or of "sign" on propagated features.
    return MODELS[config.model if config.model in MODELS else config.policy.formula].load()


@dataclass(frozen=True)
class _Trial:
    """Measured steps of the user's own model. A peak has two numbers: bytes that do not depend on
    the batch, and bytes for each of its nodes and edges."""

    num_neighbors: tuple[int, ...]  # of the measured batches
    state_bytes: int  # weights, buffers, gradients and the optimizer's moments
    training: tuple[float, float]  # fixed bytes, and bytes per node or edge
    evaluation: tuple[float, float]
    flops_per_row: float  # time for a node or edge, as matrix-product operations that take as long


_trials: dict[str, _Trial] = {}  # of this process, by `_trial_key`
# Parameters that change a step of a model, in addition to its batch.
_OF_STEP = {"model", "model_args", "hidden_channels", "dropout", "precision"}


def _trial_key(config: TrainConfig, num_features: int, num_classes: int) -> str:
    # A text that differs if steps differ: by parameters, sizes, or an edit of the model's file.
    file = home(config.model.rpartition(":")[0])  # of "my_model.py:Net"
    stamp = file.stat().st_mtime_ns if file.is_file() else 0
    values = config.model_dump(mode="json", include=_OF_STEP)
    # accumulated gradients stay in memory from the second batch on
    depth = config.policy.formula, config.depth, min(2, config.accumulate)
    return json.dumps([values, depth, num_features, num_classes, stamp])


def _trial(config: TrainConfig, num_features: int, num_classes: int) -> _Trial | None:
    # The trial of the user's own model, from this process or its parent; None if there is none.
    if config.model in MODELS:
        return None
    key = _trial_key(config, num_features, num_classes)
    measured = json.loads(os.environ.get(STEP_VARIABLE, "{}"))  # set by the parent
    if key not in _trials and measured.get("key") == key:
        _trials[key] = _Trial(**measured["trial"])
    return _trials.get(key)


def is_measured(config: TrainConfig, size: GraphSize) -> bool:
    """Whether the step of the config's model is known: by formulas or by a trial."""
    size = hop_size(size, config)  # the width of propagated features, if it trains on them
    trial = _trial(config, size.num_features, size.num_classes)
    if trial is None:
        return config.model in MODELS
    # a trial with other fan-outs has other shares of nodes and edges
    return [*trial.num_neighbors] == [*config.num_neighbors]  # a list if it comes from JSON


# Steps of at least this many operations gain from a second thread. On two cores a step of
# [3, 2] x 128 x 16 (num_neighbors, batch_size, hidden_channels; 0.02 GFLOP) ran at 551 batches/s
# with one thread, and at 375 with two. [15, 10, 5] x 1024 x 64 (7 GFLOP) ran at 4.5 and 7.4.
LARGE_FLOPS = 5e8
# Memory of a step that the allocator does not record: BLAS buffers, gaps in the heap. Small steps of
# Frozen and List of tests/benchmarks/bench_planner.py took 25 to 50 MB more than it.
_OUTSIDE_BYTES = 32 * MB
# Operations of a float32 product that take as long as writing a byte: one Zen 4 core copied rows of
# 256 bytes at 13 GB/s, and reached 57 GFLOP/s in the products of a step.
_FLOPS_PER_BYTE = 4.4


@dataclass(frozen=True)
class Step:
    """The computation on a batch, to train or to evaluate."""

    config: TrainConfig
    batch: BatchShape
    num_features: int
    num_classes: int
    training: bool = True
    on_gpu: bool = False

    @property
    def fuses(self) -> bool:
        """Whether `training.fused_sage`, which reads float16 features in place, trains it."""
        is_own = self.config.model not in MODELS
        return _formulas_of(self.config).fused and not is_own and not self.on_gpu

    @property
    def layers(self) -> list[Layer]:
        """Layers: i of L reads nodes within L - i hops of a seed, writes those within L - i - 1.
        The user's own model computes every layer for all nodes, from an edge list."""
        config = self.config
        batch = self.batch
        is_own = config.model not in MODELS
        depth = config.depth
        sizes = depth, self.num_features, config.hidden_channels, self.num_classes
        widths = _formulas_of(config).widths(*sizes)  # (inputs, outputs) of each layer
        layers = []
        for i, (inputs, outputs) in enumerate(widths):
            # Hops whose nodes the layer writes. Batches of propagated features have none, and their
            # models may have more layers: at least the seeds.
            reach = depth + 1 if is_own else max(1, depth - i)
            layers.append(
                Layer(
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
                    fused=self.fuses,
                    edge_list=is_own,
                )
            )
        return layers

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products."""
        # The backward pass takes twice as many as the forward pass, for gradients of inputs and of
        # weights; in the first layer as many, as x needs no gradient.
        model = _formulas_of(self.config)
        flops = 0
        for layer in self.layers:
            rows = layer.sources if model.transforms_sources else layer.targets
            forward = 2 * rows * model.weights(layer)  # a multiplication and an addition each
            backward = forward if layer.first else 2 * forward
            flops += forward + backward * self.training
        return flops

    def seconds(self, machine: Machine, threads: int) -> float:
        """Seconds of the computation on a machine.

        A registered model's step has matrix products, and writes each array of its layers and edges
        once. The user's own model takes the time of a measured step for each node and edge.
        """
        rate = machine.products_per_s(self.config.precision, threads)  # operations per second
        share = 1 if self.training else 1 / 3  # the backward pass takes twice as long
        trial = _trial(self.config, self.num_features, self.num_classes)
        if trial is not None:
            return share * trial.flops_per_row * self.batch.num_rows / rate
        model = _formulas_of(self.config)
        num_bytes = sum(model.memory(each).peak + model.edge_bytes(each) for each in self.layers)
        others_s = _FLOPS_PER_BYTE * num_bytes / machine.products_per_s("fp32", threads)
        return self.flops / rate + share * others_s

    def threads(self, cores: int) -> int:
        """Number of torch threads; "auto" is one for small steps and `cores` for large ones."""
        if self.config.num_threads != "auto":
            return self.config.num_threads or cores  # None: torch's own choice, about all cores
        return cores if self.flops >= LARGE_FLOPS else 1

    # The CPU allocator's own record (torch 2.13, PyG 2.8) was at most 5 % above and 25 % below
    # this, in steps of more than a few MB; sage took 8 % more with checkpointing, autocast and
    # dropout together.
    @property
    def activation_bytes(self) -> int:
        """Peak bytes, without the batch's own x and the gradients of weights."""
        trial = _trial(self.config, self.num_features, self.num_classes)
        if trial is not None:
            fixed_bytes, row_bytes = trial.training if self.training else trial.evaluation
            return _OUTSIDE_BYTES + max(0, int(fixed_bytes + row_bytes * self.batch.num_rows))
        # A layer's peak comes on top of the bytes that earlier layers keep. With activation
        # checkpointing, they keep only their outputs and sparse matrices, but a layer is computed
        # again while the gradient of its output, as large, is in memory. An evaluation has only a layer and
        # its input in memory.
        peak = 0
        saved = 0  # bytes of earlier layers
        is_checkpointed = self.training and self.config.activation_checkpointing
        for layer in map(_formulas_of(self.config).memory, self.layers):
            checkpoint = layer.checkpointed if is_checkpointed else 0  # kept, and the gradient
            peak = max(peak, saved + checkpoint + layer.peak)
            if self.training:
                saved += checkpoint or layer.saved
            else:
                saved = layer.checkpointed  # the output, the next layer's input
        return peak  # no layer keeps more than its peak


def model_state_bytes(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Weights, gradients and Adam's two moments (Kingma and Ba 2015), float32: 16 bytes a weight."""
    trial = _trial(config, num_features, num_classes)
    if trial is not None:
        return trial.state_bytes
    layers = Step(config, BatchShape((), ()), num_features, num_classes).layers  # no batch
    return 16 * sum(map(_formulas_of(config).weights, layers))


# The trial of the user's own model.

# Most bytes of a random batch's step by the formulas, and most edges or nodes of the batches for
# memory: they take a fraction of a second, the batch for time a few seconds.
_TRIAL_BYTES = 64 * MB
_TIMED_BYTES = 256 * MB
_TRIAL_EDGES = 2**14
_SMALLER = 0.4  # a second batch for memory, as a share of the first
# Fewest nodes and edges whose time stands out from the clock's noise. The timed batch is as large as
# the run's where `_TIMED_BYTES` allow it, as large ones outgrow caches: EdgeConv with 64 channels
# took 6.2, 8.2, 11.2 and 14.5 us for a node or edge of batches of 11, 45, 182 and 728 thousand.
_LEAST_TIMED = 2**12


def try_model(config: TrainConfig, size: GraphSize, run_dir: Path | None = None) -> dict[str, str]:
    """Measure a step of the user's model in another process, for all later forecasts.

    Returns the environment variable that hands it to a trainer. `run_dir` has the model's code if a
    run is resumed. Raises `InputError` if the model can't be found, created or trained.
    """
    size = hop_size(size, config)
    key = _trial_key(config, size.num_features, size.num_classes)
    measured = _measure(config, size, run_dir)
    _trials[key] = _Trial(config.num_neighbors, **measured)
    return {STEP_VARIABLE: json.dumps({"key": key, "trial": asdict(_trials[key])})}


def _trial_shapes(config: TrainConfig, size: GraphSize) -> list[dict[str, list[int]]]:
    """Batches in the run's proportions: a smaller and a larger one for memory, one for time."""
    shape = size, config.undirected, config.batch_size, config.fan_out(training=True)
    batch = expected_batch(*shape, even=True)
    # by formulas, or by an earlier trial with other fan-outs
    step_bytes = Step(config, batch, size.num_features, size.num_classes).activation_bytes
    # batches as shares of the run's, which may be above 1
    by_rows = _TRIAL_EDGES / max(batch.num_nodes, batch.num_edges)
    large = min(by_rows, _TRIAL_BYTES / step_bytes)
    timed = min(max(1.0, _LEAST_TIMED / batch.num_rows), _TIMED_BYTES / step_bytes)
    # arguments of `training.call.random_batch`; at least 2, as batch norm refuses a single row
    hops = {"hop_nodes": batch.hop_nodes, "hop_edges": batch.hop_edges}
    return [
        {name: [max(2, round(share * count)) for count in hops[name]] for name in hops}
        for share in (_SMALLER * large, large, timed)
    ]


def _measure(config: TrainConfig, size: GraphSize, run_dir: Path | None) -> dict[str, Any]:
    """Run `training.child.try_model` in another process, and return the fields of a `_Trial`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.json")
        log = Path(folder, "stderr")
        argv = [
            *(sys.executable, "-m", "ogbnlib.training.child", "--try"),
            *(str(size.num_features), str(size.num_classes)),
            *(json.dumps(_trial_shapes(config, size)), str(file), str(run_dir or "")),
        ]
        env = {
            **os.environ,
            # else malloc asks the kernel for the same pages in each step: Attention of
            # tests/benchmarks/bench_planner.py took 2 to 3 times as long
            **trainer_environment(os.environ),
            CONFIG_VARIABLE: config.model_dump_json(),
            "TMPDIR": folder,  # so that the model's temporary files are deleted, too
        }
        # Files, not pipes: a process that the model has started may hold a pipe open for ever.
        nothing = subprocess.DEVNULL
        with open(log, "w") as stderr:
            done = subprocess.run(argv, env=env, stdin=nothing, stdout=nothing, stderr=stderr)
        if done.returncode == 0:
            return json.loads(file.read_bytes())
        output = log.read_text(errors="replace").strip()
        problem = f"{config.model}: trying it out ended with exit code {done.returncode}:\n{output}"
        errors = re.findall(r"^error: (.*)", output, re.MULTILINE)  # an `InputError` of the child
        raise InputError(errors[-1] if errors else problem)
