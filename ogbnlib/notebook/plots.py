"""Pictures of runs: memory over time, several runs on one scale, and their epochs, accuracies, peaks and forecasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from ..errors import GB, MB, InputError
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..runs.folder import CONFIG, Run, RunLike, Runs, named
from ..runs.timeline import Phase, held_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Array = NDArray[np.floating[Any]]


# Anonymous memory is what kills, so it has the strong colour; the file cache is reclaimable and pale.
PARTS = {
    "anon": ("anonymous", "#3b6fb6"),
    "shmem": ("shared (/dev/shm)", "#8e5bb0"),
    "file": ("file cache (reclaimable)", "#c9d8ea"),
}
CUDA_LAYERS = {
    "cuda_allocated_bytes": ("allocated by tensors", "#3b6fb6"),
    "cuda_unallocated_bytes": ("reserved, not allocated", "#f0a35e"),
    "cuda_free_bytes": ("free", "#e8e8e8"),
}
_SHADES = {  # by what a phase's name begins with; a legend leaves out names that begin with "_"
    "load": ("loading", "#e6e0d4"),
    "build": ("building loaders", "#f6c28b"),
    "train": ("training", "#dfe7f2"),
    "eval": ("evaluating", "#bfe3c0"),
    "release": ("_release", "#ffffff"),
}
_OTHER = "_other", "#ececec"
LIMIT, KILLED = "#c0392b", "#d62728"
_CROSS: dict[str, Any] = {"color": KILLED, "markersize": 13, "markeredgecolor": "white"}
_ROOM = 1.7  # of an axis' height: room above the highest sample and the limit for the phases' names
_WAIT_S = 5.0  # without a sample: between two attempts of a run nothing is held
_LABEL = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
_PLAIN: dict[str, Any] = {"fontsize": 8, "frameon": False}
_BELOW: dict[str, Any] = {**_PLAIN, "loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}


def _axes(ax: Axes | None, width: float = 9, height: float = 4.2) -> Axes:
    """`ax`, or those of a new figure; without the two borders that carry no scale."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _mark(ax: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    """A label beside a point, on white so that the curve under it does not disturb."""
    style = {"bbox": _LABEL, "zorder": 7, "fontsize": 8.5, **style}
    ax.annotate(text, at, xytext=shift, textcoords="offset points", **style)


def _unit(largest_bytes: float) -> tuple[int, str, Callable[[float], str]]:
    """A figure's one unit: in bytes, by name, and what writes a number of them; GB where the largest size has one."""
    return (GB, "GB", "{:.2f} GB".format) if largest_bytes >= GB else (MB, "MB", "{:.0f} MB".format)


# Memory over time -----------------------------------------------------------------------------------------------------


def _held(run: Run) -> tuple[Array, Array]:
    """Times of the samples, and what was held at them in bytes, one row each of PARTS."""
    held = held_memory(run.timeline)
    return held["time_s"].to_numpy(), _stacks(held, PARTS)


def _stacks(table: pd.DataFrame, layers: Mapping[str, Any]) -> Array:
    stacks: Array = table[[*layers]].fillna(0).to_numpy().T
    return stacks


def _top_bytes(run: Run) -> float:
    """The upper end of an axis for the highest sample, the limit, and above them the phases' names."""
    highest = float(_held(run)[1].sum(axis=0).max(initial=0))
    return _ROOM * max(highest, float(run.result.get("memory_limit_bytes") or 0), 2**20)


def _draw_layers(
    ax: Axes, run: Run, time_s: Array, stacks: Array, layers: Mapping[str, tuple[str, str]], title: str | None
) -> float:
    """Stacked layers over the phases of a run, under what became of it; gives the right end of the axis."""
    names, colours = zip(*layers.values(), strict=True)
    ax.stackplot(time_s, stacks, labels=names, colors=colours, linewidth=0, zorder=2)
    end_s = max(float(time_s[-1]), 1e-3) if len(time_s) else 1.0
    _draw_phases(ax, run, end_s)
    ax.set(xlim=(0, end_s * 1.02), xlabel="seconds")
    out_of_memory = run.exit_code in (137, OUT_OF_CUDA_MEMORY)
    title = title or f"{run.run_dir.name}: {run.state}"
    ax.set_title(title, fontsize=10, color=KILLED if out_of_memory else "black")
    return end_s


def _shade(phase: Phase) -> tuple[str, str] | None:
    return next((shade for prefix, shade in _SHADES.items() if phase.name.lower().startswith(prefix)), None)


