"""Promises of the command line: the run's exit codes, one sentence for a mistake, JSON alone."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MB, cli, official_csv, raw_arrays, tree, write_run

from ogbnlib.__main__ import _COMPUTE, app, main
from ogbnlib.config import TrainConfig
from ogbnlib.sources.ogb import open_raw


def inside(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in this process: the start of another one takes a second."""
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with contextlib.chdir(cwd or Path.cwd()), streams[0], streams[1]:
        code = main([*arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


TINY = ["--set", "epochs=1", "--set", "batch_size=16", "--set", "device=cpu"]


def test_train_ends_with_0_and_resumes_with_the_runs_values(
    tiny_store: Path, tmp_path: Path
) -> None:
    run = ["train", "--run-dir", str(tmp_path)]
    done = cli(*run, "--set", f"dataset={tiny_store}", *TINY, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "result.json").read_text())
    assert json.loads(done.stdout)["exit_code"] == 0
    done = cli(*run, "--resume", "--set", "epochs=2")
    assert done.returncode == 0, done.stderr
    assert "Epoch 002 | Loss: " in done.stdout
    assert "Epoch 001" not in done.stdout
    assert TrainConfig.load(tmp_path / "config.json").batch_size == 16


def test_train_ends_with_137_when_the_child_is_killed(tiny_store: Path, tmp_path: Path) -> None:
    arguments = ["--set", f"dataset={tiny_store}", *TINY, "--memory-limit", "500 MB"]
    arguments += ["--set", "hidden_channels=1000000"]
    done = cli("train", "--run-dir", str(tmp_path / "run"), *arguments)
    assert done.returncode == 137
    assert "Killed by" in done.stdout
    assert str(tmp_path / "run") in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["doctor", "status .", "convert a b"])
def test_a_deleted_working_folder_is_named(tmp_path: Path, command: str) -> None:
    (tmp_path / "gone").mkdir()
    argv = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone")]
    argv += [sys.executable, "-m", "ogbnlib", *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: working folder: ")


def test_diagnose_prints_the_paragraph_or_its_json_and_changes_nothing(tmp_path: Path) -> None:
    kill = {"killed_by": "kernel", "oom_kills": 1, "memory_limit_bytes": 256 * MB}
    run = write_run(tmp_path / "run", exit_code=137, **kill)
    before = tree(tmp_path)
    text, as_json = inside("diagnose", str(run)), inside("diagnose", str(run), "--json")
    assert (text.returncode, as_json.returncode) == (0, 0)
    assert json.loads(as_json.stdout)["text"] == text.stdout.strip()
    assert json.loads(as_json.stdout)["cause"] == "out of memory"
    assert tree(tmp_path) == before


def test_plan_says_what_fits_and_its_json_is_json_alone() -> None:
    arguments = ["plan", "--set", "loading=eager", "--memory-limit", "128 GB"]
    text, as_json = inside(*arguments), inside(*arguments, "--json")
    assert (text.returncode, as_json.returncode) == (1, 1)
    facts = json.loads(as_json.stdout)
    assert (facts["dataset"], facts["verdict"]) == ("ogbn-papers100M", "WILL NOT FIT")
    assert "WILL NOT FIT" in text.stdout
    assert facts["sbatch"] in text.stdout
    assert text.stderr + as_json.stderr == ""
    assert inside("plan", "--memory-limit", "128 GB").returncode == 0
    assert inside("plan", "--set", "loading=eager").returncode == 0


def test_what_is_given_beside_a_file_of_parameters_wins(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("loading: eager\nmemory_limit: 128 GB\n")
    arguments = ["plan", "--config", str(tmp_path / "mine.yaml"), "--json"]
    assert json.loads(inside(*arguments).stdout)["verdict"] == "WILL NOT FIT"
    assert json.loads(inside(*arguments, "--set", "loading=shared").stdout)["verdict"] == "FITS"
    facts = json.loads(inside(*arguments, "--memory-limit", "512 GB").stdout)
    assert (facts["verdict"], facts["run_s"] > 0) == ("FITS", True)


def test_plan_prints_the_ladder() -> None:
    text, as_json = inside("plan", "--ladder"), inside("plan", "--ladder", "--json")
    assert (text.returncode, as_json.returncode) == (0, 0)
    rungs = json.loads(as_json.stdout)["rungs"]
    assert [rungs[0]["you have"], rungs[-1]["you have"]] == ["512 GB", "4 GB"]
    for rung in rungs:
        assert rung["you have"] in text.stdout


def test_few_addresses_are_refused_where_torch_or_numba_is_imported(
    tmp_path: Path, tiny_store: Path
) -> None:
    def limited(command: str, kilobytes: int) -> subprocess.CompletedProcess[str]:
        argv = [f"ulimit -v {kilobytes}; exec {sys.executable} -{command}"]
        one = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy takes addresses for each thread
        return subprocess.run(
            ["bash", "-c", *argv], cwd=tmp_path, env=one, capture_output=True, text=True
        )

    for command in _COMPUTE:
        done = limited(f"m ogbnlib {command}", 1_000_000)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("error: ulimit -v: expected at least 2.00 GB")
    light = {
        "watch": "--run-dir run -- true",
        "status": "run",
        "diagnose": "run",
        "verify": str(tiny_store),
        "notebooks": "new",
        "download": "--help",
    }
    for command, arguments in light.items():
        assert limited(f"m ogbnlib {command} {arguments}", 300_000).returncode == 0, command
    code = "import ogbnlib as o; o.run(o.TrainConfig.create(dataset='none'), run_dir='new')"
    assert "ulimit -v: expected at least 2.00 GB" in limited(f'c "{code}"', 1_000_000).stderr
    callbacks = [entry.callback for entry in app.registered_commands]
    assert {one.__name__ for one in callbacks if one} == {*_COMPUTE, *light}


def test_doctor_reports_each_check_and_a_fix_for_each_failure() -> None:
    done = inside("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    names = {check["name"] for check in report["checks"] if check["result"]}
    assert names >= {"packages", "memory limit", "limit by", "/dev/shm", "disk"}
    assert report["ok"] != any(check["fix"] for check in report["checks"])


def test_an_official_name_is_downloaded_by_its_command_alone(
    tiny_dir: Path, tmp_path: Path
) -> None:
    done = inside("convert", "ogbn-arxiv", "new", cwd=tmp_path)
    assert "python -m ogbnlib download ogbn-arxiv" in done.stderr
    assert not (tmp_path / "new").exists()
    arrays = raw_arrays(tiny_dir)
    official_csv(tmp_path / "dataset", **arrays, splits=open_raw(tiny_dir).read_splits())
    done = inside("download", "ogbn-arxiv", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["path"] == "dataset/ogbn_arxiv"
    done = inside("convert", "ogbn-arxiv", "new", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_nodes"] == len(arrays["x"])
