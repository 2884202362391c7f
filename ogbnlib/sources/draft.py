"""Roles by canonical names, and the draft of a `dataset.yaml` where names do not decide.

A file called edges, features, labels, nodes, train, valid, test, splits or targets has the role of
its name. In these files, columns called id, node_id, source (src), target (dst), label, split and
weight have theirs; in a table of features or nodes every other column of numbers is a feature,
except one whose name is empty or ends in "id". Values decide nothing but the type of a column.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from ..errors import InputError
from ..files import shown, write_atomically
from ..graph.npz import load
from ..graph.store import is_store
from ..graph.store_format import SPLITS, nearby
from .columns import Piece, Table, numbers
from .description import FILE_ROLES, LEFT_OUT, DataFile, Description, missing_roles
from .formats import READABLE, ending, files_of, format_of, is_parts
from .tables import open_table

TODO = "TODO"
_STEMS = ("nodes", "features", "labels", "targets", "splits", *SPLITS, "edges")  # in this order
_ARRAYS = {"": TODO, "splits": TODO, "nodes": "names", "targets": "values"}  # else the file's name
_OF_NUMBERS = {"nodes": "feature", "features": "feature", "targets": "value"}
_ENDS = {"source": "source", "src": "source", "target": "target", "dst": "target"}
_IDS = ("id", "node_id")
# no feature: a name that ends in "id", and the names that pandas gives to an index
_NO_FEATURE = re.compile(r"|.*id|unnamed: ?\d+|__index_level_\d+__", re.IGNORECASE)
_NUMBER_LIKE = re.compile(r"\s*[-+]?\.?\d[-+\d.,' eE]*\s*|true|false|nan|[-+]?inf", re.IGNORECASE)
_SAMPLE = 1000  # rows that show the type of a column
_MOST_ALIKE = 20  # columns of one role and type; more share the line of a pattern
_PLAIN = re.compile(r"[^\W\d][\w./-]*|\d+")
_HEAD = """\
# Draft: the role of each file and column of this folder. Replace each TODO, and run the same command
# again. Roles of a column: id (row numbers), name (defines or refers to named nodes), source, target,
# weight, feature, label, value (a number to predict), split, train, valid, test (masks, or the nodes of
# a split in a file of their own), left out. A pattern such as "emb_*" stands for all columns that it
# matches. Roles of an array: edges, features, labels, values, names, train, valid, test, left out. If
# the first line of a text file is data, write `header: none`, and number its columns 1, 2, ...
"""
_FOOT = """\
# undirected: true       # add the reverse of each edge
# feature_dtype: float16 # or float32, int8
# drop_unknown: true     # leave out edges of names that no node has
# drop_unlabelled: true  # nodes without a label leave the splits
# num_classes: 5         # by default the largest label plus one
"""


@dataclass
class _Draft:
    """A file with the roles that names decide, and a comment on each column; an array has the one
    column ""."""

    path: Path
    stem: str
    roles: dict[str, str] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    header: bool = True

    @property
    def column_roles(self) -> list[str]:
        if self.is_array:
            return [*FILE_ROLES.get(self.roles[""], (TODO,))]
        return [*self.roles.values()]

    @property
    def is_array(self) -> bool:
        return [*self.roles] == [""]

    def data_file(self) -> DataFile:
        if self.is_array:
            return DataFile(self.path, str(self.path), self.roles[""])
        return DataFile(self.path, str(self.path), columns=self.roles, header=self.header)


def no_data(path: Path) -> InputError:
    """Return the error for a path that is no folder of data, such as a file that only torch reads."""
    saved = [path] if path.suffix in (".pt", ".pth") else [*path.glob("*.pt")]
    saved += [file for file in path.glob("processed/*.pt") if not file.name.startswith("pre_")]
    hint = nearby(path)
    expected = f"{path}: expected a folder of data"
    if saved:
        store = f"{path.stem}_store"
        return InputError(
            f"{expected}, found {saved[0].name}, a file of torch; in Python, if you trust it: "
            f"ogbnlib.Store.from_data(torch.load({str(saved[0])!r}, weights_only=False), {store!r})"
        )
    if path.is_file():
        return InputError(
            f"{expected}, found a file{hint or '; name its folder, unpack an archive'}"
        )
    if path.is_dir():
        return InputError(f"{expected}: files of {READABLE}, found none{hint}")
    return InputError(f"{expected}, found no such folder{hint}")


def describe(folder: Path, file: Path) -> Description:
    """Return the description of a folder if canonical names decide all roles.

    Raises:
        InputError: they do not, and a draft was written to `file`; or the folder has no data.
    """
    drafts = _draft_files(folder)
    canonical = [draft for draft in drafts if draft.stem]
    problems = missing_roles([draft.column_roles for draft in canonical])
    bare = [draft for draft in canonical if TODO in draft.column_roles]
    if not problems and not bare:
        unread = ", ".join(draft.path.name for draft in drafts if not draft.stem)
        if unread:
            print(f"{folder}: not read, as dataset.yaml gives no role: {unread}", file=sys.stderr)
        return Description(folder, [draft.data_file() for draft in canonical], is_declared=False)
    why = "".join(problems[:1])
    if bare:
        columns = [repr(name) for name, role in bare[0].roles.items() if role == TODO]
        why = f"{bare[0].path.name}: {', '.join(columns[:3])}{', ...' * (len(columns) > 3)}"
    why = f"names do not decide all roles ({why})"
    if file.exists():
        raise InputError(f"{file}: expected roles of `files`: {why}")
    lines = [_HEAD, *(f"# Missing: {problem}\n" for problem in problems), "files:\n"]
    text = "".join([*lines, *map(_written, drafts), _FOOT])
    try:
        write_atomically(file, lambda out: out.write(text.encode()))
    except OSError as error:
        raise InputError(
            f"{folder}: {why}, and {file} can't be written ({os.strerror(error.errno or 0)}): name "
            "a place of your own by --description FILE"
        ) from None
    raise InputError(
        f"{folder}: {why}; wrote the draft {shown(file)}: complete it, and run the same command again"
    )


def _draft_files(folder: Path) -> list[_Draft]:
    """Return the readable files and folders of parts, those with a canonical name last and in order."""
    drafts = []
    for path in sorted(folder.iterdir()):
        is_data = path.is_file() or (is_parts(path) and not is_store(path))
        if path.name[0] in "._" or not is_data:
            continue
        stem = path.name[: len(path.name) - len(ending(path.name))].lower()
        draft = _Draft(path, stem if stem in _STEMS else "")
        try:
            _fill(draft)
        except InputError as error:
            if draft.stem:
                raise
            draft.roles = {"": LEFT_OUT}
            draft.comments = {"": " ".join(str(error).split())}
        # a file of an unknown ending is data if it reads as a table
        if path.is_dir() or format_of(path) or len(draft.roles) > 1:
            drafts.append(draft)
    if not drafts:
        raise no_data(folder)
    drafts.sort(key=lambda draft: _STEMS.index(draft.stem) if draft.stem else -1)
    stems = Counter(draft.stem for draft in drafts if draft.stem)
    # without a table that defines names, ids are row numbers
    has_names = any("name" in draft.column_roles for draft in drafts if draft.stem in _STEMS[:2])
    for draft in drafts:
        for name, role in draft.roles.items():
            if role == "name" and not has_names:
                draft.roles[name] = "id"
            if stems[draft.stem] > 1:  # two files of one name: the name does not decide
                draft.roles[name] = TODO
    return drafts


def _fill(draft: _Draft) -> None:
    parts = files_of(draft.path)
    if format_of(parts[0]) == "array":
        array = load(parts[0])
        draft.roles = {"": _ARRAYS.get(draft.stem, draft.stem)}
        draft.comments = {"": f"{array.dtype} {[*array.shape]}"}
        return
    table = open_table(draft.path)
    draft.header = table.header
    sample = next(table.batches(table.names, _SAMPLE), [])
    kinds = {piece.name: _kind(piece.values) for piece in sample}
    for piece in sample:
        values = ", ".join(map(str, piece.values[:3].to_pylist()))
        draft.comments[piece.name] = f"{kinds[piece.name]}: {values}"[:70]
    for name in table.names:
        draft.roles[name] = _role(draft.stem, table, name, kinds.get(name, ""))
    if draft.stem in ("", "edges") and table.header:
        _note_two_kinds(draft, [p for p in sample if kinds[p.name] == "whole numbers"])


def _kind(values: pa.Array) -> str:
    """Return the type of a column of values, of text by most of its first values."""
    if pa.types.is_string(values.type):
        texts = [text for text in values[:_SAMPLE].to_pylist() if text and text.strip()]
        numeric = [text for text in texts if _NUMBER_LIKE.fullmatch(text)]
        if len(numeric) * 2 < max(1, len(texts)):
            return "text"
        if len(numeric) < len(texts):
            return "mostly numbers"
        if all(text.strip().isdecimal() for text in texts):
            return "whole numbers"
        return "numbers"
    inner = getattr(values.type, "value_type", values.type)
    if pa.types.is_temporal(inner) or not str(inner).startswith(
        ("int", "uint", "float", "double", "halffloat", "bool", "decimal")
    ):
        return str(values.type)
    if inner != values.type:
        return "lists of numbers"
    if pa.types.is_integer(inner):
        return "whole numbers"
    return "numbers"


def _role(stem: str, table: Table, name: str, kind: str) -> str:
    """Return the role that a column's name has in a file of this name, or TODO."""
    plain = name.strip().lower() if table.header else ""
    count = 0 if table.header else len(table.names)
    if stem == "edges":
        if count == 2:
            return {"1": "source", "2": "target"}[name]
        return {**_ENDS, "weight": "weight"}.get(plain, TODO)
    if stem in SPLITS and (plain in _IDS or count == 1):
        return stem
    if stem in SPLITS:
        return TODO
    if plain in ("label", "split"):
        return plain
    if not stem:
        return _ENDS.get(plain, TODO)
    if plain in _IDS or (count == 1 and stem == "nodes"):
        return "name"
    if count == 1 and stem == "labels":
        return "label"
    is_index = name in table.index or (table.header and _NO_FEATURE.fullmatch(plain) is not None)
    if stem in _OF_NUMBERS and "numbers" in kind and plain not in _ENDS and not is_index:
        return _OF_NUMBERS[stem]
    return TODO


