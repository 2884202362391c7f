"""Explain why a Slurm job ended or waits: by scontrol, else sacct, else its log, and its run."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from ..memory.killed import Action
from .cause import OPEN_CAUSES, Facts
from .codes import START_AGAIN, STATES, code_key, of_code, of_state, resubmission, specified
from .folder import Run, is_run
from .render import Diagnosis
from .texts import cleaned, failed_rank, find, job_rows, job_state, last_words

_FORMAT = "--format=JobID,State,ExitCode,ReqMem,NNodes,Elapsed,Timelimit,NodeList,Reason,WorkDir"


def _ask(job_id: str) -> tuple[list[dict[str, str]], str]:
    """Return the rows of the job or of its tasks, see `job_rows`; if there are none, also why not.

    scontrol knows the job's log and the reason why it waits now, but forgets a job minutes after
    its end; sacct does not.
    """
    rows, no_scontrol = _answer(["scontrol", "--oneliner", "show", "job", job_id], job_id)
    if rows:
        return rows, ""
    # -X: without the job's steps
    rows, no_sacct = _answer(["sacct", "-X", "-j", job_id, "--parsable2", _FORMAT], job_id)
    return rows, f"{no_sacct}; {no_scontrol}"


def _answer(argv: list[str], job_id: str) -> tuple[list[dict[str, str]], str]:
    # rows as a command of Slurm prints them; without any, why not
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return [], f"{argv[0]} is not installed here"
    except subprocess.TimeoutExpired as error:  # the controller does not answer
        return [], str(error)
    rows = job_rows(done.stdout)
    if rows and done.returncode == 0:
        return rows, ""
    return [], f"{argv[0]}: {done.stderr.strip() or f'it knows no job {job_id}'}"


def _find_run(job_id: str, work_dir: Path, log: str) -> Run | None:
    """Find the run that the log names, else the newest run in `work_dir`/runs/NAME-JOBID.

    That folder is the run itself, or a notebook's folder with its runs inside.
    """
    line = r"^(?:ogbnlib: the run is in|Everything about it is in) (.+)$"
    named = re.findall(line, log, re.MULTILINE)[-1:]  # only the last one counts
    below = [f"runs/*-{job_id}{deeper}" for deeper in ("", "/*", "/runs/*")]
    for folders in (
        [work_dir / name for name in named],
        [path for pattern in below for path in work_dir.glob(pattern)],
    ):
        files = [file for path in folders if is_run(path) for file in path.iterdir()]
        if files:  # the newest file is of the newest run
            return Run(max(files, key=lambda path: path.stat().st_mtime).parent)
    return None


class _Job:
    """The traces of a job, or of one task of an array: Slurm's rows, its log, and its run."""

    def __init__(self, job_id: str, row: dict[str, str]):  # `row`: see `job_rows`, or {}
        self.job_id = job_id
        self.row = row
        work_dir = Path(row.get("WorkDir") or ".")
        self.log_path = _log_path(job_id, row, work_dir)
        # only the last attempt's part of the log, which begins with this line
        log = self.log_path.read_bytes() if self.log_path and self.log_path.is_file() else b""
        text = log[-(2**18) :].decode(errors="replace").replace("\r", "\n")  # the last 256 KB
        self.log = re.split(r"(?=ogbnlib: job \S+, restart \d+)", text)[-1]
        self.rank = failed_rank(cleaned(self.log))  # the match, if torchrun reports one
        lines = [line for line in self.log.splitlines() if line.strip()]
        self.proven, _ = job_state(lines)  # the state that the log alone proves
        self.run = _find_run(job_id, work_dir, self.log)
        self.diagnosis: Diagnosis | None = None
        # a last attempt in another job says nothing of this one
        if self.run and self.run.record.start.get("slurm_job") in (None, job_id):
            self.diagnosis = self.run.diagnosis
        self.run_code = self.diagnosis.exit_code if self.diagnosis else None
        self.state = (row.get("State") or self.proven).partition(" by ")[0]  # "CANCELLED by 0"
        # A user's own script, whose exit codes have other meanings, writes no line of this package
        # to its log. Without a log, the job counts as this package's.
        self.is_ours = bool(
            self.run or not self.log or re.search("^(ogbnlib|error): ", self.log, re.MULTILINE)
        )
        self.resumption = START_AGAIN
        if self.run and self.run.paths.config.is_file():
            self.resumption = resubmission(self.run.run_dir)

    def end(self) -> Diagnosis:
        """Cause, facts and actions of the end: by Slurm's state, else by the exit code."""
        state = self.state
        is_over = state not in STATES or STATES[state][0] not in ("pending", "running")
        if is_over and self.proven == "OUT_OF_MEMORY":  # Slurm may say FAILED or COMPLETED
            state = self.proven
        if state not in STATES:
            # "None" of a run without a result is no code
            return self._by_code(code_key(self.row.get("ExitCode") or str(self.run_code)))
        end = of_state(state, self.row)
        inner = self.diagnosis
        if inner and inner.cause == end.cause == "out of memory":
            raise_mem, *_, resume = end.actions  # the run's own actions replace those between
            end = replace(end, actions=(raise_mem, *inner.actions, resume))
        return end

    def _by_code(self, code: str) -> Diagnosis:
        if not code:  # `code` as of `code_key`: "" if neither Slurm nor a result has one
            return Diagnosis("unknown", Facts("no sign"), (Action("ask Slurm"),))
        end = of_code(code, foreign=not self.is_ours)
        # The result of the job's run says more than the code. Without a result, or if torchrun
        # reports another rank that failed first, the log decides.
        explained = self._is_end_of_run(code)
        found = None
        if (code != "0" and self.rank) or (end.cause in OPEN_CAUSES and not explained):
            found = find(self.log, foreign=not self.is_ours)
        if found:
            exit_code = of_code(self.rank["code"] if self.rank else code).exit_code
            return replace(found, facts=replace(found.facts, exit_code=exit_code))
        if self.diagnosis and explained:
            sign = "run unfinished" if code == "0" else "as run"
            facts = Facts(sign, exit_code=self.run_code)
            return Diagnosis(self.diagnosis.cause, facts, self.diagnosis.actions)
        return end

    def _is_end_of_run(self, code: str) -> bool:
        # whether the job ended with this code because its run failed
        if not self.run or not self.run_code:
            return False
        if code == "0":
            # A notebook may let its runs be killed on purpose. They lie in its folder, which has
            # the job's name.
            return not any(
                folder.name.endswith(f"-{self.job_id}") for folder in self.run.run_dir.parents
            )
        return code != "2" or self.run_code == 2  # 2: a second trainer was refused, say

    def diagnose(self, refusals: str) -> Diagnosis:
        """The end with all traces as facts; `refusals`: why Slurm has no row of the job."""
        end = self.end()
        # The run knows rank 0 alone, which may have ended only because another rank failed.
        log_says_more = self.diagnosis is None or self.rank is not None
        shows_log = log_says_more and end.cause not in ("pending", "finished")
        facts = replace(
            end.facts,
            job={**self.row, "JobID": self.job_id, **end.facts.job},
            line="",  # `log_line` has it
            log_line=last_words(self.log) if shows_log else "",
            run_dir=str(self.run.run_dir) if self.run else "",
            unasked="" if self.row else refusals,
        )
        specific = {"resume": self.resumption}
        if self.log_path and not (self.run and self.run.paths.output.is_file()):
            # torchrun writes no output.log
            specific["read output"] = Action("read output", {"file": str(self.log_path)})
        return specified(replace(end, facts=facts, inner=self.diagnosis), specific)


