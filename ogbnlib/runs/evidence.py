"""Table from messages of the kernel, Slurm, allocators, launchers and Python to causes.

`find` reads pasted texts, the last output of a run and the logs of Slurm jobs, so that the same
text always has the same cause. `exit_codes` explains exit codes and job states.
"""

import csv
import itertools
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import format_bytes
from ..memory.cuda import ALLOCATOR_VARIABLES, oom_sizes
from ..memory.killed import NEEDING_LESS
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
    "hold less at once: `python -m ogbnlib plan --memory-limit SIZE` says which settings fit; in a script of your own "
    f"one loader at a time, {NEEDING_LESS}"
)
_GPU_LESS = EXIT_CODES["76"].remedy.partition(", or ")[2]
# Named groups of the patterns below that match a size.
_SIZES = ("anon", "asked", "used")


@dataclass(frozen=True)
class _Clue:
    """A pattern for a line of a log, and the cause that it proves.

    Without a `meaning`, the exit code or signal in the pattern's group `code`, `signal`, `name` or
    `number` is looked up, and `who` names the process. Names in braces stand for the pattern's
    groups.
    """

    pattern: str
    meaning: Meaning | None = None
    who: str = ""


_VICTIM = r"Kill(?:ed)? process (?P<pid>\d+)[ ,]+\(?(?P<name>[^\s),]+)\)?"
_HELD = r"[^\n]*?anon-rss: ?(?P<anon>\d+ ?kB)"
_STRUCK = "the kernel's out-of-memory killer ended process {pid} ({name})"
_GROUP = ", for the limit of its cgroup: a job's --mem, or the limit of a container or a run"
_SHORT = "{killer} ended {name}, because the machine ran short of memory"
_MACHINE = ", because the whole machine had no memory left"
_KERNEL = [
    _Clue(
        rf"[Mm]emory cgroup out of memory: {_VICTIM}{_HELD}",
        Meaning(OUT_OF_MEMORY, _STRUCK + ", which held {anon} of anonymous memory" + _GROUP, _LESS),
    ),
    _Clue(
        rf"Out of memory[^\n]*: {_VICTIM}{_HELD}",
        Meaning(
            OUT_OF_MEMORY, _STRUCK + ", which held {anon} of anonymous memory" + _MACHINE, _LESS
        ),
    ),
    _Clue(
        _VICTIM + _HELD,
        Meaning(OUT_OF_MEMORY, _STRUCK + ", which held {anon} of anonymous memory", _LESS),
    ),
    _Clue(
        rf"[Mm]emory cgroup out of memory: {_VICTIM}",
        Meaning(OUT_OF_MEMORY, _STRUCK + _GROUP, _LESS),
    ),
    _Clue(rf"Out of memory[^\n]*: {_VICTIM}", Meaning(OUT_OF_MEMORY, _STRUCK + _MACHINE, _LESS)),
    _Clue(
        r"oom-kill:constraint=CONSTRAINT_MEMCG[^\n]*task=(?P<name>[^,\n]+),pid=(?P<pid>\d+)",
        Meaning(OUT_OF_MEMORY, _STRUCK + _GROUP, _LESS),
    ),
    _Clue(
        r"oom-kill:constraint=[^\n]*task=(?P<name>[^,\n]+),pid=(?P<pid>\d+)",
        Meaning(OUT_OF_MEMORY, _STRUCK + _MACHINE, _LESS),
    ),
    _Clue(
        r"oom_reaper: reaped process (?P<pid>\d+) \((?P<name>[^)\n]+)\)",
        Meaning(OUT_OF_MEMORY, _STRUCK, _LESS),
    ),
    _Clue(
        r"(?P<killer>systemd-oomd)[^\n]*: Killed (?P<name>\S+)[^\n]*(?:memory|swap)",
        Meaning(OUT_OF_MEMORY, _SHORT, _LESS),
    ),
    _Clue(
        r"(?P<killer>earlyoom|nohang)[^\n]*[Ss]ending SIG\w+ to (?P<name>process \d+)",
        Meaning(OUT_OF_MEMORY, _SHORT, _LESS),
    ),
    _Clue(
        r"killed by the OOM killer|crashed after using all available RAM|[Rr]esult:? '?oom-kill"
        r"|OOMKilled(?!\W+false)|OOM-killed|invoked oom-killer|systemd-oomd killed \d"
        r"|killed by systemd-oomd|[Kk]illed due to (?:memory (?:pressure|usage)|the node running low on memory)"
        r"|exceeding memory limits|low on resource: memory|[Rr]eplicas low on memory"
        r"|tried to allocate more memory than is available|exceeded \d+% memory budget"
        r"|Memory quota (?:vastly )?exceeded",
        Meaning(
            OUT_OF_MEMORY,
            "it was ended for passing the memory of its machine, service, container or session",
            _LESS,
        ),
    ),
    _Clue(
        r"TERM_MEMLIMIT|job killed: p?v?mem\b[^\n]* exceeded limit|exceeded resource p?v?mem\b"
        r"|[Cc]group mem(?:ory)? limit exceeded|exceeds job (?:hard|soft) limit \"[hs]_(?:vmem|rss)"
        r"|over memory limit of \d|memory usage exceeded request_memory",
        Meaning(
            OUT_OF_MEMORY,
            "the batch system ended the job for passing its memory",
            f"ask for more, or {_LESS}",
        ),
    ),
    _Clue(
        r"TERM_RUNLIMIT|job killed: walltime \d+ exceeded limit|exceeded (?:hard|soft) wallclock time",
        Meaning(
            "time limit",
            "the batch system ended the job at its time limit",
            "ask for more time, and resume",
        ),
    ),
    _Clue(
        r"TERM_(?:OWNER|ADMIN)\b",
        Meaning("cancelled", "the job's owner or an administrator ended it", "submit it again"),
    ),
    _Clue(
        r"^s(?:batch|run|alloc): error: [^\n]*(?:submission failed|allocate resources): (?P<name>[^\n]+)",
        Meaning(
            "never started",
            "Slurm refused the job: {name}",
            "ask for what a partition has and your account may use: sinfo -o '%P %l %D %c %m %G' "
            "and sacctmgr show assoc user=$USER",
        ),
    ),
]
# Pattern of a line in a job's log -> state. "hit memory limit at least once" is not among them: the
# page cache meets the limit without a kill, too.
_JOB_LINES = {
    r"error: .*oom[-_]kill event|\bsrun: error: .*: Out Of Memory|been OOM Killed": "OUT_OF_MEMORY",
    r"error: .*exceeded (?:virtual )?memory limit .*being killed": "OUT_OF_MEMORY",
    r"error: \*\*\* .*DUE TO TIME LIMIT": "TIMEOUT",
    r"error: \*\*\* .*DUE TO PREEMPTION": "PREEMPTED",
    r"error: \*\*\* .*DUE TO NODE FAILURE|^srun: error: Node failure on": "NODE_FAIL",
    r"error: \*\*\* .*DUE TO JOB REQUEUE|^ogbnlib: .*; back in the queue": "REQUEUED",
    # only of a JOB: srun also cancels steps, which proves nothing
    r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*": "CANCELLED",
}

