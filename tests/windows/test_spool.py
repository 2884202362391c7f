"""An evaluation is read from the store once, its batches stay what they were, no file stays."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_loaders
from conftest import batches_of, files_of, python_child, same, scores
from store_loaders import assert_equal

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.pass_memory import Spooling, Windows
from ogbnlib.graph.store import Store
from ogbnlib.io.disk_array import DiskArray, Interrupted
from ogbnlib.io.spool_file import DiskFull, SpoolFile
from ogbnlib.memory.recorder import EventLog
from ogbnlib.runs.folder import Run
from ogbnlib.sampling.policies import set_epoch
from ogbnlib.sources.resolve import find_store
from ogbnlib.training.train import train
from ogbnlib.windows import plan
from ogbnlib.windows.plan import spool_bytes
from ogbnlib.windows.spool import Spool
from ogbnlib.windows.store_loader import StoreLoader

WINDOWS = Windows(3, 0, 2**20)
GB = 2**30
HOT = [0, 60_000, GB]  # bytes for rows in memory: none, some, all that come twice
Build = Callable[..., Any]
Config = Callable[..., TrainConfig]
# Lookahead is small, so that windows are taken; the store itself, of 30 MB, would fit into memory.
SPOOLED = {"loading": "store", "lookahead": "3 MB", "batch_size": 64, "dropout": 0.5}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of spools, for the length of a test."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def make(store: Store, tmp_path: Path) -> Iterator[Build]:
    """Makes loaders of 8 batches; `picked` are on disk at a time, 0 for windows in memory."""
    loaders: list[StoreLoader] = []

    def build(
        picked: int, sampled: int = 5, structure: int = 2, hot: int = 0, **options: Any
    ) -> Any:
        spooling = None
        if picked:
            spooling = Spooling(sampled, picked * structure, picked, 2**20, 0, hot)
        windows = dataclasses.replace(WINDOWS, spooling=spooling, in_memory=WINDOWS)
        options = {"last_epoch": 3, "spool_dir": tmp_path, **options}
        loaders.append(store_loaders.build(store, windows, **options))
        return loaders[-1]

    yield build
    for loader in loaders:
        loader.close()


def bytes_read(loader: Any) -> int:
    return sum(array.bytes_read for array in loader.reader.arrays.values())


@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("sampled", [5, 100])
@pytest.mark.parametrize("picked", [3, 100])
def test_the_batches_are_those_without_it(make: Build, picked: int, sampled: int, hot: int) -> None:
    plain, spooled = make(0), make(picked, sampled, hot=hot)
    for epoch in (1, 2, 3):
        assert_equal(batches_of(spooled, epoch), batches_of(plain, epoch))
    if picked == sampled == 100:  # one pass serves all epochs
        assert bytes_read(spooled) < bytes_read(plain) / 3
    passes = [event for event in spooled.seen if "windows" in event]
    assert sum(event["windows"] for event in passes) == 9  # of three epochs, each prepared once
    assert len(passes) <= -(-9 // max(1, picked // 3))
    assert [event.get("from_spool") for event in spooled.seen].count(True) == 9


@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize(("start", "taken"), [(16, 0), (48, 4)])
def test_it_goes_on_from_anywhere(make: Build, start: int, taken: int, hot: int) -> None:
    spooled, plain = make(8, hot=hot), make(0)
    expected = batches_of(plain, 2)
    assert_equal(batches_of(spooled, 2, start), expected[start // 16 :])
    set_epoch(spooled, 1)
    batches = iter(spooled)
    for _ in range(taken):
        next(batches)
    batches.close()
    assert_equal(batches_of(spooled, 1), batches_of(plain, 1))  # back
    assert_equal(batches_of(spooled, 2), expected)


def test_the_first_pass_of_training_prepares_the_evaluations(make: Build) -> None:
    how = {"shuffle": False, "last_epoch": None}
    plain, alone, evaluation = (make(picked, **how) for picked in (0, 8, 8))
    training, expected = make(8, evaluations=[evaluation.reader.spool]), batches_of(plain, 0)
    for _ in range(2):
        assert_equal(batches_of(alone, 0), expected)
    assert 0 < bytes_read(alone) <= bytes_read(plain)  # once
    for epoch in (1, 2):
        assert_equal(batches_of(training, epoch), batches_of(make(0), epoch))
        assert_equal(batches_of(evaluation, 0), expected)
    assert bytes_read(evaluation) == 0


def open_files(folder: Path) -> list[os.stat_result]:
    """The files below `folder` that this process has open; others may come and go meanwhile."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            own = os.dup(int(name))  # of the same file, and nobody else closes it
        except OSError:
            continue
        try:
            if os.readlink(f"/proc/self/fd/{own}").startswith(f"{folder}/"):
                found.append(os.fstat(own))
        finally:
            os.close(own)
    return found


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is freed is freed by the last reference to it, not some time later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_a_nameless_file_goes_with_its_loader(make: Build, tmp_path: Path, store: Store) -> None:
    loader = make(8)  # which maps the store too
    loader.close()
    before, loader = len(open_files(store.path)), make(8)
    assert len(open_files(store.path)) == before + 3
    set_epoch(loader, 1)
    batches = iter(loader)
    next(batches)
    files = open_files(tmp_path)
    assert sum(file.st_size > 1000 for file in files) >= 2  # another one may be at its beginning
    assert all(file.st_nlink == 0 for file in files)
    assert [*tmp_path.iterdir()] == [tmp_path / "scratch"]
    batches.close()
    loader.close()
    assert not open_files(tmp_path)
    assert len(open_files(store.path)) == before