def _log_path(job_id: str, row: dict[str, str], work_dir: Path) -> Path | None:
    """The job's log: slurm-NAME-JOBID.out of the job scripts, slurm-JOBID.out of sbatch itself."""
    if row.get("StdOut"):
        return Path(row["StdOut"])
    logs = [path for path in work_dir.glob("slurm-*.out") if path.stem.endswith(f"-{job_id}")]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def diagnose_job(job_id: str | int) -> Diagnosis:
    """Diagnose the end or wait of a Slurm job (id 123) or of one task of an array (123_4)."""
    name = str(job_id).strip()
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise InputError(f"--job: expected a Slurm job id such as 123 or 123_4, got {job_id!r}")
    rows, refusals = _ask(name)
    jobs = {row["JobID"]: row for row in rows if "." not in row["JobID"]}  # 123.0 is a step
    if len(jobs) > 1:
        raise InputError(
            f"--job: {name} is an array; expected one of its tasks, such as {' or '.join(jobs)}"
        )
    job_id_in_slurm, row = [*jobs.items(), (name, {})][0]  # without a row, the files alone
    job = _Job(job_id_in_slurm, row)
    if not (row or job.run or job.log):
        raise InputError(
            f"--job: nothing is left of job {name}: {refusals}; and {Path().resolve()} has no "
            f"runs/*-{name} and no slurm-*-{name}.out. Start this in the folder that you submitted from."
        )
    return job.diagnose(refusals)
