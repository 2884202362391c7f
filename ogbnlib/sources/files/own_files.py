"""A user's own files as a `Source`: edges, features, labels and splits, in any format of
`readers`.

Edges and features are streamed. Memory use is 4 bytes a node for labels, and about 50 for names.
Import this module only when needed: it imports pyarrow.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ...errors import InputError, Problems, clear_errors
from ...files import StrPath, home
from ...graph.array_checks import finite
from ...graph.npz import Array, load, slices
from ...graph.store_format import SPLITS
from ..labels import (
    check_num_classes,
    clean_targets,
    refuse_class_options,
    refuse_several_labels,
)
from ..source import Source, stamped, stored_dtype
from .columns import Columns, Nodes, Piece, Table, hashes, numbers, option
from .formats import format_of
from .layouts import SPLIT_DICT, find_files, layout_of, splits_in_order
from .node_features import Features
from .node_labels import read_labels, read_split, read_split_dict, read_splits
from .readers import open_table
from .roles import Named, decide, is_id_like, kinds

_CHUNK_NODES = 2**17


def _refuse_unused_ids(columns: Columns, nodes: Nodes, name: str, *values: str) -> None:
    """Refuse to take row i for node i if an unused column could hold the node ids."""
    if columns.one("id") is not None or columns.table.num_rows != nodes.num_nodes:
        return
    for column in columns.all("left out"):
        if column not in columns.notes and _could_be_ids(columns.table, column, nodes):
            raise InputError(
                f"{columns.table.file}, column {column!r}: "
                "it could hold the node ids (its values are all different); "
                f"if it does, name it: {option(name, column, *values)}; "
                f"if row i is node i: {option('--leave-out', column)}"
            )


def _could_be_ids(table: Table, column: str, nodes: Nodes) -> bool:
    """Whether a column could hold the node ids, in another order than that of the rows.

    Its values must all differ, and not count up row by row. Fractions under a name unlike an id are
    measurements. Memory use is 24 bytes a node.
    """

    readers: dict[str, Callable[[Piece], Array]] = {
        "nodes": nodes,
        "whole numbers": lambda piece: numbers(piece.cast("int64", "")),
        "numbers": lambda piece: numbers(piece.cast("double", "")),
        "text": lambda piece: hashes(numbers(piece.cast("string", ""))),
    }
    values = np.empty(0)
    is_measurement = False
    for kind, read in readers.items():  # the first and strictest that reads every value
        with contextlib.suppress(InputError):
            values = np.concatenate([read(piece) for (piece,) in table.batches([column])])
            is_measurement = kind == "numbers" and not is_id_like(column)
            break
    in_order = bool((np.diff(values) == 1).all())
    return len(np.unique(values)) == len(values) and not in_order and not is_measurement


def _refuse_two_kinds(edges: Columns, nodes: Nodes) -> None:
    """Refuse edges between two kinds of nodes whose ids overlap.

    The evidence is two column names for different kinds, and an id that is in both columns. Two
    kinds without a common id are accepted.
    """
    names = [edges.all("source")[0], edges.all("target")[0]]
    if not edges.table.header or not kinds(names):
        return
    seen = np.zeros((2, nodes.num_nodes), bool)
    for pieces in edges.table.batches(names):
        for own, piece in zip(seen, pieces, strict=True):
            rows = nodes.find(piece)
            own[rows[rows >= 0]] = True
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
    """Open the table of each role; a file with several roles is one table."""
    tables: dict[str, Table] = {}
    of_file: dict[Path, Table] = {}
    for role, file in paths.items():
        is_array = format_of(file) == "array" and file.is_file()
        if (role in ("features", "targets") and is_array) or file.name == SPLIT_DICT:
            continue
        with problems.catch():
            if role == "labels" and is_array:
                shape = load(file).shape
                if len(shape) == 2 and shape[1] > 1:
                    refuse_several_labels(load(file)[: 2**16], str(file))
            if file not in of_file or role == "edges":
                of_file[file] = open_table(file, "split" if role in SPLITS else role)
            tables[role] = of_file[file]
    return tables


def _find_nodes(
    paths: Mapping[str, Path],
    columns: Mapping[str, Columns],
    relabel: bool,
    where: StrPath,
    features: Features | None,
) -> Nodes:
    """Return the map from ids to rows. Ids are names if a file `nodes` or the features have them,
    else row numbers."""
    names = None
    if features is not None and features.own is not None:
        names = (features.table, features.own)
    if "nodes" in columns:
        names = (columns["nodes"].table, columns["nodes"].all("id")[0])
    if relabel and names is None:
        raise InputError(
            f"--relabel: {where}: expected a file nodes, or a column node_id of features, found none"
            " (--drop-unknown needs it, too)"
        )
    if features is not None:
        num_nodes = features.num_rows
    elif names is not None:
        num_nodes = names[0].num_rows
    elif columns["labels"].one("id") is None:
        num_nodes = columns["labels"].table.num_rows
    else:
        raise InputError(
            f"{where}: expected, without features, a file nodes, or a label for each node in order"
        )
    rows = next(paths[role] for role in ("features", "nodes", "labels", "targets") if role in paths)
    return Nodes(num_nodes, rows.name, names)


def _read_all_splits(
    paths: Mapping[str, Path], columns: Mapping[str, Columns], nodes: Nodes, problems: Problems
) -> dict[str, Array]:
    """Return int64 ids of the splits."""
    if "splits" in columns:
        with problems.catch():
            return read_splits(columns["splits"], nodes)
    if "splits" in paths and "splits" not in columns:
        return read_split_dict(paths["splits"])
    if "train" not in columns:  # a layout without files of splits
        bounds = splits_in_order(nodes.num_nodes, paths.get("labels", Path()))
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
    """Return stand-in features for a graph without any, in pieces of float32.

    They are ones [N, 1], or with `degree` log(1 + in-degree) and log(1 + out-degree), [N, 2].
    """
    if not degree:
        return slices(np.broadcast_to(np.ones(1, np.float32), (num_nodes, 1)), _CHUNK_NODES)
    degrees = np.zeros((num_nodes, 2), np.float32)
    for src, dst in edge_chunks(2**20):
        np.add.at(degrees[:, 0], dst, 1)
        np.add.at(degrees[:, 1], src, 1)
    return slices(np.log1p(degrees, out=degrees), _CHUNK_NODES)


def _read_labels(
    columns: Mapping[str, Columns], nodes: Nodes, num_classes: int | None, targets: Features | None
) -> tuple[Array, int, Array | None]:
    """Return labels, number of classes and class names in the form of `read_labels`.

    With targets, whose number of rows is checked, there are no labels and 0 classes.
    """
    if targets is not None:
        if targets.num_rows != nodes.num_nodes:
            raise InputError(
                f"{targets.file}: expected {nodes.num_nodes} rows of targets, found {targets.num_rows}"
            )
        return np.empty(0), 0, None
    _refuse_unused_ids(
        columns["labels"], nodes, "--label-columns", columns["labels"].all("label")[0]
    )
    return read_labels(columns["labels"], nodes, num_classes)


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
    drop_unknown: bool = False,
    **files: StrPath | None,
) -> Source:
    """Open a user's own files for conversion: those in a folder by their names, or named one by
    one.

    Labels and splits are read here. A csv file of features is read once to count its rows. Standard
    error lists the role of each column. One error reports the mistakes of all files.

    Args:
        relabel: require names as ids. By default, ids are names if a file has the nodes' names.
        edge_columns: the columns of source and target. Columns without names are called "1", "2"
            and so on, here and below.
        label_columns: the columns of the node and of its label, or the column of the label alone.
            Without a column of node ids, row i is node i.
        id_column: the column of node ids in features, labels, nodes and splits; by default one
            named "node_id", "node" or "id".
        leave_out: columns to ignore in every file.
        num_classes: by default the largest label plus one.
        drop_unknown: leave out edges from or to a name that no node has; the store's summary has
            their number.
        files: paths of `edges`, `features` and so on, instead of those in the folder. Each is a
            file, a folder of parts or a pattern such as "edges/part-*.csv". Several roles may have
            the same file. `features` may be "ones", or "degree" for log(1 + in-degree) and
            log(1 + out-degree), which take 8 bytes of memory a node. `targets` replaces `labels`
            by numbers for each node, in the order of the nodes, in a file of its own.
    """
    problems = Problems()
    with problems.catch():
        check_num_classes(num_classes)
        if files.get("targets") is not None:
            refuse_class_options("targets", num_classes=num_classes, label_columns=label_columns)
    paths = dict[str, Path]()
    with problems.catch():
        paths = find_files(folder, files, lambda text: print(text, file=sys.stderr))
    if not paths:
        problems.refuse()
    stamps = stamped(paths)
    columns = decide(
        _open_files(paths, problems),
        Named(edge_columns, label_columns, id_column, leave_out),
        problems,
    )
    problems.refuse()
    degree = str(files.get("features")) == "degree"
    find_nodes = partial(_find_nodes, paths, columns, relabel or drop_unknown, folder)
    source = _read(paths, columns, find_nodes, num_classes, degree, drop_unknown, problems)
    path = layout_of(home(folder).resolve())[1]
    return replace(source, name=path.name, path=path, stamps=stamps)


def _edge_chunks(
    table: Table, ends: list[str], nodes: Nodes, drop_unknown: bool, chunk_edges: int
) -> Iterator[tuple[Array, Array]]:
    """Yield sources and targets of edges, int64, at most `chunk_edges` at a time."""
    for pieces in table.batches(ends):
        pairs = np.stack([*map(nodes.find if drop_unknown else nodes, pieces)])
        src, dst = pairs[:, (pairs >= 0).all(axis=0)] if drop_unknown else pairs
        yield from zip(slices(src, chunk_edges), slices(dst, chunk_edges), strict=True)


def _label_chunks(labels: Array, targets: Features | None, nodes: Nodes) -> Iterator[Array]:
    """Return pieces of labels [n], or of targets, float32 [n] or [n, T] with NaN for none."""
    if targets is None:
        return slices(labels, _CHUNK_NODES)
    chunks = clean_targets(targets.chunks(nodes), str(targets.file))
    return (values.reshape(len(values), *targets.row_shape) for values in chunks)


def _read(
    paths: Mapping[str, Path],
    columns: Mapping[str, Columns],
    find_nodes: Callable[[Features | None], Nodes],
    num_classes: int | None,
    degree: bool,
    drop_unknown: bool,
    problems: Problems,
) -> Source:
    """Read labels and splits, check all files, and return the `Source`; it has no name yet."""
    opened = {
        role: Features(paths[role], columns.get(role), kind)
        for role, kind in (("features", "feature"), ("targets", "value"))
        if role in paths
    }
    features = opened.get("features")
    targets = opened.get("targets")
    nodes = find_nodes(features or targets)
    edges = columns["edges"]
    ends = [edges.all("source")[0], edges.all("target")[0]]
    with problems.catch():
        _refuse_two_kinds(edges, nodes)
    with problems.catch():
        labels, num_classes, class_names = _read_labels(columns, nodes, num_classes, targets)
    splits = _read_all_splits(paths, columns, nodes, problems)
    problems.refuse()
    dtype = stored_dtype(paths.get("features"))

    edge_chunks = partial(_edge_chunks, edges.table, ends, nodes, drop_unknown)

    def x_chunks() -> Iterator[Array]:
        if features is None:
            return _stand_ins(degree, nodes.num_nodes, edge_chunks)
        return finite(features.chunks(nodes), dtype, str(paths["features"]))

    return Source(
        name="",
        num_nodes=nodes.num_nodes,
        num_edges=edges.table.num_rows,
        num_features=1 + degree if features is None else features.width,
        num_classes=num_classes,
        feature_dtype=dtype,
        edge_chunks=edge_chunks,
        x_chunks=x_chunks,
        label_chunks=lambda: _label_chunks(labels, targets, nodes),
        target_shape=() if targets is None else targets.row_shape,
        read_splits=lambda: dict(splits),
        node_names=nodes.chunks,
        label_names=class_names,
        features_at=str(paths.get("features", "features")),
        feature_names=[] if features is None else features.names,
    )
