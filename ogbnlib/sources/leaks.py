"""Checks that features do not reveal the labels or the splits, before anything is written."""

import numpy as np

from ..errors import InputError
from ..graph.node_set import NodeSet
from .source import Source, aligned

_LEAST_NODES = 20  # with fewer nodes, a match may be chance


def refuse_leaks(source: Source) -> None:
    """Refuse feature columns that are equal to the labels, or that only tell the splits apart.

    The ids of the splits are valid. Each check stops reading features as soon as no column can be a
    leak, mostly after the first chunk.

    Raises:
        InputError: features leak; the message names the columns.
    """
    for find, problem in (  # a function that returns the columns which leak, and the mistake
        (_equal_to_labels, "equal to the labels on all labelled nodes; training would see them"),
        (
            _constant_in_splits,
            "one value for all nodes of a split and another one in another split, such as a mask "
            "or a fold; training learns nothing from it",
        ),
    ):
        columns = find(source)
        if columns:
            raise InputError(
                f"{source.features_at}, column {source.columns(columns)}: {problem}; declare it "
                "`left out` in dataset.yaml, or remove it from an array by numpy.delete(x, columns, "
                "axis=1)"
            )


def _equal_to_labels(source: Source) -> list[int]:
    """Return the feature columns that are the labels of all labelled nodes, of two classes at least."""
    if not source.num_classes:  # targets
        return []
    columns = np.arange(source.num_features)  # equal to the labels so far
    classes = set[int]()
    count = 0  # labelled nodes
    for rows, labels in aligned([source.x_chunks(), source.label_chunks()]):
        labelled = labels >= 0
        columns = columns[(rows[labelled][:, columns] == labels[labelled, None]).all(axis=0)]
        if not len(columns):
            return []
        classes |= {*np.unique(labels[labelled]).tolist()}
        count += int(labelled.sum())
    return columns.tolist() if count >= _LEAST_NODES and len(classes) > 1 else []


def _constant_in_splits(source: Source) -> list[int]:
    """Return the feature columns that are constant in each split but differ between splits, which
    have 20 nodes at least; smaller ones do not count."""
    ids_of = source.read_splits().values()
    splits = [NodeSet(source.num_nodes, ids) for ids in ids_of if len(ids) >= _LEAST_NODES]
    if len(splits) < 2:
        return []
    # of each split its first value in each column; NaN until a chunk has a node of the split
    values = np.full((len(splits), source.num_features), np.nan)
    constant = np.ones(source.num_features, bool)  # columns with one value in each split so far
    begin = 0  # first node of the chunk
    for rows in source.x_chunks():
        nodes = np.arange(begin, begin + len(rows))
        for split, first in zip(splits, values, strict=True):
            members = rows[split.contains(nodes)]
            if len(members):
                first[:] = np.where(np.isnan(first), members[0], first)  # a row of `values`
                constant &= (members == first).all(axis=0)
        if not constant.any():
            return []
        begin += len(rows)
    differs = (values != values[0]).any(axis=0)  # between splits
    return np.flatnonzero(constant & differs).tolist()
