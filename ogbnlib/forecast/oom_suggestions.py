"""Options that make a run fit into its GPU's memory, cheapest first."""

import math
from collections.abc import Mapping

from ..config import TrainConfig
from ..errors import InputError, format_bytes
from ..registry import MODELS
from .memory_parts import smaller_fan_outs
from .run_forecast import predict


def oom_suggestions(config: TrainConfig, oom: Mapping[str, float]) -> list[str]:
    """One sentence for each option that the run does not use yet.

    `oom` has sizes by name as in the event `cuda_oom`, without those that torch did not report.
    """
    # NaN in place of each size that torch did not report
    requested = oom.get("requested_bytes", math.nan)
    reserved = oom.get("reserved_bytes", math.nan) - oom.get("allocated_bytes", math.nan)
    unallocated = oom.get("unallocated_bytes", reserved)
    missing = requested - unallocated - oom.get("free_bytes", math.nan)
    suggestions = []
    if not config.expandable_segments:
        text = "expandable_segments=True costs nothing"
        if not math.isnan(unallocated):
            text += f": {format_bytes(unallocated)} was reserved but unallocated"
        if missing <= 0:
            text += ", and with the free memory more than the request, but not in one piece"
        suggestions.append(text)
    if not config.release_every:
        suggestions.append(
            "release_every=100 costs some time and frees only segments without any tensor"
        )
    enough = []
    unsure = []
    for changes, cost in _options(config):
        text = " ".join(f"{name}={value}" for name, value in changes.items()) + f" {cost}"
        try:
            now = sum(predict(config).gpu.values())
            then = sum(predict(config.replace(**changes)).gpu.values())
        except (InputError, OSError):  # the data set is gone
            unsure.append(text)
            continue
        if then >= now:  # for some models autocast's copies take more than they save
            continue
        text += f": a step of about {format_bytes(then)} instead of {format_bytes(now)}"
        # If bytes are unknown, or if memory was only fragmented, no difference of sums tells what
        # is enough.
        if missing > 0 and now - then > missing:
            enough.append(f"{text}, which would have been enough")
        else:
            unsure.append(f"{text}, not enough by itself" if missing > 0 else text)
    return suggestions + (enough or unsure)


def _options(config: TrainConfig) -> list[tuple[dict[str, object], str]]:
    parts = 2 if config.batch_size % 4 else 4
    model = MODELS.get(config.model)
    fan_outs = next(iter(smaller_fan_outs(config)), ())
    options: list[tuple[object, dict[str, object], str]] = [
        (
            config.batch_size >= 2,
            {"batch_size": config.batch_size // parts, "accumulate": config.accumulate * parts},
            "trains about the same seeds a step in smaller batches",
        ),
        (config.precision == "fp32", {"precision": "bf16"}, "computes with fewer digits"),
        (
            model and model.load().can_checkpoint and not config.activation_checkpointing,
            {"activation_checkpointing": True},
            "keeps the gradients and computes each layer twice",
        ),
        (fan_outs, {"num_neighbors": [*fan_outs]}, "changes the results"),
    ]
    return [(changes, cost) for applies, changes, cost in options if applies]
