"""`papermill --engine ogbnlib`: strict parameters, an honest ending, an exit status that says what happened.

papermill loads this module each time it starts, by the entry point in pyproject.toml and while it is itself only half
imported. So nothing of papermill is imported here before a notebook is executed; what executes it is in `kernel`.
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
_GIVEN_BY_PAPERMILL = {"PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}  # --inject-paths


class ParameterError(click.ClickException, InputError):
    """Parameters that the notebook does not take; papermill's command line shows it in one line and exits with 2."""

    exit_code = 2


class Engine:
    """What papermill calls."""

    @staticmethod
    def execute_notebook(nb: Any, kernel_name: str, **options: Any) -> Any:
        """Check the parameters, then execute `nb`; nothing is written where they are refused.

        Raises:
            ParameterError: for a parameter that the notebook does not define, or of a type it does not take.
            kernel.NotebookEnded: when the kernel died, or a cell ended because a training run did not finish.
            papermill.exceptions.PapermillExecutionError: for any other exception in a cell.
        """
        check_given(nb)
        from .kernel import NotebookEngine

        return NotebookEngine.execute_notebook(nb, kernel_name, **options)

    @staticmethod
    def nb_kernel_name(nb: Any, name: str | None = None) -> str:
        from papermill.utils import nb_kernel_name

        return nb_kernel_name(nb, name)

    @staticmethod
    def nb_language(nb: Any, language: str | None = None) -> str:
        from papermill.utils import nb_language

        return nb_language(nb, language)


def takes(annotation: str | None, value: object) -> bool:
    """Whether `value` fits. As in JSON: a list fits `tuple` and an int fits `float`, but a bool is not an int.

    An annotation made of names other than Python's own types and `typing` can't be read here: it takes anything.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(eval(annotation or "object", {"__builtins__": {}}, _NAMES))
    except (NameError, AttributeError, TypeError, SyntaxError, PydanticUserError):
        return True
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # TypeError: not a value that a notebook's metadata can hold
        return False
    return True


def read_parameters(source: str) -> dict[str, tuple[str | None, object]]:
    """(type, default) of each assignment in a `parameters` cell; the type is the annotation, or else the default's.

    papermill's own `inspect_notebook` goes by a regular expression, which passes over `str | None`, `Literal[...]` and
    `tuple[int, ...]` as if there were no such parameter.

    Raises:
        SyntaxError: when the cell is not Python.
    """
    found = {}
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        annotation, default = getattr(statement, "annotation", None), None
        with contextlib.suppress(ValueError, TypeError):  # an expression, or no value: it says nothing about the type
            default = ast.literal_eval(statement.value)  # type: ignore[arg-type]
        of_default = None if default is None else type(default).__name__
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            if isinstance(target, ast.Name):
                found[target.id] = ast.unparse(annotation).strip("'\"") if annotation else of_default, default
    return found


def _alike(value: object, default: object) -> bool:
    """Whether the items of a list are of the kind of the default's: `[3x2]` is a list, but none of numbers."""
    kinds = {type(item) for item in default} if isinstance(default, list) else set()
    return not kinds or not isinstance(value, list) or {type(item) for item in value} <= kinds


def _how_to_pass(name: str, annotation: str | None, value: object, default: object) -> str:
    """What on papermill's command line would give the value that was probably meant, or one like the default."""
    if takes(annotation, str(value)):
        # A size without a unit is refused by what takes it.
        unit = " GB" if name.endswith(("limit", "allocation")) and isinstance(value, int | float) else ""
        return f"; pass it as text: -r {name} {json.dumps(f'{value}{unit}')}"
    texts = [value, f"[{value.replace(' ', ', ')}]"] if isinstance(value, str) else []
    texts += [f"{value:g}"] if isinstance(value, float) else []  # -p makes 1e3 a float
    for text in [*texts, json.dumps(default, default=str)]:
        with contextlib.suppress(yaml.YAMLError):
            meant = yaml.safe_load(text)
            if meant is not None and takes(annotation, meant) and _alike(meant, default):
                return f"; pass it as -y '{name}: {json.dumps(meant)}'"
    return ""


def begin_notebook() -> None:
    """What a notebook does first: check its parameters, go to the one working folder, name versions and machine.

    In a folder of the checkout, where JupyterLab starts a kernel, relative paths such as `data` and `runs` are seen
    from the checkout; elsewhere from where papermill was started, as those on its command line, and that is named.

    Raises:
        ParameterError: as `check_parameters`.
    """
    from ..runs.doctor import machine

    check_parameters()
    print(machine())
    if Path("..", "notebooks", "00_quickstart.ipynb").is_file():
        os.chdir("..")
    elif Path("notebooks", "00_quickstart.ipynb").is_file():
        return
    print(f"working in {Path.cwd()}: relative paths such as data and runs lie there")


def check_parameters() -> None:
    """Refuse, in a notebook's own cell, what papermill has injected: its stock engine goes on with the defaults.

    papermill puts "# Parameters" and the values into a cell of their own, below that of the defaults. Without effect
    where there is none: in JupyterLab, or outside of a notebook.

    Raises:
        ParameterError: all that is wrong, one line each.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = [] if shell is None else shell.user_ns["In"]
    for defaults, injected in itertools.pairwise(cells):
        if injected.startswith("# Parameters\n"):
            return _check({name: value for name, (_, value) in read_parameters(injected).items()}, defaults)


def check_given(nb: Any) -> None:
    """Compare the parameters that papermill was given with the notebook's `parameters` cell.

    papermill only warns of an unknown name and goes on with the defaults (nteract/papermill#667). Its `-p` turns
    "True", "False", "None" and numbers into values and leaves the rest as text, "false" and "[3, 2]" included.

    Args:
        nb: The notebook as papermill hands it to an engine, with the values in `metadata.papermill.parameters`.

    Raises:
        ParameterError: all that is wrong, one line each.
    """
    given = dict(nb.metadata.papermill.get("parameters") or {})
    given = {name: value for name, value in given.items() if name not in _GIVEN_BY_PAPERMILL}
    cell = next((cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])), None)
    if given and cell is None:
        raise ParameterError(
            f"{', '.join(sorted(given))}: expected a notebook with a cell tagged 'parameters', found none; "
            "tag the cell that assigns the defaults, or pass no parameters"
        )
    if cell is not None:
        _check(given, cell.source)


def _check(given: dict[str, Any], defaults: str) -> None:
    try:
        known = read_parameters(defaults) if given else {}
    except SyntaxError as error:
        raise ParameterError(f"parameters cell: expected plain assignments in Python, found {error}") from None
    problems = []
    for name, value in given.items():
        if name not in known:
            problems.append(unknown_name(name, known, "parameter"))
        elif not takes((expected := known[name])[0], value):
            found = f"expected {expected[0]}, found {value!r} ({type(value).__name__})"
            problems.append(f"{name}: {found}{_how_to_pass(name, expected[0], value, expected[1])}")
    if problems:
        raise ParameterError("\n".join(problems))
