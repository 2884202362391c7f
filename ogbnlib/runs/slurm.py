"""Explain why a Slurm job ended or waits.

Sources are sacct, else scontrol, else the job's log, and the job's run.
"""

import contextlib
import re
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..environment import RESTARTS_VARIABLE
from ..errors import InputError
from .diagnosis import OPEN_CAUSES, Diagnosis, Result
from .evidence import OUT_OF_MEMORY, cleaned, failed_rank, find, job_rows, job_state, last_words
from .exit_codes import (
    PENDING,
    RUNNING,
    STATES,
    STOPPED,
    Meaning,
    code_key,
    meaning_of,
    meaning_of_state,
    sbatch_resumption,
)
from .folder import Run, is_run

_FORMAT = "--format=JobID,State,ExitCode,ReqMem,NNodes,Elapsed,Timelimit,NodeList,Reason,WorkDir"
_RUN_LINE = r"^(?:ogbnlib: the run is in|Everything about it is in) (.+)$"


@dataclass(frozen=True)
class _JobDiagnosis:
    """Diagnosis of a Slurm job: `text` is a paragraph for people.

    `exit_code` is Slurm's EXIT:SIGNAL pair, or without one the run's exit code.
    """

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
    tasks: list["_JobDiagnosis"] = field(default_factory=list)  # of a job array
    to_dict = asdict

    def __str__(self) -> str:
        return self.text


def _ask(job_id: str) -> tuple[list[dict[str, str]], list[str]]:
    """Return sacct's rows, else scontrol's, with the command that answered or why neither did."""
    recorded, refusal = _answer(["sacct", "-j", job_id, "--parsable2", _FORMAT], job_id)
    shown, another = _answer(["scontrol", "--oneliner", "show", "job", job_id], job_id)
    if not recorded:
        return shown, ["scontrol"] if shown else [refusal, another]
    # sacct knows neither the job's script nor the reason why the job waits now
    present = {row["JobID"]: row for row in shown}
    rows = []
    for row in recorded:
        own = present.get(row["JobID"], row)
        rows.append({**own, **row, "Reason": own.get("Reason", "")})
    return rows, ["sacct"]


