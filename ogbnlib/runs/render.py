"""Sentences for a diagnosis: what ended it, the evidence, and what to do next.

The only file of `runs` and `memory` with advice in words. A name in braces is a fact or an
argument; a part in brackets is left out if one of its names is unknown.
"""

import html
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import format_bytes, printable
from ..memory.cuda import ALLOCATOR_VARIABLES
from ..memory.killed import Action
from .cause import UNKNOWN, Cause, Facts

_SHOWN = 3  # most entries of a list in a sentence
_COMMON: dict[str, object] = {
    "guide": "notebooks/guide/troubleshooting.md (without a clone: `python -m ogbnlib notebooks FOLDER` writes it)",
    "page": "notebooks/guide/memory.md#a-killed-script",
    "kept": "a loss that is added up without .item(), outputs or batches in a list",
    "by_target": "data.edge_index = data.edge_index[:, data.edge_index[1].argsort()]",
    "less": "make a step smaller: batch_size with accumulate, precision=bf16, activation_checkpointing=True, "
    "num_neighbors",
    "how": "go on",
    "JobID": "ID",
    "allocator": ALLOCATOR_VARIABLES[0],
}  # fmt: skip
_LIMIT = "[ under a limit of {memory_limit_bytes} ({limit_by})]"
_WHERE = "[, in phase '{phase}']"
_WHEN = f" after {{duration_s:.1f}} s{_WHERE}"
_KERNEL = "killed by the kernel's out-of-memory killer (exit code {exit_code}[, oom_kill counter {oom_kills}])"
# Whole first sentences for runs, by `Facts.sign`; `_subject` has that for all other signs.
_RUNS = {
    "0": f"finished without an error in {{duration_s:.1f}} s{_LIMIT}[; it held {{held_peak_bytes}} at most]"
    "[, {counted_bytes} with page cache]",
    "at work": f"at work{_WHERE}; after {{duration_s:.1f}} s it holds {{held_bytes}}"
    "[ of {memory_limit_bytes}][, {held_peak_bytes} at most]",
    "no result": f"no result was written: the watching process was killed, or its disk was full{_WHEN}",
    "not started": "not started: by forecast it takes {forecast_bytes} in phase '{phase}', and {limit_by} leaves "
    "{room_bytes} beside this notebook",
    "killed by watchdog": f"killed by this library's watchdog (exit code {{exit_code}}){_LIMIT}{_WHEN}",
    "killed by kernel": f"{_KERNEL}{_LIMIT}{_WHEN}",
    "killed around": f"{_KERNEL} for the limit of {{outer_bytes}} of the cgroup {{outer_cgroup}} around it"
    f"[, not for its own limit of {{memory_limit_bytes}}]{_WHEN}",
}  # fmt: skip
# How a process or a job ended, by `Facts.sign`, to follow its name.
_ENDS = {
    "0": "finished without an error",
    "1": "ended with 1, which for Python is an exception",
    "2": "refused its input, or could not read or write a file",
    "other 2": "ended with 2, which most commands use for wrong arguments",
    "75": "stopped at a batch boundary on a signal; its checkpoint is written",
    "76": "out of GPU memory: an allocation failed (torch.OutOfMemoryError)",
    "77": "diverged: the loss, a weight or a score was not finite, mostly as lr is too large",
    "78": "ended before the training was finished, without an error: code of the model ended a process, or hung",
    "124": "ended with 124: the time of the command `timeout` was up",
    "126": "never started: its file can't be executed",
    "127": "never started: it, or its interpreter, was not found",
    "129": "ended by SIGHUP: its terminal was closed",
    "130": "interrupted (SIGINT: Ctrl-C, or a notebook's stop, restart or shutdown button)",
    "132": "ended by SIGILL: a library was compiled for another processor",
    "135": "ended by SIGBUS: a full /dev/shm where there are DataLoader workers, or a mapped file that became shorter",
    "137": "ended by SIGKILL, cause unknown: an out-of-memory killer, scancel, a time limit (`ulimit -t` too), "
    "preemption or kill -9 sends it",
    "138": "ended by SIGUSR1, which came before it could stop at a checkpoint, or which it does not catch",
    "139": "ended by SIGSEGV, a crash in compiled code",
    "141": "ended by SIGPIPE: the reader of its output ended first (write to a file instead)",
    "143": "ended by SIGTERM: scancel, a time limit, preemption or kill",
    "152": "ended by SIGXCPU: its CPU time, limited by `ulimit -t`, was used up",
    "153": "ended by SIGXFSZ: a file grew past the limit of `ulimit -f`, not of the disk",
    "0:125": "ended by Slurm for passing the job's --mem (state OUT_OF_MEMORY); srun itself returns 1 for such a step",
    "0:53": "never started: Slurm could not open the batch script's output file or working directory",
    # states of Slurm
    "OUT_OF_MEMORY": "had a process killed for passing its memory[ of {ReqMem}]",
    "TIMEOUT": "reached its time limit[ of {Timelimit}]",
    "DEADLINE": "reached its --deadline[ after {Elapsed}]",
    "PREEMPTED": "was preempted by another job",
    "CANCELLED": "was cancelled[ after {Elapsed}] (scancel)",
    "NODE_FAIL": "lost its node[ {NodeList}]",
    "BOOT_FAIL": "got a node that did not boot[ {NodeList}]",
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED"), "is {State}[ after {Elapsed}][ of {Timelimit}]"),
    # other ends of a job
    "no sign": "left no sign of its end",
    "as run": "ended as its run did",
    "run unfinished": "ended with exit code 0, but its run did not finish",
    # lines of a text
    "unknown text": "cause unknown: it has no message that is known",
    "kernel kill": "the kernel's out-of-memory killer ended {who}, as the whole machine had no memory left",
    "kernel kill in a cgroup": "the kernel's out-of-memory killer ended {who}, for the limit of its cgroup: a job's "
    "--mem, or the limit of a container or a run",
    "memory of a group": "it was ended for passing the memory of its machine, service or container",
    "limit met": "the job met its memory limit, which page cache does without a kill, too",
    "allocation refused": "Linux refused an allocation: more than the machine, or a limit of `ulimit -v`, has left",
    "file descriptors": "ran out of file descriptors: DataLoader workers pass each tensor by one of them",
    "shared memory": "ran out of shared memory: DataLoader workers pass batches through /dev/shm",
    "label out of range": "a label lies outside of 0 to the number of classes - 1, such as a NaN made an integer",
    "worker gone": "a DataLoader worker[ ({who})] ended, and the message does not say why",
    "rank gone": "a rank waited for another one, which had ended, hung or lost its connection",
}  # fmt: skip
# Evidence, in the order of the sentence; a clause with an unknown name is left out.
_CLAUSES = (
    "the log ends with: {log_line}",
    "evidence: {line}",
    "its last words: {last_output}",
    "its data set: {damage}",
    "its record has gaps: {unwritable}",
    "{requested_bytes} asked for[, {allocated_bytes} allocated][, {reserved_bytes} reserved]"
    "[, {free_bytes} free on the GPU]"
    "[; {alloc_retries:.0f} allocations needed a second try]",
    "the kernel's out-of-memory killer struck {kills_around} times in its cgroup meanwhile",
    "rank {rank} was the first to end, with exit code {rank_exit_code}",
    "it was slowed down {times} times, as its memory passed memory.high ({high_bytes}) of the cgroup {cgroup}: raise "
    "it (MemoryHigh= of systemd) or use less",
    "processes waited for memory for {waited_s:.0f} s, {waited_share:.0%} of its time: raise the limit, or use less",
)  # fmt: skip
_MEMORY_CLAUSES = (
    "it held {parts}",
    "its largest processes: {processes}",
    "over {epochs} epochs memory climbs by {slope_bytes} per epoch (fitted), from {first_bytes} to {last_bytes}",
)
_WITHOUT_MEMORY = ("bad input", "stopped at a checkpoint", "diverged")
# What to do next, by `Action.id`; the names are arguments of the action, or in `_COMMON`.
_ACTIONS = {
    "resume": "{how}[ with run(run_dir=\"{run_dir}\", resume=True), or `python -m ogbnlib train --run-dir {quoted} "
    "--resume`][ with `sbatch slurm/{script}.sbatch --run-dir {job_quoted} --resume` and the same options of sbatch, "
    "unless Slurm has requeued the job]",
    "read output": "read what it printed[: the end of {file}]",
    "read guide": "look for its words in {guide}; `python -m ogbnlib watch` runs the command again and records it",
    "check data": "[set a smaller {parameter} or weight_decay (--set NAME=..., also of a resumed run: a checkpoint is "
    "always finite), and ]check the {values} with `python -m ogbnlib verify`[; {guide} has the line that repairs "
    "{repaired} in a script of your own]",
    "run without workers": "run with num_workers=0 and PYTHONFAULTHANDLER=1 to see where it ended, under a "
    "memory_limit to see a kill; after a crash install versions of torch and its extensions that match",
    "find sender": "look for 'Out of memory' in dmesg or the job's state in sacct; a run under a memory_limit shows it",
    "find leak": "find what keeps {slope_bytes} in each epoch, since smaller batches or a larger limit would only "
    "delay the kill: {kept} ({page})",
    # changes of parameters, from the planner
    "set": "{how} with {changes} ({peak_bytes} by forecast)",
    "nothing fits": "no change that the planner knows fits {limit_bytes}",
    "raise limit": "raise {option}[ of the cgroup {cgroup} (a Slurm job by --mem)][ to {limit}]",
    "lower limit": "give it a memory_limit below {limit_bytes} to see it killed, or ask for more: {sbatch}",
    "try model": "ask `python -m ogbnlib plan --config` with the run's config.json what fits: it tries {model} out, of "
    "which no step was measured here",
    "name data": "name the data set again and ask `python -m ogbnlib plan` what fits: the planner can't say it here "
    "({error})",
    "less memory": "`python -m ogbnlib plan --memory-limit SIZE` says which settings fit, `python -m ogbnlib watch` "
    "where a script of your own needs its memory; {page} has the usual causes",
    "hold less": "hold less at once: memory in use grew to {held_bytes}[, {grown_bytes} of it in {line}]"
    "[, {grown_bytes} of it in '{phase}']; {page} has the usual causes",
    "map file": "map the file instead of reading it whole: {call}(..., {argument}) in {line}, a file of {file_bytes}",
    "sort edges once": "sort the edges by target once, {by_target} (those of store.to_data() are), and pass "
    "is_sorted=True to each NeighborLoader ({lines}): then none of these {num_loaders} loaders keeps a graph of "
    "{graph_bytes}",
    "more shared memory": "give the container more shared memory (docker --shm-size=8g) or set num_workers=0; else "
    "check the data (`python -m ogbnlib verify`)",
    "free GPU": "look with nvidia-smi for another process on the GPU; if there is none, set expandable_segments=True "
    "(in a script of your own {allocator}=expandable_segments:True), or {less}",
    "ask Slurm": "ask Slurm before you submit another one: on the login node `scontrol show job {JobID}` has its "
    "state, what it waits for and its files, `sacct -j {JobID}` its end",
}  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """The end of a run: its cause, facts and actions. `text` has them in at most three sentences.

    The diagnosis of a Slurm job has that of its run as `inner`.
    """

    cause: Cause
    facts: Facts = field(default_factory=Facts)
    actions: tuple[Action, ...] = ()
    inner: "Diagnosis | None" = None

    @property
    def exit_code(self) -> int | None:
        return self.facts.exit_code

    @property
    def phase(self) -> str | None:
        return self.facts.phase

    @property
    def text(self) -> str:
        """At most three sentences: the end, the evidence, and what to do next."""
        # evidence and actions may be ""
        sentences = [_subject(self), _evidence(self), self.remedy and f"next: {self.remedy}"]
        return " ".join(f"{text[:1].upper()}{text[1:].rstrip('.')}." for text in sentences if text)

    @property
    def remedy(self) -> str:
        """The actions in words, in their order; how to go on follows others with "then"."""
        texts: list[str] = []
        for action in self.actions:
            template = _ACTIONS.get(action.id, action.id)  # an id may be of another version
            arguments = action.arguments
            if action.id == "resume" and not arguments:  # no run is known: a name to replace
                arguments = {"run_dir": "RUN", "quoted": "RUN"}
            text = _filled(template, {**_COMMON, **self.facts.job, **arguments})
            joint = "then" if action.id == "resume" else "or"
            texts.append(f"{joint} {text}" if texts else text)
        return "; ".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """Cause, facts and actions for JSON, with their words; unknown facts are left out."""
        return {
            "cause": self.cause,
            "facts": self.facts.to_dict(),
            "actions": [asdict(action) for action in self.actions],
            "inner": self.inner and self.inner.to_dict(),
            "exit_code": self.exit_code,
            "phase": self.phase,
            "text": str(self),
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        return printable(self.text).replace("\n", " ")  # a user's phase may have any name

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<p style="max-width:60em">{html.escape(str(self))}</p>'


def _words_of(facts: Facts) -> str:
    """The end of a process or a job in words, to follow its name."""
    default = "ended with exit code {sign}, which has no fixed meaning"
    if facts.job:  # in a state of Slurm without an entry in `_ENDS`
        default = "is {State}[: {Reason}]"
    elif _signal_name(facts.sign):
        default = "ended by {signal}"
    template = _ENDS.get(facts.sign, default)
    if "{who}" not in template:  # the process in the command that ended, such as "rank 1"
        template = f"[{{who}}: ]{template}"
    return _filled(template, _values(facts))


def _subject(end: Diagnosis) -> str:  # the first sentence: what ended, and how
    facts = end.facts
    template = "{words}"  # of a pasted text
    if facts.job:
        template = (
            "job[ {JobID}][ (from files alone: {unasked})]: {words}[ (exit code {exit_code})]"
        )
    elif facts.duration_s is not None:  # a run
        ended = f"exit code {{exit_code}}: {{words}}; it ended{_LIMIT}{_WHEN}"
        template = _RUNS.get(facts.sign, ended)
    elif facts.exit_code is not None and not facts.who:  # a code alone
        template = "exit code {exit_code}: {words}"
    return _filled(template, {**_values(facts), "words": _words_of(facts)})


def _evidence(end: Diagnosis) -> str:
    """The second sentence: the facts that say most about an end; "" without any."""
    facts = end.facts
    values = _values(facts)
    inner = end.inner
    if inner is not None and facts.log_line:  # a job whose log says more than its run
        where = f"its run {facts.run_dir} was in phase '{inner.phase}'"
        values["log_line"] = f"{facts.log_line} ({where})"
    elif inner is not None:
        return f"its run {facts.run_dir}: {_subject(inner)}"
    clauses: tuple[str, ...] = _CLAUSES
    if facts.duration_s is not None and end.cause not in _WITHOUT_MEMORY:
        clauses += _MEMORY_CLAUSES
    return "; ".join(filter(None, (_filled(clause, values) for clause in clauses)))


def _values(facts: Facts) -> dict[str, Any]:
    """The values of names in all templates but those of `_ACTIONS`; None or empty if unknown."""
    values = {**vars(facts), **facts.sizes, **facts.job}
    for name in ("line", "log_line", "last_output", "damage"):  # a sentence has its own full stop
        values[name] = (values[name] or "").rstrip(".")
    sign = facts.sign.removeprefix("other ")
    return {**values, **_memory_values(facts), "sign": sign, "signal": _signal_name(sign)}


def _memory_values(facts: Facts) -> dict[str, Any]:
    largest_first = sorted(facts.parts.items(), key=lambda item: -item[1])
    values: dict[str, Any] = {  # None for 0, which no sentence mentions
        "held_peak_bytes": facts.held_peak_bytes or None,
        "kills_around": facts.kills_around or None,
        "parts": ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest_first),
    }
    if facts.peak_source == "kernel counter":
        values["counted_bytes"] = facts.peak_bytes
    if facts.outer_limit is not None:
        values["outer_bytes"] = facts.outer_limit.limit_bytes
        values["outer_cgroup"] = facts.outer_limit.cgroup
    waited_share = (facts.stalled_s or 0) / max(facts.duration_s or 0, 1e-3)
    # Less is harmless: reading a file once in a full cgroup already loses 7 % of the time.
    if facts.stalled_s is not None and facts.stalled_s >= 5 and waited_share >= 0.15:
        values |= {"waited_s": facts.stalled_s, "waited_share": waited_share}
    if facts.growth is not None and facts.growth.verdict == "climbs":
        values |= vars(facts.growth)
    for throttle in facts.throttled:  # the last one, if several cgroups did
        values |= throttle
    return values


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template; "" if a name outside of its brackets is unknown.

    "{a}[ in {b}]" is "1 in 2" for a=1 and b=2, "1" for a=1 alone, and "" for b=2 alone.
    """

    def is_known(text: str) -> bool:
        names = re.findall(r"{(\w+)", text)
        return all(values.get(name) not in UNKNOWN for name in names)

    parts = re.split(r"[\[\]]", template)  # those with an odd index stood in brackets
    known = "".join(part for i, part in enumerate(parts) if i % 2 == 0 or is_known(part))
    shown = {name: _shown(name, value) for name, value in values.items()}
    return known.format_map(shown) if is_known(known) else ""


def _shown(name: str, value: Any) -> Any:  # a value as its sentence has it
    if name.endswith("_bytes") and isinstance(value, int | float):
        return format_bytes(value)
    if isinstance(value, list | tuple):
        return ", ".join([*map(str, value[:_SHOWN]), *["..."] * (len(value) > _SHOWN)])
    return value


def _signal_name(sign: str) -> str:
    """Name of the signal by which a process with the exit code `sign` ended; "" for other codes."""
    number = int(sign) - 128 if sign.isdigit() else 0
    if not 0 < number < signal.NSIG:
        return ""
    # a real-time signal has no name
    return next((item.name for item in signal.Signals if item == number), f"signal {number}")
