"""Entry point of `papermill --engine ogbnlib`, and strict checks of notebook parameters.

papermill itself only warns (nteract/papermill#667).
"""

import ast
import contextlib
import itertools
import json
import os
import typing
from pathlib import Path
from typing import Any

import click
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from ..display import ON_ANY_THEME
from ..errors import InputError, unknown_name


class ParameterError(click.ClickException, InputError):
    """Error for refused parameters; papermill's command line prints it and exits with 2."""

    exit_code = 2


class _Engine:
    """Proxy that imports `kernel.NotebookEngine` on first use, because papermill loads entry
    points while papermill itself is only half imported."""

    def execute_notebook(self, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Check the parameters, then execute `nb`. If the parameters are refused, the output file
        stays as it was."""
        tagged = (cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", []))
        defaults = "".join(cell.source for cell in itertools.islice(tagged, 1))  # the first one
        check_parameters(dict(nb.metadata.papermill.get("parameters") or {}), defaults)
        # NotebookEngine's method: `self.execute_notebook` would be this one again
        return self.__getattr__("execute_notebook")(nb, kernel_name, **options)

    def __getattr__(self, name: str) -> Any:  # for all that this class does not define
        from .kernel import NotebookEngine

        return getattr(NotebookEngine, name)


Engine = _Engine()


def begin_notebook() -> None:
    """Check the notebook's parameters, enter its working folder, and print versions and machine.

    JupyterLab starts a kernel in a folder of the checkout. The checkout itself then becomes the
    working folder, so that relative paths such as `data` and `runs` start there. Elsewhere they
    start in the folder where papermill was started.
    """
    from IPython import get_ipython

    from ..doctor import machine

    shell = get_ipython()  # None in a plain script
    if shell:
        # Read when matplotlib is first imported. Only the saved picture is transparent: JupyterLab
        # would put a background behind a figure whose own colour is "none".
        pictures = {"facecolor": "none", "bbox_inches": "tight"}
        shell.config.InlineBackend.update(print_figure_kwargs=pictures, rc=ON_ANY_THEME)
    cells = shell.user_ns["In"] if shell else []  # the sources of the cells that ran so far
    for defaults, injected in itertools.pairwise(cells):
        # papermill inserts its cell of values below the cell of defaults
        if injected.startswith("# Parameters\n"):
            values = {name: value for name, (_, value) in _assignments(injected).items()}
            check_parameters(values, defaults)
            break
    print(machine())
    if "JPY_SESSION_NAME" in os.environ:  # in JupyterLab, the user waits and may close the tab
        print(
            "the imports below take 10 to 20 s the first time; a run continues when this tab is "
            'closed, and then\nRun.open("runs/NAME") in a new cell shows it'
        )
    if Path("..", "notebooks", "00_quickstart.ipynb").is_file():  # started in folder notebooks/
        os.chdir("..")
    elif Path("notebooks", "00_quickstart.ipynb").is_file():
        return  # started in the checkout, where its user expects the files
    print(f"working in {Path.cwd()}: relative paths such as data and runs lie there")


def check_parameters(values: dict[str, object], defaults: str) -> None:
    """Refuse parameters with an unknown name or a wrong type.

    `defaults` is the source of the notebook's `parameters` cell.
    """
    declared = _assignments(defaults) if values else {}  # name -> (type, default)
    problems = []
    for name, value in values.items():
        if name in declared:
            annotation, default = declared[name]
            if not _accepts(annotation, value):
                problems.append(_wrong_type(name, value, annotation, default))
        elif not name.startswith("PAPERMILL_"):  # set by --inject-paths
            problems.append(unknown_name(name, declared, "parameter"))
    if problems:
        raise ParameterError("\n".join(problems))


def _wrong_type(name: str, value: object, annotation: str | None, default: object) -> str:
    # papermill's -p turns "8" into a number and leaves "[5, 4]" as text; -y takes YAML, -r text
    example = f"-y '{name}: {json.dumps(default, default=list)}'"
    if _accepts(annotation, "text"):
        example = f"-r {name} TEXT"
    return (
        f"{name}: expected {annotation}, found {value!r} ({type(value).__name__}); pass it as in "
        f"{example}"
    )


def _assignments(source: str) -> dict[str, tuple[str | None, object]]:
    """Return name -> (type, default) for each assignment in a cell's source. The type is the text of
    the annotation, or else the type of the default; None if neither shows it."""
    # papermill's own `inspect_notebook` uses a regular expression that misses `str | None` and
    # `tuple[int, ...]`.
    parameters = {}
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        default = None
        # an expression, or no value, does not show a type
        with contextlib.suppress(ValueError, TypeError):
            default = ast.literal_eval(statement.value)  # type: ignore[arg-type]
        target = ast.unparse(statement).partition(" = ")[0]  # "name" or "name: annotation"
        name, _, annotation = target.partition(": ")
        if not annotation and default is not None:
            annotation = type(default).__name__
        parameters[name] = annotation.strip("'\"") or None, default  # it may stand in quotes
    return parameters


def _accepts(annotation: str | None, value: object) -> bool:
    """Check a value by JSON's rules: a list fits `tuple`, an int `float`; a bool is not an int."""
    try:
        kind = eval(annotation or "object", {**vars(typing), "Path": Path})
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
    except (NameError, AttributeError, TypeError, SyntaxError, PydanticUserError):
        return True  # a name that is not known here, such as np.ndarray
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # TypeError: not a JSON value
        return False
    return True
