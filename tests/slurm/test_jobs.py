"""Promises of the job scripts, on a real cluster: what is submitted runs, is killed, requeued and
explained.

Where only the script itself is in question, OGBNLIB_ACTIVATE names a file that puts a stand-in for
python or papermill in place of the real one; that is what the variable is for.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import same, wait_until, weights
from slurm_cluster import Cluster

from ogbnlib.config import TrainConfig
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run as run_alone

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
SMALL = ("--mem=1500", "--cpus-per-task=1", "--time=5")
LONG = ("device=cpu", "batch_size=16", "epochs=60")  # 9 s, in which a signal must find it at work
KILLS = int(os.environ.get("OGBNLIB_KILLS", "1"))
QUICK = ("device=cpu", "epochs=1", "batch_size=16")

Diagnose = Callable[[str], dict[str, Any]]
pytestmark = pytest.mark.slow


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder to submit from, with the job scripts and an environment to activate."""
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    unneeded = shutil.ignore_patterns("data", "runs")
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=unneeded)
    activate(tmp_path, f'export PATH="{Path(sys.executable).parent}:$PATH"')
    monkeypatch.setitem(slurm.env, "OGBNLIB_ACTIVATE", str(tmp_path / "activate"))
    monkeypatch.setitem(slurm.env, "PYTHONPATH", str(ROOT))
    return tmp_path


def activate(site: Path, text: str) -> None:
    (site / "activate").write_text(text + "\n")


def attempts(run: Path) -> int:
    """How many attempts a run has begun."""
    if not (run / "events.jsonl").is_file():
        return 0
    return sum(event["event"] == "start" for event in Run(run).events)


@pytest.fixture(scope="module")
def large_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """papers100M at four thousandths: 0.23 GB of features and 0.1 GB of edges, beyond any doubt at
    the limit below."""
    from ogbnlib.sources.synth import synthesize_store

    path = tmp_path_factory.mktemp("data") / "large"
    return synthesize_store(path, scale=0.004, feature_dtype="float32", progress=False).path


@pytest.fixture
def diagnose(slurm: Cluster, site: Path) -> Diagnose:
    def call(job_id: str) -> dict[str, Any]:
        argv = [sys.executable, "-m", "ogbnlib", "diagnose", "--job", job_id, "--json"]
        return json.loads(slurm.call(*argv, cwd=site).stdout)

    return call


def output(site: Path, job_id: str) -> str:
    (path,) = site.glob(f"slurm-*-{job_id}*.out")
    return path.read_text()


def test_a_first_submission_trains_with_the_resources_named_to_sbatch(
    slurm: Cluster, site: Path, tiny_store: Path, diagnose: Diagnose
) -> None:
    job_id = slurm.sbatch(*SMALL, "slurm/train.sbatch", f"dataset={tiny_store}", *QUICK, cwd=site)
    (job,) = slurm.wait(job_id)
    assert job["JobState"] == "COMPLETED", output(site, job_id)
    assert (job["MinMemoryNode"], job["NumCPUs"], job["TimeLimit"]) == ("1500M", "1", "00:05:00")
    run = site / "runs" / f"train-{job_id}"
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0
    assert TrainConfig.load(run / "config.json").batch_size == 16
    assert "Epoch 001 | Loss: " in output(site, job_id)
    found = diagnose(job_id)
    facts = found["facts"]
    assert (found["cause"], facts["job"]["State"]) == ("finished", "COMPLETED")
    assert facts["run_dir"] == str(run)


def test_a_job_killed_for_its_memory_is_out_of_memory_and_diagnose_names_phase_and_remedy(
    slurm: Cluster, site: Path, large_dir: Path, diagnose: Diagnose
) -> None:
    values = f"dataset={large_dir}", "loading=eager", "device=cpu"
    job_id = slurm.sbatch("--mem=640", "slurm/train.sbatch", *values, cwd=site)
    (job,) = slurm.wait(job_id)
    assert (job["JobState"], job["ExitCode"]) == ("OUT_OF_MEMORY", "0:125"), output(site, job_id)
    said = output(site, job_id)
    assert "exit code 137" in said
    assert f"python -m ogbnlib diagnose --job {job_id}" in said
    found = diagnose(job_id)
    assert found["cause"] == "out of memory"
    assert "memory of 640M" in str(found["text"])
    assert "go on with loading=store" in str(found["remedy"])
    assert "in phase '" in str(found["text"])


