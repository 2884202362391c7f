"""GPU memory: allocator settings, readings, and the record of a failed allocation.

Readings never import torch: where the process has not used CUDA, there is nothing to read.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InputError, format_bytes

if TYPE_CHECKING:
    import torch

    from ..config import TrainConfig

# exit code of a run that ran out of GPU memory; see `exit_codes.EXIT_CODES`
OUT_OF_CUDA_MEMORY = 76
# torch reads the older name first, and the newer one only if the older one is unset
# (c10/cuda/CUDAAllocatorConfig.h).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def cuda_in_use() -> Any:
    """Return the torch module if this process has used CUDA, else None."""
    torch = sys.modules.get("torch")
    return torch if torch and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def allocator_environment(config: TrainConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that turn on `expandable_segments`; {} if `config` does not.

    The user's other allocator settings are kept.
    """
    if not config.expandable_segments:
        return {}
    current = next((environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)), "")
    settings = re.split(r",(?![^\[]*\])", current)  # not at commas inside brackets
    others = [
        part for part in settings if part.split(":")[0].strip() not in ("", "expandable_segments")
    ]
    return dict.fromkeys(ALLOCATOR_VARIABLES, ",".join([*others, "expandable_segments:True"]))


def prepare_allocator(config: TrainConfig) -> None:
    """Set `expandable_segments` for this process; torch reads it at the first use of CUDA."""
    torch = sys.modules["torch"]
    variables = allocator_environment(config, os.environ)
    if not variables or config.device == "cpu" or not torch.cuda.is_available():
        return
    if torch.cuda.is_initialized() and not variables.items() <= os.environ.items():
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
    torch = sys.modules["torch"]
    notes = []
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    if config.max_cuda_memory is not None:
        total = torch.cuda.mem_get_info()[1]
        if config.max_cuda_memory > total:
            notes.append(f"max_cuda_memory: without effect, the GPU has {format_bytes(total)}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.max_cuda_memory / total))
    return notes


def end(config: TrainConfig) -> None:
    """Remove the GPU memory cap."""
    torch = cuda_in_use()
    if torch is not None and config.max_cuda_memory is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)


def cuda_reading(largest: bool = False) -> dict[str, float] | None:
    """Return the memory of this process on its current GPU, or None if it has not used CUDA.

    `free_bytes` can still be reserved by the allocator, also under a cap. `alloc_retries` counts
    allocations that failed until the cache was emptied. With `largest`, the reading also has the
    size of the largest unallocated block, and the seconds that it took to find it.
    """
    torch = cuda_in_use()
    if torch is None:
        return None
    stats = torch.cuda.memory_stats_as_nested_dict()
    reserved = stats["reserved_bytes"]["all"]["current"]
    free, total = torch.cuda.mem_get_info()
    allowed = int(total * torch.cuda.memory.get_per_process_memory_fraction())
    reading: dict[str, float] = {
        "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
        "reserved_bytes": reserved,
        "peak_allocated_bytes": stats["allocated_bytes"]["all"]["peak"],
        "peak_reserved_bytes": stats["reserved_bytes"]["all"]["peak"],
        "free_bytes": max(0, min(free, allowed - reserved)),
        "alloc_retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
    }
    # cudaMallocAsync has no list of blocks
    if largest and torch.cuda.get_allocator_backend() == "native":
        begin_s = time.perf_counter()
        # With a recorded history, the snapshot takes seconds. Older releases of torch cannot leave
        # the history out.
        accepted = inspect.signature(torch.cuda.memory_snapshot).parameters
        options = {"include_traces": False} if "include_traces" in accepted else {}
        segments = torch.cuda.memory_snapshot(**options)
        device = torch.cuda.current_device()
        free_sizes = (
            int(block["size"])
            for segment in segments
            for block in segment["blocks"]
            if segment["device"] == device and block["state"] == "inactive"
        )
        reading["largest_free_bytes"] = max(free_sizes, default=0)
        reading["took_s"] = round(time.perf_counter() - begin_s, 6)
    return reading


# Patterns for sizes in the allocator's message (CUDACachingAllocator.cpp): as worded since torch
# 2.0, as worded before, and as people list them, such as "Requested: 2 GiB".
_SIZES = {
    "requested_bytes": ("[Tt]ried to allocate:? {}", "[Rr]equested:? {}"),
    "total_bytes": ("total capacity of {}", "{} total capacity"),
    "free_bytes": (r"{} (?:is )?free\b", "[Ff]ree:? {}"),
    "allowed_bytes": ("{} allowed",),
    "allocated_bytes": ("{} is allocated by PyTorch", "{} already allocated"),
    "unallocated_bytes": (
        "{} (?:is )?reserved (?:by PyTorch )?but unallocated",
        "[Rr]eserved but unallocated:? {}",
    ),
    "reserved_bytes": ("{} reserved in total by PyTorch",),
}


def oom_sizes(message: str) -> dict[str, int]:
    """Return the sizes in the message of a torch.OutOfMemoryError, in bytes."""
    sizes = {}
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for name, forms in _SIZES.items():
        pattern = "|".join(form.format(r"([\d.]+) (bytes|KiB|MiB|GiB)") for form in forms)
        match = re.search(pattern, message)
        if match:
            number, unit = filter(None, match.groups())
            sizes[name] = int(float(number) * units[unit])
    allocated = sizes.get("allocated_bytes", 0)
    if "reserved_bytes" in sizes:
        sizes["unallocated_bytes"] = sizes["reserved_bytes"] - allocated
    elif "unallocated_bytes" in sizes and allocated:
        sizes["reserved_bytes"] = allocated + sizes["unallocated_bytes"]
    if "allowed_bytes" in sizes and "reserved_bytes" in sizes:
        free = max(0, sizes["allowed_bytes"] - sizes["reserved_bytes"])
        sizes["free_bytes"] = min(free, sizes.get("free_bytes", free))
    return sizes


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
