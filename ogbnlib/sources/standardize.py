"""Features with mean 0 and standard deviation 1 on the train nodes, for columns of any scale."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from ..errors import InputError
from ..graph.array_checks import finite
from ..graph.node_set import NodeSet
from ..graph.npz import Array, slices
from .source import Source

_SLICE_VALUES = 2**19  # feature values at a time: 4 MB of float64


def standardized(
    source: Source, which: bool | Sequence[str], train: Array, done: Callable[[int], object]
) -> Source:
    """Return a source whose features are those of `source`, standardized, as float64.

    Its origin has mean and deviation of each feature: (original - mean) / deviation. Features that
    are not standardized have 0 and 1. One pass over the features is made here.

    Args:
        which: True for all features, or names and patterns of columns.
        train: int64 ids of the train nodes.
        done: called with the number of feature values after each slice.

    Raises:
        InputError: no train nodes, no such column, or features that are standardized already.
    """
    if "standardized" in source.origin:
        raise InputError(f"standardize: {source.name} is standardized; convert the original data")
    if not len(train):
        raise InputError("standardize: expected nodes in the train split, found none")
    selected = _selected(source, which)
    mean, deviation = _scale(source, NodeSet(source.num_nodes, train), done)
    mean[~selected] = 0
    deviation[~selected | (deviation == 0)] = 1  # a constant column has deviation 0
    return replace(
        source,
        x_chunks=lambda: ((rows - mean) / deviation for rows in _slices(source)),
        origin={
            **source.origin,
            "standardized": {"mean": mean.tolist(), "deviation": deviation.tolist()},
        },
    )


def _selected(source: Source, which: bool | Sequence[str]) -> Array:
    """Return which features are meant, bool [F]."""
    if isinstance(which, bool):
        return np.full(source.num_features, which)
    # a column `emb` of lists has the features emb[0], emb[1], ...
    columns = [re.sub(r"\[\d+\]$", "", name) for name in source.feature_names]
    selected = np.zeros(source.num_features, bool)
    for pattern in map(str, which):
        matches = [pattern == column or fnmatchcase(column, pattern) for column in columns]
        if not any(matches):
            known = get_close_matches(pattern, columns, 1) or [*dict.fromkeys(columns)][:20]
            expected = " or ".join(["true", *known])  # an array's features have no names
            raise InputError(f"standardize: expected {expected}, found no feature {pattern!r}")
        selected |= matches
    return selected


def _slices(source: Source) -> Iterator[Array]:
    for chunk in source.x_chunks():
        yield from slices(chunk, _SLICE_VALUES // source.num_features)


def _scale(source: Source, train: NodeSet, done: Callable[[int], object]) -> tuple[Array, Array]:
    """Return mean and standard deviation of each feature on the train nodes, float64 [F].

    Slices are combined as by Chan, Golub and LeVeque (COMPSTAT 1982).
    """
    count = 0  # train nodes so far
    mean = np.zeros(source.num_features)
    squares = np.zeros(source.num_features)  # sum of (value - mean) ** 2
    begin = 0  # first node of the slice
    for rows in finite(_slices(source), np.float64, source.features_at):
        values = rows[train.contains(np.arange(begin, begin + len(rows)))]  # of train nodes
        if count == 0 and len(values):
            mean = values[0]  # then the differences of a constant column are exactly 0
        differences = values - mean
        total = count + len(values)
        share = len(values) / max(1, total)  # of the slice
        shift = differences.sum(axis=0) / max(1, len(values))  # the slice's mean - mean
        squares += ((differences - shift) ** 2).sum(axis=0) + shift**2 * count * share
        mean = mean + shift * share
        count = total
        begin += len(rows)
        done(rows.size)
    return mean, np.sqrt(squares / count)
