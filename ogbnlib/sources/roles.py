"""Features, labels and splits in a user's own files, read in pieces and checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..graph.checks import SPLITS
from ..graph.npz import CHUNK_BYTES, Array, load, slices
from ..graph.table import Nodes, Piece, Table, is_number, numbers, without_missing

NODE = ("node_id", "node", "id")
_LABEL, _SPLIT = ("label", "y", "class"), ("split", "set")
_SPLIT_OF = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}
_FLAGS = ("false", "0", "0.0", "true", "1", "1.0")  # of masks; the second half means "in the split"
# Columns that are hardly features: ids such as paper_id and paperId, pandas' index, and the labels themselves.
_NO_FEATURE = re.compile(
    r"|Unnamed: .*|__index_level_0__|(.*[^a-zA-Z])?(ids?|ID|idx|index|key|name)|\w*[a-z](Id|ID|Idx)"
    r"|labels?|class|target|split"
)
_ENDS = (("source", "target"), ("src", "dst"))
_FEW = 20  # in fewer rows, distinct whole numbers may be a feature by chance


def refusal(table: Table, expected: str, hint: str) -> InputError:
    """Return the error for columns that are neither known nor named."""
    names = ", ".join(map(repr, table.names)) if table.header else f"{len(table.names)}, without names"
    return InputError(f"{table.file}: expected {expected}, found columns {names}; {hint}")


def is_named(first: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of these fields is a column's name, in any case."""
    return bool({text.lower() for text in first} & {name.lower() for name in names})


def leave_out(table: Table, used: Sequence[str | None]) -> None:
    """Name the columns that are not used on standard error; standard output belongs to the caller."""
    if others := [name for name in table.names if name not in used]:
        print(f"{table.file}: left out: {', '.join(map(repr, others))}", file=sys.stderr)


def check_named(table: Table, columns: Sequence[str], counts: Sequence[int], option: str) -> None:
    """Check columns that an option names."""
    if len(columns) not in counts or len({*columns} & {*table.names}) < len(columns):
        many = " or ".join(map(str, counts))
        expected = f"{many} of the columns {', '.join(table.names)}"
        raise InputError(f"{option}: {table.file}: expected {expected}, found {','.join(columns)}")


def has_column(file: Path, name: str) -> bool:
    """Whether a table has a column of this name."""
    return file.suffix != ".npy" and Table(file, lambda first: name.isdigit()).one_of([name]) is not None


# Edges and names -----------------------------------------------------------------------------------------------------


def name_table(file: Path, known: Sequence[str]) -> tuple[Table, str]:
    """Return the table with the nodes' names, and their column."""
    table = Table(file, lambda first: not is_named(first, known))
    column = table.one_of(known) or (table.names[0] if len(table.names) == 1 else None)
    if column is None:
        raise refusal(table, f"a column {known[0]}", "name it with --id-column")
    leave_out(table, [column])
    return table, column


def edge_table(file: Path, nodes: Nodes, columns: Sequence[str] | None) -> tuple[Table, list[str]]:
    """Return the table of edges, with its columns of sources and of targets."""
    table = Table(file, lambda first: not is_named(first, columns or ()) and nodes.known(first), pair=True)
    if columns is not None:
        check_named(table, columns, (2,), "--edge-columns")
    elif not table.header and len(table.names) == 2:
        columns = table.names
        if table.first == ["0", "1"]:  # pandas' default column names, or the edge 0 -> 1
            print(f"{file}: the first line, 0,1, is read as an edge; if it is a header, remove it", file=sys.stderr)
    else:
        pairs = [[table.one_of([end]) for end in pair] for pair in _ENDS]
        columns = next(([str(end) for end in pair] for pair in pairs if None not in pair), None)
    if columns is None:
        hint = "name them: --edge-columns SOURCE,TARGET (1,2 where they have no names); csv files need commas"
        raise refusal(table, "columns source and target, or two without names, of node ids", hint)
    leave_out(table, columns)
    return table, list(columns)


