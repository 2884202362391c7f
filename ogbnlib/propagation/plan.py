"""Plan of a propagation from sizes alone: columns at a time, memory, disk space and minutes."""

import os
from pathlib import Path

from ..config import TrainConfig
from ..errors import MB, InputError, format_bytes
from ..forecast.run_forecast import HopPlan
from ..graph.store import GraphSize, Store
from ..sources.resolve import check_store

# for the minutes only: a 2-core machine with an NVMe-like disk
_BYTES_PER_S = 1.2e9
_EDGES_PER_S = 25e6  # an edge is a memory read that misses all caches
KERNEL_BYTES = 96 * MB  # compiling the kernels, in the first process that needs them
# In addition, if no kernel is in the cache yet: the peak was 717 MB where 643 MB were planned.
COMPILING_BYTES = 80 * MB
THREADS = min(8, len(os.sched_getaffinity(0))) + 1  # one waits for the disk, the others compute
# Share of the memory still available to a process that a propagation plans to use; `usable_bytes`
# would leave too little of small limits for its buffers.
OWN_SHARE = 0.95
SLICE_BYTES = 4 * MB  # largest result of a slice, for any number of columns
# Memory of each thread that fills the columns: 4 MB as read, 8 MB widened to float32, 8 MB for int8
# codes. A sweep needs less: 2 MB of edges, and two copies of a slice's offsets, 512 kB each.
THREAD_BYTES = 20 * MB
# Slice results in memory in a sweep: one for each thread, the one that is waited for, and the one
# being written, with its chosen rows, its scaled rows and a copy in the file's dtype.
NUM_SLICES = THREADS + 5

# by norm of a config: the norm, and whether each node is its own neighbor, as a store records them
NORMS = {"row": ("row", False), "sym": ("sym", False), "gcn": ("sym", True)}


def fixed_bytes(size: GraphSize, hops: int) -> int:
    """Return the bytes that a propagation needs without the columns: for kernels, buffers, the sets
    of nodes of each hop (bits and ranks), and the splits (int64 ids, and a copy of the largest)."""
    # Threads either fill the columns or sweep, with 4 MB of edges and offsets each. Before and
    # after, a few chunks of 8 MB need less.
    buffers = max(THREADS * THREAD_BYTES, NUM_SLICES * SLICE_BYTES + THREADS * 4 * MB)
    sets = (hops + 1) * (size.num_nodes // 8 + size.num_nodes // 16)  # bits and ranks
    seeds = size.num_seeds.values()  # of each split
    return KERNEL_BYTES + buffers + sets + 8 * (sum(seeds) + max(seeds, default=0))


def columns_room(left_bytes: int, fixed: int) -> int:
    """Return the bytes for columns, of the `left_bytes` that a process may still use: without
    `fixed` bytes, the rest less `COMPILING_BYTES`, but at least half of the rest."""
    room = left_bytes - fixed
    return room - min(COMPILING_BYTES, room // 2)


def plan_hops(
    size: GraphSize,
    hops: int,
    *,
    left_bytes: int,
    itemsize: int,  # bytes of a value in RAM and on disk
    num_outputs: int,
    reached: list[int],
) -> HopPlan:
    """Plan a propagation whose columns fit in `left_bytes`; raise `InputError` if not one fits.

    The result has `num_outputs` nodes; `reached` are the numbers of nodes that each hop computes.
    """
    widths: list[int] = []  # columns at a time, for each hop
    held_bytes = 0  # largest size of the columns in memory
    num_passes = 0  # over the graph
    edges = 0.0  # added up in all passes
    # A hop reads the rows that the hop before has computed; its own rows go to disk.
    for rows, targets in zip([size.num_nodes, *reached[:-1]], reached, strict=True):
        column_bytes = max(1, rows * itemsize)
        most = left_bytes // column_bytes
        if most < 1:
            raise InputError(
                f"memory_limit: expected room for a column of {size.name} beside the memory in use, "
                f"{format_bytes(column_bytes)}, found {format_bytes(max(0, left_bytes))}; raise it by at "
                f"least {format_bytes(column_bytes - left_bytes)}"
            )
        blocks = -(-size.num_features // most)  # a pass over the graph for each block of columns
        widths.append(-(-size.num_features // blocks))  # blocks about equal
        held_bytes = max(held_bytes, widths[-1] * column_bytes)
        num_passes += blocks
        edges += blocks * size.num_edges * targets / max(1, size.num_nodes)
    graph = 4 * size.num_edges + 8 * size.num_nodes  # bytes of row and colptr
    hop_bytes = num_outputs * size.num_features * itemsize  # of one hop in the result
    between = sum(reached[:-1]) * size.num_features * itemsize  # bytes of the next hops' input
    # The first hop reads whole rows for each block of columns; later hops read files of columns.
    # The survey before them reads the features once, and the graph once per hop; see `survey`.
    features = size.num_nodes * size.num_features * size.feature_itemsize
    read = (-(-size.num_features // widths[0]) + 1) * features
    read += (num_passes + (hops if reached[-1] < size.num_nodes else 1)) * graph
    minutes = ((read + 2 * between) / _BYTES_PER_S + edges / _EDGES_PER_S) / 60
    # on disk: each hop's outputs, then the result, which has the nodes' own features as well
    disk_bytes = hops * hop_bytes + (hops + 1) * hop_bytes + between
    return HopPlan(widths, held_bytes, disk_bytes, num_passes, minutes)


def check_parameters(result: Store, config: TrainConfig) -> None:
    """Refuse a store of propagated features that are not those that `config` asks for."""
    check_store(result, config)  # number of hops, and others
    recorded = result.origin.get("norm"), result.origin.get("self_loops")
    if recorded != NORMS[config.norm]:
        raise InputError(
            f"norm: {result.path} has features propagated with the norm {recorded[0]} and "
            f"self_loops={recorded[1]}, got {config.norm!r}"
        )


def propagated_path(store: Store, config: TrainConfig) -> Path:
    """Return the store path of a run's propagated features: next to the graph."""
    norm, self_loops = NORMS[config.norm]
    graph = store.path.name.removesuffix(".store")
    return store.path.parent / f"{graph}-{config.hops}-hops-{norm}{'-loops' * self_loops}.store"
