"""The cause of a Slurm job's end, or the reason why it waits: from sacct, else scontrol, else its log, and its run.

Lines of slurmstepd and torchrun in the log name a killed process, where srun turns the kill into exit code 1.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..memory.record import RunPaths
from .diagnosis import Diagnosis
from .exit_codes import EXIT_CODES, meaning_of, sbatch_resumption
from .folder import Run

FIELDS = ["JobID", "State", "ExitCode", "ReqMem", "NNodes", "Elapsed", "Timelimit", "NodeList", "Reason", "WorkDir"]
# scontrol's names -> sacct's
NAMES = {"JobId": "JobID", "JobState": "State", "RunTime": "Elapsed", "TimeLimit": "Timelimit", "NumNodes": "NNodes"}
NAMES |= {"MinMemoryNode": "ReqMem", "MinMemoryCPU": "ReqMem"}
# State -> (cause, sentence, remedy). The exit code explains any other state.
PENDING = ("pending", "is {state}: {reason}", "it starts by itself: submit no second one; squeue --start says when")
RUNNING = ("running", "is {state}{elapsed}{limit}", "watch it with squeue -j {job}")
STATES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"), PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "STAGE_OUT"), RUNNING),
    "OUT_OF_MEMORY": ("out of memory", "had a process killed for passing its memory{memory}", "{more}"),
    "TIMEOUT": ("time limit", "reached its time limit{limit}", "{resume}, or ask for more --time"),
    "DEADLINE": ("time limit", "reached its --deadline{elapsed}", "{resume}"),
    "PREEMPTED": ("preempted", "was preempted by another job", "{resume}; with --requeue Slurm restarts it"),
    "CANCELLED": ("cancelled", "was cancelled{elapsed} (scancel)", "{resume}"),
    "NODE_FAIL": ("node failure", "lost its node {nodes}", "{resume}; --exclude={nodes} avoids that node"),
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
FIRST_LINE = r"ogbnlib: job \S+, restart \d+"  # of each attempt, by slurm/common.sh
RUN_LINE = r"^(?:ogbnlib: the run is in|Everything about it is in) (.+)$"
FAILED_RANK = r"rank\s+: (\d+) \(local_rank: \d+\)\n\s+exitcode\s+: (-?\d+)"  # in torchrun's report


@dataclass(frozen=True)
class JobDiagnosis:
    """`text` is the paragraph for people. `exit_code` is Slurm's EXIT:SIGNAL."""

    job_id: str
    text: str
    cause: str  # "out of memory", "time limit", "cancelled", "never started", "stopped at a checkpoint", ...
    state: str | None  # Slurm's own word; None when Slurm does not know the job
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


def _parse_sacct(text: str) -> list[dict[str, str]]:
    """Rows of `sacct --parsable2`, jobs and their steps."""
    header, *rows = text.splitlines() or [""]
    names = header.split("|")  # the last value may contain the separator
    return [dict(zip(names, row.split("|", len(names) - 1), strict=True)) for row in rows]


def _parse_scontrol(text: str) -> list[dict[str, str]]:
    """Jobs of `scontrol --oneliner show job` under sacct's names; a value may contain blanks."""
    pairs = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)")
    jobs = [{NAMES.get(name, name): value for name, value in pairs.findall(line)} for line in text.splitlines()]
    for job in jobs:
        if "ArrayJobId" in job:
            job["JobID"] = f"{job['ArrayJobId']}_{job.get('ArrayTaskId', '')}"
    return [job for job in jobs if job]


