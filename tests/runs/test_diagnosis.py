"""Promises of `diagnosis`: every ending is explained, and out of memory is claimed on evidence
only."""

import re
from pathlib import Path

import pytest
from conftest import MB, write_run

from ogbnlib.errors import InputError
from ogbnlib.memory.signals import Stopped
from ogbnlib.runs.exit_codes import exit_code_of
from ogbnlib.runs.folder import Run, diagnose


@pytest.mark.parametrize(
    ("result", "cause", "words"),
    [
        (
            {"exit_code": 137, "limit_by": "cgroup v2", "oom_kills": 0},
            "SIGKILL, cause unknown",
            "no out-of-.* kill",
        ),
        (
            {"exit_code": 1, "last_output": "_ArrayMemoryError: Unable to allocate 53.0 GiB"},
            "out of memory",
            "plan --config .* what fits",
        ),
        (
            {"exit_code": 1, "last_output": "torch.OutOfMemoryError: CUDA out of memory."},
            "out of GPU memory",
            "no sizes.* last words: torch",
        ),
        ({"exit_code": None}, "no result", "No result was written.* resume=True"),
    ],
)
def test_without_evidence_of_memory_or_a_result_it_says_so(
    tmp_path: Path, result: dict[str, object], cause: str, words: str
) -> None:
    found = diagnose(write_run(tmp_path, memory_limit_bytes=500 * MB, **result))
    assert (found.cause, found.exit_code, found.phase) == (
        cause,
        result["exit_code"],
        "build valid loader",
    )
    assert re.search(words, found.text)


def test_an_out_of_memory_kill_names_phase_limit_by_parts_counter_and_remedy(
    tmp_path: Path,
) -> None:
    killed = {
        "memory_limit_bytes": 256 * MB,
        "limit_by": "cgroup v1",
        "killed_by": "kernel",
        "oom_kills": 2,
    }
    found = diagnose(write_run(tmp_path, exit_code=137, **killed))
    assert (found.cause, found.exit_code, found.phase) == (
        "out of memory",
        137,
        "build valid loader",
    )
    assert found.parts == {"edge_index (COO)": 160 * MB}
    for words in (
        "kernel",
        "137",
        "oom_kill counter 2",
        "256 MB (cgroup v1)",
        "build valid loader",
        "160 MB",
    ):
        assert words in found.text
    asked = f"plan --config {tmp_path}/config.json --memory-limit '256 MB'` what fits"
    assert asked in found.remedy  # of a result without a diagnosis
    assert found.remedy in found.text


def test_how_to_go_on_is_said_with_a_path_valid_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Run.open(write_run(Path("runs/a"), exit_code=75, memory_limit_bytes=1536 * MB))
    monkeypatch.chdir("/")  # a script's working folder may change
    call = f'run(run_dir="{tmp_path}/runs/a", memory_limit="1.5 GB", resume=True)'
    assert found.diagnosis.remedy.startswith(f"go on with {call}")


def test_a_phase_that_failed_is_where_it_ended(tmp_path: Path) -> None:
    events = [
        {"time_s": 100.0, "event": "start"},
        {"time_s": 101.0, "event": "begin", "phase": "train epoch", "epoch": 4},
        {"time_s": 102.0, "event": "end", "phase": "train epoch", "failed": "RuntimeError"},
    ]
    found = diagnose(
        write_run(tmp_path, exit_code=1, events=events, last_output="RuntimeError: boom")
    )
    assert (found.cause, found.phase) == ("error", "train epoch 4")
    assert "RuntimeError: boom" in found.text


def test_inside_a_slurm_job_a_run_goes_on_in_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    for name, script in (("train-7", "train"), ("train_ddp-7", "train_ddp")):
        found = diagnose(write_run(tmp_path / "runs" / name, exit_code=75))
        command = f"`sbatch slurm/{script}.sbatch --run-dir runs/{name} --resume`"
        assert found.remedy == f"go on with {command}, unless Slurm requeued job 7"


def test_an_exception_and_its_exit_code_are_one_thing() -> None:
    import torch

    errors = [
        InputError("x"),
        Stopped("x"),
        KeyboardInterrupt(),
        torch.OutOfMemoryError("x"),
        MemoryError(),
    ]
    assert [exit_code_of(error) for error in errors] == [2, 75, 130, 76, 1]


def samples(sizes: list[int], processes: list[int]) -> list[dict[str, float]]:
    """A sample a second of this many MB in all, by this many processes."""
    rows = []
    for i, (size, number) in enumerate(zip(sizes, processes, strict=True)):
        row = {"time_s": 100.0 + i, "num_processes": number}
        for kind in ("rss", "pss"):
            parts = {f"{kind}_anon_bytes": size * MB, f"{kind}_shmem_bytes": 0}
            rows_of = {**parts, f"{kind}_file_bytes": 0}
            row |= rows_of
        rows.append(row)
    return rows


def test_growth_and_its_processes_are_told_and_loading_may_be_part_of_it(tmp_path: Path) -> None:
    sizes = [272 + 18 * i for i in range(33)]
    grown = samples(sizes, [min(17, 1 + i) for i in range(33)])
    start = {"time_s": 100.0, "event": "start", "command": ["python", "train.py"]}
    killed = {"killed_by": "kernel", "oom_kills": 1, "memory_limit_bytes": 900 * MB}
    found = diagnose(write_run(tmp_path / "a", events=[start], samples=grown, **killed))
    assert "Its processes went from 1 to 17, 33 MB each" in found.text
    assert "memory climbs by" in found.text
    assert "No phase is named, so loading may be part of it." in found.text
    load = {"time_s": 100.0, "event": "begin", "phase": "load data"}
    found = diagnose(write_run(tmp_path / "b", events=[start, load], samples=grown, **killed))
    assert "climbs" not in found.text
    assert "grows" not in found.text
