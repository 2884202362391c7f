"""Which neighbors and which order of seeds are drawn: pure functions of (seed, epoch, batch, hop, node)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numba import uint64
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from ..errors import InputError
from ..graph.bits import GAMMA, kernel, mix

_U0, _U1, _U32, _U64 = (np.uint64(n) for n in (0, 1, 32, 64))
_LOW_32 = np.uint64(0xFFFFFFFF)
_INSERTION_MAX = 32  # up to this many neighbors, inserting into a sorted list beats a table


@kernel
def batch_key(seed: Any, epoch: Any, first: Any) -> Any:
    """uint64 that stands for one batch of one epoch; `first` is the position of its first seed. All integers."""
    key = mix(uint64(seed) + GAMMA)
    key = mix((key ^ uint64(epoch)) + GAMMA)
    return mix((key ^ uint64(first)) + GAMMA)


@kernel
def node_state(key: Any, hop: Any, node: Any) -> Any:
    """uint64 state of the random stream of global id `node` at `hop` (0 for the seeds) of the batch with this `key`."""
    return mix((mix((uint64(key) ^ uint64(hop)) + GAMMA) ^ uint64(node)) + GAMMA)


@kernel
def _bounded(state: Any, n: Any) -> Any:
    """`(new state, integer in [0, n))`, n >= 1, exactly uniform.

    Below 2**32: the multiply-shift with rejection of Lemire ("Fast random integer generation in an interval", ACM
    TOMACS 2019) on the upper half of each splitmix64 output. Above: as many bits as n has, until they are below n.
    """
    n = uint64(n)
    if n <= _LOW_32:
        state += GAMMA
        product = (mix(state) >> _U32) * n
        if product & _LOW_32 < n:
            threshold = (_LOW_32 + _U1 - n) % n
            while product & _LOW_32 < threshold:
                state += GAMMA
                product = (mix(state) >> _U32) * n
        return state, product >> _U32
    mask = n - _U1
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> uint64(shift)
    while True:
        state += GAMMA
        draw = mix(state) & mask
        if draw < n:
            return state, draw


@kernel
def choose(state: Any, degree: Any, k: Any, out: Any) -> Any:
    """Write the chosen edge positions, in [0, degree) and ascending, to `out`; return how many there are.

    All positions when `k` is -1 or at least `degree`, else a uniformly random k-subset. Ascending, so that a mapped
    `row` is read forwards. `out` is an int64 array with room for min(k, degree); `state` comes from `node_state`.

    Subsets are drawn by Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 1987): k draws, no memory
    of size `degree`. Above 32 neighbors membership is looked up in a table in which position p starts its probing at
    slot p * slots // degree, so reading the slots in order gives a nearly sorted list: O(k) expected in all.
    """
    if k < 0 or k >= degree:
        for i in range(degree):
            out[i] = i
        return degree
    state = uint64(state)
    if k <= _INSERTION_MAX:
        for i in range(k):
            top = degree - k + i  # larger than anything chosen so far
            state, draw = _bounded(state, top + 1)
            position = np.int64(draw)
            j = i
            while j > 0 and out[j - 1] > position:
                j -= 1
            if j > 0 and out[j - 1] == position:
                out[i] = top
            else:
                for moved in range(i, j, -1):
                    out[moved] = out[moved - 1]
                out[j] = position
        return k
    slots = 2 * k
    table = np.full(slots + k, -1, np.int64)  # k more, so that probing never has to wrap around
    for top in range(degree - k, degree):
        state, draw = _bounded(state, top + 1)
        position = np.int64(draw)
        slot = np.int64(position * slots // degree)
        while table[slot] >= 0 and table[slot] != position:
            slot += 1
        if table[slot] == position:
            position = np.int64(top)
            slot = np.int64(position * slots // degree)
            while table[slot] >= 0:
                slot += 1
        table[slot] = position
    filled = 0
    for position in table:
        if position >= 0:
            j = filled
            while j > 0 and out[j - 1] > position:
                out[j] = out[j - 1]
                j -= 1
            out[j] = position
            filled += 1
    return k


@kernel
def count_chosen(degree: Any, k: Any) -> Any:
    """How many edges `choose_all` chooses."""
    total = 0
    for d in degree:
        total += d if k < 0 else min(k, d)
    return total


@kernel
def choose_all(
    key: Any, hop: Any, ids: Any, start: Any, degree: Any, k: Any, begin: Any, out: Any, target: Any
) -> None:
    """What one batch reads of `row` at one hop: places in `out`, int64, and `target`, any integers, which ascends.

    `ids` are the frontier's original node ids, `start` and `degree` where their columns lie; the frontier's first node
    has local id `begin`.
    """
    e = 0
    for i in range(len(ids)):
        taken = choose(node_state(key, hop, ids[i]), degree[i], k, out[e:])
        for j in range(e, e + taken):
            out[j] += start[i]
            target[j] = begin + i
        e += taken


class EpochSampler(Sampler[int]):
    """Positions 0..n-1 for a DataLoader, in an order that is a pure function of (seed, epoch).

    Args:
        n: number of positions.
        seed: with the epoch it decides the order; any integer of 64 bits.
        shuffle: False yields them in ascending order in every epoch.
        rank, num_ranks, batch_size: batches of this size are dealt out in turn, and those of `rank` are yielded.
        drop_last: leave out the positions at the end that do not fill a batch.
    """

    def __init__(
        self,
        n: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        num_ranks: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.n, self.seed, self.shuffle = n - n % batch_size * drop_last, seed, shuffle
        self.rank, self.num_ranks, self.batch_size = rank, num_ranks, batch_size
        self._dropped = n - self.n
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """The epoch to yield next, from position `start` of its whole order, whatever the number of ranks.

        A multiple of the batch size gives the same batches as the whole epoch has from there on.

        Raises:
            InputError: for a `start` outside 0..n.
        """
        if not 0 <= start <= self.n:
            raise InputError(f"start: expected a position from 0 to {self.n}, got {start}")
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.count(self.start)

    def count(self, start: int) -> int:
        """How many positions this rank has of an order from `start` on."""
        rounds, rest = divmod(self.n - start, self.batch_size * self.num_ranks)
        return rounds * self.batch_size + min(max(rest - self.rank * self.batch_size, 0), self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """All positions, int64 [n] in RAM, in the order of `epoch`."""
        if not self.shuffle:
            return torch.arange(self.n)
        mixed = int(batch_key(np.uint64(self.seed & (2**64 - 1)), epoch, 0))
        generator = torch.Generator().manual_seed(mixed & (2**63 - 1))
        return torch.randperm(self.n + self._dropped, generator=generator)[: self.n]

    def share(self, epoch: int, start: int = 0) -> Tensor:
        """This rank's positions of the order of `epoch` from `start` on, int64 in RAM."""
        order = self.order(epoch)[start:]
        if self.num_ranks == 1:
            return order
        return order[torch.arange(len(order)) // self.batch_size % self.num_ranks == self.rank]

    def __iter__(self) -> Iterator[int]:
        share: Any = self.share(self.epoch, self.start)
        for part in share.split(2**16):  # an int takes 40 bytes, so a part at a time
            yield from part.tolist()


class GivenOrder(EpochSampler):
    """The positions that another sampler yields, in its order: Lightning puts samplers of its own into a loader.

    It does so to predict, for `overfit_batches`, and to deal a loader out among processes.
    """

    def __init__(self, given: Any, batch_size: int, drop_last: bool = False) -> None:
        self.given, self._drawn = given, (-1, torch.empty(0, dtype=torch.int64))
        shuffle = not isinstance(given, SequentialSampler)
        super().__init__(len(given), shuffle=shuffle, batch_size=batch_size, drop_last=drop_last)

    def order(self, epoch: int) -> Tensor:
        """Drawn once an epoch: windows ask for it one by one, and another sampler's may be new each time."""
        if self._drawn[0] != epoch:
            if hasattr(self.given, "set_epoch"):
                self.given.set_epoch(epoch)
            self._drawn = epoch, torch.tensor(list(self.given), dtype=torch.int64)[: self.n]
        return self._drawn[1]
