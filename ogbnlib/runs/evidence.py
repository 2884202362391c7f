"""Table from messages of the kernel, Slurm, allocators, launchers and Python to causes.

`find` reads pasted texts, the last output of a run and the logs of Slurm jobs, so that the same
text always has the same cause. `exit_codes` explains exit codes and job states.
"""

import csv
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import format_bytes
from ..memory.cuda import ALLOCATOR_VARIABLES, oom_sizes
from .exit_codes import (
    EXIT_CODES,
    PENDING,
    RUNNING,
    STATES,
    Meaning,
    code_key,
    meaning_of,
    meaning_of_state,
    state_key,
)

GUIDE = (
    "notebooks/guide/troubleshooting.md (without a clone: `python -m ogbnlib notebooks FOLDER` "
    "writes it)"
)
OUT_OF_MEMORY = "out of memory"
_LESS = (
    "`python -m ogbnlib plan --memory-limit SIZE` says which settings fit; `python -m ogbnlib watch` shows where a "
    "script of your own needs its memory"
)
_GPU_LESS = EXIT_CODES["76"].remedy.partition(", or ")[2]
# Named groups of the patterns below that match a size.
_SIZES = ("anon", "asked", "used")


@dataclass(frozen=True)
class _Clue:
    """A pattern, and the cause that it proves.

    Without a `meaning`, the exit code or signal in the pattern's group `code` or `signal` is looked
    up, and `who` names the process. Names in braces stand for the pattern's groups.
    """

    pattern: str
    meaning: Meaning | None = None
    who: str = ""


