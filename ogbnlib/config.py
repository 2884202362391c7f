"""The parameters of a run: one frozen object for notebooks, the command line and Slurm jobs.

Bad values are refused here, with the parameter's name, before any file is opened. Imports neither
torch nor numpy.
"""

import inspect
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from . import parameters as p
from .errors import InputError, clear_errors, unknown_name
from .files import parse_json, read_whole, write_json
from .registry import MODELS, POLICIES, Policy

Loading: Any = Literal[tuple(POLICIES)]


class Resume(NamedTuple):
    """Mark of a parameter that a resumed run may change."""

    is_noted: bool = False  # whether to report a change, because weights or accuracies then differ

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Return the mark of the parameter `name`; None if a resumed run may not change it."""
        info = TrainConfig.model_fields[name]
        return next((item for item in info.metadata if isinstance(item, cls)), None)


# Parameters of 0.2.0 that are gone. A saved run must have this version's value, for it to open and
# to go on as it began; None: the parameter has changed no result.
_REMOVED = {
    "sampling": "nodes",
    "lr_schedule": "constant",
    "keep_by": "accuracy",
    "lookahead": None,
    "download": None,
    "pin_memory": None,
    "data_dir": None,
    "progress": None,
}
_FREE = Resume()
_NOTED = Resume(is_noted=True)


class TrainConfig(BaseModel):
    """Parameters of one training run, frozen. Every field also accepts the string that a command
    line or papermill passes.

    Build it with `TrainConfig.create(dataset=..., ...)`; `help(TrainConfig.create)` explains each
    parameter.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    # data
    dataset: Annotated[p.Dataset, _FREE]  # the path may change: the checkpoint compares the data
    """A store, or an official name such as "ogbn-arxiv", which stands for its store in the
    folder "dataset"; `convert` makes a store of other data."""
    undirected: p.OptionalBool = None
    """Train with reverse edges. If omitted, the store's own setting is used; a store with the other
    one is refused. A plan without a store is directed."""
    feature_dtype: Literal["float32", "float16", "int8"] = "float32"
    """dtype of the features in RAM, or in the store of a plan without one. On disk a store has its
    own, which `convert` sets; int8 is for stores only."""

    # loading
    loading: Annotated[Loading, _FREE] = "shared"
    """Loading policy. eager: a stock loader for each split, all at once; lazy: one stock loader at a
    time; shared: one graph (CSC) in RAM for all loaders; store: the graph on disk; propagated:
    features propagated once, no sampling."""
    spool: Annotated[p.SizeOrWord, _FREE] = "auto"
    """loading=store: disk for windows of batches prepared for several epochs, in SLURM_TMPDIR or
    TMPDIR."""
    num_neighbors: p.FanOut = (3, 2)
    """One fan-out per layer, nearest hop first; -1 takes all neighbors."""
    batch_size: p.Count = 128
    """Seeds per sampled batch."""
    accumulate: Annotated[p.Count, _FREE] = 1
    """Batches per optimizer step and process."""
    eval_batch_size: Annotated[p.OptionalCount, _NOTED] = None
    """Seeds per batch of an evaluation; None: batch_size."""
    num_workers: Annotated[p.CountOrZero, _FREE] = 0
    """Sampling processes per loader."""
    persistent_workers: Annotated[bool, _FREE] = False
    """Keep the workers between epochs; needs num_workers > 0."""

    # loading=propagated
    hops: p.Count = 2
    """loading=propagated: number of times that features are propagated to neighbors."""
    norm: Literal["row", "sym", "gcn"] = "sym"
    """loading=propagated: row is the mean over in-neighbors, sym divides by roots of degrees, gcn
    is sym with each node as its own neighbor once."""

    # model
    model: p.Model = "sage"
    """sage, gcn or gat; with loading=propagated sgc, sign or sagn; or your own class, such as
    "my_model.py:Net"."""
    model_args: p.Arguments = {}
    """More arguments of your own model's __init__, or {"heads": 8} for gat and sagn (4); a dict or
    JSON text."""
    hidden_channels: p.Count = 16
    """Width of the layers."""
    dropout: Annotated[p.Float, Field(ge=0, lt=1)] = 0.0
    """Share of a hidden layer's values that training drops."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the layers' products (torch.autocast); fp16 needs a GPU."""
    activation_checkpointing: Annotated[bool, _FREE] = False
    """Compute layers again in the backward pass: less memory, same gradients."""

    # training
    epochs: Annotated[p.CountOrZero, _FREE] = 3
    """Passes over the train split."""
    lr: Annotated[p.Float, Field(gt=0), _NOTED] = 0.01
    """Adam's learning rate. For a schedule, resume the run with another value."""
    weight_decay: Annotated[p.Float, Field(ge=0), _NOTED] = 0.0
    """Adam's weight decay."""
    class_weight: p.ClassWeight = "none"
    """Weight of each class in the loss: none, or balanced (as in scikit-learn: the fewer nodes in
    the train split, the larger)."""
    checkpoint_every_s: Annotated[p.Float, Field(ge=0), _FREE] = 600.0
    """Seconds between checkpoints within an epoch; 0: at epoch ends only."""
    seed: p.CountOrZero = 0
    """Seed of weights, order, neighbors and dropout; on a CPU it determines the run."""
    device: Annotated[Literal["auto", "cpu", "cuda"], _FREE] = "auto"
    """auto: a GPU where there is one."""
    num_threads: Annotated[p.Threads, _NOTED] = "auto"
    """Threads of torch in each process; auto: one for small steps, all of the job's cores for large
    ones, and in a resumed run as many as before; None: torch's own choice. config.json has the
    number."""

    # evaluation
    train_eval: Annotated[Literal["every_epoch", "final", "never"], _FREE] = "final"
    """Time of the evaluation on the train split."""
    eval_every: Annotated[p.Count, _FREE] = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    eval_splits: Annotated[p.Splits, _FREE] = ("valid", "test")
    """Splits to evaluate; may be ("valid",) or () for none."""
    eval_num_neighbors: Annotated[p.EvalFanOut, _NOTED] = None
    """Fan-out of evaluations: one number per layer, or one for all (-1: all neighbors); None:
    num_neighbors. With one for all, accuracies are the same for every eval_batch_size, except for
    gcn, whose degrees depend on the batch."""
    early_stopping: Annotated[p.Patience, _FREE] = 0
    """Stop after this many evaluations in a row without a better valid accuracy; 0: never."""
    keep: Literal["last", "best"] = "last"
    """best: also keep best.pt, the model with the best accuracy on the valid split so far."""
    release_every: Annotated[p.CountOrZero, _FREE] = 0
    """Call release_memory() every k batches, in training and evaluation, with empty_cache() on a
    GPU; 0: never."""

    # GPU memory; no effect on a CPU
    expandable_segments: Annotated[bool, _FREE] = False
    """Let the allocator's segments grow in place: less fragmentation."""
    max_cuda_memory: Annotated[p.OptionalBytes, _FREE] = None
    """Cap on GPU memory such as "4 GB", to reproduce the out-of-memory error of a small card on a
    large one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for applies, text in _conflicts(self):
            if applies:
                raise ValueError(text)
        return self

    @classmethod
    def create(cls, values: Mapping[str, object] | None = None, /, **more: object) -> Self:
        """Create a config from names and values; one `InputError` reports every mistake."""
        try:
            return cls.model_validate({**(values or {}), **more})
        except ValidationError as error:
            raise InputError("; ".join(map(_problem, error.errors()))) from None

    def replace(self, **changes: object) -> Self:
        """Create a config with some values changed, and validate it again."""
        return self.create({**self.model_dump(), **changes})

    @clear_errors()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the resolved values as JSON, atomically."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    @clear_errors()
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of `save`; `InputError` if it is missing or damaged, has bad values, or is of a
        version whose runs this one can't go on with."""
        values = parse_json(read_whole(Path(path)), path, "a JSON object of parameters")
        unknown = sorted(values.keys() - cls.model_fields.keys() - _REMOVED.keys())
        if unknown:
            raise InputError(
                f"{path}: expected parameters of ogbnlib 0.2.0 or later, found {', '.join(unknown)} of "
                "another version, such as 0.1.0; go on with that version, or train in a new folder"
            )
        for name, expected in _REMOVED.items():
            value = values.pop(name, expected)
            if value != expected and expected is not None:
                raise InputError(
                    f"{path}: expected {name}={expected!r}, the only value left in this version, found "
                    f"{value!r}; go on with ogbnlib 0.2.0"
                )
        try:
            return cls.create(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def continuing(self, saved: Self) -> Self:
        """Return the config that resumes a run of `saved`, whose number of threads replaces auto."""
        return self if self.num_threads != "auto" else self.replace(num_threads=saved.num_threads)

    @property
    def policy(self) -> Policy:
        """Registry entry of the loading policy, which says where the run keeps the graph."""
        return POLICIES[self.loading]

    @property
    def rounds_in_ram(self) -> bool:
        """Whether a store's features are rounded to float16 while they are read into memory."""
        return self.feature_dtype == "float16" and not self.policy.reads_disk

    @property
    def heads(self) -> int:
        """Attention heads of gat and sagn."""
        return int(self.model_args.get("heads", 4))

    def is_over(self, valid: Iterable[float | None]) -> bool:
        """Whether training is finished; `valid` has each epoch's accuracy, None or NaN without one."""
        history = list(valid)
        values = [value for value in history if value is not None and not math.isnan(value)]
        # number of evaluations after the first of the best ones
        since = len(values) - values.index(max(values)) - 1 if values else 0
        return len(history) >= self.epochs or 0 < self.early_stopping <= since

    def fan_out(self, training: bool) -> tuple[int, ...]:
        """Return the fan-outs of a training or evaluation pass, one per layer, nearest hop first;
        none for propagated features."""
        if not self.policy.samples:
            return ()
        fan_outs = self.num_neighbors if training else self.eval_num_neighbors or self.num_neighbors
        # one is for all layers
        return fan_outs * len(self.num_neighbors) if len(fan_outs) == 1 else fan_outs

    @property
    def depth(self) -> int:
        """Number of layers of a model on sampled subgraphs, or of hops of propagated features."""
        return self.policy.hops(self) or len(self.num_neighbors)

    def seeds_per_batch(self, training: bool) -> int:
        """Return the number of seeds per batch in a training or evaluation pass."""
        return self.batch_size if training else self.eval_batch_size or self.batch_size

    def splits_to_evaluate(self, epoch: int) -> list[str]:
        """Return the splits to evaluate after `epoch`, the last one or a multiple of `eval_every`."""
        final = epoch == self.epochs
        due = final or epoch % self.eval_every == 0
        train = {"every_epoch": due, "final": final, "never": False}[self.train_eval]
        return ["train"] * train + [*self.eval_splits] * due  # times False: none

    def without_empty_splits(self, num_seeds: Mapping[str, int]) -> Self:
        """Return the config without evaluations of splits that have no nodes."""
        return self.replace(eval_splits=[split for split in self.eval_splits if num_seeds[split]])

    def num_evaluations(self, split: str) -> int:
        """Return the number of evaluations of `split` in the whole run."""
        if not self.epochs:
            return 0
        # after each multiple of `eval_every` before the last epoch, and after the last epoch
        num_before = (self.epochs - 1) // self.eval_every
        is_due_before = split in self.splits_to_evaluate(self.eval_every)
        return num_before * is_due_before + (split in self.splits_to_evaluate(self.epochs))

    def changes(self, saved: Mapping[str, object]) -> tuple[list[str], list[str]]:
        """Compare with the parameters of the run to resume: return the changes to refuse, and
        sentences about allowed changes that affect weights or accuracies.

        A parameter that an older version did not save counts as its default value.
        """
        refused = []
        notes = [
            f"{name} is no longer a parameter, and {value!r} has no effect from here on"
            for name, value in saved.items()
            if name in _REMOVED and value not in (_REMOVED[name], False, "auto")  # the defaults
        ]
        for name, value in self.model_dump(mode="json").items():
            earlier = saved.get(name, type(self).model_fields[name].default)
            if earlier == value:
                continue
            rule = Resume.of(name)
            if rule is None:
                refused.append(f"{name} was {earlier!r}, now {value!r}")
            elif rule.is_noted:
                notes.append(f"{name} is {value} from here on, {earlier} before")
        return refused, notes


def _problem(item: ErrorDetails) -> str:
    """Return one of pydantic's errors as `name: expectation, got value`."""
    names = [str(name) for name in item["loc"][:1]]  # none for a check of several parameters
    if item["type"] == "extra_forbidden":
        return unknown_name(names[0], TrainConfig.model_fields, "parameter")
    if item["type"] == "missing":
        text = "expected a value, got none"
    elif item["type"] == "value_error":  # raised by a check of this package
        text = str(item["ctx"]["error"])
    else:  # pydantic's "Input should be ..."
        text = f"{item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"
    return ": ".join([*names, text])


def _conflicts(config: TrainConfig) -> list[tuple[object, str]]:  # (true if found, message)
    layers = len(config.num_neighbors)
    evaluated = config.eval_num_neighbors
    without_valid = "valid" not in config.eval_splits
    needs_valid = f"expected 'valid' in eval_splits, got {list(config.eval_splits)}"
    return [
        (
            not config.dataset.strip(),
            "dataset: expected a folder or an official name such as 'ogbn-arxiv', got an empty string",
        ),
        (
            evaluated is not None and len(evaluated) not in (1, layers),
            f"eval_num_neighbors: expected one fan-out or {layers}, as in num_neighbors, got "
            f"{list(evaluated or ())}",
        ),
        (
            config.feature_dtype == "int8" and not config.policy.reads_disk,
            "feature_dtype: int8 is for a store on disk: expected loading=store, got "
            f"loading={config.loading}",
        ),
        (
            config.persistent_workers and config.num_workers == 0,
            "persistent_workers: needs num_workers of at least 1, got num_workers=0",
        ),
        (without_valid and config.early_stopping, f"early_stopping: {needs_valid}"),
        (without_valid and config.keep == "best", f"keep: {needs_valid}"),
        *_model_problems(config),
    ]


def _model_problems(config: TrainConfig) -> list[tuple[object, str]]:
    """Return (true if found, message) for each thing that a model can't do; the first counts."""
    models = {name: entry.load() for name, entry in MODELS.items()}
    chosen = models.get(config.model)
    checkpointed = [name for name, model in models.items() if model.can_checkpoint]
    checkpointing = (
        config.activation_checkpointing and config.model not in checkpointed,
        f"activation_checkpointing: expected with {', '.join(checkpointed)}; in your own model call "
        "torch.utils.checkpoint",
    )
    if chosen is None:  # the user's own model, which takes any arguments
        return [checkpointing]
    needs_propagated = not config.policy.samples
    fitting = [name for name, model in models.items() if model.propagated == needs_propagated]
    known_arguments = {"heads"} if chosen.has_heads else set()
    heads = config.model_args.get("heads", 4)
    is_count = type(heads) is int and heads > 0  # not `config.heads`, which converts it
    return [
        (
            config.model_args.keys() - known_arguments,
            f"model_args: {config.model} takes {' '.join(known_arguments) or 'none'}, got "
            f"{config.model_args}",
        ),
        (not is_count, f"model_args: expected heads of at least 1, a whole number, got {heads!r}"),
        (
            chosen.has_heads and is_count and config.hidden_channels % heads,
            f"hidden_channels: expected a multiple of heads={heads}, got {config.hidden_channels}",
        ),
        (
            config.model not in fitting,
            f"model: loading={config.loading} takes {', '.join(fitting)}, or your own model, got "
            f"{config.model!r}",
        ),
        checkpointing,
    ]


def check_config(config: object) -> None:
    if not isinstance(config, TrainConfig):
        raise InputError(
            f"config: expected a TrainConfig, got a {type(config).__name__}; use TrainConfig.create(...)"
        )


def parameters() -> dict[str, str]:
    """Return the meaning of each parameter; the keys are its name, default and choices."""
    meanings = {}
    for name, info in TrainConfig.model_fields.items():
        choices = ""
        if get_origin(info.annotation) is Literal:
            choices = f" ({', '.join(get_args(info.annotation))})"
        default = "" if info.is_required() else f"={info.default!r}"
        meanings[f"{name}{default}{choices}"] = (info.description or "").replace("\n", " ")
    return meanings


# TAB, Shift-TAB and help() show all parameters of `create`.
_create: Any = TrainConfig.create.__func__  # type: ignore[attr-defined]
_create.__signature__ = inspect.Signature(
    [
        inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY),
        *(
            one.replace(annotation=one.empty)
            for one in inspect.signature(TrainConfig).parameters.values()
        ),
    ]
)
_create.__doc__ = "\n\n".join(
    [str(_create.__doc__), *(f"{name}\n    {text}" for name, text in parameters().items())]
)
# The public place of the class. If jedi looked for the class in this module, TAB would first read
# the sources of pydantic and typing, for 3 s.
TrainConfig.__module__ = "ogbnlib"
