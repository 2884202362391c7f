"""The parts of a run's memory, each from sizes alone: a `GraphSize`, a `TrainConfig`, a batch.

Every part is a function whose docstring gives its formula and where that comes from. "Measured" means: by the kernel's
per-phase counters (`timeline.phase_memory`) on the synthetic data set at scale 0.01, PyTorch 2.13 and PyG 2.8 on Linux;
the tests check the sums at other scales and settings. No torch, no data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..config import TrainConfig
from ..errors import MB, InputError, unknown_name
from ..sampling.budget import BatchShape

if TYPE_CHECKING:
    from ..graph.store import Dataset


# A training process at rest, kernels loaded (`train.warm_up`); `sandbox.measure_runtime_bytes` measures it anew.
RUNTIME_BYTES = 354 * MB
# What a forked worker writes to: its interpreter's pages, the sampling of a batch aside. 2 workers added 17 MB.
WORKER_BYTES = 8 * MB
# DataLoader's own default: batches that each worker has ready or under way (torch.utils.data, prefetch_factor).
PREFETCH_FACTOR = 2


@dataclass(frozen=True)
class GraphSize:
    """The numbers that decide memory.

    Attributes:
        num_edges: As loaded, in one direction unless `undirected`.
        num_seeds: Nodes of the splits "train", "valid" and "test".
        undirected: Whether reverse edges are among `num_edges`.
        stored: As a store, whose features have `feature_itemsize` bytes a value; as raw arrays; or as csv files, which
            OGB's own code reads into RAM whole.
    """

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    num_seeds: Mapping[str, int]
    undirected: bool = False
    stored: Literal["raw", "csv", "store"] = "raw"
    feature_itemsize: int = 4


def _known(name: str, nodes: int, edges: int, features: int, classes: int, *seeds: int) -> GraphSize:
    splits = dict(zip(("train", "valid", "test"), seeds, strict=True))
    both = name in ("ogbn-products", "ogbn-proteins")
    stored: Literal["raw", "csv"] = "raw" if name == "ogbn-papers100M" else "csv"
    return GraphSize(name, nodes, edges * (2 if both else 1), features, classes, splits, both, stored)


# Open Graph Benchmark (Hu et al., NeurIPS 2020), table 2 and the pages of its data sets. OGB adds the reverse edges of
# products and proteins on reading. mag: papers and their citations alone; proteins: no node features, 112 labels.
KNOWN = {
    size.name: size
    for size in (
        _known("ogbn-arxiv", 169_343, 1_166_243, 128, 40, 90_941, 29_799, 48_603),
        _known("ogbn-products", 2_449_029, 61_859_140, 100, 47, 196_615, 39_323, 2_213_091),
        _known("ogbn-mag", 736_389, 5_416_271, 128, 349, 629_571, 64_879, 41_939),
        _known("ogbn-proteins", 132_534, 39_561_252, 0, 112, 86_619, 21_236, 24_679),
        _known("ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 172, 1_207_179, 125_265, 214_338),
    )
}


def size_of(dataset: str) -> GraphSize:
    """The size of a known OGB data set, or of a folder, from its headers and split files.

    Raises:
        InputError: for an OGB name that is not known, and as `open_store` and `open_raw` for a folder.
    """
    if dataset.startswith("ogbn-"):
        if dataset not in KNOWN:
            raise InputError(f"dataset: {unknown_name(dataset, KNOWN, 'data set')}")
        return KNOWN[dataset]
    # Not at the top: they compile kernels, and a known data set should be answered at once.
    from ..graph.store import is_store, open_store
    from ..sources.ogb import open_raw

    return size_of_dataset(open_store(dataset) if is_store(dataset) else open_raw(dataset))


def size_of_dataset(dataset: Dataset) -> GraphSize:
    """The size of an open data set."""
    from ..graph.store import Store

    store = dataset if isinstance(dataset, Store) else None
    return GraphSize(
        name=dataset.name,
        num_nodes=dataset.num_nodes,
        num_edges=dataset.num_edges,
        num_features=dataset.num_features,
        num_classes=dataset.num_classes,
        num_seeds={split: len(ids) for split, ids in dataset.read_splits().items()},
        undirected=store is not None and store.undirected,
        stored="raw" if store is None else "store",
        feature_itemsize=4 if store is None else store.x.itemsize,
    )


def mean_sampled(mean_degree: float, k: int, sigma: float) -> float:
    """E[min(degree, k)] for log-normal degrees: the neighbors that a node gets on average; all of them for k = -1.

    With mu = ln(mean) - sigma^2 / 2: mean * Phi((ln k - mu - sigma^2) / sigma) + k * Phi((mu - ln k) / sigma).
    """
    if k < 0 or mean_degree <= 0:
        return mean_degree
    mu = math.log(mean_degree) - sigma**2 / 2
    below = _normal_cdf((math.log(k) - mu - sigma**2) / sigma)
    return mean_degree * below + k * _normal_cdf((mu - math.log(k)) / sigma)


def _normal_cdf(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def trained_edges(size: GraphSize, undirected: bool | None) -> int:
    """Edges that are trained on: twice those of a directed graph with `undirected` (1 to 2 % are repeats and go).

    None takes the graph as it is.
    """
    return size.num_edges * (2 if undirected and not size.undirected else 1)


def spread(size: GraphSize, undirected: bool | None) -> tuple[float, float]:
    """(sigma of the log-normal degrees, number of nodes over which sampling spreads); fits to the synthetic data set.

    0.92 and 0.40 of the nodes in a citation graph, where few papers cite back into the recent ones that many seeds
    share; 0.70 and 0.60 with reverse edges.
    """
    both = undirected or size.undirected
    return (0.70, 0.60 * size.num_nodes) if both else (0.92, 0.40 * size.num_nodes)


def expected_batch(
    size: GraphSize, undirected: bool | None, num_seeds: int, num_neighbors: Sequence[int]
) -> BatchShape:
    """The batch that `num_seeds` seeds grow into.

    Each node found at one hop gets `mean_sampled` neighbors at the next. Of m draws in all, reach * (1 - exp(-m /
    reach)) nodes are distinct.
    """
    sigma, reach = spread(size, undirected)
    mean_degree = trained_edges(size, undirected) / size.num_nodes
    seeds = min(num_seeds, size.num_nodes)
    nodes, edges, found, draws = [float(seeds)], [], float(seeds), float(seeds)
    for k in num_neighbors:
        edges.append(nodes[-1] * mean_sampled(mean_degree, k, sigma))
        draws += edges[-1]
        total = min(max(found, reach * -math.expm1(-draws / reach)), float(size.num_nodes))
        nodes.append(total - found)
        found = total
    return BatchShape(tuple(round(n) for n in nodes), tuple(round(n) for n in edges))


def smaller_fan_out(num_neighbors: Sequence[int]) -> tuple[int, ...] | None:
    """Half of each, 15 for all neighbors, 2 at the least; None where there is nothing left to halve."""
    smaller = tuple(15 if k < 0 else max(2, -(-k // 2)) if k > 2 else k for k in num_neighbors)
    return smaller if smaller != tuple(num_neighbors) else None


def sampling_bytes(batch: BatchShape) -> int:
    """The sampler's own arrays while it draws a batch: ids and hash table, offsets and degrees, rows and columns.

    About 32 bytes a node and 48 an edge, all freed before the batch is used.
    """
    return 32 * batch.num_nodes + 48 * batch.num_edges


# The graph ------------------------------------------------------------------------------------------------------------


def feature_itemsize(config: TrainConfig, size: GraphSize) -> int:
    """Bytes of a feature: a store's own under loading=store, else `feature_dtype`, also of a store still to be made."""
    if config.loading == "store" and size.stored == "store":
        return size.feature_itemsize
    return 2 if config.feature_dtype == "float16" else 4


