"""Sizes of the parts of a run's memory, without torch and without data.

"Measured" means: with the kernel's counters, on the synthetic data set at scale 0.01, with PyTorch
2.13 and PyG 2.8 on Linux.
"""

import dataclasses
import functools
import importlib.util
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..config import TrainConfig
from ..errors import MB
from ..graph.npz import Array
from ..graph.store import GraphSize
from ..graph.store_format import index_dtype, label_dtype
from .batches import BatchShape


def _torch_is_for_gpus() -> bool:
    torch = importlib.util.find_spec("torch")  # its files, as an import takes seconds
    folders = torch.submodule_search_locations if torch else None
    libraries = ("lib/libtorch_cuda.so", "lib/libtorch_hip.so")
    return any(Path(folder, name).exists() for folder in folders or () for name in libraries)


# A training process at rest, with kernels loaded (`tests/warm_up.py`); a test compares it with a
# real process. A build of torch for GPUs takes more when it is imported, with or without a GPU: 471
# MB in all with torch 2.13 for CUDA 13.0, 484 MB with 2.15 for CUDA 13.2.
RUNTIME_BYTES = (484 if _torch_is_for_gpus() else 354) * MB
# Pages of the interpreter that a forked worker writes to: 2 workers added 17 MB, 12 persistent ones
# of three loaders 140 MB.
WORKER_BYTES = 12 * MB
PREFETCH_FACTOR = 2  # DataLoader's default: batches that each worker has ready or under way
# Sigmas of log-normal degrees: in-neighbors in a directed graph, and degrees with reverse edges.
# They were fitted to batches (num_neighbors x batch_size) of generated graphs of scale 0.02 to 1
# and of real ones. With reverse edges the nodes of [3, 2] x 128, [15, 10] x 512 and
# [15, 10, 5] x 1024 are within 8 %. [10, 10, 10] x 1024 has 692,000 nodes in the real papers100M,
# where the example of DGL's GraphBolt reports 669,000.
# The second value, for bounds of memory, is that of graphs with more even degrees.
_DIRECTED_SIGMAS = (1.4, 0.92)
_BOTH_SIGMAS = (0.93, 0.8)
# Number of nodes in the labelled nodes' field of research: 2.5 M in a generated graph of any scale
# that has more, 1.6 times its labelled nodes at full size.
_FIELD_NODES = 2.5e6
_FIELD_LABELLED = 1.6
_LOYALTY = 0.95  # share of the edges that stay in their field
# In the field and outside: the share of nodes that are visited, and the sigma of their visits.
_VISITS_DIRECTED = ((0.72, 0.85), (0.5, 0.55))
_VISITS_BOTH = ((1.0, 0.75), (1.0, 1.0))


def _mean_sampled(mean_degree: float, k: int, sigma: float) -> float:
    """E[min(degree, k)] for log-normal degrees, the mean number of neighbors; all for k = -1."""
    if k < 0 or mean_degree <= 0:
        return mean_degree
    above = (math.log(k / mean_degree) + sigma**2 / 2) / sigma  # of log(k), in standard deviations
    normal = statistics.NormalDist()
    return mean_degree * normal.cdf(above - sigma) + k * normal.cdf(-above)


def trained_edges(size: GraphSize, undirected: bool | None) -> int:
    """Number of edges trained on: with `undirected`, twice those of a directed graph. This counts
    the 1 to 2 % of them that repeat another edge and are dropped."""
    return size.num_edges * (2 if undirected and not size.undirected else 1)


@functools.cache
def _degree_quantiles(sigma: float) -> tuple[float, ...]:
    # Degrees relative to the mean, of 64 equally large groups of nodes, ascending.
    values = np.exp([statistics.NormalDist(0, sigma).inv_cdf((i + 0.5) / 64) for i in range(64)])
    return tuple((values / values.mean()).tolist())


def _hit_weights(size: GraphSize, undirected: bool | None, even: bool = True) -> tuple[float, ...]:
    # How often an edge leads to a node of each of 64 equally large groups, relative to the mean.
    if undirected or size.undirected:  # in proportion to degrees
        return _degree_quantiles(_BOTH_SIGMAS[even])  # True: the second sigma
    # In a directed citation graph, edges lead to 0.4 of the nodes (26 of 64 groups), as few papers
    # cite back into the recent ones that many seeds share.
    return (64 / 26,) * 26 + (0.0,) * 38


def distinct_nodes(size: GraphSize, undirected: bool | None, draws: float) -> float:
    """Expected distinct nodes that `draws` edges lead to; on the high side, to bound memory."""
    weights = _hit_weights(size, undirected)
    # of each group, the share of nodes that no edge leads to (Poisson)
    missed = [math.exp(-weight * draws / size.num_nodes) for weight in weights]
    return size.num_nodes * (1 - sum(missed) / len(missed))


