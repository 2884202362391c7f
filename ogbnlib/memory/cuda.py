"""GPU memory: readings, and the sizes in the message of a failed allocation.

Readings never import torch: where the process has not used CUDA, there is nothing to read.
"""

from __future__ import annotations

import re
import sys
from typing import Any

OUT_OF_CUDA_MEMORY = 76  # exit code of a run that ran out of GPU memory; see `runs.codes`
# torch reads the older name first, and the newer one only if the older one is unset
# (c10/cuda/CUDAAllocatorConfig.h).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def cuda_in_use() -> Any:
    """Return the torch module if this process has used CUDA, else None."""
    torch = sys.modules.get("torch")
    return torch if torch and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def cuda_reading() -> dict[str, float] | None:
    """Return the memory of this process on its current GPU, or None if it has not used CUDA.

    `free_bytes` can still be reserved by the allocator, also under a cap. `alloc_retries` counts
    allocations that failed until the cache was emptied.
    """
    torch = cuda_in_use()
    if torch is None:
        return None
    stats = torch.cuda.memory_stats_as_nested_dict()
    reserved = stats["reserved_bytes"]["all"]["current"]
    free, total = torch.cuda.mem_get_info()  # bytes of the whole GPU, for all its processes
    allowed = int(total * torch.cuda.memory.get_per_process_memory_fraction())  # the cap
    return {
        "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
        "reserved_bytes": reserved,
        "peak_allocated_bytes": stats["allocated_bytes"]["all"]["peak"],
        "peak_reserved_bytes": stats["reserved_bytes"]["all"]["peak"],
        "free_bytes": max(0, min(free, allowed - reserved)),
        "alloc_retries": stats["num_alloc_retries"],
    }


# Patterns for sizes in the allocator's message since torch 2.0 (CUDACachingAllocator.cpp)
_SIZES = {
    "requested_bytes": "Tried to allocate {}",
    "free_bytes": r"{} is free\b",
    "allocated_bytes": "{} is allocated by PyTorch",
    "unallocated_bytes": "{} is reserved by PyTorch but unallocated",
}


def oom_sizes(message: str) -> dict[str, int]:
    """Return the sizes in the message of a torch.OutOfMemoryError, in bytes."""
    sizes = {}
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for name, pattern in _SIZES.items():
        match = re.search(pattern.format(r"([\d.]+) (bytes|KiB|MiB|GiB)"), message)
        if match:  # other releases of torch and other errors lack some sizes
            sizes[name] = int(float(match[1]) * units[match[2]])
    if "unallocated_bytes" in sizes and "allocated_bytes" in sizes:
        sizes["reserved_bytes"] = sizes["allocated_bytes"] + sizes["unallocated_bytes"]
    return sizes
