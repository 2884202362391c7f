"""`papermill --engine ogbnlib`: parameters are refused before anything runs, and an ending is shown as it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from click.testing import CliRunner, Result
from conftest import MB, wait_until
from nbformat import NotebookNode, v4
from papermill.cli import papermill as command_line
from papermill.engines import papermill_engines
from papermill.exceptions import PapermillExecutionError

import ogbnlib
from ogbnlib.errors import InputError
from ogbnlib.memory.cgroup import Cgroup
from ogbnlib.memory.limits import Limit
from ogbnlib.notebook.engine import Engine, begin_notebook, check_given
from ogbnlib.notebook.kernel import KernelWatch, NotebookEnded

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
"""
KILL = "import os\nos.kill(os.getpid(), 9)"


def make_book(*cells: str, parameters: str | None = PARAMETERS) -> NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = v4.new_notebook(metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    book.cells = [v4.new_markdown_cell("# A notebook")]
    if parameters is not None:
        book.cells.append(v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    book.cells += [v4.new_code_cell(cell) for cell in cells]
    return book


def write_book(folder: Path, *cells: str, parameters: str | None = PARAMETERS) -> Path:
    nbformat.write(make_book(*cells, parameters=parameters), folder / "in.ipynb")
    return folder / "in.ipynb"


def statuses(path: Path) -> list[str]:
    """How each code cell of an executed notebook ended."""
    book = nbformat.read(path, as_version=4)
    return [cell.metadata.papermill.status for cell in book.cells if cell.cell_type == "code"]


def banners(path: Path) -> str:
    """The cells that say how the notebook ended."""
    book = nbformat.read(path, as_version=4)
    return "\n".join(cell.source for cell in book.cells if "papermill-error-cell-tag" in cell.metadata.get("tags", []))


def refused(values: dict[str, Any], parameters: str | None = PARAMETERS) -> str:
    book = make_book(parameters=parameters)
    book.metadata["papermill"] = NotebookNode(parameters=values)
    with pytest.raises(InputError) as caught:
        check_given(book)
    return str(caught.value)


@pytest.fixture
def execute(tmp_path: Path) -> Callable[..., Path]:
    """Executes cells in this process; gives the output notebook's path."""
    papermill_engines.register("ogbnlib", Engine)

    def run(*cells: str, **options: Any) -> Path:
        path = write_book(tmp_path, *cells)
        papermill.execute_notebook(path, tmp_path / "out.ipynb", engine_name="ogbnlib", **options)
        return tmp_path / "out.ipynb"

    return run


@pytest.fixture(scope="session")
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which papermill learns of the engine as pyproject.toml says it, however old the installation is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["papermill.engine"].items()]
    folder = tmp_path_factory.mktemp("installed")
    (folder / "ogbnlib_engine-0.dist-info").mkdir()
    (folder / "ogbnlib_engine-0.dist-info" / "METADATA").write_text("Name: ogbnlib-engine\nVersion: 0\n")
    (folder / "ogbnlib_engine-0.dist-info" / "entry_points.txt").write_text("\n".join(["[papermill.engine]", *lines]))
    return folder


@pytest.fixture
def environment(entry_point: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(entry_point), str(ROOT)])}


def argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "papermill", "--engine", "ogbnlib", "in.ipynb", "out.ipynb", *arguments]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """papermill's command line in this process, without its 2 s of imports."""
    papermill_engines.register("ogbnlib", Engine)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(command_line, argv(*arguments)[3:])


