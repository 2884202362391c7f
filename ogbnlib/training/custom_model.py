"""Creation of models: ours, and a user's own, imported by name and tried on a random batch.

`config.model` is FILE.py:CLASS or MODULE:CLASS. The run's folder keeps a copy of a file, and the
run executes the copy. A module is imported from its own place.
"""

import atexit
import importlib.util
import inspect
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
from .network import GNN

_SEEDS = 4  # number of seeds of the trial batch, and of nodes and edges at each of its hops


def make_model(
    config: TrainConfig,
    num_features: int,
    num_classes: int,
    run_dir: Path | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> nn.Module:
    """Return the model that a config describes, with weights drawn from `config.seed`; a custom
    model after a trial on one random batch.

    Args:
        num_features: Columns of a batch's `x`; under loading=propagated, of all hops together.
        num_classes: Columns of the model's scores.
        run_dir: The run's folder. If it has a copy of a custom model's file, the copy is executed.
        note: Called with a line that shows how a custom model was created.

    Raises:
        InputError: for a class or scores that can't be trained; errors of its code are raised as
            they are.
    """
    if config.model in MODELS:
        torch.manual_seed(config.seed)
        kind = MODELS[config.model].load()
        create = kind.network if kind.propagated else GNN
        model = create(config, num_features, num_classes)
        _remove_generated_files()  # those of the layers that were just created
        return model
    model_class = _import_class(config, run_dir)
    torch.manual_seed(config.seed)  # after the import, as the user's file may draw random numbers
    parameters = inspect.signature(model_class).parameters  # of its __init__
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
    arguments = {name: value for name, value in offered.items() if name in parameters}
    arguments |= config.model_args
    if config.dropout and "dropout" not in arguments:
        raise InputError(f"dropout: {config.model} takes none, got {config.dropout}; leave it out")
    model = model_class(**arguments)
    texts = [f"{name}={value!r}" for name, value in arguments.items()]
    note(f"the model is {config.model}({', '.join(texts)})")
    _try(model, config, num_features, num_classes)
    return model


@atexit.register  # for a custom model's layers, whose files torch.jit.script may read until then
def _remove_generated_files() -> None:
    """Remove the files of the modules that PyG generates for each class of layers: it leaves them
    in the temporary folder, named as the module and a random text."""
    for name in [name for name in sys.modules if name.endswith(("_propagate", "_edge_updater"))]:
        file = Path(str(getattr(sys.modules[name], "__file__", None)))
        if file.stem.startswith(f"{name}_"):  # not a module of the user's
            file.unlink(missing_ok=True)


def _import_class(config: TrainConfig, run_dir: Path | None) -> type[nn.Module]:
    path, _, name = config.model.rpartition(":")  # FILE.py:CLASS or MODULE:CLASS
    code, _ = find_code(config, run_dir, keep=False)
    module = _run_file(code, home(path)) if path.endswith(".py") else importlib.import_module(path)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise InputError(
            f"{path}: expected a class {name} derived from torch.nn.Module, found {found!r}"
        )
    return found


def find_code(config: TrainConfig, run_dir: Path | None, keep: bool) -> tuple[Path, list[str]]:
    """Return the file with the model's code (unused for MODULE:CLASS), and notes for the user.

    With `keep`, the code is copied to the run's folder, unless a copy is there already.
    """
    path = config.model.rpartition(":")[0]
    if path == "__main__":  # a class of a notebook's cells
        raise InputError(
            f"model: {config.model} is in no file; write it to one (%%writefile my_model.py)"
        )
    source = home(path)
    if source.suffix != ".py" or run_dir is None:
        return source, []
    copy = RunPaths(run_dir).model
    content = source.read_bytes() if source.is_file() else None
    if keep and content is not None and not copy.is_file():
        write_atomically(copy, lambda file: file.write(content))
    if not copy.is_file():
        return source, []
    if content == copy.read_bytes():
        return copy, []
    return copy, [f"{source}: changed or gone since the run began; using its copy, {copy}"]


def _run_file(code: Path, source: Path) -> types.ModuleType:
    """Execute the copy `code` as the module of `source`, and return the module.

    The folder of `source` has the data and modules that the code reads. Errors name the copy.
    """
    file = (source if source.is_file() else code).absolute()
    folder = str(file.parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]  # first, and once
    module = types.ModuleType("ogbnlib_custom_model")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for a class's module
    exec(compile(code.read_bytes(), code.absolute(), "exec"), vars(module))
    return module


def _try(model: nn.Module, config: TrainConfig, num_features: int, num_classes: int) -> None:
    """Refuse a model without scores of all nodes of a random batch; lazy layers get their weights
    here."""
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
