"""Promises of `StoreLoader` and the policy `store`: the same batches and losses, within the memory
that is given."""

import functools
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MB, batches_of, force_windows, scores, wait_until
from ogb_layout import write_raw
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.files import new_folder
from ogbnlib.forecast.pass_memory import Windows
from ogbnlib.graph.store import Store, open_store
from ogbnlib.graph.writer import StoreWriter
from ogbnlib.memory.limits import Limit
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.sampling.order import EpochSampler
from ogbnlib.sampling.policies import set_epoch
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.sources.convert import convert
from ogbnlib.training.train import train
from ogbnlib.windows.spool import Preparation
from ogbnlib.windows.store_loader import StoreLoader

N, FEATURES, CLASSES, BATCH, NUM_NEIGHBORS = 1500, 301, 4, 16, [3, 2]
Make = Callable[..., StoreLoader]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 nodes, 9,000 edges; 230 / 50 / 70 labelled, so that the last batch of each split is a
    partial one."""
    rng = np.random.default_rng(0)
    classes = rng.integers(CLASSES, size=N)
    x = (
        np.eye(CLASSES)[classes] @ rng.normal(size=(CLASSES, FEATURES))
        + rng.normal(size=(N, FEATURES))
    ) / 4
    ids = rng.permutation(N)
    splits = {"train": ids[:230], "valid": ids[230:280], "test": ids[280:350]}
    y = np.full(N, -1)
    y[ids[:350]] = classes[ids[:350]]
    path = tmp_path_factory.mktemp("data") / "raw"
    write_raw(
        path,
        edge_index=rng.integers(N, size=(2, 9000)),
        x=x,
        y=y,
        splits=splits,
        num_classes=CLASSES,
    )
    return path


@pytest.fixture(scope="module")
def stores(raw: Path) -> Callable[..., Store]:
    """`raw` as a store, float32 unless told; each made once."""
    made: dict[str, Store] = {}

    def get(**changes: Any) -> Store:
        options: dict[str, Any] = {"feature_dtype": "float32", **changes}
        if str(options) not in made:
            made[str(options)] = convert(
                raw, raw.parent / f"store{len(made)}", progress=False, **options
            )
        return made[str(options)]

    return get


@pytest.fixture(scope="module")
def config(
    stores: Callable[..., Store], tiny_config: Callable[..., TrainConfig]
) -> Callable[..., TrainConfig]:
    return functools.partial(tiny_config, **{"dataset": str(stores().path), "batch_size": BATCH})


@pytest.fixture
def make(stores: Callable[..., Store]) -> Iterator[Make]:
    """A loader over the train split with `on_window` recorded in `loader.seen`; closed at the
    end."""
    made: list[StoreLoader] = []

    def build(
        window_batches: int | None,
        overlapped: bool = True,
        store: Store | None = None,
        shuffle: bool = True,
        last_epoch: int | None = None,
    ) -> StoreLoader:
        store = store or stores()
        seen: list[dict[str, Any]] = []
        ids = torch.from_numpy(store.splits["train"])
        loader = StoreLoader(
            store,
            CSCSampler(store.colptr, store.row, NUM_NEIGHBORS, seed=3),
            ids,
            torch.from_numpy(np.array(store.y[ids.numpy()])),
            Preparation(
                Windows(window_batches, overlapped, 0, 2**20),
                last_epoch=last_epoch,
                on_window=lambda **info: seen.append(info),
            ),
            batch_size=BATCH,
            sampler=EpochSampler(len(ids), shuffle=shuffle, seed=3),
        )
        loader.seen = seen
        made.append(loader)
        return loader

    yield build
    for loader in made:
        loader.close()


def expected_batches(
    store: Store, epoch: int, start: int = 0, shuffle: bool = True
) -> Iterator[dict[str, Any]]:
    """What a loader of `make` has to hand out, from plain indexing and one sampled batch after
    another."""
    ids, colptr, row = store.splits["train"], np.array(store.colptr), np.array(store.row)
    sampler = CSCSampler(colptr, row, NUM_NEIGHBORS, seed=3)
    sampler.set_epoch(epoch)
    for positions in (
        EpochSampler(len(ids), shuffle=shuffle, seed=3).order(epoch)[start:].split(BATCH)
    ):
        seeds = torch.from_numpy(ids)[positions]
        out = sampler.sample_from_nodes(NodeSamplerInput(input_id=positions, node=seeds))
        yield {
            "x": torch.from_numpy(store.x[out.node.numpy()]),
            "y": torch.from_numpy(store.y[seeds.numpy()]),
            "edge_index": torch.stack([out.row, out.col]),
            "n_id": out.node,
            "input_id": positions,
            "num_sampled_nodes": list(out.num_sampled_nodes),
            "num_sampled_edges": list(out.num_sampled_edges),
            "batch_size": len(positions),
        }


def assert_same(batches: list[Data], expected: Iterator[dict[str, Any]]) -> None:
    wanted = list(expected)
    assert len(batches) == len(wanted) > 0
    for batch, values in zip(batches, wanted, strict=True):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert batch[name].dtype == value.dtype, name
                assert torch.equal(batch[name], value), name
            else:
                assert batch[name] == value, name


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("window_batches", [None, 1, 4, 100])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("kind", [{}, {"feature_dtype": "float16", "undirected": True}], ids=str)
def test_any_window_gives_the_batches_of_plain_indexing(
    make: Make,
    stores: Callable[..., Store],
    window_batches: int | None,
    overlapped: bool,
    kind: dict[str, Any],
) -> None:
    store = stores(**kind)
    loader = make(window_batches, overlapped, store)
    assert len(loader) == 15
    assert_same(batches_of(loader, 1), expected_batches(store, 1))
    _, second, *others = batches_of(loader, 2)
    assert len({batch.x.untyped_storage().data_ptr() for batch in (second, others[0])}) == 1 + (
        window_batches == 1
    )
    # they share neither rows nor the version by which autograd finds changed tensors
    second.x.zero_()
    assert_same(others, itertools.islice(expected_batches(store, 2), 2, None))
    assert not any(batch.x._version for batch in others)
    if window_batches is not None:  # the windows cover each epoch exactly
        full, rest = divmod(15, window_batches)
        assert [window["batches"] for window in loader.seen] == (
            [window_batches] * full + [rest] * (rest > 0)
        ) * 2
        assert [window["epoch"] for window in loader.seen] == [1] * (full + (rest > 0)) + [2] * (
            full + (rest > 0)
        )


@pytest.mark.parametrize(("window_batches", "taken"), [(None, 1), (4, 1), (4, 5)])
def test_a_left_epoch_leaves_no_thread_and_no_open_file(
    make: Make, stores: Callable[..., Store], window_batches: int | None, taken: int
) -> None:
    gc.collect()  # loaders of other tests
    before, loader = set(threading.enumerate()), make(window_batches, last_epoch=9)
    files = open_files() - (0 if window_batches is None else 3)
    for _ in range(3):
        set_epoch(loader, 1)
        for number, batch in enumerate(loader, 1):
            held, batch.x = StorageWeakRef(batch.x.untyped_storage()), None
            if number == 1:  # which shares its memory with no other
                wait_until(held.expired, "the memory of an array that its user replaced", 20)
            if number == taken:
                break
        assert "prefetch_0" not in [thread.name for thread in new_threads(before)]
    assert_same(batches_of(loader, 1), expected_batches(stores(), 1))
    loader.close()
    assert not new_threads(before)
    assert open_files() == files
    loader.close()


ALL = {"dropout": 0.5, "train_eval": "every_epoch"}


@pytest.fixture(scope="module")
def shared(config: Callable[..., TrainConfig]) -> list[dict[str, Any]]:
    return scores(train(config(**ALL)).history)


@pytest.mark.parametrize("lookahead", ["auto", "1 MB", "1 kB"])
def test_losses_and_accuracies_are_those_of_the_policy_shared(
    config: Callable[..., TrainConfig],
    stores: Callable[..., Store],
    shared: list[dict[str, Any]],
    lookahead: str,
    tmp_path: Path,
) -> None:
    before = set(threading.enumerate())
    changes = {"dataset": str(stores().path), "loading": "store", "lookahead": lookahead, **ALL}
    folder = tmp_path / "run" if lookahead in ("auto", "1 MB") else None
    assert scores(train(config(**changes), folder).history) == shared
    assert not new_threads(before)
    if folder is not None:
        windows = [event for event in Run(folder).events if event["event"] == "window"]
        trained = [
            window for window in windows if window["loader"] == "train" and window["epoch"] > 0
        ]
        assert bool(windows) == (lookahead == "1 MB")
        assert sum(window["batches"] for window in trained) == (30 if windows else 0)
        assert {window["loader"] for window in windows} == (
            {"train", "valid", "test"} if windows else set()
        )


def test_another_direction_than_the_stores_is_refused(
    config: Callable[..., TrainConfig], stores: Callable[..., Store], tmp_path: Path
) -> None:
    wanted = config(dataset=str(stores().path), loading="store", undirected=True)
    for refuse in (
        lambda: train(wanted, tmp_path / "here"),
        lambda: run(wanted, run_dir=tmp_path / "child"),
    ):
        with pytest.raises(InputError, match="undirected: "):
            refuse()
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


def test_a_store_four_times_the_budget_is_trained_within_it(
    tmp_path: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    kernel_limit(2**30).close()  # skips where the kernel enforces none
    store, budget = write_large(tmp_path / "store", 32_000, 2048), 60 * MB
    assert store.nbytes > 4 * budget
    config = TrainConfig.create(
        dataset=str(store.path),
        loading="store",
        epochs=2,
        batch_size=8,
        train_eval="never",
        eval_splits="",
        device="cpu",
    )
    force_windows(budget)
    result = run(config, "1 GB", run_dir=tmp_path / "run", echo=False)
    assert result.exit_code == 0, result.result
    events = Run(tmp_path / "run").events
    windows = [event for event in events if event["event"] == "window"]
    assert sum(window["batches"] for window in windows) == 2 * 148
    assert len({window["epoch"] for window in windows}) == 2
    base = next(
        e["held_bytes"] for e in events if e["event"] == "begin" and e.get("phase") == "load"
    )
    peak = result.result["sampled_peaks_bytes"]["held_bytes"]
    print(f"base {base / MB:.0f} MB, peak {peak / MB:.0f} MB, {len(windows)} windows")
    # 40 MB for the first step of training and the batches on their way: less than half of what the
    # features take.
    assert peak <= base + budget + 40 * MB
