"""Tables of runs: exit, peaks, times, forecast and measurement, costs of loaders."""

import pandas as pd

from ..errors import GB, MB, clear_errors
from ..forecast.memory_parts import trained_edges
from ..forecast.run_forecast import predict
from ..memory.reading import own_memory
from ..runs.folder import Run, RunLike, Runs, named
from ..sources.resolve import size_of


def memory_in_use() -> int:
    """Return the bytes of anonymous and shared memory of this process."""
    return own_memory()[0]


def epoch_s(run: Run) -> float:
    """Return the median seconds of an epoch, without the first of several, which loads
    libraries; NaN if no epoch was finished."""
    times_s = run.metrics["time_s"]  # one for each finished epoch
    return float(times_s.iloc[min(1, len(times_s) - 1) :].median())


def compare_runs(runs: Runs) -> pd.DataFrame:
    """Return one row per run: how it ended, its peak memory in use (anonymous + shared) in GB, the
    seconds of the run, of an epoch (the median, without the first of several) and of all
    evaluations, and the last metrics.

    Runs on a GPU add the peaks of allocated and reserved memory in GB and the retried allocations.
    """
    rows: dict[str, dict[str, object]] = {}
    for name, run in named(runs).items():
        rows[name] = {
            "ended": run.state,
            "in phase": "" if run.exit_code == 0 else run.diagnosis.phase or "",
            # NaN for a run that was not started
            "peak GB": round(run.held_peak_bytes / GB, 3) or float("nan"),
            "run s": round(run.diagnosis.facts.duration_s or 0, 1),
        }
        metrics = run.metrics
        if len(metrics):  # one row for each finished epoch
            rows[name]["epoch s"] = round(epoch_s(run), 2)
            rows[name]["all evals s"] = round(metrics["eval_time_s"].sum(), 2)
            rows[name] |= metrics[["loss", "valid", "test"]].iloc[-1].add_prefix("last ")
        if len(run.cuda):  # one row for each reading of GPU memory
            peaks = run.cuda.max()
            rows[name] |= {
                "GPU allocated GB": round(peaks["cuda_peak_allocated_bytes"] / GB, 3),
                "GPU reserved GB": round(peaks["cuda_peak_reserved_bytes"] / GB, 3),
                "GPU retries": peaks["cuda_alloc_retries"],
            }
    # a name may be a tuple, which pandas would split into levels
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
        forecast = predict(run.config, memory_limit_bytes=run.result.get("memory_limit_bytes"))
        full_forecast = predict(run.config.replace(dataset=full), size_of(full))  # sizes alone
        measured_bytes = run.held_peak_bytes if run.exit_code == 0 else float("nan")
        rows[name] = {
            "predicted MB": round(forecast.peak_bytes / MB),
            "measured MB": round(measured_bytes / MB, 0),  # without 0, round(NaN) raises
            "error %": round(100 * (forecast.peak_bytes / measured_bytes - 1), 1),
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
    table = run.phase_memory  # columns: phase, duration_s, kept_bytes, transient_bytes
    num_edges = trained_edges(size_of(run.config.dataset), run.config.undirected)
    table = table[table["phase"].str.startswith("build")].reset_index(drop=True)
    for column in ("kept", "transient"):
        sizes = table.pop(f"{column}_bytes")
        table[f"{column} MB"] = (sizes / MB).round(1)
        table[f"{column} bytes per edge"] = (sizes / num_edges).round(2)
    return table.rename(columns={"duration_s": "seconds"}).round({"seconds": 2}).set_index("phase")


@clear_errors()
def compare_steps(runs: Runs) -> pd.DataFrame:
    """Return one row per run: the MB that a training step adds, measured and forecast, and the
    median seconds of an epoch, both also relative to the first run.

    On a GPU, the memory of a step is the peak that torch allocated. Without a GPU, it is the rise
    within an epoch (`Run.phase_memory`), which includes the batch and its sampling. Rises and
    seconds leave out the first of several epochs: it loads libraries and allocates gradients that
    stay.
    """
    rows = {}
    for name, run in named(runs).items():
        forecast = predict(run.config)
        if len(run.cuda):
            step = run.cuda["cuda_peak_allocated_bytes"].max() / MB
            expected = sum(forecast.gpu.values()) / MB  # bytes by named part
        else:
            phases = run.phase_memory  # one row for each finished phase
            rises = phases.loc[phases["phase"].str.startswith("train epoch"), "transient_bytes"]
            step = rises.iloc[min(1, len(run.metrics) - 1) :].max() / MB  # without the first epoch
            expected = sum(forecast.train.step().values()) / MB
        rows[name] = {"step MB": step, "forecast MB": expected, "epoch s": epoch_s(run)}
    table = pd.DataFrame.from_dict(rows, orient="index")
    measured = table[["step MB", "epoch s"]]
    table[["relative memory", "relative time"]] = measured / measured.iloc[0]  # to the first run
    return table.round(3)


def best_epochs(runs: Runs) -> pd.DataFrame:
    """Return one row per run: the best epoch on valid, its valid and test accuracy, the number of
    epochs trained, and the peak in GB."""
    rows = {}
    for name, run in named(runs).items():
        # NaN for a run of which no epoch was evaluated
        best = pd.Series(run.best_epoch, ["epoch", "valid", "test"], dtype=float)
        rows[name] = {
            "best epoch": best["epoch"],
            "valid": best["valid"],
            "test": best["test"],
            "epochs trained": len(run.metrics),
            "peak GB": round(run.held_peak_bytes / GB, 3),
        }
    return pd.DataFrame.from_dict(rows, orient="index")
