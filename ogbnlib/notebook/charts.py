"""Pictures that compare runs: epochs, accuracies, peaks, forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from ..errors import InputError
from ..runs.folder import Run
from .plots import GB, KILLED, LIMIT, PARTS, axes, mark, opened

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .plots import RunLike


def epoch_times(runs: Mapping[tuple[str, str], Run], limits: Sequence[str], ax: Axes | None = None) -> Axes:
    """Seconds per epoch against the memory limit, one line per policy; a cross where the policy was killed.

    Args:
        runs: By (policy, limit).
        limits: Their order on the axis.
    """
    ax = axes(ax, 7.5, 4)
    policies = list(dict.fromkeys(policy for policy, _ in runs))
    highest = 0.0
    for policy in policies:
        points = [(i, runs[policy, limit]) for i, limit in enumerate(limits) if (policy, limit) in runs]
        alive = [(i, float(run.metrics["time_s"].mean())) for i, run in points if run.exit_code == 0]
        line = ax.plot([i for i, _ in alive], [time_s for _, time_s in alive], "o-", label=policy, zorder=3)[0]
        highest = max([highest, *[time_s for _, time_s in alive]])
        for i, run in points:
            if run.exit_code != 0:
                # Policies that die at the same limit stand beside each other.
                shift = 0.12 * (policies.index(policy) - len(policies) / 2)
                style = {"color": line.get_color(), "markersize": 11, "markeredgecolor": "white"}
                ax.plot(i + shift, 0, "X", clip_on=False, zorder=5, **style)
    ax.set_xticks(range(len(limits)), limits)
    ax.set_ylim(0, 1.15 * highest or 1)
    ax.set_xlabel("memory limit at full size (cross: killed)")
    ax.set_ylabel("seconds per epoch")
    ax.legend(fontsize=8, frameon=False)
    return ax


def plot_accuracy(runs: Mapping[str, Run]) -> Figure:
    """Loss, and accuracy on valid (full line) and test (dashed), over the epochs; a mark at the best valid accuracy."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, run in runs.items():
        metrics = run.metrics
        (line,) = left.plot(metrics["epoch"], metrics["loss"], ".-", label=name)
        colour, best = line.get_color(), metrics.loc[metrics["valid"].idxmax()]
        right.plot(metrics["epoch"], metrics["valid"], ".-", color=colour, label=f"{name}, valid")
        right.plot(metrics["epoch"], metrics["test"], ".--", color=colour, alpha=0.6, label=f"{name}, test")
        right.plot(best["epoch"], best["valid"], "o", color=colour, markersize=9, markeredgecolor="black")
    right.plot([], [], "o", color="white", markersize=9, markeredgecolor="black", label="best valid accuracy")
    for ax, what in ((axes(left), "loss on train"), (axes(right), "accuracy")):
        ax.set_xlabel("epoch")
        ax.set_ylabel(what)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(fontsize=8, frameon=False)
    right.set_ylim(bottom=0)
    return figure


def plot_peaks(peaks: Mapping[str, RunLike | float], limit_bytes: float | None = None, ax: Axes | None = None) -> Axes:
    """Horizontal bars of peak memory by name, with the limit they have to stay under.

    Args:
        peaks: Runs, of which the most anonymous + shared memory is drawn, or bytes.
    """
    ax = axes(ax, 9, 0.5 * len(peaks) + 1.2)
    sizes = [float(peak) if isinstance(peak, int | float) else opened(peak).held_peak_bytes for peak in peaks.values()]
    colours = [KILLED if limit_bytes and size >= 0.98 * limit_bytes else PARTS[0][2] for size in sizes]
    bars = ax.barh(list(peaks), [size / GB for size in sizes], color=colours)
    ax.bar_label(bars, fmt="%.2f GB", padding=3, fontsize=9)
    ax.invert_yaxis()
    if limit_bytes:
        ax.axvline(limit_bytes / GB, color=LIMIT, linestyle="--")
        style = {"ha": "center", "color": LIMIT, "xycoords": ("data", "axes fraction")}
        mark(ax, f"limit {limit_bytes / GB:.2f} GB", (limit_bytes / GB, 1.0), (0, 3), **style)
    ax.set_xlim(0, 1.15 * max([*sizes, limit_bytes or 0]) / GB)
    ax.set_xlabel("peak memory in GB")
    return ax


def plot_forecast(run: RunLike, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A run's forecast beside what was measured: one bar a phase, its largest parts stacked, the measured peak a mark.

    Raises:
        InputError: when the run has no result yet, or no forecast in it.
    """
    run = opened(run)
    forecast = run.result.get("forecast", {})
    if "phases" not in forecast:
        raise InputError(
            f"{run.run_dir}: expected a result with a forecast, found {forecast.get('skipped', 'none')}; "
            "only runs of `run` have one"
        )
    phases = forecast["phases"]
    ax = axes(ax, 9, 0.5 * len(phases) + 1.6)
    names = list(dict.fromkeys(name for phase in phases.values() for name in phase["parts"]))
    top = sorted(names, key=lambda name: -max(phase["parts"].get(name, 0) for phase in phases.values()))[:7]
    colours = plt.get_cmap("tab10")
    rows = np.arange(len(phases))
    left = np.zeros(len(phases))
    for i, name in enumerate([*top, "other parts"]):
        if name == "other parts":
            sizes = np.array([phase["predicted"] for phase in phases.values()]) / GB - left
        else:
            sizes = np.array([phase["parts"].get(name, 0) for phase in phases.values()]) / GB
        colour = "#cccccc" if name == "other parts" else colours(i)
        ax.barh(rows, sizes, left=left, height=0.62, color=colour, label=name, alpha=0.85)
        left += sizes
    measured = [phase["measured"] for phase in phases.values()]
    for row, value in zip(rows, measured, strict=True):
        if value is not None:
            ax.plot([value / GB] * 2, [row - 0.38, row + 0.38], color="black", linewidth=2.2, zorder=5)
    ax.plot([], [], color="black", linewidth=2.2, label="measured peak")
    ax.set_yticks(rows, list(phases))
    ax.invert_yaxis()
    ax.set_xlabel("anonymous + shared memory, GB")
    ax.set_title(title or f"{run.run_dir.name}: predicted parts, measured peaks", fontsize=10)
    ax.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return ax


def plot_knobs(forecasts: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """One bar a setting: its predicted peak, the measured one as a mark, and beside it the full data set's forecast.

    Args:
        forecasts: As `forecast_table` makes them.
    """
    (full,) = (name for name in forecasts.columns if name.endswith(" GB"))
    ax, rows = axes(ax, 9, 0.4 * len(forecasts) + 1.6), np.arange(len(forecasts))
    bars = ax.barh(rows, forecasts["predicted MB"], height=0.62, color=PARTS[2][2], label="predicted")
    ax.vlines(forecasts["measured MB"], rows - 0.38, rows + 0.38, color="black", linewidth=2.2, label="measured")
    ax.bar_label(bars, [f"{size:.1f} GB" for size in forecasts[full]], padding=10, fontsize=9)
    ax.set_yticks(rows, forecasts.index)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.15 * float(forecasts[["predicted MB", "measured MB"]].max().max()))
    ax.set_xlabel("peak memory in MB")
    ax.set_title(f"beside each bar: the forecast for {full.removesuffix(' GB')}", fontsize=10)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=2, fontsize=8, frameon=False)
    return ax
