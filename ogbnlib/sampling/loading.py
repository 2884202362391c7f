"""A store in loops of one's own: the trainer's loader, and PyG's interfaces over the files.

`loader` is the fast way: what does not fit into memory is read in windows, in ascending passes. `StoreFeatures` and
`StoreGraph` serve PyG's own loaders, samplers and link prediction: rows are faulted in one by one through the page
cache, which is slow where the store outgrows memory (see `window`). PyG's `NeighborLoader` and `LinkNeighborLoader`
draw with pyg-lib or torch-sparse; `NodeLoader` and `LinkLoader` with `Store.sampler`, which needs neither.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.loader import LinkLoader, NodeLoader

from ..config import TrainConfig
from ..errors import InputError, parse_bytes
from ..graph.checks import SPLITS
from ..graph.npz import Array
from ..graph.store import Store
from ..memory.reading import own_memory
from ..memory.recorder import EventLog
from .budget import BatchShape, queued_bytes, usable_bytes
from .loader import StoreLoader
from .policies import StoreLoaders
from .sampler import CSCSampler

_SHARE = 4  # of what is left, one part in four is spared for the model and its step


class _OneLoader(StoreLoaders):
    """The policy of `loading="store"` for the loader of one split, or of ids that are given."""

    def __init__(self, store: Store, config: TrainConfig, split: str, ids: Tensor, limit: int | None) -> None:
        self._split, self._ids, self._limit = split, ids, limit
        super().__init__(store, config, EventLog(None), 0, 1, self._spared)

    def _load(self, store: Store) -> Any:
        self.splits[self._split] = self._ids
        loaded = super()._load(store)
        if self._limit is not None:
            self._available = max(0, min(self._available, usable_bytes(self._limit) - own_memory()[0]))
        return loaded

    def _spared(self, batch: BatchShape) -> tuple[int, int]:
        spared = queued_bytes(batch, self.num_features, 4) + self._available // _SHARE
        return spared, spared

    def loader(self, shuffle: bool) -> StoreLoader:
        loader: StoreLoader = self._build(self._split, shuffle)
        loader.last_epoch, loader.labels, loader.next_epoch = None, loader.labels.long(), int(shuffle)
        return loader


def loader(
    store: Store,
    nodes: str | Any | None = "train",
    *,
    num_neighbors: Sequence[int] = (15, 10),
    batch_size: int = 1024,
    memory_limit: str | int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    num_workers: int = 0,
) -> StoreLoader:
    """A PyG `NodeLoader` over a store on disk, with the batches that the trainer gets for the same seed and epoch.

    Each pass over it is an epoch: where it shuffles, order and neighbors are new in each, else the same in all.
    `set_epoch(k)` makes the next pass that of epoch k, 1 being the first, to go on after an interruption.

    A batch has `x` float32 [n, F], `edge_index` int64 [2, e] of local ids, `n_id` int64 [n], the seeds first, `y` int64
    [batch_size] of the seeds alone (-1 where there is no label), `num_sampled_nodes` and `num_sampled_edges` of each
    hop, `batch_size`, and `input_id`, the seeds' places in `nodes`.

    Args:
        nodes: a split's name, or distinct node ids or a mask of all nodes, numpy or torch; None, as in PyG, for all.
        num_neighbors: a fan-out per layer, the seeds' first; -1 for all.
        memory_limit: "4 GB" or bytes for this whole process, page cache included; by default its cgroup's, or what the
            machine has left. A quarter of what is left is spared for the model; where the rest does not hold the
            store, batches are sampled many at a time.
        shuffle: by default for "train" alone.
        seed: order and neighbors follow from it, not from `torch.manual_seed`: repeat an experiment with another one.
        num_workers: processes that sample, where the store fits; windows have no use for them.

    Raises:
        InputError: naming the argument and what is wrong with it.
    """
    if shuffle is None:
        shuffle = isinstance(nodes, str) and nodes == "train"
    values = {"num_neighbors": num_neighbors, "batch_size": batch_size, "seed": seed, "num_workers": num_workers}
    config = TrainConfig.create({"dataset": store.path, "loading": "store", **values})
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    if isinstance(nodes, str):
        if nodes not in SPLITS:
            raise InputError(f"nodes: expected one of {', '.join(SPLITS)}, or node ids, got {nodes!r}")
        split, ids = nodes, torch.from_numpy(store.splits[nodes])
    else:
        split, ids = "train", torch.from_numpy(node_ids(nodes, store.num_nodes))
    return _OneLoader(store, config, split, ids, limit).loader(bool(shuffle))


def node_ids(nodes: Any, num_nodes: int) -> Array:
    """Distinct node ids, a mask of all nodes or None for all of them as int64 ids; `InputError` for anything else."""
    ids = np.arange(num_nodes) if nodes is None else np.asarray(nodes)
    if ids.dtype.kind == "b" and ids.shape == (num_nodes,):
        ids = np.flatnonzero(ids)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        found = f"{ids.dtype} {list(ids.shape)}"
        raise InputError(f"nodes: expected node ids [n], or a mask of {num_nodes} booleans, got {found}")
    if ids.min() < 0 or ids.max() >= num_nodes:
        raise InputError(f"nodes: expected ids from 0 to {num_nodes - 1}, got {ids.min()} to {ids.max()}")
    if len(np.unique(ids)) < len(ids):
        raise InputError(f"nodes: expected each once, got {len(ids) - len(np.unique(ids))} repeats")
    return ids.astype(np.int64)


# PyG's own loaders ---------------------------------------------------------------------------------------------------


class PassSampler(CSCSampler):
    """A `CSCSampler` for PyG's own loaders, each pass of which is an epoch: neighbors and negatives are drawn anew.

    They follow from `seed`, from the pass's number, and from which of the sampler's loaders it is (in the order in which
    these begin): not from `torch.manual_seed`, the number of workers, or passes of other loaders.
    `NodeLoader(stores, sampler)`, `LinkLoader(stores, sampler)`, `NeighborLoader(stores, fan_outs,
    neighbor_sampler=sampler)` and `LinkNeighborLoader` take it, with `stores` a pair of `StoreFeatures` and
    `StoreGraph`, or a `Data`; the fan-outs are the sampler's.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self._passes = weakref.WeakKeyDictionary[Any, list[int]]()  # by loader: its number, passes begun
        self._loaders = 0

    def set_epoch(self, epoch: int) -> None:
        """Have each loader go on with its pass number `epoch`, 0 being the first: after an interruption, say."""
        super().set_epoch(epoch)
        for entry in self._passes.values():
            entry[1] = 0

    def begin_pass(self, loader: Any, name: str) -> None:
        """Have the iterator that `loader`, whose attribute `name` this sampler is, makes next draw at a new epoch.

        An iterator takes the loader's `collate_fn` along, also to its workers. Here it gets that of a copy of the
        loader, whose sampler has the epoch of the pass. Workers that persist have a sampler already, and see its epoch.
        """
        if loader not in self._passes:
            self._passes[loader] = [self._loaders, 0]
            self._loaders += 1
        number, begun = self._passes[loader]
        self._passes[loader][1] += 1
        epoch = int(self._epoch_value[0]) + begun + (number << 32)
        if loader.persistent_workers and loader._iterator is not None:
            getattr(loader.collate_fn.args[0], name).set_epoch(epoch)
            return
        one = copy.copy(loader)
        vars(one)[name] = self.at_epoch(epoch)
        loader.collate_fn = functools.partial(type(loader).collate_fn, one)


