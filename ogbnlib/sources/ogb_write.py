"""Put any graph into OGB's binary layout, so that OGB's own loaders open it."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import InputError
from ..files import StrPath, new_folder, write_json
from ..graph import npz
from ..graph.npz import Array, NpzWriter
from ..graph.store import SPLITS
from .ogb import MAX_CLASSES, RawDataset, clean_labels, open_raw

RELEASE = "RELEASE_v1.txt"  # ogb asks on the terminal whether to update when it is missing
_MAPPING = """Node i is row i of node_feat and node_label in raw/; label c is class c. No outside identifiers are known.
"""


def _numpy(value: Any, name: str) -> Array:
    """An array or a torch tensor (on any device) as numpy, without a copy where there need be none."""
    try:
        array = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: expected a numpy array or a torch tensor numpy can hold; {error}") from None
    if array.dtype.kind not in "fiub":
        raise InputError(f"{name}: expected numbers, got {array.dtype}")
    return array


def _split_ids(splits: Mapping[str, Any], labels: Array) -> dict[str, Array]:
    """Checked int64 ids of the three splits, given as ids or as boolean masks over all nodes."""
    if not isinstance(splits, Mapping) or sorted(splits) != sorted(SPLITS):
        found = sorted(splits) if isinstance(splits, Mapping) else type(splits).__name__
        raise InputError(f"splits: expected a dict with train, valid and test, got {found}")
    num_nodes, checked = len(labels), {}
    taken = np.zeros(num_nodes, np.uint8)
    for number, name in enumerate(SPLITS, 1):
        where, ids = f"splits[{name!r}]", _numpy(splits[name], f"splits[{name!r}]")
        if ids.dtype.kind == "b" and ids.shape == (num_nodes,):
            ids = np.flatnonzero(ids)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise InputError(f"{where}: expected node ids [n], at least one, got {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= num_nodes:
            raise InputError(f"{where}: expected ids from 0 to {num_nodes - 1}, got {ids.min()} to {ids.max()}")
        if taken[ids].any():
            node = ids[taken[ids] > 0][0]
            raise InputError(f"{where}: expected no overlap, but node {node} is also in {SPLITS[taken[node] - 1]}")
        if len(np.unique(ids)) != len(ids):
            raise InputError(f"{where}: expected each node once, got {len(ids) - len(np.unique(ids))} repeats")
        if (labels[ids] < 0).any():
            raise InputError(f"{where}: expected labelled nodes, but node {ids[labels[ids] < 0][0]} has no label")
        taken[ids], checked[name] = number, ids.astype(np.int64)
    return checked


def write_layout(
    folder: Path,
    name: str,
    num_classes: int,
    splits: Mapping[str, Array],
    edge_rows: Sequence[Iterable[Array]],
    members: Mapping[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]],
    labels: Iterable[Array],
    num_edges: int,
) -> None:
    """Write OGB's binary layout into `folder` from chunks that are trusted; `members` must hold node_feat."""
    for part in ("raw", "split/time", "mapping", "processed"):  # ogb saves into processed/ without making it
        (folder / part).mkdir(parents=True)
    num_nodes, num_features = members["node_feat"][0]
    with NpzWriter(folder / "raw" / "data.npz") as data:
        data.write("edge_index", (2, num_edges), np.int64, (chunk for row in edge_rows for chunk in row))
        for member, (shape, dtype, chunks) in members.items():
            data.write(member, shape, dtype, chunks)
        data.write("num_nodes_list", (1,), np.int64, [np.array([num_nodes])])
        data.write("num_edges_list", (1,), np.int64, [np.array([num_edges])])
    with NpzWriter(folder / "raw" / "node-label.npz") as label:
        label.write("node_label", (num_nodes, 1), np.float32, labels)
    for split, ids in splits.items():
        with (
            open(folder / "split" / "time" / f"{split}.csv.gz", "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,  # no name, no time: same ids, same bytes
        ):
            packed.write("".join(f"{node}\n" for node in ids.tolist()).encode())
    (folder / "mapping" / "README.md").write_text(_MAPPING)
    (folder / RELEASE).touch()
    sizes = {"num_nodes": num_nodes, "num_edges": num_edges, "num_features": num_features, "num_classes": num_classes}
    write_json(folder / "meta.json", {"name": name, **sizes})


def _slices(array: Array, rows: int) -> Iterator[Array]:
    return (array[begin : begin + rows] for begin in range(0, len(array), rows))


def _checked_features(x: Array) -> Iterator[Array]:
    with np.errstate(over="ignore"):
        for chunk in _slices(x, max(1, npz.CHUNK_BYTES // (4 * max(1, x.shape[1])))):
            yield chunk.astype(np.float32, copy=False)


def write_raw(
    path: StrPath,
    *,
    edge_index: Any,
    x: Any,
    y: Any,
    splits: Mapping[str, Any],
    year: Any = None,
    num_classes: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> RawDataset:
    """Put any graph into OGB's binary layout, as ogbn-papers100M has it, so that OGB's own classes open it too.

    Everything is checked before anything is written, and the folder appears whole or not at all.

    Args:
        edge_index: whole numbers [2, E], source above destination; a numpy array or a torch tensor, as the others.
        x: features [N, F], finite; stored as float32.
        y: labels [N] or [N, 1]: -1 or NaN where there is none.
        splits: node ids, or boolean masks over all nodes, of train, valid and test.
        year: whole numbers [N] or [N, 1].
        num_classes: the largest label plus one when not given.
        overwrite: replace a data set that is there already; any other folder is still refused.

    Raises:
        InputError: naming the argument and what is wrong with it.
    """
    edge_index, x, y = _numpy(edge_index, "edge_index"), _numpy(x, "x"), _numpy(y, "y")
    if x.ndim != 2 or 0 in x.shape:
        raise InputError(f"x: expected features [N, F] of at least one node and feature, got shape {list(x.shape)}")
    num_nodes = len(x)
    if y.shape not in {(num_nodes,), (num_nodes, 1)}:
        raise InputError(f"y: expected one label for each of the {num_nodes} rows of x, got shape {list(y.shape)}")
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or edge_index.dtype.kind not in "iu":
        raise InputError(f"edge_index: expected whole numbers [2, E], got {edge_index.dtype} {list(edge_index.shape)}")
    num_edges = edge_index.shape[1]
    if num_edges and (edge_index.min() < 0 or edge_index.max() >= num_nodes):
        raise InputError(
            f"edge_index: expected node ids from 0 to {num_nodes - 1}, got {edge_index.min()} to {edge_index.max()}"
        )
    begin = 0
    for chunk in _checked_features(x):
        finite = np.isfinite(chunk).all(axis=1)
        if not finite.all():
            raise InputError(f"x: expected finite float32 values; row {begin + int(finite.argmin())} has others")
        begin += len(chunk)
    if num_classes is not None and (isinstance(num_classes, bool) or not 0 < num_classes <= MAX_CLASSES):
        raise InputError(f"num_classes: expected 1 to {MAX_CLASSES}, got {num_classes!r}")
    labels = clean_labels(y, num_classes or MAX_CLASSES, "y")
    if labels.max() < 0:
        raise InputError("y: expected at least one label, got none")
    num_classes = num_classes or int(labels.max()) + 1
    ids = _split_ids(splits, labels)
    members: dict[str, tuple[Sequence[int], DTypeLike, Iterable[Array]]] = {
        "node_feat": (x.shape, np.float32, _checked_features(x))
    }
    if year is not None:
        year = _numpy(year, "year")
        if year.shape not in {(num_nodes,), (num_nodes, 1)} or year.dtype.kind not in "iu":
            raise InputError(f"year: expected whole numbers [{num_nodes}], got {year.dtype} {list(year.shape)}")
        members["node_year"] = ((num_nodes, 1), np.int64, _slices(year, 2**20))
    with new_folder(path, overwrite) as folder:
        rows = [_slices(row, 2**20) for row in edge_index]
        floats = (np.where(chunk < 0, np.float32("nan"), chunk.astype(np.float32)) for chunk in _slices(labels, 2**20))
        write_layout(folder, name or Path(path).absolute().name, num_classes, ids, rows, members, floats, num_edges)
    return open_raw(path)
