"""Cause, meaning and next step of exit codes and of Slurm's job states; how to resume a run.

`evidence` reads messages and logs, and refers to these tables.
"""

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..display import in_notebook
from ..errors import GB, MB, Diverged, InputError, RankHung, explained
from ..files import shown
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..memory.signals import Stopped
from ..sampling.workers import WorkerDied

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
DIVERGED = 77
UNFINISHED = 78


class Meaning(NamedTuple):
    """Explanation of an exit code, a job state or a text.

    `cause` is a word or two, `text` the end of a sentence, and `remedy` the next step. `line` and
    `sizes` (bytes) are the evidence in a text.
    """

    cause: str
    text: str
    remedy: str
    line: str = ""
    sizes: Mapping[str, int] = MappingProxyType({})


_RESUME = "go on with resume=True (--resume)"
READ_LOG = "read the end of output.log"
READ_OUTPUT = "read what it printed"  # where there is no output.log, as under torchrun
# 128 + N is death by signal N, as shells report it. "0:125" and "0:53" are Slurm's EXIT:SIGNAL
# pairs: 125 is its pseudo-signal for out of memory, 53 a batch script that could not be started.
EXIT_CODES = {code: Meaning(*meaning) for code, meaning in {
    "0": ("finished", "finished without an error", "nothing to fix"),
    "1": ("error", "ended by a Python exception", READ_LOG),
    "2": ("bad input", "refused its input, or could not read or write a file", "fix what the message names"),
    "75": ("stopped at a checkpoint", "stopped at a batch boundary on a signal; its checkpoint is written", _RESUME),
    "76": ("out of GPU memory", "out of GPU memory: an allocation failed (torch.OutOfMemoryError)",
           "set expandable_segments=True, or make a step smaller: batch_size with accumulate, precision=bf16, "
           "activation_checkpointing=True, num_neighbors"),
    "77": ("diverged", "diverged: the loss, a weight or a score was not finite",
           "go on with a smaller lr (--resume --set lr=...)"),
    "78": ("not finished",
           "ended before the training was finished, without an error: code of the model ended a process, or hung",
           f"let that code raise an error instead, and {_RESUME}"),
    "120": ("error", "ended with 120: Python could not write the rest of its output",
            "check that the disk and the reader of its output are still there"),
    "124": ("time limit", "ended with 124: the time of the command `timeout` was up",
            "give `timeout` more; with --signal=USR1 a run stops at a checkpoint first"),
    "125": ("never started", "ended with 125: docker, podman or `timeout` itself failed, before the command began",
            "read the launcher's own message"),
    "126": ("never started", "never started: its file can't be executed", "check its permissions and first line"),
    "127": ("never started", "never started: it, or its interpreter, was not found", "check both names"),
    "129": ("SIGHUP", "ended by SIGHUP: its terminal was closed", "go on with resume=True, in tmux or by sbatch"),
    "130": ("interrupted", "interrupted (SIGINT: Ctrl-C, or a notebook's stop, restart or shutdown button)",
            "go on with resume=True"),
    "132": ("error", "ended by SIGILL: a library was compiled for another processor",
            "install the libraries on the kind of machine that runs them"),
    "134": ("error", "ended by SIGABRT: compiled code gave up, and its message stands above the end",
            "read that message at the end of output.log; std::bad_alloc there is a lack of memory"),
    "135": ("error",
            "ended by SIGBUS: a full /dev/shm where there are DataLoader workers, or a mapped file that became shorter",
            "give the container more shared memory (docker --shm-size=8g) or set num_workers=0; else check the data "
            "(`python -m ogbnlib verify`)"),
    "137": ("SIGKILL, cause unknown",
            "ended by SIGKILL, cause unknown: an out-of-memory killer, scancel, a time limit (`ulimit -t` too), "
            "preemption or kill -9 sends it",
            "look for 'Out of memory' in dmesg or the job's state in sacct; run under a memory_limit to get evidence"),
    "136": ("error", "ended by SIGFPE: compiled code divided by zero", READ_LOG),
    "138": ("SIGUSR1", "ended by SIGUSR1 in its first second, before it could stop at a checkpoint",
            "start it again, with resume=True (--resume) if its folder exists already"),
    "139": ("error", "ended by SIGSEGV, a crash in compiled code",
            "run with num_workers=0 and PYTHONFAULTHANDLER=1; check that torch and its extensions match"),
    "141": ("error", "ended by SIGPIPE: the reader of its output ended first", "write the output to a file"),
    "143": ("SIGTERM", "ended by SIGTERM: scancel, a time limit, preemption or kill", "go on with resume=True"),
    "152": ("time limit", "ended by SIGXCPU: its CPU time, limited by `ulimit -t`, was used up",
            "raise that limit; login nodes have one, so submit a job instead"),
    "153": ("error", "ended by SIGXFSZ: a file grew past the limit of `ulimit -f`, not of the disk",
            "raise that limit (`ulimit -f unlimited`), or write smaller files"),
    "255": ("error", "ended with 255, which ssh, srun and container launchers use when the launcher itself failed",
            "read the launcher's own messages: lost connection, missing image, node failure"),
    "0:125": ("out of memory", "ended by Slurm for passing the job's --mem (state OUT_OF_MEMORY)",
              "ask for more with --mem, or `python -m ogbnlib plan --config FILE --memory-limit SIZE` for what fits; "
              "note that srun itself returns 1 for such a step"),
    "0:53": ("never started", "never started: Slurm could not open the batch script's output file or working directory",
             "make the folder of --output and --chdir on a file system that the compute node sees"),
}.items()}  # fmt: skip
# Meanings that differ for a command other than this package's own, whose codes 75 to 78 can mean
# anything.
_FOREIGN = {
    **{
        str(code): Meaning(
            "error", f"ended with exit code {code}, which has no fixed meaning", READ_LOG
        )
        for code in range(STOPPED, UNFINISHED + 1)
    },
    "1": Meaning("error", "ended with 1, which for Python is an exception", READ_LOG),
    "2": Meaning("error", "ended with 2, which most commands use for wrong arguments", READ_LOG),
    "138": Meaning(
        "SIGUSR1", "ended by SIGUSR1, which it does not catch", "catch SIGUSR1, or do not send it"
    ),
}


