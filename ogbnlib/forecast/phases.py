"""A run's memory, phase by phase, in named parts, before anything is loaded; and its comparison
with a measured run.

Only sizes go in, so a forecast takes well under a second for a data set that is not there yet. The
conversion of a data set to a store is not among the phases: it keeps to any limit by itself.
"""

import contextlib
import io
import os
import re
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..config import TrainConfig
from ..errors import MB, InputError
from ..files import block_buffer
from ..graph.store import GraphSize, Store
from ..launcher import job_cores
from ..memory.reading import processor
from ..registry import POLICIES
from ..sources.resolve import check_store, graph_for
from .budget import DISK_BYTES_PER_S, BatchShape, Windows, sweep_s
from .draws import Batches
from .passes import MODEL, Pass
from .sizes import RUNTIME_BYTES, store_bytes, trained_edges
from .step import choose_threads, model_state_bytes, step_flops

# The phase in which a run makes the propagated features, if no store has them yet.
PROPAGATE = "propagate"
_SORT_S_PER_EDGE = 1e-7  # of a stock loader's CSC: 1.0 to 1.8 s for 16 M edges


def margin_bytes(predicted_bytes: int) -> int:
    """The error of a prediction: 8 % or 60 MB, whichever is more."""
    return max(int(0.08 * predicted_bytes), 60 * MB)


@dataclass(frozen=True)
class PhaseForecast:
    """The parts in memory at the highest moment of a phase, and the page cache that it would use,
    in bytes."""

    name: str
    parts: Mapping[str, int]
    cache_bytes: int = 0  # which the kernel takes back under pressure
    unsure_bytes: int = 0  # batches that were not drawn whole may be larger by these

    @property
    def held_bytes(self) -> int:
        """Anonymous and shared memory, which only the run itself can give back and which a kill
        goes by."""
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

    def phase(
        self, name: str, passing: Mapping[str, int], cache_bytes: int = 0, unsure_bytes: int = 0
    ) -> None:
        """Add a phase that has, at its highest, all parts of `held` and those of `passing`."""
        self.phases.append(PhaseForecast(name, {**self.held, **passing}, cache_bytes, unsure_bytes))

    def pass_phase(self, name: str, one: Pass, idle_loaders: int) -> None:
        """Add the phase of a pass whose batches come from workers, or are made in the process
        itself."""
        passing = one.step() | one.workers(idle_loaders)
        self.phase(name, passing, unsure_bytes=one.unsure_bytes(passing))

    def hold_model(self) -> None:
        self.held[MODEL] = model_state_bytes(
            self.config, self.size.num_features, self.size.num_classes
        )

    def one_pass(self, split: str, training: bool = False) -> Pass:
        return Pass.over(self.config, self.size, split, training)

    def evaluations(self) -> list[tuple[str, list[str]]]:
        """Splits evaluated between epochs, with the train loader in memory ("eval"), and after the
        last ("final")."""
        config = self.config
        between = (
            config.splits_to_evaluate(config.eval_every)
            if config.epochs > config.eval_every
            else []
        )
        return [
            ("eval", between),
            ("final", config.splits_to_evaluate(config.epochs) if config.epochs else []),
        ]


_READ_BYTES, _THREADS, _PROBE_S = 8 * 2**20, 3, 0.1  # reads as `graph.disk` makes them


