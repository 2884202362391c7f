"""Training until it no longer gets better, through any number of interruptions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..runs.folder import CONFIG, Run
from ..runs.sandbox import run
from .tables import best_epochs


def run_until_converged(
    config: TrainConfig,
    memory_limit: str | int | None = None,
    *,
    run_dir: str | os.PathLike[str],
    patience: int,
    **options: Any,
) -> Run:
    """Train `patience` epochs at a time, `config.epochs` at most, until none of the last was the best on valid.

    The run in `run_dir` is begun, or gone on with wherever it was interrupted; a finished one is only read. The weights
    are those of a run that was given as many epochs at once.

    Args:
        options: More of `run`'s.

    Raises:
        RunEnded: when a run does not finish.
        InputError: as `run`.
    """
    folder = Path(run_dir)
    resume = (folder / CONFIG).is_file()
    target = Run.open(folder).config.epochs if resume else min(patience, config.epochs)
    while True:
        chunk = config.replace(epochs=target)
        done = run(chunk, memory_limit, run_dir=folder, resume=resume, **options).require_finished()
        if target >= config.epochs or target - best_epochs({"run": done}).loc["run", "best epoch"] >= patience:
            return done
        target, resume = min(target + patience, config.epochs), True
