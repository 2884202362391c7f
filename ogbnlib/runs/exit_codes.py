"""Exit codes of a run, a command or a Slurm job: cause, meaning and next step of each; how to
resume a run."""

import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from ..errors import GB, MB, Diverged, InputError, RankHung, explained
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..memory.signals import Stopped
from ..memory.workers import WorkerDied
from ..output import in_notebook

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
DIVERGED = 77
UNFINISHED = 78


class Meaning(NamedTuple):
    """Cause in a word or two, meaning as the end of a sentence, and next step of an exit code."""

    cause: str
    text: str
    remedy: str


_RESUME, _READ = "go on with resume=True (--resume)", "read the end of output.log"
_KILLED = "an out-of-memory killer, scancel, a time limit, preemption or kill -9 sends it"
_STEP = "batch_size with accumulate, precision=bf16, activation_checkpointing=True, num_neighbors"
# 128 + N is death by signal N, as shells report it. "0:125" and "0:53" are Slurm's EXIT:SIGNAL
# pairs: 125 is its pseudo-signal for out of memory, 53 a batch script that could not be started.
EXIT_CODES = {code: Meaning(*meaning) for code, meaning in {
    "0": ("finished", "finished without an error", "nothing to fix"),
    "1": ("error", "ended by a Python exception", _READ),
    "2": ("bad input", "refused its input, or could not read or write a file", "fix what the message names"),
    "75": ("stopped at a checkpoint", "stopped at a batch boundary on a signal; its checkpoint is written", _RESUME),
    "76": ("out of GPU memory", "out of GPU memory: an allocation failed (torch.OutOfMemoryError)",
           f"set expandable_segments=True, or make a step smaller: {_STEP}"),
    "77": ("diverged", "diverged: the loss, a weight or a score was not finite",
           "go on with a smaller lr (--resume --set lr=...)"),
    "78": ("not finished",
           "ended before the training was finished, without an error: code of the model ended a process, or hung",
           f"let that code raise an error instead, and {_RESUME}"),
    "126": ("never started", "never started: its file can't be executed", "check its permissions and first line"),
    "127": ("never started", "never started: it, or its interpreter, was not found", "check both names"),
    "129": ("SIGHUP", "ended by SIGHUP: its terminal was closed", "go on with resume=True, in tmux or by sbatch"),
    "130": ("interrupted", "interrupted (SIGINT: Ctrl-C, or a notebook's stop, restart or shutdown button)",
            "go on with resume=True"),
    "135": ("error",
            "ended by SIGBUS: a full /dev/shm where there are DataLoader workers, or a mapped file that became shorter",
            "give the container more shared memory (docker --shm-size=8g) or set num_workers=0; else check the data "
            "(`python -m ogbnlib verify`)"),
    "137": ("SIGKILL, cause unknown", f"ended by SIGKILL, cause unknown: {_KILLED}",
            "look for 'Out of memory' in dmesg or the job's state in sacct; run under a memory_limit to get evidence"),
    "138": ("SIGUSR1", "ended by SIGUSR1 in its first second, before it could stop at a checkpoint",
            "start it again, with resume=True (--resume) if its folder exists already"),
    "139": ("error", "ended by SIGSEGV, a crash in compiled code",
            "run with num_workers=0 and PYTHONFAULTHANDLER=1; check that torch and its extensions match"),
    "141": ("error", "ended by SIGPIPE: the reader of its output ended first", "write the output to a file"),
    "143": ("SIGTERM", "ended by SIGTERM: scancel, a time limit, preemption or kill", "go on with resume=True"),
    "153": ("error", "ended by SIGXFSZ: a file passed the limit of `ulimit -f`, not of the disk",
            "raise that limit (`ulimit -f unlimited`), or write smaller files"),
    "255": ("error", "ended with 255, which ssh, srun and container launchers use when the launcher itself failed",
            "read the launcher's own messages: lost connection, missing image, node failure"),
    "0:125": ("out of memory", "ended by Slurm for passing the job's --mem (state OUT_OF_MEMORY)",
              "ask for more with --mem, or `python -m ogbnlib plan --config FILE --memory-limit SIZE` for what fits; "
              "note that srun itself returns 1 for such a step"),
    "0:53": ("never started", "never started: Slurm could not open the batch script's output file or working directory",
             "make the folder of --output and --chdir on a file system that the compute node sees"),
}.items()}  # fmt: skip
# Other meanings for a command that is not of this package, whose own codes 75 to 78 are unknown.
_FOREIGN = {
    "1": Meaning("error", "ended with 1, which for Python is an exception", _READ),
    "2": Meaning("error", "ended with 2, which most commands use for wrong arguments", _READ),
    "138": Meaning(
        "SIGUSR1", "ended by SIGUSR1, which it does not catch", "catch SIGUSR1, or do not send it"
    ),
}
# State of a Slurm job -> cause, sentence and remedy; the exit code explains any other state.
_WAIT = "it starts by itself: submit no second one; squeue --start says when"
PENDING = Meaning("pending", "is {state}: {Reason}", _WAIT)
RUNNING = Meaning(
    "running", "is {state} after {Elapsed} of {Timelimit}", "watch it with squeue -j {job}"
)
STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "STAGE_OUT"), RUNNING),
    "OUT_OF_MEMORY": Meaning("out of memory", "had a process killed for passing its memory of {ReqMem}",
                             "ask for more --mem, or: {less}; then {resume}"),
    "TIMEOUT": Meaning("time limit", "reached its time limit of {Timelimit}", "{resume}, or ask for more --time"),
    "DEADLINE": Meaning("time limit", "reached its --deadline after {Elapsed}", "{resume}"),
    "PREEMPTED": Meaning("preempted", "was preempted by another job", "{resume}; with --requeue Slurm restarts it"),
    "CANCELLED": Meaning("cancelled", "was cancelled after {Elapsed} (scancel)", "{resume}"),
    "NODE_FAIL": Meaning("node failure", "lost its node {NodeList}", "{resume}; --exclude={NodeList} avoids that node"),
    "BOOT_FAIL": Meaning("node failure", "got a node that did not boot, {NodeList}", "{resume}"),
}  # fmt: skip
# Line of a job's log -> state. "hit memory limit at least once" proves nothing: the page cache does
# so without a kill.
LOG_LINES = {
    r"error: .*oom[-_]kill event|^srun: error: .*: Out Of Memory": "OUT_OF_MEMORY",
    r"error: \*\*\* .*DUE TO TIME LIMIT": "TIMEOUT",
    r"error: \*\*\* .*DUE TO PREEMPTION": "PREEMPTED",
    r"error: \*\*\* .*DUE TO NODE FAILURE": "NODE_FAIL",
    r"error: \*\*\* .*DUE TO JOB REQUEUE|^ogbnlib: .*; back in the queue": "REQUEUED",
    # srun cancels steps, which proves nothing
    r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*": "CANCELLED",
}


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ends with this exception."""
    error, torch = explained(error), sys.modules.get("torch")  # not imported for this
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_CUDA_MEMORY
    if isinstance(error, WorkerDied):
        return error.exit_code
    codes = {
        InputError: 2,
        Stopped: STOPPED,
        Diverged: DIVERGED,
        RankHung: UNFINISHED,
        KeyboardInterrupt: 130,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


def meaning_of(code: int | str, *, foreign: bool = False) -> Meaning:
    """Meaning of an exit code, or of Slurm's `EXIT:SIGNAL` pair; `foreign` if the command is not of
    this package."""
    key = str(code)
    number = int(key) if key.isdigit() else -1
    if key in EXIT_CODES and not (foreign and STOPPED <= number <= UNFINISHED):
        meaning = _FOREIGN.get(key, EXIT_CODES[key]) if foreign else EXIT_CODES[key]
        remedy = (
            meaning.remedy.replace("go on with resume=True", "start it again")
            if foreign
            else meaning.remedy
        )
        return meaning._replace(remedy=remedy)
    if 128 < number <= 192:
        name = next((f" ({one.name})" for one in signal.Signals if one == number - 128), "")
        return Meaning(
            "error", f"ended by signal {number - 128}{name}", f"{_READ}, and `man 7 signal`"
        )
    return Meaning("error", f"ended with exit code {key}, which has no fixed meaning", _READ)


def sbatch_resumption(run_dir: Path) -> str:
    """The command that resumes a run in a Slurm job, for the folder that it was submitted from."""
    script = "train_ddp" if run_dir.name.startswith("train_ddp") else "train"
    with contextlib.suppress(ValueError):
        run_dir = run_dir.resolve().relative_to(Path.cwd())
    return f"sbatch slurm/{script}.sbatch --run-dir {shlex.quote(str(run_dir))} --resume"


def resumption(run_dir: Path, limit: float | None) -> str:
    """The call that resumes a run, in a notebook or a shell; inside a Slurm job the command submits
    another job."""
    run_dir = run_dir.absolute()  # the reader's working folder may be another one
    size = "" if not limit else f"{limit / GB:g} GB" if limit >= GB else f"{limit / MB:g} MB"
    call = (
        f'run(run_dir="{run_dir}", '
        + (f'memory_limit="{size}", ' if limit else "")
        + "resume=True)"
    )
    if job := os.environ.get("SLURM_JOB_ID"):
        command = f"`{sbatch_resumption(run_dir)}`, unless Slurm requeued job {job}"
        return f"{call}, or {command}" if in_notebook() else command
    command = f"python -m ogbnlib train --run-dir {shlex.quote(str(run_dir))} --resume"
    return f"{call}, or `{command}" + (f" --memory-limit '{size}'`" if limit else "`")
