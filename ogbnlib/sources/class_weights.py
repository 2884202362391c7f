"""Weights of classes in the loss: balanced, or from a user's csv file."""

import csv
import math

import numpy as np

from ..config import TrainConfig
from ..errors import InputError, naming
from ..files import StrPath, home
from ..graph.npz import Array
from ..graph.store import Store
from .resolve import graph_for


def check_class_weight(config: TrainConfig) -> None:
    """Refuse a file of weights that can't be read or names a class that the store lacks.

    The classes are checked only if the store exists.
    """
    if config.class_weight in ("none", "balanced"):
        return
    weights = _read_weights(config.class_weight)
    graph = graph_for(config)
    if isinstance(graph, Store):
        _by_class(weights, graph, config.class_weight)


def class_weights(config: TrainConfig, store: Store, counts: Array) -> Array | None:
    """Return the weight of each class in the loss, float32 [num_classes]; None for no weights.

    The mean weight of the train nodes is 1. Balanced weights are those of scikit-learn, num_nodes /
    (num_classes * count), where only train nodes, and the classes that occur among them, count.

    Args:
        counts: Number of train nodes in each class, int64 [num_classes].
    """
    path = config.class_weight
    if path == "none":
        return None
    if path == "balanced":
        weights = np.divide(1.0, counts, out=np.zeros(len(counts)), where=counts > 0)
    else:
        weights = _by_class(_read_weights(path), store, path)
    total = weights @ counts
    if not total:
        raise InputError(
            f"{path}: expected a weight above 0 for a class of the train split, found none"
        )
    return (weights * (counts.sum() / total)).astype(np.float32)


def _read_weights(path: StrPath) -> dict[str, float]:
    file = home(path)
    if not file.is_file():
        raise InputError(
            "class_weight: expected none, balanced, or a csv file of classes and weights, found no "
            f"file {path}"
        )
    weights: dict[str, float] = {}
    with (
        naming(path, "lines of a class and its weight"),
        open(file, newline="", encoding="utf-8-sig") as stream,
    ):
        lines = csv.reader(stream)
        for fields in filter(None, lines):
            place = f"{path}, line {lines.line_num}"
            if len(fields) != 2:
                raise InputError(f"{place}: expected a class and its weight, found {fields}")
            name = fields[0].strip()
            if not weights and fields[1].strip() == "weight":
                continue  # the header
            if name in weights:
                raise InputError(f"{place}: expected each class once, found {name!r} again")
            weights[name] = _weight(fields[1], place)
    return weights


def _weight(text: str, place: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise InputError(f"{place}: expected a weight of at least 0, found {text!r}")
    return weight


def _by_class(weights: dict[str, float], store: Store, path: StrPath) -> Array:
    """Return the weight of each class of a store, float64 [num_classes].

    A class without a weight in the file gets 1, as in scikit-learn.
    """
    names = store.class_names
    unknown = sorted(weights.keys() - {*names})
    if unknown:
        raise InputError(
            f"{path}: expected classes of {store.path} such as {', '.join(names[:3])}, found "
            f"{', '.join(map(repr, unknown[:3]))}"
        )
    return np.array([weights.get(name, 1.0) for name in names])
