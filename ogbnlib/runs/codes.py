"""Exit codes and Slurm's job states: the cause and the actions of each; how to resume a run."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..errors import Diverged, InputError, explained
from ..files import shown
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..memory.killed import Action
from ..memory.signals import Stopped
from ..sampling.workers import WorkerDied
from .cause import Cause, Facts
from .render import Diagnosis

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
DIVERGED = 77
UNFINISHED = 78

# 128 + N is death by signal N, as shells report it. "0:125" and "0:53" are Slurm's EXIT:SIGNAL
# pairs: 125 is its pseudo-signal for out of memory, 53 a batch script that could not be started.
_CODES: dict[str, tuple[Cause, tuple[str, ...]]] = {
    "0": ("finished", ()),
    "1": ("error", ("read output",)),
    "2": ("bad input", ("fix input",)),
    "75": ("stopped at a checkpoint", ("resume",)),
    "76": ("out of GPU memory", ("free GPU",)),
    "77": ("diverged", ("smaller lr", "resume")),
    "78": ("not finished", ("resume",)),
    "124": ("time limit", ("more time",)),
    "126": ("never started", ("fix input",)),
    "127": ("never started", ("fix input",)),
    "129": ("SIGHUP", ("resume",)),
    "130": ("interrupted", ("resume",)),
    "132": ("error", ("check libraries",)),
    "135": ("error", ("more shared memory",)),
    "137": ("SIGKILL, cause unknown", ("find sender", "resume")),
    "138": ("SIGUSR1", ("resume",)),
    "139": ("error", ("check libraries",)),
    "141": ("error", ("read output",)),
    "143": ("SIGTERM", ("resume",)),
    "152": ("time limit", ("more time",)),
    "153": ("error", ("raise ulimit",)),
    "0:125": ("out of memory", ("more memory",)),
    "0:53": ("never started", ("fix input",)),
}
# Ends that only a message shows.
TEXTS: dict[str, tuple[Cause, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("kernel kill in a cgroup", "kernel kill", "memory of a group", "allocation refused"),
        ("out of memory", ("less memory",)),
    ),
    "limit met": ("memory limit met, cause unknown", ("ask sacct",)),
    "file descriptors": ("error", ("raise ulimit",)),
    "shared memory": ("error", ("more shared memory",)),
    "label out of range": ("error", ("check labels",)),
    "worker gone": ("worker died, cause unknown", ("no workers",)),
    "rank gone": ("lost another rank, cause unknown", ("read output",)),
}  # fmt: skip
_OURS = ("2", *map(str, range(STOPPED, UNFINISHED + 1)))  # of other commands they mean anything

# a job in any other state, such as COMPLETED and FAILED, is explained by its exit code
STATES: dict[str, tuple[Cause, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
        ("pending", ("wait",)),
    ),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "STAGE_OUT"),
        ("running", ("wait",)),
    ),
    "OUT_OF_MEMORY": ("out of memory", ("more memory", "resume")),
    "TIMEOUT": ("time limit", ("resume", "more time")),
    "DEADLINE": ("time limit", ("resume",)),
    "PREEMPTED": ("preempted", ("resume",)),
    "CANCELLED": ("cancelled", ("resume",)),
    "NODE_FAIL": ("node failure", ("resume",)),
    "BOOT_FAIL": ("node failure", ("resume",)),
}  # fmt: skip


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ends with this exception."""
    error = explained(error)
    torch = sys.modules.get("torch")  # do not import torch for this
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_CUDA_MEMORY
    if isinstance(error, WorkerDied):
        return error.exit_code
    codes = {
        InputError: 2,
        Stopped: STOPPED,
        Diverged: DIVERGED,
        KeyboardInterrupt: 130,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


# Signals N that kill: sacct of Slurm 22.05 shows these as N:0.
_OFTEN = (6, 7, 9, 10, 11, 13, 15)


def code_key(code: int | str) -> str:
    """The code as a shell reports it: "137" for -9, 0:9, 9:0 and SIGKILL; "" if it is no code."""
    text = str(code).strip()
    signals = {item.name: str(128 + item) for item in signal.Signals}
    if text in _CODES or text in signals:
        return signals.get(text, text)
    pair = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    if pair:
        status = int(pair[1])
        number = int(pair[2]) % 128  # Slurm adds 128 to the signal of a process that dumped core
        if status in _OFTEN:
            number = status
        return str(128 + number) if number else code_key(status)
    if not re.fullmatch(r"-?\d{1,3}", text) or not -64 <= int(text) <= 255:
        return ""
    return str(128 - int(text)) if text[0] == "-" else text  # subprocess and torchrun give -N


def of_code(code: int | str, *, foreign: bool = False, who: str = "") -> Diagnosis:
    """Diagnosis of an exit code in any form (see `code_key`).

    `foreign` if the command is not of this package, `who` if the process is not the command itself.
    """
    key = code_key(code)
    cause, actions = _CODES.get(key, ("error", ("read output",)))
    sign = key
    if foreign and key in _OURS:
        cause = "error"
        actions = ("read output",)
        sign = f"other {key}"
    if foreign:
        actions = tuple("start again" if name == "resume" else name for name in actions)
    facts = Facts(sign=sign, who=who, exit_code=int(key) if key.isdigit() else None)
    return Diagnosis(cause, facts, tuple(map(Action, actions)))


def of_sign(sign: str, facts: Facts) -> Diagnosis:
    """Diagnosis of another process's code or of a sign in `TEXTS`; the command itself is not
    resumed for it."""
    cause, actions = {**_CODES, **TEXTS}[sign]
    return Diagnosis(cause, facts, (Action(actions[0]),))


def of_state(state: str, job: Mapping[str, str], line: str = "") -> Diagnosis:
    """Diagnosis of a job's state; `job` has sacct's fields of the job, `line` proves the state."""
    cause, actions = STATES[state]
    facts = Facts(sign=state, job={**job, "State": state}, line=line)
    arguments = {"job": job["JobID"]} if "JobID" in job else {}
    return Diagnosis(cause, facts, tuple(Action(action, arguments) for action in actions))


def specified(end: Diagnosis, by_id: Mapping[str, Action]) -> Diagnosis:
    """Return the diagnosis with more specific actions in place of those with these ids."""
    specific = tuple(by_id.get(action.id, action) for action in end.actions)
    return replace(end, actions=specific)


def resumption(run_dir: Path) -> Action:
    """The action that resumes a run; inside a Slurm job, in another job."""
    if "SLURM_JOB_ID" in os.environ:
        return resubmission(run_dir)
    path = str(run_dir.absolute())  # the reader's working folder may be another one
    return Action("resume", {"run_dir": path, "quoted": shlex.quote(path)})


def resubmission(run_dir: Path) -> Action:
    """The action that resumes a run in a Slurm job, for the folder of the first submission."""
    script = "train"
    if run_dir.name.startswith("train_ddp"):
        script = "train_ddp"
    quoted = shlex.quote(str(shown(run_dir.resolve())))
    return Action("submit to resume", {"script": script, "quoted": quoted})