# Lines that only the kernel, systemd or Slurm write: they prove a cause wherever they stand.
_SYSTEM = [
    _Clue(
        r"(?P<limit>Memory cgroup out|Out) of memory[^\n]*: Killed process (?P<pid>\d+)[ ,]+\(?(?P<name>[^\s),]+)"
        r"(?:[^\n]*?anon-rss: ?(?P<anon>\d+ ?kB))?",
        Meaning(
            OUT_OF_MEMORY, "the kernel's out-of-memory killer ended process {pid} ({name})", _LESS
        ),
    ),
    _Clue(
        r"(?P<limit>oom-kill:constraint=\w+)[^\n]*task=(?P<name>[^,\n]+),pid=(?P<pid>\d+)",
        Meaning(
            OUT_OF_MEMORY, "the kernel's out-of-memory killer ended process {pid} ({name})", _LESS
        ),
    ),
    _Clue(
        r"\binvoked oom-killer: |oom_reaper: reaped process|systemd-oomd killed \d|with result 'oom-kill'"
        r"|Result: oom-kill|\bReason: +OOMKilled",
        Meaning(
            OUT_OF_MEMORY,
            "it was ended for passing the memory of its machine, service or container",
            _LESS,
        ),
    ),
    _Clue(
        r"^slurmstepd\S* error: Exceeded (?:job|step) memory limit at some point",
        Meaning(
            "memory limit met, cause unknown",
            "the job met its memory limit, which page cache does without a kill, too",
            "look at the job's state, which is OUT_OF_MEMORY after a kill: sacct -j ID",
        ),
    ),
]
# Pattern of a line in a job's log -> state. "hit memory limit at least once" is not among them: the
# page cache meets the limit without a kill, too.
_JOB_LINES = {
    r"error: .*oom[-_]kill event|\bsrun: error: .*: Out Of Memory|been OOM Killed"
    r"|error: .*exceeded (?:virtual )?memory limit .*being killed": "OUT_OF_MEMORY",
    r"error: \*\*\* .*DUE TO TIME LIMIT": "TIMEOUT",
    r"error: \*\*\* .*DUE TO PREEMPTION": "PREEMPTED",
    r"error: \*\*\* .*DUE TO NODE FAILURE|^srun: error: Node failure on": "NODE_FAIL",
    r"error: \*\*\* .*DUE TO JOB REQUEUE|^ogbnlib: .*; back in the queue": "REQUEUED",
    # only of a JOB: srun also cancels steps, which proves nothing
    r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*": "CANCELLED",
}
_SHM = EXIT_CODES["135"]
_DIED = "worker died, cause unknown"
_LOST = "lost another rank, cause unknown"
_WAITED = "a rank waited for another one, which had ended, hung or lost its connection"
_ALL_LOGS = "read the logs of all ranks for the first that failed; dmesg and sacct show a kill"
_NO_WORKERS = (
    "set num_workers=0, which shows the worker's own error; run under a memory_limit to see a kill"
)
# Messages of exceptions, strongest evidence first.
_EXCEPTIONS = [
    _Clue(
        r"(?:DefaultCPUAllocator: [^\n]*?tried to allocate |(?<!OutOf)MemoryError: Unable to allocate )"
        r"(?P<asked>[\d.]+ \w+)",
        Meaning(
            OUT_OF_MEMORY,
            "Linux refused {asked} of RAM at once: more than the machine, or a limit of `ulimit -v`, has left",
            _LESS,
        ),
    ),
    # `_gpu` reads the sizes in torch's message
    _Clue(
        r"CUDA out of memory|OutOfMemoryError|CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)",
        Meaning(
            "out of GPU memory",
            "an allocation on the GPU failed, and the message has no sizes",
            f"look with nvidia-smi for another process on the GPU; if there is none, {_GPU_LESS}",
        ),
    ),
    _Clue(
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) is killed by signal: (?P<signal>[A-Z][a-z ]+\w)",
        who="DataLoader worker {pid}",
    ),
    _Clue(
        r"process (?P<pid>\d+) terminated with signal (?P<code>SIG\w+)"
        r"|died with <Signals\.(?P<signal>SIG\w+)",
        who="a process that it started",
    ),
    _Clue(
        r"received 0 items of ancdata|Too many open files",
        Meaning(
            "error",
            "ran out of file descriptors: DataLoader workers pass each tensor by one of them",
            "raise the limit with `ulimit -n 65536`, or call "
            "torch.multiprocessing.set_sharing_strategy('file_system') at the beginning",
        ),
    ),
    _Clue(
        r"insufficient shared memory|unable to (?:open|allocate) shared memory"
        r"|unable to (?:write to|mmap \d+ bytes from|resize) file </torch(?![^\n]*Cannot allocate)"
        r"|No space left on device: '?/(?:dev/shm|torch_)",
        Meaning(
            _SHM.cause,
            "ran out of shared memory: DataLoader workers pass batches through /dev/shm",
            _SHM.remedy,
        ),
    ),
    _Clue(
        r"device-side assert triggered|Target -?\d+ is out of bounds",
        Meaning(
            "error",
            "a label lies outside of 0 to the number of classes - 1, such as a NaN turned into an integer",
            f"check the labels with `python -m ogbnlib verify`; {GUIDE} has the line for a script of your own",
        ),
    ),
    _Clue(
        r"(?<!OutOf)MemoryError\b|std::bad_alloc|an(?:'|no)t allocate memory|not enough memory: you tried",
        Meaning(
            OUT_OF_MEMORY,
            "Linux refused an allocation: the machine, or a limit of `ulimit -v`, has no memory left",
            _LESS,
        ),
    ),
    _Clue(
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) exited unexpectedly",
        Meaning(
            _DIED, "DataLoader worker {pid} ended, and the message does not say why", _NO_WORKERS
        ),
    ),
    _Clue(
        r"ncclRemoteError|gloo[^\n]*(?:Connection closed|Timed out)",
        Meaning(_LOST, _WAITED, _ALL_LOGS),
    ),
]
# by the signal's description, such as "Killed"
_SIGNAL_CODES = {str(signal.strsignal(code)): str(128 + code) for code in signal.Signals}
# only of crashes and kills: ordinary lines may begin with the other words, such as "Stopped"
_WORDS = "|".join(
    re.escape(word)
    for word, code in _SIGNAL_CODES.items()
    if code in ("132", "134", "135", "137", "139", "143")
)
# Lines of shells, srun and torch about another process.
_LAUNCHERS = [
    _Clue(
        r"ProcessGroupNCCL\.cpp[^\n]*collective operation timeout",
        Meaning(_LOST, _WAITED, _ALL_LOGS),
    ),
    # A killed worker's connection may be reset before torch checks on the worker.
    _Clue(
        r"utils/data/dataloader\.py[\s\S]{0,4000}ConnectionResetError",
        Meaning(
            _DIED,
            "a DataLoader worker ended while it handed over a batch, and the message does not say why",
            _NO_WORKERS,
        ),
    ),
    _Clue(
        rf"^(?:\S+: line \d+: +\d+ +|\[\d+\] *[+-] +|srun: error: \S+: tasks? [\d,-]+: )(?P<signal>{_WORDS})(?!\w)"
        rf"|^(?P<code>{_WORDS})(?: \(core dumped\))? *$",
        who="a process",
    ),
]
# Exceptions that only report the end of another process: the cause stands above them.
_CONSEQUENCES = re.compile(
    r"exited unexpectedly|ChildFailedError|Connection (?:closed|reset|refused)|Broken ?pipe"
    r"|CalledProcessError|EOFError|ProcessRaisedException|BrokenProcessPool",
    re.IGNORECASE,
)
# A line that a program's end begins with: `Type: message` of Python, or of an exception in C++.
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\w*(?=[:\n]|$)|terminate called after throwing).*$",
    re.MULTILINE,
)
_WORD = re.compile(r"[^\W_]")  # ruled lines (====) do not match
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = re.compile(
    r"(?:direct cause of the following exception|another exception occurred):[\s\w\[\]:]*$"
)
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