@dataclass(frozen=True)
class Machine:
    """Figures of a machine for the time of a run without a GPU."""

    cores: int
    flops_per_s: float  # of one core, in a float32 product
    disk_bytes_per_s: float
    has_bf16: bool  # whether the processor multiplies bfloat16 itself

    def products_per_s(self, precision: str, threads: int) -> float:
        """Operations per second in the products of a training step."""
        # The second core adds 0.74 of the first: 1.29 and 2.03 batches/s, 1.97 and 2.96 in
        # bfloat16. In bfloat16 a product ran at twice the speed with AVX512_BF16 (167 against 88
        # GFLOP/s), and on AVX2 at a 24th (2.4 and 57).
        factor = 1.0 if precision == "fp32" else 2.0 if self.has_bf16 else 0.04
        return self.flops_per_s * factor * min(threads, self.cores) ** 0.8

    def __str__(self) -> str:
        speed = f"{self.flops_per_s / 1e9:.0f} GFLOP/s a core, disk {self.disk_bytes_per_s / 1e9:.1f} GB/s"
        return f"{self.cores} core{'s' * (self.cores > 1)}, {speed}"


# The two cores and the disk on which the guide's figures were measured.
REFERENCE = Machine(2, 75e9, DISK_BYTES_PER_S, True)


def _product() -> float:
    """Operations per second of one core in a float32 product."""
    # So small a product runs in one thread of OpenBLAS; a larger one counts threads that wait in a
    # loop. 60 GFLOP/s here, where products of the size of a hidden layer reach 57 to 75.
    a, done, begin = np.ones((64, 64), np.float32), 0, time.thread_time()
    out = a @ a
    while (seconds := time.thread_time() - begin) < _PROBE_S:
        np.matmul(a, a, out=out)
        done += 1
    return 2 * 64**3 * done / seconds


