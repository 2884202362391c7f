"""A `Source` is anything that can be written as a store or in OGB's layout, such as arrays in
RAM."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, Problems, format_bytes, split_name
from ..files import Stamp, stamp
from ..graph import npz
from ..graph.checks import (
    MAX_CLASSES,
    SPLITS,
    check_num_classes,
    clean_labels,
    count_classes,
    find_labels,
    finite,
    from_one,
    refuse_several_labels,
    split_problems,
)
from ..graph.formats import files_of
from ..graph.npz import Array, load, slices
from ..graph.store import GraphSize


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set, read in pieces; each call begins at the first one. Damage and wrong values are an
    `InputError`.

    Attributes:
        feature_dtype: of the features in a store.
        edge_chunks: yields (sources, destinations) int64, in range, at most as many at a time as
            its argument.
        x_chunks: yields rows of features [n, F] in any float dtype, unchecked.
        label_chunks: yields labels: int16 or int64 [n], -1 for none.
        read_splits: returns int64 ids of `SPLITS`, in this order, unchecked.
        node_names: returns the dtype of the nodes' names, and the names in order of the nodes; None
            without names.
        label_names: the names of the classes, UTF-8 bytes [C]; None if labels were numbers.
        year_chunks: yields years int64 [n]; None if the nodes have none. Only OGB's layout has
            them.
        path: the data's folder; None for data in RAM.
        stamps: the files that are read, with their `stamp` at opening, by the names that the
            store's origin has.
        generated: the store's origin, for generated data.
    """

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    feature_dtype: np.dtype[Any]
    edge_chunks: Callable[[int], Iterator[tuple[Array, Array]]] = field(repr=False)
    x_chunks: Callable[[], Iterator[Array]] = field(repr=False)
    label_chunks: Callable[[], Iterator[Array]] = field(repr=False)
    read_splits: Callable[[], dict[str, Array]] = field(repr=False)
    node_names: Callable[[], tuple[np.dtype[Any], Iterator[Array]] | None] = field(
        default=lambda: None, repr=False
    )
    label_names: Array | None = field(default=None, repr=False)
    year_chunks: Callable[[], Iterator[Array]] | None = field(default=None, repr=False)
    path: Path | None = None
    stamps: Mapping[str, tuple[Path, Stamp]] = field(default_factory=dict, repr=False)
    generated: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def check_unchanged(self) -> None:
        """Refuse files that changed since they were opened: a mix of old and new data has no wrong
        checksum."""
        for file, before in self.stamps.values():
            if not file.exists() or stamp(file) != before:
                raise InputError(
                    f"{file}: it changed while it was read; start again when it is complete"
                )

    def where(self, split: str) -> str:
        """Return the file of a split, for messages."""
        files = [
            file
            for name, (file, _) in self.stamps.items()
            if split in (name, file.name.split(".")[0])
        ]
        return str(files[0]) if files else f"{self.name}, split {split}"

    @property
    def origin(self) -> dict[str, Any]:
        return dict(self.generated) if self.path is None else origin_of(self.path, self.stamps)

    def facts(self) -> dict[str, Any]:
        """Return name and sizes, the content of meta.json."""
        return {
            name: getattr(self, name)
            for name in ("name", "num_nodes", "num_edges", "num_features", "num_classes")
        }

    @property
    def size(self) -> GraphSize:
        num_seeds = {split: len(ids) for split, ids in self.read_splits().items()}
        return GraphSize(
            **self.facts(), num_seeds=num_seeds, feature_itemsize=self.feature_dtype.itemsize
        )


def stamped(files: Mapping[str, Path]) -> dict[str, tuple[Path, Stamp]]:
    """Return the stamps of files, and of the parts of a folder or pattern."""
    stamps = {}
    for name, path in files.items():
        for file in files_of(path):
            stamps[name if file == path else f"{name}/{file.name}"] = (file, stamp(file))
    return stamps


def origin_of(folder: Path, stamps: Mapping[str, tuple[Path, Stamp]]) -> dict[str, Any]:
    """Return the origin that a store records: the folder's path, and each file's size and mtime in
    ns."""
    return {
        "raw": str(folder.resolve()),
        "files": {name: [*before[:2]] for name, (_, before) in stamps.items()},
    }


