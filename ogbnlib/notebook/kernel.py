"""Notebook execution for papermill: the kernel is watched; notebook and exit code show how it
ended.

Without this engine, papermill marks every cell "completed" when the kernel dies, and its exit code
is always 138. This engine marks the running cell failed, leaves later cells pending, and adds a
banner with the diagnosis.
"""

import os
import re
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode, v4
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager
from papermill.exceptions import PapermillExecutionError
from papermill.execute import ERROR_MARKER_TAG, raise_for_execution_errors
from papermill.log import logger

from ..memory.cgroup import effective_limit, find_cgroup, read_whole
from ..memory.limits import Watchdog
from ..memory.reading import Reading
from ..memory.recorder import Recorder
from ..memory.signals import Stopped, handled
from ..memory.tree import Tree
from ..runs.codes import STOPPED
from ..runs.diagnosis import explain, read_facts
from ..runs.folder import RunEnded


class KernelDied(DeadKernelError):
    """Error for a kernel process that ended by itself. The text is its diagnosis."""

    exit_code: int


class _Client(PapermillNotebookClient):  # type: ignore[misc]
    """papermill's client, which also records the kernel's memory and forwards the signals that
    papermill receives to the kernel."""

    def __init__(self, nb_man: NotebookExecutionManager, pending: set[int], **options: Any):
        super().__init__(nb_man, **options)
        self._pending = pending  # numbers of the received signals to forward
        self._index: int | None = None  # of the code cell that is running or ran last
        self._error: BaseException | None = None  # raised by that cell

    def execute(self, **options: Any) -> Any:  # papermill calls this once, for all cells
        with tempfile.TemporaryDirectory(prefix="ogbnlib-kernel-") as self._folder:
            self._recorder = Recorder(self._folder)
            try:
                return super().execute(**options)
            except BaseException as error:
                # the cell's own error first, because cleaning up may have failed as well
                raise self._mark_failure(self._error or error) from None
            finally:
                self._recorder.stop()

    def start_new_kernel(self, **options: Any) -> None:
        # Without JPY_SESSION_NAME, a kernel prints progress as lines for a log.
        env = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
        super().start_new_kernel(env=env, **options)
        self._process = self.km.provisioner.process
        self._limit = Watchdog(None, find_cgroup(self._process.pid))  # only counts kills
        self._recorder.log.mark("start", command=["kernel"])
        self._recorder.start(
            Tree(self._process.pid), interval_s=0.1, on_sample=self._forward_signals
        )

    def _forward_signals(self, _: Reading) -> None:
        """Forward the received signals; SIGUSR1 waits for a handler, else it ends the kernel."""
        for signum in sorted(self._pending):
            status = read_whole(f"/proc/{self._process.pid}/status")
            if status is None:  # the kernel has ended
                return
            # SigCgt is a bit mask of the signals with a handler; its lowest bit is signal 1
            handled_mask = int(status.partition(b"SigCgt:")[2].split()[0], 16)
            if signum != signal.SIGUSR1 or handled_mask >> (signum - 1) & 1:
                self._pending.discard(signum)
                logger.warning(
                    f"{signal.Signals(signum).name} received and forwarded to the kernel"
                )
                self._process.send_signal(signum)

    def execute_cell(self, cell: NotebookNode, index: int) -> Any:  # papermill calls this for each
        if cell.cell_type != "code":
            return super().execute_cell(cell, index)
        self._index = index
        self._limit = Watchdog(None, find_cgroup(self._process.pid))  # counts kills from here on
        first_line = cell.source.strip().partition("\n")[0]
        name = f"cell {index + 1} of {len(self.nb.cells)}: {first_line}"
        # without an "end": the record's innermost phase is the cell that began last
        self._recorder.log.mark("begin", phase=name, held_bytes=self._recorder.record.held_bytes)
        try:
            return super().execute_cell(cell, index)
        except BaseException as error:
            self._error = error
            raise

    def _mark_failure(self, error: BaseException) -> BaseException:
        """Mark the cell at which the notebook ended as failed, which papermill would leave completed;
        return the error to raise."""
        # jupyter_client raises a plain RuntimeError for a kernel that died before it was ready.
        if isinstance(error, RuntimeError) and "Kernel died" in str(error):
            error = self._diagnose()
        # the cell that ran, else the first code cell; none in a notebook without code
        codes = [i for i, cell in enumerate(self.nb.cells) if cell.cell_type == "code"]
        for index in codes[:1] if self._index is None else [self._index]:
            cell = self.nb.cells[index]
            name = type(error).__name__
            # drop the error output of the kernel's interruption
            cell.outputs = [out for out in cell.outputs if out.output_type != "error"]
            lines = [f"{name}: {error}"]
            cell.outputs.append(
                v4.new_output("error", ename=name, evalue=str(error), traceback=lines)
            )
            self.nb_man.cell_exception(cell, cell_index=index)
        return error

    def _diagnose(self) -> KernelDied:  # from exit code, kill counter and record
        status = self._process.wait()
        code = 128 - status if status < 0 else status  # Popen shows signal N as -N
        self._limit.ended(by_sigkill=code == 137)
        result = {"exit_code": code, **self._limit.evidence()}
        if result["outer_limit"] is None:  # no limit of a cgroup around the kernel was reached
            limit_bytes, source = effective_limit()
            result |= {"memory_limit_bytes": limit_bytes, "limit_by": source}
        facts = read_facts(result)
        # None: a kernel has no TrainConfig
        end = explain(Path(self._folder), None, facts, self._recorder.record, at_work=False)
        # without the further actions: a kernel has no memory_limit to raise
        error = KernelDied(replace(end, actions=end.actions[:1]))
        if code == 0:
            error = KernelDied("it ended with exit code 0 before the last cell, as by os._exit(0)")
        error.exit_code = max(code, 1)  # 0 would pass for success
        return error


