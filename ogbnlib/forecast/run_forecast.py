"""A forecast of a run's memory, phase by phase in named parts, and of its time, from sizes alone.

The conversion of a data set to a store is not among the phases, as it keeps to any limit by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import TrainConfig
from ..errors import MB, format_bytes
from ..graph.store import GraphSize
from ..progress import seconds
from ..registry import POLICIES
from ..sources.resolve import check_trainable, size_of
from .machine import REFERENCE, Machine
from .memory_parts import RUNTIME_BYTES, store_bytes, trained_edges
from .pass_memory import MODEL, Pass, Windows
from .step_memory import model_state_bytes

# The phase in which a run makes the propagated features, if no store has them yet.
PROPAGATE = "propagate"
# Share of the disk's rate that a pass over a store reaches: 0.7 to 0.8 at full size, for
# [3, 2] x 128 and [15, 10] x 512.
_PASS_SHARE = 0.8
# Time of a pass for a spool (windows kept on disk), in addition to its reads: 10 s for 1,179
# batches of [15, 10, 5] x 1024 and 1.3 s for 18,824 of [3, 2] x 128 (num_neighbors x batch_size),
# on two cores.
_SAMPLING_S_PER_NODE = 5e-8
_SORT_S_PER_EDGE = 1e-7  # to build a stock loader's CSC: 1.0 to 1.8 s for 16 M edges


def margin_bytes(predicted_bytes: int) -> int:
    """The error of a prediction: 8 % or 60 MB, whichever is more."""
    return max(int(0.08 * predicted_bytes), 60 * MB)


@dataclass(frozen=True)
class PhaseForecast:
    """The parts in memory at the peak of a phase, in bytes."""

    name: str
    parts: Mapping[str, int]
    unsure_bytes: int = 0  # by which batches that were not drawn whole may be larger

    @property
    def held_bytes(self) -> int:
        """Anonymous and shared memory, on which an out-of-memory kill depends."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class HopPlan:
    """Numbers of columns to propagate at a time, and their costs."""

    widths: list[int]  # columns in memory at a time, of each hop
    held_bytes: int  # columns in memory; `propagation.plan.fixed_bytes` come on top
    disk_bytes: int  # the result and, until it is complete, the files of its hops
    num_passes: int  # passes over the graph
    minutes: float  # on a 2-core machine with an NVMe-like disk

    def __str__(self) -> str:
        return (
            f"{self.num_passes} pass{'es' * (self.num_passes > 1)} over it, at most "
            f"{max(self.widths)} columns each: {format_bytes(self.held_bytes)} of memory, "
            f"{format_bytes(self.disk_bytes)} of disk, most of it until it is done, about "
            f"{seconds(60 * self.minutes)} on 2 cores"
        )


