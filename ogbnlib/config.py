"""Everything the trainer knows, in one frozen object that notebook, command line and Slurm job all build.

Bad values are refused here, with the parameter's name, before any file is opened. Imports neither torch nor numpy.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from .errors import InputError, parse_bytes, unknown_name
from .files import home, write_json

Loading = Literal["eager", "lazy", "shared", "store"]
Split = Literal["train", "valid", "test"]


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


Int = Annotated[int, Field(lt=2**31), BeforeValidator(_number)]  # what numpy and torch can count with
Float = Annotated[float, BeforeValidator(_number)]
OptionalCount = Annotated[Annotated[Int, Field(gt=0)] | None, BeforeValidator(_none)]
OptionalBytes = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_size), BeforeValidator(_none)]
Lookahead = Annotated[Literal["auto", "off"] | Annotated[int, Field(gt=0)], BeforeValidator(_lookahead)]
Integers = Annotated[tuple[Int, ...], BeforeValidator(_list)]
FanOut = Annotated[tuple[Int, ...] | None, BeforeValidator(_list), BeforeValidator(_single), BeforeValidator(_none)]
Splits = Annotated[tuple[Split, ...], BeforeValidator(_list)]


class TrainConfig(BaseModel):
    """One training run. Frozen; every field can be given as the string a command line or papermill passes.

    Build it with `TrainConfig.create(dataset=..., ...)`, which turns every mistake into one `InputError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # data
    # A store, a folder in OGB's binary layout or of files of one's own, or an official name such as "ogbn-arxiv".
    dataset: Annotated[str, BeforeValidator(_path)]
    # Where official data sets are looked for ("dataset") and stores of other data are kept (beside it).
    data_dir: Annotated[str | None, BeforeValidator(_path), BeforeValidator(_none)] = None
    download: bool = False  # consent to download an official data set; without it a missing one is an error
    # Reverse edges; None: as the store is, and directed where it is still to be made.
    undirected: Annotated[bool | None, BeforeValidator(_none)] = None
    # In RAM, or of the store that loading=store has still to make; a store has its own. Training is float32.
    feature_dtype: Literal["float32", "float16"] = "float32"

    # loading
    loading: Loading = "shared"  # where the graph lives: three stock loaders, one at a time, one CSC for all, on disk
    lookahead: Lookahead = "auto"  # store only: memory for batches sampled ahead
    spool: Lookahead = "auto"  # store only: disk on which windows of an evaluation are kept for the next one
    spool_dir: Annotated[str | None, BeforeValidator(_path), BeforeValidator(_none)] = None  # a local disk
    sampler: Literal["numba", "pyg"] = "numba"  # pyg: the stock one, needs pyg-lib or torch-sparse
    num_neighbors: Integers = (3, 2)  # one fan-out per layer, nearest hop first; -1 takes all neighbors
    batch_size: Annotated[Int, Field(gt=0)] = 128  # seeds per sampled batch
    accumulate: Annotated[Int, Field(gt=0)] = 1  # batches per optimizer step, times the number of processes
    eval_batch_size: OptionalCount = None  # None: batch_size
    num_workers: Annotated[Int, Field(ge=0)] = 0  # sampling processes per loader
    persistent_workers: bool = False  # keep them between epochs; needs num_workers > 0
    pin_memory: bool = False  # page-locked batches for faster copies to a GPU

    # model
    model: Literal["sage", "gcn", "gat"] = "sage"
    hidden_channels: Annotated[Int, Field(gt=0)] = 16
    heads: Annotated[Int, Field(gt=0)] = 4  # gat only
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of the layers' products (torch.autocast); fp16 needs a GPU
    activation_checkpointing: bool = False  # compute layers again in the backward pass: less kept, same gradients

    # training
    epochs: Annotated[Int, Field(ge=0)] = 3
    lr: Annotated[Float, Field(gt=0)] = 0.01
    weight_decay: Annotated[Float, Field(ge=0)] = 0.0
    checkpoint_every_s: Annotated[Float, Field(ge=0)] = 600.0  # within an epoch; 0: at epoch ends only
    seed: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: OptionalCount = 1  # torch's threads; None leaves torch's own choice

    # evaluation
    train_eval: Literal["every_epoch", "final", "never"] = "final"  # accuracy on the train split
    eval_every: Annotated[Int, Field(gt=0)] = 1  # epochs between evaluations; the last epoch is always evaluated
    eval_splits: Splits = ("valid", "test")  # may be ("valid",) or () for none
    # As num_neighbors, or one number for all hops (-1: all neighbors); None: num_neighbors. With one number accuracies
    # are the same for every eval_batch_size, but for gcn, whose degrees are those of the sampled subgraph.
    eval_num_neighbors: FanOut = None
    release_every: Annotated[Int, Field(ge=0)] = 0  # release_memory() every k training batches; 0: never

    # GPU memory; without effect on a CPU
    empty_cache_every: Annotated[Int, Field(ge=0)] = 0  # torch.cuda.empty_cache() every k training batches; 0: never
    expandable_segments: bool = False  # the allocator's segments grow in place: less is lost to fragmentation
    max_cuda_memory: OptionalBytes = None  # a cap such as "4 GB", to meet a small card's OOM on a large one
    cuda_snapshot: bool = False  # record allocations and write cuda_snapshot.pickle when an allocation fails

    progress: Literal["auto", "bar", "lines", "none"] = "auto"  # auto: a bar in a terminal or JupyterLab, else lines

    @model_validator(mode="after")
    def _together(self) -> TrainConfig:
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
        if self.model == "gat" and self.hidden_channels % self.heads:
            raise ValueError(
                f"hidden_channels: expected a multiple of heads={self.heads} for gat, got {self.hidden_channels}"
            )
        if len(set(self.eval_splits)) != len(self.eval_splits):
            raise ValueError(f"eval_splits: expected each split once, got {list(self.eval_splits)}")
        if "train" in self.eval_splits:
            raise ValueError('eval_splits: expected "valid" and "test"; the train split is ruled by train_eval')
        return self

    def fan_out(self, training: bool) -> tuple[int, ...]:
        """The fan-outs of a pass, one per layer."""
        if training or self.eval_num_neighbors is None:
            return self.num_neighbors
        repeats = len(self.num_neighbors) if len(self.eval_num_neighbors) == 1 else 1
        return self.eval_num_neighbors * repeats

    def splits_to_evaluate(self, epoch: int) -> list[str]:
        """The splits whose accuracy is wanted after `epoch`: every `eval_every` epochs and after the last."""
        final = epoch == self.epochs
        splits: list[str] = [*self.eval_splits] if final or epoch % self.eval_every == 0 else []
        if (self.train_eval == "every_epoch" and splits) or (self.train_eval == "final" and final):
            splits.insert(0, "train")
        return splits

    @classmethod
    def create(cls, values: Mapping[str, Any] | None = None, /, **more: Any) -> TrainConfig:
        """A config from names and values; every mistake in them is reported in one `InputError`."""
        values = {**(values or {}), **more}
        problems = [
            unknown_name(name, cls.model_fields, "parameter") for name in values if name not in cls.model_fields
        ]
        try:
            config = cls(**values)
        except ValidationError as error:
            for item in error.errors():
                if item["type"] == "extra_forbidden":
                    continue
                name = str(item["loc"][0]) if item["loc"] else ""
                problems.append(_sentence(name, item))
            raise InputError("; ".join(problems)) from None
        return config

    def replace(self, **changes: Any) -> TrainConfig:
        """A new config with some values changed, validated like a new one."""
        return self.create({**self.model_dump(), **changes})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the resolved values as JSON, atomically."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """Read what `save` wrote.

        Raises:
            InputError: when the file is missing, is not JSON or holds values that are refused.
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
            return cls.create(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


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
        close = difflib.get_close_matches(str(given), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{name}: expected one of {', '.join(known)}, got {given!r}{hint}"
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
