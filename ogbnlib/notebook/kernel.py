"""Notebook execution for papermill: the kernel is watched; notebook and exit code show how it
ended.

Without this engine, papermill marks every cell "completed" when the kernel dies, and its exit code
is always 138. This engine marks the running cell failed, leaves later cells pending, and adds a
banner with cause, limit, peak and phase.
"""

import os
import re
import signal
import tempfile
from typing import Any

import click
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode, v4
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager
from papermill.exceptions import PapermillExecutionError
from papermill.execute import ERROR_MARKER_TAG, raise_for_execution_errors
from papermill.log import logger

from ..errors import format_bytes
from ..memory.cgroup import counting_cgroup, effective_limit, read_whole
from ..memory.reading import Reading
from ..memory.recorder import Recorder
from ..memory.signals import Stopped, handled
from ..runs.codes import STOPPED, of_code
from ..runs.folder import RunEnded
from ..runs.render import words_of


class KernelDied(DeadKernelError):
    """Error for a kernel process that ended by itself."""

    facts: dict[str, str]  # cause, exit code, limit, peak, next step and phase


class _Client(PapermillNotebookClient):  # type: ignore[misc]
    """papermill's client, which also records the kernel's memory and forwards the signals that
    papermill receives to the kernel."""

    def __init__(self, nb_man: NotebookExecutionManager, pending: set[int], **options: Any):
        super().__init__(nb_man, **options)
        self._pending = pending
        self._kills_before = 0
        self._recorder: Recorder | None = None
        self._index: int | None = None  # of the code cell that is running or ran last
        self._error: BaseException | None = None

    def execute(self, **options: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="ogbnlib-kernel-") as self._folder:
            try:
                return super().execute(**options)
            except BaseException as error:
                # the cell's own error first, because cleaning up may have failed as well
                raise self._mark_failure(self._error or error) from None
            finally:
                if self._recorder is not None:
                    self._recorder.stop()

    def start_new_kernel(self, **options: Any) -> None:
        # Without JPY_SESSION_NAME, a kernel prints progress as lines for a log.
        env = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
        super().start_new_kernel(env=env, **options)
        self._process = self.km.provisioner.process
        self._cgroup = counting_cgroup(self._process.pid)
        self._recorder = Recorder(self._folder).start(
            self._process.pid, interval_s=0.1, on_sample=self._forward_signals
        )

    def _forward_signals(self, _: Reading) -> None:
        """Forward the received signals to the kernel.

        SIGUSR1 waits until the kernel has a handler for it, because without one it would end the
        kernel.
        """
        for signum in sorted(self._pending):
            status = read_whole(f"/proc/{self._process.pid}/status")
            if status is None:  # the kernel has ended
                return
            mask = int(status.partition(b"SigCgt:")[2].split()[0], 16)  # its lowest bit is signal 1
            if signum != signal.SIGUSR1 or mask >> (signum - 1) & 1:
                self._pending.discard(signum)
                logger.warning(
                    f"{signal.Signals(signum).name} received and forwarded to the kernel"
                )
                self._process.send_signal(signum)

    def execute_cell(self, cell: NotebookNode, index: int) -> Any:
        if cell.cell_type != "code":
            return super().execute_cell(cell, index)
        self._index = index
        self._kills_before = self._kills()
        try:
            return super().execute_cell(cell, index)
        except BaseException as error:
            self._error = error
            raise

    def _mark_failure(self, error: BaseException) -> BaseException:
        """Mark the cell at which the notebook ended as failed, and return the error to raise.

        papermill would leave the cell completed.
        """
        # jupyter_client raises a plain RuntimeError for a kernel that died before it was ready.
        if self._recorder and isinstance(error, RuntimeError) and "Kernel died" in str(error):
            facts = self._facts(self._recorder)
            error = KernelDied(facts["cause"])
            error.facts = facts
        # the cell that ran, else the first code cell
        codes = [i for i, cell in enumerate(self.nb.cells) if cell.cell_type == "code"]
        for index in codes[:1] if self._index is None else [self._index]:
            cell = self.nb.cells[index]
            name = type(error).__name__
            text = str(error)
            # drop the error output of the kernel's interruption
            cell.outputs = [out for out in cell.outputs if out.output_type != "error"]
            cell.outputs.append(
                v4.new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])
            )
            self.nb_man.cell_exception(cell, cell_index=index)
        return error

    def _kills(self) -> int:
        return (self._cgroup.count("oom_kill") if self._cgroup else 0) or 0

    def _facts(self, recorder: Recorder) -> dict[str, str]:
        status = self._process.wait()
        code = max(status, 1)  # an exit with 0 in mid-notebook is an error, too
        if status < 0:  # Popen shows signal N as -N, a shell as 128 + N
            code = 128 - status
        end = of_code(code)
        cause = words_of(end.facts)
        remedy = end.remedy
        if status == 0:
            cause = "exit with status 0 before the notebook's end"
            remedy = "look for os._exit in the cell that ran"
        elif code == 137 and self._kills() > self._kills_before:
            cause = "out of memory: killed by the kernel's out-of-memory killer, as its cgroup's counter shows"
            remedy = "train with run(config, memory_limit=...), whose kill a notebook survives, or ask for more"
        phase = "before the first cell"
        if self._index is not None:
            first_line = self.nb.cells[self._index].source.strip().partition("\n")[0]
            phase = f"cell {self._index + 1} of {len(self.nb.cells)}: `{first_line}`"
        limit, source = effective_limit()
        peak = format_bytes(recorder.record.held_peak_bytes)
        return {
            "cause": cause,
            "exit code": str(code),
            "limit": f"{format_bytes(limit)} ({source})",
            "peak": f"{peak} anonymous and shared, of kernel and children",
            "next": remedy,
            "phase": phase,
        }