def from_arrays(
    name: str,
    edge_index: Any,
    x: Any,
    y: Any,
    splits: Mapping[str, Any],
    num_classes: int | None = None,
) -> Source:
    """Check arrays or torch tensors, without a copy where possible; see `ogb.write_raw`."""
    edge_index, x, y = as_numpy(edge_index, "edge_index"), as_numpy(x, "x"), as_numpy(y, "y")
    if x.ndim != 2 or 0 in x.shape:
        raise InputError(
            f"x: expected features [N, F] of at least one node and feature, got shape {list(x.shape)}"
        )
    num_nodes = len(x)
    if y.shape not in {(num_nodes,), (num_nodes, 1)}:
        if len(y) == num_nodes and y.ndim == 2:
            refuse_several_labels(y, "y", "y")
        raise InputError(
            f"y: expected one label for each of {num_nodes} rows, got shape {list(y.shape)}"
        )
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or edge_index.dtype.kind not in "iu":
        raise InputError(
            f"edge_index: expected whole numbers [2, E], got {edge_index.dtype} "
            f"{list(edge_index.shape)}; pass edge_index.T of [E, 2], edge_index.long() of floats"
        )
    if edge_index.size and (edge_index.min() < 0 or edge_index.max() >= num_nodes):
        actual = f"{edge_index.min()} to {edge_index.max()}{from_one(edge_index, num_nodes)}"
        raise InputError(f"edge_index: expected node ids from 0 to {num_nodes - 1}, got {actual}")
    check_num_classes(num_classes)
    labels = clean_labels(y, int(num_classes or MAX_CLASSES), "y")
    num_classes = int(num_classes or count_classes([labels], y.dtype, "y"))
    _refuse_labels(x, labels)
    names = (
        sorted(map(split_name, splits)) if isinstance(splits, Mapping) else type(splits).__name__
    )
    if names != sorted(SPLITS):
        raise InputError(
            f"splits: expected a dict with train, valid (or val) and test, got {names}"
        )
    ids_of = {
        split_name(split): as_ids(ids, num_nodes, f"splits[{split!r}]")
        for split, ids in splits.items()
    }
    ids_of = {split: ids_of[split] for split in SPLITS}
    problems = Problems()
    for split, problem in split_problems(ids_of, num_nodes, lambda nodes: labels[nodes] >= 0):
        problems.add(f"splits[{split!r}]: {problem}")
    problems.refuse()
    dtype = x.dtype if x.dtype in (np.float16, np.float32) else np.dtype(np.float32)
    for _ in finite(slices(x, npz.CHUNK_BYTES // (x.itemsize * x.shape[1])), dtype, "x"):
        pass

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        for src, dst in zip(*(slices(row, chunk_edges) for row in edge_index), strict=True):
            yield src.astype(np.int64, copy=False), dst.astype(np.int64, copy=False)

    return Source(
        name=name, num_nodes=num_nodes, num_edges=edge_index.shape[1], num_features=x.shape[1],
        num_classes=num_classes, feature_dtype=dtype, edge_chunks=edge_chunks,
        x_chunks=lambda: slices(x, npz.CHUNK_BYTES // (x.itemsize * x.shape[1])),
        label_chunks=lambda: slices(labels, npz.CHUNK_BYTES // labels.itemsize), read_splits=lambda: dict(ids_of),
    )  # fmt: skip


def _refuse_labels(x: Array, labels: Array) -> None:
    """Refuse columns of features that hold nothing but the labels."""
    rows = max(1, npz.CHUNK_BYTES // (x.itemsize * x.shape[1]))
    copies = find_labels(lambda: slices(x, rows), labels, x.shape[1])
    if copies is None or copies.by_chance:
        return
    text = "equal to the labels" if copies.equal else "the labels in other numbers"
    raise InputError(
        f"x, columns {copies.columns} (from 0): {text}, on all labelled nodes; training would see "
        f"them; remove them: numpy.delete(x, {copies.columns}, axis=1)"
    )


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse matrix of torch, torch_sparse or scipy."""
    layout = str(getattr(value, "layout", ""))
    return layout.startswith("torch.sparse") or hasattr(value, "nnz")


def sparse_remedy(name: str, function: str = "to_edge_index") -> str:
    """Return how the sparse adjacency matrix `name` becomes an edge_index."""
    return (
        f"torch_geometric.utils.{function}({name})[0] if its rows are sources, and that .flip(0) "
        "if they are destinations, as in PyG's adj_t"
    )


def _refuse_sparse(value: Any, name: str) -> None:
    if not is_sparse(value):
        return
    shape = list(value.shape if hasattr(value, "shape") else value.sizes())
    text = f"{name}: expected a dense array, got a sparse one of shape {shape}"
    if name == "edge_index":
        of_scipy = type(value).__module__.startswith("scipy")
        function = "from_scipy_sparse_matrix" if of_scipy else "to_edge_index"
        raise InputError(f"{text}; pass {sparse_remedy(name, function)}")
    dense_bytes = 4 * math.prod(shape)
    raise InputError(f"{text}, which takes {format_bytes(dense_bytes)} as dense float32")


def as_numpy(value: Any, name: str) -> Array:
    """Return an array or a torch tensor (on any device) as numpy, without a copy where possible."""
    _refuse_sparse(value, name)
    try:
        # exact in float32
        value = value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: expected a numpy array or a torch tensor numpy can hold; {error}"
        ) from None
    if array.dtype.kind not in "fiub":
        raise InputError(f"{name}: expected numbers, got {array.dtype}")
    return array


def as_ids(values: Any, num_nodes: int, name: str) -> Array:
    """Return int64 node ids, unchecked, from ids [n] or from a mask [N] of booleans, or of zeros
    and ones."""
    ids = as_numpy(values, name)
    # Two whole numbers may be ids; more that are all 0 or 1 would repeat ids.
    is_mask = ids.dtype.kind == "b" or (ids.size > 2 and bool(np.isin(ids, (0, 1)).all()))
    if ids.ndim == 1 and is_mask:
        if len(ids) != num_nodes:
            raise InputError(f"{name}: found a mask of {len(ids)} values for {num_nodes} nodes")
        ids = np.flatnonzero(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        hint = (
            f"; of several masks pass one as splits, such as {name}[:, 0]" if ids.ndim == 2 else ""
        )
        expected = f"expected node ids [n] or a mask of {num_nodes} booleans"
        raise InputError(f"{name}: {expected}, got {ids.dtype} {list(ids.shape)}{hint}")
    return ids.astype(np.int64)


def stored_dtype(features: Path | None) -> np.dtype[Any]:
    """Return the dtype of a file's features in a store: float16 for an .npy file of float16, else
    float32."""
    if features is not None and features.suffix == ".npy" and features.is_file():
        return np.dtype(np.float16 if load(features).dtype == np.float16 else np.float32)
    return np.dtype(np.float32)
