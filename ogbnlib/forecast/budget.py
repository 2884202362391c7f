"""Memory of batches, queues and windows. No torch, no numba.

A window is a run of batches that are sampled ahead in one pass over the store; a spool keeps
windows on disk.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MB, format_bytes
from ..files import file_system

# Batches that wait for the model under loading=store, at least a group: a number or a size,
# whichever is reached first.
QUEUE_BATCHES, QUEUE_BYTES = 4, 256 * 2**20
# drawn together: 11 of [3, 2] x 128; for more malloc asks Linux each time
GROUP_BATCHES, GROUP_BYTES = 16, 2**22
# For the choice of windows and for times only; measured on a 2-core machine with an NVMe-like disk.
DISK_BYTES_PER_S = 1.2e9
TRAIN_S_PER_NODE = 2.5e-6
# largest window in a spool, read in one piece; a larger one gains only with large batches
WINDOW_BYTES = 2**28


@dataclass(frozen=True)
class BatchShape:
    """Nodes discovered at each hop, seeds first, and edges sampled at each hop; expected values or
    a sample's."""

    hop_nodes: tuple[int, ...]
    hop_edges: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return sum(self.hop_nodes)

    @property
    def num_edges(self) -> int:
        return sum(self.hop_edges)


def batch_bytes(batch: BatchShape, num_features: int, itemsize: int) -> int:
    """A batch as the model gets it: x, n_id int64 and edge_index int64 [2, E]."""
    return batch.num_nodes * (num_features * itemsize + 8) + batch.num_edges * 16


