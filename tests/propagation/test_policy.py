"""loading="propagated": its models in the trainer, resumed, limited, refused and foretold."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from all_models import PROPAGATED
from conftest import MB, same
from graphs import make_store

from ogbnlib import InputError, TrainConfig, open_store, plan, predict, propagate, run
from ogbnlib.errors import GB
from ogbnlib.forecast.batches import BatchShape
from ogbnlib.forecast.step_memory import Step, model_state_bytes
from ogbnlib.memory.limits import Limit
from ogbnlib.registry import MODELS
from ogbnlib.training.custom_model import make_model
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]


@pytest.fixture
def graph(tiny_store: Path, tmp_path: Path) -> Path:
    """The tiny store in a folder of its own, beside which others may be made."""
    return Path(shutil.copytree(tiny_store, tmp_path / "graph.store"))


def make(tiny_config: Config, dataset: Path, **changes: Any) -> TrainConfig:
    values = {"dataset": str(dataset), "loading": "propagated", "model": "sign", **changes}
    return tiny_config(**values)


@pytest.mark.parametrize("model", ["sgc", "sagn"])
def test_a_model_learns_from_propagated_features_and_is_resumed(
    tiny_config: Config, graph: Path, tmp_path: Path, model: str
) -> None:
    values = {"epochs": 6, "lr": 0.05, "dropout": 0.3, "checkpoint_every_s": 0}
    config = make(tiny_config, graph, model=model, **values)
    whole = train(config, tmp_path / "whole")
    made = tmp_path / "graph-2-hops-sym.store"
    inode = made.stat().st_ino
    train(config.replace(epochs=2), tmp_path / "parts")
    if os.getuid() == 0:  # who alone can give a file to another user
        os.chown(tmp_path / "parts", 12345, 12345)  # of a container's host, or Slurm's prolog
        shutil.copytree(tmp_path / "parts", tmp_path / "foreign")
        os.chown(tmp_path / "foreign" / "config.json", 12345, 12345)
        with pytest.raises(InputError, match="expected a run of your own"):
            predict(tmp_path / "foreign", tmp_path / "out.npy", progress=False)
    resumed = train(config, tmp_path / "parts", resume=True)
    assert made.stat().st_ino == inode  # the second run has found it
    assert whole.history[-1]["test"] == resumed.history[-1]["test"]
    assert same(whole.model.state_dict(), resumed.model.state_dict())
    assert (whole.history[-1]["test"] or 0) > 0.6  # of four classes


def test_a_path_or_workers_change_nothing(tiny_config: Config, graph: Path, tmp_path: Path) -> None:
    config = make(tiny_config, graph, hops=3, norm="gcn")
    first = train(config)
    made = tmp_path / "graph-3-hops-sym-loops.store"
    named = train(config.replace(dataset=str(made)))
    workers = train(config.replace(num_workers=2))
    for other in (named, workers):
        assert [row["loss"] for row in other.history] == [row["loss"] for row in first.history]


def test_a_model_of_ones_own_gets_all_hops_in_a_row(tiny_config: Config, graph: Path) -> None:
    args = {"num_layers": 2, "hidden_channels": 8, "norm": None}
    result = train(make(tiny_config, graph, model="torch_geometric.nn:MLP", model_args=args))
    assert result.model.channel_list == [3 * 8, 8, 4]


def test_a_propagation_of_many_columns_keeps_to_its_plan(
    tiny_config: Config, tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    kernel_limit(GB).close()  # skips where the kernel enforces none
    random = np.random.default_rng(0)
    edges = random.integers(60_000, size=(2, 200_000))
    features = random.standard_normal((60_000, 512), np.float32)
    store = make_store(tmp_path / "wide.store", edges, features)
    config = make(tiny_config, store.path, hops=1, epochs=1)
    forecast = plan(config).forecast
    limit = forecast.least_bytes + forecast.margin_bytes
    while (
        plan(config, limit).verdict != "FITS"
        or max(plan(config, limit).forecast.propagation.widths) < 512
    ):
        limit += 10 * MB
    done = run(config, limit, run_dir=tmp_path / "run", echo=False)
    assert done.exit_code == 0, done.diagnosis
    phase = done.result["forecast"]["phases"]["propagate"]
    assert 0.7 * phase["predicted"] < phase["measured"] < phase["predicted"] + 20 * MB
    # the next run finds the result, and has no such phase
    again = run(config, limit, run_dir=tmp_path / "again", echo=False)
    assert "propagate" not in again.result["forecast"]["phases"]
    assert "propagate" not in [phase.name for phase in again.phases]


def test_mismatches_are_refused_by_name(tiny_config: Config, graph: Path, tmp_path: Path) -> None:
    for changes, said in (
        ({"model": "sage"}, "^model: .*sagn, sgc, sign"),
        ({"loading": "store"}, "^model: .*gat, gcn, sage"),
        ({"model": "sagn", "hidden_channels": 6}, "^hidden_channels: .*heads"),
    ):
        with pytest.raises(InputError, match=said):
            make(tiny_config, graph, **changes)
    made = propagate(open_store(graph), tmp_path / "made", norm="row", progress=False).path
    with pytest.raises(InputError, match=r"loading: .*loading=propagated"):
        train(tiny_config(dataset=str(made), loading="store"))
    for refuse in (plan, train):
        with pytest.raises(InputError, match=f"norm: {made} .*norm row .*, got 'sym'"):
            refuse(make(tiny_config, made))
    train(make(tiny_config, graph))
    (tmp_path / "graph.store").rename(tmp_path / "old")

    random = np.random.default_rng(0)
    x = random.normal(size=(300, 8)).astype("f4")
    make_store(tmp_path / "graph.store", random.integers(300, size=(2, 500)), x)
    with pytest.raises(InputError, match=r"graph-2-hops-sym\.store: .*graph\.store"):
        train(make(tiny_config, tmp_path / "graph.store"))


@pytest.mark.parametrize("model", PROPAGATED)
def test_weights_are_counted_and_what_a_step_keeps_is_bounded(model: str) -> None:
    values: dict[str, Any] = {"hops": 3, "hidden_channels": 64, "dropout": 0.5}
    config = TrainConfig.create(dataset="none", loading="propagated", model=model, **values)
    net = make_model(config, 4 * 40, 7)
    seeds = 1000
    weights = sum(weight.numel() for weight in net.parameters())
    assert 16 * weights == model_state_bytes(config, 4 * 40, 7)
    x, kept = torch.randn(seeds, 4 * 40), {}
    known = {value.untyped_storage().data_ptr() for value in (x, *net.parameters())}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        F.cross_entropy(net(x), torch.zeros(seeds, dtype=torch.int64)).backward()
    found = sum(storage.nbytes() for key, storage in kept.items() if key not in known)
    layers = Step(config, BatchShape((seeds,), ()), 4 * 40, 7).layers
    foretold = sum(MODELS[model].load().memory(layer).saved for layer in layers)
    assert found <= foretold * 1.01 + 20_000
    assert foretold <= 1.8 * found + 20_000
