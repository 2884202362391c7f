"""Conversion of a PyG `Data`, or of the forms in which PyG and OGB save one, to a store."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..display import in_notebook
from ..errors import InputError
from ..files import StrPath
from ..graph.array_checks import from_one
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.summary import summarized
from ..progress import Progress
from .arrays import as_ids, as_numpy, is_sparse, sparse_remedy, store_from_arrays
from .convert import FeatureDtype

_MASKS = {"train": ("train_mask",), "valid": ("val_mask", "valid_mask"), "test": ("test_mask",)}
# By library, how to turn its graph into a Data.
_CONVERSIONS = {
    "dgl": "torch_geometric.utils.from_dgl(graph)",
    "networkx": "torch_geometric.utils.from_networkx(graph)",
    "scipy": "Data(edge_index=torch_geometric.utils.from_scipy_sparse_matrix(matrix)[0], x=..., y=...)",
}
_SPLITS = (
    "pass splits={'train': ids, 'valid': ids, 'test': []}, [] for an empty one; OGB's "
    "dataset.get_idx_split() has them, torch_geometric.transforms.RandomNodeSplit()(data) draws them"
)
_REMEDIES = {
    "edge_index": "without edges set data.edge_index = torch.empty(2, 0, dtype=torch.long)",
    "x": "without features set data.x = torch.ones(len(data.y), 1)",
    "y": "set data.y to the class of each node, -1 for none",
    **dict.fromkeys(("train_mask", "val_mask", "test_mask"), _SPLITS),
}


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
    name: str | None = None,
    undirected: bool = False,
    feature_dtype: FeatureDtype | None = None,
    memory_limit: str | int | None = None,
    progress: Progress = True,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], object] = _say,
) -> Store:
    """Write a PyG `Data` with one kind of node as a store.

    Needed are `x`, `y`, `edge_index` or `adj_t`, and, without `splits`, `train_mask`, `val_mask`
    and `test_mask`. `data` may also be a PyG data set of one graph, the tuple (data, slices) that
    it saves, or OGB's (graph, labels). Unless `undirected`, each node's in-edges keep their order.

    Args:
        splits: node ids, or masks, of train, valid (or val) and test, instead of the masks in
            `data`; [] for an empty split.
        say: called with lines of text: the attributes that a store does not keep, such as
            edge_attr, a doubt about the labels, and the store's summary. By default they go to
            standard error, in a notebook to standard output.
        num_classes: by default the largest label plus one.
        targets: whether `data.y` has numbers [N] or [N, T] instead of classes, such as values to
            predict or several labels per node, NaN for none. They are stored as float32 for your
            own training loop; ogbnlib's trainer refuses them.
        name: the store's name, by default that of its folder.
        undirected, feature_dtype, memory_limit, progress, check: as in `convert`.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(
            f"path: expected the new store's folder, got {type(path).__name__}; "
            "call from_data(data, path)"
        )
    values = _attributes(data)
    masks = {}
    if splits is None:  # a missing mask gets its usual name, which the message then asks for
        masks = {
            split: next((name for name in names if name in values), names[0])
            for split, names in _MASKS.items()
        }
    edges = "adj_t" if "adj_t" in values and "edge_index" not in values else "edge_index"
    required = [edges, "x", "y", *masks.values()]
    _check_complete(values, required)
    num_nodes = _count_nodes(values)
    others = sorted({*values} - {*required, "num_nodes", "train_mask", "val_mask", "test_mask"})
    edge_index = values[edges]
    if edges == "adj_t":
        edge_index, weighted = _edges_of(edge_index, num_nodes)
        others += ["the values of adj_t"] * weighted
    if others:
        say(f"{path}: a store does not keep {', '.join(others)} of the data")
    if splits is None:
        splits = {
            split: as_ids(values[mask], num_nodes, f"data.{mask}") for split, mask in masks.items()
        }
    store = store_from_arrays(
        path,
        edge_index=edge_index,
        x=values["x"],
        y=values["y"],
        splits=splits,
        num_classes=num_classes,
        targets=targets,
        name=name,
        undirected=undirected,
        feature_dtype=feature_dtype,
        memory_limit=memory_limit,
        progress=progress,
        check=check,
    )
    labels = as_numpy(values["y"], "y")
    question = from_one(labels[labels >= 0], store.num_classes - 1)
    if num_classes is None and not targets and question:
        say(f"{path}: labels from 1 to {store.num_classes - 1}{question}")
    say(summarized(store))
    return store


