"""The summary of a conversion: counts taken in passes that it makes anyway."""

from typing import Any

import numpy as np

from ..errors import format_bytes
from ..files import shown
from .npz import Array
from .store import Store

_MOST_NAMES = 20  # names of classes in a summary


def count_labels(sizes: Array, num_nodes: int) -> dict[str, Any]:
    """Return the summary's entries on labels; `sizes` is the number of nodes of each class, at
    least one."""
    largest = int(sizes.argmax())
    smallest = int(np.where(sizes > 0, sizes, sizes[largest] + 1).argmin())
    return {
        "unlabelled_nodes": num_nodes - int(sizes.sum()),
        "largest_class": [largest, int(sizes[largest])],
        "smallest_class": [smallest, int(sizes[smallest])],
        "empty_classes": int((sizes == 0).sum()),
    }


def summarized(store: Store) -> str:
    """Return the text at the end of a conversion; one line for a store without counts."""
    lines = [
        f"{shown(store.path)}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, store of "
        f"{format_bytes(store.nbytes)}"
    ]
    if store.summary:
        lines += [_edges(store), _labels(store), _splits(store)]
    return "\n  ".join(lines)


def _edges(store: Store) -> str:
    counts = store.summary
    text = f"edges: {counts['edges_read']:,} read{_left_out(store, 'dropped_edges')}"
    if store.undirected:
        both = 2 * counts["edges_read"]
        text += f" ({both:,} with their reverses, {counts['merged_edges']:,} of them merged)"
    return (
        f"{text}; self-loops: {counts['self_loops']:,}; isolated nodes: "
        f"{counts['isolated_nodes']:,}"
    )


def _labels(store: Store) -> str:
    if store.has_targets:
        return f"targets: float32, shape {[*store.files['y'].shape]}"
    counts = store.summary
    text = (
        f"classes: {store.num_classes:,}; largest: {_class_size(store, 'largest_class')}; smallest: "
        f"{_class_size(store, 'smallest_class')}; without a node: {counts['empty_classes']:,}"
    )
    if store.label_name is None:
        return text
    names = [*map(repr, store.class_names[:_MOST_NAMES])]
    if store.num_classes > _MOST_NAMES:
        names.append("...")
    return f"{text}\n  called {', '.join(names)}"


def _splits(store: Store) -> str:
    splits = ", ".join(f"{split} {count:,}" for split, count in store.num_seeds.items())
    left_out = _left_out(store, "dropped_seeds")
    unlabelled = store.summary["unlabelled_nodes"]
    return f"splits: {splits}{left_out}; nodes without a label: {unlabelled:,}"


def _left_out(store: Store, name: str) -> str:
    count = store.summary.get(name)  # absent in stores of earlier versions
    return f", {count:,} left out" if count else ""


def _class_size(store: Store, name: str) -> str:
    number, num_nodes = store.summary[name]
    text = str(number)
    if store.label_name is not None:
        text = repr(str(store.label_name[number]))
    return f"{text} with {num_nodes:,}"
