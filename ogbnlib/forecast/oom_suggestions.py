"""Options that make a run fit into its GPU's memory, cheapest first."""

from collections.abc import Mapping

from ..config import TrainConfig
from ..errors import InputError, format_bytes
from ..registry import MODELS
from .memory_parts import smaller_fan_outs
from .run_forecast import predict

# Bytes by name as in the event `cuda_oom`, without those that torch did not say.
Oom = Mapping[str, float]


def oom_suggestions(config: TrainConfig, oom: Oom) -> list[str]:
    """One sentence for each option that the run has not used yet; `oom` is the event `cuda_oom`."""
    requested = oom.get("requested_bytes")
    unallocated = _unallocated(oom)
    suggestions = []
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
    # 0 is unknown, or fragmentation: then no difference of sums tells what would have been enough.
    missing = 0.0
    free = oom.get("free_bytes")
    if requested is not None and unallocated is not None and free is not None:
        missing = max(0, requested - unallocated - free)
    enough = []
    others = []
    for changes, cost in _options(config):
        option = " ".join(f"{name}={value}" for name, value in changes.items()) + f" {cost}"
        try:
            now = sum(predict(config).gpu.values())
            then = sum(predict(config.replace(**changes)).gpu.values())
        except (InputError, OSError):  # the data set is gone
            others.append(option)
            continue
        text = f"{option}: a step of about {format_bytes(then)} instead of {format_bytes(now)}"
        if then >= now:  # for some models autocast's copies take more than they save
            continue
        if not missing:
            others.append(text)
        elif now - then > missing:
            enough.append(f"{text}, which would have been enough")
        else:
            others.append(f"{text}, not enough by itself")
    return suggestions + (enough or others)


def _unallocated(oom: Oom) -> float | None:
    """Bytes that torch had reserved and not allocated; None if unknown."""
    reserved = oom.get("reserved_bytes")
    allocated = oom.get("allocated_bytes")
    unallocated = oom.get("unallocated_bytes")
    if unallocated is None and reserved is not None and allocated is not None:
        return reserved - allocated
    return unallocated


def _options(config: TrainConfig) -> list[tuple[dict[str, object], str]]:
    """Changes of the config that take less GPU memory, and their costs; the cheapest first."""
    options: list[tuple[dict[str, object], str]] = []
    if config.batch_size >= 2:
        parts = 4 if config.batch_size % 4 == 0 else 2
        smaller = {
            "batch_size": config.batch_size // parts,
            "accumulate": config.accumulate * parts,
        }
        options.append(({**smaller}, "trains about the same seeds a step in smaller batches"))
    if config.precision == "fp32":
        options.append(({"precision": "bf16"}, "computes with fewer digits"))
    is_sampled = config.model in MODELS and not config.policy.uses_hops
    if is_sampled and not config.activation_checkpointing:
        cost = "keeps the gradients and computes each layer twice"
        options.append(({"activation_checkpointing": True}, cost))
    for fan_outs in smaller_fan_outs(config)[:1]:
        options.append(({"num_neighbors": list(fan_outs)}, "changes the results"))
    return options
