"""Memory, disk and minutes of a propagation, and its columns at a time, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import TrainConfig
from ..errors import MB, InputError, format_bytes
from ..files import home
from ..graph.store import GraphSize, Store

# For the minutes only: a 2-core machine with an NVMe-like disk; an edge is a read of memory that no cache holds.
_BYTES_PER_S, _EDGES_PER_S = 1.2e9, 25e6
KERNEL_BYTES = 96 * MB  # compiling the kernels, in the first process that needs them
THREAD_BYTES = 24 * MB  # a slice of offsets, a piece of edges and of features, and a slice's result


@dataclass(frozen=True)
class HopPlan:
    """Columns that are propagated at a time, and their costs."""

    num_blocks: int  # passes over the graph
    width: int  # columns in memory at a time
    held_bytes: int  # of the columns in memory; `fixed_bytes` are on top
    disk_bytes: int  # of the result and, until it is complete, of the blocks that it is made of
    minutes: float  # on a 2-core machine with an NVMe-like disk

    def __str__(self) -> str:
        passes = "1 pass" if self.num_blocks == 1 else f"{self.num_blocks} passes"
        return (
            f"{passes} over it, {self.width} columns each: {format_bytes(self.held_bytes)} of memory, "
            f"{format_bytes(self.disk_bytes)} of disk, half of it until it is done, about {self.minutes:.0f} "
            "minutes on 2 cores"
        )


def fixed_bytes(size: GraphSize, hops: int, threads: int) -> int:
    """Memory in addition to the columns: kernels, buffers, and bits of the nodes that each hop reads."""
    return KERNEL_BYTES + threads * THREAD_BYTES + (hops + 1) * (size.num_nodes // 8 + size.num_nodes // 16)


def plan_hops(
    size: GraphSize, hops: int, norm: str, *, left_bytes: int, itemsize: int, kept: int, reached: list[int]
) -> HopPlan:
    """Plan a propagation within a limit.

    Args:
        left_bytes: Memory that this process may still use, without `fixed_bytes`.
        kept: Nodes in the result.
        reached: Nodes that each hop must compute.
    """
    held_itemsize = 4 if norm == "none" else itemsize  # sums may outgrow float16
    # The rows of the hop before and of this one; those of the last one go to disk.
    source, following = [size.num_nodes, *reached[:-1]], [*reached[:-1], 0]
    rows_held = max(before + after for before, after in zip(source, following, strict=True))
    column = rows_held * held_itemsize
    most = left_bytes // max(1, column)
    if most < 1:
        raise InputError(
            f"memory_limit: expected room for a column of {size.name} beside the memory in use, "
            f"{format_bytes(column)}, found {format_bytes(max(0, left_bytes))}; raise it by the difference"
        )
    blocks = -(-size.num_features // min(most, size.num_features))
    width = -(-size.num_features // blocks)
    if width % 8 and most >= width + 8 - width % 8:
        width += 8 - width % 8  # eight values are one instruction
    width = min(width, size.num_features)
    blocks, result = -(-size.num_features // width), kept * (hops + 1) * size.num_features * itemsize
    graph = 4 * size.num_edges + 8 * size.num_nodes
    features = size.num_nodes * size.num_features * size.feature_itemsize
    read = blocks * (features + hops * graph) + max(1, hops - 1) * graph + features
    edges = sum(size.num_edges * count / max(1, size.num_nodes) for count in reached)
    minutes = (read / _BYTES_PER_S + blocks * edges / _EDGES_PER_S) / 60
    return HopPlan(blocks, width, width * column, 2 * result, minutes)


def propagated_path(store: Store, config: TrainConfig) -> Path:
    """The store of a run's propagated features: next to the graph's store or in `data_dir`."""
    loops = "-loops" if config.self_loops else ""
    name = f"{store.path.name.removesuffix('.store')}-{config.hops}-hops-{config.norm}{loops}.store"
    return (store.path.parent if config.data_dir is None else home(config.data_dir)) / name