def _ask(job_id: str) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of jobs and steps, by sacct, else by scontrol, and why a tool knows nothing."""
    sacct = ["sacct", "-j", job_id, "--parsable2", f"--format={','.join(FIELDS)}"]
    refusals = []
    for argv, parse in ((sacct, _parse_sacct), (["scontrol", "--oneliner", "show", "job", job_id], _parse_scontrol)):
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
            if rows := parse(done.stdout) if done.returncode == 0 else []:
                return rows, [argv[0]]
            refusals.append(f"{argv[0]}: {done.stderr.strip() or f'it knows no job {job_id}'}")
        except FileNotFoundError:
            refusals.append(f"{argv[0]} is not installed here")
        except subprocess.TimeoutExpired:
            refusals.append(f"{argv[0]} did not answer in 60 s")
    return [], refusals


def _find_run(job_id: str, work_dir: Path, log: str = "") -> Run | None:
    """The run that the log names, else `work_dir`/runs/NAME-JOBID, else the last run of a notebook in that folder."""
    named = [work_dir / name for name in re.findall(RUN_LINE, log, re.MULTILINE)[-1:]]
    below = [path for deeper in ("", "/*", "/runs/*") for path in work_dir.glob(f"runs/*-{job_id}{deeper}")]
    for folders in (named, below):
        runs = [path for path in folders if RunPaths(path).config.is_file() or RunPaths(path).events.is_file()]
        if files := [file for run in runs for file in run.iterdir()]:
            return Run(max(files, key=lambda path: path.stat().st_mtime).parent)
    return None


def _read_log(job: dict[str, str], job_id: str, work_dir: Path) -> tuple[Path | None, str]:
    """Path and last attempt of the job's log."""
    # The job scripts write slurm-NAME-JOBID.out, sbatch by itself slurm-JOBID.out.
    found = [path for name in ("*-", "") for path in work_dir.glob(f"slurm-{name}{job_id}.out")]
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    path = Path(job["StdOut"]) if job.get("StdOut") else newest
    if path is None or not path.is_file():
        return path, ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2**18))
        text = file.read().decode(errors="replace").replace("\r", "\n")
    return path, text[max((match.start() for match in re.finditer(FIRST_LINE, text)), default=0) :]


def _diagnose(job_id: str, job: dict[str, str], rows: list[dict[str, str]], asked: list[str]) -> JobDiagnosis:
    """Diagnose one job, or one task of an array, from its row, its log and its run."""
    work_dir = Path(job.get("WorkDir") or ".")
    log_path, log = _read_log(job, job_id, work_dir)
    lines = [line for line in log.splitlines() if line.strip()]
    words = [line for line in lines if not line.startswith(("ogbnlib: ", "slurmstepd", "srun: "))]
    run, steps = _find_run(job_id, work_dir, log), [row for row in rows if row["JobID"].startswith(f"{job_id}.")]
    proven = ""  # the state that the log proves
    for line in log.splitlines():
        found = next((state for pattern, state in LOG_LINES.items() if re.search(pattern, line)), "")
        if found and (proven != "OUT_OF_MEMORY" or found == "REQUEUED"):  # a kill explains all else that follows it
            proven = found
    if not (job or run or words or proven):
        raise InputError(
            f"--job: nothing is left of job {job_id}: {'; '.join(asked)}; and {work_dir.resolve()} has no "
            f"runs/*-{job_id} and no slurm-*-{job_id}.out. Start this in the folder that you submitted from."
        )
    state = (job.get("State") or proven).partition(" by ")[0]
    ending = STATES.get(state)
    if ending not in (PENDING, RUNNING) and "OUT_OF_MEMORY" in {proven, *(step.get("State") for step in steps)}:
        ending = STATES["OUT_OF_MEMORY"]
    resume = "submit it again"
    if run and run.paths.config.is_file():
        resume = f"go on with `{sbatch_resumption(run.run_dir)}` and the same options of sbatch"
    diagnosis = run.diagnosis if run else None
    ranks = [(rank, int(code)) for rank, code in re.findall(FAILED_RANK, log)]
    # The first that failed by itself: torchrun ends the others by SIGTERM.
    failed = ((rank, str(code if code >= 0 else 128 - code)) for rank, code in ranks if code not in (-15, 143))
    rank, pair = next(failed, None), job.get("ExitCode", "")
    code = str(run.exit_code) if run and run.exit_code is not None else ""
    if pair:  # EXIT:SIGNAL has a meaning of its own, or is 128 + SIGNAL, or EXIT
        exit_, _, number = pair.partition(":")
        code = pair if pair in EXIT_CODES else exit_ if number in ("", "0") else str(128 + int(number))
        if number == "0" and int(exit_) > 2 and str(128 + int(exit_)) in EXIT_CODES:
            code = str(128 + int(exit_))  # sacct of Slurm 22.05 shows 141 as 13:0
    if ending:
        less = diagnosis.remedy if diagnosis and diagnosis.cause == "out of memory" else "see `plan`"
        facts = {"job": job_id, "state": state, "nodes": job.get("NodeList", ""), "resume": resume}
        words_of = {"elapsed": ("after", "Elapsed"), "limit": ("of", "Timelimit"), "memory": ("of", "ReqMem")}
        for name, (before, key) in words_of.items():  # not a word such as Partition_Limit
            facts[name] = f" {before} {job[key]}" if job.get(key, "")[:1].isdigit() else ""
        facts |= {"reason": job.get("Reason") or "no reason in its log"}
        facts["more"] = f"ask for more --mem, or: {less}; then {resume}"
        cause, sentence, remedy = (text.format(**facts) for text in ending)
    elif not code:
        cause, sentence, remedy = "unknown", "left no sign of its end", "ask sacct on the cluster's login node"
    else:
        cause, sentence, remedy = _by_code(job_id, code, rank, run, log, resume)
        if log_path and not (run and run.paths.output.is_file()):  # torchrun leaves none
            remedy = remedy.replace("output.log", str(log_path))
    text = f"Job {job_id} {sentence.rstrip('.')}."
    if run and diagnosis and rank:  # the end of rank 0, which writes the run's result, is a consequence
        text += f" Its run {run.run_dir} was in phase '{diagnosis.phase}'."
    elif run and diagnosis:
        text += f" Its run {run.run_dir}: {diagnosis.text.removesuffix(f' Next: {diagnosis.remedy}.')}"
    elif words and cause not in ("pending", "finished"):
        text += f" The last words in {log_path}: {words[-1].rstrip('.')}."
    text += f" Next: {remedy}." if remedy else ""
    text += "" if job else f" This is from files alone: {'; '.join(asked)}."
    sources = [*(asked if job else []), *([str(log_path)] if words else []), *([str(run.run_dir)] if run else [])]
    path = str(run.run_dir) if run else None
    return JobDiagnosis(
        job_id, text, cause, job.get("State"), pair or code or None, remedy, sources, steps, path, diagnosis
    )


