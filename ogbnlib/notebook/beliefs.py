"""What people say about memory, each belief beside what runs of it measured. The verdict is computed, never fixed.

A function takes runs (`run`, `Run.open`) and returns its `Belief`; `ledger` makes the table. Memory is what a run held,
anonymous + shared (`Run.held_peak_bytes`). The docstrings say from where on a belief holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..errors import MB, format_bytes
from ..forecast.planner import FITS, Advice
from ..forecast.sizes import size_of
from ..graph.store import open_store
from ..runs.folder import Run
from .ledger import DOES_NOT_HOLD, HOLDS, NOT_MEASURED, Judged, ends, judged
from .ledger import Belief as Belief
from .ledger import ledger as ledger
from .tables import best_epochs, compare_cuda, compare_steps, loader_costs, phase_seconds, released

DATA = ("features", "labels", "edge_index (COO)", "shared CSC")  # what a run holds whatever its loaders


def _data_bytes(run: Run) -> int:
    return sum(run.parts.get(part, 0) for part in DATA)


def _lower(before: Run, after: Run, share: float) -> Judged:
    """Whether the peak fell by more than a share of what it was."""
    peak, saved = before.held_peak_bytes, before.held_peak_bytes - after.held_peak_bytes
    return f"from {format_bytes(peak)} to {format_bytes(after.held_peak_bytes)}", saved > share * peak


# The baseline, and the knobs ------------------------------------------------------------------------------------------


@judged("each worker copies the data set")
def workers_copy_the_data(with_workers: Run, without: Run) -> Judged:
    """Holds from half of the data set a worker on."""
    count = with_workers.config.num_workers
    added, data = with_workers.held_peak_bytes - without.held_peak_bytes, _data_bytes(without)
    measured = f"{count} workers per loader added {format_bytes(added)}, the data are {format_bytes(data)}; "
    measured += f"RSS, summed over processes, reached {format_bytes(with_workers.rss_peak_bytes)}"
    return measured, count > 0 and added >= 0.5 * count * data


@judged("a smaller batch and fan-out lowers the peak by a lot")
def smaller_batches_lower_the_peak(larger: Run, smaller: Run) -> Judged:
    """Holds from a tenth on."""
    return _lower(larger, smaller, 0.1)


@judged("one of these knobs brings the run under the limit", of_killed=True)
def turning_knobs_is_enough(attempts: Mapping[str, Run]) -> Judged:
    """Holds where any of the attempts finished."""
    return ends(attempts), any(run.exit_code == 0 for run in attempts.values())


@judged("persistent_workers keeps every sampled batch")
def workers_keep_every_batch(kept: Run, dropped: Run) -> Judged:
    """Holds where persistent workers (`kept`) hold as much more as the features of the seeds of all epochs take."""
    size, epochs = size_of(kept.config.dataset), kept.config.epochs
    seeds_bytes = 4 * size.num_features * size.num_seeds["train"] * epochs
    measured = f"{format_bytes(kept.held_peak_bytes)} with persistent workers, {format_bytes(dropped.held_peak_bytes)} "
    measured += f"without; the seeds of {epochs} epochs alone have {format_bytes(seeds_bytes)} of features"
    return measured, kept.held_peak_bytes - dropped.held_peak_bytes > seeds_bytes


@judged("halving the batch saves 40 GB")
def halving_the_batch_saves_40_gb(forecasts: pd.DataFrame) -> Judged:
    """`forecasts`: two rows of `forecast_table`, the whole batch's first. Holds from 20 GB at full size on."""
    (full,) = (name for name in forecasts.columns if name.endswith(" GB"))
    whole, half = forecasts.iloc[0], forecasts.iloc[-1]
    saved_mb, saved_gb = whole["measured MB"] - half["measured MB"], whole[full] - half[full]
    measured = f"{saved_mb:.0f} MB of {whole['measured MB']:.0f} here, {saved_gb:.2f} GB of {whole[full]:.1f} forecast "
    return measured + f"for {full.removesuffix(' GB')}", bool(saved_gb >= 20)


