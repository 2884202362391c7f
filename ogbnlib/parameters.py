"""Names and values of parameters as the command line, papermill, YAML and JSON pass them.

Imports neither torch nor numpy.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .errors import InputError, naming, parse_bytes, split_name, unknown_name
from .files import home
from .registry import MODELS

# Parameters, each with its names in PyG, DGL, Lightning and other programs.
_ELSEWHERE = {
    "lr": "learning_rate lr0 base_lr init_lr initial_lr learningrate alpha",
    "epochs": "max_epochs num_epochs n_epochs nb_epochs num_train_epochs max_epoch",
    "batch_size": "train_batch_size bs minibatch_size per_device_train_batch_size",
    "eval_batch_size": "test_batch_size val_batch_size valid_batch_size inference_batch_size",
    "num_neighbors": "fanout fanouts fan_out fan_outs num_neighbours neighbors sizes "
    "neighbor_sizes sample_sizes num_samples",
    "eval_num_neighbors": "eval_fanout test_fanout val_fanout eval_fanouts",
    "hidden_channels": "hidden_dim hidden_size hidden_units num_hidden n_hidden hid_dim nhid "
    "hidden_features h_feats hid_size embedding_dim hidden_width hidden",
    "num_workers": "workers n_workers num_cpu_workers dataloader_num_workers",
    "num_threads": "threads n_threads omp_num_threads num_cores",
    "dropout": "drop dropout_rate drop_rate p_dropout feat_drop dropout_p drop_out",
    "weight_decay": "wd l2 l2_reg l2_regularization reg",
    "seed": "random_seed random_state rng_seed manual_seed",
    "model": "arch architecture gnn gnn_type model_type model_name conv net",
    "model_args": "model_kwargs model_params net_args",
    "dataset": "data data_name dataset_name data_path path graph input",
    "data_dir": "root data_root dataset_dir data_folder",
    "device": "accelerator gpu cuda use_cuda gpus use_gpu",
    "precision": "amp fp16 bf16 use_amp mixed_precision dtype half autocast",
    "accumulate": "accumulation_steps accumulate_grad_batches gradient_accumulation_steps "
    "grad_accum accum_steps",
    "activation_checkpointing": "gradient_checkpointing checkpointing grad_checkpointing",
    "early_stopping": "patience early_stop early_stopping_patience es_patience",
    "keep_by": "monitor metric_for_best_model best_metric",
    "class_weight": "class_weights loss_weight weighted_loss pos_weight",
    "eval_every": "eval_steps eval_interval check_val_every_n_epoch eval_freq log_steps val_every",
    "lr_schedule": "scheduler lr_scheduler lr_scheduler_type schedule",
    "hops": "k num_hops n_hops sign_k num_propagations",
    "undirected": "to_undirected add_reverse_edges symmetric bidirected make_undirected",
    "pin_memory": "pinned use_pinned",
    "loading": "policy loader loader_type in_memory",
    "checkpoint_every_s": "save_every save_steps checkpoint_every save_interval checkpoint_interval",
    "progress": "verbose progress_bar enable_progress_bar silent quiet",
}
# What to write in place of a name that is not a parameter of a run.
INSTEAD = {
    **{name: f"write {ours}" for ours, names in _ELSEWHERE.items() for name in names.split()},
    **dict.fromkeys(
        ("num_layers", "n_layers", "layers", "depth", "num_gnn_layers"),
        "write one fan-out per layer in num_neighbors: [15, 10, 5] has three",
    ),
    **dict.fromkeys(("shuffle", "drop_last"), "training always shuffles all seeds"),
    **dict.fromkeys(("optimizer", "optim", "opt"), "Adam trains, with lr and weight_decay"),
    **dict.fromkeys(
        ("loss", "criterion", "loss_fn", "label_smoothing"),
        "the loss is the cross-entropy, in loss_and_gradient (training/learner.py)",
    ),
    **dict.fromkeys(
        ("in_channels", "num_features", "out_channels", "num_classes"),
        "it follows from the data set",
    ),
    **dict.fromkeys(
        ("run_dir", "out_dir", "output_dir", "save_dir"),
        "write --run-dir, or run(config, run_dir=...)",
    ),
    **dict.fromkeys(
        ("ranks", "num_ranks", "world_size"), "write --ranks, or run(config, num_ranks=...)"
    ),
    "memory_limit": "write --memory-limit, or run(config, memory_limit=...)",
    "resume": "write --resume, or run(config, resume=True)",
    "limit_by": "write --limit-by, or run(config, limit_by=...)",
    # heads and the names below were parameters of versions 0.1.0 and 0.2.0
    **dict.fromkeys(("n_heads", "num_heads", "heads"), 'write model_args={"heads": 4}'),
    "cuda_snapshot": "write torch.cuda.memory._record_memory_history() in a script under `watch`",
    "empty_cache_every": "write release_every",
    "lr_schedule_args": 'write lr_schedule="cosine:T_max=40"',
    "sampling": "write nothing: each node draws its own neighbors",
    "sampler": "write store.sampler(...) behind PyG's own loader",
    "self_loops": 'write norm="gcn"',
    "spool_dir": "write the environment variable TMPDIR",
}


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


def _size(value: object) -> object:
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
    return value


def _model(value: object) -> object:
    if not isinstance(value, str) or value in MODELS:
        return value
    place, _, name = value.rpartition(":")
    if not place.strip() or not name.strip():
        raise ValueError(
            f'expected {", ".join(MODELS)}, or your own as "my_model.py:Net" or '
            f'"package.module:Net", got {value!r}'
        )
    return f"{_path(place)}:{name}"


# Arguments of each schedule, the required one first, named as in torch's CosineAnnealingLR and
# StepLR.
_SCHEDULES: dict[str, dict[str, type[int] | type[float]]] = {
    "constant": {},
    "cosine": {"T_max": int, "eta_min": float},
    "step": {"step_size": int, "gamma": float},
}
_RANGES = {int: (1, 2**31 - 1, "a number of epochs"), float: (0, 1, "a number from 0 to 1")}


def parse_schedule(text: str) -> tuple[str, dict[str, float]]:
    """Split "cosine:T_max=40,eta_min=0.001" into its name and its arguments."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    if name not in _SCHEDULES:
        raise ValueError(f"expected constant, cosine:T_max=40 or step:step_size=10, got {text!r}")
    kinds = _SCHEDULES[name]
    pairs = [pair.partition("=") for pair in rest.split(",") if pair.strip()]
    names = [key.strip() for key, _, _ in pairs]
    required = [*kinds][:1]
    if len({*names}) < len(names) or not {*required} <= {*names} <= {*kinds}:
        takes = "needs {} and takes {}".format(*kinds) if kinds else "takes none"
        raise ValueError(f"{name} {takes}, got {', '.join(names) or 'none'}")
    arguments = {}
    for key, (_, _, word) in zip(names, pairs, strict=True):
        lowest, highest, expected = _RANGES[kinds[key]]
        number = math.nan
        with contextlib.suppress(ValueError):
            number = kinds[key](word)
        if not lowest <= number <= highest:
            raise ValueError(f"expected {expected} for {key}, got {word.strip()!r}")
        arguments[key] = number
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
OptionalCount = Annotated[Count | None, BeforeValidator(no_value)]
Threads = Annotated[Literal["auto"] | Count | None, BeforeValidator(no_value)]
OptionalPath = Annotated[str | None, BeforeValidator(_path), BeforeValidator(no_value)]
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
    str, BeforeValidator(lambda value: "none" if no_value(value) is None else _path(value))
]
Dataset = Annotated[str, BeforeValidator(_path)]
Model = Annotated[str, BeforeValidator(_model)]
Schedule = Annotated[str, AfterValidator(lambda text: parse_schedule(text) and text)]
Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


