"""Table from messages of the kernel, Slurm, allocators, launchers and Python to causes.

`find` reads pasted texts, the last output of a run and the logs of Slurm jobs, so that the same
text always has the same cause. `codes` explains exit codes and job states.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..memory.cuda import oom_sizes
from .cause import Facts
from .codes import code_key, of_code, of_sign, of_state
from .render import Diagnosis


class _Clue(NamedTuple):
    """The groups `who`, `pid` and `name` of a pattern name the process that ended."""

    pattern: str
    sign: str  # that it proves; `codes` has the cause of a sign


_KILLED = r"[^\n]*: Killed process (?P<pid>\d+)[ ,]+\(?(?P<name>[^\s),]+)"
# Lines that only the kernel, systemd or Slurm write: they prove a cause wherever they stand.
_SYSTEM = [
    _Clue(rf"Memory cgroup out of memory{_KILLED}", "kernel kill in a cgroup"),
    _Clue(rf"Out of memory{_KILLED}", "kernel kill"),
    _Clue(
        r"\binvoked oom-killer: |\boom-kill:constraint=|oom_reaper: reaped process|systemd-oomd killed \d"
        r"|with result 'oom-kill'|Result: oom-kill|\bReason: +OOMKilled",
        "memory of a group",
    ),
    _Clue(r"^slurmstepd\S* error: Exceeded (?:job|step) memory limit at some point", "limit met"),
]
# Pattern of a line in a job's log -> state. "hit memory limit at least once" is not among them: the
# page cache meets the limit without a kill, too.
_JOB_LINES = {
    r"error: .*oom[-_]kill event|\bsrun: error: .*: Out Of Memory|been OOM Killed"
    r"|error: .*exceeded (?:virtual )?memory limit .*being killed|\bOUT_OF_ME(?:MORY\b|\+)": "OUT_OF_MEMORY",
    r"error: \*\*\* .*DUE TO TIME LIMIT": "TIMEOUT",
    r"error: \*\*\* .*DUE TO PREEMPTION": "PREEMPTED",
    r"error: \*\*\* .*DUE TO NODE FAILURE|^srun: error: Node failure on": "NODE_FAIL",
    r"error: \*\*\* .*DUE TO JOB REQUEUE|^ogbnlib: .*; back in the queue": "REQUEUED",
    # only of a JOB: srun also cancels steps, which proves nothing
    r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*": "CANCELLED",
}
_PID = r"\(pid(?:\(s\))? (?P<pid>[\d, ]+)\)"
# Messages of exceptions, strongest evidence first.
_EXCEPTIONS = [
    _Clue(r"CUDA (?:error: )?out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", "76"),
    _Clue(rf"(?P<who>DataLoader worker) {_PID} is killed by signal: Killed", "137"),
    _Clue(rf"(?P<who>DataLoader worker) {_PID} is killed by signal: Bus error", "135"),
    _Clue(
        r"(?P<who>process) (?P<pid>\d+) terminated with signal SIGKILL|<Signals\.SIGKILL: 9", "137"
    ),
    _Clue(r"received 0 items of ancdata|Too many open files", "file descriptors"),
    _Clue(
        r"insufficient shared memory|unable to (?:open|allocate) shared memory"
        r"|unable to (?:write to|mmap \d+ bytes from|resize) file </torch(?![^\n]*Cannot allocate)"
        r"|No space left on device: '?/(?:dev/shm|torch_)",
        "shared memory",
    ),
    _Clue(r"device-side assert triggered|Target -?\d+ is out of bounds", "label out of range"),
    _Clue(
        r"(?<!OutOf)MemoryError\b|std::bad_alloc"
        r"|(?:DefaultCPUAllocator: )?(?:[Cc]an(?:'|no)t allocate memory|not enough memory: you tried)",
        "allocation refused",
    ),
    _Clue(rf"DataLoader worker {_PID} exited unexpectedly", "worker gone"),
    _Clue(r"ncclRemoteError|gloo[^\n]*(?:Connection closed|Timed out)", "rank gone"),
]
# Lines of shells, srun and torch about another process.
_LAUNCHERS = [
    _Clue(r"ProcessGroupNCCL\.cpp[^\n]*collective operation timeout", "rank gone"),
    # A killed worker's connection may be reset before torch checks on the worker.
    _Clue(r"utils/data/dataloader\.py[\s\S]{0,4000}ConnectionResetError", "worker gone"),
    _Clue(r"^(?:\S+: line \d+: +\d+ +|\[\d+\] *[+-] +)Killed\b|^Killed *$", "137"),
]
# Exceptions that only report the end of another process: the cause stands above them.
_CONSEQUENCES = re.compile(
    r"exited unexpectedly|ChildFailedError|Connection (?:closed|reset|refused)|Broken ?pipe"
    r"|CalledProcessError|EOFError|ProcessRaisedException|BrokenProcessPool",
    re.IGNORECASE,
)
# A line that a program's end begins with: `Type: message` of Python, also after this package's
# "error: ", or of an exception in C++.
_EXCEPTION = re.compile(
    r"^(?:(?:error: )?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\w*(?=[:\n]|$)"
    r"|terminate called after throwing).*$",
    re.MULTILINE,
)
_WORD = re.compile(r"[^\W_]")  # ruled lines (====) do not match
_RANK_PREFIX = re.compile(r"^\[(?:rank)?\d+\]: ?", re.MULTILINE)
# Escape sequences of colors and titles, and control characters except tab, newline and return.
_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
# Failed ranks in torchrun's reports; the root cause of each node comes first.
_FAILED_RANKS = (
    r"Root Cause[^\n]*?:\s.*?rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+)",
    r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+)",
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",
)


def find(text: str, *, foreign: bool = True, killed: bool = False) -> Diagnosis | None:
    """Find the cause of a process's end in a text; None if none is known.

    A line counts only where it can be the end: lines of the kernel and Slurm anywhere; then the
    last exception; then a launcher's report. A line that merely mentions memory proves nothing. A
    `killed` program raised no exception, so only the first kind counts. `foreign` as in `of_code`.
    """
    text = cleaned(text)
    state, line = job_state(text.splitlines())
    end = _first(_SYSTEM, text) or (of_state(state, {}, line) if state else None)
    if end or killed:
        return end
    return _by_rank(text, foreign=foreign) or _by_exception(text) or _first(_LAUNCHERS, text)


def find_in_message(text: str) -> Diagnosis | None:
    """Find the cause in a pasted text, which may be a message without its exception's name."""
    joined = " ".join(cleaned(text).split())  # joined, because a terminal may have broken a message
    # later in the text, a message without its exception's name may be a mention
    at_start = [clue for clue in _EXCEPTIONS if re.match(clue.pattern, joined)]
    return find(text) or _first(at_start, joined)


