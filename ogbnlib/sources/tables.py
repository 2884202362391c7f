"""Files of one's own as a `Source`: edges, features, labels and splits, in any format of
`graph.readers`.

Edges and features are streamed. Memory use is 4 bytes a node for labels, and about 50 for names.
Import it on use.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError, clear_errors
from ..files import StrPath, home
from ..graph.checks import MAX_CLASSES, SPLITS, count_classes, finite, label_dtype
from ..graph.npz import CHUNK_BYTES, Array, load, slices
from ..graph.readers import is_number
from ..graph.table import Nodes, Piece, Table, numbers, without_missing
from .data import Source, stamped, stored_dtype
from .layouts import ROLE_NAMES, find_files, layout_of, splits_in_order

NODE = ("node_id", "node", "id")
LABEL, SPLIT = ("label", "y", "class"), ("split", "set")
_SPLIT_OF = {
    "train": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "test": "test",
}
_FLAGS = ("false", "0", "0.0", "true", "1", "1.0")  # of masks; the second half means "in the split"
# Columns that are hardly features: ids such as paper_id and paperId, pandas' index, and the labels
# themselves.
_NO_FEATURE = re.compile(
    r"|Unnamed: .*|__index_level_0__|(.*[^a-zA-Z])?(ids?|ID|idx|index|key|name)|\w*[a-z](Id|ID|Idx)"
    r"|labels?|class|target|split"
)
_CHUNK_NODES = 2**17
_FEW = 20  # in fewer rows, distinct whole numbers may be a feature by chance


class Features:
    """A file of features; `own` is its column of node ids, or None."""

    def __init__(self, file: Path, known: Sequence[str]) -> None:
        self.own: str | None = None
        self._array = load(file) if file.suffix == ".npy" else None
        if self._array is not None:
            shape, dtype = self._array.shape, self._array.dtype
            if len(shape) != 2 or 0 in shape or dtype.kind not in "fiub":
                raise InputError(
                    f"{file}: expected features [N, F], numbers, found {dtype} {list(shape)}"
                )
            self.num_rows, self.width = shape
            return
        self.table = table = Table(file, "features")
        first = next((batch for batch in table.batches(table.names) if len(batch[0].values)), None)
        if first is None:
            raise InputError(f"{file}: expected a row for each node, found none")
        self.own = table.one_of(known)
        columns = [piece for piece in first if piece.name != self.own]
        self.columns, self.num_rows, self.width = (
            [piece.name for piece in columns],
            table.num_rows,
            len(columns),
        )
        self._list = any(hasattr(piece.values.type, "value_type") for piece in columns)
        if not columns or (self._list and len(columns) > 1):
            raise table.refusal(
                "columns of numbers, or one of lists", "remove the others from the file"
            )
        hint = "name it with --id-column if it holds node ids, else rename it, or save the features as .npy"
        for name in self.columns:
            if table.header and _NO_FEATURE.fullmatch(name):
                raise table.refusal(f"columns of features, not {name!r}", hint)
        if self._list:
            values = columns[0].values[0].as_py()
            columns[0].refuse([not values], "a list of numbers")
            self.width = len(values)
        elif not self.own and len(columns) > 1 and len(columns[0].values) >= _FEW:
            values = numbers(columns[0].cast("double", "a number"))
            if (values == np.floor(values)).all() and len(np.unique(values)) == len(values):
                raise table.refusal(
                    f"features, not different whole numbers in column {columns[0].name!r}, ids?",
                    hint,
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
                yield np.stack(
                    [numbers(piece.cast("double", "a number")) for piece in pieces], axis=1
                )


def value_columns(
    table: Table, known: Sequence[str], values: Sequence[str], hint: str
) -> tuple[str | None, str]:
    """Return the column of node ids, None where row i is node i, and the column of one of the names
    `values`."""
    own = table.one_of(known)
    value = table.one_of(values, alone=own is None)
    if len(table.names) == 2 and not table.header:
        own, value = table.names
    if value is None or (own is None and len(table.names) > 1):
        raise table.refusal(f"columns {known[0]} and {values[0]}", hint)
    table.leave_out([own, value])
    return own, value


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
    table: Table, own: str | None, column: str, nodes: Nodes
) -> Iterator[tuple[Array, Piece]]:
    """Yield (node ids, values of `column`); each node comes once."""
    check_rows(table, nodes, one_each=own is None)
    seen = np.zeros(nodes.num_nodes, bool)
    for piece, *ids_piece in table.batches([column, *([own] if own else [])]):
        ids = np.arange(piece.begin, piece.begin + len(piece.values))
        if ids_piece:
            ids = nodes(ids_piece[0])
            ids_piece[0].refuse(seen[ids] | pd.Index(ids).duplicated(), "each node once")
            seen[ids] = True
        yield ids, piece


def read_labels(
    table: Table, own: str | None, column: str, nodes: Nodes, num_classes: int
) -> tuple[Array, Array | None]:
    """Return int32 labels [N], -1 where there is none, and the sorted classes of text labels: UTF-8
    bytes [C]."""
    check_rows(table, nodes, one_each=own is None)
    classes, words = set[str](), set[str]()
    for (piece,) in table.batches([column]):
        if piece.values.type != "string":
            break
        known = without_missing(piece.values)
        classes |= {*pc.unique(known.drop_null()).to_pylist()}
        words |= {*pc.unique(piece.values.filter(known.is_null())).to_pylist()} - {None, ""}
        if any(map(is_number, classes)):
            if not all(map(is_number, classes)):
                both = ", ".join(sorted(classes)[:5])
                raise InputError(
                    f"{table.file}: expected labels of text or of numbers, found both: {both}"
                )
            classes.clear()
            break
        if len(classes) > num_classes:
            raise InputError(f"{table.file}: expected at most {num_classes} classes, found more")
    names, labels = sorted(classes), np.full(nodes.num_nodes, -1, np.int32)
    if words and names:  # a class may be called "none"
        print(f"{table.file}: taken for no label: {', '.join(sorted(words))}", file=sys.stderr)
    for ids, piece in _by_node(table, own, column, nodes):
        if names:
            labels[ids] = (
                pc.index_in(without_missing(piece.values), value_set=pa.array(names))
                .fill_null(-1)
                .to_numpy()
            )
            continue
        expected = f"whole labels from 0 to {num_classes - 1}, or NaN or -1 where there is none"
        values = numbers(piece.cast("double", expected))
        some = ~np.isnan(values) & (values != -1)
        piece.refuse(
            some & ((values != np.floor(values)) | (values < 0) | (values >= num_classes)), expected
        )
        labels[ids] = np.where(some, values, -1)
    return labels, np.array([name.encode() for name in names]) if names else None


def read_split(file: Path, nodes: Nodes, known: Sequence[str]) -> Array:
    """Return int64 ids of one split, from a file of ids, or a mask of more than two nodes: two
    flags may be ids."""
    expected = f"node ids [n] or a mask of {nodes.num_nodes} booleans"
    table = Table(file, "split")
    column = table.one_of(known, alone=True)
    if len(table.names) > 1 or column is None:
        raise table.refusal(
            f"one column {known[0]} or mask, {expected}", "--id-column gives it another name"
        )
    check_rows(table, nodes)
    if nodes.num_nodes == table.num_rows > 2:
        mask = []
        for (piece,) in table.batches([column]):
            flags = pc.index_in(
                pc.utf8_lower(piece.cast("string", expected)), value_set=pa.array(_FLAGS)
            )
            if flags.null_count:
                break
            mask.append(numbers(flags) >= len(_FLAGS) // 2)
        else:
            return np.flatnonzero(np.concatenate(mask))
    if nodes.names is not None and nodes.are_rows(piece for (piece,) in table.batches([column])):
        print(f"{file}: read as row numbers: none of its ids is a name", file=sys.stderr)
        nodes = Nodes(nodes.num_nodes, file.name)
    return np.concatenate(
        [np.empty(0, np.int64), *(nodes(piece) for (piece,) in table.batches([column]))]
    )


def read_splits(file: Path, nodes: Nodes, known: Sequence[str]) -> dict[str, Array]:
    """Return int64 ids of the splits, from a file that names the split of each node, empty for
    none."""
    table = Table(file)
    own, column = value_columns(
        table, known, SPLIT, "rename them; --id-column names that of the nodes"
    )
    parts = {split: [np.empty(0, np.int64)] for split in SPLITS}
    for ids, piece in _by_node(table, own, column, nodes):
        words = without_missing(piece.cast("string", "the name of a split"))
        places = pc.index_in(pc.utf8_lower(words), value_set=pa.array([*_SPLIT_OF]))
        piece.refuse(
            pc.and_(places.is_null(), words.is_valid()), "train, valid, test or an empty cell"
        )
        codes = places.fill_null(-1).to_numpy()
        for place, split in enumerate(_SPLIT_OF.values()):
            parts[split].append(ids[codes == place])
    return {split: np.sort(np.concatenate(ids), kind="stable") for split, ids in parts.items()}


@clear_errors()
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
    """Open a user's own files for conversion: those in a folder by their names, or named one by
    one.

    Labels and splits are read here, and a csv file of features for the number of its rows. Standard
    error lists unused columns.

    Args:
        relabel: require names as ids; without it ids are names if the names are there.
        edge_columns: the columns of source and target; "1", "2" and so on where columns have no
            names, here as below.
        label_columns: the columns of the node and of its label, or of the label alone: row i is
            node i.
        id_column: the column of node ids in features, labels, nodes and splits, or one named
            "node_id", "node" or "id".
        num_classes: the largest label plus one if None.
        files: paths of `edges`, `features` and so on, instead of those in the folder; also a
            folder of parts or a pattern such as "edges/part-*.csv". `features` may be "ones", or
            "degree": log(1 + in-degree) and log(1 + out-degree), 8 bytes a node in memory.
    """
    paths = find_files(folder, files, lambda text: print(text, file=sys.stderr))
    path = layout_of(home(folder).resolve())[1]
    stamps, known = stamped(paths), (id_column, *NODE) if id_column else NODE
    features = Features(paths["features"], known) if "features" in paths else None
    label_table, hint = (
        Table(paths["labels"]),
        f"name them: --label-columns {NODE[0]},{LABEL[0]}, or that of labels",
    )
    if label_columns is None:
        own, label = value_columns(label_table, known, LABEL, hint)
    else:
        if not 0 < len(label_columns) <= 2 or len({*label_columns} & {*label_table.names}) < len(
            label_columns
        ):
            raise label_table.refusal(
                f"the columns {', '.join(label_columns)}", "check --label-columns"
            )
        label, ids = label_columns[-1], label_table.one_of(known)
        own = label_columns[0] if len(label_columns) == 2 else None if ids == label else ids
        label_table.leave_out([own, label])
    names = (
        (features.table, features.own)
        if features is not None and features.own is not None
        else None
    )
    if "nodes" in paths:
        table = Table(paths["nodes"])
        if (column := table.one_of(known, alone=True)) is None:
            raise table.refusal(f"a column {known[0]}", "name it with --id-column")
        table.leave_out([column])
        names = (table, column)
    if relabel and names is None:
        raise InputError(
            f"--relabel: {folder}: expected a file nodes, or a column {NODE[0]} of features, found none"
        )
    if features is None and names is None and own is not None:
        raise InputError(
            f"{folder}: expected, without features, a file nodes, or a label for each node in order"
        )
    num_nodes = (features or (names or [label_table])[0]).num_rows
    nodes = Nodes(num_nodes, paths.get("features", paths.get("nodes", paths["labels"])).name, names)
    edges, ends = Table(paths["edges"], "edges"), edge_columns
    if edge_columns is not None:
        if len({*edge_columns} & {*edges.names}) != 2 or len(edge_columns) != 2:
            raise edges.refusal(f"two columns {', '.join(edge_columns)}", "check --edge-columns")
    elif not edges.header and len(edges.names) == 2:
        ends = edges.names
    else:
        for pair in (("src", "dst"), ("source", "target")):
            columns = [column for end in pair if (column := edges.one_of([end])) is not None]
            ends = columns if len(columns) == 2 else ends
    if ends is None:
        hint = "name them: --edge-columns SOURCE,TARGET (1,2 where they have no names)"
        raise edges.refusal("columns source and target, or two without names, of node ids", hint)
    edges.leave_out(ends)
    labels, class_names = read_labels(label_table, own, label, nodes, num_classes or MAX_CLASSES)
    if num_classes is None:
        kind = next((str(piece.values.type) for (piece,) in label_table.batches([label])), "")
        dtype = np.dtype(kind if kind.startswith(("int", "uint")) else float)
        num_classes = count_classes([labels], dtype, str(paths["labels"]))
    if "splits" in paths:
        splits = read_splits(paths["splits"], nodes, known)
    elif "train" not in paths:
        bounds = splits_in_order(num_nodes, paths["labels"])
        splits = {split: np.arange(*ends) for split, ends in bounds.items()}
    else:
        splits = {
            split: read_split(paths[split], nodes, (*known, "mask", *ROLE_NAMES[split]))
            for split in SPLITS
        }
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
