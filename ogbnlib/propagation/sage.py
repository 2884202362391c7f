"""GraphSAGE's layer as one autograd function on the CPU, for edges in ascending order of their targets.

PyG's `SAGEConv` makes each large array anew for the mean, two products, their sum and the ReLU, and its backward pass
for the gradients of the slice of targets, of the mean, and their sum. Here the neighbors' mean and the targets' own
features lie side by side, so that one product makes the output, and each gradient is written once.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..graph.bits import kernel

_PART_BYTES = 2**20  # of the output of a thread, from which on starting it (0.05 ms) pays


@kernel
def _gather(begin: Any, end: Any, crow: Any, col: Any, x: Any, out: Any) -> None:
    """Write the mean of the neighbors' rows of `x` and the own row of the targets from `begin` to `end`."""
    width, zero = x.shape[1], out.dtype.type(0)
    for t in range(begin, end):
        first, last = crow[t], crow[t + 1]
        if last > first:
            source = col[first]
            for c in range(width):
                out[t, c] = x[source, c]
        else:
            for c in range(width):
                out[t, c] = zero
        for e in range(first + 1, last):
            source = col[e]
            for c in range(width):
                out[t, c] += x[source, c]
        if last > first + 1:
            degree = out.dtype.type(last - first)
            for c in range(width):
                out[t, c] /= degree
        for c in range(width):
            out[t, width + c] = x[t, c]


@kernel
def _spread(begin: Any, end: Any, crow: Any, col: Any, grads: Any, x: Any, masked: Any, out: Any) -> None:
    """Write columns `begin` to `end` of the gradient of `x`; `grads` are those of `_gather`'s output.

    `masked`: x is the output of a ReLU, and its gradient is 0 where x is 0.
    """
    # Rows as slices, whose indices begin at 0: numba vectorizes no loop whose index may be negative (5 times slower).
    width, targets, zero = x.shape[1], len(crow) - 1, out.dtype.type(0)
    for t in range(targets):
        out[t, begin:end] = grads[t, width + begin : width + end]
    for s in range(targets, len(out)):
        out[s, begin:end] = zero
    for t in range(targets):
        first, last = crow[t], crow[t + 1]
        grad, degree = grads[t, begin:end], out.dtype.type(last - first)
        if last > first + 1:
            for c in range(len(grad)):
                grad[c] /= degree
        for e in range(first, last):
            into = out[col[e], begin:end]
            for c in range(len(into)):
                into[c] += grad[c]
    if masked:
        for s in range(len(out)):
            into, value = out[s, begin:end], x[s, begin:end]
            for c in range(len(into)):
                into[c] = zero if value[c] <= zero else into[c]


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="sage")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def _in_parts(work: Callable[..., None], count: int, out: Tensor, *arguments: Any) -> None:
    """Call `work(begin, end, ..., out)` for parts of range(count), one a thread; their number changes no result."""
    arrays = [value.detach().numpy() if isinstance(value, Tensor) else value for value in (*arguments, out)]
    parts = max(1, min(torch.get_num_threads(), out.nbytes // _PART_BYTES))
    bounds = [count * part // parts for part in range(parts + 1)]
    others = [_pool(torch.get_num_threads()).submit(work, bounds[i], bounds[i + 1], *arrays) for i in range(1, parts)]
    work(0, bounds[1], *arrays)
    for other in others:
        other.result()


class FusedSAGE(torch.autograd.Function):
    """`relu(mean(x[neighbors]) @ weight_l.T + bias + x[targets] @ weight_r.T)`, the ReLU where `relu` says so.

    Args:
        x: [num_sources, channels], on the CPU, the targets first.
        crow: int64 [num_targets + 1], bounds of each target's edges; `col` has their sources, int64.
        masked: Whether x is such a layer's output with ReLU, with dropout or without. The gradient of that ReLU is then
            taken here, in place, and not in the layer that applied it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        crow: Tensor,
        col: Tensor,
        weight_l: Tensor,
        bias: Tensor,
        weight_r: Tensor,
        relu: bool,
        masked: bool,
    ) -> Tensor:
        x, targets = x.contiguous(), len(crow) - 1
        both = x.new_empty(targets, 2 * x.shape[1])
        _in_parts(_gather, targets, both, crow, col, x)
        ctx.save_for_backward(both, weight_l, weight_r, crow, col, *([x] if ctx.needs_input_grad[0] else []))
        ctx.masked = masked
        out = torch.addmm(bias, both, torch.cat([weight_l, weight_r], 1).t())
        return out.relu_() if relu else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, weight_l, weight_r, crow, col, *inputs = ctx.saved_tensors
        width, into = both.shape[1] // 2, None
        weights = grad.t() @ both
        if inputs:
            into = torch.empty_like(inputs[0])
            grads = grad @ torch.cat([weight_l, weight_r], 1)
            _in_parts(_spread, width, into, crow, col, grads, inputs[0], ctx.masked)
        return into, None, None, weights[:, :width], grad.sum(0), weights[:, width:], None, None


def compile_layer() -> None:
    """Compile the kernels of `FusedSAGE`, or load them from disk; see `sampling.window.compile_kernels`."""
    x, none = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    _in_parts(_gather, 0, x, none, none, x)
    _in_parts(_spread, 0, x, none, none, x, x, True)
