"""Explain why a run ended, from its result and its record.

The facts are exit code, kill counters, last sample, last phase and named parts of memory. A SIGKILL
does not name its sender. Out of memory is therefore claimed only on evidence: the cgroup's
`oom_kill` counter, this library's own watchdog, or a known message in the output. Without evidence
the answer is "cause unknown".
"""

import contextlib
import html
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, FiniteFloat

from .. import clock
from ..config import TrainConfig
from ..errors import MB, InputError, format_bytes, printable
from ..memory.cgroup import Throttle, throttled_since
from ..memory.cuda import OUT_OF_CUDA_MEMORY
from ..memory.killed import KilledBy
from ..memory.record import Growth, Phase, Record, RunPaths, Stalled
from .evidence import (
    GUIDE,
    OUT_OF_MEMORY,
    exception_line,
    find,
    find_in_message,
    gpu_sizes,
    last_line,
)
from .exit_codes import (
    DIVERGED,
    EXIT_CODES,
    READ_LOG,
    READ_OUTPUT,
    STOPPED,
    Meaning,
    code_key,
    meaning_of,
    meaning_of_state,
    resumption,
    state_key,
)
from .script_remedy import REFUSED, script_remedy


@dataclass(frozen=True)
class Diagnosis:
    """Cause of a run's end: a paragraph for people (`text`) and its facts. Sizes are in bytes."""

    text: str
    cause: str  # "finished", "out of memory", "SIGKILL, cause unknown", "interrupted", "error", ...
    exit_code: int | None
    phase: str | None
    parts: dict[str, int] = field(default_factory=dict)
    last_sample: dict[str, int] = field(default_factory=dict)
    remedy: str = ""

    def __str__(self) -> str:
        return printable(self.text).replace("\n", " ")  # a user's phase may have any name

    __repr__ = __str__
    to_dict = asdict

    def _repr_html_(self) -> str:
        return f'<p style="max-width:60em">{html.escape(str(self))}</p>'


_Number: TypeAlias = int | FiniteFloat
Remedy: TypeAlias = Callable[[TrainConfig, Record, KilledBy], str]


class _OuterLimit(BaseModel):
    limit_bytes: _Number | None
    cgroup: str
    others_bytes: int = 0  # memory of other processes in that cgroup, read after the run's end


class Result(BaseModel):
    """The fields of result.json that the package reads; other fields are kept."""

    model_config = ConfigDict(extra="allow")

    exit_code: int | None = None  # 128 + N after signal N
    duration_s: _Number | None = None
    memory_limit_bytes: _Number | None = None
    limit_by: str | None = None
    killed_by: str | None = None  # "kernel" or "watchdog"
    # The kernel's counter. With memory.oom.group, which a limit under cgroup v2 sets, the first
    # killed process counts twice, unless it has ended before the others are killed.
    oom_kills: int | None = None
    ended_with: int | None = None  # exit code of the first process, if the kill hit another one
    # set if the kernel killed for a cgroup around the run's own
    outer_limit: _OuterLimit | None = None
    kills_around: int | None = None  # out-of-memory kills in a cgroup that other processes share
    last_output: str | None = None
    printed_bytes: _Number | None = None  # memory in use when a command last printed a line
    throttled: list[Throttle] = []  # cgroups whose `memory.high` slowed the run down
    slurm_job: str | None = None  # Slurm's id of the job, ARRAYID_TASK in an array
    peak_bytes: _Number | None = None
    peak_source: str | None = None
    sampled_peaks_bytes: dict[str, _Number] = {}
    growth: Growth | None = None
    # time spent waiting for memory; None if the kernel does not count it
    stalled: Stalled | None = None
    diagnosis: Diagnosis | None = None

    @property
    def held_peak_bytes(self) -> int:
        """Peak of anonymous + shared memory in any sample."""
        return int(self.sampled_peaks_bytes.get("held_bytes", 0))

    def under_limit(self) -> str:
        if not self.memory_limit_bytes:
            return ""
        return f" under a limit of {format_bytes(self.memory_limit_bytes)} ({self.limit_by})"


def ended(result: Result | None) -> str:
    """The end of a run in a few words, for a title or a table."""
    if result is None:
        return "no result"
    cause = OUT_OF_MEMORY if result.killed_by else meaning_of(str(result.exit_code)).cause
    if result.diagnosis:
        cause = result.diagnosis.cause
    return f"{cause}, exit code {result.exit_code}" if result.exit_code else cause


