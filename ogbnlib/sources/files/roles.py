"""Roles of the columns in a user's own files, decided for all files together before the graph is
read.

A column has one role: id, source, target, feature, label, value (of a target), split, mask, or left
out. Columns that the user names come first, then columns with known names, such as node_id. A name
that could mean two roles is refused.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import Problems
from ...graph.store_format import SPLITS
from ..labels import refuse_several_labels
from .columns import MASK_NAMES, SPLIT_OF, Columns, Table, flags, numbers, option, plain
from .formats import format_of
from .readers import is_number

NODE = ("node_id", "node", "id")
LABEL = ("label", "y", "class")
SPLIT = ("split", "set")
_ENDS = (("source", "target"), ("src", "dst"))
_ID_WORDS = ("id", "ids", "idx", "index", "key", "name")
# Names, as `plain` returns them, that suggest labels. They are refused among the features.
_LABEL_LIKE = (
    *("label", "labels", "y", "class", "classes", "target", "targets"),
    *("ytrue", "truelabel", "nodelabel", "classlabel", "groundtruth"),
)
# Words for an end of an edge, or for ids. They do not name a kind of node.
_NO_KINDS = {
    *("id", "ids", "idx", "index", "key", "name", "no", "num", "number"),
    *("node", "nodes", "vertex", "vertices", "edge", "source", "src", "target", "tgt"),
    *("destination", "dest", "dst", "from", "to", "in", "out", "start", "end", "begin"),
    *("first", "second", "left", "right", "head", "tail", "origin", "subject", "object"),
    *("parent", "child", "children", "citing", "cited", "cites", "cite", "ref", "reference"),
    *("references", "referenced", "sender", "receiver", "caller", "callee"),
    *("follower", "followee", "followed", "following"),
}


def words(name: str) -> list[str]:
    """Return the words of a name in lower case: ["paper", "id"] for "paperId_1"."""
    return re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())


def is_id_like(name: str) -> bool:
    """Whether a name, such as paperId or pandas' Unnamed: 0, suggests ids or an index."""
    if not name or name.startswith("Unnamed: ") or name == "__index_level_0__":
        return True
    return words(name)[-1:] != [] and words(name)[-1] in _ID_WORDS


