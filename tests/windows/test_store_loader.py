"""`StoreLoader` and the policy `store` give the same batches and losses, in the memory given."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_loaders
import torch
from conftest import MB, batches_of, force_windows, scores, wait_until
from store_loaders import BATCH_SIZE, NUM_NEIGHBORS, assert_equal
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.sampler import NodeSamplerInput

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.files import new_folder
from ogbnlib.forecast.pass_memory import Windows
from ogbnlib.graph.store import Store, open_store
from ogbnlib.graph.writer import StoreWriter
from ogbnlib.memory.limits import Limit
from ogbnlib.memory.recorder import EventLog
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.sampling.order import EpochSampler
from ogbnlib.sampling.policies import DiskLoaders, set_epoch
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.sources.convert import convert
from ogbnlib.sources.resolve import find_store
from ogbnlib.training.train import train
from ogbnlib.windows import policy
from ogbnlib.windows.store_loader import StoreLoader

CLASSES = 4
Make = Callable[..., Any]
Config = Callable[..., TrainConfig]


@pytest.fixture
def make(store: Store) -> Iterator[Make]:
    """A loader with windows of so many batches; closed at the end."""
    made: list[StoreLoader] = []

    def build(window_batches: int | None, store: Store = store, **preparation: Any) -> Any:
        windows = Windows(window_batches, 0, 2**20)
        made.append(store_loaders.build(store, windows, **preparation))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


def expected_batches(store: Store, epoch: int) -> list[dict[str, Any]]:
    """The batches of a loader of `make`, from plain indexing and one sampled batch after another."""
    ids, colptr, row = store.splits["train"], np.array(store.colptr), np.array(store.row)
    sampler = CSCSampler(colptr, row, NUM_NEIGHBORS, seed=3)
    sampler.set_epoch(epoch)
    batches = []
    for positions in EpochSampler(len(ids), seed=3).order(epoch).split(BATCH_SIZE):
        seeds = torch.from_numpy(ids)[positions]
        out = sampler.sample_from_nodes(NodeSamplerInput(input_id=positions, node=seeds))
        expected: dict[str, Any] = {"input_id": positions, "batch_size": len(positions)}
        expected["x"] = torch.from_numpy(store.x[out.node.numpy()])
        expected["y"] = torch.from_numpy(store.y[seeds.numpy()])
        expected |= {"n_id": out.node, "edge_index": torch.stack([out.row, out.col])}
        for name in ("num_sampled_nodes", "num_sampled_edges"):
            expected[name] = list(getattr(out, name))
        batches.append(expected)
    return batches


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("window_batches", [None, 1, 3, 100])
@pytest.mark.parametrize("kind", [{}, {"feature_dtype": "float16", "undirected": True}], ids=str)
def test_any_window_gives_the_batches_of_plain_indexing(
    make: Make, tiny_dir: Path, tmp_path: Path, window_batches: int | None, kind: dict[str, Any]
) -> None:
    store = convert(tiny_dir, tmp_path / "store", progress=False, **kind)
    loader = make(window_batches, store)
    assert len(loader) == 8
    assert_equal(batches_of(loader, 1), expected_batches(store, 1))
    _, second, *others = batches_of(loader, 2)
    storages = {batch.x.untyped_storage().data_ptr() for batch in (second, others[0])}
    assert len(storages) == 1 + (window_batches == 1)
    # they share neither rows nor the version by which autograd finds changed tensors
    second.x.zero_()
    assert_equal(others, expected_batches(store, 2)[2:])
    assert not any(batch.x._version for batch in others)
    sizes = {None: [], 1: [1] * 8, 3: [3, 3, 2], 100: [8]}[window_batches]
    seen = [(window["epoch"], window["batches"]) for window in loader.seen]
    assert seen == [(epoch, size) for epoch in (1, 2) for size in sizes]


@pytest.mark.parametrize(("window_batches", "taken"), [(None, 1), (4, 1), (4, 5)])
def test_a_left_epoch_leaves_no_thread_and_no_open_file(
    make: Make, store: Store, window_batches: int | None, taken: int
) -> None:
    expected = expected_batches(store, 1)  # which maps the store
    gc.collect()  # loaders of other tests
    before, loader = set(threading.enumerate()), make(window_batches, last_epoch=9)
    files = len(os.listdir("/proc/self/fd")) - (0 if window_batches is None else 3)
    for _ in range(3):
        set_epoch(loader, 1)
        for number, batch in enumerate(loader, 1):
            held, batch.x = StorageWeakRef(batch.x.untyped_storage()), None
            if number == 1:  # which shares its memory with no other
                wait_until(held.expired, "the memory of an array that its user replaced", 20)
            if number == taken:
                break
        assert "prefetch_0" not in [thread.name for thread in new_threads(before)]
    assert_equal(batches_of(loader, 1), expected)
    loader.close()
    assert not new_threads(before)
    assert len(os.listdir("/proc/self/fd")) == files
    loader.close()


ALL = {"dropout": 0.5, "train_eval": "every_epoch"}


@pytest.fixture(scope="module")
def shared(tiny_config: Config) -> list[dict[str, Any]]:
    return scores(train(tiny_config(loading="shared", **ALL)).history)


@pytest.mark.parametrize("lookahead", ["auto", "20 kB", "1 kB"])
def test_losses_and_accuracies_are_those_of_the_policy_shared(
    tiny_config: Config, shared: list[dict[str, Any]], lookahead: str, tmp_path: Path
) -> None:
    before = set(threading.enumerate())
    config = tiny_config(loading="store", lookahead=lookahead, spool="off", **ALL)
    assert scores(train(config, tmp_path / "run").history) == shared
    assert not new_threads(before)
    windows = [event for event in Run(tmp_path / "run").events if event["event"] == "window"]
    trained = [event for event in windows if event["loader"] == "train" and event["epoch"] > 0]
    is_read = lookahead != "auto"
    assert sum(window["batches"] for window in trained) == 2 * 8 * is_read
    loaders = {"train", "valid", "test"} if is_read else set()
    assert {window["loader"] for window in windows} == loaders


def test_memory_for_windows_is_measured_beside_the_labels(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, steps, load = tiny_config(loading="store"), [], DiskLoaders._load

    def loaded(self: DiskLoaders, store: Store) -> Any:
        data = load(self, store)
        steps.append("labels")
        return data

    monkeypatch.setattr(DiskLoaders, "_load", loaded)
    monkeypatch.setattr(policy, "available_bytes", lambda: steps.append("memory") or MB)
    config.policy.load()(find_store(config.dataset), config, EventLog(None)).close()
    assert steps == ["labels", "memory"]


def test_another_direction_than_the_stores_is_refused(tiny_config: Config, tmp_path: Path) -> None:
    wanted = tiny_config(loading="store", undirected=True)
    with pytest.raises(InputError, match="undirected: "):
        train(wanted, tmp_path / "here")
    with pytest.raises(InputError, match="undirected: "):
        run(wanted, run_dir=tmp_path / "child")
    assert not list(tmp_path.iterdir())


def write_large(path: Path, num_nodes: int, num_features: int) -> Store:
    """A store of float32 rows, written in parts: 1,200 seeds, 10 in-edges each node."""
    rng = np.random.default_rng(0)
    with new_folder(path) as folder:
        writer = StoreWriter(folder)
        writer.write("colptr", np.arange(num_nodes + 1, dtype=np.int64) * 10)
        writer.write("row", rng.integers(num_nodes, size=10 * num_nodes).astype(np.int32))
        with writer.create("x", np.float32, (num_features,)) as x:
            for begin in range(0, num_nodes, 2000):
                x.write(rng.random((min(2000, num_nodes - begin), num_features), np.float32))
        y = np.full(num_nodes, -1, np.int16)
        ids = rng.permutation(num_nodes)[:1200]
        y[ids] = rng.integers(CLASSES, size=1200)
        writer.write("y", y)
        for name, part in zip(("train", "valid", "test"), np.split(ids, [1180, 1190]), strict=True):
            writer.write(name, part)
        writer.finish("large", CLASSES, undirected=False, origin={})
    return open_store(path)


def test_training_keeps_to_a_budget(tmp_path: Path, kernel_limit: Callable[[int], Limit]) -> None:
    kernel_limit(2**30).close()  # skips where the kernel enforces none
    store, budget = write_large(tmp_path / "store", 32_000, 2048), 60 * MB
    assert store.nbytes > 4 * budget
    values = {"epochs": 2, "batch_size": 8, "train_eval": "never", "eval_splits": ""}
    config = TrainConfig.create(dataset=str(store.path), loading="store", device="cpu", **values)
    force_windows(budget)
    result = run(config, "1 GB", run_dir=tmp_path / "run", echo=False)
    assert result.exit_code == 0, result.result
    events = Run(tmp_path / "run").events
    windows = [event for event in events if event["event"] == "window"]
    assert sum(window["batches"] for window in windows) == 2 * 148
    assert len({window["epoch"] for window in windows}) == 2
    begun = [event for event in events if event["event"] == "begin"]
    base = next(event["held_bytes"] for event in begun if event.get("phase") == "load")
    peak = result.result["sampled_peaks_bytes"]["held_bytes"]
    print(f"base {base / MB:.0f} MB, peak {peak / MB:.0f} MB, {len(windows)} windows")
    # 40 MB for the first step of training and the batches on their way: less than half of what the
    # features take.
    assert peak <= base + budget + 40 * MB
