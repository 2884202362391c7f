"""Training speed from a store on disk (page cache warm) against stock PyG in RAM, on the same graph
in one run.

Run it by hand from the repository root: `python tests/benchmarks/bench_training.py [--scale 0.02]
[--dir DIR]`. Stock PyG is its `NeighborLoader` with float32 features in RAM and the forward of its
documentation, in which every layer computes every sampled node; it needs torch-sparse or pyg-lib.
Both sides train GraphSAGE with Adam, in turn, with one torch thread and with torch's default; in
each round the better of the two is compared, and the median of the rounds counts. Both sides run
with the environment that `run` gives its trainer: malloc's settings and huge pages.

`--peer graphbolt --peer-python DIR/bin/python [--precision bf16]` compares [15, 10, 5] x 1024 x 256
with GraphBolt of dgl 2.1.0 instead, in float32 and in the same precision, as its users run it and
with the huge pages that we ask for, each side in processes of its own. Its environment: `python3 -m
venv DIR`, then `DIR/bin/pip install dgl==2.1.0 torch==2.2.1 torchdata==0.7.1 'numpy<2' 'pandas<3'
pydantic pyyaml` (for a CPU alone, a CPU build of torch 2.2.1).
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
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.typing as installed
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

from ogbnlib.graph.store import Store, is_store, open_store
from ogbnlib.runs.supervise import HUGE_PAGES, trainer_environment
from ogbnlib.sources.synth import synthesize_store

SETTINGS = (
    {"num_neighbors": (3, 2), "batch_size": 128, "hidden_channels": 16, "epochs": 60},
    {"num_neighbors": (15, 10, 5), "batch_size": 1024, "hidden_channels": 64, "epochs": 4},
)


class Stock(torch.nn.Module):
    """GraphSAGE as in PyG's examples."""

    def __init__(self, sizes: list[int]):
        super().__init__()
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = F.relu(x)
        return x


def stock_rate(store: Store, data: Data, setting: dict, seconds: float, threads: int) -> float:
    """Training batches per second of stock PyG, the first one left out."""
    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = NeighborLoader(
            data,
            list(setting["num_neighbors"]),
            input_nodes=torch.from_numpy(store.splits["train"]),
            batch_size=setting["batch_size"],
            shuffle=True,
        )
    hidden = [setting["hidden_channels"]] * (len(setting["num_neighbors"]) - 1)
    model = Stock([store.num_features, *hidden, store.num_classes])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done, begin = -1, time.perf_counter()
    while True:
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size].long()).backward()
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
    store: Store, setting: dict, threads: int, env: dict[str, str], precision: str = "fp32"
) -> float:
    """Training batches per second of ours in a process of its own, from whole epochs after the
    first."""
    values = {
        "dataset": str(store.path),
        "loading": "store",
        "progress": "none",
        "device": "cpu",
        **setting,
    }
    values |= {
        "train_eval": "never",
        "eval_splits": [],
        "num_threads": threads,
        "precision": precision,
    }
    with tempfile.TemporaryDirectory() as tmp:
        argv = [sys.executable, "-c", OURS, json.dumps(values), f"{tmp}/run"]
        done = subprocess.run(argv, env=env, stdout=-1, check=True)
    return -(-len(store.splits["train"]) // setting["batch_size"]) / float(
        done.stdout.splitlines()[-1]
    )