def test_an_array_trains_one_run_for_each_line_of_the_file(
    slurm: Cluster, site: Path, tiny_store: Path, diagnose: Diagnose
) -> None:
    (site / "params.txt").write_text('# two tasks\nlr=0.1 num_neighbors="2 1"\n\nlr=0.01')
    sweep = "--array=1-3", "slurm/sweep.sbatch", "params.txt"
    job_id = slurm.sbatch(*SMALL, *sweep, f"dataset={tiny_store}", *QUICK, cwd=site)
    states = {job["ArrayTaskId"]: job["JobState"] for job in slurm.wait(job_id)}
    assert states == {"1": "COMPLETED", "2": "COMPLETED", "3": "FAILED"}
    folders = [site / "runs" / f"sweep-{job_id}_{task}" for task in (1, 2)]
    configs = [TrainConfig.load(folder / "config.json") for folder in folders]
    assert [config.lr for config in configs] == [0.1, 0.01]
    assert [config.num_neighbors for config in configs] == [(2, 1), (3, 2)]
    assert "submit with --array=1-2" in output(site, f"{job_id}_3")
    causes = [diagnose(f"{job_id}_{task}")["cause"] for task in (1, 2, 3)]
    assert causes == ["finished", "finished", "bad input"]
    assert diagnose(f"{job_id}_2")["facts"]["run_dir"] == str(folders[1])


def test_a_requeued_task_of_an_array_leaves_the_others_alone(slurm: Cluster, site: Path) -> None:
    """The last task has the array's id as its SLURM_JOB_ID."""
    python = """python() {
        [[ $1 != -c ]] || { command python3 "$@"; return; }
        echo "$task" >> calls
        ((task == 1 || restart > 0)) || return 75
    }"""
    activate(site, python)
    (site / "params.txt").write_text("lr=0.1\nlr=0.01\n")
    job_id = slurm.sbatch(*SMALL, "--array=1-2", "slurm/sweep.sbatch", "params.txt", cwd=site)
    jobs = {job["ArrayTaskId"]: job for job in slurm.wait(job_id)}
    assert {job["JobState"] for job in jobs.values()} == {"COMPLETED"}
    assert {task: job["Restarts"] for task, job in jobs.items()} == {"1": "0", "2": "1"}
    assert sorted((site / "calls").read_text().split()) == ["1", "2", "2"]


def test_a_run_stopped_at_a_checkpoint_goes_back_to_the_queue_but_not_for_ever(
    slurm: Cluster, site: Path, diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(site, 'python() { echo "$*" >> calls; [[ $1 == -c ]] || return 75; }')
    monkeypatch.setitem(slurm.env, "OGBNLIB_MAX_RESTARTS", "1")
    job_id = slurm.sbatch(*SMALL, "slurm/train.sbatch", cwd=site)
    (job,) = slurm.wait(job_id)
    said = output(site, job_id)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "75:0", "1"), said
    assert "back in the queue for restart 1 of at most 1" in said
    assert "not requeued after 1 restarts" in said
    assert diagnose(job_id)["cause"] == "stopped at a checkpoint"


