"""Checks that features do not reveal the labels or the splits, before anything is written."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from ..graph.npz import Array, slices
from .source import Source

_MOST_VALUES = 2**23  # float64 values in memory at a time, one per class and column: 64 MB
_CHANCE = math.log(0.05)  # a match that is more likely than this may be chance
_CODE_NODES = 2**20  # nodes whose split is looked up at a time: 8 MB
_MOST_SHOWN = 20  # columns in a message


def refuse_leaks(source: Source) -> None:
    """Refuse feature columns that encode only the labels or only the splits.

    Each check stops reading features as soon as no column can be a leak, mostly after the first
    chunk. Memory use is 64 MB plus two chunks.

    Raises:
        InputError: features leak; the message names the columns and how to leave them out.
    """
    if source.num_classes:  # a feature may well equal a target, such as last year's value
        sizes = np.zeros(source.num_classes, np.int64)
        for chunk in source.label_chunks():
            np.add.at(sizes, chunk[chunk >= 0], 1)
        labels = _find_labels(source, sizes)
        if labels is not None:
            _tell_labels(source, labels)
    columns = _find_splits(source)
    if columns:
        raise InputError(
            f"{_place(source, columns)}: one value for all nodes of a split and another one in "
            "another split, such as a mask or a fold; training learns nothing from it; "
            f"{_remedy(source, columns)}"
        )


class _LabelColumns(NamedTuple):
    """Columns of features [N, F] that encode only the labels."""

    columns: list[int]
    equal: bool  # one column, equal to the labels
    by_chance: bool  # there are so few labels that the match may be chance


def _place(source: Source, columns: Sequence[int]) -> str:
    names = [repr(source.feature_names[column]) for column in columns if source.feature_names]
    end = "" if names else " (from 0)"
    shown = (names or [str(column) for column in columns])[:_MOST_SHOWN]
    return f"{source.features_at}, column {', '.join(shown)}{end}"


def _remedy(source: Source, columns: Sequence[int]) -> str:
    if not source.feature_names:
        return f"remove it: numpy.delete(x, {list(columns)}, axis=1)"
    from .files.columns import option

    names = [source.feature_names[column] for column in columns]
    return f"leave it out: {option('--leave-out', *names)}"


def _tell_labels(source: Source, found: _LabelColumns) -> None:
    """Refuse the columns; only warn if they may match the labels by chance."""
    text = "the labels in other numbers"
    if found.equal:
        text = "equal to the labels"
    elif len(found.columns) > 1:
        text = f"together {text}"
    text = f"{_place(source, found.columns)}: {text}, on all labelled nodes"
    remedy = _remedy(source, found.columns)
    if not found.by_chance:
        raise InputError(f"{text}; training would see them; {remedy}")
    print(f"{text}; so few that it may be chance; else {remedy}", file=sys.stderr)


def _find_labels(source: Source, sizes: Array) -> _LabelColumns | None:
    """Return the feature columns that encode the labels of all labelled nodes, or None.

    A column does so if it has one value per class, different for each class, such as the label
    itself. Several columns, such as one-hot columns, can do so together. A column that has the same
    value in several classes is an attribute, and is not refused on its own. `sizes` [C] counts the
    nodes of each class.
    """
    classes = np.flatnonzero(sizes)
    candidates, values = _constant_columns(source, source.label_chunks, classes)
    alone = [i for i in range(len(candidates)) if len(np.unique(values[:, i])) == len(classes)]
    if not alone and (not candidates or len(np.unique(values, axis=0)) < len(classes)):
        return None
    equal = [i for i in alone if (values[:, i] == classes).all()]
    chosen = equal[:1] or alone[:1] or range(len(candidates))
    chance = len(chosen) * math.log(source.num_features) - _log_arrangements(sizes[classes])
    if not equal:
        chance += math.lgamma(len(classes) + 1)  # any numbering of the classes is a match
    return _LabelColumns([candidates[i] for i in chosen], bool(equal), chance > _CHANCE)


def _find_splits(source: Source) -> list[int]:
    """Return the feature columns that are constant in each split but differ between splits.

    Such a column is the mask of a split, or numbers the splits or folds. Columns that may be so by
    chance, because splits are small, are not returned.
    """
    splits = [np.sort(ids) for ids in source.read_splits().values()]
    sizes = np.array([len(ids) for ids in splits])

    def codes() -> Iterator[Array]:
        for begin in range(0, source.num_nodes, _CODE_NODES):
            code = np.full(min(_CODE_NODES, source.num_nodes - begin), -1, np.int8)
            for number, ids in enumerate(splits):
                first, last = np.searchsorted(ids, (begin, begin + len(code)))
                code[ids[first:last] - begin] = number
            yield code

    present = np.flatnonzero(sizes)
    candidates, values = _constant_columns(source, codes, present)
    leaking = []
    for column, own in zip(candidates, values.T, strict=True):
        together = [sizes[present][own == value].sum() for value in np.unique(own)]
        chance = math.log(source.num_features) - _log_arrangements(np.array(together))
        if chance <= _CHANCE:
            leaking.append(column)
    return leaking


def _log_arrangements(sizes: Array) -> float:
    """Return the logarithm of the number of ways to deal values to groups of these sizes.

    The chance that a shuffled column falls into exactly these groups is one over that number.
    """
    return math.lgamma(sizes.sum() + 1) - sum(math.lgamma(size + 1) for size in sizes)


def _constant_columns(
    source: Source, code_chunks: Callable[[], Iterator[Array]], classes: Array
) -> tuple[list[int], Array]:
    """Return the feature columns that are constant in each class but differ between classes, and
    their values [classes, columns].

    Classes may also be splits. `code_chunks` yields each node's class, -1 for none; `classes` are
    the classes with nodes.
    """
    step = max(1, _MOST_VALUES // max(1, source.num_classes))
    candidates: list[int] = []
    parts = [np.empty((len(classes), 0))]
    for part in slices(np.arange(source.num_features), step):
        columns, values = _values_of_classes(
            _paired(source.x_chunks(), code_chunks()), part, int(classes.max(initial=-1)) + 1
        )
        varies = (values[classes] != values[classes[:1]]).any(axis=0)
        candidates += columns[varies].tolist()
        parts.append(values[classes][:, varies])
    return candidates, np.concatenate(parts, axis=1)


def _paired(chunks: Iterable[Array], codes: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield each chunk of rows with the codes of its rows; chunks of `codes` may differ in size."""
    pending = np.empty(0, np.int64)
    for chunk in chunks:
        while len(pending) < len(chunk):
            pending = np.concatenate([pending, next(codes)])
        yield chunk, pending[: len(chunk)]
        pending = pending[len(chunk) :]


def _values_of_classes(
    pairs: Iterable[tuple[Array, Array]], columns: Array, num_classes: int
) -> tuple[Array, Array]:
    """Return the columns that are constant in each class, and their values [C, columns].

    The values are NaN for classes without nodes. Reading stops when no column is left.
    """
    values = np.full((num_classes, len(columns)), np.nan)
    for chunk, codes in pairs:
        known = np.flatnonzero(codes >= 0)
        used, first, place = np.unique(codes[known], return_index=True, return_inverse=True)
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