def find(text: str, *, foreign: bool = True, killed: bool = False) -> Meaning | None:
    """Find the cause of a process's end in a text; None if none is known.

    A line counts only where it can be the end: lines of the kernel and Slurm anywhere; then the
    exception with which the program ended, not one that was caught and followed by another; then a
    launcher's report. A line that merely mentions memory proves nothing. A `killed` program raised
    no exception, so only the first kind counts.

    `foreign` tells whether exit codes in the text come from commands that are not this package's
    own.
    """
    text = cleaned(text)
    finding = _first(_SYSTEM, text)
    state, line = job_state(text.splitlines())
    if finding is None and state:
        meaning = meaning_of_state(state, {})
        finding = meaning._replace(text=f"the job {meaning.text}", line=line)
    if finding or killed:
        return finding
    return _by_rank(text, foreign=foreign) or _by_exception(text) or _first(_LAUNCHERS, text)


def find_in_message(text: str) -> Meaning | None:
    """Find the cause in a pasted text, which may be a message without its exception's name."""
    # The last tries join the lines, because a terminal may have broken a message.
    joined = " ".join(text.split())
    begun = [clue for clue in _EXCEPTIONS if re.match(clue.pattern, joined)]
    return find(text) or find_job(text) or find(joined) or _first(begun, joined)


def _first(clues: Iterable[_Clue], text: str) -> Meaning | None:
    for clue in clues:
        matches = list(re.finditer(clue.pattern, text, re.MULTILINE))
        if matches:
            return _finding(clue, matches[-1])
    return None


def _finding(clue: _Clue, match: re.Match[str]) -> Meaning:
    """Return the clue's meaning, with the match's names and sizes in its text and the matched line
    as evidence."""
    groups = {name: value for name, value in match.groupdict().items() if value is not None}
    sizes = {name: _size_of(groups[name]) for name in _SIZES if name in groups}
    words = groups | {name: format_bytes(size) for name, size in sizes.items()}
    line = _line_of(match)
    meaning = clue.meaning
    if meaning is None:
        word = groups.get("code") or groups["signal"]
        meaning = meaning_of(_SIGNAL_CODES.get(word, word), foreign=True)
        meaning = meaning._replace(text=_about(clue.who, meaning))
    elif meaning.cause == "out of GPU memory":  # torch's message has the sizes that say why
        return _gpu(match.string, line) or meaning._replace(line=line)
    text = meaning.text.format(**words)
    if "anon" in words:
        text += f", which held {words['anon']} of anonymous memory"
    if "limit" in words:
        of_cgroup = re.search("cgroup|MEMCG", words["limit"])
        text += _GROUP if of_cgroup else _MACHINE
    return meaning._replace(text=text, line=line, sizes=sizes)


_GROUP = ", for the limit of its cgroup: a job's --mem, or the limit of a container or a run"
_MACHINE = ", because the whole machine had no memory left"


def _about(who: str, meaning: Meaning) -> str:
    verb = "was " if meaning.text.startswith(("ended by ", "interrupted ")) else ""
    return f"{who} {verb}{meaning.text}"


def _line_of(match: re.Match[str]) -> str:
    """Return the whole line around a match; several lines are joined by blanks."""
    begin = match.string.rfind("\n", 0, match.start()) + 1
    rest = match.string[match.end() :].partition("\n")[0]
    return " ".join((match.string[begin : match.end()] + rest).split())


def _size_of(text: str) -> int:
    """Bytes of a size, as kernel, torch, numpy and Slurm write it: "126 kB", "51.7 TiB", "64K"."""
    number, unit = re.findall(r"([\d.]+) ?([kKMGTPE]?)", text)[0]
    return int(float(number) * 1024 ** " KMGTPE".index(unit.upper() or " "))


