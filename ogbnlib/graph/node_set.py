"""Sets of nodes as bitmaps (node v: bit v % 64 of word v // 64), with ranks; 21 MB for papers100M.

In the kernels `words` is the uint64 bitmap; `word_ranks[w]` is the number of members below word w.
"""

import numpy as np
from numba import int64, uint64

from ..kernels import kernel
from .npz import Array
from .store_format import index_dtype


@kernel
def _ones(word: np.uint64) -> int:
    """Count the bits set in a uint64 (Warren, Hacker's Delight, 2nd edition, figure 5-2)."""
    # sums of 2 neighboring bits in place, then of 4, then of 8, then all in the highest byte
    word = word - ((word >> uint64(1)) & uint64(0x5555555555555555))
    word = (word & uint64(0x3333333333333333)) + ((word >> uint64(2)) & uint64(0x3333333333333333))
    word = (word + (word >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
    return int64((word * uint64(0x0101010101010101)) >> uint64(56))


@kernel
def has(words: Array, node: int) -> bool:
    """Return whether `node` is a member."""
    bit = uint64(node)
    return (words[bit >> uint64(6)] >> (bit & uint64(63))) & uint64(1) != uint64(0)


@kernel
def put(words: Array, node: int) -> None:
    """Add `node`."""
    bit = uint64(node)
    words[bit >> uint64(6)] |= uint64(1) << (bit & uint64(63))


@kernel
def rank(words: Array, word_ranks: Array, node: int) -> int:
    """Return the number of members below `node`."""
    bit = uint64(node)
    below = (uint64(1) << (bit & uint64(63))) - uint64(1)
    return word_ranks[bit >> uint64(6)] + _ones(words[bit >> uint64(6)] & below)


@kernel
def _put_all(words: Array, nodes: Array) -> None:
    for node in nodes:
        put(words, node)


@kernel
def _rank_words(words: Array, word_ranks: Array) -> int:
    total = 0
    for w in range(len(words)):
        word_ranks[w] = total
        total += _ones(words[w])
    return total  # members of the set


@kernel
def _ranks(words: Array, word_ranks: Array, nodes: Array) -> Array:
    out = np.empty(len(nodes), word_ranks.dtype)
    for i in range(len(nodes)):
        out[i] = rank(words, word_ranks, nodes[i])
    return out


@kernel
def _members(words: Array, total: int, word_ranks: Array) -> Array:
    ids = np.empty(total, word_ranks.dtype)  # ascending; of `word_ranks` only the dtype is used
    at = 0
    for w in range(len(words)):
        word = words[w]
        while word != uint64(0):
            higher_bits = word & (word - uint64(1))  # all but the lowest bit
            ids[at] = w * 64 + _ones((word ^ higher_bits) - uint64(1))  # zeros below that bit
            word = higher_bits
            at += 1
    return ids


class NodeSet:
    """A set of node ids below `num_nodes`, in num_nodes / 8 bytes, and half as many for the ranks.
    It finds the distinct ids among 12 million in one second; sorting takes ten."""

    def __init__(self, num_nodes: int, *nodes: Array):
        self.num_nodes = num_nodes
        # at least one bit more than nodes, as `num_nodes` has a rank, too
        self.words = np.zeros(num_nodes // 64 + 1, np.uint64)
        self.word_ranks: Array = np.empty(0, np.int32)  # as of the last `count`
        self.add(*nodes)

    def add(self, *nodes: Array) -> None:
        """Add integer ids, which are not checked."""
        for ids in nodes:
            _put_all(self.words, ids)

    def contains(self, nodes: Array) -> Array:
        """Return which of these int64 ids are members, bool [len(nodes)]."""
        bits = (nodes & 63).astype(np.uint64)  # of each id in its word
        return (self.words[nodes >> 6] >> bits) & np.uint64(1) != 0

    def count(self) -> int:
        """Return the number of members; compute the ranks, which are valid until the next `add`."""
        self.word_ranks = np.empty(len(self.words), index_dtype(self.num_nodes))
        return _rank_words(self.words, self.word_ranks)

    def members(self) -> Array:
        """Return all ids, ascending, int32 (int64 from 2**31 nodes on), and compute the ranks."""
        return _members(self.words, self.count(), self.word_ranks)

    def ranks(self, nodes: Array) -> Array:
        """Return the number of members below each id, for a member its position among `members`;
        call `count` first. The dtype is that of `members`."""
        return _ranks(self.words, self.word_ranks, nodes)
