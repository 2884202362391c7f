"""The order of seeds: a pure function of (seed, epoch)."""

import copy
from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler

from ..graph.neighbors import batch_key


class EpochSampler(Sampler[int]):
    """Positions 0..n-1 among a loader's seeds, in an order decided by (seed, epoch) alone.
    Ranks take batches in turn. `drop_last` leaves out a last batch that is not full."""

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
        self.n = n - n % batch_size * drop_last  # positions of all ranks in an epoch
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.num_ranks = num_ranks
        self.batch_size = batch_size
        self._dropped = n - self.n
        self._order = (-1, torch.empty(0, dtype=torch.int64))  # (epoch, its order); none yet
        self.set_epoch(0)
        self.is_chosen = False  # whether another than a `StoreLoader` called `set_epoch` last

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch to yield next, from position `start` of the order of all ranks."""
        self.epoch = epoch
        self.start = start
        self.is_chosen = True

    def __len__(self) -> int:
        return self.count(self.start)

    def count(self, start: int) -> int:
        """Return the number of this rank's positions in an order from `start` on."""
        # in a round each rank takes a batch in turn; in the last round some may get less, or none
        rounds, remainder = divmod(self.n - start, self.batch_size * self.num_ranks)
        last = min(max(remainder - self.rank * self.batch_size, 0), self.batch_size)
        return rounds * self.batch_size + last

    def order(self, epoch: int) -> Tensor:
        """Return all positions, int64 [n] in RAM, in the order of `epoch`."""
        if not self.shuffle:
            return torch.arange(self.n)
        # Drawn once an epoch: each window (batches sampled together) asks for the order, and a
        # `BorrowedOrder` might draw another one each time.
        last = self._order  # a local name, because another thread may replace the attribute
        if last[0] != epoch:
            last = self._order = epoch, self._draw(epoch)
        return last[1]

    def _generator(self, epoch: int) -> torch.Generator:
        # 0: of the epoch, not of a batch; masks: a seed may be negative, and torch takes 63 bits
        mixed = int(batch_key(np.uint64(self.seed & (2**64 - 1)), epoch, 0))
        return torch.Generator().manual_seed(mixed & (2**63 - 1))

    def _draw(self, epoch: int) -> Tensor:
        # `drop_last` leaves out other positions in each epoch
        return torch.randperm(self.n + self._dropped, generator=self._generator(epoch))[: self.n]

    def share(self, epoch: int, start: int = 0) -> Tensor:
        """Return this rank's positions, int64 in RAM, in the order of `epoch` from `start` on."""
        order = self.order(epoch)[start:]
        if self.num_ranks == 1:
            return order
        batches = torch.arange(len(order)) // self.batch_size  # the batch of each position
        return order[batches % self.num_ranks == self.rank]

    def __iter__(self) -> Iterator[int]:
        # an int takes 40 bytes, so not all at once
        for part in torch.split(self.share(self.epoch, self.start), 2**16):
            yield from part.tolist()


class BorrowedOrder(EpochSampler):
    """The positions of another sampler, in its order; they may repeat.

    A user passes a sampler to draw rare classes more often. Lightning puts its own sampler into a
    loader for predictions, for `overfit_batches`, and for several processes. Where a sampler would
    use torch's global generator, the seed and the epoch decide instead.
    """

    def __init__(
        self, sampler: Collection[int], batch_size: int, drop_last: bool, seed: int
    ) -> None:
        self.sampler = sampler
        super().__init__(
            len(sampler),
            seed=seed,
            shuffle=not isinstance(sampler, SequentialSampler),  # else `_draw` is not needed
            batch_size=batch_size,
            drop_last=drop_last,
        )

    def _draw(self, epoch: int) -> Tensor:
        sampler = self.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        # True for torch's RandomSampler and WeightedRandomSampler, also PyG's ImbalancedSampler,
        # without a generator of their own; False for samplers without this attribute.
        if getattr(sampler, "generator", self) is None:
            sampler = copy.copy(sampler)
            sampler.generator = self._generator(epoch)  # type: ignore[attr-defined]
        return torch.tensor(list(sampler), dtype=torch.int64)[: self.n]
