"""Promises of `attempt` and `folder`: each file is read once, and the end of a run is as quick
after weeks as after a minute."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import MB

from ogbnlib.config import TrainConfig
from ogbnlib.graph.store import open_store
from ogbnlib.runs.attempt import Attempt
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run

Config = Callable[..., TrainConfig]


def test_what_run_returns_is_what_its_folder_says(tiny_config: Config, tmp_path: Path) -> None:
    done = run(tiny_config(epochs=1), run_dir=tmp_path / "run", echo=False)
    found = Run.open(tmp_path / "run")
    for name in ("result", "diagnosis", "config", "exit_code", "peak_bytes", "held_peak_bytes"):
        assert getattr(found, name) == getattr(done, name)
    assert found.exit_code == 0
    assert found.rss_peak_bytes == done.rss_peak_bytes > 50 * MB
    # For peaks by phase see test_recorder.py: here another process may note a phase's time and
    # write it a sample later.
    assert found.record.parts == done.record.parts
    assert found.record.largest_parts == done.record.largest_parts
    assert repr(found) == f"Run('{tmp_path}/run', finished)"


def end(folder: Path, config: TrainConfig, *events: Any, code: int = 0, **more: Any) -> Run:
    """The result of an attempt that marked these events."""
    attempt = Attempt(Run(folder), config)
    for event in events:
        attempt.recorder.log.mark(event.pop("event"), **event)
    attempt.recorder.stop()
    return attempt.end(code, with_forecast=True, **more)


def test_a_result_names_its_job_for_the_job_script(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert end(tmp_path, tiny_config()).result["slurm_job"] == "7"


def test_the_forecast_check_takes_the_size_that_the_run_found(
    tiny_config: Config, tmp_path: Path
) -> None:
    config, size = tiny_config(), open_store(tiny_config().dataset).size
    files = end(tmp_path, config).result["forecast"]
    marked = {"event": "dataset", **asdict(size), "num_nodes": 1_000_000}
    run_ = end(tmp_path, config.replace(dataset="gone since"), marked).result["forecast"]
    assert run_["peak_bytes"]["predicted"] > files["peak_bytes"]["predicted"]
    gone = end(tmp_path, config.replace(dataset="gone since")).result["forecast"]
    assert "gone since" in gone["skipped"]


def test_an_outer_limits_kill_is_told_with_that_limit(tiny_config: Config, tmp_path: Path) -> None:
    outer = {"limit_bytes": 750 * MB, "cgroup": "/sys/fs/cgroup/memory/job"}
    more: Any = {"killed_by": "kernel", "oom_kills": 1, "outer_limit": outer, "code": 137}
    limit: Any = {"memory_limit_bytes": 4096 * MB, "limit_by": "cgroup v1"}
    own = end(tmp_path, tiny_config(), **limit, **more)
    facts = own.diagnosis.facts
    assert (facts.sign, facts.outer_limit.limit_bytes) == ("killed around", 750 * MB)
    assert facts.outer_limit.cgroup == "/sys/fs/cgroup/memory/job"
    assert "not for its own limit of 4.00 GB" in own.diagnosis.text
    assert "its own limit" not in end(tmp_path, tiny_config(), **more).diagnosis.text