def _field_nodes(size: GraphSize) -> float:
    # number of nodes in the field of the labelled ones
    return min(size.num_nodes, max(_FIELD_NODES, _FIELD_LABELLED * sum(size.num_seeds.values())))


def _visited(size: GraphSize, undirected: bool | None, batch: BatchShape) -> tuple[Array, Array]:
    """Groups of nodes that training visits: each group's number of nodes, and the share of all
    visits that one of its nodes gets; float64 [64] or [128].

    Labelled nodes are of one field. 95 % of the edges stay in it, so a node h hops from a seed is
    in the field with probability 0.95 ** h. Inside and outside of the field, visits are spread
    log-normally over all nodes or a part of them. The spreads were fitted to epochs of
    [3, 2] x 128, [15, 10] x 512 and [15, 10, 5] x 1024 in generated graphs: directed ones of scale
    0.02 to 0.08 within 5 %, with reverse edges those of scale 0.02 to 1 within 8 % (18 % for an
    epoch at full size).
    """
    field = _field_nodes(size)
    hop_nodes = np.array(batch.hop_nodes, float)
    stay = _LOYALTY ** np.arange(len(hop_nodes))  # probability, by hop
    in_field = float(hop_nodes @ stay / max(1, batch.num_nodes))  # share of the batch's nodes
    spreads = _VISITS_BOTH if undirected or size.undirected else _VISITS_DIRECTED
    if field == size.num_nodes:
        return _group(field, 1.0, *spreads[0])
    inside = _group(field, in_field, *spreads[0])
    outside = _group(size.num_nodes - field, 1 - in_field, *spreads[1])
    return np.append(inside[0], outside[0]), np.append(inside[1], outside[1])


def _group(nodes: float, share: float, visited_share: float, sigma: float) -> tuple[Array, Array]:
    # as `_visited`, for nodes that get `share` of all visits; `visited_share` of them get any
    visited = visited_share * nodes
    visits = np.multiply(_degree_quantiles(sigma), share / visited)
    return np.full(64, visited / 64), visits


def shared_nodes(
    size: GraphSize, undirected: bool | None, batch: BatchShape, num_batches: int
) -> float:
    """Expected number of distinct nodes in several batches."""
    nodes, shares = _visited(size, undirected, batch)
    visits = num_batches * batch.num_nodes * shares  # expected, of one node in each group
    return float(nodes @ -np.expm1(-visits))  # a node is visited with probability 1 - exp(-visits)


def rows_left(
    size: GraphSize, undirected: bool | None, batch: BatchShape, num_batches: int, num_windows: int
) -> tuple[Array, Array]:
    """The share of the windows' rows that is still read if those of some nodes stay in memory.

    A window has `num_batches` batches. The nodes that stay are those in the largest number of the
    `num_windows` windows. Returns numbers of such nodes, rising from 0, and the share for each;
    float64 [num_windows + 1].
    """
    nodes, shares = _visited(size, undirected, batch)  # by group: its nodes, each one's share
    visits = num_batches * batch.num_nodes  # in a window
    # expected number of windows with each node; above 0 for the logarithm, as seeds without
    # neighbors never leave their field
    expected = num_windows * -np.expm1(-np.maximum(visits * shares, 1e-12))
    counts = np.arange(1, num_windows + 1)
    # Probability of each count [num_windows, groups], by its logarithm, as counts are large. Poisson
    # in place of binomial: most nodes are in few of the windows.
    log_factorials = np.cumsum(np.log(counts))[:, None]
    chances = np.exp(counts[:, None] * np.log(expected) - expected - log_factorials)
    chances[-1] = -np.expm1(-expected) - chances[:-1].sum(0)  # includes higher counts
    with_count = (chances @ nodes)[::-1]  # number of nodes, those in most windows first
    rows = with_count * counts[::-1]  # of all windows, for these nodes
    share_left = 1 - np.cumsum(rows) / rows.sum()
    return np.append(0.0, np.cumsum(with_count)), np.append(1.0, share_left)


