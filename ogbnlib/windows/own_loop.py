"""Loader over a store for the user's own training loop, with the same batches as the trainer's."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch_geometric.data import Data

from ..config import TrainConfig
from ..errors import InputError, clear_errors, format_bytes, parse_bytes, split_name
from ..forecast.available import available_bytes, usable_bytes
from ..forecast.batches import batch_bytes, num_queued
from ..forecast.pass_memory import Pass, Windows
from ..graph.store import Store
from ..graph.writer import check_for_training
from ..launcher import launch, local_ranks
from ..memory.reading import own_memory
from ..sampling.order import BorrowedOrder, EpochSampler
from ..sampling.policies import STREAM
from ..sampling.pyg_stores import node_ids
from ..sampling.sampler import CSCSampler
from ..sampling.workers import worker_arguments
from ..sources.resolve import check_store
from .plan import Budget, spool_bytes, spool_dir
from .spool import Preparation
from .store_loader import StoreLoader


def _available_bytes(memory_limit: str | int | None) -> int:  # left to use, with page cache
    available = available_bytes()
    if memory_limit is None:
        return available
    limit = parse_bytes(memory_limit)
    used = own_memory()[0]  # anonymous + shared
    if limit < used:
        raise InputError(
            f"memory_limit: expected more than the {format_bytes(used)} that this process already "
            f"uses, got {format_bytes(limit)}"
        )
    return min(available, max(0, usable_bytes(limit) - used))  # 5 % of it, or 60 MB, stay free


def _choose_windows(loader_pass: Pass, order: EpochSampler, available: int) -> Windows:
    ranks = local_ranks()
    # Waiting batches are float32. A quarter of the memory is left for the model and its step.
    per_batch_bytes = batch_bytes(loader_pass.batch, loader_pass.size.num_features, itemsize=4)
    reserved = per_batch_bytes * num_queued(per_batch_bytes) + available // 4
    loader_pass = replace(
        loader_pass,
        own_batches=-(-len(order) // loader_pass.config.batch_size),  # `order` may be a sampler's
        sharers=ranks,
        reserve=(reserved, reserved),  # with windows, and with the page cache
    )
    budget = Budget(available, spool_bytes(loader_pass.config.spool, spool_dir(), ranks), ranks)
    return budget.loader(loader_pass)


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
    epoch k, counted from 1, and `set_epoch(k, start=n * batch_size)` its remainder after n batches.

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
    if shuffle is None:
        shuffle = isinstance(nodes, str) and nodes == "train"
    shuffle = shuffle or sampler is not None  # with a sampler, epochs have new neighbors
    config = TrainConfig.create(  # checks the values
        dataset=store.path,
        loading="store",
        num_neighbors=num_neighbors,
        batch_size=batch_size,
        seed=seed,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )
    check_store(store, config)
    check_for_training(store)
    ids = node_ids(nodes, store)
    order = EpochSampler(
        len(ids),
        seed=config.seed,
        shuffle=shuffle,
        batch_size=config.batch_size,
        drop_last=drop_last,
    )
    if sampler is not None:
        order = BorrowedOrder(sampler, config.batch_size, drop_last, config.seed)
    if drop_last and not len(order):
        raise InputError(
            f"drop_last: expected at least a batch of {config.batch_size} nodes, got "
            f"{len(ids if sampler is None else sampler)}"
        )
    split = split_name(nodes) if isinstance(nodes, str) else "train"  # decides the random stream
    labels = torch.from_numpy(store.y[ids])
    available = _available_bytes(memory_limit)  # without ids and labels, which are in memory now
    store.advise_random()  # mapped rows are read in no order: no read-ahead
    windows = _choose_windows(Pass.over(config, store, split, order.shuffle, ids), order, available)
    # if the store fits into memory; one rank reads it for its whole node
    if shuffle and windows.window_batches is None and launch().local_rank == 0:
        store.fill_page_cache()
    return StoreLoader(
        store,
        CSCSampler(
            store.colptr,
            store.row,
            config.num_neighbors,
            seed=config.seed + STREAM[split],
            fixed=not shuffle,
            where=str(store.path),  # for messages
        ),
        torch.from_numpy(ids),
        labels if store.has_targets else labels.long(),
        Preparation(windows, spool_dir=spool_dir()),
        first_epoch=1 if shuffle else 0,  # epoch 0 is the trainer's evaluations
        transform=transform,
        batch_size=config.batch_size,
        drop_last=drop_last,
        sampler=order,
        num_workers=config.num_workers,
        persistent_workers=config.persistent_workers,
        **worker_arguments(config.num_workers),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(config.seed),  # leaves torch's global one alone
    )