def compare_stock(store: Store, setting: dict, seconds: float, rounds: int) -> None:
    """Print batches per second of both sides, in turn, and the ratios of all rounds."""
    x, y = torch.from_numpy(store.read("x", "float32")), torch.from_numpy(store.read("y"))
    data = Data(x=x, edge_index=torch.from_numpy(store.read_edge_index()), y=y)
    threads = sorted({1, torch.get_num_threads()})
    stock, ours = [], []
    for _ in range(rounds):
        stock.append([stock_rate(store, data, setting, seconds, number) for number in threads])
        ours.append([our_rate(store, setting, number, dict(os.environ)) for number in threads])
    for name, rates in {"stock PyG": stock, "ours": ours}.items():
        for number, each in zip(threads, zip(*rates, strict=True), strict=True):
            print(
                f"  {name}, {number} thread(s): {median(each):.2f} batches/s ({min(each):.2f} to {max(each):.2f})"
            )
    ratios = [max(a) / max(b) for a, b in zip(ours, stock, strict=True)]
    print(
        f"  {median(ratios):.2f} x stock PyG; rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )


def compare_graphbolt(
    store: Store, python: Path, precision: str, seconds: float, rounds: int
) -> None:
    """Print batches per second of both sides, in turn, with huge pages and without, and the ratios
    of the medians."""
    setting = {
        "num_neighbors": [15, 10, 5],
        "batch_size": 1024,
        "hidden_channels": 256,
        "epochs": 4,
    }
    rates = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as tmp:
        arrays = {
            "colptr": store.colptr,
            "row": store.row,
            "x": store.read("x", "float32"),
            "y": store.read("y"),
        }
        for name, array in {**arrays, "train": store.splits["train"]}.items():
            np.save(f"{tmp}/{name}.npy", array)
        del arrays
        for _, pages, threads in itertools.product(range(rounds), "10", (1, 2)):
            plain = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
            env = {
                **plain,
                "OMP_NUM_THREADS": str(threads),
                **({HUGE_PAGES: "1"} if pages == "1" else {}),
            }
            for theirs in {"fp32", precision}:
                argv = [
                    python,
                    Path(__file__).with_name("peer_graphbolt.py"),
                    tmp,
                    "15,10,5",
                    1024,
                    256,
                    theirs,
                ]
                done = subprocess.run(
                    [*map(str, argv), str(threads), str(seconds)], env=env, stdout=-1, check=True
                )
                rates[theirs, pages, threads].append(
                    json.loads(done.stdout.splitlines()[-1])["rate"]
                )
            env |= {
                name: value
                for name, value in trainer_environment(env).items()
                if name != HUGE_PAGES
            }
            rates["ours", pages, threads].append(our_rate(store, setting, threads, env, precision))
    for pages, threads in itertools.product("10", (1, 2)):
        ours = median(rates["ours", pages, threads])
        size = "huge" if pages == "1" else "4 KB"
        print(f"{precision}, {threads} thread(s), {size} pages: ours {ours:.2f} batches/s")
        for theirs, peer_pages in itertools.product(sorted({"fp32", precision}), "01"):
            peer = median(rates[theirs, peer_pages, threads])
            how = "with huge pages" if peer_pages == "1" else "as it comes"
            print(f"  {ours / peer:.2f} x GraphBolt in {theirs} {how} ({peer:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.02)
    parser.add_argument("--dir", type=Path, help="keep the generated store here")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--peer", choices=["stock", "graphbolt"], default="stock")
    parser.add_argument("--peer-python", type=Path, help="Python of the peer's environment")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.peer == "stock" and (missing := trainer_environment(os.environ)):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **missing})
    with tempfile.TemporaryDirectory() as scratch:
        path = (options.dir or Path(scratch)) / f"bench-store-{options.scale:g}"
        store = (
            open_store(path)
            if is_store(path)
            else synthesize_store(path, options.scale, progress=False)
        )
        print(
            f"{store.num_nodes:,} nodes, {store.num_edges:,} edges, {store.num_features} float16 features"
        )
        if options.peer == "graphbolt":
            return compare_graphbolt(
                store, options.peer_python, options.precision, options.seconds, options.rounds
            )
        if not (installed.WITH_PYG_LIB or installed.WITH_TORCH_SPARSE):
            sys.exit(
                "stock PyG: needs torch-sparse or pyg-lib, found neither; install one, or give --peer graphbolt"
            )
        for setting in SETTINGS:
            print(f"\n{setting}")
            compare_stock(store, setting, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
