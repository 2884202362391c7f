"""The cause of a Slurm job's end, or the reason why it waits: from sacct, else scontrol, else its
log, and its run."""

import csv
import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import InputError
from ..memory.record import RunPaths
from .diagnosis import Diagnosis
from .exit_codes import (
    EXIT_CODES,
    LOG_LINES,
    PENDING,
    RUNNING,
    STATES,
    meaning_of,
    sbatch_resumption,
)
from .folder import Run

FIELDS = [
    "JobID",
    "State",
    "ExitCode",
    "ReqMem",
    "NNodes",
    "Elapsed",
    "Timelimit",
    "NodeList",
    "Reason",
    "WorkDir",
]
# scontrol's names -> sacct's
NAMES = {
    "JobId": "JobID",
    "JobState": "State",
    "RunTime": "Elapsed",
    "TimeLimit": "Timelimit",
    "NumNodes": "NNodes",
}
NAMES |= {"MinMemoryNode": "ReqMem", "MinMemoryCPU": "ReqMem"}
RUN_LINE = r"^(?:ogbnlib: the run is in|Everything about it is in) (.+)$"
# in torchrun's report
FAILED_RANK = r"rank\s+: (\d+) \(local_rank: \d+\)\n\s+exitcode\s+: (?!-15\b|143\b)(-?\d+)"


@dataclass(frozen=True)
class JobDiagnosis:
    """`text` is the paragraph for people. `exit_code` is Slurm's EXIT:SIGNAL."""

    job_id: str
    text: str
    # "out of memory", "time limit", "cancelled", "never started", "stopped at a checkpoint", ...
    cause: str
    state: str | None = None  # Slurm's own word; None when Slurm does not know the job
    exit_code: str | None = None
    remedy: str = ""
    sources: list[str] = field(default_factory=list)
    steps: list[dict[str, str]] = field(default_factory=list)
    run_dir: str | None = None
    run: Diagnosis | None = None
    tasks: list["JobDiagnosis"] = field(default_factory=list)  # of a job array
    to_dict = asdict

    def __str__(self) -> str:
        return self.text


def _parse(text: str) -> list[dict[str, str]]:
    """Rows of jobs and steps from `sacct --parsable2` or `scontrol --oneliner`, under sacct's
    names."""
    if text.startswith("JobID|"):
        return list(
            csv.DictReader(text.splitlines(), restval="", delimiter="|", quoting=csv.QUOTE_NONE)
        )
    text = re.sub(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\S+)", r"JobId=\1_\2", text)
    # a value may contain blanks
    pairs = re.compile(r"(?:^|\s)([A-Z][\w/:&]*)=(.*?)(?=\s+[A-Z][\w/:&]*=|\s*$)")
    jobs = [
        {NAMES.get(name, name): value for name, value in pairs.findall(line)}
        for line in text.splitlines()
    ]
    return [job for job in jobs if job]


