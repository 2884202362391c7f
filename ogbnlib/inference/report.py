"""Accuracy of a run's saved model, class by class, from its predictions."""

import base64
import html
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.sparse import coo_array, csr_array
from sklearn.metrics import precision_recall_fscore_support

from ..errors import InputError, clear_errors, printable, split_name
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.store_format import SPLITS
from ..progress import Progress
from ..runs.folder import Run, RunLike
from ..sources.catalog import open_for
from ..training.checkpoint import SavedModel
from .predictions import predict

_CHUNK_NODES = 2**20
_LARGEST = 20  # classes in the plot


@dataclass(frozen=True)
class Report:
    """Accuracy of a run's model on a split, overall and for each class.

    Macro-F1 is the mean of F1 over the classes that occur among labels or predictions. Weighted F1
    counts each class as often as it has nodes. Both are as in scikit-learn.
    """

    title: str
    classes: pd.DataFrame  # a row per class: precision, recall, f1, count
    confusion: Any  # scipy.sparse array of counts [true class, predicted class]
    names: list[str]  # names of all classes

    @property
    def accuracy(self) -> float:
        return float(self.confusion.diagonal().sum() / self.confusion.sum())

    @property
    def macro_f1(self) -> float:
        return float(self.classes["f1"].mean())

    @property
    def weighted_f1(self) -> float:
        return float(np.average(self.classes["f1"], weights=self.classes["count"]))

    def __str__(self) -> str:
        table = self.classes.to_string(float_format="{:.4f}".format)
        return (
            f"{self.title}\naccuracy {self.accuracy:.4f}, macro-F1 {self.macro_f1:.4f}, "
            f"weighted F1 {self.weighted_f1:.4f}\n\n{table}"
        )

    def _repr_html_(self) -> str:
        picture = base64.b64encode(self.png()).decode()
        return (
            f'<pre>{html.escape(printable(self))}</pre><img src="data:image/png;base64,{picture}"/>'
        )

    def png(self) -> bytes:
        """Return the picture of `plot` as a PNG file."""
        buffer = io.BytesIO()
        self.plot().savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def plot(self) -> Figure:
        """Plot the largest 20 classes: the percentage of each class's nodes by predicted class."""
        sizes = self.confusion.sum(axis=1)
        largest = np.argsort(-sizes, kind="stable")[:_LARGEST]
        largest = largest[sizes[largest] > 0]
        counts = self.confusion[largest].tocsc()[:, largest].toarray()
        other_counts = sizes[largest] - counts.sum(axis=1)
        names = [printable(self.names[number]).replace("\n", " ")[:24] for number in largest]
        percent = 100 * np.column_stack([counts, other_counts]) / sizes[largest][:, None]
        side = 2.5 + 0.45 * len(names)
        figure = Figure(figsize=(side + 1, side), layout="constrained")
        ax = figure.add_subplot()
        ax.imshow(percent, cmap="Blues", vmin=0, vmax=100)
        ax.set_xticks(range(len(names) + 1), [*names, "(others)"], rotation=90, parse_math=False)
        ax.set_yticks(range(len(names)), names, parse_math=False)
        ax.set(xlabel="predicted class", ylabel="class")
        ax.set_title("percent of each class's nodes", fontsize=10)
        for (row, column), value in np.ndenumerate(percent):
            if value > 0.5:
                colour = "white" if value > 55 else "black"
                ax.text(
                    column, row, f"{value:.0f}", color=colour, ha="center", va="center", fontsize=8
                )
        return figure


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
    Memory is bounded: it holds the ids of the split, their labels and predictions, and counts of
    pairs of classes.

    Args:
        split: train, valid or test.
        memory_limit, progress, say: As for `predict`.
    """
    split = split_name(split)
    if split not in SPLITS:
        raise InputError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    run_dir = Run.open(run).run_dir
    saved = SavedModel.open(run_dir)
    store = open_for(saved.config, memory_limit=memory_limit, say=say, progress=progress is True)
    nodes = store.splits[split]
    if not len(nodes):
        raise InputError(f"split: expected nodes in {split} of {store.path}, found none")
    with tempfile.TemporaryDirectory(prefix="ogbnlib-report-") as folder:
        path = predict(
            run_dir,
            Path(folder, "classes.npy"),
            nodes=nodes,
            sampled=True,
            memory_limit=memory_limit,
            progress=progress,
            say=say,
        )
        confusion = _count(store, nodes, np.load(path, mmap_mode="r", allow_pickle=False))
    return Report(
        f"{run_dir}, {split}: {len(nodes):,} nodes, by {saved.path.name}",
        _by_class(confusion, store.class_names),
        confusion,
        store.class_names,
    )


def _count(store: Store, nodes: Array, predicted: Array) -> csr_array:
    shape = (store.num_classes, store.num_classes)
    counts = csr_array(shape, dtype=np.int64)
    for begin in range(0, len(nodes), _CHUNK_NODES):
        part = slice(begin, begin + _CHUNK_NODES)
        true = store.y[nodes[part]]
        counts += coo_array((np.ones(len(true), np.int64), (true, predicted[part])), shape).tocsr()
    return counts


def _by_class(confusion: csr_array, names: list[str]) -> pd.DataFrame:
    pairs = confusion.tocoo()
    present = np.union1d(pairs.row, pairs.col)
    # Each pair of classes is one sample, weighted by its number of nodes.
    precision, recall, f1, count = precision_recall_fscore_support(
        pairs.row, pairs.col, labels=present, sample_weight=pairs.data, zero_division=0
    )
    columns = {"precision": precision, "recall": recall, "f1": f1, "count": count.astype(np.int64)}
    return pd.DataFrame(columns, pd.Index([names[i] for i in present], name="class"))