@judged("a smaller fan-out costs no accuracy")
def small_fan_outs_cost_no_accuracy(small: Run, large: Run) -> Judged:
    """Holds within two standard errors of the difference, on all evaluated nodes together."""
    (few, number), (many, _) = _accuracy(small), _accuracy(large)
    error = _standard_error(few, many, number)
    measured = f"{few:.3f} with {list(small.config.num_neighbors)}, {many:.3f} with {list(large.config.num_neighbors)} "
    measured += f"after {large.config.epochs} epochs; standard error of the difference {error:.3f}"
    worse = f"{DOES_NOT_HOLD}: {100 * (many - few):.1f} points less"
    return measured, worse if many - few > 2 * error else "holds, as far as this can tell"


def _accuracy(run: Run) -> tuple[float, int]:
    """Of the last evaluation on all evaluated nodes together, and their number."""
    seeds, last, splits = size_of(run.config.dataset).num_seeds, run.metrics.iloc[-1], run.config.eval_splits
    number = sum(seeds[split] for split in splits)
    return float(sum(seeds[split] * last[split] for split in splits if seeds[split])) / number, number


def _standard_error(one: float, other: float, number: int) -> float:
    """Of the difference of two accuracies on `number` nodes each."""
    return float((one * (1 - one) + other * (1 - other)) / number) ** 0.5


@judged("a run needs what htop shows as RES", of_killed=True)
def res_is_what_a_run_needs(free: Run, limited: Run) -> Judged:
    """`limited` is `free` again, under a limit below its RES. Holds where that killed it."""
    res, limit = free.rss_peak_bytes, limited.result["memory_limit_bytes"]
    measured = f"RES {format_bytes(res)}, of it {format_bytes(free.held_peak_bytes)} anonymous and shared; "
    measured += ends({f"under {format_bytes(limit)}": limited})
    return measured, limited.exit_code != 0 if limit < res else NOT_MEASURED


# Before a job is submitted --------------------------------------------------------------------------------------------


@judged("how much memory a job takes is known once it ran")
def only_a_run_can_tell(forecasts: pd.DataFrame) -> Judged:
    """`forecasts`: a `forecast_table`. Holds where a forecast is off by more than a tenth."""
    worst = forecasts["error %"].abs().max()
    measured = f"{forecasts['error %'].count()} forecasts from sizes alone, off by {worst:.1f} % at most"
    return measured, bool(worst > 10)


@judged("lazy loaders alone bring it under the limit", of_killed=True)
def lazy_loaders_are_enough(limited: Run, advice: Advice | None = None) -> Judged:
    """`limited`: lazy loaders under the limit; `advice`: the planner's, for the full data set. Holds if both fit."""
    return fits_and_finishes(limited, advice)


def fits_and_finishes(limited: Run, advice: Advice | None) -> Judged:
    """Whether a run under a limit finished, and the forecast at full size, where there is one, fits its own."""
    measured = ends({f"under {format_bytes(limited.result['memory_limit_bytes'])}": limited})
    if advice is None:
        return measured, limited.exit_code == 0
    measured += f"; {advice.forecast.size.name} under {format_bytes(advice.limit_bytes)}: {advice.verdict}, "
    measured += f"{format_bytes(advice.forecast.peak_bytes)} predicted"
    return measured, limited.exit_code == 0 and advice.verdict == FITS


# Loaders --------------------------------------------------------------------------------------------------------------


def _valid_loader(run: Run) -> pd.Series[Any]:
    """What the first building of the valid loader took and kept."""
    return loader_costs(run).loc[["build valid loader"]].iloc[0]


