"""Values of parameters as command line, papermill, YAML and JSON pass them. Imports neither torch
nor numpy."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .errors import InputError, naming, parse_bytes, split_name
from .files import home
from .registry import MODELS

# Parameters of earlier versions, which config.json of an old run has, and what to write instead.
REPLACED = {
    "cuda_snapshot": "torch.cuda.memory._record_memory_history() in a script under `watch`",
    "empty_cache_every": "release_every",
    "heads": 'model_args={"heads": 4}',
    "lr_schedule_args": 'lr_schedule="cosine:T_max=40"',
    "sampling": "nothing; all neighbors are drawn independently",
    "sampler": "store.sampler(...) behind PyG's own loader",
    "self_loops": 'norm="gcn"',
    "spool_dir": "the environment variable TMPDIR",
}


def _list(value: object) -> object:
    """Split `"3 2"`, `"3,2"`, `"[3, 2]"`, as papermill's `-p` and `--set` pass them; keep lists and
    tuples."""
    if not isinstance(value, str):
        return value
    return [word.strip("'\"") for word in value.strip().strip("[]()").replace(",", " ").split()]


def _none(value: object) -> object:
    return (
        None if isinstance(value, str) and value.strip().lower() in {"", "none", "null"} else value
    )


def _number(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read it as 0 or 1
        raise ValueError(f"expected a number, got {value!r}")
    return value


def _fan_out(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError(f"expected a fan-out of at least 1, or -1 for all neighbors, got {value}")
    return value


def _size(value: object) -> object:
    try:
        return None if value is None else parse_bytes(value, "size")
    except InputError:
        raise ValueError(f'expected a size such as "4 GB", got {value!r}') from None


def _path(value: object) -> object:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return str(home(text)) if isinstance(text, str) and text.startswith("~") else text


def _model(value: object) -> object:
    if not isinstance(value, str) or value in MODELS:
        return value
    place, _, name = value.rpartition(":")
    if not place.strip() or not name.strip():
        custom = 'your own as "my_model.py:Net" or "package.module:Net"'
        raise ValueError(f"expected {', '.join(MODELS)}, or {custom}, got {value!r}")
    return f"{_path(place)}:{name}"


# Required and optional argument of each schedule, named as in torch's CosineAnnealingLR and StepLR.
_SCHEDULES = {"constant": ("", ""), "cosine": ("T_max", "eta_min"), "step": ("step_size", "gamma")}


def parse_schedule(text: str) -> tuple[str, dict[str, Any]]:
    """Split "cosine:T_max=40,eta_min=0.001" into its name and its arguments."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    if name not in _SCHEDULES:
        raise ValueError(f"expected constant, cosine:T_max=40 or step:step_size=10, got {text!r}")
    required, optional = _SCHEDULES[name]
    pairs = [[word.strip() for word in pair.split("=")] for pair in rest.split(",") if pair.strip()]
    arguments, names = dict[str, Any](), [pair[0] for pair in pairs]
    if sorted(names) not in [
        sorted(filter(None, known)) for known in ((required,), (required, optional))
    ]:
        takes = f"needs {required} and takes {optional}" if required else "takes none"
        raise ValueError(f"{name} {takes}, got {', '.join(names) or 'none'}")
    for key, *words in pairs:
        kind, expected = (
            (int, "a number of epochs") if key == required else (float, "a number from 0 to 1")
        )
        with contextlib.suppress(ValueError):
            arguments[key] = kind("=".join(words))
        if not (
            1 <= arguments.get(key, 0) < 2**31 if kind is int else 0 <= arguments.get(key, -1) <= 1
        ):
            raise ValueError(f"expected {expected} for {key}, got {'='.join(words)!r}")
    return name, arguments


def _arguments(value: object) -> object:
    """Read a dict or JSON text; tuples become lists, as in a saved config."""
    try:
        arguments = json.loads(value.strip() or "{}") if isinstance(value, str) else value
        return json.loads(json.dumps(arguments, allow_nan=False))
    except (TypeError, ValueError):
        raise ValueError(
            f'expected names and values as JSON has them, such as {{"heads": 4}}, got {value!r}'
        ) from None


Int = Annotated[int, Field(lt=2**31), BeforeValidator(_number)]  # the range of a 32-bit integer
Float = Annotated[float, BeforeValidator(_number)]
Count = Annotated[Int, Field(gt=0)]
CountOrZero = Annotated[Int, Field(ge=0)]
OptionalCount = Annotated[Count | None, BeforeValidator(_none)]
Threads = Annotated[Literal["auto"] | Count | None, BeforeValidator(_none)]
OptionalPath = Annotated[str | None, BeforeValidator(_path), BeforeValidator(_none)]
OptionalBytes = Annotated[
    Annotated[int, Field(gt=0)] | None, BeforeValidator(_size), BeforeValidator(_none)
]
SizeOrWord = Annotated[  # a saved config has whole numbers
    Literal["auto", "off"] | Annotated[int, Field(gt=0)],
    BeforeValidator(
        lambda value: value if type(value) is int or value in ("auto", "off") else _size(value)
    ),
]
Neighbors = Annotated[Int, AfterValidator(_fan_out)]
FanOut = Annotated[tuple[Neighbors, ...], BeforeValidator(_list), Field(min_length=1)]
EvalFanOut = Annotated[
    tuple[Neighbors, ...] | None,
    BeforeValidator(_list),
    BeforeValidator(lambda value: [value] if type(value) is int else value),
    BeforeValidator(_none),
]
Split = Annotated[Literal["valid", "test"], BeforeValidator(split_name)]
Splits = Annotated[
    tuple[Split, ...],
    BeforeValidator(_list),
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
]
Patience = Annotated[CountOrZero, BeforeValidator(lambda value: _none(value) or 0)]
OptionalBool = Annotated[bool | None, BeforeValidator(_none)]
Dataset = Annotated[str, BeforeValidator(_path)]
Model = Annotated[str, BeforeValidator(_model)]
Schedule = Annotated[str, AfterValidator(lambda text: parse_schedule(text) and text)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Saved values of an earlier version in this one's form, as far as weights depend on them."""
    values = dict(values)
    if arguments := values.pop("lr_schedule_args", {}):
        pairs = ",".join(f"{name}={value}" for name, value in arguments.items())
        values["lr_schedule"] = f"{values.get('lr_schedule', 'constant')}:{pairs}"
    if values.pop("self_loops", False):
        norm = values.get("norm", "sym")
        values["norm"] = "gcn" if norm == "sym" else f"{norm}-loops"
    model = values.get("model", "sage")
    heads = values.pop("heads", 4)
    # other models never had any
    if heads != 4 and (model not in MODELS or MODELS[model].load().has_heads):
        values["model_args"] = {**values.get("model_args", {}), "heads": heads}
    return values


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


def read_parameters(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and values of a YAML file such as slurm/small.yaml; `InputError` for anything else."""
    import yaml

    with naming(file, "YAML such as 'batch_size: 128'"):
        text = Path(file).read_text(encoding="utf-8")
        tree, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{file}: expected lines such as 'batch_size: 128', found {values!r:.60}")
    if len(tree.value) > len(values):  # YAML keeps the last value of a repeated key
        raise InputError(
            f"{file}: expected each parameter once, found {len(tree.value)} lines for {len(values)} names"
        )
    return values
