"""What ended a Slurm job, from everything that is left of it: accounting, controller, output file, run folder.

`sacct` knows a job for ever where there is accounting (slurmdbd); `scontrol show job` knows it for a few minutes after
its end (MinJobAge); what slurmstepd wrote into the job's output file, and the run's own folder, stay. Each is used
where it is to be had, and what the answer rests on is in `sources`.

Two of Slurm's own traps are seen through: an out-of-memory kill in a step that srun started leaves the job FAILED with
whatever the script made of srun's exit code 1, and sacct of Slurm 22.05 shows exit codes of 128 and above less 128
(141 as `13:0`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, format_bytes
from .diagnosis import EXIT_CODES, Diagnosis, diagnose, explain_exit_code, read_result

# WorkDir goes last: a folder's name may hold the separator.
FIELDS = (
    *("JobID", "JobIDRaw", "State", "ExitCode", "DerivedExitCode", "ReqMem", "MaxRSS", "Elapsed", "Timelimit"),
    *("Restarts", "NodeList", "Reason", "WorkDir"),
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
ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "STOPPED")
CAUSES = {"2": "bad input", "130": "interrupted", "137": "SIGKILL, cause unknown", "143": "SIGTERM"}
# How slurmstepd's own lines in the job's output file name an end; the last one counts.
WORDS_IN_OUTPUT = (
    (r"oom[-_]kill event", "OUT_OF_MEMORY"),
    (r"CANCELLED AT \S+ DUE TO TIME LIMIT", "TIMEOUT"),
    (r"CANCELLED AT \S+ DUE TO PREEMPTION", "PREEMPTED"),
    (r"CANCELLED AT \S+ DUE TO NODE FAILURE", "NODE_FAIL"),
    (r"CANCELLED AT \S+ DUE TO JOB REQUEUE", "REQUEUED"),
    (r"JOB \S+ ON \S+ CANCELLED AT \S+ \*\*\*", "CANCELLED"),
)
_ATTEMPT = re.compile(rb"^ogbnlib: job \S+, restart \d+", re.MULTILINE)  # slurm/common.sh begins every attempt with it


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
    """Rows of `sacct --parsable2`, jobs and steps in the order they come; only the last attempt of a requeued job."""
    lines = text.splitlines()
    if not lines:
        return []
    names = lines[0].split("|")
    rows = [dict(zip(names, line.split("|", len(names) - 1), strict=False)) for line in lines[1:]]
    last: dict[str, dict[str, str]] = {}
    for row in rows:
        if "." not in row["JobID"]:  # a new attempt: its steps follow
            last = {name: kept for name, kept in last.items() if name.partition(".")[0] != row["JobID"]}
        last[row["JobID"]] = row
    return list(last.values())


def parse_scontrol(text: str) -> list[dict[str, str]]:
    """Jobs of `scontrol --oneliner show job`, one a line: NAME=VALUE, where a value may hold blanks."""
    jobs = []
    for line in text.splitlines():
        marks = list(re.finditer(r"(?:^|\s)([A-Z][\w/:&]*)=", line))
        ends = [mark.start() for mark in marks[1:]] + [len(line)]
        if marks:
            jobs.append({mark[1]: line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)})
    return jobs


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


def _sacct(job_id: str) -> tuple[list[dict[str, str]], str]:
    known, refusal = _call("sacct", "--helpformat")  # a field that this version does not have would refuse them all
    if refusal:
        return [], refusal
    wanted = [name for name in FIELDS if name in known.split()]
    text, refusal = _call("sacct", "-j", job_id, "--parsable2", "--duplicates", f"--format={','.join(wanted)}")
    rows = parse_sacct(text)
    return rows, refusal or ("" if rows else f"sacct knows no job {job_id}")


def _scontrol(job_id: str) -> tuple[list[dict[str, str]], str]:
    text, refusal = _call("scontrol", "--oneliner", "show", "job", job_id)
    return parse_scontrol(text), refusal


def _task_id(job: dict[str, str]) -> str:
    """A job's id as people write it: ARRAYID_TASK for the task of an array."""
    if "ArrayJobId" in job:
        return f"{job['ArrayJobId']}_{job.get('ArrayTaskId', '')}"
    return job["JobId"]


