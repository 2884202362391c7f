"""Files of one's own as a `Source`: edges, features, labels and splits, each .npy, .csv, .csv.gz or .parquet.

| file | content |
|---|---|
| `edges` or `edge_index` | .npy [2, E]; or columns source and target (src and dst), or the only two, without names |
| `features` or `x` | row i is node i: .npy [N, F] of any number type; or columns of numbers, or one of lists |
| `labels` or `y` | numbers or text: .npy [N]; or one column, row i is node i; or columns node_id and label |
| `train`, `valid` (`val`), `test` | node ids; or a mask of N booleans, or of N zeros and ones |
| `splits`, instead of these three | columns node_id and split, or split alone: train, valid or val, test, or empty |
| `split/time/` (or `split/ANY/`), instead | train, valid and test, as OGB has them |
| `nodes` | where ids are names (text, or numbers that leave gaps): the name of each row of the features |

Names may also be a column of the features: `node_id`, `node` or `id`, or the first, of text. Edges and features are
streamed; memory use is 4 bytes a node for labels, and about 50 for names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, unknown_name
from ..files import StrPath, home
from ..graph.checks import MAX_CLASSES, SPLITS, count_classes, finite, label_dtype
from ..graph.npz import Array, slices
from ..graph.store import is_store
from .data import Source
from .ogb import split_folder

if TYPE_CHECKING:
    from ..graph.table import Nodes, Table

# `roles` and `graph.table` import pyarrow and pandas, and most runs have a store: they are imported on use.

_NAMES = {  # of each role's file
    "edges": ("edges", "edge_index"), "features": ("features", "x"), "labels": ("labels", "y"),
    "train": ("train", "train_mask"), "valid": ("valid", "val", "valid_mask", "val_mask"),
    "test": ("test", "test_mask"), "splits": ("splits",), "nodes": ("nodes",),
}  # fmt: skip
ROLES, REQUIRED = tuple(_NAMES), ("edges", "features", "labels")
MADE_FEATURES = ("ones", "degree")
_CHUNK_NODES = 2**17
_ENDINGS = (".npy", ".parquet", ".csv", ".csv.gz")


# Files ---------------------------------------------------------------------------------------------------------------


def origin_of_files(path: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the origin that a store records: the folder, and size and mtime in ns of each file."""
    stats = {role: file.stat() for role, file in files.items()}
    return {"raw": str(path), "files": {role: [stat.st_size, stat.st_mtime_ns] for role, stat in stats.items()}}


def _candidates(folder: Path, role: str) -> list[Path]:
    files = [folder / f"{name}{ending}" for name in _NAMES[role] for ending in _ENDINGS]
    return [file for file in files if file.is_file()]


def is_tables(folder: StrPath) -> bool:
    """Whether a folder holds a user's own edges or features, complete or not; nothing is read."""
    folder = Path(folder)
    return not is_store(folder) and any(_candidates(folder, role) for role in ("edges", "features"))


def find_files(folder: StrPath, chosen: Mapping[str, StrPath | None] | None = None) -> dict[str, Path]:
    """Return the file of each role: the `chosen` one, or the one of that name in `folder`.

    Raises:
        InputError: for files that are missing, of another kind, or ambiguous.
    """
    folder, files = home(folder), dict[str, Path]()
    own = {"valid" if role == "val" else role: home(file) for role, file in (chosen or {}).items() if file is not None}
    if unknown := [role for role in own if role not in ROLES]:
        raise InputError(f"files: {unknown_name(unknown[0], ROLES, 'role of a file')}")
    skipped = {"features"} if str(own.get("features")) in MADE_FEATURES else set()
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
    if splits := [role for role in (*SPLITS, "splits") if role in files]:
        if "splits" in splits and len(splits) > 1:
            raise InputError(f"{folder}: expected either splits or train, valid and test, found {', '.join(splits)}")
    elif (folder / "split").is_dir():  # as OGB has them, or without a folder in it
        inner = (
            split_folder(folder) if any(entry.is_dir() for entry in (folder / "split").iterdir()) else folder / "split"
        )
        files |= {role: file for role in SPLITS for file in _candidates(inner, role)[:1]}
    required = {*REQUIRED, *([] if "splits" in files else SPLITS)} - {*files, *skipped}
    if missing := [role for role in ROLES if role in required]:
        hint = "; without features convert with --features ones, or degree" if "features" in required else ""
        raise InputError(f"{folder}: expected files of {', '.join(missing)} ({', '.join(_ENDINGS)}), found none{hint}")
    return files


# All files of a graph ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableSource(Source):
    """A user's own files as a `Source`, from `open_tables`.

    Reading raises `InputError`, naming the file and the line or row, for damage and wrong values.
    """

    path: Path
    files: Mapping[str, Path]
    origin: Mapping[str, Any] = field(repr=False)  # as of `origin_of_files`
    file_dtype: np.dtype[Any]  # of the features in the file
    nodes: Nodes = field(repr=False)
    ends: tuple[Table, list[str]] = field(repr=False)
    features: Callable[[], Iterator[Array]] = field(repr=False)
    labels: Array = field(repr=False)  # as of `label_dtype`
    splits: Mapping[str, Array] = field(repr=False)
    class_names: Array | None = field(repr=False)

    def check_unchanged(self) -> None:
        now = origin_of_files(self.path, self.files)["files"]
        if changed := [str(file) for role, file in self.files.items() if now[role] != self.origin["files"][role]]:
            raise InputError(f"{', '.join(changed)}: changed while it was read; convert again")

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        table, columns = self.ends
        for pieces in table.batches(columns):
            src, dst = map(self.nodes, pieces)
            yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)

    def x_chunks(self) -> Iterator[Array]:
        return finite(self.features(), self.feature_dtype, str(self.files.get("features", "features")))

    def label_chunks(self) -> Iterator[Array]:
        return slices(self.labels, _CHUNK_NODES)

    def read_splits(self) -> dict[str, Array]:
        return dict(self.splits)

    def where(self, split: str) -> str:
        return str(self.files[split]) if split in self.files else f"{self.files['splits']}, split {split}"

    @property
    def label_names(self) -> Array | None:
        return self.class_names

    def name_chunks(self) -> tuple[np.dtype[Any], Iterator[Array]] | None:
        return None if self.nodes.names is None else self.nodes.chunks()


