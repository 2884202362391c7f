"""Promises of `forecast.step`: what autograd keeps, and all that a step has alive, stay below the forecast.

Two counts of the same step on the CPU: hooks on saved tensors see what the forward pass keeps for the backward pass;
the profiler's record of the CPU allocator is the counterpart of `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import MB
from torch import Tensor
from torch_geometric.data import Data

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.budget import BatchShape
from ogbnlib.forecast.phases import predict
from ogbnlib.forecast.planner import step_table
from ogbnlib.forecast.step import activation_bytes, saved_bytes
from ogbnlib.memory.reading import release_memory
from ogbnlib.memory.recorder import EventLog
from ogbnlib.sampling.policies import make_loaders, set_epoch
from ogbnlib.sampling.window import compile_kernels
from ogbnlib.sources.catalog import open_for
from ogbnlib.training.models import GNN
from ogbnlib.training.step import allocator_peak

Config = Callable[..., TrainConfig]
WIDE = {"num_neighbors": [15, 10, 5], "batch_size": 128, "hidden_channels": 64, "device": "cpu", "progress": "none"}


# Measuring ------------------------------------------------------------------------------------------------------------


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
    """What autograd holds in place of a saved tensor; its end is the end of the tensor's being kept."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class SavedTensors:
    """Counts the distinct storages that autograd keeps for the backward pass, as a context manager.

    A view keeps its whole storage, and a storage that is kept twice counts once. `known` storages, the parameters and
    the batch, do not count. Inside `torch.utils.checkpoint` only a layer's inputs are seen.
    """

    def __init__(self, known: Iterable[Tensor]):
        self._known = {storage.data_ptr() for tensor in known for storage in storages(tensor)}
        self._counts: dict[int, int] = {}
        self.bytes = self.peak_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> Held:
        held = Held(tensor.detach())  # the tensor itself would make a cycle with its graph
        for storage in storages(tensor):
            key, size = storage.data_ptr(), storage.nbytes()
            if key in self._known or size == 0:
                continue
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] == 1:
                self.bytes += size
                self.peak_bytes = max(self.peak_bytes, self.bytes)
            weakref.finalize(held, self._release, key, size)
        return held

    def _release(self, key: int, size: int) -> None:
        self._counts[key] -= 1
        if self._counts[key] == 0:
            del self._counts[key]
            self.bytes -= size

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


@dataclass(frozen=True)
class Drawn:
    """Batches of a data set's first epoch, in memory, and what a model for them must know."""

    batches: tuple[Data, ...]
    classes: tuple[int, int]


def draw(config: TrainConfig) -> Drawn:
    """The batches of the first optimizer step of `config`."""
    compile_kernels(list(config.num_neighbors))
    loaders = make_loaders(open_for(config), config, EventLog(None))
    try:
        loader = loaders.train_loader()
        set_epoch(loader, 1)
        batches = tuple(itertools.islice(loader, config.accumulate))
        return Drawn(batches, (loaders.num_features, loaders.num_classes))
    finally:
        loaders.close()


@dataclass(frozen=True)
class StepMemory:
    """Beyond the model, its gradients and the batches: what autograd kept at the most, and all there was at once."""

    saved_bytes: int
    peak_bytes: int
    predicted_saved_bytes: int
    predicted_peak_bytes: int


def measure(config: TrainConfig, drawn: Drawn | None = None) -> StepMemory:
    """One optimizer step of `config` on the CPU, on `accumulate` batches whose graphs are freed one by one."""
    drawn = drawn or draw(config)
    torch.manual_seed(config.seed)
    model = GNN(config, *drawn.classes).train()
    inputs = [(batch.x.float(), batch.edge_index, batch.y[: batch.batch_size].long()) for batch in drawn.batches]

    def step() -> None:
        for batch, (x, edge_index, labels) in zip(drawn.batches, inputs, strict=True):
            scores = model(x, edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)
            F.cross_entropy(scores, labels, reduction="sum").backward()

    step()  # makes the gradients, which later steps add to
    with SavedTensors(itertools.chain(model.parameters(), *inputs)) as saved:
        step()
    shapes = [BatchShape(tuple(batch.num_sampled_nodes), tuple(batch.num_sampled_edges)) for batch in drawn.batches]
    return StepMemory(
        saved.peak_bytes,
        allocator_peak(step),
        max(saved_bytes(config, shape, *drawn.classes) for shape in shapes),
        max(activation_bytes(config, shape, *drawn.classes) for shape in shapes),
    )


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """What malloc keeps of these steps, 1 GB, would stand in the figures of the tests that follow."""
    yield
    release_memory()


