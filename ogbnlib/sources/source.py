"""`Source`: any data set that can be written as a store or in OGB's layout, such as arrays in
RAM."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..graph.npz import Array
from ..graph.store import GraphSize
from ..graph.store_format import Stamp, stamp
from .formats import files_of


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set that is read in chunks.

    Each call of a function below starts at the first chunk. Damaged files and wrong values raise an
    `InputError`.

    Attributes:
        feature_dtype: dtype of the features in a store, unless the conversion sets another.
        num_edges: an upper bound; `edge_chunks` may leave out some edges.
        edge_chunks: yields (sources, destinations), int64 ids in range. Its argument is the largest
            number of edges per chunk.
        x_chunks: yields rows of features [n, F] in any float dtype, unchecked.
        num_classes: 0 if the nodes have targets.
        label_chunks: yields labels: int16 or int64 [n], -1 for none; or targets: float32
            [n, *target_shape], NaN for none.
        read_splits: returns the int64 node ids of each of `SPLITS`, in this order, unchecked.
        node_names: returns the dtype of the nodes' names and an iterator over chunks of the names,
            in the order of the nodes; None if nodes have no names.
        label_names: the names of the classes, UTF-8 bytes [C]; None if labels were numbers.
        year_chunks: yields years int64 [n]; None if the nodes have no years. Only OGB's layout
            stores them.
        undirected: whether the edges already include the reverse of each edge.
        features_at: the place of the features, such as a file, for messages.
        feature_names: the name of each feature, [] if they have none.
        path: the data's folder; None for data in RAM, generated data and stores.
        stamps: path and `stamp` at opening of each file that is read, by the file's name in the
            new store's `origin`.
        generated: the new store's `origin` if `path` is None.
        options: undirected and feature_dtype, the defaults of a conversion, and drop_unlabelled.
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

    def check_unchanged(self) -> None:
        """Refuse files that changed after they were opened.

        No checksum would reveal the mix of old and new data.
        """
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
        """Return the name and the sizes, which are the content of meta.json."""
        return {
            name: getattr(self, name)
            for name in ("name", "num_nodes", "num_edges", "num_features", "num_classes")
        }

    @property
    def size(self) -> GraphSize:
        num_seeds = {split: len(ids) for split, ids in self.read_splits().items()}
        return GraphSize(
            **self.facts(),
            num_seeds=num_seeds,
            feature_itemsize=self.feature_dtype.itemsize,
        )


def stamped(files: Mapping[str, Path]) -> dict[str, tuple[Path, Stamp]]:
    """Return path and stamp of each file, by name; a folder or pattern gives one per part."""
    return {
        name if file == path else f"{name}/{file.name}": (file, stamp(file))
        for name, path in files.items()
        for file in files_of(path)
    }


def origin_of(folder: Path, stamps: Mapping[str, tuple[Path, Stamp]]) -> dict[str, Any]:
    """Return the origin that a store records: the path of the data's folder, and the size and the
    mtime in ns of each file."""
    return {
        "raw": str(folder.resolve()),
        "files": {name: [*before[:2]] for name, (_, before) in stamps.items()},
    }
