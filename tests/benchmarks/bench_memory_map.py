"""Training from memory maps against `loading=store`, from one store, under one hard memory limit
that counts page cache.

Run it by hand from the repository root: `python tests/benchmarks/bench_memory_map.py [STORE]
[--limit "4 GB"] [--setting small large] [--precision bf16]`. Without STORE it generates an int8
store of `--scale`. The sides, in turn, each in a process of its own and with a cold page cache:

- store: `run(config, limit)`. A whole epoch, with the time in which it is prepared.
- memmap: `np.load(file, mmap_mode="r")` of colptr, row and x, features by fancy indexing. For each
  page the kernel reads as much around it as /sys/block/DISK/queue/read_ahead_kb says (128 on many
  machines).
- random: the same after `madvise(MADV_RANDOM)`, which reads single pages, with each number of
  `--workers` of a torch `DataLoader`. Only workers make the disk read several pages at once.
- graphzero: GraphZero's `batch_random_fanout` and `FeatureStore.get_tensor`, with `--graphzero DIR`,
  the folder of `pip install --target DIR --no-deps graphzero==0.2.0`. Its files are written here as
  its converter, which takes csv alone, would write them: ids of 8 bytes. It has no int8 type, so
  four features are packed into an INT32. `get_tensor` of 0.2.0 copies all features into memory, so
  it is killed if they are larger than the limit.

The sides other than the first train for `--seconds` after `--warm-up`, and not a whole epoch. The
maps get our sampler, which touches only the edges that it draws, and all sides have the same model
and the same training step, so they differ in how they read. Bytes are those of the kernel in
/proc/PID/io; the store's include its spool, written and read.
"""

import argparse
import json
import mmap
import multiprocessing
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
CHUNK_ROWS = 2**20


class MappedBatches(Dataset):
    """Batches by their numbers, from memory maps of a store's files."""

    def __init__(self, store: Store, config: TrainConfig, random: bool):
        self.size = config.batch_size
        self.order = np.random.default_rng(0).permutation(store.splits["train"])
        self.labels = np.load(store.path / "y.npy", mmap_mode="r")[self.order].astype(np.int64)
        self._open(store, list(config.num_neighbors), random)

    def _open(self, store: Store, num_neighbors: list[int], random: bool) -> None:
        names = ("colptr", "row", "x")
        colptr, row, self.x = (np.load(store.path / f"{n}.npy", mmap_mode="r") for n in names)
        for array in (colptr, row, self.x) if random else ():
            array._mmap.madvise(mmap.MADV_RANDOM)
        self.sampler = CSCSampler(colptr, row, num_neighbors)

    def __len__(self) -> int:
        return len(self.order) // self.size

    def __getitem__(self, number: int) -> Data:
        places = torch.arange(number * self.size, (number + 1) * self.size)
        seeds = torch.from_numpy(self.order[places.numpy()])
        n_id, edge_index, num_nodes, num_edges = self.sample(places, seeds)
        return Data(
            x=torch.from_numpy(self.features(n_id)),
            edge_index=edge_index,
            y=torch.from_numpy(self.labels[places.numpy()]),
            input_id=places,
            batch_size=self.size,
            num_sampled_nodes=num_nodes,
            num_sampled_edges=num_edges,
        )

    def sample(
        self, places: torch.Tensor, seeds: torch.Tensor
    ) -> tuple[np.ndarray, torch.Tensor, list[int], list[int]]:
        """Return the nodes' ids, the edges between them, and the numbers of both at each hop."""
        drawn = self.sampler.sample_from_nodes(NodeSamplerInput(input_id=places, node=seeds))
        edge_index = torch.stack([drawn.row, drawn.col])
        return drawn.node.numpy(), edge_index, drawn.num_sampled_nodes, drawn.num_sampled_edges

    def features(self, n_id: np.ndarray) -> np.ndarray:
        """Return the int8 codes of some nodes."""
        return self.x[n_id]