def _first(clues: list[_Clue], text: str) -> Diagnosis | None:
    """The diagnosis by the first clue that occurs in `text`; of several places the last counts."""
    for pattern, sign in clues:
        matches = list(re.finditer(pattern, text, re.MULTILINE))
        if matches:
            return _end_by(sign, matches[-1])
    return None


def _end_by(sign: str, match: re.Match[str]) -> Diagnosis:
    groups = match.groupdict()  # `who`, `pid` and `name`, see the tables above
    who = " ".join(filter(None, [groups.get("who"), groups.get("pid")]))
    if "name" in groups:  # of the kernel's line, which has no `who`
        who = f"process {who} ({groups['name']})"
    sizes = {}
    if sign == "76":  # out of GPU memory; a terminal may have broken the message into lines
        sizes = oom_sizes(" ".join(match.string[match.start() :].split()))
    return of_sign(sign, Facts(sign, who, _line_of(match), sizes))


def _line_of(match: re.Match[str]) -> str:
    # the whole lines around the match, blanks joined
    begin = match.string.rfind("\n", 0, match.start()) + 1
    tail = match.string[match.end() :].partition("\n")[0]
    return " ".join((match.string[begin : match.end()] + tail).split())


def cleaned(text: str) -> str:
    """Remove escapes and torch's "[rank0]: " from a text; carriage returns become line ends."""
    return _RANK_PREFIX.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def job_state(lines: Iterable[str]) -> tuple[str, str]:
    """Return a Slurm job's state and the line of its log that proves it, or two ""."""
    proofs = [  # (state, line), in the log's order
        (state, line.strip())
        for line in lines
        for pattern, state in _JOB_LINES.items()
        if re.search(pattern, line)
    ]
    # An out-of-memory kill explains all later lines, unless a new attempt followed.
    kills = [proof for proof in proofs if proof[0] == "OUT_OF_MEMORY"]
    if kills and proofs[-1][0] != "REQUEUED":
        return kills[0]
    return [("", ""), *proofs][-1]  # the last proof, if there is one


