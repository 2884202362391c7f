"""Epochs from a store on disk under a hard limit, with a spool, against as many batches from RAM,
in one run.

Run it by hand from the repository root: `python tests/benchmarks/bench_spool.py STORE [--limit "4
GB"] [--epochs 20] [--spool "30 GB"] [--large] [--precision bf16]`. STORE is a store larger than the
limit. The other side is a generated one of `--scale` with features of the same dtype, small enough
for the page cache: batches of the same shape are trained and evaluated for `--ram-epochs` epochs
after one that is left out, and their time is taken per batch. Bytes are those of the kernel,
/proc/PID/io.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from ogbnlib import Run, TrainConfig, run
from ogbnlib.graph.store import open_store
from ogbnlib.sources.synth import synthesize_store

SETTING = {
    "num_neighbors": [3, 2],
    "batch_size": 128,
    "hidden_channels": 16,
    "eval_splits": ["valid", "test"],
}
LARGE = {
    **SETTING,
    "num_neighbors": [15, 10, 5],
    "batch_size": 1024,
    "hidden_channels": 256,
    "eval_splits": [],
}


def config(asked: argparse.Namespace, path: Path, epochs: int, **changes: object) -> TrainConfig:
    setting = LARGE if asked.large else SETTING
    setting = {**setting, "precision": asked.precision}
    values = {
        "dataset": str(path),
        "loading": "store",
        "epochs": epochs,
        "train_eval": "never",
        **setting,
        **changes,
    }
    return TrainConfig.create({"num_threads": "auto", **values})


def batches(asked: argparse.Namespace, path: Path) -> tuple[int, int]:
    """Of training and of the evaluations, in an epoch."""
    setting = LARGE if asked.large else SETTING
    size = {
        split: -(-len(ids) // setting["batch_size"])
        for split, ids in open_store(path).splits.items()
    }
    return size["train"], sum(size[split] for split in setting["eval_splits"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("--limit", default="4 GB")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--spool", default="auto")
    parser.add_argument("--scale", type=float, default=0.05)
    parser.add_argument("--ram-epochs", type=int, default=3)
    parser.add_argument(
        "--large", action="store_true", help="[15, 10, 5] x 1024 x 256, no evaluation"
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="for what is generated and runs",
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        small = Path(folder, "small")
        dtype = str(open_store(asked.store).x.dtype)
        synthesize_store(small, asked.scale, feature_dtype=dtype, progress=False)
        in_ram = config(asked, small, asked.ram_epochs + 1)
        ram = run(in_ram, run_dir=Path(folder, "ram"), echo=False).require_finished()
        os.environ["SLURM_TMPDIR"] = folder  # of the spool
        on_disk = config(asked, asked.store, asked.epochs, spool=asked.spool)
        disk = run(on_disk, asked.limit, run_dir=Path(folder, "disk")).require_finished()
        report(asked, ram, disk, batches(asked, small), batches(asked, asked.store))


def report(
    asked: argparse.Namespace, ram: Run, disk: Run, few: tuple[int, int], many: tuple[int, int]
) -> None:
    rows = ram.metrics.iloc[1:]
    per_batch = rows["time_s"].mean() / few[0], rows["eval_time_s"].mean() / max(few[1], 1)
    compute_s = asked.epochs * (many[0] * per_batch[0] + many[1] * per_batch[1])
    took_s = disk.metrics[["time_s", "eval_time_s"]].to_numpy().sum()
    moved = [event for event in disk.events if event["event"] == "disk"]
    total = moved[-1]["read_bytes"] + moved[-1]["write_bytes"]
    answer = {
        "from RAM, batches/s": [round(1 / each, 2) for each in per_batch if each > 0],
        "the same batches from RAM, s": round(compute_s),
        "from disk, s": round(took_s),
        "epochs from disk, s": [round(each) for each in disk.metrics["time_s"]],
        "ratio": round(took_s / compute_s, 2),
        "read, GB": round(moved[-1]["read_bytes"] / 2**30, 1),
        "written, GB": round(moved[-1]["write_bytes"] / 2**30, 1),
        "moved an epoch, GB": round(total / asked.epochs / 2**30, 2),
        "peak with page cache, GB": round(disk.peak_bytes / 2**30, 2),
        "passes": [event for event in disk.events if event["event"] == "pass"],
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