_SIGNAL_CODES = {
    **{str(signal.strsignal(one)): str(128 + one) for one in signal.Signals},  # "Killed"
    # names of signals that glibc and bash print in Chinese, German, French and Spanish
    **dict.fromkeys(("已杀死", "強制結束", "Getötet", "Abgebrochen (killed)"), "137"),
    **dict.fromkeys(("Processus arrêté", "Tué", "Matado"), "137"),
    **dict.fromkeys(("段错误", "程式記憶體區段錯誤", "Speicherzugriffsfehler"), "139"),
    **dict.fromkeys(("Adressierungsfehler", "Erreur de segmentation"), "139"),
    **{"Violación de segmento": "139"},
    **{"已放弃": "134", "总线错误": "135", "已终止": "143"},
}
# only of crashes and kills: ordinary lines may begin with the other words, such as "Stopped"
_WORDS = "|".join(
    re.escape(word)
    for word, code in _SIGNAL_CODES.items()
    if code in ("132", "134", "135", "137", "139", "143")
)
_REFUSED = (
    "Linux refused {asked} at once: more than the machine, or a limit of `ulimit -v`, has left"
)
_SHM = EXIT_CODES["135"]
# Exceptions and last lines of programs, strongest evidence first.
_PROGRAM = [
    _Clue(
        r"DefaultCPUAllocator: [^\n]*?tried to allocate (?P<asked>\d+ bytes)",
        Meaning(OUT_OF_MEMORY, _REFUSED + " (torch's allocator of the CPU, not of the GPU)", _LESS),
    ),
    _Clue(
        r"(?:(?<!OutOf)MemoryError: Unable to allocate|cannot allocate vector of size) (?P<asked>[\d.]+ \w+)",
        Meaning(OUT_OF_MEMORY, _REFUSED, _LESS),
    ),
    _Clue(
        r"\b(?:(?:m|re)alloc of size|memory allocation of) (?P<asked>\d+)(?: bytes)? failed",
        Meaning(OUT_OF_MEMORY, _REFUSED, _LESS),
    ),
    _Clue(
        r"java\.lang\.OutOfMemoryError|JavaScript heap out of memory",
        Meaning(
            OUT_OF_MEMORY,
            "the heap of a Java or JavaScript program was full, which has a limit of its own",
            "raise that limit before it starts: -Xmx, spark.driver.memory and spark.executor.memory, or "
            "NODE_OPTIONS=--max-old-space-size",
        ),
    ),
    # `_gpu` reads the sizes in torch's message
    _Clue(
        r"(?:CUDA|HIP|MPS backend) out of memory|torch(?:\.cuda)?\.OutOfMemoryError"
        r"|(?<!you )\b[Tt]ried to allocate:? [\d.]+ (?:b|[KMG]iB)|(?:CUDA|HIP) error: out of memory"
        r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
        r"|Cuda failure[^\n]*out of memory|STATUS_ALLOC_FAILED|out_of_memory: CUDA|CUDA: out of memory"
        r"|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating[^\n]*GPU|cupy\.\S*OutOfMemoryError",
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
        r"process (?P<pid>\d+) terminated with signal (?P<code>SIG\w+)",
        who="process {pid} of torch.multiprocessing",
    ),
    _Clue(
        r"exit codes of the workers are \{[^}]*?(?P<code>SIG[A-Z]+)\(-\d+\)",
        who="a worker process of the pool",
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
        r"|bus error encountered in worker"
        r"|unable to (?:write to|mmap \d+ bytes from|resize) file </torch(?![^\n]*Cannot allocate)"
        r"|No space left on device: '?/(?:dev/shm|torch_)",
        Meaning(
            _SHM.cause,
            "ran out of shared memory: DataLoader workers pass batches through /dev/shm",
            _SHM.remedy,
        ),
    ),
    _Clue(
        r"can't start new thread|fork: (?:retry: )?Resource temporarily|hread creation failed"
        r"|pthread_create",
        Meaning(
            "error",
            "ran out of threads or processes: a limit of `ulimit -u` or of its cgroup (pids.max)",
            "set num_workers lower and OMP_NUM_THREADS=1, or ask for a higher limit",
        ),
    ),
    _Clue(
        r"Weights only load failed",
        Meaning(
            "error",
            "a file was refused by torch.load (weights_only=True since torch 2.6): it holds more than tensors",
            "pass weights_only=False if you trust who made the file, because loading it executes code; for "
            "processed/ files of ogb and PyG: `python -m ogbnlib convert` reads raw/ instead",
        ),
    ),
    _Clue(
        r"No space left on device|Disk quota exceeded|low on resource: ephemeral-storage",
        Meaning(
            "disk full",
            "a file could not be written, because the disk or the quota is full",
            "free some space, or set run_dir, data_dir or TMPDIR to another disk; then resume",
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
        r"(?<!OutOf)MemoryError\b|std::bad_alloc|an(?:'|no)t allocate memory|not enough memory: you tried"
        r"|runtime: out of memory|<jemalloc>: Error allocating|OOM when allocating[^\n]*CPU",
        Meaning(
            OUT_OF_MEMORY,
            "Linux refused an allocation: the machine, or a limit of `ulimit -v`, has no memory left",
            _LESS,
        ),
    ),
    _Clue(
        r"Xid [^\n]*: (?:48|63|64|74|79|94|95),|uncorrectable (?:ECC|NVLink) error|GPU has fallen off"
        r"|GPU is lost",
        Meaning(
            "GPU failure",
            "the GPU itself failed, not the program",
            "take another GPU or node (Slurm: --exclude=NODE), and show the message to the cluster's support",
        ),
    ),
    _Clue(
        r"illegal memory access|unspecified launch failure",
        Meaning(
            "error",
            "a kernel on the GPU read or wrote outside of its memory, and the error was noticed later",
            "set CUDA_LAUNCH_BLOCKING=1, which names the call; check the node ids with `python -m ogbnlib verify`",
        ),
    ),
    _Clue(
        r"^(?:\S+ ?: \w+ \d+[^\d\n]{1,6}\d+ +|Fatal Python error: |make\S*: \*\*\* \[[^\n\]]*\] )"
        rf"(?P<signal>{_WORDS})(?!\w)|^(?:zsh: |\[\d+\] *[+-] +(?:\d+ +)?)(?P<name>(?i:{_WORDS}))(?!\w)"
        rf"|^(?P<code>{_WORDS}) ?(?:\W[^\n]*(?:core|核心|Speicherabzug)[^\n]*\W)? *$",
        who="a process",
    ),
    _Clue(rf"^srun: error: \S+: tasks? [\d,-]+: (?P<signal>{_WORDS})", who="a task of srun"),
    _Clue(
        r"died with <Signals\.(?P<code>SIG\w+)|interrupted by signal \d+: ?(?P<signal>SIG\w+)"
        r"|Signal \d+ \((?P<name>SIG\w+)\) received",
        who="a process",
    ),
    # printed by mpirun, fish, time, gunicorn, LSF and torchrun (first alternative), mpich (second),
    # gunicorn, supervisor and systemd (third)
    _Clue(
        r"(?i:(?:exited|terminated|killed|died)\s+(?:by|on|with|due to)|got|via)\s+(?i:signal):?\s+\[?"
        rf"(?:(?P<number>[1-6]?\d)\b|(?P<code>SIG[A-Z]+))|(?P<signal>{_WORDS}) \(signal \d"
        r"|(?:was sent|(?<!process is )\b(?:terminated|killed) by|status=\d+/)\W?(?P<name>(?:SIG|(?<=/))[A-Z]+\b)",
        who="a process",
    ),
    _Clue(
        r"(?i:(?:\bexit(?:s|ed)?|\breturn[ _-]?code|\bnon-?zero|\bterminated with code|\]:? error)"
        r"(?:[ _-]?(?:with|a|non-zero|exit|return|status|code|of)\b)*)[\"\s:=(]*"
        r"(?P<code>-\d{1,2}|1[2-5]\d|24\d|250)\b",
        who="a process",
    ),
    _Clue(r"^timeout: sending signal \w+ to command", EXIT_CODES["124"]),
    _Clue(
        r"DeadKernelError|Kernel died|Kernel crashed|kernel[^\n]* appears to have died|Kernel Restarting"
        r"|KernelRestarter: restarting kernel|session crashed for an unknown reason"
        r"|Canceled future for execute_request",
        Meaning(
            "kernel died, cause unknown",
            "the notebook's kernel ended, and the message does not say why: mostly by SIGKILL, for memory",
            "run it with `papermill --engine ogbnlib`, which says how the kernel ended, or train with "
            "run(config, memory_limit=...), whose kill a notebook survives",
        ),
    ),
    _Clue(
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) exited unexpectedly",
        Meaning(
            "worker died, cause unknown",
            "DataLoader worker {pid} ended, and the message does not say why",
            "set num_workers=0, which shows the worker's own error; run under a memory_limit to see a kill",
        ),
    ),
    # A killed worker's connection may be reset before torch checks on the worker.
    _Clue(
        r"utils/data/dataloader\.py[\s\S]{0,4000}ConnectionResetError",
        Meaning(
            "worker died, cause unknown",
            "a DataLoader worker ended while it handed over a batch, and the message does not say why",
            "set num_workers=0, which shows the worker's own error; run under a memory_limit to see a kill",
        ),
    ),
    _Clue(
        r"process (?:managed by the executor|in the process pool) was (?:unexpectedly )?terminated"
        r"|\bKilledWorker\b|The (?:worker|actor) died unexpectedly",
        Meaning(
            "worker died, cause unknown",
            "a process of a pool ended, and the message does not say why",
            "run with one process, which shows its error; run under a memory_limit to see a kill",
        ),
    ),
    _Clue(
        r"Watchdog caught collective operation timeout|ncclRemoteError|gloo[^\n]*(?:Connection closed|Timed out)",
        Meaning(
            "lost another rank, cause unknown",
            "a rank waited for another one, which had ended, hung or lost its connection",
            "read the logs of all ranks for the first that failed; dmesg and sacct show a kill",
        ),
    ),
    _Clue(
        r"[Ee]xceeded (?:job|step) memory limit at some point|hit memory limit at least once",
        Meaning(
            "memory limit met, cause unknown",
            "the job met its memory limit, which page cache does without a kill, too",
            "look at the job's state, which is OUT_OF_MEMORY after a kill: sacct -j ID",
        ),
    ),
]
# Exceptions that only report the end of another process: the cause stands above them.
_CONSEQUENCES = re.compile(
    r"exited unexpectedly|ChildFailedError|Connection (?:closed|reset|refused)|DeadKernelError|Broken ?pipe"
    r"|CalledProcessError|EOFError|ProcessRaisedException|BrokenProcessPool|TerminatedWorkerError"
    r"|PapermillExecutionError|CellExecutionError",
    re.IGNORECASE,
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
# Bars as tqdm, Keras and rich draw them: no other line looks like them, redrawn or not.
_DRAWN = re.compile(r"\d%\|[#\d\u2588-\u258f ]+\|? |\[=*>\.*\]|[━╸╺]{5}")
# Signs of a progress bar that count only in a redrawn line.
_BAR = re.compile(r"\d%\||\d(?:it|batch|s)?/s\b|\| *\d+/\d+ *\[")
# Failed ranks in torchrun's reports; the root cause of each node comes first.
_FAILED_RANKS = (
    r"Root Cause[^\n]*?:\s.*?rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+)",
    r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+)",
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",
)


