"""The summary of a conversion: counts taken in passes that it makes anyway."""

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
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
    text = (
        f"{shown(store.path)}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, store of "
        f"{format_bytes(store.nbytes)}"
    )
    if not store.summary:
        return text
    counts = {
        name: f"{count:,}" if isinstance(count, int) else _class_size(store, *count)
        for name, count in store.summary.items()
    }
    dropped = {
        name: f", {counts[name]} left out" if store.summary.get(name) else ""
        for name in ("dropped_edges", "dropped_seeds")  # absent in earlier versions' stores
    }
    merged = ""
    if store.undirected:
        merged = (
            f" ({2 * store.summary['edges_read']:,} with their reverses, {counts['merged_edges']} "
            "of them merged)"
        )
    labels = "targets: float32, shape " + str([*store.files["y"].shape])
    if not store.has_targets:
        labels = (
            f"classes: {store.num_classes:,}; largest: {counts['largest_class']}; smallest: "
            f"{counts['smallest_class']}; without a node: {counts['empty_classes']}"
            f"{_class_names([] if store.label_name is None else store.class_names)}"
        )
    splits = ", ".join(f"{split} {count:,}" for split, count in store.num_seeds.items())
    return f"""{text}
  edges: {counts["edges_read"]} read{dropped["dropped_edges"]}{merged}; self-loops: {counts["self_loops"]}; \
isolated nodes: {counts["isolated_nodes"]}
  {labels}
  splits: {splits}{dropped["dropped_seeds"]}; nodes without a label: {counts["unlabelled_nodes"]}"""


def _class_names(names: Sequence[str]) -> str:
    """Return lines with the names of the classes, and which differ by case, accents or blanks
    alone; "" for none."""
    alike = defaultdict(list)
    for name in names:
        letters = unicodedata.normalize("NFKD", name)
        plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
        alike[plain.casefold().strip()].append(repr(name))
    twins = [f"{' and '.join(spellings)}" for spellings in alike.values() if len(spellings) > 1]
    shown = [*map(repr, names[:_MOST_NAMES]), *["..."] * (len(names) > _MOST_NAMES)]
    lines = [f"\n  called {', '.join(shown)}"] if names else []
    lines += [f"\n  differ by case, accents or blanks alone: {'; '.join(twins)}"] if twins else []
    return "".join(lines)


def _class_size(store: Store, number: int, num_nodes: int) -> str:
    name = str(number) if store.label_name is None else repr(str(store.label_name[number]))
    return f"{name} with {num_nodes:,}"
