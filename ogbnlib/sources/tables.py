"""Files of one's own as a `Source`: edges, features, labels and splits, in any format of
`graph.readers`.

Edges and features are streamed. Memory use is 4 bytes a node for labels, and about 50 for names.
Import it on use.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError, Problems, clear_errors
from ..files import StrPath, home
from ..graph.checks import (
    MAX_CLASSES,
    NOT_CLASSES,
    SPLITS,
    check_num_classes,
    count_classes,
    find_labels,
    finite,
    from_one,
    label_dtype,
    refuse_several_labels,
)
from ..graph.npz import CHUNK_BYTES, Array, load, slices
from ..graph.readers import is_number
from ..graph.table import Nodes, Piece, Table, flags, numbers, without_missing
from .data import Source, stamped, stored_dtype
from .layouts import find_files, layout_of, splits_in_order
from .roles import SPLIT_OF, Columns, Named, decide, is_id_like, kinds, option

_CHUNK_NODES = 2**17
_FEW = 20  # in fewer rows, distinct whole numbers may be a feature by chance
_SEPARATORS = r"[,;|]"


def _feature(piece: Piece) -> Array:
    """Return a column of features as float64."""
    hint = f"; a column of text is no feature: {option('--leave-out', piece.name)}"
    return numbers(piece.cast("double", "a number", hint))


class Features:
    """A file of features: an array, or the columns whose role is feature."""

    def __init__(self, file: Path, columns: Columns | None) -> None:
        self.file = file
        self.own: str | None = None
        self.columns: list[str] = []
        self._array: Array | None = None
        self._list = False
        if columns is None:
            self._array = load(file)
            shape, dtype = self._array.shape, self._array.dtype
            if len(shape) != 2 or 0 in shape or dtype.kind not in "fiub":
                raise InputError(
                    f"{file}: expected features [N, F], numbers, found {dtype} {list(shape)}"
                )
            self.num_rows, self.width = shape
        else:
            self._open(columns)

    def _open(self, columns: Columns) -> None:
        self.table = table = columns.table
        self.own, self.columns = columns.one("id"), columns.all("feature")
        if not self.columns:
            raise table.refusal("columns of numbers, or one of lists", "add the features")
        batches = table.batches(self.columns)
        first = next((batch for batch in batches if len(batch[0].values)), None)
        if first is None:
            raise InputError(f"{self.file}: expected a row for each node, found none")
        self.num_rows, self.width = table.num_rows, len(first)
        self._list = any(hasattr(piece.values.type, "value_type") for piece in first)
        if self._list:
            if len(first) > 1:
                hint = option("--leave-out", *self.columns[1:])
                raise table.refusal("columns of numbers, or one of lists", hint)
            values = first[0].values[0].as_py()
            first[0].refuse([not values], "a list of numbers")
            self.width = len(values)
        elif not self.own and len(first) > 1 and len(first[0].values) >= _FEW:
            self._refuse_ids(first)

    def _refuse_ids(self, first: list[Piece]) -> None:
        """Refuse a column of different whole numbers: the first one, or one of row numbers."""
        for piece in first:
            values = _feature(piece)
            whole = (values == np.floor(values)).all() and values.min() >= 0
            in_range = piece is first[0] or values.max() <= self.num_rows
            if whole and in_range and len(np.unique(values)) == len(values):
                hint = (
                    f"if it holds node ids: {option('--id-column', piece.name)}; "
                    f"else {option('--leave-out', piece.name)}, or save the features as .npy"
                )
                raise self.table.refusal(
                    f"features, not different whole numbers in column {piece.name!r}, ids?", hint
                )

    def chunks(self, nodes: Nodes) -> Iterator[Array]:
        """Yield rows of features [n, F] in the order of `nodes`: an array's own dtype, else
        float64."""
        rows = max(1, CHUNK_BYTES // (8 * self.width))
        if self._array is not None:
            yield from slices(self._array, rows)
            return
        for pieces in self.table.batches([*self.columns, *([self.own] if self.own else [])], rows):
            if self.own:
                ids = pieces.pop()
                wrong = nodes(ids) != np.arange(ids.begin, ids.begin + len(ids.values))
                ids.refuse(wrong, "the nodes in the order of their names")
            if self._list:
                lists = pieces[0].values
                lengths = numbers(
                    pc.if_else(lists.is_null(), -1, pc.list_value_length(lists)).fill_null(-1)
                )
                pieces[0].refuse(lengths != self.width, f"a list of {self.width} numbers")
                flat = replace(pieces[0], values=lists.flatten())
                yield numbers(flat.cast("double", "a number")).reshape(-1, self.width)
            else:
                yield np.stack([_feature(piece) for piece in pieces], axis=1)

    def refuse_labels(self, nodes: Nodes, labels: Array) -> None:
        """Refuse columns that hold nothing but the labels."""
        found = find_labels(lambda: self.chunks(nodes), labels, self.width)
        if found is None:
            return
        if self.columns and not self._list:
            names = [self.columns[column] for column in found.columns]
            place = f"column {', '.join(map(repr, names))}"
            remedy = f"leave it out: {option('--leave-out', *names)}"
        else:
            place = f"column {', '.join(map(str, found.columns))} (from 0)"
            remedy = f"remove it: numpy.delete(features, {found.columns}, axis=1)"
        text = "equal to the labels" if found.equal else "the labels in other numbers"
        if len(found.columns) > 1:
            text = "together the labels in other numbers"
        text = f"{self.file}, {place}: {text}, on all labelled nodes"
        if not found.by_chance:
            raise InputError(f"{text}; training would see them; {remedy}")
        print(f"{text}; so few that it may be chance; else {remedy}", file=sys.stderr)


def check_rows(table: Table, nodes: Nodes, one_each: bool = False) -> None:
    """Refuse more rows than nodes, or another number, before anything of the size of the file is in
    memory: a small compressed file may have billions of rows."""
    if one_each and table.num_rows != nodes.num_nodes:
        expected = f"expected {nodes.num_nodes} rows, one for each node"
        raise InputError(
            f"{table.file}: {expected}, found {table.num_rows}; blank lines do not count"
        )
    if table.num_rows > nodes.num_nodes:
        expected = f"expected at most {nodes.num_nodes} rows, the number of nodes"
        raise InputError(f"{table.file}: {expected}, found {table.num_rows}")


def _by_node(
    table: Table, own: str | None, columns: Sequence[str], nodes: Nodes
) -> Iterator[tuple[Array, list[Piece]]]:
    """Yield (node ids, values of `columns`); each node comes once."""
    check_rows(table, nodes, one_each=own is None)
    seen = np.zeros(nodes.num_nodes, bool)
    for pieces in table.batches([*columns, *([own] if own else [])]):
        begin = pieces[0].begin
        ids = np.arange(begin, begin + len(pieces[0].values))
        if own:
            ids_piece = pieces.pop()
            ids = nodes(ids_piece)
            ids_piece.refuse(seen[ids] | pd.Index(ids).duplicated(), "each node once")
            seen[ids] = True
        yield ids, pieces


def _holds_several(text: str, classes: set[str]) -> bool:
    """Whether a field holds a list: it is in brackets, or its parts are numbers or `classes`
    themselves."""
    text = text.strip()
    parts = [part.strip() for part in re.split(_SEPARATORS, text)]
    brackets = text[:1] + text[-1:]
    if brackets == "[]" or (brackets in ("()", "{}") and len(parts) > 1):
        return True
    if len(parts) > 1 and all(part in classes for part in parts):
        return True
    fields = [part for part in re.split(rf"{_SEPARATORS}|\s", text) if part]
    return len(fields) > 1 and all(map(is_number, fields))


def _refuse_lists(piece: Piece, classes: set[str]) -> None:
    """Refuse several labels in one field."""
    several = [True] * len(piece.values)
    if pa.types.is_string(piece.values.type):
        fields = pc.unique(piece.values.drop_null()).to_pylist()
        wrong = [text for text in fields if _holds_several(text, classes)]
        several = pc.is_in(piece.values, value_set=pa.array(wrong, pa.string()))
    elif not hasattr(piece.values.type, "value_type"):
        return
    hint = "; several labels a node are not supported: use one, and train a model for each"
    piece.refuse(several, "one label", hint)


def _class_names(table: Table, column: str, num_classes: int) -> list[str]:
    """Return the sorted names of the classes, [] if labels are numbers."""
    classes, others = set[str](), set[str]()
    for (piece,) in table.batches([column]):
        if piece.values.type != "string":
            _refuse_lists(piece, set())
            return []
        known = without_missing(piece.values)
        classes |= {*pc.unique(known.drop_null()).to_pylist()}
        others |= {*pc.unique(piece.values.filter(known.is_null())).to_pylist()} - {None, ""}
        if any(map(is_number, classes)):
            _refuse_lists(piece, classes)
            if not all(map(is_number, classes)):
                both = ", ".join(sorted(classes)[:5])
                raise InputError(
                    f"{table.file}: expected labels of text or of numbers, found both: {both}"
                )
            return []
        if len(classes) > num_classes:
            raise InputError(f"{table.file}: expected at most {num_classes} classes, found more")
    if any(_holds_several(text, classes) for text in classes):
        for (piece,) in table.batches([column]):
            _refuse_lists(piece, classes)
    if others and classes:  # a class may be called "none"
        print(f"{table.file}: taken for no label: {', '.join(sorted(others))}", file=sys.stderr)
    return sorted(classes)


def _numeric_labels(piece: Piece, num_classes: int) -> Array:
    """Return labels as whole numbers, -1 where there is none."""
    expected = f"whole labels from 0 to {num_classes - 1}, or NaN or -1 where there is none"
    if pa.types.is_string(piece.values.type):
        _refuse_lists(piece, set())
    values = numbers(piece.cast("double", expected))
    some = ~np.isnan(values) & (values != -1)
    piece.refuse(some & (values != np.floor(values)), expected, NOT_CLASSES)
    hint = from_one(values[some], num_classes)
    piece.refuse(some & ((values < 0) | (values >= num_classes)), expected, hint)
    return np.where(some, values, -1)


def read_labels(
    columns: Columns, nodes: Nodes, num_classes: int | None
) -> tuple[Array, int, Array | None]:
    """Return labels [N], -1 where there is none, the number of classes, and the sorted classes of
    text labels: UTF-8 bytes [C]."""
    table, column = columns.table, columns.all("label")[0]
    check_rows(table, nodes, one_each=columns.one("id") is None)
    names = _class_names(table, column, num_classes or MAX_CLASSES)
    labels, kind = np.full(nodes.num_nodes, -1, np.int32), ""
    for ids, (piece,) in _by_node(table, columns.one("id"), [column], nodes):
        kind = kind or str(piece.values.type)
        if names:
            places = pc.index_in(without_missing(piece.values), value_set=pa.array(names))
            labels[ids] = places.fill_null(-1).to_numpy()
        else:
            labels[ids] = _numeric_labels(piece, num_classes or MAX_CLASSES)
    if num_classes is None:
        dtype = np.dtype(kind if kind.startswith(("int", "uint")) else float)
        num_classes = count_classes([labels], dtype, str(table.file))
        used = labels[labels >= 0]
        if question := from_one(used, num_classes - 1):
            print(f"{table.file}: labels from 1 to {num_classes - 1}{question}", file=sys.stderr)
    class_names = np.array([name.encode() for name in names]) if names else None
    return labels.astype(label_dtype(num_classes)), num_classes, class_names


def _mask(piece: Piece) -> Array:
    """Return one booleans of a mask; an empty cell is no member."""
    values = flags(piece)
    missing = pc.is_null(without_missing(piece.cast("string", "true or false")))
    piece.refuse(pc.and_(values.is_null(), pc.invert(missing)), "true or false")
    return numbers(values.fill_null(False)).astype(bool)


def read_split(columns: Columns, split: str, nodes: Nodes) -> Array:
    """Return int64 ids of one split, from a column of ids, or a mask of more than two nodes: two
    flags may be ids."""
    table, own = columns.table, columns.one("id")
    mask = columns.masks.get(split)
    if mask is not None and own is not None:
        parts = [ids[_mask(piece)] for ids, (piece,) in _by_node(table, own, [mask], nodes)]
        return np.concatenate([np.empty(0, np.int64), *parts])
    column = mask or own or ""
    members = _flags_of(table, column, nodes)
    if members is None:
        pieces = (piece for (piece,) in table.batches([column]))
        if nodes.names is not None and nodes.are_rows(pieces):
            print(f"{table.file}: read as row numbers: none of its ids is a name", file=sys.stderr)
            nodes = Nodes(nodes.num_nodes, table.file.name)
        ids = [nodes(piece) for (piece,) in table.batches([column])]
        return np.concatenate([np.empty(0, np.int64), *ids])
    return np.flatnonzero(members)


def _flags_of(table: Table, column: str, nodes: Nodes) -> Array | None:
    """Return the flags of a mask [N], None for ids: more than two flags repeat ids, which a split
    never does."""
    parts = []
    for (piece,) in table.batches([column]):
        values = flags(piece, "node ids or a mask")
        is_bool = pa.types.is_boolean(piece.values.type)
        if values.null_count or (table.num_rows <= 2 and not is_bool):
            check_rows(table, nodes)
            return None
        # of a file that is too long, the first rows are enough
        parts.append(numbers(values).astype(bool))
        if table.num_rows > nodes.num_nodes:
            break
    if parts and table.num_rows != nodes.num_nodes:
        raise InputError(
            f"{table.file}: found a mask of {table.num_rows} rows, "
            f"expected {nodes.num_nodes}, one for each node"
        )
    return np.concatenate(parts) if parts else None


def read_splits(columns: Columns, nodes: Nodes) -> dict[str, Array]:
    """Return int64 ids of the splits, from a column that names the split of each node, empty for
    none, or from a mask of each split."""
    table, own = columns.table, columns.one("id")
    names = columns.all("split")
    parts = {split: [np.empty(0, np.int64)] for split in SPLITS}
    masks = [columns.masks[split] for split in SPLITS] if not names else []
    for ids, pieces in _by_node(table, own, names or masks, nodes):
        if masks:
            for split, piece in zip(SPLITS, pieces, strict=True):
                parts[split].append(ids[_mask(piece)])
            continue
        words = without_missing(pieces[0].cast("string", "the name of a split"))
        places = pc.index_in(pc.utf8_lower(words), value_set=pa.array([*SPLIT_OF]))
        pieces[0].refuse(
            pc.and_(places.is_null(), words.is_valid()), "train, valid, test or an empty cell"
        )
        codes = places.fill_null(-1).to_numpy()
        for place, split in enumerate(SPLIT_OF.values()):
            parts[split].append(ids[codes == place])
    return {split: np.sort(np.concatenate(ids), kind="stable") for split, ids in parts.items()}


def _refuse_unused_ids(columns: Columns, nodes: Nodes, name: str, *values: str) -> None:
    """Refuse to take rows for nodes if a column that is left out could hold the nodes' ids."""
    if columns.one("id") is not None or columns.table.num_rows != nodes.num_nodes:
        return
    for column in columns.all("left out"):
        reason = "" if column in columns.notes else _id_evidence(columns.table, column, nodes)
        if reason:
            raise InputError(
                f"{columns.table.file}, column {column!r}: it could hold the node ids ({reason}); "
                f"if it does, name it: {option(name, column, *values)}; "
                f"if row i is node i: {option('--leave-out', column)}"
            )


