"""Conversion of a PyG `Data`, or of the forms in which PyG and OGB save one, to a store."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..display import in_notebook
from ..errors import InputError
from ..files import StrPath
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.summary import summarized
from .arrays import as_ids, as_numpy, is_sparse, sparse_remedy, store_from_arrays

_MASKS = {"train": ("train_mask",), "valid": ("val_mask", "valid_mask"), "test": ("test_mask",)}
_REMEDIES = {
    "edge_index": "without edges set data.edge_index = torch.empty(2, 0, dtype=torch.long)",
    "x": "without features set data.x = torch.ones(len(data.y), 1)",
    "y": "set data.y to the class of each node, -1 for none",
}
_SPLITS = (
    "pass splits={'train': ids, 'valid': ids, 'test': []}, [] for an empty one; OGB's "
    "dataset.get_idx_split() has them, torch_geometric.transforms.RandomNodeSplit()(data) draws them"
)


def _say(text: str) -> None:
    # a notebook shows text on standard error like an error
    print(text, file=sys.stdout if in_notebook() else sys.stderr)


def from_data(
    data: Any,
    path: StrPath,
    *,
    splits: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    targets: bool = False,
    say: Callable[[str], object] = _say,
    **options: Any,
) -> Store:
    """Write a PyG `Data` with one kind of node as a store.

    Needed are `x`, `y`, `edge_index` or `adj_t`, and, without `splits`, `train_mask`, `val_mask`
    and `test_mask`. `data` may also be a PyG data set of one graph, the tuple (data, slices) that
    it saves, or OGB's (graph, labels). Unless `undirected`, each node's in-edges keep their order.

    Args:
        splits: node ids, or masks, of train, valid (or val) and test, instead of the masks in
            `data`; [] for an empty split.
        say: called with lines of text: the attributes that a store does not keep, such as
            edge_attr, and the store's summary. By default they go to standard error, in a notebook
            to standard output.
        num_classes: by default the largest label plus one.
        targets: whether `data.y` has numbers [N] or [N, T] instead of classes, NaN for none, for
            your own training loop. They are stored as float32; ogbnlib's trainer refuses them.
        options: name, the store's name, and options of `convert`, as in `from_arrays`.
    """
    values = _attributes(data)
    _check_complete(values)
    num_nodes = len(np.atleast_1d(as_numpy(values["x"], "x")))
    if splits is None:
        splits = _masks_of(values, num_nodes)
    unused = {*values} - {
        *_REMEDIES,
        "num_nodes",
        *(name for names in _MASKS.values() for name in names),
    }
    if "edge_index" not in values:
        unused.discard("adj_t")
        values["edge_index"], weighted = _edges_of(values["adj_t"], num_nodes)
        unused |= {"the values of adj_t"} if weighted else set()
    if unused:
        say(f"{path}: a store does not keep {', '.join(sorted(unused))} of the data")
    store = store_from_arrays(
        path,
        edge_index=values["edge_index"],
        x=values["x"],
        y=values["y"],
        splits=splits,
        num_classes=num_classes,
        targets=targets,
        **options,
    )
    say(summarized(store))
    return store


def _masks_of(values: Mapping[str, Any], num_nodes: int) -> dict[str, Array]:
    masks = {}
    for split, names in _MASKS.items():
        name = next((name for name in names if name in values), None)
        if name is None:
            raise InputError(f"data: expected train_mask, val_mask and test_mask; {_SPLITS}")
        masks[split] = as_ids(values[name], num_nodes, f"data.{name}", are_mask=True)
    return masks


def _check_complete(values: Mapping[str, Any]) -> None:
    missing = [name for name in _REMEDIES if name not in values]
    if "adj_t" in values and "edge_index" in missing:
        missing.remove("edge_index")
    if missing:
        remedies = "; ".join(_REMEDIES[name] for name in missing)
        if "edge_index" in missing and is_sparse(values.get("adj")):
            remedies = f"set data.edge_index: {sparse_remedy('data.adj')}"
        raise InputError(f"data: found no {', '.join(missing)}; {remedies}")


def _attributes(data: Any) -> dict[str, Any]:
    graph = _only_graph(data)
    if hasattr(graph, "node_types"):
        raise InputError(
            f"data: expected one kind of node, got {', '.join(graph.node_types) or 'none'}; pass "
            "data.node_type_subgraph([KIND]).to_homogeneous()"
        )
    if not isinstance(graph, Mapping):
        if isinstance(graph, type) or not hasattr(graph, "to_dict"):
            kind = graph.__name__ if isinstance(graph, type) else type(graph).__name__
            raise InputError(
                f"data: expected a PyG Data, got {kind}; torch_geometric.utils has from_networkx, "
                "from_dgl and from_scipy_sparse_matrix"
            )
        graph = graph.to_dict()
    return {str(name): value for name, value in graph.items() if value is not None}


def _only_graph(data: Any) -> Any:
    """Return the graph of a PyG data set, of what one saves, or of OGB's (graph, labels); any other
    `data` as it is."""
    if isinstance(data, Mapping) and {*data} == {"graph", "labels"}:
        return _of_ogb(data["graph"], data["labels"])
    if isinstance(data, tuple) and len(data) in (2, 3):
        return _of_saved(*data)
    if not hasattr(data, "processed_dir"):
        return data
    _check_count(len(data))
    return data[0]


def _of_ogb(graph: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    values = {name: value for name, value in graph.items() if name != "node_feat"}
    return {**values, "x": graph["node_feat"], "y": labels}


def _of_saved(graph: Any, more: Any, kind: Any = None) -> Any:
    if isinstance(graph, Mapping) and "node_feat" in graph:
        return _of_ogb(graph, more)
    if not isinstance(more, Mapping | None):
        return (graph, more)
    # PyG saves (attributes, slices, class); before version 2.3 it saved (Data, slices)
    ends = [ends for ends in (more or {}).values() if not isinstance(ends, Mapping)]
    _check_count(max((len(offsets) - 1 for offsets in ends), default=1))
    return graph if kind is None else kind.from_dict(graph)


def _check_count(count: int) -> None:
    if count != 1:
        raise InputError(f"data: expected one graph, got {count}; pass one of them, dataset[i]")


def _edges_of(adj_t: Any, num_nodes: int) -> tuple[Array, bool]:
    """Return the edge_index [2, E] of PyG's `adj_t`, whose rows are destinations, and whether
    `adj_t` has a value other than 1."""
    from torch_geometric.utils import to_edge_index

    if not is_sparse(adj_t):
        raise InputError(
            f"data.adj_t: expected a sparse matrix, got {type(adj_t).__name__}; set "
            "data.edge_index = torch_geometric.utils.dense_to_sparse(data.adj_t)[0].flip(0)"
        )
    shape = [adj_t.size(0), adj_t.size(1)]
    if shape != [num_nodes, num_nodes]:
        raise InputError(f"data.adj_t: expected {[num_nodes, num_nodes]}, got {shape}")
    if hasattr(adj_t, "layout"):
        # to_edge_index marks its argument as coalesced; the user's tensor stays unmarked
        adj_t = adj_t.detach()
    edges, values = to_edge_index(adj_t)
    return as_numpy(edges.flip(0), "adj_t"), bool((values != 1).any())