# Features ------------------------------------------------------------------------------------------------------------


class Features:
    """A file of features.

    Attributes:
        own: the column of node ids, or None.
        width: features of a node.
        dtype: of the features in the file; for a table float32, or float16 if all its columns are.
    """

    def __init__(self, file: Path, known: Sequence[str], has_nodes: bool) -> None:
        self.own: str | None = None
        self._array = load(file) if file.suffix == ".npy" else None
        if self._array is not None:
            self.dtype, shape = self._array.dtype, self._array.shape
            if len(shape) != 2 or 0 in shape or self.dtype.kind not in "fiub":
                raise InputError(f"{file}: expected features [N, F], numbers, found {self.dtype} {list(shape)}")
            self.num_rows, self.width = shape
            return
        count = [str(number) for number in range(2**16)]  # pandas' names for columns without a name
        self.table = table = Table(file, lambda first: is_number(first[-1]) and first != count[: len(first)])
        first = next((batch for batch in table.batches(table.names) if len(batch[0].values)), None)
        if first is None:
            raise InputError(f"{file}: expected a row for each node, found none")
        head = {piece.name: piece for piece in first}
        self.own, name = table.one_of(known), table.names[0]
        is_text = first[0].values.type == "string" and not is_number(str(first[0].values[0]))
        if self.own is None and not has_nodes and is_text:
            self.own = name
            print(f"{file}: column {name!r} is taken for the nodes' names", file=sys.stderr)
        self.columns = [name for name in table.names if name != self.own]
        self._check_columns(head)
        self.num_rows, self.width = table.num_rows, len(self.columns)
        kinds = [head[name].values.type for name in self.columns]
        if self._list:
            values = head[self.columns[0]].values[0].as_py()
            head[self.columns[0]].refuse([not values], "a list of numbers")
            self.width, kinds = len(values), [kinds[0].value_type]
        types = {*map(str, kinds)}
        self.dtype = np.dtype(np.float16 if types == {"halffloat"} else np.float32)

    def _check_columns(self, head: dict[str, Piece]) -> None:
        self._list = any(hasattr(head[name].values.type, "value_type") for name in self.columns)
        if not self.columns or (self._list and len(self.columns) > 1):
            raise refusal(self.table, "columns of numbers, or one of lists", "remove the others from the file")
        hint = "name it with --id-column if it holds node ids, else rename it or remove it from the file"
        for name in self.columns:
            if self.table.header and _NO_FEATURE.fullmatch(name):
                raise refusal(self.table, f"columns of features, not {name!r}", hint)
        name, *others = self.columns
        stem = re.sub(r"\d+$", "", name)  # x of x0, before x1
        if (
            self.own
            or self._list
            or not others
            or len(head[name].values) < _FEW
            or (stem and others[0].startswith(stem))
        ):
            return
        values = numbers(head[name].cast("double", "a number"))
        if (values == np.floor(values)).all() and len(np.unique(values)) == len(values):
            raise refusal(self.table, f"features, not different whole numbers in column {name!r}, like ids", hint)

    def chunks(self, nodes: Nodes) -> Iterator[Array]:
        """Yield rows of features [n, F] in the order of `nodes`: an array's own dtype, else float64."""
        rows = max(1, CHUNK_BYTES // (8 * self.width))
        if self._array is not None:
            yield from slices(self._array, rows)
            return
        for *columns, last in self.table.batches([*self.columns, *([self.own] if self.own else [])]):
            if self.own:
                last.refuse(nodes(last) != last.rows, "the nodes in the order of their names")
            else:
                columns.append(last)
            for begin in range(0, len(last.values), rows):
                pieces = [column[begin : begin + rows] for column in columns]
                pieces = [self._flat(pieces[0])] if self._list else pieces
                values = [numbers(piece.cast("double", "a number")) for piece in pieces]
                yield values[0].reshape(-1, self.width) if self._list else np.stack(values, axis=1)

    def _flat(self, piece: Piece) -> Piece:
        """The numbers in a column of lists, each of `width`."""
        lists = piece.values
        lengths = numbers(pc.if_else(lists.is_null(), -1, pc.list_value_length(lists)).fill_null(-1))
        piece.refuse(lengths != self.width, f"a list of {self.width} numbers")
        return replace(piece, values=lists.flatten(), per_row=self.width)


# Columns by node -----------------------------------------------------------------------------------------------------


def value_columns(table: Table, known: Sequence[str], values: Sequence[str], option: str) -> tuple[str | None, str]:
    """Return the column of node ids, None where row i is node i, and the column of one of the names `values`."""
    own, value = table.one_of(known), table.one_of(values)
    if len(table.names) <= 2 and not table.header:
        own, value = (None, *table.names)[-2:]
    elif len(table.names) == 1 and own is None:
        value = table.names[0]
    if value is None or (own is None and len(table.names) > 1):
        raise refusal(table, f"columns {known[0]} and {values[0]}", option)
    return own, value


def by_node(table: Table, own: str | None, column: str, nodes: Nodes) -> Iterator[tuple[Array, Piece]]:
    """Yield (node ids, values of `column`)."""
    if own is None and table.num_rows != nodes.num_nodes:
        expected = f"expected {nodes.num_nodes} rows, one for each node"
        raise InputError(f"{table.file}: {expected}, found {table.num_rows}; blank lines do not count")
    seen = np.zeros(nodes.num_nodes, bool)
    for piece, *ids_piece in table.batches([column, *([own] if own else [])]):
        ids = nodes(ids_piece[0]) if own else piece.rows
        again = seen[ids]
        again[np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])] = True
        (ids_piece or [piece])[0].refuse(again, "each node once", " again")
        seen[ids] = True
        yield ids, piece