def _note_two_kinds(draft: _Draft, pieces: Sequence[Piece]) -> None:
    """Say in the comments if two columns of ids may number two kinds of nodes from the same number."""
    open_pieces = [piece for piece in pieces if draft.roles[piece.name] == TODO][:2]
    values = [numbers(piece.cast("double", "a number")) for piece in open_pieces]
    ranges = [(column.min(), column.max()) for column in values]
    if len(ranges) == 2 and ranges[0][0] <= ranges[1][1] and ranges[1][0] <= ranges[0][1]:
        texts = [
            f"{piece.name} ({low:g} to {high:g})"
            for piece, (low, high) in zip(open_pieces, ranges, strict=True)
        ]
        draft.comments[open_pieces[1].name] += (
            f"\n    # {' and '.join(texts)} overlap in the first rows: if they\n"
            "    # number two kinds of nodes, give each kind ids of its own"
        )


def _written(draft: _Draft) -> str:
    key = draft.path.name + "/" * draft.path.is_dir()
    if draft.is_array:
        return _line("  ", key, draft.roles[""], draft.comments.get("", ""))
    lines = [f"  {_quoted(key)}:\n", *["    header: none\n"] * (not draft.header)]
    kinds = {name: draft.comments.get(name, "").partition(":")[0] for name in draft.roles}
    (most, count), *_ = Counter((draft.roles[name], kinds[name]) for name in kinds).most_common(1)
    for name, role in draft.roles.items():
        if count <= _MOST_ALIKE or (role, kinds[name]) != most:
            lines.append(_line("    ", name, role, draft.comments.get(name, "")))
    if count > _MOST_ALIKE:
        lines.append(_line("    ", "*", most[0], f"the other {count} columns: {most[1]}"))
    return "".join(lines)


def _line(indent: str, key: str, role: str, comment: str) -> str:
    return f"{indent}{_quoted(key)}: {role}{'  # ' * bool(comment)}{comment}\n"


def _quoted(key: str) -> str:
    return key if _PLAIN.fullmatch(key) else json.dumps(key, ensure_ascii=False)
