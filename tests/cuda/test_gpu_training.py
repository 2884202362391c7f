"""Promises of training on a GPU; without one, two runs on the CPU try the comparison."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from all_policies import settings
from conftest import MB, batches_of
from store_loaders import assert_equal
from test_notebooks import ROOT, execute, outputs_of, shown
from torch import Tensor, nn
from torch_geometric.data import Data

from ogbnlib.config import TrainConfig
from ogbnlib.memory.cuda import OUT_OF_CUDA_MEMORY
from ogbnlib.memory.recorder import EventLog
from ogbnlib.propagation.hops import propagated
from ogbnlib.registry import MODELS, POLICIES
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.sources.resolve import find_store
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
NOTEBOOK = ROOT / "notebooks" / "05_cuda_memory.ipynb"
# Dropout draws other numbers on a GPU than on the CPU.
PLAIN: dict[str, Any] = {"dropout": 0.0, "epochs": 2, "eval_splits": (), "train_eval": "never"}
# A step is forecast to allocate 131 MB on a GPU.
LARGE_STEPS: dict[str, Any] = {"num_neighbors": [15, 10, 5], "batch_size": 512, "device": "cuda"}
LARGE_STEPS |= {"hidden_channels": 256, "epochs": 5, "eval_splits": (), "train_eval": "never"}


class Recorder(nn.Module):
    """A linear model of the seeds' features, which keeps every batch that it is trained on."""

    def __init__(self, num_features: int):
        super().__init__()
        self.linear = nn.Linear(num_features, 4)
        self.batches: list[dict[str, Tensor]] = []

    def forward(self, batch: Data) -> Tensor:
        if self.training:
            names = ("n_id", "edge_index", "x")
            self.batches.append({name: batch[name].cpu() for name in names})
        scores: Tensor = self.linear(batch.x[: batch.batch_size])
        return scores


def record(config: TrainConfig) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Train the recorder on the tiny graph; return its batches, and the loss of each epoch."""
    result = train(config.replace(model=f"{__name__}:Recorder"))
    model: Any = result.model
    return model.batches, [row["loss"] for row in result.history]


def settings_of(model: str) -> dict[str, Any]:
    """A model, with a policy that trains it."""
    loading = "propagated" if MODELS[model].load().propagated else "shared"
    return {"loading": loading, "model": model}


def losses(config: TrainConfig) -> list[float]:
    return [row["loss"] for row in train(config).history]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_policy_trains_on_the_batches_of_the_cpu(
    tiny_config: Config, device: str, policy: str
) -> None:
    config = tiny_config(**PLAIN, **settings(policy))
    expected, expected_losses = record(config)
    assert len(expected) == 2 * 8  # 120 seeds in batches of 16
    found, found_losses = record(config.replace(device=device))
    assert_equal(found, expected)  # nodes, edges and features, in their order
    assert found_losses == pytest.approx(expected_losses, abs=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "values",
    [*map(settings, POLICIES), *map(settings_of, MODELS)],
    ids=lambda v: "-".join(v.values()),
)
def test_policies_and_models_have_the_losses_of_the_cpu(
    tiny_config: Config, values: dict[str, Any]
) -> None:
    config = tiny_config(**PLAIN, **values)
    assert losses(config.replace(device="cuda")) == pytest.approx(losses(config), abs=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_has_about_the_losses_of_float32(
    tiny_config: Config, precision: str
) -> None:
    config = tiny_config(**PLAIN, device="cuda")
    half = losses(config.replace(precision=precision))
    assert half == pytest.approx(losses(config), rel=0.05)


@pytest.mark.parametrize(
    ("first", "then", "dropout"),
    [
        ("cpu", "cpu", 0.5),
        pytest.param("cuda", "cuda", 0.5, marks=pytest.mark.cuda),
        pytest.param("cuda", "cpu", 0.0, marks=pytest.mark.cuda),
    ],
)
def test_a_run_goes_on_with_the_same_dropout_or_elsewhere(
    tiny_config: Config, tmp_path: Path, first: str, then: str, dropout: float
) -> None:
    config = tiny_config(**{**PLAIN, "dropout": dropout}, device=then)
    train(config.replace(epochs=1, device=first), tmp_path / "run")
    resumed = train(config, tmp_path / "run", resume=True)
    found = [row["loss"] for row in resumed.history]
    assert found == pytest.approx(losses(config), abs=1e-3)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_batches_are_pinned_for_a_gpu(
    tiny_config: Config, device: str, policy: str, num_workers: int
) -> None:
    config = tiny_config(**settings(policy), device=device, num_workers=num_workers)
    store = find_store(config.dataset)
    if config.policy.hops(config):
        store = propagated(store, config, say=lambda line: None, progress=lambda *count: None)
    loaders = config.policy.load()(store, config, EventLog(None))
    batches = batches_of(loaders.train_loader(), 1)
    assert len(batches) == 8
    for batch in batches:
        # an empty tensor has no memory
        tensors = [value for value in (batch.x, batch.edge_index) if value.numel()]
        assert [value.is_pinned() for value in tensors] == [device == "cuda"] * len(tensors)
    loaders.close()


@pytest.fixture(scope="module")
def finished(synth_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of large steps on the GPU."""
    config = TrainConfig.create(dataset=str(synth_dir), **LARGE_STEPS)
    done = run(config, run_dir=tmp_path_factory.mktemp("gpu") / "run", echo=False)
    assert done.exit_code == 0, done.diagnosis
    return done