def _seconds(duration: str) -> str:
    return duration if re.fullmatch(r"(\d+-)?\d+(:\d+)+(\.\d+)?", duration) else ""


def _sizes(rows: list[dict[str, str]]) -> list[int]:
    """MaxRSS of every step in bytes; Slurm writes `816K`."""
    unit = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    found = [re.fullmatch(r"([\d.]+)([KMGT]?)", row.get("MaxRSS", "")) for row in rows]
    return [int(float(match[1]) * unit[match[2]]) for match in found if match]


def _user(uid: str) -> str:
    with contextlib.suppress(KeyError, ValueError):
        return f"user {pwd.getpwuid(int(uid)).pw_name} (uid {uid})"
    return f"uid {uid}"


def _runs_below(folder: Path) -> Iterator[Path]:
    for path in (folder, *folder.glob("*"), *folder.glob("runs/*")):
        if (path / "config.json").is_file() or (path / "events.jsonl").is_file():
            yield path


def find_run(job_id: str, work_dir: Path) -> Path | None:
    """The run that a job left in `work_dir`/runs/NAME-JOBID, the last one where a notebook made several."""
    runs = [run for folder in work_dir.glob(f"runs/*-{job_id}") if folder.is_dir() for run in _runs_below(folder)]
    return max(runs, key=lambda run: max(path.stat().st_mtime for path in run.iterdir()), default=None)


def find_output(job_id: str, work_dir: Path) -> Path | None:
    """The output file that the job scripts ask for, slurm-NAME-JOBID.out, or sbatch's default."""
    files = [*work_dir.glob(f"slurm-*-{job_id}.out"), *work_dir.glob(f"slurm-{job_id}.out")]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def read_output(path: Path) -> tuple[str | None, str]:
    """The state that slurmstepd's lines in a job's output file name, and the last words of what ran."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2**18))
        data = file.read()
    begins = [match.start() for match in _ATTEMPT.finditer(data)]
    text = data[begins[-1] if begins else 0 :].decode(errors="replace")
    state = None
    for line in text.splitlines():
        if line.lstrip().startswith(("slurmstepd", "srun", "[")):
            state = next((name for words, name in WORDS_IN_OUTPUT if re.search(words, line)), state)
    others = ("ogbnlib: ", "slurmstepd", "srun: ")
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip() and not line.startswith(others)]
    return state, lines[-1] if lines else ""


def _exit_code(words: str, run: Diagnosis | None, result: dict[str, Any] | None, exact: bool) -> int | str | None:
    """One exit code of Slurm's EXIT:SIGNAL: the pair where it is a word of its own, else 128 + SIGNAL or EXIT."""
    match = re.fullmatch(r"(\d+):(\d+)", words)
    if not match:
        return run.exit_code if run else None
    code, number = int(match[1]), int(match[2])
    if words in EXIT_CODES:
        return words
    if number:
        return 128 + number
    if code and result and result.get("exit_code") in (code, 128 + code):
        return int(result["exit_code"])
    if not exact and f"{128 + code}" in EXIT_CODES and code > 2:
        return 128 + code
    return code


def _resume(run_dir: Path | None) -> str:
    if run_dir is None:
        return "submit it again"
    if (run_dir / "checkpoint.pt").is_file():
        return f"go on from its checkpoint with python -m ogbnlib train --run-dir {run_dir} --resume"
    return "submit it again; no checkpoint was written"


