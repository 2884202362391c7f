"""What a run will hold, phase by phase, in named parts, before anything is loaded.

Only sizes go in, so it answers in well under a second, on a login node, for a data set that is not there yet. The parts
and their formulas are in `footprint`; here they are added up the way the loading policies hold them.

`held_bytes` is anonymous and shared memory, which only the run itself can give back and which a kill goes by.
`cache_bytes` is the page cache that a phase would like to have and that the kernel takes back under pressure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .config import TrainConfig, format_bytes
from .footprint import (
    CSC_CHUNKS_BYTES,
    PREFETCH_FACTOR,
    QUEUE_BATCHES,
    QUEUE_BYTES,
    RUNTIME_BYTES,
    WORKER_BYTES,
    Batch,
    GraphSize,
    activation_bytes,
    batch_bytes,
    coo_bytes,
    expected_batch,
    features_bytes,
    label_itemsize,
    labels_bytes,
    layer_widths,
    model_state_bytes,
    num_edges,
    reverse_edges_bytes,
    sampling_bytes,
    shared_csc_bytes,
    size_of,
    spread,
    stock_csc_bytes,
    stock_sort_bytes,
    store_bytes,
)

# For choosing between windows and for times only; a 2-core machine with an NVMe-like disk.
DISK_BYTES_PER_S = 1.2e9
TRAIN_S_PER_NODE = 2.5e-6


# Windows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowPlan:
    """How a loader reads its store. `window_batches` is None where batches are drawn one by one."""

    window_batches: int | None
    overlapped: bool  # the next window is prepared while one is used, so two are held
    window_bytes: int
    available_bytes: int
    num_windows: int = 0

    def __str__(self) -> str:
        free = format_bytes(self.available_bytes)
        if self.window_batches is None:
            return f"batches are drawn one by one through the page cache ({free} available)"
        how = "two held, one being prepared" if self.overlapped else "one held"
        size = format_bytes(self.window_bytes)
        return f"windows of {self.window_batches} batches, about {size} each, {how} ({free} available)"


def compact_batch_bytes(batch: Batch, row_bytes: int) -> int:
    """A batch inside a window: its rows of x, ids int64, local row and col int32, and the objects around them."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def window_fixed_bytes(num_nodes: int) -> int:
    """The bitmap of the ids of a window and its ranks."""
    return num_nodes // 8 + num_nodes // 16


