"""`%load_ext ogbnlib`: `%%memory` records a cell, `%%memory_limit 4GB` runs it in a child that may die for the kernel.

A limited cell's variables go between kernel and child as pickles. Nobody else writes into their folder: it is made for
the cell, for this user alone (mode 700), and goes with it.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import itertools
import json
import os
import pickle
import re
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from .. import marks
from ..errors import InputError, clear_errors, format_bytes, shortened

_JOB, _ERROR = "job.json", "error.json"
# Where in the child's output a picture belongs: a line with its number, of a kind that terminals do not show.
_SHOWN = re.compile("\x1b_ogbnlib (\\d+)\n")
_SHOWN_IN_PART = re.compile("\x1b(_[a-z]*( \\d*)?)?\\Z")
_PRINTED = "the end of output.log", "what it printed above"  # the folder goes with the cell
_HINTS: dict[type, str] = {
    NameError: "a limited cell knows no variable of the notebook but those of --in",
    EOFError: "a limited cell has no keyboard: ask in another one, and hand the answer over with --in",
}


class CellFailed(RuntimeError):
    """A cell that can't be read, that raised an exception in its child, or did not live to give its results back."""


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext ogbnlib` calls."""
    if _as_line not in shell.input_transformers_cleanup:  # else it is %reload_ext
        magics = Magics(shell)
        shell.register_magic_function(magics.memory, "line_cell", "memory")
        shell.register_magic_function(magics.memory_limit, "cell", "memory_limit")
        shell.input_transformers_cleanup.append(_as_line)
        shell.events.register("post_run_cell", magics.end_memory)


def _as_line(lines: list[str]) -> list[str]:
    """`%%memory` becomes a line of its cell, which the shell then runs as any other: `await`, `_` and tracebacks."""
    if not lines[1:] or lines[0].split()[:1] != ["%%memory"]:
        return lines
    from IPython.core.inputtransformer2 import cell_magic

    return [lines[0].replace("%%", "%", 1), *cell_magic(lines[1:])]


class Magics:
    """Magics of one shell."""

    def __init__(self, shell: Any):
        self._shell = shell
        self._recording = contextlib.ExitStack()
        self._result: Any = None  # of the cell that is recorded

    def memory(self, line: str, cell: str | None = None) -> None:
        """%%memory

        Run the cell as ever, and show its memory over time, sampled every 20 ms: peak, and what it left behind.
        Processes that it starts count, each page once. Inside, `with ogbnlib.phase("load"):` names moments.
        """
        if line.strip():
            raise InputError(f"%%memory: expected nothing behind it, got {line.strip()!r}")
        if cell is not None:
            self._shell.run_cell(f"%%memory\n{cell}")
            return
        self._recording.close()
        self._result = self._shell.displayhook.exec_result
        self._recording.enter_context(self._recorded())

    def end_memory(self, result: Any) -> None:
        """What the shell calls at the end of each cell, of those inside another one too."""
        if result is None or self._result in (None, result):
            self._recording.close()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        from ..memory.reading import own_memory
        from ..memory.recorder import Recorder
        from ..runs.folder import Run

        with tempfile.TemporaryDirectory(prefix="ogbnlib-cell-") as folder:
            recorder, begin_s, before = Recorder(folder), time.monotonic(), own_memory()[0]
            recorder.log.mark("start")
            recorder.start(os.getpid(), interval_s=0.02)
            try:
                with marks.attached(folder), marks.phase("cell"):
                    yield
                took_s, left = time.monotonic() - begin_s, own_memory()[0] - before
            finally:
                recorder.stop()
            peak = max(recorder.tally.held_peak_bytes or 0, before)
            text = f"{took_s:.1f} s, peak {format_bytes(peak)}, {format_bytes(peak - before)} above the start; "
            text += f"{format_bytes(left)} left behind" if left >= 0 else f"{format_bytes(-left)} given back"
            print(f"memory: {text}", flush=True)
            self._draw(Run(folder), "memory")

    def memory_limit(self, line: str, cell: str) -> None:
        """%%memory_limit 4GB [--in a,b] [--out c] [--limit-by watchdog]

        Run the cell in a child process under a memory limit. The kernel survives whatever happens to it.

        The child knows the variables named with --in, and nothing else of the notebook; those named with --out come
        back. Both are copied, through cloudpickle and a temporary file. What the cell prints and shows appears as it
        comes. A kill is shown with its cause; the cell fails with it only where it owed something to --out.
        """
        asked = _arguments(line)
        try:
            given, wanted = (_names(" ".join(names)) for names in (asked.given, asked.wanted))
            self._limited(cell, " ".join(asked.limit).strip("'\""), asked.limit_by.strip("'\""), given, wanted)
        except KeyboardInterrupt:
            raise shortened(KeyboardInterrupt("the limited cell was interrupted; its process has ended")) from None

    @clear_errors()
    def _limited(self, cell: str, limit: str, limit_by: str, given: list[str], wanted: list[str]) -> None:
        from IPython.display import display

        from ..runs.sandbox import watch

        with tempfile.TemporaryDirectory(prefix="ogbnlib-cell-") as name:
            folder = Path(name)
            self._hand_over(folder, cell, given, wanted)
            argv = [sys.executable, "-m", __name__, name]
            with contextlib.redirect_stdout(_Shown(folder, sys.stdout, self._shell.display_pub)) as shown:
                done = watch(argv, limit, run_dir=folder / "memory_limit", limit_by=limit_by)
                shown.write("\n" * bool(shown.part))
            told = folder / _ERROR
            failed = json.loads(told.read_text()) if told.exists() else None
            if failed:
                raise shortened(CellFailed(failed["error"]), failed["lines"])
            if done.exit_code == 0:
                print(f"memory_limit: {done.diagnosis}", flush=True)
            else:
                display(dataclasses.replace(done.diagnosis, remedy=done.diagnosis.remedy.replace(*_PRINTED)))
            self._draw(done, f"memory_limit: {done.state}")
            if done.exit_code == 0 and all((folder / f"--out-{name}.pickle").exists() for name in wanted):
                self._shell.user_ns.update({name: _load(folder, name, "--out") for name in wanted})
            elif wanted:
                why = f"the cell's process ended: {done.state}"
                if done.exit_code == 0:
                    why = "the cell ended its process itself, os._exit(0) say, before it handed back what it made"
                raise shortened(CellFailed(f"--out {', '.join(wanted)}: not set, as {why}"))

    def _hand_over(self, folder: Path, cell: str, given: list[str], wanted: list[str]) -> None:
        for name in given:
            if name not in self._shell.user_ns:
                raise InputError(f"--in {name}: expected a variable of the notebook, found none of this name")
            _dump(folder, name, self._shell.user_ns[name], "--in")
        job = {"cell": cell, "in": given, "out": wanted, "path": [path or os.getcwd() for path in sys.path]}
        job |= {"number": self._shell.execution_count - 1, "colors": self._shell.colors}
        (folder / _JOB).write_text(json.dumps(job))

    def _draw(self, run: Any, title: str) -> None:
        """The run's picture, in a notebook."""
        if not hasattr(self._shell, "kernel") or not len(run.samples):
            return
        from IPython.display import Image, display
        from matplotlib.figure import Figure

        from .plots import plot_timeline

        figure = Figure(figsize=(9, 3.4), layout="constrained")  # not pyplot's, whose figures are the cell's own
        plot_timeline(run, figure.subplots(), title=title)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=90)
        display(Image(picture.getvalue()))


class _Shown(io.TextIOBase):
    """The child's output on its way to the notebook, each picture in its place."""

    def __init__(self, folder: Path, stream: Any, publisher: Any):
        self._folder, self._stream, self._publisher, self.part = folder, stream, publisher, ""

    def write(self, text: str) -> int:
        text, self.part = self.part + text, ""
        if cut := _SHOWN_IN_PART.search(text):
            text, self.part = text[: cut.start()], cut[0]
        for i, piece in enumerate(_SHOWN.split(text)):
            if i % 2:
                shown = json.loads((self._folder / f"shown-{piece}").read_text())
                getattr(self._publisher, shown["call"])(*shown["args"], **shown["how"])
            elif piece:
                self._stream.write(piece)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


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
    with open(folder / f"{option}-{name}.pickle", "wb") as file:
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
    with open(folder / f"{option}-{name}.pickle", "rb") as file:
        try:
            return pickle.load(file)
        except Exception as error:
            raise InputError(
                f"{option} {name}: it can't be read back here ({type(error).__name__}: {error}); what it is made of "
                "must be importable in both processes"
            ) from None


def _make_shell(folder: Path, job: dict[str, Any]) -> Any:
    """A shell for the child's cell: what it shows goes to the kernel's notebook, an error's lines to `error_lines`."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    def send(call: str, *args: Any, **how: Any) -> None:
        number = next(numbers)
        text = json.dumps({"call": call, "args": args, "how": how}, default=_as_text)
        (folder / f"shown-{number}").write_text(text)
        sys.stdout.flush()
        os.write(1, f"\x1b_ogbnlib {number}\n".encode())  # not to sys.stdout, which the cell may have redirected

    class Publisher(DisplayPublisher):  # type: ignore[misc]
        def publish(
            self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
        ) -> None:
            data = {kind: value for kind, value in data.items() if "jupyter.widget" not in kind}  # which live there
            send("publish", data, metadata, transient=transient, update=update)

        def clear_output(self, wait: bool = False) -> None:
            send("clear_output", wait)

    class Hook(DisplayHook):  # type: ignore[misc]
        def write_output_prompt(self) -> None:
            pass

        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            send("publish", format_dict, md_dict)

    class Shell(InteractiveShell):  # type: ignore[misc]
        display_pub_class, displayhook_class = Publisher, Hook
        error_lines: tuple[str, ...] = ()

        def enable_gui(self, gui: Any = None) -> None:
            pass

        def ask_exit(self) -> None:
            pass

        def show_usage_error(self, exc: Any) -> None:
            pass

        def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
            self.error_lines = tuple(stb)

    numbers = itertools.count()
    module = types.ModuleType("__main__")  # in which workers and pickles find what the cell defines
    config = Config({"HistoryManager": {"enabled": False}})
    shell = Shell.instance(config=config, user_module=module, colors=job["colors"])
    shell.execution_count = job["number"]
    load_ipython_extension(shell)
    return shell


def _as_text(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def main(folder: Path) -> int:
    """The child: take over, run the cell, hand back."""
    job = json.loads((folder / _JOB).read_text())
    sys.path[:] = job["path"]
    os.environ.setdefault("MPLBACKEND", "agg")  # where no notebook shows pictures
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the kernel's own input never says a word, nor that it won't
    shell = _make_shell(folder, job)
    try:
        for name in job["in"]:
            with marks.phase(f"take over {name}"):
                shell.user_ns[name] = _load(folder, name, "--in")
        with marks.phase("cell"):
            done = shell.run_cell(job["cell"])
        if error := done.error_before_exec or done.error_in_exec:
            return _fail(folder, f"{type(error).__name__}: {error}", shell.error_lines, _HINTS.get(type(error)))
        for name in job["out"]:
            if name not in shell.user_ns:
                raise InputError(f"--out {name}: expected a variable of the cell, found none of this name")
            with marks.phase(f"hand back {name}"):
                _dump(folder, name, shell.user_ns[name], "--out")
    except InputError as error:
        return _fail(folder, f"InputError: {error}")
    return 0


def _fail(folder: Path, error: str, lines: Sequence[str] = (), hint: str | None = None) -> int:
    lines = [*(lines or [error]), *([hint] if hint else [])]
    (folder / _ERROR).write_text(json.dumps({"error": error, "lines": lines}))
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
