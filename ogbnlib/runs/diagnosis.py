"""What ended a run, read from what it left behind: exit code, kill counters, last samples, last phase, named parts.

A SIGKILL says nothing about its sender. Out of memory is claimed only on evidence (the cgroup's `oom_kill` counter, or
this library's own watchdog); without it the answer is "cause unknown" with the possible senders.
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..errors import GB, MB, Diverged, InputError, RankHung, format_bytes
from ..forecast.oom_suggestions import oom_suggestions
from ..forecast.sizes import RUNTIME_BYTES
from ..memory.cuda import ALLOCATOR_VARIABLES, OUT_OF_CUDA_MEMORY, oom_sizes
from ..memory.signals import Stopped
from ..memory.tally import Tally
from ..memory.workers import WorkerDied
from ..progress import in_notebook
from ..registry import POLICIES

_COMPILING = ", and compiling kernels, once, 90 MB more"
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
DIVERGED = 77
UNFINISHED = 78
_CONTEXT_BYTES = 2**30  # what CUDA itself takes of a GPU is less: 0.3 to 0.6 GB
# JupyterLab sends it, too, when a kernel is restarted or shut down, before it asks for the end.
_SIGINT = "SIGINT: Ctrl-C, or a notebook's stop, restart or shutdown button"
# Exit codes: 128 + N is death by signal N as shells and this library report it; "0:125" and "0:53" are Slurm's
# EXIT:SIGNAL pairs (125 is its pseudo-signal for out of memory, 53 for a batch script that could not be started).
EXIT_CODES: dict[str, tuple[str, str, str]] = {  # (word, meaning, remedy)
    "0": ("finished", "finished without an error", "nothing to mend"),
    "1": ("error", "ended by a Python exception", "read the end of output.log"),
    "2": ("bad input", "refused its input, or could not read or write a file", "mend what the message names"),
    "75": (
        "stopped at a checkpoint",
        "stopped at a batch boundary on SIGUSR1, SIGTERM or SIGHUP, as a time limit, preemption or a closed terminal "
        "sends them; its checkpoint is written",
        "go on with resume=True (--resume)",
    ),
    "76": (
        "out of GPU memory",
        "out of GPU memory: an allocation failed (torch.OutOfMemoryError)",
        "set expandable_segments=True, or make a step smaller: batch_size with accumulate, precision=bf16, "
        "activation_checkpointing=True, num_neighbors",
    ),
    "77": (
        "diverged",
        "diverged: the loss, a weight or a score was no longer finite; no such weight is in a checkpoint",
        "go on with a smaller lr (--resume --set lr=...)",
    ),
    "78": (
        "not finished",
        "ended before the training was finished, without an error: code of the model or of a module that it imports "
        "ended a process of it (os._exit), or hung",
        "let that code raise an error instead, and go on with resume=True (--resume)",
    ),
    "126": ("never started", "never started: its file can't be executed", "check its permissions and first line"),
    "127": ("never started", "never started: it, or its interpreter, was not found", "check both names"),
    "129": ("SIGHUP", "ended by SIGHUP: its terminal was closed", "go on with resume=True, in tmux or by sbatch"),
    "130": ("interrupted", f"interrupted ({_SIGINT})", "go on with resume=True"),
    "135": (
        "error",
        "ended by SIGBUS, which for DataLoader workers means a full /dev/shm, and for a mapped file one that shrank",
        "give the container more shared memory (docker --shm-size=8g), or set num_workers=0",
    ),
    "137": (
        "SIGKILL, cause unknown",
        "ended by SIGKILL, cause unknown: an out-of-memory killer sends it, but so do scancel, a time limit, "
        "preemption and kill -9",
        "look for 'Out of memory' in dmesg or the job's state in sacct; run under a memory_limit to get evidence",
    ),
    "138": (
        "SIGUSR1",
        "ended by SIGUSR1 in its first second, before it could stop at a checkpoint",
        "start it again, with resume=True (--resume) where its folder is there already",
    ),
    "139": (
        "error",
        "ended by SIGSEGV, a crash in compiled code",
        "run with num_workers=0 and PYTHONFAULTHANDLER=1 to see where; check that torch and its extensions match",
    ),
    "141": (
        "error",
        "ended by SIGPIPE: it wrote to a pipe whose reader was gone, as `python ... | head` leaves it",
        "write the output to a file; in job scripts, `set -o pipefail` turns a closed pipe into this code",
    ),
    "143": (
        "SIGTERM",
        "ended by SIGTERM: scancel, a time limit, preemption or kill",
        "go on with resume=True; in Slurm, sacct says which it was",
    ),
    "255": (
        "error",
        "ended with 255, which ssh, srun and container launchers use when the launcher itself failed",
        "look at the launcher's own messages: lost connection, missing image, node failure",
    ),
    "0:125": (
        "out of memory",
        "ended by Slurm for passing the job's --mem (state OUT_OF_MEMORY)",
        "ask for more with --mem, or use loading=shared; note that srun itself returns 1 for such a step",
    ),
    "0:53": (
        "never started",
        "never started: Slurm could not open the batch script's output file or working directory",
        "make the folder of --output and --chdir on a file system that the compute node sees",
    ),
}
# Of a command that is none of ours, where it is another thing: our own codes from 75 on mean nothing there.
_FOREIGN = {
    "1": ("error", "ended with 1, which for Python is an exception", "read the end of output.log"),
    "2": ("error", "ended with 2, which most commands use for wrong arguments", "read the end of output.log"),
    "130": ("interrupted", f"interrupted ({_SIGINT})", "start it again"),
    "138": ("SIGUSR1", "ended by SIGUSR1, which it does not catch", "have nobody send it, or catch it"),
}


def exit_code_of(error: BaseException) -> int:
    """The exit code with which a process ends that was stopped by this exception."""
    torch = sys.modules.get("torch")  # without it nothing of it was raised
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_CUDA_MEMORY
    if isinstance(error, WorkerDied):
        return error.exit_code
    codes = {InputError: 2, Stopped: STOPPED, Diverged: DIVERGED, RankHung: UNFINISHED, KeyboardInterrupt: 130}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


def meaning_of(code: int | str, *, foreign: bool = False) -> tuple[str, str, str]:
    """(word, meaning, remedy) of an exit code, or of Slurm's `EXIT:SIGNAL` pair such as "0:125".

    Args:
        foreign: It is that of a command that is none of this package's.
    """
    key = str(code)
    ours = foreign and key.isdigit() and STOPPED <= int(key) <= UNFINISHED
    if known := (foreign and _FOREIGN.get(key)) or (None if ours else EXIT_CODES.get(key)):
        word, meaning, remedy = known
        return word, meaning, remedy.replace("go on with resume=True", "start it again") if foreign else remedy
    if key.isdigit() and 128 < int(key) < 128 + 65:
        number, name = int(key) - 128, ""
        with contextlib.suppress(ValueError):
            name = f" ({signal.Signals(number).name})"
        return "error", f"ended by signal {number}{name}", "read the end of output.log, and what `man 7 signal` says"
    return "error", f"ended with exit code {key}, which has no fixed meaning", "read the end of output.log"


def explain_code(code: str) -> Diagnosis:
    """What an exit code alone says, or Slurm's `EXIT:SIGNAL` pair.

    Raises:
        InputError: for anything else.
    """
    if not re.fullmatch(r"\d{1,3}(:\d{1,3})?", code) or int(code.partition(":")[0]) > 255:
        raise InputError(f"--exit-code: expected 0 to 255, or Slurm's pair such as 0:125, got {code!r}")
    word, meaning, remedy = meaning_of(code)
    number = None if ":" in code else int(code)
    return Diagnosis(f"Exit code {code}: {meaning}. Next: {remedy}.", word, number, None, remedy=remedy)


def explain_exit_code(code: int | str) -> tuple[str, str]:
    """(meaning, remedy) of an exit code, see `meaning_of`."""
    return meaning_of(code)[1:]


def word_of(code: int | str) -> str:
    """The cause that an exit code alone tells, in a word or two."""
    return meaning_of(code)[0]


def ended(result: Mapping[str, Any]) -> str:
    """How a run ended by its result.json, in a few words: for a title or a table."""
    if not result:
        return "no result"
    code, told = result.get("exit_code"), result.get("diagnosis")
    cause = told["cause"] if told else "out of memory" if result.get("killed_by") else word_of(str(code))
    return cause if code in (0, None) else f"{cause}, exit code {code}"


_PARTS = {"anon": "anonymous", "shmem": "shared", "file": "file memory"}


def labelled_html(rows: Mapping[str, str]) -> str:
    """Labelled lines as a small table, broken between words."""
    style = "text-align:left;vertical-align:top"
    cells = "".join(
        f'<tr><th style="{style};white-space:nowrap">{html.escape(label)}</th>'
        f'<td style="{style};max-width:60em;overflow-wrap:break-word">{html.escape(text)}</td></tr>'
        for label, text in rows.items()
    )
    return f"<table>{cells}</table>"


@dataclass(frozen=True)
class Diagnosis:
    """`text` is the paragraph for people; the rest is what it was made of. Sizes in bytes."""

    text: str
    cause: str  # "finished", "out of memory", "SIGKILL, cause unknown", "interrupted", "error", ...
    exit_code: int | None
    phase: str | None
    parts: dict[str, int] = field(default_factory=dict)
    last_sample: dict[str, int] = field(default_factory=dict)
    remedy: str = ""
    why: str = ""  # the evidence: who killed it for which limit, or what its exit code means, and its last words

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return "\n".join(f"{label}: {text}" for label, text in self.labelled().items())

    def _repr_html_(self) -> str:
        return labelled_html(self.labelled())

    def labelled(self) -> dict[str, str]:
        """The lines of the card that a notebook shows."""
        if self.exit_code is None or self.exit_code == 0:
            return {"state": self.text}
        lines = {"ended": f"{self.cause}, exit code {self.exit_code}"}
        if self.why:
            killer = self.why.removeprefix("Killed by ")
            lines["what happened" if killer == self.why else "killed by"] = killer
        held = [f"{format_bytes(size)} {_PARTS[part]}" for part, size in self.last_sample.items() if part in _PARTS]
        held += [f"{name} {format_bytes(size)}" for name, size in sorted(self.parts.items(), key=lambda item: -item[1])]
        lines |= {"in phase": self.phase or "before the first", "memory in use": ", ".join(held) or "unknown"}
        return {**lines, "next step": self.remedy or "nothing to fix"}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _is_foreign(tally: Tally) -> bool:
    """Whether it was another command than one of this package's, which have other exit codes and no `loading`."""
    command: list[str] = tally.events.get("start", {}).get("command") or []
    return bool(command) and command[1:3] != ["-m", "ogbnlib"]