class NotebookEngine(NBClientEngine):  # type: ignore[misc]
    """papermill's engine, with `_Client` and with exit codes that show how the notebook ended."""

    @classmethod
    def execute_notebook(cls, nb: NotebookNode, kernel_name: str, **options: Any) -> Any:
        """Execute `nb`. After a dead kernel or an unfinished training run, papermill exits with
        the exit code of that kernel or run."""
        exit_code = None  # None leaves it to papermill
        try:
            nb = super().execute_notebook(nb, kernel_name, **options)
        except KernelDied as error:
            exit_code = error.exit_code
            banner = f"## The kernel died\n{error}"
            # papermill's own tag makes the next execution remove the banner.
            nb.cells.insert(0, v4.new_markdown_cell(banner, metadata={"tags": [ERROR_MARKER_TAG]}))
        except CellTimeoutError:
            pass  # `raise_for_execution_errors` raises it
        # papermill, too, calls this after the engine, but then it is too late to set the exit code. If
        # a cell has an error, as `_mark_failure` adds, it writes `nb` with the banner, and raises.
        try:
            raise_for_execution_errors(nb, nb.metadata.papermill["output_path"])
        except PapermillExecutionError as error:
            # The kernel reports the name and the text of the exception that ended a cell.
            codes = re.findall(r"^(\d+): ", error.evalue)  # a `RunEnded` begins with its exit code
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
        # As papermill's own method does, with these arguments as options of the client.
        del options["input_path"]  # not an option of the client
        options |= {"timeout": execution_timeout, "startup_timeout": start_timeout, "log": logger}
        options["coalesce_streams"] = True  # one output of a cell's text, without overwritten lines
        pending: set[int] = set()  # numbers of the signals to forward
        with handled(lambda number, _: pending.add(number)):
            _Client(nb_man, pending, kernel_name=kernel_name, **options).execute()
