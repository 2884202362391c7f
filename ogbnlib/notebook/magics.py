"""`%load_ext ogbnlib`: `%%memory` records a cell, `%%memory_limit 4GB` runs it in a child that may die for the kernel.

A limited cell's variables go between kernel and child as pickles. Nobody else writes into their folder: it is made for
the cell, for this user alone (mode 700), and goes with it.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import Any

import cloudpickle

from .. import marks
from ..errors import InputError, clear_errors, format_bytes, shortened

_JOB, _ERROR = "job.json", "error.json"


class CellFailed(RuntimeError):
    """A cell that can't be read, that raised an exception in its child, or did not live to give its results back."""


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext ogbnlib` calls."""
    magics = Magics(shell)
    shell.register_magic_function(magics.memory, "cell", "memory")
    shell.register_magic_function(magics.memory_limit, "cell", "memory_limit")


class Magics:
    """Cell magics of one shell."""

    def __init__(self, shell: Any):
        self._shell = shell

    def memory(self, line: str, cell: str) -> None:
        """%%memory

        Run the cell as ever, and show its memory over time, sampled every 20 ms: peak, and what it left behind.
        Processes that it starts count, each page once. Inside, `with ogbnlib.phase("load"):` names moments.
        """
        from ..memory.reading import own_memory
        from ..memory.recorder import Recorder
        from ..runs.folder import Run

        if line.strip():
            raise shortened(InputError(f"%%memory: expected nothing behind it, got {line.strip()!r}"))
        with tempfile.TemporaryDirectory(prefix="ogbnlib-cell-") as folder:
            recorder, begin_s, before = Recorder(folder), time.monotonic(), own_memory()[0]
            recorder.log.mark("start")
            recorder.start(os.getpid(), interval_s=0.02)
            try:
                with marks.attached(folder), marks.phase("cell"):
                    error = self._run(cell)
                took_s, left = time.monotonic() - begin_s, own_memory()[0] - before
            finally:
                recorder.stop()
            peak = max(recorder.tally.held_peak_bytes or 0, before)
            text = f"{took_s:.1f} s, peak {format_bytes(peak)}, {format_bytes(peak - before)} above the start; "
            text += f"{format_bytes(left)} left behind" if left >= 0 else f"{format_bytes(-left)} given back"
            self._show(Run(folder), f"memory: {text}")
        if error is not None:
            raise error

    def memory_limit(self, line: str, cell: str) -> None:
        """%%memory_limit 4GB [--in a,b] [--out c] [--limit-by watchdog]

        Run the cell in a child process under a memory limit. The kernel survives whatever happens to it.

        The child knows the variables named with --in, and nothing else of the notebook; those named with --out come
        back. Both are copied, through cloudpickle and a temporary file. The cell is plain Python, without % and !; what
        it prints appears as it comes, and its last expression is printed. A kill is shown with its cause; the cell
        fails with it only where it owed something to --out.
        """
        asked = _arguments(line)
        try:
            given, wanted = (_names(" ".join(names)) for names in (asked.given, asked.wanted))
            self._limited(cell, " ".join(asked.limit).strip("'\""), asked.limit_by.strip("'\""), given, wanted)
        except (InputError, KeyboardInterrupt) as error:
            raise shortened(error) from None

    @clear_errors()
    def _limited(self, cell: str, limit: str, limit_by: str, given: list[str], wanted: list[str]) -> None:
        from ..runs.sandbox import watch

        with tempfile.TemporaryDirectory(prefix="ogbnlib-cell-") as name:
            folder = Path(name)
            self._hand_over(folder, cell, given, wanted)
            done = watch(
                [sys.executable, "-m", __name__, name], limit, run_dir=folder / "memory_limit", limit_by=limit_by
            )
            told = folder / _ERROR
            failed = json.loads(told.read_text()) if told.exists() else None
            if failed:
                raise shortened(CellFailed(failed["error"]), failed["lines"])
            self._show(done, f"memory_limit: {done.diagnosis}")
            if done.exit_code == 0:
                self._shell.user_ns.update({name: _load(folder, name, "--out") for name in wanted})
            elif wanted:
                names = ", ".join(wanted)
                raise shortened(CellFailed(f"--out {names}: not set, as the cell's process ended: {done.state}"))

    def _hand_over(self, folder: Path, cell: str, given: list[str], wanted: list[str]) -> None:
        for name in given:
            if name not in self._shell.user_ns:
                raise InputError(f"--in {name}: expected a variable of the notebook, found none of this name")
            _dump(folder, name, self._shell.user_ns[name], "--in")
        job = {"cell": cell, "in": given, "out": wanted, "path": [path or os.getcwd() for path in sys.path]}
        (folder / _JOB).write_text(json.dumps(job))

    def _run(self, cell: str) -> BaseException | None:
        """Run a cell in the shell; the error that it raised, which shows itself as the shell would have shown it."""
        told: list[list[str]] = []
        shell = self._shell
        shell._showtraceback = lambda kind, value, lines: told.append(lines)
        shell.show_usage_error = lambda error: None
        try:
            result = shell.run_cell(cell, store_history=False)
        finally:
            del shell._showtraceback, shell.show_usage_error
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        if isinstance(error, SyntaxError):  # IPython has a way of its own to show one, and does not ask it
            error = CellFailed(f"{type(error).__name__}: {error}")
        return shortened(error, told[-1]) if error is not None and told else error

    def _show(self, run: Any, text: str) -> None:
        """The sentence, and in a notebook the picture."""
        print(text, flush=True)
        if not hasattr(self._shell, "kernel") or not len(run.samples):
            return
        import matplotlib.pyplot as plt
        from IPython.display import Image, display

        from .plots import plot_timeline

        figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
        plot_timeline(run, ax, title=text.split(":")[0] if run.exit_code is None else f"memory_limit: {run.state}")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=90)
        plt.close(figure)
        display(Image(picture.getvalue()))


def _arguments(line: str) -> Any:
    from IPython.core.magic_arguments import MagicArgumentParser

    parser = MagicArgumentParser(prog="%%memory_limit")
    parser.add_argument("limit", nargs="+")
    parser.add_argument("--in", dest="given", nargs="+", default=[])
    parser.add_argument("--out", dest="wanted", nargs="+", default=[])
    parser.add_argument("--limit-by", default="auto")
    return parser.parse_argstring(line)


def _names(text: str) -> list[str]:
    names = [name for name in re.split(r"[\s,]+", text) if name]
    for name in names:
        if not name.isidentifier():
            raise InputError(f"%%memory_limit: expected names of variables after --in and --out, got {name!r}")
    return names


# Between kernel and child ---------------------------------------------------------------------------------------------


def _dump(folder: Path, name: str, value: Any, option: str) -> None:
    with open(folder / f"{name}.pickle", "wb") as file:
        try:
            cloudpickle.dump(value, file)
        except OSError:
            raise
        except Exception as error:
            raise InputError(
                f"{option} {name}: expected what cloudpickle can copy to another process, found a "
                f"{type(value).__name__} ({error}); make it there instead"
            ) from None


def _load(folder: Path, name: str, option: str) -> Any:
    with open(folder / f"{name}.pickle", "rb") as file:
        try:
            return pickle.load(file)
        except Exception as error:
            raise InputError(
                f"{option} {name}: it can't be read back here ({type(error).__name__}: {error}); what it is made of "
                "must be importable in both processes"
            ) from None


def _execute(cell: str, namespace: dict[str, Any]) -> None:
    """Run a cell, and print its last expression as a prompt would."""
    tree = ast.parse(cell, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
        if value is not None:
            print(repr(value))


def _explain(error: BaseException, cell: str) -> dict[str, Any]:
    """An error in the cell's own lines."""
    source = cell.splitlines()
    found = traceback.TracebackException.from_exception(error)
    numbers = [frame.lineno or 1 for frame in found.stack if frame.filename == "<cell>"]
    lines = [f"line {number}: {source[number - 1].strip()}" for number in numbers]
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, NameError) and error.name:
        said += f"; where it is a variable of the notebook, hand it over with --in {error.name}"
    if isinstance(error, SyntaxError):
        said += "; a limited cell is plain Python, without % and ! lines"
    return {"error": said, "lines": [*lines, said]}


def main(folder: Path) -> int:
    """The child: take over, run the cell, hand back."""
    job = json.loads((folder / _JOB).read_text())
    sys.path[:] = job["path"]
    os.environ["MPLBACKEND"] = "agg"  # the kernel's own shows pictures in a notebook, which this process has not
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # of which workers and pickles find the cell's
    namespace = vars(module)
    try:
        with marks.phase(f"take over {', '.join(job['in'])}" if job["in"] else "start"):
            namespace |= {name: _load(folder, name, "--in") for name in job["in"]}
        with marks.phase("cell"):
            _execute(job["cell"], namespace)
        with marks.phase(f"hand back {', '.join(job['out'])}"):
            for name in job["out"]:
                if name not in namespace:
                    raise InputError(f"--out {name}: expected a variable of the cell, found none of this name")
                _dump(folder, name, namespace[name], "--out")
    except Exception as error:
        (folder / _ERROR).write_text(json.dumps(_explain(error, job["cell"])))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
