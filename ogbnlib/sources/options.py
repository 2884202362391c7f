"""Options of a conversion that are saved with the data, in the file `dataset.yaml` of their folder.

They have the names of the options on the command line of `convert`.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InputError, unknown_name
from ..files import Stamp, StrPath, home, write_atomically
from ..parameters import read_parameters
from .files.layouts import OPTIONS, ROLE_NAMES, is_tables, layout_of, replaced_roles
from .ogb import open_raw
from .source import Source, stamped

_LISTS = ("edge_columns", "label_columns", "leave_out")
_FLAGS = ("relabel", "drop_unknown", "drop_unlabelled", "undirected")
_DTYPES = ("float16", "float32", "int8")
_NAMES = (*ROLE_NAMES, *_LISTS, *_FLAGS, "id_column", "num_classes", "feature_dtype")
NAMES = (*_NAMES, "save_options")  # on the command line
# options of the conversion itself; `open_tables` takes the others
OF_CONVERSION = ("undirected", "feature_dtype", "drop_unlabelled")
STAND_INS = ("ones", "degree")  # values of `features` that name generated features, not a file


def read_options(folder: Path) -> dict[str, Any]:
    """Return the options in a folder's `dataset.yaml`, with files as paths; {} without that file.

    Raises:
        InputError: a name is unknown (the message suggests the nearest one), or a value has the
            wrong type.
    """
    file = folder / OPTIONS
    if not file.is_file():
        return {}
    values = {name.replace("-", "_"): value for name, value in read_parameters(file).items()}
    return {name: _value(file, name, value) for name, value in values.items()}


def _value(file: Path, name: str, value: Any) -> Any:
    """Convert an option's value, which the file has as text or a list of texts, to its type."""
    if name not in _NAMES:
        raise InputError(f"{file}: {unknown_name(name, _NAMES, 'option')}")
    if name in _LISTS and isinstance(value, str | list):
        return _as_list(value)
    expected = "one text"
    if name in _FLAGS:
        expected = "true or false"
        value = {"true": True, "false": False}.get(str(value).lower())
    elif name == "num_classes":
        expected = "a whole number"
        value = int(value) if str(value).isdecimal() else None
    elif name == "feature_dtype" and value not in _DTYPES:
        expected = ", ".join(_DTYPES)
        value = None
    if value is None or isinstance(value, list | dict):
        raise InputError(f"{file}: {name}: expected {expected}, found another value")
    if name in ROLE_NAMES and value not in STAND_INS:
        return file.parent / home(value)
    return value


def _as_list(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


def _with_saved(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options updated by `options`.

    Standard error names each saved value that `options` overrides. Saved files that are no longer
    read, because `options` names others, are left out.
    """
    saved = read_options(folder)
    for name in replaced_roles({role: options[role] for role in ROLE_NAMES if role in options}):
        saved.pop(name, None)
    for name in saved.keys() & options.keys():
        if str(saved[name]) != str(options[name]):
            print(
                f"{folder / OPTIONS}: {name} is {options[name]}, not {saved[name]}: the option "
                "given now wins",
                file=sys.stderr,
            )
    return saved | dict(options)


def _write_options(folder: Path, options: Mapping[str, Any]) -> dict[str, tuple[Path, Stamp]]:
    """Write `dataset.yaml` and return its stamp; files in `folder` get paths relative to it."""
    import yaml

    values: dict[str, Any] = {}
    for name, value in options.items():
        values[name] = list(value) if name in _LISTS else value
        if name in ROLE_NAMES:
            values[name] = str(value)
        if name in ROLE_NAMES and str(value) not in STAND_INS:
            values[name] = str(home(value).absolute()).removeprefix(f"{folder.absolute()}/")
    text = yaml.safe_dump(values, sort_keys=True, allow_unicode=True)
    write_atomically(folder / OPTIONS, lambda file: file.write(text.encode()))
    return stamped(options_file(folder))


def open_folder(name: StrPath, options: Mapping[str, Any]) -> Source:
    """Open a folder of a user's own files or in one of OGB's layouts.

    Args:
        options: options of `open_tables` and of a conversion, which override those in
            `dataset.yaml`. With `save_options`, a complete conversion writes all options, old and
            new, to that file.
    """
    folder = layout_of(home(name).absolute())[1]
    own_options = {name: _as_list(v) if name in _LISTS else v for name, v in options.items()}
    save = own_options.pop("save_options", False)
    merged = _with_saved(folder, own_options)
    of_files = {name: value for name, value in merged.items() if name not in OF_CONVERSION}
    if not {*of_files} - {"num_classes"} and not is_tables(name):
        source = open_raw(name, **of_files)
    else:
        from .files.own_files import open_tables  # imports pyarrow

        source = open_tables(name, **of_files)
    if save:
        source = replace(source, save_options=partial(_write_options, folder, merged))
    own = {name: merged[name] for name in OF_CONVERSION if name in merged}
    return replace(source, options=own, stamps={**source.stamps, **stamped(options_file(folder))})


def options_file(folder: Path) -> dict[str, Path]:
    """Return the path of the folder's `dataset.yaml`, by its name; {} if there is none."""
    file = folder / OPTIONS
    return {OPTIONS: file} if file.is_file() else {}
