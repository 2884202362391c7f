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
# What the backward pass needs of each layer, from the first layer on: its input x, the output of
# `_gather` (None: gather again), the bounds of its edges, and [weight_l, weight_r]; see `Layers`.
_Tape: TypeAlias = list[tuple[Tensor, Tensor | None, Array, list[Tensor]]]


@kernel
def bounds_of(sources: Array, targets: Array, sizes: Array, bounds: Array) -> bool:
    """Write the CSR bounds of a batch's edges to `bounds`; return whether the edges are valid.

    Edges are valid if their targets ascend and all ids exist in their layer.

    Args:
        sources: int64 [num_edges], row 0 of `edge_index`; `targets` is its row 1.
        sizes: int64 [num_layers + 1], the number of nodes that each layer reads, from the first
            layer on, then the number that the last layer writes.
        bounds: int64 [sizes[1] + 1]; target t has the edges bounds[t] to bounds[t + 1] - 1.
    """
    t = 0  # the first target whose bound is not yet written
    layer = len(sizes) - 2  # layer i reads sizes[i] nodes and writes sizes[i + 1]
    for e in range(len(targets)):
        while layer > 0 and targets[e] >= sizes[layer + 1]:
            layer -= 1  # the last layer that computes this target
        if (
            targets[e] < max(0, t - 1)  # below the previous edge's target, or negative
            or targets[e] >= sizes[1]
            or sources[e] < 0
            or sources[e] >= sizes[layer]
        ):
            return False
        while t <= targets[e]:  # targets without edges get the same bound
            bounds[t] = e
            t += 1
    bounds[t:] = len(targets)
    return True


@kernel
def _gather(begin: int, end: int, bounds: Array, col: Array, x: Array, out: Array) -> None:
    """Write rows `begin` to `end` - 1 of `out` [num_targets, 2 * width]: of each target the mean of
    its neighbors' rows of `x` [num_sources, width], then the target's own row.

    `bounds` and `col`, the edges' sources, are as in `Layers`; `x` and `out` as from `_values`.
    """
    width = x.shape[1]
    line = 64 // x.itemsize  # values in a cache line of 64 bytes
    total = np.zeros(width, np.float32)
    for t in range(begin, end):
        first = bounds[t]
        last = bounds[t + 1]
        # Prefetch the rows of the edges 6 places ahead: 14 instead of 20 ms for [15, 10, 5] x 1024.
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
        for e in range(last - (last - first) % 2, last):  # the last edge of an odd number
            neighbor = x[col[e]]
            for c in range(width):
                total[c] += widened(neighbor[c])
        degree = np.float32(max(1, last - first))  # the mean of no neighbors is 0
        # Views of rows, because LLVM makes no vector instructions for `out[t, c]`: 500 rows take 13
        # instead of 47 us.
        mean = out[t, :width]
        root = out[t, width:]
        row = x[t]  # a layer's targets are the first of its sources
        for c in range(width):
            mean[c] = narrowed(total[c] / degree, mean[c])  # mean[c]: only for its type
        for c in range(width):
            root[c] = narrowed(widened(row[c]), root[c])


@kernel
def _by_source(bounds: Array, col: Array, num_sources: int) -> tuple[Array, Array]:
    # Sort a layer's edges by source, with a counting sort: source s has the edges ends[s] to
    # ends[s + 1] - 1, and these edges have the targets targets[ends[s]], ... in ascending order.
    ends = np.zeros(num_sources + 1, np.int64)
    targets = np.empty(bounds[-1], np.int64)  # `col` may have edges of earlier layers after these
    for e in range(bounds[-1]):
        ends[col[e] + 1] += 1
    for s in range(num_sources):
        ends[s + 1] += ends[s]
    at = ends[:-1].copy()  # the place of each source's next edge
    for t in range(len(bounds) - 1):
        for e in range(bounds[t], bounds[t + 1]):
            targets[at[col[e]]] = t
            at[col[e]] += 1
    return ends, targets


