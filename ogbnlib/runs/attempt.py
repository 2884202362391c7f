"""One attempt (a start or a resumption) of a run: folder lock, event `start`, and result.json."""

import contextlib
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..config import TrainConfig
from ..errors import InputError, explained, naming
from ..files import check_own, locked, make_folder, open_to_write, sync, write_json
from ..forecast.audit import audit, memory_remedy
from ..memory.record import RunPaths
from ..memory.recorder import Recorder
from ..registry import MODELS
from ..sources.resolve import find_store
from .codes import UNFINISHED
from .diagnosis import explain, met_limit, read_facts
from .folder import Run
from .render import Diagnosis

_TORN_FILES = ".*.part"  # temporary files of atomic writes that a kill interrupted


@contextlib.contextmanager
def open_run_dir(
    config: TrainConfig | None, run_dir: Path, *, resume: bool
) -> Iterator[tuple[Run, int]]:
    """Create or reopen the folder of a run, and hold its lock inside the block.

    Yields the run as it was before this attempt, and the lock's file descriptor, which a trainer
    inherits. `config` is None for a watched command. The config.json of a new run is written here;
    a resumed trainer writes it after it has accepted data set and checkpoint.
    """
    check_content(run_dir, resume=resume)
    make_folder(run_dir, 0o700)  # no other user may read it
    with naming(run_dir), lock_of(run_dir) as lock:
        check_content(run_dir, resume=resume)  # again: another process may have been faster
        run = Run(run_dir)
        for path in (run.paths.events, run.paths.timeline, run.paths.output, run.paths.progress):
            check_own(path, stat.S_ISREG)  # a regular file of this user's, if it exists
        resumed = run.paths.config.is_file()
        if resumed and config is not None:  # raises for a refused one; the trainer logs others
            check_changes(run.config.model_dump(mode="json"), config, run_dir)
        for torn in run_dir.glob(_TORN_FILES):
            torn.unlink(missing_ok=True)
        if config is not None and not resumed:
            config.save(run.paths.config)
        yield run, lock


def refuse_foreign_code(config: TrainConfig, run_dir: Path) -> None:
    """Refuse another user's run folder if its custom model would run, or features be propagated to
    a store beside the data that its config names, as this user."""
    paths = RunPaths(run_dir)
    is_known = config.model in MODELS
    is_new = not (paths.config.is_file() or paths.model.is_file())
    if is_new or (is_known and not config.policy.hops(config)):
        return
    for path in (paths.config,) if is_known else (run_dir, paths.config, paths.model):
        if path.exists() and path.stat().st_uid not in (os.geteuid(), 0):  # 0: root
            raise InputError(
                f"{path}: expected a run of your own, found another user's, whose {config.model} "
                "would run or propagate as you; read its code and config.json, and copy the folder"
            )