def _draw_phases(ax: Axes, run: Run, end_s: float) -> None:
    """Shaded spans, innermost last so that it is seen; labels stand upright, where the span is wide enough for one."""
    trained = (run.run_dir / CONFIG).is_file()  # of another command each phase that it named is drawn
    phases = [phase for phase in run.phases if _shade(phase) or not trained]
    # Before the first phase Python starts and imports torch, 0.3 GB that a stranger would look for among the data.
    spans = [(0.0, min(phase.start_s for phase in phases), "imports")] if phases else []
    for phase in sorted(phases, key=lambda phase: phase.depth):
        stop = min(phase.until_s, end_s)
        label, colour = _shade(phase) or _OTHER
        label = "_again" if label in ax.get_legend_handles_labels()[1] else label
        ax.axvspan(phase.start_s, stop, color=colour, label=label, alpha=0.75, linewidth=0, zorder=0)
        ax.axvline(phase.start_s, color="white", linewidth=0.8, zorder=0.5)
        # A span that holds another one (eval holds build) is labelled where it is not covered: at its last stretch.
        inner = [p for p in phases if p.depth > phase.depth and phase.start_s <= p.start_s <= stop]
        covered = [min(p.until_s, stop) for p in inner if not p.name.startswith("release")]
        spans.append((max([phase.start_s, *covered]), stop, phase.label))
    free_from, width = 0.0, 0.028 * end_s
    style: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "top", "fontsize": 8, "color": "#333333"}
    for start, stop, label in sorted(spans):
        if stop - start >= width and start >= free_from:
            free_from = start + width
            ax.text((start + stop) / 2, 0.985, label, transform=ax.get_xaxis_transform(), zorder=4, **style)


def plot_timeline(
    run: RunLike,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    top_bytes: float | None = None,
    legend: bool = True,
) -> Axes:
    """One run's memory over time: anonymous, shared and file memory stacked, phases shaded, limit, peak, and a kill.

    Args:
        run: A `Run` or the folder of one.
        ax: Where to draw; a new figure by default.
        title: By default the folder's name and how the run ended.
        top_bytes: The axis' upper end, to draw several runs on one scale.
        legend: Whether to name the colours.

    Raises:
        InputError: when the folder holds no timeline.
    """
    run, ax = Run.open(run), _axes(ax)
    time_s, stacks = _held(run)
    top_bytes = top_bytes or _top_bytes(run)
    unit, name, text = _unit(top_bytes / _ROOM)
    stacks = stacks / unit
    waits = np.flatnonzero(np.diff(time_s) > _WAIT_S) + 1
    drawn = np.insert(time_s, waits, time_s[waits]), np.insert(stacks, waits, np.nan, axis=1)
    end_s = _draw_layers(ax, run, *drawn, PARTS, title)
    limit = (run.result.get("memory_limit_bytes") or 0) / unit
    if limit:
        ax.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.4, zorder=3)
        where = {"xycoords": ("axes fraction", "data"), "bbox": None}
        _mark(ax, f"limit {text(limit)}", (0.0, limit), (4, 3), color=LIMIT, **where)
    held = stacks[0] + stacks[1]
    if run.exit_code == 137 and len(held):
        # The last sample falls before the last allocation: what the kernel stopped was the climb to the limit.
        height = limit or held[-1]
        ax.plot([end_s] * 2, [held[-1], height], ":", color=KILLED, linewidth=1.5, zorder=5)
        ax.plot(end_s, height, "X", zorder=8, label="killed", **_CROSS)
        if phase := run.diagnosis.phase:
            # Well below the climb that it names, which it would hide.
            style = {"ha": "right", "va": "center", "color": KILLED}
            _mark(ax, f"killed in\n{phase}", (end_s, 0.4 * height), (-10, 0), **style)
    elif len(held):
        at = int(held.argmax())
        ax.plot(time_s[at], held[at], "o", color="black", markersize=4, zorder=6)
        late = time_s[at] > 0.75 * end_s
        side = {"ha": "right" if late else "center", "va": "bottom"}
        _mark(ax, f"peak {text(held[at])}", (time_s[at], held[at]), (-6 if late else 0, 8), **side)
    ax.set(ylim=(0, top_bytes / unit), ylabel=f"memory in {name}")
    if legend:
        ax.legend(ncol=4, **_BELOW)
    return ax


