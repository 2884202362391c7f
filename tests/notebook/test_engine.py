"""Promises of `papermill --engine ogbnlib`: parameters are checked at first, an ending is shown."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import nbformat
import papermill
import pytest
from click.testing import CliRunner, Result
from conftest import MB, wait_until
from execute_notebooks import is_transparent
from nbformat import NotebookNode, v4
from papermill.cli import papermill as command_line
from papermill.engines import papermill_engines
from papermill.exceptions import PapermillExecutionError

from ogbnlib.errors import format_bytes
from ogbnlib.memory.cgroup import effective_limit
from ogbnlib.memory.limits import Limit
from ogbnlib.notebook.engine import Engine, ParameterError, begin_notebook, check_parameters

ROOT = Path(__file__).parents[2]
PARAMETERS = """
epochs: int = 3
lr: float = 0.1
flag: bool = False
fanout: list = [3, 2]
hops: "Union[list, str]" = [3, 2]
root: str = "data"
limit: "str | None" = None
sizes: tuple[int, ...] = (1, 2)
plain = 2.5
loading: "Literal['eager', 'lazy']" = "lazy"
array: 'np.ndarray' = None
other = 3 * 4
"""
KILL = "import os\nos.kill(os.getpid(), 9)"
# The child of the kernel signals it, as papermill does before a job's time limit.
STOPPED_BY_USR1 = """from ogbnlib import watch
watch(['-c', 'import os, time; os.kill(os.getppid(), 10); time.sleep(20)'], name='a')"""

# `train` in the kernel raises it where its handler has seen a signal.
STOPPED_IN_THE_KERNEL = """from ogbnlib.memory.signals import Stopped
try:
    raise Stopped("stopped by SIGUSR1")
except Exception:
    print("a sweep goes on")"""


def write_book(folder: Path, *cells: str, parameters: str | None = PARAMETERS) -> Path:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = v4.new_notebook(metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    book.cells = [v4.new_markdown_cell("# A notebook")]
    if parameters is not None:
        book.cells.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    book.cells += [v4.new_code_cell(cell) for cell in cells]
    nbformat.write(book, folder / "in.ipynb")
    return folder / "in.ipynb"


def read_book(folder: Path) -> NotebookNode:
    return nbformat.read(folder / "out.ipynb", as_version=4)


def statuses(folder: Path) -> list[str]:
    """The status of each executed code cell below the parameters."""
    cells = [cell for cell in read_book(folder).cells if "parameters" not in cell.metadata.tags]
    return [cell.metadata.papermill.status for cell in cells if cell.cell_type == "code"]


def banners(folder: Path) -> str:
    """The text of the cells that explain how the notebook ended."""
    cells = read_book(folder).cells
    return "\n".join(c.source for c in cells if "papermill-error-cell-tag" in c.metadata.tags)


@pytest.fixture
def execute(tmp_path: Path) -> Callable[..., NotebookNode]:
    """Executes cells in this process and returns the output notebook."""
    papermill_engines.register("ogbnlib", Engine)

    def run(*cells: str, **options: Any) -> NotebookNode:
        path = write_book(tmp_path, *cells, parameters="epochs: int = 3")
        papermill.execute_notebook(path, tmp_path / "out.ipynb", engine_name="ogbnlib", **options)
        return read_book(tmp_path)

    return run


# papermill finds the engine by the entry point of the installed package
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def argv(*arguments: str) -> list[str]:
    command = ["-m", "papermill", "--engine", "ogbnlib", "in.ipynb", "out.ipynb"]
    return [sys.executable, *command, *arguments]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """papermill's command line in this process, without its 2 s of imports."""
    papermill_engines.register("ogbnlib", Engine)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(command_line, argv(*arguments)[3:])


