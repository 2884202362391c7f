"""A user's own model: imported by name, created, and tried on one random batch.

`config.model` is FILE.py:CLASS or MODULE:CLASS. The run's folder keeps a copy of a file, and the
run executes the copy. A module is imported from its own place; its copy only shows whether it has
changed.
"""

import contextlib
import importlib.util
import inspect
import linecache
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import TrainConfig
from ..errors import InputError
from ..files import home, write_atomically
from ..memory.record import RunPaths
from ..registry import MODELS
from .call import Call, random_batch
from .network import registered_model

_VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}  # *args, **kwargs
_SEEDS = 4  # number of seeds of the trial batch, and of nodes and edges at each of its hops


def make_model(
    config: TrainConfig,
    num_features: int,
    num_classes: int,
    run_dir: Path | None = None,
    model: nn.Module | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> nn.Module:
    """Return the model that a config describes, with weights drawn from `config.seed`.

    A custom model is first tried on one random batch.

    Args:
        config: The run's parameters.
        num_features: Columns of a batch's `x`; under loading=propagated, of all hops together.
        num_classes: Columns of the model's scores.
        run_dir: The run's folder. If it has a copy of a custom model's file, the copy is executed.
        model: The user's own object, used in place of `config.model`.
        note: Called with a line that shows how a custom model was created.

    Raises:
        InputError: for a class or scores that can't be trained; errors of its code are raised as
            they are.
    """
    if model is None and config.model in MODELS:
        torch.manual_seed(config.seed)
        return registered_model(config, num_features, num_classes)
    kind = _import_class(config, run_dir) if model is None else None
    torch.manual_seed(config.seed)  # after the import, as the user's file may draw random numbers
    parameters = {} if kind is None else inspect.signature(kind).parameters
    offered: dict[str, object] = {
        "hidden_channels": config.hidden_channels,
        "dropout": config.dropout,
        "heads": config.heads,
        "in_channels": num_features,
        "num_features": num_features,
        "out_channels": num_classes,
        "num_classes": num_classes,
        "num_layers": len(config.num_neighbors),
    }
    fitting = {name: value for name, value in offered.items() if name in parameters}
    arguments = fitting | config.model_args
    if config.dropout and "dropout" not in arguments:
        raise InputError(f"dropout: {config.model} takes none, got {config.dropout}; leave it out")
    if kind is not None:
        texts = [f"{name}={value!r}" for name, value in arguments.items()]
        model = kind(**arguments)
        note(f"the model is {config.model}({', '.join(texts)})")
    assert model is not None
    _try(model, config, num_features, num_classes)
    return model


def _import_class(config: TrainConfig, run_dir: Path | None) -> type[nn.Module]:
    path, _, name = config.model.rpartition(":")
    code = find_code(config, run_dir)[0]
    is_file = path.endswith(".py")
    module = _run_file(code, home(path)) if is_file else importlib.import_module(path)
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InputError(
            f"{path}: expected a class {name} derived from torch.nn.Module, found {kind!r}"
        )
    return kind


def find_code(config: TrainConfig, run_dir: Path | None, keep: bool = False) -> tuple[Path, str]:
    """Return the file with the model's code, and a note for the user or an empty text.

    With `keep`, the code is copied to the run's folder, unless a copy is there already.
    """
    path, _, name = config.model.rpartition(":")
    if path == "__main__" or "<locals>" in name:
        raise InputError(
            f"model: {config.model} is in no file; write it to one (%%writefile my_model.py)"
        )
    source = Path(path)
    is_file = path.endswith(".py")
    copy = Path() if run_dir is None else RunPaths(run_dir).model
    # if there is no such module, or it has no file, the import reports it
    with contextlib.suppress(Exception):
        source = home(path) if is_file else Path(importlib.util.find_spec(path).origin)  # type: ignore
    content = source.read_bytes() if source.is_file() else None
    if keep and content is not None and not copy.is_file():
        write_atomically(copy, lambda file: file.write(content))
    if not copy.is_file():
        return source, ""
    if content == copy.read_bytes():
        return copy if is_file else source, ""
    if content is None:
        return copy, f"{source}: gone since the run began; using its copy, {copy}"
    if not is_file:  # a copy of a module could not import the modules beside it
        raise InputError(
            f"{source}: changed since the run began; restore it from {copy}, or use a new run_dir"
        )
    return copy, f"{source}: changed since the run began; using its copy, {copy}"


def _run_file(code: Path, source: Path) -> types.ModuleType:
    """Execute the copy `code` as the module of `source`, and return the module.

    The folder of `source` has the data and modules that the code reads. Errors name the copy if
    `source` has changed since it was made.
    """
    file = (source if source.is_file() else code).absolute()
    text = importlib.util.decode_source(code.read_bytes())
    is_same = file.read_bytes() == code.read_bytes()
    named = str(file if is_same else code.absolute())
    # PyG reads the source lines of `forward`.
    linecache.cache[named] = len(text), None, text.splitlines(keepends=True), named
    sys.path[:] = [str(file.parent), *(folder for folder in sys.path if folder != str(file.parent))]
    # without this check, `import utils` could silently return another model's utils
    for neighbor in file.parent.glob("*.py"):
        loaded = getattr(sys.modules.get(neighbor.stem), "__file__", None) or neighbor
        imports = rf"^\s*(import|from)\b.*\b{re.escape(neighbor.stem)}\b"
        if Path(loaded).resolve() != neighbor.resolve() and re.search(imports, text, re.MULTILINE):
            raise InputError(
                f"{neighbor} has the name of {loaded}, which is loaded; rename it or use a new process"
            )
    module = types.ModuleType("ogbnlib_custom_model")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(text, named, "exec"), vars(module))
    return module


