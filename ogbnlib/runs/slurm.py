"""What ended a Slurm job, from everything that is left of it: Slurm's own word, the output file, the run's folder.

`sacct` knows a job for ever where there is accounting (slurmdbd). Where there is none, `scontrol show job` knows it
until a few minutes after its end (MinJobAge). What slurmstepd wrote into the job's output file, and the run's own
folder, stay. What the answer rests on is in `sources`.

Two of Slurm's own traps are seen through: an out-of-memory kill in a step that srun started leaves the job FAILED with
whatever the script made of srun's exit code 1, and sacct of Slurm 22.05 shows exit codes of 128 and above less 128
(141 as `13:0`).
"""

from __future__ import annotations

import contextlib
import pwd
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, format_bytes, parse_bytes
from ..memory.recorder import EVENTS
from .diagnosis import EXIT_CODES, Diagnosis, explain_exit_code, word_of
from .folder import CHECKPOINT, CONFIG, Run

# WorkDir goes last: a folder's name may hold the separator.
FIELDS = (
    *("JobID", "JobIDRaw", "State", "ExitCode", "DerivedExitCode", "ReqMem", "MaxRSS", "Elapsed", "Timelimit"),
    *("NodeList", "Reason", "WorkDir"),
)
WAITING = {
    "Resources": "no node has the resources free that it asked for",
    "Priority": "other jobs come first",
    "Dependency": "a job that it depends on has not ended",
    "DependencyNeverSatisfied": "a job that it depends on ended the wrong way; cancel it",
    "BeginTime": "its begin time lies ahead; a requeued job waits for about two minutes",
    "JobHeldUser": "it is held; scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "a node that it needs is down or reserved",
    "PartitionTimeLimit": "its --time is above what the partition allows",
    "QOSMaxMemoryPerJob": "its --mem is above what its QOS allows",
}
# What scontrol says, under sacct's names.
NAMES = {"JobId": "JobID", "JobState": "State", "RunTime": "Elapsed", "TimeLimit": "Timelimit"}
NAMES["MinMemoryNode"] = "ReqMem"
ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "STOPPED")
# How slurmstepd's own lines in the job's output file name an end; the last one counts.
WORDS_IN_OUTPUT = {
    "oom-kill event": "OUT_OF_MEMORY",
    "oom_kill event": "OUT_OF_MEMORY",  # before Slurm 22
    "DUE TO TIME LIMIT": "TIMEOUT",
    "DUE TO PREEMPTION": "PREEMPTED",
    "DUE TO NODE FAILURE": "NODE_FAIL",
    "DUE TO JOB REQUEUE": "REQUEUED",
    "CANCELLED AT": "CANCELLED",
}


@dataclass(frozen=True)
class JobDiagnosis:
    """`text` is the paragraph for people. `exit_code` is Slurm's EXIT:SIGNAL, `steps` what sacct says of each step."""

    job_id: str
    text: str
    cause: str  # "out of memory", "time limit", "cancelled", "never started", "stopped at a checkpoint", ...
    state: str | None  # Slurm's own word, or None when nothing of Slurm knows the job
    exit_code: str | None
    remedy: str
    sources: list[str] = field(default_factory=list)
    steps: list[dict[str, str]] = field(default_factory=list)
    run_dir: str | None = None
    run: Diagnosis | None = None
    tasks: list[JobDiagnosis] = field(default_factory=list)  # of a job array

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# What is left of a job ------------------------------------------------------------------------------------------------


def parse_sacct(text: str) -> list[dict[str, str]]:
    """Rows of `sacct --parsable2`, jobs and their steps."""
    names, *rows = [line.split("|", len(FIELDS) - 1) for line in text.splitlines()] or [[]]
    return [dict(zip(names, row, strict=False)) for row in rows]


def parse_scontrol(text: str) -> list[dict[str, str]]:
    """Jobs of `scontrol --oneliner show job`, one a line: NAME=VALUE, where a value may hold blanks."""
    pairs = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)")
    return [job for line in text.splitlines() if (job := dict(pairs.findall(line)))]


