"""The parts of a run's memory, each from sizes alone: a `GraphSize`, a `TrainConfig`, a batch.

Every part is a function whose docstring gives its formula and where that comes from. "Measured" means: by the kernel's
per-phase counters (`timeline.phase_memory`) on the synthetic data set at scale 0.01, PyTorch 2.13 and PyG 2.8 on Linux;
the tests check the sums at other scales and settings. No torch, no data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .config import InputError, TrainConfig, unknown_name

if TYPE_CHECKING:
    from .ogb_raw import Dataset

MIB = 2**20

# A training process at rest, kernels loaded (`train.warm_up`); `sandbox.measure_runtime_bytes` measures it anew.
RUNTIME_BYTES = 354 * MIB
# What a forked worker writes to: its interpreter's pages, the sampling of a batch aside. 2 workers added 17 MB.
WORKER_BYTES = 8 * MIB
# Streaming a compressed member: two decompression streams, their chunks and the counting of the edges.
CSC_CHUNKS_BYTES = 80 * MIB
# DataLoader's own default: batches that each worker has ready or under way (torch.utils.data, prefetch_factor).
PREFETCH_FACTOR = 2
# The batches that wait for the model under loading=store: so many, or as many as fit (`store_loader.prefetch`).
QUEUE_BATCHES, QUEUE_BYTES = 4, 256 * MIB


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
    from .ogb_raw import open_raw
    from .store import is_store, open_store

    return size_of_dataset(open_store(dataset) if is_store(dataset) else open_raw(dataset))


def size_of_dataset(dataset: Dataset) -> GraphSize:
    """The size of an open data set."""
    from .store import Store

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


# A batch --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Nodes discovered at each hop, seeds first, and edges sampled at each hop; expected values or a sample's."""

    hop_nodes: tuple[int, ...]
    hop_edges: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return sum(self.hop_nodes)

    @property
    def num_edges(self) -> int:
        return sum(self.hop_edges)


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


def num_edges(size: GraphSize, undirected: bool) -> int:
    """Edges that are trained on: twice those of a directed graph with `undirected` (1 to 2 % are repeats and go)."""
    return size.num_edges * (2 if undirected and not size.undirected else 1)


def spread(size: GraphSize, undirected: bool) -> tuple[float, float]:
    """(sigma of the log-normal degrees, number of nodes over which sampling spreads); fits to the synthetic data set.

    0.92 and 0.40 of the nodes in a citation graph, where few papers cite back into the recent ones that many seeds
    share; 0.70 and 0.60 with reverse edges.
    """
    both = undirected or size.undirected
    return (0.70, 0.60 * size.num_nodes) if both else (0.92, 0.40 * size.num_nodes)


def expected_batch(size: GraphSize, undirected: bool, num_seeds: int, num_neighbors: Sequence[int]) -> Batch:
    """The batch that `num_seeds` seeds grow into.

    Each node found at one hop gets `mean_sampled` neighbors at the next. Of m draws in all, reach * (1 - exp(-m /
    reach)) nodes are distinct.
    """
    sigma, reach = spread(size, undirected)
    mean_degree = num_edges(size, undirected) / size.num_nodes
    seeds = min(num_seeds, size.num_nodes)
    nodes, edges, found, draws = [float(seeds)], [], float(seeds), float(seeds)
    for k in num_neighbors:
        edges.append(nodes[-1] * mean_sampled(mean_degree, k, sigma))
        draws += edges[-1]
        total = min(max(found, reach * -math.expm1(-draws / reach)), float(size.num_nodes))
        nodes.append(total - found)
        found = total
    return Batch(tuple(round(n) for n in nodes), tuple(round(n) for n in edges))


