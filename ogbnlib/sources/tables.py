"""Files of one's own as a `Source`: edges, features, labels and splits, each .npy, .csv, .csv.gz or .parquet.

Edges and features are streamed. Memory use is 4 bytes a node for labels, and about 50 for names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, unknown_name
from ..files import StrPath, home
from ..graph.checks import MAX_CLASSES, SPLITS, count_classes, finite, label_dtype
from ..graph.npz import Array, load, slices
from ..graph.store import is_store
from .data import Source, stamped

# `roles` and `graph.table` import pyarrow and pandas, and most runs have a store: they are imported on use.

_NAMES = {  # of each role's file
    "edges": ("edges", "edge_index"), "features": ("features", "x"), "labels": ("labels", "y"),
    "train": ("train", "train_mask"), "valid": ("valid", "val", "valid_mask", "val_mask"),
    "test": ("test", "test_mask"), "splits": ("splits",), "nodes": ("nodes",),
}  # fmt: skip
ROLES = tuple(_NAMES)
_CHUNK_NODES = 2**17
_ENDINGS = (".npy", ".parquet", ".csv", ".csv.gz")


def _candidates(folder: Path, role: str) -> list[Path]:
    return [file for name in _NAMES[role] for end in _ENDINGS if (file := folder / f"{name}{end}").is_file()]


def is_tables(folder: StrPath) -> bool:
    """Whether a folder holds a user's own edges or features, complete or not; nothing is read."""
    folder = Path(folder)
    return not is_store(folder) and any(_candidates(folder, role) for role in ("edges", "features"))


def find_files(folder: StrPath, chosen: Mapping[str, StrPath | None] | None = None) -> dict[str, Path]:
    """Return the file of each role: the `chosen` one, or the one of that name in `folder`."""
    folder, files = home(folder), dict[str, Path]()
    own = {role: home(file) for role, file in (chosen or {}).items() if file is not None}
    if unknown := [role for role in own if role not in ROLES]:
        raise InputError(f"files: {unknown_name(unknown[0], ROLES, 'role of a file')}")
    skipped = {"features"} if str(own.get("features")) in ("ones", "degree") else set()
    if ("splits" in own) != bool({*SPLITS} & {*own}):  # named files replace those in the folder
        skipped |= {*SPLITS} if "splits" in own else {"splits"}
    for role in (role for role in ROLES if role not in skipped):
        candidates = [own[role]] if role in own else _candidates(folder, role)
        if len(candidates) > 1:
            raise InputError(f"{folder}: expected one file of {role}, found {', '.join(f.name for f in candidates)}")
        for file in candidates:
            if not file.is_file() or not file.name.endswith(_ENDINGS):
                raise InputError(f"{file}: expected a file of {role} ({', '.join(_ENDINGS)}), found none")
            files[role] = file
    if "splits" in files and {*SPLITS} & {*files}:
        raise InputError(f"{folder}: expected either splits or train, valid and test, found both")
    required = ("edges", "features", "labels", *(() if "splits" in files else SPLITS))
    if missing := [role for role in required if role not in {*files, *skipped}]:
        hint = "; without features convert with --features ones, or degree" if "features" in missing else ""
        raise InputError(f"{folder}: expected files of {', '.join(missing)} ({', '.join(_ENDINGS)}), found none{hint}")
    return files


def stored_dtype(features: Path | None) -> np.dtype[Any]:
    """Return the dtype of a file's features in a store: float16 for an .npy file of float16, else float32."""
    is_half = features is not None and features.suffix == ".npy" and load(features).dtype == np.float16
    return np.dtype(np.float16 if is_half else np.float32)


