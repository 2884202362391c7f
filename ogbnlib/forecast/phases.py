"""What a run will hold, phase by phase, in named parts, before anything is loaded.

Only sizes go in, so it answers in well under a second, on a login node, for a data set that is not there yet. The parts
and their formulas are in `sizes`, `step` and `passes`; here a ledger adds them up the way the loading policies hold
them. The conversion of a data set that is no store yet is not among the phases: it keeps to any limit by itself.

`held_bytes` is anonymous and shared memory, which only the run itself can give back and which a kill goes by.
`cache_bytes` is the page cache that a phase would like to have and that the kernel takes back under pressure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import TrainConfig
from ..errors import MB
from ..graph.store import Store, is_store, open_store
from ..propagation.plan import KERNEL_BYTES, HopPlan, fixed_bytes, hop_size, plan_hops, propagated_path
from ..sampling.budget import (
    DISK_BYTES_PER_S,
    BatchShape,
    Windows,
    spool_bytes,
    spool_dir,
    sweep_s,
    usable_bytes,
    window_budget,
)
from ..sources.catalog import check_store, graph_for
from .draws import Batches
from .passes import MODEL, Pass
from .sizes import (
    RUNTIME_BYTES,
    GraphSize,
    feature_itemsize,
    label_itemsize,
    shared_csc_bytes,
    stock_csc_bytes,
    stock_sort_bytes,
    store_bytes,
    trained_edges,
)
from .step import layers_of, model_state_bytes

_SORT_S_PER_EDGE = 1e-7  # of a stock loader's CSC: 1.0 to 1.8 s for 16 M edges


def margin_bytes(predicted_bytes: int) -> int:
    """What a prediction may be off: 8 % or 60 MB, whichever is more."""
    return max(int(0.08 * predicted_bytes), 60 * MB)


@dataclass(frozen=True)
class PhaseForecast:
    """The parts held at the highest moment of a phase, and the page cache that it would use, in bytes."""

    name: str
    parts: Mapping[str, int]
    cache_bytes: int = 0
    unsure_bytes: int = 0  # by which batches may be larger that were not drawn whole

    @property
    def held_bytes(self) -> int:
        return sum(self.parts.values())


class Ledger:
    """The parts that a run holds as it goes along, in bytes, and its phases so far."""

    def __init__(self, runtime_bytes: int):
        self.held = {"runtime": runtime_bytes}
        self.phases: list[PhaseForecast] = []

    def phase(self, name: str, passing: Mapping[str, int], cache_bytes: int = 0, unsure_bytes: int = 0) -> None:
        """Write down a phase that has, at its highest, what is held and what is `passing`."""
        self.phases.append(PhaseForecast(name, {**self.held, **passing}, cache_bytes, unsure_bytes))


@dataclass(frozen=True)
class Forecast:
    """What `predict` returns.

    Attributes:
        batches: Those of training.
        gpu: The training step on a GPU by parts; the CUDA context, 0.3 to 0.6 GB, comes on top.
        windows: How a store is read in training, under loading=store.
        propagation: How features are propagated, where that is still to be done, under loading=propagated.
        least_bytes: The smallest limit under which the run works at all: its peak, and less under loading=store with
            lookahead=auto and under loading=propagated, which take what they are given.
    """

    config: TrainConfig
    size: GraphSize
    phases: tuple[PhaseForecast, ...]
    batches: Batches
    gpu: Mapping[str, int]
    windows: Windows | None
    least_bytes: int
    propagation: HopPlan | None = None

    @property
    def batch(self) -> BatchShape:
        """The mean training batch."""
        return self.batches.mean

    @property
    def peak(self) -> PhaseForecast:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: phase.held_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.held_bytes

    @property
    def margin_bytes(self) -> int:
        """What the peak may be off: 8 % or 60 MB, or more where batches are not known well."""
        highest = max(phase.held_bytes + phase.unsure_bytes for phase in self.phases)
        return max(margin_bytes(self.least_bytes), highest - self.peak_bytes)

    @property
    def cache_bytes(self) -> int:
        return max(phase.cache_bytes for phase in self.phases)

    @property
    def epoch_s(self) -> float:
        """Seconds of a training epoch on the reference machine: 2 cores and a disk of 1.2 GB/s.

        0.7 ms a batch, 0.3 us a node for sampling and gathering on one thread, and matrix products (4 * T * in * H for
        a layer's two matrices, as much again twice for the backward pass but for the first layer's input) at 44 GFLOP/s
        in float32 and 73 in half width, times threads ** 0.8. Measured at [3, 2] x 128 x 16 and [15, 10, 5] x 1024 x 64
        and x 256, on one thread and on two. While windows are read, half of a core's training goes on.
        """
        config, size, batch = self.config, self.size, self.batch
        hops, work = len(config.num_neighbors), 0.0
        for i, layer in enumerate(layers_of(config, batch, size.num_features, size.num_classes)):
            targets = sum(batch.hop_nodes[: max(1, hops - i)])
            work += 4 * targets * layer.inputs * layer.outputs * (2 if layer.first else 3)
        batches = Pass(config, size, "train", self.batches).num_batches
        rate = (44e9 if config.precision == "fp32" else 73e9) * (config.num_threads or 2) ** 0.8
        train_s = batches * (0.7e-3 + 0.3e-6 * batch.num_nodes + work / rate)
        if self.windows is None or self.windows.window_batches is None:
            return train_s
        read_s = self.windows.moved_bytes / DISK_BYTES_PER_S
        return max(train_s, read_s + train_s / 2) if self.windows.overlapped else train_s + read_s

    @property
    def run_s(self) -> float:
        """Seconds of the whole run, on the machine of `epoch_s`: loading or propagating, epochs and evaluations.

        A seed costs an evaluation what it costs the training, at the most. From disk each split is read in a pass of
        its own, once where there is a spool to keep it, else every time.
        """
        config, size, windows = self.config, self.size, self.windows
        files = store_bytes(config, size)
        in_passes = windows is not None and windows.window_batches is not None
        loading_s = 0.0 if in_passes else sum(files.values()) / DISK_BYTES_PER_S
        if config.loading == "propagated":
            loading_s = 60 * self.propagation.minutes if self.propagation else 0.0
        seconds = loading_s + config.epochs * self.epoch_s
        builds = 1 if config.loading in ("eager", "lazy") else 0
        for split, seeds in size.num_seeds.items():
            count = config.num_evaluations(split)
            seconds += count * self.epoch_s * seeds / max(1, size.num_seeds["train"])
            if in_passes:
                kept = windows is not None and windows.spooling is not None
                seconds += (min(1, count) if kept else count) * sweep_s(files, len(config.num_neighbors))
            elif builds and split != "train":
                builds += count if config.loading == "lazy" else 1
        return seconds + builds * _SORT_S_PER_EDGE * trained_edges(size, config.undirected)


def predict(
    config: TrainConfig,
    size: GraphSize | None = None,
    *,
    memory_limit_bytes: int | None = None,
    runtime_bytes: int = RUNTIME_BYTES,
) -> Forecast:
    """The memory of a run, phase by phase: load, build, train, eval, final.

    Args:
        size: By default `config.dataset`. Batches are drawn from a `Store`; sizes alone give expected ones.
        memory_limit_bytes: What the run may use; it decides the windows of loading=store. None: as much as it likes.
        runtime_bytes: Of the process itself, when another machine's is known.

    Raises:
        InputError: when the data set's size cannot be read, or it cannot do what the config asks for.
    """
    size = size or graph_for(config)
    check_store(size, config)
    if config.loading == "propagated":
        if isinstance(size, Store):
            kept = propagated_path(size, config)
            size = (open_store(kept) if size.hops is None and is_store(kept) else size).size
        return _propagated(config, size, Ledger(runtime_bytes), memory_limit_bytes)
    windows = None
    if config.loading == "store":
        windows, ledger = _from_store(config, size, Ledger(runtime_bytes), memory_limit_bytes)
    else:
        ledger = _in_ram(config, size, Ledger(runtime_bytes))
    least = max(phase.held_bytes for phase in ledger.phases)
    if config.loading == "store" and config.lookahead == "auto":
        _, smallest = _from_store(config, size, Ledger(runtime_bytes), 0)  # windows of one batch, one at a time
        least = min(least, max(phase.held_bytes for phase in smallest.phases))
    train = Pass.over(config, size, "train", training=True)
    return Forecast(config, size, tuple(ledger.phases), train.batches, train.on_gpu(), windows, least)


def _evaluations(config: TrainConfig) -> tuple[list[str], list[str]]:
    """The splits evaluated between epochs, with the train loader resident, and after the last, without it."""
    between = config.splits_to_evaluate(config.eval_every) if config.epochs > config.eval_every else []
    return between, config.splits_to_evaluate(config.epochs) if config.epochs else []


def _in_ram(config: TrainConfig, size: GraphSize, run: Ledger) -> Ledger:
    """eager, lazy and shared: the store's arrays read into RAM, the edges as COO or as one CSC."""
    edges, shared = trained_edges(size, config.undirected), config.loading == "shared"
    if shared:
        run.held["shared CSC"] = shared_csc_bytes(size, edges)
        run.phase("build shared CSC", {})
    run.held["features"] = size.num_nodes * size.num_features * feature_itemsize(config, size)
    run.held["labels"] = size.num_nodes * label_itemsize(size.num_classes)
    if not shared:
        run.held["edge_index (COO)"] = 16 * edges  # int64 [2, E]
    run.phase("load", {})

    def build(split: str, label: str) -> None:
        run.held[f"{split} loader's CSC"] = stock_csc_bytes(size, edges)
        run.phase(label, {"sort": stock_sort_bytes(size, edges)})

    resident: list[str] = ["train", *(config.eval_splits if config.loading == "eager" else ())] if config.epochs else []
    for split in resident if not shared else ():
        build(split, f"build {split} loader")
    run.held[MODEL] = model_state_bytes(config, size.num_features, size.num_classes)
    between, final = _evaluations(config)
    if config.epochs:
        train = Pass.over(config, size, "train", training=True)
        passing = train.step() | train.workers(len(resident) - 1 if between else 0)
        run.phase("train", passing, unsure_bytes=train.unsure_bytes(passing))
    for when, splits in (("eval", between), ("final", final)):
        if when == "final":
            run.held.pop("train loader's CSC", None)
            resident = resident[1:]
        for split in splits:
            made = not shared and split not in resident
            if made:
                build(split, f"build {split} loader ({when})")
            # An evaluation of the train split has a loader of its own, on the resident one's CSC.
            idle = [name for name in resident if name != split or split == "train"]
            evaluation = Pass.over(config, size, split, training=False)
            passing = evaluation.step() | evaluation.workers(len(idle))
            run.phase(f"{when} {split}", passing, unsure_bytes=evaluation.unsure_bytes(passing))
            if made:
                run.held.pop(f"{split} loader's CSC", None)
    return run


