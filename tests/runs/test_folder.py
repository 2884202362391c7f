"""Promises of `run_dir`: one process at a time trains in a folder, each file is read once, and what
`run` returns is what the folder says."""

import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, Config, python_child, tree, write_run

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.graph.store import open_store
from ogbnlib.memory.growth import Growth
from ogbnlib.memory.record import METRIC_COLUMNS
from ogbnlib.notebook import compare_runs
from ogbnlib.runs.attempt import Attempt
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.training.train import train

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom ogbnlib.runs.attempt import lock_of\n"
    "with lock_of(Path(sys.argv[1])):\n    print('ready', flush=True)\n    time.sleep(600)\n"
)


def test_a_second_trainer_is_refused_and_changes_nothing(
    tiny_config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(tiny_config(epochs=1), folder)
    with python_child(HOLD, str(folder)) as holder:
        before = tree(folder)
        words = re.escape(f"{folder}: it is being trained in by process {holder.pid} on ")
        for start in (train, run):
            with pytest.raises(InputError, match=words):
                start(tiny_config(epochs=2), run_dir=folder, resume=True)
        assert tree(folder) == before
    # it was killed, so nothing holds the folder any more
    train(tiny_config(epochs=2), folder, resume=True)


def test_resuming_in_an_empty_folder_starts_a_run(
    tiny_config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, folder = tiny_config(epochs=1), tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(InputError, match="expected a new or empty folder, found other files"):
        train(config, folder, resume=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    train(config, folder, resume=True)
    assert f"{folder}: no checkpoint to resume from" in capfd.readouterr().out
    with pytest.raises(InputError, match="expected a new or empty folder, found a run in it"):
        train(config, folder)
    train(config.replace(epochs=2), folder, resume=True)  # the same command goes on
    assert "no checkpoint" not in capfd.readouterr().out
    assert Run(folder).metrics["epoch"].tolist() == [1, 2]


METRICS = ",".join(METRIC_COLUMNS)
METRICS += "\n1,1.5,,0.5,0.4,1.0,0.1,,0.4,0.3\n2,1.2,,0.6,0.5,1.0,0.1,,0.5,0.4\n"


def everything(folder: Path) -> str:
    """All that `diagnose` and the pictures read of a run."""
    found = Run.open(folder)
    names = "result config metrics timeline phases parts peak_bytes held_peak_bytes rss_peak_bytes"
    return f"{found} {[getattr(found, name) for name in names.split()]} {found.diagnosis}"


@pytest.mark.parametrize("name", ["config.json", "result.json", "metrics.csv", "timeline.csv"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\x00" * len(data),
        lambda data: data.replace(b"1", b"x"),
        lambda data: data.replace(b"\n", b",more\n", 1),
        lambda data: b"[" * 200_000,
        lambda data: data.replace(b"10", b"1e400", 2),
        None,
    ],
    ids=["half", "zeros", "letters", "a column more", "brackets", "infinite", "a pipe"],
)
def test_a_damaged_file_of_a_run_is_no_traceback(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes] | None
) -> None:
    peaks: dict[str, Any] = {"peak_bytes": 2**20, "sampled_peaks_bytes": {"held_bytes": 2**20}}
    folder = write_run(tmp_path / "run", **peaks)
    (folder / "metrics.csv").write_text(METRICS)
    everything(folder)
    whole = (folder / name).read_bytes()
    if spoil is None:
        (folder / name).unlink()
        os.mkfifo(folder / name)
    else:
        (folder / name).write_bytes(spoil(whole))
        if spoil(whole) == whole:
            return
    words = f"{folder / name}: {'' if spoil else 'expected a file'}"
    with pytest.raises(InputError, match=re.escape(words)):
        everything(folder)


COMMAND = {"command": ["python", "x.py"], "previous": {"duration_s": 3.0}}
KINDS: list[dict[str, Any]] = [
    {"event": "start", "memory_limit_bytes": 100, **COMMAND},
    {"event": "begin", "phase": "train epoch", "epoch": 1, "held_bytes": 5, "rss_bytes": 6},
    {"event": "part", "name": "features", "bytes": 5},
    {"event": "cuda", "allocated_bytes": 5, "reserved_bytes": 6},
    {"event": "cuda_oom", "message": "CUDA", "requested_bytes": 5, "alloc_retries": 2},
    {"event": "mark", "name": "epoch", "held_bytes": 5, "info": {}},
    {"event": "end", "phase": "train epoch", "held_bytes": 5, "peak_rss_bytes": 6},
    {"event": "rank ended", "rank": 1, "exit_code": 9, "pid": 4},
    {"event": "of a later version", "x": 1},
]


@pytest.mark.parametrize(
    "value",
    ["x", {"a": 1}, 1e400, 10**400, "\ud800"],
    ids=["a text", "an object", "infinite", "too large", "half a character"],
)
def test_an_event_of_another_version_is_no_traceback(tmp_path: Path, value: object) -> None:
    for event in KINDS:
        for name in event:
            events = [{"time_s": 100.0 + i, **one} for i, one in enumerate(KINDS)]
            events[KINDS.index(event)][name] = value
            run = write_run(tmp_path / f"{KINDS.index(event)} {name}", exit_code=76, events=events)
            everything(run)
            assert len(Run(run).phase_memory) <= 1


@pytest.mark.parametrize("number", ["inf", "1e400", "1" * 400])
@pytest.mark.parametrize("name", ["timeline.csv", "metrics.csv"])
def test_a_number_too_large_in_a_column_is_named(tmp_path: Path, name: str, number: str) -> None:
    path = write_run(tmp_path / "run", exit_code=None) / name
    (tmp_path / "run" / "metrics.csv").write_text(METRICS)
    header, first, *rest = path.read_text().splitlines()
    for i in range(1, header.count(",") + 1):
        values = first.split(",")
        values[i] = number
        path.write_text("\n".join([header, ",".join(values), *rest, ""]))
        with pytest.raises(InputError, match=f"^{path}: expected the columns "):
            everything(tmp_path / "run")


def test_a_table_takes_a_result_that_someone_edited(tmp_path: Path) -> None:
    edited: dict[str, Any] = {"duration_s": None, "memory_limit_bytes": "4096"}
    events = [{"time_s": 100.0, "event": "begin", "phase": "\ud800", "epoch": 1}]
    folder = write_run(tmp_path / "run", events=events, **edited)
    row = compare_runs(folder).loc["run"]
    assert row["run s"] == Run(folder).record.duration_s > 0
    assert row["in phase"] == r"\ud800 1"
    assert Run(folder)._repr_html_().isprintable()
    assert Run(folder).memory_limit_bytes == 4096


def test_what_a_newer_version_adds_is_ignored(tmp_path: Path) -> None:
    growth = {**asdict(Growth("climbs", 1.0, 5, 1, 2)), "new": 1}
    facts: dict[str, Any] = {"sign": "killed by kernel", "phase": "later", "outer_limit": None}
    actions = [{"id": "a new action"}, {"id": "resume", "new": 1}]
    stored = {"cause": "out of memory", "actions": actions, "new": 1}
    found = Run.open(write_run(tmp_path, new=1, growth=growth, diagnosis=stored, **facts))
    assert (found.diagnosis.phase, found.diagnosis.facts.parts) == ("later", {})
    assert found.diagnosis.facts.growth == Growth("climbs", 1.0, 5, 1, 2)
    assert found.state == "out of memory, exit code 137"
    assert found.diagnosis.remedy.startswith("a new action; then go on")


def test_a_diagnosis_in_sentences_by_0_2_0_is_made_again(tmp_path: Path) -> None:
    stored = {"text": "Killed.", "cause": "cause of then", "exit_code": 137, "phase": None}
    found = Run.open(write_run(tmp_path, killed_by="kernel", oom_kills=1, diagnosis=stored))
    assert (found.diagnosis.cause, found.diagnosis.phase) == ("out of memory", "build valid loader")


def test_a_metrics_file_without_one_of_its_lines_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.csv").write_text(METRICS.replace("\n1,1.5,", "\n1,more,1.5,"))
    with pytest.raises(InputError, match=r"metrics\.csv: .* epoch from 1 on, found \[2"):
        _ = Run(folder).metrics


def test_a_run_shows_itself_as_a_small_card(tmp_path: Path, tiny_config: Config) -> None:
    train(tiny_config(), tmp_path / "a<b")
    shown = Run(tmp_path / "a<b")._repr_html_()
    assert f"{tmp_path}/a&lt;b" in shown
    for words in (">finished<", ">diagnosis<", ">best epoch<", "after epoch", "<polygon "):
        assert words in shown
    (tmp_path / "a<b" / "result.json").write_text("nonsense\n")
    assert ">damaged<" in Run(tmp_path / "a<b")._repr_html_()


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
