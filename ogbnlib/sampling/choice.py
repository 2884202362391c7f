"""The choice of neighbors and the order of seeds: pure functions of (seed, epoch, batch, hop,
node).

Any kernel that calls `batch_key`, `node_state` and `choose` draws the same neighbors. From Python,
wrap keys and states in `np.uint64`, because numba takes a plain int for an int64.
"""

import copy
from collections.abc import Collection, Iterator

import numpy as np
import torch
from numba import uint64
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from ..errors import InputError
from ..kernels import Array, kernel
from ..splitmix64 import GAMMA, mix

LOW_32 = np.uint64(0xFFFFFFFF)


@kernel
def batch_key(seed: np.uint64, epoch: int, first: int) -> np.uint64:
    """The uint64 key of one batch of one epoch; `first` is the position of its first seed."""
    key = mix(uint64(seed) + GAMMA)
    key = mix((key ^ uint64(epoch)) + GAMMA)
    return mix((key ^ uint64(first)) + GAMMA)


@kernel
def node_state(key: np.uint64, hop: int, node: int) -> np.uint64:
    """The uint64 state of a node's random stream in the batch with `key`.

    `node` is its global id; `hop` is 0 for the seeds.
    """
    of_hop = mix((uint64(key) ^ uint64(hop)) + GAMMA)
    return mix((of_hop ^ uint64(node)) + GAMMA)


@kernel
def _bounded(state: np.uint64, n: int) -> tuple[np.uint64, np.uint64]:
    """`(new state, integer in [0, n))`, exactly uniform, for 1 <= n < 2**32."""
    # Multiply-shift with rejection (Lemire, "Fast random integer generation in an interval", ACM
    # TOMACS 2019) on the upper half of each splitmix64 output.
    bound = uint64(n)
    state += GAMMA
    product = (mix(state) >> uint64(32)) * bound
    if product & LOW_32 < bound:
        threshold = (LOW_32 + uint64(1) - bound) % bound
        while product & LOW_32 < threshold:
            state += GAMMA
            product = (mix(state) >> uint64(32)) * bound
    return state, product >> uint64(32)


@kernel
def choose(state: np.uint64, degree: int, k: int, out: Array) -> int:
    """Write the chosen edge positions, in [0, degree), to `out` in ascending order; return their
    number.

    If `k` is -1 or at least `degree`, all positions are chosen, else a uniformly random k-subset.
    They ascend, so that a mapped `row` is read forwards. `out` is int64 with room for
    min(k, degree) positions; `degree` is below 2**32.
    """
    if k < 0 or k >= degree:
        for i in range(degree):
            out[i] = i
        return degree
    # Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 1987) needs k draws and
    # no memory of size `degree`. Insertion into a sorted list takes k**2 / 4 moves, which is
    # cheaper than a table up to about 100 neighbors.
    state = uint64(state)
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
            for shifted in range(i, j, -1):
                out[shifted] = out[shifted - 1]
            out[j] = position
    return k


@kernel
def count_chosen(degree: Array, k: int) -> int:
    """The number of edges that `choose_all` chooses."""
    total = 0
    for d in degree:
        total += d if k < 0 else min(k, d)
    return total


@kernel
def choose_all(
    key: np.uint64, hop: int, ids: Array, start: Array, degree: Array, k: int, begin: int,
    out: Array, target: Array,
) -> None:  # fmt: skip
    """Choose the edges of one batch at one hop.

    Writes the edges' positions in `row` to `out`, int64, and the local ids of their targets to
    `target`. `ids` are the nodes whose neighbors are sampled, the first with local id `begin`;
    `start` and `degree` describe their columns. `out` and `target` have exactly
    `count_chosen(degree, k)` entries.
    """
    e = 0
    for i in range(len(ids)):
        count = choose(node_state(key, hop, ids[i]), degree[i], k, out[e:])
        for j in range(e, e + count):
            out[j] += start[i]
            target[j] = begin + i
        e += count