def _id_evidence(table: Table, column: str, nodes: Nodes) -> str:
    """Return why a column could hold the ids of the nodes, "" if it can't or if its order is that
    of the rows. Memory use is 24 bytes a node."""

    def text(piece: Piece) -> Array:
        return pd.util.hash_array(numbers(piece.cast("string", "text")), categorize=False)

    def whole(piece: Piece) -> Array:
        return numbers(piece.cast("int64", "a whole number"))

    def number(piece: Piece) -> Array:
        return numbers(piece.cast("double", "a number"))

    values = np.empty(0)
    for read in (nodes, whole, number, text):
        with contextlib.suppress(InputError):
            values = np.concatenate([read(piece) for (piece,) in table.batches([column])])
            break
    if len(np.unique(values)) < len(values) or (np.diff(values) == 1).all():
        return ""
    if read is whole and values.max() - values.min() + 1 == len(values):
        return f"consecutive numbers from {values.min()} to {values.max()}"
    if read is number and not is_id_like(column):
        return ""
    return "each node once" if read is nodes else "all different"


def _refuse_two_kinds(edges: Columns, nodes: Nodes) -> None:
    """Refuse edges between two kinds of nodes whose ids overlap.

    Two names of kinds are the evidence, and one id in both columns; kinds with ids apart are
    accepted.
    """
    names = [edges.all("source")[0], edges.all("target")[0]]
    if not edges.table.header or not kinds(names):
        return
    seen = np.zeros((2, nodes.num_nodes), bool)
    for pieces in edges.table.batches(names):
        for own, piece in zip(seen, pieces, strict=True):
            own[nodes(piece)] = True
        shared = np.flatnonzero(seen[0] & seen[1])
        if len(shared):
            first, second = names
            raise InputError(
                f"{edges.table.file}: columns {first!r} and {second!r} name two kinds of nodes, "
                f"but node {shared[0]} is in both: give each kind its own ids, such as "
                f"{second} + the number of the first kind, or names in a file nodes; "
                "if both are one kind, call the columns source and target"
            )


