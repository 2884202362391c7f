"""A notebook executed by papermill, its kernel watched: what the output notebook and the exit status say is what was.

papermill alone marks every cell "completed" when the kernel dies, and exits with 138 whatever killed it. Here the cell
that ran is marked failed, later ones stay pending, and a banner says cause, limit, peak and phase.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import click
import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine
from papermill.exceptions import PapermillExecutionError
from papermill.execute import ERROR_MARKER_TAG, raise_for_execution_errors
from papermill.log import logger

from ..errors import InputError, format_bytes, is_interactive
from ..memory.cgroup import counting_cgroup, effective_limit
from ..memory.reading import Reading, read_memory
from ..memory.recorder import RUNS_VARIABLE, Recorder
from ..memory.signals import handled
from ..runs.diagnosis import explain_exit_code
from ..runs.folder import Run, RunEnded

BAR_INTERVAL_S = 10.0  # between two states of a progress bar in the log
_OVERWRITTEN = re.compile(r".*\r(?=[^\n])")  # what a carriage return takes back, as nbclient's coalesce_streams has it


class NotebookEnded(click.ClickException, PapermillExecutionError):  # type: ignore[misc]
    """A notebook that did not reach its end, with the exit status that papermill's command line gives for it."""

    def __init__(self, error: PapermillExecutionError, exit_code: int):
        PapermillExecutionError.__init__(self, *error.args)
        self.message, self.exit_code = str(error), exit_code  # type: ignore[misc]  # click sets them so, too

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file=file, err=True)


class KernelDied(DeadKernelError):
    """The kernel process ended by itself. `facts` are cause, limit, peak, phase and what to do next."""

    def __init__(self, facts: dict[str, str], exit_code: int):
        super().__init__(facts["cause"])
        self.facts, self.exit_code = facts, exit_code


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal (SigCgt in /proc/PID/status; signal 1 is the lowest bit)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (signum - 1) & 1)


class KernelWatch:
    """Beside a kernel: records its tree's memory every 0.1 s, and hands it the signals that papermill received.

    SIGUSR1 would end a kernel that does not catch it, so it is kept until a run that catches it is going on. Others are
    always handed on: a kernel that does not catch it ends, and its notebook says so while there is still time to write.
    """

    def __init__(self, process: subprocess.Popen[bytes], pending: set[int], folder: Path):
        self.process, self._pending, self._told = process, pending, False
        self.cgroup = counting_cgroup(process.pid)
        self.begin_cell()
        self._recorder = Recorder(folder).start(process.pid, interval_s=0.1, on_sample=self._hand_on)
        self.stop = self._recorder.stop

    def begin_cell(self) -> None:
        """An out-of-memory kill counted before this moment was not the kernel's, nor a peak the cell's."""
        self._cell_peak = 0
        self._kills_before = self.cgroup.oom_kills() if self.cgroup else None

    def end_cell(self) -> int:
        """The most that kernel and children held in any sample since the cell began, its end among them, in bytes."""
        return max(self._cell_peak, read_memory(self.process.pid, pss=True).held_bytes or 0)

    def _hand_on(self, reading: Reading) -> None:
        self._cell_peak = max(self._cell_peak, reading.held_bytes or 0)
        for signum in sorted(self._pending):
            name = signal.Signals(signum).name
            if signum != signal.SIGUSR1 or catches(self.process.pid, signum):
                self._pending.discard(signum)
                logger.warning(f"{name} received and handed to the kernel")
                self.process.send_signal(signum)
            elif not self._told:
                self._told = True
                logger.warning(f"{name} received and kept until the kernel catches it, as during a training run")

    def exit_code(self) -> int:
        """The ended kernel's exit status, 128 + N after signal N; 1 for a kernel that left with 0 in mid-notebook."""
        status = self.process.wait()
        return 128 - status if status < 0 else status or 1

    def cause(self, code: int) -> tuple[str, str]:
        """What ended the kernel, as far as there is evidence, and what to do next."""
        if self.process.returncode == 0:
            return "left by itself with status 0 before the notebook's end", "look for os._exit in the cell that ran"
        meaning, remedy = explain_exit_code(code)
        if code != 137:
            return meaning, remedy
        before, after = self._kills_before, self.cgroup.oom_kills() if self.cgroup else None
        if self.cgroup is None or before is None or after is None:  # one count alone says nothing about this cell
            known = "no oom_kill counter can be read here"
        elif after > before:
            text = f"out of memory: killed by the kernel's out-of-memory killer (oom_kill counter of {self.cgroup.path}"
            text += f" rose from {before} to {after})"
            return text, "train with run(config, memory_limit=...), whose kill a notebook survives, or ask for more"
        else:
            known = f"no kill counted in {self.cgroup.path}"
        return f"SIGKILL, cause unknown ({known}): {meaning.partition('cause unknown: ')[2]}", remedy

    def peak(self) -> str:
        held = self._recorder.tally.held_peak_bytes
        text = f"{format_bytes(held)} anonymous and shared memory in the kernel and its children (samples)"
        if self.cgroup and self.cgroup.limit_bytes() and (peak := self.cgroup.peak_bytes()):
            text += f"; {format_bytes(peak)} by its cgroup's own counter, page cache and papermill included"
        return text


