"""The loading policies: where a run keeps the graph. All of them make the same batches.

A policy is one class and one line of `registry.POLICIES`. It loads a store, builds loaders, and
forecasts its phases; `phases` works without torch, which is imported where batches are made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..config import TrainConfig
from ..forecast import memory_parts as sizes
from ..forecast.pass_memory import WORKERS
from ..forecast.run_forecast import Ledger
from ..graph.npz import Array
from ..graph.store import Store
from ..graph.writer import check_for_training
from ..memory.reading import release_memory
from ..memory.recorder import EventLog
from ..progress import Progress
from ..sources.resolve import check_store
from .workers import worker_arguments

if TYPE_CHECKING:
    from torch import Tensor
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from .order import EpochSampler
    from .sampler import CSCSampler

# Each split samples with its own stream of random numbers, so that no split repeats another's.
STREAM = {"train": 0, "valid": 1, "test": 2}
# Function called a few times a second while a batch is prepared from disk. It gets the running read
# (array name, bytes read, bytes to read) or None. If it returns True, `Interrupted` ends the wait.
Waiting = Callable[[tuple[str, int, int] | None], bool]


class Loaders:
    """Base of the policies: a store loaded for a run, and loaders that yield the batches of `rank`.

    Construct one by `config.policy.load()(store, config, log)`, where `load` imports the class.
    """

    labels: dict[str, Tensor]  # of each split's nodes, int16 or int64 in RAM
    all_resident = False  # all loaders, not only train's, are built before training and stay

    def __init__(
        self,
        store: Store,
        config: TrainConfig,
        log: EventLog,
        rank: int = 0,
        num_ranks: int = 1,
        waiting: Waiting = lambda reading: False,
    ) -> None:
        import torch

        check_store(store, config)
        self.config = config
        self.log = log
        self.waiting = waiting
        self.num_features = store.num_features
        self.num_classes = store.num_classes
        self._rank = rank
        self._num_ranks = num_ranks
        self._where = str(store.path)  # for messages
        # By split, the loaders that stay after a pass. The key is "eval SPLIT" for a loader whose
        # prepared batches on disk stay too.
        self._resident: dict[str, NodeLoader] = {}
        with log.phase("load", policy=config.loading):
            check_for_training(store)
            self.splits = {name: torch.from_numpy(ids) for name, ids in store.splits.items()}
            self.data = self._load(store)

    @classmethod
    def trained_store(
        cls,
        graph: Store,
        config: TrainConfig,
        log: EventLog,
        *,
        say: Callable[[str], object],
        progress: Progress,
        check: Callable[[], None] = lambda: None,
    ) -> Store:
        """Return the store that a run trains on: `graph`, or the one of its propagated features,
        created if it is missing. `say`, `progress` and `check` are as in `propagate`."""
        return graph

    def _load(self, store: Store) -> Data:  # what the policy keeps in memory; sets `labels`
        raise NotImplementedError

    def _build(self, split: str, shuffle: bool) -> NodeLoader:  # shuffles for training only
        raise NotImplementedError

    @classmethod
    def resident_splits(cls, config: TrainConfig) -> list[str]:
        """Return the splits whose loaders are built before training and stay."""
        return ["train", *config.eval_splits] if cls.all_resident else ["train"]

    def _order(self, split: str, shuffle: bool) -> EpochSampler:  # of this rank's seeds
        from .order import EpochSampler

        return EpochSampler(
            len(self.splits[split]),
            seed=self.config.seed,
            shuffle=shuffle,
            rank=self._rank,
            num_ranks=self._num_ranks,
            batch_size=self.config.seeds_per_batch(training=shuffle),
        )

    def _arguments(self, split: str, shuffle: bool) -> dict[str, Any]:  # of each `NodeLoader`
        import torch

        return {
            "input_nodes": self.splits[split],
            "batch_size": self.config.seeds_per_batch(training=shuffle),
            "sampler": self._order(split, shuffle),
            "num_workers": self.config.num_workers,
            "persistent_workers": self.config.persistent_workers,
            **worker_arguments(self.config.num_workers),
            # copies from page-locked memory are faster
            "pin_memory": self.config.device != "cpu" and torch.cuda.is_available(),
            # A generator of its own: DataLoader draws a worker seed per iteration, and taking that
            # from torch's global state would make dropout depend on how many evaluations were run.
            "generator": torch.Generator().manual_seed(self.config.seed),
        }

    def _sampler(
        self, split: str, colptr: Array | Tensor, row: Array | Tensor, training: bool
    ) -> CSCSampler:
        from .sampler import CSCSampler

        return CSCSampler(
            colptr,
            row,
            self.config.fan_out(training),
            seed=self.config.seed + STREAM[split],
            fixed=not training,  # evaluations are compared on the same neighbors
            where=self._where,
        )

    def train_loader(self) -> NodeLoader:
        """Return the shuffling loader of the train split; it stays until `drop_train_loader`."""
        if "train" not in self._resident:
            self._resident |= self._build_resident()
        return self._resident["train"]

    def _build_resident(self) -> dict[str, NodeLoader]:  # all that are built before training
        return {
            split: self._build(split, shuffle=split == "train")
            for split in self.resident_splits(self.config)
        }

    def drop_train_loader(self) -> None:
        """Delete the train loader with its CSC, end all workers, and release the memory."""
        if "train" in self._resident:
            _close(self._resident.pop("train"))
            # Workers forked before keep its CSC in memory; the next pass starts new ones.
            for resident in self._resident.values():
                _end_workers(resident)
            self._released("train")

    def _released(self, split: str) -> None:
        # return freed memory to the system, after the split's loader was dropped, and log it
        with self.log.phase("release"):
            self.log.mark("release", after=f"{split} loader", **release_memory())
        self.log.part(f"{split} loader's CSC", 0)

    def close(self) -> None:
        """End the workers of resident loaders."""
        for loader in self._resident.values():
            _close(loader)
        self._resident.clear()

    def eval_loader(self, split: str) -> NodeLoader:
        """Return a loader over `split` in order; the caller's own, unless it is in `_resident`."""
        from torch_geometric.loader import NodeLoader

        resident = self._resident.get(split)
        if resident is None:
            return self._build(split, shuffle=False)
        if split != "train":
            return resident
        # An evaluation of the train split has a loader that shares the train loader's CSC.
        train = resident.node_sampler
        sampler = self._sampler(split, train.colptr, train.row, training=False)
        return NodeLoader(self.data, sampler, **self._arguments(split, shuffle=False))

    def eval_batches(self, split: str) -> Iterator[Data]:
        """Yield the batches of `split` in order; then release a temporary loader's memory."""
        loader = self.eval_loader(split)
        is_resident = any(loader is resident for resident in self._resident.values())
        set_epoch(loader, 0)  # the same for all evaluations, which are compared across epochs
        try:
            yield from loader
        finally:
            if not is_resident:
                _close(loader)
                del loader  # before its memory is released
                if split not in self._resident:  # else it shared a CSC, which stays
                    self._released(split)