def _from_store(config: TrainConfig, size: GraphSize, run: Ledger, limit: int | None) -> tuple[Windows, Ledger]:
    """store: the graph on disk, read through the page cache where it fits, else in windows."""
    per_seed = 8 + label_itemsize(size.num_classes)  # ids int64
    run.held["splits and their labels"] = per_seed * sum(size.num_seeds.values())
    run.phase("load", {})
    left = None if limit is None else max(0, usable_bytes(limit) - sum(run.held.values()))
    run.held[MODEL] = model_state_bytes(config, size.num_features, size.num_classes)
    cache_bytes = sum(store_bytes(config, size).values())

    def read(name: str, one: Pass, windows: Windows, num_passes: int, idle_loaders: int) -> None:
        in_windows = windows.window_batches is not None  # prepared by a thread, whatever `num_workers` is
        threaded = in_windows or not config.num_workers
        passing = one.prefetched() if threaded else one.step() | one.workers(idle_loaders)
        unsure_bytes = one.unsure_bytes(passing)
        if in_windows:
            count = 2 if windows.overlapped and windows.num_windows * num_passes > 1 else 1
            passing |= {"windows": count * one.window_bytes(windows)}
            if windows.spooling is None:
                passing["window being prepared"] = one.preparing_bytes(windows)
            elif windows not in kept.values():
                passing["pass for the spool"] = windows.spooling.working_bytes
        run.phase(name, passing, 0 if in_windows else cache_bytes, unsure_bytes)

    train = Pass.over(config, size, "train", training=True)
    between, final = _evaluations(config)
    room = _room_bytes(config)
    # As `policies.StoreLoaders` does: what evaluations draw is kept on disk too, where it takes a third of the room.
    evaluations = {split: Pass.over(config, size, split, training=False) for split in {*between, *final}}
    budget = window_budget(config.lookahead, left)
    kept = {split: one.windows(budget, room // 3, always=True) for split, one in evaluations.items()}
    taken = sum(one.spooling.disk_bytes if one.spooling else room for one in kept.values())
    windows = train.windows(budget, room - taken if taken <= room // 3 else room)
    if windows.spooling is None or taken > room // 3:
        kept = {}
    if config.epochs:
        read("train", train, windows, config.epochs, 0)
    if windows.prepared_ahead:
        run.held["next window to train on"] = train.window_bytes(windows)
        if windows.spooling is not None and windows.spooling.picked_batches < train.num_batches * config.epochs:
            run.held["next pass for the spool"] = windows.spooling.working_bytes
    for split in between:
        one = evaluations[split]
        beside = window_budget(config.lookahead, left, windows)
        read(f"eval {split}", one, kept.get(split) or one.windows(beside, room), 1, 1)
    run.held.pop("next window to train on", None)
    run.held.pop("next pass for the spool", None)
    for split in final:
        one = evaluations[split]
        read(f"final {split}", one, kept.get(split) or one.windows(budget, room), 1, 0)
    return windows, run


def _room_bytes(config: TrainConfig) -> int:
    """What a spool may take here and now; none in a folder that is not there yet."""
    folder = spool_dir(config.spool_dir)
    return spool_bytes(config.spool, folder) if folder.is_dir() else 0


def _propagated(config: TrainConfig, graph: GraphSize, run: Ledger, limit: int | None) -> Forecast:
    """propagated: as many columns at a time as there is room for; then rows of them through the page cache."""
    size, plan, least = hop_size(graph, config), None, 0
    rows = graph.num_nodes if graph.hops is not None else sum(graph.num_seeds.values())
    itemsize = feature_itemsize(config, graph)
    if graph.hops is None:
        fixed = fixed_bytes(graph, config.hops, threads=3)
        column = graph.num_nodes * (4 if config.norm == "none" else itemsize)
        reached = [graph.num_nodes] * (config.hops - 1) + [rows]  # at the most
        held_twice = 2 * column if config.hops > 1 else column
        left = held_twice * graph.num_features
        if limit is not None:
            left = max(held_twice, min(left, limit - sum(run.held.values()) - fixed))
        plan = plan_hops(
            graph, config.hops, config.norm, left_bytes=left, itemsize=itemsize, kept=rows, reached=reached
        )
        buffers = {"columns": plan.held_bytes, "buffers": fixed - KERNEL_BYTES}
        run.phase("propagate", buffers, unsure_bytes=KERNEL_BYTES)  # the kernels are compiled already, or not
        least = run.phases[-1].held_bytes - plan.held_bytes + held_twice
    run.held["splits and their labels"] = (8 + label_itemsize(size.num_classes)) * sum(size.num_seeds.values())
    cache_bytes = rows * size.num_features * itemsize
    run.phase("load", {}, cache_bytes)
    run.held[MODEL] = model_state_bytes(config, size.num_features, size.num_classes)
    train = Pass.over(config, size, "train", training=True)
    between, final = _evaluations(config)
    passes = [("train", train)] if config.epochs else []
    for when, splits in (("eval", between), ("final", final)):
        passes += [(f"{when} {split}", Pass.over(config, size, split, training=False)) for split in splits]
    for name, one in passes:
        run.phase(name, one.step() | one.workers(0), cache_bytes)
    least = max([least, *(phase.held_bytes for phase in run.phases if phase.name != "propagate")])
    return Forecast(config, size, tuple(run.phases), train.batches, train.on_gpu(), None, least, plan)