def find(text: str, *, foreign: bool = True) -> Meaning | None:
    """Find the cause of a process's end in the messages of a text; None if none is known.

    `foreign` tells whether exit codes in the text come from commands that are not this package's
    own. A message of the kernel or Slurm counts anywhere in the text. An exception counts only if
    the program ended with it, not if it was caught and another one followed.
    """
    text = cleaned(text)
    finding = _first(_KERNEL, text)
    state, line = job_state(text.splitlines())
    if finding is None and state:
        meaning = meaning_of_state(state, {})
        finding = meaning._replace(text=f"the job {meaning.text}", line=line)
    return finding or _by_rank(text, foreign=foreign) or _by_exception(text)


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
        word = groups.get("code") or groups.get("signal") or groups.get("name")
        word = word or f"-{groups['number']}"  # `code_key` reads a negative number as a signal
        # look up a shell's "killed" or "KILLED" as "Killed"; a code or a name such as SIGKILL stays
        meaning = meaning_of(_SIGNAL_CODES.get(word.capitalize(), word), foreign=True)
        meaning = meaning._replace(text=_about(clue.who, meaning))
    elif meaning.cause == "out of GPU memory":  # torch's message has the sizes that say why
        return _gpu(match.string, line) or meaning._replace(line=line)
    return meaning._replace(text=meaning.text.format(**words), line=line, sizes=sizes)


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
    """Read rows of jobs and steps from a text, each a dict with sacct's field names; [] without
    any.

    Known formats are sacct's table, aligned or with `|` (--parsable), squeue's table, and those of
    `_listed`.
    """
    header = re.compile(r"\s*JOB_?ID[ |]", re.IGNORECASE)
    lines = [*itertools.dropwhile(lambda line: not header.match(line), text.strip().splitlines())]
    if not lines:
        return _listed(text)
    if "|" in lines[0]:
        rows = csv.DictReader(lines, restkey="", restval="", delimiter="|", quoting=csv.QUOTE_NONE)
        return [{name: cell for name, cell in row.items() if name} for row in rows]
    first, *lines = lines
    names = [_NAMES.get(name, name) for name in first.split()]
    # sacct underlines each column of its header; cells below may be empty
    columns = [match.span() for match in re.finditer("-+", "".join(lines[:1]))]
    if len(columns) == len(names):
        body = [[line[begin:end].strip() for begin, end in columns] for line in lines]
    else:  # squeue, whose last column, the reason, may contain blanks
        body = [line.split(None, len(names) - 1) for line in lines]
    # a row begins with a job's number; a row that the paste cut off has fewer cells
    return [dict(zip(names, row, strict=False)) for row in body if row and row[0][:1].isdigit()]


