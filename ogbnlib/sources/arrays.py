"""Arrays and torch tensors, as a `Source` or as a store."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, split_name
from ..files import StrPath
from ..graph import npz
from ..graph.npz import Array, slices
from ..graph.store import Store
from ..graph.store_format import SPLITS
from .convert import convert
from .labels import (
    MAX_CLASSES,
    by_node,
    check_num_classes,
    clean_labels,
    clean_targets,
    count_classes,
    refuse_several_labels,
)
from .source import Source, checked_edges


def from_arrays(
    name: str,
    edge_index: object,
    x: object,
    y: object,
    splits: object,
    num_classes: int | None = None,
    targets: bool = False,
) -> Source:
    """Check arrays or torch tensors and return them as a `Source`, without a copy where possible.

    The arguments are those of `store_from_arrays`.
    """
    edges = as_numpy(edge_index, "edge_index")  # [2, E]
    features = as_numpy(x, "x")  # [N, F]
    labels = as_numpy(y, "y")  # classes [N] or [N, 1], or targets [N] or [N, T]
    if features.ndim != 2 or 0 in features.shape:
        raise InputError(
            "x: expected features [N, F] of at least one node and feature, got shape "
            f"{list(features.shape)}"
        )
    num_nodes, num_features = features.shape
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype.kind not in "iu":
        raise InputError(
            f"edge_index: expected whole numbers [2, E], got {edges.dtype} {list(edges.shape)}; pass "
            "edge_index.T of [E, 2], edge_index.long() of floats"
        )
    _check_label_shape(labels, num_nodes, targets)
    check_num_classes(num_classes)
    if targets and num_classes is not None:
        raise InputError("num_classes: expected without targets, which have no classes")
    if targets:
        num_classes = 0  # the sign of targets in a `Source`
    elif num_classes is None:
        num_classes = count_classes(_label_chunks(labels, MAX_CLASSES), "y")
    ids_of = _split_ids(splits, num_nodes)  # int64 ids of each split

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        ends = zip(*(slices(row, chunk_edges) for row in edges), strict=True)  # (sources, targets)
        return checked_edges(ends, num_nodes, "edge_index")

    return Source(
        name=name,
        num_nodes=num_nodes,
        num_edges=edges.shape[1],
        num_features=num_features,
        num_classes=num_classes,
        feature_dtype=np.dtype(np.float16 if features.dtype == np.float16 else np.float32),
        edge_chunks=edge_chunks,
        x_chunks=lambda: slices(features, npz.CHUNK_BYTES // (features.itemsize * num_features)),
        label_chunks=lambda: _label_chunks(labels, num_classes),
        target_shape=labels.shape[1:] if targets else (),
        read_splits=lambda: dict(ids_of),  # a copy, since the caller may change it
        features_at="x",
    )


def _label_chunks(values: Array, num_classes: int) -> Iterator[Array]:
    chunks = slices(values, npz.CHUNK_BYTES // max(1, values[:1].nbytes))  # bytes of a row
    if not num_classes:
        yield from clean_targets(chunks, "y")  # float32 [n] or [n, T]
        return
    begin = 0  # node of the chunk's first label
    for chunk in chunks:
        labels = chunk.reshape(-1)  # [n, 1] as [n]
        yield clean_labels(labels, num_classes, by_node("y", labels, begin))
        begin += len(labels)


def store_from_arrays(
    path: StrPath,
    *,
    edge_index: object,
    x: object,
    y: object,
    splits: Mapping[str, object],
    num_classes: int | None = None,
    targets: bool = False,
    **options: Any,
) -> Store:
    """Write arrays or torch tensors as a store, in chunks; memory maps of any size stay on disk.

    Args:
        path: the new store's folder.
        edge_index: whole numbers [2, E]; row 0 has the sources, row 1 the destinations.
        x: features [N, F], finite.
        y: labels [N] or [N, 1]; -1 or NaN for an unlabelled node.
        splits: node ids, or boolean masks over all nodes, of train, valid (or val) and test.
        num_classes: by default the largest label plus one.
        targets: whether `y` has numbers [N] or [N, T] instead of classes, NaN for none, for your own
            training loop. They are stored as float32; ogbnlib's trainer refuses them.
        options: undirected, feature_dtype, standardize, memory_limit, progress: as in `convert`.
    """
    source = from_arrays(Path(path).absolute().name, edge_index, x, y, splits, num_classes, targets)
    return convert(source, path, **options)


def _check_label_shape(y: Array, num_nodes: int, targets: bool) -> None:
    if y.ndim not in (1, 2) or len(y) != num_nodes or not y.size:  # neither [N] nor [N, T]
        raise InputError(
            f"y: expected one label for each of {num_nodes} rows, got shape {list(y.shape)}"
        )
    if not targets and y.shape[1:] not in {(), (1,)}:
        refuse_several_labels("y", y.shape[1])


def _split_ids(splits: Any, num_nodes: int) -> dict[str, Array]:
    if not isinstance(splits, Mapping) or sorted(map(split_name, splits)) != sorted(SPLITS):
        raise InputError(
            f"splits: expected a dict with train, valid (or val) and test, got {splits!r:.200}"
        )
    ids_of = {
        split_name(split): as_ids(ids, num_nodes, f"splits[{split!r}]")
        for split, ids in splits.items()
    }
    return {split: ids_of[split] for split in SPLITS}  # in the order of `SPLITS`


def as_numpy(value: Any, name: str) -> Array:
    """Return an array or a torch tensor (on any device) as numpy, without a copy where possible."""
    # a sparse tensor of torch, or a matrix of scipy; without an import of either
    if str(getattr(value, "layout", "")).startswith("torch.sparse") or hasattr(value, "nnz"):
        raise InputError(
            f"{name}: expected a dense array, got a sparse one; an edge_index is torch_geometric.utils"
            ".to_edge_index(matrix)[0] if its rows are sources, and that .flip(0) if they are "
            "destinations, as in PyG's adj_t; for scipy it is from_scipy_sparse_matrix"
        )
    try:
        if hasattr(value, "detach"):  # a tensor
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: expected a numpy array or a torch tensor numpy can hold; {error}"
        ) from None
    if array.dtype.kind not in "fiub":  # float, int, unsigned or bool
        raise InputError(f"{name}: expected numbers, got {array.dtype}")
    return array


def as_ids(values: object, num_nodes: int, name: str, *, are_mask: bool = False) -> Array:
    """Return int64 node ids [n], unchecked, from ids [n] or from a mask [N] of booleans. With
    `are_mask`, refuse ids, and accept a mask of zeros and ones."""
    ids = as_numpy(values, name)
    is_mask = ids.dtype.kind == "b" or (are_mask and np.isin(ids, (0, 1)).all())
    if ids.ndim == 1 and is_mask:
        if len(ids) != num_nodes:
            raise InputError(f"{name}: found a mask of {len(ids)} values for {num_nodes} nodes")
        return np.flatnonzero(ids)  # the nodes whose value is true
    # an empty list is an array of float64, and has no ids
    if are_mask or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        hint = ""
        if ids.ndim == 2:
            hint = f"; of several masks pass one as splits, such as {name}[:, 0]"
        expected = f"a mask of {num_nodes} booleans" if are_mask else "node ids [n] or a mask [N]"
        raise InputError(f"{name}: expected {expected}, got {ids.dtype} {[*ids.shape]}{hint}")
    return ids.astype(np.int64)