def _call(*argv: str) -> tuple[str, str]:
    """Standard output, or why there is none."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return "", f"{argv[0]} is not installed here"
    except subprocess.TimeoutExpired:
        return "", f"{argv[0]} did not answer within 60 s"
    if done.returncode != 0:
        return "", (done.stderr.strip().splitlines() or [f"{argv[0]} failed with exit code {done.returncode}"])[-1]
    return done.stdout, ""


def _ask(job_id: str) -> tuple[str, list[dict[str, str]], list[str]]:
    """The tool that knows the job ("" where none does), its rows under sacct's names, and why other tools do not.

    Of a requeued job sacct tells the last attempt.
    """
    text, refusal = _call("sacct", "-j", job_id, "--parsable2", f"--format={','.join(FIELDS)}")
    if rows := parse_sacct(text):
        return "sacct", rows, []
    missing = [f"sacct: {refusal or f'it knows no job {job_id}'}"]
    text, refusal = _call("scontrol", "--oneliner", "show", "job", job_id)
    for shown in parse_scontrol(text):
        row = {NAMES.get(name, name): value for name, value in shown.items()}
        if "ArrayJobId" in row:
            row["JobID"] = f"{row['ArrayJobId']}_{row.get('ArrayTaskId', '')}"
        rows.append(row)
    return ("scontrol" if rows else ""), rows, missing + ([f"scontrol: {refusal}"] if refusal else [])


def _newest(files: Iterable[Path]) -> Path | None:
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def _find_run(job_id: str, work_dir: Path) -> Path | None:
    """The run that a job left in `work_dir`/runs/NAME-JOBID, the last one where a notebook made several."""
    below = [path for deeper in ("", "/*", "/runs/*") for path in work_dir.glob(f"runs/*-{job_id}{deeper}")]
    runs = [path for path in below if (path / CONFIG).is_file() or (path / EVENTS).is_file()]
    newest = _newest(file for run in runs for file in run.iterdir())
    return newest.parent if newest else None


def _read_output(path: Path) -> tuple[str, str]:
    """The state that slurmstepd's lines in a job's output file name, and the last words of what ran."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2**18))
        text = file.read().decode(errors="replace").replace("\r", "\n")
    state = last_line = ""
    for line in text.splitlines():
        if re.match(r"ogbnlib: job \S+, restart \d+", line):  # slurm/common.sh begins every attempt with it
            state = last_line = ""
        elif line.lstrip().startswith(("slurmstepd", "srun", "[")):
            state = next((name for words, name in WORDS_IN_OUTPUT.items() if words in line), state)
        if line.strip() and not line.startswith(("ogbnlib: ", "slurmstepd", "srun: ")):
            last_line = line
    return state, last_line


class _Job:
    """All that is left of one job, or of one task of an array.

    Attributes:
        source: "sacct", "scontrol", or "" where Slurm knows nothing of it.
        words: What that says, under sacct's names; `steps` of each step.
        state: Slurm's own word, else that of the output file's lines.
    """

    def __init__(self, job_id: str, source: str, words: dict[str, str], rows: list[dict[str, str]]):
        self.job_id, self.source, self.words = job_id, source, words
        self.steps = [row for row in rows if row["JobID"].startswith(f"{job_id}.")]
        self.work_dir = Path(words.get("WorkDir") or ".")
        found = _find_run(job_id, self.work_dir)
        self.run = Run.open(found) if found else None
        # The output file that the job scripts ask for, slurm-NAME-JOBID.out, or sbatch's default.
        beside = (path for name in ("*-", "") for path in self.work_dir.glob(f"slurm-{name}{job_id}.out"))
        self.output = Path(words["StdOut"]) if words.get("StdOut") else _newest(beside)
        self.output_state = self.last_line = ""
        if self.output and self.output.is_file():
            self.output_state, self.last_line = _read_output(self.output)
        self.state = words.get("State") or self.output_state

    def time(self, before: str, name: str) -> str:
        time = self.words.get(name, "")  # or a word such as Partition_Limit
        return f" {before} {time}" if re.fullmatch(r"(\d+-)?\d+(:\d+)+(\.\d+)?", time) else ""

    @property
    def after(self) -> str:
        return self.time("after", "Elapsed")

    @property
    def resume(self) -> str:
        if self.run is None:
            return "submit it again"
        if (self.run.run_dir / CHECKPOINT).is_file():
            return f"go on from its checkpoint with python -m ogbnlib train --run-dir {self.run.run_dir} --resume"
        return "submit it again; no checkpoint was written"

    @property
    def out_of_memory(self) -> Diagnosis | None:
        """The run's own diagnosis, where it is that."""
        return self.run.diagnosis if self.run and self.run.diagnosis.cause == "out of memory" else None

    def exit_code(self) -> int | str | None:
        """One exit code of Slurm's EXIT:SIGNAL: the pair where it is a word of its own, else 128 + SIGNAL or EXIT."""
        words, own = self.words.get("ExitCode", ""), self.run.exit_code if self.run else None
        if not words or words in EXIT_CODES:
            return words or own
        code, _, number = words.partition(":")
        if number != "0":
            return 128 + int(number)
        cut = str(128 + int(code))
        if own and str(own) in (code, cut):
            return own
        return cut if self.source == "sacct" and int(code) > 2 and cut in EXIT_CODES else code


