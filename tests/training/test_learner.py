"""The loss has one definition for every model; a measured step counts what a model holds."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import MB, same
from torch import Tensor, nn

from ogbnlib.config import TrainConfig
from ogbnlib.memory.recorder import EventLog
from ogbnlib.training import learner
from ogbnlib.training.call import random_batch
from ogbnlib.training.distributed import Ranks
from ogbnlib.training.learner import Learner, allocations, measure_step, peak_of
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]

OWN = """
import torch
from torch_geometric.nn import SAGEConv

class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = SAGEConv(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)
"""


def smoothed(
    scores: Tensor, labels: Tensor, scale: float, weight: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Another loss, as the docstring of `loss_and_gradient` writes it."""
    scores = scores.requires_grad_()
    loss = F.cross_entropy(scores, labels, weight, reduction="sum", label_smoothing=smoothing)
    return loss.detach(), torch.autograd.grad(loss * scale, scores)[0]


@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "sgc", "sign", "sagn", "my_model.py:Net"])
def test_another_loss_in_its_one_place_trains_every_model(
    model: str, tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(OWN)
    more = {"loading": "propagated"} if model in ("sgc", "sign", "sagn") else {}
    config = tiny_config(model=model, epochs=1, eval_splits=(), train_eval="never", **more)
    plain = train(config)
    results = []
    for smoothing in (0.0, 0.2):
        other = partial(smoothed, smoothing=smoothing)
        monkeypatch.setattr(learner, "loss_and_gradient", other)
        results.append(train(config))
    again, changed = results
    assert again.history[0]["loss"] == plain.history[0]["loss"]
    assert same(again.model.state_dict(), plain.model.state_dict())
    assert changed.history[0]["loss"] != plain.history[0]["loss"]
    assert not same(changed.model.state_dict(), plain.model.state_dict())


class Large(nn.Module):
    """Small layers beside an embedding of 16 MB, and five tensors of 16 MB that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2**15, 128)
        self.frozen = nn.Embedding(2**15, 128).requires_grad_(False)
        self.unused = nn.Parameter(torch.empty(2**22))
        self.register_buffer("shift", torch.zeros(2**15, 128))
        self.shifts = [torch.zeros(2**15, 128)]
        self.array = nn.Parameter(torch.from_numpy(np.zeros((2**15, 128), np.float32)), False)
        self.layers = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = torch.arange(len(x)) % 2**15
        x = x + self.table(rows) + self.frozen(rows) + self.shift[0] + self.array[0]
        return self.layers(x.index_add(0, edge_index[1], x[edge_index[0]]))


def test_a_measured_step_counts_what_a_model_holds_and_what_grows() -> None:
    config = TrainConfig.create({"dataset": "none", "device": "cpu"})
    shapes = [{"hop_nodes": (n, n), "hop_edges": (2 * n,)} for n in (400, 1000, 4000)]
    measured = measure_step(config, Large, 128, [*shapes[:2], shapes[0]])
    # the embedding with its gradient and Adam's moments, the five others once
    assert 9 * 16 * MB < measured["state_bytes"] < 9.1 * 16 * MB

    learners: list[Learner] = []
    batch = random_batch(**shapes[2], num_features=128)

    def train() -> None:
        learners[0].begin(epoch=1)
        learners[0].step(iter([batch]), 1, 0, 1)

    def make() -> None:
        learners.append(Learner(config, Large(), torch.device("cpu"), Ranks(), EventLog(None)))

    bytes_by_torch = [*allocations(make), *allocations(train), *allocations(train)]
    fixed_bytes, rate = measured["training"]
    step_bytes = fixed_bytes + rate * (batch.num_nodes + batch.num_edges)
    forecast = measured["state_bytes"] - 16 * MB + step_bytes  # without numpy's array
    assert 1 <= forecast / peak_of(bytes_by_torch) < 1.15
