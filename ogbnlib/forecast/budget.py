"""Memory of batches, queues and windows, and the choice of a store's windows. No torch, no numba.

A window is a run of batches that are sampled ahead in one pass over the store; a spool keeps windows on disk. The
trainer calls these functions with a batch that was drawn, the forecast with an expected one.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MB, format_bytes
from ..files import file_system
from ..graph.npz import CHUNK_BYTES

# Batches that wait for the model under loading=store: a number and a size, whichever is reached first.
QUEUE_BATCHES, QUEUE_BYTES = 4, 256 * 2**20


# A batch --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchShape:
    """Nodes discovered at each hop, seeds first, and edges sampled at each hop; expected values or a sample's."""

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


def queue_depth(item_bytes: int, depth: int = QUEUE_BATCHES, limit_bytes: int = QUEUE_BYTES) -> int:
    """Items of this size in a queue: `depth`, or fewer if they exceed `limit_bytes`, but at least one."""
    return max(1, min(depth, limit_bytes // max(1, item_bytes)))


def queued_bytes(batch: BatchShape, num_features: int, itemsize: int, num_left: int = QUEUE_BATCHES + 1) -> int:
    """Bytes of the batches in the queue and of the one that its thread prepares, at most `num_left` of them."""
    one = batch_bytes(batch, num_features, itemsize)
    return one * min(queue_depth(one) + 1, num_left)


# For the choice of windows and for times only; measured on a 2-core machine with an NVMe-like disk.
DISK_BYTES_PER_S = 1.2e9
TRAIN_S_PER_NODE = 2.5e-6


def sweep_s(files: Mapping[str, int], num_hops: int) -> float:
    """Seconds of a window's pass over a store: its features once, its graph once a hop."""
    return (files["x"] + num_hops * (files["colptr"] + files["row"])) / DISK_BYTES_PER_S


# Windows --------------------------------------------------------------------------------------------------------------


WINDOW_BYTES = 2**28  # largest window in a spool, which is read in one piece; a larger one gains nothing


@dataclass(frozen=True)
class Spooling:
    """The passes that prepare windows on disk.

    Attributes:
        sampled_batches: Batches of one pass over the graph.
        reel_batches: Batches of one structure file: ids and edges without features.
        picked_batches: Batches of one feature shard, filled by one pass over the features.
        working_bytes: Memory of either pass, as much as it needs.
        disk_bytes: The most on disk, while one shard is used and the next is prepared.
    """

    sampled_batches: int
    reel_batches: int
    picked_batches: int
    working_bytes: int
    disk_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Memory for features between the two files."""
        return min(self.working_bytes // 4, 2 * WINDOW_BYTES)


@dataclass(frozen=True)
class Windows:
    """The way in which a loader reads its store.

    Attributes:
        window_batches: None where batches are drawn one by one through the page cache.
        overlapped: Whether the next window is prepared while one is used, so that two are in memory.
        moved_bytes: Between memory and disk, in a pass over the loader.
        in_memory: With `spooling`, the windows to use once the disk is full.
    """

    window_batches: int | None
    overlapped: bool
    window_bytes: int
    available_bytes: int
    num_windows: int = 0
    moved_bytes: int = 0
    spooling: Spooling | None = None
    in_memory: Windows | None = None

    @property
    def held_bytes(self) -> int:
        """The peak of memory, with more than one window."""
        working = self.spooling.working_bytes if self.spooling else 0
        return (2 if self.overlapped else 1) * self.window_bytes + working

    @property
    def prepared_ahead(self) -> bool:
        """Whether the next epoch's first window is prepared at the end of an epoch and stays during evaluations."""
        return self.window_batches is not None and self.overlapped

    def __str__(self) -> str:
        free = format_bytes(self.available_bytes)
        if self.window_batches is None:
            return f"batches are drawn one by one through the page cache ({free} available)"
        how = "two held, one being prepared" if self.overlapped else "one held"
        if self.spooling:
            how = f"from a spool of {format_bytes(self.spooling.disk_bytes)} on disk at most, two held"
        size = format_bytes(self.window_bytes)
        return f"windows of {self.window_batches} batches, about {size} each, {how} ({free} available)"


def compact_batch_bytes(batch: BatchShape, row_bytes: int) -> int:
    """A batch inside a window: its rows of x, ids int64, local row and col int32, and the objects around them."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def spooled_batch_bytes(batch: BatchShape, row_bytes: int) -> int:
    """A batch on disk that shares no node with another: rows of x, slots and ids int32, edges int32."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8


def sampled_batch_bytes(batch: BatchShape) -> int:
    """The peak of `window.sample_windows` for each batch, seeds and their positions included.

    By their sizes the arrays take 26 kB for [3, 2] x 128 and 9.4 MB for [15, 10, 5] x 1024; 33 kB and 10.3 MB were
    measured, hence 1.1 and 4,000 bytes.
    """
    highest = nodes = edges = 0
    for frontier, found, new in zip(batch.hop_nodes, batch.hop_nodes[1:], batch.hop_edges, strict=False):
        nodes += frontier
        # Reading a hop's offsets, then its edges, then appending its nodes to the others.
        steps = 40 * frontier, 24 * frontier + 12 * new, 24 * new, 8 * (nodes + found) + 12 * new
        highest = max(highest, 8 * (nodes + edges) + max(steps))
        edges += new
    return int(1.1 * highest) + 4000


def window_fixed_bytes(num_nodes: int) -> int:
    """The bitmap of the ids of a window and its ranks."""
    return num_nodes // 8 + num_nodes // 16


def usable_bytes(limit_bytes: int) -> int:
    """The part of a limit to plan with: 5 %, and at least 60 MB, are left for memory that no sum here knows."""
    return max(0, min(int(0.95 * limit_bytes), limit_bytes - 60 * MB))


def window_budget(
    lookahead: str | int, left_bytes: int | None, training: Windows | None = None, sharers: int = 1
) -> int | None:
    """Bytes for the windows of one loader; None to draw batches one by one, whatever the store's size.

    An evaluation gets the rest beside training: a tenth if training has two windows, as the next one is being prepared
    meanwhile, and everything if it has one, which is used up by then.

    Args:
        lookahead: As in the config: "auto" for `left_bytes`, or a size for all of `sharers` together.
        left_bytes: Bytes that the process may still use; None for no limit.
        training: The windows of the training loader, for an evaluation beside it.
        sharers: Processes of this node that train together.
    """
    if lookahead == "off":
        return None
    budget = left_bytes if lookahead == "auto" else int(lookahead) // sharers
    if budget is None or training is None or not training.prepared_ahead:
        return budget
    return budget - training.held_bytes


_SPARED_BYTES = 5 * 2**30  # of a disk, for its other users
_IN_MEMORY = ("tmpfs", "ramfs")  # files there are memory that can't be reclaimed


def spool_dir(folder: str | None) -> Path:
    """The folder for a spool: the config's, the local disk of a Slurm job, or that of temporary files."""
    return Path(folder or os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())


def spool_bytes(spool: str | int, folder: Path, sharers: int = 1) -> int:
    """Bytes that each of `sharers` processes may keep in `folder`: a fixed size, or with "auto" a quarter of the free
    disk space, never its last 5 GB, and 0 for a file system in memory.
    """
    if spool == "off":
        return 0
    if spool != "auto":
        return int(spool) // sharers
    free = shutil.disk_usage(folder).free
    return 0 if file_system(folder) in _IN_MEMORY else max(0, min(free // 4, free - _SPARED_BYTES)) // sharers


def choose_windows(
    files: Mapping[str, int],
    num_nodes: int,
    row_bytes: int,
    batch: BatchShape,
    num_batches: int,
    available: int | None,
    *,
    training: bool,
    reserve: tuple[int, int] = (0, 0),
    sharers: int = 1,
    room_bytes: int = 0,
    passes: int = 1,
    always: bool = False,
) -> Windows:
    """Choose between the page cache, windows in memory and windows on disk, and the windows' size.

    Args:
        files: Bytes of the store's colptr, row and x.
        row_bytes: Of one node's features in the store.
        batch: Shape of one batch.
        available: From `window_budget`, page cache included.
        training: Of two windows in memory, one in training may have 0.45 of `available`, so that evaluations find a
            tenth; one in an evaluation half.
        reserve: Bytes for waiting batches and a step beside windows; and beside the page cache, with workers, for which
            windows have no use.
        sharers: Processes that have `available` each, and the page cache in common.
        room_bytes: Of disk for a spool.
        passes: Over the loader; in training each draws anew.
        always: Keep windows on disk wherever possible, as a pass is made in any case.

    A pass over the files costs the same for a large window as for a small one, so in memory the fewest windows win,
    unless a single one that can't be prepared during training costs more than several that can. Windows on disk are
    small, and win if they move fewer bytes, written and read again, than one pass over the store for each window.
    """
    if available is None or not num_batches or sum(files.values()) <= (available - reserve[1]) * sharers:
        return Windows(None, True, 0, available or 0)
    left = max(0, available - reserve[0])
    one, fixed = compact_batch_bytes(batch, row_bytes), window_fixed_bytes(num_nodes)
    hops = len(batch.hop_edges)
    sweep = sweep_s(files, hops)
    train_s = num_batches * batch.num_nodes * TRAIN_S_PER_NODE

    def windows(budget: float) -> int:
        return -(-num_batches // max(1, int((budget - fixed) / one)))

    half = (0.45 if training else 0.5) * left
    alone, paired = windows(left), windows(half)
    overlapped = half >= fixed + one and max(paired * sweep, train_s) <= alone * sweep + train_s
    size = -(-num_batches // (paired if overlapped else alone))
    number = -(-num_batches // size)
    moved = number * (files["x"] + hops * (files["colptr"] + files["row"]))
    made = Windows(size, overlapped, size * one + fixed, available, number, moved)
    spooled = spooled_windows(
        files, num_nodes, row_bytes, batch, num_batches, left, training=training, room_bytes=room_bytes, passes=passes
    )
    if spooled is None or not (always or spooled.moved_bytes < moved):
        return made
    return dataclasses.replace(spooled, in_memory=made, available_bytes=available)


def _counts(most: int) -> Iterator[int]:
    """Numbers of structure files to try, up to `most`: each of the first 64, then in steps of 2 %."""
    count = 1
    while count < most:
        yield count
        count += 1 + count // 64
    yield most


def spooled_windows(
    files: Mapping[str, int],
    num_nodes: int,
    row_bytes: int,
    batch: BatchShape,
    num_batches: int,
    left: int,
    *,
    training: bool,
    room_bytes: int,
    passes: int,
) -> Windows | None:
    """Windows on disk, or None where memory or disk are too small for them.

    A window takes a 24th of `left`, or one batch. Two are in use, two more in an evaluation between epochs; an eighth
    is a reserve, and the rest goes to the passes that prepare others. An evaluation's windows stay for the next one, if
    the disk has room for all. Batches are divided into structure files and these into feature shards so that the fewest
    bytes are moved: one pass over the graph for each file, if memory has room to sample it at once, and one over the
    features for each shard; two files and two shards are on disk at a time.

    Args:
        left: Bytes of memory; the other arguments are those of `choose_windows`.
    """
    one, rows = compact_batch_bytes(batch, row_bytes), batch.num_nodes * row_bytes
    structure = spooled_batch_bytes(batch, 0)
    size = min(num_batches, max(1, min(left // 24, WINDOW_BYTES) // one))
    working, total = left - left // 8 - 4 * size * one, num_batches * (passes if training else 1)
    sampled = max(0, working - window_fixed_bytes(num_nodes)) // sampled_batch_bytes(batch)
    # A pass over the features has the ids in memory, int32, or int64 from 2**31 nodes on; a file has seeds and sizes.
    index, kept = batch.num_nodes * (4 if num_nodes < 2**31 else 8), 2500
    graph, choices = len(batch.hop_edges) * (files["colptr"] + files["row"]), []
    least = max(1, min(working // 4 // (index + kept), room_bytes // 2 // (structure + rows)))  # in a reel of one part
    for reels in _counts(1 + 2 * (total // least)):
        reel = min(total, -(-total // reels // size) * size)
        most = (working // 4 - reel * kept) // max(1, index)  # of memory
        alone = reels == 1 and total <= most and total * (structure + rows) <= room_bytes
        held = min(2, reels) * reel * structure
        picked = total if alone else min(reel, most, (room_bytes - held) // 2 // max(1, rows))
        if min(sampled, picked) >= size:
            parts = -(-reel // picked)
            picked = min(picked // size, -(-reel // parts // size)) * size
            moved = reels * (parts * files["x"] + -(-reel // sampled) * graph)
            choices.append((moved, reels, reels * parts, reel, picked, held + min(2, reels * parts) * picked * rows))
    if not choices:
        return None
    moved, _, parts, reel, picked, disk = min(choices)
    sampling = window_fixed_bytes(num_nodes) + min(reel, sampled) * sampled_batch_bytes(batch)
    picking = picked * index + min(working // 4, 2 * WINDOW_BYTES, picked * rows)
    buffers = 4 * min(CHUNK_BYTES, left // 64)  # of a pass's threads
    working = min(working, max(sampling, picking) + reel * kept + buffers)
    spooling = Spooling(sampled, reel, picked, working, disk)
    again = 1 if training or parts == 1 else passes
    drawn = num_batches * (structure + rows)
    moved = again * (moved + total * (structure + rows)) // passes + drawn
    return Windows(size, True, size * one, left, -(-num_batches // size), moved, spooling)