@judged("a loader costs as much as the data set")
def a_loader_costs_the_data_set(lazy: Run) -> Judged:
    """Holds where it keeps nine tenths of what features and edge list take."""
    build, data_mb = _valid_loader(lazy), _data_bytes(lazy) / MB
    kept, taken = build["kept MB"] / data_mb, build["transient MB"] / data_mb
    an_edge = [build[f"{what} bytes per edge"] for what in ("kept", "transient")]
    measured = f"{an_edge[0]:.1f} bytes an edge kept, {an_edge[1]:.1f} while it is built: "
    measured += f"{kept:.0%} and {taken:.0%} of features and edge list"
    return measured, HOLDS if kept > 0.9 else f"half true: {kept:.0%} of it is kept, {taken:.0%} taken for a moment"


@judged("lazy loaders lower the peak")
def lazy_loaders_lower_the_peak(eager: Run, lazy: Run) -> Judged:
    """Holds from 2 % on."""
    return _lower(eager, lazy, 0.02)


@judged("each further loader costs memory")
def every_loader_costs(lazy: Run, shared: Run) -> Judged:
    """Stock loaders and views on one CSC judged apart; from 1 MB on a loader costs."""
    stock = _valid_loader(lazy)["kept MB"]
    view = loader_costs(shared).loc[["build valid loader", "build test loader"], "kept MB"].max()
    measured = f"{stock:.0f} MB for a stock one, {view:.1f} MB for a view on the shared CSC"
    return measured, "half true: stock ones do, views do not" if view < 1 <= stock else bool(view >= 1)


@judged("del gives a loader's memory back")
def del_gives_memory_back(lazy: Run) -> Judged:
    """Holds where the garbage collector, after the `del`, finds less than a tenth of a loader."""
    collected, trimmed = released(lazy)[["gc MB", "malloc_trim MB"]].mean()
    measured = f"after it gc.collect() gave {collected:.1f} MB a time and malloc_trim {trimmed:.1f}"
    return measured, bool(collected < 0.1 * _valid_loader(lazy)["kept MB"])


@judged("gc.collect() gives memory back")
def the_collector_gives_memory_back(lazy: Run, shared: Run) -> Judged:
    """Half true where it frees a deleted stock loader (half of what one keeps, or more), and under a view nothing."""
    stock, view = released(lazy)["gc MB"].mean(), released(shared)["gc MB"].mean()
    measured = f"{stock:.1f} MB a time after del of a stock loader, {view:.1f} MB after del of a view"
    frees = "half true: of deleted loaders, not in general" if view < 1 else HOLDS
    return measured, frees if stock > 0.5 * _valid_loader(lazy)["kept MB"] else DOES_NOT_HOLD


# Evaluation -----------------------------------------------------------------------------------------------------------


@judged("skipping train evaluation saves time")
def skipping_train_evaluation_saves_time(every_epoch: Run) -> Judged:
    """Holds from 5 % of the training's time on."""
    seconds = phase_seconds({"run": every_epoch})["run"]
    evaluating, training = seconds.get("eval train", 0.0), seconds["train epoch"]
    building = seconds[seconds.index.str.startswith("build")].sum()
    measured = f"{evaluating:.1f} s of evaluating it, beside {training:.1f} s of training and {building:.1f} s of "
    verdict = HOLDS if evaluating > 0.05 * training else DOES_NOT_HOLD
    more = ", but building loaders costs more" if building > evaluating else ""
    return measured + "building loaders", verdict + more


@judged("skipping train evaluation lowers the peak")
def skipping_train_evaluation_lowers_the_peak(every_epoch: Run, never: Run) -> Judged:
    """Holds from 2 % on."""
    return _lower(every_epoch, never, 0.02)


@judged("evaluating less often saves time")
def evaluating_less_often_saves_time(often: Run, seldom: Run) -> Judged:
    """Holds from 2 % of the run's time on."""
    saved = float(often.metrics["eval_time_s"].sum() - seldom.metrics["eval_time_s"].sum())
    took, times = often.result["duration_s"], [run.metrics["valid"].count() for run in (seldom, often)]
    return f"{saved:.1f} s of {took:.1f} s, by evaluating {times[0]} instead of {times[1]} times", saved > 0.02 * took