def expected_batch(
    size: GraphSize,
    undirected: bool | None,
    num_seeds: int,
    num_neighbors: Sequence[int],
    *,
    even: bool = False,
) -> BatchShape:
    """The batch that `num_seeds` seeds grow into, by the mean degree and the spread of degrees in
    citation graphs.

    With `even`, degrees differ less, which gives a larger batch, for bounds of memory.
    """
    # If all neighbors are taken, degrees alone decide, and these are even in generated graphs.
    # Batches of sampled neighbors are smaller, as seeds have neighbors in common.
    even = even or -1 in num_neighbors
    # Each of 64 parts of the nodes is counted by itself: arrays [64]. With reverse edges a node is
    # hit in proportion to its degree, so the weights are relative degrees, too.
    weights = np.array(_hit_weights(size, undirected, even))
    mean_degree = trained_edges(size, undirected) / size.num_nodes
    # With reverse edges most of a batch is in the field of its seeds.
    both = undirected or size.undirected
    num_nodes = _field_nodes(size) if both and not even else size.num_nodes
    seeds = min(num_seeds, num_nodes)
    frontier = np.full(64, seeds / 64)  # nodes found in the last hop
    unseen = num_nodes / 64 - frontier
    nodes = [float(seeds)]  # by hop, like `edges`
    edges: list[float] = []
    for k in num_neighbors:
        # With reverse edges neighbors have higher degrees than seeds, so groups count apart.
        if both:
            degrees = np.minimum(mean_degree * weights, math.inf if k < 0 else k)  # -1: all
            edges.append(float(frontier @ degrees))
        else:
            edges.append(nodes[-1] * _mean_sampled(mean_degree, k, _DIRECTED_SIGMAS[even]))
        # a node is hit at least once with probability 1 - exp(-hits expected)
        frontier = unseen * -np.expm1(-edges[-1] / num_nodes * weights)
        unseen = unseen - frontier
        nodes.append(float(frontier.sum()))
    return BatchShape(tuple(round(n) for n in nodes), tuple(round(n) for n in edges))


def smaller_fan_outs(config: TrainConfig) -> list[tuple[int, ...]]:
    """The config's fan-outs halved once, twice and so on, down to 2; -1 (all neighbors) becomes 15."""
    smaller: list[tuple[int, ...]] = []
    fan_outs = config.fan_out(training=True)  # () for propagated features
    while any(k < 0 or k > 2 for k in fan_outs):
        # a half is rounded up; k = 1 stays
        fan_outs = tuple(15 if k < 0 else min(k, max(2, -(-k // 2))) for k in fan_outs)
        smaller.append(fan_outs)
    return smaller


def sampling_bytes(batch: BatchShape) -> int:
    """Bytes of the sampler's arrays: ids and hash table, offsets and degrees, rows and columns."""
    return 32 * batch.num_nodes + 48 * batch.num_edges


def has_own_dtype(config: TrainConfig, size: GraphSize) -> bool:
    """Whether features stay in an existing store, whose dtype then replaces `feature_dtype`."""
    return config.policy.reads_disk and size.stored == "store"


def feature_itemsize(config: TrainConfig, size: GraphSize) -> int:
    """Bytes of a feature value, in a store that stays on disk or by `feature_dtype`."""
    itemsize = np.dtype(config.feature_dtype).itemsize
    if has_own_dtype(config, size):
        itemsize = size.feature_itemsize
    if itemsize == 1 and config.policy.hops(config):
        return 4  # int8 features are propagated as float32
    return itemsize


def label_itemsize(num_classes: int) -> int:
    return np.dtype(label_dtype(num_classes)).itemsize  # int16, int64 beyond 32,767 classes


def hop_size(size: GraphSize, config: TrainConfig) -> GraphSize:
    """The size of the graph that a run trains on, with propagated features if it has them."""
    hops = config.policy.hops(config)
    if hops is None or size.hops is not None:  # trains on the graph's own features, or on its hops
        return size
    return dataclasses.replace(size, num_features=size.num_features * (hops + 1), hops=hops)


def raw_bytes(size: GraphSize) -> int:
    """Bytes of the arrays that every script loads: the edges as int64 [2, E], the features as float32."""
    return 16 * size.num_edges + 4 * size.num_nodes * size.num_features


def stock_csc_bytes(size: GraphSize, edges: int) -> int:
    """Bytes of a stock `NeighborLoader`'s colptr, row and perm, int64 (PyG's `to_csc`)."""
    return 8 * (size.num_nodes + 1) + 16 * edges


def shared_csc_bytes(size: GraphSize, edges: int) -> int:
    """Bytes of one CSC for all loaders: colptr int64 and row int32 (int64 from 2**31 nodes on)."""
    return 8 * (size.num_nodes + 1) + np.dtype(index_dtype(size.num_nodes)).itemsize * edges


def store_bytes(config: TrainConfig, size: GraphSize) -> dict[str, int]:
    """Bytes of each file of a store that training reads."""
    colptr = 8 * (size.num_nodes + 1)
    csc = shared_csc_bytes(size, trained_edges(size, config.undirected))
    return {
        "colptr": colptr,
        "row": csc - colptr,
        "x": size.num_nodes * size.num_features * feature_itemsize(config, size),
    }