def _explain(job: dict[str, str], steps: list[dict[str, str]], facts: dict[str, Any]) -> tuple[str, str, str]:
    """(cause, sentence, remedy) of one job. `job` has sacct's names; `facts` what the files say."""
    run: Diagnosis | None = facts["run"]
    run_dir: Path | None = facts["run_dir"]
    word, _, who = job.get("State", "").partition(" ")
    reason, elapsed, limit = job.get("Reason", ""), _seconds(job.get("Elapsed", "")), _seconds(job.get("Timelimit", ""))
    killed_step = next((step["JobID"] for step in steps if step.get("State") == "OUT_OF_MEMORY"), None)
    after = f" after {elapsed}" if elapsed else ""
    resume = _resume(run_dir)
    if word in ACTIVE:
        if word not in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
            return (
                "running",
                f"is {word}{after}{f' of {limit}' if limit else ''}",
                f"watch it with squeue -j {facts['id']}",
            )
        again = f", after {job['Restarts']} restarts" if job.get("Restarts", "0") not in ("0", "") else ""
        why = WAITING.get(reason.split(",")[0], "squeue --start says when Slurm expects it to begin")
        return "pending", f"is {word}{again}: {reason or 'no reason given'}", why
    own_limit = facts["result"] and facts["result"].get("memory_limit_bytes")
    memory = job.get("ReqMem", "")
    if word == "OUT_OF_MEMORY" or killed_step or (facts["output_state"] == "OUT_OF_MEMORY" and word == "FAILED"):
        where = f" in step {killed_step}, whose exit code srun gives as 1" if killed_step and word == "FAILED" else ""
        sizes = _sizes(steps)
        seen = f" The largest MaxRSS that Slurm sampled is {format_bytes(max(sizes))}." if sizes else ""
        sentence = f"was killed for passing its --mem{f' of {memory}' if memory else ''}{after}{where}.{seen}"
        remedy = run.remedy if run and run.cause == "out of memory" else EXIT_CODES["0:125"][1]
        return "out of memory", sentence, f"ask for more with --mem, or: {remedy}" if run else remedy
    if word == "TIMEOUT" or word == "DEADLINE":
        return (
            "time limit",
            f"reached its time limit{f' of {limit}' if limit else ''}",
            f"{resume}, or ask for more --time",
        )
    if word == "PREEMPTED":
        return "preempted", f"was preempted by another job{after}", f"{resume}; with --requeue Slurm restarts it itself"
    if word == "CANCELLED":
        by = f" by {_user(who.removeprefix('by '))}" if who else ""
        return "cancelled", f"was cancelled{by}{after} (scancel)", resume
    if word in ("NODE_FAIL", "BOOT_FAIL"):
        return (
            "node failure",
            f"lost its node {job.get('NodeList', '')}{after}",
            f"{resume}; --exclude keeps off that node",
        )
    code = _exit_code(job.get("ExitCode", ""), run, facts["result"], facts["exact"])
    if code is None:
        return "unknown", "left nothing that says how it ended", "ask sacct on the cluster's login node"
    if str(code) == "0:53":
        return (
            "never started",
            "never started: Slurm could not open its output file or enter its folder",
            EXIT_CODES["0:53"][1],
        )
    if str(code) == "75":
        text = "stopped at a checkpoint (exit code 75) and was not put back into the queue"
        return "stopped at a checkpoint", text, f"{resume}; OGBNLIB_MAX_RESTARTS bounds how often a job requeues itself"
    if str(code) == "0":
        return "finished", f"finished without an error{after}", ""
    meaning, remedy = explain_exit_code(code)
    if run and run.cause == "out of memory":
        held = f" the run's own limit of {format_bytes(own_limit)}" if own_limit else " the memory there was"
        return "out of memory", f"ended with exit code {code}{after}: its run passed{held}", run.remedy
    shown = job.get("ExitCode", "")
    inferred = shown != str(code) and not shown.startswith("0:") and shown.partition(":")[0] != str(code)
    note = f", which sacct shows as {shown}; a plain {shown.partition(':')[0]} would look the same" if inferred else ""
    return CAUSES.get(str(code), "error"), f"{meaning}{after} (exit code {code}{note})", remedy


def _merge(sacct: list[dict[str, str]], scontrol: list[dict[str, str]]) -> dict[str, dict[str, Any]]:
    """What is known of each job or array task, by its id, under sacct's names; its steps under "steps"."""
    jobs: dict[str, dict[str, Any]] = {}
    for row in sacct:
        name, _, step = row["JobID"].partition(".")
        job = jobs.setdefault(name, {"steps": [], "exact": False})
        if step:
            job["steps"].append(row)
        else:
            job.update(row)
    names = {"RunTime": "Elapsed", "TimeLimit": "Timelimit", "MinMemoryNode": "ReqMem", "JobState": "State"}
    same = ("ExitCode", "Reason", "Restarts", "NodeList", "WorkDir", "StdOut")
    for shown in scontrol:
        job = jobs.setdefault(_task_id(shown), {"steps": [], "exact": True})
        job["exact"] = True
        fresh = {names.get(name, name): value for name, value in shown.items() if name in names or name in same}
        if job.get("State", "").partition(" ")[0] == fresh.get("State"):
            del fresh["State"]  # sacct also says who cancelled it
        job.update(fresh)
    return jobs


