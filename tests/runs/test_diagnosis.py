"""Promises of `diagnosis`: every ending is explained, and out of memory is claimed on evidence
only."""

import sys
from pathlib import Path

import pytest
from conftest import MB, write_run

import ogbnlib.__main__
from ogbnlib.errors import InputError
from ogbnlib.memory.signals import Stopped
from ogbnlib.runs import render
from ogbnlib.runs.codes import exit_code_of
from ogbnlib.runs.diagnosis import explain_text, sentence_of
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import watch
from ogbnlib.runs.texts import last_words
from ogbnlib.training import child

NO_ARRAY = "_ArrayMemoryError: Unable to allocate 53.0 GiB"
NO_CUDA = "torch.OutOfMemoryError: CUDA out of memory."


@pytest.mark.parametrize(
    ("result", "cause", "action"),
    [
        ({"exit_code": 137, "oom_kills": 0}, "SIGKILL, cause unknown", "find sender"),
        ({"exit_code": 1, "last_output": NO_ARRAY}, "out of memory", "less memory"),
        ({"exit_code": 1, "last_output": NO_CUDA}, "out of GPU memory", "free GPU"),
        ({"exit_code": None}, "no result", "resume"),
    ],
)
def test_without_evidence_of_memory_or_a_result_it_says_so(
    tmp_path: Path, result: dict[str, object], cause: str, action: str
) -> None:
    found = Run.open(write_run(tmp_path, memory_limit_bytes=500 * MB, **result)).diagnosis
    assert (found.cause, found.exit_code) == (cause, result["exit_code"])
    assert found.phase == "build valid loader"
    assert found.actions[0].id == action
    assert found.facts.last_output == result.get("last_output")


def test_an_out_of_memory_kill_has_phase_limit_parts_and_action(tmp_path: Path) -> None:
    limit = {"memory_limit_bytes": 256 * MB, "limit_by": "cgroup v1"}
    killed = {"killed_by": "kernel", "oom_kills": 2}
    found = Run.open(write_run(tmp_path, exit_code=137, **limit, **killed)).diagnosis
    assert (found.cause, found.exit_code) == ("out of memory", 137)
    assert found.phase == "build valid loader"
    facts = found.facts
    assert (facts.sign, facts.oom_kills) == ("killed by kernel", 2)
    assert (facts.memory_limit_bytes, facts.limit_by) == (256 * MB, "cgroup v1")
    assert facts.parts == {"edge_index (COO)": 160 * MB}
    # of a result without a diagnosis
    assert found.actions[0].id in render._ACTIONS
    for fact in (facts.sign, found.phase, "137", "counter 2", "256 MB (cgroup v1)", "160 MB"):
        assert str(fact).removeprefix("killed by ") in found.text
    assert found.text.endswith(f"Next: {found.remedy}.")


def test_how_to_go_on_is_said_with_a_path_valid_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Run.open(write_run(Path("runs/a"), exit_code=75, memory_limit_bytes=1536 * MB))
    monkeypatch.chdir("/")  # a script's working folder may change
    call = f'run(run_dir="{tmp_path}/runs/a", resume=True)'
    assert found.diagnosis.remedy.startswith(f"go on with {call}")


def test_inside_a_slurm_job_a_run_goes_on_in_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    for name, script in (("train-7", "train"), ("train_ddp-7", "train_ddp")):
        found = Run.open(write_run(tmp_path / "runs" / name, exit_code=75)).diagnosis
        command = f"`sbatch slurm/{script}.sbatch --run-dir runs/{name} --resume`"
        assert found.remedy.startswith(f"go on with {command}")


def test_an_exception_and_its_exit_code_are_one_thing() -> None:
    import torch

    errors = [InputError(""), Stopped(""), KeyboardInterrupt(), torch.OutOfMemoryError("x")]
    assert [exit_code_of(error) for error in [*errors, MemoryError()]] == [2, 75, 130, 76, 1]


REFUSED = {
    "numpy": "np.empty(2**50, np.uint8)",
    "torch": "torch.empty(2**50, dtype=torch.uint8)",
    "C++": "raise MemoryError('std::bad_alloc')",
    "a map": "raise OSError(12, 'Cannot allocate memory')",
    "a worker": "raise MemoryError(f'Caught it\\nOriginal Traceback\\n{NO_ARRAY}')",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["command", "child"])
def test_a_refused_allocation_is_one_sentence_with_its_line_and_cause(
    name: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import numpy as np
    import torch

    def work(*arguments: object) -> None:
        exec(REFUSED[name], {"np": np, "torch": torch, "NO_ARRAY": NO_ARRAY})

    monkeypatch.setattr(child, "take_over", lambda handler: None)
    monkeypatch.setattr(ogbnlib.__main__, "app", work)
    code = child.exit_code(work) if where == "child" else ogbnlib.__main__.main([])
    output = capsys.readouterr().err
    assert (code, output.count("\n"), output[:7]) == (1, 1, "error: ")
    if name == "a worker":
        assert NO_ARRAY in output
    assert "test_diagnosis.py, line " in output
    assert " GB" in output
    found = Run.open(write_run(tmp_path, exit_code=1, last_output=last_words(output))).diagnosis
    assert (found.cause, found.facts.sign) == ("out of memory", "allocation refused")
    assert sentence_of(KeyError("MemoryError")) == ""


COMMAND = {"time_s": 100.0, "event": "start", "command": ["python", "train.py"]}
FILL = [
    {"time_s": 101.0, "event": "begin", "phase": "fill"},
    {"time_s": 102.0, "event": "end", "phase": "fill"},
]
FAILED = [FILL[0], FILL[1] | {"failed": "MemoryError"}]


def test_a_phase_that_ended_is_not_blamed(tmp_path: Path) -> None:
    killed = {"killed_by": "kernel", "oom_kills": 1, "memory_limit_bytes": 900 * MB}
    for events in (FILL, FAILED):
        folder = write_run(tmp_path / "killed", events=[COMMAND, *events], **killed)
        found = Run.open(folder).diagnosis
        assert (found.cause, found.phase) == ("out of memory", None)
    raised = write_run(tmp_path / "raised", exit_code=1, events=[COMMAND, *FAILED])
    found = Run.open(raised).diagnosis
    assert (found.cause, found.phase) == ("error", "fill")


TIPS = [
    "Tip: if you get CUDA out of memory, use a smaller batch",
    "caught RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB; going on",
    "Note: MemoryError: Unable to allocate 3 GiB is raised where memory is short",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes is what torch says",
]


SIGKILL = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("tip", TIPS)
def test_a_line_that_mentions_memory_is_no_cause(tmp_path: Path, tip: str) -> None:
    ends = {SIGKILL: "SIGKILL, cause unknown"}
    if tip in TIPS[:3]:
        ends["raise SystemExit(3)"] = "error"
        assert explain_text(f"{tip}\n{tip}").cause == "unknown"
    for end, cause in ends.items():
        argv = [sys.executable, "-c", f"print({tip!r}, flush=True); {end}"]
        found = watch(argv, run_dir=tmp_path / cause, echo=False).diagnosis
        assert (found.cause, found.facts.last_output) == (cause, tip)
