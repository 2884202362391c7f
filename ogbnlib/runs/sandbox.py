"""Run the trainer in a child process under a real memory limit, and come back whatever happens to it.

The parent records the child's memory, relays its output and writes `result.json`; an out-of-memory kill is a result.
What the limit covers: the child and every process it starts, with the page cache they fill where the engine is a
cgroup. What it does not cover: CPU time, disk, GPU memory, and files already cached by others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import TrainConfig
from ..errors import InputError, is_interactive, parse_bytes
from ..files import next_run_dir, write_json
from ..forecast.audit import audit
from ..forecast.sizes import RUNTIME_BYTES
from ..memory.cgroup import LIMIT_VARIABLE, effective_limit
from ..memory.cuda import allocator_environment, check_precision, resolve_device
from ..memory.limits import Limit, kill_tree, make_limit
from ..memory.recorder import RUNS_VARIABLE, TIMELINE, EventLog, Recorder
from ..memory.signals import Forward, handled, held_back
from ..sources.catalog import locate_for
from .diagnosis import RESULT, Diagnosis, diagnose, read_result
from .folder import CONFIG, OUTPUT, own_run_dir
from .timeline import measured_parts, measured_phases, read_csv_lines, read_metrics, read_timeline

if TYPE_CHECKING:
    import pandas as pd


# glibc's malloc keeps much of what is freed (mallopt(3)). Two arenas for all threads, not eight per core: a run under
# 40 MB of head-room finished that was killed before. Blocks from 4 MiB on come from mmap and go back at once, where the
# default raises that size to 32 MiB as it goes: 75 MB less at the peak of [15, 10, 5] x 1024, at the same speed.
MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(4 * 2**20)}


class RunEnded(RuntimeError):
    """A run that did not finish. The text is its exit code, a colon and its diagnosis."""


@dataclass(frozen=True)
class Run:
    """A run that has ended, however it ended."""

    run_dir: Path
    result: dict[str, Any]
    diagnosis: Diagnosis

    @property
    def exit_code(self) -> int:
        return int(self.result["exit_code"])

    @property
    def peak_bytes(self) -> int:
        """The most memory at once: the cgroup's own counter, else the largest sample of anonymous + shared."""
        return int(self.result["peak_bytes"] or 0)

    @property
    def timeline(self) -> pd.DataFrame:
        return read_timeline(self.run_dir)

    @property
    def metrics(self) -> pd.DataFrame:
        return read_metrics(self.run_dir)

    def require_finished(self) -> Run:
        """This run, where it finished: for a notebook that has no use for the rest of its cells otherwise.

        Raises:
            RunEnded: when the exit code is not 0; `papermill --engine ogbnlib` then exits with that code.
        """
        if self.exit_code != 0:
            raise RunEnded(f"{self.exit_code}: {self.diagnosis}")
        return self


