"""Files of one's own as a `Source`: edges, features, labels and splits, each .npy, .csv, .csv.gz or .parquet.

| file | content |
|---|---|
| `edges` | .npy whole numbers [2, E]; or columns source and target (src and dst; else the first two, which is said) |
| `features` | row i is node i: .npy [N, F] of any number type; or columns of numbers, or one of lists |
| `labels` | row i is node i: .npy [N]; or one column; or a column of node ids and one of labels, in any order |
| `train`, `valid`, `test` | node ids; or a mask of N booleans |
| `nodes` | where ids are names (text, or numbers that leave gaps): the name of each row of the features |

Names may also be a column of the features: `node_id`, `node` or `id`, or the first, of text. All is streamed; what is
held is 18 bytes a node where ids are names, and the labels where they come in an order of their own.
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
from ..graph.checks import MAX_CLASSES, SPLITS, clean_labels, count_classes, finite
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import GraphSize
from ..graph.table import BATCH_ROWS, Names, Rows, Table, is_number, numbers, slices
from .data import Source

REQUIRED = ("edges", "features", "labels", *SPLITS)
ROLES = (*REQUIRED, "nodes")
_ENDINGS = (".npy", ".parquet", ".csv", ".csv.gz")
_ENDS = [("source", "target"), ("src", "dst")]
_NODE, _LABEL = ("node_id", "node", "id"), ("label", "y", "class")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # standard output belongs to the caller


def _load(file: Path) -> Array:
    """An .npy file, mapped."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{file}: expected a numpy array without objects, found otherwise ({error})") from None
    return array


def _open(file: Path, is_data: Callable[[list[str]], bool] = lambda first: is_number(first[-1])) -> Array | Table:
    return _load(file) if file.suffix == ".npy" else Table(file, is_data)


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
    ids: Rows | Names = field(repr=False)
    ends: tuple[Array | Table, list[str]] = field(repr=False)
    features: tuple[Array | Table, list[str]] = field(repr=False)
    labels: Callable[[], Iterator[Array]] = field(repr=False)

    @property
    def size(self) -> GraphSize:
        """Its sizes; the split files are read."""
        num_seeds = {split: len(ids) for split, ids in self.read_splits().items()}
        return GraphSize(**self.facts(), num_seeds=num_seeds, feature_itemsize=self.feature_dtype.itemsize)

    def check_unchanged(self) -> None:
        """Refuse files that were replaced or written to since they were opened."""
        then, now = self.origin["files"], origin_of_files(self.path, self.files)["files"]
        if changed := [str(self.files[role]) for role in self.files if now[role] != then[role]]:
            raise InputError(f"{', '.join(changed)}: changed while it was read; convert again")

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        """(src, dst) int64 in the order of the file, at most `chunk_edges` at a time."""
        edges, columns = self.ends
        begin = 0
        if isinstance(edges, Table):
            for batch in edges.batches(dict.fromkeys(columns, self.ids.type)):
                src, dst = (self.ids(values, edges.where, begin) for values in batch)
                begin += len(src)
                yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)
            return
        where = f"{self.files['edges']}, edge {{}}".format
        for begin in range(0, edges.shape[1], chunk_edges):
            src, dst = (self.ids(row[begin : begin + chunk_edges], where, begin) for row in edges)
            yield src, dst

    def x_chunks(self) -> Iterator[Array]:
        return finite(
            _feature_chunks(*self.features, self.num_features), self.feature_dtype, str(self.files["features"])
        )

    def label_chunks(self) -> Iterator[Array]:
        return _cleaned(self.labels, self.num_classes, self.files["labels"])

    def read_splits(self) -> dict[str, Array]:
        return {split: _split(self.files[split], self.ids) for split in SPLITS}

    def where(self, split: str) -> str:
        """What a sentence about a split begins with."""
        return str(self.files[split])

    def name_chunks(self) -> tuple[np.dtype[Any], Iterator[Array]] | None:
        return (self.ids.dtype, self.ids.chunks()) if isinstance(self.ids, Names) else None


