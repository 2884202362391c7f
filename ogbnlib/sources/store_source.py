"""A store as a `Source`, to convert it to another feature dtype or to add reverse edges."""

from collections.abc import Iterator

import numpy as np

from ..errors import InputError
from ..graph.npz import Array
from ..graph.store import Store
from .source import Source

_STEP_NODES = 2**16  # nodes whose edges are looked up at a time


def from_store(store: Store) -> Source:
    """Return a store as a `Source`, which yields its data in the order of the store.

    Chunks are read, not memory-mapped, except the offsets (`colptr`). Features in int8 are decoded
    to float32. A store of propagated features is refused, because it has no edges.
    """
    if store.hops is not None:
        raise InputError(
            f"{store.path}: expected a graph, found propagated features, which have no edges; "
            "convert the graph, and propagate it again"
        )

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        for _ in store.chunks("colptr", checked=True):
            pass  # only checks: `_targets` would search for ever with damaged offsets
        step = max(1, chunk_edges)
        node = 0
        for begin, sources in store.chunks("row", checked=True):
            for first in range(0, len(sources), step):
                part = sources[first : first + step]
                node, targets = _targets(store, node, begin + first, len(part))
                yield part.astype(np.int64), targets

    names = store.files.get("node_name")
    return Source(
        name=store.name,
        num_nodes=store.num_nodes,
        num_edges=store.num_edges,
        num_features=store.num_features,
        num_classes=store.num_classes,
        feature_dtype=store.feature_dtype,
        edge_chunks=edge_chunks,
        x_chunks=lambda: (store.decode(part) for _, part in store.chunks("x", checked=True)),
        label_chunks=lambda: (part for _, part in store.chunks("y", checked=True)),
        read_splits=lambda: dict(store.splits),
        node_names=lambda: (
            None
            if names is None
            else (np.dtype(names.dtype), (part for _, part in store.chunks("node_name")))
        ),
        label_names=None if store.label_name is None else np.char.encode(store.label_name, "utf-8"),
        target_shape=store.files["y"].shape[1:],
        features_at=str(store.file_path("x")),
        undirected=store.undirected,
        stamps={name: (store.file_path(name), before) for name, before in store.stamps.items()},
        generated=store.origin,
    )


def _targets(store: Store, node: int, begin: int, count: int) -> tuple[int, Array]:
    """Return the target of the last of `count` edges from edge `begin` on, and the targets of all,
    int64 [count].

    The search starts at `node`, which is at most the target of the first edge.
    """
    parts = [np.empty(0, np.int64)]
    num_targets = 0
    while num_targets < count:
        offsets = np.clip(store.colptr[node : node + _STEP_NODES + 1], begin, begin + count)
        nodes = np.arange(node, node + len(offsets) - 1)
        parts.append(np.repeat(nodes, np.diff(offsets)))
        num_targets += len(parts[-1])
        node += len(nodes)
    targets = np.concatenate(parts)
    return int(targets[-1]), targets