def _first_line(cell: Any) -> str:
    return next((line.strip() for line in cell.source.splitlines() if line.strip()), "")


class Client(PapermillNotebookClient):  # type: ignore[misc]
    """papermill's client, with a watched kernel."""

    def __init__(self, nb_man: Any, pending: set[int], cell_lines: bool, **options: Any):
        super().__init__(nb_man, **options)
        self._pending, self._cell_lines = pending, cell_lines
        self._watch: KernelWatch | None = None
        self._at: int | None = None  # the code cell that runs, or ran last
        self._ended: BaseException | None = None
        self._last_bar_s = -BAR_INTERVAL_S
        self._bars: dict[str, str] = {}  # by stream, the last state of a bar that the log has not shown

    def execute(self, **options: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="ogbnlib-kernel-") as folder:
            self._runs, self._runs_before = Path(folder) / "runs", 0
            self._runs.touch()
            try:
                return super().execute(**options)
            except BaseException as error:
                raise self._ended or self._note(error) from None  # a client's cleaning up may fail as well
            finally:
                if self._watch is not None:
                    self._watch.stop()

    def start_new_kernel(self, **options: Any) -> None:
        # Without a session name a kernel is not taken for one that a person watches: its bars become lines.
        env = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
        super().start_new_kernel(env={**env, RUNS_VARIABLE: str(self._runs)}, **options)
        provisioner = self.km.provisioner
        process = getattr(provisioner, "process", None)
        if process is None:
            self._cleanup_kernel()
            raise InputError(
                f"kernel {self.kernel_name!r}: expected one that runs as a process on this machine, found one of "
                f"{type(provisioner).__name__}; use it without --engine ogbnlib"
            )
        self._watch = KernelWatch(process, self._pending, self._runs.parent)

    def execute_cell(self, cell: Any, index: int) -> Any:
        if cell.cell_type == "code" and self._watch is not None:
            self._at = index
            self._watch.begin_cell()
            self._runs_before = len(self._runs.read_text().splitlines())
            if self._cell_lines:
                self.log.info(f"cell {index + 1} of {len(self.nb.cells)}: {_first_line(cell)}")
        try:
            return super().execute_cell(cell, index)
        except CellExecutionError:
            raise  # papermill marks this one itself
        except BaseException as error:
            self._ended = self._note(error)
            raise self._ended from None
        finally:
            if cell.cell_type == "code" and self._watch is not None:
                cell.metadata["ogbnlib"] = {"peak_bytes": self._watch.end_cell()}

    def _note(self, error: BaseException) -> BaseException:
        """Mark the cell at which the notebook ended, which papermill holds for completed."""
        # jupyter_client raises a RuntimeError of these words for a kernel that died before it was ready.
        if self._watch and isinstance(error, RuntimeError) and "Kernel died" in str(error):
            error = self._death(self._watch)
        first = next((i for i, cell in enumerate(self.nb.cells) if cell.cell_type == "code"), None)
        if (index := first if self._at is None else self._at) is not None:
            cell, name = self.nb.cells[index], type(error).__name__
            facts = error.facts if isinstance(error, KernelDied) else {name: str(error)}
            lines = [f"{what}: {text}" for what, text in facts.items()]
            cell.outputs.append(nbformat.v4.new_output("error", ename=name, evalue=str(error), traceback=lines))
            self.nb_man.cell_exception(cell, cell_index=index)
        return error

    def _death(self, watch: KernelWatch) -> KernelDied:
        if self._at is not None and self.nb.cells[self._at].execution_count is None:
            self.nb.cells[self._at].execution_count = self.code_cells_executed  # it died before it could say so
        code = watch.exit_code()
        cause, remedy = watch.cause(code)
        limit, source = effective_limit()
        facts = {"cause": cause, "exit code": str(code), "limit": f"{format_bytes(limit)} ({source})"}
        return KernelDied(facts | {"peak": watch.peak(), "phase": self._phase(), "next": remedy}, code)

    def _phase(self) -> str:
        """The cell, and the training run that was going on in it."""
        if self._at is None:
            return "before the first cell"
        cell = self.nb.cells[self._at]
        text = f"cell {self._at + 1} of {len(self.nb.cells)}, In [{cell.execution_count}]: `{_first_line(cell)}`"
        runs = self._runs.read_text().splitlines()[self._runs_before :]
        going_on = [run for run in map(Run, runs) if run.run_dir.is_dir() and run.exit_code is None]
        return text + "".join(f"; in it the run {run.run_dir}. {run.diagnosis}" for run in going_on[-1:])

    def output(self, outs: list[Any], *args: Any) -> Any:
        """Successive pieces of one stream become one output, in which a progress bar shows its last state."""
        out = super().output(outs, *args)
        if out is not None and out.output_type == "stream" and outs[-1:] == [out]:
            if len(outs) > 1 and outs[-2].output_type == "stream" and outs[-2].name == out.name:
                outs.pop()
                before, newline, line = outs[-1].text.rpartition("\n")
                outs[-1].text = before + newline + _OVERWRITTEN.sub("", line + out.text)
            else:
                out.text = _OVERWRITTEN.sub("", out.text)
        return out

    def log_output_message(self, output: Any) -> None:
        """Whole lines always; the state of a progress bar every 10 s, and the last one."""
        if output.output_type == "stream":
            bar = self._bars.pop(output.name, "")
            text = _OVERWRITTEN.sub("", bar + output.text)
            if bar or "\r" in output.text:
                lines, newline, state = text.rpartition("\n")
                if state and time.monotonic() - self._last_bar_s < BAR_INTERVAL_S:
                    self._bars[output.name], text = state, lines + newline
                elif state:
                    self._last_bar_s = time.monotonic()
            if not text:
                return
            output = nbformat.NotebookNode({**output, "text": text})
        super().log_output_message(output)


