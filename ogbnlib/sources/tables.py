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
streamed; what is held is 4 bytes a node for labels, and about 50 where ids are names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, unknown_name
from ..files import StrPath, home
from ..graph.checks import MAX_CLASSES, SPLITS, count_classes, finite, label_dtype
from ..graph.npz import Array, slices
from ..graph.store import GraphSize, is_store
from ..graph.table import BATCH_ROWS, Nodes, Table
from .data import Source
from .roles import NODE, Features, Labels, check_named, leave_out, named, read_split, read_splits, refusal

_NAMES = {  # of each role's file
    "edges": ("edges", "edge_index"), "features": ("features", "x"), "labels": ("labels", "y"),
    "train": ("train", "train_mask"), "valid": ("valid", "val", "valid_mask", "val_mask"),
    "test": ("test", "test_mask"), "splits": ("splits",), "nodes": ("nodes",),
}  # fmt: skip
ROLES, REQUIRED = tuple(_NAMES), ("edges", "features", "labels")
MADE_FEATURES = ("ones", "degree")
_ENDS = (("source", "target"), ("src", "dst"))
_ENDINGS = (".npy", ".parquet", ".csv", ".csv.gz")


# Files ---------------------------------------------------------------------------------------------------------------


def origin_of_files(path: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """What a store says of the files it was made from: their folder, and each one's size and mtime in ns."""
    stats = {role: file.stat() for role, file in files.items()}
    return {"raw": str(path), "files": {role: [stat.st_size, stat.st_mtime_ns] for role, stat in stats.items()}}


def _candidates(folder: Path, role: str) -> list[Path]:
    found = [folder / f"{name}{ending}" for name in _NAMES[role] for ending in _ENDINGS]
    return [file for file in found if file.is_file()]


def is_tables(folder: StrPath) -> bool:
    """Whether a folder holds edges or features of one's own, complete or not; nothing is read."""
    folder = Path(folder)
    return not is_store(folder) and any(_candidates(folder, role) for role in ("edges", "features"))


def _split_folder(folder: Path) -> dict[str, Path]:
    """The files of the splits in a folder of one split or, as OGB's, of several."""
    inner = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    if len(inner) > 1 and folder / "time" not in inner:
        names = ", ".join(entry.name for entry in inner)
        raise InputError(f"{folder}: expected a folder time, or just one, found {names}; name --train, --valid, --test")
    chosen = folder if not inner else inner[0] if len(inner) == 1 else folder / "time"
    found = {role: _candidates(chosen, role) for role in SPLITS}
    return {role: files[0] for role, files in found.items() if files}


def find_files(folder: StrPath, given: Mapping[str, StrPath | None] | None = None) -> dict[str, Path]:
    """The file of each role: the `given` one, or the one of that name in `folder`.

    Raises:
        InputError: for files that are missing, of another kind, or there twice.
    """
    folder, found = home(folder), dict[str, Path]()
    named = {"valid" if role == "val" else role: file for role, file in (given or {}).items() if file is not None}
    for role in named:
        if role not in ROLES:
            raise InputError(f"files: {unknown_name(role, ROLES, 'role of a file')}")
    made, by_split = str(named.get("features")) in MADE_FEATURES, {*SPLITS} & {*named}
    skipped = {"features"} if made else set()
    if bool(by_split) != ("splits" in named):  # what is named is instead of what the folder has
        skipped |= {"splits"} if by_split else {*SPLITS}
    for role in (role for role in ROLES if role not in skipped):
        files = [home(named[role])] if role in named else _candidates(folder, role)
        if len(files) > 1:
            raise InputError(f"{folder}: expected one file of {role}, found {', '.join(f.name for f in files)}")
        if files and (not files[0].is_file() or not files[0].name.endswith(_ENDINGS)):
            found_here = f"{'one' if files[0].is_file() else 'none'} here"
            raise InputError(f"{files[0]}: expected a file of {role} ({', '.join(_ENDINGS)}), found {found_here}")
        found |= {role: files[0]} if files else {}
    own = [role for role in SPLITS if role in found]
    if own and "splits" in found:
        raise InputError(f"{folder}: expected either splits or train, valid and test, found splits and {own[0]}")
    if not own and "splits" not in found and (folder / "split").is_dir():
        found |= _split_folder(folder / "split")
    required = {*REQUIRED, *([] if "splits" in found else SPLITS)} - {*found, *skipped}
    if missing := [f"{role} ({', '.join(_ENDINGS)})" for role in ROLES if role in required]:
        hint = "; without features convert with --features ones, or degree" if "features" in required else ""
        raise InputError(f"{folder}: expected files of {', '.join(missing)}, found none; or name each of them{hint}")
    return found


# All files of a graph ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableSource(Source):
    """Files of one's own as a `Source`; `open_tables` makes one.

    Every read raises `InputError`, naming the file and the line or row, on damage and on values that cannot be.
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

    @property
    def size(self) -> GraphSize:
        """Its sizes."""
        num_seeds = {split: len(ids) for split, ids in self.splits.items()}
        return GraphSize(**self.facts(), num_seeds=num_seeds, feature_itemsize=self.feature_dtype.itemsize)

    def check_unchanged(self) -> None:
        """Refuse files that were replaced or written to since they were opened."""
        then, now = self.origin["files"], origin_of_files(self.path, self.files)["files"]
        if changed := [str(self.files[role]) for role in self.files if now[role] != then[role]]:
            raise InputError(f"{', '.join(changed)}: changed while it was read; convert again")

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        """(src, dst) int64 in the order of the file, at most `chunk_edges` at a time."""
        table, columns = self.ends
        for begin, batch in table.batches(columns):
            src, dst = (self.nodes(values, table.where, begin) for values in batch)
            yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)

    def x_chunks(self) -> Iterator[Array]:
        return finite(self.features(), self.feature_dtype, str(self.files.get("features", "features")))

    def label_chunks(self) -> Iterator[Array]:
        return slices(self.labels, BATCH_ROWS)

    def read_splits(self) -> dict[str, Array]:
        return dict(self.splits)

    def where(self, split: str) -> str:
        """What a sentence about a split begins with."""
        return str(self.files[split]) if split in self.files else f"{self.files['splits']}, split {split}"

    @property
    def label_names(self) -> Array | None:
        return self.class_names

    def name_chunks(self) -> tuple[np.dtype[Any], Iterator[Array]] | None:
        return None if self.nodes.names is None else self.nodes.chunks()


def stored_dtype(folder: StrPath) -> np.dtype[Any]:
    """Of a store's features, when it is made of the files in `folder`: their own, where that is float16."""
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
    """Open files of one's own, to be converted: those in a folder by their names, or named one by one.

    Labels and splits are read here, and of a csv file of features the number of its rows. What of a file is left out,
    and what is taken for the nodes' names where no name tells, is said on standard error.

    Args:
        folder: with edges, features, labels, train, valid, test, and nodes where ids are names; each .npy, .parquet,
            .csv or .csv.gz, as at the top of this module.
        relabel: insists on ids being names; without it they are where the names are given. The store keeps them in
            `node_name.npy`.
        edge_columns: the columns of source and target; "1", "2" and so on where columns have no names, here as below.
        label_columns: the columns of the node and of its label, or of the label alone: row i is node i.
        id_column: the column of node ids in features, labels, nodes and splits; "node_id", "node" or "id" if None.
        num_classes: the largest label plus one when not given.
        files: paths of `edges`, `features` and so on, where they are not those in the folder. `features` may be "ones",
            or "degree": log(1 + in-degree) and log(1 + out-degree), 8 bytes a node in memory.

    Raises:
        InputError: naming the file, the column, the line or row, and what was expected; for a column that is neither
            known nor named.
    """
    folder, made = home(folder), str(files.get("features"))
    found, path = find_files(folder, files), folder.resolve()
    origin, known = origin_of_files(path, found), (id_column, *NODE) if id_column else NODE
    features = None if made in MADE_FEATURES else Features(found["features"], known, "nodes" in found)
    label_file = Labels(found["labels"], label_columns, known)
    names = _names(found["nodes"], known) if "nodes" in found else None
    if names is None and features is not None and features.own is not None:
        names = (features.table, features.own)
    if relabel and names is None:
        raise InputError(
            f"--relabel: expected the id of each row of {found['features'].name}: a file nodes{_ENDINGS[2]} (.npy, "
            f".parquet), or in a table a column {NODE[0]}; found neither"
        )
    if features is None and names is None and label_file.own is not None:
        raise InputError(f"{folder}: expected, without features, a file nodes, or a label for each node in order")
    num_nodes = (features or (names or [label_file.table])[0]).num_rows
    nodes = Nodes(num_nodes, found.get("features", found.get("nodes", found["labels"])).name, names)
    edges, ends = _edges(found["edges"], nodes, edge_columns)
    labels, label_names = label_file.read(nodes, num_classes or MAX_CLASSES)
    counted = count_classes([labels], label_file.dtype, str(found["labels"]))
    num_classes = num_classes or counted
    splits = (
        read_splits(found["splits"], nodes, known)
        if "splits" in found
        else {split: read_split(found[split], nodes, known) for split in SPLITS}
    )
    tables = [file for role, file in found.items() if role != "edges" and file.suffix != ".npy"]
    if id_column and not any(Table(file, lambda first: id_column.isdigit(), "").one_of([id_column]) for file in tables):
        raise InputError(f"--id-column: expected a column {id_column!r} in a file beside edges, found none")
    dtype = np.dtype(np.float32) if features is None else features.dtype
    source = TableSource(
        name=name or path.name, path=path, files=found, origin=origin, num_nodes=num_nodes,
        num_features=features.width if features else 1 + (made == "degree"), num_edges=edges.num_rows,
        num_classes=num_classes, feature_dtype=_stored(dtype), file_dtype=dtype, nodes=nodes, ends=(edges, ends),
        features=lambda: features.chunks(nodes) if features else _made_features(made, source),
        labels=labels.astype(label_dtype(num_classes)), class_names=label_names, splits=splits,
    )  # fmt: skip
    return source


def _names(file: Path, known: Sequence[str]) -> tuple[Table, str]:
    """The table with the nodes' names, and their column."""
    table = Table(file, lambda first: not named(first, known), "ids [N]")
    column = table.one_of(known) or (table.names[0] if len(table.names) == 1 else None)
    if column is None:
        raise refusal(table, f"a column {known[0]}", "name it with --id-column")
    leave_out(table, [column])
    return table, column


def _edges(file: Path, nodes: Nodes, given: Sequence[str] | None) -> tuple[Table, list[str]]:
    """The table of edges, with its columns of sources and of targets."""
    table = Table(file, lambda first: not named(first, given or ()) and nodes.known(first), "node ids [2, E]")
    if len(table.names) < 2:
        expected = "expected a column of sources and one of targets, by commas in csv"
        raise InputError(f"{file}: {expected}, found {len(table.names)}")
    pairs = [[table.one_of([end]) for end in pair] for pair in _ENDS]
    pair: Any = next((pair for pair in pairs if None not in pair), None)
    if given is not None:
        check_named(table, given, (2,), "--edge-columns")
        pair = list(given)
    elif not table.header and len(table.names) == 2:
        pair = table.names
        if table.first == ["0", "1"]:  # pandas' default column names, or the edge 0 -> 1
            print(f"{file}: its first line, 0,1, is read as an edge; if it is a header, remove it", file=sys.stderr)
    elif pair is None:
        hint = "name those of sources and targets: --edge-columns SOURCE,TARGET (1,2 where they have no names)"
        raise refusal(table, "columns source and target, or two without names, of node ids", hint)
    leave_out(table, pair)
    return table, pair


def _made_features(made: str, source: TableSource) -> Iterator[Array]:
    """Features [n, 1] of ones; or [n, 2], log(1 + in-degree) and log(1 + out-degree), by a pass over the edges."""
    if made == "ones":
        yield from slices(np.broadcast_to(np.ones(1, np.float32), (source.num_nodes, 1)), BATCH_ROWS)
        return
    degrees = np.zeros((source.num_nodes, 2), np.float32)
    for src, dst in source.edge_chunks():
        np.add.at(degrees[:, 0], dst, 1)
        np.add.at(degrees[:, 1], src, 1)
    yield from map(np.log1p, slices(degrees, BATCH_ROWS))
