"""Promises of slurm/full: each notebook's runs at full size, planned from sizes, are killed or fit
as its file says."""

import ast
import builtins
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import nbformat
import pytest
import yaml

from ogbnlib.config import TrainConfig
from ogbnlib.errors import GB, InputError, format_bytes, parse_bytes
from ogbnlib.forecast.fitting import FITS, WILL_NOT_FIT, verdict
from ogbnlib.forecast.planner import Advice
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.graph.store import GraphSize
from ogbnlib.notebook.engine import check_parameters
from ogbnlib.runs import sandbox
from ogbnlib.sources.official import KNOWN

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "slurm" / "full").glob("*.yaml"))
PAPERS = dataclasses.replace(KNOWN["ogbn-papers100M"], stored="store", feature_itemsize=2)
GENERATED_SEEDS = {"train": 2414, "valid": 250, "test": 429}
SIZES = {
    "data/papers100M-directed": PAPERS,
    "data/papers100M": dataclasses.replace(PAPERS, num_edges=2 * PAPERS.num_edges, undirected=True),
    "ogbn-papers100M": KNOWN["ogbn-papers100M"],
    "generated": dataclasses.replace(
        PAPERS, num_nodes=222_120, num_edges=3_233_129, num_seeds=GENERATED_SEEDS
    ),
}
NOTEBOOK_BYTES = GB  # of the kernel itself, more than any notebook was seen to have
# The runs that a notebook means to be killed, by policy and limit, and those not started under the
# job's --mem.
BOTH = {"eager under 128.00 GB", "lazy under 128.00 GB"}
SHARED = {"shared under 48.00 GB", "shared under 8.00 GB"}  # the latter with float16 features
KILLED = {"01_baseline_oom": {"eager under 128.00 GB"}, "06_out_of_core": BOTH | SHARED}
NOT_STARTED = {"02_memory_budget": {"eager", "lazy"}}


def size_of(dataset: str) -> GraphSize:
    return SIZES[str(dataset)]


class Planner:
    """Stands in for what a notebook imports: its runs are planned, not run."""

    def __init__(self, job_bytes: int) -> None:
        self.room_bytes = job_bytes - NOTEBOOK_BYTES
        self.killed: set[str] = set()
        self.not_started: set[str] = set()
        self.wrong: list[str] = []
        self.run_s = 0.0

    def run(self, config: TrainConfig, memory_limit: Any = None, **_: Any) -> MagicMock:
        limit_bytes = None if memory_limit is None else parse_bytes(memory_limit)
        own_bytes = min(limit_bytes or self.room_bytes, self.room_bytes)
        known = str(config.dataset) in SIZES
        size = size_of(config.dataset) if known else dataclasses.replace(PAPERS, hops=config.hops)
        forecast = predict(config, size, memory_limit_bytes=own_bytes)
        answer, label = verdict(forecast, own_bytes), config.loading
        if answer == WILL_NOT_FIT and limit_bytes is not None and limit_bytes <= self.room_bytes:
            self.killed.add(f"{label} under {format_bytes(limit_bytes)}")
        elif answer == WILL_NOT_FIT:
            self.not_started.add(label)
        elif verdict(forecast, self.room_bytes) != FITS:
            self.wrong.append(f"{label}: {forecast.peak_bytes} of {self.room_bytes} B")
        else:
            self.run_s += forecast.run_s
        done = MagicMock(config=config, exit_code=137 if answer == WILL_NOT_FIT else 0)
        done.held_peak_bytes = forecast.peak_bytes
        done.rss_peak_bytes = forecast.peak_bytes + 30 * GB
        done.require_finished.return_value = done
        return done

    @staticmethod
    def plan(config: TrainConfig, memory_limit: Any = None) -> Advice:
        limit_bytes = None if memory_limit is None else parse_bytes(memory_limit)
        forecast = predict(config, size_of(config.dataset), memory_limit_bytes=limit_bytes)
        return Advice(forecast, limit_bytes)


def imports(planner: Planner) -> Callable[..., Any]:
    """Return an `__import__` for the notebooks' cells: the package with `planner` in it, and mocks
    of slow packages."""
    package = MagicMock(TrainConfig=TrainConfig, format_bytes=format_bytes, InputError=InputError)
    package.run, package.plan = planner.run, planner.plan
    package.scaled_limit = sandbox.scaled_limit
    package.prepare_dataset = lambda dataset, *_, **__: dataset or "generated"

    def load(name: str, *how: Any) -> Any:
        if name.split(".")[0] in ("ogbnlib", "matplotlib", "torch", "torch_geometric"):
            return package if name in ("ogbnlib", "ogbnlib.notebook") else MagicMock()
        return builtins.__import__(name, *how)

    return load


def comment(path: Path, pattern: str) -> str:
    (found,) = re.findall(pattern, path.read_text())
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_notebook_at_full_size_is_killed_where_it_means_to_be_and_fits_its_job(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "size_of", size_of)
    cells = nbformat.read(ROOT / "notebooks" / f"{path.stem}.ipynb", 4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    (parameters,) = [cell.source for cell in code if "parameters" in cell.metadata.get("tags", [])]
    values = yaml.safe_load(path.read_text())  # as papermill reads it
    check_parameters(values, parameters)
    assert values["dataset"] in SIZES
    planner = Planner(int(comment(path, r"--mem=(\d+)G ")) * GB)
    names: dict[str, Any] = {"display": MagicMock(), "print": MagicMock()}
    names["__builtins__"] = {**vars(builtins), "__import__": imports(planner)}
    for cell in code:
        if cell.source.startswith("%%"):
            continue
        source = re.sub("^%.*", "", cell.source, flags=re.MULTILINE)
        try:
            exec(source, names)
        except Exception:
            # A table or a plot of a mock. What starts a run must work, and later cells may need no
            # name of this one.
            names_used = [getattr(node, "id", "") for node in ast.walk(ast.parse(source))]
            if "run" in names_used:
                raise
        if cell.source is parameters:
            names |= values
    assert planner.wrong == []
    assert planner.killed == KILLED.get(path.stem, set())
    assert planner.not_started == NOT_STARTED.get(path.stem, set())
    hours, minutes = comment(path, r"--time=(\d+):(\d+):00")
    assert planner.run_s / 3600 < int(hours) + int(minutes) / 60


def test_every_file_is_in_the_guides_table_with_its_memory_and_time() -> None:
    page = (ROOT / "notebooks" / "guide" / "slurm.md").read_text()
    assert len(FILES) == 8
    for path in FILES:
        mem = comment(path, r"--mem=(\d+G) ")
        time = ":".join(comment(path, r"--time=(\d+):(\d+):00"))
        assert re.search(rf"^\| {path.stem} \| {mem} \| {time} \|", page, re.MULTILINE), path.stem