def job_rows(text: str) -> list[dict[str, str]]:
    """Read rows of jobs and steps from `sacct --parsable2` or `scontrol show job`, each a dict with
    sacct's field names; [] without any."""
    if re.match(r"JobID(Raw)?\|", text):
        return [*csv.DictReader(text.splitlines(), delimiter="|", quoting=csv.QUOTE_NONE)]
    # scontrol names a task of an array by three numbers, sacct as 123_4
    text = re.sub(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\S+)", r"JobId=\1_\2", text)
    # NAME=VALUE, and a value, which may contain blanks, ends before the next name
    value = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)")
    jobs = re.split(r"(?=\bJobId=)", text)[1:]  # the first piece is what stands before all jobs
    pairs = [value.findall(" ".join(job.split())) for job in jobs]
    return [{_NAMES.get(name, name): word for name, word in job} for job in pairs]


# scontrol's names -> sacct's
_NAMES = {
    "JobId": "JobID",
    "JobState": "State",
    "RunTime": "Elapsed",
    "TimeLimit": "Timelimit",
    "NumNodes": "NNodes",
    "MinMemoryNode": "ReqMem",
    "MinMemoryCPU": "ReqMem",
}


def failed_rank(text: str) -> re.Match[str] | None:
    """Find the rank that failed first, by torchrun's report; groups are `rank` and `code`.

    torchrun ends the other ranks by SIGTERM, so code 143 is left out.
    """
    for pattern in _FAILED_RANKS:
        for rank in re.finditer(pattern, text, re.DOTALL):
            if code_key(rank["code"]) not in ("0", "143"):
                return rank
    return None


def _by_rank(text: str, *, foreign: bool) -> Diagnosis | None:  # by torchrun's report
    rank = failed_rank(text)
    if rank is None:
        return None
    who = f"rank {rank['rank']}"
    # code 1 is a Python exception, whose traceback stands somewhere in the text
    inner = _by_exception(text) if rank["code"] == "1" else None
    if inner is not None:
        return replace(inner, facts=replace(inner.facts, who=who))
    end = of_code(rank["code"], foreign=foreign, who=who)
    # the exit code is the rank's, not that of the command, which is unknown
    return replace(end, facts=replace(end.facts, line=_line_of(rank), exit_code=None))


def _by_exception(text: str) -> Diagnosis | None:
    """Find the cause in the last exception; if that only reports another process's end, in an
    earlier one."""
    # each message with all that follows it
    messages = [text[match.start() :] for match in _EXCEPTION.finditer(text)]
    end = None  # by the last consequence whose message is known
    for message in reversed(messages):
        known = _by_message(message)
        if not _CONSEQUENCES.search(message.partition("\n")[0]):
            return known or end
        end = end or known
    return end


def _by_message(message: str) -> Diagnosis | None:
    # Only the first line decides; the match in the whole message has the sizes of later lines.
    first_line = message.partition("\n")[0]
    for pattern, sign in _EXCEPTIONS:
        match = re.search(pattern, first_line) and re.search(pattern, message)
        if match:
            return _end_by(sign, match)
    return None


def exception_line(text: str) -> str:
    """Return the line `Type: message` of the last exception; "" without one."""
    return ["", *_EXCEPTION.findall(cleaned(text))][-1]


def _lines(output: str) -> list[str]:  # without the frames of typer's and rich's boxes
    return [line.strip(" \t│") for line in cleaned(output).splitlines()]


def last_words(output: str, *, killed: bool = False) -> str:
    """Return the line of a command's output that tells most about its end; "" without one.

    In this order: the command's own "error: ..." line, the evidence of `find`, an exception's line,
    and the last line. A `killed` command raised no exception.
    """
    errors = [line for line in _lines(output) if line.startswith("error: ")]
    if errors:
        return errors[-1]
    end = find(output, killed=killed)
    if end:
        return end.facts.line
    raised = "" if killed else exception_line(output)
    # `_WORD` leaves out lines without a letter or digit
    return raised or ["", *filter(_WORD.search, _lines(output))][-1]
