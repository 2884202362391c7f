"""Find out why a run ended, from its result and its record.

A SIGKILL does not name its sender. Out of memory is therefore claimed only on evidence: the
cgroup's `oom_kill` counter, this library's own watchdog, or a known message in the output. Without
evidence the answer is "cause unknown".
"""

import errno
import os
import resource
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..config import TrainConfig
from ..errors import InputError, explained, format_bytes
from ..memory.calls import LIBRARY
from ..memory.cgroup import effective_limit
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..memory.killed import Action, KilledBy
from ..memory.reading import read_memory
from ..memory.record import Record, RunPaths
from ..memory.tree import Tree
from ..sampling.workers import WorkerDied
from .cause import OPEN_CAUSES, Facts
from .codes import START_AGAIN, code_key, exit_code_of, of_code, resumption, specified
from .render import Diagnosis
from .texts import exception_line, find, find_in_message

_FACTS = TypeAdapter(Facts)
_DIAGNOSIS = TypeAdapter(Diagnosis)
_PACKAGE = str(Path(__file__).parents[1])


def read_facts(result: Mapping[str, Any]) -> Facts:
    """The facts in the content of a result.json; raises `ValueError` for wrong types."""
    return _FACTS.validate_python(result)


def read_diagnosis(result: Mapping[str, Any]) -> Diagnosis | None:
    """The diagnosis in the content of a result.json; None without one, and in one of version
    0.2.0, which stored sentences."""
    stored = result.get("diagnosis")
    if not isinstance(stored, dict) or "actions" not in stored:
        return None
    return _DIAGNOSIS.validate_python({**stored, "facts": result})  # facts stand at the top level


def explain_code(code: str) -> Diagnosis:
    """Diagnosis of an exit code, a signal's name, or Slurm's `EXIT:SIGNAL` pair."""
    if not code_key(code):
        raise InputError(
            "--exit-code: expected 0 to 255, -N for signal N, its name such as SIGKILL, or Slurm's "
            f"pair such as 0:125, got {code!r}"
        )
    return of_code(code)


def explain_text(text: str) -> Diagnosis:
    """Diagnose a pasted text, such as a message, a log's end, or lines of dmesg."""
    if not text.strip():
        raise InputError("--text: expected a message or the end of a log, got nothing")
    unknown = Facts("unknown text", line=exception_line(text)[:200])
    return find_in_message(text) or Diagnosis("unknown", unknown, (Action("read guide"),))


def sentence_of(error: BaseException) -> str:
    """Return the sentence that a command prints for an exception; "" if it needs a traceback.

    A refused allocation is named by its size, the line of code, and the memory that is free.
    """
    error = explained(error)
    if exit_code_of(error) != 1 or isinstance(error, WorkerDied):
        return str(error)
    # An exception of a DataLoader worker has the worker's whole traceback as its text.
    line = exception_line(f"{type(error).__name__}: {error}")
    end = find(line)
    is_refusal = end is not None and end.facts.sign == "allocation refused"
    is_torchs = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    is_map = isinstance(error, OSError) and error.errno == errno.ENOMEM
    # other errors may only mention such a one
    if not is_refusal or not (isinstance(error, MemoryError) or is_torchs or is_map):
        return ""
    # The innermost line of this package or of the user's code, not of a library, shows the array.
    frames = traceback.extract_tb(error.__traceback__)
    places = [f for f in frames if _PACKAGE in f.filename or not LIBRARY.match(f.filename)]
    where = [f" ({Path(f.filename).name}, line {f.lineno}: `{f.line}`)" for f in places if f.line]
    limit_bytes, _ = effective_limit()
    unused_bytes = limit_bytes - (read_memory(Tree(os.getpid())).held_bytes or 0)
    # the machine may have less left than the limit
    free = format_bytes(max(0, min(unused_bytes, KilledBy().left_bytes)))
    address_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_bytes >= 0:  # -1 is no limit
        free += f", and `ulimit -v` allows {format_bytes(address_bytes)} of addresses"
    return f"{line.rstrip('.')}{''.join(where[-1:])}; free memory: {free}"