def _foreign_remedy(tally: Tally) -> str:
    """What to change in a script of which nothing is known but its phases and what it held."""
    name = tally.phase.name.lower() if tally.phase else ""
    steps = any(word in name for word in ("train", "epoch", "eval", "test", "step", "batch"))
    growth = tally.growth if tally.growth and tally.growth.verdict == "climbs" else None
    leak = "what each epoch keeps: a loss that is added up without .item(), outputs or batches in a list"
    if growth and growth.over_s is None and 2 * growth.climbed_bytes > (tally.held_bytes or 0):
        text = f"find {leak}"
    elif sum("loader" in phase.lower() for phase in tally.phases) > 1:
        text = "build one loader at a time, as each of PyG's keeps a copy of the graph; or convert the graph once "
        text += "(`python -m ogbnlib convert`) and give all loaders its store, which stays on disk"
    elif tally.last and tally.last["shmem"] > tally.last["anon"]:
        text = "share less through /dev/shm, where DataLoader workers and shared tensors lie: lower num_workers"
    elif (tally.num_processes or 1) > 2:
        text = (
            f"start fewer processes: {tally.num_processes} held it together; for DataLoader workers lower num_workers"
        )
    elif growth and (steps or name in ("", "cell")):
        text = f"if it was not still reading its data, find {leak}"
    elif steps:
        text = "make batches, fan-outs or the model smaller"
    elif name not in ("", "cell"):
        text = f"read or build less at once in '{name}', or map it (numpy.load(..., mmap_mode='r'))"
    else:
        text = 'name its moments, `with ogbnlib.phase("load"):`, to see which of them takes it'
    return f"{text}; or raise memory_limit"


