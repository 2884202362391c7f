"""Plots of runs: memory over time, epochs, accuracies, peaks and forecasts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..display import GREY
from ..errors import GB, MB, InputError, format_bytes, printable
from ..forecast.fitting import FITS, TIGHT, WILL_NOT_FIT
from ..forecast.planner import Advice
from ..graph.npz import Array
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..memory.record import Phase
from ..runs.folder import Run, RunLike, Runs, named
from ..runs.timeline import held_memory
from .tables import epoch_s

# Strong colours for memory that can't be reclaimed, a pale one for the file cache.
PARTS = {
    "anon": ("anonymous", "#3b6fb6"),
    "shmem": ("shared (/dev/shm)", "#8e5bb0"),
    "file": ("file cache (reclaimable)", "#c9d8ea"),
}
# prefix of a phase's name -> label and colour; legends leave out labels with a leading "_"
_SHADES = {
    "load": ("loading", "#8c7853"),
    "build": ("building loaders", "#f08a24"),
    "train": ("training", "#f2cf00"),
    "eval": ("evaluating", "#3fae4b"),
    "release": ("_release", "none"),
}
# Strong colours, drawn faintly: pale on a white page, dark on a dark one, and readable below names.
_SHADE_ALPHA = 0.22
# words in the name of a memory part -> its colour; black text is readable on each
_PART_COLOURS = {
    "features": "#8db4e2",
    "COO": "#f0a35e",
    "sort": "#f3d25b",
    "shared CSC": "#8fd18f",
    "valid loader's CSC": "#d993c0",
    "test loader's CSC": "#b3a1e6",
    "CSC": "#e58f80",
    "next pass": "#dcc9ee",
    "pass for the spool": "#c0a3df",
    "next window": "#bfe0d4",
    "windows": "#8cc7b0",
    "rows visited": "#f2a7c3",
    "columns": "#d9bf94",
    "batch": "#c3d977",
    "step": "#74c7c4",
    "labels": "#f7b6c8",
    "model": "#c9a27a",
    "runtime": "#c4c4c4",
    "other parts": "#e4e4e4",
}
LIMIT = "#c0392b"
KILLED = "#d62728"
_CROSS: dict[str, Any] = {"color": KILLED, "markersize": 13, "markeredgecolor": "white"}
_ROOM = 1.12  # height of the axis / the highest sample or limit
_NAME_LETTERS = 24  # most letters in a line of a phase's name
_VERDICTS = {FITS: "#2f8f4e", TIGHT: "#b3741f", WILL_NOT_FIT: KILLED, None: GREY}
_PLAIN: dict[str, Any] = {"fontsize": 8, "frameon": False, "labelcolor": GREY}


def _figure(
    rows: int, columns: int, size: tuple[float, float], sharey: bool = False
) -> tuple[Figure, Array]:
    figure, grid = plt.subplots(
        rows, columns, squeeze=False, sharey=sharey, figsize=size, layout="constrained"
    )
    for ax in grid.flat:
        _axes(ax)
    return figure, grid


def _axes(ax: Axes | None = None, width: float = 9, height: float = 4.2) -> Axes:
    if ax is None:
        return _figure(1, 1, (width, height))[1][0, 0]
    ax.set_facecolor("none")
    ax.tick_params(colors=GREY)
    ax.spines[:].set_color(GREY)
    ax.spines[["top", "right"]].set_visible(False)
    for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
        text.set_color(GREY)
    return ax


def _mark(
    ax: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any
) -> None:
    style = {"zorder": 7, "fontsize": 8.5, "color": GREY, **style}
    ax.annotate(text, at, xytext=shift, textcoords="offset points", **style)


def _unit(largest_bytes: float) -> tuple[int, str, Callable[[float], str]]:
    if largest_bytes >= GB:
        return GB, "GB", "{:.2f} GB".format
    return MB, "MB", "{:.0f} MB".format


def _plain(text: object) -> str:
    """Return a name in a form for pictures: in one line, with dollar signs escaped, as matplotlib
    would read formulas between them."""
    return printable(text).replace("\n", " ").replace("$", r"\$")


def _stacks(samples: pd.DataFrame) -> Array:
    return np.asarray(samples[[*PARTS]].fillna(0), np.float64).T  # bytes [parts, samples]


def _top_bytes(run: Run) -> float:
    highest = float(_stacks(held_memory(run.timeline)).sum(axis=0).max(initial=0))
    return _ROOM * max(highest, float(run.result.get("memory_limit_bytes") or 0), MB)


def _draw_run(
    ax: Axes,
    run: Run,
    time_s: Array,
    stacks: Array,
    title: str | None,
    begin_s: float,
) -> float:
    """Draw the stacked parts of a run's memory from `begin_s` on; return its last moment, in seconds.

    The axis is 2 % longer.
    """
    names, colours = zip(*PARTS.values(), strict=True)
    visible = stacks.max(axis=1, initial=0) > 0.005 * stacks.sum(axis=0).max(initial=0)
    labels = [name if seen else f"_{name}" for name, seen in zip(names, visible, strict=True)]
    ax.stackplot(time_s, stacks, labels=labels, colors=colours, linewidth=0, zorder=2)
    # The last phase may have begun after the last sample.
    starts_s = [phase.start_s for phase in run.phases]
    end_s = max([*time_s[-1:], *starts_s, 1e-3]) if len(time_s) else 1.0
    ax.set(xlim=(begin_s, end_s + 0.02 * (end_s - begin_s)), xlabel="seconds")
    colour = KILLED if run.exit_code in (137, OUT_OF_CUDA_MEMORY) else ax.title.get_color()
    ax.set_title(_plain(title or f"{run.run_dir.name}: {run.state}"), fontsize=10, color=colour)
    return end_s


def _shade(phase: Phase) -> tuple[str, str]:
    name = phase.name.lower()
    if name.startswith("line ") and "loader(" in name:
        name = "build"
    shades = (shade for prefix, shade in _SHADES.items() if name.startswith(prefix))
    return next(shades, ("_other", "none"))


def _shade_phases(
    ax: Axes, run: Run, end_s: float, in_use: Array, time_s: Array, begin_s: float
) -> None:
    is_training = run.paths.config.is_file()  # for other commands, every phase is drawn
    shown = (*_SHADES,) if is_training else ""
    phases = [phase for phase in run.phases if phase.name.lower().startswith(shown)]
    spans = []
    if phases:
        # Before the first phase Python imports torch, which takes 0.3 GB.
        first_s = min(phase.start_s for phase in phases)
        spans.append((0.0, first_s, "imports" if is_training else "start"))
    for phase in sorted(phases, key=lambda phase: phase.depth):
        stop = min(phase.until_s, end_s)
        if phase.end_s is None and phase.until_s < end_s:
            # The process that was in this phase died: not later than its last sample.
            stop = time_s[time_s < stop].max(initial=phase.start_s)
        label, colour = _shade(phase)
        # An outer phase is not drawn under its inner ones: two colours would mix to a third.
        inner = [p for p in phases if p.depth > phase.depth and not p.name.startswith("release")]
        pieces = [*_pieces(phase.start_s, stop, inner)]
        widest_s = max((until - max(start, begin_s) for start, until in pieces), default=0.0)
        is_thin = widest_s < 0.004 * (end_s - begin_s)  # thinner than a line
        if is_thin or label in ax.get_legend_handles_labels()[1]:
            label = "_again"
        for piece in pieces:
            ax.axvspan(
                *piece, color=colour, alpha=_SHADE_ALPHA, label=label, linewidth=0, zorder=0.01
            )
            label = "_again"
        ax.axvline(phase.start_s, color=GREY, linewidth=0.3, zorder=0.5)
        spans += [(*piece, phase.label) for piece in pieces[-1:]]
    visible = [(max(start, begin_s), stop, label) for start, stop, label in spans if stop > begin_s]
    _write_names(ax, visible, end_s - begin_s, in_use, time_s)


def _write_names(
    ax: Axes, spans: list[tuple[float, float, str]], shown_s: float, in_use: Array, time_s: Array
) -> None:
    """Write names vertically into spans that are wide enough: inside the curve where memory is
    high, else above it."""
    figure: Any = ax.get_figure()
    # the width of a line of text, 9.5 points, in seconds
    narrowest_s = 9.5 / (72 * figure.get_figwidth() * ax.get_position().width) * shown_s
    half = 0.5 * ax.get_ylim()[1]
    below_limit = 0.97 / _ROOM
    for start, stop, label in spans:
        if stop - start < narrowest_s:
            continue
        inside = in_use[(time_s >= start) & (time_s <= stop)]
        is_high = len(inside) > 0 and inside.mean() > half
        ax.text(
            (start + stop) / 2,
            0.02 if is_high else below_limit,
            _wrapped(label, 2 if stop - start > 2.2 * narrowest_s else 1),
            transform=ax.get_xaxis_transform(),
            zorder=4,
            rotation=90,
            ha="center",
            va="bottom" if is_high else "top",
            fontsize=8,
            color="white" if is_high else GREY,
        )


def _pieces(start_s: float, stop_s: float, inner: Iterable[Phase]) -> Iterator[tuple[float, float]]:
    for phase in sorted(inner, key=lambda phase: phase.start_s):
        if start_s < phase.start_s < stop_s:
            yield start_s, phase.start_s
        if phase.start_s < stop_s:
            start_s = max(start_s, phase.until_s)
    if start_s < stop_s:
        yield start_s, stop_s


def _wrapped(label: str, lines: int) -> str:
    text = _plain(label)
    letters = max(_NAME_LETTERS, *map(len, text.split())) if lines > 1 else _NAME_LETTERS
    rows = textwrap.TextWrapper(letters, max_lines=lines, placeholder="…", break_long_words=False)
    return rows.fill(text)


def plot_timeline(
    run: RunLike,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    top_bytes: float | None = None,
    legend: bool = True,
    since: str | None = None,
    page_cache: bool = True,
) -> Axes:
    """Plot a run's memory over time: stacked anonymous, shared and file memory, with phases,
    limit, peak, and a kill.

    Args:
        top_bytes: The upper end of the axis, to draw several runs on one scale.
        since: The phase at which the picture begins, such as "train epoch 1".
        page_cache: Whether to plot file memory, too.
    """
    run = Run.open(run)
    ax = _axes(ax)
    begin_s = next((phase.start_s for phase in run.phases if phase.label == since), 0.0)
    samples = held_memory(run.timeline)
    top_bytes = top_bytes or _top_bytes(run)
    unit, name, text = _unit(top_bytes / _ROOM)
    time_s, stacks = _with_gaps(
        samples["time_s"].to_numpy(), _stacks(samples) / unit, _resumed_s(run)
    )
    if not page_cache:
        stacks[-1] = 0
    end_s = _draw_run(ax, run, time_s, stacks, title, begin_s)
    ax.set(ylim=(0, top_bytes / unit), ylabel=f"memory in {name}")
    in_use = stacks[0] + stacks[1]
    _shade_phases(ax, run, end_s, in_use, time_s, begin_s)
    _mark_attempts(ax, run, time_s, in_use)
    limit = (run.result.get("memory_limit_bytes") or 0) / unit
    if limit:
        ax.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.4, zorder=3)
        _mark(
            ax,
            f"limit {text(limit)}",
            (0.0, limit),
            (4, 3),
            color=LIMIT,
            xycoords=("axes fraction", "data"),
        )
    if len(in_use):
        _draw_end(ax, run, time_s, in_use, (limit, end_s), text)
    if legend:
        figure: Any = ax.get_figure()
        below = -0.67 / figure.get_figheight()  # below the axis' label, in pictures of any height
        ax.legend(ncol=4, loc="upper center", bbox_to_anchor=(0.5, below), **_PLAIN)
    return ax


def _draw_end(
    ax: Axes,
    run: Run,
    time_s: Array,
    in_use: Array,
    corner: tuple[float, float],
    text: Callable[[float], str],
) -> None:
    """Mark a kill, or the peak of a run that was not killed; `corner` is the limit and the end."""
    limit, end_s = corner
    if run.exit_code == 137:
        # The last sample is older than the last allocation: the cross stands at the limit that
        # stopped the climb.
        height = limit or in_use[-1]
        ax.plot([end_s] * 2, [in_use[-1], height], ":", color=KILLED, linewidth=1.5, zorder=5)
        ax.plot(end_s, height, "X", zorder=8, label="killed", **_CROSS)
        _draw_killing_phase(ax, run, end_s)
        return
    # The peak stands in the title: beside its point it would cover the phases' names.
    at = int(in_use.argmax())
    ax.plot(time_s[at], in_use[at], "o", color=GREY, markersize=5, zorder=6)
    ax.set_title(f"{ax.get_title()}, peak {text(in_use[at])}", fontsize=10)


def _resumed_s(run: Run) -> list[float]:
    """Return the seconds at which the run was resumed."""
    starts_s = [event["time_s"] for event in run.events if event["event"] == "start"]
    return [start_s - run.events[0]["time_s"] for start_s in starts_s[1:]]


def _with_gaps(time_s: Array, stacks: Array, resumed_s: Iterable[float]) -> tuple[Array, Array]:
    """Add zeros from the last sample of an attempt to the start of the next one: no process ran."""
    for start_s in resumed_s:
        at = int(np.searchsorted(time_s, start_s))
        if at:
            time_s = np.insert(time_s, [at, at], [time_s[at - 1], start_s])
            stacks = np.insert(stacks, [at, at], 0.0, axis=1)
    return time_s, stacks


def _mark_attempts(ax: Axes, run: Run, time_s: Array, in_use: Array) -> None:
    """Mark the last sample of each interrupted attempt, and the start of the next one."""
    label = "interrupted"
    for start_s in _resumed_s(run):
        (earlier,) = np.nonzero((time_s < start_s) & (in_use > 0))
        last = earlier[-1:]
        ax.plot(time_s[last], in_use[last], "X", zorder=8, label=label, **_CROSS)
        label = "_again"
        ax.axvline(start_s, color=KILLED, linestyle=":", zorder=3)
        at = (start_s, 0.5)
        _mark(ax, "resumed", at, (4, 0), color=KILLED, xycoords=("data", "axes fraction"))


def _draw_killing_phase(ax: Axes, run: Run, end_s: float) -> None:
    phase = run.diagnosis.phase
    if not phase:
        return
    ax.set_title(f"{ax.get_title()}\nin phase '{_plain(phase)}'", fontsize=10, color=KILLED)
    start_s = max([0.0, *(entry.start_s for entry in run.phases if entry.label == phase)])
    shown_s = end_s - ax.get_xlim()[0]
    end_s = max(end_s, start_s + 0.015 * shown_s)  # within the axis, which is 2 % longer
    # behind the stack: over it, red and blue would mix to the colour of shared memory
    ax.axvspan(
        start_s, end_s, color=KILLED, alpha=0.45, linewidth=0, zorder=1, label="phase of the kill"
    )


def plot_runs(runs: Runs, *, columns: int = 3, one_time_axis: bool = False) -> Figure:
    """Plot the memory in use by several runs side by side on one scale, without page cache.

    `runs` maps titles to runs or their folders, or lists runs or folders.
    """
    titled = [*named(runs).items()]
    if not titled:
        raise InputError("runs: expected at least one run to draw, got none")
    columns = min(columns, len(titled))
    rows = -(-len(titled) // columns)
    # 3 panels fit into JupyterLab at 1400 pixels
    size = (4.0 if columns > 2 else 4.6) * columns, 3.9 * rows
    figure, grid = _figure(rows, columns, size, sharey=True)
    for ax in grid.flat[len(titled) :]:
        ax.set_visible(False)
    top = max(_top_bytes(run) for _, run in titled)
    handles: dict[str, Artist] = {}
    for i, (ax, (name, run)) in enumerate(zip(grid.flat, titled, strict=False)):
        title = f"{name}: {run.state}"
        plot_timeline(run, ax, title=title, top_bytes=top, legend=False, page_cache=False)
        if i % columns:
            ax.set_ylabel("")
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    if one_time_axis:
        plt.setp(grid.flat, xlim=(0, max(ax.get_xlim()[1] for ax in grid.flat)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncol=5, **_PLAIN)
    return figure


def epoch_times(runs: Mapping[tuple[str, str], RunLike]) -> Axes:
    """Plot the seconds of an epoch against the memory limit, which grows to the right.

    `runs` maps (policy, limit) to a run. Each policy has a line for the median of the later epochs
    and a dotted line for the first epoch. A cross marks a killed run; the policies that finished
    under the smallest limit are named there.
    """
    ax = _axes(width=7.5, height=4)
    opened = {key: Run.open(run) for key, run in runs.items()}
    sizes = {limit: run.result.get("memory_limit_bytes") or 0 for (_, limit), run in opened.items()}
    limits = sorted(sizes, key=lambda limit: sizes[limit])
    highest = 0.0
    policies = list(dict.fromkeys(policy for policy, _ in opened))
    for number, policy in enumerate(policies):
        of_policy = {limit: run for (name, limit), run in opened.items() if name == policy}
        finished = sorted(
            limits.index(limit) for limit in of_policy if not of_policy[limit].exit_code
        )
        times = [of_policy[limits[at]].metrics["time_s"] for at in finished]
        first = [series.iloc[:1].mean() for series in times]
        later = [epoch_s(of_policy[limits[at]]) for at in finished]
        (line,) = ax.plot(finished, later, "o-", label=policy, zorder=3)
        ax.plot(finished, first, ".:", color=line.get_color(), zorder=2)
        highest = max([highest, *first, *later])
        # Crosses of several policies at one limit stand side by side.
        shift = 0.12 * (number - len(policies) / 2)
        dead = [limits.index(limit) + shift for limit in of_policy if of_policy[limit].exit_code]
        cross = {**_CROSS, "color": line.get_color()}
        # An empty line that is not clipped would make the layout reserve the room up to the corner.
        ax.plot(dead, [0] * len(dead), "X", clip_on=False, in_layout=False, zorder=5, **cross)
        if 0 in finished:
            text = f"{_plain(policy)} finished under {limits[0]}"
            _mark(ax, text, (0, later[0]), (8, 8), color=line.get_color())
    ax.set_xticks(
        range(len(limits)), [f"{limit}\n({format_bytes(sizes[limit])})" for limit in limits]
    )
    ax.set(
        ylim=(0, 1.15 * highest or 1),
        ylabel="seconds of an epoch; dotted: the first",
        xlabel="memory limit at full size (here); cross: killed",
    )
    ax.legend(**_PLAIN)
    return ax


def plot_accuracy(runs: Runs) -> Figure:
    """Plot loss, valid accuracy (full line) and test accuracy (dashed) over the epochs, and mark
    the best epoch on valid."""
    figure, ((losses, accuracies),) = _figure(1, 2, (10, 4))
    for name, run in named(runs).items():
        name = _plain(name)
        metrics = run.metrics
        (line,) = losses.plot(metrics["epoch"], metrics["loss"], ".-", label=name)
        colour = line.get_color()
        best = run.best_epoch
        accuracies.plot(
            metrics["epoch"], metrics["valid"], ".-", color=colour, label=f"{name}, valid"
        )
        accuracies.plot(
            metrics["epoch"], metrics["test"], ".--", color=colour, alpha=0.6, label=f"{name}, test"
        )
        if best is not None:
            accuracies.plot(
                best["epoch"],
                best["valid"],
                "o",
                color=colour,
                markersize=9,
                markeredgecolor=GREY,
            )
    accuracies.plot(
        [],
        [],
        "o",
        color="none",
        markersize=9,
        markeredgecolor=GREY,
        label="best epoch on valid",
    )
    for ax, label in ((_axes(losses), "loss on train"), (_axes(accuracies), "accuracy")):
        ax.set(xlabel="epoch", ylabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend(**_PLAIN)
    accuracies.set_ylim(bottom=0)
    return figure


def plot_forecast(run: RunLike) -> Axes:
    """Plot a run's forecast: one bar per phase with its largest parts stacked, and a mark at the
    measured peak."""
    run = Run.open(run)
    forecast = run.result.get("forecast", {})
    if "phases" not in forecast:
        raise InputError(
            f"{run.run_dir}: expected a result with a forecast, found {forecast.get('skipped', 'none')}"
        )
    phases = pd.DataFrame.from_dict(forecast["phases"], orient="index")
    parts = pd.DataFrame(list(phases["parts"]), phases.index).fillna(0)
    measured = phases["measured"].astype(float)
    unit, name, _ = _unit(max(parts.sum(axis=1).max(), measured.max()))
    largest = parts.max().nlargest(7).index
    stacks = parts[largest].assign(**{"other parts": parts.drop(columns=largest).sum(axis=1)})
    ax = _axes(height=0.5 * len(phases) + 1.6)
    bars = (stacks / unit).rename(index=_plain, columns=_plain)
    bars.plot.barh(
        ax=ax,
        stacked=True,
        width=0.62,
        color=[*map(_part_colour, stacks.columns)],
        legend=False,
    )
    rows = np.arange(len(bars))
    ax.vlines(
        measured / unit,
        rows - 0.38,
        rows + 0.38,
        color=GREY,
        linewidth=2.2,
        zorder=5,
        label="measured peak",
    )
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlabel(f"anonymous + shared memory in {name}")
    ax.set_title(_plain(f"{run.run_dir.name}: predicted parts, measured peaks"), fontsize=10)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **_PLAIN)
    return ax


def plot_parts(
    plans: Mapping[str, Advice],
    limit_bytes: int,
    runs: Mapping[str, RunLike] | None = None,
    full: Mapping[str, Mapping[str, Advice]] | None = None,
) -> Axes:
    """Plot the named parts of memory at each plan's peak. If the plan has a run in `runs`, a mark
    shows its measured peak, a cross a killed run.

    `full` has plans of the same names for other graphs, by the graph's name: a column beside the
    bars for each graph, with peaks and verdicts.
    """
    ax = _axes(width=10, height=0.75 * len(plans) + 1.1)
    unit, unit_name, text = _unit(limit_bytes)
    peaks = (plan.forecast.peak_bytes for plan in plans.values())
    ax.set_xlim(0, 1.02 * max(limit_bytes, *peaks) / unit)
    ax.set_yticks(range(len(plans)), map(_plain, plans))
    ax.invert_yaxis()
    for row, plan in enumerate(plans.values()):
        _draw_parts(ax, row, plan.forecast.peak.parts, unit)
    for name, run in named(runs or {}).items():
        _mark_peak(ax, [*plans].index(name), run, limit_bytes / unit, unit)
    _write_verdicts(ax, [*plans], full or {})
    ax.axvline(limit_bytes / unit, color=LIMIT, linestyle="--", linewidth=1.4)
    _mark(
        ax,
        f"limit {text(limit_bytes / unit)}",
        (limit_bytes / unit, 1.0),
        (0, 3),
        color=LIMIT,
        ha="center",
        xycoords=("data", "axes fraction"),
    )
    measured = "; grey marks: measured peaks" if runs else ""
    ax.set_xlabel(f"memory in {unit_name}, without page cache{measured}")
    return ax


def _mark_peak(ax: Axes, row: int, run: Run, limit: float, unit: int) -> None:
    if run.exit_code != 137:
        peak = run.held_peak_bytes / unit
        ax.vlines(peak, row - 0.42, row + 0.42, color=GREY, linewidth=2.5, zorder=5)
        return
    ax.plot(limit, row - 0.36, "X", zorder=8, **_CROSS)  # not over the name of a part
    text = _plain(f"killed in {run.diagnosis.phase or 'no phase'}")
    # in one line below its own bar, so that no other bar seems to be the killed one
    _mark(ax, text, (limit, row + 0.37), (0, 0), color=KILLED, ha="center", va="top", fontsize=8)


def _write_verdicts(
    ax: Axes, names: Sequence[str], full: Mapping[str, Mapping[str, Advice]]
) -> None:
    """Write a column for each graph of `full` to the right of the bars: peak and verdict of each
    named plan."""
    for column, (graph, advices) in enumerate(full.items()):
        middle = 1.14 + 0.22 * column  # in widths of the axes
        _mark(
            ax,
            textwrap.fill(graph, 18),
            (middle, 1.0),
            (0, 3),
            ha="center",
            xycoords="axes fraction",
        )
        for row, name in enumerate(names):
            _mark(
                ax,
                advices[name].in_short.replace(", ", "\n"),
                (middle, row),
                (0, 0),
                color=_VERDICTS[advices[name].verdict],
                ha="center",
                va="center",
                xycoords=("axes fraction", "data"),
            )


def _part_colour(name: str) -> str:
    return next((colour for key, colour in _PART_COLOURS.items() if key in name), "#9a9a9a")


def _draw_parts(ax: Axes, row: int, parts: Mapping[str, int], unit: int) -> None:
    left = 0.0
    figure: Any = ax.get_figure()
    letters = 11 * figure.get_figwidth() / ax.get_xlim()[1]  # in one unit of the axis
    for name, size in parts.items():
        width = size / unit
        ax.barh(row, width, 0.72, left, color=_part_colour(name))
        middle = left + width / 2
        if width * letters > max(map(len, name.split())):
            words = _plain(name).replace(" ", "\n")
            ax.text(middle, row, words, ha="center", va="center", fontsize=7.5, color="black")
        elif width * letters > 1:
            _mark(
                ax,
                _plain(name),
                (middle, row + 0.4),
                (0, 0),
                ha="center",
                va="top",
                fontsize=7.5,
            )
        left += width
