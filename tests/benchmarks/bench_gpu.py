"""Training speed on a GPU under every loading policy, beside the speed of its loader alone.

Run it by hand from the repository root: `python tests/benchmarks/bench_gpu.py [--scale 0.02] [--dir
DIR] [--policies store propagated]`. Each policy has a process of its own, with the environment that
`run` gives its trainer. It trains whole epochs on the GPU, and then draws as many from the same
loader without a model. The first epoch of each is not counted. A ratio near 1 means that training
waits for the loader, and a low one that it waits for the GPU.

Compare only figures of one run: the machine's cores, disk and page cache decide the loader's speed.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ogbnlib.config import TrainConfig
from ogbnlib.graph.store import Store, is_store, open_store
from ogbnlib.memory.malloc import trainer_environment
from ogbnlib.memory.recorder import EventLog
from ogbnlib.propagation.hops import propagated
from ogbnlib.registry import MODELS, POLICIES
from ogbnlib.sampling.policies import set_epoch
from ogbnlib.sources.synth import synthesize_store
from ogbnlib.training.train import train

NO_GPU = "error: this benchmark needs a GPU, and torch.cuda.is_available() is false here"


def settings(policy: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The parameters of a policy's run, with the first model that it trains."""
    models = [name for name, kind in MODELS.items() if POLICIES[policy].takes(kind.load())]
    return {
        "loading": policy,
        "model": models[0],
        "num_neighbors": [15, 10, 5],
        "batch_size": asked.batch_size,
        "hidden_channels": 256,
        "epochs": asked.epochs,
        "eval_splits": [],
        "train_eval": "never",
    }


def training_rate(config: TrainConfig, num_batches: int, run_dir: Path) -> float:
    """Batches per second of training: the median of the epochs after the first."""
    history = train(config, run_dir).history
    return num_batches / median(row["time_s"] for row in history[1:])


def loader_rate(config: TrainConfig, store: Store) -> float:
    """Batches per second of the policy's loader without a model: the median of the epochs after the
    first."""
    if config.policy.hops(config):
        store = propagated(store, config, say=print, progress=lambda *count: None)
    loaders = config.policy.load()(store, config, EventLog(None))
    rates = []
    with contextlib.closing(loaders):
        loader = loaders.train_loader()
        for epoch in range(1, config.epochs + 1):
            set_epoch(loader, epoch)
            begin_s = time.perf_counter()
            num_batches = sum(1 for _ in loader)
            rates.append(num_batches / (time.perf_counter() - begin_s))
    return median(rates[1:])


def measure(config: TrainConfig, store: Store, run_dir: Path) -> dict[str, float]:
    """Batches per second of training and of the loader alone."""
    num_batches = -(-len(store.splits["train"]) // config.batch_size)
    training = training_rate(config, num_batches, run_dir)
    return {"training": training, "loader": loader_rate(config, store)}


def as_line(policy: str, rates: dict[str, float]) -> str:
    """One row of the table."""
    training, loader = rates["training"], rates["loader"]
    return f"{policy:<12}{training:>10.2f}{loader:>10.2f}{training / loader:>8.2f}"


def in_own_process(values: dict[str, Any]) -> dict[str, float]:
    """`measure` in a new process."""
    env = {**os.environ, **trainer_environment(os.environ)}
    argv = [sys.executable, __file__, "--one", json.dumps(values)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.02, help="of the generated graph")
    parser.add_argument("--dir", type=Path, help="a store, or where to make one and keep it")
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=[*POLICIES])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument(
        "--epochs", type=int, default=5, help="at least 2: the first is not counted"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.epochs < 2:
        parser.error(f"--epochs: expected at least 2, got {asked.epochs}")
    return asked


def main(argv: list[str]) -> None:
    asked = parse_arguments(argv)
    if not torch.cuda.is_available():
        sys.exit(NO_GPU)
    if asked.one:
        config = TrainConfig.create(json.loads(asked.one), device="cuda")
        with tempfile.TemporaryDirectory() as scratch:
            rates = measure(config, open_store(config.dataset), Path(scratch) / "run")
        print(json.dumps(rates))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = asked.dir or Path(scratch) / "store"
        if not is_store(path):
            synthesize_store(path, scale=asked.scale)
        name = torch.cuda.get_device_name()
        print(f"{name}, torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores")
        print(f"{'policy':<12}{'training':>10}{'loader':>10}{'ratio':>8}")
        print(f"{'':<12}{'batches/s':>10}{'batches/s':>10}")
        for policy in asked.policies:
            values = {"dataset": str(path), **settings(policy, asked)}
            print(as_line(policy, in_own_process(values)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
