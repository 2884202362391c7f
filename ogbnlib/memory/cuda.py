"""A GPU's memory: the allocator's settings, what it holds, and what is kept of the moment it ran out.

No reading imports torch: without it, or before CUDA was used in this process, there is nothing to read.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, format_bytes
from ..files import write_atomically

if TYPE_CHECKING:
    import torch

    from ..config import TrainConfig

OUT_OF_CUDA_MEMORY = 76  # exit code of a run whose GPU had no memory left; see `diagnosis.EXIT_CODES`
SNAPSHOT = "cuda_snapshot.pickle"
# torch reads the first, its older name, and only where that is not set the second (c10/cuda/CUDAAllocatorConfig.h).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\s*expandable_segments\s*:\s*(\w+)\s*", re.IGNORECASE)
_HISTORY_ENTRIES = 100_000  # of the allocator's trace; several KB each in the snapshot's file
_GPU_OPTIONS = ("empty_cache_every", "expandable_segments", "max_cuda_memory", "cuda_snapshot")


def cuda_in_use() -> Any:
    """torch, where this process has used CUDA."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


# Settings -------------------------------------------------------------------------------------------------------------


def allocator_environment(config: TrainConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """What must be in a process's environment for `expandable_segments`; the user's other settings stay in it."""
    if not config.expandable_segments:
        return {}
    current = next((environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)), "")
    merged = {}
    for name in ALLOCATOR_VARIABLES:
        settings = re.split(r",(?![^\[]*\])", environ.get(name) or current)  # commas in brackets part none
        kept = [part for part in settings if part.strip() and not _EXPANDABLE.fullmatch(part)]
        merged[name] = ",".join([*kept, "expandable_segments:True"])
    return merged


def prepare_allocator(config: TrainConfig) -> None:
    """Set `expandable_segments` for this process, before its first use of CUDA.

    Raises:
        InputError: when it comes too late.
    """
    torch = sys.modules["torch"]
    wanted = allocator_environment(config, os.environ)
    if not wanted or config.device == "cpu" or not torch.cuda.is_available():
        return
    if torch.cuda.is_initialized() and any(os.environ.get(name) != value for name, value in wanted.items()):
        raise InputError(
            "expandable_segments: expected a process that has not used CUDA yet, and this one has; "
            "restart it, train with run() in a child process, or set "
            f"{ALLOCATOR_VARIABLES[1]}=expandable_segments:True before it starts"
        )
    os.environ.update(wanted)


def begin(config: TrainConfig, device: str) -> list[str]:
    """Set the cap and start recording allocations; returns notes on options that have no effect here."""
    if device != "cuda":
        names = [name for name in _GPU_OPTIONS if getattr(config, name)]
        return [f"{', '.join(names)}: without effect on the CPU"] if names else []
    torch, notes = sys.modules["torch"], []
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    if config.max_cuda_memory is not None:
        total = torch.cuda.mem_get_info()[1]
        if config.max_cuda_memory > total:
            notes.append(f"max_cuda_memory: without effect, the GPU has {format_bytes(total)}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.max_cuda_memory / total))
    if config.cuda_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES, stacks="python")
    return notes


def end(config: TrainConfig) -> None:
    """Undo `begin`."""
    if (torch := cuda_in_use()) is None:
        return
    if config.max_cuda_memory is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if config.cuda_snapshot:
        torch.cuda.memory._record_memory_history(enabled=None)


def empty_cache(mark: Callable[..., None], batch: int) -> None:
    """Give cached blocks back to the GPU and mark how much that was and how long it took."""
    if (torch := cuda_in_use()) is None:
        return
    begin_s, before = time.perf_counter(), torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    given, took_s = before - torch.cuda.memory_reserved(), time.perf_counter() - begin_s
    mark("empty_cache", after=f"batch {batch}", bytes=given, took_s=round(took_s, 6))


# Readings -------------------------------------------------------------------------------------------------------------