# Labels --------------------------------------------------------------------------------------------------------------


class Labels:
    """A file of labels.

    Attributes:
        own: the column of node ids, or None where row i is node i.
        dtype: of the labels in the file; float64 for text.
    """

    def __init__(self, file: Path, columns: Sequence[str] | None, known: Sequence[str]) -> None:
        names = [*(columns or ()), *known, *_LABEL]
        self.table = table = Table(file, lambda first: not is_named(first, names) and any(map(_is_filled, first)))
        if columns is None:
            hint = f"name them: --label-columns {NODE[0]},{_LABEL[0]}, or only that of labels where row i is node i"
            self.own, self._label = value_columns(table, known, _LABEL, hint)
        else:
            check_named(table, columns, (1, 2), "--label-columns")
            own, self._label = table.one_of(known), columns[-1]
            self.own = columns[0] if len(columns) == 2 else None if own == self._label else own
        kind = next((str(piece.values.type) for piece in table.column(self._label)), "")
        self.dtype = np.dtype(kind if kind.startswith(("int", "uint")) else float)
        leave_out(table, [self.own, self._label])

    def read(self, nodes: Nodes, num_classes: int) -> tuple[Array, Array | None]:
        """Return int32 labels [N], -1 where there is none, and the sorted classes of text labels: UTF-8 bytes [C]."""
        names, labels = self._class_names(num_classes), np.full(nodes.num_nodes, -1, np.int32)
        expected = f"whole labels from 0 to {num_classes - 1}, or NaN or -1 where there is none"
        for ids, piece in by_node(self.table, self.own, self._label, nodes):
            if names:
                places = pc.index_in(without_missing(piece.values), value_set=pa.array(names))
                labels[ids] = places.fill_null(-1).to_numpy()
                continue
            values = numbers(piece.cast("double", "a label"))
            known = ~np.isnan(values) & (values != -1)
            piece.refuse(known & ((values != np.floor(values)) | (values < 0) | (values >= num_classes)), expected)
            labels[ids] = np.where(known, values, -1)
        return labels, np.array([name.encode() for name in names]) if names else None

    def _class_names(self, num_classes: int) -> list[str]:
        """The sorted classes of labels that are text; [] for numbers."""
        names, words = set[str](), set[str]()
        for piece in self.table.column(self._label):
            if piece.values.type != "string":
                return []
            known = without_missing(piece.values)
            names |= {*pc.unique(known.drop_null()).to_pylist()}
            words |= {*pc.unique(piece.values.filter(known.is_null())).to_pylist()} - {None, ""}
            if names and all(map(is_number, names)):
                return []
            if any(map(is_number, names)):
                both = ", ".join(sorted(names)[:5])
                raise InputError(f"{self.table.file}: expected labels of text or of numbers, found both: {both}")
            if len(names) > num_classes:
                raise InputError(f"{self.table.file}: expected at most {num_classes} classes, found more")
        if words and names:  # a class may be called "none"
            print(f"{self.table.file}: taken for no label: {', '.join(sorted(words))}", file=sys.stderr)
        return sorted(names)