# "contract": multiply and add with one rounding, as in the backward pass of torch's sparse product
@kernel_with(fastmath={"contract"})
def _spread(
    begin: int,
    end: int,
    bounds: Array,  # int64 [num_targets + 1], by target as in `Layers`
    ends: Array,  # int64 [num_sources + 1], by source as from `_by_source`
    targets: Array,  # int64 [num_edges], as from `_by_source`
    grads: Array,  # [num_targets, 2 * width], gradients of `_gather`'s output
    x: Array,  # [num_sources, width]
    scale: float,
    out: Array,  # [num_sources, width]
) -> None:
    """Write rows `begin` to `end` - 1 of the gradient of `x` to `out`.

    `x` is the output of a ReLU and of dropout that kept a share of 1 / `scale`. So the gradient is 0
    where `x` is 0, and is multiplied by `scale` elsewhere.
    """
    width = x.shape[1]
    zero = np.float32(0)
    factor = np.float32(scale)
    total = np.empty(width, np.float32)
    for s in range(begin, end):
        total[:] = zero
        for e in range(ends[s], ends[s + 1]):  # s is a neighbor of t: its share of t's mean
            t = targets[e]
            share = np.float32(1) / np.float32(bounds[t + 1] - bounds[t])
            for c in range(width):
                total[c] += widened(grads[t, c]) * share
        if s < len(bounds) - 1:  # s is a target, too: the gradient of its own row
            for c in range(width):
                total[c] += widened(grads[s, width + c])
        for c in range(width):
            out[s, c] = narrowed(zero if widened(x[s, c]) <= zero else total[c] * factor, out[s, c])


@functools.cache
def _numpys_blas() -> ThreadpoolController:
    # Controls the threads of numpy's OpenBLAS. `_product` uses it for float32: with AVX2 on AMD
    # it reaches 73 to 82 GFLOP/s a core on the rows of one part, and torch's MKL 68 to 72.
    return ThreadpoolController().select(user_api="blas")


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="sage")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


_LARGE = 2**28  # multiplications (7 ms in one thread) above which torch's threads share one part


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
    inference = torch.is_inference_mode_enabled()  # a thread of the pool has its own mode

    def take(part: slice) -> T:
        with torch.inference_mode(inference):
            return work(part)

    # a new thread of the pool keeps the limit at its first use of torch, see `torch_threads`
    with _numpys_blas().limit(limits=1), torch_threads(1):
        return [*_pool(threads).map(take, parts)]


# The integers that numba gets in place of these floats; see `io.half_floats.widened`.
_BITS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}


def _values(x: Tensor) -> Array:  # a view of the tensor's memory, for kernels
    return (x.view(_BITS[x.dtype]) if x.dtype in _BITS else x.detach()).numpy()


def _parts(num_rows: int) -> list[slice]:  # for `_share`
    begins = range(0, max(1, num_rows), PART_ROWS)  # without rows one empty part, for a result
    return [slice(begin, min(begin + PART_ROWS, num_rows)) for begin in begins]


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    if left.dtype != torch.float32:
        return torch.mm(left, right, out=out)
    into = None if out is None else out.numpy()
    return torch.from_numpy(np.dot(left.numpy(), right.numpy(), out=into))  # see `_numpys_blas`


