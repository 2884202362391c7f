"""`Source`: any data set that can be written as a store or in OGB's layout."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..graph.array_checks import finite, from_one
from ..graph.node_set import NodeSet
from ..graph.npz import Array, slices
from ..graph.store import Store
from ..graph.store_format import Stamp, stamp
from ..graph.writer import check_for_training
from .description import Options
from .formats import files_of

_SLICE_VALUES = 2**18  # feature values that are standardized at a time: 2 MB of float64


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
        undirected: whether the edges already include the reverse of each edge.
        features_at: the place of the features, such as a file, for messages.
        feature_names: the name of each feature, [] if they have none.
        path: the data's folder; None for data in RAM, generated data and stores.
        stamps: path and `stamp` at opening of each file that is read.
        origin: facts that the new store records, such as the path of the data's folder.
        options: those of the data's `dataset.yaml`.
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
    target_shape: tuple[int, ...] = ()
    undirected: bool = False
    features_at: str = "features"
    feature_names: Sequence[str] = ()
    path: Path | None = None
    stamps: Sequence[tuple[Path, Stamp]] = field(default=(), repr=False)
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options: Options = field(default=Options(), repr=False)

    def check_unchanged(self) -> None:
        """Refuse files changed since opening; no checksum shows a mix of old and new data."""
        for file, before in self.stamps:
            # size, time and inode, without `changed_ns`, which a new mode or link changes, too
            if not file.exists() or stamp(file)[:3] != before[:3]:
                raise InputError(
                    f"{file}: it changed while it was read; start again when it is complete"
                )

    def where(self, split: str) -> str:
        """Return the file of a split for messages, or the argument if the data has no such file."""
        files = (str(file) for file, _ in self.stamps if file.name.split(".")[0] == split)
        return next(files, f"splits[{split!r}]")

    def columns(self, numbers: Sequence[int] | Array) -> str:
        """Return the names of the features with these numbers, at most 20, for messages."""
        names = self.feature_names or range(self.num_features)
        return ", ".join(repr(names[number]) for number in numbers[:20])


def stamped(paths: Iterable[Path]) -> list[tuple[Path, Stamp]]:
    """Return each file and its stamp; for a folder or pattern those of each part."""
    return [(file, stamp(file)) for path in paths for file in files_of(path)]


def aligned(streams: Sequence[Iterable[Array]]) -> Iterator[list[Array]]:
    """Yield the next rows of several streams, equally many of each.

    All streams have the same number of rows, in chunks of any sizes.
    """
    filled = [filter(len, stream) for stream in streams]  # without chunks of no rows
    pending = [np.empty(0) for _ in streams]  # rows read from each stream, not yet yielded
    while True:
        pending = [
            rows if len(rows) else next(stream, rows)  # stays empty at the end of the stream
            for rows, stream in zip(pending, filled, strict=True)
        ]
        count = min(map(len, pending))
        if count == 0:
            return
        yield [rows[:count] for rows in pending]
        pending = [rows[count:] for rows in pending]


def checked_edges(
    chunks: Iterable[tuple[Array, Array]], num_nodes: int, where: str
) -> Iterator[tuple[Array, Array]]:
    """Yield chunks of (sources, destinations) as int64; refuse ids that no node has."""
    begin = 0  # number of the chunk's first edge
    for chunk in chunks:
        pairs = np.stack([ids.astype(np.int64, copy=False) for ids in chunk])  # [2, n]
        if pairs.min() < 0 or pairs.max() >= num_nodes:
            wrong = int(((pairs < 0) | (pairs >= num_nodes)).any(axis=0).argmax())  # the first one
            raise InputError(
                f"{where}: expected node ids from 0 to {num_nodes - 1}, found edge {begin + wrong} "
                f"is {tuple(pairs[:, wrong].tolist())}{from_one(pairs, num_nodes)}"
            )
        yield pairs[0], pairs[1]
        begin += pairs.shape[1]


def from_store(store: Store) -> Source:
    """Return a store as a `Source`, which yields its data in the order of the store.

    Features in int8 are decoded to float32. A store of propagated features has no edges and is
    refused.
    """
    if store.hops is not None:
        raise InputError(
            f"{store.path}: expected a graph, found propagated features, which have no edges; "
            "convert the graph, and propagate it again"
        )
    check_for_training(store)  # `_targets` trusts the offsets

    def chunks(name: str) -> Iterator[Array]:
        return (part for _, part in store.chunks(name, checked=True))

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        for begin, sources in store.chunks("row", checked=True):  # `begin`: number of an edge
            for part in slices(sources, chunk_edges):
                yield part.astype(np.int64), _targets(store.colptr, begin, len(part))
                begin += len(part)

    names = store.files.get("node_name")  # None if nodes have no names
    return Source(
        name=store.name,
        num_nodes=store.num_nodes,
        num_edges=store.num_edges,
        num_features=store.num_features,
        num_classes=store.num_classes,
        feature_dtype=store.feature_dtype,
        edge_chunks=edge_chunks,
        x_chunks=lambda: map(store.decode, chunks("x")),
        label_chunks=lambda: chunks("y"),
        read_splits=lambda: dict(store.splits),  # a copy, since the caller may change it
        node_names=lambda: (np.dtype(names.dtype), chunks("node_name")) if names else None,
        label_names=None if store.label_name is None else np.char.encode(store.label_name, "utf-8"),
        target_shape=store.files["y"].shape[1:],
        features_at=str(store.file_path("x")),
        undirected=store.undirected,
        stamps=[(store.file_path(name), before) for name, before in store.stamps.items()],
        origin=store.origin,
    )


def _targets(colptr: Array, begin: int, count: int) -> Array:
    """Return the targets of `count` edges from edge `begin` on, int64 [count], by a search in the
    offsets, which reads few pages of the map, also where nodes have no edges."""
    edges = np.arange(begin, begin + count)
    # an edge's target is the last node whose offset is not above the edge's number
    first, last = np.searchsorted(colptr, edges[[0, -1]], side="right") - 1
    targets: Array = first + np.searchsorted(colptr[first : last + 2], edges, side="right") - 1
    return targets


def standardized(
    source: Source, which: bool | Sequence[str], train: Array, done: Callable[[int], object]
) -> Source:
    """Return the source with features of mean 0 and standard deviation 1 on the train nodes.

    Its origin has mean and deviation of each feature, 0 and 1 of those that stay as they are.

    Args:
        which: True for all features, or names and patterns of columns.
        train: int64 ids of the train nodes.
        done: called with the number of feature values after each slice of a pass over them.
    """
    if "standardized" in source.origin:
        raise InputError(f"standardize: {source.name} is standardized; convert the original data")
    if not len(train):
        raise InputError("standardize: expected nodes in the train split, found none")
    selected = _selected(source, which)
    mean, deviation = _scale(source, NodeSet(source.num_nodes, train), done)
    mean[~selected] = 0
    # Constant up to the rounding of float32: nothing to scale, and other splits may differ by far.
    deviation[~selected | (deviation <= 1e-6 * np.abs(mean))] = 1
    scale = {"mean": mean.tolist(), "deviation": deviation.tolist()}
    return replace(
        source,
        x_chunks=lambda: ((rows - mean) / deviation for rows in _feature_slices(source)),
        origin={**source.origin, "standardized": scale},
    )


def _selected(source: Source, which: bool | Sequence[str]) -> Array:
    """Return which features to standardize, bool [F]."""
    if isinstance(which, bool):
        return np.full(source.num_features, which)
    # a column `emb` of lists has the features emb[0], emb[1], ...; an array's have no names
    columns = [re.sub(r"\[\d+\]$", "", name) for name in source.feature_names]
    selected = np.zeros(source.num_features, bool)
    for pattern in map(str, which):
        matches = [
            pattern in (name, column) or fnmatchcase(column, pattern)
            for name, column in zip(source.feature_names, columns, strict=True)
        ]
        if not any(matches):
            known = f"true or some of {[*dict.fromkeys(columns)][:20]}"
            if not columns:
                known = "true, as these features have no names"
            raise InputError(f"standardize: expected {known}, found {pattern!r}")
        selected |= matches
    return selected


def _feature_slices(source: Source) -> Iterator[Array]:
    for chunk in source.x_chunks():
        yield from slices(chunk, _SLICE_VALUES // source.num_features)


def _scale(source: Source, train: NodeSet, done: Callable[[int], object]) -> tuple[Array, Array]:
    """Return mean and standard deviation of each feature on the train nodes, float64 [F]; slices are
    combined as by Chan, Golub and LeVeque (COMPSTAT 1982)."""
    count = 0  # train nodes so far
    mean = np.zeros(source.num_features)
    squares = np.zeros(source.num_features)  # sum of (value - mean) ** 2
    begin = 0  # first node of the slice
    for rows in finite(_feature_slices(source), np.float64, source.features_at):
        values = rows[train.contains(np.arange(begin, begin + len(rows)))]  # of train nodes
        if count == 0 and len(values):
            mean = values[0]  # then the differences of a constant column are exactly 0
        differences = values - mean
        shift = differences.sum(axis=0) / max(1, len(values))  # the slice's mean - mean
        share = len(values) / max(1, count + len(values))  # of the slice
        squares += ((differences - shift) ** 2).sum(axis=0) + shift**2 * count * share
        mean = mean + shift * share
        count += len(values)
        begin += len(rows)
        done(rows.size)
    if not np.isfinite(squares).all():
        wrong = source.columns(np.flatnonzero(~np.isfinite(squares)))
        raise InputError(f"standardize: the values of {wrong} are too large to have a deviation")
    return mean, np.sqrt(squares / count)