def _try(model: nn.Module, config: TrainConfig, num_features: int, num_classes: int) -> None:
    """Refuse a model that can't be trained, after computing its scores for one random batch.

    A model with lazy layers gets its weights here.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: expected an object of a class derived from torch.nn.Module, got {model!r:.80}; "
            "pass an object, such as Net(...), or set the config's model to the name of the class, "
            "such as my_model.py:Net"
        )
    if {item.kind for item in inspect.signature(model.forward).parameters.values()} <= _VARIABLE:
        raise InputError(
            f"{config.model}: expected a forward with named parameters such as x and edge_index, found "
            "none, or one that passes everything on, as around a model of torch.compile or "
            "DataParallel; pass the model itself"
        )
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    if any(part.sparse for part in model.modules() if isinstance(part, embeddings)):
        raise InputError(
            f"{config.model}: expected dense gradients, which Adam needs, found an embedding with "
            "sparse=True; set sparse=False"
        )
    hops = len(config.num_neighbors)
    call = Call.of(model, "fp32")
    batch = random_batch([_SEEDS] * (hops + 1), [_SEEDS] * hops, num_features)
    scores = call.scores(model.eval(), batch, next(model.parameters(), batch.x).device)
    # A model that gets more than x and edge_index knows which nodes are seeds, and may return
    # scores of the seeds only.
    knows_seeds = {*call.arguments.values()} - {"x", "edge_index"}
    least_rows = _SEEDS if knows_seeds else len(batch.x)
    if (
        not isinstance(scores, Tensor)
        or scores.dim() != 2
        or scores.shape[1] != num_classes
        or not least_rows <= len(scores) <= len(batch.x)
    ):
        raise InputError(
            f"{config.model}: expected scores [{len(batch.x)}, {num_classes}] of its forward, found "
            f"{list(getattr(scores, 'shape', ())) or type(scores).__name__}"
        )
    used = _used_parameters(scores)
    if not used or used - {*model.parameters()}:
        problem = "others, which are neither trained nor saved" if used else "none of them used"
        raise InputError(
            f"{config.model}: expected forward to use the model's own parameters, found {problem}; "
            "keep layers in torch.nn.ModuleList, not in a list, and return scores before argmax or "
            "detach"
        )


def _used_parameters(scores: Tensor) -> set[nn.Parameter]:
    steps: list[object] = [scores.grad_fn]
    for step in steps:  # the loop appends the operations before each step
        inputs = getattr(step, "next_functions", ())
        steps += [earlier for earlier, _ in inputs if earlier not in steps]
    variables = [getattr(step, "variable", None) for step in steps]
    return {variable for variable in variables if isinstance(variable, nn.Parameter)}
