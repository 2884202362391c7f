"""The memory of a pass over a split, from sizes alone: batches, a step, workers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from ..config import TrainConfig
from ..errors import format_bytes
from ..graph.npz import CHUNK_BYTES, Array
from ..graph.store import GraphSize, Store
from ..graph.store_format import SPLITS
from . import memory_parts as sizes
from .batches import Batches, BatchShape, Draw, batch_bytes, draw_batches, num_queued, with_hub
from .step_memory import Step, model_state_bytes

MODEL = "model, gradients, Adam"
BATCH = "batch in use"
STEP = "step: activations and sampling"
READY = "batches ready"
WAITING = "workers' batches (shared memory)"
WORKERS = "workers"
# Share by which batches may be larger, by `Batches.source`; twice that if a hop takes all neighbors
UNSURE = {"drawn": 0.0, "extrapolated": 0.1, "degrees": 0.25}


def read_bytes(available_bytes: int) -> int:
    """Bytes of one read; the three buffers of a pass may not outweigh a small window."""
    return min(CHUNK_BYTES, max(2**18, available_bytes // 64))  # reads below 256 kB are slow


@dataclass(frozen=True)
class Spooling:
    """The sizes of the passes that prepare windows on disk."""

    sampled_batches: int  # sampled by one pass over the graph
    structure_batches: int  # of one structure file: ids and edges without features
    picked_batches: int  # of one feature shard, filled by one pass over the features
    working_bytes: int  # memory of either pass
    disk_bytes: int  # the most on disk, while one shard is used and the next is prepared
    hot_bytes: int = 0  # the part of `working_bytes` for rows that stay in memory


@dataclass
class Windows:
    """The way in which a loader reads its store."""

    window_batches: int | None  # None where batches are drawn through the page cache
    window_bytes: int  # of one window
    available_bytes: int  # memory for the loader, page cache included
    num_windows: int = 0  # in a pass over the loader
    moved_bytes: int = 0  # between memory and disk, in a pass over the loader
    first_bytes: int = 0  # moved before the first window is ready
    spooling: Spooling | None = None
    in_memory: "Windows | None" = None  # the windows to use once the disk is full

    @property
    def peak_bytes(self) -> int:
        """Bytes of a window in use, of the next one, and of passes that prepare windows on disk."""
        working = self.spooling.working_bytes if self.spooling else 0
        return 2 * self.window_bytes + working

    def __str__(self) -> str:
        free = format_bytes(self.available_bytes)
        if self.window_batches is None:
            return f"batches are drawn through the page cache ({free} available)"
        where = "two in memory, one being prepared"
        if self.spooling:
            disk = format_bytes(self.spooling.disk_bytes)
            hot = format_bytes(self.spooling.hot_bytes)
            where += f", from a spool of {disk} on disk at most, the rows visited most in {hot}"
        size = format_bytes(self.window_bytes)
        return f"windows of {self.window_batches} batches, about {size} each, {where} ({free} available)"


@dataclass(frozen=True)
class Pass:
    """A pass over a split; its methods return bytes by part, without the graph and, except for
    `on_gpu`, the model."""

    config: TrainConfig
    size: GraphSize
    split: str
    batches: Batches
    training: bool = True
    own_batches: int | None = None  # number of this rank; None for all of the split
    sharers: int = 1  # ranks on this node, which share the page cache
    # bytes to reserve next to windows and next to a store in the page cache; None: those of a step
    reserve: tuple[int, int] | None = None

    @classmethod
    def over(
        cls,
        config: TrainConfig,
        size: GraphSize,
        split: str,
        training: bool,
        ids: Array | None = None,
    ) -> Self:
        """A pass over a split, or over the nodes `ids` of a store, whose batches are drawn. Without
        a store, they are expected from mean degrees."""
        num_ids = size.num_seeds[split] if ids is None else len(ids)
        seeds = min(config.seeds_per_batch(training), num_ids)
        fan_out = config.fan_out(training)  # () for propagated features
        batches = None
        if isinstance(size, Store) and seeds and fan_out:
            passes = max(1, config.epochs) if training else 1  # evaluations repeat their batches
            draw = Draw(seeds, fan_out, training, config.seed + SPLITS.index(split))
            num_batches = passes * -(-num_ids // seeds)
            batches = draw_batches(size, split if ids is None else ids, draw, num_batches)
        if batches is None:  # no store or no fan-outs, or batches too large to draw
            shape = size, config.undirected, seeds, fan_out
            mean = sizes.expected_batch(*shape)
            largest = bound = sizes.expected_batch(*shape, even=True)
            if -1 in fan_out:  # one node may have all edges, and be in a batch
                bound = with_hub(largest, fan_out, size, size.num_edges)
            # without neighbors, batches are as large as their seeds
            batches = Batches(mean, largest, "degrees" if fan_out else "drawn", bound)
        return cls(config, size, split, batches, training)

    @property
    def batch(self) -> BatchShape:
        """The mean batch, for sums over many; the largest one decides the peak of a step."""
        return self.batches.mean

    @property
    def itemsize(self) -> int:
        return sizes.feature_itemsize(self.config, self.size)

    @property
    def num_batches(self) -> int:
        if self.own_batches is not None:
            return self.own_batches
        return -(-self.size.num_seeds[self.split] // max(1, self.batch.hop_nodes[0]))

    def computation(self, batch: BatchShape, on_gpu: bool = False) -> Step:
        widths = self.size.num_features, self.size.num_classes
        return Step(self.config, batch, *widths, self.training, on_gpu)

    def _largest(self, on_gpu: bool = False) -> tuple[int, int, int]:
        # Bytes of the largest batch, of a float32 copy of its float16 x, and of its activations.
        largest = self.batches.largest
        widened = 0
        step = self.computation(largest, on_gpu)
        if self.itemsize == 2 and not step.fuses:  # a fused step reads float16 in place
            widened = 4 * largest.num_nodes * self.size.num_features
        return self._batch_bytes(largest), widened, step.activation_bytes

    def on_gpu(self) -> dict[str, int]:
        """GPU memory that torch allocates in a step; the batch is copied whole and widened there."""
        batch, widened, activations = self._largest(on_gpu=True)
        return {
            "batch": batch + widened,
            MODEL: model_state_bytes(self.config, self.size.num_features, self.size.num_classes),
            "activations": activations,
        }

    def step(self) -> dict[str, int]:
        """Memory of the trainer: a batch, and the larger of a step and the next one's sampling."""
        batch, widened, activations = self._largest()
        sampling = sizes.sampling_bytes(self.batches.largest)
        return {BATCH: batch, STEP: max(activations + widened, sampling)}

    def workers(self, idle_loaders: int) -> dict[str, int]:
        """Memory of this pass's workers and of persistent ones of `idle_loaders` others."""
        config = self.config
        if not config.num_workers:
            return {}
        # one batch is with the trainer
        ready = min(sizes.PREFETCH_FACTOR * config.num_workers, max(0, self.num_batches - 1))
        sampling = min(config.num_workers, self.num_batches)
        processes = config.num_workers
        if config.persistent_workers:
            processes *= 1 + idle_loaders
        return {
            WAITING: self._ready_bytes(ready),
            WORKERS: processes * sizes.WORKER_BYTES + sampling * sizes.sampling_bytes(self.batch),
        }

    def unsure_bytes(self, parts: Mapping[str, int]) -> int:
        """Bytes by which the batches in `parts` may exceed their forecast (`UNSURE`, `bound`)."""
        share = UNSURE[self.batches.source]
        if -1 in self.config.fan_out(self.training):
            share *= 2
        unsure = share * sum(parts.get(name, 0) for name in (BATCH, STEP, READY, WAITING, WORKERS))
        # the same pass, in which a node of the highest degree comes into the largest batch
        bound = replace(self, batches=replace(self.batches, largest=self.batches.bound))
        return int(unsure) + sum(bound.step().values()) - sum(self.step().values())

    def prefetched(self) -> dict[str, int]:
        """Memory of a step and of the batches that a store's loader has ready, without windows."""
        # one batch of the pass is in use, and the queue never has batches of the next pass
        ready = num_queued(self._batch_bytes(self.batch), max(0, self.num_batches - 1))
        return {READY: self._ready_bytes(ready), **self.step()}

    def _batch_bytes(self, batch: BatchShape) -> int:
        itemsize = 4 if self.itemsize == 1 else self.itemsize  # int8 is decoded to float32
        return batch_bytes(batch, self.size.num_features, itemsize)

    def _ready_bytes(self, count: int) -> int:
        """Bytes of `count` waiting batches: one of the largest size, the others of the mean size.
        If several batches have a hub, one may wait while another is in use."""
        mean = self._batch_bytes(self.batch)
        return max(0, count - 1) * mean + min(1, count) * self._batch_bytes(self.batches.largest)
