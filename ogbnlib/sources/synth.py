"""A synthetic ogbn-papers100M at any scale up to 1, written to disk chunk by chunk without torch.

Every random draw for an edge, a label or a feature is a hash (splitmix64, Steele et al., OOPSLA
2014) of (seed, stream, node, k). So any chunk of the graph can be drawn on its own. Papers appear
over time, `BLOCK` at once; a paper's slot in its block gives its class. A paper cites recent or any
older papers, mostly of its own class. From 2 * `_FIELD` papers on, the labelled papers belong to
one field; its papers mostly cite it, and the others mostly do not. Features are the mean of the
class, in a low-rank space, plus noise.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, clear_errors, format_bytes
from ..files import StrPath, home, new_folder, shown
from ..graph.npz import Array
from ..graph.store import Store, is_store, open_store
from ..kernels import kernel, kernel_with
from ..splitmix64 import GAMMA, mix
from .convert import convert
from .description import FeatureDtype
from .official import KNOWN
from .ogb import open_raw, write_layout
from .resolve import check_direction, find_store, made_once
from .source import Source

PAPERS = KNOWN["ogbn-papers100M"]
BLOCK = 1024  # papers that appear at once; class sizes are multiples of 1 / BLOCK of all papers
_NODES = 2**15  # nodes per chunk: 16 MB of 128 features
# the period of each split, as shares of the papers in order of time
_PERIODS = {"train": (0.2, 0.7), "valid": (0.7, 0.82), "test": (0.82, 1.0)}
# Tuned at scale 0.01 with an MLP on [x, Ax, AAx]: accuracy 0.21 on features alone, 0.40 with one
# hop, 0.47 with two; with reverse edges 0.58 and 0.68. For papers100M, 0.49 and 0.63-0.66 are
# reported (pyg-team#9386).
_HOMOPHILY = 0.58  # share of citations drawn within the class; others get there by chance
# share of citations to recent papers, and the mean age of those as a share of all time
_RECENT = 0.65
_RECENT_SPAN = 0.03
_AGE_POWER = 2.0  # other citations of a paper of time t go to time t * U**2: more to old papers
_FAME_POWER = 2.5  # U**2.5 picks the paper within a block and class: most go to a few papers
_DEGREE_SIGMA = 0.9  # sigma of the log-normal number of references per paper
# length of the class means, in standard deviations of a feature's noise; dimension of their space
_SIGNAL = 2.4
_RANK = 16
_ZIPF = 0.7  # the share of the r-th largest class is about proportional to (r + 2) ** -0.7
_LABEL_NOISE = 0.25  # share of papers with a random label
# The labelled papers (those of arXiv) belong to one field: every k-th block, k = N // `_FIELD`, so
# about `_FIELD` papers at any scale that has twice as many. With a chance of 95 % a citation stays
# in the field, or outside it. Citations within the field go to fewer papers. So a batch of 1024
# seeds with num_neighbors [10, 10, 10] and reverse edges has 61 % of the 1,137,664 possible nodes,
# at scale 0.02 and at 0.1. In the real data set it has 59 %, 669,000 (dgl's
# examples/graphbolt/disk_based_feature). Without a field it had 82 % at scale 0.1.
_FIELD = 2_500_000
_LOYALTY = 0.95
_FIELD_FAME_POWER = 5.0
# random streams: degree, recent, age, within class, slot, whether the label is noise, noise label,
# feature, split and field
_NUM_STREAMS = 9


class _Tables(NamedTuple):
    """Arrays from which the kernels draw a graph."""

    keys: Array  # uint64 [9], one for each of the streams that `_NUM_STREAMS` counts
    order: Array  # int64 [4], see `_shuffled_order`
    degrees: Array  # float64 [1024], number of references by quantile
    slot_class: Array  # int64 [1024], the class of each slot in a block; ascending
    class_slot: Array  # int64 [C + 1], the first slot of each class, and the number of slots
    means: Array  # float64 [C, F], mean features of the classes


@kernel_with(inline="always")
def _draw(key: np.uint64, node: int, k: int) -> np.uint64:
    # 64 random bits by a stream's `key`, a paper's number in time, and that of its reference, or 0
    return mix(mix(key + np.uint64(node) * GAMMA) + np.uint64(k) * GAMMA)


@kernel_with(inline="always")
def _uniform(bits: np.uint64) -> float:
    return np.float64(bits >> np.uint64(11)) * 2.0**-53  # in [0, 1), from the upper 53 bits


@kernel_with(inline="always")
def _number(v: int, order: Array) -> Any:
    """Return the number in time of the paper with id `v`, see `_shuffled_order`."""
    num_nodes, _, inverse, shift = order
    return (v - shift + num_nodes) % num_nodes * inverse % num_nodes


@kernel_with(inline="always")
def _degree(tables: _Tables, j: int) -> int:
    """Return the number of references of the j-th paper in time; the first block has none."""
    if j < 1024:  # BLOCK
        return 0
    bits = _draw(tables.keys[0], j, 0)  # their number is rounded at random, so that its mean stays
    return int(tables.degrees[bits & np.uint64(1023)] + _uniform(mix(bits)))


@kernel
def _count_edges(begin: int, end: int, tables: _Tables) -> int:
    total = 0
    for v in range(begin, end):
        total += _degree(tables, _number(v, tables.order))  # references of paper v
    return total


@kernel
def _citations(
    begin: int, end: int, tables: _Tables, num_fields: int, src: Array, dst: Array
) -> None:
    """Fill `src` with the ids of the citing papers, `begin` to `end` - 1, `dst` with those of the
    cited ones; both are int64, with an entry for each reference."""
    keys, order, _, slot_class, class_slot, _ = tables
    num_nodes, multiplier, _, shift = order
    span = _RECENT_SPAN * num_nodes / 1024  # blocks; the mean age of recent references
    at = 0  # edge
    for v in range(begin, end):
        j = _number(v, order)
        time = j // 1024  # number of the paper's block
        slot = j % 1024
        for k in range(_degree(tables, j)):
            # 1. the block of the cited paper, before the citing one's
            age = _uniform(_draw(keys[2], j, k))
            if _uniform(_draw(keys[1], j, k)) < _RECENT:  # exponentially distributed ages
                target = time - 1 - int(-math.log(1.0 - age) * span)
            else:
                target = int(time * age**_AGE_POWER)
            target = max(0, min(time - 1, target))
            power = _FAME_POWER
            if num_fields > 1 and _uniform(_draw(keys[8], j, k)) < _LOYALTY:
                if time % num_fields == 0:  # within the labelled field
                    target = target - target % num_fields
                    power = _FIELD_FAME_POWER
                elif target > 0 and target % num_fields == 0:  # from outside to outside
                    target -= 1
            # 2. its slot: among those of the same class, or among all
            low = 0
            high = 1024
            if _uniform(_draw(keys[3], j, k)) < _HOMOPHILY:
                low = class_slot[slot_class[slot]]
                high = class_slot[slot_class[slot] + 1]
            # The famous slots differ from block to block. Otherwise the same slots would be hubs in
            # all blocks. The number 1,000,003 is beyond the k of any reference.
            fame = int(_uniform(_draw(keys[4], j, k)) ** power * (high - low))
            turn = _draw(keys[4], target, 1_000_003) % np.uint64(high - low)
            to = low + (fame + np.int64(turn)) % (high - low)
            src[at] = v
            dst[at] = ((target * 1024 + to) * multiplier + shift) % num_nodes
            at += 1


@kernel
def _label(ids: Array, begin: int, tables: _Tables, out: Array) -> None:
    # writes the class of each node of `ids` to `out`, whose entry 0 is of node `begin`
    for v in ids:
        j = _number(v, tables.order)
        slot = j % 1024
        if _uniform(_draw(tables.keys[5], j, 0)) < _LABEL_NOISE:
            slot = np.int64(_draw(tables.keys[6], j, 0) % np.uint64(1024))
        out[v - begin] = tables.slot_class[slot]


@kernel
def _features(begin: int, end: int, tables: _Tables, out: Array) -> None:
    """Fill `out` [end - begin, F] with class means plus noise of mean 0 and standard deviation 1.

    The noise is the scaled sum of four 16-bit uniform numbers, whose mean is 131,070 and standard
    deviation 37,837. Values are rounded to multiples of 2**-8, which float16 represents exactly.
    Rounded features compress to half the size in half the time.
    """
    low = np.uint64(0xFFFF)
    for v in range(begin, end):
        j = _number(v, tables.order)
        mean = tables.means[tables.slot_class[j % 1024]]
        key = _draw(tables.keys[7], j, 0)
        for f in range(out.shape[1]):
            raw = mix(key + np.uint64(f) * GAMMA)
            four = (
                (raw & low)
                + (raw >> np.uint64(16) & low)
                + (raw >> np.uint64(32) & low)
                + (raw >> np.uint64(48))
            )
            value = mean[f] + (np.float64(four) - 131070.0) / 37837.0
            out[v - begin, f] = np.rint(value * 256.0) / 256.0


def _degrees(num_nodes: int) -> Array:
    # quantiles of a log-normal distribution, float64 [1024]
    quantile = np.exp([_DEGREE_SIGMA * NormalDist().inv_cdf((i + 0.5) / 1024) for i in range(1024)])
    # as many references a paper as in papers100M, though the first block has none
    mean = PAPERS.num_edges / PAPERS.num_nodes * num_nodes / (num_nodes - BLOCK)
    return quantile / quantile.mean() * mean


def _class_sizes(random: np.random.Generator, num_classes: int) -> Array:
    """Return the number of slots that each class has in a block, at least one."""
    weights = 1.0 / (random.permutation(num_classes) + 3.0) ** _ZIPF
    sizes = 1 + np.floor(weights / weights.sum() * (BLOCK - num_classes)).astype(np.int64)
    sizes[np.argmax(sizes)] += BLOCK - sizes.sum()  # what rounding left
    return sizes


def _class_means(random: np.random.Generator, num_classes: int, num_features: int) -> Array:
    """Return the mean features of the classes [C, F], in a space of dimension `_RANK` at most."""
    rank = min(_RANK, num_features)  # dimension of the space of the means
    axes = np.linalg.qr(random.standard_normal((num_features, rank)))[0]  # orthonormal [F, rank]
    latent = random.standard_normal((num_classes, rank))  # the means' coordinates in this space
    latent *= _SIGNAL / np.linalg.norm(latent, axis=1, keepdims=True)
    return latent @ axes.T


class _CitationGraph:  # its methods draw the chunks and splits of a `Source`
    def __init__(
        self,
        num_nodes: int,
        split_sizes: dict[str, int],
        seed: int,
        num_features: int,
        num_classes: int,
    ):
        self.num_nodes = num_nodes
        self.num_features = num_features
        self._split_sizes = split_sizes
        self._num_fields = max(1, num_nodes // _FIELD)
        # Another order of these draws would give another graph.
        random = np.random.default_rng(seed)
        keys = random.integers(2**63, size=_NUM_STREAMS, dtype=np.uint64)
        order = _shuffled_order(num_nodes, random)
        sizes = _class_sizes(random, num_classes)
        self._tables = _Tables(
            keys,
            order,
            _degrees(num_nodes),
            slot_class=np.repeat(np.arange(num_classes), sizes),
            class_slot=np.concatenate([[0], np.cumsum(sizes)]),
            means=_class_means(random, num_classes, num_features),
        )

    def _spans(self, step: int) -> Iterator[tuple[int, int]]:
        # (first node, node after the last one) of chunks of `step` nodes
        begins = range(0, self.num_nodes, step)
        return ((begin, min(begin + step, self.num_nodes)) for begin in begins)

    def num_edges(self) -> int:
        return sum(int(_count_edges(*span, self._tables)) for span in self._spans(_NODES))

    def edge_chunks(self, chunk_edges: int) -> Iterator[tuple[Array, Array]]:
        # a paper has 14.5 references on average
        for span in self._spans(max(1, min(2 * _NODES, chunk_edges // 16))):
            src, dst = np.empty((2, _count_edges(*span, self._tables)), np.int64)
            _citations(*span, self._tables, self._num_fields, src, dst)
            yield src, dst

    def x_chunks(self) -> Iterator[Array]:
        for begin, end in self._spans(_NODES):
            out = np.empty((end - begin, self.num_features), np.float32)
            _features(begin, end, self._tables, out)
            yield out

    def read_splits(self) -> dict[str, Array]:
        """Return the labelled nodes of each split, spread evenly over its period; ids ascend."""
        splits = {}
        _, multiplier, _, shift = map(int, self._tables.order)
        num_papers = self.num_nodes // self._num_fields  # of the labelled field
        for number, (name, size) in enumerate(self._split_sizes.items()):
            begin, end = (int(part * num_papers) for part in _PERIODS[name])
            # `size` bins of the period, [size + 1]; one paper is drawn from each
            bounds = begin + np.arange(size + 1, dtype=np.int64) * (end - begin) // size
            draw = np.random.default_rng([int(self._tables.keys[8]), number])
            times = draw.integers(bounds[:-1], bounds[1:])  # numbers in time within the field
            # block b of the field is block b * num_fields of the graph
            times += times // BLOCK * BLOCK * (self._num_fields - 1)
            splits[name] = np.sort((times * multiplier + shift) % self.num_nodes)
        return splits

    def label_chunks(self) -> Iterator[Array]:
        labelled = np.sort(np.concatenate(list(self.read_splits().values())))
        for begin, end in self._spans(_NODES):
            ids = labelled[np.searchsorted(labelled, begin) : np.searchsorted(labelled, end)]
            out = np.full(end - begin, -1, np.int16)
            _label(ids, begin, self._tables, out)
            yield out


def _shuffled_order(num_nodes: int, random: np.random.Generator) -> Array:
    """Return N, a multiplier, its inverse modulo N, and a shift, int64 [4].

    The id of the paper with number `time` in time is (time * multiplier + shift) mod N.
    """
    multiplier = int(num_nodes * 0.6180339887)  # golden ratio: spreads papers of similar time
    while math.gcd(multiplier, num_nodes) != 1:
        multiplier += 1
    shift = int(random.integers(num_nodes))
    return np.array([num_nodes, multiplier, pow(multiplier, -1, num_nodes), shift], np.int64)


def _citations_like(
    path: StrPath, scale: float, seed: int, num_features: int, num_classes: int
) -> Source:
    # Nothing is written here: the source is only named like the file or folder `path`.
    for name, value, low, high in (
        ("scale", scale, 0, 1),
        ("seed", seed, 0, 2**63),
        ("num_features", num_features, 1, 2**16),
        ("num_classes", num_classes, 2, BLOCK // 2),
    ):
        if not low <= value <= high:
            raise InputError(f"{name}: expected a number from {low} to {high}, got {value!r}")
    num_nodes = round(PAPERS.num_nodes * scale)
    least = 8 * BLOCK  # the shortest period, 12 % of the nodes, then has about one block
    split_sizes = {name: round(size * scale) for name, size in PAPERS.num_seeds.items()}
    if num_nodes < least or min(split_sizes.values()) < 1:
        raise InputError(
            f"scale: expected at least {least / PAPERS.num_nodes:.1e} ({least} nodes, a label in "
            f"each split), got {scale!r}, which makes {num_nodes} nodes"
        )
    graph = _CitationGraph(num_nodes, split_sizes, seed, num_features, num_classes)
    return Source(
        name=home(path).absolute().name,
        num_nodes=num_nodes,
        num_edges=graph.num_edges(),
        num_features=num_features,
        num_classes=num_classes,
        feature_dtype=np.dtype(np.float32),
        edge_chunks=graph.edge_chunks,
        x_chunks=graph.x_chunks,
        label_chunks=graph.label_chunks,
        read_splits=graph.read_splits,
        origin={"synthetic": {"scale": scale, "seed": seed}},
    )


@clear_errors()
def synthesize(
    path: StrPath,
    scale: float = 0.01,
    seed: int = 0,
    *,
    num_features: int = 128,
    num_classes: int = 172,
) -> Source:
    """Write a data set like ogbn-papers100M, `scale` times its size, in OGB's binary layout.

    Edges point from citing to cited papers. So the newest papers, those of the test split, have few
    in-neighbors, and reverse edges help, as in the real data set. Only a chunk and the labelled
    nodes are in memory at a time: about 110 MB in addition to the imports, at scale 0.01 (1.1
    million nodes, 16 million edges) and at 0.03.
    """
    model = _citations_like(path, scale, seed, num_features, num_classes)
    with new_folder(path) as folder:
        write_layout(folder, model)
    return open_raw(path, num_classes=num_classes)


def synthesize_store(
    path: StrPath,
    scale: float = 0.01,
    seed: int = 0,
    *,
    num_features: int = 128,
    num_classes: int = 172,
    feature_dtype: FeatureDtype = "float16",
    **options: Any,
) -> Store:
    """Write the data set of `synthesize` as a store, without its files in OGB's layout.

    The arrays are bit for bit those that `convert` would make from these files. At scale 1 that
    saves writing and compressing 40 GB. `feature_dtype`, undirected, memory_limit and progress are
    as in `convert`.
    """
    source = _citations_like(path, scale, seed, num_features, num_classes)
    return convert(source, path, feature_dtype=feature_dtype, **options)


@clear_errors()
def prepare_dataset(
    dataset: StrPath,
    data_dir: StrPath,
    scale: float,
    seed: int = 0,
    *,
    undirected: bool | None = None,
) -> str:
    """Return the folder of a data set's store for a notebook.

    If `dataset` is "", the data set is synthetic, of this `scale` and `seed`; its store is made in
    `data_dir` on first use.
    """
    if dataset:
        store = find_store(dataset)
        check_direction(store, undirected)
    else:
        store = _synthetic_store(home(data_dir), scale, seed, bool(undirected))
    print(
        f"{shown(store.path)}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, "
        f"{store.num_features} features, {format_bytes(store.nbytes)}"
    )
    return str(store.path)


def _synthetic_store(data_dir: Path, scale: float, seed: int, undirected: bool) -> Store:
    path = data_dir / f"synthetic-{scale:g}-seed{seed}{'-undirected' * undirected}.store"
    if not is_store(path):
        with made_once(path, check=lambda: None):  # nothing ends the wait early
            if not is_store(path):  # another process may have made it meanwhile
                print(f"{path}: generating it, once")
                synthesize_store(path, scale, seed, undirected=undirected)
    return open_store(path)