# State of a Slurm job -> cause, sentence and remedy; a job in any other state is explained by its
# exit code.
PENDING = Meaning(
    "pending",
    "is {state}: {Reason}",
    "submit no second one: `squeue --start -j {job}` says when it starts, `scontrol show job {job}` what it waits for",
)
RUNNING = Meaning(
    "running", "is {state} after {Elapsed} of {Timelimit}", "watch it with squeue -j {job}"
)
STATES = {
    "COMPLETED": EXIT_CODES["0"],
    "FAILED": Meaning("error", "ended with an exit code other than 0, which says more than this state",
                      "ask `python -m ogbnlib diagnose --job {job}`, which reads code, log and run"),
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
# squeue's short names
_SHORT_STATES = {
    "PD": "PENDING",
    "R": "RUNNING",
    "CG": "COMPLETING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "F": "FAILED",
    "OOM": "OUT_OF_MEMORY",
    "TO": "TIMEOUT",
    "DL": "DEADLINE",
    "PR": "PREEMPTED",
    "CA": "CANCELLED",
    "NF": "NODE_FAIL",
    "BF": "BOOT_FAIL",
}


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
        RankHung: UNFINISHED,
        KeyboardInterrupt: 130,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


# Signals N that kill. A shell turns them into 128 + N, sacct of Slurm 22.05 shows these as N:0, and
# Python's sys.exit(-N) gives 256 - N. Other small numbers are taken for a script's own exit codes.
_OFTEN = (6, 7, 9, 10, 11, 13, 15)


def code_key(code: int | str) -> str:
    """The code as the tables' key: "137" for -9, 247, 9:0, 0:9 and SIGKILL; "" if it is no code."""
    text = str(code).strip()
    if text in EXIT_CODES:
        return text
    name = re.fullmatch(r"(?:SIG)?([A-Z]+\d?)", text.upper())
    if name:
        number = getattr(signal, f"SIG{name[1]}", None)
        return str(128 + number) if isinstance(number, signal.Signals) else ""
    pair = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    if pair:
        status, number = int(pair[1]), int(pair[2])
        if number:
            # Slurm adds 128 to the signal of a process that dumped core
            return f"0:{number}" if f"0:{number}" in EXIT_CODES else str(128 + number % 128)
        return str(128 + status) if status in _OFTEN else code_key(status)
    if not re.fullmatch(r"-\d{1,2}|\d{1,3}", text) or not -64 <= int(text) <= 255:
        return ""
    number = int(text)
    if 256 - number in _OFTEN:
        number -= 256
    return str(128 - number if number < 0 else number)  # Python's subprocess and torchrun give -N


def state_key(text: str) -> str:
    """Full name of a job state such as OUT_OF_ME+, `CANCELLED by 1000` or TO; "" if it is none."""
    word = text.strip().upper().partition(" BY ")[0]
    if word.endswith("+"):
        return next((name for name in STATES if name.startswith(word[:-1])), "")
    word = _SHORT_STATES.get(word, word)
    return word if word in STATES else ""


# Facts that a sentence omits unless they begin with a digit: unknown ones, and words such as
# Partition_Limit.
_LEFT_OUT = ("Elapsed", "Timelimit", "ReqMem")


def meaning_of_state(state: str, facts: Mapping[str, str]) -> Meaning:
    """Meaning of a job's state with these facts. Its text ends a sentence that begins with the job.

    The facts are sacct's fields, `job` (its id), `state`, `resume` (how to go on) and `less` (how
    to need less memory).
    """
    meaning = STATES[state]
    known: dict[str, str] = {
        "Reason": "no reason in its log",
        "NodeList": "",
        "job": "ID",
        "state": state,
        "resume": "submit it again",
        "less": "see `plan`",
        **dict.fromkeys(_LEFT_OUT, ""),
        **facts,
    }
    text = meaning.text
    for name in _LEFT_OUT:
        if not known[name][:1].isdigit():
            text = re.sub(rf" (of|after) \{{{name}\}}", "", text)
    if not known["NodeList"]:
        known["NodeList"] = "NODE"
        text = re.sub(r",? \{NodeList\}", "", text)
    return meaning._replace(text=text.format(**known), remedy=meaning.remedy.format(**known))


def meaning_of(code: int | str, *, foreign: bool = False) -> Meaning:
    """Meaning of an exit code in any form (see `code_key`); `foreign` if the command is not of this
    package."""
    key = code_key(code)
    if foreign and key in _FOREIGN:
        return _FOREIGN[key]
    if key in EXIT_CODES:
        meaning = EXIT_CODES[key]
        again = meaning.remedy.replace("go on with resume=True", "start it again")
        return meaning._replace(remedy=again if foreign else meaning.remedy)
    number = int(key) - 128 if key.isdigit() else 0
    if 0 < number <= 64:
        name = next((f" ({one.name})" for one in signal.Signals if one == number), "")
        return Meaning(
            "error", f"ended by signal {number}{name}", f"{READ_LOG}, and `man 7 signal`"
        )
    return Meaning("error", f"ended with exit code {code}, which has no fixed meaning", READ_LOG)


def sbatch_resumption(run_dir: Path) -> str:
    """The command that resumes a run in a Slurm job, for the folder of the first submission."""
    script = "train_ddp" if run_dir.name.startswith("train_ddp") else "train"
    place = shlex.quote(str(shown(run_dir.resolve())))
    return f"sbatch slurm/{script}.sbatch --run-dir {place} --resume"


def resumption(run_dir: Path, limit: float | None) -> str:
    """The call in Python and the shell command that resume a run.

    Inside a Slurm job the command submits another job, and the call is given in a notebook only.
    """
    run_dir = run_dir.absolute()  # the reader's working folder may be another one
    command = f"python -m ogbnlib train --run-dir {shlex.quote(str(run_dir))} --resume"
    arguments = [f'run_dir="{run_dir}"']
    if limit:
        size = f"{limit / GB:g} GB" if limit >= GB else f"{limit / MB:g} MB"
        arguments.append(f'memory_limit="{size}"')
        command += f" --memory-limit '{size}'"
    call = f"run({', '.join(arguments)}, resume=True)"
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return f"{call}, or `{command}`"
    command = f"`{sbatch_resumption(run_dir)}`, unless Slurm requeued job {job}"
    return f"{call}, or {command}" if in_notebook() else command
