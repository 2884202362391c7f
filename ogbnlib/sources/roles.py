"""Roles of the columns in a user's own files: decided once, for all files together, before any
value is read.

A column has one role: id, source, target, feature, label, split, mask, or left out. What the user
names comes first, then the names that `open_tables` knows. A name that could mean two roles is
refused.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import Problems
from ..graph.checks import SPLITS, refuse_several_labels
from ..graph.table import Table, flags, is_number, numbers
from .data import ROLE_NAMES

NODE = ("node_id", "node", "id")
LABEL, SPLIT = ("label", "y", "class"), ("split", "set")
SPLIT_OF = {
    "train": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "test": "test",
}
_ENDS = (("src", "dst"), ("source", "target"))
_ID_WORDS = ("id", "ids", "idx", "index", "key", "name")
_LABEL_LIKE = (
    *("label", "labels", "y", "class", "classes", "target", "targets"),
    *("ytrue", "truelabel", "nodelabel", "classlabel", "groundtruth"),
)
_MASK_OF = {f"{word}mask": split for word, split in SPLIT_OF.items()}
_MASK_OF |= {f"is{word}": split for word, split in SPLIT_OF.items()}
# Words that say which end of an edge a column is, or that it holds ids: not a kind of node.
_NO_KINDS = {
    *("id", "ids", "idx", "index", "key", "name", "no", "num", "number"),
    *("node", "nodes", "vertex", "vertices", "edge", "source", "src", "target", "tgt"),
    *("destination", "dest", "dst", "from", "to", "in", "out", "start", "end", "begin"),
    *("first", "second", "left", "right", "head", "tail", "origin", "subject", "object"),
    *("parent", "child", "children", "citing", "cited", "cites", "cite", "ref", "reference"),
    *("references", "referenced", "sender", "receiver", "caller", "callee"),
    *("follower", "followee", "followed", "following"),
}
_SHOWN = {"feature": 4}  # more names of one role are counted, not listed
_MOST_SHOWN = 20


def plain(name: str) -> str:
    """Return a name for comparisons: "Train_Mask" and "trainmask" are the same."""
    return re.sub(r"[\W_]+", "", name).lower()


def words(name: str) -> list[str]:
    """Return the words of a name in lower case: paper and id of "paperId_1"."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return re.findall(r"[^\W\d_]+", spaced.lower())


def is_id_like(name: str) -> bool:
    """Whether a name is that of an id or of an index, such as paperId or pandas' Unnamed: 0."""
    if not name or name.startswith("Unnamed: ") or name == "__index_level_0__":
        return True
    return words(name)[-1:] != [] and words(name)[-1] in _ID_WORDS


def kinds(ends: Sequence[str]) -> list[str]:
    """Return the two kinds of nodes that the names of an edge's columns name, [] for one kind or
    none.

    user_id and item_id name two. The ends of one kind have the same word (paper_id_1, paper_id_2),
    words of one stem (lender, lendee), or only words that tell the ends apart (citing, cited).
    """
    named = []
    for end in ends:
        known = [word for word in words(end) if word not in _NO_KINDS and len(word) > 1]
        named.append(known[-1] if known else "")
    first, second = named
    if not first or not second or first[:4] == second[:4]:
        return []
    return named


@dataclass(frozen=True)
class Named:
    """The columns that the user names."""

    edges: Sequence[str] | None = None
    labels: Sequence[str] | None = None
    ids: str | None = None
    left_out: Sequence[str] = ()


