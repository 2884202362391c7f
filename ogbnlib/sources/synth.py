"""A synthetic ogbn-papers100M at any scale, written straight to disk in memory bounded by a chunk.

What is made up, and how, is in `citations`. Importing this imports no torch.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import InputError, clear_errors, format_bytes
from ..files import StrPath, check_space, home, new_folder
from ..graph.store import Store
from ..progress import counted
from .citations import BLOCK, PAPERS, CitationModel
from .convert import FeatureDtype, convert
from .ogb import RawDataset, open_raw, write_layout

_MIN_NODES = 8 * BLOCK


def _model(path: StrPath, scale: float, seed: int, num_features: int, num_classes: int) -> CitationModel:
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise InputError(f"scale: expected a number above 0 and up to 1, the real size, got {scale!r}")
    num_nodes = round(PAPERS.num_nodes * scale)
    sizes = {name: round(size * scale) for name, size in PAPERS.num_seeds.items()}
    if num_nodes < _MIN_NODES or min(sizes.values()) < 1:
        raise InputError(
            f"scale: expected at least {_MIN_NODES / PAPERS.num_nodes:.1e} ({_MIN_NODES} nodes, a label in each "
            f"split), got {scale!r}, which makes {num_nodes} nodes with splits of {list(sizes.values())}"
        )
    limits = {"num_features": (num_features, 1, 2**16), "num_classes": (num_classes, 2, BLOCK // 2)}
    for name, (value, low, high) in {**limits, "seed": (seed, 0, math.inf)}.items():
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
    return CitationModel.create(home(path).absolute().name, num_nodes, sizes, seed, num_features, num_classes)


@clear_errors()
def synthesize(
    path: StrPath,
    scale: float = 0.01,
    seed: int = 0,
    *,
    num_features: int = 128,
    num_classes: int = 172,
    progress: bool = True,
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
    model = _model(path, scale, seed, num_features, num_classes)
    # Measured, compressed: features 2.2 of 4 bytes; an edge 0.1 bytes for the source and up to 5 for the cited paper.
    needed = round(1.05 * (model.num_nodes * (num_features * 2.2 + 1) + model.num_edges * 4.5))
    check_space(path, needed, f"{format_bytes(needed)} of free disk space")
    total = model.num_edges * 16 + model.num_nodes * num_features * 4
    with new_folder(path) as folder, counted("synthesize", total, progress) as done:
        write_layout(folder, model, done)
    return open_raw(path)


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
    """Write the data set of `synthesize` straight as a store: the arrays that `convert` would make of it, bit for bit.

    At the real size that spares a raw file of 40 GB and the time to deflate and inflate it.

    Args:
        options: undirected, memory_limit, progress and check, as in `convert`.

    Raises:
        InputError: as `synthesize` and `convert`.
    """
    model = _model(path, scale, seed, num_features, num_classes)
    origin = {"synthetic": {"scale": scale, "seed": seed}}
    return convert(model, path, feature_dtype=feature_dtype, origin=origin, **options)
