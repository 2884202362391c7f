"""Accuracy of a run's saved model, class by class, from its predictions."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import InputError, clear_errors, split_name
from ..graph.npz import Array
from ..graph.store_format import SPLITS
from ..progress import Progress
from ..runs.folder import Run, RunLike
from ..sources.resolve import find_store
from .predictions import predict


@dataclass(frozen=True)
class Report:
    """Accuracy of a run's model on a split, overall and for each class.

    Macro-F1 is the mean of F1 over the classes that occur among labels or predictions, as in
    scikit-learn.
    """

    title: str
    accuracy: float
    classes: pd.DataFrame  # a row per class: precision, recall, f1, count

    @property
    def macro_f1(self) -> float:
        return float(self.classes["f1"].mean())

    def __str__(self) -> str:
        table = self.classes.to_string(float_format="{:.4f}".format)
        overall = f"accuracy {self.accuracy:.4f}, macro-F1 {self.macro_f1:.4f}"
        return f"{self.title}\n{overall}\n\n{table}"

    __repr__ = __str__


@clear_errors()
def report(
    run: RunLike,
    split: str = "test",
    *,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    say: Callable[[str], object] = print,
) -> Report:
    """Evaluate a run's saved model (best.pt, else checkpoint.pt) on a split, class by class.

    Neighbors are sampled as in the run's evaluations, so the accuracy is the one in metrics.csv.

    Args:
        split: train, valid or test.
        memory_limit, progress, say: As for `predict`.
    """
    split = split_name(split)
    if split not in SPLITS:
        raise InputError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    opened = Run.open(run)
    store = find_store(opened.config.dataset)
    nodes = store.splits[split]
    if not len(nodes):
        raise InputError(f"split: expected nodes in {split} of {store.path}, found none")
    with tempfile.TemporaryDirectory(prefix="ogbnlib-report-") as folder:
        path = predict(
            opened.run_dir,
            Path(folder, "classes.npy"),
            nodes=nodes,
            sampled=True,
            memory_limit=memory_limit,
            progress=progress,
            say=say,
        )
        predicted = np.load(path, allow_pickle=False)
    labels = np.asarray(store.y[nodes])  # int [n], like `predicted`
    return Report(
        f"{opened.run_dir}, {split}: {len(nodes):,} nodes",
        float((labels == predicted).mean()),
        _by_class(labels, predicted, store.class_names),
    )


def _by_class(labels: Array, predicted: Array, names: list[str]) -> pd.DataFrame:
    # The table of a `Report`, from classes int [n] of the same nodes. Counts are int64 [classes].
    hits = np.bincount(labels[labels == predicted], minlength=len(names))
    count = np.bincount(labels, minlength=len(names))
    guesses = np.bincount(predicted, minlength=len(names))
    table = pd.DataFrame(
        {
            # a class without guesses or nodes has 0 hits
            "precision": hits / np.maximum(guesses, 1),
            "recall": hits / np.maximum(count, 1),
            "f1": 2 * hits / np.maximum(count + guesses, 1),
            "count": count,
        },
        pd.Index(names, name="class"),
    )
    return table[count + guesses > 0]  # classes that occur among labels or predictions
