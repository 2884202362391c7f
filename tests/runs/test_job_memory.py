"""Promises of runs in a notebook's job: none takes more than the job has, and a requeued job
repeats none."""

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, write_run

from ogbnlib.config import TrainConfig
from ogbnlib.environment import AGAIN_VARIABLE
from ogbnlib.memory.cgroup import effective_limit
from ogbnlib.memory.reading import read_memory
from ogbnlib.memory.tree import Tree
from ogbnlib.notebook import compare_runs, forecast_table, loader_costs, plot_runs
from ogbnlib.runs import sandbox
from ogbnlib.runs.folder import Run
from ogbnlib.runs.names import next_run_dir
from ogbnlib.runs.sandbox import run, watch


class Started(Exception):
    """A child would have been started."""


@pytest.fixture
def config(synth_dir: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A config whose run ends in `Started` instead of a child."""

    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(sandbox, "_carry_out", start)
    return TrainConfig.create(dataset=str(synth_dir), loading="lazy", epochs=1, device="cpu")


def test_a_notebook_does_not_start_a_run_that_exceeds_its_job(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    where: dict[str, Any] = {"runs_dir": tmp_path, "echo": False}
    with pytest.raises(Started):
        run(config, name="fits", **where)
    # less than torch alone takes
    room_mb = -(-(read_memory(Tree(os.getpid())).held_bytes or 0) // MB) + 100
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(room_mb))
    assert effective_limit()[0] == room_mb * MB
    with pytest.raises(Started):
        run(config, name="script", **where)
    monkeypatch.setattr(sandbox, "in_notebook", lambda: True)
    monkeypatch.setattr(sandbox, "RUNTIME_BYTES", 40 * MB)  # the least limit of a trainer
    with pytest.raises(Started):
        run(config, "50 MB", name="own-limit", **where)  # its kill ends nothing else
    done = run(config, name="large", **where)
    assert (done.state, done.exit_code) == ("not started", None)
    assert Run.open(done.run_dir).state == "not started"
    text = capsys.readouterr().out
    facts = done.diagnosis.facts
    assert facts.limit_by == "Slurm --mem (SLURM_MEM_PER_NODE)"
    assert facts.sizes["room_bytes"] < facts.sizes["forecast_bytes"]
    assert str(done.diagnosis) in text
    assert "<- peak" in text
    table = compare_runs({"large": done})
    assert table.loc["large", "ended"] == "not started"
    assert table["peak GB"].isna().all()
    assert loader_costs(done).empty
    assert forecast_table({"large": done})["measured MB"].isna().all()
    assert done.rss_peak_bytes == 0
    assert "not started" in plot_runs({"large": done}).axes[0].get_title()


def test_a_notebook_executed_again_gets_the_same_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*codes: str) -> list[Run]:
        how: dict[str, Any] = {"name": "a", "runs_dir": tmp_path, "echo": False}
        return [watch(["-c", code], **how) for code in codes]

    assert [done.run_dir.name for done in ends("pass", "exit(1)")] == ["a", "a-2"]
    monkeypatch.setenv(AGAIN_VARIABLE, "1")
    again = ends("pass", "exit(1)", "exit(2)")
    assert [done.run_dir.name for done in again] == ["a", "a-2", "a-3"]
    assert [done.exit_code for done in again] == [0, 1, 2]
    assert [len([e for e in done.events if e["event"] == "start"]) for done in again] == [1, 1, 1]
    assert next_run_dir(tmp_path, "a", again=True).name == "a-4"
    # a caller's own folder is never one that exists
    assert next_run_dir(tmp_path, "a").name == "a-4"


def test_a_notebook_executed_again_continues_a_stopped_run(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AGAIN_VARIABLE, "1")
    values = config.model_dump()
    killed = write_run(tmp_path / "killed", exit_code=137, killed_by="kernel", config=values)
    assert run(config, name="killed", runs_dir=tmp_path).run_dir == killed
    write_run(tmp_path / "other", exit_code=0, config={**values, "seed": 7})
    write_run(tmp_path / "stopped", exit_code=75, config=values)
    write_run(tmp_path / "limits", exit_code=0, config=values, memory_limit_bytes=2**33)
    for name in ("other", "stopped", "limits"):
        with pytest.raises(Started):
            run(config, name=name, runs_dir=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["killed", "limits", "limits-2", "other", "other-2", "stopped"]
