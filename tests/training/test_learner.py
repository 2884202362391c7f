"""The loss has one definition, which trains every model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import same
from torch import Tensor

from ogbnlib.config import TrainConfig
from ogbnlib.training import learner
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
    model: str,
    tiny_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