def queued_bytes(batch: Batch, num_features: int, itemsize: int) -> int:
    """Batches that are ready before the model asks for them: those in the queue and one more in its thread's hand."""
    one = max(1, batch_bytes(batch, num_features, itemsize))
    return one * (max(1, min(QUEUE_BATCHES, QUEUE_BYTES // one)) + 1)


def choose_windows(
    files: Mapping[str, int],
    num_nodes: int,
    row_bytes: int,
    batch: Batch,
    num_batches: int,
    available: int | None,
    pair_share: float,
    reserve: int = 0,
    sharers: int = 1,
) -> WindowPlan:
    """Choose between the page cache and windows, and the windows' size.

    Args:
        files: Bytes of the store's colptr, row and x.
        row_bytes: Of one node's features in the store.
        batch: What one batch holds.
        available: Bytes that may be taken, page cache included; None draws batches one by one, whatever is left.
        pair_share: The part of them that a window may have where two are held at once.
        reserve: What batches on their way and a training step take of them.
        sharers: Processes that have `available` each, and the page cache in common.

    A pass over the files costs the same for a large window as for a small one, so the fewest windows win, unless a
    single one that can't be prepared during training costs more than several that can.
    """
    if available is None or sum(files.values()) <= (available - reserve) * sharers:
        return WindowPlan(None, True, 0, available or 0)
    left = max(0, available - reserve)
    one, fixed = compact_batch_bytes(batch, row_bytes), window_fixed_bytes(num_nodes)
    sweep_s = (files["x"] + len(batch.hop_edges) * (files["colptr"] + files["row"])) / DISK_BYTES_PER_S
    train_s = num_batches * batch.num_nodes * TRAIN_S_PER_NODE

    def windows(budget: float) -> int:
        return -(-num_batches // max(1, int((budget - fixed) / one)))

    alone, paired = windows(left), windows(pair_share * left)
    pair_fits = pair_share * left >= fixed + one
    overlapped = pair_fits and max(paired * sweep_s, train_s) <= alone * sweep_s + train_s
    size = -(-num_batches // (paired if overlapped else alone))
    return WindowPlan(size, overlapped, size * one + fixed, available, -(-num_batches // size))


# Phases ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhasePlan:
    """The parts held at the highest moment of a phase, in bytes; `transient` names those that end with it."""

    name: str
    parts: Mapping[str, int]
    transient: frozenset[str] = frozenset()
    cache_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Plan:
    """What `predict` returns.

    Attributes:
        batch: The expected training batch.
        gpu: The training step on a GPU by parts; the CUDA context, 0.3 to 0.6 GB, comes on top.
        window: How a store is read, under loading=store.
        epoch_s: See `epoch_s`.
        least_bytes: The smallest limit under which the run works at all: its peak, and less under loading=store, which
            takes what it is given.
    """

    config: TrainConfig
    size: GraphSize
    phases: tuple[PhasePlan, ...]
    batch: Batch
    gpu: Mapping[str, int]
    window: WindowPlan | None = None
    epoch_s: float = 0.0
    least_bytes: int = 0

    @property
    def peak(self) -> PhasePlan:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: phase.held_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.held_bytes

    @property
    def cache_bytes(self) -> int:
        return max(phase.cache_bytes for phase in self.phases)


def _in_flight(config: TrainConfig, batch: Batch, size: GraphSize, itemsize: int) -> dict[str, int]:
    """Batches held at once, beside the sampling of the next: one; with workers, those they have ready as well.

    Workers hand batches over in shared memory: `num_workers * prefetch_factor` ready and the one in use.
    """
    one = batch_bytes(batch, size.num_features, itemsize)
    if config.num_workers:
        ready = PREFETCH_FACTOR * config.num_workers
        return {
            "batch in use": one,
            "workers' batches (shared memory)": ready * one,
            "workers": config.num_workers * WORKER_BYTES,
        }
    return {"batch in use": one}


def _step(config: TrainConfig, batch: Batch, size: GraphSize, itemsize: int, training: bool) -> dict[str, int]:
    """Activations, float16 features widened to float32, or the sampling of the next batch, whichever is more."""
    widened = 4 * batch.num_nodes * size.num_features if itemsize == 2 else 0
    computed = activation_bytes(config, batch, size.num_features, size.num_classes, training) + widened
    return {"step: activations and sampling": max(computed, sampling_bytes(batch) if not config.num_workers else 0)}


def step_reserve_bytes(config: TrainConfig, batch: Batch, size: GraphSize, itemsize: int) -> int:
    """What a step takes beside a window under loading=store: queued batches, the one in use, activations, weights."""
    step = _step(config, batch, size, itemsize, True)
    queued = queued_bytes(batch, size.num_features, itemsize)
    one = batch_bytes(batch, size.num_features, itemsize)
    return sum(step.values()) + queued + one + model_state_bytes(config, size.num_features, size.num_classes)


def predict(
    config: TrainConfig,
    size: GraphSize | None = None,
    *,
    memory_limit_bytes: int | None = None,
    runtime_bytes: int = RUNTIME_BYTES,
) -> Plan:
    """The memory of a run, phase by phase: load, build, train, eval, final.

    Args:
        size: By default that of `config.dataset`.
        memory_limit_bytes: What the run may use; it decides the windows of loading=store. None: as much as it likes.
        runtime_bytes: Of the process itself, when another machine's is known.

    Raises:
        InputError: when the data set's size cannot be read.
    """
    size = size or size_of(config.dataset)
    edges = num_edges(size, config.undirected)
    batch = expected_batch(
        size, config.undirected, min(config.batch_size, size.num_seeds["train"]), config.num_neighbors
    )
    builder = _store_phases if config.loading == "store" else _ram_phases
    window, phases = builder(config, size, edges, batch, runtime_bytes, memory_limit_bytes)
    plan = Plan(config, size, tuple(phases), batch, gpu_bytes(config, batch, size), window)
    least = plan.peak_bytes if window is None else _least(config, size, edges, batch, runtime_bytes)
    return replace(plan, epoch_s=epoch_s(plan), least_bytes=least)


def _eval_batch(config: TrainConfig, size: GraphSize, split: str) -> Batch:
    seeds = min(config.eval_batch_size or config.batch_size, size.num_seeds[split])
    return expected_batch(size, config.undirected, seeds, config.num_neighbors)


def _evaluations(config: TrainConfig) -> tuple[list[str], list[str]]:
    """The splits evaluated between epochs, with the train loader resident, and after the last, without it."""
    between: list[str] = [*config.eval_splits] if config.epochs > config.eval_every else []
    final: list[str] = [*config.eval_splits]
    if config.train_eval == "every_epoch" and config.eval_splits:
        between, final = (["train", *between] if between else []), ["train", *final]
    elif config.train_eval == "final":
        final = ["train", *final]
    return between, final


def _ram_phases(
    config: TrainConfig, size: GraphSize, edges: int, batch: Batch, runtime: int, limit: int | None
) -> tuple[None, list[PhasePlan]]:
    """eager, lazy and shared: the graph in RAM."""
    itemsize = 2 if config.feature_dtype == "float16" else 4
    base = {"runtime": runtime}
    nodes = {
        "features": features_bytes(size, config.feature_dtype),
        "labels": labels_bytes(size),
    }
    phases: list[PhasePlan] = []

    def add(name: str, held: Mapping[str, int], transient: Mapping[str, int]) -> None:
        phases.append(PhasePlan(name, {**held, **transient}, frozenset(transient)))

    shared = config.loading == "shared"
    if shared:
        csc = {"shared CSC": shared_csc_bytes(size, edges, config.engine)}
        chunks = {"chunks of the edge list": CSC_CHUNKS_BYTES}
        if config.engine == "pyg":
            chunks["row int32 -> int64"] = 4 * edges
        add("build shared CSC", {**base, **csc}, chunks)
        base = {**base, **csc, **nodes}
        add("load", base, {})
    else:
        base = {**base, **nodes}
        if config.undirected and not size.undirected:
            given = {"edge_index (COO)": coo_bytes(size.num_edges)}
            add("add reverse edges", {**base, **given}, {"to_undirected": reverse_edges_bytes(size)})
        base = {**base, "edge_index (COO)": coo_bytes(edges)}
        add("load", base, {})
    stock = {} if shared else {"CSC": stock_csc_bytes(size, edges)}
    sort = {} if shared else {"sort": stock_sort_bytes(size, edges)}

    def loader(split: str) -> dict[str, int]:
        return {f"{split} loader's CSC": amount for amount in stock.values()}

    state = {"model, gradients, Adam": model_state_bytes(config, size.num_features, size.num_classes)}
    held = {**base}
    resident = ["train", *(config.eval_splits if config.loading == "eager" else [])] if config.epochs else []
    for split in resident:
        held |= loader(split)
        if not shared:
            add(f"build {split} loader", held, sort)
    held |= state
    if config.epochs:
        moving = _in_flight(config, batch, size, itemsize) | _step(config, batch, size, itemsize, True)
        add("train", held, moving)

    def evaluate(split: str, held: Mapping[str, int], when: str) -> None:
        view = shared or (split in resident and f"{split} loader's CSC" in held)
        if not view:
            held = {**held, **loader(split)}
            add(f"build {split} loader ({when})", held, sort)
        ahead = _eval_batch(config, size, split)
        moving = _in_flight(config, ahead, size, itemsize) | _step(config, ahead, size, itemsize, False)
        add(f"{when} {split}", held, moving)

    between, final = _evaluations(config)
    for name in between:
        evaluate(name, held, "eval")
    held = {name: amount for name, amount in held.items() if name != "train loader's CSC"}
    for name in final if config.epochs else ():
        evaluate(name, held, "final")
    return None, phases


def _store_parts(
    config: TrainConfig, size: GraphSize, batch: Batch, itemsize: int, training: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """(held, transient) parts of a loader on a store, its windows aside."""
    ready = {"batches ready": queued_bytes(batch, size.num_features, itemsize)}
    if config.num_workers:
        ready = {}
    state = {"model, gradients, Adam": model_state_bytes(config, size.num_features, size.num_classes)}
    moving = _in_flight(config, batch, size, itemsize) | _step(config, batch, size, itemsize, training)
    return state, {**ready, **moving}


def _store_base(size: GraphSize, runtime: int) -> dict[str, int]:
    """The process, and the ids (int64) and labels (int16) of all splits."""
    per_seed = 8 + label_itemsize(size.num_classes)
    return {"runtime": runtime, "splits and their labels": per_seed * sum(size.num_seeds.values())}


def _windows(
    config: TrainConfig, size: GraphSize, edges: int, batch: Batch, seeds: int, budget: int | None, share: float
) -> WindowPlan:
    files = store_bytes(size, edges)
    itemsize = files["x"] // max(1, size.num_nodes * size.num_features)
    batches = -(-seeds // max(1, batch.hop_nodes[0]))
    reserve = step_reserve_bytes(config, batch, size, itemsize)
    return choose_windows(files, size.num_nodes, size.num_features * itemsize, batch, batches, budget, share, reserve)


def _window_bytes(size: GraphSize, batch: Batch, window: WindowPlan, itemsize: int, reach: float) -> int:
    """What a window really holds: each distinct node's features once, and every batch's own ids and edges."""
    assert window.window_batches is not None
    drawn = window.window_batches * batch.num_nodes
    distinct = min(drawn, reach * -math.expm1(-drawn / reach))
    own = window.window_batches * compact_batch_bytes(batch, 0)
    return int(distinct * size.num_features * itemsize) + own + window_fixed_bytes(size.num_nodes)


def _store_phases(
    config: TrainConfig, size: GraphSize, edges: int, batch: Batch, runtime: int, limit: int | None
) -> tuple[WindowPlan, list[PhasePlan]]:
    """store: the graph on disk, read through the page cache where it fits, else in windows."""
    files = store_bytes(size, edges)
    itemsize = files["x"] // max(1, size.num_nodes * size.num_features)
    base = _store_base(size, runtime)
    reach = spread(size, config.undirected)[1]
    budget: int | None = None
    if config.lookahead != "off":
        free = None if limit is None else max(0, int(0.95 * limit) - sum(base.values()))
        budget = sum(files.values()) * 2 if free is None else free
        if config.lookahead != "auto":
            budget = int(config.lookahead)
    cached = sum(files.values())
    phases = [PhasePlan("load", base, cache_bytes=0)]

    def add(name: str, batch: Batch, window: WindowPlan, training: bool) -> None:
        held, moving = _store_parts(config, size, batch, itemsize, training)
        if window.window_batches is None:
            phases.append(PhasePlan(name, {**base, **held, **moving}, frozenset(moving), cached))
            return
        count = 2 if window.overlapped and (window.num_windows > 1 or (training and config.epochs > 1)) else 1
        moving |= {"windows": count * _window_bytes(size, batch, window, itemsize, reach)}
        phases.append(PhasePlan(name, {**base, **held, **moving}, frozenset(moving)))

    plan = _windows(config, size, edges, batch, size.num_seeds["train"], budget, 0.45)
    if config.epochs:
        add("train", batch, plan, True)
    between, final = _evaluations(config)
    pair = plan.window_batches is not None and plan.overlapped
    for splits, when, left in (
        (between, "eval", budget if budget is None or not pair else budget - 2 * plan.window_bytes),
        (final if config.epochs else [], "final", budget),
    ):
        for split in splits:
            ahead = _eval_batch(config, size, split)
            window = _windows(config, size, edges, ahead, size.num_seeds[split], left, 0.5)
            add(f"{when} {split}", ahead, window, False)
    return plan, phases


def _least(config: TrainConfig, size: GraphSize, edges: int, batch: Batch, runtime: int) -> int:
    """The smallest memory in which a store run works: windows of one batch, one at a time."""
    itemsize = store_bytes(size, edges)["x"] // max(1, size.num_nodes * size.num_features)
    reserve = step_reserve_bytes(config, batch, size, itemsize)
    one = compact_batch_bytes(batch, size.num_features * itemsize) + window_fixed_bytes(size.num_nodes)
    return sum(_store_base(size, runtime).values()) + reserve + one


def gpu_bytes(config: TrainConfig, batch: Batch, size: GraphSize) -> dict[str, int]:
    """The parts of a training step in GPU memory, allocated by torch, at its peak.

    The batch is copied whole: x in its own dtype, widened there to float32, and edge_index.
    """
    itemsize = 2 if config.feature_dtype == "float16" else 4
    widened = 4 * batch.num_nodes * size.num_features if itemsize == 2 else 0
    return {
        "batch": batch_bytes(batch, size.num_features, itemsize) + widened,
        "model, gradients, Adam": model_state_bytes(config, size.num_features, size.num_classes),
        "activations": activation_bytes(config, batch, size.num_features, size.num_classes),
    }


# Time -----------------------------------------------------------------------------------------------------------------


def epoch_s(plan: Plan) -> float:
    """Seconds of a training epoch on the 2-core reference machine (one torch thread, 1.2 GB/s disk); to compare with.

    0.7 ms a batch, 0.35 us a node for sampling and gathering, 30 GFLOP/s of matrix products (4 * T * in * H for a
    layer's two matrices, as much again twice for the backward pass but for the first layer's input): measured at
    [3, 2] x 128 x 16 and [15, 10, 5] x 1024 x 64 and x 256. Windows add one pass over the files each.
    """
    config, size, batch = plan.config, plan.size, plan.batch
    hops = len(config.num_neighbors)
    work = 0.0
    for i, (width, out) in enumerate(layer_widths(config, size.num_features, size.num_classes)):
        targets = sum(batch.hop_nodes[: hops - i])
        work += 4 * targets * width * out * (2 if i == 0 else 3)
    batches = -(-size.num_seeds["train"] // max(1, batch.hop_nodes[0]))
    train_s = batches * (0.7e-3 + 0.35e-6 * batch.num_nodes + work / 30e9)
    window = plan.window
    if window is None or window.window_batches is None:
        return train_s
    files = store_bytes(size, num_edges(size, config.undirected))
    sweep_s = (files["x"] + hops * (files["colptr"] + files["row"])) / DISK_BYTES_PER_S * window.num_windows
    return max(train_s, sweep_s) if window.overlapped else train_s + sweep_s
