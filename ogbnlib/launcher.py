"""The environment of a launcher such as torchrun or Slurm."""

import os
from typing import NamedTuple

from .errors import InputError


class _Launch(NamedTuple):
    """Place of this process among the launcher's processes; `local` counts those of its node."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1


def job_cores() -> int:
    """Return the number of cores that this job may use on this node.

    These are the cores of its CPU affinity, in a Slurm job at most SLURM_CPUS_PER_TASK.
    """
    cores = len(os.sched_getaffinity(0))
    job_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(cores, int(job_cpus) or cores) if job_cpus.isdecimal() else cores


def sampling_threads() -> int:
    """Return the number of threads of this process that sample, each its own batch: one for each
    of its cores, at most 32."""
    return min(32, max(1, job_cores() // local_ranks()))


def launch() -> _Launch:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; without the first two this process is
    alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return _Launch()

    def number(name: str, least: int, most: int = 2**31, default: str = "") -> int:
        text = os.environ.get(name, default)
        if not text.isdecimal() or not least <= int(text) <= most:
            raise InputError(
                f"{name}: expected a number from {least} to {most} in the environment, as RANK and WORLD_SIZE are set, "
                f"got {text!r}; start the ranks with torchrun, or unset RANK and WORLD_SIZE"
            )
        return int(text)

    num_ranks = number("WORLD_SIZE", 1)
    rank = number("RANK", 0, num_ranks - 1)
    if num_ranks == 1:
        return _Launch()
    return _Launch(
        rank,
        num_ranks,
        number("LOCAL_RANK", 0, num_ranks - 1),
        number("LOCAL_WORLD_SIZE", 1, num_ranks, "1"),
    )


def local_ranks() -> int:
    """Return how many processes a launcher started on this node to train together.

    Raises the errors of `launch`.
    """
    return launch().num_local_ranks