class Ledger:
    """The phases and parts of a run's memory, as its loading policy writes them down."""

    def __init__(
        self, config: TrainConfig, size: GraphSize, limit_bytes: int | None, is_sorted: bool = False
    ):
        self.config = config
        self.limit_bytes = limit_bytes
        self.is_sorted = is_sorted  # whether stock loaders sample from the edge list itself
        self.size = size  # a policy may replace it by that of the graph it trains on
        self.held = {"runtime": RUNTIME_BYTES}  # bytes of the parts in memory now
        self.phases: list[PhaseForecast] = []
        self.windows: Windows | None = None  # where a store is read in windows
        self.propagation: HopPlan | None = None  # where features are still to be propagated
        self.least_bytes = 0  # the smallest limit under which the run works; 0 for its peak
        self.queue_bytes = 0  # decrease of `least_bytes` if no batch ever waits
        self.num_sorts = 0  # CSCs that stock loaders build in the whole run

    @property
    def peak(self) -> PhaseForecast:
        """The phase with the most memory in use."""
        return max(self.phases, key=lambda phase: phase.held_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.held_bytes

    def phase(self, name: str, passing: Mapping[str, int], unsure_bytes: int = 0) -> None:
        """Add a phase, with the parts of `held` and parts (`passing`, bytes) that end with it."""
        self.phases.append(PhaseForecast(name, {**self.held, **passing}, unsure_bytes))

    def pass_phase(self, name: str, loader_pass: Pass, idle_loaders: int) -> None:
        """Add the phase of a pass, with the persistent workers of `idle_loaders` other loaders."""
        passing = loader_pass.step() | loader_pass.workers(idle_loaders)
        self.phase(name, passing, loader_pass.unsure_bytes(passing))

    def hold_model(self) -> None:
        self.held[MODEL] = model_state_bytes(
            self.config, self.size.num_features, self.size.num_classes
        )

    def one_pass(self, split: str, training: bool = False) -> Pass:
        return Pass.over(self.config, self.size, split, training)

    def evaluations(self) -> dict[str, list[str]]:
        """Splits evaluated between epochs, with the train loader ("eval"), and in the end ("final")."""
        config = self.config
        splits: dict[str, list[str]] = {"eval": [], "final": []}
        if config.epochs > config.eval_every:  # else the only evaluation is the final one
            splits["eval"] = config.splits_to_evaluate(config.eval_every)  # after this epoch
        if config.epochs:
            splits["final"] = config.splits_to_evaluate(config.epochs)
        return splits


class Forecast(Ledger):
    """The result of `predict`."""

    def __init__(
        self,
        config: TrainConfig,
        size: GraphSize,
        limit_bytes: int | None,
        machine: Machine,
        is_sorted: bool,
    ):
        super().__init__(config, size, limit_bytes, is_sorted)
        self.machine = machine  # for times
        POLICIES[config.loading].load().phases(self)  # writes phases, windows, `least_bytes`
        self.train = self.one_pass("train", training=True)  # of one epoch
        evaluated = {split for splits in self.evaluations().values() for split in splits}
        steps = [each.on_gpu() for each in (self.train, *map(self.one_pass, evaluated))]
        # the largest step by parts; the CUDA context, 0.3 to 0.6 GB, comes on top
        self.gpu: Mapping[str, int] = max(steps, key=lambda parts: sum(parts.values()))
        self.least_bytes = self.least_bytes or self.peak_bytes  # 0: the policy wrote none

    @property
    def num_threads(self) -> int:
        # one number for the whole run, by the training step, as the trainer chooses it
        return self.train.computation(self.train.batch).threads(self.machine.cores)

    @property
    def margin_bytes(self) -> int:
        """The error to allow for: that of `least_bytes`, or more if batch sizes are uncertain."""
        highest = max(phase.held_bytes + phase.unsure_bytes for phase in self.phases)
        return max(margin_bytes(self.least_bytes), highest - self.peak_bytes)

    @property
    def epoch_s(self) -> float:
        """Seconds of a training epoch on `machine`."""
        train_s = self._pass_s(self.train)
        if self.windows is None:
            return train_s
        prepare_s = self.windows.moved_bytes / (_PASS_SHARE * self.machine.disk_bytes_per_s)
        prepare_s += _SAMPLING_S_PER_NODE * self.train.num_batches * self.train.batch.num_nodes
        # Training begins once the first window is there. Up to half of the training is done while
        # the others are prepared.
        first_share = self.windows.first_bytes / self.windows.moved_bytes
        first_s = prepare_s * first_share / max(1, self.config.epochs)  # it waits once in a run
        return first_s + max(train_s, prepare_s - first_s + train_s / 2)

    def _pass_s(self, loader_pass: Pass) -> float:
        # Seconds of a pass whose batches come from memory.
        # 0.7 ms a batch, 0.3 us a node for sampling and gathering; measured at [3, 2] x 128 x 16
        # and [15, 10, 5] x 1024 x 64 and x 256, on one thread and on two.
        batch_s = 0.7e-3 + 0.3e-6 * loader_pass.batch.num_nodes
        step = loader_pass.computation(loader_pass.batch)
        return loader_pass.num_batches * (batch_s + step.seconds(self.machine, self.num_threads))

    @property
    def run_s(self) -> float:
        """Seconds of the whole run on `machine`: loading or propagating, epochs and evaluations."""
        config = self.config
        size = self.size
        disk_rate = self.machine.disk_bytes_per_s
        files = store_bytes(config, size)  # bytes by array: colptr, row, x
        total_s = config.epochs * self.epoch_s
        if self.propagation is not None:
            total_s += 60 * self.propagation.minutes
        elif size.hops is None and self.windows is None:  # read once, into memory or page cache
            total_s += sum(files.values()) / disk_rate
        for split in size.num_seeds:
            count = config.num_evaluations(split)
            if count == 0:
                continue
            total_s += count * self._pass_s(self.one_pass(split))
            # From disk each split needs a pass of its own, which reads features once and the graph
            # once a hop: one for all evaluations if a spool keeps its batches, else one for each.
            if self.windows is not None:
                passes = count if self.windows.spooling is None else 1
                graph = len(config.fan_out(training=False)) * (files["colptr"] + files["row"])
                total_s += passes * (files["x"] + graph) / disk_rate
        return total_s + self.num_sorts * _SORT_S_PER_EDGE * trained_edges(size, config.undirected)


def predict(
    config: TrainConfig,
    size: GraphSize | None = None,
    *,
    memory_limit_bytes: int | None = None,
    machine: Machine = REFERENCE,
    is_sorted: bool = False,
) -> Forecast:
    """Forecast a run's memory and time, see `planner.plan`.

    `size` defaults to that of `config.dataset`. Batches are drawn from a `Store`, else expected.
    """
    size = size or size_of(config.dataset)
    check_trainable(size, config)
    config = config.without_empty_splits(size.num_seeds)
    return Forecast(config, size, memory_limit_bytes, machine, is_sorted)
