"""What ended a Slurm job, or what it waits for: by scontrol, else sacct, by the job's log, and by its run's folder.

`scontrol` is exact and up to date, but forgets a job minutes after its end (MinJobAge). `sacct` remembers every job
where there is accounting (slurmdbd). The log stays: slurmstepd's and torchrun's lines in it name a process that was
killed, where srun makes exit code 1 of that.
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

from ..errors import InputError
from ..memory.recorder import EVENTS
from .diagnosis import EXIT_CODES, Diagnosis, meaning_of, sbatch_resumption
from .folder import CONFIG, OUTPUT, Run

FIELDS = ["JobID", "State", "ExitCode", "ReqMem", "NNodes", "Elapsed", "Timelimit", "NodeList", "Reason", "WorkDir"]
# scontrol's names -> sacct's
NAMES = {"JobId": "JobID", "JobState": "State", "RunTime": "Elapsed", "TimeLimit": "Timelimit", "NumNodes": "NNodes"}
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
# State -> (cause, sentence, remedy). Any other state is explained by the exit code.
PENDING = ("pending", "is {state}{restarts}: {reason}", "{waiting}; it starts by itself: submit no second one")
RUNNING = ("running", "is {state}{after}{limit}", "watch it with squeue -j {job}")
STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "STAGE_OUT"), RUNNING),
    "OUT_OF_MEMORY": ("out of memory", "had a process killed for passing its {memory}{after}", "{more}"),
    "TIMEOUT": ("time limit", "reached its time limit{limit}", "{resume}, or ask for more --time"),
    "DEADLINE": ("time limit", "reached its --deadline{after}", "{resume}"),
    "PREEMPTED": ("preempted", "was preempted by another job{after}", "{resume}; with --requeue Slurm restarts it"),
    "CANCELLED": ("cancelled", "was cancelled{by}{after} (scancel)", "{resume}"),
    "NODE_FAIL": ("node failure", "lost its node {nodes}{after}", "{resume}; --exclude={nodes} avoids that node"),
    "BOOT_FAIL": ("node failure", "got a node that did not boot, {nodes}", "{resume}"),
}
# Line of the log -> state. "hit memory limit at least once" proves nothing: the page cache does so without a kill.
LOG_LINES = {
    r"error: .*oom[-_]kill event|^srun: error: .*: Out Of Memory": "OUT_OF_MEMORY",
    r"error: \*\*\* .*DUE TO TIME LIMIT": "TIMEOUT",
    r"error: \*\*\* .*DUE TO PREEMPTION": "PREEMPTED",
    r"error: \*\*\* .*DUE TO NODE FAILURE": "NODE_FAIL",
    r"error: \*\*\* .*DUE TO JOB REQUEUE|^ogbnlib: .*; back in the queue": "REQUEUED",
    r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*": "CANCELLED",  # srun cancels steps, which proves nothing
}
FIRST_LINE = r"ogbnlib: job \S+, restart \d+"  # slurm/common.sh starts every attempt with it
RUN_LINE = r"^(?:ogbnlib: the run is in|Everything about it is in) (.+)$"
FAILED_RANK = r"rank\s+: (\d+) \(local_rank: \d+\)\n\s+exitcode\s+: (-?\d+)"  # in torchrun's report


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


def parse_sacct(text: str) -> list[dict[str, str]]:
    """Rows of `sacct --parsable2`, jobs and their steps. The last field may contain the separator."""
    names, *rows = [line.split("|") for line in text.splitlines()] or [[]]
    return [dict(zip(names, [*row[: len(names) - 1], "|".join(row[len(names) - 1 :])], strict=True)) for row in rows]


def parse_scontrol(text: str) -> list[dict[str, str]]:
    """Jobs of `scontrol --oneliner show job` under sacct's names; a value may contain blanks."""
    pairs = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)")
    jobs = [{NAMES.get(name, name): value for name, value in pairs.findall(line)} for line in text.splitlines()]
    for job in jobs:
        if "ArrayJobId" in job:
            job["JobID"] = f"{job['ArrayJobId']}_{job.get('ArrayTaskId', '')}"
    return [job for job in jobs if job]


