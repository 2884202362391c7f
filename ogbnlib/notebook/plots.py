"""Pictures of runs: the memory timeline, several runs side by side on one scale, and peaks against the limit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np

from ..errors import InputError
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..runs.diagnosis import read_result
from ..runs.sandbox import Run
from ..runs.timeline import Phase, read_cuda, read_phases, read_timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GB = 2**30
# Anonymous memory is what kills, so it has the strong colour; the file cache is reclaimable and pale.
PARTS = (
    ("anon", "anonymous", "#3b6fb6"),
    ("shmem", "shared (/dev/shm)", "#8e5bb0"),
    ("file", "file cache (reclaimable)", "#c9d8ea"),
)
_SHADES = (("build", "#f6c28b"), ("eval", "#bfe3c0"), ("train", "#dfe7f2"), ("release", "#ffffff"), ("load", "#e6e0d4"))
_LIMIT, _KILLED = "#c0392b", "#d62728"
_WAIT_S = 5.0  # without a sample: between two attempts of a run nothing is held
_LABEL = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def _folder(run: Run | str | os.PathLike[str]) -> Path:
    return run.run_dir if isinstance(run, Run) else Path(run)


def _ending(folder: Path) -> str:
    code = (read_result(folder) or {}).get("exit_code")
    known = {None: "no result", 0: "finished", 137: "killed, exit code 137"}
    known[OUT_OF_CUDA_MEMORY] = f"out of GPU memory, exit code {OUT_OF_CUDA_MEMORY}"
    return known.get(code, f"exit code {code}")


def _columns(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows to draw and where they come from: the cgroup's count if there is one, else sums over processes."""
    source = "cgroup" if table["cgroup_anon_bytes"].notna().any() else "rss"
    return table.dropna(subset=[f"{source}_anon_bytes"]), source


def _top_bytes(run: Run | str | os.PathLike[str]) -> float:
    """Room for the highest sample and the limit, and above them for the phases' names."""
    table, source = _columns(read_timeline(_folder(run)))
    total = sum(table[f"{source}_{part}_bytes"].fillna(0) for part, _, _ in PARTS)
    limit = (read_result(_folder(run)) or {}).get("memory_limit_bytes") or 0
    return 1.6 * max(float(total.max()) if len(table) else 0.0, float(limit), 2**20)


def _shade(phase: Phase) -> str | None:
    return next((colour for prefix, colour in _SHADES if phase.name.startswith(prefix)), None)


def _draw_phases(ax: Axes, phases: list[Phase], end_s: float, label_from: float) -> None:
    """Shaded spans, innermost last so that it is seen; labels stand upright where the span is too narrow for them."""
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
        ax.text(
            (start + stop) / 2,
            0.985,
            label,
            transform=ax.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="top",
            fontsize=7.5,
            color="#333333",
            zorder=4,
        )


def plot_timeline(
    run: Run | str | os.PathLike[str],
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
    folder = _folder(run)
    table, source = _columns(read_timeline(folder))
    result = read_result(folder) or {}
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    time_s = table["time_s"].to_numpy()
    stacks = np.array([table[f"{source}_{part}_bytes"].fillna(0).to_numpy() for part, _, _ in PARTS]) / GB
    names, colours = [name for _, name, _ in PARTS], [colour for *_, colour in PARTS]
    waits = np.flatnonzero(np.diff(time_s) > _WAIT_S) + 1
    drawn = np.insert(time_s, waits, time_s[waits]), np.insert(stacks, waits, np.nan, axis=1)
    ax.stackplot(*drawn, labels=names, colors=colours, linewidth=0, zorder=2)
    end_s = float(time_s[-1]) if len(time_s) else 1.0
    limit = result.get("memory_limit_bytes")
    held = stacks[0] + stacks[1]
    top = (top_bytes or _top_bytes(folder)) / GB
    _draw_phases(ax, read_phases(folder), end_s, label_from=0.028 * end_s)
    if limit:
        ax.axhline(limit / GB, color=_LIMIT, linestyle="--", linewidth=1.4, zorder=3)
        text = f"limit {limit / GB:.2f} GB"
        ax.annotate(text, (0.0, limit / GB), xycoords=("axes fraction", "data"), xytext=(4, 3),
                    textcoords="offset points", ha="left", fontsize=8, color=_LIMIT, zorder=5)  # fmt: skip
    killed = result.get("exit_code") == 137
    if len(held) and not killed:
        at = int(held.argmax())
        ax.plot(time_s[at], held[at], "o", color="black", markersize=4, zorder=6)
        late = time_s[at] > 0.75 * end_s
        ax.annotate(f"peak {held[at]:.2f} GB", (time_s[at], held[at]), xytext=(-6 if late else 0, 8),
                    textcoords="offset points", ha="right" if late else "center", va="bottom", fontsize=8.5, zorder=6,
                    bbox=_LABEL)  # fmt: skip
    if killed and len(held):
        # The last sample falls before the last allocation: what the kernel stopped was the climb to the limit.
        height = limit / GB if limit else held[-1]
        ax.plot([time_s[-1]] * 2, [held[-1], height], ":", color=_KILLED, linewidth=1.5, zorder=5)
        if result.get("diagnosis", {}).get("phase"):
            # Well below the climb that it names, which it would hide.
            ax.annotate(f"killed in\n{result['diagnosis']['phase']}", (time_s[-1], 0.4 * height), xytext=(-10, 0),
                        textcoords="offset points", ha="right", va="center", fontsize=8, color=_KILLED, zorder=7,
                        bbox=_LABEL)  # fmt: skip
        ax.plot(
            time_s[-1], height, "X", color=_KILLED, markersize=13, markeredgecolor="white", zorder=7, label="killed"
        )
    ax.set_xlim(0, end_s * 1.02)
    ax.set_ylim(0, top)
    ax.set_xlabel("seconds")
    ax.set_ylabel("memory in GB" + ("" if source == "cgroup" else " (sum over processes)"))
    if title is None:
        title = f"{folder.name}: {_ending(folder)}"
    ax.set_title(title, fontsize=10, color=_KILLED if killed else "black")
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4, fontsize=8, frameon=False)
    return ax


