"""PyG's interfaces over a store: `Data`, `FeatureStore`, `GraphStore`, and a sampler for its
loaders."""

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch_geometric import typing
from torch_geometric.data import Data, EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.sampler import NeighborSampler, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.utils import index_to_mask

from ..errors import InputError, clear_errors, format_bytes, split_name
from ..forecast.available import available_bytes
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.store_format import SPLITS
from ..sources.arrays import as_ids
from .sampler import NO_EDGES, CSCSampler

_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def node_ids(nodes: str | ArrayLike | Tensor | None, store: Store) -> Array:
    """Return the int64 ids [n] of `nodes`: a split's name, distinct node ids, a mask of all nodes,
    or None for all nodes."""
    if isinstance(nodes, str):
        name = split_name(nodes)  # "val" is "valid"
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
    repeats = len(ids) - len(np.unique(ids))
    if repeats:
        raise InputError(f"nodes: expected each once, got {repeats} repeats")
    return ids


def _label_dtype(store: Store) -> type[np.number[Any]]:  # that PyG and torch's losses expect
    return np.float32 if store.has_targets else np.int64


def _check_room(store: Store, size_bytes: int) -> None:  # for arrays of all nodes in RAM
    free = available_bytes()
    if size_bytes > free:  # 102 GB for ogbn-papers100M
        raise InputError(
            f"{store.path}: {format_bytes(size_bytes)} for all of it in RAM, {format_bytes(free)} are "
            "available; use store.loader, which reads batch by batch"
        )


def mapped_features(store: Store) -> Tensor:
    """The features of all nodes [N, F], mapped from disk, in the store's dtype; int8 codes are not
    decoded."""
    # torch warns of writing to the map, which nothing here does
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.asarray(store.x))


class StoreData(Data):  # type: ignore[misc]  # PyG ships no types
    """The `data` of a loader: the number of nodes, and `x`, read at each access, for PyG's
    layer-wise `model.inference(loader)`."""

    def __init__(self, store: Store) -> None:
        super().__init__(edge_index=NO_EDGES, num_nodes=store.num_nodes)
        self.__dict__["store"] = store  # past `Data`, which would take it for an item of the graph

    @property
    def x(self) -> Tensor:
        """The features of all nodes, float32 [N, F]: mapped from disk, or in RAM if the store has
        another dtype."""
        store = self.__dict__["store"]
        if store.feature_dtype == np.float32:
            return mapped_features(store)
        _check_room(store, 4 * store.num_nodes * store.num_features)
        return torch.from_numpy(store.read("x", np.float32))


@clear_errors()
def to_data(store: Store, *, half: bool = False) -> Data:
    """Read a whole store into a PyG `Data` in RAM, for a graph that fits.

    It has `x` float32 [N, F], `y` int64 [N] (-1 if there is no label) or float32 targets [N] or
    [N, T], and `train_mask`, `val_mask`, `test_mask` bool [N]. `edge_index` is int64 [2, E], row 0
    sources and row 1 targets, ascending by target, reverse edges included: PyG's loaders of it may
    have `is_sorted=True`.

    Args:
        half: Read `x` as float16: half the memory, also while it is read, where `data.x.half()`
            has both copies for a moment. A model takes `batch.x.float()`.
    """
    dtype = np.dtype(np.float16 if half else np.float32)
    node_bytes = dtype.itemsize * store.num_features + 3  # 3 for the masks
    label_bytes = np.dtype(_label_dtype(store)).itemsize * store.y.size
    _check_room(store, node_bytes * store.num_nodes + label_bytes + 16 * store.num_edges)
    masks = {
        mask: index_to_mask(torch.from_numpy(store.splits[split]), store.num_nodes)
        for split, mask in _MASKS.items()
    }
    return Data(
        x=torch.from_numpy(store.read("x", dtype)),
        y=torch.from_numpy(store.read("y", _label_dtype(store))),
        edge_index=torch.from_numpy(store.read_edge_index()),
        **masks,
    )


class _PassSampler(CSCSampler):
    """A sampler with batch keys from torch's global generator, as in PyG's own samplers."""

    def batch_key(self, first: int, epoch: int | None = None) -> np.uint64:  # `first` is unused
        return super().batch_key(int(torch.randint(2**62, ())), epoch)


