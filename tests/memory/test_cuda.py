"""Promises on a GPU's memory that need no GPU: torch.cuda is replaced where its answers matter."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Config
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ogbnlib.errors import GB, InputError
from ogbnlib.memory.cuda import ALLOCATOR_VARIABLES, OUT_OF_CUDA_MEMORY, cuda_reading
from ogbnlib.runs.diagnosis import explain_text
from ogbnlib.runs.folder import Run
from ogbnlib.training.gpu import begin, end, prepare_allocator
from ogbnlib.training.train import train

# As torch 2.13 writes it (c10/cuda/CUDACachingAllocator.cpp).
MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 70.00 GiB is "
    "free. Including non-PyTorch memory, this process has 4.40 GiB memory in use. 4.00 GiB allowed; Of the allocated "
    "memory 2.00 GiB is allocated by PyTorch, and 1.75 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


class FakeGPU:
    """A card of 80 GB on which this process holds 3 GB in 4, in two segments."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch
        self.fraction, self.reserved = 1.0, 4 * GB
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "memory_reserved": lambda: self.reserved,
            "memory_stats_as_nested_dict": self.stats,
            "mem_get_info": lambda: (76 * GB, 80 * GB),
            "empty_cache": self.empty_cache,
            "synchronize": lambda: None,
            "init": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "set_per_process_memory_fraction": self.cap,
            "get_rng_state": lambda device: torch.zeros(1),
            "set_rng_state": lambda state, device: None,
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda: self.fraction)

    def stats(self) -> dict[str, Any]:
        bytes_ = {"reserved_bytes": self.reserved, "allocated_bytes": 3 * GB}
        counts = {"num_alloc_retries": 2}
        return {k: {"all": {"current": v, "peak": 2 * v}} for k, v in bytes_.items()} | counts

    def empty_cache(self) -> None:
        self.reserved -= GB

    def cap(self, fraction: float) -> None:
        assert isinstance(fraction, float)
        self.fraction = fraction


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_process_that_trains_gets_the_allocators_settings(
    tiny_config: Config, gpu: FakeGPU, clean: pytest.MonkeyPatch
) -> None:
    clean.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    clean.setenv("PYTORCH_ALLOC_CONF", "")
    prepare_allocator(tiny_config(expandable_segments=True))  # for a CPU
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    config = tiny_config(expandable_segments=True, device="auto")
    with pytest.raises(InputError, match=r"^expandable_segments: "):  # the GPU is in use
        prepare_allocator(config)
    clean.setattr(torch.cuda, "is_initialized", lambda: False)
    prepare_allocator(config)
    prepare_allocator(config)
    found = {os.environ[name] for name in ALLOCATOR_VARIABLES}
    assert found == {"max_split_size_mb:64,expandable_segments:True"}


def test_on_a_cpu_the_gpus_options_change_no_loss(tiny_config: Config, tmp_path: Path) -> None:
    options = {"max_cuda_memory": "4 GB", "expandable_segments": True}
    result = train(tiny_config(epochs=1, **options), tmp_path / "run")
    assert result.history[0]["loss"] == train(tiny_config(epochs=1)).history[0]["loss"]
    notes = [event["text"] for event in Run(tmp_path / "run").events if "text" in event]
    assert notes == ["expandable_segments, max_cuda_memory: without effect on the CPU"]


def test_a_cap_is_a_share_of_the_card_and_is_taken_back(tiny_config: Config, gpu: FakeGPU) -> None:
    config = tiny_config(max_cuda_memory="20 GB")
    assert begin(config, "cuda") == []
    assert gpu.fraction == 0.25
    end(config)
    assert gpu.fraction == 1.0
    (note,) = begin(tiny_config(max_cuda_memory="90 GB"), "cuda")
    assert note == "max_cuda_memory: without effect, the GPU has 80.00 GB"


def test_a_reading_has_the_allocators_counts_and_what_is_free(gpu: FakeGPU) -> None:
    reading = {"allocated_bytes": 3 * GB, "reserved_bytes": 4 * GB, "alloc_retries": 2}
    reading |= {"peak_allocated_bytes": 6 * GB, "peak_reserved_bytes": 8 * GB}
    assert cuda_reading() == {**reading, "free_bytes": 76 * GB}
    gpu.fraction = 0.0625  # 5 of 80 GB
    assert cuda_reading() == {**reading, "free_bytes": GB}


def test_memory_is_released_every_k_batches(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(epochs=1, release_every=3, eval_splits=(), train_eval="never")
    train(config, tmp_path / "run")
    events = [event for event in Run(tmp_path / "run").events if event["event"] == "release"]
    found = [event["after"] for event in events if "batch" in event["after"]]
    assert found == ["batch 3", "batch 6"]  # of 8


def test_the_sizes_of_a_pasted_message_are_facts() -> None:
    for message in (MESSAGE, MESSAGE.replace(" ", "\n")):
        found = explain_text(message)
        assert found.cause == "out of GPU memory"
        sizes = found.facts.sizes
        assert (sizes["requested_bytes"], sizes["unallocated_bytes"]) == (1.5 * GB, 1.75 * GB)


def test_running_out_of_gpu_memory_is_a_result(tiny_config: Config, tmp_path: Path) -> None:
    steps = itertools.count(1)

    def allocate(*_: Any) -> None:
        if next(steps) == 3:
            raise torch.OutOfMemoryError(MESSAGE)

    hook = register_optimizer_step_pre_hook(allocate)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            train(tiny_config(), tmp_path / "run")
    finally:
        hook.remove()
    result = Run(tmp_path / "run").result
    assert result is not None
    assert result["exit_code"] == OUT_OF_CUDA_MEMORY == 76
    found = Run.open(tmp_path / "run").diagnosis
    assert (found.cause, found.phase) == ("out of GPU memory", "train epoch 1")
    assert "model, gradients, Adam" in found.facts.parts
    assert result["diagnosis"]["text"] == found.text
    assert (found.facts.sizes["requested_bytes"], found.facts.sizes["allocated_bytes"]) == (
        1.5 * GB,
        2 * GB,
    )
    assert found.actions[0].id == "free GPU"
    assert [event["event"] for event in Run(tmp_path / "run").events].count("cuda_oom") == 1
