"""Conversion of a PyG `Data`, or of the form in which PyG saves one, to a store."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import StrPath
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.summary import summarized
from .arrays import as_ids, as_numpy, store_from_arrays

# names of a Data's attributes: of the masks by split, and of those that are needed, with remedies
_MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
_REMEDIES = {
    "edge_index": "of adj_t it is torch_geometric.utils.to_edge_index(data.adj_t)[0].flip(0), "
    "without edges torch.empty(2, 0, dtype=torch.long)",
    "x": "without features set data.x = torch.ones(len(data.y), 1)",
    "y": "set data.y to the class of each node, -1 for none",
}
_SPLITS = (
    "pass splits={'train': ids, 'valid': ids, 'test': []}, [] for an empty one; OGB's "
    "dataset.get_idx_split() has them, torch_geometric.transforms.RandomNodeSplit()(data) draws them"
)


def from_data(
    data: Any, path: StrPath, *, splits: Mapping[str, Any] | None = None, **options: Any
) -> Store:
    """Write a PyG `Data` with one kind of node as a store.

    Needed are `x`, `y`, `edge_index`, and, without `splits`, `train_mask`, `val_mask` and
    `test_mask`. `data` may also be a PyG data set of one graph, or the tuple (data, slices) that it
    saves. Attributes that a store does not keep, such as edge_attr, are printed with its summary.

    Args:
        splits: node ids, or masks, of train, valid (or val) and test, instead of the masks in
            `data`; [] for an empty split.
        options: num_classes, targets and other options of `from_arrays`.
    """
    values = _attributes(data)
    missing = [name for name in _REMEDIES if name not in values]
    if missing:
        remedies = "; ".join(_REMEDIES[name] for name in missing)
        raise InputError(f"data: found no {', '.join(missing)}; {remedies}")
    if splits is None:
        splits = _masks_of(values)
    unused = {*values} - {*_REMEDIES, *_MASKS.values(), "num_nodes"}
    if unused:
        print(f"{path}: a store does not keep {', '.join(sorted(unused))} of the data")
    store = store_from_arrays(
        path,
        edge_index=values["edge_index"],
        x=values["x"],
        y=values["y"],
        splits=splits,
        **options,
    )
    print(summarized(store))
    return store


def _masks_of(values: Mapping[str, Any]) -> dict[str, Array]:
    if not {*_MASKS.values()} <= {*values}:
        raise InputError(f"data: expected {', '.join(_MASKS.values())}; {_SPLITS}")
    num_nodes = len(np.atleast_1d(as_numpy(values["x"], "x")))  # a scalar is refused later
    return {
        split: as_ids(values[name], num_nodes, f"data.{name}", are_mask=True)
        for split, name in _MASKS.items()
    }


def _attributes(data: Any) -> dict[str, Any]:
    """Return the attributes of a graph by their names, but for those that are None."""
    graph = _only_graph(data)
    if hasattr(graph, "node_types"):  # HeteroData
        raise InputError(
            f"data: expected one kind of node, got {', '.join(graph.node_types) or 'none'}; pass "
            "data.node_type_subgraph([KIND]).to_homogeneous()"
        )
    if not isinstance(graph, Mapping):  # PyG saves a Data's attributes as a dict
        if isinstance(graph, type) or not hasattr(graph, "to_dict"):  # a type: Data for Data()
            raise InputError(
                f"data: expected a PyG Data, got {type(graph).__name__}; torch_geometric.utils has "
                "from_networkx, from_dgl and from_scipy_sparse_matrix"
            )
        graph = graph.to_dict()
    return {str(name): value for name, value in graph.items() if value is not None}


def _only_graph(data: Any) -> Any:
    """Return the graph of a PyG data set, or of the tuple that one saves; other `data` as it is."""
    if isinstance(data, tuple) and len(data) in (2, 3) and isinstance(data[1], Mapping | None):
        # PyG saves (attributes, slices, class), before version 2.3 (Data, slices). For an attribute
        # `slices` has where each graph begins, and the end (HeteroData: maps). None is one graph.
        offsets = [ends for ends in (data[1] or {}).values() if not isinstance(ends, Mapping)]
        count = max((len(ends) - 1 for ends in offsets), default=1)
    elif hasattr(data, "processed_dir"):  # a PyG data set
        count = len(data)
    else:
        return data
    if count != 1:
        raise InputError(f"data: expected one graph, got {count}; pass one of them, dataset[i]")
    return data[0]
