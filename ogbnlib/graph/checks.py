"""What data must be, checked alike wherever they come in: finite features, whole labels, splits to be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError
from .npz import Array

SPLITS = ("train", "valid", "test")


def index_dtype(num_nodes: int) -> type[np.signedinteger[Any]]:
    """The dtype of node ids in `row`: int32, or int64 from 2**31 nodes on."""
    return np.int32 if num_nodes < 2**31 else np.int64


def label_dtype(num_classes: int) -> type[np.signedinteger[Any]]:
    """The dtype of cleaned labels: int16, or int64 beyond 32,767 classes."""
    return np.int16 if num_classes <= 32767 else np.int64


def clean_labels(values: Array, num_classes: int, where: str, start: int = 0) -> Array:
    """Labels in any number type to int16 (int64 beyond 32,767 classes), -1 where there is none."""
    values = values.reshape(-1)
    known = ~np.isnan(values) if values.dtype.kind == "f" else values != -1
    wrong = known & ((values != np.floor(values)) | (values < 0) | (values >= num_classes))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"{where}: expected whole labels from 0 to {num_classes - 1}, or NaN (-1 in whole numbers) where there is "
            f"none; found {values[at]} at node {start + at}"
        )
    labels = np.full(len(values), -1, label_dtype(num_classes))
    labels[known] = values[known].astype(labels.dtype)
    return labels


def split_problems(
    splits: Mapping[str, Array], num_nodes: int, labelled: Callable[[Array], Array]
) -> Iterator[tuple[str, str]]:
    """(split, what is wrong with it) for all that keeps int64 ids of splits from being trained on.

    Args:
        labelled: tells of node ids which have a label, bool [n].
    """
    taken: dict[str, Array] = {}
    for name, ids in splits.items():
        outside = ids[(ids < 0) | (ids >= num_nodes)]
        if not ids.size or outside.size:
            found = f"{outside.size} others such as {outside[0]}" if outside.size else "none"
            yield name, f"expected node ids from 0 to {num_nodes - 1}, found {found}"
            continue
        if repeats := len(ids) - len(np.unique(ids)):
            yield name, f"expected each node once, found {repeats} repeats"
        bare = ids[~labelled(ids)]
        if bare.size:
            yield name, f"expected labelled nodes, found {bare.size} without a label such as {bare[0]}"
        for other, before in taken.items():
            shared = np.intersect1d(ids, before)
            if shared.size:
                yield name, f"expected no node of {other}, found {shared.size} such as {shared[0]}"
        taken[name] = ids


class FiniteCheck:
    """Casts chunks of features and counts what is not finite, before or after."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.most = float(np.finfo(self.dtype).max)
        self._bad, self._large = [0, -1], [0, -1]  # how many, and the row of the first

    def __call__(self, values: Array, begin: int) -> Array:
        """`values` [n, F] in the wanted dtype; `begin` is the row of the first."""
        with np.errstate(over="ignore"):
            out = values.astype(self.dtype, order="C", copy=False)
        # NaN makes both comparisons false.
        if not (values.size == 0 or (float(values.max()) <= self.most and float(values.min()) >= -self.most)):
            given, finite = np.isfinite(values), np.isfinite(out)
            for wrong, found in ((~given, self._bad), (given & ~finite, self._large)):
                if wrong.any():
                    found[0] += int(wrong.sum())
                    found[1] = found[1] if found[1] >= 0 else begin + int(wrong.any(axis=1).argmax())
        return out

    def problem(self) -> str | None:
        """What was wrong with the values that went through, or None."""
        (bad, first_bad), (large, first_large) = self._bad, self._large
        if bad:
            return f"expected finite values, found {bad} NaN or Inf, the first in row {first_bad}"
        if large:
            return (
                f"found {large} values beyond {self.most:g}, the largest {self.dtype}, the first in row {first_large}; "
                "use feature_dtype='float32'"
            )
        return None
