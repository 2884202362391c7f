"""The cause of a run's end, from its result and record: exit code, kill counters, last sample, last
phase, named parts.

A SIGKILL has no sender. Out of memory is claimed only on evidence: the cgroup's `oom_kill` counter,
or this library's own watchdog. Without it the answer is "cause unknown".
"""

import html
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, FiniteFloat

from ..config import TrainConfig
from ..errors import InputError, format_bytes, printable
from ..forecast.sizes import RUNTIME_BYTES
from ..memory.cuda import ALLOCATOR_VARIABLES, OUT_OF_CUDA_MEMORY, oom_sizes
from ..memory.record import Growth, Record
from ..registry import POLICIES
from .exit_codes import DIVERGED, EXIT_CODES, STOPPED, meaning_of, resumption

# Said by Python, numpy and torch where Linux refuses memory instead of killing: often an array
# larger than the machine.
_REFUSED = re.compile(r"(?<!OutOf)MemoryError|an't allocate memory|Cannot allocate memory")


@dataclass(frozen=True)
class Diagnosis:
    """`text` is the paragraph for people; the other fields are its parts. Sizes in bytes."""

    text: str
    cause: str  # "finished", "out of memory", "SIGKILL, cause unknown", "interrupted", "error", ...
    exit_code: int | None
    phase: str | None
    parts: dict[str, int] = field(default_factory=dict)
    last_sample: dict[str, int] = field(default_factory=dict)
    remedy: str = ""

    def __str__(self) -> str:
        return printable(self.text).replace("\n", " ")  # a phase may have any name

    __repr__ = __str__
    to_dict = asdict

    def _repr_html_(self) -> str:
        return f'<p style="max-width:60em">{html.escape(str(self))}</p>'


_Number: TypeAlias = int | FiniteFloat


class _OuterLimit(BaseModel):
    limit_bytes: _Number | None
    cgroup: str


class Result(BaseModel):
    """The fields of result.json that the package reads; other fields are kept."""

    model_config = ConfigDict(extra="allow")

    exit_code: int | None = None  # 128 + N after signal N
    duration_s: _Number | None = None
    memory_limit_bytes: _Number | None = None
    limit_by: str | None = None
    killed_by: str | None = None  # "kernel" or "watchdog"
    oom_kills: int | None = None
    ended_with: int | None = None  # the first process's own exit code, where another one was killed
    outer_limit: _OuterLimit | None = None  # of a cgroup around the run's own
    kills_around: int | None = None  # out-of-memory kills in a cgroup that other processes share
    last_output: str | None = None
    peak_bytes: _Number | None = None
    peak_source: str | None = None
    sampled_peaks_bytes: dict[str, _Number] = {}
    growth: Growth | None = None
    diagnosis: Diagnosis | None = None

    @property
    def held_peak_bytes(self) -> int:
        """Peak of anonymous + shared memory in any sample."""
        # old results lack the first
        names = ("held_bytes", "cgroup_anon_shmem_bytes", "anon_shmem_bytes")
        return int(
            next(
                (
                    self.sampled_peaks_bytes[name]
                    for name in names
                    if self.sampled_peaks_bytes.get(name)
                ),
                0,
            )
        )

    def under_limit(self) -> str:
        limit = self.memory_limit_bytes
        return f" under a limit of {format_bytes(limit)} ({self.limit_by})" if limit else ""


def ended(result: Result | None) -> str:
    """The end of a run in a few words, for a title or a table."""
    if result is None:
        return "no result"
    code, cause = (
        result.exit_code,
        "out of memory" if result.killed_by else meaning_of(str(result.exit_code)).cause,
    )
    cause = result.diagnosis.cause if result.diagnosis else cause
    return f"{cause}, exit code {code}" if code else cause


