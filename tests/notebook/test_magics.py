"""Promises of `%%memory` and `%%memory_limit`: a cell may be killed, the kernel never."""

import re
import textwrap
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import papermill
import pytest
from nbformat import NotebookNode, v4

LOAD = "%load_ext ogbnlib"
ALIVE = re.compile(r"memory_limit: (?!Finished).*\n")  # signs of life
FILL = "x = []\nwhile True:\n    x.append(bytearray(10**7))"


def make_book(*cells: str) -> NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = v4.new_notebook(metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    book.cells = [v4.new_code_cell(cell) for cell in cells]
    return book


def execute(*cells: str) -> list[dict[str, str]]:
    """Executes cells, whatever they raise; returns the outputs of each by kind."""
    book = make_book(LOAD, *cells)
    nbclient.NotebookClient(book, allow_errors=True, timeout=120).execute()
    return [shown(cell) for cell in book.cells[1:]]


def shown(cell: NotebookNode) -> dict[str, str]:
    found: dict[str, str] = {"stdout": "", "stderr": ""}
    for out in cell.outputs:
        if out.output_type == "stream":
            found[out.name] += out.text
        elif out.output_type == "error":
            assert "error" not in found, "shown twice"
            found["error"] = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(out.traceback))
        else:
            found = {kind: str(data) for kind, data in out.data.items()} | found
    return found


def test_memory_shows_a_cells_peak_and_what_it_leaves_behind() -> None:
    load = "import ogbnlib, time\nkept = bytearray(100 * 2**20)\nwith ogbnlib.phase('read'):\n"
    load += "    y = bytearray(200 * 2**20)\n    time.sleep(0.2)\n    del y\nlen(kept)"
    first, value, after, syntax = execute(
        f"%%memory\n{load}", "print(len(kept))", "%%memory\ndel kept", "%%memory\nf("
    )
    line = r"memory: [\d.]+ s, peak (\d+) MB, (\d+) MB above the start; (\d+) MB left behind"
    found = re.search(line, first["stdout"])
    assert found
    assert 295 < int(found[2]) < 330
    assert 95 < int(found[3]) < 130
    assert first["text/plain"] == str(100 * 2**20)  # the cell's own value, as ever
    assert "image/png" in first
    assert value["stdout"] == f"{100 * 2**20}\n"
    assert re.search(r"\b100 MB given", after["stdout"])
    assert "Error: incomplete input" in syntax["error"]  # a subclass of SyntaxError from 3.13 on
    assert "magics.py" not in syntax["error"]


def test_a_limited_cell_takes_and_returns_variables() -> None:
    (_, done, results) = execute(
        "import math\nclass Mine:\n    size = 2\na, run = [1, 2], Mine()",
        "%%memory_limit 1 GB --in a, math,run --out c,out\n"
        "print('inside', a)\nc = math.floor(sum(a) + 0.5) + run.size\nclass Made: pass\nout = Made()\nc * 2",
        "print(c, type(out).__name__, 'left' if 'Made' in globals() else 'clean')",
    )
    assert ALIVE.match(done["stdout"])
    own = ALIVE.sub("", done["stdout"])
    assert own.startswith("inside [1, 2]\nmemory_limit: Finished ")
    assert done["text/plain"] == "10"
    assert "of 1.00 GB" in done["stdout"]
    assert results["stdout"] == "5 Made clean\n"


def test_a_limited_cell_is_killed_and_the_kernel_lives(tmp_path: Path) -> None:
    killed = "%%memory_limit 150MB\nimport ogbnlib\nwith ogbnlib.phase('fill'):\n"
    nbformat.write(
        make_book(LOAD, "a = 1", killed + textwrap.indent(FILL, "    "), "a"), tmp_path / "in.ipynb"
    )
    done = papermill.execute_notebook(tmp_path / "in.ipynb", None, progress_bar=False)
    cell, after = shown(done.cells[2]), shown(done.cells[3])
    for words in ("Killed by", "limit of 150 MB", "fill"):
        assert words in cell["text/plain"]
    assert "image/png" in cell
    assert after["text/plain"] == "1"