def _read(path: Path) -> float:
    """Bytes per second of large reads past the page cache, from places all over a file; 0.0 for a
    small one."""
    pieces = path.stat().st_size // _READ_BYTES
    if pieces < 64:
        return 0.0
    begin = time.perf_counter()

    def part(thread: int) -> int:
        buffer, done = block_buffer(_READ_BYTES), 0
        while time.perf_counter() - begin < _PROBE_S:
            place = (thread + done * _THREADS) * 37 % pieces
            done += os.preadv(file.fileno(), [buffer], place * _READ_BYTES) // _READ_BYTES
        return done

    with (
        io.FileIO(os.open(path, os.O_RDONLY | os.O_DIRECT)) as file,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        done = sum(pool.map(part, range(_THREADS)))
    return done * _READ_BYTES / (time.perf_counter() - begin)


def probe(size: GraphSize) -> Machine:
    """Measure this machine; the disk by a store's features, else the reference machine's is
    taken."""
    disk = 0.0
    with contextlib.suppress(OSError):
        disk = _read(size.file_path("x")) if isinstance(size, Store) else 0.0
    return Machine(
        job_cores(),
        _product(),
        disk or DISK_BYTES_PER_S,
        bool(processor() & {"avx512_bf16", "amx_bf16"}),
    )


class Forecast(Ledger):
    """The result of `predict`."""

    batches: Batches  # of training
    machine: Machine = REFERENCE  # for times
    # the training step by parts; the CUDA context, 0.3 to 0.6 GB, comes on top
    gpu: Mapping[str, int]

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
        """Seconds of a training epoch on `machine`."""
        config, size, batch, machine = self.config, self.size, self.batch, self.machine
        sizes = batch, size.num_features, size.num_classes
        work, threads = step_flops(config, *sizes), choose_threads(config, *sizes, machine.cores)
        batches = Pass(config, size, "train", self.batches).num_batches
        # 0.7 ms a batch, 0.3 us a node for sampling and gathering; measured at [3, 2] x 128 x 16
        # and [15, 10, 5] x 1024 x 64 and x 256, on one thread and on two.
        rate = machine.products_per_s(config.precision, threads)
        train_s = batches * (0.7e-3 + 0.3e-6 * batch.num_nodes + work / rate)
        if self.windows is None or not self.in_windows:
            return train_s
        read_s = self.windows.moved_bytes / machine.disk_bytes_per_s
        # While windows are read, half of a core's training goes on.
        return max(train_s, read_s + train_s / 2) if self.windows.overlapped else train_s + read_s

    @property
    def run_s(self) -> float:
        """Seconds of the whole run on `machine`: loading or propagating, epochs and evaluations."""
        config, size, disk = self.config, self.size, self.machine.disk_bytes_per_s
        files, seconds = store_bytes(config, size), 0.0
        if config.propagated:
            seconds = 60 * self.propagation.minutes if self.propagation else 0.0
        elif not self.in_windows:
            seconds = sum(files.values()) / disk
        seconds += config.epochs * self.epoch_s
        for split, seeds in size.num_seeds.items():
            count = config.num_evaluations(split)
            # A seed costs an evaluation no more than the training. From disk each split is read in
            # a pass of its own, once where a spool keeps it, else every time.
            seconds += count * self.epoch_s * seeds / max(1, size.num_seeds["train"])
            if self.windows is not None and self.in_windows:
                passes = min(1, count) if self.windows.spooling is not None else count
                seconds += passes * sweep_s(files, len(config.num_neighbors), disk)
        return seconds + self.num_sorts * _SORT_S_PER_EDGE * trained_edges(size, config.undirected)


def predict(
    config: TrainConfig,
    size: GraphSize | None = None,
    *,
    memory_limit_bytes: int | None = None,
    machine: Machine = REFERENCE,
) -> Forecast:
    """Forecast the memory of a run, phase by phase: load, build, train, eval, final.

    `size` is by default that of `config.dataset`. Batches are drawn from a `Store`; sizes alone
    give expected ones.
    """
    size = size or graph_for(config)
    check_store(size, config)
    run = Forecast(config, size, memory_limit_bytes)
    run.machine = machine
    POLICIES[config.loading].load().phases(run)
    train = run.one_pass("train", training=True)
    run.batches, run.gpu, run.least_bytes = (
        train.batches,
        train.on_gpu(),
        run.least_bytes or run.peak_bytes,
    )
    return run


def kind_of(phase: str) -> str:
    """The name of a phase in forecast and timeline: `final valid` -> `eval valid`, `train epoch 3`
    -> `train`."""
    if phase.startswith("train epoch"):
        return "train"
    return re.sub(r" \(\w+\)$", "", re.sub(r"^final ", "eval ", phase))


def graph_of_run(
    config: TrainConfig, event: Mapping[str, Any] | None, phases: Collection[str]
) -> GraphSize:
    """The graph of a run: its store, if that still has the size in the run's event `dataset`, else
    that size.

    Raises `InputError` or `OSError` where neither is known. After the phase `propagate` of a run,
    it is the graph that was propagated over.
    """
    size = None
    if event is not None:
        size = GraphSize(**{item.name: event[item.name] for item in fields(GraphSize)})
    try:
        graph = graph_for(config)
    except (InputError, OSError):
        if size is None:
            raise
        return size
    if PROPAGATE in phases:
        return graph.size if isinstance(graph, Store) else graph
    if size is None or (isinstance(graph, Store) and graph.size == size):
        return graph  # whose batches are drawn
    return size


def audit(
    config: TrainConfig,
    memory_limit_bytes: int | None,
    measured: Mapping[str, int],
    marked: Mapping[str, int],
    event: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The entry `forecast` of result.json: predicted and measured, where a phase that a run did not
    reach has None.

    `measured` has the peak in phases of each name, "" between phases, and `marked` the largest size
    of each named part; `event` is the run's `dataset`, None reads the size from its files.
    """
    try:
        size = graph_of_run(config, event, measured)
    except (InputError, OSError) as error:
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
        "peak_bytes": {
            "predicted": forecast.peak_bytes,
            "measured": max(measured.values(), default=None),
        },
        "phases": {
            kind: {
                "predicted": phase.held_bytes,
                "measured": peaks.get(kind),
                "parts": dict(phase.parts),
            }
            for kind, phase in highest.items()
        },
        "parts": {
            name: {"predicted": parts[name], "measured": most}
            for name, most in marked.items()
            if name in parts
        },
    }
