"""A pass over a split: batches, a step, workers or windows, from sizes alone; and the choice of a store's windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import TrainConfig
from ..graph.npz import CHUNK_BYTES
from ..graph.store import Store
from .budget import (
    BatchShape,
    Windows,
    batch_bytes,
    choose_windows,
    compact_batch_bytes,
    queued_bytes,
    sampled_batch_bytes,
    window_fixed_bytes,
)
from .draws import Batches, draw_batches
from .sizes import (
    PREFETCH_FACTOR,
    WORKER_BYTES,
    GraphSize,
    distinct_nodes,
    expected_batch,
    feature_itemsize,
    sampling_bytes,
    store_bytes,
)
from .step import activation_bytes, model_state_bytes

MODEL = "model, gradients, Adam"
BATCH, STEP, READY = "batch in use", "step: activations and sampling", "batches ready"
WORKERS = "workers' batches (shared memory)", "workers"
# The share by which batches may be larger than forecast; twice that where they have all neighbors.
UNSURE = {"drawn": 0.0, "extrapolated": 0.1, "degrees": 0.25}


@dataclass(frozen=True)
class Pass:
    """One pass over a split, to train or to evaluate: bytes beside the graph and the model, by parts.

    Attributes:
        own_batches: Batches of this rank; None for all of the split.
        sharers: Ranks on this node, which have the page cache in common.
        reserve: Bytes that a store keeps free beside windows and beside the page cache; None for those of a step.
    """

    config: TrainConfig
    size: GraphSize
    split: str
    batches: Batches
    training: bool = True
    own_batches: int | None = None
    sharers: int = 1
    reserve: tuple[int, int] | None = None

    @classmethod
    def over(cls, config: TrainConfig, size: GraphSize, split: str, training: bool) -> Pass:
        """A pass with batches drawn from the store, if `size` is one, or else expected from mean degrees.

        Evaluations have their own number of seeds and fan-outs.
        """
        seeds = config.batch_size if training else config.eval_batch_size or config.batch_size
        seeds = min(seeds, size.num_seeds[split])
        if config.propagated:
            return cls(config, size, split, Batches.of(BatchShape((seeds,), ())), training)
        fan_out, count = config.fan_out(training), -(-size.num_seeds[split] // max(1, seeds))
        if isinstance(size, Store):
            count *= max(1, config.epochs) if training else 1
            batches = draw_batches(size, split, seeds, fan_out, training=training, num_batches=count)
        else:
            batches = Batches.of(expected_batch(size, config.undirected, seeds, fan_out), "degrees")
        return cls(config, size, split, batches, training)

    @property
    def batch(self) -> BatchShape:
        """The mean batch, for sums over many of them."""
        return self.batches.mean

    @property
    def largest(self) -> BatchShape:
        """The largest batch, whose step is the peak."""
        return self.batches.largest

    @property
    def itemsize(self) -> int:
        return feature_itemsize(self.config, self.size)

    @property
    def num_batches(self) -> int:
        if self.own_batches is not None:
            return self.own_batches
        return -(-self.size.num_seeds[self.split] // max(1, self.batch.hop_nodes[0]))

    @property
    def batch_bytes(self) -> int:
        return batch_bytes(self.largest, self.size.num_features, self.itemsize)

    @property
    def widened_bytes(self) -> int:
        """float16 features in float32."""
        return 4 * self.largest.num_nodes * self.size.num_features if self.itemsize == 2 else 0

    @property
    def activation_bytes(self) -> int:
        size = self.size
        return activation_bytes(self.config, self.largest, size.num_features, size.num_classes, self.training)

    def on_gpu(self) -> dict[str, int]:
        """A step in GPU memory, allocated by torch, at its peak; the batch is copied whole and widened there."""
        return {
            "batch": self.batch_bytes + self.widened_bytes,
            MODEL: model_state_bytes(self.config, self.size.num_features, self.size.num_classes),
            "activations": self.activation_bytes,
        }

    def step(self) -> dict[str, int]:
        """In the trainer's own process: a batch and a step, or the sampling of the next batch where that is more."""
        step = max(self.activation_bytes + self.widened_bytes, sampling_bytes(self.largest))
        return {BATCH: self.batch_bytes, STEP: step}

    def workers(self, idle_loaders: int) -> dict[str, int]:
        """In this pass's workers and, if they are persistent, in those of `idle_loaders` others.

        Batches are handed over in shared memory: `num_workers * PREFETCH_FACTOR` ready beside the one in use, if there
        are as many. Each worker that has a batch to make samples at the same time as the others.
        """
        config = self.config
        if not config.num_workers:
            return {}
        ready = min(PREFETCH_FACTOR * config.num_workers, max(0, self.num_batches - 1))
        sampling = min(config.num_workers, self.num_batches) * sampling_bytes(self.batch)
        idle = idle_loaders * config.num_workers if config.persistent_workers else 0
        mean_bytes = batch_bytes(self.batch, self.size.num_features, self.itemsize)
        return {WORKERS[0]: ready * mean_bytes, WORKERS[1]: (config.num_workers + idle) * WORKER_BYTES + sampling}

    def unsure_bytes(self, parts: Mapping[str, int]) -> int:
        """By how much more than forecast the batches among `parts` may take, see `UNSURE`."""
        share = UNSURE[self.batches.source] * (2 if -1 in self.config.fan_out(self.training) else 1)
        return int(share * sum(parts.get(name, 0) for name in (BATCH, STEP, READY, *WORKERS)))

    # Over a store -----------------------------------------------------------------------------------------------------

    def prefetched(self) -> dict[str, int]:
        """Batches that a thread prepares (`sampling.loader.prefetch`) and a step, without windows."""
        ready = queued_bytes(self.batch, self.size.num_features, self.itemsize, max(0, self.num_batches - 1))
        return {READY: ready, **self.step()}

    def windows(self, budget: int | None, room_bytes: int = 0, *, always: bool = False) -> Windows:
        """How a loader reads a store, see `choose_windows`."""
        size, config = self.size, self.config
        return choose_windows(
            store_bytes(config, size),
            size.num_nodes,
            size.num_features * self.itemsize,
            self.batch,
            self.num_batches,
            budget,
            training=self.training,
            reserve=self.reserve or step_reserve_bytes(config, self.batch, size),
            sharers=self.sharers,
            room_bytes=room_bytes,
            passes=max(1, config.epochs if self.training else config.num_evaluations(self.split)),
            always=always,
        )

    def window_bytes(self, windows: Windows) -> int:
        """Real bytes of a window: each distinct node's features once, and every batch's own ids and edges."""
        assert windows.window_batches is not None
        drawn = windows.window_batches * self.batch.num_nodes
        distinct = min(drawn, max(self.batch.num_nodes, distinct_nodes(self.size, self.config.undirected, drawn)))
        own = windows.window_batches * compact_batch_bytes(self.batch, 0)
        return int(distinct * self.size.num_features * self.itemsize) + own + window_fixed_bytes(self.size.num_nodes)

    def preparing_bytes(self, windows: Windows) -> int:
        """Bytes beside a window while it is prepared: its batches' samples, and three buffers that read the store."""
        assert windows.window_batches is not None
        buffers = 3 * min(CHUNK_BYTES, max(2**18, windows.available_bytes // 64))
        return windows.window_batches * sampled_batch_bytes(self.largest) + buffers


def step_reserve_bytes(config: TrainConfig, batch: BatchShape, size: GraphSize) -> tuple[int, int]:
    """Bytes that loading=store keeps free beside windows, for ready batches, a step and weights; and beside the page
    cache, with workers too.

    0 where `lookahead` is a size of its own: all of that is for windows.
    """
    if config.lookahead != "auto":
        return 0, 0
    one = Pass(config, size, "train", Batches.of(batch))
    state = model_state_bytes(config, size.num_features, size.num_classes)
    step = sum(one.prefetched().values()) + state
    return step, step + sum(one.workers(idle_loaders=1).values())


def choose_loaders(
    train: Pass, evaluations: Mapping[str, Pass], budget: int | None, room_bytes: int
) -> tuple[Windows, dict[str, Windows]]:
    """Windows of the training loader, and of evaluations whose windows stay on disk between them, for all or for none.

    Evaluations stay on disk if they take a third of `room_bytes` at the most and training has its windows there too.
    """
    kept = {split: one.windows(budget, room_bytes // 3, always=True) for split, one in evaluations.items()}
    on_disk = [windows.spooling.disk_bytes for windows in kept.values() if windows.spooling is not None]
    if len(on_disk) < len(kept) or sum(on_disk) > room_bytes // 3:
        return train.windows(budget, room_bytes), {}
    windows = train.windows(budget, room_bytes - sum(on_disk))
    return windows, kept if windows.spooling is not None else {}