MISTAKES: list[tuple[str, str]] = [
    ("5\n1", "InputError: memory_limit: expected a size such as"),
    ("1GB --in nope\n1", "InputError: --in nope: expected a variable of the notebook"),
    ("1GB\nprint(f)", "NameError: name 'f' is not defined\na limited cell has only the variables"),
    ("1GB\nx = 1\nf(", "Error: incomplete input"),
    ("1GB\ndef g():\n    1 / 0\n\ng()", "----> 2     1 / 0\n\nZeroDivisionError: division"),
    ("1GB\ninput('name? ')", "EOFError: EOF when reading a line"),
    (f"150MB --out x\n{FILL}", "CellFailed: --out x: not set, .* ended: out of memory"),
]


def test_mistakes_and_errors_of_a_limited_cell_fail_it() -> None:
    cells = execute("f = (i for i in [])", *(f"%%memory_limit {text}" for text, _ in MISTAKES))
    for (text, expected), cell in zip(MISTAKES, cells[1:], strict=True):
        assert re.search(expected, cell["error"]), text
        assert "magics.py" not in cell["error"]


SHOW = """
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import HTML, clear_output, display
print("first")
clear_output()
plt.plot([1, 2])
plt.show()
print("second")
handle = display(HTML("<b>x</b>"), display_id=True)
print("third")
handle.update(HTML("<b>y</b>"))
plt.figure().gca()
pd.DataFrame({"a": [1]})
"""


def test_text_of_a_limited_cell_stands_above_its_displays() -> None:
    book = make_book(LOAD, "%%memory_limit 1GB" + SHOW)
    nbclient.NotebookClient(book, timeout=120).execute()
    texts = [out.text for out in book.cells[1].outputs if out.output_type == "stream"]
    shown = [out.data for out in book.cells[1].outputs if out.output_type != "stream"]
    assert ALIVE.sub("", "".join(texts)).startswith("first\nsecond\nthird\nmemory_limit: ")
    kinds = [kind for data in shown for kind in ("image/png", "text/html") if kind in data]
    # the last picture shows the cell's memory
    assert kinds == ["image/png", "text/html", "text/html", "image/png", "image/png"]
    assert shown[1]["text/html"] == "<b>y</b>"
    assert "dataframe" in shown[2]["text/html"]


PLAIN: list[tuple[str, str]] = [
    ("import asyncio\nawait asyncio.sleep(0.01)\n7", "7"),
    ("%%time\nx = 1\nprint('in')", "in\nCPU times"),
    ("import warnings\nwarnings.warn('careful')", "UserWarning: careful"),
    ("print('x' * 2**20)", "x" * 2**20 + "\n"),
    ("%%memory\nprint('inner')", "inner\nmemory: "),
]


@pytest.mark.parametrize("magic", ["%%memory", "%%memory_limit 1GB"])
def test_a_cell_does_what_a_plain_one_does(magic: str) -> None:
    cells = execute(*(f"{magic}\n{cell}" for cell, _ in PLAIN))
    for (cell, expected), done in zip(PLAIN, cells, strict=True):
        assert "error" not in done, cell
        text = done["stdout"] + done["stderr"] + done["text/plain"]
        assert expected in ALIVE.sub("", text), cell
        assert "memory" in done["stdout"]
        assert "image/png" in done


def test_each_statement_of_a_limited_cell_is_a_phase_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = "%%memory_limit 1GB --run runs/mine\nkept = bytearray(60 * 2**20)\nfor i in range(2):\n    i\n'end'"
    first, second, table = execute(
        cell,
        cell,
        "names = mine.phase_memory.set_index('phase')['kept_bytes'] // 2**20\n"
        "print(mine.run_dir, *names.filter(like='line').index, names.filter(like='kept').item())",
    )
    assert first["text/plain"] == "'end'"
    assert "error" not in second
    phases = "line 1: kept = bytearray(60 * 2 ** 20) line 2: for i in range(2) line 4: 'end'"
    folder, _, rest = table["stdout"].strip().partition(" ")
    assert folder == "runs/mine-2"
    assert rest.startswith(phases)
    assert 55 <= int(rest.split()[-1]) <= 65


def test_a_killed_line_names_the_call_to_map_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros(200 * 2**20 // 8))
    cell = "%%memory_limit 180MB\nimport numpy\nfor name in ['x.npy']:\n    x = numpy.load(name)\nprint(x[9])"
    found, again = execute(cell, cell.replace("(name)", "(name, mmap_mode='r')"))
    assert "in phase 'line 2: for name in ['x.npy']'" in found["text/plain"]
    assert "numpy.load(..., mmap_mode='r') in line 3 of the cell" in found["text/plain"]
    assert "\n0.0\n" in again["stdout"]
