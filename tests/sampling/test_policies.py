"""Every policy hands out the same batches; only where the graph lives differs."""

import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from all_policies import SAMPLED, settings
from conftest import batches_of
from damage import rewrite
from torch_geometric.loader import NodeLoader

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.memory.recorder import EventLog
from ogbnlib.registry import POLICIES
from ogbnlib.sampling.policies import Loaders
from ogbnlib.sampling.workers import workers_ended
from ogbnlib.sources.convert import convert
from ogbnlib.sources.resolve import find_store

Make = Callable[..., Loaders]


@pytest.fixture
def make(tiny_config: Callable[..., TrainConfig], tmp_path: Path) -> Iterator[Make]:
    made = []

    def build(**changes: object) -> Loaders:
        config = tiny_config(**changes)
        kind = config.policy.load()
        log = EventLog(tmp_path)
        graph = find_store(config.dataset)
        store = kind.trained_store(graph, config, log, say=len, progress=False)
        made.append(kind(store, config, log))
        return made[-1]

    yield build
    for loaders in made:
        loaders.close()
        loaders.log.close()


def contents(loader: NodeLoader, epoch: int) -> list[list[Any]]:
    found = []
    for batch in batches_of(loader, epoch):
        labels = batch.y[: batch.batch_size]  # under `store` a batch has no others
        tensors = (batch.n_id, batch.edge_index, batch.x, labels)
        found.append([tensor.tolist() for tensor in tensors])
    return found


@pytest.mark.parametrize(
    ("undirected", "split"), [(False, "train"), (True, "valid"), (True, "train")]
)
def test_every_policy_hands_out_the_same_batches(
    make: Make, tiny_dir: Path, tmp_path: Path, undirected: bool, split: str
) -> None:
    store = convert(tiny_dir, tmp_path / "store", undirected=undirected, progress=False)
    seen = []
    for policy in SAMPLED:
        loaders = make(loading=policy, dataset=str(store.path))
        loader = loaders.train_loader() if split == "train" else loaders.eval_loader(split)
        seen.append(contents(loader, 3))
    assert all(batches == seen[0] for batches in seen)
    assert len(seen[0]) > 2


def test_evaluating_the_train_split_leaves_the_next_epoch(make: Make) -> None:
    loaders, others = make(), make()
    loader = loaders.train_loader()
    first = contents(loader, 1)
    list(loaders.eval_batches("train"))
    other = others.train_loader()
    assert contents(other, 1) == first
    assert contents(other, 2) == contents(loader, 2)


def test_iterating_takes_nothing_from_torchs_random_numbers(make: Make) -> None:
    loaders = make()
    state = torch.get_rng_state()
    list(loaders.train_loader())
    list(loaders.eval_batches("valid"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("policy", "split"), [("lazy", "train"), ("shared", "valid")])
def test_persistent_workers_end_with_their_loader(make: Make, policy: str, split: str) -> None:
    loaders = make(loading=policy, num_workers=1, persistent_workers=True)
    if split == "train":
        loaders.train_loader()  # resident: evaluating the split makes another loader on its CSC
    before = set(multiprocessing.active_children())
    batches = loaders.eval_batches(split)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    for _ in batches:
        pass
    worker.join(2)
    # DataLoader sends SIGTERM to a worker that did not hear of its end for 5 s
    assert worker.exitcode == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("train", 0, -1),
        ("valid", 1, 10**9),
        ("train", slice(None), 0),
        ("colptr", -1, 10**12),
        ("colptr", slice(1, -1), 10**12),
    ],
    ids=str,
)
def test_no_policy_takes_ids_labels_or_offsets_out_of_range(
    make: Make, tiny_store: Path, tmp_path: Path, policy: str, name: str, at: int, value: int
) -> None:
    store = shutil.copytree(tiny_store, tmp_path / "data" / "store")
    rewrite(store, name, lambda values: values.__setitem__(at, value))
    with pytest.raises(InputError, match=rf"{name}\.npy: expected"):
        make(dataset=str(store), **settings(policy))
    assert [*store.parent.iterdir()] == [store]  # no propagated table


@pytest.mark.parametrize("policy", ["lazy", "shared", "store", "windows"])
def test_wrong_ids_of_neighbors_are_named_with_the_command_to_verify(
    make: Make, tiny_store: Path, tmp_path: Path, policy: str
) -> None:
    store = shutil.copytree(tiny_store, tmp_path / "store")
    row = np.lib.format.open_memmap(store / "row.npy", mode="r+")
    row[:] = 10**6
    row.flush()
    lookahead = {"lookahead": 5000} if policy == "windows" else {"lookahead": "off"}
    loading = "store" if policy == "windows" else policy
    values = {"dataset": str(store), "loading": loading, "num_workers": int(policy == "store")}
    with pytest.raises(InputError) as caught, workers_ended():
        list(make(**values, **lookahead).train_loader())
    assert str(store) in str(caught.value).partition(": ")[0]
    assert "row" in str(caught.value).partition("; ")[0]
    assert f"`python -m ogbnlib verify {store}`" in str(caught.value)
