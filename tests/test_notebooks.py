"""Every notebook runs through papermill at smoke scale, as a user would run it, and is committed as it was executed."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from execute_notebooks import code_hash, is_stale

from ogbnlib.errors import MB
from ogbnlib.runs.folder import Run

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# 0.002 is 222,000 nodes and 3.2M edges: small, yet large enough that the scaled 128 GB limit still kills the baseline.
SMOKE = ["-p", "scale", "0.002", "-p", "epochs", "1"]
WELL_KNOWN = {"matplotlib", "numpy", "pandas", "torch", "torch_geometric"}
OF_ITS_OWN = {"09_your_own": ["-p", "num_nodes", "5000", "-p", "epochs", "1"]}
EXTRA = {
    "08_propagate_once": ["-p", "hop_epochs", "3"],
    "06_out_of_core": ["-y", "limits: ['128 GB', '32 GB', '8 GB']"],
}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook-data")


def execute(path: Path, folder: Path, data_dir: Path, user: list[str] | None = None) -> nbformat.NotebookNode:
    argv = [*(user or []), sys.executable, "-m", "papermill", "--engine", "ogbnlib", str(path), "out.ipynb"]
    argv += [*OF_ITS_OWN.get(path.stem, SMOKE), "-p", "data_dir", str(data_dir), *EXTRA.get(path.stem, [])]
    env = {**os.environ, **({"HOME": str(folder), "PYTHONPATH": str(ROOT)} if user else {})}
    result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr[-4000:]
    return nbformat.read(folder / "out.ipynb", as_version=4)


@pytest.fixture(scope="session")
def executed(data_dir: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    done: dict[str, nbformat.NotebookNode] = {}

    def once(path: Path) -> nbformat.NotebookNode:
        if path.stem not in done:
            done[path.stem] = execute(path, tmp_path_factory.mktemp(path.stem), data_dir)
        return done[path.stem]

    return once


def text_of(book: nbformat.NotebookNode) -> str:
    """All text output of an executed notebook."""
    parts = []
    for cell in book.cells:
        for output in cell.get("outputs", []):
            parts.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(parts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_headless_and_draws_its_timeline(path: Path, executed) -> None:  # type: ignore[no-untyped-def]
    book = executed(path)
    pictures = [o for cell in book.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_was_executed_last(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    assert not is_stale(book), "its outputs are of other code: run python tests/execute_notebooks.py"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    first, *_ = outputs = [output for cell in code for output in cell.outputs]
    assert re.match(r"ogbnlib \d\S*, torch \S+, .*\n.* cores, .* of memory, ", first.text)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/|warning", json.dumps(outputs), re.IGNORECASE)
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert max(map(len, pictures)) < 200_000
    assert path.stat().st_size < 1_000_000


def test_outputs_are_stale_once_the_code_changed_and_not_for_prose() -> None:
    cells = [nbformat.v4.new_markdown_cell("# Why"), nbformat.v4.new_code_cell("1"), nbformat.v4.new_code_cell("2")]
    book = nbformat.v4.new_notebook(cells=cells)
    assert is_stale(book)
    book.metadata["ogbnlib"] = {"code_sha256": code_hash(book)}
    book.cells[0].source = "# How"
    assert not is_stale(book)
    book.cells[1].source = "1  # more"
    assert is_stale(book)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_one_parameters_cell(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for line in tagged[0].source.splitlines():
        assert ":" in line.split("=")[0], f"{line}: a parameter needs its type"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_leaves_its_logic_to_the_package(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    assert len(book.cells) <= 25
    assert sum(len(source.splitlines()) for source in code) <= 150
    assert max(len(source.splitlines()) for source in code) <= 15
    python = [source for source in code if not source.startswith("%")]  # a magic: a file, or a cell on its own
    nodes = list(ast.walk(ast.parse("\n".join(python))))
    assert not [node for node in nodes if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "ogbnlib" in modules
    assert not [name for name in modules if name.startswith("ogbnlib.")], "notebooks import the facade alone"
    assert {name.split(".")[0] for name in modules} <= {"ogbnlib", *WELL_KNOWN, *sys.stdlib_module_names}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_at_its_top_how_long_it_takes_and_what_it_writes(path: Path) -> None:
    top = nbformat.read(path, as_version=4).cells[0]
    assert top.cell_type == "markdown"
    assert top.source.startswith("# ")
    assert "\nTakes about " in top.source
    assert "Writes " in top.source


def verdicts(book: nbformat.NotebookNode) -> dict[str, str]:
    """The rows of a notebook's ledger."""
    lines = [line.split(": ", 1) for line in text_of(book).splitlines() if not line.startswith(" ")]
    words = ("holds", "does not hold", "half true", "not measured")
    return {line[0]: line[1] for line in lines if len(line) == 2 and line[1].startswith(words)}


