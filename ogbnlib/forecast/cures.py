"""What would have kept a run within its GPU's memory, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import MODELS, TrainConfig
from ..errors import InputError, format_bytes
from .phases import predict
from .sizes import smaller_fan_out


def step_bytes(config: TrainConfig) -> int | None:
    """The forecast of a training step on the GPU; None where the data set's size is not to be had any more."""
    try:
        return sum(predict(config).gpu.values())
    except InputError:
        return None


def cuda_cures(config: TrainConfig, oom: Mapping[str, Any]) -> list[str]:
    """Sentences, one for each option that is not taken yet, in the order of what they cost.

    Args:
        oom: The event `cuda_oom`.

    Where sizes are known, an option says what a step would take, and whether that is less by what was missing.
    """
    requested, unallocated = oom.get("requested_bytes"), oom.get("unallocated_bytes")
    if unallocated is None and "reserved_bytes" in oom and "allocated_bytes" in oom:
        unallocated = oom["reserved_bytes"] - oom["allocated_bytes"]
    cures = []
    pieces = f"{format_bytes(unallocated)} was reserved but unallocated" if unallocated is not None else ""
    if unallocated is not None and requested is not None and unallocated >= requested:
        pieces += ", more than was asked for, but not in one piece"
    if not config.expandable_segments:
        cures.append("expandable_segments=True costs nothing" + (f": {pieces}" if pieces else ""))
    if not config.empty_cache_every:
        cures.append("empty_cache_every=100 costs some time a call and gives back whole unused segments only")
    missing = 0  # unknown, or nothing was: it was there in pieces, and no sum says what would have helped
    if requested is not None and unallocated is not None and "free_bytes" in oom:
        missing = max(0, requested - unallocated - oom["free_bytes"])
    now = step_bytes(config)
    for changes, cost in _changes(config):
        name = " ".join(f"{key}={list(value) if key == 'num_neighbors' else value}" for key, value in changes.items())
        text = f"{name} {cost}"
        if now is not None and (then := step_bytes(config.replace(**changes))) is not None:
            if then >= now:
                continue  # as autocast does for some models, whose copies take more than they save
            text += f": a step of about {format_bytes(then)} in place of {format_bytes(now)}"
            if missing:
                text += ", which would have been enough" if now - then > missing else ", not enough by itself"
        cures.append(text)
    return cures


def _changes(config: TrainConfig) -> Iterator[tuple[dict[str, Any], str]]:
    if config.batch_size >= 2:
        parts = 4 if config.batch_size % 4 == 0 else 2
        smaller = {"batch_size": config.batch_size // parts, "accumulate": config.accumulate * parts}
        seeds = "the same seeds" if config.batch_size % parts == 0 else "nearly as many seeds"
        yield smaller, f"trains {seeds} a step in smaller batches"
    if config.precision == "fp32":
        yield {"precision": "bf16"}, "costs digits"
    if not config.activation_checkpointing and config.model in MODELS:
        yield {"activation_checkpointing": True}, "keeps the gradients and computes each layer twice"
    if fewer := smaller_fan_out(config.num_neighbors):
        yield {"num_neighbors": fewer}, "changes what is learned"
