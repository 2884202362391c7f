"""Cell magics of `%load_ext ogbnlib`: `%%memory` records a cell, `%%memory_limit 4GB` runs it in a
child process under that limit.

Kernel and child exchange variables as pickles, in a temporary folder of mode 700 that is deleted
after the cell.
"""

import ast
import contextlib
import io
import os
import pickle
import re
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from .. import marks
from ..errors import InputError, clear_errors, format_bytes, shortened
from ..runs.names import next_run_dir

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from ..runs.folder import Run

_STATEMENT_LETTERS = 32  # most letters in the name of a statement's phase


class CellFailed(RuntimeError):
    """Error for a limited cell that raised an exception or ended before it returned results."""


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Register the magics; IPython calls this for `%load_ext ogbnlib`."""
    if _as_line_magic not in shell.input_transformers_cleanup:  # else it is %reload_ext
        magics = _Magics(shell)
        shell.register_magic_function(magics.memory, "line_cell", "memory")
        shell.register_magic_function(magics.memory_limit, "cell", "memory_limit")
        shell.input_transformers_cleanup.append(_as_line_magic)
        shell.events.register("post_run_cell", magics.end_memory)


def _as_line_magic(lines: list[str]) -> list[str]:
    """Turn `%%memory` into a line magic, so that `await`, `_` and tracebacks work as elsewhere."""
    if not lines[1:] or lines[0].split()[:1] != ["%%memory"]:
        return lines
    from IPython.core.inputtransformer2 import cell_magic

    # `cell_magic` transforms the lines below as IPython would a cell that begins with them
    return [lines[0].replace("%%", "%", 1), *cell_magic(lines[1:])]


class _Magics:
    """The magics `%%memory` and `%%memory_limit` of one shell."""

    def __init__(self, shell: "InteractiveShell"):
        self._shell = shell
        self._recording = contextlib.ExitStack()  # the open `_recorded` block, if any
        self._recorded_cell: ExecutionResult | None = None  # the cell with `%%memory`

    def memory(self, line: str, cell: str | None = None) -> None:
        """%%memory

        Run the cell as usual, then show its memory over time, sampled every 20 ms, and its peak.
        Child processes are included; each page is counted once. Use `with ogbnlib.phase("load"):`
        in the cell to name moments.
        """
        if cell is not None:  # by `run_cell_magic`; `_as_line_magic` makes it `%memory` in its cell
            self._shell.run_cell(f"%%memory\n{cell}")
            return
        # This call is the first statement of the cell to record; `end_memory` follows its last one.
        self._recording.close()
        self._recorded_cell = self._shell.displayhook.exec_result
        self._recording.enter_context(self._recorded())

    def end_memory(self, result: "ExecutionResult | None") -> None:
        """Stop recording. The shell calls this at the end of each cell, also at the end of a cell
        inside another one."""
        if result is None or self._recorded_cell in (None, result):  # no result: cancelled
            self._recording.close()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:  # prints and draws the block's memory at its end
        from ..memory.reading import own_memory
        from ..memory.recorder import Recorder
        from ..memory.tree import Tree
        from ..runs.folder import Run

        with tempfile.TemporaryDirectory(prefix="ogbnlib-cell-") as folder:
            recorder = Recorder(folder)
            begin_s = time.monotonic()
            start_bytes = own_memory()[0]  # anonymous + shared memory of this process
            recorder.log.mark("start")
            recorder.start(Tree(os.getpid()), interval_s=0.02)
            try:
                with marks.attached(folder), marks.phase("cell"):
                    yield
                took_s = time.monotonic() - begin_s
                left_bytes = own_memory()[0] - start_bytes  # below 0, if the cell freed memory
            finally:
                recorder.stop()
            peak = max(recorder.record.held_peak_bytes or 0, start_bytes)
            outcome = "left behind" if left_bytes >= 0 else "given back"
            print(
                f"memory: {took_s:.1f} s, peak {format_bytes(peak)}, {format_bytes(peak - start_bytes)} "
                f"above the start; {format_bytes(abs(left_bytes))} {outcome}",
                flush=True,
            )
            self._draw(Run(folder), "memory")

    @clear_errors()
    def memory_limit(self, line: str, cell: str) -> None:
        """%%memory_limit 4GB [--in a,b] [--out c] [--run runs/name]

        Run the cell in a child process under a memory limit. The kernel survives when the child is
        killed.

        The child gets copies of the variables after --in, and no others. Copies of the variables
        after --out come back to the notebook. Text appears as it comes, pictures and tables below
        it at the end. If the limit kills the child, the cause is shown; the cell fails only if
        --out is given. Each statement of the cell is a phase of the record. With --run, the record
        stays in a new folder, and the variable `name` is its `Run`.
        """
        from IPython.core.magic_arguments import MagicArgumentParser
        from IPython.display import display

        from ..runs.sandbox import watch

        parser = MagicArgumentParser(prog="%%memory_limit")
        parser.add_argument("limit", nargs="+")  # "4 GB" is two words
        parser.add_argument("--in", dest="inputs", nargs="+", default=[])
        parser.add_argument("--out", dest="outputs", nargs="+", default=[])
        parser.add_argument("--run")
        options = parser.parse_argstring(line)
        outputs = _split(options.outputs)
        with tempfile.TemporaryDirectory(prefix="ogbnlib-cell-") as path:
            folder = Path(path)
            self._write_job(folder, cell, _split(options.inputs), outputs)
            argv = [sys.executable, "-m", __name__, str(folder)]  # `_main` below
            limit = " ".join(options.limit).strip("'\"")
            own_dir = Path(options.run) if options.run else folder / "memory_limit"
            run_dir = next_run_dir(own_dir.parent, own_dir.name)  # with a number, if it exists
            try:
                done = watch(argv, limit, run_dir=run_dir)
            except KeyboardInterrupt:
                raise shortened(
                    KeyboardInterrupt("the limited cell was interrupted; its process has ended")
                ) from None
            with (
                open(folder / "displays", "rb") as file,  # a pickle for each display
                contextlib.suppress(EOFError, pickle.UnpicklingError),  # the latter after a kill
            ):
                while True:
                    data, metadata, shown = pickle.load(file)
                    self._shell.display_pub.publish(data, metadata, **shown)
            if (folder / "error").exists():  # an exception in the child, not a kill
                error, lines = pickle.loads((folder / "error").read_bytes())
                raise shortened(CellFailed(error), lines)
            if done.exit_code == 0:
                print(f"memory_limit: {done.diagnosis}", flush=True)
            else:
                display(done.diagnosis)
            self._draw(done, f"{own_dir.name}: {done.state}")
            if options.run:
                self._shell.user_ns[own_dir.name] = done
            self._set_outputs(done, folder, outputs)

    def _set_outputs(self, done: "Run", folder: Path, outputs: list[str]) -> None:
        # Copy the variables after --out into the notebook. The child writes their files last.
        files = {name: folder / f"--out-{name}.pickle" for name in outputs}
        if done.exit_code == 0 and all(file.exists() for file in files.values()):
            for name, file in files.items():
                self._shell.user_ns[name] = pickle.loads(file.read_bytes())
        elif outputs:
            end = done.state if done.exit_code else "by exit code 0, as by os._exit(0)"
            problem = f"not set, as the cell's process ended: {end}"
            raise shortened(CellFailed(f"--out {', '.join(outputs)}: {problem}"))

    def _write_job(self, folder: Path, cell: str, inputs: list[str], outputs: list[str]) -> None:
        # Write what `_main` reads: the variables after --in, and the job.
        for name in inputs:
            _dump(folder, "--in", name, self._shell.user_ns)
        job = {
            "cell": cell,
            "in": inputs,
            "out": outputs,
            "path": [path or os.getcwd() for path in sys.path],  # "" is the working folder
            "number": self._shell.execution_count - 1,  # of this cell, which IPython has counted
            "colors": self._shell.colors,
        }
        (folder / "job").write_bytes(pickle.dumps(job))
        (folder / "displays").touch()

    def _draw(self, run: "Run", title: str) -> None:
        if not hasattr(self._shell, "kernel") or not len(run.samples):  # no notebook: a terminal
            return
        from IPython.display import Image, display
        from matplotlib.figure import Figure

        from .plots import plot_timeline

        # not a pyplot figure, because pyplot's figures belong to the cell
        figure = Figure(figsize=(9, 3.4), layout="constrained", frameon=False)
        plot_timeline(run, figure.subplots(), title=title)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=90)
        display(Image(picture.getvalue()))


def _split(words: list[str]) -> list[str]:  # the names in "a,b", "a, b" or "a b"
    return re.findall(r"[^\s,]+", " ".join(words))


def _dump(folder: Path, option: str, name: str, variables: dict[str, object]) -> None:
    # Pickle the variable that `option`, --in or --out, names to a file for the other process.
    if name not in variables:
        owner = "notebook" if option == "--in" else "cell"
        raise InputError(
            f"{option} {name}: expected a variable of the {owner}, found none of this name"
        )
    try:
        with open(folder / f"{option}-{name}.pickle", "wb") as file:
            cloudpickle.dump(variables[name], file)
    except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        kind = type(variables[name]).__name__
        problem = f"expected an object that cloudpickle can copy, found a {kind}"
        raise InputError(f"{option} {name}: {problem} ({error})") from None


def _make_shell(folder: Path, job: dict[str, Any]) -> "InteractiveShell":
    """Create the child's shell. It appends displays to a file and stores the lines of a traceback
    in `error_lines`."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Publisher(DisplayPublisher):  # type: ignore[misc]
        def publish(self, data: dict[str, Any], metadata: Any = None, **options: Any) -> None:
            # `data` maps MIME types to contents. Widgets exist only in the child, so the kernel
            # can't show them.
            shown = {kind: value for kind, value in data.items() if "jupyter.widget" not in kind}
            with open(folder / "displays", "ab") as file:
                pickle.dump((shown, metadata, options), file)

        def clear_output(self, wait: bool = False) -> None:
            pass  # the notebook has shown the earlier text already

    class Hook(DisplayHook):  # type: ignore[misc]  # for the value of the cell's last line
        def write_output_prompt(self) -> None:
            pass  # "Out[1]:" would be text between the cell's own

        def write_format_data(self, format_dict: dict[str, object], md: object = None) -> None:
            self.shell.display_pub.publish(format_dict, md)

    class Shell(InteractiveShell):  # type: ignore[misc]
        display_pub_class = Publisher
        displayhook_class = Hook
        error_lines: tuple[str, ...] = ()
        # no windows, no prompt to leave, and the kernel shows errors
        enable_gui = ask_exit = show_usage_error = lambda *_: None

        def _showtraceback(self, etype: object, evalue: object, stb: list[str]) -> None:
            self.error_lines = tuple(stb)  # the kernel shows them, see `_main`

    module = types.ModuleType("__main__")  # workers and pickles look up the cell's definitions here
    config = Config({"HistoryManager": {"enabled": False}})
    shell = Shell.instance(config=config, user_module=module, colors=job["colors"])
    shell.execution_count = job["number"]
    load_ipython_extension(shell)  # the cell may use %%memory
    return shell