def explain_code(code: str) -> Diagnosis:
    """Diagnosis of an exit code, a signal's name, Slurm's `EXIT:SIGNAL` pair or a job's state."""
    key = code_key(code)
    state = state_key(code)
    number = None
    if state:
        meaning = meaning_of_state(state, {})
        subject = f"{state}: the job {meaning.text}"
    elif key:
        meaning = meaning_of(code)
        name = code if code[0].isalpha() else f"Exit code {code}"
        also = f" ({key})" if key != code else ""
        subject = f"{name}{also}: {meaning.text}"
        if key.isdigit():
            number = int(key)
        if ":" in code:
            job = "ask `python -m ogbnlib diagnose --job ID`, which reads the job's log, too"
            meaning = meaning._replace(remedy=meaning.remedy.replace(READ_LOG, job))
    else:
        raise InputError(
            f"--exit-code: expected 0 to 255, -N for signal N, its name such as SIGKILL, Slurm's pair such as 0:125 or "
            f"a job's state such as OUT_OF_MEMORY, got {code!r}"
        )
    return Diagnosis(
        f"{subject}. Next: {meaning.remedy}.", meaning.cause, number, None, remedy=meaning.remedy
    )


def explain_text(text: str) -> Diagnosis:
    """Diagnose a pasted text, such as a message, a log's end, lines of dmesg or sacct's table."""
    if not text.strip():
        raise InputError(
            "--text: expected a message, the end of a log, or sacct's table, got nothing"
        )
    if code_key(text) or state_key(text):
        return explain_code(text.strip())
    finding = find_in_message(text)
    if finding is None:
        message = exception_line(text)
        end = f"it ends with {message[:200]!r}" if message else "no message in it is known"
        finding = Meaning(
            "unknown",
            f"Cause unknown: {end}",
            f"look for its words in {GUIDE}; `python -m ogbnlib watch` runs the command again and "
            "records it",
        )
    remedy = finding.remedy.replace(READ_LOG, READ_OUTPUT)
    sentences = [
        f"{finding.text[:1].upper()}{finding.text[1:]}.",
        finding.line and f"Evidence: {finding.line[:200].rstrip('.')}.",
        f"Next: {remedy}.",
    ]
    text = " ".join(filter(None, sentences))
    return Diagnosis(text, finding.cause, None, None, dict(finding.sizes), remedy=remedy)


def explain(
    run_dir: Path,
    config: TrainConfig | None,
    result: Result,
    record: Record,
    at_work: bool,
    remedy_of: Remedy | None = None,
) -> Diagnosis:
    """Diagnose the last attempt of a run, or describe a run at work.

    `result` is an empty `Result` if no result.json was written. `remedy_of` is the planner's
    `memory_remedy`; with None the remedy is the command that asks the planner.
    """
    case = _Case(run_dir, config, result, record, remedy_of)
    if at_work:
        return case.at_work()
    if result.exit_code is None:
        return case.without_result()
    if result.exit_code == 0:
        return case.finished()
    return case.killed() if result.killed_by else case.failed()


_TAIL_BYTES = 2**13  # from the end of the output, to find its last line
# Causes that an exit code alone leaves open: evidence in the output decides.
OPEN_CAUSES = ("error", "SIGKILL, cause unknown", "never started")


