"""The loading policies: the same batches, with the graph living in different places.

| policy | graph in memory | loaders |
|---|---|---|
| `eager` | COO + one CSC per loader | three stock PyG NeighborLoaders, resident |
| `lazy` | COO + one or two CSCs | train resident; valid and test made on demand, used, deleted, memory released |
| `shared` | one CSC, int32 ids | views of it; building another costs nothing |
| `store` | on disk, mapped or read ahead in windows | views of the files; building another costs nothing |

`eager` and `lazy` let PyG's real `NeighborLoader` constructor build its own CSC, so what they cost is what the stock
loader costs; only the sampling on that CSC is ours, which makes the batches of all policies equal for the same seed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader

from ..config import TrainConfig
from ..errors import clear_errors
from ..files import warn_if_remote
from ..graph.sort import restore_input_order
from ..graph.store import Store
from ..graph.writer import wrong_splits
from ..launcher import launch
from ..memory.reading import release_memory
from ..memory.recorder import EventLog
from ..memory.workers import worker_arguments
from ..sources.catalog import check_store
from .budget import BatchShape, spool_bytes, spool_dir, window_budget
from .choice import EpochSampler
from .loader import NO_EDGES, StoreLoader, Waiting, available_bytes, fill_page_cache, fit_windows, local_ranks
from .sampler import CSCSampler
from .window import compile_lookahead

# Each split samples with its own stream of random numbers, so that none follows another's.
STREAM = {"train": 0, "valid": 1, "test": 2}

Reserve = Callable[[BatchShape], tuple[int, int]]


class Loaders:
    """Base of the policies. Build with `make_loaders`.

    Attributes:
        num_features, num_classes: Of the data set.
        splits: int64 tensors of node ids in RAM under "train", "valid" and "test".
        y: int16 or int64 [num_nodes] in RAM, -1 where unlabelled.
        waiting: Called while a batch is waited for that is prepared from disk, see `StoreLoader`.
    """

    y: Tensor
    waiting: Waiting = staticmethod(lambda reading: False)
    drop_last = False  # an incomplete last batch is trained on too

    def __init__(self, store: Store, config: TrainConfig, log: EventLog, rank: int, num_ranks: int, reserve: Reserve):
        self.config, self.log, self.rank, self.num_ranks = config, log, rank, num_ranks
        self._reserve = reserve
        check_store(store, config)
        self._where = str(store.path)
        self.num_features, self.num_classes = store.num_features, store.num_classes
        with log.phase("load", policy=config.loading):
            for split, problem in wrong_splits(store):  # it may have been made by hand, or have changed since
                raise store.damaged(split, problem)
            self.splits = {name: torch.from_numpy(ids) for name, ids in store.splits.items()}
            self.data = self._load(store)
        self._resident: dict[str, NodeLoader] = {}

    def _load(self, store: Store) -> Data:
        raise NotImplementedError

    def _load_nodes(self, store: Store) -> Tensor:
        """Read features and labels; returns the features [num_nodes, num_features] in RAM."""
        x = torch.from_numpy(store.read("x", self.config.feature_dtype))
        self.log.part("features", x.nbytes)
        self.y = torch.from_numpy(store.read("y"))
        self.log.part("labels", self.y.nbytes)
        return x

    def _arguments(self, split: str, shuffle: bool) -> dict[str, Any]:
        config = self.config
        input_nodes = self.splits[split]
        batch_size = config.batch_size if shuffle else config.eval_batch_size or config.batch_size
        share: dict[str, Any] = {"rank": self.rank, "num_ranks": self.num_ranks, "batch_size": batch_size}
        share["drop_last"] = self.drop_last
        return {
            "input_nodes": input_nodes,
            "batch_size": batch_size,
            "drop_last": self.drop_last,
            "sampler": EpochSampler(len(input_nodes), shuffle=shuffle, seed=config.seed, **share),
            "num_workers": config.num_workers,
            "persistent_workers": config.persistent_workers,
            **worker_arguments(config.num_workers),
            "pin_memory": config.pin_memory and torch.cuda.is_available(),
            # A generator of its own: DataLoader draws a worker seed per iteration, and taking that from torch's
            # global state would make dropout depend on how many evaluations were run.
            "generator": torch.Generator().manual_seed(config.seed),
        }

    def _sampler(self, split: str, colptr: Any, row: Any, training: bool) -> CSCSampler:
        fan_out, seed = self.config.fan_out(training), self.config.seed + STREAM[split]
        return CSCSampler(colptr, row, fan_out, seed=seed, fixed=not training, where=self._where)

    def _build(self, split: str, shuffle: bool) -> NodeLoader:
        raise NotImplementedError

    def labels(self, split: str) -> Tensor:
        """The labels of a split's nodes, int16 or int64 [num_ids] in RAM."""
        return self.y[self.splits[split]]

    def train_loader(self) -> NodeLoader:
        """The shuffling loader of the train split; made at the first call, resident until `drop_train_loader`."""
        kept = self.config.eval_splits if self.config.loading == "eager" else ()
        for split in ("train", *kept):
            if split not in self._resident:
                self._resident[split] = self._build(split, shuffle=split == "train")
        return self._resident["train"]

    def drop_train_loader(self) -> None:
        """Delete the train loader with its CSC and workers and give the memory back."""
        if (loader := self._resident.pop("train", None)) is not None:
            _end_workers(loader)
            del loader
            self._released("train")

    def _released(self, split: str) -> None:
        with self.log.phase("release"):
            self.log.mark("release", after=f"{split} loader", **release_memory())
        self.log.part(f"{split} loader's CSC", 0)

    def close(self) -> None:
        """End the workers of resident loaders."""
        for loader in self._resident.values():
            _end_workers(loader)
        self._resident.clear()

    def eval_loader(self, split: str) -> NodeLoader:
        """A loader over `split` in order. It belongs to the caller: memory comes back when the last name of it goes."""
        resident = self._resident.get(split)
        if resident is None:
            return self._build(split, shuffle=False)
        if split != "train":
            return resident
        # The resident train loader's CSC serves.
        colptr, row = resident.node_sampler.graph
        sampler = self._sampler(split, colptr, row, training=False)
        return NodeLoader(self.data, sampler, **self._arguments(split, shuffle=False))

    def eval_batches(self, split: str) -> Iterator[Data]:
        """The batches of `split` in order; a loader made for them is deleted after the last, its memory released."""
        loader = self.eval_loader(split)
        kept = any(loader is one for one in self._resident.values())
        set_epoch(loader, 0)  # every evaluation samples the same neighbors, so epochs are compared on equal terms
        try:
            yield from loader
        finally:
            if not kept:
                _end_workers(loader)
            del loader
            if not kept and split not in self._resident:  # else it was made on the train loader's CSC
                self._released(split)