# The names of scontrol, squeue and seff -> sacct's
_NAMES = {
    "JobId": "JobID",
    "JobState": "State",
    "RunTime": "Elapsed",
    "TimeLimit": "Timelimit",
    "NumNodes": "NNodes",
    "MinMemoryNode": "ReqMem",
    "MinMemoryCPU": "ReqMem",
    "JOBID": "JobID",
    "ST": "State",
    "STATE": "State",
    "NODELIST(REASON)": "Reason",
    "Job ID": "JobID",
    "Memory Utilized": "MaxRSS",
}


def _listed(text: str) -> list[dict[str, str]]:
    """Rows of `scontrol show job`, with or without --oneliner, of seff, or of a mail's subject."""
    mail = re.search(r"Slurm [\w ]*Job_id=(\d+) .*, ([A-Z_]+), ExitCode (\d+)", text)
    if mail:
        return [{"JobID": mail[1], "State": mail[2], "ExitCode": f"{mail[3]}:0"}]
    if re.search(r"^State: [A-Z_]+ \(exit code", text, re.MULTILINE):
        pairs = re.findall(r"^([A-Z][\w ]+): (.*)$", text, re.MULTILINE)
        row = {_NAMES.get(name, name): value for name, value in pairs}
        state, _, code = row["State"].partition(" (exit code ")
        return [row | {"State": state, "ExitCode": f"{code.rstrip(')')}:0"}]
    text = re.sub(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\S+)", r"JobId=\1_\2", text)
    # a value may contain blanks
    value = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)")
    shown = re.split(r"(?=\bJobId=)", text)[1:]
    return [
        {_NAMES.get(name, name): word for name, word in value.findall(" ".join(job.split()))}
        for job in shown
    ]