@pytest.fixture(scope="module")
def wide(synth_dir: Path) -> Config:
    def make(**changes: Any) -> TrainConfig:
        return TrainConfig.create({"dataset": str(synth_dir), **WIDE, **changes})

    return make


@pytest.fixture(scope="module")
def drawn(wide: Config) -> Drawn:
    return draw(wide())


# What is foretold -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
@pytest.mark.parametrize(
    ("dropout", "precision", "checkpointing"), [(0.0, "fp32", False), (0.5, "bf16", False), (0.5, "bf16", True)]
)
def test_a_step_takes_no_more_than_is_foretold_and_not_much_less(
    wide: Config, drawn: Drawn, model: str, dropout: float, precision: str, checkpointing: bool
) -> None:
    changes = {"model": model, "dropout": dropout, "precision": precision, "activation_checkpointing": checkpointing}
    step = measure(wide(**changes), drawn)
    assert 0.995 <= step.predicted_saved_bytes / step.saved_bytes <= 1.25
    # Without AVX-512 a bfloat16 product makes no copies of its own: a checkpointed step is 1.2506 times forecast.
    most = 1.26 if precision == "bf16" and torch.backends.cpu.get_cpu_capability() != "AVX512" else 1.25
    assert 0.97 <= step.predicted_peak_bytes / step.peak_bytes <= most


@pytest.mark.parametrize(("model", "hidden"), [("sage", 256), ("gcn", 16), ("gat", 16)])
def test_the_bounds_hold_for_other_widths_and_depths(wide: Config, model: str, hidden: int) -> None:
    for fan_out in ([5], [4, 3, 2, 2]):
        step = measure(wide(model=model, hidden_channels=hidden, num_neighbors=fan_out))
        assert 0.995 <= step.predicted_saved_bytes / step.saved_bytes <= 1.25
        assert step.peak_bytes - MB <= step.predicted_peak_bytes <= 1.25 * step.peak_bytes + MB


def test_an_accumulated_step_keeps_one_batchs_activations_at_a_time(wide: Config, drawn: Drawn) -> None:
    whole, parts = measure(wide(), drawn), measure(wide(batch_size=16, accumulate=4))
    alone = measure(wide(batch_size=16)).saved_bytes
    assert alone <= parts.saved_bytes < 1.2 * alone < whole.saved_bytes
    assert 0.995 <= parts.predicted_saved_bytes / parts.saved_bytes <= 1.25


def test_the_table_of_options_follows_them(wide: Config) -> None:
    options: Mapping[str, Mapping[str, Any]] = {
        "plain": {},
        "bf16": {"precision": "bf16"},
        "checkpointed": {"activation_checkpointing": True},
        "accumulated": {"batch_size": 16, "accumulate": 4},
        "both": {"precision": "bf16", "activation_checkpointing": True},
    }
    config = wide(hidden_channels=256)
    table = step_table(config, options)
    kept = table["kept MB"]
    assert (kept.drop("plain") < 0.8 * kept["plain"]).all()
    assert kept["both"] < kept["bf16"]
    assert table.loc["accumulated", "peak MB"] < 0.5 * table.loc["plain", "peak MB"]
    for name, changes in options.items():
        gpu = predict(config.replace(**changes)).gpu
        assert table.loc[name, "peak MB"] == pytest.approx(gpu["activations"] / MB, abs=0.1)
        assert table.loc[name, "GPU step MB"] == pytest.approx(sum(gpu.values()) / MB, abs=0.1)
    assert list(table.index) == list(options)