def check_content(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that can't be written to, has other files, or has a run unless `resume`."""
    paths = RunPaths(run_dir)
    is_run = paths.config.is_file()
    if run_dir.is_dir() and not os.access(run_dir, os.W_OK):
        raise InputError(
            f"{run_dir}: expected a folder that you may write to; copy it, or name another"
        )
    if (resume and is_run) or not run_dir.is_dir():
        return
    # An attempt that was killed before it wrote a config leaves a lock and torn files.
    if any(path != paths.lock and not path.match(_TORN_FILES) for path in run_dir.iterdir()):
        raise InputError(
            f"{run_dir}: expected a new or empty folder, found "
            f"{'a run in it; resume it or' if is_run else 'other files in it;'} name another one"
        )


def check_changes(earlier: Mapping[str, object], config: TrainConfig, run_dir: Path) -> list[str]:
    """Return a sentence for each value that differs from the `earlier` config, by name, and takes
    effect from here on; refuse changes of values that are fixed for a run."""
    refused, notes = config.changes(earlier)
    if refused:
        raise InputError(
            f"{run_dir}: can't resume with other values ({'; '.join(refused)}); use a new run_dir"
        )
    return notes


def lock_of(run_dir: Path) -> contextlib.AbstractContextManager[int]:
    """Lock `run_dir` until the block and each child with the yielded descriptor have ended."""
    return locked(RunPaths(run_dir).lock, f"{run_dir}: it is being trained in", keep=True)


class Attempt:
    """One attempt of a run: it records the start, owns the recorder, and writes the result."""

    def __init__(self, earlier: Run, config: TrainConfig | None = None, **info: object):
        # `info` is the content of the event "start": limit, command
        self._earlier_result = earlier.result  # read before the file is deleted
        self.config = config
        self.run_dir = earlier.run_dir
        self.paths = earlier.paths
        self._sizes = {  # bytes before this attempt
            path: path.stat().st_size if path.exists() else 0
            for path in (self.paths.events, self.paths.timeline)
        }
        self._job = os.environ.get("SLURM_JOB_ID")
        if "SLURM_ARRAY_TASK_ID" in os.environ:  # as sacct names a task: 123_4
            self._job = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ)
        try:
            self.recorder = Recorder(self.run_dir)
            self.recorder.log.mark("start", **info, slurm_job=self._job)
        except OSError:  # such as a full disk
            for path, num_bytes in self._sizes.items():
                if not num_bytes:
                    path.unlink(missing_ok=True)
            raise
        self.paths.result.unlink(missing_ok=True)
        sync(self.run_dir)  # else the old result may be back after a power cut
        self._begin = time.monotonic()

    def end(
        self,
        exit_code: int | None,
        *,
        with_forecast: bool = False,
        memory_limit_bytes: int | None = None,
        kernel_peak_bytes: int | None = None,
        not_started: Diagnosis | None = None,
        **evidence: object,
    ) -> Run:
        """Write result.json: exit code, peaks, diagnosis, `with_forecast` also that of a training.

        Stop the recorder first. `kernel_peak_bytes` is the kernel's own counter, `not_started` the
        diagnosis of a run that was not started; `evidence` has more `Facts`.
        """
        record = self.recorder.record
        if exit_code == 0 and self.config is not None and "finished" not in record.events:
            exit_code = UNFINISHED  # the user's model ended the trainer, such as by os._exit(0)
        values = {
            "exit_code": exit_code,
            "slurm_job": self._job,  # slurm/common.sh reads it
            "memory_limit_bytes": memory_limit_bytes,
            **dict.fromkeys(("limit_by", "killed_by", "oom_kills")),  # None unless in `evidence`
            **evidence,
            "duration_s": round(time.monotonic() - self._begin, 3),
            "peak_bytes": kernel_peak_bytes or record.held_peak_bytes,
            "peak_source": "kernel counter" if kernel_peak_bytes else "samples",
            "sampled_peaks_bytes": record.peaks,
        }
        if exit_code == 128 + signal.SIGBUS and self.config is not None:
            try:  # a mapped file became shorter, or /dev/shm was full
                find_store(self.config.dataset)  # compares the files' sizes with store.json
            except (InputError, OSError) as error:
                values["damage"] = str(error)
        if with_forecast and self.config is not None:
            # its size of the graph is used if the data set is gone by now
            event = record.events.get("dataset")
            values["forecast"] = audit(self.config, memory_limit_bytes, record.phases, event)
        end = not_started or explain(self.run_dir, self.config, read_facts(values), record)
        if end.facts.killed_by and self.config is not None:
            remedy = memory_remedy(self.config, record, met_limit(end.facts))
            end = replace(end, actions=remedy)
        shown = end.to_dict()
        # facts stand at the top level of result.json
        written = {**values, **shown.pop("facts"), "diagnosis": shown}
        try:
            self._write(written, is_refused=exit_code == 2 and "resumed" not in record.events)
        except OSError as error:  # the work is done all the same, so the exit code still counts
            print(
                f"error: {self.paths.result}: it could not be written: {explained(error)}",
                file=sys.stderr,
            )
        return Run(self.run_dir, result=written, diagnosis=end, record=record)

    def _write(self, result: Mapping[str, object], *, is_refused: bool) -> None:
        """Write result.json.

        If the attempt refused its input before it resumed the run (`is_refused`), the run keeps its
        earlier result, and events.jsonl and timeline.csv are cut to their earlier sizes.
        """
        if is_refused and self._earlier_result:
            for path, num_bytes in self._sizes.items():
                with open(path, "ab", opener=open_to_write) as file:
                    file.truncate(num_bytes)
            result = self._earlier_result
        write_json(self.paths.result, result)
