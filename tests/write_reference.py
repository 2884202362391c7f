"""Write the pages that follow from code and measurements: `python tests/write_reference.py`.

Contents, parameters.md and api.md from docstrings; numbers.md from forecasts and tests/benchmarks.
"""

import csv
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import ogbnlib
from ogbnlib import TrainConfig, config, notebook, plan
from ogbnlib.errors import GB, MB

# The pages in their order, and what each is about.
TITLES = {
    "data": "bring your data: files, arrays, a PyG `Data`, OGB",
    "training": "your loop, your model, our trainer",
    "resume": "stop, resume, several processes",
    "memory": "limit it, watch it, plan it",
    "out_of_core": "the graph on disk, int8, propagated features, predictions",
    "gpu": "a GPU's memory",
    "slurm": "jobs, and the notebooks at full size",
    "command_line": "commands, papermill, JupyterLab, without the clone",
    "papers100M": "from the download to a trained model",
    "troubleshooting": "from a symptom to a command",
    "trust": "files of other people",
    "numbers": "figures that people quote, and ours",
    "parameters": "every parameter of a run",
    "api": "every name in Python",
    "glossary": "the words",
}
ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "notebooks" / "guide"
BENCHMARKS = ROOT / "tests" / "benchmarks"
SCRIPT = "Written by `python tests/write_reference.py`."


def nav(page: str) -> str:
    """The line below a page's title: the contents and the two neighbours."""
    names = [*TITLES]
    at = names.index(page)
    links = ["[Contents](README.md)"]
    links += [f"Previous: [{name}]({name}.md)" for name in names[max(0, at - 1) : at]]
    links += [f"Next: [{name}]({name}.md)" for name in names[at + 1 : at + 2]]
    return " · ".join(links)


