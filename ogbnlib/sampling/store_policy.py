"""The policy loading=store, whose graph and features stay on disk, mapped or read in windows; and
its base class."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..files import warn_if_remote
from ..forecast.budget import (
    BatchShape,
    Windows,
    spool_bytes,
    spool_dir,
    usable_bytes,
    window_budget,
)
from ..forecast.draws import Batches
from ..forecast.memory_parts import label_itemsize, store_bytes
from ..forecast.passes import Pass, choose_loaders
from ..forecast.run_forecast import Ledger
from ..graph.npz import CHUNK_BYTES
from ..graph.store import Store
from ..launcher import launch, local_ranks
from .policies import STREAM, Loaders

if TYPE_CHECKING:
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from .loader import StoreLoader


# A first window of few batches, by reads of single rows, about 10,000 a second here, in place of a
# pass of a minute.
_LONG_PASS_BYTES, _FIRST_READS = 2**33, 2**17
_EVALUATION = "evaluation of "  # before the split's name: its loader that stays between evaluations


class DiskLoaders(Loaders):
    """Base of the policies whose store stays on disk, mapped: in RAM are the splits and the labels
    of their nodes."""

    @classmethod
    def _forecast_load(cls, run: Ledger) -> None:
        per_seed = 8 + label_itemsize(run.size.num_classes)  # ids int64
        run.held["splits and their labels"] = per_seed * sum(run.size.num_seeds.values())

    def _load(self, store: Store) -> Data:
        import torch
        from torch_geometric.data import Data

        self.store = store
        self.labels = {
            split: torch.from_numpy(store.y[ids.numpy()]) for split, ids in self.splits.items()
        }
        store.advise_random()
        tensors = [*self.splits.values(), *self.labels.values()]
        self.log.part("splits and their labels", sum(tensor.nbytes for tensor in tensors))
        return Data()


class StoreLoaders(DiskLoaders):
    """The graph and features stay on disk; a loader has its seeds, their labels and the batches on
    their way."""

    @classmethod
    def phases(cls, run: Ledger) -> None:
        cls._forecast(run)
        if run.config.lookahead == "auto":
            smallest = Ledger(run.config, run.size, 0)  # windows of one batch, one at a time
            cls._forecast(smallest)
            run.least_bytes = min(run.peak_bytes, smallest.peak_bytes)

    @classmethod
    def _forecast(cls, run: Ledger) -> None:
        config, folder = run.config, spool_dir()
        room = spool_bytes(config.spool, folder) if folder.is_dir() else 0
        cls._forecast_load(run)
        run.phase("load", {})
        available = None
        if run.limit_bytes is not None:
            available = max(0, usable_bytes(run.limit_bytes) - sum(run.held.values()))
        run.hold_model()
        train, evaluations = run.one_pass("train", training=True), dict(run.evaluations())
        passes = {
            split: run.one_pass(split) for split in {*evaluations["eval"], *evaluations["final"]}
        }
        memory = window_budget(config.lookahead, available)
        windows, eval_windows = choose_loaders(train, passes, memory, room)
        run.windows, cache_bytes = windows, sum(store_bytes(config, run.size).values())

        def add(name: str, one: Pass, windows: Windows, num_passes: int, idle_loaders: int) -> None:
            # in windows, a thread prepares them for any `num_workers`
            batches = windows.window_batches
            threaded = batches is not None or not config.num_workers
            passing = one.prefetched() if threaded else one.step() | one.workers(idle_loaders)
            unsure_bytes = one.unsure_bytes(passing)
            if batches is not None:
                count = 2 if windows.overlapped and windows.num_windows * num_passes > 1 else 1
                passing |= {"windows": count * one.window_bytes(windows)}
                # its batches' samples, and three buffers that read the store
                if windows.spooling is None:
                    buffers = 3 * min(CHUNK_BYTES, max(2**18, windows.available_bytes // 64))
                    largest = one.batches.largest
                    sampling, result = one.sampled_bytes(largest)
                    # When a window is packed, its nodes are copied.
                    passing["window being prepared"] = (
                        batches * max(sampling, result + 8 * largest.num_nodes) + buffers
                    )
                elif windows not in eval_windows.values():
                    passing["pass for the spool"] = windows.spooling.working_bytes
            run.phase(name, passing, cache_bytes if batches is None else 0, unsure_bytes)

        if config.epochs:
            add("train", train, windows, config.epochs, 0)
        ahead: dict[str, int] = {}  # of the next epoch, while others are evaluated
        if windows.prepared_ahead:
            ahead["next window to train on"] = train.window_bytes(windows)
            if (
                windows.spooling is not None
                and windows.spooling.picked_batches < train.num_batches * config.epochs
            ):
                ahead["next pass for the spool"] = windows.spooling.working_bytes
        run.held |= ahead
        beside = window_budget(config.lookahead, available, windows)
        for split in evaluations["eval"]:
            add(
                f"eval {split}",
                passes[split],
                eval_windows.get(split) or passes[split].windows(beside, room),
                1,
                1,
            )
        for name in ahead:
            del run.held[name]
        for split in evaluations["final"]:
            add(
                f"final {split}",
                passes[split],
                eval_windows.get(split) or passes[split].windows(memory, room),
                1,
                0,
            )

    def _load(self, store: Store) -> Data:
        from .loader import available_bytes

        danger = (
            "if another machine replaces a file of it, this process dies of SIGBUS; copy it here"
        )
        warn_if_remote(store.path, danger)
        self._available, self._ranks = available_bytes(), local_ranks()
        self._spool_dir = spool_dir()
        self._room = spool_bytes(self.config.spool, self._spool_dir, self._ranks)
        self.log.mark("note", spool_dir=str(self._spool_dir), spool_room_bytes=self._room)
        return super()._load(store)

    def _pass(self, split: str, training: bool, memory: int | None) -> Pass:
        """The pass of a loader, with the shape of one real batch, where windows are to be
        chosen."""
        from torch_geometric.sampler import NodeSamplerInput

        store, shape, arguments = (
            self.store,
            BatchShape((0,), (0,)),
            self._arguments(split, shuffle=training),
        )
        # A rank without a batch chooses as one with a single batch does.
        seeds = self.splits[split][: max(1, len(arguments["sampler"]))]
        num_batches = -(-len(seeds) // arguments["batch_size"])
        if memory is not None and num_batches:
            sampler = self._sampler(split, store.colptr, store.row, training)
            probe = sampler.sample_from_nodes(
                NodeSamplerInput(None, seeds[: arguments["batch_size"]])
            )
            shape = BatchShape(tuple(probe.num_sampled_nodes), tuple(probe.num_sampled_edges))
        return Pass(
            self.config, store.size, split, Batches.of(shape), training, num_batches, self._ranks
        )

    def _build(self, split: str, shuffle: bool) -> StoreLoader:
        from .loader import fill_page_cache

        config, train = self.config, self._resident.get("train")
        with self.log.phase(f"build {split} loader"):
            beside = None if train is None or shuffle else train.windows
            memory = window_budget(config.lookahead, self._available, beside, self._ranks)
            one, eval_windows = self._pass(split, shuffle, memory), dict[str, Windows]()
            if shuffle:
                others = [name for name in STREAM if self._room and config.num_evaluations(name)]
                # of this rank
                others = [name for name in others if len(self._arguments(name, False)["sampler"])]
                evaluations = {name: self._pass(name, False, memory) for name in others}
                windows, eval_windows = choose_loaders(one, evaluations, memory, self._room)
            else:
                windows = one.windows(memory, self._room)
            loader = self._loader(split, shuffle, windows)
            for name, chosen in eval_windows.items():
                self._resident[_EVALUATION + name] = other = self._loader(name, False, chosen)
                loader.evaluations.append(other)
            for name, chosen in [(split, windows), *eval_windows.items()]:
                self.log.mark(
                    "note", loader=name, windows=str(chosen), window_batches=chosen.window_batches
                )
        if shuffle:
            loader.last_epoch, here = config.epochs, launch()
            if (
                windows.prepared_ahead
                and sum(store_bytes(config, self.store.size).values()) > _LONG_PASS_BYTES
            ):
                reads = max(1, 2 * one.batch.num_nodes + one.batch.num_edges)
                loader.first_batches = min(
                    _FIRST_READS // reads, (windows.window_batches or 0) // 2
                )
            first = here is None or here.local_rank == 0  # one rank fills it for all of its node
            if windows.window_batches is None and config.lookahead != "off" and first:
                with self.log.phase("load into page cache"):
                    fill_page_cache(self.store)
        return loader

    def _loader(self, split: str, shuffle: bool, windows: Windows) -> StoreLoader:
        from .loader import StoreLoader

        store, arguments = self.store, self._arguments(split, shuffle)
        sampler = self._sampler(split, store.colptr, store.row, training=shuffle)
        loader = StoreLoader(
            store, sampler, labels=self.labels[split], windows=windows, **arguments
        )
        loader.spool_dir, loader.waiting = self._spool_dir, self.waiting
        loader.on_window = functools.partial(self.log.mark, "window", loader=split)
        loader.on_pass = functools.partial(self.log.mark, "pass", loader=split)
        return loader

    def eval_loader(self, split: str) -> NodeLoader:
        """As `Loaders.eval_loader`; a loader whose windows are on disk stays, with them."""
        if (resident := self._resident.get(_EVALUATION + split)) is not None:
            return resident
        # for `train` too, whose loader may have its next window
        loader = self._build(split, shuffle=False)
        if loader.windows.spooling is not None and self.config.num_evaluations(split) > 1:
            self._resident[_EVALUATION + split] = loader
        return loader