def _count_nodes(values: Mapping[str, object]) -> int:
    x = as_numpy(values["x"], "x")
    num_nodes = len(x) if x.ndim else 0
    if values.get("num_nodes", num_nodes) != num_nodes:
        raise InputError(
            f"x: expected a row for each of data.num_nodes={values['num_nodes']} nodes, "
            f"found {num_nodes} rows"
        )
    return num_nodes


def _attributes(data: Any) -> dict[str, Any]:
    graph = _only_graph(data)
    if isinstance(graph, Mapping):
        values = dict(graph)
    elif isinstance(graph, type) or not hasattr(graph, "to_dict"):
        raise InputError(f"data: expected a PyG Data, got {_kind(graph)}")
    elif hasattr(graph, "node_types"):
        raise InputError(f"data: expected one kind of node, got {_parts(graph)}")
    else:
        values = graph.to_dict()
    return {str(name): value for name, value in values.items() if value is not None}


def _only_graph(data: Any) -> Any:
    """Return the only graph of a PyG data set, of (data, slices) or of OGB's (graph, labels).

    Any other `data` is returned unchanged.
    """
    if isinstance(data, Mapping) and {*data} == {"graph", "labels"}:
        data = (data["graph"], data["labels"])
    count = 1
    if hasattr(data, "processed_dir"):
        count = len(data)
        data = data[0] if count else None
    elif isinstance(data, tuple) and len(data) in (2, 3):
        graph, more, *kind = data
        if isinstance(graph, Mapping) and "node_feat" in graph:
            return {
                **{name: graph[name] for name in graph if name != "node_feat"},
                "x": graph["node_feat"],
                "y": more,
            }
        if more is None or isinstance(more, Mapping):
            # PyG saves (attributes, slices, class); before version 2.3 it saved (Data, slices)
            data = kind[0].from_dict(graph) if kind else graph
            flat = [ends for ends in (more or {}).values() if not isinstance(ends, Mapping)]
            count = max((len(ends) - 1 for ends in flat), default=1)
    if count != 1:
        raise InputError(f"data: expected one graph, got {count}; pass one of them, dataset[i]")
    return data


def _kind(data: Any) -> str:
    """Describe, for messages, a `data` that is no `Data`, and how to get a `Data` from it."""
    if isinstance(data, type):
        return f"the class {data.__name__}; pass an object of it"
    kind = type(data).__name__
    library = type(data).__module__.split(".")[0]
    if library in _CONVERSIONS:
        return f"{library}'s {kind}; pass {_CONVERSIONS[library]}"
    return kind


def _parts(data: Any) -> str:
    """List the node types of a `HeteroData`, for messages, and how to extract a labelled one."""
    kinds = data.node_types
    text = f"{type(data).__name__} of {', '.join(kinds) or 'none'}"
    labelled = next((kind for kind in kinds if "y" in data[kind]), None)
    if labelled is None:
        return text
    return f"{text}; pass data.node_type_subgraph([{labelled!r}]).to_homogeneous()"


def _check_complete(values: Mapping[str, Any], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in values]
    remedies = [_REMEDIES[name] for name in missing]
    if "edge_index" in missing and is_sparse(values.get("adj")):
        remedies[0] = f"set data.edge_index: {sparse_remedy('data.adj')}"
    if missing:
        raise InputError(
            f"data: expected {', '.join(required)}, found no {', '.join(missing)}; "
            f"{'; '.join(dict.fromkeys(remedies))}"
        )


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