def _by_code(
    job_id: str, code: str, rank: tuple[str, str] | None, run: Run | None, log: str, resume: str
) -> tuple[str, str, str]:
    """(cause, sentence, remedy) of a job that its state does not explain."""
    # A user's own script, whose codes have other meanings, leaves no line of ours in its log.
    is_ours = run is not None or not log or re.search("^(ogbnlib|error): ", log, re.MULTILINE)
    # A notebook may let its runs be killed on purpose.
    is_own = run is not None and not any(folder.name.endswith(f"-{job_id}") for folder in run.run_dir.parents)
    cause, meaning, remedy = meaning_of(code, foreign=not is_ours)
    sentence = meaning if ":" in code else f"{meaning} (exit code {code})"
    if cause == "stopped at a checkpoint":
        why = "".join(re.findall(r"^ogbnlib: .*?(not requeued.*)$", log, re.MULTILINE)[-1:])
        sentence = f"stopped at a checkpoint (exit code {code}) and was not put back into the queue"
        sentence += f": {why}" if why else ""
        remedy = f"{resume}; OGBNLIB_MAX_RESTARTS bounds how often a job requeues itself"
    elif rank and code != "0":
        cause, meaning, remedy = meaning_of(rank[1])
        sentence = f"failed because of its rank {rank[0]}: {meaning} (exit code {rank[1]})"
    elif run and run.exit_code and (is_own if code == "0" else code != "2" or run.exit_code == 2):
        cause, remedy = run.diagnosis.cause, run.diagnosis.remedy
        sentence = f"ended as its run did (exit code {run.exit_code})"
        sentence = "ended with exit code 0, but its run did not finish" if code == "0" else sentence
    elif code == "0":
        remedy = ""
    if "resume" in remedy and "sbatch" not in remedy:
        remedy = resume + (", with a smaller lr=..." if cause == "diverged" else "")
    return cause, sentence, remedy


def diagnose_job(job_id: str | int) -> JobDiagnosis:
    """Diagnose a Slurm job: the cause of its end, or what it waits for, and the next step.

    Args:
        job_id: As sbatch and squeue print it: 123, or 123_4 for the task of an array; 123 means all tasks of an array.
    """
    name = str(job_id).strip()
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise InputError(f"--job: expected a Slurm job id such as 123 or 123_4, got {job_id!r}")
    rows, asked = _ask(name)
    jobs = {row["JobID"]: row for row in rows if "." not in row["JobID"]}
    if not jobs and "_" not in name and _find_run(name, Path()) is None:
        jobs = {name + folder.name.rpartition(name)[2]: {} for folder in sorted(Path().glob(f"runs/*-{name}_*"))}
    found = [_diagnose(job, row, rows, asked) for job, row in (jobs or {name: {}}).items()]
    if len(found) == 1:
        return found[0]
    causes = [task.cause for task in found]
    counts = ", ".join(f"{causes.count(cause)} {cause}" for cause in dict.fromkeys(causes))
    text = "\n".join([f"Job {name} is an array; of {len(found)} tasks: {counts}.", *(task.text for task in found)])
    return JobDiagnosis(name, text, counts, None, None, "", sorted({s for t in found for s in t.sources}), tasks=found)
