"""`papermill --engine ogbnlib`: strict parameters, an honest ending, an exit status that says what happened.

papermill loads this module each time it starts, by the entry point in pyproject.toml and while it is itself only half
imported. So nothing of papermill is imported here before a notebook is executed; what executes it is in `kernel`.
"""

from __future__ import annotations

import ast
import builtins
import json
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
        check_parameters(nb)
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


class Parameter:
    """One assignment of a `parameters` cell: its type from the annotation, or else from the default."""

    def __init__(self, name: str, annotation: ast.expr | None, value: ast.expr | None):
        self.name = name
        try:
            self.default = None if value is None else ast.literal_eval(value)
        except ValueError:
            value = None  # an expression: it says nothing about the type
        if annotation is None and value is not None and self.default is not None:
            annotation = ast.Name(type(self.default).__name__, ast.Load())
        self.expected = "anything" if annotation is None else ast.unparse(annotation).strip("'\"")
        self._adapter = None if annotation is None else _adapter(self.expected)

    def takes(self, value: object) -> bool:
        """Whether `value` fits. As in JSON: a list fits `tuple` and an int fits `float`, but a bool is not an int.

        An annotation made of names other than Python's own types and `typing` can't be read here: it takes anything.
        """
        if self._adapter is None:
            return True
        try:
            self._adapter.validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError):  # TypeError: not a value that a notebook's metadata can hold
            return False
        return True

    def how_to_pass(self, value: object) -> str:
        """What on papermill's command line would give the value that was probably meant, or one like the default."""
        if self.takes(str(value)):
            return f"; pass it as text: -r {self.name} {json.dumps(str(value))}"
        meant = [_yaml(value), [_yaml(word) for word in value.split()]] if isinstance(value, str) else []
        meant += [int(value)] if isinstance(value, float) and value.is_integer() else []
        for candidate in (*meant, self.default):
            if candidate is not None and self.takes(candidate):
                return f"; pass it as -y '{self.name}: {json.dumps(candidate)}'"
        return ""


def _yaml(text: str) -> object:
    try:
        return yaml.safe_load(text.strip(","))
    except yaml.YAMLError:
        return text


def _adapter(annotation: str) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(eval(annotation, {"__builtins__": {}}, _NAMES))
    except (NameError, AttributeError, TypeError, SyntaxError, PydanticUserError):
        return None


def read_parameters(source: str) -> dict[str, Parameter]:
    """The assignments of a `parameters` cell, by name.

    Raises:
        InputError: when the cell is not Python.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise InputError(f"parameters cell: expected plain assignments in Python, found {error}") from None
    found = {}
    for statement in statements:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            found[name] = Parameter(name, statement.annotation, statement.value)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = Parameter(target.id, None, statement.value)
    return found


def check_parameters(nb: Any) -> None:
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
    if not given:
        return
    cells = [cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])]
    if not cells:
        raise ParameterError(
            f"{', '.join(sorted(given))}: expected a notebook with a cell tagged 'parameters', found none; "
            "tag the cell that assigns the defaults, or pass no parameters"
        )
    try:
        known = read_parameters(cells[0].source)
    except InputError as error:
        raise ParameterError(str(error)) from None
    problems = []
    for name, value in given.items():
        if name not in known:
            problems.append(unknown_name(name, known, "parameter"))
        elif not (parameter := known[name]).takes(value):
            found = f"found {value!r} ({type(value).__name__})"
            problems.append(f"{name}: expected {parameter.expected}, {found}{parameter.how_to_pass(value)}")
    if problems:
        raise ParameterError("\n".join(problems))