def _is_filled(text: str) -> bool:
    return bool(text) and is_number(text)


# Splits --------------------------------------------------------------------------------------------------------------


def read_split(file: Path, nodes: Nodes, known: Sequence[str]) -> Array:
    """Return int64 ids of one split, from a file of ids or a mask."""
    expected = f"node ids [n] or a mask of {nodes.num_nodes} booleans"
    table = Table(file, lambda first: nodes.known(first[:1]) or first[0].lower() in _FLAGS)
    column = table.one_of(known) or table.names[0]
    if len(table.names) > 1:
        raise refusal(table, f"one column, {expected}", "remove the others")
    if table.header and nodes.kind == "string" and file.suffix != ".parquet" and table.one_of(known) is None:
        raise refusal(table, f"in the first line a node, or {known[0]}", "--id-column names another column")
    mask = _mask(table, column)
    if mask is not None and len(mask) > 2:  # two flags may be the ids 0 and 1
        if len(mask) == nodes.num_nodes:
            return np.flatnonzero(mask)
        raise InputError(f"{file}: expected {expected}, found a mask of {len(mask)}")
    return np.concatenate([np.empty(0, np.int64), *map(nodes, table.column(column))])


def _mask(table: Table, column: str) -> Array | None:
    """The mask in a column of booleans, or of zeros and ones alone; None for other values."""
    parts = [np.empty(0, bool)]
    for piece in table.column(column):
        if hasattr(piece.values.type, "value_type"):
            return None
        flags = pc.index_in(pc.utf8_lower(piece.values.cast("string")), value_set=pa.array(_FLAGS))
        if flags.null_count:
            return None
        parts.append(numbers(flags) >= len(_FLAGS) // 2)
    return np.concatenate(parts)


def read_splits(file: Path, nodes: Nodes, known: Sequence[str]) -> dict[str, Array]:
    """Return int64 ids of the splits, from a file that names the split of each node, empty for none."""
    table = Table(file, lambda first: first[-1].lower() in _SPLIT_OF)
    own, column = value_columns(table, known, _SPLIT, "rename them; --id-column names that of the nodes")
    leave_out(table, [own, column])
    parts: dict[str, list[Array]] = {split: [np.empty(0, np.int64)] for split in SPLITS}
    for ids, piece in by_node(table, own, column, nodes):
        words = without_missing(piece.cast("string", "the name of a split"))
        places = pc.index_in(pc.utf8_lower(words), value_set=pa.array([*_SPLIT_OF]))
        wrong = np.asarray(places.is_null()) & np.asarray(words.is_valid())
        piece.refuse(wrong, "train, valid, test or an empty cell")
        places = places.fill_null(-1).to_numpy()
        for place, split in enumerate(_SPLIT_OF.values()):
            parts[split].append(ids[places == place])
    return {split: np.sort(np.concatenate(ids), kind="stable") for split, ids in parts.items()}