@judged("releasing memory every few batches lowers the peak")
def releasing_often_lowers_the_peak(never: Run, often: Run) -> Judged:
    """`often` has `release_every`. Holds from 2 % on."""
    measured, lower = _lower(never, often, 0.02)
    took = float(often.metrics["time_s"].sum() - never.metrics["time_s"].sum())
    return f"{measured}, for {took:.1f} s more of training", lower


# A training step, on a GPU where the runs had one ---------------------------------------------------------------------


def _against(plain: Run, option: Run) -> tuple[float, float, str]:
    """Memory of a step and time of an epoch relative to the plain run, and both in words."""
    memory, time = compare_steps({"plain": plain, "option": option})[["to plain", "time to plain"]].loc["option"]
    where = "GPU" if any(event["event"] == "cuda" for event in plain.events) else "CPU"
    return memory, time, f"on the {where} {memory:.0%} of a step's memory and {time:.0%} of an epoch's time"


@judged("fp16/bf16 halves memory")
def half_precision_halves_memory(plain: Run, half: Run) -> Judged:
    """Holds up to 55 % of the plain step."""
    memory, _, measured = _against(plain, half)
    return measured, memory < 0.55


@judged("checkpointing saves 50-70 %")
def checkpointing_saves_most(plain: Run, checkpointed: Run) -> Judged:
    """Holds where 30 to 50 % of the plain step are left."""
    memory, _, measured = _against(plain, checkpointed)
    return measured, 0.3 <= memory <= 0.5


@judged("accumulation makes batch size free")
def accumulation_is_free(plain: Run, accumulated: Run) -> Judged:
    """Of memory below half of the plain step, of time up to a tenth more."""
    memory, time, measured = _against(plain, accumulated)
    return measured, "half true: of memory, not of time" if memory < 0.5 and time > 1.1 else memory < 0.5


@judged("empty_cache each batch helps")
def emptying_the_cache_helps(plain: Run, emptied: Run) -> Judged:
    """`emptied` has `empty_cache_every=1`. Holds where 5 % less is reserved and no more than 5 % more time taken."""
    return less_is_reserved(plain, emptied)


def less_is_reserved(plain: Run, emptied: Run) -> Judged:
    """Of a GPU's memory: 5 % less, for no more than 5 % more time."""
    table = compare_cuda({"plain": plain, "emptied": emptied})[["reserved GB", "epoch s"]]
    reserved, time = table.loc["emptied"] / table.loc["plain"]
    if reserved != reserved:
        return "the runs used no GPU", NOT_MEASURED
    return f"{reserved:.0%} of the reserved memory, {time:.0%} of an epoch's time", reserved < 0.95 and time < 1.05


@judged("memory grows from epoch to epoch")
def memory_grows_from_epoch_to_epoch(run: Run) -> Judged:
    """From what is held after the evaluations of valid, when all is released; epoch 1 fills caches. From 2 % on."""
    held = [phase.info["end_held_bytes"] for phase in run.phases if phase.name == "eval valid"]
    if len(held) < 3:
        return f"{len(held)} epochs", NOT_MEASURED
    growth = held[-1] / held[1] - 1
    return f"{growth:+.2%} from epoch 2 to epoch {len(held)}", growth > 0.02


@judged("a list of losses leaks memory")
def kept_losses_leak(grown_bytes: Mapping[str, float]) -> Judged:
    """What a process grew by for each way of keeping losses, "loss" first; from 1 MB on, and a tenth of that."""
    whole, *_ = grown_bytes.values()
    measured = ", ".join(f"{way} {format_bytes(size)}" for way, size in grown_bytes.items())
    harmless = [way for way, size in grown_bytes.items() if size < 0.1 * whole]
    leaks = f"half true: kept as {', '.join(harmless)} they do not" if harmless else HOLDS
    return measured, leaks if whole > MB else DOES_NOT_HOLD


