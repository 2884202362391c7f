"""Every notebook runs through papermill at smoke scale, and is committed as it was executed."""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import nbformat
import pytest
from conftest import NOBODY
from execute_notebooks import README_PICTURE, is_stale, is_transparent, readme_picture

from ogbnlib import kernel_cache
from ogbnlib.errors import MB
from ogbnlib.runs.folder import Run

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# 0.002 is 222,000 nodes and 3.2M edges: small, yet large enough that the scaled 128 GB limit still
# kills the baseline.
SMOKE = ["-p", "scale", "0.002", "-p", "epochs", "1"]
WELL_KNOWN = {"matplotlib", "numpy", "pandas", "torch", "torch_geometric"}
OF_ITS_OWN = {"09_your_own": ["-p", "num_nodes", "5000", "-p", "epochs", "1"]}
# Each run takes some six seconds, five of which are its imports: so few of them.
EXTRA = {
    "05_cuda_memory": ["-y", "{hidden_channels: 32, sized_epochs: 5}"],
    "06_out_of_core": [
        "-y",
        "{policies: [eager, shared, store], limits: [128 GB, 8 GB], epochs: 2}",
    ],
    # epochs are so short here that fewer would end before the kill
    "07_full_training": ["-y", "seeds: [0]", "-p", "epochs", "40"],
    "08_propagate_once": ["-y", "{models: [sign], epochs: 3}"],
    # after the last one lazy loaders need a CSC less, and pass
    "02_memory_budget": ["-p", "epochs", "2"],
    "03_lazy_loaders": ["-p", "epochs", "2"],
    "04_skip_train_eval": ["-p", "epochs", "2"],
}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook-data")


def execute(path: Path, folder: Path, data_dir: Path, *user: str) -> nbformat.NotebookNode:
    argv = [*user, sys.executable, "-m", "papermill", "--engine", "ogbnlib"]
    argv += [str(path), "out.ipynb", "-p", "data_dir", str(data_dir)]
    argv += [*OF_ITS_OWN.get(path.stem, SMOKE), *EXTRA.get(path.stem, [])]
    own = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": ""}
    env = {**os.environ, **(own if user else {})}
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


def lend_caches(home: Path) -> None:
    """Give nobody a home with this user's compiled kernels and fonts, which take long to make."""
    kernels = kernel_cache.folder()
    assert kernels is not None
    shutil.copytree(matplotlib.get_cachedir(), home / ".cache" / "matplotlib")
    shutil.copytree(kernels.parent, home / ".cache" / "ogbnlib-kernels-65534")
    for path in [home, *home.rglob("*")]:
        os.chown(path, 65534, 65534)