def open_tables(
    folder: StrPath,
    *,
    relabel: bool = False,
    edge_columns: Sequence[str] | None = None,
    label_columns: Sequence[str] | None = None,
    id_column: str | None = None,
    num_classes: int | None = None,
    **files: StrPath | None,
) -> Source:
    """Open a user's own files for conversion: those in a folder by their names, or named one by one.

    Labels and splits are read here, and a csv file of features for the number of its rows. Standard error lists unused
    columns.

    Args:
        relabel: require names as ids; without it ids are names if the names are there.
        edge_columns: the columns of source and target; "1", "2" and so on where columns have no names, here as below.
        label_columns: the columns of the node and of its label, or of the label alone: row i is node i.
        id_column: the column of node ids in features, labels, nodes and splits, beside "node_id", "node" and "id".
        num_classes: the largest label plus one if None.
        files: paths of `edges`, `features` and so on, instead of those in the folder. `features` may be "ones",
            or "degree": log(1 + in-degree) and log(1 + out-degree), 8 bytes a node in memory.

    Raises:
        InputError: naming the file, the column, the row, and the expectation; for a column that is neither known nor
            named.
    """
    from ..graph.table import Nodes, Table
    from .roles import LABEL, NODE, Features, read_labels, read_split, read_splits, value_columns

    paths, path = find_files(folder, files), home(folder).resolve()
    stamps, known = stamped(paths), (id_column, *NODE) if id_column else NODE
    features = Features(paths["features"], known) if "features" in paths else None

    label_table, hint = Table(paths["labels"]), f"name them: --label-columns {NODE[0]},{LABEL[0]}, or that of labels"
    if label_columns is None:
        own, label = value_columns(label_table, known, LABEL, hint)
    else:
        if not 0 < len(label_columns) <= 2 or len({*label_columns} & {*label_table.names}) < len(label_columns):
            raise label_table.refusal(f"the columns {', '.join(label_columns)}", "check --label-columns")
        label, ids = label_columns[-1], label_table.one_of(known)
        own = label_columns[0] if len(label_columns) == 2 else None if ids == label else ids
        label_table.leave_out([own, label])

    names = None
    if "nodes" in paths:
        table = Table(paths["nodes"])
        if (column := table.one_of(known, alone=True)) is None:
            raise table.refusal(f"a column {known[0]}", "name it with --id-column")
        table.leave_out([column])
        names = (table, column)
    elif features is not None and features.own is not None:
        names = (features.table, features.own)
    if relabel and names is None:
        raise InputError(f"--relabel: {folder}: expected a file nodes, or a column {NODE[0]} of features, found none")
    if features is None and names is None and own is not None:
        raise InputError(f"{folder}: expected, without features, a file nodes, or a label for each node in order")
    num_nodes = (features or (names or [label_table])[0]).num_rows
    nodes = Nodes(num_nodes, paths.get("features", paths.get("nodes", paths["labels"])).name, names)

    edges, ends = Table(paths["edges"], "edges"), edge_columns
    if edge_columns is not None:
        if len({*edge_columns} & {*edges.names}) != 2 or len(edge_columns) != 2:
            raise edges.refusal(f"two columns {', '.join(edge_columns)}", "check --edge-columns")
    elif not edges.header and len(edges.names) == 2:
        ends = edges.names
    else:
        for pair in (("source", "target"), ("src", "dst")):
            columns = [column for end in pair if (column := edges.one_of([end])) is not None]
            ends = columns if ends is None and len(columns) == 2 else ends
    if ends is None:
        hint = "name them: --edge-columns SOURCE,TARGET (1,2 where they have no names); csv files need commas"
        raise edges.refusal("columns source and target, or two without names, of node ids", hint)
    edges.leave_out(ends)

    labels, class_names = read_labels(label_table, own, label, nodes, num_classes or MAX_CLASSES)
    if num_classes is None:
        kind = next((str(piece.values.type) for piece in label_table.column(label)), "")
        dtype = np.dtype(kind if kind.startswith(("int", "uint")) else float)
        num_classes = count_classes([labels], dtype, str(paths["labels"]))
    if "splits" in paths:
        splits = read_splits(paths["splits"], nodes, known)
    else:
        splits = {split: read_split(paths[split], nodes, (*known, "mask", *_NAMES[split])) for split in SPLITS}
    labels = labels.astype(label_dtype(num_classes))
    dtype, width = stored_dtype(paths.get("features")), 1 + (str(files.get("features")) == "degree")

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        for pieces in edges.batches(ends):
            src, dst = map(nodes, pieces)
            yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)

    def x_chunks() -> Iterator[Array]:
        if features is not None:
            return finite(features.chunks(nodes), dtype, str(paths["features"]))
        if width == 1:
            return slices(np.broadcast_to(np.ones(1, np.float32), (num_nodes, 1)), _CHUNK_NODES)
        degrees = np.zeros((num_nodes, 2), np.float32)
        for src, dst in edge_chunks(2**20):
            np.add.at(degrees[:, 0], dst, 1)
            np.add.at(degrees[:, 1], src, 1)
        return slices(np.log1p(degrees, out=degrees), _CHUNK_NODES)

    return Source(
        name=path.name, path=path, stamps=stamps, num_nodes=num_nodes, num_edges=edges.num_rows,
        num_features=features.width if features else width, num_classes=num_classes, feature_dtype=dtype,
        edge_chunks=edge_chunks, x_chunks=x_chunks, label_chunks=lambda: slices(labels, _CHUNK_NODES),
        read_splits=lambda: dict(splits), node_names=nodes.chunks, label_names=class_names,
    )  # fmt: skip
