"""Training from memory maps against `loading=store`, under one hard limit that counts page cache.

Run it by hand from the repository root: `python tests/benchmarks/bench_memory_map.py [STORE]
[--limit "4 GB"] [--setting small large] [--precision bf16]`. Without STORE it generates an int8
store of `--scale`. The sides, in turn, each in a process of its own and with a cold page cache:

- store: `run(config, limit)`. A whole epoch, with the time in which it is prepared.
- memmap: `np.load(file, mmap_mode="r")` of colptr, row and x, features by fancy indexing. For each
  page the kernel reads as much around it as /sys/block/DISK/queue/read_ahead_kb says (128 on many
  machines).
- random: the same after `madvise(MADV_RANDOM)`, which reads single pages, with each number of
  `--workers` of a torch `DataLoader`. Only workers make the disk read several pages at once.

The sides other than the first train for `--seconds` after `--warm-up`. The maps get our sampler,
which touches only the edges that it draws, and all sides have the same model and training step.
"""

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from ogbnlib import Run, TrainConfig, run, watch
from ogbnlib.errors import GB
from ogbnlib.graph.store import Store, open_store
from ogbnlib.memory.malloc import trainer_environment
from ogbnlib.memory.recorder import EventLog
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.sources.synth import synthesize_store
from ogbnlib.training.distributed import Ranks
from ogbnlib.training.learner import Learner
from ogbnlib.training.network import GNN

SETTINGS = {
    "small": {"num_neighbors": [3, 2], "batch_size": 128, "hidden_channels": 16},
    "large": {"num_neighbors": [15, 10, 5], "batch_size": 1024, "hidden_channels": 256},
}


class MappedBatches(Dataset):
    """Batches by their numbers, from memory maps of a store's files."""

    def __init__(self, store: Store, config: TrainConfig, random: bool):
        self.size = config.batch_size
        self.order = np.random.default_rng(0).permutation(store.splits["train"])
        self.labels = np.load(store.path / "y.npy", mmap_mode="r")[self.order].astype(np.int64)
        names = ("colptr", "row", "x")
        colptr, row, self.x = (np.load(store.path / f"{n}.npy", mmap_mode="r") for n in names)
        for array in (colptr, row, self.x) if random else ():
            array._mmap.madvise(mmap.MADV_RANDOM)
        self.sampler = CSCSampler(colptr, row, list(config.num_neighbors))

    def __len__(self) -> int:
        return len(self.order) // self.size

    def __getitem__(self, number: int) -> Data:
        places = torch.arange(number * self.size, (number + 1) * self.size)
        seeds = torch.from_numpy(self.order[places.numpy()])
        sample = self.sampler.sample_from_nodes(NodeSamplerInput(input_id=places, node=seeds))
        return Data(
            x=torch.from_numpy(self.x[sample.node.numpy()]),
            edge_index=torch.stack([sample.row, sample.col]),
            y=torch.from_numpy(self.labels[places.numpy()]),
            input_id=places,
            batch_size=self.size,
            num_sampled_nodes=sample.num_sampled_nodes,
            num_sampled_edges=sample.num_sampled_edges,
        )


def drop_from_page_cache(store: Store) -> None:
    for path in store.path.glob("*.npy"):
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def train_from_maps(asked: dict[str, Any]) -> dict[str, float]:
    """Train in this process for some time; runs in the child."""
    config = TrainConfig.create(asked["config"])
    store = open_store(config.dataset)
    batches = MappedBatches(store, config, asked["side"] == "random")
    workers = asked["workers"]
    loader = DataLoader(
        batches,
        batch_size=None,
        collate_fn=lambda batch: batch,
        num_workers=workers,
        prefetch_factor=1 if workers else None,
        multiprocessing_context="fork" if workers else None,
    )
    model = GNN(config, store.num_features, store.num_classes)
    learner = Learner(config, model, torch.device("cpu"), Ranks(), EventLog(None))
    learner.begin(1)
    return timed(decoded(loader, store), learner, asked["warm_up"], asked["seconds"])