def has_ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it: its number stays its own until it is waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _relay(process: subprocess.Popen[bytes], log_path: Path, echo: bool) -> str:
    """Copy the child's output to the log and to our own until the child ends; returns its last lines."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    tail = b""
    with open(log_path, "ab") as log:
        ended_s: float | None = None
        while True:
            readable, _, _ = select.select([descriptor], [], [], 0.1)
            if readable:
                data = os.read(descriptor, 65536)
                if not data:
                    return tail.decode(errors="replace")
                log.write(data)
                log.flush()
                tail = (tail + data)[-4000:]
                if echo:
                    sys.stdout.write(data.decode(errors="replace"))
                    sys.stdout.flush()
            elif has_ended(process.pid):
                # An orphaned worker may hold the pipe open for ever: half a second of silence is the end.
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - ended_s > 0.5:
                    return tail.decode(errors="replace")


@dataclass
class Outcome:
    """How a supervised process tree ended. `exit_code` is 128 + N after signal N."""

    exit_code: int
    duration_s: float
    tail: str
    killed_by: str | None
    oom_kills: int | None
    peak_bytes: int | None
    cgroup: str | None
    interrupted: bool = False


def supervise(
    argv: list[str],
    run_dir: Path,
    limit: Limit,
    *,
    env: Mapping[str, str] | None = None,
    echo: bool = True,
    holds_back: bool = False,
    lock: int | None = None,
) -> Outcome:
    """Start `argv` inside `limit`, record its memory in `run_dir` until it ends, and end all it leaves behind.

    SIGUSR1 and SIGTERM to this process are passed on to the child meanwhile, if this is the main thread.

    Args:
        holds_back: The child calls `signals.take_over`; until then it keeps stop signals waiting.
        lock: A descriptor for the child to inherit.
    """
    forward = Forward()
    with handled(forward):
        return _supervise(argv, run_dir, limit, env or {}, echo, forward, holds_back, () if lock is None else (lock,))


def _supervise(
    argv: list[str],
    run_dir: Path,
    limit: Limit,
    env: Mapping[str, str],
    echo: bool,
    forward: Forward,
    holds_back: bool,
    descriptors: tuple[int, ...],
) -> Outcome:
    begin = time.monotonic()
    interrupted = False
    try:
        with held_back() if holds_back else contextlib.nullcontext():
            process = subprocess.Popen(
                limit.command(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the child in order
                env={**MALLOC, **os.environ, "PYTHONUNBUFFERED": "1", **env},
            )
    except BaseException:
        limit.close()  # no process was started in it
        raise
    forward.begin(process.pid)
    tail = ""
    recorder = None
    try:
        limit.attach(process.pid)
        recorder = Recorder(
            run_dir,
            process.pid,
            cgroup=lambda: limit.cgroup,
            interval_s=0.02 if limit.name == "watchdog" else 0.05,
            on_sample=limit.check,
            on_error=lambda: kill_tree(process.pid),  # a run whose memory nobody watches must not go on
        ).start()
        try:
            tail = _relay(process, run_dir / OUTPUT, echo)
        except KeyboardInterrupt:
            interrupted = True
            forward.end()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        forward.end()
        kill_tree(process.pid)
        status = process.wait()
    except BaseException:
        forward.end()
        kill_tree(process.pid)
        process.wait()
        raise
    finally:
        try:
            if recorder is not None:
                recorder.stop()
        finally:
            oom_kills = limit.oom_kills()
            peak = limit.cgroup.peak_bytes() if limit.cgroup else None
            limit.close()
            assert process.stdout is not None
            process.stdout.close()
    if oom_kills and limit.killed_by is None and status != 0:
        limit.killed_by = "kernel"  # the tree ended between two samples
    code = 130 if interrupted else 128 - status if status < 0 else status
    if limit.killed_by:
        code = 137  # a worker was picked by the killer, or its parent ended first: the tree died of the same cause
    return Outcome(
        exit_code=code,
        duration_s=time.monotonic() - begin,
        tail=tail,
        killed_by=limit.killed_by,
        oom_kills=oom_kills,
        peak_bytes=peak,
        cgroup=str(limit.cgroup.path) if limit.cgroup else None,
        interrupted=interrupted,
    )


def sampled_peaks(run_dir: Path, since_line: int = 0) -> dict[str, int]:
    """The largest sample of each column of timeline.csv from line `since_line` on, in bytes."""
    lines, _ = read_csv_lines(run_dir / TIMELINE)
    peaks: dict[str, int] = {}
    if not lines:
        return peaks
    names = lines[0].strip().split(",")
    for line in lines[max(1, since_line) :]:
        values = dict(zip(names, line.strip().split(","), strict=True))
        for name, value in values.items():
            if value and name.endswith("_bytes") and name != "cgroup_limit_bytes":
                peaks[name] = max(peaks.get(name, 0), int(value))
        both = [int(values[f"rss_{part}_bytes"] or 0) for part in ("anon", "shmem")]
        peaks["anon_shmem_bytes"] = max(peaks.get("anon_shmem_bytes", 0), sum(both))
        if values["cgroup_anon_bytes"]:
            held = int(values["cgroup_anon_bytes"]) + int(values["cgroup_shmem_bytes"])
            peaks["cgroup_anon_shmem_bytes"] = max(peaks.get("cgroup_anon_shmem_bytes", 0), held)
    return peaks


def watch(
    argv: list[str],
    memory_limit: str | int | None = None,
    *,
    name: str,
    runs_dir: str | os.PathLike[str] = "runs",
    engine: str = "auto",
    echo: bool = True,
) -> Run:
    """Run any Python command line in a child process, recorded and limited as `run` does it: `["-m", "ogbnlib", ...]`.

    Raises:
        InputError: for a bad limit or engine, before the child is started.
    """
    limit_bytes = None if memory_limit is None else parse_bytes(memory_limit)
    limit, refused = make_limit(limit_bytes, engine)
    folder = next_run_dir(runs_dir, name)
    folder.mkdir(parents=True)
    earlier = start_attempt(folder, memory_limit_bytes=limit_bytes, limit_engine=limit.name, command=argv)
    result = _supervised([sys.executable, *argv], folder, limit, refused, earlier, {}, echo, [])
    return Run(folder, result, diagnose(folder))


def _supervised(
    argv: list[str],
    folder: Path,
    limit: Limit,
    refused: list[str],
    earlier: int,
    env: dict[str, str],
    echo: bool,
    notes: list[str],
    config: TrainConfig | None = None,
    lock: int | None = None,
) -> dict[str, Any]:
    """Supervise one attempt and write its result.json, with the forecast for `config` beside what was measured.

    With `lock`, the child is a trainer.
    """
    if limit.limit_bytes is not None:
        env = {**env, LIMIT_VARIABLE: str(limit.limit_bytes)}
    outcome = supervise(argv, folder, limit, env=env, echo=echo, holds_back=lock is not None, lock=lock)
    words = [line for line in outcome.tail.replace("\r", "\n").splitlines() if line.strip()]
    result = write_result(
        folder,
        outcome.exit_code,
        outcome.duration_s,
        samples_from=earlier,
        memory_limit_bytes=limit.limit_bytes,
        limit_engine=limit.name if limit.limit_bytes is not None else None,
        limit_engines_refused=refused,
        killed_by=outcome.killed_by,
        oom_kills=outcome.oom_kills,
        kernel_peak_bytes=outcome.peak_bytes,
        last_output=words[-1] if words and outcome.exit_code not in (0, 137) else None,
        notes=notes,
        **(
            {}
            if config is None
            else {"forecast": audit(config, limit.limit_bytes, measured_phases(folder), measured_parts(folder))}
        ),
    )
    if outcome.interrupted:
        raise KeyboardInterrupt(f"{folder}: interrupted; go on with resume=True")
    return result


def start_attempt(folder: Path, **info: Any) -> int:
    """Mark a new attempt in the events; returns the number of lines that timeline.csv has so far.

    An earlier attempt's result moves to the events: it must not pass for this one's, and must not be lost.
    """
    log = EventLog(folder)
    log.mark("start", **info, previous=read_result(folder))
    log.close()
    (folder / RESULT).unlink(missing_ok=True)
    runs = Path(os.environ.get(RUNS_VARIABLE, ""))
    if runs.is_file():  # gone where this process has outlived the one that asked
        with open(runs, "a") as file:
            file.write(f"{folder.resolve()}\n")
    timeline = folder / TIMELINE
    return timeline.read_bytes().count(b"\n") if timeline.exists() else 0


def write_result(
    folder: Path, exit_code: int, duration_s: float, *, samples_from: int, **evidence: Any
) -> dict[str, Any]:
    """Write result.json: how the attempt ended, its peaks since line `samples_from` of the timeline, and why it ended.

    `evidence` names what the limit knows: `memory_limit_bytes`, `limit_engine`, `killed_by`, `oom_kills`,
    `kernel_peak_bytes`; all absent for a run in this process.
    """
    peaks = sampled_peaks(folder, since_line=samples_from)
    kernel_peak = evidence.pop("kernel_peak_bytes", None)
    result: dict[str, Any] = {
        "exit_code": exit_code,
        "memory_limit_bytes": None,
        "limit_engine": None,
        "killed_by": None,
        "oom_kills": None,
        **evidence,
        "duration_s": round(duration_s, 3),
        "peak_bytes": kernel_peak or peaks.get("anon_shmem_bytes"),
        "peak_source": "kernel counter" if kernel_peak else "samples",
        "sampled_peaks_bytes": peaks,
        "last_metrics": _last_row(read_metrics(folder)),
    }
    write_json(folder / RESULT, result)
    result["diagnosis"] = diagnose(folder).to_dict()
    write_json(folder / RESULT, result)
    return result


def run(
    config: TrainConfig,
    memory_limit: str | int | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] = "runs",
    resume: bool = False,
    engine: str = "auto",
    echo: bool = True,
    num_ranks: int = 1,
) -> Run:
    """Train in a child process under a memory limit and return what happened, an out-of-memory kill included.

    Args:
        config: What to train.
        memory_limit: "2 GB" or bytes; None records without a limit.
        run_dir: The run's folder, new or empty (or the run to resume). Without it, a new folder under `runs_dir`
            called `name`, or by data set and policy.
        resume: Go on from the run's last checkpoint. A run of this very config that has finished is returned as it is.
        engine: "auto", or one of `limits.ENGINES`.
        echo: Relay the child's output; it is in `output.log` either way.
        num_ranks: Processes on this machine that train together (`ogbnlib.ranks`), under the one limit.

    Raises:
        InputError: for bad input, before the child is started.
        KeyboardInterrupt: when interrupted; the child is ended and `result.json` written first.
    """
    limit_bytes = None if memory_limit is None else parse_bytes(memory_limit)
    if num_ranks < 1:
        raise InputError(f"num_ranks: expected at least 1, got {num_ranks}")
    check_inputs(config)
    if resume and run_dir is not None and (finished := _finished(config, Path(run_dir))):
        return finished
    available, source = effective_limit()
    notes = []
    if limit_bytes is not None and limit_bytes > available:
        notes.append(f"memory_limit is above what this process may use: {available} bytes ({source})")
    limit, refused = make_limit(limit_bytes, engine)
    folder = Path(run_dir) if run_dir is not None else next_run_dir(runs_dir, name or _default_name(config))
    with contextlib.ExitStack() as stack:
        not_started = stack.enter_context(contextlib.ExitStack())
        not_started.callback(limit.close)
        lock = stack.enter_context(own_run_dir(config, folder, resume=resume))
        earlier = start_attempt(folder, memory_limit_bytes=limit_bytes, limit_engine=limit.name, notes=notes)
        not_started.pop_all()  # `supervise` closes the limit from here on
        module = ["ogbnlib.training.child"] if num_ranks == 1 else ["ogbnlib.training.launch", str(num_ranks)]
        argv = [sys.executable, "-m", *module, str(folder), *(["--resume"] if resume else [])]
        progress = config.progress if config.progress != "auto" else "bar" if is_interactive() else "lines"
        env = {"OGBNLIB_PROGRESS": progress, "OGBNLIB_PARENT": str(os.getpid())}
        env |= allocator_environment(config, os.environ)
        result = _supervised(argv, folder, limit, refused, earlier, env, echo, notes, config, lock)
    return Run(folder, result, diagnose(folder))


def _finished(config: TrainConfig, folder: Path) -> Run | None:
    """The run in `folder`, where it is one of exactly this config and its last attempt came to the last epoch's end."""
    result = read_result(folder)
    if result is None or result["exit_code"] != 0 or TrainConfig.load(folder / CONFIG) != config:
        return None
    # A kill between the writing of a new config.json and its attempt leaves an older attempt's result.
    return Run(folder, result, diagnose(folder)) if len(read_metrics(folder)) == config.epochs else None


