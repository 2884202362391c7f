"""The summary of a conversion: counts taken while it reads the data for the store."""

import textwrap
from typing import Any

import numpy as np

from ..errors import format_bytes
from ..files import shown
from .npz import Array
from .store import Store

_REMEDIES = {"spread_over_100_times_the_median": " (in dataset.yaml: standardize: true)"}


def count_labels(sizes: Array, num_nodes: int) -> dict[str, Any]:
    """Return the summary's entries on labels; `sizes`, int64 [C], C >= 1, is the number of nodes of
    each class. The largest and the smallest one are pairs (class, nodes)."""
    largest = int(sizes.argmax())
    smallest = int(np.where(sizes > 0, sizes, sizes[largest] + 1).argmin())  # of those with nodes
    return {
        "unlabelled_nodes": num_nodes - int(sizes.sum()),
        "largest_class": [largest, int(sizes[largest])],
        "smallest_class": [smallest, int(sizes[smallest])],
        "empty_classes": int((sizes == 0).sum()),
    }


def summarized(store: Store) -> str:
    """Return the text at the end of a conversion."""
    text = (
        f"{shown(store.path)}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, store of "
        f"{format_bytes(store.nbytes)}"
    )
    classes = store.num_classes or "none, but targets"
    counts = {"classes": classes, **store.summary, **store.num_seeds}  # numbers, text or pairs
    for name in {"largest_class", "smallest_class"} & {*counts}:  # none of a store with targets
        number, num_nodes = counts[name]
        counts[name] = f"{store.class_names[number]!r} with {num_nodes:,}"
    words = [
        f"{name.replace('_', ' ')}: {count if isinstance(count, str) else format(count, ',')}"
        f"{_REMEDIES.get(name, '')}"
        for name, count in counts.items()
    ]
    return "\n".join(
        [text, *textwrap.wrap("; ".join(words), 100, initial_indent="  ", subsequent_indent="  ")]
    )