def unknown_parameter(name: str, known: Iterable[str]) -> str:
    """Return the message for a name that is not a parameter: what to write instead, or the closest
    name and all names."""
    plain = name.strip().lower().replace("-", "_")
    instead = f"write {plain}" if plain in known else INSTEAD.get(plain)
    if instead is None:
        return unknown_name(name, known, "parameter")
    return f"unknown parameter {name!r}: {instead}"


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
    """Return names and values of a YAML file such as slurm/small.yaml; `InputError` for anything
    else.

    Values stay text, as `--set` passes them, or lists of text, because YAML 1.1 reads 010 as 8,
    1:30 as 90 and off as false. Values of a map, such as model_args, are read as JSON.
    """
    import yaml

    expected = "YAML such as 'batch_size: 128'"
    with naming(file, expected), open(file, encoding="utf-8") as opened:
        text = opened.read(_MOST_YAML + 1)
        if len(text) > _MOST_YAML:
            raise InputError(f"{file}: expected {expected} of at most 1 MB, found more")
        for event in yaml.parse(text, yaml.SafeLoader):
            name = getattr(event, "anchor", None)
            # ten lines of anchors and aliases can stand for 10**9 values
            if name:
                raise InputError(
                    f"{file}, line {event.start_mark.line + 1}: expected values without YAML's & "
                    f"and *, found {name!r}"
                )
        tree = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(tree, yaml.MappingNode) or not tree.value:
        raise InputError(f"{file}: expected lines such as 'batch_size: 128', found {text!r:.60}")
    return _plain(tree, file)


_MOST_YAML = 2**20


def _plain(node: Any, file: str | os.PathLike[str], maps: int = 0) -> Any:
    """Return a YAML node, nested in `maps` maps, as text, list or dict; in the inner maps, values
    are read as JSON."""
    if node.id == "scalar":
        return node.value if maps < 2 else _json_value(node, file)
    if node.id == "sequence":
        return [_plain(item, file, maps) for item in node.value]
    values: dict[str, Any] = {}
    for key, value in node.value:
        place = f"{file}, line {key.start_mark.line + 1}"
        if key.id != "scalar":
            raise InputError(f"{place}: expected a name, found a {key.id} in its place")
        if key.value in values:
            raise InputError(f"{place}: expected each parameter once, found {key.value} again")
        values[key.value] = _plain(value, file, maps + 1)
    return values


def _json_value(node: Any, file: str | os.PathLike[str]) -> object:
    """Return a value of an inner map: text if it is quoted or text in YAML, else read as JSON."""
    if node.style or node.tag.endswith(":str"):
        return node.value
    try:
        return json.loads(node.value.lower())  # lower: YAML may write True
    except ValueError:
        raise InputError(
            f"{file}, line {node.start_mark.line + 1}: expected a value as JSON has it, such as 8, "
            f"0.5, true or null, or text in quotes, found {node.value}"
        ) from None
