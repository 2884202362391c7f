"""Loaders over the train split of a store, as the policy `store` builds them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ogbnlib.forecast.pass_memory import Windows
from ogbnlib.graph.store import Store
from ogbnlib.sampling.order import EpochSampler
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.windows.spool import Preparation
from ogbnlib.windows.store_loader import StoreLoader

BATCH_SIZE = 16
NUM_NEIGHBORS = (4, 3)


def build(store: Store, windows: Windows, *, shuffle: bool = True, **preparation: Any) -> Any:
    """A loader with these windows; `loader.seen` has all that it reported of windows and passes."""
    ids = torch.from_numpy(store.splits["train"])
    seen: list[dict[str, Any]] = []

    def see(kind: str, **facts: Any) -> None:
        seen.append(facts)

    loader: Any = StoreLoader(
        store,
        CSCSampler(store.colptr, store.row, NUM_NEIGHBORS, seed=3, fixed=not shuffle),
        ids,
        torch.from_numpy(np.array(store.y[ids.numpy()])),
        Preparation(windows, on_event=see, **preparation),
        batch_size=BATCH_SIZE,
        sampler=EpochSampler(len(ids), shuffle=shuffle, seed=3),
    )
    loader.seen = seen
    return loader


def assert_equal(batches: Sequence[Any], others: Sequence[Any]) -> None:
    """Batches are equal in every bit; a batch may be a dict."""
    assert len(batches) == len(others) > 0
    for one, other in zip(batches, others, strict=True):
        assert {*one.keys()} == {*other.keys()}
        for name in {*one.keys()}:
            if isinstance(one[name], torch.Tensor):
                assert one[name].dtype == other[name].dtype, name
                assert torch.equal(one[name], other[name]), name
            else:
                assert one[name] == other[name], name
