"""Labels and splits of the nodes, from a user's files."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import InputError, naming
from ...graph.array_checks import from_one
from ...graph.npz import Array
from ...graph.store_format import SPLITS, label_dtype
from ..labels import (
    MAX_CLASSES,
    NOT_CLASSES,
    count_classes,
)
from .columns import SPLIT_OF, Columns, Nodes, Piece, Table, flags, numbers, without_missing
from .readers import is_number

_SEPARATORS = r"[,;|]"


def _check_rows(table: Table, nodes: Nodes, one_each: bool = False) -> None:
    """Refuse more rows than nodes, or with `one_each` any other number than that of the nodes.

    This comes before memory use grows with the file: a small compressed file may have billions of
    rows.
    """
    if one_each and table.num_rows != nodes.num_nodes:
        raise InputError(
            f"{table.file}: expected {nodes.num_nodes} rows, one for each node, found "
            f"{table.num_rows}; blank lines do not count"
        )
    if table.num_rows > nodes.num_nodes:
        raise InputError(
            f"{table.file}: expected at most {nodes.num_nodes} rows, the number of nodes, found "
            f"{table.num_rows}"
        )


def _by_node(
    table: Table, own: str | None, columns: Sequence[str], nodes: Nodes
) -> Iterator[tuple[Array, list[Piece]]]:
    """Yield (node ids, values of `columns`) in pieces; refuse a node that comes twice.

    Without a column `own` of ids, row i is node i.
    """
    _check_rows(table, nodes, one_each=own is None)
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
    """Whether a field holds several labels.

    It is in square brackets, or has several parts: in other brackets, all numbers, or all
    `classes`.
    """
    text = text.strip()
    parts = [part.strip() for part in re.split(_SEPARATORS, text)]
    brackets = text[:1] + text[-1:]
    are_several = brackets in ("()", "{}") or classes.issuperset(parts)
    if brackets == "[]" or (len(parts) > 1 and are_several):
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
    piece.refuse(
        several,
        "one label",
        "; several labels a node are not supported: use one, and train a model for each",
    )


def _class_names(table: Table, column: str, num_classes: int) -> list[str]:
    """Return the sorted names of the classes, [] if labels are numbers."""
    classes = set[str]()
    others = set[str]()
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
    """Return labels [N], -1 for none, the number of classes, and the names of text classes.

    The names are sorted UTF-8 bytes [C]; None if labels are numbers.
    """
    table = columns.table
    column = columns.all("label")[0]
    _check_rows(table, nodes, one_each=columns.one("id") is None)
    names = _class_names(table, column, num_classes or MAX_CLASSES)
    labels = np.full(nodes.num_nodes, -1, np.int32)
    kind = ""
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
        question = from_one(labels[labels >= 0], num_classes - 1)
        if question:
            print(f"{table.file}: labels from 1 to {num_classes - 1}{question}", file=sys.stderr)
    class_names = np.array([name.encode() for name in names]) if names else None
    return labels.astype(label_dtype(num_classes)), num_classes, class_names


def _mask(piece: Piece) -> Array:
    """Return a mask as booleans; an empty cell means no member."""
    values = flags(piece)
    is_known = without_missing(piece.cast("string", "true or false")).is_valid()
    piece.refuse(pc.and_(values.is_null(), is_known), "true or false")
    return numbers(values.fill_null(False)).astype(bool)


def read_split(columns: Columns, split: str, nodes: Nodes) -> Array:
    """Return int64 ids of one split, from a column of ids or from a mask.

    Without a column of ids beside it, a mask of one or two rows must be boolean: 0 and 1 could be
    ids.
    """
    table = columns.table
    own = columns.one("id")
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
    """Return the booleans of a mask [N], or None if the column holds ids.

    More than two values of 0 and 1 are no ids, because a split never repeats an id.
    """
    parts = []
    for (piece,) in table.batches([column]):
        values = flags(piece, "node ids or a mask")
        is_bool = pa.types.is_boolean(piece.values.type)
        if values.null_count or (table.num_rows <= 2 and not is_bool):
            _check_rows(table, nodes)
            return None
        # of a file with too many rows, which is refused below, the first ones are enough
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
    """Return int64 ids of the splits, from one mask per split or from a column with the split of
    each node, empty for none."""
    own = columns.one("id")
    names = columns.all("split")
    parts = {split: [np.empty(0, np.int64)] for split in SPLITS}
    masks = [columns.masks[split] for split in SPLITS] if not names else []
    for ids, pieces in _by_node(columns.table, own, names or masks, nodes):
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


def read_split_dict(file: Path) -> dict[str, Array]:
    """Return int64 ids of the splits in MAG240M's split_dict.pt. Test is empty, because its papers
    have no public labels."""
    import torch
    from torch.serialization import safe_globals

    reconstruct = np.empty(0).__reduce__()[0]
    # what torch needs to load numpy's integer arrays, by its names in numpy 1 and numpy 2
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    safe: list[Any] = [
        *((reconstruct, name) for name in names),
        np.ndarray,
        np.dtype,
        type(np.dtype("i8")),
    ]
    with naming(file, "a dict of train and valid, int64 ids, saved by torch"), safe_globals(safe):
        content = torch.load(file, weights_only=True)
        splits = {split: np.asarray(content[split], np.int64) for split in SPLITS[:2]}
    return {**splits, "test": np.empty(0, np.int64)}
