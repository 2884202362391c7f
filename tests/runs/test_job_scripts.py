"""Promises of slurm/common.sh that need no cluster: a script goes on where its log can't be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(
    folder: Path, python: str, log: str, call: str = "train.sbatch dataset=d", **job: str
) -> subprocess.CompletedProcess[str]:
    """Run a job script with this shell function as python, its output sent to `log`."""
    (folder / "activate").write_text(f"{python}\nscontrol() {{ echo $* >> scontrol; }}\n")
    name, _, _ = call.partition(".")
    job |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "5", "SLURM_JOB_NAME": name}
    own = {"OGBNLIB_ACTIVATE": str(folder / "activate"), "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **job, **own}
    argv = ["bash", "-c", f'bash "{ROOT}/slurm/"{call} >{log} 2>{log}']
    return subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("log", ["log", "/dev/full"])
def test_a_full_log_keeps_no_stopped_run_from_the_queue(tmp_path: Path, log: str) -> None:
    done = script(tmp_path, "python() { [[ $1 == -c ]] || return 75; }", log)
    assert done.returncode == 75
    assert (tmp_path / "scontrol").read_text() == "requeue 5\n"


@pytest.mark.parametrize(("job", "code"), [("5", 75), ("4", 1), (None, 75)])
def test_an_end_that_another_job_wrote_is_not_taken_for_ones_own(
    tmp_path: Path, job: str | None, code: int
) -> None:
    """torchrun turns the refusal of a second trainer into 1, and meanwhile the first one ends."""
    result = json.dumps({"exit_code": 75, "slurm_job": job})
    python = 'python() { if [[ $1 == -c ]]; then command python3 "$@"; else '
    python += f"echo '{result}' >runs/train-5/result.json; return 1; fi; }}"
    done = script(tmp_path, python, "log")
    assert done.returncode == code, (tmp_path / "log").read_text()


def test_a_line_of_a_sweep_with_an_open_quote_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.txt").write_bytes(b'lr=1\r\nnum_neighbors="3 2\r\n')
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    python = f'python() {{ "{sys.executable}" "$@"; }}'
    done = script(tmp_path, python, "log", f"sweep.sbatch params.txt dataset={tmp_path}", **task)
    assert done.returncode == 2
    words = "params.txt: expected KEY=VALUE with quotes in pairs for task 2, found"
    assert words in (tmp_path / "log").read_text()
