"""Promises on a GPU's memory that need no GPU: torch.cuda is replaced where its answers matter."""

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MB
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.forecast.oom_suggestions import oom_suggestions
from ogbnlib.memory.cuda import ALLOCATOR_VARIABLES, OUT_OF_CUDA_MEMORY, cuda_reading
from ogbnlib.memory.reading import memory_now
from ogbnlib.runs.diagnosis import explain_text
from ogbnlib.runs.folder import Run
from ogbnlib.training.gpu import _allocator_environment, begin, end, prepare_allocator
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
GB = 2**30
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
        self.fraction, self.reserved, self.backend = 1.0, 4 * GB, "native"
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "memory_reserved": lambda: self.reserved,
            "memory_stats_as_nested_dict": self.stats,
            "mem_get_info": lambda: (76 * GB, 80 * GB),
            "memory_snapshot": self.snapshot,
            "empty_cache": self.empty_cache,
            "synchronize": lambda: None,
            "init": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "get_allocator_backend": lambda: self.backend,
            "set_per_process_memory_fraction": self.cap,
            "get_rng_state": lambda device: torch.zeros(1),
            "set_rng_state": lambda state, device: None,
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda: self.fraction)

    def stats(self) -> dict[str, Any]:
        bytes_ = {"reserved_bytes": self.reserved, "allocated_bytes": 3 * GB}
        counts = {"num_alloc_retries": 2, "num_ooms": 1}
        return {k: {"all": {"current": v, "peak": 2 * v}} for k, v in bytes_.items()} | counts

    def snapshot(self, include_traces: bool) -> list[dict[str, Any]]:
        assert not include_traces  # the whole trace would take seconds
        block = {"active_allocated": GB, "inactive": 300 * MB, "active_awaiting_free": 2 * GB}
        other = {"device": 1, "blocks": [{"state": "inactive", "size": 9 * GB}]}
        return [{"device": 0, "blocks": [{"state": k, "size": v} for k, v in block.items()]}, other]

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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
            "max_split_size_mb:128,expandable_segments:True",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:True"),
        (
            {
                "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2], expandable_segments : true"
            },
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
        ),
    ],
    ids=str,
)
def test_expandable_segments_join_the_users_settings(
    tiny_config: Config, before: dict[str, str], after: str
) -> None:
    config = tiny_config(expandable_segments=True)
    merged = _allocator_environment(config, before)
    assert merged == dict.fromkeys(ALLOCATOR_VARIABLES, after)
    assert _allocator_environment(config, merged) == merged
    assert _allocator_environment(tiny_config(), before) == {}


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
    assert {os.environ[name] for name in ALLOCATOR_VARIABLES} == {
        "max_split_size_mb:64,expandable_segments:True"
    }


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
    reading = {"allocated_bytes": 3 * GB, "reserved_bytes": 4 * GB, "alloc_retries": 2, "ooms": 1}
    reading |= {"peak_allocated_bytes": 6 * GB, "peak_reserved_bytes": 8 * GB}
    assert cuda_reading() == {**reading, "free_bytes": 76 * GB}
    gpu.fraction = 0.0625  # 5 of 80 GB
    largest = cuda_reading(largest=True)
    assert largest is not None
    assert largest.pop("took_s") >= 0
    assert largest == {**reading, "free_bytes": GB, "largest_free_bytes": 300 * MB}
    gpu.backend = "cudaMallocAsync"  # which refuses to list its blocks
    assert cuda_reading(largest=True) == {**reading, "free_bytes": GB}


def test_a_torch_whose_snapshot_has_no_options_is_read_too(gpu: FakeGPU) -> None:
    def older(mempool_id: Any = None) -> list[dict[str, Any]]:
        return gpu.snapshot(include_traces=False)

    gpu.patch.setattr(torch.cuda, "memory_snapshot", older)
    largest = cuda_reading(largest=True)
    assert largest is not None
    assert largest["largest_free_bytes"] == 300 * MB


def test_memory_now_names_the_gpus(gpu: FakeGPU) -> None:
    assert memory_now().endswith("; GPU: 3.00 GB allocated, 4.00 GB reserved, 76.00 GB free")


def test_memory_is_released_every_k_batches(tiny_config: Config, tmp_path: Path) -> None:
    train(
        tiny_config(epochs=1, release_every=3, eval_splits=(), train_eval="never"), tmp_path / "run"
    )
    events = [
        event
        for event in Run(tmp_path / "run").events
        if event["event"] == "release" and "took_s" in event
    ]
    assert [event["after"] for event in events] == ["batch 3", "batch 6"]  # of 8


# As torch 1.x has it.
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {}.00 GiB (GPU 0; 16.00 GiB total capacity; {}.00 GiB already "
    "allocated; {}.00 GiB free; {}.00 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    "message",
    [
        MESSAGE,
        OLD.format(3, 13, 1, 14),
        OLD.format(1, 3, 0, 4).removeprefix("RuntimeError: ").replace(" ", "\n"),
    ],
)
def test_the_sizes_of_a_pasted_message_are_facts(message: str) -> None:
    found = explain_text(message)
    assert found.cause == "out of GPU memory"
    assert found.facts.sizes["requested_bytes"] > 0
    assert found.facts.sizes["unallocated_bytes"] > 0


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
    for words in (
        "exit code 76",
        "1.50 GB asked for",
        "2.00 GB allocated",
        "3.75 GB reserved",
        "train epoch 1",
    ):
        assert words in found.text.replace("Exit code 76", "exit code 76")
    assert found.remedy.startswith("expandable_segments=True")
    assert [event["event"] for event in Run(tmp_path / "run").events].count("cuda_oom") == 1


def test_suggestions_come_in_the_order_of_their_cost() -> None:
    oom = {
        "requested_bytes": GB,
        "allocated_bytes": 3 * GB,
        "reserved_bytes": 4 * GB,
        "free_bytes": 0,
    }
    config = TrainConfig.create(
        dataset="ogbn-papers100M",
        num_neighbors=[15, 10, 5],
        batch_size=1024,
        hidden_channels=256,
        loading="store",
    )
    suggestions = oom_suggestions(config, oom)
    names = [re.split(r"[= ]", text)[0] for text in suggestions]
    # Without activation_checkpointing: a layer of sage is at its widest while it is computed again.
    assert names == [
        "expandable_segments",
        "release_every",
        "batch_size",
        "precision",
        "num_neighbors",
    ]
    assert "1.00 GB was reserved but unallocated" in suggestions[0]
    assert "more than the request" in suggestions[0]
    assert "enough" not in "".join(suggestions)  # the request was free, but in pieces
    little = {**oom, "requested_bytes": 2 * GB, "free_bytes": GB - 20 * MB}
    assert oom_suggestions(config, little)[2].endswith("which would have been enough")
    assert oom_suggestions(config, little)[0].endswith("unallocated")
    parts = {"requested_bytes": 4.15 * GB, "free_bytes": 3.84 * GB, "unallocated_bytes": 3.56 * GB}
    assert oom_suggestions(config, parts)[0].endswith("request, but not in one piece")
    assert oom_suggestions(config, {**oom, "requested_bytes": 50 * GB})[2].endswith(
        "not enough by itself"
    )


def test_a_propagated_model_gets_no_option_of_sampling() -> None:
    config = TrainConfig.create(dataset="ogbn-papers100M", loading="propagated", model="sign")
    text = " ".join(oom_suggestions(config, {"requested_bytes": GB}))
    assert "batch_size=32 accumulate=4" in text
    assert "num_neighbors" not in text
    assert "activation_checkpointing" not in text