class _StoreSampler(_PassSampler):
    """A sampler over a store's mapped files, pickled by the store's path."""

    def __init__(self, store: Store, num_neighbors: Sequence[int], seed: int) -> None:
        super().__init__(store.colptr, store.row, num_neighbors, seed=seed)
        self._store = store

    def __reduce__(self) -> tuple[Any, ...]:  # the worker maps the files itself
        return _StoreSampler, (self._store, self.num_neighbors, self.seed)


def sampler(store: Store, num_neighbors: Sequence[int], seed: int = 0) -> CSCSampler:
    """Return a sampler for PyG's node and link loaders; torch's generator decides each batch.

    Pass it to `NeighborLoader` or `LinkNeighborLoader` as `neighbor_sampler`. The `num_neighbors`
    of the sampler are used, not those of the loader.
    """
    return _StoreSampler(store, num_neighbors, seed)


def sample_without_pyg_lib() -> None:
    """Let `CSCSampler` draw for PyG's own `NeighborLoader` where neither pyg-lib nor torch-sparse is
    installed. Options that it lacks, such as `replace` or times, still raise PyG's `ImportError`."""
    if typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE:
        return
    warnings.filterwarnings("ignore", message=".*without a.*pyg-lib.*")
    refuse = NeighborSampler.sample_from_nodes  # raises the `ImportError`

    def sample_from_nodes(stock: NeighborSampler, inputs: NodeSamplerInput) -> Any:
        options = (stock.replace, stock.disjoint, stock.edge_weight, inputs.time)
        is_plain = stock.subgraph_type == SubgraphType.directional
        if any(option not in (None, False) for option in options) or not is_plain:
            return refuse(stock, inputs)
        if not hasattr(stock, "kernels"):  # the first batch of this loader
            fan_outs = stock.num_neighbors.get_mapped_values()
            stock.kernels = _PassSampler(stock.colptr, stock.row, fan_outs)
        return stock.kernels.sample_from_nodes(inputs)

    NeighborSampler.sample_from_nodes = sample_from_nodes


class StoreFeatures(FeatureStore):  # type: ignore[misc]  # PyG ships no types
    """PyG's `FeatureStore` over a store's mapped files: `x` float32 [N, F], and `y` int64 [N] or
    float32 targets. `Store.loader` is faster for stores larger than memory."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        store.advise_random()  # PyG's loaders read the rows of a batch

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [TensorAttr(group_name=None, attr_name=name) for name in ("x", "y")]

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        self._check_name(attr)
        self.store.check_maps()
        index = slice(None) if attr.index is None else attr.index  # None: all nodes
        if isinstance(index, Tensor):
            index = index.numpy()
        values = np.asarray(getattr(self.store, attr.attr_name)[index])
        if attr.attr_name == "y":
            return torch.from_numpy(values.astype(_label_dtype(self.store)))
        rows = values.reshape(-1, self.store.num_features)  # the row of a single node is 1-D
        floats = self.store.decode(rows).astype(np.float32)
        return torch.from_numpy(floats.reshape(values.shape))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        self._check_name(attr)
        return self.store.files[attr.attr_name].shape

    def _check_name(self, attr: TensorAttr) -> None:
        group = attr.group_name if attr.is_set("group_name") else None
        if group is not None or attr.attr_name not in ("x", "y"):
            raise KeyError(
                f"{self.store.path}: expected x and y of the group None, got {attr.attr_name} of "
                f"{group}"
            )

    def _read_only(self, *arguments: object) -> NoReturn:  # in place of PyG's `put` and `remove`
        raise InputError(f"{self.store.path}: a store is read only; write a new one")

    _put_tensor = _remove_tensor = _read_only


class StoreGraph(GraphStore):  # type: ignore[misc]
    """The edges of a store as PyG's `GraphStore`: one edge type, in CSC form, for PyG's own
    samplers. These need int64, so `row` is read into RAM: 8 bytes an edge."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        size = self.store.num_nodes, self.store.num_nodes
        return [EdgeAttr(edge_type=None, layout=EdgeLayout.CSC, is_sorted=True, size=size)]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        if edge_attr.edge_type is not None or edge_attr.layout != EdgeLayout.CSC:
            return None  # PyG's way to say that there are no such edges
        row = torch.from_numpy(self.store.read("row", np.int64))
        return row, torch.from_numpy(self.store.read("colptr"))

    _put_edge_index = _remove_edge_index = StoreFeatures._read_only