def measure_runtime_bytes() -> int:
    """Anonymous + shared memory that a training process takes whatever its data: about 0.4 GB, see `train.warm_up`."""
    # The pause is longer than the sampling interval, so that at least one sample falls into it.
    argv = [sys.executable, "-c", "import ogbnlib.training.train as t, time; t.warm_up(); time.sleep(0.2)"]
    held: list[int] = []
    # The first may compile the kernels, which takes some 90 MB more than loading them: then once more.
    while not held or (len(held) == 1 and held[0] > 1.15 * RUNTIME_BYTES):
        with tempfile.TemporaryDirectory() as folder:
            limit, _refused = make_limit(None)
            outcome = supervise(argv, Path(folder), limit, echo=False)
            if outcome.exit_code != 0:
                raise InputError(f"ogbnlib: it can't train here, run `python -m ogbnlib doctor`: {outcome.tail[-500:]}")
            held.append(sampled_peaks(Path(folder))["anon_shmem_bytes"])
    return min(held)


def scaled_limit(
    memory_limit: str | int, scale: float, allocation: str = "128 GB", runtime_bytes: int | None = None
) -> int:
    """The limit, in bytes, under which a data set of `scale` meets what the full one meets under `allocation`.

    "auto" is `allocation` times `scale`, plus the interpreter's own memory, which does not shrink with the data:
    `runtime_bytes`, measured where it is not given. Anything else is taken as it is.
    """
    if memory_limit != "auto":
        return parse_bytes(memory_limit)
    if runtime_bytes is None:
        runtime_bytes = measure_runtime_bytes()
    return int(parse_bytes(allocation, "allocation") * scale) + runtime_bytes


def check_inputs(config: TrainConfig) -> None:
    """Refuse what can be seen to be wrong without loading data, before a run's folder is made.

    Raises:
        InputError: for a missing or damaged data set (from its headers), an engine that is not installed, or a GPU
            that is not there (the one check that imports torch, only when `device="cuda"` or `precision="fp16"`).
    """
    if config.sampler == "pyg" and not any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse")):
        raise InputError(
            "sampler: 'pyg' needs pyg-lib or torch-sparse, and neither is installed; use sampler='numba', or "
            "pip install torch-sparse (builds from source, about 20 minutes)"
        )
    if config.device == "cuda":
        resolve_device(config.device)
    if config.precision == "fp16":
        check_precision(config.precision, config.device)
    locate_for(config)


def _default_name(config: TrainConfig) -> str:
    return f"{Path(config.dataset).name}-{config.loading}"


def _last_row(metrics: pd.DataFrame) -> dict[str, float | None] | None:
    if not len(metrics):
        return None
    return {key: None if value != value else float(value) for key, value in metrics.iloc[-1].items()}


__all__ = ["Run", "RunEnded", "diagnose", "next_run_dir", "run", "supervise"]