class _RamLoaders(Loaders):
    """Base of the policies with features and labels in RAM."""

    def _load_nodes(self, store: Store) -> Tensor:  # sets `y` and `labels`, returns features
        import torch

        x = torch.from_numpy(store.read("x", self.config.feature_dtype))
        self.y = torch.from_numpy(store.read("y"))
        self.labels = {split: self.y[ids] for split, ids in self.splits.items()}
        self.log.part("features", x.nbytes)
        self.log.part("labels", self.y.nbytes)
        return x

    @classmethod
    def phases(cls, run: Ledger) -> None:
        """Write the phases of a run into the ledger, each with the parts that are in memory."""
        config = run.config
        cls._forecast_load(run)
        resident = cls.resident_splits(config) if config.epochs else []  # the train split first
        for split in resident:
            cls._forecast_build(run, split, f"build {split} loader")
        run.hold_model()  # mostly gradients and optimizer state, from the first step on
        evaluations = run.evaluations()  # "eval": between epochs; "final": after training
        if config.epochs:
            # an evaluation loader's workers begin with its first pass, and then stay
            idle_loaders = len(resident) - 1 if evaluations["eval"] else 0
            run.pass_phase("train", run.one_pass("train", training=True), idle_loaders)
        for when, splits in evaluations.items():
            if when == "final":  # the train loader was dropped
                run.held.pop("train loader's CSC", None)
                resident = resident[1:]
            for split in splits:
                if split not in resident:
                    # idle workers; the train loader's end before the final evaluations
                    idle = config.num_workers * config.persistent_workers * (when == "eval")
                    cls._forecast_build(run, split, f"build {split} loader ({when})", idle)
                # An evaluation of the train split has a loader of its own, which shares the train
                # loader's CSC; that one is idle, too.
                others = [name for name in resident if name != split or split == "train"]
                run.pass_phase(f"{when} {split}", run.one_pass(split), len(others))
                if split not in resident:
                    run.held.pop(f"{split} loader's CSC", None)

    @classmethod
    def _forecast_load(cls, run: Ledger) -> None:
        size = run.size
        run.held["features"] = (  # bytes that stay in memory from here on
            size.num_nodes * size.num_features * sizes.feature_itemsize(run.config, size)
        )
        run.held["labels"] = size.num_nodes * sizes.label_itemsize(size.num_classes)

    @classmethod
    def _forecast_build(cls, run: Ledger, split: str, phase: str, idle_workers: int = 0) -> None:
        """Add the phase that builds a loader next to `idle_workers`; none if loaders share a CSC."""


