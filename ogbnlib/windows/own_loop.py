"""Loader over a store for the user's own training loop, with the same batches as the trainer's."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch_geometric.data import Data

from ..config import TrainConfig
from ..errors import InputError, clear_errors, format_bytes, parse_bytes, split_name
from ..forecast.available import usable_bytes
from ..forecast.batches import batch_bytes, num_queued
from ..forecast.pass_memory import Pass
from ..graph.store import Store
from ..memory.reading import own_memory
from ..memory.recorder import EventLog
from ..sampling.order import BorrowedOrder, EpochSampler
from ..sampling.pyg_stores import node_ids
from .policy import StoreLoaders
from .store_loader import StoreLoader


@dataclass(frozen=True)
class _Request:
    """The arguments of `loader` that a run of the trainer does not have."""

    split: str
    ids: Tensor
    limit: int | None
    drop_last: bool
    transform: Callable[[Data], Data] | None
    order: Collection[int] | None


class _OneLoader(StoreLoaders):
    """The policy `loading="store"` for a single loader, over one split or over node ids."""

    prepares_epochs = False

    def __init__(self, store: Store, config: TrainConfig, request: _Request):
        self._request = request
        self._node_ids = request.ids.numpy()
        self.drop_last = request.drop_last
        super().__init__(store, config, EventLog(None))

    def _load(self, store: Store) -> Data:
        split = self._request.split
        self.splits[split] = self._request.ids
        loaded = super()._load(store)
        if not store.has_targets:
            self.labels[split] = self.labels[split].long()
        if self._request.limit is not None:
            room = max(0, usable_bytes(self._request.limit) - own_memory()[0])
            available = min(self.budget.available_bytes or 0, room)
            self.budget = replace(self.budget, available_bytes=available)
        return loaded

    def _pass(self, split: str, training: bool) -> Pass:
        loader_pass = super()._pass(split, training)
        # A quarter of the available memory is left for the model and its step.
        per_batch_bytes = batch_bytes(loader_pass.batch, self.num_features, itemsize=4)
        reserved = per_batch_bytes * num_queued(per_batch_bytes)
        reserved += (self.budget.available_bytes or 0) // 4
        return replace(loader_pass, reserve=(reserved, reserved))

    def _order(self, split: str, shuffle: bool) -> EpochSampler:
        if self._request.order is None:
            return super()._order(split, shuffle)
        return BorrowedOrder(
            self._request.order,
            len(self._request.ids),
            self.config.batch_size,
            self.drop_last,
            self.config.seed,
        )

    def _arguments(self, split: str, shuffle: bool) -> dict[str, Any]:
        return super()._arguments(split, shuffle) | {
            "next_epoch": int(shuffle),
            "transform": self._request.transform,
        }


def _limit_bytes(memory_limit: str | int) -> int:
    limit = parse_bytes(memory_limit)
    used = own_memory()[0]
    if limit < used:
        raise InputError(
            f"memory_limit: expected more than the {format_bytes(used)} that this process already "
            f"uses, got {format_bytes(limit)}"
        )
    return limit


@clear_errors()
def loader(
    store: Store,
    nodes: str | ArrayLike | Tensor | None = "train",
    *,
    num_neighbors: Sequence[int] = (15, 10),
    batch_size: int = 1024,
    memory_limit: str | int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    num_workers: int = 0,
    persistent_workers: bool = False,
    drop_last: bool = False,
    transform: Callable[[Data], Data] | None = None,
    sampler: Collection[int] | None = None,
) -> StoreLoader:
    """Return a PyG `NeighborLoader` over a store on disk, with the trainer's batches for the same
    seed and epoch.

    Each pass is an epoch: with `shuffle`, every epoch has a new order and new neighbors, else all
    epochs are the same. To continue after an interruption, `set_epoch(k)` makes the next pass
    epoch k, counted from 1. `state_dict()` and `load_state_dict(state)` continue within an epoch;
    Lightning calls both.

    A batch has `x` float32 [n, F], `edge_index` int64 [2, e] of local ids, and `n_id` int64 [n],
    the seeds first. Its `y` is for the seeds alone: int64 [batch_size] (-1 if there is no label),
    or float32 targets [batch_size] or [batch_size, T] (NaN if there is none). It also has
    `num_sampled_nodes` and `num_sampled_edges` of each hop, `batch_size`, and `input_id`, the
    seeds' places in `nodes`. Small batches share memory: to keep one, keep a `batch.clone()`.

    Args:
        nodes: a split's name ("val" is "valid"); distinct node ids or a mask of all nodes, numpy
            or torch; or None for all nodes, as in PyG.
        memory_limit: "4 GB" or bytes for this whole process, page cache included; by default its
            cgroup's limit, or the machine's free memory. A quarter of the memory still available
            is left for the model. If the store does not fit into the remaining memory, many
            batches are sampled at a time.
        shuffle: by default only for "train".
        seed: decides order and neighbors in place of `torch.manual_seed`; use another seed to
            repeat an experiment.
        num_workers: processes that sample if the store fits into memory; otherwise none are used.
        transform: called with each batch, as in PyG; `loader.transform = f` sets it later.
        sampler: in place of `shuffle`, a sampler of positions in `nodes`, which may repeat: PyG's
            `ImbalancedSampler`, one of torch's samplers, or a list. If the sampler has no
            generator of its own, `seed` and the epoch decide what it draws.
    """
    if sampler is not None and shuffle:
        raise InputError("sampler, shuffle: expected one of them, as a sampler decides the order")
    if sampler is not None and not hasattr(sampler, "__len__"):
        raise InputError("sampler: expected one with a length, as torch's samplers have it")
    if shuffle is None or sampler is not None:
        shuffle = sampler is not None or (isinstance(nodes, str) and nodes == "train")
    config = TrainConfig.create(
        dataset=store.path,
        loading="store",
        num_neighbors=num_neighbors,
        batch_size=batch_size,
        seed=seed,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )
    limit = None if memory_limit is None else _limit_bytes(memory_limit)
    ids = torch.from_numpy(node_ids(nodes, store))
    num_seeds = len(ids) if sampler is None else len(sampler)
    if drop_last and num_seeds < config.batch_size:  # there would be no batch at all
        raise InputError(
            f"drop_last: expected at least a batch of {config.batch_size} nodes, got {num_seeds}"
        )
    split = split_name(nodes) if isinstance(nodes, str) else "train"
    request = _Request(split, ids, limit, drop_last, transform, sampler)
    policy = _OneLoader(store, config, request)
    result = policy._build(split, shuffle)
    result.set_epoch(int(shuffle))
    return result
