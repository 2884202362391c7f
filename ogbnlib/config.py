"""Everything the trainer knows, in one frozen object that notebook, command line and Slurm job all build.

Bad values are refused here, with the parameter's name, before any file is opened. Imports neither torch nor numpy.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from .errors import InputError, clear_errors, parse_bytes, split_name, unknown_name
from .files import home, write_json
from .registry import MODELS

Loading = Literal["eager", "lazy", "shared", "store", "propagated"]
Split = Literal["train", "valid", "test"]
# The epochs that a schedule must be given and the number it may be, as torch's CosineAnnealingLR and StepLR call them.
_SCHEDULES = {"constant": ("", ""), "cosine": ("T_max", "eta_min"), "step": ("step_size", "gamma")}


def _list(value: object) -> object:
    """`"3 2"`, `"3,2"`, `"[3, 2]"` as papermill's `-p` and `--set` hand them over; lists and tuples as they are."""
    if not isinstance(value, str):
        return value
    return [word.strip("'\"") for word in value.strip().strip("[]()").replace(",", " ").split()]


def _single(value: object) -> object:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in {"", "none", "null"} else value


def _number(value: object) -> object:
    if isinstance(value, bool):  # pydantic would take it for 0 or 1
        raise ValueError(f"expected a number, got {value!r}")
    return value


def _size(value: object) -> object:
    try:
        return None if value is None else parse_bytes(value, "size")
    except InputError:
        raise ValueError(f'expected a size such as "4 GB", got {value!r}') from None