def kinds(ends: Sequence[str]) -> list[str]:
    """Return the two kinds of nodes in the names of an edge's two columns; [] for one kind or none.

    user_id and item_id name two kinds. Two columns are of one kind if they share a word
    (paper_id_1, paper_id_2) or a stem (lender, lendee). Words that only tell the ends apart
    (citing, cited) name no kind.
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


def _ends(columns: Columns, named: Named) -> None:
    """Find source and target."""
    table = columns.table
    pairs: list[Sequence[str]] = [named.edges] if named.edges is not None else [*_ENDS]
    if named.edges is None and not table.header and len(table.names) == 2:
        pairs = [table.names]
    for pair in pairs:
        ends = [own for own in map(columns.find, pair) if own is not None]
        if len({*ends}) == len(pair) == 2:
            columns.roles |= dict(zip(ends, ("source", "target"), strict=True))
            return
    if named.edges is not None:
        raise table.refusal(f"two columns {', '.join(named.edges)}", "check --edge-columns")
    hint = "name them: --edge-columns SOURCE,TARGET"
    pair = columns.free[:2]
    if table.header and len(pair) == 2:
        hint = f"name them, such as {option('--edge-columns', *pair)}"
    if len(pair) == 2 and kinds(pair):
        hint += ", if these two kinds of nodes have no id in common"
    hint += " (1,2 where they have no names)"
    raise table.refusal("columns source and target, or two without names, of node ids", hint)


def _ids(columns: Columns, named: Named) -> None:
    """Find the column of node ids, if there is one."""
    labels = [columns.find(name) for name in named.labels or ()]
    column = columns.find(named.ids)
    if column is None and len(labels) == 2:
        column = labels[0]
    if column is None:
        column = columns.only(NODE, "node ids")
    if column is not None and column not in labels[-1:]:
        columns.roles[column] = "id"


def _value(columns: Columns, role: str, names: Sequence[str]) -> bool:
    """Find the column of labels or of splits; return whether there is one.

    It is found by its name, as the only column without a role, or as the second of two columns
    without names.
    """
    table = columns.table
    value = columns.only(names, f"{role}s")
    if value is None and not table.header and len(table.names) == len(columns.free) == 2:
        columns.roles[table.names[0]] = "id"
    if value is None and (columns.one("id") is None or not table.header):
        value = columns.alone
    if value is not None:
        columns.roles[value] = role
    return value is not None


def _label(columns: Columns, named: Named) -> None:
    """Find the column of labels in the file of labels."""
    table = columns.table
    if named.labels is not None:
        own = [columns.find(name) for name in named.labels]
        if len(own) not in (1, 2) or None in own or len({*own}) < len(own):
            raise table.refusal(f"the columns {', '.join(named.labels)}", "check --label-columns")
        columns.roles[str(own[-1])] = "label"
    elif _value(columns, "label", LABEL):
        _refuse_rows(columns, "--label-columns", str(columns.one("label")))
    else:
        _refuse_many(columns)
        example = option("--label-columns", *columns.all("id"), *columns.free[-1:])
        raise table.refusal(f"columns {NODE[0]} and {LABEL[0]}", f"name them, such as {example}")


def _refuse_many(columns: Columns) -> None:
    """Refuse several columns of 0 and 1, or of true and false: they give a node several labels."""
    table = columns.table
    many = columns.free
    pieces = next(iter(table.batches(many)), []) if many else []
    # without a header, skip the first row: it may be the names 0, 1, 2 that pandas writes
    values = [flags(piece)[int(not table.header) :] for piece in pieces]
    if len(values) > 1 and not any(column.null_count for column in values):
        array = np.stack([numbers(column) for column in values], axis=1).astype(int)
        refuse_several_labels(
            array, str(table.file), choose=option("--label-columns", *columns.all("id"), many[0])
        )


def _split(columns: Columns, named: Named) -> None:
    """Find the column that names each node's split, or the masks of the three splits."""
    if not _value(columns, "split", SPLIT):
        for split in SPLITS:
            mask = columns.mask(split)
            if mask is None:
                raise columns.table.refusal(
                    f"columns {NODE[0]} and {SPLIT[0]}, or train_mask, val_mask, test_mask",
                    "rename them; --id-column names that of the nodes",
                )
            columns.masks[split] = mask
        columns.roles |= dict.fromkeys(columns.masks.values(), "mask")
    _refuse_rows(columns, "--id-column")


def _refuse_rows(columns: Columns, name: str, *values: str) -> None:
    """Refuse to take row i for node i if a column without a role might hold the ids of nodes."""
    others = [name for name in columns.free if plain(name) not in MASK_NAMES]
    if columns.one("id") is not None or columns.uses & {"features", "nodes"} or not others:
        return
    # Suggest the column that is named like ids, else the first.
    first = next(filter(is_id_like, others), others[0])
    raise columns.table.refusal(
        f"a column {NODE[0]}, or no column of an unknown role",
        f"if {first!r} holds the node ids: {option(name, first, *values)}; "
        f"if row i is node i: {option('--leave-out', *others)}",
    )


def _members(split: str) -> Callable[[Columns, Named], None]:
    """Return the function that finds the node ids or the mask in the file of one split."""

    def find(columns: Columns, named: Named) -> None:
        words = [word for word, own in SPLIT_OF.items() if own == split]
        mask = columns.mask(split) or columns.only(("mask", *words), f"split {split}")
        if mask is not None:
            columns.masks[split] = mask
            columns.roles[mask] = "mask"
        elif columns.one("id") is None and columns.alone is not None:
            columns.roles[columns.alone] = "id"
        others = [name for name in columns.free if plain(name) not in MASK_NAMES]
        is_shared = columns.uses - {*SPLITS}
        if (mask is None and columns.one("id") is None) or (others and not is_shared):
            raise columns.table.refusal(
                f"one column {NODE[0]} or mask, node ids [n] or a mask of all nodes",
                "--id-column gives it another name, --leave-out removes the others",
            )

    return find


def _names(columns: Columns, named: Named) -> None:
    """Find the column of names in the file of nodes."""
    names = columns.one("id") or columns.alone
    if names is None:
        raise columns.table.refusal(f"a column {NODE[0]}", "name it with --id-column")
    columns.roles[names] = "id"


