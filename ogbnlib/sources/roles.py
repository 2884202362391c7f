"""What the columns of one's own files stand for: features, labels and splits, read in pieces and checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..graph.checks import SPLITS
from ..graph.npz import CHUNK_BYTES, Array, load, slices
from ..graph.table import Nodes, Table, Where, cast, is_number, numbers, without_missing

NODE = ("node_id", "node", "id")
_LABEL, _SPLIT = ("label", "y", "class"), ("split", "set")
_SPLIT_OF = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}
_FLAGS = ("false", "0", "0.0", "true", "1", "1.0")  # the second half is in
# Column names of what is hardly a feature: ids, as paper_id and paperId, pandas' index, and what is to be learnt.
_NO_FEATURE = re.compile(r"(.*[^a-zA-Z])?(ids?|ID|idx|index|key|name)|\w*[a-z](Id|ID|Idx)|labels?|class|target|split")
_FEW = 20  # rows in which distinct whole numbers may be a feature by chance


def is_index(name: str) -> bool:
    """Whether pandas writes its index under this name."""
    return name in ("", "__index_level_0__") or name.startswith("Unnamed: ")


def refusal(table: Table, expected: str, hint: str) -> InputError:
    """The sentence for columns that are neither known nor named."""
    names = ", ".join(map(repr, table.names)) if table.header else f"{len(table.names)}, without names"
    pandas = [f" ({name!r} is pandas' index: index=False leaves it out)" for name in table.names if is_index(name)]
    return InputError(f"{table.file}: expected {expected}, found columns {names}{''.join(pandas[:1])}; {hint}")


def named(first: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of these fields is one of the names of columns, in any case."""
    return bool({text.lower() for text in first} & {name.lower() for name in names})


def leave_out(table: Table, used: Sequence[str | None]) -> None:
    """Say which columns are not used."""
    if others := [name for name in table.names if name not in used]:
        text = f"{table.file}: left out: {'column' if len(others) == 1 else 'columns'} {', '.join(map(repr, others))}"
        print(text, file=sys.stderr)  # standard output belongs to the caller


def check_named(table: Table, given: Sequence[str], counts: Sequence[int], option: str) -> None:
    """Check columns that an option names."""
    missing = [name for name in given if name not in table.names]
    if len(given) not in counts or missing or len(set(given)) < len(given):
        wrong = f"no {missing[0]}" if missing and len(given) in counts else f"{len(given)} names"
        wrong = f"{given[0]} twice" if len(set(given)) < len(given) else wrong
        many = " or ".join(["one", "two"][count - 1] for count in counts)
        expected = f"expected {many} of its columns, {', '.join(table.names)}"
        raise InputError(f"{table.file}: {expected}, found {wrong} ({option})")


# Features ------------------------------------------------------------------------------------------------------------