def find_job(text: str) -> Meaning | None:
    """Explain the end of a job in a pasted table; None without a job and its state."""
    rows = [{"JobID": "ID", **row} for row in job_rows(text) if row.get("State")]
    lone = re.search(r"^ *(\d+)?.*\bOUT_OF_ME(?:MORY\b|\+)", text, re.MULTILINE)
    if lone and not rows:  # a row of sacct without its header
        rows = [{"JobID": lone[1] or "ID", "State": "OUT_OF_MEMORY"}]
    if not rows:
        return None
    # rows of jobs, without those of their steps such as 12.batch
    jobs = [row for row in rows if "." not in row["JobID"]] or rows
    job = _job_to_explain(jobs)
    name = job["JobID"].partition(".")[0]
    own = [row for row in rows if row["JobID"].partition(".")[0] == name]
    states = [state_key(row["State"]) for row in own]
    # When a step is killed for its memory, srun lets the job end as FAILED.
    state = "OUT_OF_MEMORY" if "OUT_OF_MEMORY" in states else state_key(job["State"])
    if state == "FAILED" and code_key(job.get("ExitCode", "")):
        meaning = meaning_of(job["ExitCode"], foreign=True)
        return Meaning(
            meaning.cause,
            f"job {name} {meaning.text} (ExitCode {job['ExitCode']})",
            f"ask `python -m ogbnlib diagnose --job {name}`, which reads its log and its run",
            job["ExitCode"],
        )
    if not state:
        return None
    facts = {"job": name} | {key: value.strip("()") for key, value in job.items() if value}
    meaning = meaning_of_state(state, facts)
    text = f"job {name} {meaning.text}".replace("job ID ", "the job ", 1)
    used = max(_size_of(row.get("MaxRSS") or "0") for row in own)
    if not used:
        return meaning._replace(text=text, line=job["State"])
    text += f" (its largest step used {format_bytes(used)})"
    return meaning._replace(text=text, line=job["State"], sizes={"used": used})


