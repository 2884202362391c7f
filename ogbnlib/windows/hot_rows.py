"""Hot rows: the features of the nodes in most windows, in memory; shards on disk have the others.

On a graph of papers100M's size, with `num_neighbors` [15, 10, 5] and `batch_size` 1024, the windows
of an epoch (8 batches each) have 165 M rows of 21 M nodes; 9.5 M are in two windows or more.
"""

from collections.abc import Iterable
from typing import Self

import numpy as np

from ..graph.node_set import NodeSet, has, rank
from ..graph.npz import Array
from ..kernels import kernel, prefetch
from .plan import ID_BYTES, MOST_VISITS, node_set_bytes

_COUNTED_NODES = 2**20  # nodes counted at a time, because `bincount` takes 8 bytes for each


@kernel
def _insert_rows(
    ids: Array, words: Array, word_ranks: Array, hot: Array, out: Array, cold: int
) -> None:
    """Copy the row of each id to `out`, uint8 [n, bytes]: from `hot`, uint8 [members, bytes], for a
    member of the set of hot nodes, else the next row of `out` itself, from row `cold` on.

    `words` and `word_ranks` are those of the `NodeSet`. No row is overwritten before it is copied,
    because there are as many members among the ids as rows before `cold`.
    """
    for i in range(len(ids)):
        if cold == i:  # no member is left, and the other rows are in their places
            return
        if i + 16 < len(ids) and has(words, ids[i + 16]):  # ahead, in cache lines of 64 bytes
            first = rank(words, word_ranks, ids[i + 16]) * hot.shape[1]
            for c in range(0, hot.shape[1], 64):
                prefetch(hot, first + c)
        target = out[i]
        if has(words, ids[i]):
            row = hot[rank(words, word_ranks, ids[i])]
        else:
            row = out[cold]
            cold += 1
        for c in range(len(target)):
            target[c] = row[c]


class HotRows:
    """Rows [nodes, F] of a store's features in RAM, ordered by id; uninitialised before `put`."""

    def __init__(self, members: NodeSet, num_features: int, dtype: np.dtype[np.generic]) -> None:
        self._members = members
        self.ids = members.members()  # int32 or int64, ascending; also computes the ranks
        self.rows = np.empty((len(self.ids), num_features), dtype)  # of these nodes

    @classmethod
    def chosen(
        cls,
        windows: Iterable[Array],
        num_nodes: int,
        num_features: int,
        dtype: np.dtype[np.generic],
        room_bytes: int,
    ) -> Self:
        """Choose the most visited nodes: as many as fit into `room_bytes`, each in at least two
        windows, given as arrays of their distinct ids. Counting the visits takes a byte per node,
        freed on return."""
        visits = np.zeros(num_nodes, np.uint8)  # windows with each node
        for ids in windows:
            visits[ids] += visits[ids] < MOST_VISITS  # a uint8 would overflow above
        row_bytes = num_features * dtype.itemsize + ID_BYTES
        room = max(0, (room_bytes - node_set_bytes(num_nodes)) // row_bytes)  # nodes that fit
        # counts[v]: nodes with v visits; none has 256, so the search below always finds a number
        counts = np.zeros(MOST_VISITS + 2, np.int64)
        for begin in range(0, num_nodes, _COUNTED_NODES):
            counts += np.bincount(visits[begin : begin + _COUNTED_NODES], minlength=len(counts))
        at_least = np.cumsum(counts[::-1])[::-1]  # at_least[v]: nodes with v visits or more
        fewest = max(2, int(np.argmax(at_least <= room)))  # nodes with so many visits all fit
        # the rest of the room is for some nodes with one visit less, if these have two at least
        spare = room - int(at_least[fewest]) if fewest > 2 else 0
        members = NodeSet(num_nodes)
        for begin in range(0, num_nodes, _COUNTED_NODES):
            counted = visits[begin : begin + _COUNTED_NODES]
            less_visited = np.flatnonzero(counted == fewest - 1)[:spare]
            members.add(begin + np.flatnonzero(counted >= fewest), begin + less_visited)
            spare -= len(less_visited)
        return cls(members, num_features, dtype)

    def put(self, first: int, rows: Array) -> None:
        """Write rows, uint8 [k, bytes], from the one at position `first` of `ids` on."""
        self.rows[first : first + len(rows)].reshape(-1).view(np.uint8)[:] = rows.reshape(-1)

    def missing(self, ids: Array) -> Array:
        """Return the ids whose rows are not in memory, in the same order."""
        return ids[~self._members.contains(ids)]

    def insert(self, ids: Array, features: Array, first: int) -> None:
        """Put the row of each id in its place in `features` [len(ids), F]; the rows of
        `missing(ids)` are expected from position `first` on."""
        rows = self.rows.view(np.uint8)
        _insert_rows(
            ids, self._members.words, self._members.word_ranks, rows, features.view(np.uint8), first
        )
