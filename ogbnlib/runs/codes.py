"""Exit codes and Slurm's job states: the cause and the actions of each; how to resume a run."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

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

_Actions: TypeAlias = tuple[Action, ...]
_GO_ON = Action("resume")
START_AGAIN = Action("resume", {"how": "start it again"})  # it has no checkpoint of ours
_RAISE_MEM = Action("raise limit", {"option": "--mem"})

# Exit code as a shell reports it -> cause and actions. 128 + N is death by signal N. Slurm's pairs
# EXIT:SIGNAL: 125 is its pseudo-signal for out of memory, 53 a batch script that could not start.
_CODES: dict[str, tuple[Cause, _Actions]] = {
    "0": ("finished", ()),
    "1": ("error", (Action("read output"),)),
    "2": ("bad input", (Action("read output"),)),
    "75": ("stopped at a checkpoint", (_GO_ON,)),
    "76": ("out of GPU memory", (Action("free GPU"),)),
    "77": ("diverged", (Action("check data", {"values": "features", "parameter": "lr"}), _GO_ON)),
    "78": ("not finished", (_GO_ON,)),
    "124": ("time limit", (Action("raise limit", {"option": "the time of `timeout`"}),)),
    "126": ("never started", (Action("read output"),)),
    "127": ("never started", (Action("read output"),)),
    "129": ("SIGHUP", (_GO_ON,)),
    "130": ("interrupted", (_GO_ON,)),
    "132": ("error", (Action("run without workers"),)),
    "135": ("error", (Action("more shared memory"),)),
    "137": ("SIGKILL, cause unknown", (Action("find sender"), _GO_ON)),
    "138": ("SIGUSR1", (_GO_ON,)),
    "139": ("error", (Action("run without workers"),)),
    "141": ("error", (Action("read output"),)),
    "143": ("SIGTERM", (_GO_ON,)),
    "152": ("time limit", (Action("raise limit", {"option": "`ulimit -t`"}),)),
    "153": ("error", (Action("raise limit", {"option": "`ulimit -f`", "limit": "unlimited"}),)),
    "0:125": ("out of memory", (_RAISE_MEM, Action("less memory"))),
    "0:53": ("never started", (Action("ask Slurm"),)),
}
# Sign that only a message or a check shows -> cause and action.
TEXTS: dict[str, tuple[Cause, _Actions]] = {
    **dict.fromkeys(
        ("kernel kill in a cgroup", "kernel kill", "memory of a group", "allocation refused"),
        ("out of memory", (Action("less memory"),)),
    ),
    "limit met": ("memory limit met, cause unknown", (Action("ask Slurm"),)),
    "file descriptors": (
        "error", (Action("raise limit", {"option": "`ulimit -n`", "limit": "65536"}),)
    ),
    "shared memory": ("error", (Action("more shared memory"),)),
    "label out of range": (
        "error", (Action("check data", {"values": "labels", "repaired": "labels"}),)
    ),
    "worker gone": ("worker died, cause unknown", (Action("run without workers"),)),
    "rank gone": ("lost another rank, cause unknown", (Action("read output"),)),
}  # fmt: skip
# codes to which only this package gives a meaning
_OURS = ("2", *map(str, range(STOPPED, UNFINISHED + 1)))

# State of a Slurm job -> cause and actions. A job in any other state, such as FAILED, is explained
# by its exit code.
STATES: dict[str, tuple[Cause, _Actions]] = {
    **dict.fromkeys(
        ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
        ("pending", (Action("ask Slurm"),)),
    ),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "STAGE_OUT"),
        ("running", (Action("ask Slurm"),)),
    ),
    "OUT_OF_MEMORY": ("out of memory", (_RAISE_MEM, Action("less memory"), _GO_ON)),
    "TIMEOUT": ("time limit", (_GO_ON, Action("raise limit", {"option": "--time"}))),
    "DEADLINE": ("time limit", (_GO_ON,)),
    "PREEMPTED": ("preempted", (_GO_ON,)),
    "CANCELLED": ("cancelled", (_GO_ON,)),
    "NODE_FAIL": ("node failure", (_GO_ON,)),
    "BOOT_FAIL": ("node failure", (_GO_ON,)),
}  # fmt: skip


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ends with this exception; 1 if it has no code of its own."""
    error = explained(error)  # errors of the file system are bad input
    if isinstance(error, WorkerDied):
        return error.exit_code
    codes = {InputError: 2, Stopped: STOPPED, Diverged: DIVERGED, KeyboardInterrupt: 130}
    if "torch" in sys.modules:  # do not import torch for this
        codes[sys.modules["torch"].OutOfMemoryError] = OUT_OF_CUDA_MEMORY
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


# Signals N that kill: sacct of Slurm 22.05 shows a death by one of them as N:0 in place of 0:N.
_SWAPPED = (6, 7, 9, 10, 11, 13, 15)


def code_key(code: int | str) -> str:
    """The code as a shell reports it: "137" for -9, 0:9, 9:0 and SIGKILL; "" if it is no code."""
    text = str(code).strip()
    signals = {item.name: str(128 + item) for item in signal.Signals}
    if text in _CODES or text in signals:
        return signals.get(text, text)
    pair = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)  # Slurm's EXIT:SIGNAL
    if pair:
        status, number = map(int, pair.groups())
        # Slurm adds 128 to the signal of a process that dumped core.
        number = status if status in _SWAPPED else number % 128
        return str(128 + number) if number else code_key(status)
    if not re.fullmatch(r"-?\d{1,3}", text) or not -64 <= int(text) <= 255:  # 64 signals
        return ""
    return str(128 - int(text) if int(text) < 0 else int(text))  # subprocess and torchrun give -N


def of_code(code: int | str, *, foreign: bool = False, who: str = "") -> Diagnosis:
    """Diagnosis of an exit code in any form (see `code_key`).

    `foreign` if the command is not of this package, `who` if the process is not the command itself.
    """
    key = code_key(code)
    sign = f"other {key}" if foreign and key in _OURS else key  # "other 2": not our meaning of 2
    cause, actions = _CODES.get(sign, ("error", (Action("read output"),)))
    if foreign:  # a command of the user's has no checkpoint of this package
        actions = tuple(START_AGAIN if action == _GO_ON else action for action in actions)
    facts = Facts(sign=sign, who=who, exit_code=int(key) if key.isdigit() else None)
    return Diagnosis(cause, facts, actions)


def of_sign(sign: str, facts: Facts) -> Diagnosis:
    """Diagnosis of a sign in `TEXTS`, or of the exit code of a process inside the command. It has
    the first action alone: the last one, to resume, is for a code of the command itself."""
    cause, actions = {**_CODES, **TEXTS}[sign]
    return Diagnosis(cause, facts, actions[:1])


def of_state(state: str, job: Mapping[str, str], line: str = "") -> Diagnosis:
    """Diagnosis of a job's state; `job` has sacct's fields of the job, `line` proves the state."""
    cause, actions = STATES[state]
    return Diagnosis(cause, Facts(sign=state, job={**job, "State": state}, line=line), actions)


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
    """The action that resumes a run by `sbatch`, from the folder of the first submission."""
    # the job scripts name a run's folder after themselves
    script = "train_ddp" if run_dir.name.startswith("train_ddp") else "train"
    quoted = shlex.quote(str(shown(run_dir.resolve())))
    return Action("resume", {"script": script, "job_quoted": quoted})
