"""Promises of `jobs`: each way a Slurm job ends is told apart, with whatever is left to read. The
tables are recordings of Slurm 22.05 with slurmdbd; PREEMPTED and NODE_FAIL, which one machine can't
produce, follow sacct's manual page."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MB, write_run
from test_texts import TEXTS

from ogbnlib.errors import InputError
from ogbnlib.runs.slurm import diagnose_job

FIELDS = "JobID|JobIDRaw|State|ExitCode|DerivedExitCode|ReqMem|MaxRSS|Elapsed|Timelimit|NodeList|Reason|WorkDir"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"
DISABLED = "Slurm accounting storage is disabled"

Says = Callable[..., None]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Puts a sacct and a scontrol first on PATH that print a recording, or fail with a message
    ("!...")."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(*, sacct: str = f"!{DISABLED}", scontrol: str = f"!{UNKNOWN}") -> None:
        for name, text in (("sacct", sacct), ("scontrol", scontrol)):
            failing = text.startswith("!")
            (folder / f"{name}.txt").write_text(text.removeprefix("!") + "\n")
            lines = f'#!/bin/sh\necho "$@" >> "{folder}/{name}.args"\n'
            lines += f'cat "{folder}/{name}.txt"' + (" >&2; exit 1\n" if failing else "\n")
            (folder / name).write_text(lines)
            (folder / name).chmod(0o755)

    return install


def table(*rows: str) -> str:
    """Recorded rows under the header; WORK stands for the present directory."""
    return "\n".join([FIELDS, *rows]).replace("WORK", os.getcwd())


# the recorded state, exit code and memory; cause, actions
ENDINGS = {
    "COMPLETED|0:0|0:0|1000M": ("finished", []),
    "OUT_OF_MEMORY|0:125|0:0|300M": ("out of memory", ["raise limit", "less memory", "resume"]),
    "FAILED|1:0|0:0|1G": ("error", ["read output"]),
    "FAILED|0:11|0:0|1000M": ("error", ["run without workers"]),
    "RUNNING|0:0|0:0|1000M": ("running", ["ask Slurm"]),
    "TIMEOUT|0:0|0:0|1000M": ("time limit", ["resume", "raise limit"]),
    "CANCELLED by 0|0:0|0:0|1000M": ("cancelled", ["resume"]),
    "PREEMPTED|0:0|0:0|1G": ("preempted", ["resume"]),
    "NODE_FAIL|0:0|0:0|1G": ("node failure", ["resume"]),
    "FAILED|75:0|0:0|1G": ("stopped at a checkpoint", ["resume"]),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_ending_that_accounting_shows_is_told_apart(
    says: Says, tmp_path: Path, ending: str
) -> None:
    cause, actions = ENDINGS[ending]
    says(sacct=table(f"2|2|{ending}||00:00:09|01:00:00|n0|None|WORK"))
    found = diagnose_job(2)
    assert (found.cause, found.facts.job["ReqMem"]) == (cause, ending.split("|")[3])
    assert [action.id for action in found.actions] == actions
    assert not found.facts.unasked
    assert cause == "finished" or f"Next: {found.remedy}." in found.text
    asked = (tmp_path / "bin" / "sacct.args").read_text()
    assert asked.startswith("-X -j 2 --parsable2 --format=JobID,State,ExitCode,")


def shown(**values: str) -> str:
    """A line of `scontrol --oneliner show job` with the recorded names."""
    known = {"JobId": "2", "JobName": "train", "JobState": "COMPLETED", "Reason": "None"}
    known |= {"Restarts": "0", "ExitCode": "0:0", "RunTime": "00:00:07", "TimeLimit": "01:00:00"}
    known |= {"NodeList": "n0", "CPUs/Task": "1"}
    known |= {"MinMemoryNode": "300M", "Command": "/a path/x.sbatch a=b", "WorkDir": os.getcwd()}
    return " ".join(f"{name}={value}" for name, value in (known | values).items())


TORCHRUN = """ogbnlib: job 2, restart 0, on n[0-1], in /x
E1122 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 12105)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_13:47:34
  host      : localhost
  rank      : 1 (local_rank: 0)
  exitcode  : -9 (pid: 12105)  (SIGKILL)
  error_file: <N/A>