def test_the_baseline_is_really_killed_and_its_notebook_goes_on(executed) -> None:  # type: ignore[no-untyped-def]
    book = executed(ROOT / "notebooks" / "01_baseline_oom.ipynb")
    assert "exit code 137" in text_of(book)
    assert "\nin phase: build" in text_of(book)
    # After all the kills.
    assert verdicts(book)["one of these knobs brings the run under the limit"] == "does not hold"


def test_what_will_not_fit_is_said_before_and_killed_after(executed) -> None:  # type: ignore[no-untyped-def]
    book = executed(ROOT / "notebooks" / "02_memory_budget.ipynb")
    assert "under 128.00 GB: WILL NOT FIT" in text_of(book)
    assert verdicts(book)["lazy loaders alone bring it under the limit"] == "does not hold"


# Another user, who may read everything, for Python may be installed in root's home, and write only what is theirs.
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
NOBODY += [f"--{which}=-all,+dac_read_search" for which in ("bounding-set", "inh-caps", "ambient-caps")]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be compared with")
@pytest.mark.parametrize("name", ["01_baseline_oom", "02_memory_budget"])
def test_a_user_without_cgroup_rights_gets_the_same_verdicts(name: str, executed, data_dir: Path) -> None:  # type: ignore[no-untyped-def]
    path = ROOT / "notebooks" / f"{name}.ipynb"
    as_root = executed(path)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are root's alone
        os.chown(folder, 65534, 65534)
        as_user = execute(path, Path(folder), data_dir, NOBODY)
        runs = [Run.open(run) for run in (Path(folder) / "runs").iterdir()]
        limited = [run.result for run in runs if run.result["memory_limit_bytes"]]
        assert limited
        for result in limited:
            assert result["limit_by"] == "watchdog"
            assert result["killed_by"] == (None if result["exit_code"] == 0 else "watchdog")
            # It looks every 20 ms, in which a process fills some 100 MB: what is beyond that is counted twice.
            assert result["peak_bytes"] < result["memory_limit_bytes"] + 150 * MB
        for run in runs:
            assert "cgroup_usage_bytes" not in run.timeline
            assert "cgroup" not in run.diagnosis.text
    assert verdicts(as_user) == verdicts(as_root)
    assert verdicts(as_user)


def test_lazy_loaders_agree_with_the_others_to_the_last_digit(executed) -> None:  # type: ignore[no-untyped-def]
    book = executed(ROOT / "notebooks" / "03_lazy_loaders.ipynb")
    assert verdicts(book)["another place for the graph gives another model"] == "does not hold"
    assert verdicts(book)["lazy loaders alone bring it under the limit"] == "does not hold"
    assert "Finished without an error" in text_of(book)  # shared, under the limit that killed the two others


def test_out_of_core_finishes_where_the_others_are_killed(executed) -> None:  # type: ignore[no-untyped-def]
    book = executed(ROOT / "notebooks" / "06_out_of_core.ipynb")
    assert verdicts(book)["there is no easy workaround, use a larger machine"] == "does not hold"
    assert "eager none" in text_of(book)
    assert "store 8 GB" in text_of(book)


def test_too_many_workers_are_killed_as_forecast_and_a_misspelt_name_is_refused(executed) -> None:  # type: ignore[no-untyped-def]
    text = text_of(executed(ROOT / "notebooks" / "10_knobs_and_mistakes.ipynb"))
    assert "WILL NOT FIT" in text
    assert "set num_workers=0: each worker adds" in text  # the remedy of the run that they killed
    assert "did you mean 'batch_size'" in text