def stored_dtype(folder: StrPath) -> np.dtype[Any]:
    """Return the dtype of the features in a store of the files in `folder`."""
    from .roles import NODE, Features

    return _stored(Features(find_files(folder)["features"], NODE, True).dtype)


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float16 if dtype == np.float16 else np.float32)


def open_tables(
    folder: StrPath,
    *,
    relabel: bool = False,
    edge_columns: Sequence[str] | None = None,
    label_columns: Sequence[str] | None = None,
    id_column: str | None = None,
    num_classes: int | None = None,
    name: str | None = None,
    **files: StrPath | None,
) -> TableSource:
    """Open a user's own files for conversion: those in a folder by their names, or named one by one.

    Labels and splits are read here, and a csv file of features for the number of its rows. Standard error lists unused
    columns, and the column taken for the nodes' names without an id's name.

    Args:
        folder: with edges, features, labels, train, valid, test, and nodes where ids are names; each .npy, .parquet,
            .csv or .csv.gz, as at the top of this module.
        relabel: require names as ids; without it ids are names if the names are there. The store keeps them in
            `node_name.npy`.
        edge_columns: the columns of source and target; "1", "2" and so on where columns have no names, here as below.
        label_columns: the columns of the node and of its label, or of the label alone: row i is node i.
        id_column: the column of node ids in features, labels, nodes and splits; "node_id", "node" or "id" if None.
        num_classes: the largest label plus one if None.
        files: paths of `edges`, `features` and so on, instead of those in the folder. `features` may be "ones",
            or "degree": log(1 + in-degree) and log(1 + out-degree), 8 bytes a node in memory.

    Raises:
        InputError: naming the file, the column, the line or row, and the expectation; for a column that is neither
            known nor named.
    """
    from ..graph.table import Nodes
    from .roles import NODE, Features, Labels, edge_table, has_column, name_table, read_split, read_splits

    generated = str(files.get("features"))
    paths, path = find_files(folder, files), home(folder).resolve()
    origin, known = origin_of_files(path, paths), (id_column, *NODE) if id_column else NODE
    features = None if generated in MADE_FEATURES else Features(paths["features"], known, "nodes" in paths)
    label_file = Labels(paths["labels"], label_columns, known)
    names = name_table(paths["nodes"], known) if "nodes" in paths else None
    if names is None and features is not None and features.own is not None:
        names = (features.table, features.own)
    if relabel and names is None:
        raise InputError(
            f"--relabel: expected a file nodes, or a column {NODE[0]} in {paths['features'].name}, found none"
        )
    if features is None and names is None and label_file.own is not None:
        raise InputError(f"{folder}: expected, without features, a file nodes, or a label for each node in order")
    num_nodes = (features or (names or [label_file.table])[0]).num_rows
    nodes = Nodes(num_nodes, paths.get("features", paths.get("nodes", paths["labels"])).name, names)
    edges, ends = edge_table(paths["edges"], nodes, edge_columns)
    labels, class_names = label_file.read(nodes, num_classes or MAX_CLASSES)
    num_classes = num_classes or count_classes([labels], label_file.dtype, str(paths["labels"]))
    splits = (
        read_splits(paths["splits"], nodes, known)
        if "splits" in paths
        else {split: read_split(paths[split], nodes, known) for split in SPLITS}
    )
    others = [file for role, file in paths.items() if role != "edges"]
    if id_column and not any(has_column(file, id_column) for file in others):
        raise InputError(f"--id-column: expected a column {id_column!r} in another file than edges, found none")
    dtype = features.dtype if features else np.dtype(np.float32)
    source = TableSource(
        name=name or path.name, path=path, files=paths, origin=origin, num_nodes=num_nodes,
        num_features=features.width if features else 1 + (generated == "degree"), num_edges=edges.num_rows,
        num_classes=num_classes, feature_dtype=_stored(dtype), file_dtype=dtype, nodes=nodes, ends=(edges, ends),
        features=lambda: features.chunks(nodes) if features else _made_features(generated, source),
        labels=labels.astype(label_dtype(num_classes)), class_names=class_names, splits=splits,
    )  # fmt: skip
    return source


def _made_features(generated: str, source: TableSource) -> Iterator[Array]:
    """Features [n, 1] of ones; or [n, 2], log(1 + in-degree) and log(1 + out-degree), by a pass over the edges."""
    features = np.broadcast_to(np.ones(1, np.float32), (source.num_nodes, 1))
    if generated == "degree":
        degrees = np.zeros((source.num_nodes, 2), np.float32)
        for src, dst in source.edge_chunks():
            np.add.at(degrees[:, 0], dst, 1)
            np.add.at(degrees[:, 1], src, 1)
        features = np.log1p(degrees, out=degrees)
    return slices(features, _CHUNK_NODES)
