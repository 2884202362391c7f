"""A model of the user's own: found by its name, made, tried on a few random nodes, and called as its forward asks.

A file is run from the copy that its run's folder keeps, so that a run goes on with the code it began with, whatever
became of the file; what it imports, and a class of a package, is imported from where it is. Arguments are given by
name, to `__init__` and to `forward`, as far as these have parameters of such names.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import itertools
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import PNA
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ..config import TrainConfig
from ..errors import InputError, no_exit, unknown_name
from ..files import home, write_atomically
from ..graph.store import Store
from ..registry import MODELS
from ..runs.folder import MODEL
from .models import DTYPES, GNN, degree_histogram

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SEEDS = 4  # of the random batch


@no_exit()
def make_model(
    config: TrainConfig,
    num_features: int,
    num_classes: int,
    run_dir: Path | None = None,
    given: nn.Module | None = None,
    note: Callable[[str], object] = lambda text: None,
    store: Store | None = None,
) -> nn.Module:
    """The model of a config, with weights drawn by its seed; `given` is one that the user has made.

    Args:
        run_dir: has the code to run; None takes it from where the config says.
        note: told how a model of the user's own is made.
        store: whose nodes' degrees a model such as PNA is given; without one it is made to be tried out alone.

    Raises:
        InputError: where a model of the user's own can't be had, made or called; it is tried on random nodes.
    """
    made_by = None if given is not None or config.model in MODELS else _find(config, code_of(config, run_dir)[0])
    torch.manual_seed(config.seed)  # now, as what a file does when it is imported may draw numbers too
    if given is not None:
        _check_unused(config, {}, "which is made already")
    elif made_by is None:
        model: nn.Module = MODELS[config.model].load()(config, num_features, num_classes)
        return model
    else:
        given = _instance(made_by, config, num_features, num_classes, note, store)
    _try_out(given, config, num_features, num_classes)
    return given


# Its code -------------------------------------------------------------------------------------------------------------


def code_of(config: TrainConfig, run_dir: Path | None) -> tuple[Path | None, list[str]]:
    """The file whose code is run, None where it has none, and what is to be said of it.

    Raises:
        InputError: where there is no such file or module, or a module is not the one that the run began with.
    """
    place, _, name = config.model.rpartition(":")
    if place == "__main__" or "<locals>" in name:
        raise InputError(
            f"model: only the process that made {config.model} has it; write it to a file (%%writefile my_model.py), "
            "or give it to train(config, model=...) again"
        )
    is_file, copy = place.endswith(".py"), None if run_dir is None else run_dir / MODEL
    source = home(place) if is_file else _module_file(place)
    there = source is not None and source.is_file()
    if copy is None or not copy.is_file():
        if is_file and not there:
            raise InputError(f"{place}: expected the file of the model (model={config.model!r}), found no such file")
        return source, []
    if not there:
        return copy, [f"{place}: found no such file any more; going on with the copy of it, {copy}"]
    assert source is not None
    lines = itertools.zip_longest(source.read_bytes().splitlines(), copy.read_bytes().splitlines())
    other = next((number for number, (now, then) in enumerate(lines, 1) if now != then), None)
    if other is None:
        return copy if is_file else source, []
    changed = f"{source}: it has changed since this run began, first in line {other}"
    if not is_file:
        raise InputError(f"{changed}; put {copy} back there, or train the new one in a new run_dir")
    return copy, [f"{changed}; going on with the copy of what it was, {copy}; to go on with the new one, copy it there"]


def keep_code(config: TrainConfig, run_dir: Path) -> list[str]:
    """Keep a copy of the model's code in the run's folder, if there is none yet; what is to be said of it."""
    code, notes = code_of(config, run_dir)
    if code is not None and code.is_file() and not (run_dir / MODEL).exists():
        content = code.read_bytes()
        write_atomically(run_dir / MODEL, lambda file: file.write(content))
    return notes


def _module_file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a package above it; a module without a spec, such as __main__
        spec = None
    except Exception as error:
        raise InputError(f"{name}: its package can't be imported: {type(error).__name__}: {error}") from None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _find(config: TrainConfig, code: Path | None) -> type[nn.Module]:
    """The class that `config.model` names."""
    place, _, name = config.model.rpartition(":")
    where, file = code if place.endswith(".py") else place, code
    try:
        if place.endswith(".py") and code:
            source = home(place).absolute()
            file = source if source.is_file() else code
            module = _executed(code, file)
        else:
            module = importlib.import_module(place)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        wrong = f"expected Python that can be imported, found {_said(error, file)}"
        raise InputError(f"{where}: {wrong}; mend it, or check the name and the folder you start from") from None
    found = getattr(module, name, None)
    if found is None:
        names = [key for key, value in vars(module).items() if _is_model(value) and value.__module__ == module.__name__]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"{where}: expected a class {name} in it, found {', '.join(names) or 'no model'}{hint}")
    if not _is_model(found):
        kind = f"a class of {found.__mro__[1].__name__}" if isinstance(found, type) else type(found).__name__
        raise InputError(f"{where}: expected {name} to be a class derived from torch.nn.Module, found {kind}")
    return found


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _executed(code: Path, file: Path) -> types.ModuleType:
    """The module in `code`, as if it lay in `file`: what lies beside that is found by `__file__`, and imported first.

    `importlib`'s own way would leave __pycache__ beside it; PyG looks it up by its name, and reads its lines.
    """
    text, name, folder = code.read_bytes(), str(file), str(file.parent)
    lines = importlib.util.decode_source(text).splitlines(keepends=True)
    linecache.cache[name] = len(text), None, lines, name  # the copy's, as the file may have changed
    sys.path[:] = [folder, *(other for other in sys.path if other != folder)]
    tree = ast.parse(text, name)
    _check_loaded(tree, file)
    module = types.ModuleType("ogbnlib_own_model")
    module.__file__ = name
    sys.modules[module.__name__] = module
    exec(compile(tree, name, "exec"), vars(module))
    return module


def _check_loaded(tree: ast.Module, file: Path) -> None:
    """Refuse an import of a file beside the model in whose place this process has loaded another of that name."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    for name in {name.partition(".")[0] for name in names}:
        beside, loaded = file.with_name(f"{name}.py"), getattr(sys.modules.get(name), "__file__", None)
        if beside.is_file() and loaded is not None and Path(loaded).resolve() != beside.resolve():
            raise InputError(
                f"{file}: expected `import {name}` to find {beside}, found that {loaded} is loaded as {name} already; "
                "rename one of them, or train in a process of its own (ogbnlib.run, or python -m ogbnlib train)"
            )