def test_a_misspelt_name_is_refused_and_leaves_the_output(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    write_book(tmp_path, "print(epochs)")
    (tmp_path / "out.ipynb").write_text("earlier")
    done = command("-p", "epoch", "7")
    assert done.exit_code == 2
    assert "'epochs'? known: array, epochs, fanout" in done.stderr
    assert (tmp_path / "out.ipynb").read_text() == "earlier"


@pytest.mark.parametrize(
    ("name", "value", "expected", "instead"),
    [
        ("epochs", "ten", "int", "-y 'epochs: 3'"),
        ("limit", 8, "str | None", "-r limit TEXT"),
        ("sizes", ["a"], "tuple[int, ...]", "-y 'sizes: [1, 2]'"),
        ("loading", "lasy", "Literal['eager', 'lazy']", "-y 'loading: \"lazy\"'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_an_example(
    name: str, value: object, expected: str, instead: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        check_parameters({name: value, "nothing": 1}, PARAMETERS)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{name}: expected {expected}, found {value!r} (")
    assert instead in first
    assert "unknown parameter 'nothing'" in second


def test_values_that_fit_reach_the_notebook(command: Callable[..., Result], tmp_path: Path) -> None:
    names = "epochs, lr, flag, fanout, hops, root, limit, list(sizes), plain, array, other"
    write_book(tmp_path, f"print({names})")
    passed = {"epochs": "7", "lr": "1", "flag": "True", "plain": "1", "limit": "None"}
    passed |= {"hops": "3 2", "other": "text", "array": "x"}
    values = [item for name, value in passed.items() for item in ("-p", name, value)]
    values += ["-r", "root", "5", "-y", "fanout: [1]", "-y", "sizes: [4]"]
    assert command(*values, "--inject-paths").exit_code == 0
    assert read_book(tmp_path).cells[-1].outputs[0].text == "7 1 True [1] 3 2 5 None [4] 1 x text\n"


def test_a_notebook_checks_parameters_under_papermills_engine(tmp_path: Path) -> None:
    begin = "from ogbnlib.notebook import begin_notebook\n\nbegin_notebook()"
    plot = "import pandas as pd\n\nax = pd.Series([1, 2]).plot()"
    path = write_book(tmp_path, begin, plot, parameters="epochs: int = 3\nfanout: list = [3, 2]")
    papermill.execute_notebook(path, tmp_path / "fine.ipynb", parameters={"epochs": 64})
    (picture,) = nbformat.read(tmp_path / "fine.ipynb", as_version=4).cells[-1].outputs
    assert is_transparent(picture)
    with pytest.raises(PapermillExecutionError, match="'epochs'"):
        papermill.execute_notebook(path, tmp_path / "out.ipynb", parameters={"epoch": 64})
    assert statuses(tmp_path)[-1] == "pending"


def test_every_way_to_run_a_notebook_has_one_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_quickstart.ipynb").touch()
    monkeypatch.chdir(tmp_path / "notebooks")  # where JupyterLab starts a kernel
    begin_notebook()
    assert Path.cwd() == tmp_path
    text = capsys.readouterr().out
    assert re.search(r"torch 2\.\d+.*, Python 3\.\d+\.\d+\n.*, \d+ cores, .* GB", text)
    assert f" {tmp_path}: " in text
    assert "Run.open" not in text
    monkeypatch.setenv("JPY_SESSION_NAME", "a.ipynb")  # JupyterLab
    begin_notebook()  # the cell again, or papermill in the checkout
    assert Path.cwd() == tmp_path
    text = capsys.readouterr().out
    assert f"working in {tmp_path}" not in text
    assert 'Run.open("runs/NAME")' in text


def test_a_killed_kernel_is_shown_and_papermill_exits_with_137(tmp_path: Path) -> None:
    write_book(tmp_path, "print('before')", KILL, "print('after')")
    (tmp_path / "elsewhere").mkdir()
    line = argv("--cwd", "elsewhere")
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 137
    assert "ended by SIGKILL, cause unknown" in done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(tmp_path) == ["completed", "failed", "pending"]
    book = read_book(tmp_path)
    nbformat.validate(book)
    (cell,) = [cell for cell in book.cells if cell.source == KILL]
    assert cell.outputs[-1].ename == "KernelDied"
    text = banners(tmp_path)
    assert "in phase 'cell 4 of 5: import os'" in text
    assert f"under a limit of {format_bytes(effective_limit()[0])}" in text
    assert re.search(r"largest processes: python\S* \d+ with \d+ MB", text)


def test_an_out_of_memory_kill_is_named_by_its_cgroup(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    fill = "held = bytearray(80 << 20)", "more = bytearray(1500 << 20)"
    write_book(tmp_path, *fill, "print('after')")
    # well above papermill, or papermill would be the one to be killed
    line = kernel_limit(700 * MB).command(argv())
    done = subprocess.run(line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 137, done.stderr
    assert statuses(tmp_path) == ["completed", "failed", "pending"]
    text = banners(tmp_path)
    assert "Killed by the kernel's out-of-memory killer (exit code 137" in text
    assert "for the limit of 700 MB of the cgroup /" in text
    assert re.search(r"in phase 'cell \d of 5: more = bytearray\(1500 << 20\)'", text)


@pytest.mark.parametrize(
    ("code", "exit_code", "cause"),
    [
        ("import os; os._exit(0)", 1, "The kernel died"),
        (STOPPED_BY_USR1, 75, "An Exception was"),
        (STOPPED_IN_THE_KERNEL, 75, "An Exception was"),
    ],
)
def test_a_notebook_ends_with_the_status_of_kernel_or_run(
    execute: Callable[..., Any], tmp_path: Path, code: str, exit_code: int, cause: str
) -> None:
    with pytest.raises(click.ClickException) as caught:
        execute(code, "print('after')", cwd=tmp_path)
    assert caught.value.exit_code == exit_code
    assert cause in banners(tmp_path)
    assert statuses(tmp_path) == ["failed", "pending"]


READY = "from pathlib import Path; import signal, time\nPath('ready').touch()\n"


def test_sigusr1_waits_for_a_kernel_that_handles_it(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    handler = "got = []\nsignal.signal(signal.SIGUSR1, lambda *_: got.append(1))\n"
    go = "while not Path('go').exists():\n    time.sleep(0.01)\n"
    write_book(tmp_path, READY + go, handler + "while not got:\n    time.sleep(0.01)")

    def act() -> None:
        wait_until(Path("ready").exists, "the notebook's first cell")
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)
        Path("go").touch()

    thread = threading.Thread(target=act)
    thread.start()
    assert command("--execution-timeout", "60").exit_code == 0
    thread.join()


def test_a_signal_ends_the_notebook_and_completes_no_later_cell(tmp_path: Path) -> None:
    write_book(tmp_path, READY + "time.sleep(60)", "print('after')")
    process = subprocess.Popen(argv(), cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE)
    try:
        wait_until((tmp_path / "ready").exists, "the notebook's first cell")
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 143
    finally:
        process.kill()
        process.communicate()
    assert statuses(tmp_path) == ["failed", "pending"]
    assert "ended by SIGTERM" in banners(tmp_path)
