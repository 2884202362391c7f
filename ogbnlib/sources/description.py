"""Description of a folder: the file `dataset.yaml`, which declares the roles of files and columns."""

import contextlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ..errors import InputError, unknown_name
from ..files import home
from ..graph.store_format import SPLITS
from ..parameters import Text, read_yaml
from .formats import files_of, format_of
from .labels import check_num_classes

DESCRIPTION = "dataset.yaml"
LEFT_OUT = "left out"
COLUMN_ROLES = (
    *("id", "name", "source", "target", "weight", "feature", "label", "value", "split"),
    *("train", "valid", "test", LEFT_OUT),
)
# roles of a file of one array, each with the roles of its columns
FILE_ROLES = {
    "edges": ("source", "target"),
    "features": ("feature",),
    "labels": ("label",),
    "values": ("value",),
    "names": ("name",),
    **{split: (split,) for split in SPLITS},
    LEFT_OUT: (),
}
FeatureDtype = Literal["float16", "float32", "int8"]
# options that are words, with the words
_WORDS = {
    **dict.fromkeys(("undirected", "drop_unknown", "drop_unlabelled"), ("true", "false")),
    "feature_dtype": get_args(FeatureDtype),
}
_FEATURES = 'np.save("features.npy", np.ones((num_nodes, 1), "float32"))'
_EXAMPLE = "files: {edges.csv: {citing: source, cited: target}}"


@dataclass(frozen=True)
class Options:
    """Options of a conversion, in `dataset.yaml`; arguments of `convert` come before them.

    Attributes:
        undirected: add reverse edges, sort each node's in-edges, drop duplicates; None as in the
            data.
        feature_dtype: of the new store; None as in the data, float64 as float32.
        num_classes: None for the largest label plus one.
        drop_unknown: leave out edges of names that no node has.
        drop_unlabelled: take nodes without a label out of the splits.
        standardize: see `convert`.
    """

    undirected: bool | None = None
    feature_dtype: FeatureDtype | None = None
    num_classes: int | None = None
    drop_unknown: bool = False
    drop_unlabelled: bool = False
    standardize: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        check_num_classes(self.num_classes)
        for name, words in _WORDS.items():
            value = getattr(self, name)
            word = value if isinstance(value, str) else str(value).lower()  # "true" for True
            is_flag_text = word is value and name != "feature_dtype"  # "false" would count as true
            if value is not None and (word not in words or is_flag_text):
                raise InputError(f"{name}: expected {' or '.join(words)}, got {value!r}")
        if not isinstance(self.standardize, bool | list | tuple):
            raise InputError(
                f"standardize: expected true, false or a list of columns, got {self.standardize!r}"
            )

    def overridden(self, **values: Any) -> Self:
        """Return the options with `values` in place of their own; a None replaces nothing."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class DataFile:
    """A file, a folder of parts or a pattern, with its roles.

    Attributes:
        where: the file and line of the roles, for messages.
        role: one of `FILE_ROLES` for an array or a file left out; "" for a table.
        columns: roles of a table's columns, by name or by pattern such as "emb_*".
        header: whether a file of text has a header.
    """

    path: Path
    where: str
    role: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    header: bool = True


@dataclass(frozen=True)
class Description:
    """A folder's files with their roles, from `dataset.yaml` or by canonical names.

    Attributes:
        files: in the order in which features are joined; the first table with a column of names
            defines the nodes.
        is_declared: whether the user declared the roles.
    """

    folder: Path
    files: Sequence[DataFile]
    is_declared: bool = True
    options: Options = Options()


def missing_roles(roles: Sequence[Sequence[str]]) -> list[str]:
    """Return the requirements that the roles of the columns, a list for each file, do not meet."""
    count = Counter(role for file in roles for role in file)
    splits = [count[role] for role in ("split", *SPLITS)]
    has_edges = any({"source", "target"} <= {*file} for file in roles)  # both in one file
    num_labels = count["label"] + sum("value" in file for file in roles)
    needs = {  # each with what was found, and whether it is met
        f"one file of edges, with a source and a target, found {count['source']}": (
            has_edges and count["source"] == count["target"] == 1
        ),
        f"features, found none; without any: {_FEATURES}": "feature" in count,
        f"a label, or values in one file, found {num_labels}": num_labels == 1,
        "either a column of the role split, or train, valid and test once each (an empty .csv file "
        "is a split without nodes)": splits in ([1, 0, 0, 0], [0, 1, 1, 1]),
    }
    return [f"expected {need}" for need, is_met in needs.items() if not is_met]


def read_description(file: Path, folder: Path) -> Description:
    """Return the description in a file; paths in it begin in `folder`.

    Raises:
        InputError: a role, file or option is unknown; the message names the line and the nearest
            known name.
    """
    files: list[DataFile] = []
    options = Options()
    for name, value in read_yaml(file, _EXAMPLE).items():  # a `Text` knows its line
        where = f"{file}, line {name.line}"
        if name != "files":
            options = _with_option(options, where, name, value)
        elif isinstance(value, dict):
            files = [_data_file(file, folder, path, roles) for path, roles in value.items()]
        else:
            raise InputError(f"{where}: expected lines such as {_EXAMPLE!r}")
    return Description(folder, files, options=options)


def _with_option(options: Options, where: str, name: Text, value: object) -> Options:
    if name not in vars(options):
        raise InputError(f"{where}: {unknown_name(name, ('files', *vars(options)), 'option')}")
    if isinstance(value, Text):  # not a list of columns
        with contextlib.suppress(ValueError):  # words stay text
            value = json.loads(value.lower())  # a number, true, false or null
    try:
        return options.overridden(**{name: value})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _data_file(file: Path, folder: Path, name: Text, roles: Any) -> DataFile:
    where = f"{file}, line {name.line}"
    path = folder / home(name)  # an absolute name replaces `folder`
    if roles == LEFT_OUT and path.exists():
        return DataFile(path, where, LEFT_OUT)
    try:
        kind = format_of(files_of(path)[0])  # all parts have the format of the first one
    except InputError as error:
        close = get_close_matches(name.rstrip("/"), [entry.name for entry in folder.iterdir()], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"{where}: {error}{hint}") from None
    if kind == "array" or roles == LEFT_OUT:  # a pattern left out; a path has returned above
        return DataFile(path, where, _role(f"{where}: {name}", roles, FILE_ROLES))
    if not isinstance(roles, dict):
        raise InputError(
            f"{where}: {name}: expected the role of each column, such as {{citing: source, cited: "
            f"target}}, or {LEFT_OUT}, found {roles}"
        )
    header = roles.get("header") != "none"
    columns = {
        column: _role(f"{file}, line {column.line}: {name}, column {column!r}", role, COLUMN_ROLES)
        for column, role in roles.items()
        if header or column != "header"  # `header: none` is no column
    }
    return DataFile(path, where, columns=columns, header=header)


def _role(where: str, role: object, known: Collection[str]) -> str:
    if not isinstance(role, Text) or role not in known:  # a list or a map is no `Text`
        raise InputError(f"{where}: {unknown_name(str(role), known, 'role')}")
    return role
