"""Promises of `diagnosis`: every ending is explained, and out of memory is claimed on evidence only."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, tree, write_run

from ogbnlib.errors import InputError
from ogbnlib.memory.signals import Stopped
from ogbnlib.runs.attempt import locked
from ogbnlib.runs.diagnosis import Result, ended
from ogbnlib.runs.exit_codes import exit_code_of, meaning_of
from ogbnlib.runs.folder import diagnose

CODES = [0, 1, 130, 135, 137, 139, 141, 143, 255, "0:125", "0:53"]


@pytest.mark.parametrize(
    ("code", "word"),
    [(1, "exception"), (130, "SIGINT"), (135, "/dev/shm"), (137, "SIGKILL"), (139, "SIGSEGV"), (141, "SIGPIPE")]
    + [(143, "SIGTERM"), (255, "launcher"), ("0:125", "OUT_OF_MEMORY"), ("0:53", "never started")],
)
def test_the_meaning_names_what_happened(code: int | str, word: str) -> None:
    assert word in meaning_of(code).text


def test_another_signal_is_named_by_its_number_and_another_code_not_guessed() -> None:
    assert "signal 24" in meaning_of(152).text
    assert "no fixed meaning" in meaning_of(7).text


def test_a_kill_under_a_limit_that_saw_none_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, exit_code=137, memory_limit_bytes=500 * MB, limit_by="cgroup v2", oom_kills=0)
    found = diagnose(run)
    assert found.cause == "SIGKILL, cause unknown"
    assert "shows no out-of-memory kill" in found.text


def test_an_out_of_memory_kill_names_phase_limit_by_parts_counter_and_remedy(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, exit_code=137, memory_limit_bytes=256 * MB, limit_by="cgroup v1", killed_by="kernel", oom_kills=2
    )
    found = diagnose(run)
    assert (found.cause, found.exit_code, found.phase) == ("out of memory", 137, "build valid loader")
    assert found.parts == {"edge_index (COO)": 160 * MB}
    for words in ("kernel", "137", "oom_kill counter 2", "256 MB (cgroup v1)", "build valid loader", "160 MB", "40 MB"):
        assert words in found.text
    assert "loading=shared" in found.remedy
    assert found.remedy in found.text


@pytest.mark.parametrize("phase", [None, "open", "compile kernels"])
def test_under_a_limit_that_python_and_torch_alone_exceed_nothing_else_is_advised(
    tmp_path: Path, phase: str | None
) -> None:
    begun = [] if phase is None else [{"time_s": 101.0, "event": "begin", "phase": phase}]
    events = [{"time_s": 100.0, "event": "start"}, *begun]
    found = diagnose(write_run(tmp_path, events=events, killed_by="kernel", memory_limit_bytes=100 * MB))
    assert found.remedy == "raise memory_limit: Python and torch alone take 354 MB, whatever the data"


def test_the_last_sample_and_its_growth_since_the_phase_began_are_told(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path, killed_by="watchdog", memory_limit_bytes=220 * MB, limit_by="watchdog"))
    assert found.last_sample == {"anon": 210.0 * MB, "shmem": 0.0, "file": 30.0 * MB}
    assert "210 MB anonymous" in found.text
    assert "40 MB of it came since the phase began" in found.text
    assert "this library's watchdog" in found.text


@pytest.mark.parametrize(
    ("config", "phase", "remedy"),
    [
        ({"loading": "lazy"}, "build train loader", "loading=shared"),
        ({"loading": "shared"}, "load", "feature_dtype=float16"),
        ({"loading": "shared", "num_workers": 2}, "train epoch", "num_workers=0"),
        ({"loading": "shared"}, "train epoch", "batch_size below 128"),
        ({"loading": "shared", "feature_dtype": "float16"}, "load", "raise memory_limit"),
    ],
)
def test_the_remedy_fits_the_config_and_the_phase(
    tmp_path: Path, config: dict[str, object], phase: str, remedy: str
) -> None:
    events = [{"time_s": 100.0, "event": "start"}, {"time_s": 101.0, "event": "begin", "phase": phase}]
    run = write_run(tmp_path, events=events, config=config, killed_by="kernel", oom_kills=1, memory_limit_bytes=MB)
    assert remedy in diagnose(run).remedy


def test_how_to_go_on_is_said_with_a_path_that_holds_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    remedy = diagnose(write_run(Path("runs/a"), exit_code=75, memory_limit_bytes=1536 * MB)).remedy
    assert remedy.startswith(f'go on with run(run_dir="{tmp_path}/runs/a", memory_limit="1.5 GB", resume=True)')


@pytest.mark.parametrize(("command", "words"), [(None, "starting for"), (["python"], "in no named phase;")])
def test_a_run_before_its_first_phase_is_starting(tmp_path: Path, command: list[str] | None, words: str) -> None:
    start = {"time_s": 100.0, "event": "start", **({"command": command} if command else {})}
    run = write_run(tmp_path, exit_code=None, events=[start])
    with locked(run):
        found = diagnose(run)
    assert found.text.startswith(f"At work, {words.removesuffix(' for')}")
    assert found.phase == (None if command else "starting")


def test_a_phase_that_failed_is_where_it_ended(tmp_path: Path) -> None:
    events = [
        {"time_s": 100.0, "event": "start"},
        {"time_s": 101.0, "event": "begin", "phase": "train epoch", "epoch": 4},
        {"time_s": 102.0, "event": "end", "phase": "train epoch", "failed": "RuntimeError"},
    ]
    found = diagnose(write_run(tmp_path, exit_code=1, events=events, last_output="RuntimeError: boom"))
    assert (found.cause, found.phase) == ("error", "train epoch 4")
    assert "RuntimeError: boom" in found.text


def test_an_attempt_killed_before_its_first_phase_is_not_blamed_on_an_earlier_ones_phase(tmp_path: Path) -> None:
    events = [
        {"time_s": 100.0, "event": "start"},
        {"time_s": 101.0, "event": "begin", "phase": "eval valid"},
        {"time_s": 110.0, "event": "start"},
    ]
    found = diagnose(write_run(tmp_path, events=events))
    assert found.phase is None
    assert "before its first phase" in found.text


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ({"peak_bytes": 300 * MB, "peak_source": "samples"}, "; it held 300 MB at most."),
        (
            {"peak_bytes": 500 * MB, "peak_source": "kernel counter"},
            "; it held 300 MB at most, 500 MB with page cache.",
        ),
    ],
    ids=["samples", "cgroup"],
)
def test_a_finished_run_says_so_with_its_peak(tmp_path: Path, evidence: dict[str, Any], said: str) -> None:
    peaks = {"anon_shmem_bytes": 300 * MB}
    found = diagnose(write_run(tmp_path, exit_code=0, sampled_peaks_bytes=peaks, **evidence))
    assert (found.cause, found.exit_code) == ("finished", 0)
    assert found.text.startswith("Finished without an error in ")
    assert found.text.endswith(said)


def test_without_a_result_it_says_that_none_was_written(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path, exit_code=None))
    assert (found.cause, found.exit_code, found.phase) == ("no result", None, "build valid loader")
    assert "No result was written" in found.text
    assert "resume=True" in found.text


@pytest.mark.parametrize("code", [2, 130, 143])
def test_what_was_no_kill_is_not_called_one(tmp_path: Path, code: int) -> None:
    found = diagnose(write_run(tmp_path, exit_code=code))
    assert found.cause in ("bad input", "interrupted", "SIGTERM")
    remedy = meaning_of(code).remedy
    call = f'run(run_dir="{tmp_path}", resume=True), or `python -m ogbnlib train --run-dir {tmp_path} --resume`'
    assert remedy.replace("resume=True", call) in found.text


def test_inside_a_slurm_job_a_run_goes_on_in_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    for name, script in (("train-7", "train"), ("train_ddp-7", "train_ddp")):
        found = diagnose(write_run(tmp_path / "runs" / name, exit_code=75))
        command = f"`sbatch slurm/{script}.sbatch --run-dir runs/{name} --resume`"
        assert found.remedy == f"go on with {command}, unless Slurm requeued job 7 (squeue --jobs=7)"


def test_a_child_killed_for_its_memory_in_a_command_that_ended_with_0_is_named(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path, exit_code=0, oom_kills=2))
    assert "the kernel's out-of-memory killer ended 2 of its processes" in found.text


def test_a_folder_without_a_timeline_is_still_diagnosed(tmp_path: Path) -> None:
    write_run(tmp_path, exit_code=1)
    (tmp_path / "timeline.csv").unlink()
    (tmp_path / "events.jsonl").unlink()
    assert diagnose(tmp_path).exit_code == 1


def test_what_is_no_run_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=f"{path}: expected the folder of a run"):
            diagnose(path)
    assert tree(tmp_path) == {"note.txt": b"mine"}


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "result.json").write_text('{"exit_code": 1')
    with pytest.raises(InputError, match=r"result\.json: expected the result of a run"):
        diagnose(tmp_path)


def test_a_diagnosis_is_plain_json(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path, killed_by="kernel", oom_kills=1))
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["text"] == str(found)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({}, "no result"),
        ({"exit_code": 0}, "finished"),
        ({"exit_code": 137}, "SIGKILL, cause unknown, exit code 137"),
        ({"exit_code": 137, "killed_by": "kernel"}, "out of memory, exit code 137"),
        ({"exit_code": 76}, "out of GPU memory, exit code 76"),
        ({"exit_code": 75}, "stopped at a checkpoint, exit code 75"),
        ({"exit_code": 139}, "error, exit code 139"),
    ],
)
def test_a_few_words_say_how_a_run_ended(result: dict[str, Any], words: str) -> None:
    assert ended(Result(**result) if result else None) == words


def test_an_exception_and_its_exit_code_are_one_thing() -> None:
    import torch

    errors = [InputError("x"), Stopped("x"), KeyboardInterrupt(), torch.OutOfMemoryError("x"), MemoryError()]
    assert [exit_code_of(error) for error in errors] == [2, 75, 130, 76, 1]


ENDED = ["ended", "what happened", "in phase", "memory in use", "next step"]


@pytest.mark.parametrize(
    ("result", "labels", "words"),
    [
        ({"exit_code": 137, "killed_by": "kernel"}, ["ended", "killed by", *ENDED[2:]], "the kernel's out-of-memory"),
        ({"exit_code": 1, "last_output": "ValueError: mine"}, ENDED, "Its last words: ValueError: mine"),
        ({"exit_code": 130}, ENDED, "restart"),
        ({"exit_code": 0}, ["state"], "Finished without an error"),
        ({"exit_code": None}, ["state"], "No result was written"),
    ],
)
def test_a_notebook_shows_a_card(tmp_path: Path, result: dict[str, Any], labels: list[str], words: str) -> None:
    found = diagnose(write_run(tmp_path, **result))
    assert [line.partition(": ")[0] for line in repr(found).splitlines()] == labels
    assert words in repr(found)
    if len(labels) > 1:
        assert "\nin phase: build valid loader\nmemory in use: 210 MB anonymous" in repr(found)
    shown = found._repr_html_()
    assert shown.count("<tr>") == len(labels)
    assert html.escape(found.remedy) in shown
