"""What ended a run, read from what it left behind: exit code, kill counters, last samples, last phase, named parts.

A SIGKILL says nothing about its sender. Out of memory is claimed only on evidence (the cgroup's `oom_kill` counter, or
this library's own watchdog); without it the answer is "cause unknown" with the possible senders.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..errors import InputError, format_bytes
from ..forecast.cures import cuda_cures
from ..memory.cuda import OUT_OF_CUDA_MEMORY, SNAPSHOT
from ..memory.recorder import EVENTS
from .timeline import Phase, last_attempt, read_events, read_parts, read_phases, read_timeline

RESULT = "result.json"
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
# Exit codes: 128 + N is death by signal N as shells and this library report it; "0:125" and "0:53" are Slurm's
# EXIT:SIGNAL pairs (125 is its pseudo-signal for out of memory, 53 for a batch script that could not be started).
EXIT_CODES: dict[str, tuple[str, str]] = {
    "0": ("finished without an error", "nothing to mend"),
    "1": ("ended by a Python exception", "read the traceback at the end of output.log"),
    "2": ("refused its input before any work", "correct the parameter or file that the message names"),
    "75": (
        "stopped at a batch boundary on SIGUSR1 or SIGTERM, as a time limit or preemption sends them; "
        "its checkpoint is written",
        "go on with resume=True (--resume)",
    ),
    "76": (
        "out of GPU memory: an allocation failed (torch.OutOfMemoryError)",
        "set expandable_segments=True, or make a step smaller: batch_size with accumulate, precision=bf16, "
        "activation_checkpointing=True, num_neighbors",
    ),
    "130": ("interrupted (SIGINT: Ctrl-C, or the notebook's stop button)", "go on with resume=True"),
    "135": (
        "ended by SIGBUS, which for DataLoader workers means a full /dev/shm, and for a mapped file one that shrank",
        "give the container more shared memory (docker --shm-size=8g), or set num_workers=0",
    ),
    "137": (
        "ended by SIGKILL, cause unknown: an out-of-memory killer sends it, but so do scancel, a time limit, "
        "preemption and kill -9",
        "look for 'Out of memory' in dmesg or the job's state in sacct; run under a memory_limit to get evidence",
    ),
    "139": (
        "ended by SIGSEGV, a crash in compiled code",
        "run with num_workers=0 and PYTHONFAULTHANDLER=1 to see where; check that torch and its extensions match",
    ),
    "141": (
        "ended by SIGPIPE: it wrote to a pipe whose reader was gone, as `python ... | head` leaves it",
        "write the output to a file; in job scripts, `set -o pipefail` turns a closed pipe into this code",
    ),
    "143": (
        "ended by SIGTERM: scancel, a time limit, preemption or kill",
        "go on with resume=True; in Slurm, sacct says which it was",
    ),
    "255": (
        "ended with 255, which ssh, srun and container launchers use when the launcher itself failed",
        "look at the launcher's own messages: lost connection, missing image, node failure",
    ),
    "0:125": (
        "ended by Slurm for passing the job's --mem (state OUT_OF_MEMORY)",
        "ask for more with --mem, or use loading=shared; note that srun itself returns 1 for such a step",
    ),
    "0:53": (
        "never started: Slurm could not open the batch script's output file or working directory",
        "make the folder of --output and --chdir on a file system that the compute node sees",
    ),
}


def explain_exit_code(code: int | str) -> tuple[str, str]:
    """(meaning, remedy) of an exit code, or of Slurm's `EXIT:SIGNAL` pair such as "0:125"."""
    key = str(code)
    if key in EXIT_CODES:
        return EXIT_CODES[key]
    if key.isdigit() and 128 < int(key) < 128 + 65:
        return f"ended by signal {int(key) - 128}", "look up the signal with `kill -l`, and the end of output.log"
    return f"ended with exit code {key}, which has no fixed meaning", "read the end of output.log"