@dataclass
class Columns:
    """The columns of one file with their roles; `uses` are the roles of the file itself."""

    table: Table
    uses: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)  # the column of each split
    notes: dict[str, str] = field(default_factory=dict)  # why a column is left out

    def all(self, role: str) -> list[str]:
        return [name for name in self.table.names if self.roles.get(name) == role]

    def one(self, role: str) -> str | None:
        return next(iter(self.all(role)), None)

    @property
    def free(self) -> list[str]:
        """The columns without a role yet."""
        return [name for name in self.table.names if name not in self.roles]

    @property
    def may_be_alone(self) -> bool:
        """Whether an only column needs no name: the header of a csv file may be a value."""
        no_text = not self.table.header or self.table.file.suffix == ".parquet"
        return no_text and len(self.free) == 1

    def find(self, name: str | None) -> str | None:
        """Return the column that the user calls `name`: exactly so, else in any case."""
        if name in self.table.names:
            return name
        lower = (name or "").lower()
        return next((own for own in self.table.names if own.lower() == lower), None)

    def called(self, names: Iterable[str]) -> list[str]:
        """Return the free columns with one of these names."""
        known = {plain(name) for name in names}
        return [name for name in self.free if plain(name) in known]

    def only(self, names: Sequence[str], what: str, option: str) -> str | None:
        """Return the free column with one of these names, None if there is none; two are
        refused."""
        columns = self.called(names)
        if len(columns) > 1:
            both = " and ".join(map(repr, columns))
            hint = f"name one with {option}, or leave one out: --leave-out {columns[1]}"
            raise self.table.refusal(f"one column of {what}, not {both}", hint)
        return columns[0] if columns else None

    def describe(self) -> str:
        """Return one line: the roles, and the columns of each."""
        parts = []
        for role in ("id", "source", "target", "feature", "label", "split", "mask", "left out"):
            names = self.all(role)
            if not names:
                continue
            texts = [repr(name) + self.notes.get(name, "") for name in names]
            most = _SHOWN.get(role, _MOST_SHOWN)
            if len(texts) > most:
                texts = [*texts[: most - 1], f"... ({len(texts)} columns)"]
            parts.append(f"{role} {', '.join(texts)}")
        return f"{self.table.file}: {'; '.join(parts)}"


def _leave_out(columns: Columns, named: Named) -> None:
    for name in named.left_out:
        column = columns.find(name)
        if column is not None:
            columns.roles[column] = "left out"
            columns.notes[column] = " (--leave-out)"


def _ends(columns: Columns, named: Named) -> None:
    """Find source and target."""
    table = columns.table
    ends: list[str | None] = [None]
    if named.edges is not None:
        ends = [columns.find(name) for name in named.edges]
        if len(ends) != 2 or None in ends or ends[0] == ends[1]:
            raise table.refusal(f"two columns {', '.join(named.edges)}", "check --edge-columns")
    elif not table.header and len(table.names) == 2:
        ends = [*table.names]
    else:
        for known in _ENDS:
            found = [columns.find(name) for name in known]
            if None not in found:
                ends = found
    if ends[0] is None or ends[1] is None:
        hint = "name them: --edge-columns SOURCE,TARGET"
        if table.header and len(columns.free) >= 2:
            pair = columns.free[:2]
            hint = f"name them, such as --edge-columns {','.join(pair)}"
            if kinds(pair):
                hint += ", if these two kinds of nodes have no id in common"
        hint += " (1,2 where they have no names); csv files need commas"
        raise table.refusal("columns source and target, or two without names, of node ids", hint)
    columns.roles |= {ends[0]: "source", ends[1]: "target"}


def _ids(columns: Columns, named: Named) -> None:
    """Find the column of node ids, if there is one."""
    labels = named.labels or ()
    wanted = [named.ids]
    if len(labels) == 2:
        wanted.append(labels[0])
    for name in wanted:
        column = columns.find(name)
        if column is not None:
            columns.roles[column] = "id"
            return
    if len(labels) == 1 and columns.find(labels[0]) in columns.called(NODE):
        return
    column = columns.only(NODE, "node ids", "--id-column")
    if column is not None:
        columns.roles[column] = "id"