class LazyLoaders(_RamLoaders):
    """PyG's own loaders, each with its own CSC; the train loader stays in memory, the others are
    built when they are needed. Only the sampling on that CSC is this package's."""

    @classmethod
    def _forecast_load(cls, run: Ledger) -> None:
        super()._forecast_load(run)
        edges = sizes.trained_edges(run.size, run.config.undirected)
        run.held["edge_index (COO)"] = 16 * edges  # int64 [2, E]
        run.phase("load", {})
        if run.config.epochs and not run.is_sorted:  # a sort for each loader that is built
            config = run.config
            resident = cls.resident_splits(config)
            temporary = {*run.size.num_seeds} - {*resident}
            run.num_sorts = (
                len(resident)
                + sum(map(config.num_evaluations, temporary))
                + ("train" in config.splits_to_evaluate(config.epochs))  # after its loader's end
            )

    @classmethod
    def _forecast_build(cls, run: Ledger, split: str, phase: str, idle_workers: int = 0) -> None:
        edges = sizes.trained_edges(run.size, run.config.undirected)
        # sorted edges serve as `row` themselves: only colptr comes on top
        csc_bytes = sizes.stock_csc_bytes(run.size, 0 if run.is_sorted else edges)
        run.held[f"{split} loader's CSC"] = csc_bytes
        passing = {WORKERS: idle_workers * sizes.WORKER_BYTES}  # bytes, in this phase only
        if not run.is_sorted:
            # At its peak, building the CSC takes 32 bytes an edge (sorted column, permutation, row,
            # copies); "sort" is the part beyond the CSC's own size.
            passing["sort"] = max(0, 32 * edges - csc_bytes)
        elif run.config.num_workers > 0 and phase == "build train loader":
            # The first loader moves the edge list to shared memory, where its workers find it.
            passing["copy for workers"] = 16 * edges
        run.phase(phase, passing)

    def _load(self, store: Store) -> Data:
        import torch
        from torch_geometric.data import Data

        x = self._load_nodes(store)
        edge_index = torch.from_numpy(store.read_edge_index())
        self.log.part("edge_index (COO)", edge_index.nbytes)
        return Data(x=x, edge_index=edge_index, y=self.y, num_nodes=store.num_nodes)

    def _build(self, split: str, shuffle: bool) -> NodeLoader:
        from torch_geometric.loader import NeighborLoader

        from ..graph.edge_sort import restore_input_order

        with self.log.phase(f"build {split} loader"), warnings.catch_warnings():
            # "Using NeighborSampler without pyg-lib is deprecated": its sampling routine is
            # replaced below.
            warnings.filterwarnings("ignore", message=".*without a.*pyg-lib.*")
            loader = NeighborLoader(
                self.data,
                list(self.config.fan_out(training=shuffle)),
                **self._arguments(split, shuffle),
            )
            stock = loader.node_sampler
            num_bytes = sum(t.nbytes for t in (stock.colptr, stock.row, stock.perm))
            self.log.part(f"{split} loader's CSC", num_bytes)
            # In place: PyG's sort is not stable, and columns in another order give other batches.
            restore_input_order(stock.colptr.numpy(), stock.row.numpy(), stock.perm.numpy())
            loader.node_sampler = self._sampler(split, stock.colptr, stock.row, training=shuffle)
            loader.stock = stock  # keeps `perm`, so that memory is as with a stock loader
            return loader