def contents() -> str:
    lines = ["# The guide", "", "[README](../../README.md) · [The notebooks](../README.md)", ""]
    lines += [f"- [{name}]({name}.md): {about}" for name, about in TITLES.items()]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def parameters() -> str:
    """The parameters of a run, in the groups of the comments in config.py."""
    lines = [
        *("# Parameters of a run", "", nav("parameters"), "", SCRIPT, ""),
        "Each is a keyword of `TrainConfig.create(...)`, a `--set NAME=VALUE` and a line of a YAML file.",
        "*Fixed* parameters belong to a run: `--resume` refuses another value. All others may be changed on resume.",
    ]
    source = inspect.getsource(config).partition("class TrainConfig")[2].partition("    @")[0]
    for title, group in re.findall(
        r"^    # ([^\n]+)\n(.*?)(?=^    # |\Z)", source, re.MULTILINE | re.DOTALL
    ):
        rows = []
        for name in re.findall(r"^    (\w+):", group, re.MULTILINE):
            info: Any = config.TrainConfig.model_fields[name]
            choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            words = info.description
            if choices:
                words += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
            default = "" if info.is_required() else f"`{info.default!r}`"
            changes = any(isinstance(mark, config.Resume) for mark in info.metadata)
            rows.append(f"| `{name}` | {default} | {cell(words)} | {'' if changes else 'fixed'} |")
        if rows:
            lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
            lines += ["| name | default | meaning | |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


class _Dots:
    def __repr__(self) -> str:
        return "..."


def signature(value: Any) -> str:
    """The parameters of a function with their defaults; "" for a class."""
    if inspect.isclass(value):
        return ""
    items = []
    for item in inspect.signature(value).parameters.values():
        has_function = callable(item.default) and item.default is not item.empty
        default = _Dots() if has_function else item.default
        items.append(item.replace(annotation=item.empty, default=default))
    return str(inspect.Signature(items))


def first_paragraph(value: Any) -> str:
    return cell((inspect.getdoc(value) or "").partition("\n\n")[0])


def api() -> str:
    """Every public name of the package and its notebook helpers, with the first paragraph of its docstring."""
    lines = [
        *("# Names in Python", "", nav("api"), "", SCRIPT, ""),
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
        is_own = inspect.isfunction(value) and value.__module__ == verdicts.__name__
        if is_own and not name.startswith("_"):
            lines.append(f"- `{name}{signature(value)}`: {first_paragraph(value)}")
    return "\n".join(lines) + "\n"


def numbers() -> str:
    """Claims about jobs on papers100M that no notebook has, with our figure and its source."""
    lines = [
        *("# Figures that people quote", "", nav("numbers"), "", SCRIPT),
        "`1024 x [15, 10]` are seeds and fan-out.",
        *("", "## By forecast, at full size, directed", "", *_header("claim", "by `plan`")),
        *(f"| {claim} | {figure} |" for claim, figure in _forecasts().items()),
        *("", "## Measured once", "", *_header("claim", "figure", "where; commit")),
        *(f"| {' | '.join(row.values())} |" for row in _rows("claims.csv")),
        *("", "## Neither confirmed nor refuted, without a GPU and 16 cores", ""),
        '"A CPU is 10 to 50 times slower", "`empty_cache` every 10 batches helps", "pinned batches take',
        '100 MB", "`pin_memory` makes a GPU faster", "32 threads are faster than two".',
        *("", "## From disk, measured at full size on generated data", ""),
        "Two threads for [15, 10, 5], else one; one run (`full_size.csv`). Only times of a row compare.",
        "Hot rows stay in memory.",
        *("", *_header("what", "precision", "limit", "seconds", "from RAM, s", "cores")),
        *_full_size(),
    ]
    return "\n".join(lines) + "\n"


def _header(*titles: str) -> tuple[str, str]:
    return f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"


def _rows(name: str) -> list[dict[str, str]]:
    with (BENCHMARKS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _forecasts() -> dict[str, str]:
    values = {"batch_size": 1024, "num_neighbors": [15, 10], "hidden_channels": 64}
    values |= {"dataset": "ogbn-papers100M", "loading": "eager", "train_eval": "never"}
    usual = TrainConfig.create(values)
    forecast = plan(usual).forecast
    parts = {name: size for phase in forecast.phases for name, size in phase.parts.items()}
    changes: dict[str, dict[str, object]] = {
        "half": {"batch_size": 512},
        "fewest": {"batch_size": 64, "num_neighbors": [2, 1]},
        "worker": {"num_workers": 1},
        "deep": {"num_neighbors": [15, 10, 5], "hidden_channels": 256},
        "small": {"batch_size": 128, "num_neighbors": [3, 2], "hidden_channels": 16},
        "medium": {"batch_size": 256, "num_neighbors": [8, 4]},
    }
    others = {name: plan(usual.replace(**change)).forecast for name, change in changes.items()}
    batch_bytes = parts["batch in use"]
    steps = -(-forecast.size.num_seeds["train"] // usual.batch_size)
    peak = forecast.peak_bytes
    loader = parts["train loader's CSC"]
    step = parts["step: activations and sampling"]
    slower = others["fewest"].epoch_s / forecast.epoch_s
    small_s = others["small"].epoch_s
    small_steps = -(-forecast.size.num_seeds["train"] // 128)
    return {
        "the edge list takes 15 GB": f"{parts['edge_index (COO)'] / GB:.1f} GB",
        "a loader takes 20 GB": f"{loader / GB:.1f} GB, twice that while it is built",
        "256 GB hold three stock loaders": f"they take {peak / GB:.0f} GB",
        "512 GB are enough with a worker": f"{others['worker'].peak_bytes / GB:.0f} GB",
        "a batch of 1024 x [15, 10] takes 80 to 105 MB": f"{batch_bytes / MB:.0f} MB",
        "a batch takes 616 bytes a node": f"{batch_bytes / forecast.train.batch.num_nodes:.0f} bytes",
        "sampling takes 30 GB": f"{step / GB:.2f} GB with the step",
        "the model takes 5 GB": f"{parts['model, gradients, Adam'] / GB:.4f} GB",
        "halving the batch saves 40 GB": f"{(peak - others['half'].peak_bytes) / GB:.2f} GB",
        "fewer neighbors save 15 GB": f"{(peak - others['fewest'].peak_bytes) / GB:.2f} GB",
        "a CPU takes 3 to 5 s a batch": f"{others['deep'].epoch_s / steps:.2f} s of 1024 x [15, 10, 5]",
        "64 x [2, 1] is 3 to 4 times slower": f"{slower:.2f} times as long as 1024 x [15, 10]",
        "an epoch takes 15 to 80 minutes": f"{forecast.epoch_s / 60:.1f} minutes of 1024 x [15, 10]",
        "an epoch of 128 x [3, 2] takes 2:32, at 61.7 it/s": f"{small_s:.0f} s, {small_steps / small_s:.0f} it/s",
        "256 x [8, 4] is small enough": f"{others['medium'].peak_bytes / GB:.0f} GB",
    }


def _full_size() -> list[str]:
    lines = []
    for row in _rows("full_size.csv"):
        if not row["from_ram_s"]:
            continue
        precision = "bf16" if "bf16" in row["config"] else "fp32"
        cells = [row[name] for name in ("limit", "seconds", "from_ram_s", "machine")]
        lines.append(f"| {row['what']} | {precision} | {' | '.join(cells)} |")
    return lines


PAGES = {"README": contents, "parameters": parameters, "api": api, "numbers": numbers}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (GUIDE / f"{page}.md").write_text(write())
