"""Promises of tests/benchmarks/bench_gpu.py that need no GPU."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import bench_gpu
from conftest import write_run

from ogbnlib.config import TrainConfig
from ogbnlib.runs.folder import Run
from ogbnlib.sources.catalog import open_for


def test_without_a_gpu_it_says_so() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, bench_gpu.__file__]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (1, bench_gpu.NO_GPU)


@pytest.mark.parametrize("policy", ["shared", "store", "propagated"])
def test_it_measures_training_and_the_loader_alone(
    tiny_config: Callable[..., TrainConfig], tmp_path: Path, policy: str
) -> None:
    asked = bench_gpu.parse_arguments(["--batch-size", "16", "--epochs", "2"])
    config = tiny_config(**bench_gpu.settings(policy, asked))
    store = open_for(config, say=lambda line: None)
    rates = bench_gpu.measure(config, store, tmp_path / "run")
    assert rates["training"] > 0
    assert rates["loader"] > 0
    assert rates["utilisation"] is None
    assert bench_gpu.as_line(policy, rates).startswith(policy)


def test_it_reads_the_utilisation_of_the_counted_epochs(tmp_path: Path) -> None:
    noon_s = time.mktime((2026, 11, 26, 12, 0, 0, 0, 0, -1))
    lines = ["12:00:00.500, 10", "12:00:01.500, 40", "12:00:01.750, 60", "12:00:02.500, [N/A]"]
    text = "".join(f"2026/11/26 {line}\n" for line in lines) + "2026/11/26 12:0"
    readings = bench_gpu.parse_readings(text)
    assert readings == [(noon_s + 0.5, 10), (noon_s + 1.5, 40), (noon_s + 1.75, 60)]
    events = [{"time_s": noon_s - 1, "event": "start"}]
    for epoch in range(2):
        span = {"phase": "train epoch", "epoch": epoch + 1}
        events.append({"time_s": noon_s + epoch, "event": "begin", **span})
        events.append({"time_s": noon_s + epoch + 1, "event": "end", **span})
    run = Run.open(write_run(tmp_path / "run", events=events))
    assert bench_gpu.counted(readings, run) == [40, 60]