def queue(one: int) -> tuple[int, int]:
    """Batches of `one` bytes each that are drawn together, and groups of them in a queue."""
    together = max(1, min(GROUP_BATCHES, GROUP_BYTES // max(1, one)))
    return together, max(1, min(QUEUE_BATCHES // together, QUEUE_BYTES // max(1, together * one)))


def queued_bytes(
    batch: BatchShape, num_features: int, itemsize: int, num_left: int = 3 * GROUP_BATCHES
) -> int:
    """Bytes of the batches that wait: in the queue, in its thread, in the model's group; of
    `num_left` at most."""
    one = batch_bytes(batch, num_features, itemsize)
    return one * num_queued(one, num_left)


def num_queued(one_bytes: int, num_left: int) -> int:
    """Batches of `one_bytes` that wait, of `num_left` at most: see `queued_bytes`."""
    together, groups = queue(one_bytes)
    return min(together * (groups + 2) - 1, num_left)


def sweep_s(
    files: Mapping[str, int], num_hops: int, bytes_per_s: float = DISK_BYTES_PER_S
) -> float:
    """Seconds of a window's pass over a store: its features once, its graph once a hop."""
    return (files["x"] + num_hops * (files["colptr"] + files["row"])) / bytes_per_s


@dataclass(frozen=True)
class Spooling:
    """The passes that prepare windows on disk."""

    sampled_batches: int  # of one pass over the graph
    structure_batches: int  # of one structure file: ids and edges without features
    picked_batches: int  # of one feature shard, filled by one pass over the features
    working_bytes: int  # memory of either pass
    disk_bytes: int  # the most on disk, while one shard is used and the next is prepared


@dataclass(frozen=True)
class Windows:
    """The way in which a loader reads its store."""

    window_batches: int | None  # None where batches are drawn through the page cache
    # whether the next window is prepared while one is used, so that two are in memory
    overlapped: bool
    window_bytes: int
    available_bytes: int
    num_windows: int = 0
    moved_bytes: int = 0  # between memory and disk, in a pass over the loader
    spooling: Spooling | None = None
    in_memory: "Windows | None" = None  # the windows to use once the disk is full

    @property
    def held_bytes(self) -> int:
        """The peak of memory, with more than one window."""
        working = self.spooling.working_bytes if self.spooling else 0
        return (2 if self.overlapped else 1) * self.window_bytes + working

    @property
    def prepared_ahead(self) -> bool:
        """Whether the next epoch's first window is prepared at the end of an epoch and stays during
        evaluations."""
        return self.window_batches is not None and self.overlapped

    def __str__(self) -> str:
        free = format_bytes(self.available_bytes)
        if self.window_batches is None:
            return f"batches are drawn through the page cache ({free} available)"
        how = "two held, one being prepared" if self.overlapped else "one held"
        if self.spooling:
            how = f"from a spool of {format_bytes(self.spooling.disk_bytes)} on disk at most, two held"
        size = format_bytes(self.window_bytes)
        return (
            f"windows of {self.window_batches} batches, about {size} each, {how} ({free} available)"
        )


def compact_batch_bytes(batch: BatchShape, row_bytes: int) -> int:
    """A batch inside a window: its rows of x, ids int64, local row and col int32, and the objects
    around them."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def sampled_batch_bytes(batch: BatchShape, num_edges: int) -> tuple[int, int]:
    """Bytes that `window.sample_windows` takes for each batch, with its seeds: at its peak, and in
    its result."""
    highest = nodes = edges = 0
    place = 4 if num_edges < 2**32 else 8  # of an edge in the store
    for frontier, reached, new in zip(
        batch.hop_nodes, [*batch.hop_nodes[1:-1], 0], batch.hop_edges, strict=False
    ):
        nodes += frontier
        # Reading a hop's offsets, choosing its edges, reading them, then appending its nodes to the
        # others. Those of the last hop are appended when a window is packed.
        own = (
            24 * frontier + (place + 4) * new,
            (2 * place + 4) * new,
            8 * (nodes + reached) + (place + 4) * new,
        )
        highest = max(highest, 8 * (nodes + edges) + max(36 * frontier, *own))
        edges += new
    # At papers100M's size 22 and 12 kB are measured for [3, 2] x 128, 3.3 and 2.3 MB for [15, 10,
    # 5] x 1024. This gives 27 and 16 kB, 3.6 and 2.4 MB.
    return int(1.1 * highest) + 4000, int(1.05 * 8 * (nodes + edges)) + 4000


def window_fixed_bytes(num_nodes: int) -> int:
    """The bitmap of the ids of a window and its ranks."""
    return num_nodes // 8 + num_nodes // 16


def usable_bytes(limit_bytes: int) -> int:
    """The part of a limit to plan with: 5 %, and at least 60 MB, are left for memory that no sum
    here knows."""
    return max(0, min(int(0.95 * limit_bytes), limit_bytes - 60 * MB))


def window_budget(
    lookahead: str | int, left_bytes: int | None, training: Windows | None = None, sharers: int = 1
) -> int | None:
    """Bytes for the windows of one loader; None to draw batches from the maps of any store.

    A size as `lookahead` is for all `sharers` of this node together. `left_bytes` may still be
    used, None stands for no limit. `training` are the windows of the training loader, for an
    evaluation during training.
    """
    if lookahead == "off":
        return None
    # An evaluation gets a tenth if training has two windows, as the next one is being prepared
    # meanwhile, and everything if it has one, which is used up by then.
    budget = left_bytes if lookahead == "auto" else int(lookahead) // sharers
    if budget is None or training is None or not training.prepared_ahead:
        return budget
    return budget - training.held_bytes


def spool_dir() -> Path:
    """The folder for a spool: the local disk of a Slurm job, or that of temporary files
    (TMPDIR)."""
    # Those that tempfile.gettempdir() takes, which tries each by writing a file.
    places = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")] + ["/tmp", "/var/tmp"]
    usable = (place for place in places if place and os.access(place, os.W_OK))
    return Path(os.environ.get("SLURM_TMPDIR") or next(usable, os.curdir)).absolute()


def spool_bytes(spool: str | int, folder: Path, sharers: int = 1) -> int:
    """Bytes that each of `sharers` processes may keep in `folder`; "auto" is a quarter of the free
    disk space."""
    if spool == "off":
        return 0
    if spool != "auto":
        return int(spool) // sharers
    free = shutil.disk_usage(folder).free
    if file_system(folder) in ("tmpfs", "ramfs"):
        return 0
    return max(0, min(free // 4, free - 5 * 2**30)) // sharers  # its last 5 GB are for other users
