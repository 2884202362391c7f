"""Write notebooks/guide/parameters.md and api.md from the docstrings: `python tests/write_reference.py`."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import ogbnlib
from ogbnlib import config, notebook

# The first line of every page of the guide.
TITLES = {
    **{
        "data": "data",
        "training": "training",
        "resume": "resume",
        "memory": "memory",
        "out_of_core": "out of core",
    },
    **{"gpu": "GPU", "slurm": "Slurm", "command_line": "command line", "papers100M": "papers100M"},
    **{
        "troubleshooting": "troubleshooting",
        "trust": "trust",
        "parameters": "parameters",
        "api": "Python",
        "glossary": "glossary",
    },
}
NAV = " · ".join(
    ["[README](../../README.md)", *(f"[{title}]({page}.md)" for page, title in TITLES.items())]
)
GUIDE = Path(__file__).parents[1] / "notebooks" / "guide"
SCRIPT = "Written from the docstrings by `python tests/write_reference.py`."


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def parameters() -> str:
    """The parameters of a run, in the groups of the comments in config.py."""
    lines = [
        *("# Parameters of a run", "", NAV, "", SCRIPT, ""),
        "Each is a keyword of `TrainConfig.create(...)`, a `--set NAME=VALUE` and a line of a YAML file.",
        "*Fixed* parameters belong to a run: `--resume` refuses another value. All others may be changed on resume.",
    ]
    source = inspect.getsource(config._Parameters)
    for title, group in re.findall(
        r"^    # ([^\n]+)\n(.*?)(?=^    # |\Z)", source, re.MULTILINE | re.DOTALL
    ):
        rows = []
        for name in re.findall(r"^    (\w+):", group, re.MULTILINE):
            info: Any = config.TrainConfig.model_fields[name]
            choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            words = (
                f"{info.description} One of {', '.join(f'`{choice}`' for choice in choices)}."
                if choices
                else info.description
            )
            default = "" if info.is_required() else f"`{info.default!r}`"
            fixed = (
                "" if any(isinstance(mark, config.Resume) for mark in info.metadata) else "fixed"
            )
            rows.append(f"| `{name}` | {default} | {cell(words)} | {fixed} |")
        if rows:
            lines += [
                "",
                f"## {title[0].upper()}{title[1:]}",
                "",
                "| name | default | meaning | |",
                "|---|---|---|---|",
                *rows,
            ]
    return "\n".join(lines) + "\n"


def signature(value: Any) -> str:
    """The names of a function's parameters; those with a default in the form `name=...`."""
    if inspect.isclass(value):
        return ""
    names = []
    for item in inspect.signature(value).parameters.values():
        mark = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
        default = (
            ""
            if item.default is item.empty
            else f"={'...' if callable(item.default) else repr(item.default)}"
        )
        if (
            item.kind is item.KEYWORD_ONLY
            and "*" not in names
            and not any(name.startswith("*") for name in names)
        ):
            names.append("*")
        names.append(f"{mark}{item.name}{default}")
    return f"({', '.join(names)})"


def first_paragraph(value: Any) -> str:
    return cell((inspect.getdoc(value) or "").partition("\n\n")[0])


def api() -> str:
    """Every public name of the package and its notebook helpers, with the first paragraph of its docstring."""
    lines = [
        *("# Names in Python", "", NAV, "", SCRIPT, ""),
        "`help(name)`, or Shift-TAB in JupyterLab, shows the whole docstring with each argument.",
    ]
    places = {"ogbnlib": ogbnlib, "ogbnlib.notebook": notebook}
    for place, module in places.items():
        lines += ["", f"## {place}", ""]
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                lines.append(f"- `{name}{signature(value)}`: {first_paragraph(value)}")
    lines += ["", "## ogbnlib.notebook.verdicts", ""]
    verdicts = importlib.import_module("ogbnlib.notebook.verdicts")
    for name, value in vars(verdicts).items():
        if (
            inspect.isfunction(value)
            and value.__module__ == verdicts.__name__
            and not name.startswith("_")
        ):
            lines.append(f"- `{name}{signature(value)}`: {first_paragraph(value)}")
    return "\n".join(lines) + "\n"


PAGES = {"parameters": parameters, "api": api}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (GUIDE / f"{page}.md").write_text(write())
