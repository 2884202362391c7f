"""The learner: model, optimizer and gradient scaler, and their steps on one rank."""

import functools
import itertools
import os
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch_geometric.data import Data

from ..config import TrainConfig
from ..errors import InputError
from ..forecast.machine import probe
from ..graph.neighbors import batch_key
from ..memory.reading import release_memory
from ..memory.recorder import EventLog
from .call import Call, random_batch
from .distributed import Ranks
from .fused_sage import torch_threads
from .network import GNN

# An object whose state is saved in a checkpoint.
Stateful: TypeAlias = nn.Module | torch.optim.Optimizer | torch.amp.GradScaler
_PIECE_VALUES = 2**18  # values of a tensor that are checked at a time: 1 MB in float32


def loss_and_gradient(
    scores: Tensor, labels: Tensor, scale: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss, and `scale` times its gradient with respect to `scores`.

    The loss of all models is the sum of the seeds' cross-entropies. The code calls the four kernels
    of `F.cross_entropy` and its backward pass; autograd around them takes 0.1 ms more, a tenth of a
    small step. Any other loss may leave its gradient to autograd:

        scores = scores.requires_grad_()
        loss = F.cross_entropy(scores, labels, weight, reduction="sum", label_smoothing=0.1)
        return loss.detach(), torch.autograd.grad(loss * scale, scores)[0]

    Args:
        scores: float32 [num_seeds, num_classes], detached from the model.
        labels: int64 [num_seeds].
        scale: One over the number of all seeds of the optimizer's step.
        weight: Weight of each class, float32 [num_classes], with a mean of 1 over the train split.
            torch's mean divides by the weights of each batch. Here a seed counts the same in any
            batch, and the loss of an epoch is torch's weighted mean over the whole split.
    """
    ops = torch.ops.aten
    log_shares = torch.log_softmax(scores, 1)
    # 2 is reduction="sum", and -100 stands for no label
    loss, total_weight = ops.nll_loss_forward.default(log_shares, labels, weight, 2, -100)
    gradient = ops.nll_loss_backward.default(
        log_shares.new_tensor(scale), log_shares, labels, weight, 2, -100, total_weight
    )
    return loss, ops._log_softmax_backward_data.default(gradient, log_shares, 1, scores.dtype)


def balanced_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Return scikit-learn's balanced weight of each class, float32 [num_classes]: num_nodes /
    (num_present_classes * count) over the train nodes with these labels, 0 for a class without."""
    counts = torch.bincount(labels, minlength=num_classes).numpy()
    weights = np.divide(1.0, counts, out=np.zeros(num_classes), where=counts > 0)
    # weights @ counts is the number of present classes
    return torch.from_numpy((weights * (counts.sum() / (weights @ counts))).astype(np.float32))


class Learner:
    """A model with Adam (Kingma and Ba 2015), on this rank's device."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        device: torch.device,
        ranks: Ranks,
        log: EventLog,
        balanced: Tensor | None = None,  # see `balanced_weights`
    ):
        self.config = config
        self.device = device
        self.ranks = ranks
        self.log = log
        self.class_weight: Tensor | None = None  # see `loss_and_gradient`
        if config.class_weight == "balanced" and balanced is not None:
            self.class_weight = balanced.to(device)
        self.model = model.to(device)
        self.call = Call.of(model, config.precision)
        self.share_model()  # a custom model may draw its weights from any random state
        values = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(
            values,
            lr=config.lr,
            weight_decay=config.weight_decay,
            # One kernel for all: a step of six small parameters takes 0.04 instead of 0.11 ms.
            fused=all(value.is_floating_point() for value in values),  # it refuses complex ones
        )
        self.scaler = torch.amp.GradScaler(enabled=config.precision == "fp16")
        self.parts: dict[str, Stateful] = {  # by their names in a checkpoint
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
        }
        # sum over this rank's seeds of the epoch
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.batches_per_step = config.accumulate * ranks.num_ranks  # over all ranks
        self._num_batches = 0  # so far in the current epoch or evaluation, for release_every

    def share_model(self) -> None:
        """Copy the first rank's weights and buffers to all ranks."""
        self.ranks.share([*self.model.parameters(), *self.model.buffers()])

    def begin(self, epoch: int = 0) -> None:
        """Prepare the model for training epoch `epoch`, or for an evaluation if it is 0."""
        self.model.train(epoch > 0)
        self._num_batches = 0

    def is_finite(self) -> bool:
        """Whether the loss so far, the weights and the optimizer's moments are finite."""
        moments = (value for state in self.optimizer.state.values() for value in state.values())
        weights = (value for value in self.model.state_dict().values() if isinstance(value, Tensor))
        return all(
            bool(torch.isfinite(piece).all())
            for value in (self.loss_sum, *weights, *moments)
            # `isfinite` of a whole tensor needs 1.75 times its memory
            for piece in value.flatten().split(_PIECE_VALUES)
        )

    @torch.no_grad()
    def predict(self, batch: Data) -> Tensor:
        """Return each seed's class of the highest score, int64 [batch_size] on the CPU; -1 for NaN."""
        scores = self.call(self.model, batch, self.device)
        return scores.argmax(dim=-1).masked_fill(scores.isnan().any(dim=-1), -1).cpu()

    def step(self, batches: Iterator[Data], epoch: int, begin: int, end: int) -> None:
        """Take one optimizer step with the mean gradient over the seeds at positions `begin` to
        `end` - 1 of the epoch's order; `batches` yields this rank's batches from there on."""
        self.optimizer.zero_grad()
        # a resumed run would start with the first rank's buffers, so each step does
        self.ranks.share(self.model.buffers())
        loss_sum = self.loss_sum
        fused = False  # whether the last batch was computed by `fused_sage`
        self.scaler.scale(loss_sum)  # creates the scale, also on a rank without a batch
        size = self.config.batch_size
        # the ranks take the step's batches in turn; at an epoch's end some may have none
        for _ in range(begin + self.ranks.rank * size, end, self.ranks.num_ranks * size):
            batch = next(batches)
            # Dropout is a function of (seed, epoch, batch), like the choice of neighbors.
            key = int(batch_key(np.uint64(self.config.seed), epoch, int(batch.input_id[0])))
            torch.default_generator.manual_seed(key)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(key)
            loss, fused = self._add_gradients(batch, 1 / (end - begin))
            loss_sum = loss_sum + loss  # a new tensor, so `self.loss_sum` keeps its value
            # else 126 MB for [15, 10, 5] x 1024 stay in memory while the next batch is made
            del batch
            self.after_batch()
        self.ranks.sum_gradients(self.model.parameters())  # waits for all ranks
        # one thread, as in the other small operations of a fused step
        with torch_threads(1 if fused else torch.get_num_threads()):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.loss_sum = loss_sum  # only now: a step may be interrupted while it waits for a batch

    def _add_gradients(self, batch: Data, scale: float) -> tuple[Tensor, bool]:
        """Add the gradients of `scale` times the loss of a batch; return the loss, and whether
        fused layers computed it, without autograd."""
        labels = batch.y[: batch.batch_size].to(self.device, torch.int64)  # of the seeds
        differentiate = functools.partial(
            loss_and_gradient, labels=labels, scale=scale, weight=self.class_weight
        )
        model = self.model
        # A class derived from GNN may have another forward.
        if type(model) is GNN and self.device.type == "cpu" and model.fuses(batch.x):
            return model.add_gradients(batch, differentiate), True
        scores = self.call(model, batch, self.device)
        loss, gradient = differentiate(scores.detach())
        scores.backward(self.scaler.scale(gradient))  # type: ignore[no-untyped-call]
        return loss, False

    def after_batch(self) -> None:
        """Record the GPU's memory if one is used; every `release_every` batches release unused
        memory and record how much."""
        self._num_batches += 1
        self.log.cuda()
        if self.config.release_every and self._num_batches % self.config.release_every == 0:
            self.log.mark("release", after=f"batch {self._num_batches}", **release_memory())


def allocations(work: Callable[[], object]) -> list[int]:
    """Return the bytes that torch's CPU allocator hands out and (below zero) gets back, in order."""
    # at a lower level, two lines are written to stderr at the first profile
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    results: Any = record.profiler
    events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def peak_of(sizes: Iterable[int]) -> int:
    return max(itertools.accumulate(sizes, initial=0))  # sizes below zero are freed


def _memory(work: Callable[[Data], object], batches: Sequence[Data]) -> tuple[float, float]:
    """Measure the memory of a step on two batches: fixed bytes, and bytes per node or edge."""
    steps = [allocations(functools.partial(work, batch)) for batch in batches]
    # Gradients of an embedding have the same size in both steps. Their peak counts by itself:
    # in a small batch they would hide the arrays that grow with it.
    same = set.intersection(*({*map(abs, sizes)} for sizes in steps))
    fixed = max(peak_of(size for size in sizes if abs(size) in same) for sizes in steps)
    small, large = (peak_of(size for size in sizes if abs(size) not in same) for sizes in steps)
    counts = [batch.num_nodes + batch.num_edges for batch in batches]
    rate = (large - small) / (counts[1] - counts[0])  # of the line through both peaks
    return fixed + large - rate * counts[1], rate


def _step_s(learner: Learner, batch: Data) -> float:  # CPU seconds, of the faster of two steps
    learner.begin(epoch=1)
    end = learner.config.batch_size
    step = functools.partial(learner.step, itertools.repeat(batch), epoch=1, begin=0, end=end)
    with torch_threads(1):
        # CPU time, as in `machine.probe`: a login node has other users
        return min(timeit.repeat(step, timer=time.thread_time, repeat=2, number=1))


def measure_step(
    config: TrainConfig,
    make: Callable[[], nn.Module],
    num_features: int,
    shapes: Iterable[Mapping[str, Sequence[int]]],
) -> dict[str, object]:
    """Measure a model that `make` returns, as `forecast.step_memory._Trial` keeps it: its state,
    the memory (see `_memory`) of two random batches, and the time of a step on a third, expressed
    in operations. `shapes` are the arguments of `random_batch` for each of the three."""
    *batches, timed = [random_batch(**shape, num_features=num_features) for shape in shapes]
    learners: list[Learner] = []  # the one that the call of `allocations` below creates
    created = allocations(
        lambda: learners.append(
            Learner(config, make(), torch.device("cpu"), Ranks(), EventLog(None))
        )
    )
    [learner] = learners
    learner.scaler = torch.amp.GradScaler(enabled=False)  # else it may skip a step

    def train(batch: Data) -> None:
        learner.begin(epoch=1)
        # With `accumulate`, a step adds gradients to those of its earlier batches. From the second
        # batch on memory is the same.
        end = config.batch_size * min(2, config.accumulate)
        learner.step(itertools.repeat(batch), epoch=1, begin=0, end=end)

    def evaluate(batch: Data) -> None:
        learner.begin()
        learner.predict(batch)

    try:
        # the first step creates gradients and moments
        created += allocations(functools.partial(train, batches[0]))
        training = _memory(train, batches)
        evaluation = _memory(evaluate, batches)
        # the operations that matrix products do in a step's time: a measure for any machine
        flops = probe().products_per_s(config.precision, threads=1) * _step_s(learner, timed)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(
            f"{config.model}: a training step fails on a random batch: {' '.join(str(error).split())}"
        ) from None
    # numpy's arrays (not resizable) are not in `created`; by address, so a shared one counts once
    arrays = {
        value.data_ptr(): value.nbytes
        for value in (*learner.model.parameters(), *learner.model.buffers())
        if not value.untyped_storage().resizable()
    }
    return {
        "state_bytes": sum(created) + sum(arrays.values()),
        "training": training,
        "evaluation": evaluation,
        "flops_per_row": flops / (timed.num_nodes + timed.num_edges),  # a row: a node or an edge
    }