def test_a_notebook_takes_papermills_parameters_and_a_requeue_overwrites_no_executed_copy(
    slurm: Cluster, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    papermill = 'printf "%s\\n" "$@" > arguments; echo "attempt $restart" > "$2"; return 75'
    activate(site, f"papermill() {{ {papermill}; }}")
    monkeypatch.setitem(slurm.env, "OGBNLIB_MAX_RESTARTS", "1")
    monkeypatch.setitem(slurm.env, "PATH", f"{Path(sys.executable).parent}:{slurm.env['PATH']}")
    notebook = ("slurm/notebook.sbatch", "00_quickstart", "-p", "dataset", "a folder")
    job_id = slurm.sbatch(*SMALL, *notebook, cwd=site)
    (job,) = slurm.wait(job_id)
    folder = f"runs/00_quickstart-{job_id}"
    assert job["Restarts"] == "1", output(site, job_id)
    assert (site / folder / "00_quickstart.ipynb").read_text() == "attempt 0\n"
    assert (site / folder / "00_quickstart.restart1.ipynb").read_text() == "attempt 1\n"
    given = (site / "arguments").read_text().splitlines()
    assert given[0] == str(site / "notebooks" / "00_quickstart.ipynb")
    assert given[-3:] == ["-p", "dataset", "a folder"]
    assert f"{folder}/runs" in given


def test_a_mistake_in_the_arguments_is_named_in_the_output(slurm: Cluster, site: Path) -> None:
    jobs = []
    for script, argument in (("notebook", "99_nothing"), ("sweep", "nowhere.txt")):
        job_id = slurm.sbatch(*SMALL, f"slurm/{script}.sbatch", argument, cwd=site)
        jobs.append((job_id, f"got '{argument}'"))
    (site / "elsewhere").mkdir()
    elsewhere = slurm.sbatch(*SMALL, "../slurm/train.sbatch", cwd=site / "elsewhere")
    (site / "activate").unlink()
    job_id = slurm.sbatch(*SMALL, "slurm/train.sbatch", cwd=site)
    jobs.append((job_id, "OGBNLIB_ACTIVATE: expected a file"))
    for job_id, words in jobs:
        (job,) = slurm.wait(job_id)
        assert job["ExitCode"] == "2:0"
        assert words in output(site, job_id)
    (job,) = slurm.wait(elsewhere)
    assert job["ExitCode"] == "2:0"
    assert "submit from the folder that holds slurm/" in output(site / "elsewhere", elsewhere)


@pytest.mark.parametrize(
    "path",
    [*SCRIPTS, ROOT / "slurm" / "common.sh", ROOT / ".ci" / "run", ROOT / "tests" / "versions.sh"],
    ids=lambda p: p.name,
)
def test_a_script_passes_shellcheck(path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (Debian: apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_run_ended_at_any_moment_and_requeued_ends_with_the_weights_of_one_left_alone(
    slurm: Cluster, site: Path, tiny_store: Path
) -> None:
    """OGBNLIB_KILLS is how often each of three ends comes: the time limit's signal, a requeue, a
    kill; 15 s each."""
    moments, ended = random.Random(0), 0
    values = (f"dataset={tiny_store}", *LONG[:-1], "dropout=0.5", f"epochs={60 * KILLS}")
    job_id = slurm.sbatch(*SMALL[:2], "--time=60", "slurm/train.sbatch", *values, cwd=site)
    run = site / "runs" / f"train-{job_id}"
    for how in ("time limit", "requeue", "kill") * KILLS:
        wait_until(lambda before=ended: attempts(run) > before, "the next attempt")
        time.sleep(moments.uniform(0, 5))  # the imports take 3 s of it
        if slurm.jobs(job_id)[0]["JobState"] == "COMPLETED":
            break
        ended += 1
        # what --signal=B:USR1@120 sends, where waiting for the limit would take minutes
        if how == "time limit":
            slurm.call("scancel", "--batch", "--signal=USR1", job_id)
        elif how == "requeue":  # as preemption does: SIGTERM, and SIGKILL a little later
            slurm.call("scontrol", "requeue", job_id)
        else:
            slurm.call("scancel", "--full", "--signal=KILL", job_id)
            slurm.wait(job_id)
            slurm.call("scontrol", "requeue", job_id)
    (job,) = slurm.wait(job_id)
    said = output(site, job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", str(ended)), said
    assert ended >= 2 * KILLS
    assert "stopped at a checkpoint; back in the queue for restart 1" in said
    assert Run(run).metrics["epoch"].tolist() == list(range(1, 60 * KILLS + 1))
    config = TrainConfig.load(run / "config.json")
    run_alone(config, run_dir=site / "alone", echo=False)
    assert same(weights(run), weights(site / "alone"))


def test_a_cancelled_run_leaves_a_checkpoint_and_does_not_come_back(
    slurm: Cluster, site: Path, tiny_store: Path, diagnose: Diagnose
) -> None:
    job_id = slurm.sbatch(*SMALL, "slurm/train.sbatch", f"dataset={tiny_store}", *LONG, cwd=site)
    run = site / "runs" / f"train-{job_id}"
    wait_until((run / "checkpoint.pt").exists, "the first checkpoint")
    slurm.call("scancel", job_id)
    (job,) = slurm.wait(job_id)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    wait_until(lambda: "ended by Slurm" in output(site, job_id), "the script's last word")
    found = diagnose(job_id)
    assert found["cause"] == "cancelled"
    command = f"sbatch slurm/train.sbatch --run-dir runs/train-{job_id} --resume"
    assert f"`{command}`" in str(found["remedy"])
    assert json.loads((run / "result.json").read_text())["exit_code"] == 75
    # as it is said, with memory per CPU and three epochs more than there are already
    arguments = [*command.split()[1:], f"epochs={len(Run(run).metrics) + 3}"]
    again = slurm.sbatch("--mem-per-cpu=1500", *SMALL[1:], *arguments, cwd=site)
    (job,) = slurm.wait(again)
    assert job["JobState"] == "COMPLETED", output(site, again)
    assert not (site / "runs" / f"train-{again}").exists()
    assert "no checkpoint" not in output(site, again)
    found = diagnose(again)
    assert (found["cause"], found["facts"]["run_dir"]) == ("finished", str(run))


def test_a_signal_before_python_listens_sends_the_job_back_to_the_queue_once(
    slurm: Cluster, site: Path, diagnose: Diagnose
) -> None:
    """A lead of --signal not shorter than --time does so in every attempt: the second one says what
    is wrong."""
    activate(site, "python() { [[ $1 == -c ]] || exec sleep 60; }")
    job_id = slurm.sbatch(*SMALL, "slurm/train.sbatch", "dataset=d", cwd=site)
    log = site / f"slurm-train-{job_id}.out"
    wait_until(log.exists, "the log")
    for restart in (0, 1):
        wait_until(lambda n=restart: log.read_text().count("the run is in") > n, "the attempt")
        slurm.call("scancel", "--batch", "--signal=USR1", job_id)
    (job,) = slurm.wait(job_id)
    said = output(site, job_id)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "138:0", "1"), said
    assert "not requeued, as every attempt would stop so early" in said
    assert diagnose(job_id)["cause"] == "SIGUSR1"


def test_ranks_find_their_environment_in_a_job_that_was_given_none(
    slurm: Cluster, site: Path, tiny_store: Path
) -> None:
    (site / ".venv" / "bin").mkdir(parents=True)
    (site / "activate").rename(site / ".venv" / "bin" / "activate")
    how = "--mem=2500", *SMALL[1:], "--export=NONE"
    job_id = slurm.sbatch(*how, "slurm/train_ddp.sbatch", f"dataset={tiny_store}", *QUICK, cwd=site)
    (job,) = slurm.wait(job_id)
    assert job["JobState"] == "COMPLETED", output(site, job_id)


def test_a_notebook_runs_and_its_runs_lie_beside_the_executed_copy(
    slurm: Cluster, site: Path, diagnose: Diagnose
) -> None:
    job_id = slurm.sbatch(
        "--mem=4000", *SMALL[1:], "slurm/notebook.sbatch", "00_quickstart", "-p", "scale", "0.0005",
        "-p", "epochs", "1", cwd=site,
    )  # fmt: skip
    (job,) = slurm.wait(job_id)
    folder = site / "runs" / f"00_quickstart-{job_id}"
    assert job["JobState"] == "COMPLETED", output(site, job_id)
    book = nbformat.read(folder / "00_quickstart.ipynb", as_version=4)
    assert any(cell.get("outputs") for cell in book.cells)
    assert (folder / "runs" / "00-shared" / "result.json").is_file()
    assert diagnose(job_id)["cause"] == "finished"


def test_several_processes_stop_at_a_checkpoint_and_resume(
    slurm: Cluster, site: Path, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(slurm.env, "OGBNLIB_PROCESSES_PER_NODE", "1")
    job_id = slurm.sbatch(
        "--mem=2500", "--cpus-per-task=2", "--time=5", "--nodes=2", "slurm/train_ddp.sbatch", f"dataset={tiny_store}",
        *LONG[:-1], "epochs=25", cwd=site,
    )  # fmt: skip
    run = site / "runs" / f"train_ddp-{job_id}"
    wait_until((run / "checkpoint.pt").exists, "the first checkpoint")
    slurm.call("scancel", "--batch", "--signal=USR1", job_id)
    (job,) = slurm.wait(job_id)
    said = output(site, job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), said
    assert "Epoch 025 | Loss: " in said
    assert [event["ranks"] for event in Run(run).events if "ranks" in event] == [2, 2]