@pytest.mark.parametrize("array", ["colptr", "row", "x"])
@pytest.mark.usefixtures("without_collector")
def test_a_pass_that_is_left_early_leaves_no_file_open(
    make: Build, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, array: str
) -> None:
    loader, shards, reading = make(3, 3, structure=1), itertools.count(), threading.Event()
    read, record = DiskArray._read, Spool._record

    def hesitant(self: DiskArray, *place: int) -> memoryview:
        if second.is_set() and self.path.stem == array:
            reading.set()
            assert self.abandoned.wait(60)
        return read(self, *place)

    def counted(self: Spool, *place: Any) -> Any:
        if next(shards) == 1:
            second.set()
        return record(self, *place)

    second = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(DiskArray, "_read", hesitant)
        patch.setattr(Spool, "_record", counted)
        set_epoch(loader, 1)
        batches = iter(loader)
        next(batches)
        assert reading.wait(60)
        batches.close()
        second.clear()
    assert_equal(batches_of(loader, 1), batches_of(make(0), 1))
    loader.close()
    assert not open_files(tmp_path)


@pytest.mark.parametrize("direct", [True, False])
def test_arrays_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:  # as overlayfs answers the first write
        original, calls = os.pwrite, itertools.count()
        monkeypatch.setattr(
            os, "pwrite", lambda *given: original(*given) if next(calls) else os.pread(-1, 0, 0)
        )
    file, draw = SpoolFile(tmp_path), np.random.default_rng(0)
    arrays = [draw.integers(0, 255, size, np.uint8) for size in (0, 1, 4095, 4096, 4097, 9_000_001)]
    reads = [file.store(array) for array in arrays]
    pair, begin = draw.integers(0, 2**31, (2, 3, 50_001), np.int32), file.size
    # of rows of 12 bytes, side by side
    for low, high in itertools.pairwise([0, 1, 1025, 2049, 2050, 40_000, 50_001]):
        for place, rows in zip((begin, begin + 2**20), pair.transpose(0, 2, 1), strict=True):
            part = np.ascontiguousarray(rows[low:high]).reshape(-1).view(np.uint8)
            file.put(part.data, place + 12 * low)
    file.finish()
    for place in (begin, begin + 2**20):
        reads.append(functools.partial(file.load, place, (50_001, 3), pair.dtype))
    for array, read in zip([*arrays, *pair.transpose(0, 2, 1)], reads, strict=True):
        assert np.array_equal(array, read())
    rows = pair.transpose(0, 2, 1)[0]
    for others in (1, 1024, 5000):  # rows before them that are not in the file
        read = file.load(begin, rows.shape, rows.dtype, others)
        assert read.shape == (others + len(rows), 3)
        assert np.array_equal(read[others:], rows)
        read[:others] = 1  # a caller's own memory
    with pytest.raises(DiskFull):
        file.load(file.size, (1,), pair.dtype)


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("num_bytes", [0, 10_000, 30_000])
def test_at_a_full_disk_windows_stay_in_memory(make: Build, num_bytes: int, hot: int) -> None:
    spooled, plain = make(8, hot=hot), make(0)
    with files_of(num_bytes), pytest.warns(UserWarning, match="spool: ") as caught:
        epochs = [batches_of(spooled, epoch) for epoch in (1, 2, 3)]
    assert sum("spool: " in str(warning.message) for warning in caught) == 1
    for epoch, batches in enumerate(epochs, start=1):
        assert_equal(batches, batches_of(plain, epoch))
    assert spooled.windows == WINDOWS