# What it says ---------------------------------------------------------------------------------------------------------

Answer = tuple[str, str, str]  # (cause, sentence, remedy)


def _explain(job: _Job) -> Answer:
    word, _, who = job.state.partition(" by ")
    if word in ACTIVE:
        return _explain_active(job, word)
    killed_step = next((step["JobID"] for step in job.steps if step.get("State") == "OUT_OF_MEMORY"), None)
    if word == "OUT_OF_MEMORY" or killed_step or (job.output_state == "OUT_OF_MEMORY" and word == "FAILED"):
        return _explain_out_of_memory(job, killed_step if word == "FAILED" else None)
    if who.isdigit():
        with contextlib.suppress(KeyError):
            who = f"user {pwd.getpwuid(int(who)).pw_name} (uid {who})"
    cancelled = f"was cancelled{f' by {who}' if who else ''}{job.after} (scancel)"
    again = f"{job.resume}; with --requeue Slurm restarts it itself"
    lost = f"lost its node {job.words.get('NodeList', '')}{job.after}"
    late = f"reached its time limit{job.time('of', 'Timelimit')}"
    endings = {
        "TIMEOUT": ("time limit", late, f"{job.resume}, or ask for more --time"),
        "PREEMPTED": ("preempted", f"was preempted by another job{job.after}", again),
        "CANCELLED": ("cancelled", cancelled, job.resume),
        "NODE_FAIL": ("node failure", lost, f"{job.resume}; --exclude keeps off that node"),
    }
    endings |= {"DEADLINE": endings["TIMEOUT"], "BOOT_FAIL": endings["NODE_FAIL"]}
    return endings.get(word) or _explain_exit(job)


def _explain_active(job: _Job, word: str) -> Answer:
    if word not in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return "running", f"is {word}{job.after}{job.time('of', 'Timelimit')}", f"watch it with squeue -j {job.job_id}"
    reason, restarts = job.words.get("Reason", ""), job.words.get("Restarts", "0")
    again = f", after {restarts} restarts" if restarts != "0" else ""
    why = WAITING.get(reason.split(",")[0], "squeue --start says when Slurm expects it to begin")
    return "pending", f"is {word}{again}: {reason or 'no reason given'}", why


def _explain_out_of_memory(job: _Job, step: str | None) -> Answer:
    memory = job.words.get("ReqMem", "")
    # Slurm writes `816K`, and nothing or 0 where it has not looked.
    sizes = [parse_bytes(size) for row in job.steps if (size := row.get("MaxRSS", "")).endswith(("K", "M", "G", "T"))]
    where = f" in step {step}, whose exit code srun gives as 1" if step else ""
    seen = f" The largest MaxRSS that Slurm sampled is {format_bytes(max(sizes))}." if sizes else ""
    sentence = f"was killed for passing its --mem{f' of {memory}' if memory else ''}{job.after}{where}.{seen}"
    remedy = explain_exit_code("0:125")[1]
    if job.out_of_memory:
        remedy = f"ask for more with --mem, or: {job.out_of_memory.remedy}"
    return "out of memory", sentence, remedy


