"""Checks that features do not reveal the labels or the splits, before anything is written."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..errors import InputError
from ..graph.npz import Array
from .source import Source

_LEAST_NODES = 20  # with fewer nodes, a match may be chance
_CODE_NODES = 2**20  # nodes whose split is looked up at a time: 8 MB
_MOST_SHOWN = 20  # columns in a message


def refuse_leaks(source: Source) -> None:
    """Refuse feature columns that are equal to the labels, or that only tell the splits apart.

    Each check stops reading features as soon as no column can be a leak, mostly after the first
    chunk.

    Raises:
        InputError: features leak; the message names the columns.
    """
    columns = _equal_to_labels(source)
    if columns:
        raise InputError(
            f"{_place(source, columns)}: equal to the labels on all labelled nodes; training would "
            f"see them; {_remedy(source, columns)}"
        )
    columns = _constant_in_splits(source)
    if columns:
        raise InputError(
            f"{_place(source, columns)}: one value for all nodes of a split and another one in "
            "another split, such as a mask or a fold; training learns nothing from it; "
            f"{_remedy(source, columns)}"
        )


def _place(source: Source, columns: Sequence[int]) -> str:
    names = [repr(source.feature_names[column]) for column in columns if source.feature_names]
    end = "" if names else " (from 0)"
    shown = (names or [str(column) for column in columns])[:_MOST_SHOWN]
    return f"{source.features_at}, column {', '.join(shown)}{end}"


def _remedy(source: Source, columns: Sequence[int]) -> str:
    if not source.feature_names:
        return f"remove it: numpy.delete(x, {list(columns)}, axis=1)"
    return "declare it `left out` in dataset.yaml"


def _equal_to_labels(source: Source) -> list[int]:
    """Return the feature columns that are the labels of all labelled nodes, of two classes at least."""
    columns = np.arange(source.num_features)
    sizes = np.zeros(source.num_classes, np.int64)
    for chunk in source.label_chunks() if source.num_classes else []:
        np.add.at(sizes, chunk[chunk >= 0], 1)
    if sizes.sum() < _LEAST_NODES or np.count_nonzero(sizes) < 2:
        return []
    for rows, labels in _paired(source.x_chunks(), source.label_chunks()):
        labelled = labels >= 0
        columns = columns[(rows[labelled][:, columns] == labels[labelled, None]).all(axis=0)]
        if not len(columns):
            break
    return columns.tolist()


def _constant_in_splits(source: Source) -> list[int]:
    """Return the feature columns that are constant in each split but differ between splits, which
    have 20 nodes at least; smaller ones do not count."""
    ids_of = source.read_splits().values()
    splits = [np.sort(ids) for ids in ids_of if len(ids) >= _LEAST_NODES]
    if len(splits) < 2:
        return []
    values = np.full((len(splits), source.num_features), np.nan)
    constant = np.ones(source.num_features, bool)
    for rows, codes in _paired(source.x_chunks(), _split_codes(splits, source.num_nodes)):
        for split in range(len(splits)):
            members = rows[codes == split]
            if len(members):
                first = np.where(np.isnan(values[split]), members[0], values[split])
                constant &= (members == first).all(axis=0)
                values[split] = first
        if not constant.any():
            return []
    varies = (values != values[0]).any(axis=0)
    return np.flatnonzero(constant & varies).tolist()


def _split_codes(splits: Sequence[Array], num_nodes: int) -> Iterator[Array]:
    """Yield the number of each node's split, -1 for none; the ids of each split ascend."""
    for begin in range(0, num_nodes, _CODE_NODES):
        codes = np.full(min(_CODE_NODES, num_nodes - begin), -1, np.int8)
        for number, ids in enumerate(splits):
            first, last = np.searchsorted(ids, (begin, begin + len(codes)))
            codes[ids[first:last] - begin] = number
        yield codes


def _paired(chunks: Iterable[Array], codes: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield each chunk of rows with the codes of its rows; chunks of `codes` may differ in size."""
    pending = np.empty(0, np.int64)
    for chunk in chunks:
        while len(pending) < len(chunk):
            pending = np.concatenate([pending, next(codes)])
        yield chunk, pending[: len(chunk)]
        pending = pending[len(chunk) :]
