"""How much memory batches, queues and windows take, and how a loader divides what it has. No torch, no numba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import format_bytes

# The batches that wait for the model under loading=store: so many, or as many as fit (`store_loader.prefetch`).
QUEUE_BATCHES, QUEUE_BYTES = 4, 256 * 2**20


# A batch --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Nodes discovered at each hop, seeds first, and edges sampled at each hop; expected values or a sample's."""

    hop_nodes: tuple[int, ...]
    hop_edges: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return sum(self.hop_nodes)

    @property
    def num_edges(self) -> int:
        return sum(self.hop_edges)


def batch_bytes(batch: Batch, num_features: int, itemsize: int) -> int:
    """A batch as the model gets it: x, n_id int64 and edge_index int64 [2, E]."""
    return batch.num_nodes * (num_features * itemsize + 8) + batch.num_edges * 16


# For choosing between windows and for times only; a 2-core machine with an NVMe-like disk.
DISK_BYTES_PER_S = 1.2e9
TRAIN_S_PER_NODE = 2.5e-6


# Windows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowPlan:
    """How a loader reads its store. `window_batches` is None where batches are drawn one by one."""

    window_batches: int | None
    overlapped: bool  # the next window is prepared while one is used, so two are held
    window_bytes: int
    available_bytes: int
    num_windows: int = 0

    def __str__(self) -> str:
        free = format_bytes(self.available_bytes)
        if self.window_batches is None:
            return f"batches are drawn one by one through the page cache ({free} available)"
        how = "two held, one being prepared" if self.overlapped else "one held"
        size = format_bytes(self.window_bytes)
        return f"windows of {self.window_batches} batches, about {size} each, {how} ({free} available)"


def compact_batch_bytes(batch: Batch, row_bytes: int) -> int:
    """A batch inside a window: its rows of x, ids int64, local row and col int32, and the objects around them."""
    return batch.num_nodes * (row_bytes + 8) + batch.num_edges * 8 + 2000


def window_fixed_bytes(num_nodes: int) -> int:
    """The bitmap of the ids of a window and its ranks."""
    return num_nodes // 8 + num_nodes // 16


def queued_bytes(batch: Batch, num_features: int, itemsize: int) -> int:
    """Batches that are ready before the model asks for them: those in the queue and one more in its thread's hand."""
    one = max(1, batch_bytes(batch, num_features, itemsize))
    return one * (max(1, min(QUEUE_BATCHES, QUEUE_BYTES // one)) + 1)


def choose_windows(
    files: Mapping[str, int],
    num_nodes: int,
    row_bytes: int,
    batch: Batch,
    num_batches: int,
    available: int | None,
    pair_share: float,
    reserve: int = 0,
    sharers: int = 1,
) -> WindowPlan:
    """Choose between the page cache and windows, and the windows' size.

    Args:
        files: Bytes of the store's colptr, row and x.
        row_bytes: Of one node's features in the store.
        batch: What one batch holds.
        available: Bytes that may be taken, page cache included; None draws batches one by one, whatever is left.
        pair_share: The part of them that a window may have where two are held at once.
        reserve: What batches on their way and a training step take of them.
        sharers: Processes that have `available` each, and the page cache in common.

    A pass over the files costs the same for a large window as for a small one, so the fewest windows win, unless a
    single one that can't be prepared during training costs more than several that can.
    """
    if available is None or not num_batches or sum(files.values()) <= (available - reserve) * sharers:
        return WindowPlan(None, True, 0, available or 0)
    left = max(0, available - reserve)
    one, fixed = compact_batch_bytes(batch, row_bytes), window_fixed_bytes(num_nodes)
    sweep_s = (files["x"] + len(batch.hop_edges) * (files["colptr"] + files["row"])) / DISK_BYTES_PER_S
    train_s = num_batches * batch.num_nodes * TRAIN_S_PER_NODE

    def windows(budget: float) -> int:
        return -(-num_batches // max(1, int((budget - fixed) / one)))

    alone, paired = windows(left), windows(pair_share * left)
    pair_fits = pair_share * left >= fixed + one
    overlapped = pair_fits and max(paired * sweep_s, train_s) <= alone * sweep_s + train_s
    size = -(-num_batches // (paired if overlapped else alone))
    return WindowPlan(size, overlapped, size * one + fixed, available, -(-num_batches // size))
