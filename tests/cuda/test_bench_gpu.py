"""Promises of tests/benchmarks/bench_gpu.py that need no GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import bench_gpu

from ogbnlib.config import TrainConfig
from ogbnlib.sources.resolve import find_store


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
    store = find_store(config.dataset)
    rates = bench_gpu.measure(config, store, tmp_path / "run")
    assert rates["training"] > 0
    assert rates["loader"] > 0
    assert bench_gpu.as_line(policy, rates).startswith(policy)
