"""Promises about weighted classes: the loss is torch's, in any batches, and a run keeps its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_arrays
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.graph.store import Store
from ogbnlib.training import learner
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
WHOLE: dict[str, Any] = {"num_neighbors": [-1, -1], "eval_splits": (), "train_eval": "never"}


def balanced(store: Store) -> Tensor:
    labels = np.asarray(store.y[store.splits["train"]], np.int64)
    weights = compute_class_weight("balanced", classes=np.arange(store.num_classes), y=labels)
    return torch.from_numpy(weights).float()


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_weighted_loss_and_its_gradient_are_torchs(scale: float) -> None:
    scores = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 4
    weight = torch.tensor([0.1, 2.0, 0.0, 1.0, 3.0])
    loss, gradient = learner.loss_and_gradient(scores, labels, scale, weight)
    scores.requires_grad_()
    expected = F.cross_entropy(scores, labels, weight, reduction="sum")
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    (expected_gradient,) = torch.autograd.grad(expected * scale, scores)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("batch_size", [16, 200])
def test_an_epochs_loss_is_torchs_weighted_mean_over_the_split(
    tiny_config: Config, store: Store, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    seen = []
    own = learner.loss_and_gradient

    def kept(scores: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        seen.append((scores.clone(), labels))
        return own(scores, labels, **more)

    monkeypatch.setattr(learner, "loss_and_gradient", kept)
    config = tiny_config(epochs=1, batch_size=batch_size, class_weight="balanced", **WHOLE)
    loss = train(config).history[0]["loss"]
    scores, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert loss == pytest.approx(float(F.cross_entropy(scores, labels, balanced(store))), rel=1e-6)
    assert loss != pytest.approx(float(F.cross_entropy(scores, labels)), rel=1e-6)


def test_a_class_without_train_nodes_has_no_weight(tiny_config: Config, tmp_path: Path) -> None:
    arrays = random_arrays(60, 200, 4, num_classes=3)
    arrays["y"][:20] = np.arange(20) % 2
    Store.from_arrays(tmp_path / "store", **arrays, num_classes=3, progress=False)
    config = tiny_config(dataset=str(tmp_path / "store"), class_weight="balanced", epochs=1)
    loss = train(config).history[0]["loss"]
    assert loss is not None
    assert np.isfinite(loss)


def test_a_resumed_run_keeps_its_weights(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(class_weight="balanced", epochs=1, **WHOLE)
    train(config, tmp_path / "run")
    more = config.replace(epochs=2)
    with pytest.raises(InputError, match="class_weight was 'balanced', now 'none'"):
        train(more.replace(class_weight="none"), tmp_path / "run", resume=True)
    resumed = train(more, tmp_path / "run", resume=True)
    straight = train(more)
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in straight.history]
