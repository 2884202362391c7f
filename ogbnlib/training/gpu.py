"""Settings of the GPU's allocator for a training, and their end."""

import os
import re
from collections.abc import Mapping

import torch

from ..config import TrainConfig
from ..errors import InputError, format_bytes
from ..memory.cuda import ALLOCATOR_VARIABLES, cuda_in_use


def _allocator_environment(config: TrainConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that turn on `expandable_segments`; {} if `config` does not.

    The user's other allocator settings are kept.
    """
    if not config.expandable_segments:
        return {}
    current = next((environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)), "")
    settings = re.split(r",(?![^\[]*\])", current)  # not at commas inside brackets
    kept = [
        part for part in settings if part.split(":")[0].strip() not in ("", "expandable_segments")
    ]
    return dict.fromkeys(ALLOCATOR_VARIABLES, ",".join([*kept, "expandable_segments:True"]))


def prepare_allocator(config: TrainConfig) -> None:
    """Set `expandable_segments` for this process; torch reads it at the first use of CUDA."""
    variables = _allocator_environment(config, os.environ)
    if not variables or config.device == "cpu" or not torch.cuda.is_available():
        return
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and not variables.items() <= os.environ.items():
        raise InputError(
            "expandable_segments: expected a process that has not used CUDA yet, and this one "
            "has; restart it, or train with run() in a child process"
        )
    os.environ.update(variables)


def begin(config: TrainConfig, device: str) -> list[str]:
    """Set the GPU memory cap and reset the peaks; return notes on options without effect here."""
    if device != "cuda":
        options = ("expandable_segments", "max_cuda_memory")
        names = ", ".join(name for name in options if getattr(config, name))
        return [f"{names}: without effect on the CPU"] if names else []
    notes = []
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.reset_peak_memory_stats()
    if config.max_cuda_memory is not None:
        total = torch.cuda.mem_get_info()[1]
        if config.max_cuda_memory > total:
            notes.append(f"max_cuda_memory: without effect, the GPU has {format_bytes(total)}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.max_cuda_memory / total))
    return notes


def end(config: TrainConfig) -> None:
    """Remove the GPU memory cap."""
    if cuda_in_use() is not None and config.max_cuda_memory is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)
