"""How much memory batches, queues and windows take, and how a loader divides what it has. No torch, no numba.

The loaders ask with what a process holds and a batch that was drawn, the forecast with sizes and an expected batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import format_bytes

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


def queued_bytes(batch: BatchShape, num_features: int, itemsize: int) -> int:
    """Batches that are ready before the model asks for them: those in the queue and one more in its thread's hand."""
    one = batch_bytes(batch, num_features, itemsize)
    return one * (queue_depth(one) + 1)


# For choosing between windows and for times only; a 2-core machine with an NVMe-like disk.
DISK_BYTES_PER_S = 1.2e9
TRAIN_S_PER_NODE = 2.5e-6


def sweep_s(files: Mapping[str, int], num_hops: int) -> float:
    """Seconds of a window's pass over a store: its features once, its graph once a hop."""
    return (files["x"] + num_hops * (files["colptr"] + files["row"])) / DISK_BYTES_PER_S


# Windows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """How a loader reads its store. `window_batches` is None where batches are drawn one by one."""

    window_batches: int | None
    overlapped: bool  # the next window is prepared while one is used, so two are held
    window_bytes: int
    available_bytes: int
    num_windows: int = 0

    @property
    def prepared_ahead(self) -> bool:
        """Whether the next epoch's first window is prepared at the end of an epoch, and held while others evaluate."""
        return self.window_batches is not None and self.overlapped

    def __str__(self) -> str:
        free = format_bytes(self.available_bytes)
        if self.window_batches is None:
            return f"batches are drawn one by one through the page cache ({free} available)"
        how = "two held, one being prepared" if self.overlapped else "one held"
        size = format_bytes(self.window_bytes)
        return f"windows of {self.window_batches} batches, about {size} each, {how} ({free} available)"


def compact_batch_bytes(batch: BatchShape, row_bytes: int) -> int:
    """A batch inside a window: its rows of x, ids int64, local row and col int32, and the objects around them."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def window_fixed_bytes(num_nodes: int) -> int:
    """The bitmap of the ids of a window and its ranks."""
    return num_nodes // 8 + num_nodes // 16


def usable_bytes(limit_bytes: int) -> int:
    """What of a limit is planned with: 5 % are spared for what no sum here knows."""
    return int(0.95 * limit_bytes)


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
    return budget - 2 * training.window_bytes


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
) -> Windows:
    """Choose between the page cache and windows, and the windows' size.

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

    A pass over the files costs the same for a large window as for a small one, so the fewest windows win, unless a
    single one that can't be prepared during training costs more than several that can.
    """
    if available is None or not num_batches or sum(files.values()) <= (available - reserve[1]) * sharers:
        return Windows(None, True, 0, available or 0)
    left = max(0, available - reserve[0])
    one, fixed = compact_batch_bytes(batch, row_bytes), window_fixed_bytes(num_nodes)
    sweep = sweep_s(files, len(batch.hop_edges))
    train_s = num_batches * batch.num_nodes * TRAIN_S_PER_NODE

    def windows(budget: float) -> int:
        return -(-num_batches // max(1, int((budget - fixed) / one)))

    half = (0.45 if training else 0.5) * left
    alone, paired = windows(left), windows(half)
    overlapped = half >= fixed + one and max(paired * sweep, train_s) <= alone * sweep + train_s
    size = -(-num_batches // (paired if overlapped else alone))
    return Windows(size, overlapped, size * one + fixed, available, -(-num_batches // size))
