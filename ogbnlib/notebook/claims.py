"""Numbers that a job on papers100M is planned with, each beside what it is. The verdict is computed, as in `beliefs`.

What does not change with a data set's size, as bytes an edge and ratios of times, is measured on a small one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..config import TrainConfig
from ..errors import GB, format_bytes
from ..forecast.phases import predict
from ..forecast.planner import FITS, Advice
from ..forecast.sizes import size_of, trained_edges
from ..runs.folder import Run
from ..sources.catalog import open_dataset
from .beliefs import fits_and_finishes, less_is_reserved
from .ledger import NOT_MEASURED, Judged, judged
from .tables import loader_costs

FULL = "ogbn-papers100M"


def sampled_nodes(
    config: TrainConfig, settings: Mapping[str, Mapping[str, Any]], full: str = FULL, batches: int = 10
) -> pd.DataFrame:
    """One row per setting: seeds times the product of fan-outs, and the nodes that batches have.

    `counted` is the mean of `batches` training batches of `config.dataset`; `full` the mean that is expected
    at that data set's size, with the direction of `config`.
    """
    import torch
    from torch_geometric.sampler import NodeSamplerInput

    from ..sampling.sampler import CSCSampler

    store, rows = open_dataset(config.dataset), {}
    seeds = torch.from_numpy(np.random.default_rng(config.seed).permutation(store.splits["train"]))
    for name, setting in settings.items():
        changed = config.replace(**setting)
        size, fan_out = changed.batch_size, changed.num_neighbors
        sampler = CSCSampler(store.colptr, store.row, fan_out, seed=config.seed)
        whole = max(1, min(batches, len(seeds) // size))  # or all there are, where they make no batch
        parts = [seeds[begin : begin + size] for begin in range(0, whole * size, size)]
        at_full = predict(changed.replace(dataset=full), size_of(full)).batch.num_nodes
        rows[name] = {
            "arithmetic": size * int(1 + np.cumprod(fan_out).sum()),
            "counted": round(
                np.mean([len(sampler.sample_from_nodes(NodeSamplerInput(None, part)).node) for part in parts])
            ),
            full: round(at_full),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


@judged("a batch has seeds x (1 + k1 + k1 k2 ...) nodes")
def a_batch_is_the_product_of_its_fan_outs(counts: pd.DataFrame) -> Judged:
    """`counts`: a `sampled_nodes`. Holds where no setting is more than a tenth off."""
    measured = ", ".join(f"{row.arithmetic:,} counted as {row.counted:,}" for row in counts.itertuples())
    return measured, bool((counts["counted"] > 0.9 * counts["arithmetic"]).all())


@judged("the train split is all 111 M nodes")
def the_train_split_is_all_nodes(dataset: str = FULL) -> Judged:
    """Holds from nine tenths on."""
    size = size_of(dataset)
    share = size.num_seeds["train"] / size.num_nodes
    return f"{size.num_seeds['train']:,} of {size.num_nodes:,} nodes, {share:.1%}", share > 0.9


@judged("the edge list takes 15 GB")
def the_edge_list_takes_15_gb(stock: Run, full: str = FULL) -> Judged:
    """`stock`: eager or lazy. Holds within a tenth."""
    an_edge = stock.parts["edge_index (COO)"] / trained_edges(size_of(stock.config.dataset), stock.config.undirected)
    takes = an_edge * trained_edges(size_of(full), stock.config.undirected)
    return f"{an_edge:.1f} bytes an edge, {takes / GB:.1f} GB at full size", abs(takes / (15 * GB) - 1) <= 0.1


@judged("loaders take 20 GB on top")
def loaders_take_20_gb(stock: Run, full: str = FULL) -> Judged:
    """`stock`: eager or lazy. What one loader keeps, and what another takes while it is built. Holds within a tenth."""
    an_edge = loader_costs(stock).loc[["build valid loader"]].iloc[0]
    edges = trained_edges(size_of(full), stock.config.undirected)
    keeps, takes = (edges * an_edge[f"{what} bytes per edge"] / GB for what in ("kept", "transient"))
    measured = f"each keeps {keeps:.1f} GB at full size, and takes {takes:.1f} while it is built"
    return measured, bool(abs((keeps + takes) / 20 - 1) <= 0.1)


@judged("smaller batches and fan-outs fit the job into its memory")
def smaller_settings_fit(plans: Mapping[str, Advice]) -> Judged:
    """Forecasts at full size under a limit. Holds where any fits."""
    measured = ", ".join(f"{name} {format_bytes(advice.forecast.peak_bytes)}" for name, advice in plans.items())
    limits = {format_bytes(advice.limit_bytes) for advice in plans.values()}
    return f"{measured}; under {', '.join(limits)}", any(advice.verdict == FITS for advice in plans.values())


@judged("twice the memory is enough", of_killed=True)
def twice_the_memory_is_enough(limited: Run, advice: Advice) -> Judged:
    """A run under the scaled limit, and the forecast at full size. Holds if both fit."""
    return fits_and_finishes(limited, advice)


@judged("empty_cache every 10 batches helps")
def emptying_every_ten_batches_helps(plain: Run, emptied: Run) -> Judged:
    """`emptied` has `empty_cache_every=10`. Holds as `beliefs.emptying_the_cache_helps` does."""
    return less_is_reserved(plain, emptied)


# Time -----------------------------------------------------------------------------------------------------------------


def _seconds(run: Run) -> float:
    """Of all epochs and their evaluations."""
    return float(run.metrics[["time_s", "eval_time_s"]].sum().sum())


@judged("skipping train evaluation is 33 % faster")
def skipping_train_evaluation_saves_a_third(every_epoch: Run, never: Run) -> Judged:
    """Of epochs and evaluations together. Holds from 30 % on."""
    saved = 1 - _seconds(never) / _seconds(every_epoch)
    measured = f"{_seconds(every_epoch):.1f} s with it, {_seconds(never):.1f} s without: {saved:.0%} saved"
    return measured, saved >= 0.3


@judged("the train loss is enough to follow a training")
def the_loss_is_enough(run: Run) -> Judged:
    """Holds where the epoch of the lowest loss is that of the best valid accuracy."""
    known = run.metrics.dropna(subset="valid").set_index("epoch")
    if len(known) < 3:
        return f"{len(known)} evaluations", NOT_MEASURED
    lowest, best = known["loss"].idxmin(), known["valid"].idxmax()
    lost = known["valid"][best] - known["valid"][lowest]
    measured = f"lowest loss in epoch {lowest:.0f}, best valid accuracy in epoch {best:.0f} of {len(run.metrics)}"
    return f"{measured}; going by the loss costs {100 * lost:.1f} points", bool(lost == 0)


@judged("more threads make it faster")
def more_threads_are_faster(one: Run, many: Run) -> Judged:
    """`many` has another `num_threads`. Holds where an epoch takes nine tenths of the time or less."""
    times = [float(run.metrics["time_s"].min()) for run in (one, many)]
    threads = many.config.num_threads or "all"
    return f"{times[0]:.2f} s an epoch with one, {times[1]:.2f} s with {threads}", times[1] <= 0.9 * times[0]


@judged("a CPU is 10 to 50 times slower")
def a_cpu_is_far_slower(cpu: Run, gpu: Run | None) -> Judged:
    """Holds from ten times on, by an epoch's time; without a GPU nothing is measured but the CPU's."""
    took = float(cpu.metrics["time_s"].min())
    if gpu is None:
        return f"{took:.1f} s an epoch on the CPU, no GPU here", NOT_MEASURED
    times = took / float(gpu.metrics["time_s"].min())
    return f"{times:.1f} times, {took:.1f} s an epoch on the CPU", times >= 10
