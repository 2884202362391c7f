"""Checks of labels and targets from any source: their range and the number of classes."""

from collections.abc import Callable, Iterable, Iterator
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
# Raises an InputError if the mask of wrong values, bool [n], is true anywhere; its other arguments
# are the expectation and the end of the message.
Refuse = Callable[[Array, str, str], None]
NOT_CLASSES = (
    "; labels are classes: make classes of numbers with numpy.digitize(values, bounds); "
    f"{AS_VALUES}"
)


def check_num_classes(value: Any) -> None:
    """Refuse a number of classes other than None or a whole number from 1 to `MAX_CLASSES`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (is_whole and 1 <= value <= MAX_CLASSES):
        raise InputError(
            f"num_classes: expected a whole number from 1 to {MAX_CLASSES}, found {value!r}"
        )


def refuse_several_labels(where: str, count: int) -> NoReturn:
    """Refuse labels [N, count], of which a node has several."""
    raise InputError(
        f"{where}: expected one label a node, found {count} columns; one-hot labels become one by "
        f"argmax(axis=1), {AS_VALUES}"
    )


def clean_targets(chunks: Iterable[Array], where: str) -> Iterator[Array]:
    """Yield chunks of targets [n] or [n, T] of any numeric dtype as float32, NaN for none; refuse
    values that are infinite in float32."""
    begin = 0  # node of the chunk's first row
    for values in chunks:
        with np.errstate(over="ignore"):  # 1e39 becomes inf, and is refused below
            targets = values.astype(np.float32)
        rows = np.nonzero(np.isinf(targets))[0]
        if len(rows):
            raise InputError(
                f"{where}: expected targets within float32, or NaN for none, "
                f"found {values[rows[0]]} at node {begin + rows[0]}"
            )
        begin += len(targets)
        yield targets


def most_exact(dtype: np.dtype[Any]) -> int:
    """Return the largest whole number that a float dtype tells from its neighbours: 2,047 in
    float16, 2**24 - 1 in float32."""
    return int(2 ** (np.finfo(dtype).nmant + 1)) - 1  # one bit more than stored: the leading 1


def by_node(where: str, values: Array, start: int = 0) -> Refuse:
    """Return a function that refuses the first wrong one of `values`, of nodes from `start` on."""

    def refuse(wrong: Array, expected: str, hint: str) -> None:
        if wrong.any():
            row = int(wrong.argmax())  # the first one
            raise InputError(
                f"{where}: expected {expected}, found {values[row]} at node {start + row}{hint}"
            )

    return refuse


def clean_labels(values: Array, num_classes: int, refuse: Refuse) -> Array:
    """Convert labels [n] of any numeric dtype to `label_dtype`, -1 where they are -1 or NaN."""
    known = values != -1  # bool [n], which nodes have a label
    largest = num_classes - 1
    if values.dtype.kind == "f":
        known &= ~np.isnan(values)
        largest = min(largest, most_exact(values.dtype))  # beyond it a label may be rounded
    expected = f"whole labels from 0 to {largest} in {values.dtype}, or NaN or -1 for none"
    refuse(known & (values != np.floor(values)), expected, NOT_CLASSES)
    hint = from_one(values[known], num_classes)
    refuse(known & ((values < 0) | (values > largest)), expected, hint)
    labels = np.full(len(values), -1, label_dtype(num_classes))
    labels[known] = values[known].astype(labels.dtype)
    return labels


def count_classes(chunks: Iterable[Array], where: str) -> int:
    """Return the largest label plus one, from chunks of `clean_labels`."""
    seen = np.zeros(MAX_CLASSES, bool)
    for chunk in chunks:
        seen[chunk[chunk >= 0]] = True
    classes = np.flatnonzero(seen)  # ascending
    if not len(classes):
        raise InputError(f"{where}: expected at least one label, found none")
    # A single wrong label of 15,000,000 would make a model of 15 million classes.
    if classes[-1] + 1 > 2 * len(classes) + 100:  # over 100 more are left out than found
        raise InputError(
            f"{where}: expected labels that leave few classes out, found {len(classes)} classes and "
            f"the label {classes[-1]}; write -1 or NaN for no label, or give num_classes (in "
            "dataset.yaml or Python)"
        )
    return int(classes[-1]) + 1
