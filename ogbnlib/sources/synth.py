"""A synthetic ogbn-papers100M at any scale, written straight into OGB's layout in memory bounded by a chunk.

Every random draw is a hash of (seed, stream, node, k), splitmix64 (Steele et al., OOPSLA 2014), so any part can be
made at any time without the rest: the two rows of edge_index are two independent passes, and nothing is kept.

The model: papers appear in time, `_BLOCK` at once. The slot of a paper within its block gives its class, by Zipf-like
class sizes. A paper cites older ones: recent ones, or any with a preference for old ones (hence a power-law
in-degree), mostly of its own class. Node ids are an affine bijection of the order in time. Labels are the class, or,
for some papers, any; features are a class mean in a low-rank space under noise. Importing this imports no torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numba import njit
from tqdm import tqdm

from ..errors import InputError, format_bytes
from ..files import StrPath, new_folder
from ..graph.bits import GAMMA, mix
from ..graph.npz import Array, MemberInfo
from ..graph.store import Store
from .convert import FeatureDtype, write_store
from .ogb import RawDataset, clean_labels, open_raw
from .ogb_write import write_layout

# ogbn-papers100M (Hu et al., NeurIPS 2020): nodes, edges, and labelled papers until 2017, of 2018 and of 2019.
NUM_NODES, NUM_EDGES = 111_059_956, 1_615_685_872
SPLIT_SIZES = {"train": 1_207_179, "valid": 125_265, "test": 214_338}
_BLOCK = 1024  # papers that appear at once; also the finest class size
_MIN_NODES = 8 * _BLOCK
_NODES = 2**15  # per chunk: 16 MB of features
_PERIODS = {"train": (0.2, 0.7), "valid": (0.7, 0.82), "test": (0.82, 1.0)}  # of all papers, in order of time
# Tuned at scale 0.01 with an MLP on [x, Ax, AAx], which reaches 0.21 on features alone, 0.40 with one hop, 0.47 with
# two, and with reverse edges 0.58 and 0.68. For papers100M, 0.49 and 0.63-0.66 are reported (pyg-team#9386).
_HOMOPHILY = 0.58  # share of citations within the class, beside those that fall there by chance
_RECENT, _RECENT_SPAN = 0.65, 0.03  # share of citations to recent papers, and their mean age as a part of all time
_AGE_POWER = 2.0  # other citations go to the time t * U**2: old papers collect more
_FAME_POWER = 2.5  # within a block and class, U**2.5 picks the paper: few collect most
_DEGREE_SIGMA = 0.9  # references per paper are log-normal
_SIGNAL, _RANK = 2.4, 16  # length and dimension of class means, in units of the noise per feature
_ZIPF = 0.7  # the share of the r-th largest class is about (r + 2) ** -0.7
_LABEL_NOISE = 0.25  # papers whose label says nothing of their class
_PASSES = ("degree", "recent", "age", "within", "slot", "label", "noise_label", "feature", "split")


@njit(cache=True, nogil=True, inline="always")
def _draw(key, node, k):  # type: ignore[no-untyped-def]
    return mix(mix(key + np.uint64(node) * GAMMA) + np.uint64(k) * GAMMA)


@njit(cache=True, nogil=True, inline="always")
def _uniform(bits):  # type: ignore[no-untyped-def]
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@njit(cache=True, nogil=True, inline="always")
def _degree(keys, j, degrees):  # type: ignore[no-untyped-def]
    """The number of references of the paper at time j; the first block cites nobody."""
    if j < 1024:
        return 0
    bits = _draw(keys[0], j, 0)
    return int(degrees[bits & np.uint64(1023)] + _uniform(mix(bits)))


@njit(cache=True, nogil=True)
def _num_edges(begin, end, keys, order, degrees):  # type: ignore[no-untyped-def]
    num_nodes, _, inverse, shift = order
    total = 0
    for v in range(begin, end):
        total += _degree(keys, (v - shift + num_nodes) % num_nodes * inverse % num_nodes, degrees)
    return total


@njit(cache=True, nogil=True)
def _sources(begin, end, keys, order, degrees, out):  # type: ignore[no-untyped-def]
    num_nodes, _, inverse, shift = order
    at = 0
    for v in range(begin, end):
        for _ in range(_degree(keys, (v - shift + num_nodes) % num_nodes * inverse % num_nodes, degrees)):
            out[at] = v
            at += 1


@njit(cache=True, nogil=True)
def _cited(begin, end, keys, order, degrees, slot_class, class_slot, shape, out):  # type: ignore[no-untyped-def]
    num_nodes, multiplier, inverse, shift = order
    homophily, recent, recent_span, age_power, fame_power = shape
    span = recent_span * num_nodes / 1024
    at = 0
    for v in range(begin, end):
        j = (v - shift + num_nodes) % num_nodes * inverse % num_nodes
        time, slot = j // 1024, j % 1024
        for k in range(_degree(keys, j, degrees)):
            age = _uniform(_draw(keys[2], j, k))
            if _uniform(_draw(keys[1], j, k)) < recent:
                target = time - 1 - int(-math.log(1.0 - age) * span)
            else:
                target = int(time * age**age_power)
            target = max(0, min(time - 1, target))
            low, high = 0, 1024
            if _uniform(_draw(keys[3], j, k)) < homophily:
                low, high = class_slot[slot_class[slot]], class_slot[slot_class[slot] + 1]
            # Who is famous differs from block to block, or the same slots would be the hubs of all time.
            fame = int(_uniform(_draw(keys[4], j, k)) ** fame_power * (high - low))
            turn = _draw(keys[4], target, 1_000_003) % np.uint64(high - low)
            to = low + (fame + np.int64(turn)) % (high - low)
            out[at] = ((target * 1024 + to) * multiplier + shift) % num_nodes
            at += 1


@njit(cache=True, nogil=True)
def _label(ids, keys, order, slot_class, noise, out):  # type: ignore[no-untyped-def]
    num_nodes, _, inverse, shift = order
    for i in range(len(ids)):
        j = (ids[i] - shift + num_nodes) % num_nodes * inverse % num_nodes
        slot = j % 1024
        if _uniform(_draw(keys[5], j, 0)) < noise:
            slot = np.int64(_draw(keys[6], j, 0) % np.uint64(1024))
        out[i] = slot_class[slot]


@njit(cache=True, nogil=True)
def _features(begin, end, keys, order, slot_class, means, out):  # type: ignore[no-untyped-def]
    """Class mean plus noise: the sum of four 16-bit uniforms, of mean 131,070 and deviation 37,837.

    Rounded to multiples of 2**-8, which float16 holds exactly: compressed, that is half the size in half the time.
    """
    num_nodes, _, inverse, shift = order
    low = np.uint64(0xFFFF)
    for v in range(begin, end):
        j = (v - shift + num_nodes) % num_nodes * inverse % num_nodes
        label, key = slot_class[j % 1024], _draw(keys[7], j, 0)
        for f in range(out.shape[1]):
            bits = mix(key + np.uint64(f) * GAMMA)
            four = (
                (bits & low) + (bits >> np.uint64(16) & low) + (bits >> np.uint64(32) & low) + (bits >> np.uint64(48))
            )
            value = means[label, f] + (np.float64(four) - 131070.0) / 37837.0
            out[v - begin, f] = np.rint(value * 256.0) / 256.0


@njit(cache=True, nogil=True)
def _years(begin, end, order, out):  # type: ignore[no-untyped-def]
    """The last 18 % of all papers are of 2019, 12 % of 2018; before, their number grew by a twelfth a year."""
    num_nodes, _, inverse, shift = order
    for v in range(begin, end):
        j = (v - shift + num_nodes) % num_nodes * inverse % num_nodes
        at = (j + 1) / num_nodes
        if j >= int(0.82 * num_nodes):
            out[v - begin] = 2019
        elif j >= int(0.7 * num_nodes):
            out[v - begin] = 2018
        else:
            out[v - begin] = max(1950, 2017 - int(-12.0 * math.log(min(1.0, at / 0.7))))


@dataclass(frozen=True)
class _Model:
    """Everything that the kernels look up; a few hundred kB, whatever the scale."""

    num_nodes: int
    keys: Array  # uint64, one per stream of draws
    order: Array  # int64: N, multiplier, its inverse modulo N, shift; id = (time * multiplier + shift) mod N
    degrees: Array  # float64 [1024], mean number of references by quantile
    slot_class: Array  # int64 [1024]
    class_slot: Array  # int64 [C + 1], first slot of each class
    means: Array  # float64 [C, F]

    @classmethod
    def create(cls, num_nodes: int, seed: int, num_features: int, num_classes: int) -> _Model:
        random = np.random.default_rng(seed)
        keys = random.integers(2**63, size=len(_PASSES), dtype=np.uint64)
        multiplier = int(num_nodes * 0.6180339887)  # the golden section spreads neighbors in time over all ids
        while math.gcd(multiplier, num_nodes) != 1:
            multiplier += 1
        order = [num_nodes, multiplier, pow(multiplier, -1, num_nodes), int(random.integers(num_nodes))]
        quantile = np.exp([_DEGREE_SIGMA * NormalDist().inv_cdf((i + 0.5) / 1024) for i in range(1024)])
        citing = NUM_EDGES / NUM_NODES * num_nodes / (num_nodes - _BLOCK)
        weights = 1.0 / (random.permutation(num_classes) + 3.0) ** _ZIPF
        sizes = 1 + np.floor(weights / weights.sum() * (_BLOCK - num_classes)).astype(np.int64)
        sizes[np.argmax(sizes)] += _BLOCK - sizes.sum()
        rank = min(_RANK, num_features)
        axes = np.linalg.qr(random.standard_normal((num_features, rank)))[0]
        latent = random.standard_normal((num_classes, rank))
        latent *= _SIGNAL / np.linalg.norm(latent, axis=1, keepdims=True)
        return cls(
            num_nodes=num_nodes,
            keys=keys,
            order=np.array(order, np.int64),
            degrees=quantile / quantile.mean() * citing,
            slot_class=np.repeat(np.arange(num_classes), sizes),
            class_slot=np.concatenate([[0], np.cumsum(sizes)]),
            means=latent @ axes.T,
        )

    def spans(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.num_nodes, _NODES):
            yield begin, min(begin + _NODES, self.num_nodes)

    def num_edges(self) -> int:
        return sum(int(_num_edges(*span, self.keys, self.order, self.degrees)) for span in self.spans())

    def sources(self) -> Iterator[Array]:
        for span in self.spans():
            out = np.empty(_num_edges(*span, self.keys, self.order, self.degrees), np.int64)
            _sources(*span, self.keys, self.order, self.degrees, out)
            yield out

    def cited(self) -> Iterator[Array]:
        shape = (_HOMOPHILY, _RECENT, _RECENT_SPAN, _AGE_POWER, _FAME_POWER)
        for span in self.spans():
            out = np.empty(_num_edges(*span, self.keys, self.order, self.degrees), np.int64)
            _cited(*span, self.keys, self.order, self.degrees, self.slot_class, self.class_slot, shape, out)
            yield out

    def features(self) -> Iterator[Array]:
        for begin, end in self.spans():
            out = np.empty((end - begin, self.means.shape[1]), np.float32)
            _features(begin, end, self.keys, self.order, self.slot_class, self.means, out)
            yield out

    def years(self) -> Iterator[Array]:
        for begin, end in self.spans():
            out = np.empty(end - begin, np.int64)
            _years(begin, end, self.order, out)
            yield out

    def splits(self, sizes: dict[str, int]) -> dict[str, Array]:
        """Exactly `sizes` labelled nodes, each split evenly over its period; ascending ids."""
        num_nodes, multiplier, _, shift = (int(number) for number in self.order)
        splits = {}
        for number, (name, size) in enumerate(sizes.items()):
            begin, end = (int(part * num_nodes) for part in _PERIODS[name])
            edges = begin + np.arange(size + 1, dtype=np.int64) * (end - begin) // size
            random = np.random.default_rng([int(self.keys[8]), number])
            times = random.integers(edges[:-1], edges[1:])
            splits[name] = np.sort((times * multiplier + shift) % num_nodes)
        return splits

    def labels(self, labelled: Array) -> Iterator[Array]:
        """float32 labels, NaN outside `labelled`, which is sorted."""
        for begin, end in self.spans():
            ids = labelled[np.searchsorted(labelled, begin) : np.searchsorted(labelled, end)]
            values = np.empty(len(ids), np.float32)
            _label(ids, self.keys, self.order, self.slot_class, _LABEL_NOISE, values)
            out = np.full(end - begin, np.nan, np.float32)
            out[ids - begin] = values
            yield out


def _counted(chunks: Iterator[Array], bar: Any) -> Iterator[Array]:
    for chunk in chunks:
        yield chunk
        bar.update(chunk.nbytes)


def _sizes(scale: float) -> tuple[int, dict[str, int]]:
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise InputError(f"scale: expected a number above 0 and up to 1, the real size, got {scale!r}")
    num_nodes = round(NUM_NODES * scale)
    sizes = {name: round(size * scale) for name, size in SPLIT_SIZES.items()}
    if num_nodes < _MIN_NODES or min(sizes.values()) < 1:
        raise InputError(
            f"scale: expected at least {_MIN_NODES / NUM_NODES:.1e} ({_MIN_NODES} nodes, a label in each split), "
            f"got {scale!r}, which makes {num_nodes} nodes with splits of {list(sizes.values())}"
        )
    return num_nodes, sizes


def _checked(scale: float, seed: int, num_features: int, num_classes: int) -> tuple[int, dict[str, int]]:
    """The number of nodes and the sizes of the splits."""
    num_nodes, sizes = _sizes(scale)
    for name, value, high in (("num_features", num_features, 2**16), ("num_classes", num_classes, _BLOCK // 2)):
        low = 1 if name == "num_features" else 2
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed: expected a whole number of at least 0, got {seed!r}")
    return num_nodes, sizes


def estimate(scale: float, *, num_features: int = 128) -> dict[str, int]:
    """Nodes, edges (within about 1 %) and bytes on disk (within about 5 %) of `synthesize` at this scale.

    Raises:
        InputError: for a scale outside (0, 1], or so small that a split would be empty.
    """
    num_nodes, _ = _sizes(scale)
    num_edges = round(NUM_EDGES / NUM_NODES * num_nodes)
    # Measured, compressed: features 2.2 of 4 bytes; an edge 0.1 bytes for the source and up to 5 for the cited paper.
    return {
        "num_nodes": num_nodes,
        "num_edges": num_edges,
        "bytes": round(num_nodes * (num_features * 2.2 + 1) + num_edges * 4.5),
    }


def synthesize(
    path: StrPath,
    scale: float = 0.01,
    seed: int = 0,
    *,
    num_features: int = 128,
    num_classes: int = 172,
    progress: bool = True,
    overwrite: bool = False,
) -> RawDataset:
    """Write a data set like ogbn-papers100M, `scale` times its size, in OGB's binary layout.

    The same arguments give the same arrays. Edges point from citing to cited papers, so the newest, which are the test
    split, have few in-neighbors: as with the real data set, reverse edges help. A few edges occur twice. Memory is
    bounded by a chunk and the labelled nodes: about 110 MB beyond the imports, at scale 0.01 as at 0.03. The folder
    appears whole or not at all.

    Args:
        scale: in (0, 1]; 0.01 makes 1.1 million nodes and 16 million edges.
        num_classes: 2 to 512.

    Raises:
        InputError: for a parameter out of range, a folder that is in use, or too little space on the disk.
    """
    num_nodes, sizes = _checked(scale, seed, num_features, num_classes)
    needed = estimate(scale, num_features=num_features)["bytes"]
    there = next(folder for folder in (Path(path).absolute(), *Path(path).absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed * 1.05:
        raise InputError(f"{path}: expected {format_bytes(needed)} of free disk space, found {format_bytes(free)}")
    with new_folder(path, overwrite) as folder:
        model = _Model.create(num_nodes, seed, num_features, num_classes)
        num_edges = model.num_edges()
        splits = model.splits(sizes)
        labelled = np.sort(np.concatenate(list(splits.values())))
        total = num_edges * 16 + num_nodes * (num_features * 4 + 12)
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="synthesize", disable=not progress, mininterval=1
        ) as bar:
            write_layout(
                folder,
                name=Path(path).absolute().name,
                num_classes=num_classes,
                splits=splits,
                edge_rows=[_counted(model.sources(), bar), _counted(model.cited(), bar)],
                members={
                    "node_feat": ((num_nodes, num_features), np.float32, _counted(model.features(), bar)),
                    "node_year": ((num_nodes, 1), np.int64, _counted(model.years(), bar)),
                },
                labels=_counted(model.labels(labelled), bar),
                num_edges=num_edges,
            )
    return open_raw(path)


@dataclass(frozen=True)
class _ModelSource:
    """The model as a `convert.Source`: what `synthesize` would write, made up as it is asked for."""

    name: str
    model: _Model
    sizes: dict[str, int]
    num_edges: int
    num_features: int
    num_classes: int

    @property
    def num_nodes(self) -> int:
        return self.model.num_nodes

    def edge_chunks(self, chunk_edges: int = 2**20) -> Iterator[tuple[Array, Array]]:
        held: list[tuple[Array, Array]] = []
        for pair in zip(self.model.sources(), self.model.cited(), strict=True):
            if held and sum(len(src) for src, _ in held) + len(pair[0]) > chunk_edges:
                yield np.concatenate([src for src, _ in held]), np.concatenate([dst for _, dst in held])
                held = []
            held.append(pair)
        yield np.concatenate([src for src, _ in held]), np.concatenate([dst for _, dst in held])

    def x_info(self) -> MemberInfo:
        shape, dtype = (self.num_nodes, self.num_features), np.dtype(np.float32)
        return MemberInfo(shape, dtype, False, self.num_nodes * self.num_features * dtype.itemsize)

    def x_chunks(self) -> Iterator[Array]:
        return self.model.features()

    def label_chunks(self) -> Iterator[Array]:
        labelled = np.sort(np.concatenate(list(self.read_splits().values())))
        return (clean_labels(chunk, self.num_classes, "label") for chunk in self.model.labels(labelled))

    def has_year(self) -> bool:
        return True

    def year_chunks(self) -> Iterator[Array]:
        return self.model.years()

    def read_splits(self) -> dict[str, Array]:
        return self.model.splits(self.sizes)


def synthesize_store(
    path: StrPath,
    scale: float = 0.01,
    seed: int = 0,
    *,
    undirected: bool = False,
    feature_dtype: FeatureDtype = "float16",
    memory_limit: str | int | None = None,
    num_features: int = 128,
    num_classes: int = 172,
    progress: bool = True,
) -> Store:
    """Write the data set of `synthesize` straight as a store: the arrays that `convert` would make of it, bit for bit.

    At the real size that spares a raw file of 40 GB and the time to deflate and inflate it.

    Args:
        undirected, feature_dtype, memory_limit: as in `convert`.

    Raises:
        InputError: as `synthesize` and `convert`.
    """
    num_nodes, sizes = _checked(scale, seed, num_features, num_classes)
    model = _Model.create(num_nodes, seed, num_features, num_classes)
    num_edges = model.num_edges()
    return write_store(
        _ModelSource(Path(path).absolute().name, model, sizes, num_edges, num_features, num_classes),
        path,
        undirected=undirected,
        feature_dtype=feature_dtype,
        memory_limit=memory_limit,
        keep_hops=None,
        progress=progress,
        origin={"synthetic": {"scale": scale, "seed": seed}, "num_nodes": num_nodes, "num_edges": num_edges},
    )