# On disk, and to convergence ------------------------------------------------------------------------------------------


@judged("there is no easy workaround, use a larger machine", of_killed=True)
def there_is_no_easy_workaround(runs: Mapping[tuple[str, str], Run]) -> Judged:
    """`runs` by (policy, limit), limits falling. Holds where "store" finished under none."""
    lowest = {name: "none" for name, _ in runs}
    lowest |= {name: limit for (name, limit), run in runs.items() if run.exit_code == 0}
    finished = ", ".join(f"{name} {low}" for name, low in lowest.items())
    return f"lowest limit that a policy finished under: {finished}", lowest["store"] == "none"


@judged("converting needs the memory of loading")
def converting_takes_the_memory_of_loading(converted: Run, loaded: Run) -> Judged:
    """Holds from half of it on."""
    measured = f"{format_bytes(converted.held_peak_bytes)} against {format_bytes(loaded.held_peak_bytes)}"
    return measured, converted.held_peak_bytes > 0.5 * loaded.held_peak_bytes


@judged("another place for the graph gives another model", of_killed=True)
def another_place_is_another_model(runs: Mapping[str, Run]) -> Judged:
    """Holds where the losses of runs that finished differ in any digit."""
    losses = {name: list(run.metrics["loss"]) for name, run in runs.items() if run.exit_code == 0}
    measured = "last losses: " + ", ".join(f"{name} {loss[-1]:.6f}" for name, loss in losses.items())
    return measured, len({tuple(loss) for loss in losses.values()}) > 1 if len(losses) > 1 else NOT_MEASURED


@judged("sampling at evaluation costs no accuracy")
def sampling_costs_nothing_at_evaluation(sampled: float, exact: float, number: int) -> Judged:
    """Accuracies of one model on `number` nodes; not settled within two standard errors of the difference."""
    error = _standard_error(sampled, exact, number)
    measured = (
        f"{sampled:.3f} with sampled neighbors, {exact:.3f} with all; standard error of the difference {error:.3f}"
    )
    within = "not measured: within two standard errors"
    return measured, within if abs(sampled - exact) <= 2 * error else bool(sampled >= exact)


@judged("training to convergence needs the data in memory")
def converging_needs_the_data_in_memory(run: Run) -> Judged:
    """Holds where the run held more than its store takes on disk, beside the interpreter."""
    store = open_store(run.config.dataset)
    begun = next(phase for phase in run.phases if phase.name == "compile kernels").info["end_held_bytes"]
    best, held = best_epochs({"run": run}).loc["run"], run.held_peak_bytes - begun
    measured = f"{format_bytes(held)} held beside the interpreter, {format_bytes(store.nbytes)} on disk: test accuracy "
    measured += f"{best['test']:.3f} at the best valid accuracy, epoch {best['best epoch']:.0f} of {len(run.metrics)}"
    return measured, held > store.nbytes


@judged("checkpoints cost time")
def checkpoints_cost_time(run: Run) -> Judged:
    """Holds from 5 % of the run's time on."""
    seconds = phase_seconds({"run": run})["run"]
    saving, total = seconds.get("checkpoint", 0.0), seconds.sum()
    return f"{saving:.1f} s of {total:.0f} s, in {len(run.metrics)} epochs", bool(saving > 0.05 * total)


@judged("the directed graph is enough")
def the_directed_graph_is_enough(undirected: Run, directed: Run) -> Judged:
    """Test accuracy at the best valid accuracy; not settled within two standard errors of the difference."""
    both, one_way = best_epochs({"both": undirected, "one way": directed})["test"]
    error = _standard_error(both, one_way, size_of(undirected.config.dataset).num_seeds["test"])
    measured = f"test accuracy {one_way:.3f} directed, {both:.3f} with reverse edges; standard error of the difference "
    within = "not measured: within two standard errors"
    return measured + f"{error:.3f}", within if abs(both - one_way) <= 2 * error else bool(one_way > both)