def _lookahead(value: object) -> object:
    """A size, "auto" or "off"; whole numbers are bytes, however few, as a saved config has them."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole or value in ("auto", "off") else _size(value)


def _path(value: object) -> object:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return str(home(text)) if isinstance(text, str) and text.startswith("~") else text


def _close(given: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _model(value: object) -> object:
    """A model of ours or the place of another one, `FILE.py:CLASS` or `MODULE:CLASS`."""
    if value in MODELS:
        return value
    place, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not place.strip() or not name.strip():
        own = 'your own as "my_model.py:Net" or "package.module:Net"'
        raise ValueError(f"expected {', '.join(MODELS)}, or {own}, got {value!r}{_close(value, MODELS)}")
    return f"{_path(place)}:{name}"


def _arguments(value: object) -> object:
    """Names and values as JSON has them, so that a saved config is the same: lists for tuples."""
    example = 'expected names and values as JSON has them, such as {"heads": 4}'
    try:
        given = json.loads(value.strip() or "{}") if isinstance(value, str) else value
        given = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{example}, got {value!r} ({error})") from None
    if not isinstance(given, dict):
        raise ValueError(f"{example}, got {value!r}")
    return given


Int = Annotated[int, Field(lt=2**31), BeforeValidator(_number)]  # what numpy and torch can count with
Float = Annotated[float, BeforeValidator(_number)]
OptionalCount = Annotated[Annotated[Int, Field(gt=0)] | None, BeforeValidator(_none)]
OptionalBytes = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_size), BeforeValidator(_none)]
Lookahead = Annotated[Literal["auto", "off"] | Annotated[int, Field(gt=0)], BeforeValidator(_lookahead)]
Integers = Annotated[tuple[Int, ...], BeforeValidator(_list)]
FanOut = Annotated[tuple[Int, ...] | None, BeforeValidator(_list), BeforeValidator(_single), BeforeValidator(_none)]
Splits = Annotated[tuple[Annotated[Split, BeforeValidator(split_name)], ...], BeforeValidator(_list)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


_REMOVED = {"cuda_snapshot", "sampler"}  # parameters of earlier versions: ignored in the config.json of an old run


class _Parameters(BaseModel):
    """The fields of a `TrainConfig`, and what each of them may be beside the others."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    # data
    dataset: Annotated[str, BeforeValidator(_path)]
    """A store, a folder in OGB's binary layout or of files of one's own, or an official name such as "ogbn-arxiv"."""
    data_dir: Annotated[str | None, BeforeValidator(_path), BeforeValidator(_none)] = None
    """Where official data sets are looked for ("dataset") and stores of other data are kept (beside it)."""
    download: bool = False
    """Consent to download an official data set; without it a missing one is an error."""
    undirected: Annotated[bool | None, BeforeValidator(_none)] = None
    """Reverse edges; None: as the store is, and directed where it is still to be made."""
    feature_dtype: Literal["float32", "float16"] = "float32"
    """In RAM, or of the store that loading=store has still to make; a store has its own. Training is float32."""

    # loading
    loading: Loading = "shared"
    """Where the graph lives: in three stock loaders, in one at a time, in one CSC for all, on disk, or propagated."""
    lookahead: Lookahead = "auto"
    """Store only: memory for batches sampled ahead."""
    spool: Lookahead = "auto"
    """Store only: disk for windows that are prepared many at a time, for several epochs and the evaluations."""
    spool_dir: Annotated[str | None, BeforeValidator(_path), BeforeValidator(_none)] = None
    """Store only: where the spool lies, on a local disk; None: the job's own, or that of temporary files."""
    num_neighbors: Integers = (3, 2)
    """One fan-out per layer, nearest hop first; -1 takes all neighbors."""
    batch_size: Annotated[Int, Field(gt=0)] = 128
    """Seeds per sampled batch."""
    accumulate: Annotated[Int, Field(gt=0)] = 1
    """Batches per optimizer step, times the number of processes."""
    eval_batch_size: OptionalCount = None
    """Seeds per batch of an evaluation; None: batch_size."""
    num_workers: Annotated[Int, Field(ge=0)] = 0
    """Sampling processes per loader."""
    persistent_workers: bool = False
    """Keep them between epochs; needs num_workers > 0."""
    pin_memory: bool = False
    """Page-locked batches for faster copies to a GPU."""

    # propagated only
    hops: Annotated[Int, Field(gt=0)] = 2
    """Propagated only: how often features go from neighbors to nodes."""
    norm: Literal["row", "sym", "none"] = "sym"
    """Propagated only: the mean over in-neighbors, gcn's weights, or the sum."""
    self_loops: bool = False
    """Propagated only: each node is its own neighbor too, once."""

    # model
    model: Annotated[str, BeforeValidator(_model)] = "sage"
    """sage, gcn, gat; sgc, sign, sagn with loading=propagated; or a class of your own, "my_model.py:Net": README."""
    model_args: Arguments = {}
    """A model of your own only: more of its __init__'s arguments, as a dict or as JSON text."""
    hidden_channels: Annotated[Int, Field(gt=0)] = 16
    """Width of the layers."""
    heads: Annotated[Int, Field(gt=0)] = 4
    """Attention heads, gat and sagn only."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of a hidden layer's values that training leaves out."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the layers' products (torch.autocast); fp16 needs a GPU."""
    activation_checkpointing: bool = False
    """Compute layers again in the backward pass: less kept, same gradients."""

    # training
    epochs: Annotated[Int, Field(ge=0)] = 3
    """Passes over the train split."""
    lr: Annotated[Float, Field(gt=0)] = 0.01
    """Adam's learning rate."""
    lr_schedule: Literal["constant", "cosine", "step"] = "constant"
    """cosine: falls from lr to eta_min (0) in T_max epochs and stays there; step: times gamma (0.1) every step_size."""
    lr_schedule_args: Arguments = {}
    """The schedule's own values such as {"T_max": 40}, as a dict or as JSON text."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.0
    """Adam's."""
    checkpoint_every_s: Annotated[Float, Field(ge=0)] = 600.0
    """Seconds between checkpoints within an epoch; 0: at epoch ends only."""
    seed: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    """Of weights, order, neighbors and dropout: the same one gives the same run on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    num_threads: OptionalCount = 1
    """Threads of torch; None leaves torch's own choice."""

    # evaluation
    train_eval: Literal["every_epoch", "final", "never"] = "final"
    """When the accuracy on the train split is evaluated."""
    eval_every: Annotated[Int, Field(gt=0)] = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    eval_splits: Splits = ("valid", "test")
    """What is evaluated; may be ("valid",) or () for none."""
    eval_num_neighbors: FanOut = None
    """As num_neighbors, or one number for all hops (-1: all neighbors); None: num_neighbors. With one number accuracies
    are the same for every eval_batch_size, but for gcn, whose degrees are those of the sampled subgraph."""
    early_stopping: Annotated[Int, Field(ge=0), BeforeValidator(lambda value: _none(value) or 0)] = 0
    """Stop once so many evaluations in a row brought no better valid accuracy; 0: never."""
    keep: Literal["last", "best"] = "last"
    """Which model stays; best: best.pt too, the model of the best valid accuracy so far."""
    release_every: Annotated[Int, Field(ge=0)] = 0
    """Call release_memory() every k batches, in training and evaluation; 0: never."""

    # GPU memory; without effect on a CPU
    empty_cache_every: Annotated[Int, Field(ge=0)] = 0
    """Call torch.cuda.empty_cache() every k batches, in training and evaluation; 0: never."""
    expandable_segments: bool = False
    """The allocator's segments grow in place: less is lost to fragmentation."""
    max_cuda_memory: OptionalBytes = None
    """A cap such as "4 GB", to meet a small card's OOM on a large one."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """How a run shows where it stands; auto: a bar in a terminal or JupyterLab, else lines."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if not self.dataset.strip():
            raise ValueError("dataset: expected a folder or an official name such as 'ogbn-arxiv', got an empty string")
        if not self.num_neighbors:
            raise ValueError("num_neighbors: expected one fan-out per layer such as [3, 2], got none")
        for name in ("num_neighbors", "eval_num_neighbors"):
            fan_out = getattr(self, name) or ()
            if any(k == 0 or k < -1 for k in fan_out):
                raise ValueError(f"{name}: expected fan-outs of at least 1, or -1 for all, got {list(fan_out)}")
        layers = len(self.num_neighbors)
        if self.eval_num_neighbors is not None and len(self.eval_num_neighbors) not in (1, layers):
            raise ValueError(
                f"eval_num_neighbors: expected one fan-out, or one for each of the {layers} of num_neighbors, "
                f"got {list(self.eval_num_neighbors)}"
            )
        if self.persistent_workers and self.num_workers == 0:
            raise ValueError("persistent_workers: needs num_workers of at least 1, got num_workers=0")
        if self.model in MODELS and MODELS[self.model].has_heads and self.hidden_channels % self.heads:
            expected = f"expected a multiple of heads={self.heads} for {self.model}"
            raise ValueError(f"hidden_channels: {expected}, got {self.hidden_channels}")
        if len(set(self.eval_splits)) != len(self.eval_splits):
            raise ValueError(f"eval_splits: expected each split once, got {list(self.eval_splits)}")
        if "train" in self.eval_splits:
            raise ValueError('eval_splits: expected "valid" and "test"; the train split is ruled by train_eval')
        wanting = "early_stopping" if self.early_stopping else "keep" if self.keep == "best" else ""
        if wanting and "valid" not in self.eval_splits:
            raise ValueError(f"{wanting}: expected 'valid' in eval_splits, got {list(self.eval_splits)}")
        self._check_model()
        self._check_schedule()
        return self

    def _check_model(self) -> None:
        propagated, entry = self.loading == "propagated", MODELS.get(self.model)
        if entry and entry.propagated != propagated:
            known = ", ".join(name for name, model in MODELS.items() if model.propagated == propagated)
            others = ", ".join(name for name, model in MODELS.items() if model.propagated)
            hint = "" if propagated else f"; {others} take loading=propagated"
            raise ValueError(
                f"model: expected {known}, or your own, with loading={self.loading}, got {self.model!r}{hint}"
            )
        if entry and self.model_args:
            raise ValueError(f"model_args: expected with a model of your own only, got model={self.model!r}")
        if self.activation_checkpointing and (entry is None or entry.propagated):
            raise ValueError(
                "activation_checkpointing: goes through the layers of sage, gcn and gat; in a model of your own call "
                "torch.utils.checkpoint in its forward, and leave this false"
            )

    def _check_schedule(self) -> None:
        epochs, factor = _SCHEDULES[self.lr_schedule]
        given = self.lr_schedule_args
        if not {epochs} - {""} <= given.keys() <= {epochs, factor} - {""}:
            takes = f"needs {epochs} and takes {factor}" if epochs else "takes none"
            raise ValueError(f"lr_schedule_args: {self.lr_schedule} {takes}, got {', '.join(given) or 'none'}")
        for name, value in given.items():
            whole = name == epochs
            sound = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
            if not sound or not (1 <= value < 2**31 if whole else 0 <= value <= 1):
                what = "a number of epochs" if whole else "a number from 0 to 1"
                raise ValueError(f"lr_schedule_args: expected {what} for {name}, got {value!r}")


