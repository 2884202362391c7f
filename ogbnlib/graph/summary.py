"""Counts that a conversion takes in the passes that it makes anyway."""

from typing import Any

import numpy as np

from ..errors import format_bytes
from .npz import Array
from .store import Store


def count_labels(sizes: Array, num_nodes: int) -> dict[str, Any]:
    """Return the entries of labels: `sizes` has the number of nodes of each class."""
    used = np.flatnonzero(sizes)
    entries: dict[str, Any] = {"unlabelled_nodes": num_nodes - int(sizes.sum())}
    if used.size:
        largest = int(sizes.argmax())
        smallest = int(used[sizes[used].argmin()])
        entries["largest_class"] = [largest, int(sizes[largest])]
        entries["smallest_class"] = [smallest, int(sizes[smallest])]
    return {**entries, "empty_classes": len(sizes) - len(used)}


def summarized(store: Store) -> str:
    """Return the text at the end of a conversion; one line for a store without counts."""
    text = f"{store.path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, store of "
    text += format_bytes(store.nbytes)
    if not store.summary:
        return text
    splits = ", ".join(f"{split} {count:,}" for split, count in store.num_seeds.items())
    unlabelled = f"nodes without a label: {store.summary['unlabelled_nodes']:,}"
    return "\n  ".join([text, _edges(store), _classes(store), f"splits: {splits}; {unlabelled}"])


def _edges(store: Store) -> str:
    counts = store.summary
    text = f"edges: {counts['edges_read']:,} read"
    if store.undirected:
        with_reverse = 2 * counts["edges_read"]
        text += (
            f" ({with_reverse:,} with their reverses, {counts['merged_edges']:,} of them merged)"
        )
    others = f"self-loops: {counts['self_loops']:,}; isolated nodes: {counts['isolated_nodes']:,}"
    return f"{text}; {others}"


def _classes(store: Store) -> str:
    parts = [f"classes: {store.num_classes:,}"]
    for size in ("largest", "smallest"):
        if f"{size}_class" in store.summary:
            number, num_nodes = store.summary[f"{size}_class"]
            parts.append(f"{size}: {_class_name(store, number)} with {num_nodes:,}")
    if store.summary["empty_classes"]:
        parts.append(f"without a node: {store.summary['empty_classes']:,}")
    return "; ".join(parts)


def _class_name(store: Store, number: int) -> str:
    if store.label_name is None:
        return str(number)
    name = store.label_name[number]
    return repr(name.decode() if isinstance(name, bytes) else str(name))
