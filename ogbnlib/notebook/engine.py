"""Entry point of `papermill --engine ogbnlib`, and strict checks of notebook parameters.

papermill itself only warns (nteract/papermill#667).
"""

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
    """Error for parameters that the notebook does not accept; papermill's command line prints it
    and exits with 2."""

    exit_code = 2


class _Engine:
    """Proxy that imports `kernel.NotebookEngine` on first use, because papermill loads entry
    points while papermill itself is only half imported."""

    def execute_notebook(self, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Check the parameters, then execute `nb`. If the parameters are refused, the output file
        stays as it was."""
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


# Numbers in other notations of YAML 1.1: 010 is 8, 0x10 is 16, 1_000 is 1000, and 1:30 is 90.
_NOT_DECIMAL = re.compile(r"[-+]?(0[0-7_]+|0[bx][\da-fA-F_]+|\d[\d.]*[_:][\d_:.]*)")


def _check_yaml() -> None:
    """Refuse numbers in papermill's options -f and -y that `--set` would read differently."""
    import yaml

    context = click.get_current_context(silent=True)
    options = context.params if context else {}
    texts = [("-y", text) for text in options.get("parameters_yaml") or ()]
    for file in filter(os.path.isfile, options.get("parameters_file") or ()):
        texts.append((file, Path(file).read_text(encoding="utf-8")))
    for option, text in texts:
        for event in yaml.parse(text, yaml.SafeLoader):
            is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
            if is_plain and _NOT_DECIMAL.fullmatch(event.value):
                value = yaml.safe_load(event.value)
                raise ParameterError(
                    f"{option}: expected decimal numbers, found {event.value}, which YAML takes for "
                    f"{value}"
                )


def _in_one_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error in papermill's options -f and -y in one line; an `excepthook`.

    papermill reads these options before it calls an engine.
    """
    import yaml

    if isinstance(error, OSError):
        print(f"error: {explained(error)}", file=sys.stderr)
    elif isinstance(error, yaml.YAMLError):
        text = " ".join(str(error).split())
        print(f"error: -f, -y: expected YAML such as 'epochs: 3', found {text}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# True where papermill's own command line imports this module.
if re.search(r"--engine[ =]ogbnlib\b", " ".join(sys.argv)):
    sys.excepthook = _in_one_line


def begin_notebook() -> None:
    """Check the notebook's parameters, enter its working folder, and print versions and machine.

    JupyterLab starts a kernel in a folder of the checkout. The checkout itself then becomes the
    working folder, so that relative paths such as `data` and `runs` start there. Elsewhere they
    start in the folder where papermill was started.
    """
    from ..doctor import machine

    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = shell.user_ns["In"] if shell else []
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
        # the user's own notebook has no date, and a console has no file
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
    """Refuse parameters with an unknown name, a wrong type or a value out of range.

    `defaults` is the source of the notebook's `parameters` cell.
    """
    declared = _assignments(defaults) if values else {}
    problems = []
    for name, value in values.items():
        if name in declared:
            problems.append(_problem(name, value, *declared[name], defaults))
        elif not name.startswith("PAPERMILL_"):  # set by --inject-paths
            problems.append(unknown_name(name, declared, "parameter"))
    if any(problems):
        raise ParameterError("\n".join(filter(None, problems)))


def _problem(
    name: str, value: object, annotation: str | None, default: object, defaults: str
) -> str:
    """Describe a value of the wrong type or range; "" if it fits.

    `default` is the default of this parameter. `defaults` is the source of the `parameters` cell,
    whose comments name bounds.
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
    """Describe a value that no run can have; "" if the value is possible.

    A parameter whose name is, or ends with, the name of a `TrainConfig` field follows that field's
    rule. Limits and sizes must be sizes. A count must be at least 1, or at least the number in its
    comment, such as "at least 2".
    """
    from ..config import TrainConfig, check_value

    fields = []
    for field in TrainConfig.model_fields:
        if f"_{name}".endswith(f"_{field}"):
            with contextlib.suppress(InputError):  # a refused default shows another meaning
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
    """Refuse a value that is not a size where a size is expected.

    A parameter takes sizes if its name ends with "_limit", or if its default is a size or a list
    of sizes.
    """
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
    """Return name -> (type, default) for each assignment; the type is the annotation, or else the
    type of the default."""
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
