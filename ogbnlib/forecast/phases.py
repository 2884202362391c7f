"""A run's memory, phase by phase, in named parts, before anything is loaded; and its comparison with a measured run.

Only sizes go in, so a forecast takes well under a second for a data set that is not there yet. The conversion of a data
set to a store is not among the phases: it keeps to any limit by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import TrainConfig
from ..errors import MB, InputError
from ..graph.store import GraphSize, Store
from ..registry import POLICIES
from ..sources.names import check_store, graph_for
from .budget import DISK_BYTES_PER_S, BatchShape, Windows, sweep_s
from .draws import Batches
from .passes import MODEL, Pass
from .sizes import RUNTIME_BYTES, store_bytes, trained_edges
from .step import layers_of, model_state_bytes

_SORT_S_PER_EDGE = 1e-7  # of a stock loader's CSC: 1.0 to 1.8 s for 16 M edges


def margin_bytes(predicted_bytes: int) -> int:
    """The error of a prediction: 8 % or 60 MB, whichever is more."""
    return max(int(0.08 * predicted_bytes), 60 * MB)


@dataclass(frozen=True)
class PhaseForecast:
    """The parts in memory at the highest moment of a phase, and the page cache that it would use, in bytes."""

    name: str
    parts: Mapping[str, int]
    cache_bytes: int = 0  # which the kernel takes back under pressure
    unsure_bytes: int = 0  # batches that were not drawn whole may be larger by these

    @property
    def held_bytes(self) -> int:
        """Anonymous and shared memory, which only the run itself can give back and which a kill goes by."""
        return sum(self.parts.values())


class Ledger:
    """The account of a run into which its loading policy writes phases and parts."""

    def __init__(self, config: TrainConfig, size: GraphSize, limit_bytes: int | None):
        self.config, self.limit_bytes = config, limit_bytes
        self.size = size  # a policy may replace it by the one that it trains on
        self.held = {"runtime": RUNTIME_BYTES}  # bytes of the parts in memory now
        self.phases: list[PhaseForecast] = []
        self.windows: Windows | None = None  # under loading=store
        self.propagation: Any = None  # the `HopPlan`, where features are still to be propagated
        self.least_bytes = 0  # the smallest limit under which the run works at all; 0 for its peak
        self.num_sorts = 0  # CSCs that stock loaders build in the whole run

    @property
    def peak(self) -> PhaseForecast:
        """The phase with the most memory in use."""
        return max(self.phases, key=lambda phase: phase.held_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.held_bytes

    def phase(self, name: str, passing: Mapping[str, int], cache_bytes: int = 0, unsure_bytes: int = 0) -> None:
        """Add a phase that has, at its highest, all parts of `held` and those of `passing`."""
        self.phases.append(PhaseForecast(name, {**self.held, **passing}, cache_bytes, unsure_bytes))

    def pass_phase(self, name: str, one: Pass, idle_loaders: int) -> None:
        """Add the phase of a pass whose batches come from workers, or are made in the process itself."""
        passing = one.step() | one.workers(idle_loaders)
        self.phase(name, passing, unsure_bytes=one.unsure_bytes(passing))

    def hold_model(self) -> None:
        self.held[MODEL] = model_state_bytes(self.config, self.size.num_features, self.size.num_classes)

    def one_pass(self, split: str, training: bool = False) -> Pass:
        return Pass.over(self.config, self.size, split, training)

    def evaluations(self) -> list[tuple[str, list[str]]]:
        """Splits evaluated between epochs, with the train loader in memory ("eval"), and after the last ("final")."""
        config = self.config
        between = config.splits_to_evaluate(config.eval_every) if config.epochs > config.eval_every else []
        return [("eval", between), ("final", config.splits_to_evaluate(config.epochs) if config.epochs else [])]


class Forecast(Ledger):
    """The result of `predict`."""

    batches: Batches  # of training
    gpu: Mapping[str, int]  # the training step by parts; the CUDA context, 0.3 to 0.6 GB, comes on top

    @property
    def batch(self) -> BatchShape:
        """The mean training batch."""
        return self.batches.mean

    @property
    def margin_bytes(self) -> int:
        """The error of the peak: 8 % or 60 MB, or more where batches are not known well."""
        highest = max(phase.held_bytes + phase.unsure_bytes for phase in self.phases)
        return max(margin_bytes(self.least_bytes), highest - self.peak_bytes)

    @property
    def cache_bytes(self) -> int:
        return max(phase.cache_bytes for phase in self.phases)

    @property
    def in_windows(self) -> bool:
        return self.windows is not None and self.windows.window_batches is not None

    @property
    def epoch_s(self) -> float:
        """Seconds of a training epoch on the reference machine: 2 cores and a disk of 1.2 GB/s."""
        config, size, batch = self.config, self.size, self.batch
        # 4 * T * in * H for a layer's two matrices, as much again twice for the backward pass but for the first input.
        hops, work = len(config.num_neighbors), 0.0
        for i, layer in enumerate(layers_of(config, batch, size.num_features, size.num_classes)):
            targets = sum(batch.hop_nodes[: max(1, hops - i)])
            work += 4 * targets * layer.inputs * layer.outputs * (2 if layer.first else 3)
        batches = Pass(config, size, "train", self.batches).num_batches
        # 0.7 ms a batch, 0.3 us a node for sampling and gathering, 44 GFLOP/s in float32 and 73 in half width; measured
        # at [3, 2] x 128 x 16 and [15, 10, 5] x 1024 x 64 and x 256, on one thread and on two.
        rate = (44e9 if config.precision == "fp32" else 73e9) * (config.num_threads or 2) ** 0.8
        train_s = batches * (0.7e-3 + 0.3e-6 * batch.num_nodes + work / rate)
        if self.windows is None or not self.in_windows:
            return train_s
        read_s = self.windows.moved_bytes / DISK_BYTES_PER_S
        # While windows are read, half of a core's training goes on.
        return max(train_s, read_s + train_s / 2) if self.windows.overlapped else train_s + read_s

    @property
    def run_s(self) -> float:
        """Seconds of the whole run, on the machine of `epoch_s`: loading or propagating, epochs and evaluations."""
        config, size = self.config, self.size
        files, seconds = store_bytes(config, size), 0.0
        if config.propagated:
            seconds = 60 * self.propagation.minutes if self.propagation else 0.0
        elif not self.in_windows:
            seconds = sum(files.values()) / DISK_BYTES_PER_S
        seconds += config.epochs * self.epoch_s
        for split, seeds in size.num_seeds.items():
            count = config.num_evaluations(split)
            # A seed costs an evaluation no more than the training. From disk each split is read in a pass of
            # its own, once where a spool keeps it, else every time.
            seconds += count * self.epoch_s * seeds / max(1, size.num_seeds["train"])
            if self.windows is not None and self.in_windows:
                passes = min(1, count) if self.windows.spooling is not None else count
                seconds += passes * sweep_s(files, len(config.num_neighbors))
        return seconds + self.num_sorts * _SORT_S_PER_EDGE * trained_edges(size, config.undirected)


def predict(
    config: TrainConfig,
    size: GraphSize | None = None,
    *,
    memory_limit_bytes: int | None = None,
) -> Forecast:
    """Forecast the memory of a run, phase by phase: load, build, train, eval, final.

    Args:
        size: By default that of `config.dataset`. Batches are drawn from a `Store`; sizes alone give expected ones.
    """
    size = size or graph_for(config)
    check_store(size, config)
    run = Forecast(config, size, memory_limit_bytes)
    POLICIES[config.loading].load().phases(run)
    train = run.one_pass("train", training=True)
    run.batches, run.gpu, run.least_bytes = train.batches, train.on_gpu(), run.least_bytes or run.peak_bytes
    return run


# Forecast and measurement ---------------------------------------------------------------------------------------------


def kind_of(phase: str) -> str:
    """The name of a phase in forecast and timeline: `final valid` -> `eval valid`, `train epoch 3` -> `train`."""
    if phase.startswith("train epoch"):
        return "train"
    return re.sub(r" \(\w+\)$", "", re.sub(r"^final ", "eval ", phase))


def audit(
    config: TrainConfig,
    memory_limit_bytes: int | None,
    measured: Mapping[str, int],
    marked: Mapping[str, int],
    size: GraphSize | None = None,
) -> dict[str, Any]:
    """The entry `forecast` of result.json: predicted and measured, where a phase that a run did not reach has None.

    Args:
        measured: The peak in phases of each name, "" between phases.
        marked: The largest size of each named part.
        size: The data set's, as the run found it; None reads it from its files.
    """
    try:
        graph = graph_for(config)
        if size is None or (isinstance(graph, Store) and graph.size == size):
            size = graph  # whose batches are drawn
    except InputError as error:
        if size is None:
            return {"skipped": str(error)}
    forecast = predict(config, size, memory_limit_bytes=memory_limit_bytes)
    peaks, parts = dict[str, int](), dict[str, int]()
    for name, peak in measured.items():
        peaks[kind_of(name)] = max(peaks.get(kind_of(name), 0), peak)
    highest: dict[str, PhaseForecast] = {}
    for phase in forecast.phases:
        kind = kind_of(phase.name)
        highest[kind] = max(highest.get(kind, phase), phase, key=lambda phase: phase.held_bytes)
        parts |= {name: max(size, parts.get(name, 0)) for name, size in phase.parts.items()}
    return {
        "peak_phase": forecast.peak.name,
        "peak_bytes": {"predicted": forecast.peak_bytes, "measured": max(measured.values(), default=None)},
        "phases": {
            kind: {"predicted": phase.held_bytes, "measured": peaks.get(kind), "parts": dict(phase.parts)}
            for kind, phase in highest.items()
        },
        "parts": {name: {"predicted": parts[name], "measured": most} for name, most in marked.items() if name in parts},
    }
