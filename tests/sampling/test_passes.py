"""Each pass over a loader draws new neighbors and negatives, the same ones for the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, LinkNeighborLoader, NeighborLoader, NodeLoader

from ogbnlib.graph.store import Store

pytestmark = pytest.mark.usefixtures("process_of_1_mb")
Make = Callable[..., Any]
Draws = list[list[tuple[list[int], list[int]]]]


def both(store: Store) -> tuple[Any, Any]:
    return store.feature_store(), store.graph_store()


def nodes(store: Store, sampler: Any, **options: Any) -> Any:
    return NodeLoader(both(store), sampler, input_nodes=torch.arange(100), batch_size=25, **options)


def neighbors(store: Store, sampler: Any, **options: Any) -> Any:
    seeds = {"input_nodes": torch.arange(100), "batch_size": 25}
    return NeighborLoader(both(store), [9, 9], neighbor_sampler=sampler, **seeds, **options)


def links(store: Store, sampler: Any, **options: Any) -> Any:
    edges = (None, torch.arange(200).reshape(2, 100))
    return LinkLoader(both(store), sampler, edges, neg_sampling="binary", batch_size=25, **options)


def neighbor_links(store: Store, sampler: Any, **options: Any) -> Any:
    options |= {"edge_label_index": (None, torch.arange(200).reshape(2, 100)), "batch_size": 25}
    options |= {"neg_sampling": "triplet", "neighbor_sampler": sampler}
    return LinkNeighborLoader(both(store), [9, 9], **options)


def draw(batch: Data) -> tuple[list[int], list[int]]:
    return batch.n_id.tolist(), batch.edge_index.flatten().tolist()


def passes(loader: Any, count: int) -> Draws:
    return [[draw(batch) for batch in loader] for _ in range(count)]


def all_differ(draws: Draws) -> bool:
    """Whether each batch drew other neighbors in each pass."""
    return all(len({str(one) for one in same}) == len(same) for same in zip(*draws, strict=True))


@pytest.mark.parametrize("make", [nodes, neighbors, links, neighbor_links])
def test_pygs_loaders_draw_anew_and_torchs_seed_repeats_them(store: Store, make: Make) -> None:
    loader = make(store, store.sampler([3, 2], seed=5))
    assert len(loader) == 4
    torch.manual_seed(1)
    expected = passes(loader, 3)
    assert all_differ([*expected, *passes(loader, 1)])
    torch.manual_seed(1)
    assert passes(make(store, store.sampler([3, 2], seed=5)), 3) == expected
    torch.manual_seed(1)
    assert all_differ([passes(make(store, store.sampler([3, 2], seed=6)), 1)[0], expected[0]])


WORKERS = {"num_workers": 2, "persistent_workers": True}
HOW = pytest.mark.parametrize(
    "options",
    [{}, {"memory_limit": "1 MB"}, {"num_workers": 1}, WORKERS],
    ids=["page cache", "windows", "workers", "persistent workers"],
)


def own(store: Store, **options: Any) -> Any:
    return store.loader("train", num_neighbors=[4, 3], batch_size=16, **options)


@HOW
def test_passes_over_a_loader_at_once_and_left_early(store: Store, options: dict[str, Any]) -> None:
    expected = passes(own(store), 3)
    loader = own(store, **options)
    if "num_workers" not in options:  # workers draw for the epoch that was set last
        first, second = iter(loader), iter(loader)
        assert [draw(next(first)), draw(next(second))] == [expected[0][0], expected[1][0]]
        assert [draw(batch) for batch in first] == expected[0][1:]
        assert [draw(batch) for batch in second] == expected[1][1:]
        assert all_differ(expected)
    loader.set_epoch(3)
    for batch in loader:
        assert draw(batch) == expected[2][0]
        break
    loader.set_epoch(2)
    assert passes(loader, 2) == expected[1:]


@pytest.mark.parametrize("options", [{}, {"memory_limit": "1 MB"}], ids=["page cache", "windows"])
def test_the_last_batch_is_dropped_everywhere(store: Store, options: dict[str, Any]) -> None:
    whole, loader = own(store), own(store, drop_last=True, **options)
    assert (len(whole), len(loader)) == (8, 7)
    assert passes(loader, 2) == [one[:7] for one in passes(whole, 2)]
