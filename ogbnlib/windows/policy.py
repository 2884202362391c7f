"""Loading policy `store`: graph and features stay on disk, mapped or read in windows (batches that
are sampled together, see `plan`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..forecast.available import available_bytes, usable_bytes
from ..forecast.pass_memory import READY, Pass, Windows, read_bytes
from ..forecast.run_forecast import Ledger
from ..graph.store import Store
from ..launcher import launch, local_ranks
from ..sampling.policies import STREAM, DiskLoaders
from .plan import Budget, asked_bytes, sampled_bytes, spool_bytes, spool_dir, window_bytes

if TYPE_CHECKING:
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    from .spool import Spool
    from .store_loader import StoreLoader


class StoreLoaders(DiskLoaders):
    """Loaders of the policy `store`, whose graph and features stay on disk. In memory, a loader
    has its seeds, their labels, and the batches that are ready or being prepared."""

    @classmethod
    def phases(cls, run: Ledger) -> None:  # writes them into the ledger
        cls._forecast(run)
        if asked_bytes() == "auto":
            smallest = Ledger(run.config, run.size, 0)  # without memory: windows of one batch
            cls._forecast(smallest)
            least = min(run, smallest, key=lambda ledger: ledger.peak_bytes)
            unqueued = [phase.held_bytes - phase.parts.get(READY, 0) for phase in least.phases]
            run.least_bytes = least.peak_bytes
            run.queue_bytes = least.peak_bytes - max(unqueued)

    @classmethod
    def _forecast(cls, run: Ledger) -> None:
        folder = spool_dir()
        room = spool_bytes(run.config.spool, folder) if folder.is_dir() else 0
        cls._forecast_load(run)
        run.phase("load", {})
        available = None  # without a limit
        if run.limit_bytes is not None:
            available = max(0, usable_bytes(run.limit_bytes) - sum(run.held.values()))
        run.hold_model()
        train = run.one_pass("train", training=True)
        splits = run.evaluations()  # "eval": between epochs; "final": in the end
        passes = {split: run.one_pass(split) for split in {*splits["eval"], *splits["final"]}}
        budget = Budget(available, room)
        windows, resident = budget.loaders(train, passes)  # resident: by split, stay on disk
        if windows.window_batches is not None:
            run.windows = windows
        if run.config.epochs:
            cls._forecast_pass(run, "train", train, windows, num_passes=run.config.epochs)
        held = run.held  # to restore when the training loader is dropped
        run.held = held | _prepared_ahead(train, windows)
        for when, training in (("eval", windows), ("final", None)):
            if training is None:
                run.held = held
            for split in splits[when]:
                cls._forecast_pass(
                    run,
                    f"{when} {split}",
                    passes[split],
                    resident.get(split) or budget.loader(passes[split], training),
                    idle_loaders=int(when == "eval"),  # the training loader's workers wait
                    spools=split not in resident,  # else filled by training's first pass
                )

    @classmethod
    def _forecast_pass(
        cls,
        run: Ledger,
        name: str,
        loader_pass: Pass,
        windows: Windows,
        *,
        num_passes: int = 1,  # epochs
        idle_loaders: int = 0,  # others with persistent workers
        spools: bool = True,  # whether a pass for the spool is made in this phase
    ) -> None:
        batches = windows.window_batches
        # with windows, a thread prepares the batches for any `num_workers`
        if batches is not None or not run.config.num_workers:
            parts = loader_pass.prefetched()
        else:
            parts = loader_pass.step() | loader_pass.workers(idle_loaders)
        unsure_bytes = loader_pass.unsure_bytes(parts)
        if batches is not None:
            is_paired = windows.num_windows * num_passes > 1  # the next one is prepared meanwhile
            parts["windows"] = (2 if is_paired else 1) * window_bytes(loader_pass, windows)
            if windows.spooling is None:
                largest = loader_pass.batches.largest
                sampling, result = sampled_bytes(loader_pass, largest)
                # packing copies a window's nodes (int64); the store is read into three buffers
                samples = batches * max(sampling, result + 8 * largest.num_nodes)
                parts["window being prepared"] = samples + 3 * read_bytes(windows.available_bytes)
            elif spools:
                parts["pass for the spool"] = windows.spooling.working_bytes
        run.phase(name, parts, unsure_bytes)

    def _load(self, store: Store) -> Data:
        data = super()._load(store)
        self._ranks = local_ranks()  # of this node; they share memory and disk
        room = spool_bytes(self.config.spool, spool_dir(), self._ranks)
        self.budget = Budget(available_bytes(), room, self._ranks)  # the labels are in memory
        return data

    def _pass(self, split: str, training: bool) -> Pass:
        # A rank without a batch makes the same choice as a rank with a single batch.
        num_seeds = max(1, len(self._order(split, training))) if len(self.splits[split]) else 0
        return dataclasses.replace(
            Pass.over(self.config, self.store, split, training),
            own_batches=-(-num_seeds // self.config.seeds_per_batch(training)),
            sharers=self._ranks,
        )

    def _build_resident(self) -> dict[str, NodeLoader]:
        with self.log.phase("build train loader"):
            evaluations = {
                split: self._pass(split, training=False)
                for split in STREAM
                # evaluated in this run, and this rank has seeds of that split
                if self.config.num_evaluations(split) and len(self._order(split, shuffle=False))
            }
            windows, on_disk = self.budget.loaders(self._pass("train", training=True), evaluations)
            evals = {split: self._loader(split, chosen) for split, chosen in on_disk.items()}
            readers = [loader.reader for loader in evals.values() if loader.reader]
            spools = [reader.spool for reader in readers if reader.spool]
            train = self._loader("train", windows, training=True, evaluations=spools)
        # The store fits into memory: one rank fills the page cache for its whole node.
        if windows.window_batches is None and launch().local_rank == 0:
            with self.log.phase("load into page cache"):
                self.store.fill_page_cache()
        return {**{f"eval {split}": loader for split, loader in evals.items()}, "train": train}

    def _loader(
        self,
        split: str,
        windows: Windows,
        *,
        training: bool = False,
        evaluations: Sequence[Spool] = (),  # to be filled in this loader's first passes
    ) -> StoreLoader:
        from .spool import Preparation
        from .store_loader import StoreLoader

        self.log.mark("note", loader=split, windows=str(windows))
        return StoreLoader(
            self.store,
            self._sampler(split, self.store.colptr, self.store.row, training),
            labels=self.labels[split],
            preparation=Preparation(
                windows,
                last_epoch=self.config.epochs if training else None,  # None: no epoch follows
                spool_dir=spool_dir(),
                evaluations=evaluations,
                on_event=functools.partial(self.log.mark, loader=split),
                waiting=self.waiting,
            ),
            **self._arguments(split, training),
        )

    def eval_loader(self, split: str) -> NodeLoader:
        """Return the loader of an evaluation, see `Loaders.eval_loader`. A loader whose windows
        are on disk stays for later evaluations, with its windows."""
        resident = self._resident.get(f"eval {split}")
        if resident is not None:
            return resident
        # The training loader, if there is one, may hold its next window. So an evaluation of its
        # split, too, has a loader of its own, and shares memory with these windows.
        train = self._resident.get("train")
        train_windows = None if train is None else train.windows
        with self.log.phase(f"build {split} loader"):
            windows = self.budget.loader(self._pass(split, training=False), train_windows)
            loader = self._loader(split, windows)
        if windows.spooling is not None and self.config.num_evaluations(split) > 1:
            self._resident[f"eval {split}"] = loader
        return loader


def _prepared_ahead(train: Pass, windows: Windows) -> dict[str, int]:
    # bytes by part that the training loader has in memory during an evaluation between epochs
    if windows.window_batches is None:
        return {}
    parts = {"next window to train on": window_bytes(train, windows)}
    spooling = windows.spooling
    # Where one feature shard (`picked_batches`) has the batches of all epochs, no second pass
    # follows, and of `working_bytes` only the hot rows stay.
    if spooling and spooling.picked_batches < train.num_batches * train.config.epochs:
        parts["next pass for the spool"] = spooling.working_bytes
    elif spooling and spooling.hot_bytes:
        parts["rows visited most"] = spooling.hot_bytes
    return parts
