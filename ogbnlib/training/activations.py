"""The memory of a training step measured without a GPU: what autograd keeps, and all that is alive at once.

Two counts of the same step on the CPU. Hooks on saved tensors (`torch.autograd.graph.saved_tensors_hooks`) see what the
forward pass keeps for the backward pass. The profiler's record of the CPU allocator has every allocation, so its peak
is the counterpart of `torch.cuda.max_memory_allocated` above what was there before the step; a GPU's own kernels may
take other scratch, and its allocator rounds to 512 bytes.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch_geometric.data import Data

from ..config import TrainConfig
from ..errors import InputError
from ..forecast.step import activation_bytes, saved_bytes
from ..memory.recorder import EventLog
from ..sampling.budget import Batch
from ..sampling.policies import compile_kernels, make_loaders, set_epoch
from ..sources.catalog import open_for
from .models import GNN

if TYPE_CHECKING:
    import pandas as pd


MIB = 2**20


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The memory behind a tensor: one storage, or the three of a sparse CSR matrix."""
    if tensor.layout == torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout == torch.sparse_csr:
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    elif tensor.layout == torch.sparse_csc:
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    else:
        raise InputError(f"activations: expected dense or compressed tensors, found {tensor.layout}")
    return [part.untyped_storage() for part in parts]


class _Kept:
    """What autograd holds in place of a saved tensor; its end is the end of the tensor's being kept."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class SavedTensors:
    """Counts the distinct storages that autograd keeps for the backward pass, as a context manager.

    A view keeps its whole storage, and a storage that is kept twice counts once. What was there before, the parameters
    and the batch, is given as `known` and counted apart. Inside `torch.utils.checkpoint` only a layer's inputs are seen
    here, as its own hooks take the rest: that is what is kept between the passes, not what the recomputation makes.

    Attributes:
        bytes: Kept now.
        peak_bytes: The most that was kept at once.
        known_bytes: Bytes of the known storages that were kept, by their names in `known`.
    """

    def __init__(self, known: Mapping[str, Iterable[Tensor]]):
        self._known = {
            storage.data_ptr(): name
            for name, tensors in known.items()
            for tensor in tensors
            for storage in _storages(tensor)
        }
        self._counts: dict[int, int] = {}
        self._seen: set[int] = set()
        self.bytes = self.peak_bytes = 0
        self.known_bytes = dict.fromkeys(known, 0)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor.detach())  # the tensor itself would make a cycle with its graph
        for storage in _storages(tensor):
            key, size = storage.data_ptr(), storage.nbytes()
            if key in self._known:
                if key not in self._seen:
                    self._seen.add(key)
                    self.known_bytes[self._known[key]] += size
                continue
            if size == 0:
                continue
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] == 1:
                self.bytes += size
                self.peak_bytes = max(self.peak_bytes, self.bytes)
            weakref.finalize(kept, self._release, key, size)
        return kept

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
class Sampled:
    """Batches of a data set's first epoch, in memory, and what a model for them must know."""

    batches: tuple[Data, ...]
    num_features: int
    num_classes: int


def sample_batches(config: TrainConfig, count: int) -> Sampled:
    """The first `count` training batches of the first epoch of `config`; fewer where the epoch is shorter.

    Raises:
        InputError: when the data set can't be read.
    """
    compile_kernels(list(config.num_neighbors))
    loaders = make_loaders(open_for(config), config, EventLog(None))
    try:
        loader = loaders.train_loader()
        set_epoch(loader, 1)
        batches = tuple(itertools.islice(loader, count))
        return Sampled(batches, loaders.num_features, loaders.num_classes)
    finally:
        loaders.close()


@dataclass(frozen=True)
class StepMemory:
    """What `measure_step` returns, in bytes but for `seconds`.

    Attributes:
        saved_bytes: The most that autograd kept for the backward pass at once, parameters and the batch's own apart.
        peak_bytes: The most that the step had allocated at once beyond the model, its gradients and the batches.
        parameter_bytes, batch_bytes: Of the parameters and of the batch's own tensors that autograd kept as well.
        predicted_saved_bytes, predicted_peak_bytes: `footprint.saved_bytes` and `activation_bytes` for these batches.
        num_batches: In the step.
        seconds: One more step took, without hooks and profiler.
    """

    saved_bytes: int
    peak_bytes: int
    parameter_bytes: int
    batch_bytes: int
    predicted_saved_bytes: int
    predicted_peak_bytes: int
    num_batches: int
    seconds: float