def _remedy(config: TrainConfig | None, tally: Tally, limit_bytes: int | None) -> str:
    """The smallest change that takes away what the run died of, with its size where that is known."""
    if _is_foreign(tally):
        return _foreign_remedy(tally)
    if config is None:
        return "raise memory_limit, or give the command its own --memory-limit below it (convert, propagate, predict)"
    name, parts = tally.phase.name if tally.phase else "", tally.parts
    if name in ("", "open", "compile kernels"):  # no data is loaded yet, so no parameter changes it
        more = _COMPILING if name == "compile kernels" and (limit_bytes or 0) > RUNTIME_BYTES else ""
        return f"raise memory_limit: Python and torch alone take {format_bytes(RUNTIME_BYTES)}, whatever the data{more}"
    if "shared" in POLICIES[config.loading].smaller:
        coo = parts.get("edge_index (COO)", 0)
        kept = sum(size for part, size in parts.items() if part.endswith("CSC"))
        if not coo:
            return "set loading=shared: it builds its CSC from the file and never holds the COO"
        # A shared CSC takes 4 bytes an edge where the COO takes 16; colptr is small beside it.
        text = f"set loading=shared: one CSC of about {format_bytes(coo / 4)} replaces the COO ({format_bytes(coo)})"
        return text + (f" and the loaders' own CSCs ({format_bytes(kept)})" if kept else "")
    if name in ("load", "build shared CSC") and config.feature_dtype == "float32":
        half = parts.get("features", 0) / 2
        saved = f", which saves {format_bytes(half)}" if half else ", which halves the features"
        return f"set feature_dtype=float16{saved}"
    if config.num_workers:
        return "set num_workers=0: each worker adds its own interpreter and batches in flight"
    if name.startswith("eval"):
        seeds, fan_out = config.eval_batch_size or config.batch_size, list(config.fan_out(training=False))
        return f"set eval_batch_size below {seeds}, or eval_num_neighbors below {fan_out}"
    if name.startswith("train"):
        return f"set batch_size below {config.batch_size}, or num_neighbors below {list(config.num_neighbors)}"
    if config.feature_dtype == "float32":
        return "set feature_dtype=float16, which halves the features"
    return "the data set itself does not fit: raise memory_limit"


