"""Each pass over a loader is an epoch by itself: new neighbors and negatives, and the same ones for the same seed."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, LinkNeighborLoader, NeighborLoader, NodeLoader

from ogbnlib import InputError, open_store
from ogbnlib.graph.store import Store
from ogbnlib.sampling.sampler import CSCSampler

pytestmark = pytest.mark.usefixtures("process_of_1_mb")
Draws = list[list[tuple[list[int], list[int]]]]


@pytest.fixture
def store(tiny_store: Path) -> Store:
    return open_store(tiny_store)


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
    edges = {"edge_label_index": (None, torch.arange(200).reshape(2, 100)), "neg_sampling": "triplet"}
    return LinkNeighborLoader(both(store), [9, 9], neighbor_sampler=sampler, **edges, batch_size=25, **options)


def draw(batch: Data) -> tuple[list[int], list[int]]:
    return batch.n_id.tolist(), batch.edge_index.flatten().tolist()


def passes(loader: Any, count: int) -> Draws:
    return [[draw(batch) for batch in loader] for _ in range(count)]


def all_differ(draws: Draws) -> bool:
    """Whether each batch drew other neighbors in each pass."""
    return all(len({str(one) for one in same}) == len(same) for same in zip(*draws, strict=True))


@pytest.mark.parametrize("make", [nodes, neighbors, links, neighbor_links])
def test_pygs_loaders_draw_anew_in_each_pass_and_the_seed_decides(store: Store, make: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    loader = make(store, store.sampler([3, 2], seed=5))
    assert len(loader) == 4
    expected = passes(loader, 3)
    assert all_differ(expected)
    assert all_differ([passes(make(store, store.sampler([3, 2], seed=6)), 1)[0], expected[0]])
    torch.manual_seed(2)
    workers = {"num_workers": 2, "persistent_workers": True}
    assert passes(make(store, store.sampler([3, 2], seed=5), **workers), 3) == expected


@pytest.mark.parametrize(("start", "count"), [("fork", 2), ("spawn", 1)])
def test_workers_that_end_with_a_pass_draw_anew_too(store: Store, start: str, count: int) -> None:
    expected = passes(links(store, store.sampler([3, 2])), count)
    workers = {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context(start)}
    assert passes(links(store, store.sampler([3, 2]), **workers), count) == expected


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_a_pass_that_is_broken_off_is_one(store: Store, workers: dict[str, Any]) -> None:
    expected = passes(nodes(store, store.sampler([3, 2])), 3)
    loader = nodes(store, store.sampler([3, 2]), **workers)
    for batch in loader:
        assert draw(batch) == expected[0][0]
        break
    assert passes(loader, 2) == expected[1:]


def test_loaders_over_one_sampler_do_not_change_each_others_draws(store: Store) -> None:
    alone = passes(nodes(store, store.sampler([3, 2])), 2)
    sampler = store.sampler([3, 2])
    train, other = nodes(store, sampler), nodes(store, sampler, num_workers=1)
    together = [[(draw(a), draw(b)) for a, b in zip(train, other, strict=True)] for _ in range(2)]
    assert [[a for a, _ in one] for one in together] == alone
    assert all_differ([*alone, *([b for _, b in one] for one in together)])
    assert all_differ([*alone, *(passes(nodes(store, sampler), 1)[0] for _ in range(2))])  # a loader for each epoch


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}], ids=str)
def test_two_passes_of_one_loader_at_once_are_those_of_one_after_the_other(
    store: Store, workers: dict[str, Any]
) -> None:
    expected = passes(nodes(store, store.sampler([3, 2])), 2)
    loader = nodes(store, store.sampler([3, 2]), **workers)
    pairs = [(draw(a), draw(b)) for a, b in zip(loader, loader, strict=True)]
    assert [[a for a, _ in pairs], [b for _, b in pairs]] == expected


def test_an_epoch_can_be_set_to_go_on_after_an_interruption(store: Store) -> None:
    expected = passes(nodes(store, store.sampler([3, 2])), 4)
    sampler = store.sampler([3, 2])
    sampler.set_epoch(2)
    loader = nodes(store, sampler)
    assert passes(loader, 2) == expected[2:]
    sampler.set_epoch(1)
    assert passes(loader, 1) == expected[1:2]


# PyG's loaders over a store, used as over a Data ----------------------------------------------------------------------


def test_input_nodes_and_edges_are_given_as_over_a_data(store: Store) -> None:
    everything, valid = torch.arange(store.num_nodes), torch.from_numpy(store.splits["valid"])
    mask = torch.zeros(store.num_nodes, dtype=torch.bool)
    mask[valid] = True
    given = {None: everything, "val": valid}
    for make in (NodeLoader, functools.partial(NeighborLoader, num_neighbors=[2])):
        name = "node_sampler" if make is NodeLoader else "neighbor_sampler"
        for nodes, expected in (*given.items(), (mask, valid.sort().values), (valid.numpy(), valid), (valid, valid)):
            loader = make(both(store), **{name: store.sampler([2])}, input_nodes=nodes, batch_size=128)
            assert loader.dataset == range(len(expected))
            batches = list(loader)
            assert torch.equal(torch.cat([batch.n_id[: batch.batch_size] for batch in batches]), expected), nodes
            places = expected if nodes is mask else torch.arange(len(expected))
            assert torch.equal(torch.cat([batch.input_id for batch in batches]), places)
    for nodes, sentence in (
        (torch.tensor([1, 1]), "each seed once per batch"),
        (torch.ones(9).bool(), "a mask of 300"),
    ):
        with pytest.raises(InputError, match=sentence):
            list(NodeLoader(both(store), store.sampler([2]), input_nodes=nodes, batch_size=2))
    with pytest.raises(InputError, match=r"nodes: expected node ids \[n\] in RAM, got tuple"):
        NodeLoader(both(store), store.sampler([2]), input_nodes=(None, torch.tensor([1, 2])))
    edges = torch.from_numpy(store.read_edge_index())
    for label_index in (None, (None, None), edges, (None, edges)):
        loader = LinkLoader(both(store), store.sampler([2]), label_index, batch_size=2000)
        ends = torch.cat([batch.n_id[batch.edge_label_index] for batch in loader], dim=1)
        assert torch.equal(ends, edges)


def test_a_data_and_other_samplers_are_left_to_pyg(store: Store) -> None:
    data = store.to_data()
    for _ in range(2):
        (batch,) = NodeLoader(data, CSCSampler(store.colptr, store.row, [-1]), batch_size=store.num_nodes)
        assert torch.equal(batch.n_id, torch.arange(store.num_nodes))
    (batch,) = LinkLoader(data, store.sampler([2]), data.edge_index[:, :3], batch_size=3)
    assert torch.equal(batch.n_id[batch.edge_label_index], data.edge_index[:, :3])
    filtered = NodeLoader(both(store), store.sampler([2]), filter_per_worker=False, num_workers=1, batch_size=100)
    assert [draw(batch) for batch in filtered] == passes(NodeLoader(data, store.sampler([2]), batch_size=100), 1)[0]


# The store's own loader -----------------------------------------------------------------------------------------------

LIMITS = pytest.mark.parametrize("memory_limit", [None, "1 MB"], ids=["page cache", "windows"])
WORKERS = {"num_workers": 2, "persistent_workers": True}


def own(store: Store, memory_limit: str | None = None, **options: Any) -> Any:
    return store.loader("train", num_neighbors=[4, 3], batch_size=16, memory_limit=memory_limit, **options)


@LIMITS
def test_two_passes_at_once_over_the_stores_own_loader(store: Store, memory_limit: str | None) -> None:
    expected = passes(own(store), 3)
    loader = own(store, memory_limit)
    first, second = iter(loader), iter(loader)
    found = [draw(next(first)), draw(next(second))]
    assert found == [expected[0][0], expected[1][0]]
    first.close()
    assert [draw(batch) for batch in second] == expected[1][1:]
    for batch in loader:
        assert draw(batch) == expected[2][0]
        break
    loader.set_epoch(2)
    assert passes(loader, 2) == expected[1:]


@pytest.mark.parametrize("options", [{}, {"memory_limit": "1 MB"}, WORKERS], ids=["page cache", "windows", "workers"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_last_batch_is_dropped_everywhere(store: Store, options: dict[str, Any], shuffle: bool) -> None:
    whole, loader = own(store, shuffle=shuffle), own(store, drop_last=True, shuffle=shuffle, **options)
    assert (len(whole), len(loader)) == (8, 7)
    assert passes(loader, 2) == [one[:7] for one in passes(whole, 2)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pin": 1}, "pin: expected nodes, num_neighbors, batch_size, .*, drop_last; for what else torch's DataLoader"),
        ({"sampler": None, "collate_fn": 1}, "sampler, collate_fn: expected nodes"),
        ({"persistent_workers": True}, "persistent_workers: needs num_workers"),
        ({"drop_last": True, "batch_size": 121}, "drop_last: expected at least a batch of 121 nodes, got 120"),
    ],
)
def test_what_the_stores_own_loader_does_not_take(store: Store, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        store.loader("train", **options)