def explain_code(code: str) -> Diagnosis:
    """Diagnosis of an exit code alone, or of Slurm's `EXIT:SIGNAL` pair."""
    if not re.fullmatch(r"\d{1,3}(:\d{1,3})?", code) or int(code.partition(":")[0]) > 255:
        raise InputError(
            f"--exit-code: expected 0 to 255, or Slurm's pair such as 0:125, got {code!r}"
        )
    cause, meaning, remedy = meaning_of(code)
    number = None if ":" in code else int(code)
    return Diagnosis(
        f"Exit code {code}: {meaning}. Next: {remedy}.", cause, number, None, remedy=remedy
    )


def explain_cuda_message(message: str) -> Diagnosis:
    """Cause of torch's "CUDA out of memory" message: fragmentation, other processes, or a step too
    large."""
    oom = oom_sizes(" ".join(message.split()))  # a terminal breaks lines
    if "requested_bytes" not in oom:
        expected = "torch's message, 'CUDA out of memory. Tried to allocate 2.00 GiB ...'"
        raise InputError(f"--text: expected {expected}, got {message[:60]!r}")
    requested, unallocated = oom["requested_bytes"], oom.get("unallocated_bytes", 0)
    used = oom.get("reserved_bytes", 0) + oom.get("free_bytes", 0)
    others = (
        oom["total_bytes"] - used
        if "total_bytes" in oom and "allowed_bytes" not in oom and used
        else 0
    )
    if unallocated and unallocated + oom.get("free_bytes", 0) >= requested:
        cause, remedy = "fragmentation", "set expandable_segments=True, in a script of your own "
        remedy += f"{ALLOCATOR_VARIABLES[0]}=expandable_segments:True"
        why = f"With {format_bytes(unallocated)} reserved but unallocated there was enough, but not in one piece."
    elif others > 2**30 + requested:  # CUDA itself takes 0.3 to 0.6 GB
        cause, remedy = (
            "others on the GPU",
            "find the other process with nvidia-smi; end it, or use another GPU",
        )
        why = (
            f"{format_bytes(others)} is used outside torch's allocator, mostly by other processes."
        )
    else:
        cause, remedy = "size", EXIT_CODES["76"].remedy.partition(", or ")[2]
        why = "There was not enough memory, not even in pieces: a step needs more than the GPU has."
    parts = {name.removesuffix("_bytes"): size for name, size in oom.items()}
    text = f"Out of GPU memory, by {cause}: {_cuda_sizes(oom)} {why} Next: {remedy}."
    return Diagnosis(text, f"out of GPU memory: {cause}", None, None, parts, remedy=remedy)


def _cuda_sizes(oom: Mapping[str, Any]) -> str:
    names = {"requested": "asked for", "allocated": "allocated", "reserved": "reserved"}
    names |= {"largest_free": "the largest free block in it", "free": "free on the GPU"}
    sizes = [
        f"{format_bytes(oom[f'{key}_bytes'])} {word}"
        for key, word in names.items()
        if f"{key}_bytes" in oom
    ]
    return ", ".join(sizes) + "." if sizes else ""


