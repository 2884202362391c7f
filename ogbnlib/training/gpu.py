"""Settings of the GPU's allocator for a training, and their end."""

import os

import torch

from ..config import TrainConfig
from ..errors import InputError, format_bytes
from ..memory.cuda import ALLOCATOR_VARIABLES, cuda_in_use


def prepare_allocator(config: TrainConfig) -> None:
    """Set `expandable_segments` for this process, after the user's own settings; torch reads it at
    the first use of CUDA."""
    if not config.expandable_segments or config.device == "cpu" or not torch.cuda.is_available():
        return
    setting = "expandable_segments:True"
    # the user's own settings, of the first variable that is set; torch ignores the others
    settings = [os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)][:1]
    if any(setting in text for text in settings):
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise InputError(
            "expandable_segments: expected a process that has not used CUDA yet, and this one "
            "has; restart it, or train with run() in a child process"
        )
    # of two values torch takes the last
    os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, ",".join([*settings, setting])))


def begin(config: TrainConfig, device: str) -> list[str]:
    """Set the GPU memory cap and reset the peaks; return notes on options without effect here."""
    if device != "cuda":
        options = ("expandable_segments", "max_cuda_memory")
        names = ", ".join(name for name in options if getattr(config, name))
        return [f"{names}: without effect on the CPU"] if names else []
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.reset_peak_memory_stats()
    if config.max_cuda_memory is not None:
        total = torch.cuda.mem_get_info()[1]  # bytes of the GPU
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.max_cuda_memory / total))
        if config.max_cuda_memory > total:
            return [f"max_cuda_memory: without effect, the GPU has {format_bytes(total)}"]
    return []


def end(config: TrainConfig) -> None:
    """Remove the GPU memory cap."""
    if cuda_in_use() is not None and config.max_cuda_memory is not None:  # None: not used
        torch.cuda.set_per_process_memory_fraction(1.0)
