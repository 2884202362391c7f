"""Promises of `run_until_converged`: it stops when nothing gets better, and an interruption changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import write_run

from ogbnlib.config import TrainConfig
from ogbnlib.notebook import converge
from ogbnlib.notebook.converge import run_until_converged
from ogbnlib.runs.folder import METRIC_COLUMNS, Run, RunEnded

CONFIG = TrainConfig.create(dataset="somewhere", epochs=10)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What was run, as (epochs, resume); a run has the valid accuracies that `best_at` says, and is stopped once."""
    asked: list[tuple[int, bool]] = []

    def run(config: TrainConfig, memory_limit: object, *, run_dir: Path, resume: bool, **options: Any) -> Run:
        assert (memory_limit, options) == ("1 GB", {"echo": False})
        asked.append((config.epochs, resume))
        code = 75 if len(asked) == stopped[0] else 0
        write_run(run_dir, exit_code=code, config={"dataset": "somewhere", "epochs": config.epochs})
        valid = [0.5 - 0.01 * abs(epoch - best_at[0]) for epoch in range(1, config.epochs + 1)]
        scores = {"epoch": range(1, config.epochs + 1), "valid": valid, "test": valid}
        metrics = pd.DataFrame(scores, columns=METRIC_COLUMNS)
        metrics.to_csv(run_dir / "metrics.csv", index=False)
        return Run.open(run_dir)

    monkeypatch.setattr(converge, "run", run)
    return asked


best_at, stopped = [0], [0]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run]:
    def train(best: int, stop_at: int = 0) -> Run:
        best_at[0], stopped[0] = best, stop_at
        return run_until_converged(CONFIG, "1 GB", run_dir=tmp_path / "run", patience=3, echo=False)

    return train


def test_it_ends_when_as_many_epochs_as_patience_brought_nothing_better(
    runs: list[tuple[int, bool]], train: Callable[..., Run]
) -> None:
    assert len(train(best=2).metrics) == 6
    assert runs == [(3, False), (6, True)]


def test_it_ends_at_the_configs_epochs(runs: list[tuple[int, bool]], train: Callable[..., Run]) -> None:
    train(best=10)
    assert runs == [(3, False), (6, True), (9, True), (10, True)]


def test_after_an_interruption_it_goes_on_where_it_was(runs: list[tuple[int, bool]], train: Callable[..., Run]) -> None:
    with pytest.raises(RunEnded, match="75"):
        train(best=10, stop_at=2)
    train(best=10)
    assert runs == [(3, False), (6, True), (6, True), (9, True), (10, True)]


def test_a_finished_one_is_asked_for_once_more_and_trains_nothing(
    runs: list[tuple[int, bool]], train: Callable[..., Run]
) -> None:
    train(best=2)
    train(best=2)
    assert runs[2:] == [(6, True)]  # which `run` returns as it is
