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

from ..config import TrainConfig
from ..errors import InputError
from ..sampling.budget import (
    DISK_BYTES_PER_S,
    Batch,
    WindowPlan,
    batch_bytes,
    choose_windows,
    compact_batch_bytes,
    queued_bytes,
    window_fixed_bytes,
)
from .sizes import (
    PREFETCH_FACTOR,
    RUNTIME_BYTES,
    WORKER_BYTES,
    GraphSize,
    coo_bytes,
    expected_batch,
    feature_itemsize,
    features_bytes,
    label_itemsize,
    labels_bytes,
    num_edges,
    sampling_bytes,
    shared_csc_bytes,
    size_of,
    spread,
    stock_csc_bytes,
    stock_sort_bytes,
    store_bytes,
)
from .step import activation_bytes, layer_widths, model_state_bytes

# Phases ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhasePlan:
    """The parts held at the highest moment of a phase, and the page cache that it would use, in bytes."""

    name: str
    parts: Mapping[str, int]
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
        least_bytes: The smallest limit under which the run works at all: its peak, and less under loading=store with
            lookahead=auto, which takes what it is given.
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


def _moving(config: TrainConfig, batch: Batch, size: GraphSize, training: bool) -> dict[str, int]:
    """What a pass takes in the trainer's own process: a batch and a step.

    A step is its activations and float16 features widened to float32, or the sampling of the next batch where that is
    more.
    """
    itemsize = feature_itemsize(config, size)
    one = batch_bytes(batch, size.num_features, itemsize)
    widened = 4 * batch.num_nodes * size.num_features if itemsize == 2 else 0
    step = activation_bytes(config, batch, size.num_features, size.num_classes, training) + widened
    return {"batch in use": one, "step: activations and sampling": max(step, sampling_bytes(batch))}


def _workers(config: TrainConfig, batch: Batch, size: GraphSize, split: str, others: int) -> dict[str, int]:
    """What a pass over `split` takes in its workers and, if they are persistent, in those of `others` idle loaders.

    Batches are handed over in shared memory: `num_workers * prefetch_factor` ready beside the one in use, if there are
    as many. Each worker samples at the same time as the others.
    """
    if not config.num_workers:
        return {}
    one = batch_bytes(batch, size.num_features, feature_itemsize(config, size))
    ready = min(PREFETCH_FACTOR * config.num_workers, max(0, _num_batches(size, split, batch) - 1))
    idle = others * config.num_workers if config.persistent_workers else 0
    return {
        "workers' batches (shared memory)": ready * one,
        "workers": config.num_workers * (WORKER_BYTES + sampling_bytes(batch)) + idle * WORKER_BYTES,
    }