class NotebookEngine(NBClientEngine):  # type: ignore[misc]
    """papermill's engine with `Client`. Called by `engine.Engine` once the parameters have been checked."""

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, progress_bar: Any = True, **options: Any) -> Any:
        lines = bool(progress_bar) and not is_interactive()
        died = None
        try:
            options |= {"progress_bar": False if lines else progress_bar, "cell_lines": lines}
            nb = super().execute_notebook(nb, kernel_name, **options)
        except KernelDied as error:
            died = error
            nb.cells.insert(0, _banner(error))
        except CellTimeoutError:
            logger.error("a cell took longer than --execution-timeout")  # the cell says so itself, shown below
        try:
            raise_for_execution_errors(nb, nb.metadata.papermill["output_path"])
        except PapermillExecutionError as error:
            if died is not None:
                raise NotebookEnded(error, died.exit_code) from None
            code = re.match(r"(\d+): ", error.evalue) if error.ename == RunEnded.__name__ else None
            if code:
                raise NotebookEnded(error, int(code[1])) from None
            raise
        return nb

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, start_timeout: int, execution_timeout: int | None = None, **options: Any
    ) -> None:
        del options["input_path"]
        options |= {"timeout": execution_timeout, "startup_timeout": start_timeout, "log": logger}
        pending: set[int] = set()  # received while the notebook is executed
        with handled(lambda number, _: pending.add(number)):
            Client(nb_man, pending, kernel_name=kernel_name, **options).execute()


def _banner(died: KernelDied) -> Any:
    """A cell for the top of the notebook, tagged like papermill's own so that the next execution takes it away."""
    lines = ["## The kernel died", *(f"- **{name}**: {text}" for name, text in died.facts.items())]
    return nbformat.v4.new_markdown_cell("\n".join(lines), metadata={"tags": [ERROR_MARKER_TAG]})
