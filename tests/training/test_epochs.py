"""Promises about a run's epochs: when they end, and which model is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same, weights
from ogb.nodeproppred import Evaluator
from sklearn.metrics import f1_score

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.runs.folder import Run
from ogbnlib.training.train import train
from ogbnlib.training.trainer import Trainer, accuracy, macro_f1

Config = Callable[..., TrainConfig]


@pytest.fixture
def valid(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The accuracies that evaluations of the valid split will have in place of the real ones."""
    accuracies: list[float] = []
    evaluate = Trainer.evaluate

    def told(self: Trainer, split: str) -> dict[str, float | None]:
        real = evaluate(self, split)
        return real | ({"valid": accuracies.pop(0)} if split == "valid" else {})

    monkeypatch.setattr(Trainer, "evaluate", told)
    return accuracies


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"early_stopping": 3, "eval_splits": "test"}, "^early_stopping: .*'valid' in eval_splits"),
        ({"keep": "best", "eval_splits": ()}, "^keep: expected 'valid' in eval_splits"),
    ],
    ids=str,
)
def test_what_no_run_can_do_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainConfig.create(dataset="x", **values)


def test_early_stopping_evaluates(tiny_config: Config, tmp_path: Path, valid: list[float]) -> None:
    valid[:] = [0.5, 0.6, 0.6, 0.55, 0.9]
    config = tiny_config(epochs=9, early_stopping=2, loading="eager")
    result = train(config, tmp_path / "run")
    assert [row["valid"] for row in result.history] == [0.5, 0.6, 0.6, 0.55]
    assert [row["train"] is not None for row in result.history] == [False, False, False, True]
    run = Run(tmp_path / "run")
    assert run.is_finished
    said = [event.get("text", "") for event in run.events]
    assert any("2 evaluations: epoch 4" in text for text in said)
    assert len(train(config, tmp_path / "run", resume=True).history) == 4
    assert valid == [0.9]
    valid += [0.1] * 9
    config = config.replace(epochs=5, early_stopping=0)
    assert len(train(config, tmp_path / "run", resume=True).history) == 5


def test_the_best_model_is_kept_too(
    tiny_config: Config, tmp_path: Path, valid: list[float]
) -> None:
    valid[:] = [0.5, 0.7, 0.7]
    config = tiny_config(epochs=3, keep="best", dropout=0.3)
    train(config, tmp_path / "run")
    best = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert (best["epoch"], best["valid"]) == (2, 0.7)
    valid[:] = [0.5, 0.7]
    assert same(best["model"], train(config.replace(epochs=2, keep="last")).model.state_dict())
    assert not same(best["model"], weights(tmp_path / "run"))


def test_a_kill_between_best_model_and_checkpoint_loses_neither(
    tiny_config: Config, tmp_path: Path, valid: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ogbnlib.training.checkpoint import Checkpointer

    valid[:] = [0.5, 0.7, 0.7, 0.6]
    config, save = tiny_config(epochs=3, keep="best"), Checkpointer.save

    def dies(self: Checkpointer, state: Any) -> None:
        if state.epoch == 2 and state.history:
            raise RuntimeError("as a kill would")
        save(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", dies)
        with pytest.raises(RuntimeError):
            train(config, tmp_path / "run")
    first = weights(tmp_path / "run", "best.pt")
    assert len(train(config, tmp_path / "run", resume=True).history) == 3
    again = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert (again["epoch"], again["valid"]) == (2, 0.7)
    assert same(again["model"], first)


def test_the_best_model_needs_a_folder_from_the_start(tiny_config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^run_dir: .*best"):
        train(tiny_config(keep="best"))
    train(tiny_config(epochs=1), tmp_path / "run")
    with pytest.raises(InputError, match="keep was 'last', now 'best'"):
        train(tiny_config(keep="best"), tmp_path / "run", resume=True)


def test_an_accuracy_is_the_one_of_ogbs_evaluator() -> None:
    rule = Evaluator("ogbn-papers100M")
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        labels, predicted = torch.randint(3, (2, 1 + 7 * seed), generator=generator)
        both = {"y_true": labels[:, None].numpy(), "y_pred": predicted[:, None].numpy()}
        assert accuracy(labels, predicted) == rule.eval(both)["acc"]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64], ids=str)
def test_a_macro_f1_is_that_of_scikit_learn(dtype: torch.dtype) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        # of 9 classes some occur in neither, or in one of both
        labels, predicted = torch.randint(6, (2, 1 + 7 * seed), generator=generator)
        labels[labels == 2] = 7
        expected = f1_score(labels, predicted, average="macro", zero_division=0)
        assert macro_f1(labels.to(dtype), predicted, 9) == pytest.approx(expected, rel=1e-12)
