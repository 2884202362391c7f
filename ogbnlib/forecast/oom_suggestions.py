"""Options that make a run fit into its GPU's memory, cheapest first."""

from collections.abc import Mapping
from typing import Any

from ..config import TrainConfig
from ..errors import InputError, format_bytes
from ..registry import MODELS
from .phases import predict
from .sizes import smaller_fan_out


def oom_suggestions(config: TrainConfig, oom: Mapping[str, Any]) -> list[str]:
    """One sentence for each option that the run has not used yet; `oom` is the event `cuda_oom`."""
    requested, free = oom.get("requested_bytes"), oom.get("free_bytes")
    unallocated = oom.get("unallocated_bytes")
    if unallocated is None and "reserved_bytes" in oom and "allocated_bytes" in oom:
        unallocated = oom["reserved_bytes"] - oom["allocated_bytes"]
    suggestions, options = [], list[tuple[dict[str, Any], str]]()
    if not config.expandable_segments:
        text = "expandable_segments=True costs nothing"
        if unallocated is not None:
            text += f": {format_bytes(unallocated)} was reserved but unallocated"
            if requested is not None and unallocated >= requested:
                text += ", more than the request, but not in one piece"
        suggestions.append(text)
    if not config.release_every:
        suggestions.append(
            "release_every=100 costs some time and frees only segments without any tensor"
        )
    if config.batch_size >= 2:
        parts = 4 if config.batch_size % 4 == 0 else 2
        smaller = {
            "batch_size": config.batch_size // parts,
            "accumulate": config.accumulate * parts,
        }
        options.append((smaller, "trains about the same seeds a step in smaller batches"))
    if config.precision == "fp32":
        options.append(({"precision": "bf16"}, "computes with fewer digits"))
    if not config.activation_checkpointing and config.model in MODELS:
        options.append(
            (
                {"activation_checkpointing": True},
                "keeps the gradients and computes each layer twice",
            )
        )
    if fewer := smaller_fan_out(config.num_neighbors):
        options.append(({"num_neighbors": fewer}, "changes the results"))
    # 0 is unknown, or fragmentation: then no difference of sums tells what would have been enough.
    missing = 0
    if requested is not None and unallocated is not None and free is not None:
        missing = max(0, requested - unallocated - free)
    helping = list[tuple[str, bool]]()  # and whether an option by itself would have been enough
    for changes, cost in options:
        name = " ".join(
            f"{key}={list(value) if key == 'num_neighbors' else value}"
            for key, value in changes.items()
        )
        text = f"{name} {cost}"
        try:
            now, then = (
                sum(predict(one).gpu.values()) for one in (config, config.replace(**changes))
            )
        except (InputError, OSError):  # the data set is gone
            helping.append((text, False))
            continue
        if then < now:  # for some models autocast's copies take more than they save
            text += f": a step of about {format_bytes(then)} instead of {format_bytes(now)}"
            is_enough = 0 < missing < now - then
            if missing:
                text += ", which would have been enough" if is_enough else ", not enough by itself"
            helping.append((text, is_enough))
    enough = [text for text, is_enough in helping if is_enough]
    return suggestions + (enough or [text for text, _ in helping])
