"""Verdicts about a memory limit, and changes of a configuration that make it fit.

A verdict allows for the forecast's error: FITS and WILL NOT FIT are claimed outside that margin,
TIGHT inside it.
"""

import itertools
import shlex
from collections.abc import Mapping, Sequence

from ..config import TrainConfig
from ..errors import MB
from ..graph.store import GraphSize
from .memory_parts import has_own_dtype, smaller_fan_outs
from .run_forecast import Forecast, predict

FITS = "FITS"
TIGHT = "TIGHT"
WILL_NOT_FIT = "WILL NOT FIT"

Changes = Mapping[str, object]  # parameters and their new values


def verdict(forecast: Forecast, limit_bytes: int) -> str:
    """FITS, TIGHT or WILL NOT FIT under a limit."""
    # Windows (batches read ahead together) are sized to the limit by the mean batch; with the
    # largest batches their peak may exceed it.
    planned = forecast.limit_bytes
    is_over = planned is not None and forecast.peak_bytes > max(planned, limit_bytes)
    most_bytes = forecast.least_bytes + forecast.margin_bytes
    # Batches wait only for a model slower than the disk: with an empty queue a run needs less.
    least_bytes = forecast.least_bytes - forecast.queue_bytes - forecast.margin_bytes
    outcome = compared(most_bytes, least_bytes, limit_bytes)
    return TIGHT if outcome == FITS and is_over else outcome


def compared(most_bytes: int, least_bytes: int, limit_bytes: int) -> str:
    """The verdict on a need between two bounds."""
    if most_bytes <= limit_bytes:
        return FITS
    return TIGHT if least_bytes <= limit_bytes else WILL_NOT_FIT


def assignments(changes: Changes) -> str:
    """Changes as `--set` takes them, a tuple's items separated by blanks: `loading=store
    'num_neighbors=15 10'`."""
    values = {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in changes.items()
    }
    return shlex.join(f"{name}={value}" for name, value in values.items())


def _knobs(config: TrainConfig) -> list[list[Changes]]:
    # For each parameter that could change, its steps from the smallest change to the largest.
    eval_seeds = config.seeds_per_batch(training=False)
    knobs: list[list[Changes]] = [
        [{"loading": name} for name in config.policy.smaller],  # less memory, fastest first
        [{"feature_dtype": "float16"}] * (config.feature_dtype == "float32"),  # times False: []
        [{"num_workers": 0, "persistent_workers": False}] * (config.num_workers > 0),
        [{"eval_num_neighbors": None}] * (config.eval_num_neighbors is not None),
        [{"eval_batch_size": seeds} for seeds in _halves(eval_seeds)],
        [{"batch_size": seeds} for seeds in _halves(config.batch_size)],
        [{"num_neighbors": fan_outs} for fan_outs in smaller_fan_outs(config)],
    ]
    return [steps for steps in knobs if steps]


def _halves(count: int) -> list[int]:
    # halved once, twice and so on, as long as 32 remain
    return [count >> times for times in range(1, count.bit_length() - 5)]


def changes_that_fit(
    config: TrainConfig, size: GraphSize, limit_bytes: int, unforeseen_bytes: int = 0
) -> list[tuple[Changes, Forecast]]:
    """Find the smallest changes that fit, with the fewest knobs turned, and their forecasts.

    `unforeseen_bytes` is memory that a run took beyond its forecast.
    """

    def fitting(steps: Sequence[Changes]) -> tuple[Changes, Forecast] | None:
        """One step of each knob as one change, with its forecast; None if it does not fit."""
        changes = {name: value for step in steps for name, value in step.items()}
        changed = config.replace(**changes)
        if has_own_dtype(changed, size) and "feature_dtype" in changes:  # it would change nothing
            return None
        forecast = predict(changed, size, memory_limit_bytes=limit_bytes)
        is_fitting = verdict(forecast, limit_bytes - unforeseen_bytes) == FITS
        return (changes, forecast) if is_fitting else None

    knobs = _knobs(config)
    for count in range(1, len(knobs) + 1):  # of knobs turned together
        smallest = []
        for chosen in itertools.combinations(knobs, count):
            # If the largest changes together don't fit, no smaller ones do.
            if fitting([steps[-1] for steps in chosen]) is not None:
                # the last knob turns first; the largest changes fit, so there is a result
                tried = (fitting(steps) for steps in itertools.product(*chosen))
                smallest.append(next(result for result in tried if result is not None))
        if smallest:
            return smallest
    return []


def smallest_limit(config: TrainConfig, size: GraphSize, unforeseen_bytes: int = 0) -> int:
    """The smallest limit in bytes, within 1 %, that a configuration fits."""
    forecast = predict(config, size)
    limit = forecast.least_bytes + forecast.margin_bytes + unforeseen_bytes
    # The windows of a store, and so its forecast, depend on the limit: raise it until it fits.
    while True:
        forecast = predict(config, size, memory_limit_bytes=limit)
        if verdict(forecast, limit - unforeseen_bytes) == FITS:
            return limit
        limit += max(MB, limit // 100)  # by 1 %