class StockLoaders(Loaders):
    """PyG's own loaders, each with its CSC: the train loader resident and the others when they are needed, or all."""

    def _load(self, store: Store) -> Data:
        x = self._load_nodes(store)
        edge_index = torch.from_numpy(store.read_edge_index())
        self.log.part("edge_index (COO)", edge_index.nbytes)
        return Data(x=x, edge_index=edge_index, y=self.y, num_nodes=store.num_nodes)

    def _build(self, split: str, shuffle: bool) -> NodeLoader:
        with self.log.phase(f"build {split} loader"):
            with warnings.catch_warnings():
                # "Using NeighborSampler without pyg-lib is deprecated": its sampling routine is replaced below.
                warnings.filterwarnings("ignore", message=".*without a.*pyg-lib.*")
                num_neighbors = list(self.config.fan_out(training=shuffle))
                loader = NeighborLoader(self.data, num_neighbors, **self._arguments(split, shuffle))
            stock = loader.node_sampler
            csc = (stock.colptr, stock.row, stock.perm)
            self.log.part(f"{split} loader's CSC", sum(t.nbytes for t in csc if t is not None))
            restore_input_order(stock.colptr.numpy(), stock.row.numpy(), stock.perm.numpy())
            loader.node_sampler = self._sampler(split, stock.colptr, stock.row, training=shuffle)
            loader.stock = stock  # holds `perm`, so that the loader takes what it takes without us
            return loader