def cleaned(text: str) -> str:
    """Remove escapes and torch's "[rank0]: " from a text; carriage returns become line ends."""
    return _RANK_PREFIX.sub("", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def job_state(lines: Iterable[str]) -> tuple[str, str]:
    """Return a Slurm job's state and the line of its log that proves it, or two ""."""
    proofs = [
        (state, line.strip())
        for line in lines
        for pattern, state in _JOB_LINES.items()
        if re.search(pattern, line)
    ]
    # An out-of-memory kill explains all later lines, unless a new attempt followed.
    kills = [proof for proof in proofs if proof[0] == "OUT_OF_MEMORY"]
    if kills and proofs[-1][0] != "REQUEUED":
        return kills[0]
    return [("", ""), *proofs][-1]


def job_rows(text: str) -> list[dict[str, str]]:
    """Read rows of jobs and steps from `sacct --parsable2` or `scontrol show job`, each a dict with
    sacct's field names; [] without any."""
    if re.match(r"JobID(Raw)?\|", text):
        return [*csv.DictReader(text.splitlines(), delimiter="|", quoting=csv.QUOTE_NONE)]
    text = re.sub(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\S+)", r"JobId=\1_\2", text)
    # a value may contain blanks
    value = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)")
    shown = re.split(r"(?=\bJobId=)", text)[1:]
    return [
        {_NAMES.get(name, name): word for name, word in value.findall(" ".join(job.split()))}
        for job in shown
    ]


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


def find_job(text: str) -> Meaning | None:
    """Explain the worst state of a job in a pasted table of Slurm; None without one."""
    if not re.search(r"\bJobI[Dd]\b|\bOUT_OF_ME", text):
        return None
    rows = [
        (state_key(word), row) for row in text.splitlines() for word in re.split(r"[\s|=]+", row)
    ]
    rows = [(state, row) for state, row in rows if state]
    ends = [end for end in rows if STATES[end[0]] not in (STATES["COMPLETED"], PENDING, RUNNING)]
    killed = [end for end in ends if end[0] == "OUT_OF_MEMORY"]
    # a step that is killed for its memory lets the job end as FAILED
    by_weight = [*killed[:1], *reversed(ends), *reversed(rows)]
    if not by_weight:
        return None
    state, row = by_weight[0]
    number = re.search(r"\d+(?:_\d+)?", row)
    meaning = meaning_of_state(state, {"job": number[0]} if number else {})
    return meaning._replace(text=f"the job {meaning.text}", line=row.strip())


def failed_rank(text: str) -> re.Match[str] | None:
    """Find the rank that failed first, by torchrun's report; groups are `rank` and `code`.

    torchrun ends the other ranks by SIGTERM, so code 143 is left out.
    """
    for pattern in _FAILED_RANKS:
        ranks = list(re.finditer(pattern, text, re.DOTALL))
        own = [one for one in ranks if code_key(one["code"]) not in ("0", "143")]
        # a rank on another node ends with 1 once its peer is gone
        killed = [one for one in own if one["code"] != "1"]
        if own:
            return (killed or own)[0]
    return None


def _by_rank(text: str, *, foreign: bool) -> Meaning | None:
    rank = failed_rank(text)
    if rank is None:
        return None
    # code 1 is a Python exception, whose traceback stands somewhere in the text
    inner = _of_exceptions(text) if rank["code"] == "1" else None
    if inner is not None:
        return inner._replace(text=f"rank {rank['rank']}: {inner.text}")
    meaning = meaning_of(rank["code"], foreign=foreign)
    return meaning._replace(text=_about(f"rank {rank['rank']}", meaning), line=_line_of(rank))


def _by_exception(text: str) -> Meaning | None:
    """Find the cause in the exception with which the program ended, and in those that it names."""
    failure = _last_failure(text)
    endings = _EXCEPTION.findall(failure)
    if endings and _CONSEQUENCES.search(endings[-1]):
        return _of_exceptions(text)
    if _TRACEBACK not in failure:
        failure = failure[failure.rfind(endings[-1]) :] if endings else ""
    return _of_exceptions(failure)