def _answer(argv: list[str], job_id: str) -> tuple[list[dict[str, str]], str]:
    """Run a Slurm command and return its rows; without rows, also the reason."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return [], f"{argv[0]} is not installed here"
    except subprocess.TimeoutExpired as error:
        return [], str(error)
    rows = job_rows(done.stdout)
    if rows and done.returncode == 0:
        return rows, ""
    return [], f"{argv[0]}: {done.stderr.strip() or f'it knows no job {job_id}'}"


def _find_run(job_id: str, work_dir: Path, log: str = "") -> Run | None:
    """Find the run that the log names, else the newest run in `work_dir`/runs/NAME-JOBID.

    That folder is the run itself, or a notebook's folder with its runs inside.
    """
    named = [work_dir / name for name in re.findall(_RUN_LINE, log, re.MULTILINE)[-1:]]
    below = [
        path
        for deeper in ("", "/*", "/runs/*")
        for path in work_dir.glob(f"runs/*-{job_id}{deeper}")
    ]
    for folders in (named, below):
        files = [file for path in folders if is_run(path) for file in path.iterdir()]
        if files:
            return Run(max(files, key=lambda path: path.stat().st_mtime).parent)
    return None


class _Job:
    """The traces of a job, or of one task of an array: Slurm's rows, its log, and its run."""

    def __init__(self, job_id: str, row: dict[str, str], rows: list[dict[str, str]]):
        self.job_id = job_id
        self.row = row
        self.steps = [step for step in rows if step["JobID"].startswith(f"{job_id}.")]
        work_dir = Path(row.get("WorkDir") or ".")
        self.log_path = _log_path(job_id, row, work_dir)
        # only the last attempt's part of the log, which begins with this line
        self.log = re.split(r"(?=ogbnlib: job \S+, restart \d+)", _end_of(self.log_path))[-1]
        self.rank = failed_rank(cleaned(self.log))
        lines = [line for line in self.log.splitlines() if line.strip()]
        self.words = [
            line for line in lines if not line.startswith(("ogbnlib: ", "slurmstepd", "srun: "))
        ]
        self.proven, _ = job_state(lines)  # the state that the log alone proves
        self.run = _find_run(job_id, work_dir, self.log)
        self.run_code, self.diagnosis = _end_in_job(self.run, job_id)
        self.state = (row.get("State") or self.proven).partition(" by ")[0]
        self.pair = row.get("ExitCode", "")
        if not self.pair and self.run_code is not None:
            self.pair = str(self.run_code)
        # A user's own script writes no line of this package to its log; its exit codes have other
        # meanings.
        self.is_ours = bool(
            self.run or not self.log or re.search("^(ogbnlib|error): ", self.log, re.MULTILINE)
        )
        self.resume = "submit it again"
        if self.run and self.run.paths.config.is_file():
            self.resume = (
                f"go on with `{sbatch_resumption(self.run.run_dir)}` and the same options of sbatch"
            )

    def end(self) -> Meaning:
        """Cause, sentence and remedy of the end: by Slurm's state, else by the exit code."""
        short = self._short_limit()
        if short:
            return short
        state = self.state
        states = [self.proven, *(step.get("State") for step in self.steps)]
        if STATES.get(state) not in (PENDING, RUNNING) and "OUT_OF_MEMORY" in states:
            state = "OUT_OF_MEMORY"
        # For COMPLETED and FAILED the exit code says more.
        if state in STATES and state not in ("COMPLETED", "FAILED"):
            facts = {"job": self.job_id, "state": self.state} | self.row | {"resume": self.resume}
            if self.diagnosis and self.diagnosis.cause == OUT_OF_MEMORY:
                facts["less"] = self.diagnosis.remedy
            return meaning_of_state(state, facts)
        code = code_key(self.pair)
        if not code:
            return Meaning(
                "unknown", "left no sign of its end", "ask sacct on the cluster's login node"
            )
        return self._with_resumption(self._by_code(code))

    def _by_code(self, code: str) -> Meaning:
        meaning = meaning_of(code, foreign=not self.is_ours)
        # The job scripts put such a job back into the queue, unless they or Slurm refused to.
        if meaning.cause == "stopped at a checkpoint":
            reasons = re.findall(r"^ogbnlib: .*?(not requeued.*)$", self.log, re.MULTILINE)
            why = "".join(f": {reason}" for reason in reasons[-1:])
            return meaning._replace(
                text=f"stopped at a checkpoint (exit code {code}) and was not put back into the queue{why}",
                remedy=f"{self.resume}; {RESTARTS_VARIABLE} bounds how often a job requeues itself",
            )
        # The result of the job's run says more than the code. Without a result, or if torchrun
        # reports another rank that failed first, the log decides.
        explained = self._is_end_of_run(code)
        finding = None
        if (code != "0" and self.rank) or (meaning.cause in OPEN_CAUSES and not explained):
            finding = find(self.log, foreign=not self.is_ours)
        if finding:
            if self.rank:
                code = code_key(self.rank["code"])
            return finding._replace(text=f"failed: {finding.text} (exit code {code})")
        if self.diagnosis and explained:
            outcome = (
                "with exit code 0, but its run did not finish" if code == "0" else "as its run did"
            )
            return Meaning(
                self.diagnosis.cause,
                f"ended {outcome} (exit code {self.run_code})",
                self.diagnosis.remedy,
            )
        if ":" in code:
            return meaning
        return meaning._replace(text=f"{meaning.text} (exit code {code})")

    def _is_end_of_run(self, code: str) -> bool:
        """Whether the end of the job's run explains the job's exit code."""
        if not self.run or not self.run_code:
            return False
        if code == "0":
            # A notebook may let its runs be killed on purpose. They lie in its folder, which has
            # the job's name.
            return not any(
                folder.name.endswith(f"-{self.job_id}") for folder in self.run.run_dir.parents
            )
        return code != "2" or self.run_code == 2

    def _with_resumption(self, meaning: Meaning) -> Meaning:
        """Add to the remedy the command that resumes the run in another job."""
        remedy = meaning.remedy
        # The remedies of `exit_codes` name the Python call; for a job it takes another `sbatch`.
        killed = ("SIGKILL, cause unknown", "worker died, cause unknown")
        if "resume" in remedy and "sbatch" not in remedy:
            remedy = self.resume
            if meaning.cause == "diverged":
                remedy += ", with a smaller lr=..."
        elif self.resume.startswith("go on") and meaning.cause in killed:
            remedy = f"{remedy}; then {self.resume}"
        if self.log_path and not (self.run and self.run.paths.output.is_file()):
            # torchrun writes no output.log
            remedy = remedy.replace("output.log", str(self.log_path))
        return meaning._replace(remedy=remedy)

    def _short_limit(self) -> Meaning | None:
        """Explain a stop right at the job's start; None for any other end.

        The lead of --signal is the time between the signal and the job's end. If the time limit is
        not longer than the lead, the signal comes as soon as the job starts.
        """
        limit_s = _seconds(self.row.get("Timelimit", ""))
        was_told = self.run_code == STOPPED or code_key(self.pair) in (str(STOPPED), "138")
        lead_s = _lead_s(self.job_id, self.row) if was_told and limit_s else 0
        if not lead_s or lead_s + 60 < limit_s:  # Slurm sends the signal up to 60 s early
            return None
        return Meaning(
            "time limit",
            f"was told to stop as soon as it started: its --signal comes {lead_s} s before the "
            f"end, and its time limit is {self.row['Timelimit']}",
            f"give sbatch a --time well above it; {self.resume}",
        )

    def diagnose(self, asked: list[str]) -> _JobDiagnosis:
        end = self.end()
        text = f"Job {self.job_id} {end.text.rstrip('.')}."
        if self.run and self.diagnosis and self.rank:
            # Rank 0 writes the run's result. Its end is only a consequence of the other rank's.
            text += f" Its run {self.run.run_dir} was in phase '{self.diagnosis.phase}'."
        elif self.run and self.diagnosis:
            story = self.diagnosis.text.removesuffix(f" Next: {self.diagnosis.remedy}.")
            text += f" Its run {self.run.run_dir}: {story}"
        elif self.words and end.cause not in ("pending", "finished"):
            words = last_words(self.log) or self.words[-1]
            text += f" The last words in {self.log_path}: {words.rstrip('.')}."
        if end.remedy:
            text += f" Next: {end.remedy}."
        if not self.row:
            text += f" This is from files alone: {'; '.join(asked)}."
        run_dir = str(self.run.run_dir) if self.run else None
        files = [str(self.log_path) if self.words else "", run_dir or ""]
        return _JobDiagnosis(
            self.job_id,
            text,
            end.cause,
            self.row.get("State"),
            self.pair or None,
            end.remedy,
            [*(asked if self.row else []), *filter(None, files)],
            self.steps,
            run_dir,
            self.diagnosis,
        )