class SharedLoaders(Loaders):
    """One CSC for all loaders, which is the store's own, read into RAM; no COO ever exists."""

    def _load(self, store: Store) -> Data:
        with self.log.phase("build shared CSC"):
            self.colptr, self.row = store.read("colptr"), store.read("row")
        self.log.part("shared CSC", self.colptr.nbytes + self.row.nbytes)
        x = self._load_nodes(store)
        return Data(x=x, edge_index=NO_EDGES, y=self.y, num_nodes=store.num_nodes)

    def _build(self, split: str, shuffle: bool) -> NodeLoader:
        with self.log.phase(f"build {split} loader"):
            sampler = self._sampler(split, self.colptr, self.row, training=shuffle)
            return NodeLoader(self.data, sampler, **self._arguments(split, shuffle))


class DiskLoaders(Loaders):
    """Base of the policies whose store stays on disk, mapped: in RAM are the splits and the labels of their nodes."""

    def _load(self, store: Store) -> Data:
        self.store = store
        self._labels = {split: torch.from_numpy(store.y[ids.numpy()]) for split, ids in self.splits.items()}
        store.advise_random()
        held = [*self.splits.values(), *self._labels.values()]
        self.log.part("splits and their labels", sum(t.nbytes for t in held))
        return Data()

    def labels(self, split: str) -> Tensor:
        return self._labels[split]