def _label(columns: Columns, named: Named) -> None:
    """Find the column of labels in the file of labels."""
    table = columns.table
    label = None
    if named.labels is not None:
        own = [columns.find(name) for name in named.labels]
        if not 0 < len(own) <= 2 or None in own or len({*own}) < len(own):
            raise table.refusal(f"the columns {', '.join(named.labels)}", "check --label-columns")
        label = own[-1]
    else:
        label = columns.only(LABEL, "labels", "--label-columns")
    if label is None:
        label = _unnamed(columns)
    if label is None and len(columns.free) > 1:
        _refuse_many(columns)
    if label is None:
        hint = "name it: --label-columns NODE_ID,LABEL, or that of the labels alone"
        if columns.free:
            named_columns = [*columns.all("id"), columns.free[-1]]
            hint = f"name them, such as --label-columns {','.join(named_columns)}"
        raise table.refusal(f"columns {NODE[0]} and {LABEL[0]}", hint)
    columns.roles[label] = "label"
    if named.labels is None:
        _by_row(columns, f"--label-columns {{}},{label}")


def _refuse_many(columns: Columns) -> None:
    """Refuse columns of zeros and ones, true or false, as several labels of a node."""
    table = columns.table
    many = columns.free
    pieces = next(iter(table.batches(many)), [])
    values = [flags(piece) for piece in pieces]
    # pandas' names of columns without a name, which the reader took for a row
    skip = int(not table.header and [piece.values[0].as_py() for piece in pieces] == _counts(many))
    if values and not any(column[skip:].null_count for column in values):
        ids = columns.all("id")
        array = np.stack([numbers(column[skip:]) for column in values], axis=1)
        choose = f"--label-columns {','.join([*ids, many[0]])}"
        refuse_several_labels(array.astype(int), str(table.file), choose=choose)


def _counts(names: Sequence[str]) -> list[str]:
    return [str(number) for number in range(len(names))]


def _split(columns: Columns, named: Named) -> None:
    """Find the column that names each node's split, or the masks of the three splits."""
    split = columns.only(SPLIT, "splits", "another name")
    masks = _masks(columns)
    if split is not None and masks:
        raise columns.table.refusal(
            "a column of splits or masks, not both", f"leave one out: --leave-out {split}"
        )
    if split is None and not masks:
        split = _unnamed(columns)
    if split is None and len(masks) < len(SPLITS):
        hint = "rename them; --id-column names that of the nodes"
        expected = f"columns {NODE[0]} and {SPLIT[0]}, or train_mask, val_mask and test_mask"
        raise columns.table.refusal(expected, hint)
    if split is not None:
        columns.roles[split] = "split"
    else:
        columns.masks |= masks
        columns.roles |= dict.fromkeys(masks.values(), "mask")
    _by_row(columns, "--id-column {}")


def _unnamed(columns: Columns) -> str | None:
    """Return the column of values if it needs no name: an only one, or the second of two."""
    table = columns.table
    if not table.header and len(table.names) == 2 and len(columns.free) == 2:
        columns.roles[table.names[0]] = "id"
    if (columns.one("id") is None or not table.header) and columns.may_be_alone:
        return columns.free[0]
    return None


def _masks(columns: Columns) -> dict[str, str]:
    """Return the free columns that are masks of splits by their names."""
    masks = dict[str, str]()
    for name in columns.called(_MASK_OF):
        split = _MASK_OF[plain(name)]
        if split in masks:
            both = f"{masks[split]!r} and {name!r}"
            raise columns.table.refusal(
                f"one mask of {split}, not {both}", f"leave one out: --leave-out {name}"
            )
        masks[split] = name
    return masks


def _by_row(columns: Columns, option: str) -> None:
    """Refuse to take rows for nodes beside columns that might hold the ids of nodes."""
    defines_nodes = columns.uses & {"features", "nodes"}
    others = [name for name in columns.free if plain(name) not in _MASK_OF]
    if columns.one("id") is not None or defines_nodes or not others:
        return
    # The column to suggest: the one that is named like ids, else the first.
    first = next(filter(is_id_like, others), others[0])
    hint = (
        f"if {first!r} holds the node ids: {option.format(first)}; "
        f"if row i is node i: --leave-out {','.join(others)}"
    )
    raise columns.table.refusal(f"a column {NODE[0]}, or no column of an unknown role", hint)


