"""The fused layer: its bfloat16 is torch's, its threads one pool, none of a parent's in a fork."""

import multiprocessing

import numpy as np
import pytest
import torch

from ogbnlib.training import fused_sage as sage


def test_all_sizes_share_a_pool_and_a_fork_makes_its_own() -> None:
    def filled(rows: int) -> None:
        parts = [slice(i) for i in range(rows)]
        assert sage._share(lambda part: part.stop, parts, 4) == [*range(rows)]

    sage._pool.cache_clear()
    for rows in (2, 3, 9):
        filled(rows)
    assert sage._pool.cache_info().currsize == 1
    with sage.torch_threads(1):  # a single part has more of torch's threads if it is large
        for size, threads in ((1, 1), (2**29, 3)):
            assert sage._share(lambda _: torch.get_num_threads(), [slice(1)], 3, size) == [threads]
    child = multiprocessing.get_context("fork").Process(target=filled, args=(4,), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_gathered_bfloat16_is_rounded_as_torch_does() -> None:
    ties = [1.00390625, 1.01171875, -1.01171875]  # half-way between two: to the even one
    special = [0.0, -0.0, 3.4e38, float("inf"), -float("inf"), float("nan"), 1e-40]
    values = [*special, *ties, *torch.randn(500).tolist()]
    x, none = torch.tensor([values]), np.zeros(2, np.int64)
    both = torch.empty(1, 2 * len(values), dtype=torch.bfloat16)
    sage._gather(0, 1, none, none, sage._values(x), sage._values(both))
    own = both[0, len(values) :]
    torch.testing.assert_close(own, x[0].bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(own.signbit(), x[0].signbit())
    again = torch.empty_like(both)
    sage._gather(0, 1, none, none, sage._values(own[None].contiguous()), sage._values(again))
    torch.testing.assert_close(again[0, len(values) :], own, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropouts_factor_is_the_same_in_output_and_gradient(dtype: torch.dtype) -> None:
    # A node without neighbors; the first layer gives ones and the second passes them on, so each
    # output is the factor.
    one, none, last = torch.ones(64, 1), torch.zeros(64), torch.eye(64)
    weights, alone = [0 * one, none, one, 0 * last, none, last], np.zeros(2, np.int64)
    layers = sage.Layers(torch.ones(1, 1), alone, alone[:0], [1, 1], 0.3, weights, dtype)
    out, tape = layers.forward("all")
    # 0.08 % apart
    assert set(out.float().unique().tolist()) == {0.0, float(torch.ones((), dtype=dtype) / 0.7)}
    assert torch.equal(layers.backward(tape, torch.ones_like(out))[1], out[0].float())
