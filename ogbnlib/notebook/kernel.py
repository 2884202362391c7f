"""Notebook execution for papermill: a watched kernel, and an ending that notebook and exit code show.

papermill alone marks every cell "completed" when the kernel dies, and exits with 138 whatever ended it. This engine
marks the running cell failed, leaves later cells pending, and adds a banner with cause, limit, peak and phase.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

import click
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode, v4
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine
from papermill.exceptions import PapermillExecutionError
from papermill.execute import ERROR_MARKER_TAG, raise_for_execution_errors
from papermill.log import logger

from ..errors import format_bytes, is_interactive
from ..memory.cgroup import counting_cgroup, effective_limit
from ..memory.reading import Reading, read_memory
from ..memory.recorder import RUNS_VARIABLE, Recorder
from ..memory.signals import handled
from ..runs.exit_codes import meaning_of
from ..runs.folder import Run, RunEnded

_OVERWRITTEN = re.compile(r".*\r(?=[^\n])")  # text that a carriage return overwrites


class NotebookEnded(click.ClickException, PapermillExecutionError):  # type: ignore[misc]
    """Notebook that did not reach its end; papermill's command line exits with `exit_code`."""

    def __init__(self, error: PapermillExecutionError, exit_code: int):
        PapermillExecutionError.__init__(self, *error.args)
        self.message, self.exit_code = str(error), exit_code  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file=file, err=True)


class KernelDied(DeadKernelError):
    """Kernel process that ended by itself. `facts` are cause, exit code, limit, peak, next step and phase."""

    def __init__(self, facts: dict[str, str]):
        super().__init__(facts["cause"])
        self.facts = facts


class KernelWatch:
    """Recorder of a kernel's memory that also forwards the signals that papermill received.

    SIGUSR1 would end a kernel without a handler for it, so it waits until a training run has installed one. Other
    signals are forwarded at once: the kernel may end, and there is still time to write the notebook.
    """

    def __init__(self, process: subprocess.Popen[bytes], pending: set[int], folder: Path):
        self.process, self._pending, self._wait_logged = process, pending, False
        self.cgroup = counting_cgroup(process.pid)
        self.begin_cell()
        self.recorder = Recorder(folder).start(process.pid, interval_s=0.1, on_sample=self._on_sample)

    def begin_cell(self) -> None:
        """Forget the peak and the out-of-memory kills of earlier cells."""
        self._cell_peak = 0
        self._kills_before = self.cgroup.oom_kills() if self.cgroup else None

    def end_cell(self) -> int:
        """Return the cell's peak memory in use of the kernel and its children, in bytes."""
        return max(self._cell_peak, read_memory(self.process.pid, pss=True).held_bytes or 0)

    def _on_sample(self, reading: Reading) -> None:
        self._cell_peak = max(self._cell_peak, reading.held_bytes or 0)
        for signum in sorted(self._pending):
            name = signal.Signals(signum).name
            if signum != signal.SIGUSR1 or self._handles(signum):
                self._pending.discard(signum)
                logger.warning(f"{name} received and forwarded to the kernel")
                self.process.send_signal(signum)
            elif not self._wait_logged:
                self._wait_logged = True
                logger.warning(f"{name} received, waiting until the kernel handles it, as during a training run")

    def _handles(self, signum: int) -> bool:
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:  # the kernel has ended
            return False
        mask = status.partition("SigCgt:")[2].split()[0]  # hexadecimal; its lowest bit is signal 1
        return bool(int(mask, 16) >> (signum - 1) & 1)

    def facts(self) -> dict[str, str]:
        """Return the ended kernel's cause of death as far as there is evidence, exit code, limit, peak, next step."""
        status = self.process.wait()
        code = 128 - status if status < 0 else status or 1  # status 0 in mid-notebook is an error, too
        _, cause, remedy = meaning_of(code)
        if status == 0:
            cause, remedy = "exit with status 0 before the notebook's end", "look for os._exit in the cell that ran"
        elif code == 137:
            before, after = self._kills_before, self.cgroup.oom_kills() if self.cgroup else None
            counts = f"(oom_kill counter of its cgroup: {before} before the cell, {after} after)"
            cause = f"SIGKILL, cause unknown {counts}"
            if before is not None and after is not None and after > before:
                cause = f"out of memory: killed by the kernel's out-of-memory killer {counts}"
                remedy = "train with run(config, memory_limit=...), whose kill a notebook survives, or ask for more"
        limit, source = effective_limit()
        peak = f"{format_bytes(self.recorder.record.held_peak_bytes)} anonymous and shared, of kernel and children"
        if self.cgroup and self.cgroup.limit_bytes() and (counted := self.cgroup.peak_bytes()):
            peak += f"; {format_bytes(counted)} by its cgroup's own counter, page cache and papermill included"
        facts = {"cause": cause, "exit code": str(code), "limit": f"{format_bytes(limit)} ({source})"}
        return facts | {"peak": peak, "next": remedy}


def _first_line(cell: Any) -> str:
    return next((line.strip() for line in cell.source.splitlines() if line.strip()), "")


