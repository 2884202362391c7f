"""The environment variables of a launcher such as torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import InputError


@dataclass(frozen=True)
class Launch:
    """This process among the processes of a launcher."""

    rank: int
    num_ranks: int
    local_rank: int  # among the ranks of this node
    num_local_ranks: int


def launch() -> Launch | None:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; None without the first two, or with a single rank."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    num_ranks = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0, num_ranks - 1)
    if num_ranks == 1:
        return None
    num_local_ranks = _number("LOCAL_WORLD_SIZE", 1, num_ranks, "1")
    return Launch(rank, num_ranks, _number("LOCAL_RANK", 0, num_ranks - 1), num_local_ranks)


def check_address() -> None:
    """Refuse a launch without MASTER_ADDR or MASTER_PORT."""
    _number("MASTER_PORT", 1, 65535)
    if not os.environ.get("MASTER_ADDR"):
        raise _wrong("MASTER_ADDR", "the first rank's host name")


def _number(name: str, least: int, most: int | None = None, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None or not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        raise _wrong(name, f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}"))
    return int(text)


def _wrong(name: str, expected: str) -> InputError:
    value = repr(os.environ[name]) if name in os.environ else "none"
    return InputError(
        f"{name}: expected {expected} in the environment, as RANK and WORLD_SIZE are set, got {value}; start the ranks "
        "with torchrun, or unset RANK and WORLD_SIZE to train in one process"
    )