def _job_to_explain(jobs: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the last job that ended badly, else the last one that waits or runs, else the last."""
    # `sacct --duplicates` has a row for each requeue of a job: the last one counts.
    latest = [*{job["JobID"]: job for job in jobs}.values()]
    others = [job for job in latest if state_key(job["State"]) != "COMPLETED"]
    ended = [job for job in others if STATES.get(state_key(job["State"])) not in (PENDING, RUNNING)]
    return [*latest, *others, *ended][-1]


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
    inner = _first(_PROGRAM, text) if rank["code"] == "1" else None
    if inner is not None:
        return inner._replace(text=f"rank {rank['rank']}: {inner.text}")
    meaning = meaning_of(rank["code"], foreign=foreign)
    return meaning._replace(text=_about(f"rank {rank['rank']}", meaning), line=_line_of(rank))


def _by_exception(text: str) -> Meaning | None:
    failure = _last_failure(text)
    finding = _first(_PROGRAM, failure)
    is_conclusive = finding is not None and not _CONSEQUENCES.search(finding.line)
    if not is_conclusive and _CONSEQUENCES.search(failure):
        return _first(_PROGRAM, text)
    return finding


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


def _shown_lines(output: str) -> list[str]:
    """The lines of a command's output as a terminal shows them, "" in place of progress bars."""
    # A bar redraws its line after "\r": the last state is what a terminal shows.
    lines = []
    for line in _ESCAPES.sub("", output).replace("\r\n", "\n").split("\n"):
        *before, shown = line.rstrip("\r").split("\r")
        is_bar = bool(_DRAWN.search(shown) or (before and _BAR.search(shown)))
        lines.append("" if is_bar else shown.strip(" \t│"))
    if "\r" in output[output.rfind("\n") + 1 :].rstrip("\r"):
        lines[-1] = ""  # the line is still open: a bar would have drawn it again
    return lines


def last_line(output: str) -> str:
    """The last line of a command's output that has a word and is no progress bar; "" without
    one."""
    return ["", *filter(_WORD.search, _shown_lines(output))][-1]


def last_words(output: str, *, killed: bool = False) -> str:
    """Return the line of a command's output that tells most about its end; "" without one.

    In this order: the command's own "error: ..." line, the evidence of `find`, an exception's line,
    and the last line that is no progress bar. For a `killed` command only the first two count.
    """
    errors = [line for line in _shown_lines(output) if line.startswith("error: ")]
    if errors:
        return errors[-1]
    finding = find(output)
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