def cuda_reading(largest: bool = False) -> dict[str, float] | None:
    """This process's memory on its current GPU; None when CUDA was not used here.

    `allocated_bytes` by tensors and `reserved_bytes` by torch's allocator for them, now and at their peak since the
    run began (`peak_allocated_bytes`, `peak_reserved_bytes`, which no sampling misses); `free_bytes` that it can still
    reserve (`torch.cuda.mem_get_info`, under a cap what the cap leaves); `alloc_retries`, allocations that failed
    until the cache was emptied, and `ooms`, those that failed for good, since the process began.

    With `largest` also `largest_free_bytes`, the largest unallocated block in one piece, and `took_s`, what looking
    for it took: the allocator lists all its blocks for that (`torch.cuda.memory_snapshot`).
    """
    if (torch := cuda_in_use()) is None:
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
    if largest and torch.cuda.get_allocator_backend() == "native":  # cudaMallocAsync has no list of blocks
        begin_s = time.perf_counter()
        segments, device = torch.cuda.memory_snapshot(include_traces=False), torch.cuda.current_device()
        blocks = [block for segment in segments if segment["device"] == device for block in segment["blocks"]]
        unallocated = (int(block["size"]) for block in blocks if block["state"] == "inactive")
        reading["largest_free_bytes"] = max(unallocated, default=0)
        reading["took_s"] = round(time.perf_counter() - begin_s, 6)
    return reading


# Out of memory --------------------------------------------------------------------------------------------------------

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# How the allocator's message has its sizes (CUDACachingAllocator.cpp), since torch 2.0 and before it.
_SIZES = {
    "requested_bytes": ("Tried to allocate {}",),
    "total_bytes": ("total capacity of {}", "{} total capacity"),
    "free_bytes": ("of which {} is free", "; {} free"),
    "allowed_bytes": ("{} allowed",),
    "allocated_bytes": ("{} is allocated by PyTorch", "{} already allocated"),
    "unallocated_bytes": ("{} is reserved by PyTorch but unallocated",),
    "reserved_bytes": ("{} reserved in total by PyTorch",),
}


def oom_sizes(message: str) -> dict[str, int]:
    """The sizes that an OutOfMemoryError names, as far as it does."""
    sizes = {}
    for name, forms in _SIZES.items():
        pattern = "|".join(form.format(r"([\d.]+) (bytes|KiB|MiB|GiB)") for form in forms)
        if found := re.search(pattern, message):
            number, unit = filter(None, found.groups())
            sizes[name] = int(float(number) * _UNITS[unit])
    allocated = sizes.get("allocated_bytes", 0)
    if "reserved_bytes" in sizes:
        sizes["unallocated_bytes"] = sizes["reserved_bytes"] - allocated
    elif "unallocated_bytes" in sizes and allocated:
        sizes["reserved_bytes"] = allocated + sizes["unallocated_bytes"]
    if "allowed_bytes" in sizes and "reserved_bytes" in sizes:
        left = max(0, sizes["allowed_bytes"] - sizes["reserved_bytes"])
        sizes["free_bytes"] = min(left, sizes.get("free_bytes", left))
    return sizes


def record_oom(error: BaseException, config: TrainConfig, run_dir: Path | None, mark: Callable[..., None]) -> None:
    """Mark the event `cuda_oom` with the message's sizes, and write cuda_snapshot.pickle where that was asked for.

    To be called while the error is handled: what its frames hold is then still allocated.
    """
    message = str(error).partition(" If reserved but unallocated")[0].splitlines()
    text = message[0] if message else type(error).__name__
    mark("cuda_oom", message=text, **{**(cuda_reading(largest=True) or {}), **oom_sizes(text)})
    if config.cuda_snapshot and run_dir is not None and (torch := cuda_in_use()) is not None:
        snapshot = torch.cuda.memory._snapshot()
        try:  # in torch's own format, which only its viewer reads
            write_atomically(run_dir / SNAPSHOT, lambda file: pickle.dump(snapshot, file))
        except OSError as failed:
            mark("note", cuda_snapshot=f"{SNAPSHOT} could not be written: {failed}")


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises:
        InputError: for `cuda` on a machine or build without it.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "no GPU is visible"
        raise InputError(f"device: expected a usable GPU for 'cuda', but {build}; use device='auto' or 'cpu'")
    return torch.device(device)


def check_precision(precision: str, device: str) -> None:
    """Refuse float16 on a CPU, where gradients below 6e-8 are lost and nothing scales them.

    Raises:
        InputError: for "fp16" where `device` resolves to the CPU.
    """
    if precision == "fp16" and resolve_device(device).type == "cpu":
        raise InputError(
            f"precision: expected a GPU for 'fp16', found none to use with device={device!r}; "
            "use 'bf16', which needs no scaling, or 'fp32'"
        )
