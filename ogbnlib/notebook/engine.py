"""Entry point of `papermill --engine ogbnlib`, and strict parameters.

papermill itself only warns of an unknown name and goes on with the defaults (nteract/papermill#667).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import json
import os
import sys
import typing
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from ..errors import InputError, unknown_name

_TYPES = ("bool", "int", "float", "str", "list", "tuple", "dict", "set", "object")
_NAMES = {**vars(typing), **{name: getattr(builtins, name) for name in _TYPES}, "typing": typing, "Path": Path}


class ParameterError(click.ClickException, InputError):
    """Parameters that the notebook does not accept; papermill's command line prints them and exits with 2."""

    exit_code = 2


class _Engine:
    """`kernel.NotebookEngine`, imported on use: papermill loads entry points while it is half imported itself."""

    def execute_notebook(self, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Check the parameters, then execute `nb`; refused parameters leave the output file as it was."""
        from .kernel import NotebookEngine

        values = dict(nb.metadata.papermill.get("parameters") or {})
        values = {name: value for name, value in values.items() if not name.startswith("PAPERMILL_")}  # --inject-paths
        cell = next((cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])), None)
        if values and cell is None:
            raise ParameterError(f"{', '.join(values)}: expected a cell tagged 'parameters' with defaults, found none")
        check_parameters(values, cell.source if cell else "")
        return NotebookEngine.execute_notebook(nb, kernel_name, **options)

    def __getattr__(self, name: str) -> Any:
        from .kernel import NotebookEngine

        return getattr(NotebookEngine, name)


Engine = _Engine()


def begin_notebook() -> None:
    """Check the notebook's parameters, enter its working folder, and print versions and machine.

    JupyterLab starts a kernel in a folder of the checkout; relative paths such as `data` and `runs` then start at the
    checkout itself. Elsewhere they start where papermill was started.

    Raises:
        ParameterError: for parameters that papermill's own engine lets through.
    """
    from ..doctor import machine

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    for defaults, injected in itertools.pairwise(shell.user_ns["In"] if shell else []):
        if injected.startswith("# Parameters\n"):  # papermill's cell of values, below the cell of defaults
            check_parameters({name: value for name, (_, value) in read_parameters(injected).items()}, defaults)
            break
    print(machine())
    if Path("..", "notebooks", "00_quickstart.ipynb").is_file():
        os.chdir("..")
    elif Path("notebooks", "00_quickstart.ipynb").is_file():
        return
    print(f"working in {Path.cwd()}: relative paths such as data and runs lie there")


def check_parameters(values: dict[str, Any], defaults: str) -> None:
    """Compare values with the source of a `parameters` cell.

    Raises:
        ParameterError: with a line for each unknown name and each value of the wrong type.
    """
    try:
        known = read_parameters(defaults) if values else {}
    except SyntaxError as error:
        raise ParameterError(f"parameters cell: expected plain assignments in Python, found {error}") from None
    problems = []
    for name, value in values.items():
        if name not in known:
            problems.append(unknown_name(name, known, "parameter"))
        elif not accepts((parameter := known[name])[0], value):
            found = f"expected {parameter[0]}, found {value!r} ({type(value).__name__})"
            problems.append(f"{name}: {found}{_how_to_pass(name, value, *parameter)}")
    if problems:
        raise ParameterError("\n".join(problems))


def read_parameters(source: str) -> dict[str, tuple[str | None, object]]:
    """Return (type, default) of each assignment; the type is the annotation, or else the type of the default.

    papermill's own `inspect_notebook` uses a regular expression that misses `str | None` and `tuple[int, ...]`.
    """
    parameters = {}
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        annotation, default = getattr(statement, "annotation", None), None
        with contextlib.suppress(ValueError, TypeError):  # an expression, or no value, does not show a type
            default = ast.literal_eval(statement.value)  # type: ignore[arg-type]
        kind = None if default is None else type(default).__name__
        kind = ast.unparse(annotation).strip("'\"") if annotation else kind
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            if isinstance(target, ast.Name):
                parameters[target.id] = kind, default
    return parameters


def accepts(annotation: str | None, value: object) -> bool:
    """Check a value by JSON's rules: a list fits `tuple` and an int fits `float`, but a bool is not an int.

    An annotation with names beyond Python's own types and `typing` can't be evaluated here, and accepts anything.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(eval(annotation or "object", {"__builtins__": {}}, _NAMES))
    except (NameError, AttributeError, TypeError, SyntaxError, PydanticUserError):
        return True
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # TypeError: not a JSON value
        return False
    return True


def _how_to_pass(name: str, value: object, annotation: str | None, default: object) -> str:
    """Name the option of papermill that passes the intended value, or else one like the default."""
    if accepts(annotation, str(value)):  # -p turned text into a number; a size also needs its unit
        unit = " GB" if name.endswith(("limit", "allocation")) and isinstance(value, int | float) else ""
        return f"; pass it as text: -r {name} {json.dumps(f'{value}{unit}')}"
    intended = None
    with contextlib.suppress(yaml.YAMLError):  # -p leaves "[5, 4]" and "false" as text
        intended = yaml.safe_load(f"{value:g}" if isinstance(value, float) else str(value))
    examples = [example for example in (intended, default) if example is not None and accepts(annotation, example)]
    return f"; pass it as -y '{name}: {json.dumps(examples[0])}'" if examples else ""