CUDA_LAYERS = (
    ("allocated", "allocated by tensors", "#3b6fb6"),
    ("unallocated", "reserved, not allocated", "#f0a35e"),
    ("free", "free", "#e8e8e8"),
)


def plot_cuda(run: Run | str | os.PathLike[str], ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A run's GPU memory over time, stacked: allocated, reserved but unallocated, free; and the largest free block.

    Allocations that needed a second try are ticks at the bottom, a failed one is a cross. Under `max_cuda_memory` the
    top is the cap.

    Raises:
        InputError: when the run marked no GPU memory, as on a CPU.
    """
    folder = _folder(run)
    table = read_cuda(folder)
    if not len(table):
        raise InputError(f"{folder}: expected a run on a GPU, found no GPU memory in its events")
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    time_s = table["time_s"].to_numpy()
    stacks = np.array([table[f"cuda_{name}_bytes"].fillna(0).to_numpy() for name, _, _ in CUDA_LAYERS]) / GB
    names, colours = [name for _, name, _ in CUDA_LAYERS], [colour for *_, colour in CUDA_LAYERS]
    ax.stackplot(time_s, stacks, labels=names, colors=colours, linewidth=0, zorder=2)
    largest = table["cuda_largest_free_bytes"] / GB
    if largest.notna().any():
        base = stacks[0] + np.minimum(largest.to_numpy(), stacks[1])
        ax.plot(time_s, base, color=_LIMIT, linewidth=1, zorder=3, label="of it the largest free block")
    retries = table["cuda_alloc_retries"].diff() > 0
    if retries.any():
        where = time_s[retries.to_numpy()]
        ax.plot(where, np.zeros(len(where)), "^", color="black", clip_on=False, zorder=5, label="allocation retried")
    failed = (read_result(folder) or {}).get("exit_code") == OUT_OF_CUDA_MEMORY
    if failed:
        style: dict[str, Any] = {"color": _KILLED, "markersize": 13, "markeredgecolor": "white"}
        ax.plot(time_s[-1], stacks[0][-1] + stacks[1][-1], "X", zorder=7, label="allocation failed", **style)
    end_s = max(float(time_s[-1]), 1e-3)
    _draw_phases(ax, read_phases(folder), end_s, label_from=0.028 * end_s)
    ax.set_xlim(0, end_s * 1.02)
    ax.set_ylim(0, 1.05 * float(stacks.sum(axis=0).max()))
    ax.set_xlabel("seconds")
    ax.set_ylabel("GPU memory in GB")
    ax.set_title(title or f"{folder.name}: {_ending(folder)}", fontsize=10, color=_KILLED if failed else "black")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=3, fontsize=8, frameon=False)
    return ax


def _grid(panels: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """Panels on one scale, `columns` in a row; what the last row has too many is hidden."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    size = width * columns, height * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for ax in axes.flat[panels:]:
        ax.set_visible(False)
    return figure, axes


def plot_runs(runs: Mapping[str, Run | str | os.PathLike[str]] | Sequence[Run], *, columns: int = 3) -> Figure:
    """Several runs side by side, every one on the same memory scale.

    Args:
        runs: Titles to runs, or runs that are called by their folders.
        columns: Panels in a row.
    """
    titled: list[tuple[str, Any]] = (
        list(runs.items()) if isinstance(runs, Mapping) else [(run.run_dir.name, run) for run in runs]
    )
    if not titled:
        raise InputError("runs: expected at least one run to draw, got none")
    figure, axes = _grid(len(titled), columns, 4.6, 3.9)
    top = max(_top_bytes(run) for _, run in titled)
    for ax, (name, run) in zip(axes.flat, titled, strict=False):
        plot_timeline(run, ax, title=f"{name}: {_ending(_folder(run))}", top_bytes=top, legend=False)
    for ax in axes[:, 1:].flat:
        ax.set_ylabel("")
    handles: dict[str, Any] = {}
    for ax in axes.flat[: len(titled)]:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncol=4, fontsize=8, frameon=False)
    return figure