def test_waiting_ends_as_the_run_is_to_stop(make: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    stops, slow = threading.Event(), threading.Event()
    loader = make(8, waiting=lambda reading: stops.is_set() and slow.is_set())
    stops.set()
    read = DiskArray._read

    def hesitant(self: DiskArray, *place: int) -> memoryview:
        slow.set()
        while not self.abandoned.wait(0.01):
            pass
        return read(self, *place)

    monkeypatch.setattr(DiskArray, "_read", hesitant)
    set_epoch(loader, 1)
    with pytest.raises(Interrupted):
        next(iter(loader))
    monkeypatch.undo()
    stops.clear()
    assert_equal(batches_of(loader, 1), batches_of(make(0), 1))


def test_auto_takes_a_quarter_of_free_disk_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    root, memory, free = Path("/"), Path("/dev/shm"), [0]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: usage(0, 0, free[0]))
    for free[0], room in ((100 * GB, 25 * GB), (6 * GB, GB), (4 * GB, 0)):  # the last 5 GB stay
        assert spool_bytes("auto", root) == room
        assert spool_bytes("auto", root, sharers=2) == room // 2
    free[0] = 100 * GB
    assert spool_bytes("auto", memory) == spool_bytes("off", root) == 0
    assert spool_bytes(3 * GB, root) == spool_bytes(3 * GB, memory) == 3 * GB


def test_a_run_scores_the_same_with_and_without(
    tiny_config: Config, synth_dir: Path, tmp_path: Path, scratch: Path
) -> None:
    asked = {"dataset": str(synth_dir), **SPOOLED, "epochs": 3, "train_eval": "every_epoch"}
    plain = train(tiny_config(**asked, spool="off"))
    spooled = train(tiny_config(**asked, spool="1 GB"), tmp_path / "run")
    assert scores(spooled.history) == scores(plain.history)
    assert same(spooled.model.state_dict(), plain.model.state_dict())
    events = Run(tmp_path / "run").events
    windows = [event for event in events if event["event"] in ("window", "pass")]
    read = Counter(event["loader"] for event in windows if not event.get("from_spool"))
    assert not list(scratch.iterdir())
    assert read["train"] > 0 == read["valid"] == read["test"]  # with the first pass of training
    # of three epochs and nine evaluations
    assert 1 <= sum(event["event"] == "pass" for event in windows) < 3


@pytest.mark.parametrize("batch_size", [64, 2000])
def test_a_rank_may_have_no_batch(
    tiny_config: Config, synth_dir: Path, tmp_path: Path, batch_size: int
) -> None:
    asked = {"dataset": str(synth_dir), **SPOOLED, "batch_size": batch_size}
    config = tiny_config(**asked, epochs=4, spool="1 GB", eval_batch_size=130)
    store, second = find_store(config.dataset), {"rank": 1, "num_ranks": 2}
    loaders = config.policy.load()(store, config, EventLog(None), **second)
    with contextlib.closing(loaders):
        trained = loaders.train_loader()
        seeds = {"train": sum(batch.batch_size for batch in batches_of(trained, 1))}
        assert (trained.windows.spooling is not None) == (batch_size == 64)
        for split in ("valid", "test"):
            seeds[split] = sum(batch.batch_size for batch in loaders.eval_batches(split))
    assert seeds == {"train": 9 * 64 if batch_size == 64 else 0, "valid": 0, "test": 214 - 130}


KILLED = """
import json, sys, time
from pathlib import Path
import ogbnlib.training.train as module
from ogbnlib.config import TrainConfig
from ogbnlib.io.disk_array import DiskArray
read = DiskArray._read
def slow(self, *place):
    time.sleep(0.01)  # else a pass over a small graph is over at once
    return read(self, *place)
DiskArray._read = slow
run = Path(sys.argv[2])
print("ready", flush=True)
module.train(TrainConfig.create(json.loads(sys.argv[1])), run, resume=run.exists())
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_weights(
    tiny_config: Config, synth_dir: Path, tmp_path: Path, scratch: Path
) -> None:
    kills, epochs = (20, 6) if os.environ.get("OGBNLIB_LONG") else (2, 2)
    random = np.random.default_rng(0)
    asked = {"dataset": str(synth_dir), **SPOOLED, "epochs": epochs}
    config = tiny_config(**asked, checkpoint_every_s=0.5, spool="5 MB")
    straight = train(config)
    values = json.dumps(config.model_dump(mode="json"))
    for _ in range(kills):
        with python_child(KILLED, values, str(tmp_path / "run")) as child:
            time.sleep(float(random.uniform(0.5, 3)))
            assert child.poll() is None
            child.kill()
        assert not list(scratch.iterdir())
    resumed = train(config, tmp_path / "run", resume=True)
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in straight.history]
    assert same(resumed.model.state_dict(), straight.model.state_dict())
