"""Description of a folder: the file `dataset.yaml`, which declares the roles of files and columns.

Roles are declared, and never inferred from values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import InputError, Problems, unknown_name
from ..files import home
from ..graph.store_format import SPLITS
from ..parameters import Text, read_yaml
from .formats import files_of, format_of

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
_FLAGS = ("undirected", "drop_unknown", "drop_unlabelled")
_DTYPES = ("float16", "float32", "int8")
_OPTIONS = (*_FLAGS, "feature_dtype", "num_classes")
_FEATURES = 'np.save("features.npy", np.ones((num_nodes, 1), "float32"))'
_EXAMPLE = "files: {edges.csv: {citing: source, cited: target}}"


@dataclass(frozen=True)
class DataFile:
    """A file, a folder of parts or a pattern, with its roles.

    Attributes:
        where: the place of the roles, for messages.
        role: of an array; "" for a table.
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
    """What a folder's files are: read from `dataset.yaml`, or decided by canonical names.

    Attributes:
        files: in the order in which features are joined; the first table with a column of names
            defines the nodes.
        is_declared: whether the user declared the roles.
        options: undirected, feature_dtype, drop_unknown, drop_unlabelled, num_classes.
    """

    folder: Path
    files: Sequence[DataFile]
    is_declared: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


def missing_roles(roles: Sequence[Sequence[str]]) -> list[str]:
    """Return the mistakes in the roles of a folder's files, given for each file; [] for none."""
    flat = [role for file in roles for role in file]
    num_edges = sum({"source", "target"} <= {*file} for file in roles)
    problems = []
    if num_edges != 1 or (flat.count("source"), flat.count("target")) != (1, 1):
        problems.append(f"one file of edges, with a source and a target, found {num_edges}")
    if "feature" not in flat:
        problems.append(f"features, found none; without any: {_FEATURES}")
    num_labels = flat.count("label")
    if num_labels + sum("value" in file for file in roles) != 1:
        problems.append(
            f"a label, or values in one file, found {num_labels} labels and "
            f"{flat.count('value')} columns of values"
        )
    counts = [flat.count(split) for split in SPLITS]
    if (flat.count("split"), counts) not in ((1, [0, 0, 0]), (0, [1, 1, 1])):
        problems.append(
            "either a column of the role split, or train, valid and test once each (an empty "
            ".csv file is a split without nodes)"
        )
    return [f"expected {problem}" for problem in problems]


def read_description(file: Path, folder: Path) -> Description:
    """Return the description in a file; paths in it begin in `folder`.

    Raises:
        InputError: a role, file or option is unknown; the message names the line and the nearest
            known name.
    """
    problems = Problems()
    files: list[DataFile] = []
    options = dict[str, Any]()
    for name, value in read_yaml(file, _EXAMPLE).items():
        where = f"{file}, line {name.line}"
        with problems.catch():
            if name != "files":
                options[name] = _option(where, name, value)
            elif not isinstance(value, dict):
                raise InputError(f"{where}: expected lines such as {_EXAMPLE!r}")
        if name == "files" and isinstance(value, dict):
            for path, roles in value.items():
                with problems.catch():
                    files.append(_data_file(file, folder, path, roles))
    problems.refuse()
    return Description(folder, files, options=options)


def _option(where: str, name: Text, value: Any) -> object:
    if name not in _OPTIONS:
        raise InputError(f"{where}: {unknown_name(name, ('files', *_OPTIONS), 'option')}")
    expected = "true or false"
    result: object = None
    if name in _FLAGS:
        result = {"true": True, "false": False}.get(str(value).lower())
    elif name == "num_classes":
        expected = "a whole number"
        if str(value).isdecimal():
            result = int(value)
    else:
        expected = ", ".join(_DTYPES)
        if value in _DTYPES:
            result = str(value)
    if result is None:
        raise InputError(f"{where}: {name}: expected {expected}, found {value}")
    return result


def _data_file(file: Path, folder: Path, name: Text, roles: Any) -> DataFile:
    where = f"{file}, line {name.line}"
    path = folder / home(name)
    if roles == LEFT_OUT and path.exists():
        return DataFile(path, where, LEFT_OUT)
    try:
        kind = format_of(files_of(path)[0])
    except InputError as error:
        names = [entry.name for entry in folder.iterdir()]
        close = get_close_matches(name.rstrip("/"), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"{where}: {error}{hint}") from None
    if roles == LEFT_OUT:
        return DataFile(path, where, LEFT_OUT)
    if kind == "array":
        if not isinstance(roles, Text) or roles not in FILE_ROLES:
            text = unknown_name(roles, FILE_ROLES, "role of an array")
            raise InputError(f"{where}: {name}: {text}")
        return DataFile(path, where, roles)
    if not isinstance(roles, dict):
        raise InputError(
            f"{where}: {name}: expected the role of each column, such as {{citing: source, cited: "
            f"target}}, or {LEFT_OUT}, found {roles}"
        )
    columns = dict[str, str]()
    for column, role in roles.items():
        is_header = (column, role) == ("header", "none")
        if not is_header and (not isinstance(role, Text) or role not in COLUMN_ROLES):
            text = unknown_name(str(role), COLUMN_ROLES, "role")
            raise InputError(f"{file}, line {column.line}: {name}, column {column!r}: {text}")
        if not is_header:
            columns[column] = role
    return DataFile(path, where, columns=columns, header=len(columns) == len(roles))
