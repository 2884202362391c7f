"""What a pass over a split takes beside the graph: batches, a step, workers or windows, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import TrainConfig
from ..sampling.budget import (
    BatchShape,
    Windows,
    batch_bytes,
    choose_windows,
    compact_batch_bytes,
    queued_bytes,
    window_fixed_bytes,
)
from .sizes import (
    PREFETCH_FACTOR,
    WORKER_BYTES,
    GraphSize,
    expected_batch,
    feature_itemsize,
    sampling_bytes,
    spread,
    store_bytes,
)
from .step import activation_bytes, model_state_bytes

MODEL = "model, gradients, Adam"


@dataclass(frozen=True)
class Pass:
    """One pass over a split, to train or to evaluate: what it holds beside the graph and the model, by parts."""

    config: TrainConfig
    size: GraphSize
    split: str
    batch: BatchShape
    training: bool = True

    @classmethod
    def over(cls, config: TrainConfig, size: GraphSize, split: str, training: bool) -> Pass:
        """With the batch that is expected; that of an evaluation has its own number of seeds and fan-outs."""
        seeds = config.batch_size if training else config.eval_batch_size or config.batch_size
        seeds = min(seeds, size.num_seeds[split])
        if config.loading == "propagated":
            return cls(config, size, split, BatchShape((seeds,), ()), training)
        batch = expected_batch(size, config.undirected, seeds, config.fan_out(training))
        return cls(config, size, split, batch, training)

    @property
    def itemsize(self) -> int:
        return feature_itemsize(self.config, self.size)

    @property
    def num_batches(self) -> int:
        return -(-self.size.num_seeds[self.split] // max(1, self.batch.hop_nodes[0]))

    @property
    def batch_bytes(self) -> int:
        return batch_bytes(self.batch, self.size.num_features, self.itemsize)

    @property
    def widened_bytes(self) -> int:
        """float16 features in float32."""
        return 4 * self.batch.num_nodes * self.size.num_features if self.itemsize == 2 else 0

    @property
    def activation_bytes(self) -> int:
        size = self.size
        return activation_bytes(self.config, self.batch, size.num_features, size.num_classes, self.training)

    def on_gpu(self) -> dict[str, int]:
        """A step in GPU memory, allocated by torch, at its peak; the batch is copied whole and widened there."""
        return {
            "batch": self.batch_bytes + self.widened_bytes,
            MODEL: model_state_bytes(self.config, self.size.num_features, self.size.num_classes),
            "activations": self.activation_bytes,
        }

    def step(self) -> dict[str, int]:
        """In the trainer's own process: a batch and a step, or the sampling of the next batch where that is more."""
        step = max(self.activation_bytes + self.widened_bytes, sampling_bytes(self.batch))
        return {"batch in use": self.batch_bytes, "step: activations and sampling": step}

    def workers(self, idle_loaders: int) -> dict[str, int]:
        """In this pass's workers and, if they are persistent, in those of `idle_loaders` others.

        Batches are handed over in shared memory: `num_workers * PREFETCH_FACTOR` ready beside the one in use, if there
        are as many. Each worker samples at the same time as the others.
        """
        config = self.config
        if not config.num_workers:
            return {}
        ready = min(PREFETCH_FACTOR * config.num_workers, max(0, self.num_batches - 1))
        idle = idle_loaders * config.num_workers if config.persistent_workers else 0
        return {
            "workers' batches (shared memory)": ready * self.batch_bytes,
            "workers": config.num_workers * (WORKER_BYTES + sampling_bytes(self.batch)) + idle * WORKER_BYTES,
        }

    # Over a store -----------------------------------------------------------------------------------------------------

    def prefetched(self) -> dict[str, int]:
        """Where a thread prepares the batches (`sampling.loader.prefetch`); windows aside."""
        return {"batches ready": queued_bytes(self.batch, self.size.num_features, self.itemsize), **self.step()}

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
            reserve=step_reserve_bytes(config, self.batch, size),
            room_bytes=room_bytes,
            passes=max(1, config.epochs if self.training else config.num_evaluations(self.split)),
            always=always,
        )

    def window_bytes(self, windows: Windows) -> int:
        """What a window really holds: each distinct node's features once, and every batch's own ids and edges."""
        assert windows.window_batches is not None
        reach = spread(self.size, self.config.undirected)[1]
        drawn = windows.window_batches * self.batch.num_nodes
        distinct = min(drawn, reach * -math.expm1(-drawn / reach))
        own = windows.window_batches * compact_batch_bytes(self.batch, 0)
        return int(distinct * self.size.num_features * self.itemsize) + own + window_fixed_bytes(self.size.num_nodes)


def step_reserve_bytes(config: TrainConfig, batch: BatchShape, size: GraphSize) -> tuple[int, int]:
    """What loading=store keeps free beside windows: batches on their way, a training step, weights; and beside the
    page cache, where there are workers too.

    0 where `lookahead` is a size of its own: all of that is for windows.
    """
    if config.lookahead != "auto":
        return 0, 0
    one = Pass(config, size, "train", batch)
    state = model_state_bytes(config, size.num_features, size.num_classes)
    step = sum(one.prefetched().values()) + state
    return step, step + sum(one.workers(idle_loaders=1).values())
