"""Training speed from a store on disk (page cache warm) against stock PyG in RAM, in one run.

Run it by hand from the repository root: `python tests/benchmarks/bench_training.py [--scale 0.02]
[--dir DIR] [--setting small]`. Stock PyG is its `NeighborLoader` with float32 features in RAM and
its `GraphSAGE`, called as in its documentation, so that every layer computes every sampled node.
Where PyG has neither torch-sparse nor pyg-lib to sample with, `ogbnlib.sample_without_pyg_lib()`
lets it. The trimmed model gets the counts of each hop. torch-sparse has no such counts, so there
the `NeighborLoader` samples with `store.sampler`. All sides train in float32 with Adam, in turn, with
one torch thread and torch's default; in each round the better of the two is compared, and the median
of the rounds counts. All sides run with the environment that `run` gives its trainer.

`--peer graphbolt --peer-python DIR/bin/python [--precision bf16]` compares [15, 10, 5] x 1024 x 256
with GraphBolt of dgl 2.1.0 instead, in float32 and in the same precision, each side in processes of
its own. Its environment: `python3 -m venv DIR`, then `DIR/bin/pip install dgl==2.1.0 torch==2.2.1
torchdata==0.7.1 'numpy<2' 'pandas<3' pydantic pyyaml` (for a CPU alone, a CPU build of torch 2.2.1).
"""

import argparse
import collections
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.typing as installed
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

from ogbnlib import sample_without_pyg_lib
from ogbnlib.graph.store import Store, is_store, open_store
from ogbnlib.memory.malloc import trainer_environment
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.sources.synth import synthesize_store

SETTINGS = {
    "small": {"num_neighbors": (3, 2), "batch_size": 128, "hidden_channels": 16, "epochs": 61},
    "large": {"num_neighbors": (15, 10, 5), "batch_size": 1024, "hidden_channels": 64, "epochs": 4},
}


def stock_sampler() -> str:
    """Name what samples for stock PyG."""
    if installed.WITH_PYG_LIB:
        return "pyg-lib"
    if installed.WITH_TORCH_SPARSE:
        return f"torch-sparse {version('torch-sparse')}"
    sample_without_pyg_lib()
    return "ogbnlib.sample_without_pyg_lib()"


def stock_loader(
    store: Store, data: Data, setting: dict, sampler: CSCSampler | None = None
) -> NeighborLoader:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return NeighborLoader(
            data,
            list(setting["num_neighbors"]),
            input_nodes=torch.from_numpy(store.splits["train"]),
            batch_size=setting["batch_size"],
            shuffle=True,
            neighbor_sampler=sampler,
        )


def loop_rate(
    loader: Iterable[Data], sizes: tuple[int, ...], seconds: float, threads: int, trimmed: bool
) -> float:
    """Training batches per second of a loop with PyG's GraphSAGE, the first one left out."""
    torch.set_num_threads(threads)
    model = GraphSAGE(*sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done, begin = -1, time.perf_counter()
    while True:
        for batch in loader:
            hops = {}
            if trimmed:
                hops["num_sampled_nodes_per_hop"] = batch.num_sampled_nodes
                hops["num_sampled_edges_per_hop"] = batch.num_sampled_edges
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index, **hops)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            done += 1
            if done == 0:
                begin = time.perf_counter()
            elif time.perf_counter() - begin > seconds:
                return done / (time.perf_counter() - begin)


OURS = """
import json, sys
from ogbnlib import TrainConfig
from ogbnlib.training.train import train
rows = train(TrainConfig.create(**json.loads(sys.argv[1])), sys.argv[2]).history[1:]
print(sum(row["time_s"] for row in rows) / len(rows))
"""