def decoded(loader: DataLoader, store: Store) -> Iterator[Data]:
    """Yield batches with float32 features, for as many epochs as are asked for."""
    while True:
        for batch in loader:
            batch.x = torch.from_numpy(store.decode(batch.x.numpy()))
            yield batch


def timed(
    batches: Iterator[Data], learner: Learner, warm_up: float, seconds: float
) -> dict[str, float]:
    """Count the batches from the first one after `warm_up` seconds on."""
    begin = time.perf_counter()
    first = None
    for number, batch in enumerate(batches):
        size = batch.batch_size
        learner.step(iter([batch]), 1, number * size, (number + 1) * size)
        now = time.perf_counter()
        if first is None and now - begin > warm_up:
            first = number, now
        elif first is not None and now - first[1] > seconds:
            break
    return {"batches": number - first[0], "seconds": now - first[1]}


def config_of(options: argparse.Namespace, store: Store, setting: str) -> TrainConfig:
    values = {"loading": "store", "epochs": 1, "train_eval": "never", "eval_splits": []}
    values |= {"dataset": str(store.path), "precision": options.precision, **SETTINGS[setting]}
    return TrainConfig.create(values)


def figures(ended: Run, batches: int, seconds: float) -> dict[str, Any]:
    return {
        "batches": batches,
        "seconds": round(seconds, 1),
        "batches/s": round(batches / seconds, 3),
        "peak in use, GB": round(ended.held_peak_bytes / GB, 2),
    }


def from_store(options: argparse.Namespace, config: TrainConfig, folder: Path) -> dict[str, Any]:
    ended = run(config, options.limit, run_dir=folder, echo=False).require_finished()
    train = open_store(config.dataset).splits["train"]
    batches = -(-len(train) // config.batch_size)
    return figures(ended, batches, ended.metrics["time_s"].sum())


def from_maps(
    options: argparse.Namespace, config: TrainConfig, folder: Path, side: str, workers: int
) -> dict[str, Any]:
    answer = folder.with_suffix(".json")
    task = {"side": side, "workers": workers, "answer": str(answer)}
    task |= {"warm_up": options.warm_up, "seconds": options.seconds}
    task["config"] = config.model_dump(mode="json")
    argv = [sys.executable, __file__, "--task", json.dumps(task)]
    ended = watch(argv, options.limit, run_dir=folder, echo=False)
    if ended.exit_code or not answer.exists():
        return {"batches/s": 0.0, "ended": str(ended.diagnosis)}
    counted = json.loads(answer.read_text())
    return figures(ended, counted["batches"], counted["seconds"])


def compare(options: argparse.Namespace, store: Store, setting: str, folder: Path) -> None:
    """Train on each side in turn; print a line for each."""
    config = config_of(options, store, setting)
    drop_from_page_cache(store)
    row = from_store(options, config, folder / f"{setting}-store")
    print(f"{setting}: store: {json.dumps(row)}", flush=True)
    sides = [("memmap", 0), *(("random", workers) for workers in options.workers)]
    for side, workers in sides:
        drop_from_page_cache(store)
        row = from_maps(options, config, folder / f"{setting}-{side}-{workers}", side, workers)
        print(f"{setting}: {side}, {workers} workers: {json.dumps(row)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path, nargs="?", help="int8; by default one is generated")
    parser.add_argument("--scale", type=float, default=0.1, help="of the generated store")
    parser.add_argument("--limit", default="4 GB")
    parser.add_argument("--setting", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task = json.loads(options.task)
        Path(task["answer"]).write_text(json.dumps(train_from_maps(task)))
        return
    os.environ.update(trainer_environment(os.environ))
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or Path(folder) / f"int8-{options.scale:g}"
        if not path.exists():
            synthesize_store(path, options.scale, feature_dtype="int8", progress=False)
        store = open_store(path)
        os.environ["SLURM_TMPDIR"] = folder  # of the spool
        for name in options.setting:
            compare(options, store, name, Path(folder))


if __name__ == "__main__":
    main()
