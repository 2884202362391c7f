"""Promises of a run that is at work: it says where it stands from its first second on, here and from elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import wait_until

from ogbnlib import progress
from ogbnlib.config import TrainConfig
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run

Config = Callable[..., TrainConfig]
SLOW = """
import time, torch

class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.layer = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        time.sleep(0.1)
        return self.layer(x)
"""


@pytest.fixture
def at_work(tiny_config: Config, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training whose epochs take 12 s."""
    (tmp_path / "slow.py").write_text(SLOW)
    config = tiny_config(model=f"{tmp_path}/slow.py:Net", batch_size=1, num_neighbors=[1], progress="lines")
    folder = tmp_path / "r"
    config.save(tmp_path / "wanted.json")
    code = "import sys\nfrom ogbnlib import TrainConfig, run\n"
    code += "run(TrainConfig.load(sys.argv[1]), '2 GB', run_dir=sys.argv[2])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "wanted.json"), str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: (folder / "progress.json").exists(), "the first batches")
        yield process, folder
    finally:
        process.kill()
        process.communicate()


def test_a_log_has_a_line_from_the_start_on_with_phase_and_memory(
    tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_config(progress="lines"), "2 GB", run_dir=tmp_path / "a").exit_code == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a: starting(: 0.0\d of 2.00 GB \[\.{10}\])?", lines[0])
    assert sum(line.startswith("Epoch 00") for line in lines) == 2
    assert run(tiny_config(progress="lines"), run_dir=tmp_path / "b", echo=False).exit_code == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["b"]


def test_a_run_at_work_says_from_elsewhere_what_it_has_done_and_is_followed_to_its_end(
    at_work: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, folder = at_work

    def counted() -> bool:
        count = Run.open(folder).status["progress"]
        return bool(count and count["loss"] and count["run_left_s"] and 0 < count["done"] <= count["total"])

    wait_until(counted, "counts of a training epoch")
    found = Run.open(folder)
    assert found.state == "at work"
    assert str(found.diagnosis).startswith("At work, in phase '")
    told: list[str] = []

    def stop(live: progress.Live) -> None:
        told.append(live._text()[0])
        if len(told) == 2:
            os.kill(process.pid, signal.SIGTERM)

    monkeypatch.setattr(progress.Live, "_show", stop)
    ended = Run.open(folder).follow()
    assert ended.exit_code == 75
    assert all(line.startswith("r: ") for line in told)
    assert ended.status["progress"] is None
    assert ended.follow().exit_code == 75  # at once