def our_rate(
    store: Store, setting: dict, env: dict[str, str], threads: int | str, precision: str = "fp32"
) -> float:
    """Training batches per second of ours in a process of its own, from whole epochs after the
    first."""
    values = {"dataset": str(store.path), "loading": "store", "device": "cpu", **setting}
    values |= {"train_eval": "never", "eval_splits": []}
    values |= {"num_threads": threads, "precision": precision}
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-c", OURS, json.dumps(values), f"{folder}/run"]
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True)
    epoch_s = float(done.stdout.splitlines()[-1])
    return -(-len(store.splits["train"]) // setting["batch_size"]) / epoch_s


def compare_stock(store: Store, setting: dict, seconds: float, rounds: int) -> None:
    """Print batches per second of all sides, in turn, and the ratios of all rounds."""
    threads = sorted({1, torch.get_num_threads()})
    fan_outs = list(setting["num_neighbors"])
    sizes = (store.num_features, setting["hidden_channels"], len(fan_outs), store.num_classes)
    whole = store.to_data()
    data = Data(whole.x, whole.edge_index, y=whole.y)  # masks would be cut out for each batch
    sampler = stock_sampler()
    stock = stock_loader(store, data, setting)
    with_ours = stock_loader(store, data, setting, store.sampler(fan_outs))
    loop = partial(loop_rate, sizes=sizes, seconds=seconds)
    sides = {
        f"stock PyG ({sampler})": partial(loop, stock, trimmed=False),
        "stock PyG (store.sampler), trimmed": partial(loop, with_ours, trimmed=True),
        "ours": partial(our_rate, store, setting, dict(os.environ)),
    }
    rates = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            rates[name].append([side(threads=number) for number in threads])
    for name, of_rounds in rates.items():
        for number, each in zip(threads, zip(*of_rounds, strict=True), strict=True):
            spread = f"{min(each):.2f} to {max(each):.2f}"
            print(f"  {name}, {number} thread(s): {median(each):.2f} batches/s ({spread})")
    for name in [*sides][:-1]:
        ratios = [max(a) / max(b) for a, b in zip(rates["ours"], rates[name], strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"  {median(ratios):.2f} x {name}; rounds: {each}")


def compare_graphbolt(
    store: Store, python: Path, precision: str, seconds: float, rounds: int
) -> None:
    """Print batches per second of both sides, in turn, and the ratios of the medians."""
    setting = {"num_neighbors": [15, 10, 5], "batch_size": 1024, "hidden_channels": 256}
    rates = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/train.npy", store.splits["train"])
        np.save(f"{folder}/x.npy", store.read("x", "float32"))
        for name in ("colptr", "row", "y"):
            np.save(f"{folder}/{name}.npy", getattr(store, name))
        script = Path(__file__).with_name("peer_graphbolt.py")
        for _, threads in itertools.product(range(rounds), (1, 2)):
            env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            peer = {"folder": folder, "fan_out": [15, 10, 5], "batch_size": 1024, "hidden": 256}
            peer |= {"threads": threads, "seconds": seconds}
            for peer_precision in {"fp32", precision}:
                arguments = json.dumps(peer | {"precision": peer_precision})
                argv = [str(python), str(script), arguments]
                done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True)
                rates[peer_precision, threads].append(float(done.stdout.splitlines()[-1]))
            env |= trainer_environment(env)
            rate = our_rate(store, setting | {"epochs": 4}, env, threads, precision)
            rates["ours", threads].append(rate)
    for threads in (1, 2):
        ours = median(rates["ours", threads])
        print(f"{precision}, {threads} thread(s): ours {ours:.2f} batches/s")
        for peer_precision in sorted({"fp32", precision}):
            rate = median(rates[peer_precision, threads])
            print(f"  {ours / rate:.2f} x GraphBolt in {peer_precision} ({rate:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.02)
    parser.add_argument("--dir", type=Path, help="keep the generated store here")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--peer", choices=["stock", "graphbolt"], default="stock")
    parser.add_argument("--setting", choices=SETTINGS, nargs="+", default=["small", "large"])
    parser.add_argument("--peer-python", type=Path, help="Python of the peer's environment")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.peer != "graphbolt" and (missing := trainer_environment(os.environ)):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **missing})
    with tempfile.TemporaryDirectory() as scratch:
        path = (options.dir or Path(scratch)) / f"bench-store-{options.scale:g}"
        if not is_store(path):
            synthesize_store(path, options.scale, progress=False)
        store = open_store(path)
        print(
            f"{store.num_nodes:,} nodes, {store.num_edges:,} edges, {store.num_features} features"
        )
        if options.peer == "graphbolt":
            return compare_graphbolt(
                store, options.peer_python, options.precision, options.seconds, options.rounds
            )
        for name in options.setting:
            setting = SETTINGS[name]
            print(f"\n{setting}", flush=True)
            compare_stock(store, setting, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