def _open_files(paths: Mapping[str, Path], problems: Problems) -> dict[str, Table]:
    """Open the table of each role; one file of several roles is one table."""
    tables: dict[str, Table] = {}
    of_file: dict[Path, Table] = {}
    for role, file in paths.items():
        is_array = file.suffix == ".npy" and file.is_file()
        if role == "features" and is_array:
            continue
        with problems.catch():
            if role == "labels" and is_array:
                shape = load(file).shape
                if len(shape) == 2 and shape[1] > 1:
                    refuse_several_labels(load(file)[: 2**16], str(file))
            if file not in of_file or role == "edges":
                of_file[file] = Table(file, "split" if role in SPLITS else role)
            tables[role] = of_file[file]
    return tables


def _find_nodes(
    paths: Mapping[str, Path],
    features: Features | None,
    columns: Mapping[str, Columns],
    relabel: bool,
    where: StrPath,
) -> Nodes:
    """Return the map from ids to rows: names of a file nodes or of the features, else row
    numbers."""
    names = None
    if features is not None and features.own is not None:
        names = (features.table, features.own)
    if "nodes" in columns:
        names = (columns["nodes"].table, columns["nodes"].all("id")[0])
    if relabel and names is None:
        raise InputError(
            f"--relabel: {where}: expected a file nodes, or a column node_id of features, found none"
        )
    labels = columns["labels"]
    if features is not None:
        num_nodes = features.num_rows
    elif names is not None:
        num_nodes = names[0].num_rows
    elif labels.one("id") is None:
        num_nodes = labels.table.num_rows
    else:
        raise InputError(
            f"{where}: expected, without features, a file nodes, or a label for each node in order"
        )
    rows = paths.get("features", paths.get("nodes", paths["labels"]))
    return Nodes(num_nodes, rows.name, names)