class _StatementPhases(ast.NodeTransformer):
    """Transformer of a cell's code that makes each statement a phase, such as "line 2: x = f()"."""

    def __init__(self, shell: "InteractiveShell") -> None:
        self.phase = contextlib.ExitStack()  # the phase of the statement that runs
        shell.user_ns["_begin_statement"] = self._begin
        shell.ast_transformers.append(self)

    def _begin(self, name: str) -> None:  # called by the cell before each statement
        self.phase.close()
        self.phase.enter_context(marks.phase(name))

    def visit_Module(self, tree: ast.Module) -> ast.Module:  # puts `_begin` before each statement
        body: list[ast.stmt] = []
        for statement in tree.body:
            first = ast.unparse(statement).splitlines()[0].removesuffix(":")
            if len(first) > _STATEMENT_LETTERS:
                # cut between words: not between two letters
                first = re.sub(rf"^(.{{1,{_STATEMENT_LETTERS}}})(?!(?<=\w)\w).*", r"\1…", first)
            name = f"line {statement.lineno}: {first}"
            begin = ast.parse(f"_begin_statement({name!r})").body[0]
            # errors in both are those of the statement's line
            body += [ast.copy_location(begin, statement), statement]
        tree.body = body
        return ast.fix_missing_locations(tree)