class Client(PapermillNotebookClient):  # type: ignore[misc]
    """papermill's client with a watched kernel."""

    def __init__(self, nb_man: Any, pending: set[int], log_cells: bool, **options: Any):
        super().__init__(nb_man, **options)
        self._pending, self._log_cells = pending, log_cells
        self._watch: KernelWatch | None = None
        self._index: int | None = None  # of the code cell that runs, or ran last
        self._failure: BaseException | None = None

    def execute(self, **options: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="ogbnlib-kernel-") as folder:
            self._runs = Path(folder) / "runs"  # the kernel appends the folder of each run that it starts
            self._runs.touch()
            try:
                return super().execute(**options)
            except BaseException as error:
                raise self._failure or self._mark_failure(error) from None  # cleaning up may have failed as well
            finally:
                if self._watch is not None:
                    self._watch.recorder.stop()

    def start_new_kernel(self, **options: Any) -> None:
        # A kernel without a session name prints progress as lines for a log.
        env = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
        super().start_new_kernel(env={**env, RUNS_VARIABLE: str(self._runs)}, **options)
        self._watch = KernelWatch(self.km.provisioner.process, self._pending, self._runs.parent)

    def execute_cell(self, cell: Any, index: int) -> Any:
        if cell.cell_type != "code" or self._watch is None:
            return super().execute_cell(cell, index)
        self._index = index
        self._watch.begin_cell()
        if self._log_cells:
            self.log.info(f"cell {index + 1} of {len(self.nb.cells)}: {_first_line(cell)}")
        try:
            return super().execute_cell(cell, index)
        except CellExecutionError:
            raise  # papermill marks this cell itself
        except BaseException as error:
            self._failure = self._mark_failure(error)
            raise self._failure from None
        finally:
            cell.metadata["ogbnlib"] = {"peak_bytes": self._watch.end_cell()}

    def _mark_failure(self, error: BaseException) -> BaseException:
        """Mark the cell at which the notebook ended as failed; papermill would mark it completed."""
        # jupyter_client raises a plain RuntimeError for a kernel that died before it was ready.
        if self._watch and isinstance(error, RuntimeError) and "Kernel died" in str(error):
            error = KernelDied(self._watch.facts() | {"phase": self._phase()})
        first = next((i for i, cell in enumerate(self.nb.cells) if cell.cell_type == "code"), None)
        if (index := first if self._index is None else self._index) is not None:
            cell, name = self.nb.cells[index], type(error).__name__
            facts = error.facts if isinstance(error, KernelDied) else {name: str(error)}
            lines = [f"{fact}: {text}" for fact, text in facts.items()]
            cell.outputs.append(v4.new_output("error", ename=name, evalue=str(error), traceback=lines))
            self.nb_man.cell_exception(cell, cell_index=index)
        return error

    def _phase(self) -> str:
        """Describe the cell that died, and the training run that was going on in it."""
        if self._index is None:
            return "before the first cell"
        cell = self.nb.cells[self._index]
        if cell.execution_count is None:  # the kernel died before it reported the number
            cell.execution_count = self.code_cells_executed
        text = f"cell {self._index + 1} of {len(self.nb.cells)}, In [{cell.execution_count}]: `{_first_line(cell)}`"
        run = Run((self._runs.read_text().splitlines() or [""])[-1])
        ongoing = (run.run_dir / "timeline.csv").exists() and run.exit_code is None
        return f"{text}; in it the run {run.run_dir}. {run.diagnosis}" if ongoing else text

    def output(self, outs: list[Any], *args: Any) -> Any:
        """Merge successive pieces of one stream; of a progress bar only the last state is saved."""
        out = super().output(outs, *args)
        if out is not None and out.output_type == "stream" and outs[-1:] == [out]:
            same = len(outs) > 1 and outs[-2].output_type == "stream" and outs[-2].name == out.name
            start, newline, line = (outs.pop(-2).text if same else "").rpartition("\n")
            text = start + newline + _OVERWRITTEN.sub("", line + out.text)
            outs[-1] = NotebookNode({**out, "text": text})
        return out

    def log_output_message(self, output: Any) -> None:
        """Log a progress bar's last state alone."""
        if output.output_type == "stream" and "\r" in output.text:
            if not output.text.endswith("\n"):
                return
            output = NotebookNode({**output, "text": _OVERWRITTEN.sub("", output.text)})
        super().log_output_message(output)


class NotebookEngine(NBClientEngine):  # type: ignore[misc]
    """papermill's engine with `Client`."""

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, progress_bar: Any = True, **options: Any) -> Any:
        """Execute a notebook whose parameters have been checked.

        Raises:
            NotebookEnded: when the kernel died, or a cell failed because a training run did not finish.
            papermill.exceptions.PapermillExecutionError: for any other exception in a cell.
        """
        log_cells, died = bool(progress_bar) and not is_interactive(), None
        options |= {"progress_bar": progress_bar and not log_cells, "log_cells": log_cells}
        try:
            nb = super().execute_notebook(nb, kernel_name, **options)
        except KernelDied as error:
            died = error
            lines = ["## The kernel died", *(f"- **{name}**: {text}" for name, text in error.facts.items())]
            # papermill's own tag has the next execution remove the banner.
            nb.cells.insert(0, v4.new_markdown_cell("\n".join(lines), metadata={"tags": [ERROR_MARKER_TAG]}))
        except CellTimeoutError:
            logger.error("a cell took longer than --execution-timeout")  # raised again below
        try:
            raise_for_execution_errors(nb, nb.metadata.papermill["output_path"])
        except PapermillExecutionError as error:
            if died is not None:
                raise NotebookEnded(error, int(died.facts["exit code"])) from None
            if error.ename == RunEnded.__name__ and (code := re.match(r"(\d+): ", error.evalue)):
                raise NotebookEnded(error, int(code[1])) from None
            raise
        return nb

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, start_timeout: int, execution_timeout: int | None = None, **options: Any
    ) -> None:
        del options["input_path"]
        options |= {"timeout": execution_timeout, "startup_timeout": start_timeout, "log": logger}
        pending: set[int] = set()  # signals to forward
        with handled(lambda number, _: pending.add(number)):
            Client(nb_man, pending, kernel_name=kernel_name, **options).execute()