class Layers(NamedTuple):
    """GraphSAGE layers, with ReLU and dropout between them.

    Each layer computes `mean(x[neighbors]) @ weight_l.T + bias + x[targets] @ weight_r.T`.

    Args:
        x: float32 or float16 [num_sources, channels], on the CPU, the targets first; float16 is
            widened whenever it is read.
        bounds: int64 [num_targets + 1], bounds of each target's edges in `col`.
        col: int64 [num_edges], the edges' sources.
        targets: Number of nodes that each layer computes.
        dropout: Probability of dropping a value, 0 in an evaluation.
        weights: weight_l [outputs, inputs], bias [outputs] and weight_r [outputs, inputs] of each
            layer, float32.
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
        self, x: Tensor, bounds: Array, weights: list[Tensor], hidden: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the means and own rows [num_targets, 2 * inputs], as `_gather` writes them, and
        the layer's output [num_targets, outputs], after ReLU in a `hidden` layer."""
        weight_l, bias, weight_r = weights
        num_targets = len(bounds) - 1
        width = x.shape[1]
        gathered = bias.new_empty(num_targets, 2 * width)
        out = bias.new_empty(num_targets, len(bias))
        parts = _parts(num_targets)
        as_pyg = len(parts) == 1 and bias.dtype == torch.float32  # add in PyG's order
        weight = bias if as_pyg else torch.cat([weight_l, weight_r], 1).t()  # as_pyg: unused

        def compute(rows: slice) -> None:
            _gather(rows.start, rows.stop, bounds, self.col, _values(x), _values(gathered))
            if as_pyg:
                part = torch.addmm(bias, gathered[:, :width], weight_l.t(), out=out)
                part += gathered[:, width:] @ weight_r.t()
            else:
                part = _product(gathered[rows], weight, out[rows])
                part += bias
            if hidden:
                part.relu_()

        _share(compute, parts, self.threads, gathered.numel() * len(bias))
        return gathered, out

    def _gradients(
        self,
        x: Tensor,
        gathered: Tensor | None,
        bounds: Array,
        weights: list[Tensor],
        grad: Tensor,
        scale: float | None,
    ) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of weight_l, bias and weight_r, float32, and the gradient of `x`.

        `grad` [num_targets, outputs] is the gradient of the layer's output, `weights` is
        [weight_l, weight_r]. The gradient of `x` is empty if `scale` is None; see `_spread`.
        `gathered`, the output of `_gather`, is overwritten; if it is None, it is gathered again.
        """
        width = x.shape[1]
        parts = _parts(len(grad))
        # the output of `_gather`, overwritten in place by its gradient
        buffer = grad.new_empty(len(grad), 2 * width) if gathered is None else gathered
        halves = (buffer[:, :width], buffer[:, width:])  # means, own rows
        as_pyg = len(parts) == 1 and grad.dtype == torch.float32  # multiply as PyG does
        weight = grad if as_pyg else torch.cat(weights, 1)  # as_pyg: unused

        def differentiate(rows: slice) -> list[Tensor]:  # of weight_l, weight_r and bias
            if gathered is None:
                _gather(rows.start, rows.stop, bounds, self.col, _values(x), _values(buffer))
            if as_pyg:
                products = [grad.t() @ half for half in halves]
                if scale is not None:
                    for matrix, half in zip(weights, halves, strict=True):
                        torch.mm(grad, matrix, out=half)
                return [*products, grad.sum(0)]
            part = grad[rows]
            product = _product(part.t(), buffer[rows]).float()  # before `buffer` is overwritten
            if scale is not None:
                _product(part, weight, buffer[rows])
            return [product[:, :width], product[:, width:], part.sum(0, dtype=torch.float32)]

        # The parts and the order of their sums do not depend on the number of threads, so the bits
        # of the results do not either.
        work = buffer.numel() * grad.shape[1]  # multiplications
        (weight_l, weight_r, bias), *later_parts = _share(differentiate, parts, self.threads, work)
        for part in later_parts:
            for gradient_sum, more in zip((weight_l, weight_r, bias), part, strict=True):
                gradient_sum += more
        if scale is None:
            return [weight_l, bias, weight_r], x.new_empty(0)
        x_grad = torch.empty_like(x)
        by_source = _by_source(bounds, self.col, len(x))
        arguments = bounds, *by_source, _values(buffer), _values(x), scale, _values(x_grad)
        _share(
            lambda rows: _spread(rows.start, rows.stop, *arguments), _parts(len(x)), self.threads
        )
        return [weight_l, bias, weight_r], x_grad

    def forward(self, keep: str) -> tuple[Tensor, _Tape]:
        """Return the last layer's output, and the tape for `backward`.

        `keep` says what the tape contains: "nothing", each layer's "input" (the backward pass then
        gathers the means again, for activation checkpointing), or "all".
        """
        tape: _Tape = []
        x = self.x
        last = len(self.targets) - 1
        for layer, num_targets in enumerate(self.targets):
            of_layer = self.weights[3 * layer : 3 * layer + 3]  # weight_l, bias, weight_r
            weights = [value.detach().to(self.dtype) for value in of_layer]
            bounds = self.bounds[: num_targets + 1]
            gathered, out = self._layer(x, bounds, weights, hidden=layer < last)
            if self.dropout and layer < last:
                out *= torch.empty_like(out).bernoulli_(1 - self.dropout).div_(1 - self.dropout)
            if keep != "nothing":
                tape.append((x, gathered if keep == "all" else None, bounds, weights[::2]))
            del gathered  # freed before the next layer, unless the tape has it
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
            x, gathered, bounds, weights = tape.pop()
            # the features, x of the first layer, need no gradient
            layer_gradients, grad = self._gradients(
                x, gathered, bounds, weights, grad, scale if tape else None
            )
            gradients = layer_gradients + gradients
            del x, gathered  # freed before the next layer
        return gradients


def compile_layer() -> None:
    """Compile the kernels of `Layers`, or load them from disk."""
    none = np.zeros(1, np.int64)  # bounds of no edges; the kernels below compute no rows
    row = torch.ones(1, 1)
    bounds_of(none[:0], none[:0], none, none)
    ends, targets = _by_source(none, none, 0)
    for out in (row, row.bfloat16()):  # `dtype` of `Layers`
        grads = _values(out)
        for x in (row, row.half(), out):  # features in float32 or float16; a layer's output
            _gather(0, 0, none, none, _values(x), grads)
        _spread(0, 0, none, ends, targets, grads, grads, 0.0, grads)
