"""Training speed of one and of two ranks on one machine's cores, side by side in one run.

Run it by hand from the repository root: `python tests/benchmarks/bench_ranks.py STORE [--loading
shared] [--epochs 3]`. Each rank has one torch thread; a third side is one rank with all cores, which
needs no second process. The first epoch is left out, and the fastest of the others counts.
"""

import argparse
import tempfile
from pathlib import Path

from ogbnlib import TrainConfig, run
from ogbnlib.graph.store import open_store

SETTING = {
    "num_neighbors": [15, 10, 5],
    "batch_size": 1024,
    "hidden_channels": 64,
    "eval_splits": [],
    "train_eval": "never",
    "device": "cpu",
}
SIDES = {
    "1 rank, 1 thread": (1, 1),
    "1 rank, all cores": (1, "auto"),
    "2 ranks, 1 thread each": (2, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--loading", default="store")
    parser.add_argument("--epochs", type=int, default=3)
    asked = parser.parse_args()
    num_batches = -(-len(open_store(asked.store).splits["train"]) // SETTING["batch_size"])
    alone = None
    for name, (num_ranks, num_threads) in SIDES.items():
        config = TrainConfig.create(
            dataset=str(asked.store), loading=asked.loading, epochs=asked.epochs,
            num_threads=num_threads, **SETTING,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            done = run(config, run_dir=f"{folder}/run", num_ranks=num_ranks, echo=False)
            done.require_finished()
            speed = num_batches / min(done.metrics["time_s"][1:])
            peak = done.held_peak_bytes / 2**30
        alone = alone or speed
        print(f"{name}: {speed:.2f} batches/s, {speed / alone:.2f} times, {peak:.2f} GB in use")


if __name__ == "__main__":
    main()