class NotebookEngine(NBClientEngine):  # type: ignore[misc]
    """papermill's engine, with `_Client` and with exit codes that show how the notebook ended."""

    @classmethod
    def execute_notebook(cls, nb: NotebookNode, kernel_name: str, **options: Any) -> Any:
        """Execute `nb`. After a dead kernel or an unfinished training run, papermill exits with
        the exit code of that kernel or run."""
        exit_code = None
        try:
            nb = super().execute_notebook(nb, kernel_name, **options)
        except KernelDied as error:
            exit_code = int(error.facts["exit code"])
            lines = [
                "## The kernel died",
                *(f"- **{name}**: {text}" for name, text in error.facts.items()),
            ]
            # papermill's own tag makes the next execution remove the banner.
            nb.cells.insert(
                0, v4.new_markdown_cell("\n".join(lines), metadata={"tags": [ERROR_MARKER_TAG]})
            )
        except CellTimeoutError:
            pass  # `raise_for_execution_errors` raises it
        try:
            raise_for_execution_errors(nb, nb.metadata.papermill["output_path"])
        except PapermillExecutionError as error:
            codes = re.findall(r"^(\d+): ", error.evalue)
            if error.ename == Stopped.__name__:
                exit_code = STOPPED
            elif error.ename == RunEnded.__name__ and codes:
                exit_code = int(codes[0])
            if exit_code is not None:
                ended = click.ClickException(str(error))
                ended.exit_code = exit_code  # type: ignore[misc]  # for papermill's command line
                raise ended from None
            raise
        return nb

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        *,
        start_timeout: int,
        execution_timeout: int | None = None,
        **options: Any,
    ) -> None:
        del options["input_path"]
        options |= {"timeout": execution_timeout, "startup_timeout": start_timeout, "log": logger}
        options["coalesce_streams"] = True  # one output of a cell's text, without overwritten lines
        pending: set[int] = set()  # signals to forward
        with handled(lambda number, _: pending.add(number)):
            _Client(nb_man, pending, kernel_name=kernel_name, **options).execute()