def _members(split: str, names: Sequence[str]) -> Callable[[Columns, Named], None]:
    """Find the node ids or the mask in the file of one split."""

    def find(columns: Columns, named: Named) -> None:
        mask = _masks(columns).get(split)
        if mask is None:
            mask = columns.only(("mask", *names), f"the split {split}", "another name")
        alone = columns.free
        if mask is None and columns.one("id") is None and columns.may_be_alone:
            columns.roles[alone[0]] = "id"
        if mask is not None:
            columns.masks[split] = mask
            columns.roles[mask] = "mask"
        others = [name for name in columns.free if plain(name) not in _MASK_OF]
        shared = columns.uses - {*SPLITS}
        if (mask is None and columns.one("id") is None) or (others and not shared):
            hint = "--id-column gives it another name, --leave-out removes the others"
            expected = f"one column {NODE[0]} or mask, node ids [n] or a mask of all nodes"
            raise columns.table.refusal(expected, hint)

    return find


def _names(columns: Columns, named: Named) -> None:
    """Find the names in the file of nodes."""
    if columns.one("id") is None and columns.may_be_alone:
        columns.roles[columns.free[0]] = "id"
    if columns.one("id") is None:
        raise columns.table.refusal(f"a column {NODE[0]}", "name it with --id-column")


def _features(columns: Columns, label: str | None) -> None:
    """Give the remaining columns of the file of features their roles; `label` is the name of the
    labels."""
    wrong = []
    for name in columns.free if columns.table.header else ():
        if label is not None and plain(name) == plain(label):
            columns.notes[name] = " (label)"
        elif plain(name) in ("mask", *_MASK_OF):
            columns.notes[name] = " (mask)"
        elif plain(name) in ("split", "splits"):
            columns.notes[name] = " (split)"
        elif is_id_like(name) or plain(name) in _LABEL_LIKE:
            wrong.append(name)
        if name in columns.notes:
            columns.roles[name] = "left out"
    if wrong:
        ids = [name for name in wrong if is_id_like(name)]
        hint = f"leave it out: --leave-out {','.join(wrong)}; or rename it, if it is a feature"
        if ids:
            hint = f"if it holds node ids: --id-column {ids[0]}; else {hint}"
        raise columns.table.refusal(f"columns of features, not {', '.join(map(repr, wrong))}", hint)
    columns.roles |= dict.fromkeys(columns.free, "feature")


_FINDERS: dict[str, Callable[[Columns, Named], None]] = {
    "edges": _ends,
    "labels": _label,
    "splits": _split,
    "nodes": _names,
    **{split: _members(split, ROLE_NAMES[split]) for split in SPLITS},
}


def decide(tables: Mapping[str, Table], named: Named, problems: Problems) -> dict[str, Columns]:
    """Return the columns of each role's file; a file with several roles has one `Columns`.

    Mistakes go to `problems`. Without one, standard error shows a line for each file with columns;
    standard output belongs to the caller.
    """
    of_table: dict[int, Columns] = {}
    for role, table in tables.items():
        of_table.setdefault(id(table), Columns(table)).uses.add(role)
    files = {role: of_table[id(table)] for role, table in tables.items()}
    for columns in of_table.values():
        _leave_out(columns, named)
        if columns.uses != {"edges"}:
            with problems.catch():
                _ids(columns, named)
    for role, find in _FINDERS.items():
        if role in files:
            with problems.catch():
                find(files[role], named)
    label = _name_of_labels(files.get("labels"), named)
    if "features" in files:
        with problems.catch():
            _features(files["features"], label)
    for columns in of_table.values():
        columns.roles |= dict.fromkeys(columns.free, "left out")
    for option, names in (("id_column", [named.ids]), ("leave_out", named.left_out)):
        for name in names:
            if name is not None and not any(columns.find(name) for columns in files.values()):
                problems.add(f"{option}: no file has a column {name!r}")
    if not problems:
        for columns in of_table.values():
            if columns.table.file.suffix != ".npy":
                print(columns.describe(), file=sys.stderr)
    return files


def _name_of_labels(labels: Columns | None, named: Named) -> str | None:
    """Return the name of the labels, None where it is only a number."""
    name = named.labels[-1] if named.labels else None
    if name is None and labels is not None and labels.table.header:
        name = labels.one("label")
    return None if name is None or is_number(name) else name