class EpochSampler(Sampler[int]):
    """Positions 0..n-1 for a DataLoader, in an order that is a pure function of (seed, epoch).

    Ranks take batches of `batch_size` in turn. `drop_last` leaves out positions at the end that do
    not fill a batch.
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
        self.n = n - n % batch_size * drop_last
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.num_ranks = num_ranks
        self.batch_size = batch_size
        self._dropped = n - self.n
        self._order = (-1, torch.empty(0, dtype=torch.int64))
        self.set_epoch(0)
        # whether `set_epoch` was called since a `StoreLoader` last set the epoch itself
        self.is_chosen = False

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch to yield next, from position `start` of the order of all ranks."""
        self.epoch = epoch
        self.start = start
        self.is_chosen = True

    def __len__(self) -> int:
        return self.count(self.start)

    def count(self, start: int) -> int:
        """The number of this rank's positions in an order from `start` on."""
        rounds, remainder = divmod(self.n - start, self.batch_size * self.num_ranks)
        last = min(max(remainder - self.rank * self.batch_size, 0), self.batch_size)
        return rounds * self.batch_size + last

    def order(self, epoch: int) -> Tensor:
        """All positions, int64 [n] in RAM, in the order of `epoch`."""
        if not self.shuffle:
            return torch.arange(self.n)
        # Drawn once an epoch: each window (batches sampled together) asks for the order, and a
        # `BorrowedOrder` might draw another one each time.
        last = self._order  # a local name, because another thread may replace the attribute
        if last[0] != epoch:
            last = self._order = epoch, self._draw(epoch)
        return last[1]

    def _generator(self, epoch: int) -> torch.Generator:
        mixed = int(batch_key(np.uint64(self.seed & (2**64 - 1)), epoch, 0))
        return torch.Generator().manual_seed(mixed & (2**63 - 1))

    def _draw(self, epoch: int) -> Tensor:
        return torch.randperm(self.n + self._dropped, generator=self._generator(epoch))[: self.n]

    def share(self, epoch: int, start: int = 0) -> Tensor:
        """This rank's positions in the order of `epoch`, from place `start` on, int64 in RAM."""
        order = self.order(epoch)[start:]
        if self.num_ranks == 1:
            return order
        return order[torch.arange(len(order)) // self.batch_size % self.num_ranks == self.rank]

    def __iter__(self) -> Iterator[int]:
        share = self.share(self.epoch, self.start)
        for part in torch.split(share, 2**16):  # an int takes 40 bytes, so not all at once
            yield from part.tolist()


class BorrowedOrder(EpochSampler):
    """The positions of another sampler, in its order; each is below `num_nodes` and may repeat.

    A user passes a sampler to draw rare classes more often. Lightning puts its own sampler into a
    loader for predictions, for `overfit_batches`, and for several processes. Where a sampler would
    use torch's global generator, the seed and the epoch decide instead.
    """

    def __init__(
        self,
        sampler: Collection[int],
        num_nodes: int,
        batch_size: int,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.sampler = sampler
        self.num_nodes = num_nodes
        super().__init__(
            len(sampler),
            seed=seed,
            shuffle=not isinstance(sampler, SequentialSampler),
            batch_size=batch_size,
            drop_last=drop_last,
        )

    def _draw(self, epoch: int) -> Tensor:
        sampler = self.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        # True for torch's RandomSampler and WeightedRandomSampler, also PyG's ImbalancedSampler,
        # without a generator of their own.
        if getattr(sampler, "generator", self) is None:
            sampler = copy.copy(sampler)
            sampler.generator = self._generator(epoch)  # type: ignore[attr-defined]
        positions = torch.tensor(list(sampler), dtype=torch.int64)[: self.n]
        wrong = positions[(positions < 0) | (positions >= self.num_nodes)]
        if len(wrong):
            raise InputError(
                f"sampler: expected positions from 0 to {self.num_nodes - 1} among the loader's "
                f"nodes, got {wrong[0]}"
            )
        return positions