def _num_batches(size: GraphSize, split: str, batch: Batch) -> int:
    return -(-size.num_seeds[split] // max(1, batch.hop_nodes[0]))


def _prefetched(config: TrainConfig, batch: Batch, size: GraphSize, training: bool) -> dict[str, int]:
    """What a pass over a store takes whose batches a thread prepares, `store_loader.prefetch`; windows aside."""
    ready = queued_bytes(batch, size.num_features, feature_itemsize(config, size))
    return {"batches ready": ready, **_moving(config, batch, size, training)}


def step_reserve_bytes(config: TrainConfig, batch: Batch, size: GraphSize) -> int:
    """What loading=store keeps free of windows: batches on their way, a training step, weights.

    0 where `lookahead` is a size of its own: all of that is for windows.
    """
    if config.lookahead != "auto":
        return 0
    state = model_state_bytes(config, size.num_features, size.num_classes)
    return sum(_prefetched(config, batch, size, True).values()) + state


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
        InputError: when the data set's size cannot be read, or its store cannot do what the config asks for.
    """
    size = size or size_of(config.dataset)
    batch = split_batch(config, size, "train")
    window = None
    if config.loading == "store":
        _check_store(config, size)
        window, phases = _store_phases(config, size, runtime_bytes, memory_limit_bytes)
    else:
        phases = _ram_phases(config, size, runtime_bytes)
    plan = Plan(config, size, tuple(phases), batch, gpu_bytes(config, batch, size), window)
    least = plan.peak_bytes
    if config.loading == "store" and config.lookahead == "auto":
        _, smallest = _store_phases(config, size, runtime_bytes, 0)  # windows of one batch, one at a time
        least = min(least, max(phase.held_bytes for phase in smallest))
    return replace(plan, epoch_s=epoch_s(plan), least_bytes=least)


def _check_store(config: TrainConfig, size: GraphSize) -> None:
    """What `store.check_store` refuses, as far as sizes tell."""
    if config.sampler == "pyg":
        raise InputError("sampler: loading='store' samples with sampler='numba' only, got 'pyg'")
    if config.undirected and size.stored == "store" and not size.undirected:
        raise InputError(f"undirected: {size.name} has no reverse edges; convert it with --undirected")


def split_batch(config: TrainConfig, size: GraphSize, split: str, training: bool = True) -> Batch:
    """The expected batch of a split; that of an evaluation has `eval_batch_size` seeds."""
    seeds = config.batch_size if training else config.eval_batch_size or config.batch_size
    return expected_batch(size, config.undirected, min(seeds, size.num_seeds[split]), config.num_neighbors)


def _evaluations(config: TrainConfig) -> tuple[list[str], list[str]]:
    """The splits evaluated between epochs, with the train loader resident, and after the last, without it."""
    if not config.epochs:
        return [], []
    between: list[str] = [*config.eval_splits] if config.epochs > config.eval_every else []
    final: list[str] = [*config.eval_splits]
    if config.train_eval == "every_epoch" and config.eval_splits:
        between, final = (["train", *between] if between else []), ["train", *final]
    elif config.train_eval == "final":
        final = ["train", *final]
    return between, final


def _ram_phases(config: TrainConfig, size: GraphSize, runtime: int) -> list[PhasePlan]:
    """eager, lazy and shared: the graph in RAM."""
    edges = num_edges(size, config.undirected)
    nodes = {
        "features": features_bytes(size, feature_itemsize(config, size)),
        "labels": labels_bytes(size),
    }
    shared = config.loading == "shared"
    phases: list[PhasePlan] = []

    def add(name: str, *parts: Mapping[str, int]) -> None:
        phases.append(PhasePlan(name, {name: amount for some in parts for name, amount in some.items()}))

    held = {"runtime": runtime}
    if shared:
        held["shared CSC"] = shared_csc_bytes(size, edges, config.sampler)
        add("build shared CSC", held)
        held |= nodes
        add("load", held)
    else:
        held |= nodes
        held["edge_index (COO)"] = coo_bytes(edges)
        add("load", held)

    sort = {"sort": stock_sort_bytes(size, edges)}

    def csc(split: str) -> dict[str, int]:
        return {} if shared else {f"{split} loader's CSC": stock_csc_bytes(size, edges)}

    resident = ["train", *(config.eval_splits if config.loading == "eager" else ())] if config.epochs else []
    for split in resident:
        held |= csc(split)
        if not shared:
            add(f"build {split} loader", held, sort)
    held["model, gradients, Adam"] = model_state_bytes(config, size.num_features, size.num_classes)
    between, final = _evaluations(config)
    if config.epochs:
        batch = split_batch(config, size, "train")
        workers = _workers(config, batch, size, "train", len(resident) - 1 if between else 0)
        add("train", held, _moving(config, batch, size, True), workers)

    def evaluate(split: str, when: str) -> None:
        own = {name: amount for name, amount in csc(split).items() if name not in held}
        if own:
            add(f"build {split} loader ({when})", held, own, sort)
        # An evaluation of the train split has a loader of its own, on the resident one's CSC.
        others = [name for name in resident if name != split or split == "train"]
        batch = split_batch(config, size, split, training=False)
        workers = _workers(config, batch, size, split, len(others))
        add(f"{when} {split}", held, own, _moving(config, batch, size, False), workers)

    for name in between:
        evaluate(name, "eval")
    held.pop("train loader's CSC", None)
    resident = resident[1:]
    for name in final:
        evaluate(name, "final")
    return phases


def _windows(
    config: TrainConfig, size: GraphSize, split: str, batch: Batch, budget: int | None, share: float
) -> WindowPlan:
    itemsize = feature_itemsize(config, size)
    files = store_bytes(size, num_edges(size, config.undirected), itemsize)
    batches, reserve = _num_batches(size, split, batch), step_reserve_bytes(config, batch, size)
    return choose_windows(files, size.num_nodes, size.num_features * itemsize, batch, batches, budget, share, reserve)


def _window_bytes(config: TrainConfig, size: GraphSize, batch: Batch, window: WindowPlan) -> int:
    """What a window really holds: each distinct node's features once, and every batch's own ids and edges."""
    assert window.window_batches is not None
    reach = spread(size, config.undirected)[1]
    drawn = window.window_batches * batch.num_nodes
    distinct = min(drawn, reach * -math.expm1(-drawn / reach))
    own = window.window_batches * compact_batch_bytes(batch, 0)
    itemsize = feature_itemsize(config, size)
    return int(distinct * size.num_features * itemsize) + own + window_fixed_bytes(size.num_nodes)


def _store_phases(
    config: TrainConfig, size: GraphSize, runtime: int, limit: int | None
) -> tuple[WindowPlan, list[PhasePlan]]:
    """store: the graph on disk, read through the page cache where it fits, else in windows."""
    per_seed = 8 + label_itemsize(size.num_classes)  # ids int64
    base = {"runtime": runtime, "splits and their labels": per_seed * sum(size.num_seeds.values())}
    phases = [PhasePlan("load", base)]
    base = {**base, "model, gradients, Adam": model_state_bytes(config, size.num_features, size.num_classes)}
    files = store_bytes(size, num_edges(size, config.undirected), feature_itemsize(config, size))
    budget: int | None = None
    if config.lookahead not in ("auto", "off"):
        budget = int(config.lookahead)
    elif config.lookahead == "auto" and limit is not None:
        budget = max(0, int(0.95 * limit) - phases[0].held_bytes)

    def add(when: str, split: str, batch: Batch, window: WindowPlan, ahead: Mapping[str, int]) -> None:
        training = when == "train"
        name = when if training else f"{when} {split}"
        moving = _prefetched(config, batch, size, training)
        if window.window_batches is not None:  # prepared by a thread, whatever `num_workers` is
            count = 2 if window.overlapped and (window.num_windows > 1 or (training and config.epochs > 1)) else 1
            windows = {"windows": count * _window_bytes(config, size, batch, window)}
            phases.append(PhasePlan(name, {**base, **moving, **windows, **ahead}))
            return
        if config.num_workers:
            workers = _workers(config, batch, size, split, 1 if when == "eval" else 0)
            moving = {**_moving(config, batch, size, training), **workers}
        phases.append(PhasePlan(name, {**base, **moving, **ahead}, sum(files.values())))

    batch = split_batch(config, size, "train")
    plan = _windows(config, size, "train", batch, budget, 0.45)
    if config.epochs:
        add("train", "train", batch, plan, {})
    pair = budget is not None and plan.window_batches is not None and plan.overlapped
    rest = budget - 2 * plan.window_bytes if pair and budget is not None else budget
    waiting = {"next window to train on": _window_bytes(config, size, batch, plan)} if pair else {}
    between, final = _evaluations(config)
    for splits, when, left, ahead in ((between, "eval", rest, waiting), (final, "final", budget, {})):
        for split in splits:
            batch = split_batch(config, size, split, training=False)
            add(when, split, batch, _windows(config, size, split, batch, left, 0.5), ahead)
    return plan, phases


def gpu_bytes(config: TrainConfig, batch: Batch, size: GraphSize) -> dict[str, int]:
    """The parts of a training step in GPU memory, allocated by torch, at its peak.

    The batch is copied whole: x in its own dtype, widened there to float32, and edge_index.
    """
    itemsize = feature_itemsize(config, size)
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
    batches = _num_batches(size, "train", batch)
    train_s = batches * (0.7e-3 + 0.35e-6 * batch.num_nodes + work / 30e9)
    window = plan.window
    if window is None or window.window_batches is None:
        return train_s
    files = store_bytes(size, num_edges(size, config.undirected), feature_itemsize(config, size))
    sweep_s = (files["x"] + hops * (files["colptr"] + files["row"])) / DISK_BYTES_PER_S * window.num_windows
    return max(train_s, sweep_s) if window.overlapped else train_s + sweep_s
