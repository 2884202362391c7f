"""The counts at the end of a conversion, taken in the passes that it makes anyway."""

from typing import Any

import numpy as np

from ..errors import format_bytes
from ..files import shown
from .npz import Array
from .store import Store


def count_labels(sizes: Array, num_nodes: int) -> dict[str, Any]:
    """Return the entries of labels: `sizes` has the number of nodes of each class, at least one."""
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
    size = format_bytes(store.nbytes)
    sizes = f"{store.num_nodes:,} nodes, {store.num_edges:,} edges, store of {size}"
    text = f"{shown(store.path)}: {sizes}"
    if not store.summary:
        return text
    counts = {
        name: f"{count:,}" if isinstance(count, int) else _class_size(store, *count)
        for name, count in store.summary.items()
    }
    dropped = {"dropped_edges": "", "dropped_seeds": ""}  # absent in earlier versions' stores
    for name in dropped:
        if store.summary.get(name):
            dropped[name] = f", {counts[name]} left out"
    merged = ""
    if store.undirected:
        both = f"{2 * store.summary['edges_read']:,} with their reverses"
        merged = f" ({both}, {counts['merged_edges']} of them merged)"
    labels = "targets: float32, shape " + str([*store.files["y"].shape])
    if not store.has_targets:
        labels = f"classes: {store.num_classes:,}; largest: {counts['largest_class']}; "
        labels += f"smallest: {counts['smallest_class']}; without a node: {counts['empty_classes']}"
    splits = ", ".join(f"{split} {count:,}" for split, count in store.num_seeds.items())
    return f"""{text}
  edges: {counts["edges_read"]} read{dropped["dropped_edges"]}{merged}; self-loops: {counts["self_loops"]}; \
isolated nodes: {counts["isolated_nodes"]}
  {labels}
  splits: {splits}{dropped["dropped_seeds"]}; nodes without a label: {counts["unlabelled_nodes"]}"""


def _class_size(store: Store, number: int, num_nodes: int) -> str:
    name = str(number)
    if store.label_name is not None:
        label = store.label_name[number]
        name = repr(label.decode() if isinstance(label, bytes) else str(label))
    return f"{name} with {num_nodes:,}"
