"""Checks of labels from any source: their range, their number of classes, and features that repeat them."""

import math
import sys
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import InputError
from ..graph.array_checks import from_one
from ..graph.npz import Array, slices
from ..graph.store_format import label_dtype

MAX_CLASSES = 2**24  # OGB's layout has float32 labels, exact up to this number


NOT_CLASSES = "; labels are classes: make classes of numbers with numpy.digitize(values, bounds)"


def check_num_classes(value: Any) -> None:
    """Refuse a number of classes that is no whole number from 1 to `MAX_CLASSES`; None is
    allowed."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (whole and 1 <= value <= MAX_CLASSES):
        raise InputError(
            f"num_classes: expected a whole number from 1 to {MAX_CLASSES}, found {value!r}"
        )


def refuse_several_labels(
    values: Array, where: str, name: str = "labels", choose: str = ""
) -> NoReturn:
    """Refuse labels [N, C] with the way out: how to make one label a node, or to choose a
    column."""
    text = f"{where}: expected one label a node, found {values.shape[1]}"
    what = "several values"
    if values.dtype.kind in "fiub" and np.isin(values, (0, 1)).all():
        if (values.sum(axis=1) == 1).all():
            raise InputError(f"{text} columns of one-hot labels; use {name}.argmax(axis=1)")
        what = "several labels (multi-label)"
    raise InputError(
        f"{text} columns; {what} a node are not supported: "
        f"use one, such as {choose or f'{name}[:, 0]'}, and train a model for each"
    )


_MOST_VALUES = 2**23  # values of classes x columns in memory at a time: 64 MB
_CHANCE = math.log(0.05)


class _LabelColumns(NamedTuple):
    """Columns of features [N, F] that hold nothing but the labels."""

    columns: list[int]
    equal: bool  # one column, the labels' own numbers
    by_chance: bool  # so few labels that other columns could be the same

    def refuse(self, place: str, remedy: str) -> None:
        """Raise an `InputError` about the columns at `place`; if it may be chance, only warn."""
        text = "the labels in other numbers"
        if self.equal:
            text = "equal to the labels"
        elif len(self.columns) > 1:
            text = f"together {text}"
        text = f"{place}: {text}, on all labelled nodes"
        if not self.by_chance:
            raise InputError(f"{text}; training would see them; {remedy}")
        print(f"{text}; so few that it may be chance; else {remedy}", file=sys.stderr)


def _values_of_classes(
    chunks: Iterable[Array], labels: Array, columns: Array, num_classes: int
) -> tuple[Array, Array]:
    """Return the columns that have one value in each class, and the values [C, columns], NaN for
    classes without labels.

    It stops reading when no column is left, mostly in the first chunk.
    """
    values = np.full((num_classes, len(columns)), np.nan)
    begin = 0
    for chunk in chunks:
        own = labels[begin : begin + len(chunk)]
        begin += len(chunk)
        known = np.flatnonzero(own >= 0)
        used, first, place = np.unique(own[known], return_index=True, return_inverse=True)
        rows = chunk[known][:, columns]
        before = values[used]
        same = (rows == rows[first][place]).all(axis=0)
        same &= (np.isnan(before) | (before == rows[first])).all(axis=0)
        columns = columns[same]
        values = values[:, same]
        values[used] = rows[first][:, same]
        if not len(columns):
            break
    return columns, values


def find_labels(
    open_chunks: Callable[[], Iterable[Array]], labels: Array, num_features: int
) -> _LabelColumns | None:
    """Return the columns of features that are the labels of all labelled nodes in the same or in
    other numbers.

    That is a column with one value for each class and another one for each other class, or several
    such as one-hot ones, which are so together. A column that several classes share is an
    attribute and stays.
    """
    classes = np.unique(labels[labels >= 0])
    num_classes = int(labels.max(initial=-1)) + 1
    step = max(1, _MOST_VALUES // max(1, num_classes))
    candidates: list[int] = []
    parts = [np.empty((len(classes), 0))]
    for part in slices(np.arange(num_features), step):
        columns, values = _values_of_classes(open_chunks(), labels, part, num_classes)
        varies = (values[classes] != values[classes[:1]]).any(axis=0)
        candidates += columns[varies].tolist()
        parts.append(values[classes][:, varies])
    values = np.concatenate(parts, axis=1)
    alone = [i for i in range(len(candidates)) if len(np.unique(values[:, i])) == len(classes)]
    if not alone and (not candidates or len(np.unique(values, axis=0)) < len(classes)):
        return None
    equal = [i for i in alone if (values[:, i] == classes).all()]
    chosen = equal[:1] or alone[:1] or range(len(candidates))
    chance = _log_chance(labels, len(chosen), num_features, bool(equal))
    return _LabelColumns([candidates[i] for i in chosen], bool(equal), chance > _CHANCE)


def _log_chance(labels: Array, count: int, num_features: int, equal: bool) -> float:
    """Return the logarithm of a bound of the chance that any `count` of the columns split the
    nodes as the classes do, if their values were shuffled."""
    sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
    arrangements = math.lgamma(sizes.sum() + 1) - sum(math.lgamma(size + 1) for size in sizes)
    namings = 0.0 if equal else math.lgamma(len(sizes) + 1)
    return count * math.log(num_features) + namings - arrangements


def clean_labels(values: Array, num_classes: int, where: str, start: int = 0) -> Array:
    """Convert labels of any numeric dtype to `label_dtype`, -1 for none."""
    values = values.reshape(-1)
    known = ~np.isnan(values) if values.dtype.kind == "f" else values != -1
    wrong = known & ((values != np.floor(values)) | (values < 0) | (values >= num_classes))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        hint = NOT_CLASSES if values[at] != np.floor(values[at]) else ""
        raise InputError(
            f"{where}: expected whole labels from 0 to {num_classes - 1}, or NaN (-1 in whole numbers) for none; "
            f"found {values[at]} at node {start + at}{hint or from_one(values[known], num_classes)}"
        )
    labels = np.full(len(values), -1, label_dtype(num_classes))
    labels[known] = values[known].astype(labels.dtype)
    return labels


def count_classes(chunks: Iterable[Array], dtype: np.dtype[Any], where: str) -> int:
    """Return the largest of cleaned labels plus one; `dtype` is that of the labels before they were
    cleaned."""
    seen = np.zeros(MAX_CLASSES, bool)
    for chunk in chunks:
        seen[chunk[chunk >= 0]] = True
    used = int(seen.sum())
    largest = int(np.flatnonzero(seen)[-1]) if seen.any() else -1
    if largest < 0:
        raise InputError(f"{where}: expected at least one label, found none")
    # The dtype's largest number, such as 255 in uint8, often means "none"; a stray 15,000,000 would
    # make a model of 15 million classes.
    ends = dtype.kind in "iu" and largest == np.iinfo(dtype).max and not seen[largest - 1]
    if ends or largest + 1 > 2 * used + 100:
        raise InputError(
            f"{where}: expected labels that leave few classes out, found {used} classes and the label {largest}; "
            "write -1 or NaN for no label, or convert with --num-classes (in Python num_classes)"
        )
    return largest + 1
