"""What autograd keeps, and all that a step has alive, stay below the forecast.

Hooks on saved tensors see what the forward pass keeps for the backward pass; the profiler's record
of the CPU allocator is the counterpart of `torch.cuda.max_memory_allocated`.
"""

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from all_models import SAMPLED
from conftest import MB
from torch import Tensor

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.batches import BatchShape
from ogbnlib.forecast.step_memory import Step
from ogbnlib.memory.reading import release_memory
from ogbnlib.memory.recorder import EventLog
from ogbnlib.registry import MODELS
from ogbnlib.sampling.policies import set_epoch
from ogbnlib.sources.resolve import find_store
from ogbnlib.training.learner import allocations, loss_and_gradient, peak_of
from ogbnlib.training.network import GNN
from ogbnlib.windows.window import compile_kernels

# saved and peak bytes, and the share of each that is forecast
Ratios = tuple[int, int, float, float]
Measure = Callable[..., Ratios]
WIDE = {"num_neighbors": [15, 10, 5], "batch_size": 128, "hidden_channels": 64, "device": "cpu"}


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The memory behind a tensor: one storage, or the three of a compressed sparse matrix."""
    if tensor.layout == torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout == torch.sparse_csr:
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    else:
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return [part.untyped_storage() for part in parts]


class Held:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()  # the tensor itself would make a cycle with its graph


def saved_peak(step: Callable[[], object], known: Iterable[Tensor]) -> int:
    """The most bytes of distinct storages that autograd keeps, without `known` ones."""
    ours = {storage.data_ptr() for tensor in known for storage in storages(tensor)}
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    peak = 0

    def pack(tensor: Tensor) -> Held:
        nonlocal peak
        held = Held(tensor)
        for key in [(storage.data_ptr(), storage.nbytes()) for storage in storages(tensor)]:
            if key[0] not in ours:
                counts[key] += 1
                weakref.finalize(held, counts.subtract, [key])
        peak = max(peak, sum(size for (_, size), count in counts.items() if count))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        step()
    return peak


def fused_kept(model: GNN, batch: Any) -> set[Tensor]:
    """What the fused layers keep for their backward pass, and the log-probabilities."""
    layers = model._fused(batch.x, batch.edge_index, batch.num_sampled_nodes)
    with torch.no_grad():
        out, kept = layers.forward("input" if model.checkpointing else "all")
    return {out, *(part for layer in kept for part in layer[:2] if part is not None)} - {batch.x}


def saved_bytes(step: Step) -> int:
    """Bytes that by the formulas are kept for the backward pass, without x and the parameters."""
    model = MODELS[step.config.model].load()
    layers = [model.memory(layer) for layer in step.layers]
    if step.config.activation_checkpointing:  # the layers' inputs, log-probabilities and labels
        return sum(layer.checkpointed for layer in layers) + 8 * step.batch.hop_nodes[0]
    # Autocast keeps a half-width copy of the weights as well.
    half = step.config.precision != "fp32"
    copies = 2 * half * sum(map(model.weights, step.layers))
    return sum(layer.saved for layer in layers) + copies


@pytest.fixture(scope="module")
def measure(synth_dir: Path) -> Iterator[Measure]:
    """Measures one optimizer step on `accumulate` batches whose graphs are freed one by one."""
    # the batches of a step, by their sizes
    drawn: dict[Any, tuple[list[Any], tuple[int, int]]] = {}

    def measured(**changes: Any) -> Ratios:
        config = TrainConfig.create({"dataset": str(synth_dir), **WIDE, **changes})
        drawing = config.num_neighbors, config.batch_size, config.accumulate
        if drawing not in drawn:
            compile_kernels(list(config.num_neighbors))
            with contextlib.closing(
                config.policy.load()(find_store(config.dataset), config, EventLog(None))
            ) as loaders:
                loader = loaders.train_loader()
                set_epoch(loader, 1)
                batches = [*itertools.islice(loader, config.accumulate)]
                drawn[drawing] = batches, (loaders.num_features, loaders.num_classes)
        batches, classes = drawn[drawing]
        torch.manual_seed(config.seed)
        model = GNN(config, *classes).train()
        inputs = [
            (one.x.float(), one.edge_index, one.y[: one.batch_size].long()) for one in batches
        ]

        def step() -> None:
            for batch, (x, edge_index, labels) in zip(batches, inputs, strict=True):
                if model.fuses(batch.x):
                    model.add_gradients(batch, partial(loss_and_gradient, labels=labels, scale=1.0))
                    continue
                scores = model(x, edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)
                F.cross_entropy(scores, labels, reduction="sum").backward()

        step()  # makes the gradients, which later steps add to
        saved = saved_peak(step, itertools.chain(model.parameters(), *inputs))
        peak = peak_of(allocations(step))
        if model.fuses(batches[0].x):  # without autograd
            saved = sum(kept.nbytes for kept in fused_kept(model, batches[0]))
        sizes = [(tuple(one.num_sampled_nodes), tuple(one.num_sampled_edges)) for one in batches]
        steps = [Step(config, BatchShape(*size), *classes) for size in sizes]
        forecast_saved = max(map(saved_bytes, steps))
        forecast_peak = max(step.activation_bytes for step in steps)
        return saved, peak, forecast_saved / saved, forecast_peak / peak

    yield measured
    # what malloc keeps of these steps, 1 GB, would stand in the figures of the tests that follow
    release_memory()


@pytest.mark.parametrize("model", SAMPLED)
@pytest.mark.parametrize(
    ("dropout", "precision", "checkpointing"),
    [(0.0, "fp32", False), (0.5, "bf16", False), (0.5, "bf16", True)],
)
def test_a_step_takes_no_more_than_is_forecast_and_not_much_less(
    measure: Measure, model: str, dropout: float, precision: str, checkpointing: bool
) -> None:
    kind = {"model": model, "dropout": dropout, "activation_checkpointing": checkpointing}
    _, _, saved, peak = measure(precision=precision, **kind)
    assert 0.995 <= saved <= 1.25
    # Without AVX-512 a bfloat16 product makes no copies of its own: a checkpointed step is 1.2506
    # times forecast.
    assert 0.97 <= peak <= (1.26 if precision == "bf16" else 1.25)


@pytest.mark.parametrize(
    ("model", "hidden"), [(name, 256 if name == "sage" else 16) for name in SAMPLED]
)
def test_the_bounds_hold_at_other_sizes(measure: Measure, model: str, hidden: int) -> None:
    sizes = {"model": model, "hidden_channels": hidden}
    for fan_out in ([5], [4, 3, 2, 2]):
        _, peak_bytes, saved, peak = measure(num_neighbors=fan_out, **sizes)
        assert 0.995 <= saved <= 1.25
        assert peak_bytes - MB <= peak * peak_bytes <= 1.25 * peak_bytes + MB


def test_an_accumulated_step_keeps_one_batchs_activations_at_a_time(measure: Measure) -> None:
    whole, alone = measure(), measure(batch_size=16)
    parts = measure(batch_size=16, accumulate=4)
    assert alone[0] <= parts[0] < 1.2 * alone[0] < whole[0]
    assert 0.995 <= parts[2] <= 1.25