@pytest.mark.cuda
def test_the_timeline_of_a_gpus_memory_is_complete(finished: Run) -> None:
    readings = finished.cuda
    assert len(readings)
    assert (readings["cuda_allocated_bytes"] <= readings["cuda_reserved_bytes"]).all()
    assert (readings["cuda_allocated_bytes"] <= readings["cuda_peak_allocated_bytes"]).all()
    assert readings["cuda_peak_allocated_bytes"].max() > 64 * MB
    assert (readings["cuda_free_bytes"] > 0).all()
    timeline = finished.timeline
    later = timeline[timeline["time_s"] >= readings["time_s"].iloc[0]]
    assert len(later)
    names = [f"cuda_{name}_bytes" for name in ("allocated", "reserved", "free")]
    assert readings[names].notna().all(axis=None)
    assert later[names].notna().all(axis=None)


@pytest.mark.cuda
def test_too_small_a_cap_ends_a_run_with_its_diagnosis(finished: Run, tmp_path: Path) -> None:
    capped = finished.config.replace(max_cuda_memory=48 * MB)
    dead = run(capped, run_dir=tmp_path / "run", echo=False)
    assert dead.exit_code == OUT_OF_CUDA_MEMORY == 76
    assert (dead.diagnosis.cause, dead.diagnosis.phase) == ("out of GPU memory", "train epoch 1")
    assert Run.open(tmp_path / "run").diagnosis.text == dead.diagnosis.text
    for words in ("asked for", "allocated", "reserved"):
        assert words in dead.diagnosis.text
    for words in ("expandable_segments=True", "batch_size"):
        assert words in dead.diagnosis.remedy
    (failure,) = [event for event in dead.events if event["event"] == "cuda_oom"]
    assert failure["requested_bytes"] > 0
    assert failure["reserved_bytes"] < 49 * MB  # torch's message rounds


@pytest.mark.cuda
def test_a_cap_ends_with_its_training(tiny_config: Config, synth_dir: Path) -> None:
    config = tiny_config(**{**LARGE_STEPS, "dataset": str(synth_dir), "max_cuda_memory": 48 * MB})
    with pytest.raises(torch.OutOfMemoryError):
        train(config)
    assert torch.cuda.memory.get_per_process_memory_fraction() == 1.0
    assert len(losses(tiny_config(**PLAIN, device="cuda"))) == 2


@pytest.mark.cuda
def test_two_ranks_by_nccl_make_the_steps_of_one(tiny_config: Config, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}")
    config = tiny_config(**PLAIN, batch_size=18)
    both = run(config.replace(device="cuda"), run_dir=tmp_path / "run", num_ranks=2, echo=False)
    assert both.exit_code == 0, both.diagnosis
    expected = losses(config.replace(accumulate=2))
    assert both.metrics["loss"].tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
@pytest.mark.cuda
def test_notebook_05_measures_what_needs_a_gpu(tmp_path: Path) -> None:
    cells = execute(NOTEBOOK, tmp_path, tmp_path / "data").cells
    streams = [output.get("text", "") for output in outputs_of(cells)]
    text = "\n".join([*streams, *shown(cells, "text/plain")])
    assert "out of GPU memory" in text
    assert "no GPU here" not in text
