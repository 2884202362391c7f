"""JupyterLab as a person sees it, in Debian's chromium: signs of life, stop, a run from elsewhere."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no chromium to open JupyterLab in; apt install chromium", allow_module_level=True)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright for chromium; pip install playwright"
)

SMALL = {"scale: float = 0.01": "scale: float = 0.002"}
AGAIN = "00-shared-3"  # the run of the cell that is stopped once and then run again
ELSEWHERE = f"""\
import time
from pathlib import Path
from ogbnlib import Run
from ogbnlib.notebook import begin_notebook
begin_notebook()
while not Path("runs/{AGAIN}/events.jsonl").exists():
    time.sleep(0.1)
print(Run.open("runs/{AGAIN}").state)
while (run := Run.open("runs/{AGAIN}")).is_at_work:
    time.sleep(0.1)
print(run.state)
"""
# What JupyterLab holds of the open notebook: the page has no cells that are out of sight.
CELLS = """() => jupyterapp.shell.currentWidget.content.widgets.filter(cell => cell.model.type == "code").map(cell => ({
    running: !!cell.promptNode?.textContent.includes("*") || cell.model.executionState == "running",
    source: cell.model.sharedModel.getSource(), outputs: cell.model.outputs.toJSON()}))"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab with the first notebook, and one that looks at its run."""
    (tmp_path / "notebooks").mkdir()
    text = (ROOT / "notebooks" / "00_quickstart.ipynb").read_text()
    for default, small in SMALL.items():
        assert default in text
        text = text.replace(default, small)
    (tmp_path / "notebooks" / "00_quickstart.ipynb").write_text(text)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(ELSEWHERE)]
    book = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    nbformat.write(book, tmp_path / "notebooks" / "elsewhere.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    argv += ["--expose-app-in-browser"]
    argv += [f"--ServerApp.port={port}", "--ServerApp.token=t", f"--ServerApp.root_dir={tmp_path}"]
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env["JUPYTERLAB_SETTINGS_DIR"] = str(tmp_path / "lab")
    with open(tmp_path / "lab.log", "wb") as log:
        how = {"stdout": log, "stderr": log, "start_new_session": True}
        server = subprocess.Popen(argv, cwd=tmp_path, env=env, **how)

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/api").status == 200
        except OSError:
            return False

    try:
        wait_until(answers, "JupyterLab")
        yield f"http://127.0.0.1:{port}/lab"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def open_book(browser: Any, lab: str, notebooks: Path, name: str) -> Any:
    """A page with a notebook whose cells and kernel are there, and to which commands go."""
    page = browser.new_page()
    page.goto(f"{lab}/workspaces/{name}/tree/notebooks/{name}.ipynb?token=t")
    cells = len(nbformat.read(notebooks / f"{name}.ipynb", as_version=4).cells)
    book = "window.jupyterapp?.shell.currentWidget"
    kernel = f"{book}?.sessionContext?.session?.kernel"
    ready = f"{book}?.content?.widgets?.length == {cells}"
    ready += f" && {kernel}?.connectionStatus == 'connected' && {kernel}.status == 'idle'"
    page.wait_for_function(ready, timeout=120_000)
    page.click(".jp-Notebook .jp-Cell >> nth=0")
    return page


def text_of(cell: Any) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def run_cell(page: Any, part: str) -> int:
    """Run the code cell in which `part` is; returns which of the code cells it is."""
    find = "cells.findIndex(cell => cell.model.sharedModel.getSource().includes(part))"
    page.evaluate(
        f"""part => {{ const book = jupyterapp.shell.currentWidget.content, cells = [...book.widgets];
        book.activeCellIndex = {find}; jupyterapp.commands.execute("notebook:run-cell"); }}""",
        part,
    )
    return next(i for i, cell in enumerate(page.evaluate(CELLS)) if part in cell["source"])


def test_a_notebook_runs_stops_and_is_seen_from_elsewhere(
    browser: Any, lab: str, tmp_path: Path
) -> None:
    page = open_book(browser, lab, tmp_path / "notebooks", "00_quickstart")
    page.evaluate("jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")
    wait_until(lambda: any(cell["running"] for cell in page.evaluate(CELLS)), "the first cell", 20)
    wait_until(lambda: not any(cell["running"] for cell in page.evaluate(CELLS)), "the last cell")
    outputs = [output for cell in page.evaluate(CELLS) for output in cell["outputs"]]
    assert not {"error", "stderr"} & {out.get("name", out["output_type"]) for out in outputs}
    assert "warning" not in str(outputs).lower()
    assert any("image/png" in output.get("data", {}) for output in outputs)

    at = run_cell(page, 'name="00-shared"')
    wait_until(lambda: "00-shared-2: " in text_of(page.evaluate(CELLS)[at]), "the line of the run")
    stopped_s = time.monotonic()
    page.click('[data-jp-item-name="interrupt"] >> nth=0')
    wait_until(lambda: not page.evaluate(CELLS)[at]["running"], "the end after stop")
    assert time.monotonic() - stopped_s < 10
    assert "stopping ..." in text_of(page.evaluate(CELLS)[at])
    assert page.evaluate(CELLS)[at]["outputs"][-1]["ename"] == "KeyboardInterrupt"

    second = open_book(browser, lab, tmp_path / "notebooks", "elsewhere")
    run_cell(second, AGAIN)
    wait_until(lambda: text_of(second.evaluate(CELLS)[0]), "the second notebook")
    run_cell(page, 'name="00-shared"')
    wait_until(lambda: not page.evaluate(CELLS)[at]["running"], "the run again")
    assert "Finished" in str(page.evaluate(CELLS)[at]["outputs"])  # in the card of the run
    wait_until(lambda: not second.evaluate(CELLS)[0]["running"], "the end as seen from elsewhere")
    lines = text_of(second.evaluate(CELLS)[0]).splitlines()
    assert "at work" in lines
    assert lines[-1].strip() == "finished"
