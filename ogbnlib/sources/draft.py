"""Roles by canonical names, and the draft of a `dataset.yaml` where names do not decide.

The guide's page data.md lists the names. Values decide nothing but the type of a column.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InputError
from ..files import shown, whereabouts, write_atomically
from ..graph.npz import load
from ..graph.store import is_store
from ..graph.store_format import SPLITS
from .columns import Table
from .description import DESCRIPTION, FILE_ROLES, LEFT_OUT, DataFile, Description, missing_roles
from .formats import READABLE, ending, files_of, format_of, is_parts
from .tables import open_table

TODO = "TODO"
# canonical names of files without their endings, in the order of the description
_STEMS = ("nodes", "features", "labels", "targets", "splits", *SPLITS, "edges")
# the role of an array by its stem, "" for no canonical name; other stems are roles themselves
_ARRAYS = {"": TODO, "splits": TODO, "nodes": "names", "targets": "values"}
_ENDS = {"source": "source", "src": "source", "target": "target", "dst": "target"}
_OF_NODES = {"id": "name", "node_id": "name", "label": "label", "split": "split"}
# the roles of columns by their names, for each stem; `_OF_NODES` for other stems
_COLUMNS = {
    "": {**_ENDS, "label": "label", "split": "split"},
    "edges": {**_ENDS, "weight": "weight"},
    **{split: {"id": split, "node_id": split} for split in SPLITS},
}
# the role of a column of numbers whose name decides nothing, by the file's stem
_OF_NUMBERS = {"nodes": "feature", "features": "feature", "targets": "value"}
# no feature: no name, one that ends in "id", or one that pandas gives to an index
_NO_FEATURE = re.compile(r"|.*id|unnamed: ?\d+|__index_level_\d+__", re.IGNORECASE)
_NUMBER_LIKE = r"(?i)^\s*([-+]?\.?\d[-+\d.,' eE]*|true|false|nan|[-+]?inf)\s*$"
_SAMPLE = 1000  # rows that show the type of a column
_MOST_ALIKE = 20  # columns of one role and type; more share the line of a pattern
_PLAIN = re.compile(r"[^\W\d][\w./-]*|\d+")  # a key that YAML needs no quotes for
_HEAD = """\
# Draft: the role of each file and column of this folder. Replace each TODO, and run the same command
# again. Roles of a column: id (row numbers), name (defines or refers to named nodes), source, target,
# weight, feature, label, value (a number to predict), split, train, valid, test (masks, or the nodes of
# a split in a file of their own), left out. A pattern such as "emb_*" stands for all columns that it
# matches. Roles of an array: edges, features, labels, values, names, train, valid, test, left out. If
# the first line of a text file is data, write `header: none`, and number its columns 1, 2, ... Two
# kinds of nodes whose numbers overlap, such as users and items both from 0, need ids of their own.
"""
_FOOT = """\
# undirected: true       # add the reverse of each edge
# feature_dtype: float16 # or float32, int8
# drop_unknown: true     # leave out edges of names that no node has
# drop_unlabelled: true  # nodes without a label leave the splits
# standardize: true      # or a list of features: subtract the mean, divide by the deviation
# num_classes: 5         # by default the largest label plus one
"""


@dataclass
class _Draft:
    """A file with the roles that names decide.

    Attributes:
        stem: the canonical name, "" for another one.
        comments: type and first values of each column, by its name; an array has the one column "".
    """

    file: DataFile
    stem: str
    comments: dict[str, str]

    @property
    def roles(self) -> Mapping[str, str]:  # by column; TODO where names do not decide
        return self.file.columns or {"": self.file.role}

    @property
    def column_roles(self) -> Sequence[str]:  # of an array, a role such as "edges" has two
        return FILE_ROLES.get(self.file.role, [*self.roles.values()])


def no_data(path: Path) -> InputError:
    """Return the error for a path that is no folder of data."""
    if path.is_dir():
        problem = f"found no files of {READABLE}"
    elif path.is_file():
        problem = "found a file; name its folder, unpack an archive"
    else:
        problem = f"found no such folder{whereabouts()}"
    # data saved by torch; PyG writes processed/data.pt beside pre_filter.pt and pre_transform.pt
    saved = [*path.glob("*.pt"), *path.glob("processed/[!p]*.pt"), path]  # or `path` is the file
    if saved[0].suffix == ".pt":
        load_it = f"torch.load({str(saved[0])!r}, weights_only=False)"
        problem += f"; in Python, if you trust it: ogbnlib.Store.from_data({load_it}, 'new_store')"
    return InputError(f"{path}: expected a folder of data, {problem}")


def describe(folder: Path, file: Path) -> Description:
    """Return the description of a folder if canonical names decide all roles.

    Raises:
        InputError: they do not, and a draft was written to `file`; or the folder has no data.
    """
    drafts = _drafts(folder)
    canonical = [draft for draft in drafts if draft.stem]
    missing = missing_roles([draft.column_roles for draft in canonical])
    undecided = [  # columns that need a role from the user
        f"{draft.file.path.name}: {name!r}"
        for draft in canonical
        for name, role in draft.roles.items()
        if role == TODO
    ]
    if not missing and not undecided:
        unread = ", ".join(draft.file.path.name for draft in drafts if not draft.stem)
        if unread:
            print(f"{folder}: not read, as dataset.yaml gives no role: {unread}", file=sys.stderr)
        return Description(folder, [draft.file for draft in canonical], is_declared=False)
    why = f"names do not decide all roles ({[*undecided, *missing][0]})"  # the first reason
    if file.exists():  # it has options only, and a draft would replace it
        raise InputError(f"{file}: expected roles of `files`: {why}")
    head = [_HEAD, *(f"# Missing: {problem}\n" for problem in missing), "files:\n"]
    text = "".join([*head, *map(_written, drafts), _FOOT])
    try:
        write_atomically(file, lambda out: out.write(text.encode()))
    except OSError as error:
        raise InputError(
            f"{folder}: {why}, and {file} can't be written ({error.strerror}): name a place of your "
            "own by --description FILE"
        ) from None
    raise InputError(
        f"{folder}: {why}; wrote the draft {shown(file)}: complete it, and run the same command again"
    )


def _stem(path: Path) -> str:  # "nodes" of "Nodes.csv.gz"
    return path.name[: len(path.name) - len(ending(path.name))].lower()


def _drafts(folder: Path) -> list[_Draft]:
    """Return the files and folders of parts, those with a canonical name last and in order."""
    paths = [path for path in sorted(folder.iterdir()) if path.name[0] not in "._"]
    paths = [path for path in paths if path.is_file() or (is_parts(path) and not is_store(path))]
    # two files of one canonical name, such as nodes.csv and nodes.npy: the name does not decide
    counts = Counter(map(_stem, paths))
    stems = ["", *(stem for stem in _STEMS if counts[stem] == 1)]
    all_drafts = [_draft(path, _stem(path) if _stem(path) in stems else "") for path in paths]
    drafts = [
        draft
        for path, draft in zip(paths, all_drafts, strict=True)
        # a file of an unknown ending is data if it reads as a table of several columns
        if path.name != DESCRIPTION and (path.is_dir() or format_of(path) or len(draft.roles) > 1)
    ]
    if not drafts:
        raise no_data(folder)
    drafts.sort(key=lambda draft: stems.index(draft.stem))
    nodes = [draft for draft in drafts if draft.stem in ("nodes", "features")]
    if not any("name" in draft.column_roles for draft in nodes):
        for draft in drafts:  # no table defines names, so ids are row numbers
            columns = {
                name: "id" if role == "name" else role for name, role in draft.file.columns.items()
            }
            draft.file = replace(draft.file, columns=columns)
    return drafts


def _draft(path: Path, stem: str) -> _Draft:
    try:
        part = files_of(path)[0]  # the file itself, or the first one of a folder
        if format_of(part) == "array":
            array = load(part)
            file = DataFile(path, str(path), _ARRAYS.get(stem, stem))
            return _Draft(file, stem, {"": f"{array.dtype} {[*array.shape]}"})
        table = open_table(path)
        sample = next(table.batches(table.names, _SAMPLE), [])  # [] for a table without rows
    except InputError as error:
        if stem:
            raise
        # another file need not be data; the draft leaves it out and says why
        return _Draft(DataFile(path, str(path), LEFT_OUT), stem, {"": " ".join(str(error).split())})
    kinds = {piece.name: _kind(piece.values) for piece in sample}
    comments = {piece.name: f"{kinds[piece.name]}: {_first(piece.values)}" for piece in sample}
    file = DataFile(path, str(path), columns=_roles(stem, table, kinds), header=table.header)
    return _Draft(file, stem, comments)


def _kind(values: pa.Array) -> str:
    """Return "numbers", also for text of which half are numbers, or the name of another type."""
    inner = getattr(values.type, "value_type", values.type)  # of the values in lists
    if pa.types.is_string(values.type):
        texts = values.filter(pc.not_equal(pc.utf8_trim_whitespace(values), ""))  # no empty cells
        count = pc.sum(pc.match_substring_regex(texts, _NUMBER_LIKE)).as_py() or 0
        return "numbers" if count * 2 >= max(1, len(texts)) else "text"  # also empty cells alone
    if not str(inner).startswith(("int", "uint", "float", "double", "half", "bool", "decimal")):
        return str(values.type)
    return "numbers" if inner == values.type else "lists of numbers"


def _first(values: pa.Array) -> str:  # on one line
    return " ".join(", ".join(map(str, values[:3].to_pylist())).split())[:60]


def _roles(stem: str, table: Table, kinds: dict[str, str]) -> dict[str, str]:
    """Return the roles that the names of a table and of its columns decide, else TODO."""
    array_roles = FILE_ROLES.get(_ARRAYS.get(stem, stem), ())  # of the array of this stem
    # without names of columns and as wide as the array of this stem: read like the array
    if not table.header and len(table.names) == len(array_roles):
        return dict(zip(table.names, array_roles, strict=True))
    role_of_name = _COLUMNS.get(stem, _OF_NODES) if table.header else {}
    roles = dict.fromkeys(table.names, TODO)
    for name in table.names:
        plain = name.strip().lower()
        is_index = name in table.index or (table.header and _NO_FEATURE.fullmatch(plain))
        is_numeric = "numbers" in kinds.get(name, "")  # also lists of numbers
        if plain in role_of_name:
            roles[name] = role_of_name[plain]
        elif is_numeric and not is_index and plain not in _ENDS:
            roles[name] = _OF_NUMBERS.get(stem, TODO)
    return roles


def _written(draft: _Draft) -> str:
    """Return a file's lines of dataset.yaml; more than `_MOST_ALIKE` columns alike share one."""
    file = draft.file
    key = file.path.name + "/" * file.path.is_dir()
    if file.role:  # an array, or a file left out
        return _line("  ", key, file.role, draft.comments[""])
    lines = [f"  {_quoted(key)}:\n", *["    header: none\n"] * (not file.header)]
    # a comment is the kind of a column, a colon and first values; a table without rows has none
    kinds = {name: draft.comments.get(name, "").partition(":")[0] for name in file.columns}
    counts = Counter((role, kinds[name]) for name, role in file.columns.items())
    [((common_role, common_kind), count)] = counts.most_common(1)
    for name, role in file.columns.items():
        if count <= _MOST_ALIKE or (role, kinds[name]) != (common_role, common_kind):
            lines.append(_line("    ", name, role, draft.comments.get(name, "")))
    if count > _MOST_ALIKE:  # after the exact names, since the pattern matches all
        lines.append(_line("    ", "*", common_role, f"the other {count} columns: {common_kind}"))
    return "".join(lines)


def _line(indent: str, key: str, role: str, comment: str) -> str:
    return f"{indent}{_quoted(key)}: {role}{'  # ' * bool(comment)}{comment}\n"


def _quoted(key: str) -> str:
    return key if _PLAIN.fullmatch(key) else json.dumps(key, ensure_ascii=False)
