"""Every registered loading policy, so that a new one is tested by being there."""

from typing import Any

from ogbnlib.registry import MODELS, POLICIES

SAMPLED = [name for name, policy in POLICIES.items() if not policy.uses_hops]
IN_MEMORY = [name for name in SAMPLED if not POLICIES[name].reads_disk]


def settings(policy: str) -> dict[str, Any]:
    """A policy, with the first model that it trains."""
    wanted = POLICIES[policy].uses_hops
    models = (name for name, model in MODELS.items() if model.load().propagated == wanted)
    return {"loading": policy, "model": next(models)}
