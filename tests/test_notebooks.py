"""Every notebook runs through papermill at smoke scale, as a user would run it, and is committed clean."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# 0.002 is 222,000 nodes and 3.2M edges: small, yet large enough that the scaled 128 GB limit still kills the baseline.
SMOKE = ["-p", "scale", "0.002", "-p", "epochs", "1"]
EXTRA = {
    "02_memory_budget": ["-p", "sweep_scale", "0.002"],  # the data that the others use
    "06_out_of_core": ["-y", "limits: ['128 GB', '32 GB', '8 GB']"],
}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook-data")


@pytest.fixture(scope="session")
def executed(data_dir: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    done: dict[str, nbformat.NotebookNode] = {}

    def execute(path: Path) -> nbformat.NotebookNode:
        if path.stem not in done:
            folder = tmp_path_factory.mktemp(path.stem)
            argv = [sys.executable, "-m", "papermill", "--engine", "ogbnlib", str(path), "out.ipynb", *SMOKE]
            argv += ["-p", "data_dir", str(data_dir), *EXTRA.get(path.stem, [])]
            result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=dict(os.environ))
            assert result.returncode == 0, result.stderr[-4000:]
            done[path.stem] = nbformat.read(folder / "out.ipynb", as_version=4)
        return done[path.stem]

    return execute


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
def test_a_notebook_is_committed_without_outputs_and_with_one_parameters_cell(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    for line in tagged[0].source.splitlines():
        assert ":" in line.split("=")[0], f"{line}: a parameter needs its type"
    assert max(len(cell.source.splitlines()) for cell in code) <= 30


def test_the_baseline_is_really_killed_and_its_notebook_goes_on(executed) -> None:  # type: ignore[no-untyped-def]
    text = text_of(executed(ROOT / "notebooks" / "01_baseline_oom.ipynb"))
    assert "exit code 137" in text
    assert "in phase 'build" in text
    assert "does not hold" in text  # the ledger, after all the kills


def test_lazy_loaders_agree_with_the_others_to_the_last_digit(executed) -> None:  # type: ignore[no-untyped-def]
    text = text_of(executed(ROOT / "notebooks" / "03_lazy_loaders.ipynb"))
    assert "losses agree to the last digit" in text
    assert "shared finished" in text


def test_out_of_core_finishes_where_the_others_are_killed(executed) -> None:  # type: ignore[no-untyped-def]
    text = text_of(executed(ROOT / "notebooks" / "06_out_of_core.ipynb"))
    assert "eager none" in text
    assert "store 8 GB" in text


def test_the_memory_budget_kills_what_it_said_would_not_fit_and_judges_every_belief(executed) -> None:  # type: ignore[no-untyped-def]
    text = text_of(executed(ROOT / "notebooks" / "02_memory_budget.ipynb"))
    assert "under 128.00 GB: WILL NOT FIT" in text
    assert "set num_workers=0: each worker adds" in text  # the remedy of the run that too many workers killed
    assert "it ended with exit code 137" in text  # lazy loaders alone, the ledger's last row


def test_a_training_that_was_stopped_ends_with_the_weights_of_one_that_was_not(executed) -> None:  # type: ignore[no-untyped-def]
    text = text_of(executed(ROOT / "notebooks" / "07_full_training.ipynb"))
    assert "exit code 75" in text
    assert "weights and metrics are identical" in text