class GraphZeroBatches(MappedBatches):
    """The same by GraphZero, from its own files."""

    def _open(self, store: Store, num_neighbors: list[int], random: bool) -> None:
        import graphzero

        self.num_neighbors = num_neighbors
        self.graph = graphzero.Graph(str(graphzero_files(store)[0]))
        self.feature_store = graphzero.FeatureStore(str(graphzero_files(store)[1]))
        self.x = self.feature_store.get_tensor()

    def sample(
        self, places: torch.Tensor, seeds: torch.Tensor
    ) -> tuple[np.ndarray, torch.Tensor, list[int], list[int]]:
        nodes = seeds.numpy()
        edges = []
        num_nodes = [len(nodes)]
        num_edges = []
        for fan_out in self.num_neighbors:
            begin = len(nodes) - num_nodes[-1]
            frontier = nodes[begin:].tolist()
            drawn = self.graph.batch_random_fanout(frontier, fan_out)
            # A node with fewer neighbors has zeros in the other places.
            degree = np.fromiter(map(self.graph.get_degree, frontier), np.int64, len(frontier))
            target, place = np.nonzero(np.arange(fan_out) < degree[:, None])
            source = drawn[target, place]
            new = np.setdiff1d(source, nodes)
            nodes = np.concatenate([nodes, new])
            order = np.argsort(nodes)
            local = order[np.searchsorted(nodes, source, sorter=order)]
            edges.append(np.stack([local, begin + target]))
            num_nodes.append(len(new))
            num_edges.append(len(source))
        edge_index = torch.from_numpy(np.concatenate(edges, 1))
        return nodes, edge_index, num_nodes, num_edges

    def features(self, n_id: np.ndarray) -> np.ndarray:
        return self.x[n_id].view(np.int8)


def graphzero_files(store: Store) -> tuple[Path, Path]:
    """The paths of a store's graph and features in GraphZero's formats, next to the store."""
    name = store.path.name
    return store.path.with_name(f"{name}.gl"), store.path.with_name(f"{name}.gd")