class StoreLoaders(DiskLoaders):
    """Everything stays on disk; a loader holds its seeds, their labels and the batches on their way."""

    def _load(self, store: Store) -> Data:
        warn_if_remote(
            store.path, "if another machine replaces a file of it, this process dies of SIGBUS; copy it here"
        )
        self._available = available_bytes()
        self._spool_dir, self._room = self._spool()
        return super()._load(store)

    def _spool(self) -> tuple[Path, int]:
        """The folder for windows, and how many bytes this process may keep there."""
        folder = spool_dir(self.config.spool_dir)
        with clear_errors(folder):
            room = spool_bytes(self.config.spool, folder, local_ranks())
        self.log.mark("note", spool_dir=str(folder), spool_room_bytes=room)
        return folder, room

    def _build(self, split: str, shuffle: bool) -> NodeLoader:
        with self.log.phase(f"build {split} loader"):
            companions = self._companions() if shuffle else {}
            loader = self._made(split, shuffle, self._room - sum(_on_disk(kept) for kept in companions.values()))
            if loader.windows.spooling is None:
                companions = _none_of(companions)
            loader.companions = [*companions.values()]
            self._resident |= {_kept(name): kept for name, kept in companions.items()}
            for name, one in [(split, loader), *companions.items()]:
                windows = one.windows
                self.log.mark("note", loader=name, windows=str(windows), window_batches=windows.window_batches)
        if shuffle:
            loader.last_epoch = self.config.epochs
            here = launch()
            first = here is None or here.local_rank == 0  # one rank fills it for all of its node
            if loader.windows.window_batches is None and self.config.lookahead != "off" and first:
                with self.log.phase("load into page cache"):
                    fill_page_cache(self.store)
        return loader

    def _made(self, split: str, shuffle: bool, room_bytes: int, *, always: bool = False) -> StoreLoader:
        """A loader for as many passes as the run has over its split; `always` on disk, whatever a pass costs."""
        config, store, train = self.config, self.store, self._resident.get("train")
        sampler = self._sampler(split, store.colptr, store.row, training=shuffle)
        arguments = self._arguments(split, shuffle)
        seeds = self.splits[split][: max(1, len(arguments["sampler"]))]
        training = None if train is None or shuffle else train.windows
        windows = fit_windows(
            store,
            sampler,
            seeds,
            arguments["batch_size"],
            window_budget(config.lookahead, self._available, training, local_ranks()),
            training=shuffle,
            reserve=self._reserve,
            room_bytes=room_bytes,
            passes=config.epochs if shuffle else config.num_evaluations(split),
            always=always,
        )
        loader = StoreLoader(store, sampler, labels=self._labels[split], windows=windows, **arguments)
        loader.spool_dir, loader.waiting = self._spool_dir, self.waiting
        loader.on_window, loader.on_pass = (
            functools.partial(self.log.mark, event, loader=split) for event in ("window", "pass")
        )
        return loader

    def _companions(self) -> dict[str, StoreLoader]:
        """The loaders of all evaluations to come, if a third of the room on disk holds what they draw."""
        wanted = [split for split in STREAM if self._room and self.config.num_evaluations(split)]
        wanted = [split for split in wanted if len(self._arguments(split, False)["sampler"])]  # has this rank a batch?
        made = {split: self._made(split, False, self._room // 3, always=True) for split in wanted}
        if all(one.windows.spooling for one in made.values()) and sum(map(_on_disk, made.values())) <= self._room // 3:
            return made
        return _none_of(made)

    def eval_loader(self, split: str) -> NodeLoader:
        """As `Loaders.eval_loader`; one whose windows are on disk stays, with them."""
        if (kept := self._resident.get(_kept(split))) is not None:
            return kept
        loader = self._build(split, shuffle=False)  # for `train` too, whose loader may hold its next window
        if loader.windows.spooling is not None and self.config.num_evaluations(split) > 1:
            self._resident[_kept(split)] = loader
        return loader


def _kept(split: str) -> str:
    return f"evaluation of {split}"


def _none_of(loaders: dict[str, StoreLoader]) -> dict[str, StoreLoader]:
    for loader in loaders.values():
        loader.close()
    return {}


def _on_disk(loader: StoreLoader) -> int:
    return loader.windows.spooling.disk_bytes if loader.windows.spooling else 0


def compile_kernels(num_neighbors: list[int]) -> None:
    """Compile, or load from disk, what the policies run: a few seconds once, 60 MB of LLVM in every process.

    Done on an empty graph before the data comes, so that the figures of later phases are the data's alone.
    """
    empty = np.empty(0, dtype=np.int64)
    restore_input_order(np.zeros(2, dtype=np.int64), empty, empty)
    compile_lookahead()
    for dtype in (np.int32, np.int64):
        CSCSampler(np.zeros(2, dtype=np.int64), np.empty(0, dtype=dtype), num_neighbors)


def set_epoch(loader: NodeLoader, epoch: int, start: int = 0) -> None:
    """Fix the order and the neighbors of the next pass over `loader`: both are functions of (seed, epoch) alone.

    The pass begins at position `start` of the order, a multiple of the batch size.
    """
    loader.sampler.set_epoch(epoch, start)
    if isinstance(loader.node_sampler, CSCSampler):
        loader.node_sampler.set_epoch(epoch)


def _end_workers(loader: NodeLoader) -> None:
    """End persistent workers now: left to the garbage collector, torch waits five seconds for each of them."""
    if isinstance(loader, StoreLoader):
        loader.close()
    kept = loader._iterator
    if kept is not None:
        getattr(kept, "iterator", kept)._shutdown_workers()  # PyG wraps torch's iterator
        loader._iterator = None


def make_loaders(
    store: Store,
    config: TrainConfig,
    log: EventLog,
    rank: int = 0,
    num_ranks: int = 1,
    reserve: Reserve = lambda batch: (0, 0),
) -> Loaders:
    """Load `store` the way `config.loading` says; the loaders hand out the batches of `rank`.

    Args:
        reserve: Bytes that a step takes beside the windows, or the page cache, of loading=store, from a batch's shape.

    Raises:
        InputError: when the store ends early or has features that `feature_dtype` can't hold, when it can't do what
            `config` asks for.
    """
    policies = {"eager": StockLoaders, "lazy": StockLoaders, "shared": SharedLoaders, "store": StoreLoaders}
    return policies[config.loading](store, config, log, rank, num_ranks, reserve)