@dataclass(frozen=True)
class Diagnosis:
    """`text` is the paragraph for people; the rest is what it was made of. Sizes in bytes."""

    text: str
    cause: str  # "finished", "out of memory", "SIGKILL, cause unknown", "interrupted", "error", ...
    exit_code: int | None
    phase: str | None
    parts: dict[str, int] = field(default_factory=dict)
    last_sample: dict[str, float] = field(default_factory=dict)
    remedy: str = ""

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_result(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The run's result.json, or None when the watching process did not live to write it."""
    path = Path(run_dir) / RESULT
    if not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: expected JSON, found something else ({error})") from None
    return result


def _last_phase(phases: list[Phase], attempts: int) -> Phase | None:
    """The innermost phase in which the last attempt ended, or the last one it finished."""
    last = [phase for phase in phases if phase.attempt == attempts]
    if not last:
        return None
    unfinished = [phase for phase in last if phase.end_s is None or "failed" in phase.info]
    return max(unfinished, key=lambda phase: (phase.depth, phase.start_s)) if unfinished else last[-1]


def _remedy(config: TrainConfig | None, phase: Phase | None, parts: dict[str, int]) -> str:
    """The smallest change that takes away what the run died of, with its size where that is known."""
    if config is None:
        return "run with loading=shared, which keeps one CSC for all loaders"
    name = phase.name if phase else ""
    if config.loading in ("eager", "lazy"):
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
    if name.startswith(("train", "eval")):
        return f"set batch_size below {config.batch_size}, or num_neighbors below {list(config.num_neighbors)}"
    if config.feature_dtype == "float32":
        return "set feature_dtype=float16, which halves the features"
    return "the data set itself does not fit: raise memory_limit"


def _out_of_cuda(run_dir: Path, config: TrainConfig | None, oom: dict[str, Any]) -> tuple[list[str], str | None]:
    """Sentences on a failed allocation, and the remedy where there is one to name."""
    names = {"requested_bytes": "asked for", "allocated_bytes": "allocated", "reserved_bytes": "reserved"}
    names |= {"largest_free_bytes": "the largest free block in it", "free_bytes": "free on the GPU"}
    sizes = [f"{format_bytes(oom[key])} {word}" for key, word in names.items() if key in oom]
    text = [", ".join(sizes) + "." if sizes else oom["message"]]
    if oom.get("alloc_retries"):
        text.append(f"{oom['alloc_retries']:.0f} allocations had needed a second try before.")
    if (run_dir / SNAPSHOT).is_file():
        command = f"python -m torch.cuda._memory_viz trace_plot {run_dir / SNAPSHOT} -o cuda.html"
        text.append(f"What was allocated, over time: `{command}`.")
    cures = cuda_cures(config, oom) if config else []
    return text, "; or ".join(cures) or None


def _holding(parts: dict[str, int], sample: dict[str, float], started: float | None) -> list[str]:
    sentences = []
    anon, shmem = sample.get("anon", float("nan")), sample.get("shmem", float("nan"))
    if anon == anon:
        text = f"The last sample shows {format_bytes(anon)} anonymous, {format_bytes(shmem)} shared"
        text += f" and {format_bytes(sample['file'])} file memory" if sample.get("file") == sample.get("file") else ""
        if started is not None and anon + shmem - started > 2**20:
            text += f"; {format_bytes(anon + shmem - started)} of it came since the phase began"
        sentences.append(text + ".")
    if parts:
        largest = sorted(parts.items(), key=lambda item: -item[1])
        sentences.append("It held " + ", ".join(f"{name} {format_bytes(size)}" for name, size in largest) + ".")
    return sentences


def held_peak_bytes(result: dict[str, Any]) -> int:
    """The most anonymous + shared memory in any sample of a result: what a kill goes by, unlike the page cache."""
    peaks = result.get("sampled_peaks_bytes", {})
    return int(peaks.get("cgroup_anon_shmem_bytes") or peaks.get("anon_shmem_bytes") or 0)


def _at_most(result: dict[str, Any]) -> str:
    held, peak = held_peak_bytes(result), result.get("peak_bytes") or 0
    if not held:
        return ""
    cached = result.get("peak_source") == "kernel counter" and peak > held
    return f"; it held {format_bytes(held)} at most" + (f", {format_bytes(peak)} with page cache" if cached else "")


def _evidence(run_dir: Path, phase: Phase | None) -> tuple[dict[str, float], float | None, float]:
    """Anonymous, shared and file bytes in the last sample; anonymous + shared when the phase began; run time."""
    try:
        table = read_timeline(run_dir)
    except InputError:
        return {}, None, 0.0
    table = table.dropna(subset=["rss_anon_bytes"])
    if not len(table):
        return {}, None, 0.0
    cgroup = table["cgroup_anon_bytes"].notna().any()
    if cgroup:
        table = table.dropna(subset=["cgroup_anon_bytes"])
    names = {part: f"{'cgroup' if cgroup else 'rss'}_{part}_bytes" for part in ("anon", "shmem", "file")}
    last = {part: float(table[name].iloc[-1]) for part, name in names.items()}
    started = None
    if phase is not None and len(before := table[table["time_s"] <= phase.start_s]):
        started = float(before[names["anon"]].iloc[-1] + before[names["shmem"]].iloc[-1])
    return last, started, float(table["time_s"].iloc[-1])


def diagnose(run_dir: str | os.PathLike[str]) -> Diagnosis:
    """Say what ended the run in `run_dir`, from its files alone; works after a SIGKILL of run or watcher.

    Raises:
        InputError: when `run_dir` is not the folder of a run.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "config.json").is_file() and not (run_dir / EVENTS).is_file():
        raise InputError(f"{run_dir}: expected the folder of a run (config.json, events.jsonl), found neither in it")
    result = read_result(run_dir)
    try:
        config: TrainConfig | None = TrainConfig.load(run_dir / "config.json")
    except InputError:
        config = None
    events = read_events(run_dir) if (run_dir / EVENTS).is_file() else []
    phases = read_phases(run_dir) if events else []
    last = last_attempt(events)
    phase = _last_phase(phases, sum(event["event"] == "start" for event in events))
    parts = read_parts(run_dir) if phases else {}
    sample, started, duration_s = _evidence(run_dir, phase)
    where = f"in phase '{phase.label}'" if phase else "before its first phase"

    if result is None or result.get("exit_code") is None:
        text = [
            "No result was written: the watching process was itself killed or is still at work. "
            f"After {duration_s:.1f} s the run was {where}."
        ]
        remedy = "if no process of it lives any more, go on with resume=True"
        text += [*_holding(parts, sample, started), f"Next: {remedy}."]
        return Diagnosis(" ".join(text), "no result", None, phase.label if phase else None, parts, sample, remedy)

    code = int(result["exit_code"])
    limit, engine = result.get("memory_limit_bytes"), result.get("limit_engine")
    limited = f" under a limit of {format_bytes(limit)} ({engine})" if limit else ""
    meaning, remedy = explain_exit_code(code)
    killed_by = result.get("killed_by")
    duration_s = result.get("duration_s", duration_s)
    if code == 0:
        text = [f"Finished without an error in {duration_s:.1f} s{limited}{_at_most(result)}."]
        return Diagnosis(text[0], "finished", 0, phase.label if phase else None, parts, sample, "")
    if killed_by:
        cause = "out of memory"
        count = result.get("oom_kills")
        who = "this library's watchdog" if killed_by == "watchdog" else "the kernel's out-of-memory killer"
        proof = f", oom_kill counter {count}" if killed_by == "kernel" else ""
        text = [f"Killed by {who} (exit code {code}{proof}){limited} after {duration_s:.1f} s, {where}."]
        remedy = _remedy(config, phase, parts)
    else:
        causes = {
            STOPPED: "stopped, checkpoint written",
            OUT_OF_CUDA_MEMORY: "out of GPU memory",
            137: "SIGKILL, cause unknown",
            130: "interrupted",
            143: "SIGTERM",
            2: "bad input",
        }
        cause = causes.get(code, "error")
        text = [f"Exit code {code}: {meaning}. It ended{limited} after {duration_s:.1f} s, {where}."]
        if limit and code == 137:
            text.append("The limit's own evidence shows no out-of-memory kill.")
        ooms = [event for event in last if event["event"] == "cuda_oom" and code == OUT_OF_CUDA_MEMORY]
        if ooms:
            more, cured = _out_of_cuda(run_dir, config, ooms[-1])
            text, remedy = text + more, cured or remedy
        elif message := result.get("last_output"):
            text.append(f"Its last words: {message}")
    for event in last:
        if event["event"] == "rank ended" and code not in (2, STOPPED):
            text.append(f"Rank {event['rank']} was the first to end: {explain_exit_code(event['exit_code'])[0]}.")
    if code not in (2, STOPPED):
        text += _holding(parts, sample, started)
    text.append(f"Next: {remedy}.")
    return Diagnosis(" ".join(text), cause, code, phase.label if phase else None, parts, sample, remedy)
