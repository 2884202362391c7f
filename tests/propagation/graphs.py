"""Small random graphs as stores, and A^k X in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

from ogbnlib import Store


def random_edges(random: np.random.Generator, num_nodes: int, num_edges: int) -> np.ndarray:
    """[2, E] with a hub, edges that repeat, self-loops, and isolated nodes at the end."""
    edges = random.integers(max(1, num_nodes - num_nodes // 8), size=(2, num_edges))
    edges[1, : num_edges // 4] = random.integers(num_nodes)
    loops = slice(num_edges // 2, num_edges // 2 + num_edges // 10)
    edges[1, loops] = edges[0, loops]
    return np.concatenate([edges, edges[:, : num_edges // 6]], 1)


def make_store(path: Path, edges: np.ndarray, x: np.ndarray, seed: int = 0, **more: Any) -> Store:
    """A store with three splits of a fifth of the nodes each."""
    order = np.random.default_rng(seed).permutation(len(x))
    part = max(1, len(x) // 5)
    parts = map(np.sort, order[: 3 * part].reshape(3, part))
    splits = dict(zip(("train", "valid", "test"), parts, strict=True))
    data = Data(torch.from_numpy(x), torch.from_numpy(edges), y=torch.from_numpy(order % 3))
    return Store.from_data(data, path, splits=splits, progress=False, **more)


def matrix(edges: np.ndarray, num_nodes: int, norm: str) -> Any:
    """The normalised adjacency, targets by sources, float64."""
    source, target = edges
    if norm == "gcn":
        others, own = source != target, np.arange(num_nodes)
        source, target = np.r_[source[others], own], np.r_[target[others], own]
    entries = np.ones(len(source)), (target, source)
    adjacency = sp.csr_matrix(entries, shape=(num_nodes, num_nodes))
    degree = np.bincount(target, minlength=num_nodes)
    inverse = np.divide(1.0, degree, out=np.zeros(num_nodes), where=degree > 0)
    if norm == "row":
        return sp.diags(inverse) @ adjacency
    return sp.diags(np.sqrt(inverse)) @ adjacency @ sp.diags(np.sqrt(inverse))


def powers(adjacency: Any, x: np.ndarray, hops: int) -> np.ndarray:
    """[N, hops + 1, F] float64: X, A X, A^2 X, ..."""
    out = [x.astype(np.float64)]
    for _ in range(hops):
        out.append(adjacency @ out[-1])
    return np.stack(out, 1)
