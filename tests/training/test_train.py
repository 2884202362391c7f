"""A run is a function of its config, whatever the policy, the workers and the interruptions."""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from all_policies import SAMPLED, settings
from conftest import same, scores, weights

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.graph.store import open_store
from ogbnlib.memory.record import METRIC_COLUMNS
from ogbnlib.registry import POLICIES
from ogbnlib.runs.folder import Run
from ogbnlib.sources.convert import convert
from ogbnlib.training.train import TrainResult, train
from ogbnlib.training.trainer import Trainer

Config = Callable[..., TrainConfig]


def column(result: TrainResult, name: str) -> list[float | None]:
    return [row[name] for row in result.history]


@pytest.fixture(scope="module")
def plain(tiny_config: Config) -> TrainResult:
    return train(tiny_config())


@pytest.mark.parametrize("undirected", [False, True])
def test_losses_and_accuracies_of_all_policies_agree_exactly(
    tiny_config: Config, tiny_dir: Path, tmp_path: Path, undirected: bool
) -> None:
    store = convert(tiny_dir, tmp_path / "store", undirected=undirected, progress=False)
    config = tiny_config(dataset=str(store.path), dropout=0.3)
    results = [train(config.replace(loading=policy)) for policy in SAMPLED]
    assert all(scores(result.history) == scores(results[0].history) for result in results)
    assert len(results[0].history) == 2


@pytest.mark.parametrize(("policy", "persistent"), [("lazy", False), ("shared", True)])
def test_workers_change_no_loss(
    tiny_config: Config, plain: TrainResult, policy: str, persistent: bool
) -> None:
    workers = {"num_workers": 2, "persistent_workers": persistent}
    result = train(tiny_config(loading=policy, eval_splits="valid", **workers))
    for name in ("loss", "train", "valid"):
        assert column(result, name) == column(plain, name)


def test_equal_configs_alone_give_equal_weights(tiny_config: Config, plain: TrainResult) -> None:
    again, other = train(tiny_config()), train(tiny_config(seed=1))
    assert same(again.model.state_dict(), plain.model.state_dict())
    assert not same(other.model.state_dict(), plain.model.state_dict())