def _ask(job_id: str) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of sacct, else of scontrol, and which of them answered or why neither did."""
    sacct, refusals = ["sacct", "-j", job_id, "--parsable2", f"--format={','.join(FIELDS)}"], []
    for argv in (sacct, ["scontrol", "--oneliner", "show", "job", job_id]):
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
            )
            if rows := _parse(done.stdout) if done.returncode == 0 else []:
                return rows, [argv[0]]
            refusals.append(f"{argv[0]}: {done.stderr.strip() or f'it knows no job {job_id}'}")
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            refusals.append(
                f"{argv[0]} is not installed here" if isinstance(error, OSError) else str(error)
            )
    return [], refusals


def _find_run(job_id: str, work_dir: Path, log: str = "") -> Run | None:
    """The run that the log names, else `work_dir`/runs/NAME-JOBID, else the last run of a notebook
    in that folder."""
    named = [work_dir / name for name in re.findall(RUN_LINE, log, re.MULTILINE)[-1:]]
    below = [
        path
        for deeper in ("", "/*", "/runs/*")
        for path in work_dir.glob(f"runs/*-{job_id}{deeper}")
    ]
    for folders in (named, below):
        runs = [
            path
            for path in folders
            if RunPaths(path).config.is_file() or RunPaths(path).events.is_file()
        ]
        if files := [file for run in runs for file in run.iterdir()]:
            return Run(max(files, key=lambda path: path.stat().st_mtime).parent)
    return None


def _by_code(
    code: str, rank: list[str], run: Run | None, is_own: bool, log: str, resume: str
) -> tuple[str, str, str]:
    """(cause, sentence, remedy) of a job that its state does not explain."""
    # A user's own script, whose codes have other meanings, leaves no line of ours in its log.
    is_ours = run is not None or not log or re.search("^(ogbnlib|error): ", log, re.MULTILINE)
    cause, meaning, remedy = meaning_of(code, foreign=not is_ours)
    sentence = meaning if ":" in code else f"{meaning} (exit code {code})"
    if cause == "stopped at a checkpoint":
        why = [
            f": {text}" for text in re.findall(r"^ogbnlib: .*?(not requeued.*)$", log, re.MULTILINE)
        ]
        sentence = f"stopped at a checkpoint (exit code {code}) and was not put back into the queue{''.join(why[-1:])}"
        remedy = f"{resume}; OGBNLIB_MAX_RESTARTS bounds how often a job requeues itself"
    elif code != "0" and rank:
        cause, meaning, remedy = meaning_of(rank[1])
        sentence = f"failed because of its rank {rank[0]}: {meaning} (exit code {rank[1]})"
    elif run and run.exit_code and (is_own if code == "0" else code != "2" or run.exit_code == 2):
        cause, remedy = run.diagnosis.cause, run.diagnosis.remedy
        text = "with exit code 0, but its run did not finish" if code == "0" else "as its run did"
        sentence = f"ended {text} (exit code {run.exit_code})"
    if "resume" in remedy and "sbatch" not in remedy:
        remedy = resume + (", with a smaller lr=..." if cause == "diverged" else "")
    return cause, sentence, remedy


def _diagnose(
    job_id: str, job: dict[str, str], rows: list[dict[str, str]], asked: list[str]
) -> JobDiagnosis:
    work_dir = Path(job.get("WorkDir") or ".")
    # The job scripts write slurm-NAME-JOBID.out, with such a line for each attempt; sbatch by
    # itself slurm-JOBID.out.
    logs = [path for path in work_dir.glob("slurm-*.out") if path.stem.endswith(f"-{job_id}")]
    log_path = (
        Path(job["StdOut"])
        if job.get("StdOut")
        else max(logs, key=lambda p: p.stat().st_mtime, default=None)
    )
    data = log_path.read_bytes()[-(2**18) :] if log_path is not None and log_path.is_file() else b""
    log = re.split(
        r"(?=ogbnlib: job \S+, restart \d+)", data.decode(errors="replace").replace("\r", "\n")
    )[-1]
    lines = [line for line in log.splitlines() if line.strip()]
    words = [line for line in lines if not line.startswith(("ogbnlib: ", "slurmstepd", "srun: "))]
    run, steps = (
        _find_run(job_id, work_dir, log),
        [row for row in rows if row["JobID"].startswith(f"{job_id}.")],
    )
    states = [
        state for line in lines for pattern, state in LOG_LINES.items() if re.search(pattern, line)
    ]
    # A kill for memory explains all else that follows it but a new attempt.
    proven = (
        "OUT_OF_MEMORY"
        if "OUT_OF_MEMORY" in states and states[-1] != "REQUEUED"
        else "".join(states[-1:])
    )
    if not (job or run or words or proven):
        missing = f"{work_dir.resolve()} has no runs/*-{job_id} and no slurm-*-{job_id}.out"
        remedy = "Start this in the folder that you submitted from."
        raise InputError(
            f"--job: nothing is left of job {job_id}: {'; '.join(asked)}; and {missing}. {remedy}"
        )
    state = (job.get("State") or proven).partition(" by ")[0]
    ending = STATES.get(state)
    if ending not in (PENDING, RUNNING) and "OUT_OF_MEMORY" in {
        proven,
        *(step.get("State") for step in steps),
    }:
        ending = STATES["OUT_OF_MEMORY"]
    resume, diagnosis = "submit it again", run.diagnosis if run else None
    if run and run.paths.config.is_file():
        resume = f"go on with `{sbatch_resumption(run.run_dir)}` and the same options of sbatch"
    # The first rank that failed by itself: torchrun ends the others by SIGTERM.
    rank = next(
        ([r, str(128 - int(c)) if c[0] == "-" else c] for r, c in re.findall(FAILED_RANK, log)), []
    )
    code = pair = job.get("ExitCode", "") or (
        "" if run is None or run.exit_code is None else str(run.exit_code)
    )
    # EXIT:SIGNAL is 128 + SIGNAL, or EXIT; sacct of Slurm 22.05 shows 141 as 13:0
    if pair not in EXIT_CODES:
        code, _, number = pair.partition(":")
        signal = int(number or 0) or (
            int(code) if int(code or 0) > 2 and str(128 + int(code)) in EXIT_CODES else 0
        )
        code = str(128 + signal) if signal and ":" in pair else code
    if ending:
        less = (
            diagnosis.remedy if diagnosis and diagnosis.cause == "out of memory" else "see `plan`"
        )
        facts = {
            "Reason": "no reason in its log",
            "NodeList": "",
            "job": job_id,
            "state": state,
        } | job
        facts |= {"resume": resume, "less": less}
        # left out if unknown, or a word such as Partition_Limit
        for name in ("Elapsed", "Timelimit", "ReqMem"):
            value = rf" \1 {job[name]}" if job.get(name, "")[:1].isdigit() else ""
            ending = ending._replace(text=re.sub(rf" (of|after) \{{{name}\}}", value, ending.text))
        cause, sentence, remedy = (text.format(**facts) for text in ending)
    elif not code:
        cause, sentence, remedy = (
            "unknown",
            "left no sign of its end",
            "ask sacct on the cluster's login node",
        )
    else:
        # A notebook, whose folder has the job's name, may let its runs be killed on purpose.
        is_own = run is not None and not any(
            folder.name.endswith(f"-{job_id}") for folder in run.run_dir.parents
        )
        cause, sentence, remedy = _by_code(code, rank, run, is_own, log, resume)
        if log_path and not (run and run.paths.output.is_file()):  # torchrun leaves none
            remedy = remedy.replace("output.log", str(log_path))
    text = f"Job {job_id} {sentence.rstrip('.')}."
    # the end of rank 0, which writes the run's result, is a consequence
    if run and diagnosis and rank:
        text += f" Its run {run.run_dir} was in phase '{diagnosis.phase}'."
    elif run and diagnosis:
        text += (
            f" Its run {run.run_dir}: {diagnosis.text.removesuffix(f' Next: {diagnosis.remedy}.')}"
        )
    elif words and cause not in ("pending", "finished"):
        text += f" The last words in {log_path}: {words[-1].rstrip('.')}."
    text += (f" Next: {remedy}." if remedy else "") + (
        "" if job else f" This is from files alone: {'; '.join(asked)}."
    )
    run_dir = str(run.run_dir) if run else None
    sources = [
        *(asked if job else []),
        *([str(log_path)] if words else []),
        *filter(None, [run_dir]),
    ]
    return JobDiagnosis(
        job_id,
        text,
        cause,
        job.get("State"),
        pair or None,
        remedy,
        sources,
        steps,
        run_dir,
        diagnosis,
    )


def diagnose_job(job_id: str | int) -> JobDiagnosis:
    """Diagnose the end or the wait of a Slurm job by its id: 123 (all tasks of an array), or 123_4
    for one task."""
    name = str(job_id).strip()
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise InputError(f"--job: expected a Slurm job id such as 123 or 123_4, got {job_id!r}")
    rows, sources = _ask(name)
    jobs = {row["JobID"]: row for row in rows if "." not in row["JobID"]}
    if not jobs and "_" not in name and _find_run(name, Path()) is None:
        jobs = {
            name + folder.name.rpartition(name)[2]: {}
            for folder in sorted(Path().glob(f"runs/*-{name}_*"))
        }
    tasks = [_diagnose(job, row, rows, sources) for job, row in (jobs or {name: {}}).items()]
    if len(tasks) == 1:
        return tasks[0]
    causes = [task.cause for task in tasks]
    counts = ", ".join(f"{causes.count(cause)} {cause}" for cause in dict.fromkeys(causes))
    text = "\n".join(
        [
            f"Job {name} is an array; of {len(tasks)} tasks: {counts}.",
            *(task.text for task in tasks),
        ]
    )
    return JobDiagnosis(
        name, text, counts, sources=sorted({s for t in tasks for s in t.sources}), tasks=tasks
    )
