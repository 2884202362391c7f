"""The loading policy `loading=propagated`: batches of propagated features, without a graph."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import TrainConfig
from ..forecast.available import available_bytes
from ..forecast.memory_parts import expected_batch, feature_itemsize, hop_size, trained_edges
from ..forecast.run_forecast import PROPAGATE, Ledger
from ..graph.store import GraphSize, Store, is_store, open_store
from ..memory.reading import malloc_trim
from ..memory.recorder import EventLog
from ..progress import Progress
from ..sampling.policies import DiskLoaders
from .plan import (
    KERNEL_BYTES,
    OWN_SHARE,
    check_parameters,
    columns_room,
    fixed_bytes,
    plan_hops,
    propagated_path,
)

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from .hop_loader import HopLoader


class PropagatedLoaders(DiskLoaders):
    """Loaders of rows of a mapped store, through the page cache, for which any limit is enough."""

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
        from .hops import propagated

        exists = graph.hops is not None or is_store(propagated_path(graph, config))
        with contextlib.nullcontext() if exists else log.phase(PROPAGATE):
            result = propagated(graph, config, say=say, progress=progress, check=check)
        if not exists:
            malloc_trim()  # else 30 MB of small blocks stay in memory for the whole run
        return result

    @classmethod
    def phases(cls, run: Ledger) -> None:
        """Write the phases of a run into the ledger: propagation, unless the store of its result
        exists, then training on its rows."""
        config, graph = run.config, run.size
        if isinstance(graph, Store):
            path = propagated_path(graph, config)
            if graph.hops is None and is_store(path):
                graph = open_store(path)
            if graph.hops is not None:
                check_parameters(graph, config)
            graph = graph.size
        if graph.hops is None:
            cls._propagate(run, graph)
        run.size = hop_size(graph, config)
        num_propagating = len(run.phases)  # 0 or 1
        cls._forecast_load(run)
        run.phase("load", {})
        run.hold_model()
        if config.epochs:
            run.pass_phase("train", run.one_pass("train", training=True), idle_loaders=0)
        for when, splits in run.evaluations().items():
            for split in splits:
                run.pass_phase(f"{when} {split}", run.one_pass(split), idle_loaders=0)
        # a single column suffices for propagation, see `_propagate`; training needs its peak
        training = [phase.held_bytes for phase in run.phases[num_propagating:]]
        run.least_bytes = max(run.least_bytes, *training)

    @staticmethod
    def _propagate(run: Ledger, graph: GraphSize) -> None:
        """Write the phase `propagate`, in which a column of all nodes is the least in memory."""
        config = run.config
        both = bool(config.undirected or graph.undirected)
        num_edges = trained_edges(graph, config.undirected)
        graph = dataclasses.replace(graph, num_edges=num_edges, undirected=both)
        num_outputs = sum(graph.num_seeds.values())
        # hop by hop from the output nodes, as in a batch with all neighbors
        neighborhoods = expected_batch(graph, both, num_outputs, [-1] * (config.hops - 1))
        itemsize = feature_itemsize(config, graph)
        column_bytes = graph.num_nodes * itemsize
        fixed = fixed_bytes(graph, config.hops)
        room = column_bytes * graph.num_features  # without a limit: all columns at once
        if run.limit_bytes is not None:
            share_bytes = int(OWN_SHARE * (run.limit_bytes - sum(run.held.values())))
            room = max(column_bytes, min(room, columns_room(share_bytes, fixed)))
        plan = plan_hops(
            graph,
            config.hops,
            left_bytes=room,
            itemsize=itemsize,
            num_outputs=num_outputs,
            # the last hop computes the output nodes, the one before their neighbors as well
            reached=[*itertools.accumulate(neighborhoods.hop_nodes)][::-1],
        )
        parts = {"columns": plan.held_bytes, "buffers": fixed - KERNEL_BYTES}
        # the kernels may be compiled already
        run.phase(PROPAGATE, parts, unsure_bytes=KERNEL_BYTES)
        run.propagation = plan
        run.least_bytes = run.peak_bytes - plan.held_bytes + column_bytes

    def _load(self, store: Store) -> Data:
        data = super()._load(store)
        # read in order once, in place of row by row, if the page cache has room
        if store.nbytes <= available_bytes() and self.config.epochs:
            with self.log.phase("load into page cache"):
                store.fill_page_cache()
        return data

    def _build(self, split: str, shuffle: bool) -> HopLoader:
        from .hop_loader import HopLoader

        arguments = self._arguments(split, shuffle)  # as for a PyG loader
        with self.log.phase(f"build {split} loader"):
            return HopLoader(
                self.store, arguments.pop("input_nodes"), self.labels[split], **arguments
            )

    def eval_loader(self, split: str) -> HopLoader:
        return self._build(split, shuffle=False)