def _allocator_peak(step: Callable[[], None]) -> int:
    """The highest sum of the CPU allocator's allocations less its frees during `step`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read at the first profile; below it writes two lines to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    results: Any = record.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


def measure_step(config: TrainConfig, sampled: Sampled | None = None) -> StepMemory:
    """Run one optimizer step of `config` on the CPU and say what its activations took.

    The step has `config.accumulate` batches, whose graphs are freed one by one, and the model's precision and
    checkpointing. `precision="fp16"` is measured as "bf16", of the same width, which the CPU computes.

    Args:
        sampled: Batches of the same data set, `batch_size` and `num_neighbors`, to compare options on one sample; by
            default they are drawn.

    Raises:
        InputError: when the data set can't be read.
    """
    sampled = sampled or sample_batches(config, config.accumulate)
    batches = sampled.batches[: config.accumulate]
    torch.manual_seed(config.seed)
    computed = config.replace(precision="bf16") if config.precision == "fp16" else config
    model = GNN.of(computed, sampled.num_features, sampled.num_classes).train()
    inputs = [(batch.x.float(), batch.edge_index, batch.y[: batch.batch_size].long()) for batch in batches]
    seeds = sum(batch.batch_size for batch in batches)

    threads = torch.get_num_threads()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)

    def step() -> None:
        for batch, (x, edge_index, labels) in zip(batches, inputs, strict=True):
            scores = model(x, edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)
            (F.cross_entropy(scores, labels, reduction="sum") / seeds).backward()

    try:
        step()  # makes the gradients, which later steps add to
        with SavedTensors({"parameters": model.parameters(), "batch": itertools.chain(*inputs)}) as saved:
            step()
        peak = _allocator_peak(step)
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
    finally:
        torch.set_num_threads(threads)
    shapes = [Batch(tuple(batch.num_sampled_nodes), tuple(batch.num_sampled_edges)) for batch in batches]
    classes = sampled.num_features, sampled.num_classes
    return StepMemory(
        saved_bytes=saved.peak_bytes,
        peak_bytes=peak,
        parameter_bytes=saved.known_bytes["parameters"],
        batch_bytes=saved.known_bytes["batch"],
        predicted_saved_bytes=max(saved_bytes(config, shape, *classes) for shape in shapes),
        predicted_peak_bytes=max(activation_bytes(config, shape, *classes) for shape in shapes),
        num_batches=len(batches),
        seconds=seconds,
    )


def compare_options(config: TrainConfig, options: Mapping[str, Mapping[str, Any]], *, repeats: int = 1) -> pd.DataFrame:
    """One row per option: activations kept and at their peak in MiB, measured and predicted, and a step's seconds.

    Args:
        config: The run to start from.
        options: Names to changes of it, such as `{"plain": {}, "bf16": {"precision": "bf16"}}`. One with the same seeds
            in a step (`batch_size * accumulate`) can be compared with the next.
        repeats: Of each measurement. Sizes are the same each time; of the times the shortest counts, as others may use
            the machine.

    Raises:
        InputError: for a bad value, or when the data set can't be read.
    """
    import pandas as pd

    rows, drawn = {}, {}
    for name, changes in options.items():
        changed = config.replace(**changes)
        key = changed.batch_size, changed.num_neighbors, changed.accumulate
        if key not in drawn:
            drawn[key] = sample_batches(changed, changed.accumulate)
        steps = [measure_step(changed, drawn[key]) for _ in range(repeats)]
        step = min(steps, key=lambda step: step.seconds)
        rows[name] = {
            "kept MiB": step.saved_bytes / MIB,
            "predicted kept MiB": step.predicted_saved_bytes / MIB,
            "peak MiB": step.peak_bytes / MIB,
            "predicted peak MiB": step.predicted_peak_bytes / MIB,
            "step s": step.seconds,
        }
    return pd.DataFrame.from_dict(rows, orient="index").round(3)