def label_itemsize(num_classes: int) -> int:
    """Bytes of `ogb_raw.label_dtype`: int16, or int64 beyond 32,767 classes."""
    return 2 if num_classes <= 32767 else 8


def stock_csc_bytes(size: GraphSize, edges: int) -> int:
    """What a stock `NeighborLoader` keeps: colptr, row and perm, all int64 (`torch_geometric.loader.utils.to_csc`)."""
    return 8 * (size.num_nodes + 1) + 16 * edges


def stock_sort_bytes(size: GraphSize, edges: int) -> int:
    """What building it takes beyond that: its peak is 32 bytes an edge (sorted column, permutation, row, copies)."""
    return max(0, 32 * edges - stock_csc_bytes(size, edges))


def shared_csc_bytes(size: GraphSize, edges: int, engine: str = "numba") -> int:
    """One CSC for all: colptr int64 and row int32, int64 for the stock sampler and from 2**31 nodes on."""
    wide = engine == "pyg" or size.num_nodes >= 2**31
    return 8 * (size.num_nodes + 1) + (8 if wide else 4) * edges


def store_bytes(size: GraphSize, edges: int, itemsize: int) -> dict[str, int]:
    """The files of a store that training reads: `shared_csc_bytes` and the features."""
    colptr, x = 8 * (size.num_nodes + 1), size.num_nodes * size.num_features * itemsize
    return {"colptr": colptr, "row": shared_csc_bytes(size, edges) - colptr, "x": x}