rank 0 ended, as another one did
"""
OOM_LINE = "slurmstepd-n0: error: Detected 1 oom-kill event(s) in StepId=2.0. Some of your\n"
RANK_OUT_OF_MEMORY = TORCHRUN + OOM_LINE + "srun: error: n0: task 0: Out Of Memory\n"
STEP_CANCELLED = "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-21T11:23:02 ***\n"
REQUEUED = "ogbnlib: stopped at a checkpoint; back in the queue for restart 1 of at most 20\n"
LOG_FILE = "slurm-train-2.out"
BEGIN = "ogbnlib: job 2, restart {}, on n0, in /x\n"
FAILED = {"JobState": "FAILED", "ExitCode": "1:0"}
HIT = "slurmstepd: StepId=2.batch hit memory limit at least once during execution.\n"
NOT_REQUEUED = "ogbnlib: not requeued, as every attempt would stop so early\n"
SEEN_THROUGH: dict[str, tuple[dict[str, str] | None, str, int | None, str, str, str, list[str]]] = {
    # what scontrol shows, the log, the run's exit code; cause, sign, process, actions
    "a rank out of memory": (FAILED, RANK_OUT_OF_MEMORY, 1, "out of memory", "OUT_OF_MEMORY", "",
                             ["raise limit", "less memory", "resume"]),
    "a rank out of memory, from the log alone": (
        None, RANK_OUT_OF_MEMORY + STEP_CANCELLED, 1, "out of memory", "OUT_OF_MEMORY", "",
        ["raise limit", "less memory", "resume"]),
    "a killed rank": (FAILED, TORCHRUN + STEP_CANCELLED, 1, "SIGKILL, cause unknown", "137", "rank 1",
                      ["find sender", "resume"]),
    "a diverged run": ({"JobState": "FAILED", "ExitCode": "77:0"}, "", 77, "diverged", "as run", "",
                      ["check data", "resume"]),
    "a job that is not requeued": ({"JobState": "FAILED", "ExitCode": "75:0"}, NOT_REQUEUED, 75,
                                   "stopped at a checkpoint", "as run", "", ["resume"]),
    "requeued": ({"JobState": "PENDING", "Reason": "BeginTime"}, REQUEUED, 75, "pending", "PENDING", "", ["ask Slurm"]),
    "a shell's exit code 2": ({"JobState": "FAILED", "ExitCode": "2:0"}, "ls: cannot access '/data'\n", None, "error",
                              "other 2", "", ["read output"]),
    "a killed run in a job with exit code 0": ({"JobState": "COMPLETED"}, "", 137, "SIGKILL, cause unknown",
                                               "run unfinished", "", ["find sender", "resume"]),
    "a killed child in a job with exit code 0": ({"JobState": "COMPLETED"}, "done\n" + OOM_LINE, 0, "out of memory",
                                                 "OUT_OF_MEMORY", "", ["raise limit", "less memory", "resume"]),
    "a limit met by the page cache": ({"JobState": "COMPLETED"}, HIT, 0, "finished", "0", "", []),
    "the controller alone": ({"JobState": "OUT_OF_MEMORY", "ExitCode": "0:125"}, "", None, "out of memory",
                             "OUT_OF_MEMORY", "", ["raise limit", "less memory", "resume"]),
    "a code of the controller alone": ({"JobState": "FAILED", "ExitCode": "141:0"}, "", None, "error", "141", "",
                                       ["read output"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN_THROUGH)
def test_log_and_run_say_more_than_the_exit_code(says: Says, name: str) -> None:
    values, log, exit_code, cause, *expected = SEEN_THROUGH[name]
    Path(LOG_FILE).write_text(log)
    if exit_code is not None:
        write_run(Path("runs/train-2"), exit_code=exit_code)
    says(**({} if values is None else {"scontrol": shown(**values)}))
    found = diagnose_job("2")
    if values is not None:  # without accounting the controller is asked
        assert (found.facts.unasked, found.facts.job["ReqMem"]) == ("", "300M")
    actions = [action.id for action in found.actions]
    assert found.cause == cause, found.text
    assert [found.facts.sign, found.facts.who, actions] == expected
    assert "= " not in found.text
    if "read output" in actions:
        assert Path(found.actions[0].arguments["file"]).name == LOG_FILE


@pytest.mark.parametrize("state", ["TIMEOUT", "FAILED"])
def test_every_remedy_goes_on_in_another_job(says: Says, state: str) -> None:
    write_run(Path("runs/train-1"), exit_code=75 if state == "FAILED" else None)
    (Path("runs/train-1") / "config.json").touch()
    # A job that went on with the run of another one, which its log names.
    Path(LOG_FILE).write_text(f"{BEGIN.format(0)}ogbnlib: the run is in runs/train-1\n")
    says(scontrol=shown(JobState=state, ExitCode="75:0" if state == "FAILED" else "0:15"))
    found = diagnose_job("2")
    assert "`sbatch slurm/train.sbatch --run-dir runs/train-1 --resume`" in found.remedy
    assert "ogbnlib train" not in found.text


def test_a_run_killed_by_its_own_limit_is_out_of_memory(says: Says) -> None:
    killed = {"killed_by": "kernel", "oom_kills": 1, "memory_limit_bytes": 256 * MB}
    write_run(Path("runs/train-2"), exit_code=137, **killed)
    says(scontrol=shown(JobState="FAILED", ExitCode="137:0"))
    found = diagnose_job("2")
    assert (found.cause, found.facts.job["State"]) == ("out of memory", "FAILED")
    assert (found.inner and found.inner.facts.memory_limit_bytes) == 256 * MB


def test_of_an_array_one_task_is_diagnosed(says: Says) -> None:
    rest = "0:0|1000M||00:00:00|01:00:00|n1|None|WORK"
    rows = [f"9_0|13|COMPLETED|0:0|{rest}", f"9_1|9|FAILED|1:0|{rest}"]
    rows += ["9_1.batch|9.batch|FAILED|1:0|||3296K|00:00:00||n1||"]
    says(sacct=table(*rows))
    with pytest.raises(InputError, match=r"9 is an array; .* 9_0 or 9_1"):
        diagnose_job("9")
    says(sacct=table(*rows[1:]))
    found = diagnose_job("9_1")
    assert (found.cause, found.facts.job["JobID"]) == ("error", "9_1")


STEPD = "slurmstepd-n0: error: *** JOB 2 ON n0 CANCELLED AT 2026-11-21T11:23:02 "
OUTPUTS = {
    "time limit": STEPD + "DUE TO TIME LIMIT ***\n",
    "pending": STEPD + "DUE TO JOB REQUEUE ***\n",
    "cancelled": STEPD + "***\n",
    "out of memory": OOM_LINE,
    # an earlier attempt's end is not taken for the last one's
    "finished": f"{STEPD}DUE TO TIME LIMIT ***\n{BEGIN.format(1)}Epoch 002\n",
}


@pytest.mark.parametrize("cause", OUTPUTS)
def test_files_are_enough_where_slurm_has_forgotten_the_job(says: Says, cause: str) -> None:
    Path(LOG_FILE).write_text(f"{BEGIN.format(0)}Epoch 001\n{OUTPUTS[cause]}")
    if cause == "finished":
        write_run(Path("runs/train-2"), exit_code=0)
    says()
    found = diagnose_job("2")
    assert found.cause == cause
    assert DISABLED in found.facts.unasked


def test_without_slurm_the_runs_files_are_read_and_that_is_said(
    says: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    write_run(Path("runs/sweep-2_7"), exit_code=137)
    found = diagnose_job("2_7")
    assert found.cause == "SIGKILL, cause unknown"
    assert "sacct is not installed here" in found.facts.unasked


def test_a_job_without_any_trace_is_refused_with_the_reasons(says: Says) -> None:
    says()
    with pytest.raises(InputError, match=f"job 2: sacct: {DISABLED}; scontrol: {UNKNOWN}"):
        diagnose_job("2")


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("reason", ["JobHeldUser", "Priority"])
def test_a_job_waits_for_the_controllers_reason(says: Says, reason: str, is_recorded: bool) -> None:
    says(scontrol=shown(JobState="PENDING", Reason=reason))
    if is_recorded:  # accounting keeps the reason of an earlier wait
        row = "2|2|PENDING|0:0|0:0|1G||00:00:00|01:00:00|None assigned|None|WORK"
        says(sacct=table(row), scontrol=shown(JobState="PENDING", Reason=reason))
    found = diagnose_job("2")
    assert (found.cause, found.facts.job["Reason"]) == ("pending", reason)
    assert "scontrol show job 2" in found.remedy


def of_jobs(run_dir: Path, *attempts: tuple[str, int]) -> None:
    """A run with an attempt of each job, and the exit code that it ended with."""
    starts = {"time_s": 1.0, "event": "start"}
    events = [{**starts, "slurm_job": job} for job, _ in attempts]
    write_run(run_dir, exit_code=attempts[-1][1], events=events)


def test_a_job_is_described_by_its_own_attempt(says: Says) -> None:
    Path(LOG_FILE).write_text("ogbnlib: the run is in runs/train-2\n")
    of_jobs(Path("runs/train-2"), ("2", 76), ("3", 0))
    says(scontrol=shown(JobState="FAILED", ExitCode="76:0"))
    found = diagnose_job("2")
    assert (found.cause, found.inner) == ("out of GPU memory", None)  # a later job has the run
    # an array's task, and a job requeued after another one had the run
    of_jobs(Path("runs/train-2"), ("2", 75), ("3", 77), ("2", 0))
    says(scontrol=shown())
    assert diagnose_job("2").cause == "finished"


def test_the_refusal_of_a_second_trainer_is_shown(says: Says) -> None:
    of_jobs(Path("runs/train-1"), ("1", 0))
    refusal = "error: runs/train-1: it is being trained in by process 7 on n0"
    log = f"{BEGIN.format(0)}ogbnlib: the run is in runs/train-1\n{refusal}\n"
    Path(LOG_FILE).write_text(log)
    for code, cause in {"2:0": "bad input", "1:0": "error"}.items():
        says(scontrol=shown(JobState="FAILED", ExitCode=code))
        found = diagnose_job("2")
        assert (found.cause, found.facts.log_line) == (cause, refusal)


@pytest.mark.parametrize("name", ["a worker", "torch on the CPU", "a rank", "shared memory"])
def test_a_text_in_a_jobs_log_has_its_pasted_cause(says: Says, name: str) -> None:
    text, cause, *_ = TEXTS[name]
    Path("slurm-2.out").write_text(f"Epoch 1\n{text}\n")
    says(scontrol=shown(**FAILED))
    assert diagnose_job("2").cause == cause
