"""Tables of runs: exit, peaks, times, forecast and measurement, costs of loaders, memory
released."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import pandas as pd

from ..config import TrainConfig
from ..errors import GB, MB, clear_errors
from ..forecast.memory_parts import trained_edges
from ..forecast.run_forecast import predict
from ..forecast.step_memory import saved_bytes
from ..memory.record import Phase
from ..runs.folder import Run, RunLike, Runs, named
from ..sources.catalog import open_dataset
from ..sources.resolve import size_of


def epoch_s(run: Run) -> float:
    """Return the median seconds of an epoch, without the first of several, which loads
    libraries."""
    times = run.metrics["time_s"]
    return float(times.iloc[min(1, len(times) - 1) :].median())


def compare_runs(runs: Runs) -> pd.DataFrame:
    """Return one row per run: how it ended, its peak memory in use (anonymous + shared) in GB, the
    seconds of the run, of an epoch (the median, without the first of several) and of all
    evaluations, and the last metrics."""
    rows: dict[str, dict[str, object]] = {}
    for name, run in named(runs).items():
        rows[name] = {
            "ended": run.state,
            "in phase": "" if run.exit_code == 0 else run.diagnosis.phase or "",
            # NaN for a run that was not started
            "peak GB": round(run.held_peak_bytes / GB, 3) or float("nan"),
            "run s": round(run.result.get("duration_s", run.record.duration_s), 1),
        }
        metrics = run.metrics
        if len(metrics):
            rows[name]["epoch s"] = round(epoch_s(run), 2)
            rows[name]["all evals s"] = round(metrics["eval_time_s"].sum(), 2)
            rows[name] |= metrics[["loss", "valid", "test"]].iloc[-1].add_prefix("last ")
    return pd.DataFrame(rows.values(), pd.Index(rows, name="run", tupleize_cols=False))


@clear_errors()
def forecast_table(runs: Runs, full: str = "ogbn-papers100M") -> pd.DataFrame:
    """Return one row per run: predicted and measured peak, and the forecast of its settings on the
    data set `full`.

    Peaks are anonymous + shared memory. The error of the prediction is relative to the measured
    peak. Both are NaN for a run that did not finish, because a killed run's peak is that of its
    limit.
    """
    rows = {}
    for name, run in named(runs).items():
        here = predict(run.config, memory_limit_bytes=run.result.get("memory_limit_bytes"))
        full_forecast = predict(run.config.replace(dataset=full), size_of(full))
        measured = run.held_peak_bytes if run.exit_code == 0 else float("nan")
        rows[name] = {
            "predicted MB": round(here.peak_bytes / MB),
            "measured MB": round(measured / MB, 0),
            "error %": round(100 * (here.peak_bytes / measured - 1), 1),
            "epoch s": round(epoch_s(run), 2),
            f"{full} GB": round(full_forecast.peak_bytes / GB, 2),
            "its peak in": full_forecast.peak.name,
        }
    return pd.DataFrame(rows.values(), pd.Index(rows, name="setting", tupleize_cols=False))


@clear_errors()
def loader_costs(run: RunLike) -> pd.DataFrame:
    """Return the memory that building each loader kept, and the memory that it needed at its peak,
    in MB and in bytes per edge."""
    run = Run.open(run)
    table = run.phase_memory
    edges = trained_edges(size_of(run.config.dataset), run.config.undirected)
    table = table[table["phase"].str.startswith("build")].reset_index(drop=True)
    for column in ("kept", "transient"):
        size = table.pop(f"{column}_bytes")
        table[f"{column} MB"] = (size / MB).round(1)
        table[f"{column} bytes per edge"] = (size / edges).round(2)
    return table.rename(columns={"duration_s": "seconds"}).round({"seconds": 2}).set_index("phase")


def released(run: RunLike) -> pd.DataFrame:
    """Return the MB that each step of each `release_memory` call in a run gave back; negative if
    the step took memory."""
    events = [event for event in Run.open(run).events if event["event"] == "release"]
    table = pd.DataFrame(
        events, columns=["after", "gc", "malloc_trim", "synchronize", "empty_cache"]
    )
    for step in table.columns[1:]:
        table[f"{step} MB"] = (table.pop(step).astype(float) / MB).round(1)
    return table


def compare_cuda(runs: Runs) -> pd.DataFrame:
    """Return one row per run: peaks of allocated and reserved GPU memory in GB, retried
    allocations, epoch seconds.

    "unallocated GB" is the largest difference of reserved and allocated memory in any reading.
    """
    rows = {}
    for name, run in named(runs).items():
        table = run.cuda
        allocated = table[["cuda_allocated_bytes", "cuda_peak_allocated_bytes"]]
        reserved = table[["cuda_reserved_bytes", "cuda_peak_reserved_bytes"]]
        releases = [event for event in run.events if event["event"] == "release"]
        rows[name] = {
            "ended": run.state,
            "allocated GB": allocated.max().max() / GB,
            "reserved GB": reserved.max().max() / GB,
            "unallocated GB": table["cuda_unallocated_bytes"].max() / GB,
            "retries": table["cuda_alloc_retries"].max(),
            "release s": sum(event.get("took_s", 0) for event in releases),
            "epoch s": epoch_s(run),
        }
    return pd.DataFrame.from_dict(rows, orient="index").round(3)


def compare_steps(runs: Runs) -> pd.DataFrame:
    """Return one row per run: the MB that a training step adds and the median seconds of an epoch,
    both also relative to the first run.

    On a GPU, the memory of a step is the peak that torch allocated. Without a GPU, it is the rise
    within an epoch (`Run.phase_memory`), which includes the batch and its sampling. Rises and
    seconds leave out the first of several epochs: it loads libraries and allocates gradients that
    stay.
    """
    runs = named(runs)
    allocated = compare_cuda(runs)["allocated GB"] * 2**10
    rows = {}
    for name, run in runs.items():
        phases = run.phase_memory
        rises = phases.loc[phases["phase"].str.startswith("train epoch"), "transient_bytes"] / MB
        first = min(1, len(run.metrics) - 1)
        step = rises.iloc[first:].max() if allocated.isna()[name] else allocated[name]
        rows[name] = {"step MB": step, "epoch s": epoch_s(run)}
    table = pd.DataFrame.from_dict(rows, orient="index")
    table[["relative memory", "relative time"]] = table[["step MB", "epoch s"]] / table.iloc[0]
    return table.round(3)


def best_epochs(runs: Runs) -> pd.DataFrame:
    """Return one row per run: the best epoch on valid, its valid and test accuracy, the number of
    epochs trained, and the peak in GB."""
    rows = {}
    for name, run in named(runs).items():
        best = run.best_epoch
        if best is None:
            best = pd.Series(index=run.metrics.columns, dtype=float)
        rows[name] = {
            "best epoch": best["epoch"],
            "valid": best["valid"],
            "test": best["test"],
            "epochs trained": len(run.metrics),
            "peak GB": round(run.held_peak_bytes / GB, 3),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def phase_seconds(runs: Runs) -> pd.DataFrame:
    """Return the seconds that each run spent in each kind of phase, summed over epochs, without
    inner phases."""
    columns = {}
    for name, run in named(runs).items():
        seconds: defaultdict[str, float] = defaultdict(float)
        entered: dict[int, Phase] = {}  # depth -> its latest phase
        for phase in run.phases:
            entered[phase.depth] = phase
            if phase.end_s is None:
                continue
            seconds[phase.name] += phase.end_s - phase.start_s
            outer = entered.get(phase.depth - 1)
            if outer is not None and outer.end_s is not None:
                seconds[outer.name] -= phase.end_s - phase.start_s
        columns[name] = seconds
    return pd.DataFrame(columns).fillna(0.0).round(3)


@clear_errors()
def sampled_nodes(
    config: TrainConfig, settings: Mapping[str, Mapping[str, object]], full: str
) -> pd.DataFrame:
    """Return one row per setting with the nodes of a batch: by arithmetic, counted, and expected
    on `full`.

    "arithmetic" is seeds x (1 + k1 + k1 k2 ...); "counted" is the mean of up to 10 training
    batches of `config.dataset`.
    """
    import torch
    from torch_geometric.sampler import NodeSamplerInput

    from ..sampling.sampler import CSCSampler

    store = open_dataset(config.dataset)
    rows = {}
    seeds = torch.from_numpy(np.random.default_rng(config.seed).permutation(store.splits["train"]))
    for name, setting in settings.items():
        changed = config.replace(**setting)
        size = changed.batch_size
        sampler = CSCSampler(store.colptr, store.row, changed.num_neighbors, seed=config.seed)
        parts = torch.split(seeds, size)[: max(1, min(10, len(seeds) // size))]  # full batches
        counted = [
            len(sampler.sample_from_nodes(NodeSamplerInput(None, part)).node) for part in parts
        ]
        rows[name] = {
            "arithmetic": size * int(1 + np.cumprod(changed.num_neighbors).sum()),
            "counted": round(np.mean(counted)),
            full: round(predict(changed.replace(dataset=full), size_of(full)).batch.num_nodes),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


@clear_errors()
def step_table(config: TrainConfig, options: Mapping[str, Mapping[str, object]]) -> pd.DataFrame:
    """Return one row per option: the memory of a training step in MB (2**20 bytes), forecast
    before anything is run.

    `step MB` forecasts the figure that `compare_steps` measures without a GPU: the batch, its
    sampling and the layers' memory. `GPU step MB` forecasts the figure that it measures on a GPU,
    including weights, gradients and Adam's moments. Of the GPU step, `kept MB` are the activations
    saved for the backward pass, and `peak MB` is the most memory that the layers use at a time.

    Args:
        options: Maps names to changes of `config`, such as `{"plain": {}, "bf16": {"precision":
            "bf16"}}`.
    """
    rows = {}
    for name, changes in options.items():
        forecast = predict(config.replace(**changes))
        size = forecast.size
        rows[name] = {
            "step MB": sum(forecast.train.step().values()),
            "kept MB": saved_bytes(
                forecast.config, forecast.batch, size.num_features, size.num_classes, on_gpu=True
            ),
            "peak MB": forecast.gpu["activations"],
            "GPU step MB": sum(forecast.gpu.values()),
        }
    return (pd.DataFrame.from_dict(rows, orient="index") / MB).round(1)
