"""A `Source` is anything that can be written as a store or in OGB's layout, such as arrays in
RAM."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import Stamp, stamp
from ..graph.array_checks import is_labelled
from ..graph.npz import Array, load
from ..graph.store import GraphSize
from .files.formats import files_of


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set, read in pieces; each call begins at the first one. Damage and wrong values are an
    `InputError`.

    Attributes:
        feature_dtype: of the features in a store.
        num_edges: at most; `edge_chunks` may leave some out.
        edge_chunks: yields (sources, destinations) int64, in range, at most as many at a time as
            its argument.
        x_chunks: yields rows of features [n, F] in any float dtype, unchecked.
        num_classes: 0 if the nodes have targets.
        label_chunks: yields labels: int16 or int64 [n], -1 for none; or targets: float32
            [n, *target_shape], NaN for none.
        read_splits: returns int64 ids of `SPLITS`, in this order, unchecked.
        node_names: returns the dtype of the nodes' names, and the names in order of the nodes; None
            without names.
        label_names: the names of the classes, UTF-8 bytes [C]; None if labels were numbers.
        year_chunks: yields years int64 [n]; None if the nodes have none. Only OGB's layout has
            them.
        undirected: each edge has its reverse already.
        features_at: where the features are, for messages.
        feature_names: the name of each feature, [] if they have none.
        path: the data's folder; None for data in RAM.
        stamps: the files that are read, with their `stamp` at opening, by the names that the
            store's origin has.
        generated: the store's origin, for generated data.
        options: undirected, feature_dtype and drop_unlabelled, for a conversion that is not told
            otherwise.
        save_options: writes the options into the data's folder if that was asked for; returns
            the stamp of the file.
    """

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    feature_dtype: np.dtype[np.generic]
    edge_chunks: Callable[[int], Iterator[tuple[Array, Array]]] = field(repr=False)
    x_chunks: Callable[[], Iterator[Array]] = field(repr=False)
    label_chunks: Callable[[], Iterator[Array]] = field(repr=False)
    read_splits: Callable[[], dict[str, Array]] = field(repr=False)
    node_names: Callable[[], tuple[np.dtype[np.generic], Iterator[Array]] | None] = field(
        default=lambda: None, repr=False
    )
    label_names: Array | None = field(default=None, repr=False)
    year_chunks: Callable[[], Iterator[Array]] | None = field(default=None, repr=False)
    target_shape: tuple[int, ...] = ()
    undirected: bool = False
    features_at: str = "features"
    feature_names: Sequence[str] = ()
    path: Path | None = None
    stamps: Mapping[str, tuple[Path, Stamp]] = field(default_factory=dict, repr=False)
    generated: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    save_options: Callable[[], Mapping[str, tuple[Path, Stamp]]] = field(default=dict, repr=False)

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
        splits = self.read_splits()
        if self.options.get("drop_unlabelled"):
            labelled = np.concatenate([is_labelled(chunk) for chunk in self.label_chunks()])
            # a conversion refuses ids out of range
            splits = {split: ids[labelled.take(ids, mode="clip")] for split, ids in splits.items()}
        num_seeds = {split: len(ids) for split, ids in splits.items()}
        return GraphSize(
            **self.facts(),
            num_seeds=num_seeds,
            feature_itemsize=self.feature_dtype.itemsize,
        )


def stamped(files: Mapping[str, Path]) -> dict[str, tuple[Path, Stamp]]:
    """Return the stamps of files, and of the parts of a folder or pattern."""
    return {
        name if file == path else f"{name}/{file.name}": (file, stamp(file))
        for name, path in files.items()
        for file in files_of(path)
    }


def origin_of(folder: Path, stamps: Mapping[str, tuple[Path, Stamp]]) -> dict[str, Any]:
    """Return the origin that a store records: the folder's path, and each file's size and mtime in
    ns."""
    return {
        "raw": str(folder.resolve()),
        "files": {name: [*before[:2]] for name, (_, before) in stamps.items()},
    }


def stored_dtype(features: Path | None) -> np.dtype[np.generic]:
    """Return the dtype of a file's features in a store: float16 for an .npy file of float16, else
    float32."""
    if features is not None and features.suffix.lower() == ".npy" and features.is_file():
        return np.dtype(np.float16 if load(features).dtype == np.float16 else np.float32)
    return np.dtype(np.float32)