def _explain_exit(job: _Job) -> Answer:
    code = job.exit_code()
    if code is None:
        return "unknown", "left nothing that says how it ended", "ask sacct on the cluster's login node"
    (meaning, remedy), cause = explain_exit_code(code), word_of(code)
    if cause == "never started":
        return cause, meaning, remedy
    if cause == "stopped at a checkpoint":
        text = f"stopped at a checkpoint (exit code {code}) and was not put back into the queue"
        return cause, text, f"{job.resume}; OGBNLIB_MAX_RESTARTS bounds how often a job requeues itself"
    if cause == "finished":
        return cause, f"finished without an error{job.after}", ""
    if job.run and job.out_of_memory:
        limit = job.run.result.get("memory_limit_bytes")
        held = f"the run's own limit of {format_bytes(limit)}" if limit else "the memory there was"
        text = f"ended with exit code {code}{job.after}: its run passed {held}"
        return "out of memory", text, job.out_of_memory.remedy
    plain, _, number = job.words.get("ExitCode", "").partition(":")
    inferred = number == "0" and plain != str(code)
    note = f", which sacct shows as {plain}:0; a plain {plain} would look the same" if inferred else ""
    return cause, f"{meaning}{job.after} (exit code {code}{note})", remedy


def _diagnose(job: _Job, missing: list[str]) -> JobDiagnosis:
    if not job.state and job.run is None and not job.last_line:
        raise InputError(
            f"--job: nothing is left of job {job.job_id}: {'; '.join(missing)}; and {job.work_dir.resolve()} has no "
            f"runs/*-{job.job_id} and no slurm-*-{job.job_id}.out; start this in the folder that you submitted from"
        )
    cause, sentence, remedy = _explain(job)
    text = f"Job {job.job_id} {sentence.rstrip('.')}."
    run = job.run.diagnosis if job.run else None
    path = str(job.run.run_dir) if job.run else None
    if run:
        text += f" Its run {path}: {run.text.removesuffix(f' Next: {run.remedy}.')}"
    elif job.last_line and cause not in ("pending", "finished"):
        text += f" The last words in {job.output}: {job.last_line}"
    if remedy:
        text += f" Next: {remedy}."
    known = job.words.get("State")
    if not known:
        text += f" This is from files alone: {'; '.join(missing)}."
    told = {job.source: known, str(job.output): job.last_line, str(path): run}
    exit_code = job.words.get("ExitCode") or (str(run.exit_code) if run and run.exit_code is not None else None)
    sources = [name for name, there in told.items() if there]
    return JobDiagnosis(job.job_id, text, cause, known, exit_code, remedy, sources, job.steps, path, run)


def diagnose_job(job_id: str | int) -> JobDiagnosis:
    """Say how a Slurm job ended, or what it waits for, and what to do next.

    Its run is looked for at runs/NAME-JOBID in the job's working directory; without Slurm's answer, in the present one.

    Args:
        job_id: As sbatch and squeue print it: 123, or 123_4 for the task of an array; 123 means all tasks of an array.

    Raises:
        InputError: for anything that is no job id, or a job of which nothing is left.
    """
    name = str(job_id).strip()
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise InputError(f"--job: expected a Slurm job id such as 123 or 123_4, got {job_id!r}")
    source, rows, missing = _ask(name)
    jobs = {row["JobID"]: row for row in rows if "." not in row["JobID"]}
    if not jobs and "_" not in name and _find_run(name, Path()) is None:
        jobs = {name + folder.name.rpartition(name)[2]: {} for folder in sorted(Path().glob(f"runs/*-{name}_*"))}
    jobs = jobs or {name: {}}
    found = [_diagnose(_Job(job, source, words, rows), missing) for job, words in jobs.items()]
    if len(found) == 1:
        return found[0]
    causes = [task.cause for task in found]
    counts = ", ".join(f"{causes.count(cause)} {cause}" for cause in dict.fromkeys(causes))
    text = "\n".join([f"Job {name} is an array; of {len(found)} tasks: {counts}.", *(task.text for task in found)])
    return JobDiagnosis(name, text, counts, None, None, "", sorted({s for t in found for s in t.sources}), tasks=found)
