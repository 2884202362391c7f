"""A pass over a split: batches, a step, workers or windows, from sizes alone; and the choice of a
store's windows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from ..config import TrainConfig
from ..graph.npz import CHUNK_BYTES
from ..graph.store import GraphSize, Store
from . import budget
from . import memory_parts as sizes
from .budget import BatchShape, Spooling, Windows
from .draws import Batches, draw_batches, with_hub
from .step_memory import activation_bytes, fuses, model_state_bytes

MODEL = "model, gradients, Adam"
BATCH, STEP, READY = "batch in use", "step: activations and sampling", "batches ready"
WORKERS = "workers' batches (shared memory)", "workers"
# The share by which batches may be larger than forecast; twice that if all neighbors are sampled.
UNSURE = {"drawn": 0.0, "extrapolated": 0.1, "degrees": 0.25}


@dataclass(frozen=True)
class Pass:
    """One pass over a split, to train or to evaluate: bytes in addition to the graph and the model,
    by parts."""

    config: TrainConfig
    size: GraphSize
    split: str
    batches: Batches
    training: bool = True
    own_batches: int | None = None  # of this rank; None for all of the split
    sharers: int = 1  # ranks on this node, which have the page cache in common
    # Bytes that a store reserves next to windows and next to the page cache; None for those of a
    # step.
    reserve: tuple[int, int] | None = None

    @classmethod
    def over(cls, config: TrainConfig, size: GraphSize, split: str, training: bool) -> Self:
        """A pass with batches drawn from the store, if `size` is one, or else expected from mean
        degrees."""
        seeds = config.batch_size if training else config.eval_batch_size or config.batch_size
        seeds = min(seeds, size.num_seeds[split])
        fan_out, count = config.fan_out(training), -(-size.num_seeds[split] // max(1, seeds))
        if config.policy.uses_hops:
            batches = Batches.of(BatchShape((seeds,), ()))
        elif isinstance(size, Store):
            count *= max(1, config.epochs) if training else 1
            batches = draw_batches(
                size, split, seeds, fan_out, training=training, num_batches=count
            )
        else:
            expected = sizes.expected_batch(size, config.undirected, seeds, fan_out)
            batches = Batches.of(expected, "degrees")
            if -1 in fan_out:
                bound = with_hub(expected, fan_out, size, size.num_edges)
                batches = replace(batches, bound=bound)
        return cls(config, size, split, batches, training)

    @property
    def batch(self) -> BatchShape:
        """The mean batch, for sums over many of them; the largest one decides the peak of a
        step."""
        return self.batches.mean

    @property
    def itemsize(self) -> int:
        return sizes.feature_itemsize(self.config, self.size)

    @property
    def batch_itemsize(self) -> int:
        """Bytes of a feature in a batch: int8 is decoded to float32 when a batch is put
        together."""
        return 4 if self.itemsize == 1 else self.itemsize

    @property
    def num_batches(self) -> int:
        if self.own_batches is not None:
            return self.own_batches
        return -(-self.size.num_seeds[self.split] // max(1, self.batch.hop_nodes[0]))

    @property
    def num_after_first(self) -> float:
        """Batches that come after the first, in units of a whole one, as the last may have fewer
        seeds."""
        if self.own_batches is not None:
            return max(0, self.own_batches - 1)
        return max(0.0, self.size.num_seeds[self.split] / max(1, self.batch.hop_nodes[0]) - 1)

    def _largest(self, on_gpu: bool = False) -> tuple[int, int, int]:
        """Bytes of the largest batch, of its float16 features widened to float32, and of its
        activations."""
        size, largest = self.size, self.batches.largest
        copied = self.itemsize == 2 and not fuses(self.config, on_gpu)
        widened = 4 * largest.num_nodes * size.num_features if copied else 0
        widths = size.num_features, size.num_classes
        activations = activation_bytes(self.config, largest, *widths, self.training, on_gpu)
        return (
            budget.batch_bytes(largest, size.num_features, self.batch_itemsize),
            widened,
            activations,
        )

    def on_gpu(self) -> dict[str, int]:
        """A step in GPU memory, allocated by torch, at its peak; the batch is copied whole and
        widened there."""
        batch, widened, activations = self._largest(on_gpu=True)
        state = model_state_bytes(self.config, self.size.num_features, self.size.num_classes)
        return {"batch": batch + widened, MODEL: state, "activations": activations}

    def step(self) -> dict[str, int]:
        """In the trainer's own process: a batch and a step, or the sampling of the next batch where
        that is more."""
        batch, widened, activations = self._largest()
        return {
            BATCH: batch,
            STEP: max(activations + widened, sizes.sampling_bytes(self.batches.largest)),
        }

    def workers(self, idle_loaders: int) -> dict[str, int]:
        """In this pass's workers and, if they are persistent, in those of `idle_loaders` others."""
        config = self.config
        if not config.num_workers:
            return {}
        ready = min(sizes.PREFETCH_FACTOR * config.num_workers, self.num_after_first)
        sampling = int(
            min(config.num_workers, self.num_after_first + 1) * sizes.sampling_bytes(self.batch)
        )
        idle = idle_loaders * config.num_workers if config.persistent_workers else 0
        mean_bytes = budget.batch_bytes(self.batch, self.size.num_features, self.batch_itemsize)
        own = (config.num_workers + idle) * sizes.WORKER_BYTES
        return {WORKERS[0]: int(ready * mean_bytes), WORKERS[1]: own + sampling}

    def unsure_bytes(self, parts: Mapping[str, int]) -> int:
        """By how much more than forecast the batches among `parts` may take: see `UNSURE`, and
        `Batches.bound`."""
        share = UNSURE[self.batches.source] * (2 if -1 in self.config.fan_out(self.training) else 1)
        unsure = share * sum(parts.get(name, 0) for name in (BATCH, STEP, READY, *WORKERS))
        bound = replace(self, batches=replace(self.batches, largest=self.batches.bound))
        return int(unsure) + sum(bound.step().values()) - sum(self.step().values())

    def prefetched(self) -> dict[str, int]:
        """A step and the batches of a store that are ready for it (`sampling.loader.prefetch`),
        without windows."""
        others = max(0, self.num_batches - 1)
        ready = budget.queued_bytes(self.batch, self.size.num_features, self.batch_itemsize, others)
        return {READY: ready, **self.step()}

    def windows(
        self, available: int | None, room_bytes: int = 0, *, always: bool = False
    ) -> Windows:
        """Choose between the page cache, windows in memory and windows on disk, and the windows'
        size.

        `available`, from `window_budget`, includes the page cache; `room_bytes` of disk are for a
        spool. With `always`, windows are on disk wherever possible, as a pass is made in any case.
        """
        size, config, batch, num_batches, reserve = (
            self.size,
            self.config,
            self.batch,
            self.num_batches,
            self.reserve,
        )
        files, hops = sizes.store_bytes(config, size), len(batch.hop_edges)
        if reserve is None:
            reserve = 0, 0  # a `lookahead` of its own size is for windows alone
            # ready batches, a step and weights; and next to the page cache workers too
            if config.lookahead == "auto":
                one = Pass(config, size, "train", Batches.of(batch))
                step = sum(one.prefetched().values())
                step += model_state_bytes(config, size.num_features, size.num_classes)
                reserve = step, step + sum(one.workers(idle_loaders=1).values())
        if (
            available is None
            or not num_batches
            or sum(files.values()) <= (available - reserve[1]) * self.sharers
        ):
            return Windows(None, True, 0, available or 0)
        memory, fixed = max(0, available - reserve[0]), budget.window_fixed_bytes(size.num_nodes)
        bytes_each = budget.compact_batch_bytes(batch, size.num_features * self.itemsize)
        sweep, train_s = (
            budget.sweep_s(files, hops),
            num_batches * batch.num_nodes * budget.TRAIN_S_PER_NODE,
        )
        # A pass over the files costs the same for a large window as for a small one, so in memory
        # the fewest windows win, unless a single one that can't be prepared during training costs
        # more than several that can. Two windows in training leave a tenth to evaluations.
        half = (0.45 if self.training else 0.5) * memory
        alone, paired = (
            -(-num_batches // max(1, int((room - fixed) / bytes_each))) for room in (memory, half)
        )
        overlapped = (
            half >= fixed + bytes_each and max(paired * sweep, train_s) <= alone * sweep + train_s
        )
        count = -(-num_batches // (paired if overlapped else alone))
        number = -(-num_batches // count)
        moved = number * (files["x"] + hops * (files["colptr"] + files["row"]))
        ram_windows = Windows(
            count, overlapped, count * bytes_each + fixed, available, number, moved
        )
        spooled = _spooled(self, files, memory, room_bytes)
        # Windows on disk are small, and win if they move fewer bytes, written and read again, than
        # a pass for each.
        if spooled is None or not (always or spooled.moved_bytes < moved):
            return ram_windows
        return replace(spooled, in_memory=ram_windows, available_bytes=available)

    def sampled_bytes(self, batch: BatchShape) -> tuple[int, int]:
        """Bytes of each batch of the size of `batch` at the peak of sampling, and from then until
        it is packed."""
        num_edges = sizes.trained_edges(self.size, self.config.undirected)
        return budget.sampled_batch_bytes(batch, num_edges)

    def window_bytes(self, windows: Windows) -> int:
        """Real bytes of a window: each distinct node's features once, and every batch's own ids and
        edges."""
        assert windows.window_batches is not None
        total = windows.window_batches * self.batch.num_nodes
        distinct = min(
            total,
            max(
                self.batch.num_nodes, sizes.distinct_nodes(self.size, self.config.undirected, total)
            ),
        )
        own = windows.window_batches * budget.compact_batch_bytes(self.batch, 0)
        own += budget.window_fixed_bytes(self.size.num_nodes)
        return int(distinct * self.size.num_features * self.itemsize) + own


def _spooled(one: Pass, files: Mapping[str, int], memory: int, room_bytes: int) -> Windows | None:
    """Windows of a pass on disk, or None where `memory` or disk are too small for them.

    Batches are divided into structure files and these into feature shards so that the fewest bytes
    are moved: one pass over the graph for each file, if memory has room to sample it at once, and
    one over the features for each shard; two files and two shards are on disk at a time. An
    evaluation's windows stay, if the disk has room.
    """
    batch, num_nodes, num_batches, config = (
        one.batch,
        one.size.num_nodes,
        one.num_batches,
        one.config,
    )
    row_bytes = one.size.num_features * one.itemsize
    # all ids int32
    rows, structure = batch.num_nodes * row_bytes, 8 * (batch.num_nodes + batch.num_edges)
    passes = max(1, config.epochs if one.training else config.num_evaluations(one.split))
    each = budget.compact_batch_bytes(batch, row_bytes)
    sampled_bytes, result_bytes = one.sampled_bytes(batch)
    # Up to 8 large batches, which have nodes in common: at papers100M's size 8 of [15, 10, 5] x
    # 1024 had 1.12 M nodes, two windows of 4 had 1.36 M.
    size = min(
        num_batches,
        max(1, min(memory // 24, budget.WINDOW_BYTES) // each, min(8, memory // 12 // each)),
    )
    # Two windows are in use, two more in an evaluation between epochs; an eighth is a reserve.
    working, total = (
        memory - memory // 8 - 4 * size * each,
        num_batches * (passes if one.training else 1),
    )
    # four threads, with a batch each
    most_sampled = max(0, working - 4 * sampled_bytes) // sampled_bytes
    packing = 2 * (
        budget.window_fixed_bytes(num_nodes) + size * budget.compact_batch_bytes(batch, 8)
    )
    # A pass over the features has the ids in memory, int32, or int64 from 2**31 nodes on; a file
    # has seeds, sizes.
    index, per_batch = batch.num_nodes * (4 if num_nodes < 2**31 else 8), 2500
    graph, choices = len(batch.hop_edges) * (files["colptr"] + files["row"]), []
    # in one shard
    least = max(1, min(working // 4 // (index + per_batch), room_bytes // 2 // (structure + rows)))
    num_files, most_files = 1, 1 + 2 * (total // least)
    while True:
        file_batches = min(total, -(-total // num_files // size) * size)
        most = (working // 4 - file_batches * per_batch) // max(1, index)  # of memory
        alone = num_files == 1 and total <= most and total * (structure + rows) <= room_bytes
        structures = min(2, num_files) * file_batches * structure
        picked = (
            total
            if alone
            else min(file_batches, most, (room_bytes - structures) // 2 // max(1, rows))
        )
        # One pass over the features is made while the last windows are packed.
        picking = (
            packing + picked * index + min(working // 4, 2 * budget.WINDOW_BYTES, picked * rows)
        )
        sampled = min(most_sampled, (working - picking) // result_bytes)
        if min(sampled, picked) >= size:
            parts = -(-file_batches // picked)
            picked = min(picked // size, -(-file_batches // parts // size)) * size
            moved = num_files * (parts * files["x"] + -(-file_batches // sampled) * graph)
            disk = structures + min(2, num_files * parts) * picked * rows
            once = min(file_batches, sampled)
            working_bytes = (
                max((once + 4) * sampled_bytes, once * result_bytes + picking)
                + file_batches * per_batch
            )
            # Of two equal choices, the one with more files wins: training begins sooner.
            choices.append(
                (
                    moved,
                    -num_files,
                    num_files * parts,
                    (sampled, file_batches, picked, working_bytes, disk),
                )
            )
        if num_files == most_files:
            break
        # each of the first 64 numbers, then steps of 2 %
        num_files = min(most_files, num_files + 1 + num_files // 64)
    if not choices:
        return None
    moved, _, parts, (sampled, file_batches, picked, working_bytes, disk) = min(choices)
    buffers = 4 * min(CHUNK_BYTES, memory // 64)  # of a pass's threads
    spooling = Spooling(sampled, file_batches, picked, min(working, working_bytes + buffers), disk)
    again = 1 if one.training or parts == 1 else passes
    moved = again * (moved + total * (structure + rows)) // passes + num_batches * (
        structure + rows
    )
    return Windows(size, True, size * each, memory, -(-num_batches // size), moved, spooling)


def choose_loaders(
    train: Pass, evaluations: Mapping[str, Pass], available: int | None, room_bytes: int
) -> tuple[Windows, dict[str, Windows]]:
    """Windows of the training loader, and of evaluations whose windows stay on disk between them,
    for all or for none.

    Evaluations stay on disk if they take at most a third of `room_bytes` and training has its
    windows there too.
    """
    chosen = {
        split: one.windows(available, room_bytes // 3, always=True)
        for split, one in evaluations.items()
    }
    on_disk = [
        windows.spooling.disk_bytes for windows in chosen.values() if windows.spooling is not None
    ]
    if len(on_disk) < len(chosen) or sum(on_disk) > room_bytes // 3:
        return train.windows(available, room_bytes), {}
    windows = train.windows(available, room_bytes - sum(on_disk))
    return windows, chosen if windows.spooling is not None else {}
