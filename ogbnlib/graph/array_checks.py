"""Checks of features and splits that hold for any source and for a store."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError
from .npz import Array


def from_one(values: Array, count: int) -> str:
    """Return the end of an error message: a question if `values` (ids or classes) go from 1 to
    `count` in place of 0 to count - 1, else ""."""
    if values.size and values.min() >= 1 and values.max() == count:
        return "; do they begin at 1? Then subtract 1"
    return ""


def is_labelled(rows: Array) -> Array:
    """Return which rows of labels [n] or float targets [n] or [n, T] have a value, bool [n]."""
    if rows.dtype.kind != "f":  # classes; -1 is none
        return rows >= 0
    return np.count_nonzero(~np.isnan(rows), axis=tuple(range(1, rows.ndim))) > 0


def split_problems(
    splits: Mapping[str, Array],
    num_nodes: int,
    labelled: Callable[[Array], Array],
    for_repeats: str = "",
    for_unlabelled: str = "",
) -> Iterator[tuple[str, str]]:
    """Yield (split, problem) for int64 node ids of splits; `labelled(ids)` returns which ids have a
    label, bool. Remedies at the end of a message: `for_repeats` and `for_unlabelled`."""
    checked: dict[str, Array] = {}  # the splits before this one
    for name, ids in splits.items():
        outside = ids[(ids < 0) | (ids >= num_nodes)]
        if outside.size:
            yield (
                name,
                f"expected node ids from 0 to {num_nodes - 1}, found {outside.size} others such as "
                f"{outside[0]}{from_one(ids, num_nodes)}",
            )
            continue  # their labels can't be looked up
        repeats = len(ids) - len(np.unique(ids))
        if repeats:
            yield name, f"expected each node once, found {repeats} repeats{for_repeats}"
        bare = ids[~labelled(ids)]  # without a label
        if bare.size:
            yield (
                name,
                f"expected labelled nodes, found {bare.size} without a label such as {bare[0]}"
                f"{for_unlabelled}",
            )
        for split, split_ids in checked.items():
            shared = np.intersect1d(ids, split_ids)
            if shared.size:
                yield name, f"expected no node of {split}, found {shared.size} such as {shared[0]}"
        checked[name] = ids


def finite(chunks: Iterable[Array], dtype: DTypeLike, where: str) -> Iterator[Array]:
    """Yield chunks of features [n, F], cast to `dtype`; refuse values that are not finite before or
    after the cast."""
    dtype = np.dtype(dtype)
    begin = 0  # first row of the chunk
    for values in chunks:
        with np.errstate(over="ignore"):  # an overflow is refused below
            out = values.astype(dtype, order="C", copy=False)
        wrong = ~np.isfinite(out)
        if wrong.any():
            row = int(np.flatnonzero(wrong.any(axis=1))[0])
            value = values[row][wrong[row]][0]
            remedy = "replace it"
            if np.isfinite(value):  # until the cast
                wider = "use feature_dtype='float32' or " * (dtype != np.float32)
                remedy = f"{wider}scale the features down"
            raise InputError(
                f"{where}: expected finite values up to {float(np.finfo(dtype).max):g}, the largest "
                f"{dtype}, found {value:g} in row {begin + row}; {remedy}"
            )
        begin += len(values)
        yield out
