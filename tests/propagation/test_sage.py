"""The threads of the fused GraphSAGE layer: one pool for outputs of all sizes, and none of a parent's in a fork."""

import multiprocessing

import pytest
import torch

from ogbnlib.propagation import sage


def test_outputs_of_all_sizes_share_a_pool_and_a_fork_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(rows: int) -> None:
        out = torch.zeros(rows)
        sage._share(lambda part: out[part].fill_(1), [slice(i, i + 1) for i in range(rows)])
        assert out.sum() == rows

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    sage._pool.cache_clear()
    for rows in (2, 3, 9):
        filled(rows)
    assert sage._pool.cache_info().currsize == 1
    child = multiprocessing.get_context("fork").Process(target=filled, args=(4,), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