def _said(error: BaseException, code: Path | None) -> str:
    """An error of the user's code in its last line, and the line it happened in."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(code)]
    number = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    where = f" in line {number}" if number is not None else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}{where}: {' '.join(text.split())}"


# Its arguments --------------------------------------------------------------------------------------------------------


def _instance(
    made_by: type[nn.Module], config: TrainConfig, num_features: int, num_classes: int, note: Callable[[str], object],
    store: Store | None,
) -> nn.Module:  # fmt: skip
    parameters = inspect.signature(made_by).parameters
    offered = {name: getattr(config, name) for name in ("hidden_channels", "dropout", "heads")}
    offered |= {"in_channels": num_features, "num_features": num_features}
    offered |= {"out_channels": num_classes, "num_classes": num_classes, "num_layers": len(config.num_neighbors)}
    named = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
    takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in config.model_args:
        if name not in named and not takes_all:
            raise InputError(f"model_args: {unknown_name(name, named, f'argument of {config.model}')}")
    arguments = {name: value for name, value in offered.items() if name in named} | config.model_args
    for name, parameter in parameters.items():
        if _is_required(parameter) and name not in (*arguments, "deg"):
            raise InputError(f"model_args: {config.model} needs {name!r}, which nobody gives; add it")
    _check_unused(config, arguments, "which takes none")
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    if issubclass(made_by, PNA) or ("deg" in named and _is_required(parameters["deg"])):  # PNA: among its **kwargs
        histogram = torch.tensor([0, 1]) if store is None else degree_histogram(store)
        arguments = {"deg": histogram, **arguments}
    try:
        model = made_by(**arguments)
    except Exception as error:
        raise InputError(f"{config.model}: can't be made with {given}: {_said(error, _file_of(made_by))}") from None
    note(f"the model is {config.model}({given})")
    return model


def _check_unused(config: TrainConfig, arguments: Mapping[str, Any], why: str) -> None:
    for name in ("dropout", "heads"):
        if name not in arguments and getattr(config, name) != TrainConfig.model_fields[name].default:
            raise InputError(f"{name}: got {getattr(config, name)} for {config.model}, {why}; leave it out")


def _is_required(parameter: inspect.Parameter) -> bool:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variable


def _file_of(kind: type) -> Path | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return None if file is None else Path(file)


# Its forward ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """How a model is called for the scores of a batch's seeds, float32 [batch_size, num_classes].

    `forward(x, edge_index)`, with the counts of each hop where it has `num_sampled_nodes` and `num_sampled_edges` (or
    PyG's names for them, `..._per_hop`); `forward(x)`; or with the whole batch, a PyG `Data` of x, edge_index, n_id,
    batch_size and the counts. Rows beyond the seeds' are left out.

    Attributes:
        arguments: What is given to each parameter; "batch" is all of it.
        dtype: Of autocast around it; ours have their own within.
    """

    arguments: Mapping[str, str]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: nn.Module, precision: str) -> Call:
        """By the names of its forward's parameters; `InputError` where one is left that nobody gives."""
        parameters = inspect.signature(model.forward).parameters
        named = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
        needed = [name for name, parameter in parameters.items() if _is_required(parameter)]
        joins = isinstance(model, BasicGNN) and hasattr(model, "jk")  # the outputs of its layers, for all nodes
        counts = [] if joins else ["num_sampled_nodes", "num_sampled_edges"]
        given = {name: count for count in counts for name in (count, f"{count}_per_hop") if name in named}
        if len(needed) == 1 and "edge_index" not in named:
            given = {needed[0]: "x" if needed == ["x"] else "batch"}
        else:
            tensors = ("x", "edge_index")
            first = tensors if set(tensors) <= set(named) else [name for name in named if name not in given][:2]
            given |= dict(zip(first, tensors, strict=False))
        if left := [name for name in needed if name not in given]:
            raise InputError(
                f"model: expected forward(x, edge_index), the same with num_sampled_nodes and num_sampled_edges, or "
                f"forward(batch), found {type(model).__name__}.forward({', '.join(needed)}): nobody gives {left[-1]!r}"
            )
        return cls(given, torch.float32 if isinstance(model, GNN) else DTYPES[precision])

    def scores(self, model: Callable[..., Any], batch: Data, device: torch.device) -> Any:
        """What the model returns."""
        # float16 features are widened after the copy, so that half the bytes cross to the GPU.
        known = {"x": batch.x.to(device, non_blocking=True).float()}
        known |= {"edge_index": batch.edge_index.to(device, non_blocking=True)}
        known |= {name: batch[name] for name in ("num_sampled_nodes", "num_sampled_edges")}
        if "batch" in self.arguments.values():
            known["batch"] = Data(**known, n_id=batch.n_id.to(device), batch_size=batch.batch_size)
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return model(**{name: known[what] for name, what in self.arguments.items()})

    def __call__(self, model: Callable[..., Any], batch: Data, device: torch.device) -> Tensor:
        scores: Tensor = self.scores(model, batch, device)[: batch.batch_size]
        return scores.float()


def random_batch(num_seeds: int, num_hops: int, num_features: int) -> Data:
    """A batch in which each node has one neighbor at the next hop; nobody's numbers drawn."""
    draw = torch.Generator().manual_seed(0)
    target = torch.arange(num_seeds * num_hops)
    num_nodes = num_seeds + len(target)
    return Data(
        x=torch.randn(num_nodes, num_features, generator=draw),
        edge_index=torch.stack([target + num_seeds, target]),
        n_id=torch.arange(num_nodes),
        batch_size=num_seeds,
        num_sampled_nodes=[num_seeds] * (1 + num_hops),
        num_sampled_edges=[num_seeds] * num_hops,
    )


def _try_out(model: nn.Module, config: TrainConfig, num_features: int, num_classes: int) -> None:
    """Refuse a model that can't be trained, by its scores of a random batch; a lazy one has its weights then."""
    name, call = config.model, Call.of(model, "fp32")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise InputError(f"{name}: expected a model with parameters to train, found none")
    batch = random_batch(_SEEDS, len(config.num_neighbors), num_features)
    try:
        with torch.enable_grad():
            scores = call.scores(model.eval(), batch, next(model.parameters()).device)
    except Exception as error:
        shapes = f"x {list(batch.x.shape)} and edge_index {list(batch.edge_index.shape)}"
        wrong = _said(error, _file_of(type(model)))
        raise InputError(f"{name}: its forward fails on a random batch, {shapes}: {wrong}") from None
    rows, least = f"{len(batch.x)}, one for each node", len(batch.x)
    if set(call.arguments.values()) - {"x", "edge_index"}:  # it knows which are the seeds
        rows, least = f"{_SEEDS} to {rows}, the seeds' first", _SEEDS
    wanted = f"{name}: expected its forward to return scores [{rows}; {num_classes} classes]"
    if not isinstance(scores, Tensor):
        raise InputError(f"{wanted}, found {type(scores).__name__}")
    if scores.dim() != 2 or not least <= len(scores) <= len(batch.x) or scores.size(1) != num_classes:
        raise InputError(f"{wanted}, found {list(scores.shape)}")
    if not scores.is_floating_point() or not scores.requires_grad:
        raise InputError(f"{wanted} with a gradient, found {scores.dtype} without one; return them before argmax")
    if unknown := _weights_behind(scores) - set(model.parameters()):
        shapes = ", ".join(sorted(str(list(weight.shape)) for weight in unknown))
        raise InputError(
            f"{name}: expected its forward to use its own parameters alone, found others of shapes {shapes}, which are "
            "neither trained nor saved; keep layers in torch.nn.ModuleList, not in a list"
        )


def _weights_behind(scores: Tensor) -> set[nn.Parameter]:
    """The parameters that a backward pass from these scores comes to."""
    found, seen, ahead = set(), set(), [scores.grad_fn]
    while ahead:
        if (step := ahead.pop()) is not None and step not in seen:
            seen.add(step)
            ahead += [behind for behind, _ in step.next_functions]
            found.add(getattr(step, "variable", None))
    return {weight for weight in found if isinstance(weight, nn.Parameter)}
