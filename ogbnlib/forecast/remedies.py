"""The way out of an out-of-memory kill: changes that fit the limit that killed, by the planner.

Nothing is suggested that `plan` would refuse. Where the planner can't know, the text says why.
"""

from ..config import Resume, TrainConfig
from ..errors import InputError, format_bytes
from ..graph.store import GraphSize
from ..memory.killed import KEPT, KilledBy
from ..memory.record import Record
from ..registry import MODELS
from .audit import graph_of_run, kind_of, measured_by_kind, predicted_by_kind
from .fitting import FITS, assignments, changes_that_fit, smallest_limit, verdict
from .memory_parts import RUNTIME_BYTES
from .run_forecast import Forecast, margin_bytes, predict
from .step_memory import is_measured

# Of these only Python, torch and kernels are in memory, so that no parameter changes them.
_BEFORE_DATA = ("", "open", "compile kernels")


def memory_remedy(config: TrainConfig, record: Record, killed: KilledBy) -> str:
    """The smallest changes that fit the limit which ended a run, else the smallest limit that
    fits."""
    if record.growth and record.growth.verdict == "climbs":
        text = f"find what each epoch keeps ({KEPT}): memory climbs from epoch to epoch"
        return f"{text}, so that smaller batches or a larger limit would only delay the kill"
    has_data = (record.phase.name if record.phase else "") not in _BEFORE_DATA
    runtime = f"Python and torch alone take {format_bytes(RUNTIME_BYTES)}, whatever the data"
    try:
        size = graph_of_run(config, record.events.get("dataset"), record.phases)
        if has_data and not is_measured(config, size):
            text = "ask `python -m ogbnlib plan --config` with the run's config.json what fits"
            return f"{text}: it tries {config.model} out, of which no step was measured here"
        forecast = predict(config, size, memory_limit_bytes=killed.left_bytes)
        unforeseen = unforeseen_bytes(forecast, record, killed.left_bytes)
        raised = killed.raised(smallest_limit(config, size, unforeseen))
        if not has_data:
            return f"{raised}: {runtime}"
        return _by_change(forecast, size, unforeseen, raised, killed.left_bytes)
    except (InputError, OSError) as error:  # the data set is gone, or damaged
        if not has_data:
            least = max(RUNTIME_BYTES, killed.left_bytes)
            return f"{killed.raised(least + margin_bytes(least))} or more: {runtime}"
        text = "name the data set again and ask `python -m ogbnlib plan` what fits"
        return f"{text}: the planner can't say it here ({error})"


def _by_change(
    forecast: Forecast, size: GraphSize, unforeseen: int, raised: str, limit_bytes: int
) -> str:
    """The smallest changes that fit a limit, or to raise it."""
    config = forecast.config
    if config.model not in MODELS and verdict(forecast, limit_bytes) == FITS:
        text = f"find what {config.model} keeps from batch to batch ({KEPT})"
        peak = format_bytes(forecast.peak_bytes)
        return f"{text}: by a measured step the run takes {peak}, and it took all of its limit"
    texts = []
    for changes, changed in changes_that_fit(config, size, limit_bytes, unforeseen)[:2]:
        verb = "start again with"
        if all(map(Resume.of, changes)):
            verb = "go on with"
        peak = format_bytes(changed.peak_bytes + unforeseen)
        texts.append(f"{verb} {assignments(changes)} ({peak} by forecast)")
    if not texts:
        texts.append(f"no change that the planner knows fits {format_bytes(limit_bytes)}")
    return "; or ".join([*texts, raised])


def unforeseen_bytes(forecast: Forecast, record: Record, limit_bytes: int) -> int:
    """Memory beyond the forecast in any phase of a run; in the phase of its kill it took all of its
    limit."""
    expected = dict.fromkeys(_BEFORE_DATA, RUNTIME_BYTES)
    for kind, phase in predicted_by_kind(forecast).items():
        expected[kind] = phase.held_bytes
    measured = measured_by_kind({name: peak for name, peak in record.phases.items() if name})
    last = kind_of(record.phase.name) if record.phase else ""
    measured[last] = max(measured.get(last, 0), limit_bytes)
    # A phase without a forecast of its own, such as a checkpoint, is compared with the whole run's.
    beyond = [peak - expected.get(kind, forecast.peak_bytes) for kind, peak in measured.items()]
    return max(0, *beyond)