def origin_of_files(path: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    """What a store says of the files it was made from: their folder, and each one's size and mtime in ns."""
    stats = {role: file.stat() for role, file in files.items()}
    return {"raw": str(path), "files": {role: [stat.st_size, stat.st_mtime_ns] for role, stat in stats.items()}}


def stored_dtype(folder: StrPath) -> np.dtype[Any]:
    """Of a store's features, when it is made of the files in `folder`: their own, where that is float16."""
    return _stored(_features(find_files(folder)["features"])[3])


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float16 if dtype == np.float16 else np.float32)


def _cleaned(labels: Callable[[], Iterator[Array]], num_classes: int, file: Path) -> Iterator[Array]:
    begin = 0
    for values in labels():
        yield clean_labels(values, num_classes, str(file), begin)
        begin += len(values)


def is_tables(folder: StrPath) -> bool:
    """Whether a folder holds edges or features of one's own, complete or not; nothing is read."""
    return any((Path(folder) / f"{role}{ending}").is_file() for role in REQUIRED[:2] for ending in _ENDINGS)


def find_files(folder: StrPath, given: Mapping[str, StrPath | None] | None = None) -> dict[str, Path]:
    """The file of each role: the `given` one, or the one of that name in `folder`.

    Raises:
        InputError: for files that are missing, of another kind, or there twice.
    """
    folder, found, missing = home(folder), dict[str, Path](), list[str]()
    named = {role: home(file) for role, file in (given or {}).items() if file is not None}
    for role in named:
        if role not in ROLES:
            raise InputError(f"files: {unknown_name(role, ROLES, 'role of a file')}")
    for role in ROLES:
        names = [f"{name}{ending}" for name in (role, *["val"] * (role == "valid")) for ending in _ENDINGS]
        files = [named[role]] if role in named else [folder / n for n in names if (folder / n).is_file()]
        if len(files) > 1:
            raise InputError(f"{folder}: expected one file of {role}, found {', '.join(f.name for f in files)}")
        if not files:
            missing += [f"{role} ({', '.join(_ENDINGS)})"] if role in REQUIRED else []
        elif not files[0].is_file() or not files[0].name.endswith(_ENDINGS):
            found_here = f"{'one' if files[0].is_file() else 'none'} here"
            raise InputError(f"{files[0]}: expected a file of {role} ({', '.join(_ENDINGS)}), found {found_here}")
        else:
            found[role] = files[0]
    if missing:
        raise InputError(f"{folder}: expected files of {', '.join(missing)}, found none; or name each of them")
    return found


def open_tables(
    folder: StrPath,
    *,
    relabel: bool = False,
    edge_columns: Sequence[str] | None = None,
    num_classes: int | None = None,
    name: str | None = None,
    **files: StrPath | None,
) -> TableSource:
    """Open files of one's own, to be converted: those in a folder by their names, or named one by one.

    The number of rows of a csv file takes a pass over it. What of a file is not kept, and what is taken for what where
    the columns' names do not tell, is said on standard error.

    Args:
        folder: with edges, features, labels, train, valid, test, and nodes where ids are names; each .npy, .parquet,
            .csv or .csv.gz, as at the top of this module.
        relabel: insists on ids being names; without it they are where the names are given. The store keeps them in
            `node_name.npy`.
        edge_columns: the columns of source and target.
        num_classes: the largest label plus one when not given.
        files: paths of `edges`, `features` and so on, where they are not those in the folder.

    Raises:
        InputError: naming the file, the column, the line or row, and what was expected.
    """
    folder = home(folder)
    found = find_files(folder, files)
    path = folder.resolve()
    origin = origin_of_files(path, found)
    features, columns, own_names, file_dtype, width = _features(found["features"])
    num_nodes = features.num_rows if isinstance(features, Table) else len(features)
    if num_nodes == 0:
        raise InputError(f"{found['features']}: expected a row for each node, found none")
    if relabel and "nodes" not in found and own_names is None:
        raise InputError(
            f"--relabel: expected the id of each row of {found['features'].name}: a file nodes{_ENDINGS[2]} (.npy, "
            f".parquet), or in a table a column {_NODE[0]}; found neither"
        )
    ids: Rows | Names
    if "nodes" in found:
        nodes = _open(found["nodes"], lambda first: first[0].lower() not in _NODE)
        if not isinstance(nodes, Table) and (nodes.ndim != 1 or nodes.dtype.kind not in "iuSU"):
            raise InputError(f"{found['nodes']}: expected ids [N], found {nodes.dtype} {list(nodes.shape)}")
        column = nodes.one_of(_NODE) or nodes.names[0] if isinstance(nodes, Table) else ""
        ids = Names(num_nodes, nodes, column, found["nodes"])
    elif own_names is not None:
        ids = Names(num_nodes, features, own_names, found["features"])
    else:
        ids = Rows(num_nodes, found["features"])
    edges, pair = _edges(found["edges"], ids, edge_columns)
    labels, num_labels, label_dtype = _labels(found["labels"], ids)
    if num_labels != num_nodes:
        raise InputError(f"{found['labels']}: expected {num_nodes} labels, one for each row of "
                         f"{found['features'].name}, found {num_labels}")  # fmt: skip
    if num_classes is None:
        chunks = _cleaned(labels, MAX_CLASSES, found["labels"])
        num_classes = count_classes(chunks, label_dtype, str(found["labels"]))
    return TableSource(
        name=name or path.name, path=path, files=found, origin=origin, num_nodes=num_nodes, num_features=width,
        num_edges=edges.num_rows if isinstance(edges, Table) else edges.shape[1], num_classes=num_classes,
        feature_dtype=_stored(file_dtype), file_dtype=file_dtype,
        ids=ids, ends=(edges, pair), features=(features, columns), labels=labels,
    )  # fmt: skip