def _main(folder: Path) -> int:  # runs the job of `_write_job` in the child process
    job = pickle.loads((folder / "job").read_bytes())
    sys.path[:] = job["path"]
    os.environ.setdefault("MPLBACKEND", "agg")  # a Jupyter kernel has set its own
    # a read from the kernel's own input would wait for ever
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    shell = _make_shell(folder, job)
    lines: list[str] = []  # of the traceback of an error in the cell
    try:
        for name in job["in"]:
            with marks.phase(f"unpickle {name}"):
                shell.user_ns[name] = pickle.loads((folder / f"--in-{name}.pickle").read_bytes())
        with marks.phase("cell"), _StatementPhases(shell).phase:
            done = shell.run_cell(job["cell"])
            error = done.error_before_exec or done.error_in_exec
            if error:
                lines = [*shell.error_lines]
                if isinstance(error, NameError):
                    lines.append(
                        "a limited cell has only the variables of the notebook that --in names"
                    )
                raise error  # here, so that its line is recorded as the phase that failed
        for name in job["out"]:
            with marks.phase(f"pickle {name}"):
                _dump(folder, "--out", name, shell.user_ns)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"  # `memory_limit` raises it in the kernel
        (folder / "error").write_bytes(pickle.dumps((text, lines or [text])))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