class Features:
    """A file of features, and the column of it that names the nodes.

    Attributes:
        own: the column of node ids, or None.
        width: features of a node.
        dtype: of the features in the file; float32 for what is no array and not float16.
    """

    def __init__(self, file: Path, known: Sequence[str], has_nodes: bool) -> None:
        self.file, self.own, self._list = file, None, False
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._array = load(file) if file.suffix == ".npy" else None
        if self._array is not None:
            self.dtype = self._array.dtype
            if self._array.ndim != 2 or 0 in self._array.shape or self.dtype.kind not in "fiub":
                found = f"{self.dtype} {list(self._array.shape)}"
                raise InputError(f"{file}: expected features [N, F], numbers, at least one of each, found {found}")
            self.width = self._array.shape[1]
            return
        count = [str(number) for number in range(2**16)]
        self.table = table = Table(file, lambda first: is_number(first[-1]) and first != count[: len(first)], "")
        self.own = table.one_of(known)
        first = next((batch for _, batch in table.batches(table.names) if len(batch[0])), None)
        if first is None:
            raise InputError(f"{file}: expected a row for each node, found none")
        head = dict(zip(table.names, first, strict=True))
        name = table.names[0]
        if self.own is None and not has_nodes and head[name].type == "string" and not is_number(str(head[name][0])):
            self.own = name
            print(f"{file}: column {name!r} is taken for the nodes' names", file=sys.stderr)
        self.columns = [name for name in table.names if name != self.own]
        self._check_columns(head)
        self.width = len(self.columns)
        if self._list:
            length = head[self.columns[0]][0].as_py()
            self.width = len(length or [])
            if not length:
                raise InputError(f"{table.where(0)}: expected a list of numbers, found {length}")
        types = {str(getattr(head[name].type, "value_type", head[name].type)) for name in self.columns}
        self.dtype = np.dtype(np.float16 if types == {"halffloat"} else np.float32)

    @property
    def num_rows(self) -> int:
        """Of a csv file only a pass over it tells."""
        return self.table.num_rows if self._array is None else len(self._array)

    def _check_columns(self, head: dict[str, Any]) -> None:
        lists = [name for name in self.columns if hasattr(head[name].type, "value_type")]
        self._list = bool(lists)
        if not self.columns or (lists and len(self.columns) > 1):
            raise refusal(self.table, "columns of numbers, or one of lists", "leave the others out of the file")
        hint = "; name it with --id-column if it holds the ids of the nodes, else leave it out of the file or rename it"
        if self.table.header:
            for name in self.columns:
                if is_index(name) or _NO_FEATURE.fullmatch(name):
                    raise refusal(self.table, f"columns of features, not {name!r}", hint[2:])
        name, *others = self.columns
        stem = re.sub(r"\d+$", "", name)  # x of x0, before x1
        if self.own or lists or not others or len(head[name]) < _FEW or (stem and others[0].startswith(stem)):
            return
        values = numbers(cast(head[name], "double", self._where(name), 0, "a number"))
        if (values == np.floor(values)).all() and len(np.unique(values)) == len(values):
            found = f"expected columns of features, found different whole numbers in column {name!r}, as ids would be"
            raise InputError(f"{self.file}: {found}{hint}")

    def chunks(self, nodes: Nodes) -> Iterator[Array]:
        """Rows of features [n, F], of an array in its own dtype, else float64, in the order of `nodes`.

        Raises:
            InputError: naming the row, for what is no number, a list of another length, or a row of another node.
        """
        rows = max(1, CHUNK_BYTES // (8 * self.width))
        if self._array is not None:
            yield from slices(self._array, rows)
            return
        where = self.table.where
        for start, batch in self.table.batches([*self.columns, *([self.own] if self.own else [])]):
            if self.own:
                wrong = nodes(batch[-1], where, start) != np.arange(start, start + len(batch[0]))
                if wrong.any():
                    row = int(wrong.argmax())
                    found = f"found {batch[-1][row]} out of order"
                    raise InputError(f"{where(start + row)}: expected the nodes in the order of their names, {found}")
            for begin in range(0, len(batch[0]), rows):
                pieces = [values[begin : begin + rows] for values in batch[: len(self.columns)]]
                yield self._from_lists(pieces[0], start + begin) if self._list else self._rows(pieces, start + begin)

    def _rows(self, pieces: list[Any], begin: int) -> Array:
        columns = zip(self.columns, pieces, strict=True)
        return np.stack(
            [numbers(cast(values, "double", self._where(name), begin, "a number")) for name, values in columns], axis=1
        )

    def _where(self, name: str) -> Where:
        return lambda row: f"{self.table.where(row)}, column {name!r}"

    def _from_lists(self, values: Any, begin: int) -> Array:
        import pyarrow.compute as pc

        lengths = numbers(pc.if_else(values.is_null(), -1, pc.list_value_length(values)).fill_null(-1))
        if (wrong := lengths != self.width).any():
            row = int(wrong.argmax())
            found = "none" if lengths[row] < 0 else f"one of {lengths[row]}"
            raise InputError(f"{self.table.where(begin + row)}: expected a list of {self.width} numbers, found {found}")

        flat = cast(values.flatten(), "double", lambda at: self.table.where(begin + at // self.width), 0, "a number")
        return numbers(flat).reshape(-1, self.width)


# Labels --------------------------------------------------------------------------------------------------------------


class Labels:
    """A file of labels: its table, the column of labels and that of node ids, None where row i is node i."""

    def __init__(self, file: Path, given: Sequence[str] | None, known: Sequence[str]) -> None:

        def is_data(first: list[str]) -> bool:
            return not named(first, [*(given or ()), *known, *_LABEL]) and any(t and is_number(t) for t in first)

        self.table = table = Table(file, is_data, "one label a node [N]")
        self.own, label = table.one_of(known), table.one_of(_LABEL)
        if given is not None:
            check_named(table, given, (1, 2), "--label-columns")
            self.own, label = (self.own if self.own != given[-1] else None), given[-1]
            self.own = given[0] if len(given) == 2 else self.own
        elif len(table.names) == 1 and self.own is None:
            label = table.names[0] if not is_index(table.names[0]) or not table.header else None
        elif not table.header and len(table.names) == 2:
            self.own, label = table.names
        if label is None or (self.own is None and given is None and len(table.names) > 1):
            hint = f"name them: --label-columns {NODE[0]},{_LABEL[0]}, or only that of labels where row i is node i"
            raise refusal(table, f"columns {known[0]} and {_LABEL[0]}", hint)
        self.label, kind = label, next((str(values.type) for _, (values,) in table.batches([label])), "")
        self.dtype = np.dtype(kind if kind.startswith(("int", "uint")) else float)
        self._missing: set[str] = set()  # words for no label
        leave_out(table, [self.own, label])

    def read(self, nodes: Nodes, num_classes: int) -> tuple[Array, Array | None]:
        """int32 [N], -1 where there is no label; and of text, the classes' names, sorted: UTF-8 bytes [C].

        Raises:
            InputError: naming the row, for what is no label or no node, and nodes that come twice.
        """
        codes: dict[str, int] | None = None  # of classes that are text, in the order of their first nodes
        values, seen = np.full(nodes.num_nodes, -1, np.int32), np.zeros(nodes.num_nodes, bool)
        where, num_rows = self.table.where, 0
        for begin, batch in self.table.batches([self.label, *([self.own] if self.own else [])]):
            num_rows = begin + len(batch[0])
            ids = nodes(batch[1], where, begin) if self.own else np.arange(begin, min(num_rows, nodes.num_nodes))
            again = seen[ids]
            again[np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])] = True
            if again.any():
                at = int(again.argmax())
                raise InputError(f"{where(begin + at)}: expected each node once, found {batch[1][at]} again")
            seen[ids] = True
            found, codes = self._codes(batch[0], begin, num_classes, codes)
            values[ids] = found[: len(ids)]
        if not self.own and num_rows != nodes.num_nodes:
            hint = "; blank lines do not count" * (".csv" in self.table.file.name)
            expected = f"expected {nodes.num_nodes} labels, one for each row of {nodes.rows}"
            raise InputError(f"{self.table.file}: {expected}, found {num_rows}{hint}")
        if not codes:
            return values, None
        names = sorted(codes)
        places = np.empty(len(names) + 1, np.int32)
        places[[codes[name] for name in names]], places[-1] = np.arange(len(names)), -1
        return places[values], np.array([name.encode() for name in names])

    def _codes(self, values: Any, begin: int, num_classes: int, codes: dict[str, int] | None) -> tuple[Array, Any]:
        import pyarrow.compute as pc

        where = self.table.where
        if values.type == "string":
            texts, values = values, without_missing(values)
            some = values.drop_null()
            if codes is None and len(some) and not is_number(some[0].as_py()):
                codes = {}
            if codes is not None and len(some):
                for name in pc.unique(some).to_pylist():
                    if is_number(name):
                        row = begin + int(pc.index(values, name).as_py())
                        raise InputError(f"{where(row)}: expected a label of text as before it, found {name!r}")
                    codes.setdefault(name, len(codes))
                    if len(codes) > num_classes:
                        raise InputError(f"{self.table.file}: expected at most {num_classes} classes, found more")
                words = {*pc.unique(texts.filter(values.is_null())).to_pylist()} - {None, "", *self._missing}
                for word in sorted(words):  # which may be a class
                    print(f"{self.table.file}: {word!r} is taken for no label", file=sys.stderr)
                self._missing |= words
                coded = values.dictionary_encode()
                places = np.array([*(codes[name] for name in coded.dictionary.to_pylist()), -1])
                return places[coded.indices.fill_null(-1).to_numpy()], codes
        found = numbers(cast(values, "double", where, begin, "a label"))
        known = ~np.isnan(found) & (found != -1)
        wrong = known & ((found != np.floor(found)) | (found < 0) | (found >= num_classes))
        if wrong.any():
            at = int(wrong.argmax())
            expected = f"expected whole labels from 0 to {num_classes - 1}, or NaN or -1 where there is none"
            raise InputError(f"{where(begin + at)}: {expected}, found {values[at].as_py()}")
        return np.where(known, found, -1).astype(np.int32), codes


# Splits --------------------------------------------------------------------------------------------------------------


def read_split(file: Path, nodes: Nodes, known: Sequence[str]) -> Array:
    """int64 ids of one split, by a file of ids or a mask.

    Raises:
        InputError: naming the row, for what is no node; for a mask that is not of all nodes.
    """

    def is_data(first: list[str]) -> bool:
        return nodes.known(first[:1]) or first[0].lower() in _FLAGS

    expected = f"node ids [n] or a mask of {nodes.num_nodes} booleans"
    table = Table(file, is_data, expected)
    column = table.one_of(known) or table.names[0]
    if len(table.names) > 1 or (table.header and is_index(column)):
        raise refusal(table, f"one column, {expected}", "keep that one alone")
    if table.header and nodes.kind == "string" and file.suffix != ".parquet" and table.one_of(known) is None:
        raise refusal(table, f"in the first line a node, or {known[0]}", "--id-column names another column")
    if (mask := _mask(table, column)) is not None and len(mask) > 2:
        if len(mask) == nodes.num_nodes:
            return np.flatnonzero(mask)
        raise InputError(f"{file}: expected {expected}, found a mask of {len(mask)}")
    found = [nodes(values, table.where, begin) for begin, (values,) in table.batches([column])]
    return np.concatenate([np.empty(0, np.int64), *found])


def _mask(table: Table, column: str) -> Array | None:
    """The mask in a column of booleans, or of zeros and ones alone; None for other values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [np.empty(0, bool)]
    for _, (values,) in table.batches([column]):
        if hasattr(values.type, "value_type") or pa.types.is_temporal(values.type):
            return None
        flags = pc.index_in(pc.utf8_lower(values.cast("string")), value_set=pa.array(_FLAGS))
        if flags.null_count:
            return None
        parts.append(numbers(flags) >= len(_FLAGS) // 2)
    return np.concatenate(parts)


def read_splits(file: Path, nodes: Nodes, known: Sequence[str]) -> dict[str, Array]:
    """int64 ids of the splits, by a file of the split of each node; a node of none has an empty one.

    Raises:
        InputError: naming the row, for what is no node or no split.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    table = Table(file, lambda first: first[-1].lower() in _SPLIT_OF, "the split of each node [N]")
    own, column = table.one_of(known), table.one_of(_SPLIT)
    if not table.header and len(table.names) <= 2:
        own, column = (None, *table.names)[-2:]
    if column is None or (own is None and len(table.names) > 1):
        raise refusal(table, f"columns {known[0]} and {_SPLIT[0]}", "rename them; --id-column names that of the nodes")
    leave_out(table, [own, column])
    found: dict[str, list[Array]] = {split: [np.empty(0, np.int64)] for split in SPLITS}
    if own is None and table.num_rows != nodes.num_nodes:
        raise InputError(f"{file}: expected the splits of {nodes.num_nodes} nodes, found {table.num_rows}")
    for begin, batch in table.batches([column, *([own] if own else [])]):
        ids = nodes(batch[1], table.where, begin) if own else np.arange(begin, begin + len(batch[0]))
        words = without_missing(cast(batch[0], "string", table.where, begin, "the name of a split"))
        places = pc.index_in(pc.utf8_lower(words), value_set=pa.array(list(_SPLIT_OF)))
        wrong = np.asarray(places.is_null()) & np.asarray(words.is_valid())
        if wrong.any():
            at = int(wrong.argmax())
            raise InputError(f"{table.where(begin + at)}: expected train, valid, test or an empty cell, "
                             f"found {words[at].as_py()!r}")  # fmt: skip
        places = places.fill_null(-1).to_numpy()
        for place, split in enumerate(_SPLIT_OF.values()):
            found[split].append(ids[places == place])
    return {split: np.sort(np.concatenate(parts), kind="stable") for split, parts in found.items()}