def _values(columns: Columns, named: Named) -> None:
    """Use all columns except the ids as targets; refuse a column whose name suggests ids."""
    ids = [name for name in columns.free if columns.table.header and is_id_like(name)]
    if ids or not columns.free:
        example = option("--id-column", *ids[:1]) if ids else "add them"
        hint = f"{example}; {option('--leave-out', *ids)} otherwise" if ids else example
        raise columns.table.refusal("columns of targets, numbers", hint)
    columns.roles |= dict.fromkeys(columns.free, "value")


def _features(columns: Columns, label: str | None) -> None:
    """Give the remaining columns of the file of features their roles, after all other roles.

    `label` is the name of the column of labels, in whichever file it is.
    """
    others = {**dict.fromkeys(("mask", *MASK_NAMES), "mask"), "split": "split", "splits": "split"}
    if label is not None:
        others[plain(label)] = "label"
    with_names = columns.free if columns.table.header else []
    for name in with_names:
        if plain(name) in others:
            columns.roles[name] = "left out"
            columns.notes[name] = f" ({others[plain(name)]})"
    ids = [name for name in columns.free if name in with_names and is_id_like(name)]
    labels = [name for name in columns.free if name in with_names and plain(name) in _LABEL_LIKE]
    if ids or labels:
        hint = f"{option('--leave-out', *ids, *labels)}, or rename what is a feature"
        if ids:
            hint = f"if {ids[0]!r} holds the node ids: {option('--id-column', ids[0])}; else {hint}"
        refused = ", ".join(map(repr, ids + labels))
        raise columns.table.refusal(f"columns of features, not {refused}", hint)
    columns.roles |= dict.fromkeys(columns.free, "feature")


_FINDERS: dict[str, Callable[[Columns, Named], None]] = {
    "edges": _ends,
    "labels": _label,
    "targets": _values,
    "splits": _split,
    "nodes": _names,
    **{split: _members(split) for split in SPLITS},
}


def decide(tables: Mapping[str, Table], named: Named, problems: Problems) -> dict[str, Columns]:
    """Return the columns of each role's file; a file with several roles has one `Columns`.

    Mistakes go to `problems`. If there is none, a line for each file, except .npy, goes to standard
    error; standard output belongs to the caller.

    Args:
        tables: the table of each role; the roles of one file have the same `Table` object.
    """
    of_table: dict[int, Columns] = {}
    for role, table in tables.items():
        of_table.setdefault(id(table), Columns(table)).uses.add(role)
    files = {role: of_table[id(table)] for role, table in tables.items()}
    for columns in of_table.values():
        columns.leave_out(named.left_out)
    sound = [columns for columns in of_table.values() if _find_roles(columns, named, problems)]
    # last: features are the columns that no other role of the file took
    if files.get("features") in sound:
        with problems.catch():
            _features(files["features"], _label_name(files, named))
    _check_names(files.values(), named, problems)
    if not problems:
        for columns in of_table.values():
            columns.roles |= dict.fromkeys(columns.free, "left out")
            if format_of(columns.table.file) != "array":
                print(columns.describe(), file=sys.stderr)
    return files


def _find_roles(columns: Columns, named: Named, problems: Problems) -> bool:
    """Give a file's columns all roles but feature; return whether there was no mistake.

    The first mistake goes to `problems` and ends the search.
    """
    with problems.catch():
        if columns.uses != {"edges"}:  # ends of edges may be called id, too
            _ids(columns, named)
        # The order matters: the one column left after the labels may be the split.
        for role, find in _FINDERS.items():
            if role in columns.uses:
                find(columns, named)
        return True
    return False  # after a mistake, which ends the block


def _label_name(files: Mapping[str, Columns], named: Named) -> str | None:
    """Return the name of the column of labels; None without such a column or name."""
    label = None
    if named.labels:
        label = named.labels[-1]
    elif "labels" in files:
        label = files["labels"].one("label")
    if label is None or is_number(label):
        return None
    return label


def _check_names(files: Iterable[Columns], named: Named, problems: Problems) -> None:
    """Add a mistake for each name in `leave_out` or `id_column` that no file has."""
    names = [("leave_out", name) for name in named.left_out]
    if named.ids is not None:
        names.insert(0, ("id_column", named.ids))
    for parameter, name in names:
        if all(columns.find(name) is None for columns in files):
            problems.add(f"{parameter}: no file has a column {name!r}")
