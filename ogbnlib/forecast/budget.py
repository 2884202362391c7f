"""How much memory batches, queues and windows take, and how a loader divides what it has. No torch, no numba.

The loaders ask with what a process holds and a batch that was drawn, the forecast with sizes and an expected batch.
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

# The batches that wait for the model under loading=store: so many, or as many as fit.
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
    """How many items of this size a queue holds: `depth`, fewer where they pass `limit_bytes`, one at the least."""
    return max(1, min(depth, limit_bytes // max(1, item_bytes)))


def queued_bytes(batch: BatchShape, num_features: int, itemsize: int, num_left: int = QUEUE_BATCHES + 1) -> int:
    """Batches that are ready before the model asks for them: those in the queue and one more in its thread's hand.

    No more than the `num_left` that are still to come.
    """
    one = batch_bytes(batch, num_features, itemsize)
    return one * min(queue_depth(one) + 1, num_left)


# For choosing between windows and for times only; a 2-core machine with an NVMe-like disk.
DISK_BYTES_PER_S = 1.2e9
TRAIN_S_PER_NODE = 2.5e-6


def sweep_s(files: Mapping[str, int], num_hops: int) -> float:
    """Seconds of a window's pass over a store: its features once, its graph once a hop."""
    return (files["x"] + num_hops * (files["colptr"] + files["row"])) / DISK_BYTES_PER_S


# Windows --------------------------------------------------------------------------------------------------------------


WINDOW_BYTES = 2**28  # of a window that is read from a spool in one piece; a larger one gains nothing