def _out_of_cuda(config: TrainConfig | None, oom: dict[str, Any]) -> tuple[list[str], str]:
    """Sentences on a failed allocation, and suggestions ("" where there are none)."""
    text = [_cuda_sizes(oom) or str(oom.get("message"))]
    if oom.get("alloc_retries"):
        text.append(f"Before, {oom['alloc_retries']:.0f} allocations needed a second try.")
    return text, "; or ".join(oom_suggestions(config, oom)) if config else ""


def _cuda_sizes(oom: Mapping[str, Any]) -> str:
    names = {"requested_bytes": "asked for", "allocated_bytes": "allocated", "reserved_bytes": "reserved"}
    names |= {"largest_free_bytes": "the largest free block in it", "free_bytes": "free on the GPU"}
    sizes = [f"{format_bytes(oom[key])} {word}" for key, word in names.items() if key in oom]
    return ", ".join(sizes) + "." if sizes else ""


def explain_cuda_message(message: str) -> Diagnosis:
    """What torch's message on a failed allocation says: memory in pieces, a step too large, or others on the GPU.

    Raises:
        InputError: for a text without such a message.
    """
    oom = oom_sizes(" ".join(message.split()))  # a terminal breaks lines
    if "requested_bytes" not in oom:
        raise InputError(
            "--text: expected torch's message, 'CUDA out of memory. Tried to allocate 2.00 GiB ...', "
            f"got {message[:60]!r}"
        )
    requested, unallocated = oom["requested_bytes"], oom.get("unallocated_bytes", 0)
    taken = oom.get("reserved_bytes", 0) + oom.get("free_bytes", 0)
    others = oom["total_bytes"] - taken if "total_bytes" in oom and "allowed_bytes" not in oom and taken else 0
    if unallocated >= requested:
        cause, remedy = "fragmentation", "set expandable_segments=True, in a script of your own "
        remedy += f"{ALLOCATOR_VARIABLES[0]}=expandable_segments:True"
        why = f"{format_bytes(unallocated)} is reserved but unallocated, more than was asked for, but not in one piece."
    elif others > _CONTEXT_BYTES + requested:
        cause, remedy = "others on the GPU", "see who it is with nvidia-smi; end it, or take another GPU"
        why = f"{format_bytes(others)} is held outside torch's allocator, by other processes but for the CUDA context."
    else:
        cause, remedy = "size", EXIT_CODES["76"][2].partition(", or ")[2]
        why = "What was asked for was not there, not even in pieces: a step takes more than the GPU has."
    parts = {name.removesuffix("_bytes"): size for name, size in oom.items()}
    text = f"Out of GPU memory, by {cause}: {_cuda_sizes(oom)} {why} Next: {remedy}."
    return Diagnosis(text, f"out of GPU memory: {cause}", None, None, parts, remedy=remedy)


