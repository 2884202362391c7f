"""Cores, ranks and device of this process, by the environment that torchrun or Slurm sets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from .errors import InputError

if TYPE_CHECKING:
    import torch


class _Launch(NamedTuple):
    """Place of this process among the launcher's processes; `local` counts those of its node."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1


def job_cores() -> int:
    """Return the number of cores that this process may use, in Slurm at most its CPUs per task."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK") or cores))


def sampling_threads() -> int:
    """Return how many threads sample, one a core, at most 32; each keeps a batch in memory."""
    return min(32, max(1, job_cores() // local_ranks()))


def launch() -> _Launch:
    """Read this process's ranks and their counts as torchrun sets them; rank 0 of 1 without it."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return _Launch()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = {name: os.environ.get(name, "") for name in names}
    are_numbers = all(map(str.isdecimal, values.values()))
    here = _Launch(*map(int, values.values())) if are_numbers else _Launch()  # of 1 rank
    # Several ranks were announced: a single one means that the values are not numbers.
    if not (here.rank < here.num_ranks > 1 and here.local_rank < here.num_local_ranks):
        raise InputError(
            f"environment: expected ranks below their sizes in {', '.join(names)}, got {values}; "
            "start the ranks with torchrun, or unset RANK and WORLD_SIZE"
        )
    return here


def local_ranks() -> int:
    """Return how many processes a launcher started on this node to train together."""
    return launch().num_local_ranks


def resolve_device(device: str) -> torch.device:
    """Return the torch device; "auto" is CUDA if a GPU is usable, else the CPU."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "no GPU is visible"
        raise InputError(
            f"device: expected a usable GPU for 'cuda', but {build}; use device='auto' or 'cpu'"
        )
    return torch.device(device)


def check_precision(precision: str, device: str) -> None:
    """Refuse float16 on a CPU: gradients below 6e-8 are lost, since no loss scaling saves them."""
    if precision == "fp16" and resolve_device(device).type == "cpu":
        raise InputError(
            f"precision: expected a GPU for 'fp16', found none with device={device!r}; "
            "use 'bf16' or 'fp32'"
        )