def _features(file: Path) -> tuple[Array | Table, list[str], str | None, np.dtype[Any], int]:
    """The features: mapped, or a table with its columns of numbers and of ids; their dtype, and how many they are."""
    import pyarrow as pa

    table = _open(file)
    if not isinstance(table, Table):
        if table.ndim != 2 or 0 in table.shape or table.dtype.kind not in "fiub":
            found = f"{table.dtype} {list(table.shape)}"
            raise InputError(f"{file}: expected features [N, F], numbers, at least one of each, found {found}")
        return table, [], None, table.dtype, table.shape[1]
    texts = [name for name, kind in table.types.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)]
    own = table.one_of(_NODE) or (texts[0] if texts == table.names[:1] else None)
    columns = [name for name in table.names if name != own]
    lists = [name for name in columns if hasattr(table.types[name], "value_type")]
    for name in columns:
        kind = table.types[name].value_type if name in lists else table.types[name]
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
            raise InputError(f"{file}, column {name}: expected numbers, found {kind}; leave it out of the file")
    if not columns or (lists and len(columns) > 1):
        raise InputError(f"{file}: expected columns of numbers, or one of lists, found {', '.join(columns) or 'none'}")
    half = all(str(table.types[name]).endswith(("halffloat", "halffloat>")) for name in columns)
    width = len(columns)
    if lists:
        width = len(next(table.batches({columns[0]: table.types[columns[0]]}))[0][0])
    return table, columns, own, np.dtype(np.float16 if half else np.float32), width