def _holding(tally: Tally) -> list[str]:
    sentences = []
    if tally.last:
        anon, shmem, file = (format_bytes(tally.last[part]) for part in ("anon", "shmem", "file"))
        text = f"The last sample shows {anon} anonymous, {shmem} shared and {file} file memory"
        began = tally.phase.held_bytes if tally.phase else None
        if began is not None and (grown := (tally.held_bytes or 0) - began) > 2**20:
            text += f"; {format_bytes(grown)} of it came since the phase began"
        sentences.append(text + ".")
    if tally.parts:
        largest = sorted(tally.parts.items(), key=lambda item: -item[1])
        sentences.append("It held " + ", ".join(f"{name} {format_bytes(size)}" for name, size in largest) + ".")
    return sentences


def held_peak_bytes(result: Mapping[str, Any]) -> int:
    """The most anonymous + shared memory in any sample of a result: what a kill goes by, unlike the page cache."""
    peaks = result.get("sampled_peaks_bytes", {})
    names = ("held_bytes", "cgroup_anon_shmem_bytes", "anon_shmem_bytes")  # the first is younger than some results
    return int(next((peaks[name] for name in names if peaks.get(name)), 0))


def _at_most(result: Mapping[str, Any]) -> str:
    held, peak = held_peak_bytes(result), result.get("peak_bytes") or 0
    if not held:
        return ""
    cached = result.get("peak_source") == "kernel counter" and peak > held
    return f"; it held {format_bytes(held)} at most" + (f", {format_bytes(peak)} with page cache" if cached else "")


def _killer(result: Mapping[str, Any]) -> str:
    """Who killed a run, on what evidence and for which limit."""
    if result["killed_by"] == "watchdog":
        return f"Killed by this library's watchdog (exit code {result['exit_code']}){_limited(result)}"
    text = "Killed by" if result.get("ended_with") is None else "A process of it was killed by"
    text += " the kernel's out-of-memory killer"
    text += f" (exit code {result['exit_code']}, oom_kill counter {result.get('oom_kills')})"
    if outer := result.get("outer_limit"):
        own = _limited(result).replace("under a limit of", "its own limit of")
        text += f" for the limit of {format_bytes(outer['limit_bytes'])} of the cgroup {outer['cgroup']} around it"
        return text + (f", not for{own}" if own else "")
    return text + _limited(result)


def _kills_around(result: Mapping[str, Any]) -> str:
    text = " Meanwhile the kernel's out-of-memory killer struck {} times in its cgroup: perhaps a process of this run."
    return text.format(kills) if (kills := result.get("kills_around")) else ""


def _limited(result: Mapping[str, Any]) -> str:
    limit = result.get("memory_limit_bytes")
    return f" under a limit of {format_bytes(limit)} ({result.get('limit_by')})" if limit else ""


def _unfinished(result: Mapping[str, Any], tally: Tally, where: str, at_work: bool) -> tuple[str, str, str]:
    """(cause, text, remedy) of a run that has no exit code, or none yet."""
    after = f"after {result.get('duration_s', tally.duration_s):.1f} s"
    if pid := result.get("watched_pid"):
        text = f"Process {pid} ended {after} of being watched{_at_most(result)}; its exit code is its parent's to know."
        return "ended", text + _kills_around(result), "run it with `python -m ogbnlib watch -- COMMAND` to know more"
    if at_work:
        since = f" for {max(0.0, time.time() - tally.phase.began_s):.1f} s" if tally.phase else ""
        text = f"At work, {where}{since}; {after} it holds {format_bytes(tally.held_bytes)}"
        start = tally.events.get("start", {})
        limit = f" of {format_bytes(limit_bytes)}" if (limit_bytes := start.get("memory_limit_bytes")) else ""
        return "at work", f"{text}{limit}, {format_bytes(tally.held_peak_bytes)} at most so far.", ""
    text = f"No result was written: the watching process was itself killed. {after.capitalize()} the run was {where}."
    remedy = "start it again" if _is_foreign(tally) else "if no process of it lives any more, go on with resume=True"
    return "no result", text, remedy


def sbatch_resumption(run_dir: Path) -> str:
    """The command that goes on with a run in a Slurm job, for the folder that it was submitted from."""
    script = "train_ddp" if run_dir.name.startswith("train_ddp") else "train"
    with contextlib.suppress(ValueError):
        run_dir = run_dir.resolve().relative_to(Path.cwd())
    return f"sbatch slurm/{script}.sbatch --run-dir {shlex.quote(str(run_dir))} --resume"