def smaller_fan_out(num_neighbors: Sequence[int]) -> tuple[int, ...] | None:
    """Half of each, 15 for all neighbors, 2 at the least; None where there is nothing left to halve."""
    smaller = tuple(15 if k < 0 else max(2, -(-k // 2)) if k > 2 else k for k in num_neighbors)
    return smaller if smaller != tuple(num_neighbors) else None


def batch_bytes(batch: Batch, num_features: int, itemsize: int) -> int:
    """A batch as the model gets it: x, n_id int64 and edge_index int64 [2, E]."""
    return batch.num_nodes * (num_features * itemsize + 8) + batch.num_edges * 16


def sampling_bytes(batch: Batch) -> int:
    """The sampler's own arrays while it draws a batch: ids and hash table, offsets and degrees, rows and columns.

    About 32 bytes a node and 48 an edge, all freed before the batch is used.
    """
    return 32 * batch.num_nodes + 48 * batch.num_edges


def parameter_count(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Weights of the model. A layer of `SAGEConv` has two matrices, of `GCNConv` one, of `GATConv` attention too."""
    total = 0
    layers = layer_widths(config, num_features, num_classes)
    for i, (width, out) in enumerate(layers):
        if config.model == "sage":
            total += 2 * width * out + out
        elif config.model == "gcn":
            total += width * out + out
        else:
            wide = out * config.heads if i == len(layers) - 1 else out
            total += width * wide + 2 * wide + out
    return total


def layer_widths(config: TrainConfig, num_features: int, num_classes: int) -> list[tuple[int, int]]:
    """(in, out) of each layer, all heads together but for the last one's."""
    hidden = [config.hidden_channels] * (len(config.num_neighbors) - 1)
    return list(itertools.pairwise([num_features, *hidden, num_classes]))


def model_state_bytes(config: TrainConfig, num_features: int, num_classes: int) -> int:
    """Parameters, gradients and Adam's two moments, float32 (Kingma and Ba 2015): 16 bytes a weight."""
    return 16 * parameter_count(config, num_features, num_classes)


@dataclass(frozen=True)
class LayerStep:
    """One layer of a training step, in bytes.

    Attributes:
        kept: For the backward pass.
        given: What of that is an input, which is kept under activation checkpointing as well; the first layer's x is
            the batch's own and in neither.
        out: Its output; its gradient is as large.
        forward: The most that its forward pass has alive, `kept` included.
        backward: What its backward pass has alive beside the gradient of its output.
    """

    kept: int
    given: int
    out: int
    forward: int
    backward: int


def layer_steps(config: TrainConfig, batch: Batch, num_features: int, num_classes: int) -> list[LayerStep]:
    """The layers of a step, first to last.

    Layer i of L reads the S nodes within L - i hops, over E edges, and writes the T within L - i - 1; `in` and H are
    the widths of its input and output, of all heads in gat; F = E + S in gcn and E + T in gat, which add self-loops.
    An element of a product takes w bytes: 4, or 2 under autocast, which also keeps half-width copies of float32 inputs.

    - sage keeps the mean of the neighbors w [T, in], the output after ReLU w [T, H], and from the second layer on the
      sparse matrix, 4 bytes an edge and 8 a target; under autocast also 2 [T, in] of the first layer's own rows.
      Forward: the mean and 3 [T, H]. Backward: the gradient of the input twice, [S, in]. Under autocast the sparse
      product is float32: its operand and result in the forward pass, and one more gradient, come on top.
    - gcn keeps 20 F of indices and weights and the output after ReLU, float32 always; under autocast 2 [S, in].
      Forward and backward: 2 [S, H] and 2 [F, H], float32: PyG gathers a row for each edge and weighs it.
    - gat keeps w [S + T + F, H], 16 F of indices, 16 F for each head of attention, and the output after ReLU, float32;
      under autocast 2 [S + T, in]. Backward: 3 more [F, H] in float32, 4 under autocast.
    - Dropout keeps its mask and its output beside the output after ReLU; gcn and gat under autocast the mask alone.
      The last layer keeps log-probabilities and labels instead.

    What is kept is exact (tests compare it with the saved-tensor hooks of `activations`); the rest reproduces the CPU
    allocator's own record, which the process's resident memory followed within 3 % (torch 2.13, PyG 2.8).
    """
    hops, layers = len(config.num_neighbors), layer_widths(config, num_features, num_classes)
    half = config.precision != "fp32"
    w = 2 if half else 4
    steps: list[LayerStep] = []
    for i, (width, channels) in enumerate(layers):
        last = i == len(layers) - 1
        s, t, e = (
            sum(batch.hop_nodes[: hops - i + 1]),
            sum(batch.hop_nodes[: hops - i]),
            sum(batch.hop_edges[: hops - i]),
        )
        h = channels * config.heads if last and config.model == "gat" else channels
        wide = w if config.model == "sage" else 4  # aggregated in float32, and ReLU keeps that
        out = t * channels * (4 if last else wide)
        masked = 0 if last or not config.dropout else 1 if half and config.model != "sage" else 2
        tail = out * (1 + masked) + (8 * t if last else 0)
        matrix = 4 * e + 8 * t
        if config.model == "sage":
            mean = w * t * width
            kept = mean + (2 * t * width if half and i == 0 else 0) + (matrix if i else 0) + tail
            given = matrix
            forward = max(kept, mean + 3 * w * t * h)
            if half:
                forward = max(forward, 6 * t * width + w * t * h, 4 * (s + t) * width if i else 0)
            # The mask of the layer before is still there then, its output after dropout is not.
            backward = (8 + (2 if half else 0) - (w if config.dropout else 0)) * s * width if i else 0
        elif config.model == "gcn":
            f = e + s
            rows = 8 * (s + f) * h
            kept = 20 * f + (2 * s * width if half else 0) + tail
            given, forward, backward = 0, kept - tail + rows, kept - tail + rows - out
        else:
            f = e + t
            kept = w * (s + t + f) * h + 16 * f * (1 + config.heads) + (2 * (s + t) * width if half else 0) + tail
            given, forward = 0, kept - tail + 4 * (f + t) * h
            backward = kept - tail + (16 if half else 12) * f * h - out
        steps.append(LayerStep(kept, given + (steps[-1].out if steps else 0), out, forward, backward))
    return steps


def saved_bytes(config: TrainConfig, batch: Batch, num_features: int, num_classes: int) -> int:
    """What autograd keeps between the passes over one batch; the batch's own x and the parameters are not in it.

    Under activation checkpointing that is the layers' inputs, log-probabilities and labels. Autocast keeps a half-width
    copy of the weights as well, but for checkpointed layers. `accumulate` changes nothing: each batch's graph is freed
    by its own backward pass.
    """
    steps = layer_steps(config, batch, num_features, num_classes)
    if config.activation_checkpointing:
        return sum(step.given for step in steps) + steps[-1].out + 8 * batch.hop_nodes[0]
    copies = 2 * parameter_count(config, num_features, num_classes) if config.precision != "fp32" else 0
    return sum(step.kept for step in steps) + copies


def activation_bytes(
    config: TrainConfig, batch: Batch, num_features: int, num_classes: int, training: bool = True
) -> int:
    """What one step computes, at its peak; the input x itself is the batch's, and gradients of weights the model's.

    The most of: a layer's forward pass on top of what the layers before it keep, and a layer's backward pass with the
    gradient of its output on top of the same. Under activation checkpointing the layers keep their inputs alone, but a
    layer is computed again while the gradient of its output is there. See `layer_steps`. Without a backward pass: the
    widest layer and its input.
    """
    steps = layer_steps(config, batch, num_features, num_classes)
    if not training:
        inputs = [0, *(step.out for step in steps)]
        return max(given + step.forward for given, step in zip(inputs, steps, strict=False))
    peak = before = 0
    for step in steps:
        if config.activation_checkpointing:
            before += step.given
            peak = max(peak, before + step.out + max(step.forward, step.backward))
        else:
            peak = max(peak, before + step.forward, before + step.out + step.backward)
            before += step.kept
    return max(peak, saved_bytes(config, batch, num_features, num_classes))


# The graph ------------------------------------------------------------------------------------------------------------


def feature_itemsize(config: TrainConfig, size: GraphSize) -> int:
    """Bytes of a feature: `feature_dtype` in RAM; a store's own, and float16 for one that is still to be made."""
    if config.loading == "store":
        return size.feature_itemsize if size.stored == "store" else 2
    return 2 if config.feature_dtype == "float16" else 4


def features_bytes(size: GraphSize, itemsize: int) -> int:
    """x: [num_nodes, num_features] of `itemsize` bytes."""
    return size.num_nodes * size.num_features * itemsize


def labels_bytes(size: GraphSize) -> int:
    """y in RAM, see `label_itemsize`."""
    return size.num_nodes * label_itemsize(size.num_classes)


def label_itemsize(num_classes: int) -> int:
    """Bytes of `ogb_raw.label_dtype`: int16, or int64 beyond 32,767 classes."""
    return 2 if num_classes <= 32767 else 8


def coo_bytes(edges: int) -> int:
    """edge_index int64 [2, E]: 16 bytes an edge."""
    return 16 * edges


def stock_csc_bytes(size: GraphSize, edges: int) -> int:
    """What a stock `NeighborLoader` keeps: colptr, row and perm, all int64 (`torch_geometric.loader.utils.to_csc`)."""
    return 8 * (size.num_nodes + 1) + 16 * edges


def stock_sort_bytes(size: GraphSize, edges: int) -> int:
    """What building it takes beyond that: its peak is 32 bytes an edge (sorted column, permutation, row, copies)."""
    return max(0, 32 * edges - stock_csc_bytes(size, edges))


def reverse_edges_bytes(size: GraphSize) -> int:
    """What PyG's `to_undirected` takes beside the edges it is given: 178 bytes for each of them, measured.

    Both directions are concatenated, turned into int64 keys, sorted with a permutation, and gathered.
    """
    return 178 * size.num_edges


def shared_csc_bytes(size: GraphSize, edges: int, engine: str = "numba") -> int:
    """One CSC for all: colptr int64 and row int32, int64 for the stock sampler and from 2**31 nodes on."""
    wide = engine == "pyg" or size.num_nodes >= 2**31
    return 8 * (size.num_nodes + 1) + (8 if wide else 4) * edges


def store_bytes(size: GraphSize, edges: int, itemsize: int) -> dict[str, int]:
    """The files of a store that training reads: `shared_csc_bytes` and the features."""
    colptr = 8 * (size.num_nodes + 1)
    return {"colptr": colptr, "row": shared_csc_bytes(size, edges) - colptr, "x": features_bytes(size, itemsize)}