def _feature_chunks(table: Array | Table, columns: list[str], width: int) -> Iterator[Array]:
    """Rows of features [n, F] in the file's own dtype; float64 of columns that differ."""
    if not isinstance(table, Table):
        yield from slices(table, CHUNK_BYTES // (table.itemsize * width))
        return
    begin = 0
    for batch in table.batches({name: table.types[name] for name in columns}):
        rows = max(1, CHUNK_BYTES // (8 * width))
        for first in range(0, len(batch[0]), rows):
            parts = [column[first : first + rows] for column in batch]
            if hasattr(parts[0].type, "value_type"):
                values = numbers(parts[0].flatten())
                if parts[0].null_count or len(values) != len(parts[0]) * width:
                    raise InputError(f"{table.where(begin + first)} and after: expected lists of {width} numbers each")
                yield values.reshape(-1, width)
            else:
                yield np.stack([numbers(part) for part in parts], axis=1)
        begin += len(batch[0])


def _edges(file: Path, ids: Rows | Names, columns: Sequence[str] | None) -> tuple[Array | Table, list[str]]:
    """The edges: mapped; or a table with its columns of sources and destinations."""
    edges = _open(file, lambda first: len(first) > 1 and ids.known(first[:2]))
    if not isinstance(edges, Table):
        if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iuSU":
            hint = "; transpose it" if edges.ndim == 2 and edges.shape[1] == 2 else ""
            raise InputError(f"{file}: expected node ids [2, E], found {edges.dtype} {list(edges.shape)}{hint}")
        return edges, []
    if len(edges.names) < 2 or not all(edges.names[:2]):
        raise InputError(
            f"{file}: expected a column of sources and one of destinations, by commas in csv, found {len(edges.names)}"
        )
    if columns is not None:
        if len(columns) != 2 or (missing := [name for name in columns if name not in edges.names]):
            wrong = f"no {missing[0]}" if len(columns) == 2 else f"{len(columns)} names"
            raise InputError(f"{file}: expected two of its columns, {', '.join(edges.names)}, found {wrong}")
        return edges, list(columns)
    for pair in _ENDS:
        found = [name for name in (edges.one_of([end]) for end in pair) if name is not None]
        if len(found) == 1:
            raise InputError(f"{file}: expected columns {' and '.join(pair)}, found {', '.join(edges.names)}")
        if found:
            return edges, found
    pair_found = edges.names[:2]
    if edges.header:
        _say(f"{file}: column {pair_found[0]} is taken for the sources, {pair_found[1]} for the destinations")
    if len(edges.names) > 2:
        _say(f"{file}: columns beyond the first two are not kept")
    return edges, pair_found


def _labels(file: Path, ids: Rows | Names) -> tuple[Callable[[], Iterator[Array]], int, np.dtype[Any]]:
    """What gives the labels in order of the nodes, in pieces; how many there are, and their dtype in the file."""
    import pyarrow as pa

    table = _open(file)
    if not isinstance(table, Table):
        if table.ndim not in (1, 2) or table.shape[1:] not in {(), (1,)} or table.dtype.kind not in "fiu":
            raise InputError(f"{file}: expected one number a node [N], found {table.dtype} {list(table.shape)}")
        return lambda: slices(table, BATCH_ROWS), len(table), table.dtype
    own = table.one_of(_NODE) or (table.names[0] if len(table.names) == 2 else None)
    label = table.one_of(_LABEL) or table.names[-1]
    if len(table.names) > 2 and (own is None or table.one_of(_LABEL) is None):
        raise InputError(f"{file}: expected columns {_NODE[0]} and {_LABEL[0]}, found {', '.join(table.names)}")
    if own is None or own == label:
        columns = {label: pa.float64()}
        return lambda: (numbers(batch[0]) for batch in table.batches(columns)), table.num_rows, np.dtype(float)
    values, begin = np.full(ids.num_nodes, np.nan, np.float32), 0
    seen = np.zeros(ids.num_nodes, bool)
    for batch in table.batches({own: ids.type, label: pa.float64()}):
        nodes = ids(batch[0], table.where, begin)
        _, firsts = np.unique(nodes, return_index=True)
        again = seen[nodes]
        again[np.setdiff1d(np.arange(len(nodes)), firsts)] = True
        if again.any():
            at = int(again.argmax())
            raise InputError(f"{table.where(begin + at)}: expected each node once, found {batch[0][at]} again")
        seen[nodes] = True
        values[nodes] = numbers(batch[1])
        begin += len(nodes)
    return lambda: slices(values, BATCH_ROWS), len(values), values.dtype


def _split(file: Path, ids: Rows | Names) -> Array:
    """The int64 ids of a split, given as ids or as a mask."""
    import pyarrow as pa

    table = _open(file, lambda first: ids.known(first[:1]) or first[0].lower() in ("true", "false"))
    if isinstance(table, Table):
        column = table.one_of(_NODE) or table.names[0]
        if not pa.types.is_boolean(table.types[column]):
            found, begin = [np.empty(0, np.int64)], 0
            for (values,) in table.batches({column: ids.type}):
                found.append(ids(values, table.where, begin))
                begin += len(values)
            return np.concatenate(found)
        values = np.concatenate([numbers(batch[0]) for batch in table.batches({column: pa.bool_()})])
    else:
        values = np.asarray(table)
    if values.dtype.kind == "b" and values.shape == (ids.num_nodes,):
        return np.flatnonzero(values)
    if values.ndim != 1 or values.dtype.kind not in "iuSU":
        found_here = f"{values.dtype} {list(values.shape)}"
        raise InputError(f"{file}: expected node ids [n] or a mask of {ids.num_nodes} booleans, found {found_here}")
    return ids(values, f"{file}, entry {{}}".format, 0)
