"""Check that features do not reveal the labels, before anything is written."""

import numpy as np

from ..errors import InputError
from .source import Source, aligned

_LEAST_NODES = 20  # with fewer labelled nodes, a match may be chance


def refuse_leaks(source: Source) -> None:
    """Refuse feature columns that are equal to the labels of all labelled nodes.

    Features are read until no column can be a leak, mostly one chunk. The message names the columns.
    """
    if not source.num_classes:
        return
    columns = np.arange(source.num_features)
    count = 0
    for rows, labels in aligned([source.x_chunks(), source.label_chunks()]):
        labelled = labels >= 0
        columns = columns[(rows[labelled][:, columns] == labels[labelled, None]).all(axis=0)]
        if not len(columns):
            return
        count += int(labelled.sum())
    if count < _LEAST_NODES:
        return
    raise InputError(
        f"{source.features_at}, column {source.columns(columns)}: equal to the labels on all labelled nodes; training "
        "would see them; declare it `left out` in dataset.yaml, or remove it from an array by "
        "numpy.delete(x, columns, axis=1)"
    )