def resumption(run_dir: Path, result: Mapping[str, Any]) -> str:
    """The call that goes on with a run, in a notebook and in a shell; in a Slurm job a shell submits another job."""
    run_dir = run_dir.absolute()  # the reader's working folder may be another one
    limit = result.get("memory_limit_bytes")
    size = "" if not limit else f"{limit / GB:g} GB" if limit >= GB else f"{limit / MB:g} MB"
    call = f'run(run_dir="{run_dir}", ' + (f'memory_limit="{size}", ' if limit else "") + "resume=True)"
    if job := os.environ.get("SLURM_JOB_ID"):
        command = f"`{sbatch_resumption(run_dir)}`, unless Slurm requeued job {job} (squeue --jobs={job})"
        return f"{call}, or {command}" if in_notebook() else command
    command = f"python -m ogbnlib train --run-dir {shlex.quote(str(run_dir))} --resume"
    return f"{call}, or `{command}" + (f" --memory-limit '{size}'`" if limit else "`")


def explain(
    run_dir: Path, config: TrainConfig | None, result: Mapping[str, Any], tally: Tally, at_work: bool = False
) -> Diagnosis:
    """Say what ended a run's last attempt, or how it stands.

    Args:
        result: What is in its result.json; empty where none was written, or is still to be.
        at_work: Whether somebody holds the folder's lock.
    """
    label = tally.phase.label if tally.phase else None
    foreign, run_dir = _is_foreign(tally), run_dir.absolute()
    starting = at_work and not label and not foreign
    where = f"in phase '{label}'" if label else "in no named phase" if foreign else "before its first phase"
    where, label = ("starting", "starting") if starting else (where, label)
    after = f"after {result.get('duration_s', tally.duration_s):.1f} s"
    told = dict(tally.parts), dict(tally.last)
    climbs = [str(growth)] if (growth := tally.growth) and growth.verdict == "climbs" else []
    if result.get("exit_code") is None:
        cause, said, remedy = _unfinished(result, tally, where, at_work)
        text = [
            said,
            *([] if cause == "ended" else _holding(tally)),
            *climbs,
            *([f"Next: {remedy}."] if remedy else []),
        ]
        return Diagnosis(" ".join(text), cause, None, label, *told, remedy)
    code = int(result["exit_code"])
    if code == 0:
        done = f"Finished without an error {after.replace('after', 'in')}{_limited(result)}{_at_most(result)}."
        if kills := result.get("oom_kills"):
            done += f" But the kernel's out-of-memory killer ended {kills} of its processes: what they made is missing."
        done += _kills_around(result)
        return Diagnosis(" ".join([done, *climbs]), "finished", 0, label, *told)
    if result.get("killed_by"):
        limit = (result.get("outer_limit") or {}).get("limit_bytes", result.get("memory_limit_bytes"))
        cause, remedy = "out of memory", _remedy(config, tally, limit)
        text = [f"{_killer(result)} {after}, {where}."]
        if (own := result.get("ended_with")) is not None:
            text.append(f"Its first process then ended with exit code {own}.")
    else:
        cause, meaning, remedy = meaning_of(code, foreign=foreign)
        if code == 130 and (by := result.get("interrupted_by")):
            meaning = f"interrupted by {by}"
        text = [f"Exit code {code}: {meaning}. It ended{_limited(result)} {after}, {where}.{_kills_around(result)}"]
        if code == 135 and config is not None and not config.num_workers:
            remedy = "look at the data set's files (`python -m ogbnlib verify`) and at their disk"
        if config is not None:
            remedy = remedy.replace("resume=True (--resume)", "resume=True")
            remedy = remedy.replace("go on with resume=True", f"go on with {resumption(run_dir, result)}")
        if code == 137 and _limited(result):
            text.append("The limit's own evidence shows no out-of-memory kill.")
            remedy = (
                "look for who sent it: the job's state in sacct, or dmesg where the whole machine had no memory left"
            )
        if code == OUT_OF_CUDA_MEMORY and (oom := tally.events.get("cuda_oom")):
            more, suggested = _out_of_cuda(config, oom)
            text, remedy = text + more, suggested or remedy
        elif message := result.get("last_output"):
            text.append(f"Its last words: {message}")
    why = " ".join(text)
    if code not in (2, STOPPED, DIVERGED):
        if first := tally.events.get("rank ended"):
            meaning, _ = explain_exit_code(first["exit_code"])
            text.append(f"Rank {first['rank']} was the first to end: {meaning}.")
        text += [*_holding(tally), *climbs]
    text.append(f"Next: {remedy}.")
    return Diagnosis(" ".join(text), cause, code, label, *told, remedy, why)
