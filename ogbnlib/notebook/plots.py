"""Pictures of runs: the memory timeline, several runs side by side on one scale, and peaks against the limit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np

from ..errors import InputError
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..runs.diagnosis import ended
from ..runs.folder import Run
from ..runs.timeline import Phase, held_memory

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Array = NDArray[np.floating[Any]]
    RunLike = Run | str | os.PathLike[str]


GB = 2**30
# Anonymous memory is what kills, so it has the strong colour; the file cache is reclaimable and pale.
PARTS = (
    ("anon", "anonymous", "#3b6fb6"),
    ("shmem", "shared (/dev/shm)", "#8e5bb0"),
    ("file", "file cache (reclaimable)", "#c9d8ea"),
)
_SHADES = (("build", "#f6c28b"), ("eval", "#bfe3c0"), ("train", "#dfe7f2"), ("release", "#ffffff"), ("load", "#e6e0d4"))
LIMIT, KILLED = "#c0392b", "#d62728"
_CROSS: dict[str, Any] = {"color": KILLED, "markersize": 13, "markeredgecolor": "white"}
_WAIT_S = 5.0  # without a sample: between two attempts of a run nothing is held
_LABEL = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def opened(run: RunLike) -> Run:
    return run if isinstance(run, Run) else Run.open(run)


def axes(ax: Axes | None, width: float = 9, height: float = 4.2) -> Axes:
    """`ax`, or those of a new figure; without the two borders that carry no scale."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _stacks(run: Run) -> tuple[Array, Array]:
    """Times of the samples, and what was held at them in GB, one row each of PARTS."""
    held = held_memory(run.timeline)
    return held["time_s"].to_numpy(), _layers(held, "{}", PARTS)


def _layers(table: pd.DataFrame, column: str, layers: Sequence[tuple[str, str, str]]) -> Array:
    return np.array([table[column.format(name)].fillna(0).to_numpy() for name, _, _ in layers]) / GB


def _top_bytes(run: Run) -> float:
    """Room for the highest sample and the limit, and above them for the phases' names."""
    _, stacks = _stacks(run)
    highest = float(stacks.sum(axis=0).max(initial=0)) * GB
    return 1.7 * max(highest, float(run.result.get("memory_limit_bytes") or 0), 2**20)


def _shade(phase: Phase) -> str | None:
    return next((colour for prefix, colour in _SHADES if phase.name.startswith(prefix)), None)


def _draw_phases(ax: Axes, phases: list[Phase], end_s: float) -> None:
    """Shaded spans, innermost last so that it is seen; labels stand upright, where the span is wide enough for one."""
    label_from = 0.028 * end_s
    for phase in sorted(phases, key=lambda phase: phase.depth):
        if (colour := _shade(phase)) is None:
            continue
        stop = min(phase.until_s, end_s)
        ax.axvspan(phase.start_s, stop, color=colour, alpha=0.75, linewidth=0, zorder=0)
        ax.axvline(phase.start_s, color="white", linewidth=0.8, zorder=0.5)
    # Before the first phase Python starts and imports torch, 0.3 GB that a stranger would look for among the data.
    spans = [(0.0, min(phase.start_s for phase in phases), "imports")] if phases else []
    # A span that holds another one (eval holds build) is labelled where it is not covered: at its last stretch.
    for phase in phases:
        if _shade(phase) is None:
            continue
        stop = min(phase.until_s, end_s)
        inner = [p for p in phases if p.depth > phase.depth and phase.start_s <= p.start_s <= stop]
        covered = [min(p.until_s, stop) for p in inner if not p.name.startswith("release")]
        spans.append((max([phase.start_s, *covered]), stop, phase.label))
    free_from = 0.0
    for start, stop, label in sorted(spans):
        if stop - start < label_from or start < free_from:
            continue
        free_from = start + label_from
        style: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "top", "fontsize": 8, "color": "#333333"}
        ax.text((start + stop) / 2, 0.985, label, transform=ax.get_xaxis_transform(), zorder=4, **style)