def _read_all_splits(
    paths: Mapping[str, Path], columns: Mapping[str, Columns], nodes: Nodes, problems: Problems
) -> dict[str, Array]:
    """Return int64 ids of the splits."""
    if "splits" in columns:
        with problems.catch():
            return read_splits(columns["splits"], nodes)
    if "train" not in columns:  # a layout without files of splits
        bounds = splits_in_order(nodes.num_nodes, paths["labels"])
        return {split: np.arange(*ends) for split, ends in bounds.items()}
    splits = {split: np.empty(0, np.int64) for split in SPLITS}
    for split in SPLITS:
        if split in columns:
            with problems.catch():
                splits[split] = read_split(columns[split], split, nodes)
    return splits


def _stand_ins(
    degree: bool, num_nodes: int, edge_chunks: Callable[[int], Iterator[tuple[Array, Array]]]
) -> Iterator[Array]:
    """Return ones [N, 1], or logarithms of degrees [N, 2], for a graph without features."""
    if not degree:
        return slices(np.broadcast_to(np.ones(1, np.float32), (num_nodes, 1)), _CHUNK_NODES)
    degrees = np.zeros((num_nodes, 2), np.float32)
    for src, dst in edge_chunks(2**20):
        np.add.at(degrees[:, 0], dst, 1)
        np.add.at(degrees[:, 1], src, 1)
    return slices(np.log1p(degrees, out=degrees), _CHUNK_NODES)


