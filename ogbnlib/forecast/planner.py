"""The planner: `plan` gives a configuration's memory and verdict, `ladder` the best configuration
for each limit.

A verdict allows for the forecast's error: FITS and WILL NOT FIT are claimed outside that margin,
TIGHT inside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import TrainConfig
from ..errors import GB, MB, InputError, clear_errors, format_bytes, parse_bytes
from ..graph.store import GraphSize
from ..registry import MODELS, POLICIES
from ..sources.resolve import graph_for
from .phases import REFERENCE, Forecast, Machine, margin_bytes, predict
from .sizes import feature_itemsize, smaller_fan_out
from .step import formula_of, is_measured, try_model

if TYPE_CHECKING:
    import pandas as pd

# One line of a plan, by the source of its batches.
_UNCERTAIN = {
    "degrees": "no batch was drawn, as there is no store here; sizes follow from mean degrees",
    "extrapolated": "a whole batch is too large to be drawn here; its size is extrapolated from a part of it",
}
FITS, TIGHT, WILL_NOT_FIT = "FITS", "TIGHT", "WILL NOT FIT"
# The ladder, the most capable rung first: each takes less memory than the one before it.
_LARGE = {"num_neighbors": (15, 10, 5), "batch_size": 1024, "hidden_channels": 256}
_MEDIUM = {"num_neighbors": (15, 10), "batch_size": 1024, "hidden_channels": 64}
_SMALL = {"num_neighbors": (3, 2), "batch_size": 128, "hidden_channels": 16}
RUNGS: tuple[dict[str, Any], ...] = (
    {"loading": "shared", "feature_dtype": "float32", **_LARGE},
    {"loading": "shared", "feature_dtype": "float16", **_LARGE},
    {"loading": "store", "feature_dtype": "float16", **_LARGE},
    {"loading": "store", "feature_dtype": "float16", **_MEDIUM},
    {"loading": "store", "feature_dtype": "float16", **_SMALL},
)
ALLOCATIONS = tuple(f"{size} GB" for size in (512, 256, 128, 64, 48, 32, 16, 8, 4))


def verdict(forecast: Forecast, limit_bytes: int) -> str:
    """FITS, TIGHT or WILL NOT FIT under a limit."""
    need, margin = forecast.least_bytes, forecast.margin_bytes
    if need + margin <= limit_bytes:
        return FITS
    return TIGHT if need - margin <= limit_bytes else WILL_NOT_FIT


def _convert_hint(forecast: Forecast) -> str:
    """The command that makes the store of a forecast about one, where there is none yet."""
    config, size = forecast.config, forecast.size
    if not config.on_disk or size.stored == "store":
        return ""
    undirected = " --undirected" if config.undirected or size.undirected else ""
    dtype = f" --feature-dtype {config.feature_dtype}" if config.feature_dtype != "float32" else ""
    return f" (after `python -m ogbnlib convert{undirected}{dtype}`)"


@dataclass(frozen=True)
class Advice:
    """The result of `plan`: `print` it for the table, `to_dict` for the numbers."""

    forecast: Forecast
    limit_bytes: int | None
    # changes that fit, each with its own forecast
    alternatives: tuple[tuple[dict[str, Any], Forecast], ...] = ()
    model_problem: str = ""  # why the user's own model was not measured

    @property
    def verdict(self) -> str | None:
        """FITS, TIGHT or WILL NOT FIT; None without a limit."""
        return None if self.limit_bytes is None else verdict(self.forecast, self.limit_bytes)

    @property
    def sbatch(self) -> str:
        """The `#SBATCH --mem` to ask for: the predicted peak and its margin, in whole GB."""
        forecast = self.forecast
        need = forecast.peak_bytes + max(margin_bytes(forecast.peak_bytes), forecast.margin_bytes)
        if forecast.windows is not None and self.limit_bytes is not None and self.verdict == FITS:
            need = min(need, self.limit_bytes)  # a store's windows adapt to the limit
        return f"#SBATCH --mem={-(-need // GB)}G"

    def table(self) -> pd.DataFrame:
        """Rows: parts; columns: phases; values in GB (2**30 bytes), and the sums below."""
        import pandas as pd

        phases = self.forecast.phases
        names = dict.fromkeys(name for phase in phases for name in phase.parts)
        rows = {name: [phase.parts.get(name, 0) / GB for phase in phases] for name in names}
        rows["memory in use"] = [phase.held_bytes / GB for phase in phases]
        rows["page cache wanted"] = [phase.cache_bytes / GB for phase in phases]
        return pd.DataFrame.from_dict(
            rows, orient="index", columns=[phase.name for phase in phases]
        ).round(3)

    def __str__(self) -> str:
        forecast, config, limit, size = (
            self.forecast,
            self.forecast.config,
            self.limit_bytes,
            self.forecast.size,
        )
        batches = (
            f"{config.hops} hops ({config.norm})"
            if config.propagated
            else f"[{_text(config.num_neighbors)}]"
        )
        lines = [
            f"{size.name}: {size.num_nodes:,} nodes, {size.num_edges:,} edges; loading={config.loading}"
            f"{_convert_hint(forecast)}, {batches} x {config.batch_size}, {config.num_workers} workers",
            "",
            f"{'phase':<30} {'memory in use':>13}  largest parts",
        ]
        for phase in forecast.phases:
            largest = sorted(phase.parts.items(), key=lambda item: -item[1])[:3]
            parts = ", ".join(f"{name} {format_bytes(part)}" for name, part in largest)
            mark = " <- peak" if phase is forecast.peak else ""
            lines.append(f"{phase.name:<30} {format_bytes(phase.held_bytes):>13}  {parts}{mark}")
        lines += [
            "",
            f"peak {format_bytes(forecast.peak_bytes)} in '{forecast.peak.name}'; {self.sbatch}",
        ]
        if forecast.cache_bytes:
            cached = format_bytes(forecast.cache_bytes)
            lines.append(f"page cache: {cached} would be used, and is given back under pressure")
        if forecast.windows is not None and forecast.in_windows:
            moved, minutes = format_bytes(forecast.windows.moved_bytes), forecast.epoch_s / 60
            lines.append(f"the store is read in {forecast.windows}")
            lines.append(
                f"an epoch of training moves {moved} from and to disk, and takes {minutes:.1f} min"
            )
        if forecast.propagation is not None:
            lines.append(f"the graph is propagated over once, in {forecast.propagation}")
        if (
            forecast.machine.has_bf16
            and forecast.machine is not REFERENCE
            and config.precision == "fp32"
        ):
            half = predict(
                config.replace(precision="bf16"),
                size,
                memory_limit_bytes=limit,
                machine=forecast.machine,
            )
            if half.epoch_s < 0.8 * forecast.epoch_s:
                times = f"an epoch in {half.epoch_s / 60:.1f} instead of {forecast.epoch_s / 60:.1f} min"
                lines.append(
                    f"precision=bf16: {times} on a CPU, as this one multiplies bfloat16 itself"
                )
        step = format_bytes(sum(forecast.gpu.values()))
        lines.append(f"a training step on a GPU: {step} allocated, beside the CUDA context")
        like = f"model={formula_of(config)} of the same width"
        if self.model_problem:
            lines.append(
                f"uncertain: {config.model} was not measured ({self.model_problem}). Its memory and times are "
                f"planned as those of {like} that computes all sampled nodes in each layer"
            )
        elif config.model not in MODELS:
            lines.append(
                f"{config.model}: the memory of a step was measured on a small random batch. "
                f"The times are those of {like}"
            )
        if reason := _UNCERTAIN.get(forecast.batches.source):
            if -1 in (*config.num_neighbors, *(config.eval_num_neighbors or ())):
                reason += ", and with all neighbors a batch may be the whole graph"
            lines.append(
                f"uncertain: {reason}; the margin is {format_bytes(forecast.margin_bytes)}"
            )
        if limit is not None:
            lines.append(f"under {format_bytes(limit)}: {self.verdict}")
        if self.alternatives:
            lines.append("what would fit, the smallest change first:")
        elif limit is not None and self.verdict != FITS:
            need = smallest_limit(config, size)
            lines.append(
                f"no change that was tried fits; the smallest limit is {-(-need // MB)} MB"
            )
        for changes, changed in self.alternatives:
            peak = format_bytes(changed.peak_bytes)
            lines.append(f"  {assignments(changes)}: peak {peak}{_convert_hint(changed)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        forecast = self.forecast
        phases = [
            {"name": one.name, "held_bytes": one.held_bytes, "parts": dict(one.parts)}
            for one in forecast.phases
        ]
        return {
            "dataset": forecast.size.name,
            "verdict": self.verdict,
            "limit_bytes": self.limit_bytes,
            "peak_bytes": forecast.peak_bytes,
            "peak_phase": forecast.peak.name,
            "least_bytes": forecast.least_bytes,
            "margin_bytes": forecast.margin_bytes,
            "batches": forecast.batches.source,
            "cache_bytes": forecast.cache_bytes,
            "epoch_s": round(forecast.epoch_s, 1),
            "sbatch": self.sbatch,
            "phases": phases,
            "gpu": dict(forecast.gpu),
            "model_taken_for": formula_of(forecast.config),
            "would_fit": [
                {"changes": changes, "peak_bytes": other.peak_bytes}
                for changes, other in self.alternatives
            ],
        }


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def assignments(changes: Mapping[str, Any]) -> str:
    """Changes as the command line takes them: `loading=store batch_size=64`."""
    texts = []
    for name, value in changes.items():
        text = f"{name}={_text(value)}"
        texts.append(f"'{text}'" if " " in text else text)
    return " ".join(texts)


def _knobs(config: TrainConfig) -> list[list[dict[str, Any]]]:
    """For each knob its changes, smallest first; the knobs in the order in which to turn them."""
    knobs: list[list[dict[str, Any]]] = [
        [{"loading": policy} for policy in POLICIES[config.loading].smaller],
        [{"feature_dtype": "float16"}] if config.feature_dtype == "float32" else [],
        [{"num_workers": 0, "persistent_workers": False}] if config.num_workers else [],
        [{"eval_num_neighbors": None}] if config.eval_num_neighbors else [],
        [
            {"eval_batch_size": seeds}
            for seeds in _halves(config.eval_batch_size or config.batch_size)
        ],
        [{"batch_size": seeds} for seeds in _halves(config.batch_size)],
    ]
    fan_out, fan_outs = smaller_fan_out(config.num_neighbors), list[dict[str, Any]]()
    while fan_out is not None and not config.propagated:
        fan_outs.append({"num_neighbors": fan_out})
        fan_out = smaller_fan_out(fan_out)
    return [*knobs, fan_outs]


def _halves(count: int) -> list[int]:
    halves = []
    while count >= 64:
        count //= 2
        halves.append(count)
    return halves


def changes_that_fit(
    config: TrainConfig, size: GraphSize, limit_bytes: int, unforeseen_bytes: int = 0
) -> list[tuple[dict[str, Any], Forecast]]:
    """Configurations that fit with the fewest knobs turned; for each set of knobs the smallest
    change.

    `unforeseen_bytes` is memory that a run took beyond its forecast.
    """

    def fitting(steps: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], Forecast] | None:
        changes = {name: value for step in steps for name, value in step.items()}
        changed = config.replace(**changes)
        if changed.on_disk and size.stored == "store" and "feature_dtype" in changes:
            return None  # a store has its own
        forecast = predict(changed, size, memory_limit_bytes=limit_bytes)
        fits = verdict(forecast, limit_bytes - unforeseen_bytes) == FITS
        return (changes, forecast) if fits else None

    knobs = [steps for steps in _knobs(config) if steps]
    for count in range(1, len(knobs) + 1):
        found = []
        for chosen in itertools.combinations(knobs, count):
            # Where the largest changes together don't fit, no smaller ones do.
            if fitting([steps[-1] for steps in chosen]) is not None:
                tried = (fitting(steps) for steps in itertools.product(*chosen))
                found.append(next(one for one in tried if one is not None))
        if found:
            return found
    return []


def smallest_limit(config: TrainConfig, size: GraphSize, unforeseen_bytes: int = 0) -> int:
    """The smallest limit that a configuration fits, within 1 %."""
    forecast = predict(config, size)
    limit = forecast.least_bytes + forecast.margin_bytes + unforeseen_bytes
    # Windows of a store, and so its forecast, follow the limit.
    while True:
        forecast = predict(config, size, memory_limit_bytes=limit)
        if verdict(forecast, limit - unforeseen_bytes) == FITS:
            return limit
        limit += max(MB, limit // 100)


@clear_errors()
def plan(
    config: TrainConfig,
    memory_limit: str | int | None = None,
    *,
    size: GraphSize | None = None,
    machine: Machine = REFERENCE,
) -> Advice:
    """Forecast a run's memory and time, and what would fit if it does not fit under a limit.

    Args:
        memory_limit: Such as "128 GB"; without it there is no verdict.
        size: Of the data set, when it is known; else a known OGB name or a folder's headers.
        machine: For times; `machine.probe` measures the one that this is called on.
    """
    limit_bytes = None if memory_limit is None else parse_bytes(memory_limit)
    size, problem = size or graph_for(config), ""
    if not is_measured(config, size):
        try:
            try_model(config, size)
        except InputError as error:  # the model may be on another machine, which is to train it
            problem = str(error)
    forecast, others = predict(config, size, memory_limit_bytes=limit_bytes, machine=machine), []
    if limit_bytes is not None and verdict(forecast, limit_bytes) != FITS:
        others = changes_that_fit(config, size, limit_bytes)
    return Advice(forecast, limit_bytes, tuple(others), problem)


@clear_errors()
def ladder(
    dataset: str = "ogbn-papers100M", *, max_epoch_s: float | None = None, **settings: Any
) -> pd.DataFrame:
    """One row per allocation from 512 GB down to 4 GB: the best configuration, its peak, and an
    epoch's time.

    Times are a 2-core machine's: compare them with each other. `settings` replace values of every
    configuration.

    Args:
        max_epoch_s: Leave out configurations whose epoch takes longer.
    """
    import pandas as pd

    rungs, rows = (
        [TrainConfig.create({"dataset": dataset, **rung, **settings}) for rung in RUNGS],
        [],
    )
    for allocation in ALLOCATIONS:
        limit_bytes = parse_bytes(allocation)
        columns = ("loading", "features", "batch_size", "num_neighbors", "hidden")
        row: dict[str, Any] = dict.fromkeys((*columns, "peak GB", "page cache GB", "epoch min"), "")
        row["loading"] = "nothing fits" if max_epoch_s is None else "nothing fits in time"
        for config in rungs:
            best = predict(config, memory_limit_bytes=limit_bytes)
            if verdict(best, limit_bytes) == FITS and (
                max_epoch_s is None or best.epoch_s <= max_epoch_s
            ):
                row |= {
                    "loading": config.loading,
                    "features": {1: "int8", 2: "float16", 4: "float32"}[
                        feature_itemsize(config, best.size)
                    ],
                    "batch_size": config.batch_size,
                    "num_neighbors": _text(config.num_neighbors),
                    "hidden": config.hidden_channels,
                    "peak GB": round(best.peak_bytes / GB, 1),
                    "page cache GB": round(best.cache_bytes / GB, 1),
                    "epoch min": round(best.epoch_s / 60, 1),
                }
                break
        rows.append(row)
    return pd.DataFrame(rows, index=pd.Index(ALLOCATIONS, name="you have"))
