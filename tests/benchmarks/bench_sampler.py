"""Batches per second of `CSCSampler`, alone and in a `NodeLoader`, beside PyG's own sampler where it is installed.

Run it by hand from the repository root: `python tests/benchmarks/bench_sampler.py [--nodes N] [--edges E]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch_geometric.typing
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.sampler import NodeSamplerInput

from ogbnlib.sampling.sampler import CSCSampler

SETTINGS = (([3, 2], 128), ([15, 10, 5], 1024))


def power_law_csc(nodes: int, edges: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """About `edges` edges; in-degrees follow a Pareto law of exponent 2, popular sources are drawn more often."""
    rng = np.random.default_rng(seed)
    weight = 1 + rng.pareto(2.0, nodes)
    degree = np.floor(weight * (edges / weight.sum()) + rng.random(nodes)).astype(np.int64)
    colptr = np.zeros(nodes + 1, np.int64)
    np.cumsum(degree, out=colptr[1:])
    ranks = (nodes * rng.random(colptr[-1]) ** 2).astype(np.int64)
    return colptr, rng.permutation(nodes).astype(np.int32)[ranks]


def per_second(batches: Iterator[object], seconds: float) -> float:
    """Median rate of three rounds, after one batch that is not counted."""
    next(batches)
    rates = []
    for _ in range(3):
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds / 3:
            next(batches)
            count += 1
        rates.append(count / (time.perf_counter() - begin))
    return statistics.median(rates)


def sampled(sampler: CSCSampler, batch_size: int) -> Iterator[object]:
    """Batches straight from the sampler, epoch after epoch."""
    batches = torch.randperm(len(sampler._colptr) - 1).split(batch_size)
    for epoch in range(2**31):
        sampler.set_epoch(epoch)
        for seeds in batches:
            yield sampler.sample_from_nodes(NodeSamplerInput(None, seeds))


def loaded(loader: NodeLoader) -> Iterator[object]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--edges", type=int, default=28_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=9.0, help="per figure")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a second thread spins between small operations and slows whatever runs beside it

    colptr, row = power_law_csc(args.nodes, args.edges, args.seed)
    print(f"graph: {args.nodes:,} nodes, {len(row):,} edges, largest in-degree {np.diff(colptr).max():,}, int32 row")
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=args.nodes)
    peer = torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE
    stock = None
    if peer:
        target = np.repeat(np.arange(args.nodes), np.diff(colptr))
        edge_index = torch.from_numpy(np.stack([row.astype(np.int64), target]))
        stock = Data(edge_index=edge_index, num_nodes=args.nodes)

    for num_neighbors, batch_size in SETTINGS:
        sampler = CSCSampler(colptr, row, num_neighbors)
        out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(batch_size)))
        print(f"\n{num_neighbors} x {batch_size}: a batch has {len(out.node):,} nodes and {len(out.row):,} edges")
        alone = per_second(sampled(sampler, batch_size), args.seconds)
        print(f"  CSCSampler alone                  {alone:10.1f} it/s")
        ours = per_second(loaded(NodeLoader(data, sampler, batch_size=batch_size, shuffle=True)), args.seconds)
        print(f"  CSCSampler in NodeLoader          {ours:10.1f} it/s  (no features)")
        if stock is None:
            print("  PyG's NeighborLoader              torch-sparse and pyg-lib not installed, not compared")
            continue
        loader = NeighborLoader(stock, num_neighbors, batch_size=batch_size, shuffle=True)
        theirs = per_second(loaded(loader), args.seconds)
        print(f"  PyG's NeighborLoader              {theirs:10.1f} it/s  (ours: {ours / theirs:.1f} times as many)")


if __name__ == "__main__":
    main()