def write_graphzero(store: Store) -> None:
    """Write a store's graph and its int8 features in GraphZero's formats, next to the store."""
    graph, features = graphzero_files(store)
    sizes = [8 * (store.num_nodes + 1), 8 * store.num_edges]
    edges_at = -(-(64 + sizes[0]) // 64) * 64
    header = [8388354976772092519, *sizes, 64, edges_at, store.num_nodes, store.num_edges, 0]
    with open(graph, "wb") as file:
        file.write(np.array(header, np.uint64).tobytes())
        for _, part in store.chunks("colptr"):
            file.write(part.astype(np.int64).tobytes())
        file.write(bytes(edges_at - file.tell()))
        for _, part in store.chunks("row"):
            file.write(part.astype(np.int64).tobytes())
    with open(features, "wb") as file:
        # no flags, and type 0, INT32
        file.write(b"GZDATA26" + np.zeros(2, np.uint32).tobytes())
        file.write(np.array([store.num_nodes, store.num_features // 4], np.uint64).tobytes())
        for _, part in store.chunks("x"):
            file.write(part.tobytes())


def drop_from_page_cache(store: Store) -> None:
    for path in (*store.path.glob("*.npy"), *graphzero_files(store)):
        if path.exists():
            with open(path, "rb") as file:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    """Bytes from disk for this process and its workers so far."""
    total = 0
    for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += int(dict(line.split(": ") for line in lines)["read_bytes"])
    return total


def train_from_maps(asked: dict[str, Any]) -> dict[str, float]:
    """Train in this process for some time; runs in the child."""
    config = TrainConfig.create(asked["config"])
    store = open_store(config.dataset)
    kind = GraphZeroBatches if asked["side"] == "graphzero" else MappedBatches
    batches = kind(store, config, asked["side"] == "random")
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
    """Count the batches and bytes from the first batch after `warm_up` seconds on."""
    begin = time.perf_counter()
    first = None
    number = nodes = 0
    for batch in batches:
        nodes += len(batch.x)
        size = batch.batch_size
        learner.step(iter([batch]), 1, number * size, (number + 1) * size)
        number += 1
        now = time.perf_counter()
        if first is None and now - begin > warm_up:
            first = number, now, read_bytes()
        elif first is not None and now - first[1] > seconds:
            break
    done = number - first[0]
    return {
        "batches": done,
        "seconds": now - first[1],
        "read_bytes": read_bytes() - first[2],
        "nodes": nodes / number,
    }


def config_of(asked: argparse.Namespace, store: Store, setting: str) -> TrainConfig:
    values = {
        "dataset": str(store.path),
        "loading": "store",
        "epochs": asked.epochs,
        "train_eval": "never",
        "eval_splits": [],
        "num_threads": "auto",
        "spool": asked.spool,
        "precision": asked.precision,
    }
    return TrainConfig.create(values | SETTINGS[setting])


def figures(ended: Run, batches: int, seconds: float, read: int, written: int) -> dict[str, Any]:
    return {
        "batches": batches,
        "seconds": round(seconds, 1),
        "batches/s": round(batches / seconds, 3),
        "MB read a batch": round(read / batches / 2**20, 2),
        "MB written a batch": round(written / batches / 2**20, 2),
        "peak in use, GB": round(ended.held_peak_bytes / GB, 2),
        "peak with page cache, GB": round(ended.peak_bytes / GB, 2),
    }


def from_store(asked: argparse.Namespace, config: TrainConfig, folder: Path) -> dict[str, Any]:
    ended = run(config, asked.limit, run_dir=folder, echo=False).require_finished()
    train = open_store(config.dataset).splits["train"]
    batches = asked.epochs * -(-len(train) // config.batch_size)
    moved = [event for event in ended.events if event["event"] == "disk"][-1]
    seconds = ended.metrics["time_s"].sum()
    return figures(ended, batches, seconds, moved["read_bytes"], moved["write_bytes"])


def from_maps(
    asked: argparse.Namespace, config: TrainConfig, folder: Path, side: str, workers: int
) -> dict[str, Any]:
    answer = folder.with_suffix(".json")
    task = {
        "config": config.model_dump(mode="json"),
        "side": side,
        "workers": workers,
        "warm_up": asked.warm_up,
        "seconds": asked.seconds,
        "answer": str(answer),
    }
    argv = [sys.executable, __file__, "--task", json.dumps(task)]
    ended = watch(argv, asked.limit, run_dir=folder, echo=False)
    if ended.exit_code or not answer.exists():
        return {"batches/s": 0.0, "ended": str(ended.diagnosis)}
    counted = json.loads(answer.read_text())
    row = figures(ended, counted["batches"], counted["seconds"], counted["read_bytes"], 0)
    return row | {"nodes a batch": round(counted["nodes"])}


def compare(asked: argparse.Namespace, store: Store, setting: str, folder: Path) -> dict[str, Any]:
    """Train on each side in turn; print a line for each, and how much faster the store is."""
    config = config_of(asked, store, setting)
    rows = {}
    for side in asked.sides:
        for workers in [0] if side in ("store", "memmap") else asked.workers:
            name = side if side == "store" else f"{side}, {workers} workers"
            drop_from_page_cache(store)
            place = folder / f"{setting}-{side}-{workers}"
            if side == "store":
                rows[name] = from_store(asked, config, place)
            else:
                rows[name] = from_maps(asked, config, place, side, workers)
            print(f"{setting}: {name}: {json.dumps(rows[name])}", flush=True)
    maps = {name: row["batches/s"] for name, row in rows.items() if name != "store"}
    best = max(maps, key=maps.get, default=None)
    if best and maps[best] and "store" in rows:
        ratio = rows["store"]["batches/s"] / maps[best]
        print(f"{setting}: the store trains {ratio:.1f} x as fast as the best map ({best})")
        rows["ratio"] = round(ratio, 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides = ["store", "memmap", "random", "graphzero"]
    parser.add_argument("store", type=Path, nargs="?", help="int8; by default one is generated")
    parser.add_argument("--scale", type=float, default=0.1, help="of the generated store")
    parser.add_argument("--limit", default="4 GB")
    parser.add_argument("--setting", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    parser.add_argument("--sides", nargs="+", choices=sides, default=sides[:3])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--epochs", type=int, default=1, help="of the store")
    parser.add_argument("--spool", default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--graphzero", type=Path, metavar="DIR")
    parser.add_argument("--dir", type=Path, help="keep what is generated here")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.task:
        task = json.loads(asked.task)
        Path(task["answer"]).write_text(json.dumps(train_from_maps(task)))
        return
    os.environ.update(trainer_environment(os.environ))
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        path = asked.store or (asked.dir or Path(folder)) / f"int8-{asked.scale:g}"
        if not path.exists():
            synthesize_store(path, asked.scale, feature_dtype="int8", progress=False)
        store = open_store(path)
        if asked.graphzero:
            sys.path.append(str(asked.graphzero))
            os.environ["PYTHONPATH"] = str(asked.graphzero)
            if not graphzero_files(store)[1].exists():
                write_graphzero(store)
        os.environ["SLURM_TMPDIR"] = folder  # of the spool
        answer = {name: compare(asked, store, name, Path(folder)) for name in asked.setting}
    print(json.dumps({"nodes": store.num_nodes, "limit": asked.limit, **answer}, indent=1))


if __name__ == "__main__":
    main()
