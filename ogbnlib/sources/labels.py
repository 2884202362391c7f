"""Checks of labels and targets from any source: their range and the number of classes."""

from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any, NoReturn

import numpy as np

from ..errors import InputError
from ..graph.array_checks import from_one
from ..graph.npz import Array
from ..graph.store_format import label_dtype

MAX_CLASSES = 2**24  # OGB's layout has float32 labels, exact up to this number
AS_VALUES = (
    "numbers for a loop of your own are declared as values in dataset.yaml, in Python by "
    "targets=True"
)
NOT_CLASSES = (
    "; labels are classes: make classes of numbers with numpy.digitize(values, bounds); "
    f"{AS_VALUES}"
)


def check_num_classes(value: Any) -> None:
    """Refuse a number of classes other than None or a whole number from 1 to `MAX_CLASSES`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (whole and 1 <= value <= MAX_CLASSES):
        raise InputError(
            f"num_classes: expected a whole number from 1 to {MAX_CLASSES}, found {value!r}"
        )


def refuse_several_labels(where: str, count: int) -> NoReturn:
    """Refuse labels [N, count]."""
    raise InputError(
        f"{where}: expected one label a node, found {count} columns; one-hot labels become one by "
        f"argmax(axis=1), {AS_VALUES}"
    )


def clean_targets(chunks: Iterable[Array], where: str) -> Iterator[Array]:
    """Yield chunks of targets [n] or [n, T] of any numeric dtype as float32, NaN for none.

    Values that are infinite in float32 are refused.
    """
    begin = 0
    for values in chunks:
        with np.errstate(over="ignore"):
            targets = values.astype(np.float32)
        rows = np.nonzero(np.isinf(targets))[0]
        if len(rows):
            raise InputError(
                f"{where}: expected targets within float32, or NaN for none, "
                f"found {values[rows[0]]} at node {begin + rows[0]}"
            )
        begin += len(targets)
        yield targets


def clean_labels(values: Array, num_classes: int, where: str, start: int = 0) -> Array:
    """Convert labels of any numeric dtype to `label_dtype` [n], -1 for none.

    `start` is the first label's node, for messages.
    """
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
    """Return the largest label plus one, from chunks of `clean_labels`.

    `dtype` is the dtype of the original labels.
    """
    seen = np.zeros(MAX_CLASSES, bool)
    for chunk in chunks:
        seen[chunk[chunk >= 0]] = True
    used = int(seen.sum())
    largest = int(np.flatnonzero(seen)[-1]) if seen.any() else -1
    if largest < 0:
        raise InputError(f"{where}: expected at least one label, found none")
    # The dtype's largest number, such as 255 in uint8, often means "none". A single wrong label of
    # 15,000,000 would make a model of 15 million classes.
    ends = dtype.kind in "iu" and largest == np.iinfo(dtype).max and not seen[largest - 1]
    if ends or largest + 1 > 2 * used + 100:
        raise InputError(
            f"{where}: expected labels that leave few classes out, found {used} classes and the label {largest}; "
            "write -1 or NaN for no label, or give num_classes (in dataset.yaml or Python)"
        )
    return largest + 1
