"""Names and values of parameters as the command line, papermill, YAML and JSON pass them.

Imports neither torch nor numpy.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from .errors import InputError, naming, parse_bytes, split_name
from .files import decode_json, home
from .registry import MODELS


# Checks and conversions for pydantic, which adds the parameter's name to a ValueError's message.
def _list(value: object) -> object:
    """Split `"3 2"`, `"3,2"`, `"[3, 2]"`, as papermill's `-p` and `--set` pass them; keep lists and
    tuples."""
    if not isinstance(value, str):
        return value
    return [word.strip("'\"") for word in value.strip().strip("[]()").replace(",", " ").split()]


def no_value(value: object) -> Any:
    """Return None for "", "none" and "null", in any case, and any other value as it is."""
    if isinstance(value, str) and value.strip().lower() in {"", "none", "null"}:
        return None
    return value


def _number(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read it as 0 or 1
        raise ValueError(f"expected a number, got {value!r}")
    return value


def _fan_out(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError(f"expected a fan-out of at least 1, or -1 for all neighbors, got {value}")
    return value


def _size(value: object) -> object:  # bytes
    try:
        return None if value is None else parse_bytes(value, "size")
    except InputError:
        raise ValueError(f'expected a size such as "4 GB", got {value!r}') from None


def _size_or_word(value: object) -> object:
    if type(value) is int or value in ("auto", "off"):  # a saved config has whole numbers
        return value
    return _size(value)


def _path(value: object) -> object:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and value.startswith("~"):
        return str(home(value))
    return value  # relative to the working directory, or an official name


def _model(value: object) -> object:
    if not isinstance(value, str) or value in MODELS:
        return value
    file, _, name = value.rpartition(":")  # or a module
    if not file.strip() or not name.strip():
        raise ValueError(
            f'expected {", ".join(MODELS)}, or your own as "my_model.py:Net" or '
            f'"package.module:Net", got {value!r}'
        )
    return f"{_path(file)}:{name}"


def _arguments(value: object) -> object:
    try:
        text = (value.strip() or "{}") if isinstance(value, str) else json.dumps(value)
        return decode_json(text.encode())  # as it is saved: tuples become lists
    except (TypeError, ValueError):
        raise ValueError(
            f'expected names and values as JSON has them, such as {{"heads": 4}}, got {value!r}'
        ) from None


# Of several BeforeValidators the last one is called first.
Int = Annotated[int, Field(lt=2**31), BeforeValidator(_number)]  # the range of a 32-bit integer
Float = Annotated[float, BeforeValidator(_number)]
Count = Annotated[Int, Field(gt=0)]
CountOrZero = Annotated[Int, Field(ge=0)]
OptionalCount = Annotated[Count | None, BeforeValidator(no_value)]
Threads = Annotated[Literal["auto"] | Count | None, BeforeValidator(no_value)]
OptionalBytes = Annotated[
    Annotated[int, Field(gt=0)] | None, BeforeValidator(_size), BeforeValidator(no_value)
]
SizeOrWord = Annotated[
    Literal["auto", "off"] | Annotated[int, Field(gt=0)], BeforeValidator(_size_or_word)
]
Neighbors = Annotated[Int, AfterValidator(_fan_out)]
FanOut = Annotated[tuple[Neighbors, ...], BeforeValidator(_list), Field(min_length=1)]
EvalFanOut = Annotated[
    tuple[Neighbors, ...] | None,
    BeforeValidator(_list),
    BeforeValidator(lambda value: [value] if type(value) is int else value),
    BeforeValidator(no_value),
]
Split = Annotated[Literal["valid", "test"], BeforeValidator(split_name)]
Splits = Annotated[
    tuple[Split, ...],
    BeforeValidator(_list),
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
]
Patience = Annotated[CountOrZero, BeforeValidator(lambda value: no_value(value) or 0)]
OptionalBool = Annotated[bool | None, BeforeValidator(no_value)]
ClassWeight = Annotated[
    Literal["none", "balanced"], BeforeValidator(lambda value: no_value(value) or "none")
]
Dataset = Annotated[str, BeforeValidator(_path)]
Model = Annotated[str, BeforeValidator(_model)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


def parse_assignments(pairs: Iterable[str]) -> dict[str, str]:
    """Split `["batch_size=128", "num_neighbors=3 2"]`, the values of `--set`, into names and
    values."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name or name in values:
            raise InputError(
                f"--set: expected KEY=VALUE such as batch_size=128, each key once, got {pair!r}"
            )
        values[name] = value
    return values


class Text(str):
    """A text of a YAML file; `line` is its line, from 1 on."""

    line = 0


class _TextLoader(yaml.BaseLoader):  # type: ignore[misc]  # yaml has no types
    """Loads each value of a YAML file as `Text`; an error names a value that stands twice."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Text:
        text = Text(node.value)
        text.line = node.start_mark.line + 1
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, Any] = super().construct_mapping(node, deep=True)
        if len(values) < len(node.value):  # PyYAML has kept the last value of a repeated name
            names = [self.construct_object(key) for key, _ in node.value]
            name = next(name for name in reversed(names) if names.count(name) > 1)
            raise yaml.YAMLError(f"line {name.line}: expected each name once, found {name} again")
        return values

    def compose_node(self, parent: yaml.Node, index: Any) -> Any:
        # ten lines of anchors and aliases can stand for 10**9 values
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: expected values without YAML's & and *")
        return super().compose_node(parent, index)


_MOST_YAML = 2**20  # characters of a file


def read_yaml(file: str | os.PathLike[str], example: str) -> dict[Text, Any]:
    """Return the map of a YAML file; `InputError` for anything else.

    Values are `Text`, because YAML 1.1 would read 010 as 8, 1:30 as 90 and off as false; or lists
    and maps of such values. `example` is a line of such a file, for messages.
    """
    expected = f"YAML of at most 1 MB such as {example!r}"
    with naming(file, expected), open(file, encoding="utf-8") as opened:
        text = opened.read(_MOST_YAML + 1)
        if len(text) > _MOST_YAML:
            raise InputError(f"{file}: expected {expected}, found more")
        values = yaml.load(text, _TextLoader)
    if not isinstance(values, dict) or not values:
        raise InputError(f"{file}: expected lines such as {example!r}, found {text!r:.60}")
    return values


def read_parameters(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return names and values of a YAML file such as slurm/small.yaml.

    Values stay text, as `--set` passes them, or lists of text. Values of a map, such as model_args,
    have their types: those of JSON, with True and False, else of YAML, such as `off` and `~`.
    """
    values = read_yaml(file, "batch_size: 128")
    return {str(name): _parameter(value, in_map=False) for name, value in values.items()}


def _parameter(value: Any, in_map: bool) -> Any:  # a value of `read_parameters`
    if isinstance(value, dict):
        return {str(name): _parameter(item, in_map=True) for name, item in value.items()}
    if isinstance(value, list):
        return [_parameter(item, in_map) for item in value]
    if in_map:
        with contextlib.suppress(ValueError):  # no JSON: try the next
            return json.loads(value if '"' in value else value.lower())  # YAML may write True
        with contextlib.suppress(yaml.YAMLError):
            return yaml.safe_load(value)
    return str(value)