class TrainConfig(_Parameters):
    """One training run. Frozen; every field can be given as the string a command line or papermill passes.

    Build it with `TrainConfig.create(dataset=..., ...)`; every mistake in it is reported in one `InputError`.
    """

    @property
    def on_disk(self) -> bool:
        """Whether features stay in a store, in its own dtype, and are read from there batch by batch."""
        return self.loading in ("store", "propagated")

    def learning_rate(self, epoch: int) -> float:
        """Of `epoch`, counted from 1; of nothing else, so that a run which goes on needs no state of a schedule."""
        done, given = epoch - 1, self.lr_schedule_args
        if self.lr_schedule == "cosine":
            lowest, share = given.get("eta_min", 0.0), min(done / given["T_max"], 1.0)
            return lowest + (self.lr - lowest) * (1 + math.cos(math.pi * share)) / 2
        if self.lr_schedule == "step":
            return self.lr * given.get("gamma", 0.1) ** (done // given["step_size"])
        return self.lr

    def is_over(self, valid: Iterable[float | None]) -> bool:
        """Whether the epochs with these valid accuracies are all; None or NaN where one was not evaluated."""
        history = list(valid)
        known = [value for value in history if value is not None and not math.isnan(value)]
        since = len(known) - known.index(max(known)) - 1 if known else 0
        return len(history) >= self.epochs or 0 < self.early_stopping <= since

    def fan_out(self, training: bool) -> tuple[int, ...]:
        """The fan-outs of a pass, one per layer."""
        if training or self.eval_num_neighbors is None:
            return self.num_neighbors
        repeats = len(self.num_neighbors) if len(self.eval_num_neighbors) == 1 else 1
        return self.eval_num_neighbors * repeats

    def splits_to_evaluate(self, epoch: int) -> list[str]:
        """The splits whose accuracy is wanted after `epoch`: every `eval_every` epochs and after the last."""
        final = epoch == self.epochs
        due = final or epoch % self.eval_every == 0
        splits: list[str] = [*self.eval_splits] if due else []
        if (self.train_eval == "every_epoch" and due) or (self.train_eval == "final" and final):
            splits.insert(0, "train")
        return splits

    def num_evaluations(self, split: str) -> int:
        """How often the accuracy of a split is wanted in the whole run."""
        if not self.epochs:
            return 0
        between = split in self.splits_to_evaluate(self.eval_every)
        return between * ((self.epochs - 1) // self.eval_every) + (split in self.splits_to_evaluate(self.epochs))

    def __init__(self, /, **values: Any):
        known = type(self).model_fields
        problems = [unknown_name(name, known, "parameter") for name in values if name not in known]
        try:
            super().__init__(**values)
        except ValidationError as error:
            for item in error.errors():
                if item["type"] != "extra_forbidden":
                    problems.append(_sentence(str(item["loc"][0]) if item["loc"] else "", item))
            raise InputError("; ".join(problems)) from None

    @classmethod
    def create(cls, values: Mapping[str, Any] | None = None, /, **more: Any) -> TrainConfig:
        """A config from names and values; every mistake in them is reported in one `InputError`."""
        return cls(**{**(values or {}), **more})

    @classmethod
    def restore(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Create a config from saved values; parameters of earlier versions are ignored with a warning."""
        if removed := sorted(values.keys() & _REMOVED):
            warnings.warn(f"{', '.join(removed)}: ignored, this version has no such parameter", stacklevel=2)
        return cls.create({name: value for name, value in values.items() if name not in _REMOVED})

    def replace(self, **changes: Any) -> TrainConfig:
        """A new config with some values changed, validated like a new one."""
        return self.create({**self.model_dump(), **changes})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the resolved values as JSON, atomically."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    @clear_errors()
    def load(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """Read what `save` wrote.

        Raises:
            InputError: when the file is missing, can't be read, is not JSON or holds values that are refused.
        """
        try:
            values = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise InputError(f"{path}: expected a run's config.json, found no such file") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: expected JSON, found something else ({error})") from None
        if not isinstance(values, dict):
            raise InputError(f"{path}: expected a JSON object of parameters, found {type(values).__name__}")
        try:
            return cls.restore(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def check_config(config: object) -> None:
    """Refuse what is no `TrainConfig`, such as its values in a dict."""
    if not isinstance(config, TrainConfig):
        found = type(config).__name__
        raise InputError(f"config: expected a TrainConfig, got a {found}; make it with TrainConfig.create(dataset=...)")


def parameters() -> dict[str, str]:
    """What each parameter means, by its name, its default and what else it may be."""
    told = {}
    for name, info in TrainConfig.model_fields.items():
        known = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
        choices = f" ({', '.join(map(str, known))})" if known else ""
        default = "" if info.is_required() else f"={info.default!r}"
        told[f"{name}{default}{choices}"] = (info.description or "").replace("\n", " ")
    return told


def _show_parameters() -> None:
    """What Shift-Tab on `TrainConfig.create` and help() show: each parameter, its default and its meaning."""
    create = TrainConfig.create.__func__  # type: ignore[attr-defined]
    first, *_ = inspect.signature(create).parameters.values()
    keyword, fields = inspect.Parameter.KEYWORD_ONLY, TrainConfig.model_fields.items()
    named = [
        inspect.Parameter(name, keyword, default=inspect.Parameter.empty if info.is_required() else info.default)
        for name, info in fields
    ]
    create.__signature__ = inspect.Signature([first, *named])
    create.__doc__ += "\n\nParameters:\n" + "\n".join(f"  {name}: {text}" for name, text in parameters().items())


_show_parameters()
_NOUNS = {"int": "a whole number", "float": "a number", "bool": "true or false"}  # by pydantic's types of errors


def _sentence(name: str, item: Any) -> str:
    """One pydantic error as `name: what was expected, got what`."""
    given, context = item.get("input"), item.get("ctx", {})
    kind = item["type"]
    if kind == "missing":
        return f"{name}: expected a value, got none"
    if kind == "value_error":
        text = str(context["error"])
        return text if not name else f"{name}: {text}"
    if kind == "literal_error":
        annotation = TrainConfig.model_fields[name].annotation
        known = [str(choice) for choice in get_args(Split if name == "eval_splits" else annotation)]
        return f"{name}: expected one of {', '.join(known)}, got {given!r}{_close(given, known)}"
    if kind == "tuple_type":
        return f"{name}: expected a list such as {list(TrainConfig.model_fields[name].default or (-1,))}, got {given!r}"
    if (noun := _NOUNS.get(kind.partition("_")[0])) and kind.partition("_")[2] in ("parsing", "type", "from_float"):
        return f"{name}: expected {noun}, got {given!r}"
    return f"{name}: {item['msg'][0].lower()}{item['msg'][1:]}, got {given!r}"


def parse_assignments(pairs: Iterable[str]) -> dict[str, str]:
    """`["batch_size=128", "num_neighbors=3 2"]`, as `--set` collects them, to names and values."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise InputError(f"--set: expected KEY=VALUE such as batch_size=128, got {pair!r}")
        if name.strip() in values:
            raise InputError(f"--set: {name.strip()} is given twice")
        values[name.strip()] = value
    return values


def read_parameters(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and values of a YAML file such as slurm/small.yaml, as papermill's `-f` takes it too.

    Raises:
        InputError: for a file that can't be read, or has other things than names and values.
    """
    import yaml

    with clear_errors(Path(file)), open(file, encoding="utf-8") as opened:
        try:
            text = opened.read()
            tree = yaml.compose(text, yaml.SafeLoader)
            keys = [key.value for key, _ in tree.value] if isinstance(tree, yaml.MappingNode) else []
            if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
                raise InputError(f"{file}: expected each parameter once, found {', '.join(twice)} twice; delete one")
            values = yaml.safe_load(text)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            found = " ".join(str(error).split())  # YAML's own words are four lines
            raise InputError(f"{file}: expected YAML such as 'batch_size: 128', found {found}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{file}: expected lines such as 'batch_size: 128', found {values!r:.60}")
    return values