def plot_cuda(run: RunLike, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A run's GPU memory over time, stacked: allocated, reserved but unallocated, free; and the largest free block.

    Allocations that needed a second try are ticks at the bottom, a failed one is a cross. Under `max_cuda_memory` the
    top is the cap.

    Raises:
        InputError: when the run marked no GPU memory, as on a CPU.
    """
    run = Run.open(run)
    table = run.cuda
    if not len(table):
        raise InputError(f"{run.run_dir}: expected a run on a GPU, found no GPU memory in its events")
    ax = _axes(ax)
    time_s, stacks = table["time_s"].to_numpy(), _stacks(table, CUDA_LAYERS)
    unit, name, _ = _unit(float(stacks.sum(axis=0).max()))
    stacks = stacks / unit
    _draw_layers(ax, run, time_s, stacks, CUDA_LAYERS, title)
    largest = table["cuda_largest_free_bytes"] / unit
    if largest.notna().any():
        base = stacks[0] + np.minimum(largest.to_numpy(), stacks[1])
        ax.plot(time_s, base, color=LIMIT, linewidth=1, zorder=3, label="of it the largest free block")
    retries = table["cuda_alloc_retries"].diff() > 0
    if retries.any():
        where = time_s[retries.to_numpy()]
        ax.plot(where, np.zeros(len(where)), "^", color="black", clip_on=False, zorder=5, label="allocation retried")
    if run.exit_code == OUT_OF_CUDA_MEMORY:
        ax.plot(time_s[-1], stacks[0][-1] + stacks[1][-1], "X", zorder=7, label="allocation failed", **_CROSS)
    ax.set(ylim=(0, 1.05 * float(stacks.sum(axis=0).max())), ylabel=f"GPU memory in {name}")
    ax.legend(ncol=3, **_BELOW)
    return ax


def plot_runs(runs: Runs, *, columns: int = 3) -> Figure:
    """Several runs side by side, every one on the same memory scale.

    Args:
        runs: Titles to runs or their folders, or these alone, which are called by their folders.
        columns: Panels in a row.
    """
    titled = [*named(runs).items()]
    if not titled:
        raise InputError("runs: expected at least one run to draw, got none")
    columns = min(columns, len(titled))
    rows = -(-len(titled) // columns)
    # Three panels are as wide as a page of JupyterLab in a window of 1400 pixels, which would shrink wider ones.
    size = (4.0 if columns > 2 else 4.6) * columns, 3.9 * rows
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for ax in grid.flat[len(titled) :]:
        ax.set_visible(False)
    top = max(_top_bytes(run) for _, run in titled)
    handles: dict[str, Any] = {}
    for i, (ax, (name, run)) in enumerate(zip(grid.flat, titled, strict=False)):
        plot_timeline(run, ax, title=f"{name}: {run.state}", top_bytes=top, legend=False)
        if i % columns:
            ax.set_ylabel("")
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncol=5, **_PLAIN)
    return figure


# Epochs, peaks and forecasts ------------------------------------------------------------------------------------------


def epoch_times(runs: Mapping[tuple[str, str], RunLike], limits: Sequence[str], ax: Axes | None = None) -> Axes:
    """Seconds per epoch against the memory limit, one line per policy; a cross where the policy was killed.

    Args:
        runs: By (policy, limit).
        limits: Their order on the axis.
    """
    ax = _axes(ax, 7.5, 4)
    policies = list(dict.fromkeys(policy for policy, _ in runs))
    highest = 0.0
    for policy in policies:
        points = [(i, Run.open(runs[policy, limit])) for i, limit in enumerate(limits) if (policy, limit) in runs]
        alive = {i: float(run.metrics["time_s"].mean()) for i, run in points if run.exit_code == 0}
        (line,) = ax.plot([*alive], [*alive.values()], "o-", label=policy, zorder=3)
        highest = max([highest, *alive.values()])
        # Policies that die at the same limit stand beside each other.
        shift = 0.12 * (policies.index(policy) - len(policies) / 2)
        dead = [i + shift for i, run in points if run.exit_code != 0]
        style = {"color": line.get_color(), "markersize": 11, "markeredgecolor": "white"}
        if dead:  # nothing drawn, but not clipped, takes up room down to the figure's corner
            ax.plot(dead, [0] * len(dead), "X", clip_on=False, zorder=5, **style)
    ax.set_xticks(range(len(limits)), limits)
    ax.set(ylim=(0, 1.15 * highest or 1), xlabel="memory limit at full size (cross: killed)")
    ax.set_ylabel("seconds per epoch")
    ax.legend(**_PLAIN)
    return ax


def plot_accuracy(runs: Runs) -> Figure:
    """Loss, and accuracy on valid (full line) and test (dashed), over the epochs; a mark at the best valid accuracy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, run in named(runs).items():
        metrics = run.metrics
        (line,) = left.plot(metrics["epoch"], metrics["loss"], ".-", label=name)
        colour, best = line.get_color(), metrics[metrics["valid"] == metrics["valid"].max()].head(1)
        right.plot(metrics["epoch"], metrics["valid"], ".-", color=colour, label=f"{name}, valid")
        right.plot(metrics["epoch"], metrics["test"], ".--", color=colour, alpha=0.6, label=f"{name}, test")
        right.plot(best["epoch"], best["valid"], "o", color=colour, markersize=9, markeredgecolor="black")
    right.plot([], [], "o", color="white", markersize=9, markeredgecolor="black", label="best valid accuracy")
    for ax, what in ((_axes(left), "loss on train"), (_axes(right), "accuracy")):
        ax.set(xlabel="epoch", ylabel=what)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(**_PLAIN)
    right.set_ylim(bottom=0)
    return figure


def plot_peaks(peaks: Mapping[str, RunLike | float], limit_bytes: float | None = None, ax: Axes | None = None) -> Axes:
    """Horizontal bars of peak memory by name, with the limit they have to stay under.

    Args:
        peaks: Runs, of which the most anonymous + shared memory is drawn, or bytes.
    """
    ax = _axes(ax, 9, 0.5 * len(peaks) + 1.2)
    sizes = [
        float(peak) if isinstance(peak, int | float) else Run.open(peak).held_peak_bytes for peak in peaks.values()
    ]
    colours = [KILLED if limit_bytes and size >= 0.98 * limit_bytes else PARTS["anon"][1] for size in sizes]
    unit, name, text = _unit(max([*sizes, limit_bytes or 0]))
    bars = ax.barh(list(peaks), [size / unit for size in sizes], color=colours)
    ax.bar_label(bars, [text(size / unit) for size in sizes], padding=3, fontsize=9)
    ax.invert_yaxis()
    if limit_bytes:
        ax.axvline(limit_bytes / unit, color=LIMIT, linestyle="--")
        style = {"ha": "center", "color": LIMIT, "xycoords": ("data", "axes fraction")}
        _mark(ax, f"limit {text(limit_bytes / unit)}", (limit_bytes / unit, 1.0), (0, 3), **style)
    ax.set(xlim=(0, 1.15 * max([*sizes, limit_bytes or 0]) / unit), xlabel=f"peak memory in {name}")
    return ax


def _draw_forecasts(ax: Axes, predicted: pd.DataFrame, measured: pd.Series[float], colours: list[Any]) -> None:
    """One bar a row, its columns stacked, and a black mark at what was measured; NaN has none."""
    predicted.plot.barh(ax=ax, stacked=True, width=0.62, color=colours, legend=False)
    rows = np.arange(len(predicted))
    ax.vlines(measured, rows - 0.38, rows + 0.38, color="black", linewidth=2.2, zorder=5, label="measured peak")
    ax.set_ylim(len(predicted) - 0.5, -0.5)


def plot_forecast(run: RunLike, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A run's forecast beside what was measured: one bar a phase, its largest parts stacked, the measured peak a mark.

    Raises:
        InputError: when the run has no result yet, or no forecast in it.
    """
    run = Run.open(run)
    forecast = run.result.get("forecast", {})
    if "phases" not in forecast:
        raise InputError(
            f"{run.run_dir}: expected a result with a forecast, found {forecast.get('skipped', 'none')}; "
            "only runs of `run` have one"
        )
    phases = pd.DataFrame.from_dict(forecast["phases"], orient="index")
    parts, measured = pd.DataFrame(list(phases["parts"]), phases.index).fillna(0), phases["measured"].astype(float)
    unit, name, _ = _unit(max(parts.sum(axis=1).max(), measured.max()))
    largest = parts.max().nlargest(7).index
    drawn = parts[largest].assign(**{"other parts": parts.drop(columns=largest).sum(axis=1)})
    ax = _axes(ax, 9, 0.5 * len(phases) + 1.6)
    colours = [*plt.get_cmap("tab10").colors[: len(largest)], "#cccccc"]
    _draw_forecasts(ax, drawn / unit, measured / unit, colours)
    ax.set_xlabel(f"anonymous + shared memory in {name}")
    ax.set_title(title or f"{run.run_dir.name}: predicted parts, measured peaks", fontsize=10)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **_PLAIN)
    return ax


def plot_knobs(forecasts: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """One bar a setting: its predicted peak, the measured one as a mark, and beside it the full data set's forecast.

    Args:
        forecasts: As `forecast_table` makes them.
    """
    (full,) = (name for name in forecasts.columns if name.endswith(" GB"))
    ax, peaks = _axes(ax, 9, 0.4 * len(forecasts) + 1.6), forecasts[["predicted MB", "measured MB"]]
    _draw_forecasts(ax, peaks[["predicted MB"]], peaks["measured MB"], [PARTS["file"][1]])
    bars: Any = ax.containers[0]
    ax.bar_label(bars, [f"{size:.1f} GB" for size in forecasts[full]], padding=10, fontsize=9)
    ax.set(xlim=(0, 1.15 * float(peaks.max().max())), xlabel="peak memory in MB", ylabel="")
    ax.set_title(f"beside each bar: the forecast for {full.removesuffix(' GB')}", fontsize=10)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=2, **_PLAIN)
    return ax
