"""Every registered loading policy, so that a new one is tested by being there."""

from typing import Any

from ogbnlib.registry import MODELS, POLICIES

SAMPLED = [name for name, policy in POLICIES.items() if policy.samples]
IN_MEMORY = [name for name in SAMPLED if not POLICIES[name].reads_disk]


def settings(policy: str) -> dict[str, Any]:
    """A policy, with the first model that it trains."""
    models = (
        name
        for name, model in MODELS.items()
        if model.load().propagated != POLICIES[policy].samples
    )
    return {"loading": policy, "model": next(models)}
