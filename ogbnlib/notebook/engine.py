"""Entry point of `papermill --engine ogbnlib`, and strict parameters: papermill only warns
(nteract/papermill#667)."""

import ast
import contextlib
import itertools
import json
import os
import re
import sys
import typing
from pathlib import Path
from types import TracebackType
from typing import Any

import click
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from ..errors import InputError, explained, parse_bytes, unknown_name


class ParameterError(click.ClickException, InputError):
    """Parameters that the notebook does not accept; papermill's command line prints them and exits
    with 2."""

    exit_code = 2


class _Engine:
    """`kernel.NotebookEngine`, imported on use: papermill loads entry points while it is half
    imported itself."""

    def execute_notebook(self, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Check the parameters, then execute `nb`; refused parameters leave the output file as it
        was."""
        from jupyter_client.kernelspec import KernelSpecManager

        _check_yaml()
        kernels = KernelSpecManager().find_kernel_specs()
        if kernel_name not in kernels:
            raise ParameterError(f"-k: {unknown_name(kernel_name, kernels, 'kernel')}")
        tagged = (cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", []))
        defaults = "".join(cell.source for cell in itertools.islice(tagged, 1))
        check_parameters(dict(nb.metadata.papermill.get("parameters") or {}), defaults)
        return self.__getattr__("execute_notebook")(nb, kernel_name, **options)

    def __getattr__(self, name: str) -> Any:
        from .kernel import NotebookEngine

        return getattr(NotebookEngine, name)


Engine = _Engine()


# YAML 1.1's other numbers: 010 is 8, 0x10 is 16, 1_000 is 1000, and 1:30 is 90.
_NOT_DECIMAL = re.compile(r"[-+]?(0[0-7_]+|0[bx][\da-fA-F_]+|\d[\d.]*[_:][\d_:.]*)")


def _check_yaml() -> None:
    """Refuse numbers in papermill's -f and -y that `--set` would read in another way."""
    import yaml

    context = click.get_current_context(silent=True)
    options = context.params if context else {}
    texts = [("-y", text) for text in options.get("parameters_yaml") or ()]
    for file in filter(os.path.isfile, options.get("parameters_file") or ()):
        texts.append((file, Path(file).read_text(encoding="utf-8")))
    for place, text in texts:
        for event in yaml.parse(text, yaml.SafeLoader):
            is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
            if is_plain and _NOT_DECIMAL.fullmatch(event.value):
                value = yaml.safe_load(event.value)
                raise ParameterError(
                    f"{place}: expected decimal numbers, found {event.value}, which YAML takes for "
                    f"{value}"
                )


def _in_one_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error of papermill's -f and -y, which it reads before it calls an engine."""
    import yaml

    if isinstance(error, OSError):
        print(f"error: {explained(error)}", file=sys.stderr)
    elif isinstance(error, yaml.YAMLError):
        text = " ".join(str(error).split())
        print(f"error: -f, -y: expected YAML such as 'epochs: 3', found {text}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if re.search(r"--engine[ =]ogbnlib\b", " ".join(sys.argv)):  # papermill itself imports this
    sys.excepthook = _in_one_line


def begin_notebook() -> None:
    """Check the notebook's parameters, enter its working folder, and print versions and machine.

    JupyterLab starts a kernel in a folder of the checkout; relative paths such as `data` and `runs`
    then start at the checkout itself. Elsewhere they start where papermill was started.
    """
    from ..doctor import machine

    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = shell.user_ns["In"] if shell else []
    for defaults, injected in itertools.pairwise(cells):
        # papermill's cell of values, below the cell of defaults
        if injected.startswith("# Parameters\n"):
            values = {name: value for name, (_, value) in _assignments(injected).items()}
            check_parameters(values, defaults)
            break
    print(machine())
    if "JPY_SESSION_NAME" in os.environ:  # JupyterLab, whose user waits and may close the tab
        print(
            "the imports below take 10 to 20 s the first time; a run continues when this tab is "
            'closed, and then\nRun.open("runs/NAME").follow() in a new cell shows it'
        )
        # a notebook of one's own has no date, and a console has no file
        with contextlib.suppress(OSError, ValueError, KeyError):
            book = json.loads(Path(os.environ["JPY_SESSION_NAME"]).read_bytes())
            print(
                "outputs below are from the committed run of "
                f"{book['metadata']['ogbnlib']['date']}, or an earlier run of yours, until you run "
                "their cells"
            )
    if Path("..", "notebooks", "00_quickstart.ipynb").is_file():
        os.chdir("..")
    elif Path("notebooks", "00_quickstart.ipynb").is_file():
        return
    print(f"working in {Path.cwd()}: relative paths such as data and runs lie there")


def check_parameters(values: dict[str, object], defaults: str) -> None:
    """Refuse unknown names and values of the wrong type or range, by the source of the
    `parameters` cell."""
    known = _assignments(defaults) if values else {}
    problems = []
    for name, value in values.items():
        if name in known:
            problems.append(_problem(name, value, *known[name], defaults))
        elif not name.startswith("PAPERMILL_"):  # of --inject-paths
            problems.append(unknown_name(name, known, "parameter"))
    if any(problems):
        raise ParameterError("\n".join(filter(None, problems)))


def _problem(
    name: str, value: object, annotation: str | None, default: object, defaults: str
) -> str:
    """Describe a value of the wrong type or range; "" if it fits.

    `default` is this parameter's, `defaults` the source of the cell, whose comments name bounds.
    """
    if _accepts(annotation, value):
        return _out_of_range(name, value, default, defaults)
    # papermill's -p turns "8" into a number and leaves "[5, 4]" as text
    example = f"-y '{name}: {json.dumps(default, default=list)}'"
    if _accepts(annotation, "text"):
        example = f"-r {name} TEXT"
    return (
        f"{name}: expected {annotation}, found {value!r} ({type(value).__name__}); pass it as in "
        f"{example}"
    )


def _out_of_range(name: str, value: object, default: object, defaults: str) -> str:
    """Describe a value that no run can have; "" if there is none.

    A name that is, or ends with, that of a run's parameter follows its rule; a limit and a size
    are sizes; a count is at least 1, or what its comment says: "at least 2".
    """
    from ..config import TrainConfig, check_value

    fields = []
    for field in TrainConfig.model_fields:
        if f"_{name}".endswith(f"_{field}"):
            with contextlib.suppress(InputError):  # its default shows another meaning
                check_value(field, default)
                fields.append(field)
    try:
        for field in fields:
            check_value(field, value, name)
        if value != "auto":
            _check_sizes(name, value, default)
    except InputError as error:
        return str(error)
    if value == [] and default:
        return f"{name}: expected at least one value, found []"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    comment = re.search(rf"^{name}\b.*#.*\bat least (\d+)", defaults, re.MULTILINE)
    least = int(comment[1]) if comment else 1
    counts = comment or (isinstance(default, int) and default > 0)
    if counts and value < least:
        return f"{name}: expected at least {least}, found {value}"
    if not fields and isinstance(default, float) and value <= 0:
        return f"{name}: expected a number above 0, found {value}"
    return ""


def _check_sizes(name: str, value: object, default: object) -> None:
    """Refuse a value that is no size in a parameter of sizes: one that ends with "_limit", or has a
    size or a list of sizes as default."""
    texts = default if isinstance(default, list) else [default]
    are_sizes = [re.fullmatch(r"[\d.]+ *[kmgt]i?b?", str(text), re.IGNORECASE) for text in texts]
    if not name.endswith("_limit") and not (texts and all(are_sizes)):
        return
    for size in value if isinstance(value, list) else [value]:
        size_bytes = parse_bytes(size, name)
        if name == "memory_limit":
            from ..runs.sandbox import check_trainer_limit

            check_trainer_limit(size_bytes)


def _assignments(source: str) -> dict[str, tuple[str | None, object]]:
    """Return (type, default) of each assignment; the type is the annotation, or else the type of
    the default."""
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
        name, _, kind = ast.unparse(statement).partition(" = ")[0].partition(": ")
        if not kind and default is not None:
            kind = type(default).__name__
        parameters[name] = kind.strip("'\"") or None, default
    return parameters


def _accepts(annotation: str | None, value: object) -> bool:
    """Check a value by JSON's rules: a list fits `tuple` and an int fits `float`, but a bool is not
    an int."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(
            eval(annotation or "object", {**vars(typing), "Path": Path})
        )
    except (NameError, AttributeError, TypeError, SyntaxError, PydanticUserError):
        return True  # a name that is not known here, such as np.ndarray
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError):  # TypeError: not a JSON value
        return False
    return True