def outputs_of(cells: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    return [output for cell in cells for output in cell.get("outputs", [])]


def shown(cells: list[nbformat.NotebookNode], kind: str) -> list[str]:
    """The outputs of cells that have a form such as "image/png", in that form."""
    return [out.data[kind] for out in outputs_of(cells) if kind in out.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_was_executed_last(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    assert not is_stale(book), "outputs of other code: run python tests/execute_notebooks.py"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    first, *_ = outputs = outputs_of(code)
    assert re.match(r"ogbnlib \d\S*, torch \S+, .*\n.* cores, .* of memory, ", first.text)
    assert not {"error", "stderr"} & {out.get("name", out.output_type) for out in outputs}
    foreign = r"(?<![\w.])/(home|root|tmp|work|Users)/|warning"
    assert not re.search(foreign, json.dumps(outputs), re.IGNORECASE)
    assert path.stat().st_size < 1_000_000
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert 0 < max(len(picture.data["image/png"]) for picture in pictures) < 200_000
    assert {is_transparent(picture) for picture in pictures} == {True}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_leaves_its_logic_to_the_package(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    top = book.cells[0].source
    assert top.startswith("# ")
    assert "**Predict before you run:**" in top
    assert "(README.md)" in top
    prose = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    assert num_words(top) <= 120
    assert sum(map(num_words, prose)) <= 650
    links = re.findall(r"\]\((?!http)([^)#]+)\)", "\n".join(prose))
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert any("verdicts.table(" in cell.source for cell in book.cells)
    kinds = ["figure" if shown([cell], "image/png") else cell.cell_type for cell in book.cells]
    assert ("figure", "code") not in [*itertools.pairwise(kinds)], "a sentence under each figure"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    (parameters,) = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    for line in parameters.source.splitlines():
        assert ":" in line.split("=")[0], f"{line}: a parameter needs its type"
    assert len(book.cells) <= 25
    lengths = [len(cell.source.splitlines()) for cell in code]
    assert sum(lengths) <= 150
    assert max(lengths) <= 15
    # a magic: a file, a cell on its own, or a line
    python = [cell.source for cell in code if not cell.source.startswith("%")]
    python = [re.sub("^%.*", "", source, flags=re.MULTILINE) for source in python]
    nodes = list(ast.walk(ast.parse("\n".join(python))))
    logic = (ast.FunctionDef, ast.Lambda, ast.ClassDef)
    assert not [node for node in nodes if isinstance(node, logic)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    public = {"ogbnlib", "ogbnlib.notebook"}
    assert {name for name in modules if name.startswith("ogbnlib")} <= public
    known = {"ogbnlib", *WELL_KNOWN, *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in modules} <= known


def num_words(text: str) -> int:
    """Words outside of code blocks, HTML tags and the targets of links."""
    prose = re.sub(r"```.*?```|<[^>]+>|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return len(re.findall(r"[A-Za-z]{2,}", prose))


def verdicts(book: nbformat.NotebookNode) -> dict[str, tuple[str, str]]:
    """The measurement and the consequence of each claim in a notebook's table."""
    tables = [cell for cell in book.cells if 'class="verdicts"' in str(shown([cell], "text/html"))]
    printed = shown(tables, "text/plain")
    rows = re.findall(r"^(\S.*)\n    (.*)\n    (.*)$", "\n".join(printed), re.MULTILINE)
    return {claim: (measured, so) for claim, measured, so in rows}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_ends_with_few_verdicts_an_exercise_and_references(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    rows = verdicts(book)
    assert len(rows) in (3, 4)
    for claim, (measured, so) in rows.items():
        assert max(len(text.split()) for text in (claim, measured, so)) <= 25, claim
        assert so not in ("Not so here.", "Not measured here."), "of the committed run"
    # A cell that JupyterLab shows in a box of its own to scroll in.
    assert not [cell for cell in book.cells if cell.metadata.get("scrolled")]
    last = book.cells[-1].source
    assert "**Exercise.**" in last
    assert "<details><summary>Answer</summary>\n\n" in last
    assert len(re.findall(r"\]\(https://", last.partition("**Read on.**")[2])) == 2


def test_the_picture_of_the_readme_is_that_of_the_first_notebook() -> None:
    book = nbformat.read(NOTEBOOKS[0], as_version=4)
    assert README_PICTURE.read_bytes() == readme_picture(book)


# The consequences that a notebook draws at any scale, by the first words of their claims.
CARRIED = {
    "00_quickstart": ["A job that is killed", "It dies in training"],
    "01_baseline_oom": ["A smaller batch", "One of these knobs"],
    "02_memory_budget": ["Halve the batch", "Lazy loaders fit"],
    "03_lazy_loaders": ["Lazy loaders save", "A loader costs", "Another place"],
    "05_cuda_memory": ["What passed four epochs"],
    "06_out_of_core": ["Get a larger machine", "Training from disk"],
    "07_full_training": ["A kill costs"],
    "09_your_own": ["My script is killed", "My model must"],
}
TEXTS = {
    "00_quickstart": ["in phase 'line ", "is_sorted=True", "104 GB, FITS"],
    "02_memory_budget": ["under 128.00 GB: WILL NOT FIT"],
    "07_full_training": ["exit code 137"],
    "09_your_own": ["in phase 'prepare valid'"],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_headless_and_reaches_its_verdicts(path: Path, executed) -> None:  # type: ignore[no-untyped-def]
    book = executed(path)
    assert shown(book.cells, "image/png")
    rows = verdicts(book)
    for begin in CARRIED.get(path.stem, []):
        (so,) = (so for claim, (_, so) in rows.items() if claim.startswith(begin))
        assert not so.startswith(("Not ", "Undecided")), rows
    said = [output.get("text", "") for output in outputs_of(book.cells)]
    said += shown(book.cells, "text/plain")
    for text in TEXTS.get(path.stem, []):
        assert text in "\n".join(said)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root")
def test_a_user_without_cgroup_rights_gets_the_same_verdicts(executed) -> None:  # type: ignore[no-untyped-def]
    path = ROOT / "notebooks" / "09_your_own.ipynb"
    as_root = executed(path)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are root's alone
        lend_caches(Path(folder))
        as_user = execute(path, Path(folder), Path(folder), *NOBODY)
        runs = [Run.open(run) for run in (Path(folder) / "runs").iterdir()]
        limited = [run.result for run in runs if run.result["memory_limit_bytes"]]
        assert limited
        for result in limited:
            assert result["limit_by"] == "watchdog"
            assert result["killed_by"] == (None if result["exit_code"] == 0 else "watchdog")
            # It looks every 20 ms, in which a process fills some 100 MB; more is counted twice.
            assert result["peak_bytes"] < result["memory_limit_bytes"] + 150 * MB
        for run in runs:
            assert "cgroup_anon_bytes" not in run.timeline
            assert "cgroup" not in run.diagnosis.text
    answers = [[so for _, so in verdicts(book).values()] for book in (as_user, as_root)]
    assert answers[0] == answers[1] != []