class EagerLoaders(LazyLoaders):
    """`LazyLoaders` that are all built before training and stay in memory."""

    all_resident = True


class SharedLoaders(_RamLoaders):
    """One CSC for all loaders: the store's own, read into RAM. No edge list (COO) ever exists."""

    @classmethod
    def _forecast_load(cls, run: Ledger) -> None:
        run.held["shared CSC"] = sizes.shared_csc_bytes(
            run.size, sizes.trained_edges(run.size, run.config.undirected)
        )
        run.phase("build shared CSC", {})
        super()._forecast_load(run)
        run.phase("load", {})

    def _load(self, store: Store) -> Data:
        from torch_geometric.data import Data

        from .sampler import NO_EDGES  # a placeholder: the loader fills in each batch's edges

        with self.log.phase("build shared CSC"):
            self.colptr = store.read("colptr")
            self.row = store.read("row")
        self.log.part("shared CSC", self.colptr.nbytes + self.row.nbytes)
        return Data(
            x=self._load_nodes(store), edge_index=NO_EDGES, y=self.y, num_nodes=store.num_nodes
        )

    def _build(self, split: str, shuffle: bool) -> NodeLoader:
        from torch_geometric.loader import NodeLoader

        with self.log.phase(f"build {split} loader"):
            return NodeLoader(
                self.data,
                self._sampler(split, self.colptr, self.row, training=shuffle),
                **self._arguments(split, shuffle),
            )


class DiskLoaders(Loaders):
    """Base of the policies whose store stays on disk, mapped; splits and labels are in RAM."""

    @classmethod
    def _forecast_load(cls, run: Ledger) -> None:
        per_seed = 8 + sizes.label_itemsize(run.size.num_classes)  # ids int64
        run.held["splits and their labels"] = per_seed * sum(run.size.num_seeds.values())

    def _load(self, store: Store) -> Data:
        import torch
        from torch_geometric.data import Data

        self.store = store
        self.labels = {
            split: torch.from_numpy(store.y[ids.numpy()]) for split, ids in self.splits.items()
        }
        store.advise_random()  # from here on, a batch's rows are read at random
        tensors = [*self.splits.values(), *self.labels.values()]
        self.log.part("splits and their labels", sum(tensor.nbytes for tensor in tensors))
        return Data()  # batches are filled by the loader


def set_epoch(loader: NodeLoader, epoch: int, start: int = 0) -> None:
    """Set the epoch of the next pass over `loader`, which begins at `start` of its order."""
    loader.sampler.set_epoch(epoch, start)
    if hasattr(loader.node_sampler, "set_epoch"):  # a loader of propagated features has none
        loader.node_sampler.set_epoch(epoch)


def _close(loader: NodeLoader) -> None:
    if hasattr(loader, "close"):  # this package's loaders, not PyG's
        loader.close()
    _end_workers(loader)


def _end_workers(loader: NodeLoader) -> None:
    """End a loader's persistent workers now: the garbage collector would wait 5 s for each."""
    iterator = loader._iterator  # kept from pass to pass, only if workers are persistent
    if iterator is not None:
        getattr(iterator, "iterator", iterator)._shutdown_workers()  # PyG wraps torch's iterator
        loader._iterator = None