class _Case:
    """The facts about a run's last attempt, with one method for each kind of end."""

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig | None,
        result: Result,
        record: Record,
        remedy_of: Remedy | None,
    ):
        self.run_dir = run_dir
        self.config = config
        self.result = result
        self.record = record
        self.remedy_of = remedy_of
        # whether the run is a command other than this package's own
        command: list[str] = record.start.get("command") or []
        self.foreign = bool(command) and command[1:3] != ["-m", "ogbnlib"]
        # An exception leaves its phases; a killed process leaves them open.
        self._set_phase(record.phase or (record.failed if result.exit_code != 137 else None))
        duration_s = record.duration_s if result.duration_s is None else result.duration_s
        self.took = f"{duration_s:.1f} s"
        self.slowed = self._slowed(result.throttled)
        self.struck = ""
        if result.kills_around:
            self.struck = (
                " Meanwhile the kernel's out-of-memory killer struck in its cgroup (oom_kill counter "
                f"+{result.kills_around}): perhaps this run."
            )

    def _set_phase(self, phase: Phase | None) -> None:
        self.phase = phase
        self.label = None
        self.where = "with no phase open"
        if phase is not None:
            self.label = phase.label
            self.where = f"in phase '{self.label}'"

    def _slowed(self, throttles: Iterable[Throttle]) -> str:
        """Sentences on slowdowns by a cgroup's `memory.high` and on time spent waiting for
        memory."""
        sentences = [*map(str, throttles)]
        stalled = self.record.stalled
        if stalled and stalled.is_thrashing:
            # whether that time was counted in a cgroup of the run alone
            is_own = self.record.start.get("limit_by") in ("cgroup v2", "systemd-run")
            whose = "It" if is_own else "This machine, or the container around the run,"
            sentences.append(
                f"{whose} waited for memory for {stalled}: the kernel took pages of files and "
                "programs away that were needed again. Raise the limit, or use less memory."
            )
        return " ".join(sentences)

    def _diagnosis(self, sentences: Iterable[str], cause: str, remedy: str = "") -> Diagnosis:
        text = " ".join(filter(None, sentences))
        if remedy:
            text += f" Next: {remedy}."
        return Diagnosis(
            text,
            cause,
            self.result.exit_code,
            self.label,
            dict(self.record.parts),
            dict(self.record.last),
            remedy,
        )

    def _memory(self) -> list[str]:
        """Sentences on the memory in use at the end, and on its growth."""
        sentences = []
        if self.record.last:
            anon, shmem, file = map(format_bytes, self.record.last.values())
            sentences.append(
                f"The last sample shows {anon} anonymous, {shmem} shared and {file} file memory."
            )
        if self.record.parts:
            largest_first = sorted(self.record.parts.items(), key=lambda item: -item[1])
            texts = [f"{name} {format_bytes(size)}" for name, size in largest_first]
            sentences.append(f"It held {', '.join(texts)}.")
        return [*sentences, self._listed(), self._growth()]

    def _listed(self) -> str:
        """Sentence that lists a watched command's processes as of the last growth of its memory."""
        listed = self.record.events.get("processes")
        if listed is None:
            return ""
        since_s = listed["time_s"] - self.record.start["time_s"]
        return f"Its processes after {since_s:.1f} s: {listed['text']}."

    def _printed(self) -> str:
        """Sentence that quotes a command's last printed line, which shows where it was if no phase
        does."""
        line = self._last_line()
        return f"The last line that it printed: {line[:200].rstrip('.')}." if line else ""

    def _last_line(self) -> str:
        if self.label or not self.foreign:
            return ""
        data = b""
        with contextlib.suppress(OSError), open(RunPaths(self.run_dir).output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            data = file.read()
        return last_line(data.decode(errors="replace"))

    def _growth(self) -> str:
        growth = self.record.growth
        return str(growth) if growth and growth.verdict in ("climbs", "grows") else ""

    def at_work(self) -> Diagnosis:
        record = self.record
        throttles = throttled_since(record.start.get("memory_high") or {})
        since = ""
        if self.phase:
            now_s = clock.now_by(record.start.get("clock"))
            since = f" for {max(0.0, now_s - self.phase.start_s):.1f} s"
        elif not self.foreign and record.newest is None:
            self.label = self.where = "starting"
        limit = record.start.get("memory_limit_bytes")
        amount = format_bytes(record.held_bytes)
        if limit:
            amount += f" of {format_bytes(limit)}"
        most = f"{format_bytes(record.held_peak_bytes)} at most"
        text = f"At work, {self.where}{since}; after {self.took} it holds {amount}, {most}."
        sentences = [text, self._slowed(throttles), self._printed(), *self._memory()]
        return self._diagnosis(sentences, "at work")

    def without_result(self) -> Diagnosis:
        text = (
            "No result was written: the watching process was itself killed. "
            f"After {self.took} the run was {self.where}."
        )
        remedy = "if no process of it is alive, go on with resume=True"
        if self.foreign:
            remedy = "start it again"
        return self._diagnosis(
            [text, self.slowed, self._printed(), *self._memory()], "no result", remedy
        )

    def finished(self) -> Diagnosis:
        result = self.result
        text = f"Finished without an error in {self.took}{result.under_limit()}"
        peak = result.held_peak_bytes
        if peak:
            text += f"; it held {format_bytes(peak)} at most"
            if result.peak_source == "kernel counter" and (result.peak_bytes or 0) > peak:
                text += f", {format_bytes(result.peak_bytes)} with page cache"
        text += "."
        sentences = [text + self.struck, self.slowed]
        if self.record.growth and self.record.growth.verdict != "levels off":
            sentences.append(self._growth())
        return self._diagnosis(sentences, "finished")

    def killed(self) -> Diagnosis:
        result = self.result
        text = [f"{_killer(result)} after {self.took}, {self.where}."]
        if result.ended_with is not None:
            text.append(f"Its first process then ended with exit code {result.ended_with}.")
        text += [self._printed(), self.slowed, *self._first_rank(), *self._memory()]
        return self._diagnosis(text, OUT_OF_MEMORY, self._memory_remedy())

    def failed(self) -> Diagnosis:
        """Diagnose by the exit code; if it leaves the cause open, by evidence in `last_output`."""
        result = self.result
        code = result.exit_code
        assert code is not None
        meaning = meaning_of(code, foreign=self.foreign)
        cause_of_code = meaning.cause
        if meaning.cause in OPEN_CAUSES:
            killed = cause_of_code == EXIT_CODES["137"].cause
            meaning = find(result.last_output or "", killed=killed) or meaning
        cause = meaning.cause
        remedy = meaning.remedy
        text = [
            f"Exit code {code}: {meaning.text}.",
            f"It ended{result.under_limit()} after {self.took}, {self.where}.{self.struck}",
        ]
        # name the call that resumes this very run
        if self.config is not None:
            call = resumption(self.run_dir, result.memory_limit_bytes)
            remedy = remedy.replace("resume=True (--resume)", "resume=True")
            remedy = remedy.replace("go on with resume=True", f"go on with {call}")
        if cause == EXIT_CODES["137"].cause and result.under_limit():
            text.append("The limit's own evidence shows no out-of-memory kill.")
            remedy = "look for who sent it: the job's state in sacct, or dmesg if the whole machine had no memory left"
        # The trainer records sizes and suggestions of a failed allocation on the GPU.
        oom = self.record.events.get("cuda_oom")
        if code == OUT_OF_CUDA_MEMORY and oom:
            text.append(gpu_sizes(oom) or str(oom.get("message")))
            if oom.get("alloc_retries"):
                text.append(f"Before, {oom['alloc_retries']:.0f} allocations needed a second try.")
            remedy = "; or ".join(oom.get("suggestions", [])) or remedy
        elif result.last_output:
            text.append(f"Its last words: {result.last_output.rstrip('.')}.")
        else:
            text.append(self._printed())
        if cause == OUT_OF_MEMORY:
            remedy = REFUSED if self.foreign else self._memory_remedy()
        if not RunPaths(self.run_dir).output.is_file():
            remedy = remedy.replace(READ_LOG, READ_OUTPUT)
        text.append(self.slowed)
        if code not in (2, STOPPED, DIVERGED):
            text += [*self._first_rank(), *self._memory()]
        return self._diagnosis(text, cause, remedy)

    def _memory_remedy(self) -> str:
        """Return the remedy for an out-of-memory kill, by the limit that the run met.

        The planner needs a config, which only a training run has. `remedy_of` is None if a folder
        is read after its run. The remedy is then the command that asks the planner.
        """
        limit = self.result.memory_limit_bytes
        killed = KilledBy(None if limit is None else int(limit))
        outer = self.result.outer_limit
        if outer:  # the kernel killed for the limit of a cgroup around the run's own
            killed = KilledBy(int(outer.limit_bytes or 0), outer.cgroup, outer.others_bytes)
        if self.foreign:
            printed_bytes = int(self.result.printed_bytes or 0)
            return script_remedy(self.record, killed, self.phase, self._last_line(), printed_bytes)
        if self.config is None:  # another command of this package
            return (
                "raise memory_limit, or give the command its own --memory-limit below it "
                "(convert, propagate, predict)"
            )
        if self.remedy_of is not None:
            return self.remedy_of(self.config, self.record, killed)
        return (
            f"ask `python -m ogbnlib plan --config {self.run_dir}/config.json --memory-limit "
            f"'{killed.left_bytes / MB:.0f} MB'` what fits"
        )

    def _first_rank(self) -> list[str]:
        first = self.record.events.get("rank ended")
        if not first:
            return []
        return [
            f"Rank {first['rank']} was the first to end: {meaning_of(first['exit_code']).text}."
        ]


def _killer(result: Result) -> str:
    code = result.exit_code
    if result.killed_by == "watchdog":
        return f"Killed by this library's watchdog (exit code {code}){result.under_limit()}"
    text = "Killed by" if result.ended_with is None else "A process of it was killed by"
    text += f" the kernel's out-of-memory killer (exit code {code}, oom_kill counter {result.oom_kills})"
    outer = result.outer_limit
    if not outer:
        return text + result.under_limit()
    text += f" for the limit of {format_bytes(outer.limit_bytes)} of the cgroup {outer.cgroup} around it"
    if result.memory_limit_bytes:
        text += f", not for{result.under_limit().replace('under a limit', 'its own limit')}"
    return text
