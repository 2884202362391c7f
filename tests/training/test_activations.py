"""Promises of `activations`: what autograd keeps is counted once and to the byte, and the formulas meet it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.phases import gpu_bytes, predict
from ogbnlib.memory.reading import release_memory
from ogbnlib.sources.ogb import open_raw
from ogbnlib.training.activations import SavedTensors, compare_options, measure_step, sample_batches

Config = Callable[..., TrainConfig]
WIDE = {"num_neighbors": [15, 10, 5], "batch_size": 128, "hidden_channels": 64, "device": "cpu", "progress": "none"}


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """What malloc keeps of these steps, 1 GB, would stand in the figures of the tests that follow."""
    yield
    release_memory()


@pytest.fixture(scope="module")
def wide(synth_dir: Path) -> Config:
    def make(**changes: Any) -> TrainConfig:
        return TrainConfig.create({"dataset": str(synth_dir), **WIDE, **changes})

    return make


def test_a_storage_that_is_kept_twice_counts_once_and_until_its_last_use() -> None:
    w = torch.ones(100, requires_grad=True)
    x = torch.ones(100)
    with SavedTensors({"weights": [w], "input": [x]}) as saved:
        y = w * x  # keeps both, which are known
        z = y * y  # keeps y twice
        assert (saved.bytes, saved.known_bytes) == (400, {"weights": 0, "input": 400})
        (z[:10] * y[:10]).sum().backward()  # views of z and y: z whole, y is there already
        assert saved.peak_bytes == 800
        assert saved.bytes == 0


def test_a_sparse_matrix_counts_with_its_three_arrays() -> None:
    matrix = torch.sparse_csr_tensor([0, 1, 3], [0, 1, 2], torch.ones(3), (2, 3))
    x = torch.ones(3, 4, requires_grad=True)
    with SavedTensors({"input": [x]}) as saved:
        torch.sparse.mm(matrix, x, "mean").sum().backward()
        assert saved.peak_bytes == 3 * 8 + 3 * 8 + 3 * 4


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_what_is_predicted_to_be_kept_is_kept_within_one_percent(
    wide: Config, model: str, dropout: float, precision: str, checkpointing: bool
) -> None:
    config = wide(
        model=model, dropout=dropout, precision=precision, activation_checkpointing=checkpointing, num_threads=1
    )
    step = measure_step(config)
    assert step.predicted_saved_bytes == pytest.approx(step.saved_bytes, rel=0.01)
    assert step.predicted_peak_bytes == pytest.approx(step.peak_bytes, rel=0.1)


@pytest.mark.parametrize("hidden", [16, 256])
def test_the_formulas_hold_for_other_widths_and_depths(wide: Config, hidden: int) -> None:
    for fan_out in ([5], [10, 5], [4, 3, 2, 2]):
        step = measure_step(wide(hidden_channels=hidden, num_neighbors=fan_out))
        assert step.predicted_saved_bytes == pytest.approx(step.saved_bytes, rel=0.01)


def test_an_accumulated_step_keeps_one_batchs_activations_at_a_time(wide: Config) -> None:
    whole, parts = measure_step(wide()), measure_step(wide(batch_size=16, accumulate=4))
    alone = max(
        measure_step(wide(batch_size=16), sample).saved_bytes for sample in [sample_batches(wide(batch_size=16), 1)]
    )
    assert parts.num_batches == 4
    assert alone <= parts.saved_bytes < 1.2 * alone < whole.saved_bytes
    assert parts.predicted_saved_bytes == pytest.approx(parts.saved_bytes, rel=0.01)


def test_precision_and_checkpointing_keep_less(wide: Config) -> None:
    table = compare_options(
        wide(hidden_channels=256),
        {
            "plain": {},
            "bf16": {"precision": "bf16"},
            "checkpointed": {"activation_checkpointing": True},
            "accumulated": {"batch_size": 16, "accumulate": 4},
        },
    )
    kept = table["kept MiB"]
    assert (kept.drop("plain") < 0.8 * kept["plain"]).all()
    assert (table["step s"] > 0).all()


def test_the_forecast_of_a_gpus_step_follows_the_options(wide: Config, synth_dir: Path) -> None:
    size = open_raw(synth_dir).size

    def activations(**changes: Any) -> int:
        config = wide(hidden_channels=256, **changes)
        return gpu_bytes(config, predict(config, size).batch, size)["activations"]

    plain = activations()
    assert activations(precision="bf16") < plain
    assert activations(batch_size=16, accumulate=4) < 0.5 * plain
    assert activations(accumulate=4) == plain
    both = activations(precision="bf16", activation_checkpointing=True)
    assert both < activations(precision="bf16")
