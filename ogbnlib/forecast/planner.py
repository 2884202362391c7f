"""The planner: memory and verdict of a configuration, and the best one for each limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config import TrainConfig
from ..errors import GB, MB, clear_errors, format_bytes, parse_bytes
from ..graph.store import GraphSize
from ..progress import seconds
from ..registry import MODELS
from ..sources.resolve import size_of
from .fitting import FITS, Changes, assignments, changes_that_fit, compared, smallest_limit, verdict
from .machine import REFERENCE, Machine
from .memory_parts import feature_itemsize
from .run_forecast import Forecast, margin_bytes, predict
from .step_memory import is_measured, try_model

if TYPE_CHECKING:
    import pandas as pd

# Why sizes are uncertain, by `Batches.source`.
_UNCERTAIN = {
    "degrees": "no batch was drawn, as there is no store here; sizes follow from mean degrees",
    "extrapolated": "a whole batch is too large to be drawn here; its size is extrapolated from a part of it",
}
# The ladder, the most capable rung first: each takes less memory than the one before it.
_LARGE = {"num_neighbors": (15, 10, 5), "batch_size": 1024, "hidden_channels": 256}
_MEDIUM = {"num_neighbors": (15, 10), "batch_size": 1024, "hidden_channels": 64}
_SMALL = {"num_neighbors": (3, 2), "batch_size": 128, "hidden_channels": 16}
RUNGS: tuple[Changes, ...] = (
    {"loading": "shared", "feature_dtype": "float32", **_LARGE},
    {"loading": "shared", "feature_dtype": "float16", **_LARGE},
    {"loading": "store", "feature_dtype": "float16", **_LARGE},
    {"loading": "store", "feature_dtype": "float16", **_MEDIUM},
    {"loading": "store", "feature_dtype": "float16", **_SMALL},
)
_CONTEXT_BYTES = 600 * MB  # at most, of a GPU: for CUDA itself; torch allocates the rest
# Disk for the spool (windows kept on disk), of one size so that figures are equal on all machines.
LADDER_SPOOL = "24 GB"
ALLOCATIONS = tuple(f"{size} GB" for size in (512, 256, 128, 64, 48, 32, 16, 8, 4))


@dataclass(frozen=True)
class Advice:
    """The result of `plan`: `print` it, or take the numbers by `to_dict`."""

    forecast: Forecast
    limit_bytes: int | None
    alternatives: Sequence[tuple[Changes, Forecast]] = ()  # changes that fit, and their forecasts
    card_bytes: int | None = None  # what torch may allocate on the GPU; None if it is not known

    @property
    def verdict(self) -> str | None:
        """FITS, TIGHT or WILL NOT FIT; None without a limit."""
        return None if self.limit_bytes is None else verdict(self.forecast, self.limit_bytes)

    @property
    def gpu_verdict(self) -> str | None:
        """The verdict on the largest step on a GPU of known size, else None."""
        step_bytes = sum(self.forecast.gpu.values())
        error_bytes = margin_bytes(step_bytes)
        if self.card_bytes is None:
            return None
        return compared(step_bytes + error_bytes, step_bytes - error_bytes, self.card_bytes)

    @property
    def in_short(self) -> str:
        """Peak and verdict, such as "126 GB, TIGHT"; for features on disk, limit and verdict."""
        need = self.forecast.peak_bytes
        if self.forecast.config.policy.reads_disk:
            need = self.limit_bytes or need  # windows grow to the limit, if there is one
        digits = 1 if need < 10 * GB else None  # "4.3 GB", "43 GB"
        return f"{round(need / GB, digits):g} GB, {self.verdict or 'no limit'}"

    @property
    def sbatch(self) -> str:
        """The `#SBATCH --mem` line to use: the predicted peak and its margin, in whole GB."""
        forecast = self.forecast
        # the second margin is at least that of uncertain batch sizes
        need = forecast.peak_bytes + max(margin_bytes(forecast.peak_bytes), forecast.margin_bytes)
        if forecast.config.policy.reads_disk and self.verdict == FITS:
            need = min(need, self.limit_bytes or need)  # windows adapt to the limit
        return f"#SBATCH --mem={-(-need // GB)}G"

    def __str__(self) -> str:
        sections = (_heading, _phases, _notes, _verdict)
        return "\n".join(line for section in sections for line in section(self))

    def to_dict(self) -> dict[str, object]:
        forecast = self.forecast
        return {
            "dataset": forecast.size.name,
            "verdict": self.verdict,
            "limit_bytes": self.limit_bytes,
            "peak_bytes": forecast.peak_bytes,
            "peak_phase": forecast.peak.name,
            "least_bytes": forecast.least_bytes,
            "margin_bytes": forecast.margin_bytes,
            "batches": forecast.train.batches.source,
            "num_threads": forecast.num_threads,
            "epoch_s": round(forecast.epoch_s, 1),
            "sbatch": self.sbatch,
            "phases": [
                {"name": phase.name, "held_bytes": phase.held_bytes, "parts": dict(phase.parts)}
                for phase in forecast.phases
            ],
            "gpu": dict(forecast.gpu),
            "gpu_verdict": self.gpu_verdict,
            "would_fit": [
                {"changes": changes, "peak_bytes": changed.peak_bytes}
                for changes, changed in self.alternatives
            ],
        }


# The sections of a printed plan, as lines.


def _heading(advice: Advice) -> Iterator[str]:
    config = advice.forecast.config
    size = advice.forecast.size
    fan_out = config.fan_out(training=True)
    neighbors = " ".join(map(str, fan_out))
    batches = f"[{neighbors}]" if fan_out else f"{config.hops} hops ({config.norm})"
    both_ways = " (and their reverse)" if config.undirected and not size.undirected else ""
    yield (
        f"{size.name}: {size.num_nodes:,} nodes, {size.num_edges:,} edges{both_ways}; "
        f"loading={config.loading}, {batches} x {config.batch_size}, {config.num_workers} workers, "
        f"num_threads={advice.forecast.num_threads}"
    )
    yield ""


def _phases(advice: Advice) -> Iterator[str]:
    yield f"{'phase':<30} {'memory in use':>13}  largest parts"
    for phase in advice.forecast.phases:
        largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:3]  # (name, bytes)
        parts = ", ".join(f"{name} {format_bytes(part)}" for name, part in largest)
        mark = " <- peak" if phase is advice.forecast.peak else ""
        yield f"{phase.name:<30} {format_bytes(phase.held_bytes):>13}  {parts}{mark}"
    yield ""
    peak = advice.forecast.peak
    yield f"peak {format_bytes(peak.held_bytes)} in '{peak.name}'; {advice.sbatch}"


def _notes(advice: Advice) -> Iterator[str]:
    forecast = advice.forecast
    config = forecast.config
    if forecast.propagation is not None:
        yield f"the graph is propagated over once, in {forecast.propagation}"
    if config.epochs:
        yield from _training(advice)
    if config.model not in MODELS:
        yield f"{config.model}: memory and time of a step were measured here on small random batches"
    reason = _UNCERTAIN.get(forecast.train.batches.source)
    if reason is not None:
        yield f"uncertain: {reason}; the margin is {format_bytes(forecast.margin_bytes)}"


def _training(advice: Advice) -> Iterator[str]:
    forecast = advice.forecast
    moving = ""
    if forecast.windows is not None:
        yield f"the store is read in {forecast.windows}"
        moved = format_bytes(forecast.windows.moved_bytes)
        moving = f" and moves {moved} from and to disk"
    yield f"an epoch by our trainer takes {seconds(forecast.epoch_s)}{moving}"
    on_card = ""
    if advice.card_bytes is not None:
        on_card = f"; under {format_bytes(advice.card_bytes)}: {advice.gpu_verdict}"
    elif forecast.config.device == "cuda":
        on_card = "; no GPU is visible here: max_cuda_memory, its size, adds a verdict"
    step = format_bytes(sum(forecast.gpu.values()))
    yield f"a step on a GPU: {step} allocated, beside the CUDA context{on_card}"


def _verdict(advice: Advice) -> Iterator[str]:
    if advice.limit_bytes is None:  # nothing to compare with
        return
    config = advice.forecast.config
    size = advice.forecast.size
    yield f"under {format_bytes(advice.limit_bytes)}: {advice.verdict}"
    if advice.verdict == FITS:
        return
    if advice.alternatives:
        yield "what would fit, the smallest change first:"
    else:
        need = smallest_limit(config, size)
        yield f"no change that was tried fits; the smallest limit is {-(-need // MB)} MB"
    for changes, changed in advice.alternatives:
        yield f"  {assignments(changes)}: peak {format_bytes(changed.peak_bytes)}"
    forecast = predict(config, size, is_sorted=True)
    if forecast.peak_bytes < advice.forecast.peak_bytes:  # eager, lazy: no sorted copies
        yield (
            "in your own loop over store.to_data(), with is_sorted=True in each NeighborLoader: "
            f"{replace(advice, forecast=forecast).in_short}"
        )


@clear_errors()
def plan(
    config: TrainConfig,
    memory_limit: str | int | None = None,
    *,
    size: GraphSize | None = None,
    machine: Machine = REFERENCE,
    is_sorted: bool = False,
) -> Advice:
    """Forecast a run's memory and time, and what would fit if it does not fit under a limit.

    Args:
        config: With `max_cuda_memory`, or device="cuda" beside a GPU, a step has a verdict, too.
        memory_limit: Such as "128 GB"; without it there is no verdict.
        size: The data set's size, if known; else that of a known OGB name or in a folder's headers.
        machine: The machine for times; `machine.probe` measures the one that it runs on.
        is_sorted: Your own loop gives `is_sorted=True` to every stock loader of `store.to_data()`,
            whose edges are sorted by target. For `loading="eager"` and `"lazy"`.
    """
    limit_bytes = None if memory_limit is None else parse_bytes(memory_limit)
    size = size or size_of(config.dataset)
    if not is_measured(config, size):
        try_model(config, size)
    forecast = predict(
        config, size, memory_limit_bytes=limit_bytes, machine=machine, is_sorted=is_sorted
    )
    alternatives: list[tuple[Changes, Forecast]] = []
    if limit_bytes is not None and verdict(forecast, limit_bytes) != FITS:
        alternatives = changes_that_fit(config, size, limit_bytes)
    return Advice(forecast, limit_bytes, alternatives, _card_bytes(config))


def _card_bytes(config: TrainConfig) -> int | None:
    if config.max_cuda_memory is not None or config.device != "cuda":
        return config.max_cuda_memory
    # In another process, as torch initialises CUDA for it: a plan must not make later forks and
    # allocator settings of this process fail.
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return None if done.returncode else int(done.stdout) - _CONTEXT_BYTES  # None: no GPU is here


@clear_errors()
def ladder(dataset: str = "ogbn-papers100M", **settings: object) -> pd.DataFrame:
    """One row per allocation from 512 GB down to 4 GB: the best configuration, its peak, and an
    epoch's time on 2 cores.

    `settings` replace values of every configuration, such as `spool`, which is 24 GB here.
    """
    import pandas as pd

    configs = [
        TrainConfig.create({"dataset": dataset, "spool": LADDER_SPOOL, **rung, **settings})
        for rung in RUNGS
    ]
    return pd.DataFrame(
        [_best(configs, parse_bytes(allocation)) for allocation in ALLOCATIONS],
        index=pd.Index(ALLOCATIONS, name="you have"),
    )


def _best(configs: Sequence[TrainConfig], limit_bytes: int) -> dict[str, object]:
    # A row of the ladder: the first of `configs`, the most capable one, that fits.
    for config in configs:
        best = predict(config, memory_limit_bytes=limit_bytes)
        if verdict(best, limit_bytes) == FITS:
            itemsize = feature_itemsize(config, best.size)
            return {
                "loading": config.loading,
                "features": {1: "int8", 2: "float16", 4: "float32"}[itemsize],
                "batch_size": config.batch_size,
                "num_neighbors": " ".join(map(str, config.num_neighbors)),
                "hidden": config.hidden_channels,
                "peak GB": round(best.peak_bytes / GB, 1),
                "epoch min": float(f"{best.epoch_s / 60:.3g}"),  # three digits
            }
    blank = ("features", "batch_size", "num_neighbors", "hidden", "peak GB", "epoch min")
    return {"loading": "nothing fits", **dict.fromkeys(blank, "")}