@clear_errors()
def open_tables(
    folder: StrPath,
    *,
    relabel: bool = False,
    edge_columns: Sequence[str] | None = None,
    label_columns: Sequence[str] | None = None,
    id_column: str | None = None,
    leave_out: Sequence[str] = (),
    num_classes: int | None = None,
    **files: StrPath | None,
) -> Source:
    """Open a user's own files for conversion: those in a folder by their names, or named one by
    one.

    Labels and splits are read here, and a csv file of features for the number of its rows. Standard
    error lists the role of each column. One error reports the mistakes of all files.

    Args:
        relabel: require names as ids; without it ids are names if the names are there.
        edge_columns: the columns of source and target; "1", "2" and so on where columns have no
            names, here as below.
        label_columns: the columns of the node and of its label, or of the label alone: row i is
            node i.
        id_column: the column of node ids in features, labels, nodes and splits, or one named
            "node_id", "node" or "id".
        leave_out: columns that are never used, in any file.
        num_classes: the largest label plus one if None.
        files: paths of `edges`, `features` and so on, instead of those in the folder; also a
            folder of parts or a pattern such as "edges/part-*.csv". Several roles may have the same
            file. `features` may be "ones", or "degree": log(1 + in-degree) and
            log(1 + out-degree), 8 bytes a node in memory.
    """
    problems, path = Problems(), layout_of(home(folder).resolve())[1]
    with problems.catch():
        check_num_classes(num_classes)
    paths = dict[str, Path]()
    with problems.catch():
        paths = find_files(folder, files, lambda text: print(text, file=sys.stderr))
    if not paths:
        problems.refuse()
    stamps = stamped(paths)
    named = Named(edge_columns, label_columns, id_column, leave_out)
    columns = decide(_open_files(paths, problems), named, problems)
    problems.refuse()
    features = Features(paths["features"], columns.get("features")) if "features" in paths else None
    nodes = _find_nodes(paths, features, columns, relabel, folder)
    edges = columns["edges"]
    ends = [edges.all("source")[0], edges.all("target")[0]]
    with problems.catch():
        _refuse_two_kinds(edges, nodes)
    with problems.catch():
        label = columns["labels"].all("label")[0]
        _refuse_unused_ids(columns["labels"], nodes, "--label-columns", label)
        labels, num_classes, class_names = read_labels(columns["labels"], nodes, num_classes)
        if features is not None:
            features.refuse_labels(nodes, labels)
    splits = _read_all_splits(paths, columns, nodes, problems)
    problems.refuse()
    dtype, degree = stored_dtype(paths.get("features")), str(files.get("features")) == "degree"

    def edge_chunks(chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        for pieces in edges.table.batches(ends):
            src, dst = map(nodes, pieces)
            yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)

    def x_chunks() -> Iterator[Array]:
        if features is None:
            return _stand_ins(degree, nodes.num_nodes, edge_chunks)
        return finite(features.chunks(nodes), dtype, str(paths["features"]))

    return Source(
        name=path.name, path=path, stamps=stamps, num_nodes=nodes.num_nodes,
        num_edges=edges.table.num_rows,
        num_features=features.width if features else 1 + degree, num_classes=num_classes, feature_dtype=dtype,
        edge_chunks=edge_chunks, x_chunks=x_chunks, label_chunks=lambda: slices(labels, _CHUNK_NODES),
        read_splits=lambda: dict(splits), node_names=nodes.chunks, label_names=class_names,
    )  # fmt: skip