@dataclass(frozen=True)
class Spooling:
    """How windows are prepared that are kept on disk until they are used."""

    sampled_batches: int  # in one pass over the graph
    reel_batches: int  # on disk at once without their features
    picked_batches: int  # whose features one pass picks
    working_bytes: int  # of memory, for either pass, as much as it needs
    disk_bytes: int  # at most at once, while one part is used and the next is prepared

    @property
    def buffer_bytes(self) -> int:
        """For features on their way from one file to the other."""
        return min(self.working_bytes // 4, 2 * WINDOW_BYTES)


@dataclass(frozen=True)
class Windows:
    """How a loader reads its store. `window_batches` is None where batches are drawn one by one."""

    window_batches: int | None
    overlapped: bool  # the next window is prepared while one is used, so two are held
    window_bytes: int
    available_bytes: int
    num_windows: int = 0
    moved_bytes: int = 0  # between memory and disk, in a pass over the loader
    spooling: Spooling | None = None
    in_memory: Windows | None = None  # with `spooling`: what a full disk leaves

    @property
    def held_bytes(self) -> int:
        """At the highest, where there is more than one window."""
        count = 2 if self.overlapped else 1
        return count * self.window_bytes + (self.spooling.working_bytes if self.spooling else 0)

    @property
    def prepared_ahead(self) -> bool:
        """Whether the next epoch's first window is prepared at the end of an epoch, and held while others evaluate."""
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
    """A batch on disk, where none of its nodes is another one's too: rows of x, slots and ids int32, edges int32."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8


def sampled_batch_bytes(batch: BatchShape) -> int:
    """What `window.sample_windows` holds at its highest, for each batch: at a hop's offsets, at its edges, or while its
    nodes are put behind the others.

    By their sizes the arrays take 26 kB for [3, 2] x 128 and 9.4 MB for [15, 10, 5] x 1024; measured were 33 kB and
    10.3 MB, seeds and their positions among it.
    """
    highest = nodes = edges = 0
    for frontier, found, new in zip(batch.hop_nodes, batch.hop_nodes[1:], batch.hop_edges, strict=False):
        nodes += frontier
        highest = max(
            highest,
            8 * (nodes + edges)
            + max(40 * frontier, 24 * frontier + 12 * new, 24 * new, 8 * (nodes + found) + 12 * new),
        )
        edges += new
    return int(1.1 * highest) + 4000


def window_fixed_bytes(num_nodes: int) -> int:
    """The bitmap of the ids of a window and its ranks."""
    return num_nodes // 8 + num_nodes // 16


def usable_bytes(limit_bytes: int) -> int:
    """What of a limit is planned with: 5 %, and at least 60 MB, are spared for what no sum here knows."""
    return max(0, min(int(0.95 * limit_bytes), limit_bytes - 60 * MB))


def window_budget(
    lookahead: str | int, left_bytes: int | None, training: Windows | None = None, sharers: int = 1
) -> int | None:
    """Bytes for the windows of one loader; None where its batches are drawn one by one whatever the store's size.

    An evaluation gets what training leaves: a tenth where that holds two windows, as the next one is being prepared
    meanwhile, and everything where it holds one, which has been used up by then.

    Args:
        lookahead: As in the config: "auto" takes what is left, a size is the user's own for all of `sharers`.
        left_bytes: What the process may still take; None for as much as it likes.
        training: The windows of the training loader, while there is one, for the loader of an evaluation.
        sharers: Processes of this node that train together.
    """
    if lookahead == "off":
        return None
    budget = left_bytes if lookahead == "auto" else int(lookahead) // sharers
    if budget is None or training is None or not training.prepared_ahead:
        return budget
    return budget - training.held_bytes


_SPARED_BYTES = 5 * 2**30  # of a disk, for its other users
_IN_MEMORY = ("tmpfs", "ramfs")  # what lies there is memory that can't be taken back


def spool_dir(given: str | None) -> Path:
    """The folder for a spool: the one that is given, the node's own disk of a Slurm job, or that of temporary files."""
    return Path(given or os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())


def spool_bytes(spool: str | int, folder: Path, sharers: int = 1) -> int:
    """Bytes that each of `sharers` processes may keep in `folder`: a given size, or a quarter of what the disk has free
    and never its last 5 GB; 0 where "auto" finds a folder that lies in memory.
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
        batch: What one batch holds.
        available: From `window_budget`, page cache included.
        training: Where two windows are held at once, one in training may have 0.45 of what is available, so that
            evaluations find a tenth; one in an evaluation half.
        reserve: What batches on their way and a step take of `available` beside windows; and beside the page cache,
            where workers, for whom windows have no use, take their part too.
        sharers: Processes that have `available` each, and the page cache in common.
        room_bytes: Of disk for a spool.
        passes: Over the loader, of which each in training draws anew.
        always: Windows are kept on disk if they can be, as a pass is made in any case.

    A pass over the files costs the same for a large window as for a small one, so in memory the fewest windows win,
    unless a single one that can't be prepared during training costs more than several that can. On disk windows are
    small; they are kept there where that moves fewer bytes, written and read again, than reading the store once for
    each window.
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
    """Numbers of reels to try, up to `most`: each of the first 64, then in steps of 2 %, whatever the epochs are."""
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
    """Windows that are kept on disk, or None where memory or disk are too small for it.

    A window takes a 24th of what is left, or one batch. Two are in use, two more in an evaluation between epochs;
    an eighth is spared, and the rest goes to the passes that prepare others. What an evaluation draws is kept for the
    next one, if the disk holds all of it. Batches are divided into reels and these into parts so that the fewest bytes
    are moved: one pass over the graph for each reel, if memory has room to sample it at once, and one over the features
    for each part, two of which are on disk.

    Args:
        left: Bytes of memory; the other arguments are those of `choose_windows`.
    """
    one, rows = compact_batch_bytes(batch, row_bytes), batch.num_nodes * row_bytes
    structure = spooled_batch_bytes(batch, 0)
    size = min(num_batches, max(1, min(left // 24, WINDOW_BYTES) // one))
    working, total = left - left // 8 - 4 * size * one, num_batches * (passes if training else 1)
    sampled = max(0, working - window_fixed_bytes(num_nodes)) // sampled_batch_bytes(batch)
    # A pass over the features holds the ids, int32, or int64 from 2**31 nodes on; seeds and sizes stay with a reel.
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