def _one(job_id: str, job: dict[str, Any], run_dir: Path | None, missing: list[str]) -> JobDiagnosis:
    """The diagnosis of one job, or of one task of an array."""
    work_dir = Path(job.get("WorkDir") or ".")
    run_dir = run_dir or find_run(job_id, work_dir)
    output = Path(job["StdOut"]) if job.get("StdOut") else find_output(job_id, work_dir)
    run = diagnose(run_dir) if run_dir else None
    output_state, last_line = read_output(output) if output and output.is_file() else (None, "")
    known = job.get("State")
    if known is None and run is None and not last_line:
        raise InputError(
            f"--job: nothing is left of job {job_id}: {'; '.join(missing)}; and {work_dir.resolve()} has no "
            f"runs/*-{job_id} and no slurm-*-{job_id}.out; start this in the folder that you submitted from"
        )
    facts: dict[str, Any] = {"id": job_id, "run": run, "run_dir": run_dir, "output_state": output_state}
    facts |= {"result": read_result(run_dir) if run_dir else None, "exact": job.get("exact", False)}
    words = {name: value for name, value in job.items() if isinstance(value, str)}
    if known is None and output_state:
        words["State"] = output_state
    cause, sentence, remedy = _explain(words, job.get("steps", []), facts)
    text = f"Job {job_id} {sentence.rstrip('.')}."
    if run:
        text += f" Its run {run_dir}: {run.text.removesuffix(f' Next: {run.remedy}.')}"
    elif last_line and cause not in ("pending", "finished"):
        text += f" The last words in {output}: {last_line}"
    if remedy:
        text += f" Next: {remedy}."
    sources = [name for name, there in (("sacct", "JobID" in job), ("scontrol", job.get("exact"))) if there]
    sources += [str(path) for path, there in ((output, last_line), (run_dir, run)) if there]
    if not known:
        text += f" This is from files alone: {'; '.join(missing)}."
    exit_code = words.get("ExitCode") or (str(run.exit_code) if run and run.exit_code is not None else None)
    path = str(run_dir) if run_dir else None
    return JobDiagnosis(job_id, text, cause, known, exit_code, remedy, sources, job.get("steps", []), path, run)


def diagnose_job(job_id: str | int, *, run_dir: str | os.PathLike[str] | None = None) -> JobDiagnosis:
    """Say how a Slurm job ended, or what it waits for, and what to do next.

    Args:
        job_id: As sbatch and squeue print it: 123, or 123_4 for the task of an array; 123 means all tasks of an array.
        run_dir: The job's run, where it is not at runs/NAME-JOBID in the job's working directory (without Slurm's
            answer: in the present directory).

    Raises:
        InputError: for anything that is no job id, a `run_dir` that holds no run, or a job of which nothing is left.
    """
    name = str(job_id).strip()
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise InputError(f"--job: expected a Slurm job id such as 123 or 123_4, got {job_id!r}")
    rows, no_sacct = _sacct(name)
    shown, no_scontrol = _scontrol(name)
    missing = [f"{tool}: {reason}" for tool, reason in (("sacct", no_sacct), ("scontrol", no_scontrol)) if reason]
    jobs = _merge(rows, shown)
    if not jobs and "_" not in name and run_dir is None and find_run(name, Path()) is None:
        folders = sorted(Path().glob(f"runs/*-{name}_*"))
        jobs = {name + folder.name.rpartition(name)[2]: {} for folder in folders}
    given = Path(run_dir) if run_dir is not None else None
    found = [_one(task, job, given, missing) for task, job in (jobs or {name: {}}).items()]
    if len(found) == 1:
        return found[0]
    causes = [task.cause for task in found]
    counts = ", ".join(f"{causes.count(cause)} {cause}" for cause in dict.fromkeys(causes))
    text = "\n".join([f"Job {name} is an array; of {len(found)} tasks: {counts}.", *(task.text for task in found)])
    return JobDiagnosis(name, text, counts, None, None, "", sorted({s for t in found for s in t.sources}), tasks=found)
