"""Promises of a run that is at work: it says where it stands from its first second on, here and
from elsewhere."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Config, is_alive, wait_until

from ogbnlib.memory.tree import process_tree
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.runs.supervise import LEAD_S, STOP_S

SLOW = """
import os, time, torch

class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.layer = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        if "OGBNLIB_RUN_DIR" in os.environ:  # not where it is tried out before
            time.sleep(float(os.environ.get("SLEEP_S", "0")))
        return self.layer(x)
"""


@pytest.fixture
def lead_s() -> float:
    return LEAD_S


@pytest.fixture
def at_work(
    tiny_config: Config, tmp_path: Path, request: pytest.FixtureRequest, lead_s: float
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training whose batches, 120 an epoch, take as many seconds as the fixture is given."""
    (tmp_path / "slow.py").write_text(SLOW)
    config = tiny_config(model=f"{tmp_path}/slow.py:Net", batch_size=1, num_neighbors=[1])
    folder = tmp_path / "r"
    config.save(tmp_path / "wanted.json")
    code = "import sys\nfrom ogbnlib import TrainConfig, run\nfrom ogbnlib.runs import supervise\n"
    code += f"supervise.LEAD_S = {lead_s}\n"
    code += "try:\n    run(TrainConfig.load(sys.argv[1]), '2 GB', run_dir=sys.argv[2])\n"
    code += "except KeyboardInterrupt as stop:\n    print(*stop._render_traceback_(), sep='\\n')"
    argv = [sys.executable, "-c", code, str(tmp_path / "wanted.json"), str(folder)]
    env = {**os.environ, "SLEEP_S": str(request.param)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    try:
        wait_until(lambda: (folder / "progress.json").exists(), "the first batches")
        yield process, folder
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("at_work", [0.1], indirect=True)
def test_a_run_at_work_is_seen_from_elsewhere(at_work: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = at_work

    def counted() -> bool:
        count = Run.open(folder).status["progress"]
        return bool(count and count["loss"] and 0 < count["done"] <= count["total"])

    wait_until(counted, "counts of a training epoch")
    found = Run.open(folder)
    assert found.state == "at work"
    assert str(found.diagnosis).startswith("At work, in phase '")
    process.send_signal(signal.SIGTERM)
    process.wait(180)
    ended = Run.open(folder)
    assert ended.exit_code == 75
    assert ended.status["progress"] is None


@pytest.mark.parametrize(
    ("at_work", "presses"),
    [(600, 1), pytest.param(600, 2, marks=pytest.mark.slow)],
    indirect=["at_work"],
)
def test_stop_ends_a_run_in_seconds_in_any_phase(
    at_work: tuple[subprocess.Popen[str], Path], presses: int
) -> None:
    process, folder = at_work
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    said = []
    while "stopping ..." not in said:
        said.append(next(process.stdout).rstrip("\n"))
    if presses == 2:
        process.send_signal(signal.SIGINT)
    said += process.stdout.read().splitlines()
    process.wait(180)  # without a stop, a batch takes 600 s
    assert said[-1].startswith(f"KeyboardInterrupt: {folder}: interrupted; go on with ")
    assert Run.open(folder).result["exit_code"] == 130
    if presses == 2:
        call = said[-1].partition("go on with ")[2].partition(", or ")[0]
        assert call == f'run(run_dir="{folder}", resume=True)'
        assert eval(call, {"run": run}).is_finished  # though there was no checkpoint yet


@pytest.mark.parametrize("at_work", [600], indirect=True)
@pytest.mark.parametrize(
    ("how", "lead_s"),
    [
        ("signalled again", LEAD_S),
        ("its time is over", 1.0),
        pytest.param("its parent is killed", LEAD_S, marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_does_not_react_is_killed(
    at_work: tuple[subprocess.Popen[str], Path], how: str
) -> None:
    process, folder = at_work
    trainers = process_tree(process.pid)[1:]
    is_parent_killed = how == "its parent is killed"
    if is_parent_killed:
        process.kill()
    else:
        process.terminate()
    if how == "signalled again":
        time.sleep(STOP_S + 1)  # sooner, the same signal may have been sent twice
        process.terminate()
    wait_until(lambda: not any(is_alive(pid) for pid in trainers), "the trainer's end")
    process.wait(180)
    assert Run.open(folder).exit_code == (None if is_parent_killed else 143)
