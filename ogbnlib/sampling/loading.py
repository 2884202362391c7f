"""A store in the user's own training loop: the trainer's loader, and PyG's interfaces over the
files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.utils import index_to_mask

from ..config import TrainConfig
from ..errors import InputError, clear_errors, format_bytes, parse_bytes, split_name
from ..forecast.budget import queued_bytes, usable_bytes
from ..forecast.passes import Pass
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.store_format import SPLITS
from ..memory.reading import own_memory
from ..memory.recorder import EventLog
from ..sources.arrays import as_ids
from .loader import StoreLoader, available_bytes
from .sampler import CSCSampler
from .store_policy import StoreLoaders


class _OneLoader(StoreLoaders):
    """The policy of `loading="store"` for one split, or for ids."""

    def __init__(
        self,
        store: Store,
        config: TrainConfig,
        split: str,
        ids: Tensor,
        limit: int | None,
        drop_last: bool,
    ):
        self._split, self._ids, self._limit, self.drop_last = split, ids, limit, drop_last
        super().__init__(store, config, EventLog(None), 0, 1)

    def _load(self, store: Store) -> Any:
        self.splits[self._split] = self._ids
        loaded = super()._load(store)
        if self._limit is not None:
            self._available = max(
                0, min(self._available, usable_bytes(self._limit) - own_memory()[0])
            )
        return loaded

    def _pass(self, split: str, training: bool, memory: int | None) -> Pass:
        one = super()._pass(split, training, memory)
        # One part in four of the available memory is left for the model and its step.
        reserved = queued_bytes(one.batch, self.num_features, 4) + self._available // 4
        return replace(one, reserve=(reserved, reserved))


@clear_errors()
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
    persistent_workers: bool = False,
    drop_last: bool = False,
    transform: Callable[[Data], Any] | None = None,
) -> StoreLoader:
    """Return a PyG `NodeLoader` over a store on disk, with the trainer's batches for the same seed
    and epoch.

    Each pass is an epoch: with `shuffle`, each has a new order and new neighbors, else all are the
    same. To go on after an interruption, `set_epoch(k)` makes the next pass that of epoch k, counted
    from 1; or `state_dict()` and `load_state_dict(state)` go on within an epoch. Lightning calls
    both.

    A batch has `x` float32 [n, F], `edge_index` int64 [2, e] of local ids, `n_id` int64 [n], the
    seeds first; `y` int64 [batch_size] of the seeds alone (-1 if there is no label),
    `num_sampled_nodes` and `num_sampled_edges` of each hop, `batch_size`, and `input_id`, the
    seeds' places in `nodes`. Small batches share memory: keep a `batch.clone()`.

    Args:
        nodes: a split's name ("val" is "valid"), or distinct node ids or a mask of all nodes, numpy
            or torch; None, as in PyG, for all.
        memory_limit: "4 GB" or bytes for this whole process, page cache included; by default its
            cgroup's limit, or the machine's free memory. A quarter of the rest is left for the
            model; if the store does not fit into what then remains, batches are sampled many at a
            time.
        shuffle: by default for "train" alone.
        seed: decides order and neighbors in place of `torch.manual_seed`; use another one to repeat
            an experiment.
        num_workers: processes that sample, if the store fits; windows have no use for them.
        transform: called with each batch, as in PyG; `loader.transform = f` sets it later.
    """
    if shuffle is None:
        shuffle = isinstance(nodes, str) and nodes == "train"
    config = TrainConfig.create(
        dataset=store.path,
        loading="store",
        num_neighbors=num_neighbors,
        batch_size=batch_size,
        seed=seed,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    if limit is not None and limit < (used := own_memory()[0]):
        expected = f"more than the {format_bytes(used)} that this process already uses, got {format_bytes(limit)}"
        raise InputError(f"memory_limit: expected {expected}")
    ids = torch.from_numpy(node_ids(nodes, store))
    if drop_last and len(ids) < config.batch_size:  # there would be no batch at all
        raise InputError(
            f"drop_last: expected at least a batch of {config.batch_size} nodes, got {len(ids)}"
        )
    split = split_name(nodes) if isinstance(nodes, str) else "train"
    result: StoreLoader = _OneLoader(store, config, split, ids, limit, drop_last)._build(
        split, shuffle
    )
    result.last_epoch, result.labels, result.transform = None, result.labels.long(), transform
    result.next_epoch = int(shuffle)
    result.set_epoch(result.next_epoch)
    return result


def node_ids(nodes: Any, store: Store) -> Array:
    """Return int64 ids [n] for a split's name, distinct node ids, a mask of all nodes, or None for
    all of them."""
    if isinstance(nodes, str):
        name = split_name(nodes)
        if name not in SPLITS or not len(store.splits[name]):
            raise InputError(
                f"nodes: expected a split with nodes of {', '.join(SPLITS)}, or node ids, got {nodes!r}"
            )
        return store.splits[name]
    num_nodes = store.num_nodes
    ids = np.arange(num_nodes) if nodes is None else as_ids(nodes, num_nodes, "nodes")
    if not ids.size or ids.min() < 0 or ids.max() >= num_nodes:
        actual = f"{ids.min()} to {ids.max()}" if ids.size else "none"
        raise InputError(f"nodes: expected ids from 0 to {num_nodes - 1}, got {actual}")
    if repeats := len(ids) - len(np.unique(ids)):
        raise InputError(f"nodes: expected each once, got {repeats} repeats")
    return ids


@clear_errors()
def to_data(store: Store) -> Data:
    """Read a whole store into a PyG `Data` in RAM, for a graph that fits.

    It has `x` float32 [N, F], `y` int64 [N] (-1 if there is no label), `edge_index` int64 [2, E],
    source above target, ascending by target, reverse edges included; and `train_mask`, `val_mask`,
    `test_mask` bool [N].
    """
    needed = 4 * store.num_nodes * store.num_features + 16 * store.num_edges + 11 * store.num_nodes
    if needed > (free := available_bytes()):  # 102 GB for ogbn-papers100M
        sizes = f"{format_bytes(needed)} for all of it in RAM, {format_bytes(free)} are available"
        raise InputError(f"{store.path}: {sizes}; use store.loader, which reads batch by batch")
    names = zip(SPLITS, ("train_mask", "val_mask", "test_mask"), strict=True)
    masks = {
        name: index_to_mask(torch.from_numpy(store.splits[split]), store.num_nodes)
        for split, name in names
    }
    x, y = (
        torch.from_numpy(store.read("x", np.float32)),
        torch.from_numpy(store.read("y", np.int64)),
    )
    return Data(x=x, y=y, edge_index=torch.from_numpy(store.read_edge_index()), **masks)


class PassSampler(CSCSampler):
    """A `CSCSampler` for PyG's own loaders: torch's generator decides each batch, as in PyG's own
    samplers.

    `NeighborLoader` and `LinkNeighborLoader` take it as `neighbor_sampler`, where its own fan-outs
    count.
    """

    def batch_key(self, first: int, epoch: int | None = None) -> np.uint64:
        return super().batch_key(int(torch.randint(2**62, ())), epoch)


class StoreFeatures(FeatureStore):  # type: ignore[misc]  # PyG ships no types
    """`x` float32 [N, F] and `y` int64 [N] of a store as PyG's `FeatureStore`, read from the
    maps."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        store.advise_random()

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [TensorAttr(group_name=None, attr_name=name) for name in ("x", "y")]

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        self._check_name(attr)
        self.store.check_maps()
        index = attr.index
        index = (
            index.numpy() if isinstance(index, Tensor) else slice(None) if index is None else index
        )
        values = np.asarray(getattr(self.store, attr.attr_name)[index])
        if attr.attr_name == "y":
            return torch.from_numpy(values.astype(np.int64))
        rows = self.store.decode(values.reshape(-1, self.store.num_features)).reshape(values.shape)
        return torch.from_numpy(rows.astype(np.float32))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        self._check_name(attr)
        return self.store.files[attr.attr_name].shape

    def _check_name(self, attr: TensorAttr) -> None:
        group = attr.group_name if attr.is_set("group_name") else None
        if group is not None or attr.attr_name not in ("x", "y"):
            names = "x and y of the group None"
            raise KeyError(f"{self.store.path}: expected {names}, got {attr.attr_name} of {group}")

    def _read_only(self, *arguments: Any) -> NoReturn:
        raise InputError(f"{self.store.path}: a store is read only; write a new one")

    _put_tensor = _remove_tensor = _read_only


class StoreGraph(GraphStore):  # type: ignore[misc]
    """The edges of a store as PyG's `GraphStore`: one kind of edge, in CSC form, mapped.

    PyG's own samplers take int64, for which `row` is read into RAM: 8 bytes an edge; `CSCSampler`
    reads the maps.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        return [
            EdgeAttr(
                None,
                EdgeLayout.CSC,
                is_sorted=True,
                size=(self.store.num_nodes, self.store.num_nodes),
            )
        ]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        if edge_attr.edge_type is not None or edge_attr.layout != EdgeLayout.CSC:
            return None
        row, colptr = self.store.read("row", np.int64), self.store.read("colptr")
        return torch.from_numpy(row), torch.from_numpy(colptr)

    _put_edge_index = _remove_edge_index = StoreFeatures._read_only