def explain(
    run_dir: Path, config: TrainConfig | None, result: Result, record: Record, at_work: bool
) -> Diagnosis:
    """Diagnose the last attempt of a run, or describe a run at work; `result` is empty where none
    was written."""
    label = record.phase.label if record.phase else None
    foreign, code = _is_foreign(record), result.exit_code
    where = (
        f"in phase '{label}'"
        if label
        else "in no named phase"
        if foreign
        else "before its first phase"
    )
    took = f"{record.duration_s if result.duration_s is None else result.duration_s:.1f} s"
    memory = dict(record.parts), dict(record.last)
    in_use = []
    if record.last:
        anon, shmem, file = (format_bytes(record.last[part]) for part in ("anon", "shmem", "file"))
        in_use.append(
            f"The last sample shows {anon} anonymous, {shmem} shared and {file} file memory."
        )
    if record.parts:
        largest_first = sorted(record.parts.items(), key=lambda item: -item[1])
        in_use.append(
            f"It held {', '.join(f'{name} {format_bytes(size)}' for name, size in largest_first)}."
        )
    climbs = [str(record.growth)] if record.growth and record.growth.verdict == "climbs" else []
    if at_work:
        if not label and not foreign:
            label = where = "starting"
        since = f" for {max(0.0, time.time() - record.phase.start_s):.1f} s" if record.phase else ""
        limit = record.start.get("memory_limit_bytes")
        amount = f"{format_bytes(record.held_bytes)}{f' of {format_bytes(limit)}' if limit else ''}"
        most = f"{format_bytes(record.held_peak_bytes)} at most"
        text = [
            f"At work, {where}{since}; after {took} it holds {amount}, {most}.",
            *in_use,
            *climbs,
        ]
        return Diagnosis(" ".join(text), "at work", None, label, *memory)
    if code is None:
        remedy = (
            "start it again" if foreign else "if no process of it is alive, go on with resume=True"
        )
        text = [
            f"No result was written: the watching process was itself killed. After {took} the run was {where}."
        ]
        text += [*in_use, *climbs, f"Next: {remedy}."]
        return Diagnosis(" ".join(text), "no result", None, label, *memory, remedy)
    struck = f"the kernel's out-of-memory killer struck {result.kills_around} times in its cgroup: perhaps this run."
    around = f" Meanwhile {struck}" if result.kills_around else ""
    if code == 0:
        cause = f"Finished without an error in {took}{result.under_limit()}"
        if peak := result.held_peak_bytes:
            cause += f"; it held {format_bytes(peak)} at most"
            if result.peak_source == "kernel counter" and (result.peak_bytes or 0) > peak:
                cause += f", {format_bytes(result.peak_bytes)} with page cache"
        cause += "."
        if result.oom_kills:
            cause += f" But the kernel's out-of-memory killer ended {result.oom_kills} of its processes: their output "
            cause += "is missing."
        return Diagnosis(" ".join([cause + around, *climbs]), "finished", 0, label, *memory)
    if result.killed_by:
        limit = result.outer_limit.limit_bytes if result.outer_limit else result.memory_limit_bytes
        cause, remedy = "out of memory", _memory_remedy(config, record, limit)
        text = [f"{_killer(result)} after {took}, {where}."]
        if result.ended_with is not None:
            text.append(f"Its first process then ended with exit code {result.ended_with}.")
    else:
        cause, meaning, remedy = meaning_of(code, foreign=foreign)
        text = [
            f"Exit code {code}: {meaning}. It ended{result.under_limit()} after {took}, {where}.{around}"
        ]
        if config is not None:
            remedy = remedy.replace("resume=True (--resume)", "resume=True")
            call = resumption(run_dir, result.memory_limit_bytes)
            remedy = remedy.replace("go on with resume=True", f"go on with {call}")
        if code == 137 and result.under_limit():
            text.append("The limit's own evidence shows no out-of-memory kill.")
            remedy = "look for who sent it: the job's state in sacct, or dmesg if the whole machine had no memory left"
        if code == OUT_OF_CUDA_MEMORY and (oom := record.events.get("cuda_oom")):
            text.append(_cuda_sizes(oom) or str(oom.get("message")))
            if oom.get("alloc_retries"):
                text.append(f"Before, {oom['alloc_retries']:.0f} allocations needed a second try.")
            remedy = "; or ".join(oom.get("suggestions", [])) or remedy
        elif result.last_output:
            text.append(f"Its last words: {result.last_output}")
            if _REFUSED.search(result.last_output):
                cause, remedy = (
                    "out of memory",
                    _memory_remedy(config, record, result.memory_limit_bytes),
                )
                text.append("So it asked for more at once than this machine has.")
    if code not in (2, STOPPED, DIVERGED):
        if first := record.events.get("rank ended"):
            text.append(
                f"Rank {first['rank']} was the first to end: {meaning_of(first['exit_code']).text}."
            )
        text += [*in_use, *climbs]
    text.append(f"Next: {remedy}.")
    return Diagnosis(" ".join(text), cause, code, label, *memory, remedy)


