"""GraphSAGE's layers and their gradients on the CPU, for edges sorted by target.

PyG's `SAGEConv` makes a new large array each for the mean, two products, their sum and the ReLU.
Autograd makes three more: for the gradients of the slice of targets and of the mean, and for their
sum. Here the neighbors' mean and the targets' own features lie side by side, and each gradient is
written once. A training step of [3, 2] x 128 x 16 (num_neighbors x batch_size x hidden_channels)
took 1.0 instead of 1.4 ms. Threads share a layer in parts of `PART_ROWS` rows. A float32 layer of
one part adds in PyG's order, so its results have the same bits.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from ..graph.npz import Array
from ..io.half_floats import narrowed, widened
from ..kernels import kernel, kernel_with, prefetch
from .models.sage import PART_ROWS

T = TypeVar("T")
# For each layer: its input, the output of `_gather` (None: gather again), the bounds of its edges,
# and its two weight matrices.
_Tape: TypeAlias = list[tuple[Tensor, Tensor | None, Array, list[Tensor]]]


@kernel
def bounds_of(sources: Array, targets: Array, sizes: Array, bounds: Array) -> bool:
    """Write to `bounds` where each target's edges begin; return whether the edges are valid.

    Entries after the last target with edges get the number of edges. Edges are valid if their
    targets ascend and all ids exist in their layer. `sizes` has the number of nodes that each layer
    reads, from the first layer on, and the number that the last layer writes.
    """
    t = 0
    layer = len(sizes) - 2
    for e in range(len(targets)):
        while layer > 0 and targets[e] >= sizes[layer + 1]:
            layer -= 1  # the last layer that computes this target
        if (
            targets[e] < max(0, t - 1)
            or targets[e] >= sizes[1]
            or sources[e] < 0
            or sources[e] >= sizes[layer]
        ):
            return False
        while t <= targets[e]:
            bounds[t] = e
            t += 1
    bounds[t:] = len(targets)
    return True


@kernel
def _gather(begin: int, end: int, bounds: Array, col: Array, x: Array, out: Array) -> None:
    """Write rows `begin` to `end` of `out`, one for each target: the mean of its neighbors' rows of
    `x`, then its own row."""
    width = x.shape[1]
    line = 64 // x.itemsize
    total = np.zeros(width, np.float32)
    for t in range(begin, end):
        first = bounds[t]
        last = bounds[t + 1]
        # with prefetching, 14 instead of 20 ms for [15, 10, 5] x 1024
        for e in range(first + 6, min(last + 6, len(col))):
            for c in range(0, width, line):
                prefetch(x, col[e] * width + c)
        total[:] = 0
        # two edges at a time, added in the same order: 10 instead of 12 ms a step
        for e in range(first, last - 1, 2):
            neighbor = x[col[e]]
            second = x[col[e + 1]]
            for c in range(width):
                total[c] = (total[c] + widened(neighbor[c])) + widened(second[c])
        for e in range(last - (last - first) % 2, last):
            neighbor = x[col[e]]
            for c in range(width):
                total[c] += widened(neighbor[c])
        # Views of rows, because LLVM makes no vector instructions for `out[t, c]`: 500 rows take 13
        # instead of 47 us.
        degree = np.float32(max(1, last - first))
        mean = out[t, :width]
        root = out[t, width:]
        row = x[t]
        for c in range(width):
            mean[c] = narrowed(total[c] / degree, mean[c])
        for c in range(width):
            root[c] = narrowed(widened(row[c]), root[c])


@kernel
def _by_source(bounds: Array, col: Array, num_sources: int) -> tuple[Array, Array]:
    ends = np.zeros(num_sources + 1, np.int64)
    targets = np.empty(bounds[-1], np.int64)
    for e in range(bounds[-1]):
        ends[col[e] + 1] += 1
    for s in range(num_sources):
        ends[s + 1] += ends[s]
    at = ends[:-1].copy()
    for t in range(len(bounds) - 1):
        for e in range(bounds[t], bounds[t + 1]):
            targets[at[col[e]]] = t
            at[col[e]] += 1
    return ends, targets


# "contract": multiply and add with one rounding, as torch's sparse product does in its backward
# pass.
@kernel_with(fastmath={"contract"})
def _spread(
    begin: int,
    end: int,
    bounds: Array,
    ends: Array,
    targets: Array,
    grads: Array,
    x: Array,
    scale: float,
    out: Array,
) -> None:
    """Write rows `begin` to `end` of the gradient of `x` to `out`, from `grads`, the gradients of
    `_gather`'s output.

    `x` is the output of a ReLU and of dropout that kept a share of 1 / `scale`. So the gradient is 0
    where `x` is 0, and is multiplied by `scale` elsewhere.
    """
    width = x.shape[1]
    zero = np.float32(0)
    factor = np.float32(scale)
    total = np.empty(width, np.float32)
    for s in range(begin, end):
        total[:] = zero
        for e in range(ends[s], ends[s + 1]):
            t = targets[e]
            share = np.float32(1) / np.float32(bounds[t + 1] - bounds[t])
            for c in range(width):
                total[c] += widened(grads[t, c]) * share
        if s < len(bounds) - 1:
            for c in range(width):
                total[c] += widened(grads[s, width + c])
        for c in range(width):
            out[s, c] = narrowed(zero if widened(x[s, c]) <= zero else total[c] * factor, out[s, c])


@functools.cache
def _numpys_blas() -> ThreadpoolController:
    # With AVX2 on AMD, OpenBLAS reaches 73 to 82 GFLOP/s a core in the products of one part, and
    # torch's MKL 68 to 72.
    return ThreadpoolController().select(user_api="blas")


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="sage")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


# Torch's threads share a layer of one part if it needs more multiplications than this, for which
# one thread takes 7 ms.
_LARGE = 2**28


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Limit torch's operations in this thread to `number` threads inside the block.

    A thread that first uses torch meanwhile keeps this limit. Torch's threads wait in a loop for
    one whose core is busy sampling the next batch. With a limit of 1 around the small operations,
    too, two cores make 17 instead of 14 steps of [15, 10, 5] x 1024 x 64 a second.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _share(work: Callable[[slice], T], parts: list[slice], threads: int, size: int = 0) -> list[T]:
    """Return `work(part)` for all parts, shared by `threads` threads, each with one torch thread.

    A single part is computed in the calling thread. If its number of multiplications, `size`, is
    above `_LARGE`, torch uses `threads` threads for it.
    """
    if len(parts) == 1:
        with torch_threads(threads) if size > _LARGE else contextlib.nullcontext():
            return [work(parts[0])]
    inference = torch.is_inference_mode_enabled()  # each thread has its own mode

    def take(part: slice) -> T:
        with torch.inference_mode(inference):
            return work(part)

    # a new thread of the pool keeps the limit at its first use of torch, see `torch_threads`
    with _numpys_blas().limit(limits=1), torch_threads(1):
        return [*_pool(threads).map(take, parts)]


# The integers that numba gets in place of these floats; see `io.half_floats.widened`.
_BITS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}


def _values(x: Tensor) -> Array:
    return (x.view(_BITS[x.dtype]) if x.dtype in _BITS else x.detach()).numpy()


def _parts(count: int) -> list[slice]:
    return [
        slice(begin, min(begin + PART_ROWS, count)) for begin in range(0, max(1, count), PART_ROWS)
    ]


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    if left.dtype != torch.float32:
        return torch.mm(left, right, out=out)
    return torch.from_numpy(
        np.dot(left.numpy(), right.numpy(), out=None if out is None else out.numpy())
    )


class Layers(NamedTuple):
    """GraphSAGE layers, with ReLU and dropout between them.

    Each layer computes `mean(x[neighbors]) @ weight_l.T + bias + x[targets] @ weight_r.T`.

    Args:
        x: float32 or float16 [num_sources, channels], on the CPU, the targets first; float16 is
            widened whenever it is read.
        bounds: int64 [num_targets + 1], bounds of each target's edges in `col`.
        col: int64, the edges' sources.
        targets: Number of nodes that each layer computes.
        dropout: Probability of dropping a value, 0 in an evaluation.
        weights: weight_l, bias and weight_r of each layer, float32.
        dtype: Type of the products and of each layer's output, float32 or bfloat16; sums over
            neighbors are float32.
        threads: Number of threads that share the parts of a layer.
    """

    x: Tensor
    bounds: Array
    col: Array
    targets: list[int]
    dropout: float
    weights: list[Tensor]
    dtype: torch.dtype
    threads: int = 1

    def _layer(
        self, x: Tensor, edges: Array, weights: list[Tensor], hidden: bool
    ) -> tuple[Tensor, Tensor]:
        weight_l, bias, weight_r = weights
        count = len(edges) - 1
        width = x.shape[1]
        values = _values(x)
        both = bias.new_empty(count, 2 * width)
        out = bias.new_empty(count, len(bias))
        array = _values(both)
        parts = _parts(count)
        as_pyg = len(parts) == 1 and bias.dtype == torch.float32  # add in PyG's order
        weight = bias if as_pyg else torch.cat([weight_l, weight_r], 1).t()

        def compute(rows: slice) -> None:
            _gather(rows.start, rows.stop, edges, self.col, values, array)
            if as_pyg:
                part = torch.addmm(bias, both[:, :width], weight_l.t(), out=out)
                part += both[:, width:] @ weight_r.t()
            else:
                part = _product(both[rows], weight, out[rows])
                part += bias
            if hidden:
                part.relu_()

        _share(compute, parts, self.threads, both.numel() * len(bias))
        return both, out

    def _gradients(
        self,
        x: Tensor,
        both: Tensor | None,
        edges: Array,
        weights: list[Tensor],
        grad: Tensor,
        scale: float | None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the gradients of a layer's weights and bias, float32, and the gradient of `x`.

        The gradient of `x` is None if `scale` is None; see `_spread`. `both`, the output of
        `_gather`, is overwritten; if it is None, it is gathered again.
        """
        width = x.shape[1]
        values = _values(x)
        again = both is None
        parts = _parts(len(grad))
        means = grad.new_empty(len(grad), 2 * width) if both is None else both
        array = _values(means)
        halves = (means[:, :width], means[:, width:])
        as_pyg = len(parts) == 1 and grad.dtype == torch.float32
        weight = grad if as_pyg else torch.cat(weights, 1)

        def differentiate(rows: slice) -> list[Tensor]:
            if again:
                _gather(rows.start, rows.stop, edges, self.col, values, array)
            if as_pyg:
                products = [grad.t() @ half for half in halves]
                if scale is not None:
                    for matrix, half in zip(weights, halves, strict=True):
                        torch.mm(grad, matrix, out=half)
                return [*products, grad.sum(0)]
            part = grad[rows]
            product = _product(part.t(), means[rows]).float()
            if scale is not None:
                _product(part, weight, means[rows])
            return [product[:, :width], product[:, width:], part.sum(0, dtype=torch.float32)]

        # The parts and the order of their sums do not depend on the number of threads, so the bits
        # of the results do not either.
        total, *later_parts = _share(
            differentiate, parts, self.threads, means.numel() * grad.shape[1]
        )
        for part in later_parts:
            for gradient_sum, more in zip(total, part, strict=True):
                gradient_sum += more
        weight_l, weight_r, bias = total
        gradients = [weight_l, bias, weight_r]
        if scale is None:
            return gradients, None
        into = torch.empty_like(x)
        arguments = edges, *_by_source(edges, self.col, len(x)), array, values, scale, _values(into)
        _share(
            lambda rows: _spread(rows.start, rows.stop, *arguments), _parts(len(x)), self.threads
        )
        return gradients, into

    def forward(self, keep: str) -> tuple[Tensor, _Tape]:
        """Return the last layer's output, and the tape for `backward`.

        `keep` says what the tape contains: "nothing", each layer's "input" (the backward pass then
        gathers the means again, for activation checkpointing), or "all".
        """
        tape: _Tape = []
        x = self.x
        last = len(self.targets) - 1
        for layer, count in enumerate(self.targets):
            weights = [
                value.detach().to(self.dtype) for value in self.weights[3 * layer : 3 * layer + 3]
            ]
            edges = self.bounds[: count + 1]
            both, out = self._layer(x, edges, weights, layer < last)
            if self.dropout and layer < last:
                out *= torch.empty_like(out).bernoulli_(1 - self.dropout).div_(1 - self.dropout)
            if keep != "nothing":
                tape.append((x, both if keep == "all" else None, edges, weights[::2]))
            del both
            x = out
        return x, tape

    def backward(self, tape: _Tape, grad: Tensor) -> list[Tensor]:
        """Return the gradients of the weights, float32, and empty `tape`, which comes from
        `forward`. `grad` is the gradient of the loss with respect to its output."""
        gradients = list[Tensor]()
        grad = grad.to(self.dtype)
        # rounded as in `forward`
        scale = float(torch.ones((), dtype=self.dtype).div_(1 - self.dropout))
        while tape:
            x, both, edges, weights = tape.pop()
            layer_gradients, into = self._gradients(
                x, both, edges, weights, grad, scale if tape else None
            )
            gradients = layer_gradients + gradients
            if into is not None:
                grad = into
            del x, both
        return gradients


def compile_layer() -> None:
    """Compile the kernels of `Layers`, or load them from disk; see
    `windows.window.compile_kernels`."""
    none = np.zeros(1, np.int64)
    row = torch.ones(1, 1)
    bounds_of(none[:0], none[:0], none, none)
    ends, targets = _by_source(none, none, 0)
    for out in (row, row.bfloat16()):
        grads = _values(out)
        for x in (row, row.half(), out):
            _gather(0, 0, none, none, _values(x), grads)
        _spread(0, 0, none, ends, targets, grads, grads, 0.0, grads)