def _call(*argv: str) -> tuple[str, str]:
    """Standard output, or why there is none."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return "", f"{argv[0]} {'is not installed here' if isinstance(error, OSError) else 'did not answer in 60 s'}"
    lines = done.stderr.strip().splitlines() or [f"{argv[0]} failed with exit code {done.returncode}"]
    return (done.stdout, "") if done.returncode == 0 else ("", lines[-1])


def _ask(job_id: str) -> tuple[list[dict[str, str]], list[str], list[str]]:
    """Rows of jobs and steps, the tools that know the job, and why another one does not."""
    text, refusal = _call("scontrol", "--oneliner", "show", "job", job_id)
    jobs, missing = parse_scontrol(text), [f"scontrol: {refusal}"]
    if jobs and all(STATES.get(job["State"]) in (PENDING, RUNNING) for job in jobs):
        return jobs, ["scontrol"], []  # sacct's state and reason may be minutes old
    text, refusal = _call("sacct", "-j", job_id, "--parsable2", f"--format={','.join(FIELDS)}")
    rows, current = parse_sacct(text), {job["JobID"] for job in jobs}
    tools = [name for name, known in (("scontrol", jobs), ("sacct", rows)) if known]
    missing.append(f"sacct: {refusal or f'it knows no job {job_id}'}")
    return jobs + [row for row in rows if row["JobID"] not in current], tools, missing


def _newest(files: Iterable[Path]) -> Path | None:
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def _find_run(job_id: str, work_dir: Path, log: str = "") -> Run | None:
    """The run that the log names, else `work_dir`/runs/NAME-JOBID, else the last run of a notebook in there."""
    named = [work_dir / name for name in re.findall(RUN_LINE, log, re.MULTILINE)[-1:]]
    below = [path for deeper in ("", "/*", "/runs/*") for path in work_dir.glob(f"runs/*-{job_id}{deeper}")]
    for folders in (named, below):
        runs = [path for path in folders if (path / CONFIG).is_file() or (path / EVENTS).is_file()]
        if newest := _newest(file for run in runs for file in run.iterdir()):
            return Run(newest.parent)
    return None


class _Job:
    """The facts about one job, or one task of an array: Slurm's `words`, the `log` of its last attempt, its `run`."""

    def __init__(self, job_id: str, words: dict[str, str], rows: list[dict[str, str]]):
        self.job_id, self.words, self.log = job_id, words, ""
        self.steps = [row for row in rows if row["JobID"].startswith(f"{job_id}.")]
        self.work_dir = Path(words.get("WorkDir") or ".")
        # The job scripts write slurm-NAME-JOBID.out, sbatch by itself slurm-JOBID.out.
        beside = (path for name in ("*-", "") for path in self.work_dir.glob(f"slurm-{name}{job_id}.out"))
        self.log_path = Path(words["StdOut"]) if words.get("StdOut") else _newest(beside)
        if self.log_path and self.log_path.is_file():
            with open(self.log_path, "rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 2**18))
                text = file.read().decode(errors="replace").replace("\r", "\n")
            self.log = text[max((found.start() for found in re.finditer(FIRST_LINE, text)), default=0) :]
        self.run, proven, self.last_line = _find_run(job_id, self.work_dir, self.log), "", ""
        for line in self.log.splitlines():
            state = next((state for pattern, state in LOG_LINES.items() if re.search(pattern, line)), "")
            if state and (proven != "OUT_OF_MEMORY" or state == "REQUEUED"):
                proven = state  # a kill for memory explains what follows it in the same attempt
            if line.strip() and not line.startswith(("ogbnlib: ", "slurmstepd", "srun: ")):
                self.last_line = line
        ranks = [(rank, int(code)) for rank, code in re.findall(FAILED_RANK, self.log)]
        codes = [(rank, str(code if code >= 0 else 128 - code)) for rank, code in ranks if code not in (-15, 143)]
        self.failed_rank = codes[0] if codes else None  # torchrun ends the other ranks by SIGTERM
        self.state, _, self.user = (words.get("State") or proven).partition(" by ")
        self.ending = STATES.get(self.state)
        evidence = {self.state, proven, *(step.get("State") for step in self.steps)}
        if "OUT_OF_MEMORY" in evidence and self.ending not in (PENDING, RUNNING):
            self.ending = STATES["OUT_OF_MEMORY"]

    def exit_code(self) -> str:
        """One code of Slurm's EXIT:SIGNAL: the pair where it has a meaning of its own, else 128 + SIGNAL or EXIT."""
        pair = self.words.get("ExitCode", "")
        if not pair and self.run and self.run.exit_code is not None:
            return str(self.run.exit_code)
        if not pair or pair in EXIT_CODES:
            return pair
        code, _, number = pair.partition(":")
        whole = str(128 + int(code if number == "0" else number))
        # sacct of Slurm 22.05 shows 141 as 13:0; scontrol, which alone counts restarts, does not.
        is_cut = "Restarts" not in self.words and int(code) > 2 and whole in EXIT_CODES
        return whole if number != "0" or is_cut else code

    def facts(self) -> dict[str, str]:
        """What the sentences of `STATES` name."""

        def time(before: str, name: str) -> str:
            found = re.fullmatch(r"(\d+-)?\d+(:\d+)+(\.\d+)?", words.get(name, ""))  # or a word: Partition_Limit
            return f" {before} {found[0]}" if found else ""

        words, user, run, resume = self.words, self.user, self.run, "submit it again"
        with contextlib.suppress(KeyError, ValueError):
            user = f"user {pwd.getpwuid(int(user)).pw_name} (uid {user})"
        option, nodes = "--mem-per-cpu" if "MinMemoryCPU" in words else "--mem", words.get("NNodes", "1")
        size = words.get("MinMemoryNode") or words.get("MinMemoryCPU") or words.get("ReqMem") or "0"
        if "ReqMem" in words and nodes != "1":
            option, size = "memory", f"{size} on {nodes} nodes"  # a sum
        if run and (run.run_dir / CONFIG).is_file():
            resume = f"go on with `{sbatch_resumption(run.run_dir)}` and the same options of sbatch"
        less = (
            run.diagnosis.remedy if run and run.diagnosis.cause == "out of memory" else "see what takes less by `plan`"
        )
        reason, restarts = words.get("Reason", ""), words.get("Restarts", "0")
        return {
            **{"job": self.job_id, "state": self.state, "nodes": words.get("NodeList", ""), "resume": resume},
            **{"after": time("after", "Elapsed"), "limit": time("of", "Timelimit"), "by": user and f" by {user}"},
            "memory": option if size == "0" else f"{option} of {size}",
            "more": f"ask for more with --mem, or: {less}; then {resume}",
            "restarts": f", after {restarts} restarts" if restarts != "0" else "",
            "reason": reason if reason not in ("", "None") else "no reason given",
            "waiting": WAITING.get(reason.split(",")[0], "squeue --start says when Slurm expects it to begin"),
        }

    def answer(self) -> tuple[str, str, str]:
        """Cause, sentence without the job's name, remedy."""
        facts, code, run = self.facts(), self.exit_code(), self.run
        if self.ending is not None:
            cause, sentence, remedy = (text.format(**facts) for text in self.ending)
            return cause, sentence, remedy
        if not code:
            return "unknown", "left nothing that says how it ended", "ask sacct on the cluster's login node"
        # A notebook may have its runs killed on purpose.
        is_own = run is not None and not any(each.name.endswith(f"-{self.job_id}") for each in run.run_dir.parents)
        # A script of the user's own, whose codes mean something else, has none of our lines in its log.
        is_ours = run is not None or not self.log or re.search("^(ogbnlib|error): ", self.log, re.MULTILINE)
        cause, meaning, remedy = meaning_of(code, foreign=not is_ours)
        shown = self.words.get("ExitCode", "").removesuffix(":0")
        note = f", which sacct shows as {shown}:0" if shown.isdigit() and shown != code else ""
        sentence = meaning if ":" in code else f"{meaning}{facts['after']} (exit code {code}{note})"
        if cause == "stopped at a checkpoint":
            why = "".join(re.findall(r"^ogbnlib: .*?(not requeued.*)$", self.log, re.MULTILINE)[-1:])
            sentence = f"stopped at a checkpoint (exit code {code}) and was not put back into the queue"
            sentence += f": {why}" if why else ""
            remedy = f"{facts['resume']}; OGBNLIB_MAX_RESTARTS bounds how often a job requeues itself"
        elif self.failed_rank and code != "0":
            rank, code = self.failed_rank
            cause, meaning, remedy = meaning_of(code)
            sentence = f"failed{facts['after']} because of its rank {rank}: {meaning} (exit code {code})"
        elif run and run.exit_code and (is_own if code == "0" else code != "2" or run.exit_code == 2):
            cause, remedy = run.diagnosis.cause, run.diagnosis.remedy
            sentence = f"ended{facts['after']} as its run did (exit code {run.exit_code})"
            sentence = "ended with exit code 0, but its run did not finish" if code == "0" else sentence
        elif code == "0":
            remedy = ""
        if "resume" in remedy and "sbatch" not in remedy:
            remedy = facts["resume"] + (", with a smaller lr=..." if cause == "diverged" else "")
        if self.log_path and not (run and (run.run_dir / OUTPUT).is_file()):  # torchrun leaves none
            remedy = remedy.replace("output.log", str(self.log_path))
        return cause, sentence, remedy

    def diagnose(self, tools: list[str], missing: list[str]) -> JobDiagnosis:
        """The answer, with the run's own diagnosis or the log's last line; `InputError` where nothing knows the job."""
        run = self.run.diagnosis if self.run else None
        path = str(self.run.run_dir) if self.run else None
        if not self.state and run is None and not self.last_line:
            raise InputError(
                f"--job: nothing is left of job {self.job_id}: {'; '.join(missing)}; and {self.work_dir.resolve()} has "
                f"no runs/*-{self.job_id} and no slurm-*-{self.job_id}.out; start this in the folder that you "
                "submitted from"
            )
        cause, sentence, remedy = self.answer()
        text = f"Job {self.job_id} {sentence.rstrip('.')}."
        if run and self.failed_rank:  # the end of rank 0, which has the run's result, is a consequence
            text += f" Its run {path} was in phase '{run.phase}'."
        elif run:
            text += f" Its run {path}: {run.text.removesuffix(f' Next: {run.remedy}.')}"
        elif self.last_line and cause not in ("pending", "finished"):
            text += f" The last words in {self.log_path}: {self.last_line.rstrip('.')}."
        text += f" Next: {remedy}." if remedy else ""
        text += f" This is from files alone: {'; '.join(missing)}." if not tools else ""
        files = {str(self.log_path): self.last_line, str(path): run}
        sources = [*tools, *(name for name, known in files.items() if known)]
        state, code = self.words.get("State"), self.words.get("ExitCode") or self.exit_code() or None
        return JobDiagnosis(self.job_id, text, cause, state, code, remedy, sources, self.steps, path, run)


def diagnose_job(job_id: str | int) -> JobDiagnosis:
    """Say how a Slurm job ended, or what it waits for, and what to do next.

    Its run is the one that its log names, or runs/NAME-JOBID in the job's working directory; where Slurm does not know
    the job, in the present one.

    Args:
        job_id: As sbatch and squeue print it: 123, or 123_4 for the task of an array; 123 means all tasks of an array.

    Raises:
        InputError: for anything that is no job id, or a job of which nothing is left.
    """
    name = str(job_id).strip()
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise InputError(f"--job: expected a Slurm job id such as 123 or 123_4, got {job_id!r}")
    rows, tools, missing = _ask(name)
    jobs = {row["JobID"]: row for row in rows if "." not in row["JobID"]}
    if not jobs and "_" not in name and _find_run(name, Path()) is None:
        jobs = {name + folder.name.rpartition(name)[2]: {} for folder in sorted(Path().glob(f"runs/*-{name}_*"))}
    found = [_Job(job, words, rows).diagnose(tools, missing) for job, words in (jobs or {name: {}}).items()]
    if len(found) == 1:
        return found[0]
    causes = [task.cause for task in found]
    counts = ", ".join(f"{causes.count(cause)} {cause}" for cause in dict.fromkeys(causes))
    text = "\n".join([f"Job {name} is an array; of {len(found)} tasks: {counts}.", *(task.text for task in found)])
    return JobDiagnosis(name, text, counts, None, None, "", sorted({s for t in found for s in t.sources}), tasks=found)