def _log_path(job_id: str, row: dict[str, str], work_dir: Path) -> Path | None:
    """The job's log: slurm-NAME-JOBID.out of the job scripts, slurm-JOBID.out of sbatch itself."""
    if row.get("StdOut"):
        return Path(row["StdOut"])
    logs = [path for path in work_dir.glob("slurm-*.out") if path.stem.endswith(f"-{job_id}")]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def _end_of(path: Path | None) -> str:
    if path is None or not path.is_file():
        return ""
    return path.read_bytes()[-(2**18) :].decode(errors="replace").replace("\r", "\n")


def _end_in_job(run: Run | None, job_id: str) -> tuple[int | None, Diagnosis | None]:
    """Exit code and diagnosis of a run's last attempt in this job; None without such an attempt.

    If a later job resumed the run, the run's present result says nothing about this job.
    """
    if run is None:
        return None, None
    starts = [event for event in run.events if event["event"] == "start"]
    own = [i for i, event in enumerate(starts) if event.get("slurm_job") == job_id]
    if own[-1:] == [len(starts) - 1] or not any(event.get("slurm_job") for event in starts):
        return run.exit_code, run.diagnosis
    if not own:
        return None, None
    result = Result.model_validate(starts[own[-1] + 1].get("previous") or {})
    return result.exit_code, result.diagnosis


def _seconds(text: str) -> float:
    """Seconds of Slurm's [DAYS-]HOURS:MINUTES:SECONDS; 0 for a word such as UNLIMITED."""
    import pandas as pd

    span = pd.to_timedelta(text.replace("-", " days "), errors="coerce")
    return 0.0 if span is pd.NaT else float(span.total_seconds())


def _lead_s(job_id: str, row: dict[str, str]) -> int:
    """Seconds before the job's end at which Slurm is to send a signal; 0 if unknown.

    The number is that of --signal in the sbatch command, else in the job's script.
    """
    # Slurm before 21.08 has no field SubmitLine.
    submitted, _ = _answer(["sacct", "-j", job_id, "--parsable2", "--format=JobID,SubmitLine"], "")
    text = "".join(f"#SBATCH {one.get('SubmitLine', '')}\n" for one in submitted[:1])
    with contextlib.suppress(OSError):
        text += Path(row.get("Command", "").partition(" ")[0]).read_text(errors="replace")
    return int([*re.findall(r"^#SBATCH .*--signal[= ]\S*?@(\d+)", text, re.MULTILINE), 0][0])


def _task_number(job: _Job) -> tuple[int, int]:
    """Sort key of an array's tasks: by number, waiting tasks such as 7_[5-8] last."""
    _, _, number = job.job_id.partition("_")
    return "[" in number, int([*re.findall(r"\d+", number), 0][0])


def diagnose_job(job_id: str | int) -> _JobDiagnosis:
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
    ends = [_Job(job_id, row, rows) for job_id, row in (jobs or {name: {}}).items()]
    if not any(job.row or job.run or job.words or job.proven for job in ends):
        raise InputError(
            f"--job: nothing is left of job {name}: {'; '.join(sources)}; and {Path().resolve()} has no "
            f"runs/*-{name} and no slurm-*-{name}.out. Start this in the folder that you submitted from."
        )
    tasks = [job.diagnose(sources) for job in sorted(ends, key=_task_number)]
    if len(tasks) == 1:
        return tasks[0]
    causes = Counter(task.cause for task in tasks)
    counts = ", ".join(f"{count} {cause}" for cause, count in causes.items())
    text = "\n".join(
        [
            f"Job {name} is an array; of {len(tasks)} tasks: {counts}.",
            *(task.text for task in tasks),
        ]
    )
    sources = sorted({source for task in tasks for source in task.sources})
    return _JobDiagnosis(name, text, counts, sources=sources, tasks=tasks)