def mark(ax: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    """A label beside a point, on white so that the curve under it does not disturb."""
    style = {"bbox": _LABEL, "zorder": 7, "fontsize": 8.5, **style}
    ax.annotate(text, at, xytext=shift, textcoords="offset points", **style)


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
    run, ax = opened(run), axes(ax)
    time_s, stacks = _stacks(run)
    names, colours = [name for _, name, _ in PARTS], [colour for *_, colour in PARTS]
    waits = np.flatnonzero(np.diff(time_s) > _WAIT_S) + 1
    drawn = np.insert(time_s, waits, time_s[waits]), np.insert(stacks, waits, np.nan, axis=1)
    ax.stackplot(*drawn, labels=names, colors=colours, linewidth=0, zorder=2)
    end_s = float(time_s[-1]) if len(time_s) else 1.0
    _draw_phases(ax, run.phases, end_s)
    limit = (run.result.get("memory_limit_bytes") or 0) / GB
    if limit:
        ax.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.4, zorder=3)
        where = {"xycoords": ("axes fraction", "data"), "bbox": None}
        mark(ax, f"limit {limit:.2f} GB", (0.0, limit), (4, 3), color=LIMIT, **where)
    held = stacks[0] + stacks[1]
    killed = run.result.get("exit_code") == 137
    if killed and len(held):
        # The last sample falls before the last allocation: what the kernel stopped was the climb to the limit.
        height = limit or held[-1]
        ax.plot([end_s] * 2, [held[-1], height], ":", color=KILLED, linewidth=1.5, zorder=5)
        ax.plot(end_s, height, "X", zorder=8, label="killed", **_CROSS)
        if phase := run.diagnosis.phase:
            # Well below the climb that it names, which it would hide.
            style = {"ha": "right", "va": "center", "color": KILLED}
            mark(ax, f"killed in\n{phase}", (end_s, 0.4 * height), (-10, 0), **style)
    elif len(held):
        at = int(held.argmax())
        ax.plot(time_s[at], held[at], "o", color="black", markersize=4, zorder=6)
        late = time_s[at] > 0.75 * end_s
        side = {"ha": "right" if late else "center", "va": "bottom"}
        mark(ax, f"peak {held[at]:.2f} GB", (time_s[at], held[at]), (-6 if late else 0, 8), **side)
    ax.set_xlim(0, end_s * 1.02)
    ax.set_ylim(0, (top_bytes or _top_bytes(run)) / GB)
    ax.set_xlabel("seconds")
    ax.set_ylabel("memory in GB")
    ax.set_title(title or f"{run.run_dir.name}: {ended(run.result)}", fontsize=10, color=KILLED if killed else "black")
    if legend:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4, fontsize=8, frameon=False)
    return ax


CUDA_LAYERS = (
    ("allocated", "allocated by tensors", "#3b6fb6"),
    ("unallocated", "reserved, not allocated", "#f0a35e"),
    ("free", "free", "#e8e8e8"),
)


def plot_cuda(run: RunLike, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A run's GPU memory over time, stacked: allocated, reserved but unallocated, free; and the largest free block.

    Allocations that needed a second try are ticks at the bottom, a failed one is a cross. Under `max_cuda_memory` the
    top is the cap.

    Raises:
        InputError: when the run marked no GPU memory, as on a CPU.
    """
    run = opened(run)
    table = run.cuda
    if not len(table):
        raise InputError(f"{run.run_dir}: expected a run on a GPU, found no GPU memory in its events")
    ax = axes(ax)
    time_s, stacks = table["time_s"].to_numpy(), _layers(table, "cuda_{}_bytes", CUDA_LAYERS)
    names, colours = [name for _, name, _ in CUDA_LAYERS], [colour for *_, colour in CUDA_LAYERS]
    ax.stackplot(time_s, stacks, labels=names, colors=colours, linewidth=0, zorder=2)
    largest = table["cuda_largest_free_bytes"] / GB
    if largest.notna().any():
        base = stacks[0] + np.minimum(largest.to_numpy(), stacks[1])
        ax.plot(time_s, base, color=LIMIT, linewidth=1, zorder=3, label="of it the largest free block")
    retries = table["cuda_alloc_retries"].diff() > 0
    if retries.any():
        where = time_s[retries.to_numpy()]
        ax.plot(where, np.zeros(len(where)), "^", color="black", clip_on=False, zorder=5, label="allocation retried")
    failed = run.result.get("exit_code") == OUT_OF_CUDA_MEMORY
    if failed:
        ax.plot(time_s[-1], stacks[0][-1] + stacks[1][-1], "X", zorder=7, label="allocation failed", **_CROSS)
    end_s = max(float(time_s[-1]), 1e-3)
    _draw_phases(ax, run.phases, end_s)
    ax.set_xlim(0, end_s * 1.02)
    ax.set_ylim(0, 1.05 * float(stacks.sum(axis=0).max()))
    ax.set_xlabel("seconds")
    ax.set_ylabel("GPU memory in GB")
    ax.set_title(title or f"{run.run_dir.name}: {ended(run.result)}", fontsize=10, color=KILLED if failed else "black")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=3, fontsize=8, frameon=False)
    return ax


def plot_runs(runs: Mapping[str, RunLike] | Sequence[Run], *, columns: int = 3) -> Figure:
    """Several runs side by side, every one on the same memory scale.

    Args:
        runs: Titles to runs, or runs that are called by their folders.
        columns: Panels in a row.
    """
    pairs = runs.items() if isinstance(runs, Mapping) else [(run.run_dir.name, run) for run in runs]
    titled = [(name, opened(run)) for name, run in pairs]
    if not titled:
        raise InputError("runs: expected at least one run to draw, got none")
    columns = min(columns, len(titled))
    rows = -(-len(titled) // columns)
    size = 4.6 * columns, 3.9 * rows
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for i, ax in enumerate(grid.flat):
        axes(ax).set_visible(i < len(titled))
    top = max(_top_bytes(run) for _, run in titled)
    handles: dict[str, Any] = {}
    for i, (ax, (name, run)) in enumerate(zip(grid.flat, titled, strict=False)):
        plot_timeline(run, ax, title=f"{name}: {ended(run.result)}", top_bytes=top, legend=False)
        if i % columns:
            ax.set_ylabel("")
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncol=4, fontsize=8, frameon=False)
    return figure
