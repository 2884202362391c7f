"""The parts of a run's memory, each from sizes alone: a `GraphSize`, a `TrainConfig`, a batch. No
torch, no data.

"Measured" means: by the kernel's counters on the synthetic data set at scale 0.01, PyTorch 2.13,
PyG 2.8, Linux.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from ..config import TrainConfig
from ..errors import MB
from ..graph.store import GraphSize
from ..graph.store_format import label_dtype
from .budget import BatchShape

# A training process at rest, kernels loaded (`train.warm_up`); a test compares it with a real
# process.
RUNTIME_BYTES = 354 * MB
# What a forked worker writes to: its interpreter's pages, the sampling of a batch aside. 2 workers
# added 17 MB, 12 that stay for three loaders 140 MB.
WORKER_BYTES = 12 * MB
# DataLoader's own default: batches that each worker has ready or under way (torch.utils.data,
# prefetch_factor).
PREFETCH_FACTOR = 2


def mean_sampled(mean_degree: float, k: int, sigma: float) -> float:
    """E[min(degree, k)] for log-normal degrees: the neighbors that a node gets on average; all of
    them for k = -1."""
    if k < 0 or mean_degree <= 0:
        return mean_degree
    mu = math.log(mean_degree) - sigma**2 / 2
    phi = statistics.NormalDist().cdf
    return mean_degree * phi((math.log(k) - mu - sigma**2) / sigma) + k * phi(
        (mu - math.log(k)) / sigma
    )


def trained_edges(size: GraphSize, undirected: bool | None) -> int:
    """Edges that are trained on: twice those of a directed graph with `undirected` (1 to 2 % are
    repeats and go)."""
    return size.num_edges * (2 if undirected and not size.undirected else 1)


@functools.cache
def _degree_quantiles(sigma: float) -> tuple[float, ...]:
    """Log-normal degrees of mean 1, each of a 64th of the nodes."""
    values = [math.exp(sigma * statistics.NormalDist().inv_cdf((i + 0.5) / 64)) for i in range(64)]
    total = sum(values)
    return tuple(64 * value / total for value in values)


def _hit_weights(size: GraphSize, undirected: bool | None) -> tuple[float, ...]:
    """Frequency at which an edge leads to a node of each 64th of the nodes; the mean is 1."""
    # With reverse edges in proportion to degrees, log-normal with sigma 0.8 in the generated
    # graphs; with 1.7 the batch of [10, 10, 10] x 1024 has the 670,000 nodes that DGL's GraphBolt
    # example reports for papers100M.
    if undirected or size.undirected:
        return _degree_quantiles(1.7 if size.name.startswith("ogbn-") else 0.8)
    # In a citation graph 0.4 of the nodes, as few papers cite back into the recent ones that many
    # seeds share.
    return (64 / 26,) * 26 + (0.0,) * 38


def distinct_nodes(size: GraphSize, undirected: bool | None, draws: float) -> float:
    """Expected number of distinct nodes at the end of `draws` edges."""
    share, count = size.num_nodes / 64, size.num_nodes
    return sum(share * -math.expm1(-draws * w / count) for w in _hit_weights(size, undirected))


def expected_batch(
    size: GraphSize, undirected: bool | None, num_seeds: int, num_neighbors: Sequence[int]
) -> BatchShape:
    """The batch that `num_seeds` seeds grow into, from mean degrees alone."""
    weights, mean_degree = (
        _hit_weights(size, undirected),
        trained_edges(size, undirected) / size.num_nodes,
    )
    seeds = min(num_seeds, size.num_nodes)
    frontier = [seeds / 64] * 64
    unseen = [max(0.0, size.num_nodes / 64 - count) for count in frontier]
    nodes, edges = [float(seeds)], list[float]()
    for k in num_neighbors:
        # With reverse edges a neighbor has more neighbors than a seed: the degrees' second moment
        # decides.
        if undirected or size.undirected:
            degrees = [mean_degree * w for w in weights]
            edges.append(
                sum(n * (d if k < 0 else min(k, d)) for n, d in zip(frontier, degrees, strict=True))
            )
        else:
            edges.append(nodes[-1] * mean_sampled(mean_degree, k, 0.92))
        frontier = [
            n * -math.expm1(-edges[-1] * w / size.num_nodes)
            for n, w in zip(unseen, weights, strict=True)
        ]
        unseen = [n - new for n, new in zip(unseen, frontier, strict=True)]
        nodes.append(sum(frontier))
    return BatchShape(tuple(round(n) for n in nodes), tuple(round(n) for n in edges))


def smaller_fan_out(num_neighbors: Sequence[int]) -> tuple[int, ...] | None:
    """Half of each fan-out, 15 for all neighbors, at least 2; None if none can be halved."""
    smaller = tuple(15 if k < 0 else max(2, -(-k // 2)) if k > 2 else k for k in num_neighbors)
    return smaller if smaller != tuple(num_neighbors) else None


def sampling_bytes(batch: BatchShape) -> int:
    """The sampler's arrays while it draws a batch: ids and hash table, offsets and degrees, rows
    and columns."""
    return 32 * batch.num_nodes + 48 * batch.num_edges


def feature_itemsize(config: TrainConfig, size: GraphSize) -> int:
    """Bytes of a feature: those of a store that stays on disk, else of `feature_dtype`."""
    on_disk = config.on_disk and size.stored == "store"
    itemsize = size.feature_itemsize if on_disk else np.dtype(config.feature_dtype).itemsize
    # int8 features are propagated as float32
    return 4 if config.propagated and itemsize == 1 else itemsize


def label_itemsize(num_classes: int) -> int:
    return np.dtype(label_dtype(num_classes)).itemsize


def hop_size(size: GraphSize, config: TrainConfig) -> GraphSize:
    """A graph with the features that `config` has propagated over it."""
    if size.hops is not None:
        return size
    return dataclasses.replace(
        size, num_features=size.num_features * (config.hops + 1), hops=config.hops
    )


def raw_bytes(size: GraphSize) -> int:
    """The edge list as int64 [2, E] and the features as float32, which every script loads before it
    trains."""
    return 16 * size.num_edges + 4 * size.num_nodes * size.num_features


def stock_csc_bytes(size: GraphSize, edges: int) -> int:
    """The CSC of a stock `NeighborLoader`: colptr, row, perm, int64
    (`torch_geometric.loader.utils.to_csc`)."""
    return 8 * (size.num_nodes + 1) + 16 * edges


def shared_csc_bytes(size: GraphSize, edges: int) -> int:
    """One CSC for all: colptr int64 and row int32, int64 from 2**31 nodes on."""
    return 8 * (size.num_nodes + 1) + (8 if size.num_nodes >= 2**31 else 4) * edges


def store_bytes(config: TrainConfig, size: GraphSize) -> dict[str, int]:
    """The files of a store that training reads."""
    colptr, csc = (
        8 * (size.num_nodes + 1),
        shared_csc_bytes(size, trained_edges(size, config.undirected)),
    )
    x = size.num_nodes * size.num_features * feature_itemsize(config, size)
    return {"colptr": colptr, "row": csc - colptr, "x": x}