def explain(
    run_dir: Path, config: TrainConfig | None, result: Facts, record: Record, at_work: bool = False
) -> Diagnosis:
    """Diagnose the last attempt of a run, or describe a run at work.

    Args:
        config: None for a watched command.
        result: The facts in result.json; none if the file was not written.
        record: What events.jsonl and timeline.csv have of the attempt.
    """
    facts = _with_record(result, record)
    code = result.exit_code
    if at_work:
        return Diagnosis("at work", replace(facts, sign="at work"))
    if code is None:
        then = START_AGAIN if config is None else resumption(run_dir)
        return Diagnosis("no result", replace(facts, sign="no result"), (then,))
    if code == 0:
        return Diagnosis("finished", facts)
    if result.killed_by:
        sign = "killed around" if result.outer_limit else f"killed by {result.killed_by}"
        end = Diagnosis("out of memory", replace(facts, sign=sign))
    else:
        end = _by_code_or_output(facts, code, foreign=config is None)
    if code == OUT_OF_CUDA_MEMORY:
        oom = record.events.get("cuda_oom", {})  # the trainer's event, with sizes of GPU memory
        sizes = {name: n for name, n in oom.items() if n and name.endswith(("_bytes", "_retries"))}
        end = replace(end, facts=replace(end.facts, sizes=sizes))
    elif end.cause == "out of memory":
        actions: tuple[Action, ...] = (Action("less memory"),)
        if result.killed_by and config is None:  # of a training, `Attempt.end` asks the planner
            actions = _script_actions(record, met_limit(facts))
        end = replace(end, actions=actions)
    specific = {}
    if RunPaths(run_dir).output.is_file():  # not of a training in the caller's process
        specific["read output"] = Action("read output", {"file": "output.log"})
    if facts.damage:  # the cause of a SIGBUS, so /dev/shm was not full
        specific["more shared memory"] = Action("check data", {"values": "files"})
    if config is not None:
        specific["resume"] = resumption(run_dir)
    return specified(end, specific)


def _with_record(result: Facts, record: Record) -> Facts:
    # for time, limit and peaks, values that `result` already has come first
    phase = record.phase
    # An exception closes the phases around it; a killed process (code 137) leaves them open.
    if phase is None and result.exit_code != 137:
        phase = record.failed
    rank = record.events.get("rank ended") or {}
    return replace(
        result,
        sign=str(result.exit_code),
        phase=phase.label if phase else result.phase,
        duration_s=result.duration_s or record.duration_s,
        memory_limit_bytes=result.memory_limit_bytes or record.start.get("memory_limit_bytes"),
        limit_by=result.limit_by or record.start.get("limit_by"),
        held_bytes=record.held_bytes,
        sampled_peaks_bytes=result.sampled_peaks_bytes or record.peaks,
        parts=dict(record.parts),
        processes=record.events.get("processes", {}).get("text", ""),
        rank=rank.get("rank"),
        rank_exit_code=rank.get("exit_code"),
        growth=record.growth,
        stalled_s=record.stalled_s,
    )


def _by_code_or_output(facts: Facts, code: int, *, foreign: bool) -> Diagnosis:
    """Diagnose an end by its code, or by the output's last words if the code says little."""
    end = of_code(code, foreign=foreign)
    if end.cause in OPEN_CAUSES:
        end = find(facts.last_output or "", killed=code == 137) or end
    shown = end.facts  # of the code or the text alone; `facts` has the run's
    merged = replace(facts, sign=shown.sign, who=shown.who, sizes=shown.sizes)
    return replace(end, facts=merged)


def met_limit(facts: Facts) -> KilledBy:
    """The limit that an out-of-memory kill met: of a cgroup around the run, else the run's own."""
    return facts.outer_limit or KilledBy(facts.memory_limit_bytes)


def _script_actions(record: Record, killed: KilledBy) -> tuple[Action, ...]:
    """Return the actions that help a killed script or cell, from the facts of its record.

    The planner knows nothing of a script's content. So an action names what was recorded: a call
    that was open at the end, the graphs that PyG's loaders keep, or by how much memory grew in the
    open phase.
    """
    # The recorded call that was open at the kill: its name `call`, and `line`, its place in the
    # script. If it read a file: `argument`, which maps the file instead, and its size `bytes`.
    call = record.call or {}
    # names are "graph of loader 1 from train.py:12"
    lines = [name.partition(" from ")[2] for name in record.graphs]
    if call and not call.get("argument"):  # a loader is being built
        lines.append(call["line"])
    growth = record.growth
    if growth and growth.verdict == "climbs":
        action = Action("find leak", {"slope_bytes": growth.slope_bytes})
    elif call.get("argument"):
        arguments = {name: call[name] for name in ("call", "argument", "line")}
        action = Action("map file", {**arguments, "file_bytes": call.get("bytes")})
    elif len(lines) > 1:
        graph_bytes = max(record.graphs.values())  # each loader keeps one of about this size
        loaders = {"num_loaders": len(lines), "lines": [*dict.fromkeys(lines)]}
        action = Action("sort edges once", {**loaders, "graph_bytes": graph_bytes})
    else:
        action = _hold_less(record, killed)
    # a script can't raise the machine's memory
    return (action,) if killed.limit_bytes is None else (action, killed.raised())


def _hold_less(record: Record, killed: KilledBy) -> Action:
    """Name the memory in use at the kill, and how much of it came in the open call or phase."""
    # the last sample may be 50 ms older than the kill, which came at the limit
    held_bytes = killed.left_bytes if killed.limit_bytes else record.held_bytes or 0
    phase = record.phase
    begin: Mapping[str, Any] = phase.info if phase else {}
    where: dict[str, Any] = {"phase": phase.label} if phase else {}
    if record.call is not None:
        begin = record.call
        where = {"line": begin["line"]}
    grown_bytes = max(0, held_bytes - (begin.get("held_bytes") or 0))
    return Action("hold less", {**where, "held_bytes": held_bytes, "grown_bytes": grown_bytes})