def _is_foreign(record: Record) -> bool:
    """Whether the run is of a command that is not of this package."""
    command: list[str] = record.start.get("command") or []
    return bool(command) and command[1:3] != ["-m", "ogbnlib"]


def _killer(result: Result) -> str:
    if result.killed_by == "watchdog":
        return f"Killed by this library's watchdog (exit code {result.exit_code}){result.under_limit()}"
    text = "Killed by" if result.ended_with is None else "A process of it was killed by"
    text += f" the kernel's out-of-memory killer (exit code {result.exit_code}, oom_kill counter {result.oom_kills})"
    if outer := result.outer_limit:
        own = result.under_limit().replace("under a limit of", "its own limit of")
        text += f" for the limit of {format_bytes(outer.limit_bytes)} of the cgroup {outer.cgroup} around it"
        return text + (f", not for{own}" if own else "")
    return text + result.under_limit()


def _memory_remedy(config: TrainConfig | None, record: Record, limit_bytes: float | None) -> str:
    """The smallest change that avoids the out-of-memory kill, with its size where that is known."""
    name, parts = record.phase.name if record.phase else "", record.parts
    if _is_foreign(record):
        text = "read or build less at once" + (f" in '{name}'" if name else "")
        text += ": one loader at a time (each of PyG's copies the graph; a store of `python -m ogbnlib convert` "
        text += "stays on disk), smaller batches, fewer workers, arrays mapped with numpy.load(mmap_mode='r')"
        if record.growth and record.growth.verdict == "climbs":
            # Without marks of epochs it may be no training, and a few seconds of loading climb,
            # too.
            text = (
                "find what each epoch keeps:"
                if record.growth.epochs
                else f"{text}; in training look for"
            )
            text += " a loss that is added up without .item(), outputs or batches in a list"
        return f"{text}; or raise memory_limit"
    if config is None:
        return "raise memory_limit, or give the command its own --memory-limit below it (convert, propagate, predict)"
    if name in ("", "open", "compile kernels"):  # no data is loaded yet, so no parameter changes it
        more = (
            ", and compiling kernels, once, 90 MB more"
            if name and (limit_bytes or 0) > RUNTIME_BYTES
            else ""
        )
        return f"raise memory_limit: Python and torch alone take {format_bytes(RUNTIME_BYTES)}, whatever the data{more}"
    if "shared" in POLICIES[config.loading].smaller:
        coo = parts.get("edge_index (COO)", 0)
        if not coo:
            return "set loading=shared: it builds its CSC from the file and never holds the COO"
        # A shared CSC takes 4 bytes an edge where the COO takes 16; colptr is small.
        text = f"set loading=shared: one CSC of about {format_bytes(coo / 4)} replaces the COO ({format_bytes(coo)})"
        copies = sum(size for part, size in parts.items() if part.endswith("CSC"))
        return text + (f" and the loaders' own CSCs ({format_bytes(copies)})" if copies else "")
    if (
        name in ("load", "build shared CSC")
        and config.feature_dtype == "float32"
        and "features" in parts
    ):
        return f"set feature_dtype=float16, which saves {format_bytes(parts['features'] / 2)}"
    if config.num_workers:
        return "set num_workers=0: each worker adds its own interpreter and batches in flight"
    if name.startswith("eval"):
        seeds, fan_out = (
            config.eval_batch_size or config.batch_size,
            list(config.fan_out(training=False)),
        )
        return f"set eval_batch_size below {seeds}, or eval_num_neighbors below {fan_out}"
    if name.startswith("train"):
        return f"set batch_size below {config.batch_size}, or num_neighbors below {list(config.num_neighbors)}"
    on_disk = (
        "set loading=store, whose graph and features stay on disk; or "
        if config.loading == "shared"
        else ""
    )
    if config.feature_dtype == "float32":
        return f"{on_disk}set feature_dtype=float16, which halves the features"
    return f"{on_disk}raise memory_limit: the data set itself does not fit"