def _of_exceptions(text: str) -> Meaning | None:
    """The strongest evidence in any exception's own lines."""
    messages = [text[match.start() :] for match in _EXCEPTION.finditer(text)]
    for clue in _EXCEPTIONS:
        for message in reversed(messages):
            first_line = message.partition("\n")[0]
            match = re.search(clue.pattern, first_line)
            if match:
                return _finding(clue, re.search(clue.pattern, message) or match)
    return None


def _last_failure(text: str) -> str:
    """The text from the last traceback on, with the earlier ones that it names as its cause."""
    parts = text.split(_TRACEBACK)
    begin = len(parts) - 1
    while begin > 1 and _CHAINED.search(parts[begin - 1]):
        begin -= 1
    return _TRACEBACK.join(parts[begin:])


def exception_line(text: str) -> str:
    """Return the line `Type: message` of the last traceback; "" without one.

    If the message ends with a colon, the next line is added.
    """
    _, traceback, after = cleaned(text).rpartition(_TRACEBACK)
    lines = [line for line in after.split("\n")[1:] if line.strip()]
    # frames: indented, or marked by loguru's ">"
    while lines and not re.match(r"[^\W\d]", lines[0]):
        del lines[0]
    if not traceback or not lines:
        return ""
    message, *following = [line.strip() for line in lines[:2]]
    if message.endswith(":") and _WORD.search("".join(following)):
        return f"{message} {following[0]}"
    return message


def last_line(output: str) -> str:
    """The last line of a command's output that has a word; "" without one."""
    return ["", *filter(_WORD.search, _lines(output))][-1]


def _lines(output: str) -> list[str]:
    return [line.strip(" \t│") for line in cleaned(output).splitlines()]


def last_words(output: str, *, killed: bool = False) -> str:
    """Return the line of a command's output that tells most about its end; "" without one.

    In this order: the command's own "error: ..." line, the evidence of `find`, an exception's line,
    and the last line. For a `killed` command only the first two count.
    """
    errors = [line for line in _lines(output) if line.startswith("error: ")]
    if errors:
        return errors[-1]
    finding = find(output, killed=killed)
    if finding:
        return finding.line
    if killed:
        return ""
    return exception_line(output) or last_line(output)


def _gpu(message: str, line: str) -> Meaning | None:
    """Cause of torch's "CUDA out of memory" message: fragmentation, other processes, or a step too
    large; None without sizes."""
    *_, last = re.split(r"(?=CUDA out of memory)", message)
    sizes = oom_sizes(" ".join(last.split()))
    if "requested_bytes" not in sizes:
        return None
    requested = sizes["requested_bytes"]
    unallocated = sizes.get("unallocated_bytes", 0)
    free = sizes.get("free_bytes", 0)
    used = sizes.get("reserved_bytes", 0) + free
    others = 0
    if "total_bytes" in sizes and "allowed_bytes" not in sizes and used:
        others = sizes["total_bytes"] - used
    if unallocated and unallocated + free >= requested:
        cause = "fragmentation"
        remedy = (
            "set expandable_segments=True, in a script of your own "
            f"{ALLOCATOR_VARIABLES[0]}=expandable_segments:True"
        )
        more = f" and {format_bytes(free)} free" if unallocated < requested else ""
        why = (
            f"With {format_bytes(unallocated)} reserved but unallocated{more} "
            "there was enough, but not in one piece"
        )
    elif others > 2**30 + requested:  # CUDA itself takes 0.3 to 0.6 GB
        cause = "others on the GPU"
        remedy = "find the other process with nvidia-smi; end it, or use another GPU"
        why = f"{format_bytes(others)} is used outside torch's allocator, mostly by other processes"
    else:
        cause = "size"
        remedy = _GPU_LESS
        why = "There was not enough memory, not even in pieces: a step needs more than the GPU has"
    text = f"out of GPU memory, by {cause}: {gpu_sizes(sizes)} {why}"
    parts = {name.removesuffix("_bytes"): size for name, size in sizes.items()}
    return Meaning(f"out of GPU memory: {cause}", text, remedy, line, parts)


def gpu_sizes(oom: Mapping[str, float]) -> str:
    """The sizes of a failed allocation on the GPU as a sentence; "" without any."""
    names = {
        "requested": "asked for",
        "allocated": "allocated",
        "reserved": "reserved",
        "largest_free": "the largest free block in it",
        "free": "free on the GPU",
    }
    sizes = [
        f"{format_bytes(oom[f'{key}_bytes'])} {word}"
        for key, word in names.items()
        if f"{key}_bytes" in oom
    ]
    return ", ".join(sizes) + "." if sizes else ""