def test_a_run_folder_holds_everything_about_the_run(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config()
    result = train(config, tmp_path / "run")
    resolved = config.replace(num_threads=1)  # auto, for a small step
    assert TrainConfig.load(tmp_path / "run" / "config.json") == resolved
    table = Run(tmp_path / "run").metrics
    assert table.columns.tolist() == list(METRIC_COLUMNS)
    assert table["loss"].tolist() == column(result, "loss")
    assert same(weights(tmp_path / "run"), result.model.state_dict())
    assert len(Run(tmp_path / "run").timeline) > 0
    names = {phase.name for phase in Run(tmp_path / "run").phases}
    assert {"load", "train epoch", "eval valid", "eval test", "eval train", "checkpoint"} <= names
    assert all(phase.end_s is not None for phase in Run(tmp_path / "run").phases)


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_a_run_goes_on_bit_for_bit(
    tiny_config: Config, tiny_store: Path, tmp_path: Path, policy: str
) -> None:
    store = shutil.copytree(tiny_store, tmp_path / "graph.store")
    values = {"dropout": 0.5, "train_eval": "never", **settings(policy)}
    config = tiny_config(dataset=str(store), epochs=3, **values)
    straight = train(config)
    train(config.replace(epochs=1), tmp_path / "parts")
    torch.rand(5)  # torch's random numbers in between do not matter
    resumed = train(config, tmp_path / "parts", resume=True)
    assert scores(resumed.history) == scores(straight.history)
    assert same(weights(tmp_path / "parts"), straight.model.state_dict())


def test_an_exact_accuracy_is_of_the_whole_graph(tiny_config: Config, tiny_store: Path) -> None:
    result = train(tiny_config(eval_num_neighbors=-1, eval_batch_size=7))
    store, model = open_store(tiny_store), result.model.eval()
    x, edge_index = torch.from_numpy(np.array(store.x)), torch.from_numpy(store.read_edge_index())
    every = [store.num_nodes, 0, 0]
    with torch.no_grad():  # all nodes are seeds, and all edges lie in the first hop
        predicted = model(x, edge_index, every, [store.num_edges, 0]).argmax(dim=-1).numpy()
    for split in ("train", "valid", "test"):
        ids = store.splits[split]
        expected = float((predicted[ids] == store.y[ids]).mean())
        assert result.history[-1][split] == pytest.approx(expected)


@pytest.mark.parametrize("loading", ["eager", "store"])
@pytest.mark.parametrize(
    ("name", "at", "value", "expected"),
    [
        ("y", slice(None), 4, r"train\.npy: expected labelled nodes, found 120 without"),
        ("test", 3, 300, r"test\.npy: expected the checksum"),
    ],
    ids=["another class", "out of range"],
)
def test_splits_of_a_store_made_by_hand_are_checked(
    tiny_config: Config, tiny_store: Path, tmp_path: Path, loading: str,
    name: str, at: Any, value: int, expected: str,
) -> None:  # fmt: skip
    store = open_store(shutil.copytree(tiny_store, tmp_path / "store"))
    array = np.load(store.file_path(name), mmap_mode="r+")
    array[at] = value
    array.flush()
    with pytest.raises(InputError, match=rf"{tmp_path}/store/{expected}.*verify"):
        train(tiny_config(dataset=str(store.path), loading=loading))


def gradients(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, torch.Tensor]]:
    """What the optimizer was given at each step of an epoch in which weights stay as they are."""
    seen = []

    def step(self: torch.optim.Adam) -> None:
        seen.append({str(i): p.grad.clone() for i, p in enumerate(self.param_groups[0]["params"])})

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", step)
        train(config)
    return seen


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "steps"), [(16, 4, 2), (7, 5, 4), (16, 100, 1)]
)
def test_accumulated_gradients_are_those_of_one_large_batch(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch,
    batch_size: int, accumulate: int, steps: int,
) -> None:  # fmt: skip
    config = tiny_config(num_neighbors=[-1, -1], epochs=1, eval_splits="", train_eval="never")
    several = config.replace(batch_size=batch_size, accumulate=accumulate)
    small = gradients(several, monkeypatch)
    large = gradients(config.replace(batch_size=batch_size * accumulate), monkeypatch)
    assert len(small) == len(large) == steps
    for one, other in zip(small, large, strict=True):
        assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in other)
        assert max(float(value.abs().max()) for value in other.values()) > 1e-3


def test_a_run_in_bfloat16_resumes_with_float32_weights(
    tiny_config: Config, tmp_path: Path, plain: TrainResult
) -> None:
    config = tiny_config(precision="bf16", dropout=0.3)
    straight = train(config)
    train(config.replace(epochs=1), tmp_path / "run")
    train(config, tmp_path / "run", resume=True)
    assert same(weights(tmp_path / "run"), straight.model.state_dict())
    assert {value.dtype for value in weights(tmp_path / "run").values()} == {torch.float32}
    half = train(tiny_config(precision="bf16"))
    assert column(half, "loss") == pytest.approx(column(plain, "loss"), rel=0.02)
    assert column(half, "loss") != column(plain, "loss")


def test_no_tensor_outlives_its_step(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[tuple[int, int]] = []
    boundary = Trainer._boundary

    def count(self: Trainer, training: bool = False) -> None:
        boundary(self, training)
        gc.collect()
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        alive.append((len(tensors), sum(item.numel() for item in tensors)))

    monkeypatch.setattr(Trainer, "_boundary", count)
    changes = {"activation_checkpointing": True, "precision": "bf16"}
    train(tiny_config(epochs=4, train_eval="never", eval_splits="", **changes))
    batches = len(alive) // 4
    # the first makes Adam's moments
    epochs = [alive[i * batches : (i + 1) * batches] for i in range(1, 4)]
    assert batches >= 3
    # between epochs: the same tensors of the same sizes
    assert len({epoch[0] for epoch in epochs}) == 1
    counts = [[tensors for tensors, _ in epoch] for epoch in epochs]
    assert counts[0] == counts[1] == counts[2]
    # Between batches: the last one's five, until the next is asked for, and three views of the
    # order of the seeds.
    assert max(counts[0]) - counts[0][0] <= 5 + 3
