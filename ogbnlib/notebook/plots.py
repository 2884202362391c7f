"""Plots of runs: memory over time, epochs, accuracies, peaks and forecasts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# prefix of a phase's name -> label in the legend and colour; matplotlib leaves out of a legend the
# labels with a leading "_"
_SHADES = {
    "load": ("loading", "#8c7853"),
    "build": ("building loaders", "#f08a24"),
    "train": ("training", "#f2cf00"),
    "eval": ("evaluating", "#3fae4b"),
    "release": ("_release", "none"),
}
LIMIT = "#c0392b"
KILLED = "#d62728"
_CROSS: dict[str, Any] = {"color": KILLED, "markersize": 13, "markeredgecolor": "white"}
_ROOM = 1.12  # height of the axis / the highest sample or limit
_VERDICTS = {FITS: "#2f8f4e", TIGHT: "#b3741f", WILL_NOT_FIT: KILLED, None: GREY}  # None: no limit
_PLAIN: dict[str, Any] = {"fontsize": 8, "frameon": False, "labelcolor": GREY}  # of legends


def _figure(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, Array]:
    # `size` is in inches; the array of axes is (rows, columns). Without its frame a figure is
    # transparent, and JupyterLab puts no background behind it.
    figure, grid = plt.subplots(
        rows, columns, squeeze=False, figsize=size, layout="constrained", frameon=False, **options
    )
    for ax in grid.flat:
        _axes(ax)
    return figure, grid


def _axes(ax: Axes | None = None, width: float = 9, height: float = 4.2) -> Axes:
    # Make axes readable on a light and a dark page. The size of a new figure is in inches.
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
    ax: Axes, text: str, at: tuple[float, float], shift: tuple[float, float] = (0, 0), **style: Any
) -> None:
    # `at` is in the axes' units, or in those of `xycoords`; `shift` is in points.
    style = {"zorder": 7, "fontsize": 8.5, "color": GREY, **style}
    ax.annotate(text, at, xytext=shift, textcoords="offset points", **style)


def _unit(largest_bytes: float) -> tuple[int, str]:
    return (GB, "GB") if largest_bytes >= GB else (MB, "MB")  # bytes in the axis's unit, its name


def _plain(text: object) -> str:
    """Return a name in one line with escaped $, between which matplotlib would read a formula."""
    return printable(text).replace("\n", " ").replace("$", r"\$")


def _top_bytes(run: Run, page_cache: bool) -> float:  # the upper end of a run's memory axis
    memory = held_memory(run.timeline)  # one row for each sample, a column for each of PARTS
    parts = [part for part in PARTS if page_cache or part != "file"]
    highest = float(memory[parts].fillna(0).sum(axis="columns").max()) if len(memory) else 0.0
    return _ROOM * max(highest, float(run.memory_limit_bytes or 0), MB)  # never 0


def _look(phase: Phase) -> tuple[str, str]:  # its label in the legend, and its colour
    name = phase.name.lower()
    if name.startswith("line ") and "loader(" in name:  # a statement of a %%memory_limit cell
        name = "build"
    shades = (shade for prefix, shade in _SHADES.items() if name.startswith(prefix))
    return next(shades, ("_other", "none"))


def _uncovered(
    start_s: float, stop_s: float, inner: Iterable[Phase]
) -> Iterator[tuple[float, float]]:
    # Yield the spans from `start_s` to `stop_s` in which none of the inner phases runs.
    for phase in sorted(inner, key=lambda phase: phase.start_s):
        if start_s < phase.start_s < stop_s:
            yield start_s, phase.start_s
        if phase.start_s < stop_s:
            start_s = max(start_s, phase.until_s)
    if start_s < stop_s:
        yield start_s, stop_s


def _wrapped(label: str, lines: int) -> str:  # cut with "…"; of two lines no word is cut
    text = _plain(label).replace(".", ".\v")  # a row may end after a dot, as in a.long_name()
    letters = max(28, *map(len, text.split())) if lines > 1 else 24  # in a row
    rows = textwrap.TextWrapper(
        letters,
        max_lines=lines,
        placeholder="…",
        break_long_words=False,
        replace_whitespace=False,
    )
    return rows.fill(text).replace("\v", "")


def _legend(ax: Axes) -> dict[str, Artist]:  # label -> its last artist
    artists, labels = ax.get_legend_handles_labels()
    return dict(zip(labels, artists, strict=True))


def _with_gaps(time_s: Array, stacks: Array, resumed_s: Iterable[float]) -> tuple[Array, Array]:
    """Add zeros from the last sample of an attempt to the start of the next one: no process ran."""
    # time_s: (samples,), stacks: (parts, samples), resumed_s: the starts of the later attempts
    for start_s in resumed_s:
        at = int(np.searchsorted(time_s, start_s))  # the first sample of the attempt
        if at:  # else there is none before it
            time_s = np.insert(time_s, [at, at], [time_s[at - 1], start_s])
            stacks = np.insert(stacks, [at, at], 0.0, axis=1)
    return time_s, stacks


class _Timeline:
    """Picture of a run's memory over time, in one axes.

    Sizes are in the unit of the axis, times in seconds since the run began. The picture begins at the
    first phase with the label `since`.
    """

    def __init__(self, ax: Axes, run: Run, top_bytes: float, since: str | None = None):
        self._ax = ax
        self._run = run
        self._unit, unit_name = _unit(top_bytes / _ROOM)
        self._limit = (run.memory_limit_bytes or 0) / self._unit  # 0 without one
        starts_s = [event["time_s"] for event in run.events if event["event"] == "start"]
        self._resumed_s = [start_s - run.events[0]["time_s"] for start_s in starts_s[1:]]
        samples = held_memory(run.timeline)
        sizes = np.asarray(samples[[*PARTS]].fillna(0), np.float64).T / self._unit
        # (samples,) and (3, samples): anonymous, shared, file cache
        self._time_s, self._stacks = _with_gaps(
            samples["time_s"].to_numpy(), sizes, self._resumed_s
        )
        self._in_use = self._stacks[0] + self._stacks[1]
        self._begin_s = next((phase.start_s for phase in run.phases if phase.label == since), 0.0)
        # The last phase may have begun after the last sample. No axis may be 0 s long.
        phases_s = [phase.start_s for phase in run.phases]
        self._end_s = max([self._time_s[-1], *phases_s, 1e-3]) if len(self._time_s) else 1.0
        self._shown_s = self._end_s - self._begin_s
        ax.set_xlim(self._begin_s, self._end_s + 0.02 * self._shown_s)
        ax.set_ylim(0, top_bytes / self._unit)
        ax.set(xlabel="seconds", ylabel=f"memory in {unit_name}")

    def draw(self, title: str | None, page_cache: bool = True) -> None:
        """Draw the memory, the phases, the limit, and the peak or the kill."""
        if not page_cache:
            self._stacks[-1] = 0
        names, colours = zip(*PARTS.values(), strict=True)
        least = 0.005 * self._stacks.sum(axis=0).max(initial=0)  # thinner parts are invisible
        labels = [
            name if part.max(initial=0) > least else f"_{name}"  # "_": not in the legend
            for name, part in zip(names, self._stacks, strict=True)
        ]
        self._ax.stackplot(
            self._time_s, self._stacks, labels=labels, colors=colours, linewidth=0, zorder=2
        )
        self._set_title(_plain(title or f"{self._run.run_dir.name}: {self._run.state}"))
        self._write_names(self._shade_phases())
        self._mark_attempts()
        if self._limit:
            at = (0.0, self._limit)
            text = f"limit {format_bytes(self._limit * self._unit)}"
            self._ax.axhline(self._limit, color=LIMIT, linestyle="--", linewidth=1.4, zorder=3)
            _mark(self._ax, text, at, (4, 3), color=LIMIT, xycoords=("axes fraction", "data"))
        if len(self._in_use):
            self._draw_end()

    def _mark_attempts(self) -> None:
        """Mark the last sample of each interrupted attempt, and the start of the next one."""
        for start_s in self._resumed_s:
            (earlier,) = np.nonzero((self._time_s < start_s) & (self._in_use > 0))  # 0: in a gap
            last = earlier[-1:]  # the index of one sample, or none
            self._ax.plot(
                self._time_s[last], self._in_use[last], "X", zorder=8, label="interrupted", **_CROSS
            )
            self._ax.axvline(start_s, color=KILLED, linestyle=":", zorder=3)
            at = (start_s, 0.5)
            _mark(self._ax, "resumed", at, (4, 0), color=KILLED, xycoords=("data", "axes fraction"))

    def _set_title(self, text: str) -> None:
        is_killed = self._run.exit_code in (137, OUT_OF_CUDA_MEMORY)  # 137: 128 + SIGKILL
        self._ax.set_title(text, fontsize=10, color=KILLED if is_killed else GREY)

    def _stop_s(self, phase: Phase) -> float:
        """Return the moment at which a phase ended, or its process was seen last."""
        stop_s = min(phase.until_s, self._end_s)
        if phase.end_s is not None or stop_s == self._end_s:
            return stop_s
        # A kill left it open, until the next attempt's start `stop_s`: the last sample before
        return float(self._time_s[self._time_s < stop_s].max(initial=phase.start_s))

    def _shade_phases(self) -> list[tuple[float, float, str]]:
        """Draw the phases behind the memory; return where to name them: (start_s, end_s, name)."""
        is_training = self._run.paths.config.is_file()  # else a watched command
        shown = (*_SHADES,) if is_training else ""  # prefixes of names; "" fits all
        phases = [phase for phase in self._run.phases if phase.name.lower().startswith(shown)]
        spans = []
        if phases:
            # Before the first phase Python imports torch, which takes 0.3 GB.
            first_s = min(phase.start_s for phase in phases)
            spans.append((0.0, first_s, "imports" if is_training else "start"))
        for phase in sorted(phases, key=lambda phase: phase.depth):
            # An outer phase is not drawn under its inner ones: two colours would mix to a third.
            deeper = [other for other in phases if other.depth > phase.depth]
            # a phase "release" has no colour of its own
            inner = [other for other in deeper if not other.name.startswith("release")]
            pieces = [*_uncovered(phase.start_s, self._stop_s(phase), inner)]
            self._shade(phase, pieces)
            spans += [(*piece, phase.label) for piece in pieces[-1:]]  # named in its last piece
        return spans

    def _shade(self, phase: Phase, pieces: list[tuple[float, float]]) -> None:  # (start, end) in s
        label, colour = _look(phase)
        seen_s = [stop_s - max(start_s, self._begin_s) for start_s, stop_s in pieces]
        if max(seen_s, default=0.0) < 0.004 * self._shown_s:  # thinner than a line
            label = "_thin"
        for piece in pieces:
            # Strong colours, drawn faintly, suit a white and a dark page and the names on them.
            self._ax.axvspan(
                *piece, color=colour, alpha=0.22, label=label, linewidth=0, zorder=0.01
            )
        self._ax.axvline(phase.start_s, color=GREY, linewidth=0.3, zorder=0.5)

    def _write_names(self, spans: list[tuple[float, float, str]]) -> None:
        """Write names vertically into spans that are wide enough: inside the curve where memory is
        high, else above it."""
        figure: Any = self._ax.get_figure()
        # the width of a line of text, 9.5 points, in seconds; an inch has 72 points
        width_points = 72 * figure.get_figwidth() * self._ax.get_position().width  # of the axes
        line_s = 9.5 / width_points * self._shown_s
        for start_s, stop_s, label in spans:
            start_s = max(start_s, self._begin_s)
            if stop_s - start_s < line_s:  # too narrow
                continue
            inside = self._in_use[(self._time_s >= start_s) & (self._time_s <= stop_s)]
            is_high = len(inside) > 0 and inside.mean() > 0.5 * self._ax.get_ylim()[1]
            self._ax.text(
                (start_s + stop_s) / 2,
                0.02 if is_high else 0.97 / _ROOM,  # below the limit
                _wrapped(label, 2 if stop_s - start_s > 2.2 * line_s else 1),
                transform=self._ax.get_xaxis_transform(),  # x in seconds, y from 0 to 1
                zorder=4,
                rotation=90,
                ha="center",
                va="bottom" if is_high else "top",
                fontsize=8,
                color="white" if is_high else GREY,
            )

    def _draw_end(self) -> None:
        """Mark a kill with its phase, or the peak of a run that was not killed."""
        title = self._ax.get_title()
        if self._run.exit_code != 137:  # 128 + SIGKILL
            # The peak stands in the title: beside its point it would cover the phases' names.
            at = int(self._in_use.argmax())
            self._ax.plot(self._time_s[at], self._in_use[at], "o", color=GREY, ms=5, zorder=6)
            self._set_title(f"{title}, peak {format_bytes(self._in_use[at] * self._unit)}")
            return
        # The last sample is older than the last allocation: the cross stands at the limit that
        # stopped the climb.
        climb = [self._in_use[-1], self._limit or self._in_use[-1]]
        self._ax.plot([self._end_s] * 2, climb, ":", color=KILLED, linewidth=1.5, zorder=5)
        self._ax.plot(self._end_s, climb[1], "X", zorder=8, label="killed", **_CROSS)
        name = self._run.diagnosis.phase
        if name:  # else it died between two phases
            self._set_title(f"{title}\nin phase '{_plain(name)}'")
            # of several phases with this label, the last one was killed
            start_s = max((p.start_s for p in self._run.phases if p.label == name), default=0.0)
            # however short it was, and within the axis, which is 2 % longer than the run
            stop_s = max(self._end_s, start_s + 0.015 * self._shown_s)
            # behind the stack: over it, red and blue would mix to the colour of shared memory
            look: dict[str, Any] = {"color": KILLED, "alpha": 0.45, "linewidth": 0, "zorder": 1}
            self._ax.axvspan(start_s, stop_s, label="phase of the kill", **look)


def plot_timeline(
    run: RunLike, ax: Axes | None = None, *, title: str | None = None, since: str | None = None
) -> Axes:
    """Plot a run's memory over time: stacked anonymous, shared and file memory, with phases,
    limit, peak, and a kill.

    `since` is the phase at which the picture begins, such as "train epoch 1".
    """
    run = Run.open(run)
    ax = _axes(ax)
    _Timeline(ax, run, _top_bytes(run, page_cache=True), since).draw(title)
    artists = _legend(ax)
    figure: Any = ax.get_figure()
    # 0.67 inches below the axes, where the axis' label ends, as a share of the picture's height
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.67 / figure.get_figheight())}
    ax.legend(artists.values(), artists.keys(), ncol=4, **place, **_PLAIN)
    return ax


def plot_runs(runs: Runs, *, columns: int = 3, one_time_axis: bool = False) -> Figure:
    """Plot the memory in use by several runs side by side on one scale, without page cache.

    `runs` maps titles to runs or their folders, or lists runs or folders.
    """
    titled = named(runs)
    if not titled:
        raise InputError("runs: expected at least one run to draw, got none")
    columns = min(columns, len(titled))
    rows = -(-len(titled) // columns)  # rounded up
    # inches; 3 panels fit into JupyterLab at 1400 pixels
    size = (4.0 if columns > 2 else 4.6) * columns, 3.9 * rows
    figure, grid = _figure(rows, columns, size, sharey=True)
    axes = grid.ravel()
    top_bytes = max(_top_bytes(run, page_cache=False) for run in titled.values())
    artists: dict[str, Artist] = {}  # one for each label of any panel
    for ax, (name, run) in zip(axes, titled.items(), strict=False):  # the last row may not be full
        _Timeline(ax, run, top_bytes).draw(f"{name}: {run.state}", page_cache=False)
        artists |= _legend(ax)
    plt.setp(axes[len(titled) :], visible=False)
    plt.setp(grid[:, 1:], ylabel="")
    if one_time_axis:
        plt.setp(axes, xlim=(0, max(ax.get_xlim()[1] for ax in axes)))
    figure.legend(artists.values(), artists.keys(), loc="outside lower center", ncol=5, **_PLAIN)
    return figure


def epoch_times(runs: Mapping[tuple[str, str], RunLike]) -> Axes:
    """Plot the seconds of an epoch against the memory limit, which grows to the right.

    `runs` maps (policy, limit) to a run. Each policy has a line for the median of the later epochs
    and a dotted line for the first epoch. A cross marks a run that failed; the policies that
    finished under the smallest limit are named there.
    """
    ax = _axes(width=7.5, height=4)
    rows = {}
    for (policy, limit), folder in runs.items():
        run = Run.open(folder)
        rows[policy, limit] = {
            "policy": policy,
            "limit": limit,  # as the user wrote it, such as "128 GB"
            "limit_bytes": run.memory_limit_bytes or 0,
            "failed": bool(run.exit_code),  # None while it is at work
            "first_s": run.metrics["time_s"].iloc[:1].mean(),  # NaN if no epoch was finished
            "later_s": epoch_s(run),
        }
    table = pd.DataFrame(
        rows.values(), columns=["policy", "limit", "limit_bytes", "failed", "first_s", "later_s"]
    )
    table["at"] = table["limit_bytes"].rank(method="dense") - 1  # place on the axis: 0, 1, 2, ...
    # Points and crosses of several policies at one limit stand side by side.
    middle = (table["policy"].nunique() - 1) / 2
    for number, (policy, own) in enumerate(table.groupby("policy", sort=False)):
        own = own.assign(at=own["at"] + 0.12 * (number - middle))
        finished = own[~own["failed"]].sort_values("at")
        (line,) = ax.plot(finished["at"], finished["later_s"], "o-", label=policy, zorder=3)
        colour = line.get_color()
        ax.plot(finished["at"], finished["first_s"], ".:", color=colour, zorder=2)
        dead = own["at"][own["failed"]]
        cross = {**_CROSS, "color": colour}
        # An empty line that is not clipped would make the layout reserve the room up to the corner.
        ax.plot(dead, 0 * dead, "X", clip_on=False, in_layout=False, zorder=5, **cross)
        for row in finished[finished["limit_bytes"] == table["limit_bytes"].min()].itertuples():
            text = f"{_plain(policy)} finished under {row.limit}"
            _mark(ax, text, (row.at, row.later_s), (8, 8), color=colour)
    limits = table.drop_duplicates("at").sort_values("at")  # one row for each limit
    ticks = [
        f"{limit}\n({format_bytes(size)})"
        for limit, size in zip(limits["limit"], limits["limit_bytes"], strict=True)
    ]
    ax.set_xticks(range(len(ticks)), ticks)
    ax.margins(x=0.12, y=0.15)
    ax.set(
        ylim=(0, None),
        ylabel="seconds of an epoch; dotted: the first",
        xlabel="memory limit at full size (here); cross: failed",
    )
    ax.legend(**_PLAIN)
    return ax


def plot_accuracy(runs: Runs) -> Figure:
    """Plot loss, valid accuracy (full line) and test accuracy (dashed) over the epochs, and mark
    the best epoch on valid."""
    figure, ((losses, accuracies),) = _figure(1, 2, (10, 4))
    ring: dict[str, Any] = {"markersize": 9, "markeredgecolor": GREY}
    for name, run in named(runs).items():
        epochs = run.metrics["epoch"]
        best = run.best_epoch  # a row of `metrics`
        title = _plain(name)
        (line,) = losses.plot(epochs, run.metrics["loss"], ".-", label=title)
        for split, style, alpha in (("valid", ".-", 1.0), ("test", ".--", 0.6)):
            look: dict[str, Any] = {"color": line.get_color(), "alpha": alpha}
            accuracies.plot(epochs, run.metrics[split], style, label=f"{title}, {split}", **look)
        if best is not None:
            accuracies.plot(best["epoch"], best["valid"], "o", color=line.get_color(), **ring)
    accuracies.plot([], [], "o", color="none", label="best epoch on valid", **ring)  # the legend's
    for ax, label in ((losses, "loss on train"), (accuracies, "accuracy")):
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
    phases = pd.DataFrame.from_dict(forecast["phases"], orient="index")  # one row for each phase
    parts = pd.DataFrame(list(phases["parts"]), phases.index).fillna(0)  # bytes, a column each
    measured = phases["measured"].astype(float)  # peaks in bytes
    unit, unit_name = _unit(max(parts.sum(axis=1).max(), measured.max()))
    largest = parts.max().nlargest(7).index  # names of the parts that are not "other parts"
    stacks = parts[largest].assign(**{"other parts": parts.drop(columns=largest).sum(axis=1)})
    ax = _axes(height=0.5 * len(phases) + 1.6)
    bars = (stacks / unit).rename(index=_plain, columns=_plain)
    colours = [*_part_colours(stacks.columns).values()]
    bars.plot.barh(ax=ax, stacked=True, width=0.62, color=colours, legend=False)
    rows = np.arange(len(bars))
    style: dict[str, Any] = {"color": GREY, "linewidth": 2.2, "label": "measured peak"}
    ax.vlines(measured / unit, rows - 0.38, rows + 0.38, zorder=5, **style)
    ax.set_ylim(len(bars) - 0.5, -0.5)  # the first phase at the top
    ax.set_xlabel(f"anonymous + shared memory in {unit_name}")
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
    unit, unit_name = _unit(limit_bytes)
    peaks = (plan.forecast.peak_bytes for plan in plans.values())
    ax.set_xlim(0, 1.02 * max(limit_bytes, *peaks) / unit)
    ax.set_yticks(range(len(plans)), map(_plain, plans))
    ax.invert_yaxis()  # the first plan at the top
    stacks = [plan.forecast.peak.parts for plan in plans.values()]  # at the highest peak
    largest = pd.DataFrame(stacks).max().sort_values(ascending=False)  # by the parts' names
    colours = _part_colours(largest.index)
    for row, parts in enumerate(stacks):
        _draw_parts(ax, row, parts, unit, colours)
    limit = limit_bytes / unit
    for name, run in named(runs or {}).items():
        _mark_peak(ax, [*plans].index(name), run, limit, unit)
    _write_verdicts(ax, [*plans], full or {})
    ax.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.4)
    style = {"color": LIMIT, "ha": "center", "xycoords": ("data", "axes fraction")}
    _mark(ax, f"limit {format_bytes(limit_bytes)}", (limit, 1.0), (0, 3), **style)
    measured = "; grey marks: measured peaks" if runs else ""
    ax.set_xlabel(f"memory in {unit_name}, without page cache{measured}")
    return ax


def _mark_peak(ax: Axes, row: int, run: Run, limit: float, unit: int) -> None:
    # the run's peak, or its kill, on the bar in this row; `limit` is in units of `unit` bytes
    if run.exit_code != 137:  # 128 + SIGKILL
        peak = run.held_peak_bytes / unit
        ax.vlines(peak, row - 0.42, row + 0.42, color=GREY, linewidth=2.5, zorder=5)
    else:
        ax.plot(limit, row - 0.36, "X", zorder=8, **_CROSS)  # not over the name of a part
        text = _plain(f"killed in {run.diagnosis.phase or 'no phase'}")
        # in one line below its own bar, so that no other bar seems to be the killed one
        _mark(ax, text, (limit, row + 0.37), color=KILLED, ha="center", va="top", fontsize=8)


def _write_verdicts(
    ax: Axes, names: Sequence[str], full: Mapping[str, Mapping[str, Advice]]
) -> None:
    """Write a column for each graph, right of the bars: each named plan's peak and verdict."""
    for column, (graph, advices) in enumerate(full.items()):
        x = 1.14 + 0.22 * column  # the column's middle, in widths of the axes
        _mark(ax, textwrap.fill(graph, 18), (x, 1.0), (0, 3), ha="center", xycoords="axes fraction")
        for row, name in enumerate(names):
            text = advices[name].in_short.replace(", ", "\n")
            place = {"xycoords": ("axes fraction", "data"), "ha": "center", "va": "center"}
            _mark(ax, text, (x, row), (0, 0), color=_VERDICTS[advices[name].verdict], **place)


def _part_colours(names: pd.Index[str]) -> dict[str, Any]:
    """Map names of memory parts to pale colours, with readable black text: the first 12 differ."""
    pale: Any = plt.get_cmap("Set3")
    return dict(zip(names, pale.colors * len(names), strict=False))


def _draw_parts(
    ax: Axes, row: int, parts: Mapping[str, int], unit: int, colours: Mapping[str, Any]
) -> None:
    # Stack the parts, named and in bytes, as one bar; `unit` is the bytes in one unit of the axis.
    left = 0.0
    figure: Any = ax.get_figure()
    letters = 11 * figure.get_figwidth() / ax.get_xlim()[1]  # in a unit of the axis, 11 an inch
    for name, size in parts.items():
        width = size / unit
        ax.barh(row, width, 0.72, left, color=colours[name])
        middle = left + width / 2
        if width * letters > max(map(len, name.split())):  # its longest word fits into the part
            words = _plain(name).replace(" ", "\n")
            ax.text(middle, row, words, ha="center", va="center", fontsize=7.5, color="black")
        elif width * letters > 1:  # visible: its name stands below the bar
            _mark(ax, _plain(name), (middle, row + 0.4), ha="center", va="top", fontsize=7.5)
        left += width