def _with_passes(begin: Callable[[Any], Iterator[Any]], name: str) -> Callable[[Any], Iterator[Any]]:
    """`begin`, the `__iter__` of a loader, which tells the loader's sampler that a pass begins."""

    @functools.wraps(begin)
    def iterate(loader: Any) -> Iterator[Any]:
        sampler = getattr(loader, name)
        if isinstance(sampler, PassSampler):
            sampler.begin_pass(loader, name)
        return begin(loader)

    return iterate


# Nothing in PyG's interface tells a sampler that a pass begins.
NodeLoader.__iter__ = _with_passes(NodeLoader.__iter__, "node_sampler")
LinkLoader.__iter__ = _with_passes(LinkLoader.__iter__, "link_sampler")


# PyG's own interfaces ------------------------------------------------------------------------------------------------


class StoreFeatures(FeatureStore):  # type: ignore[misc]  # PyG ships no types
    """`x` float32 [N, F] and `y` int64 [N] of a store as PyG's `FeatureStore`: a batch's rows are read from the maps.

    Pickled, as for DataLoader workers, it carries the store's path only.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        store.advise_random()

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [TensorAttr(group_name=None, attr_name=name) for name in ("x", "y")]

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        if attr.attr_name not in ("x", "y"):
            return None
        array = self._store.x if attr.attr_name == "x" else self._store.y
        index = attr.index
        index = index.numpy() if isinstance(index, Tensor) else slice(None) if index is None else index
        return torch.from_numpy(np.asarray(array[index]).astype(np.float32 if attr.attr_name == "x" else np.int64))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        return self._store.files[attr.attr_name].shape

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise InputError(f"{self._store.path}: a store is read only; write a new one")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise InputError(f"{self._store.path}: a store is read only; write a new one")


class StoreGraph(GraphStore):  # type: ignore[misc]
    """The edges of a store as PyG's `GraphStore`: one kind of edge, in CSC form, mapped.

    PyG's own samplers take int64, for which `row` is read into RAM: 8 bytes an edge; `CSCSampler` reads the maps.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        size = self._store.num_nodes, self._store.num_nodes
        return [EdgeAttr(edge_type=None, layout=EdgeLayout.CSC, is_sorted=True, size=size)]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        if edge_attr.layout != EdgeLayout.CSC:
            return None
        row, colptr = self._store.read("row", np.int64), self._store.read("colptr")
        return torch.from_numpy(row), torch.from_numpy(colptr)

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise InputError(f"{self._store.path}: a store is read only; write a new one")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise InputError(f"{self._store.path}: a store is read only; write a new one")
