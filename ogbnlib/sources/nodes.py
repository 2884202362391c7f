"""Nodes in a user's files: their ids (row numbers, or names from a table), labels and splits."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..graph.array_checks import from_one
from ..graph.npz import Array
from ..graph.store_format import SPLITS, label_dtype
from .columns import Piece, Table, numbers
from .description import LEFT_OUT
from .labels import MAX_CLASSES, clean_labels, count_classes, refuse_several_labels
from .tables import is_number

LONGEST_NAME = 1024  # bytes of UTF-8; in `node_name` each node takes the width of the longest name
# the split that each word in a column of the role split means, in any case
_WORDS = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}


class Nodes:
    """Map from node ids to row numbers.

    Ids are row numbers, or names: text or any whole numbers. A pandas index holds the names as
    64-bit numbers, about 50 bytes a node; text is hashed. Among ten million texts, two have the
    same hash with a probability of 3e-6, and are then refused.

    Args:
        rows: the file whose rows are the nodes, for messages.
        names: the table and the column with the names in row order; None if ids are row numbers.
    """

    def __init__(self, num_nodes: int, rows: str, names: tuple[Table, str] | None = None) -> None:
        self.num_nodes = num_nodes
        self.names = names
        self.kind = "int64"  # of the ids in files: "int64", or "string" for names that are text
        self._width = 1  # bytes of the longest name that is text
        self._expected = (  # a valid id, in words for messages
            f"node ids from 0 to {num_nodes - 1}, the rows of {rows}; "
            "names need a column of names in a table of nodes"
        )
        if names is None:
            return
        table, column = names
        check_rows(table, self, num_nodes)
        if not all(map(_are_whole, table.pieces(column))):
            self.kind = "string"
        self._expected = "the name of a node"
        keys = []  # for each name 64 bits: a whole number itself, or the hash of a text
        for piece in table.pieces(column):
            keys.append(piece.keys(self.kind, self._expected))
            if self.kind == "string":  # the maximum is None for a piece without rows
                self._width = max(self._width, pc.max(_lengths(piece)).as_py() or 1)
        if self._width > LONGEST_NAME:
            _refuse_long_names(table, column)
        self._index = pd.Index(np.concatenate(keys))  # its position i has the key of row i
        if not self._index.is_unique:
            row = int(self._index.duplicated().argmax())
            raise InputError(
                f"{table.file}, row {row}: expected each node once, found one of the rows above again"
            )
        self._expected = f"one of the {num_nodes} nodes in {table.file.name}"

    def of(self, table: Table) -> "Nodes":
        """Return the map to use for a table of values: of row numbers if it has a column of the
        role id, else this one."""
        if table.first("id") is None or self.names is None:
            return self
        return Nodes(self.num_nodes, self.names[0].file.name)

    @property
    def are_reordered(self) -> bool:
        """Whether the names are 0 to num_nodes - 1, but not in the order of the rows."""
        if self.names is None or self.kind == "string" or self._index.is_monotonic_increasing:
            return False
        return np.array_equal(np.sort(self._index.to_numpy()), np.arange(self.num_nodes))

    def is_mask(self, table: Table, split: str) -> bool:
        """Whether a column of the role train, valid or test is a mask, and not a list of nodes: if
        its first value is true or false, or it stands next to columns of other roles."""
        if any(role not in (split, LEFT_OUT) for role in table.roles.values()):
            return True
        filled = (piece for piece in table.pieces(table.all(split)[0]) if len(piece.values))
        first_value = next((piece.values[0].as_py() for piece in filled), None)  # None: no rows
        return str(first_value).strip().lower() in ("true", "false")  # text, or a boolean

    def find(self, piece: Piece) -> Array:
        """Return the row of each name, int64; -1 for a name that no node has."""
        return self._index.get_indexer(piece.keys(self.kind, self._expected))

    def __call__(self, piece: Piece) -> Array:
        """Return the row of each id or name, int64; refuse those that no node has."""
        if self.names is None:
            ids = piece.keys(self.kind, self._expected)  # row numbers, not yet checked
            hint = from_one(ids, self.num_nodes)
        else:
            ids = self.find(piece)  # -1 for unknown names
            hint = "; drop_unknown: true in dataset.yaml leaves out edges of other names"
        piece.refuse((ids < 0) | (ids >= self.num_nodes), self._expected, hint)
        return ids.astype(np.int64, copy=False)

    def chunks(self) -> tuple[np.dtype[Any], Iterator[Array]] | None:
        """Return the names' dtype, int64 or UTF-8 bytes of fixed width, and arrays of the names in
        the order of the nodes; None if the nodes have no names."""
        if self.names is None:
            return None
        table, column = self.names
        pieces = (piece.cast(self.kind, self._expected) for piece in table.pieces(column))
        if self.kind == "int64":
            return np.dtype("<i8"), map(numbers, pieces)
        dtype = np.dtype(f"S{self._width}")
        return dtype, (np.array(names.cast("binary").to_pylist(), dtype) for names in pieces)


def _lengths(names: Piece) -> pa.Array:
    return pc.binary_length(names.values.cast("string"))  # bytes of UTF-8


def _refuse_long_names(table: Table, column: str) -> None:
    # masks of the pieces: the message names the first long name, and counts all of them
    too_long = [pc.greater(_lengths(piece), LONGEST_NAME) for piece in table.pieces(column)]
    count = sum(pc.sum(mask).as_py() or 0 for mask in too_long)  # None for a piece without rows
    expected = f"names of {LONGEST_NAME} bytes at most"
    for piece, mask in zip(table.pieces(column), too_long, strict=True):
        piece.refuse(mask.fill_null(False), expected, f"; {count} names are longer")


def _are_whole(names: Piece) -> bool:
    """Whether names are whole numbers; "007" and "7" are two names of text."""
    values = names.values
    if not pa.types.is_string(values.type):
        return True  # numbers; `Piece.keys` refuses those that are not whole
    with contextlib.suppress(pa.ArrowInvalid):  # a text is no whole number
        return values.cast("int64").cast("string").equals(values)
    return False


def check_rows(table: Table, nodes: Nodes, least: int = 0) -> None:
    """Refuse a table with more rows than nodes, or fewer than `least`: 0, or one for each node. Call
    it before memory use grows with the file: a small compressed file may have billions of rows."""
    if not least <= table.num_rows <= nodes.num_nodes:
        raise InputError(
            f"{table.file}: expected {'at most ' * (not least)}{nodes.num_nodes} rows, one for each "
            f"node, found {table.num_rows}; blank lines do not count"
        )


def _by_node(table: Table, column: str, nodes: Nodes) -> Iterator[tuple[Array, Piece]]:
    """Yield the nodes' row numbers, int64, with each piece of a column; refuse a repeated node.

    Without a column of ids or names in the table, row i is node i, and each node has a row.
    """
    ids_column = table.first("id", "name")
    if ids_column is None:
        check_rows(table, nodes, nodes.num_nodes)
        for piece in table.pieces(column):
            yield np.arange(piece.begin, piece.begin + len(piece.values)), piece
        return
    check_rows(table, nodes)
    find_rows = nodes.of(table)
    seen = np.zeros(nodes.num_nodes, bool)  # nodes in earlier pieces
    for piece, ids_piece in table.batches([column, ids_column]):
        ids = find_rows(ids_piece)
        ids_piece.refuse(seen[ids] | pd.Index(ids).duplicated(), "each node once")
        seen[ids] = True
        yield ids, piece


def _class_names(table: Table, column: str, num_classes: int) -> list[str]:
    """Return the sorted names of the classes as written, [] if labels are numbers."""
    classes = set[str]()
    for piece in table.pieces(column):
        if hasattr(piece.values.type, "value_type") and len(piece.values):  # a list for each node
            refuse_several_labels(str(table.file), len(piece.values[0]))
        if piece.values.type != "string":
            return []
        classes |= {*pc.unique(piece.values.drop_null()).to_pylist()} - {""}  # empty: no label
        if len(classes) > num_classes:
            raise InputError(f"{table.file}: expected at most {num_classes} classes, found more")
    # "nan" is in neither set: it is the name of a class among texts, and no label among numbers
    numeric = {text for text in classes if is_number(text) and any(map(str.isdigit, text))}
    texts = {text for text in classes if not is_number(text)}
    if not numeric:
        return sorted(classes)
    if texts:  # a mixture: the fewer ones are refused as typing errors
        wrong, expected = min((texts, "a number"), (numeric, "text"), key=lambda pair: len(pair[0]))
        for piece in table.pieces(column):
            is_wrong = pc.is_in(piece.values, value_set=pa.array(sorted(wrong)))
            piece.refuse(is_wrong, f"{expected}, as most classes are")
    return []


def read_labels(
    table: Table, nodes: Nodes, num_classes: int | None
) -> tuple[Array, int, Array | None]:
    """Return labels [N], -1 for none, the number of classes, and the sorted names of text classes,
    UTF-8 bytes [C]; None if labels are numbers."""
    column = table.all("label")[0]
    names = _class_names(table, column, num_classes or MAX_CLASSES)
    labels = np.full(nodes.num_nodes, -1, np.int32)
    for ids, piece in _by_node(table, column, nodes):
        if names:  # the class of a name is its position among them, null for an empty cell
            classes = pc.index_in(piece.values, value_set=pa.array(names))
            labels[ids] = classes.fill_null(-1).to_numpy()
        else:
            values = piece.values  # floats keep their type: float16 is exact up to 2,047 only
            if not pa.types.is_floating(values.type):
                values = piece.cast("double", "a number")
            labels[ids] = clean_labels(numbers(values), num_classes or MAX_CLASSES, piece.refuse)
    if num_classes is None:
        num_classes = count_classes([labels], str(table.file))
    class_names = np.array([name.encode() for name in names]) if names else None  # dtype S
    return labels.astype(label_dtype(num_classes)), num_classes, class_names


def _read_split(table: Table, split: str, nodes: Nodes) -> Array:
    """Return int64 ids from the column of the role `split`: a mask over the nodes, or ids."""
    column = table.all(split)[0]
    none = np.empty(0, np.int64)  # numpy can't concatenate no arrays
    if nodes.is_mask(table, split):
        members = [ids[piece.flags()] for ids, piece in _by_node(table, column, nodes)]
        return np.sort(np.concatenate([none, *members]))
    check_rows(table, nodes)
    pieces = [piece for piece in table.pieces(column) if len(piece.values)]
    if nodes.names and pieces and not any((nodes.find(piece) >= 0).any() for piece in pieces):
        print(f"{table.file}: read as row numbers: none of its ids is a name", file=sys.stderr)
        nodes = Nodes(nodes.num_nodes, nodes.names[0].file.name)
    return np.concatenate([none, *map(nodes, pieces)])  # in the order of the file


def read_splits(tables: Sequence[Table], nodes: Nodes) -> dict[str, Array]:
    """Return int64 ids of the splits, from a column of splits or from ids or a mask for each."""
    table_of = {role: table for table in tables for role in table.roles.values()}
    if "split" not in table_of:
        return {split: _read_split(table_of[split], split, nodes) for split in SPLITS}
    table = table_of["split"]
    expected = "train, valid, test or an empty cell"
    parts = {split: [np.empty(0, np.int64)] for split in SPLITS}  # ids from each piece
    for ids, piece in _by_node(table, table.all("split")[0], nodes):
        texts = pc.fill_null(piece.cast("string", expected), "")
        words = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
        positions = pc.index_in(words, value_set=pa.array([*_WORDS]))  # null: another word
        piece.refuse(pc.and_(positions.is_null(), pc.not_equal(words, "")), expected)
        codes = positions.fill_null(-1).to_numpy()  # -1: an empty cell, no split
        for code, split in enumerate(_WORDS.values()):
            parts[split].append(ids[codes == code])
    return {split: np.sort(np.concatenate(ids)) for split, ids in parts.items()}