@contextmanager
def started(folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """papermill executing a notebook that makes the file `ready`, at the moment it was made."""
    process = subprocess.Popen(argv(), cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((folder / "ready").exists, "the notebook's first cell")
        yield process
    finally:
        process.kill()
        process.communicate()


# Parameters


def test_a_misspelt_name_is_refused_with_2_and_leaves_the_output_as_it_was(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    write_book(tmp_path, "print(epochs)")
    (tmp_path / "out.ipynb").write_text("an earlier result")
    done = command("-p", "epoch", "7")
    assert done.exit_code == 2
    assert "unknown parameter 'epoch': did you mean 'epochs'? known: epochs, fanout, flag" in done.stderr
    assert (tmp_path / "out.ipynb").read_text() == "an earlier result"


@pytest.mark.parametrize(
    ("name", "value", "expected", "instead"),
    [
        ("epochs", "ten", "int", "-y 'epochs: 3'"),
        ("epochs", True, "int", "-y 'epochs: 3'"),
        ("epochs", 2.5, "int", "-y 'epochs: 3'"),
        ("epochs", 1000.0, "int", "-y 'epochs: 1000'"),  # what -p epochs 1e3 becomes
        ("epochs", None, "int", "-y 'epochs: 3'"),
        ("lr", "fast", "float", "-y 'lr: 0.1'"),
        ("lr", True, "float", "-y 'lr: 0.1'"),
        ("flag", "false", "bool", "-y 'flag: false'"),
        ("flag", 1, "bool", "-y 'flag: false'"),
        ("fanout", "[5, 4]", "list", "-y 'fanout: [5, 4]'"),
        ("fanout", "5 4", "list", "-y 'fanout: [5, 4]'"),
        ("fanout", "3x2", "list", "-y 'fanout: [3, 2]'"),
        ("fanout", 5, "list", "-y 'fanout: [3, 2]'"),
        ("hops", 3, "Union[list, str]", '-r hops "3"'),
        ("root", 5, "str", '-r root "5"'),
        ("limit", 8, "str | None", '-r limit "8 GB"'),
        ("sizes", ["a"], "tuple[int, ...]", ""),
        ("plain", "x", "float", "-y 'plain: 2.5'"),
        ("loading", "lasy", "Literal['eager', 'lazy']", "-y 'loading: \"lazy\"'"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_way_to_pass_it(
    name: str, value: object, expected: str, instead: str
) -> None:
    message = refused({name: value})
    assert message.startswith(f"{name}: expected {expected}, found {value!r} ({type(value).__name__})")
    assert instead in message


def test_every_mistake_is_reported_at_once() -> None:
    assert len(refused({"epochs": "ten", "flag": "false", "nothing": 1}).splitlines()) == 3


def test_parameters_are_refused_where_the_notebook_has_no_parameters_cell() -> None:
    assert "expected a notebook with a cell tagged 'parameters', found none" in refused({"epochs": 3}, parameters=None)


def test_a_parameters_cell_that_is_not_python_is_refused() -> None:
    assert "expected plain assignments in Python" in refused({"epochs": 3}, parameters="epochs = = 3")


def test_values_that_fit_reach_the_notebook(command: Callable[..., Result], tmp_path: Path) -> None:
    names = "epochs, lr, flag, fanout, hops, root, limit, list(sizes), plain, other"
    write_book(tmp_path, f"print({names})", parameters=PARAMETERS + "other = 3 * 4")
    given = ["-p", "epochs", "7", "-p", "lr", "1", "-p", "flag", "True", "-y", "fanout: [1]", "-p", "hops", "3 2"]
    given += ["-r", "root", "5", "-p", "limit", "None", "-y", "sizes: [4]", "-p", "plain", "1", "-p", "other", "text"]
    assert command(*given, "--inject-paths").exit_code == 0
    assert nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs[0].text == (
        "7 1 True [1] 3 2 5 None [4] 1 text\n"
    )


def test_an_annotation_that_is_not_a_type_of_pythons_takes_anything() -> None:
    book = make_book(parameters="array: np.ndarray = None")
    book.metadata["papermill"] = NotebookNode(parameters={"array": "x"})
    check_given(book)


# Endings


def test_a_killed_kernel_is_shown_as_killed_and_papermill_exits_with_137(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    write_book(tmp_path, "print('before')", KILL, "print('after')")
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(argv("--cwd", "elsewhere"), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 137
    assert "SIGKILL, cause unknown" in done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(tmp_path / "out.ipynb") == ["completed", "completed", "failed", "pending"]
    book = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(book)
    (cell,) = [cell for cell in book.cells if cell.source == KILL]
    assert cell.metadata.papermill.exception is True
    assert cell.execution_count == 3
    assert cell.outputs[-1].ename == "KernelDied"
    text = banners(tmp_path / "out.ipynb")
    assert "**cause**: SIGKILL, cause unknown" in text
    assert "out of memory" not in text
    assert "**limit**: " in text
    assert "**peak**: " in text
    assert "**phase**: cell 4 of 5, In [3]: `import os`" in text


def test_an_out_of_memory_kill_is_named_by_the_counter_of_its_cgroup(
    tmp_path: Path, environment: dict[str, str], kernel_limit: Callable[[int], Limit]
) -> None:
    write_book(tmp_path, "held = bytearray(80 << 20)", "more = bytearray(1500 << 20)", "print('after')")
    line = kernel_limit(700 * MB).command(argv())  # well above papermill, or it would be the largest and killed
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 137, done.stderr
    assert statuses(tmp_path / "out.ipynb") == ["completed", "completed", "failed", "pending"]
    text = banners(tmp_path / "out.ipynb")
    assert "**cause**: out of memory: killed by the kernel's out-of-memory killer (oom_kill counter of " in text
    assert "**limit**: 700 MB (memory cgroup" in text
    assert "700 MB by its cgroup's own counter" in text
    peak_mb = float(text.partition("**peak**: ")[2].split()[0])
    assert 80 < peak_mb <= 700


def test_the_banner_names_the_phase_of_the_run_that_was_going_on(execute: Callable[..., Path], tmp_path: Path) -> None:
    cell = f"""
from pathlib import Path
from ogbnlib.runs.attempt import Attempt
from ogbnlib.runs.folder import Run
from ogbnlib.memory.recorder import EventLog
for name in ("finished", "going-on"):
    folder = Path({str(tmp_path)!r}) / name
    folder.mkdir()
    attempt = Attempt(Run(folder))
    log = EventLog(folder)
    with log.phase("build valid loader"):
        if name == "going-on":
            import os; os.kill(os.getpid(), 9)
    (folder / "timeline.csv").touch()
    attempt.recorder.stop()
    attempt.end(0)
"""
    with pytest.raises(NotebookEnded):
        execute(cell)
    text = banners(tmp_path / "out.ipynb")
    assert f"in it the run {tmp_path / 'going-on'}." in text
    assert "in phase 'build valid loader'" in text
    assert str(tmp_path / "finished") not in text


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        (3, 4, "out of memory: killed by the kernel's out-of-memory killer (oom_kill counter of /nowhere rose from 3"),
        (3, 3, "SIGKILL, cause unknown (no kill counted in /nowhere)"),
        (None, 4, "SIGKILL, cause unknown (no oom_kill counter can be read here)"),
        (3, None, "SIGKILL, cause unknown (no oom_kill counter can be read here)"),
    ],
)
def test_out_of_memory_is_claimed_where_the_counter_was_read_before_and_after(
    tmp_path: Path, before: int | None, after: int | None, cause: str
) -> None:
    class Counter(Cgroup):
        def oom_kills(self) -> int | None:
            return counts.pop(0)

    counts = [before, after]
    with subprocess.Popen(["sleep", "60"]) as process:
        watch = KernelWatch(process, set(), tmp_path)
        watch.cgroup = Counter(Path("/nowhere"), 2)
        watch.begin_cell()
        process.kill()
        process.wait()
        watch.stop()
    assert watch.cause(137)[0].startswith(cause)


def test_each_executed_cell_knows_the_peak_of_kernel_and_children_in_it(execute: Callable[..., Path]) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; x = bytearray(300 * 2**20); "
    book = nbformat.read(execute("1", child + "time.sleep(2.5)'])", "x = bytearray(100 * 2**20)", "2"), as_version=4)
    peaks = [cell.metadata.ogbnlib.peak_bytes / MB for cell in book.cells if cell.cell_type == "code"]
    assert 10 < peaks[0] < 200  # the parameters
    assert 290 < peaks[2] - peaks[1] < 400
    assert 95 < peaks[3] - peaks[1] < 130
    assert peaks[4] == pytest.approx(peaks[3], abs=5)
    assert not any("ogbnlib" in cell.metadata for cell in book.cells if cell.cell_type != "code")


@pytest.mark.parametrize(
    ("code", "exit_code", "cause"),
    [
        ("import os; os.abort()", 134, "signal 6"),
        ("import os; os._exit(3)", 3, "exit code 3"),
        ("import os; os._exit(0)", 1, "status 0 before the notebook's end"),
    ],
)
def test_a_kernel_that_ended_otherwise_gives_its_own_status(
    execute: Callable[..., Path], tmp_path: Path, code: str, exit_code: int, cause: str
) -> None:
    with pytest.raises(NotebookEnded) as caught:
        execute(code, "print('after')")
    assert caught.value.exit_code == exit_code
    assert cause in banners(tmp_path / "out.ipynb")
    assert statuses(tmp_path / "out.ipynb") == ["completed", "failed", "pending"]


def test_a_kernel_that_never_starts_completes_no_cell(
    execute: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "kernels" / "broken"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        '{"argv": ["sh", "-c", "exit 9"], "display_name": "broken", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with pytest.raises(NotebookEnded) as caught:
        execute("print('never')", kernel_name="broken")
    assert caught.value.exit_code == 9
    assert statuses(tmp_path / "out.ipynb") == ["failed", "pending"]
    assert "**phase**: before the first cell" in banners(tmp_path / "out.ipynb")


@pytest.mark.parametrize(("child", "exit_code"), [("exit(75)", 75), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_a_cell_that_needs_a_finished_run_ends_papermill_with_the_runs_code(
    execute: Callable[..., Path], tmp_path: Path, child: str, exit_code: int
) -> None:
    cell = f"from ogbnlib.runs.sandbox import watch\nwatch(['-c', {child!r}], name='a').require_finished()"
    with pytest.raises(NotebookEnded, match=f"RunEnded: {exit_code}: Exit code {exit_code}") as caught:
        execute(cell, "print('after')", cwd=tmp_path)
    assert caught.value.exit_code == exit_code
    assert isinstance(caught.value, PapermillExecutionError)
    assert statuses(tmp_path / "out.ipynb") == ["completed", "failed", "pending"]
    assert "An Exception was encountered" in banners(tmp_path / "out.ipynb")


def test_an_exception_in_a_cell_ends_as_papermill_has_it(command: Callable[..., Result], tmp_path: Path) -> None:
    write_book(tmp_path, "1 / 0", "print('after')")
    done = command()
    assert done.exit_code == 1
    assert "ZeroDivisionError: division by zero" in str(done.exception)
    assert statuses(tmp_path / "out.ipynb") == ["completed", "failed", "pending"]


def test_a_cell_that_takes_too_long_is_marked_failed(execute: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(PapermillExecutionError, match="CellTimeoutError"):
        execute("import time; time.sleep(60)", "print('after')", execution_timeout=5)
    assert statuses(tmp_path / "out.ipynb") == ["completed", "failed", "pending"]


def test_a_second_execution_leaves_no_banner(execute: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(NotebookEnded):
        execute(f"from pathlib import Path\nif not Path({str(tmp_path / 'again')!r}).exists():\n    exec({KILL!r})")
    (tmp_path / "again").touch()
    path = tmp_path / "out.ipynb"
    assert "The kernel died" in banners(path)
    papermill.execute_notebook(path, path, engine_name="ogbnlib")
    assert banners(path) == ""
    assert statuses(path) == ["completed", "completed"]


# While it runs


def test_the_output_is_saved_after_every_cell(execute: Callable[..., Path], tmp_path: Path) -> None:
    cells = f"json.load(open({str(tmp_path / 'out.ipynb')!r}))['cells']"
    path = execute("import json", f"print([c['metadata']['papermill']['status'] for c in {cells}])", "print('after')")
    book = nbformat.read(path, as_version=4)
    assert book.cells[3].outputs[0].text == "['completed', 'completed', 'completed', 'running', 'pending']\n"


def test_a_headless_log_has_one_line_for_each_code_cell(
    command: Callable[..., Result], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_book(tmp_path, "\nx = 1\ny = 2", "z = 3")
    with caplog.at_level("INFO"):
        done = command()
    assert [line for line in caplog.messages if line.startswith("cell ")] == [
        "cell 2 of 4: epochs: int = 3",
        "cell 3 of 4: x = 1",
        "cell 4 of 4: z = 3",
    ]
    assert "Executing:" not in done.stderr  # papermill's own bar


def test_a_progress_bar_in_a_cell_floods_neither_notebook_nor_log(
    command: Callable[..., Result], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bar = "import sys, time\nprint('a line', file=sys.stderr)\n"
    bar += "for i in range(40):\n    print(f'\\rstep {i}', end='', file=sys.stderr, flush=True)\n    time.sleep(0.05)\n"
    write_book(tmp_path, bar + "print('\\nanother line', file=sys.stderr)")
    with caplog.at_level("INFO"):
        assert command("--log-output").exit_code == 0
    log = "\n".join(caplog.messages)
    assert len([line for line in log.splitlines() if line.startswith("step")]) <= 3
    assert "step 39\nanother line" in log
    book = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    assert [output.text for output in book.cells[2].outputs] == ["a line\nstep 39\nanother line\n"]


# Signals

READY = "from pathlib import Path; import signal, time\nPath('ready').touch()\n"


@contextmanager
def beside(act: Callable[[], object]) -> Iterator[None]:
    """`act` in another thread, once a cell of the notebook that is executed in this one has made the file `ready`."""

    def wait_and_act() -> None:
        wait_until(Path("ready").exists, "the notebook's first cell")
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_reaches_the_handler_in_the_kernel_and_the_notebook_goes_on(
    command: Callable[..., Result], tmp_path: Path, number: signal.Signals
) -> None:
    handler = f"got = []\nsignal.signal({int(number)}, lambda *_: got.append(1))\n"
    wait = "while not got:\n    time.sleep(0.01)"
    write_book(tmp_path, "import signal\n" + handler + READY + wait, "print('after')")
    before = signal.getsignal(number)
    with beside(lambda: os.kill(os.getpid(), number)):
        assert command("--execution-timeout", "60").exit_code == 0
    assert statuses(tmp_path / "out.ipynb") == ["completed"] * 3
    assert signal.getsignal(number) == before


def test_sigusr1_waits_for_a_kernel_that_catches_it(
    command: Callable[..., Result], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = "got = []\nsignal.signal(signal.SIGUSR1, lambda *_: got.append(1))\n"
    go = "while not Path('go').exists():\n    time.sleep(0.01)\n"
    write_book(tmp_path, READY + go, handler + "while not got:\n    time.sleep(0.01)")

    def act() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: "SIGUSR1 received and kept" in caplog.text, "the engine's word")
        Path("go").touch()

    with beside(act):
        assert command("--execution-timeout", "60").exit_code == 0


@pytest.mark.parametrize(
    ("number", "exit_code", "said"), [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 1, "")]
)
def test_a_signal_ends_the_notebook_and_completes_no_later_cell(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals, exit_code: int, said: str
) -> None:
    write_book(tmp_path, READY + "time.sleep(60)", "print('after')")
    with started(tmp_path, environment) as process:
        process.send_signal(number)
        assert process.wait(30) == exit_code
    assert statuses(tmp_path / "out.ipynb") == ["completed", "failed", "pending"]
    assert not said or said in banners(tmp_path / "out.ipynb")


# The whole


def test_the_engine_can_be_imported_before_papermill_and_does_not_import_it(environment: dict[str, str]) -> None:
    code = "import ogbnlib.notebook.engine, sys; assert 'papermill' not in sys.modules; import ogbnlib.notebook.kernel"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"epoch": 64}, "did you mean 'epochs'"), ({"fanout": "3 2"}, "-y 'fanout: [3, 2]'")],
)
def test_a_notebook_checks_what_papermills_own_engine_lets_through(tmp_path: Path, given: Any, said: str) -> None:
    path = write_book(tmp_path, "from ogbnlib import begin_notebook\n\nbegin_notebook()", "print('went on')")
    papermill.execute_notebook(path, tmp_path / "fine.ipynb", parameters={"epochs": 64})
    with pytest.raises(PapermillExecutionError, match=re.escape(said)):
        papermill.execute_notebook(path, tmp_path / "out.ipynb", parameters=given)
    assert statuses(tmp_path / "out.ipynb")[-1] == "pending"


def test_every_way_to_run_a_notebook_has_one_working_folder_and_names_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_quickstart.ipynb").touch()
    (tmp_path / "mine").mkdir()
    for start in (tmp_path / "notebooks", tmp_path / "mine"):  # as JupyterLab starts a kernel
        monkeypatch.chdir(start)
        begin_notebook()
        assert Path.cwd() == tmp_path
        said = capsys.readouterr().out
        assert said.startswith(f"ogbnlib {ogbnlib.__version__}, torch ")
        assert said.endswith(f"working in {tmp_path}: relative paths such as data and runs lie there\n")
    begin_notebook()  # as papermill does, or the cell again
    assert Path.cwd() == tmp_path
    said = capsys.readouterr().out
    assert "working in" not in said
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere" / "deep")
    begin_notebook()
    assert f"working in {tmp_path}/elsewhere/deep: relative paths" in capsys.readouterr().out
    assert re.search(r"torch 2\.\d+.*, Python 3\.\d+\.\d+\n.*, \d+ cores, .* GB of memory, ", said)
