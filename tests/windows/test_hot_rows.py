"""Rows that stay in memory: the most visited nodes, as many as have room, and their own values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_loaders
from conftest import batches_of, force_windows
from store_loaders import assert_equal

from ogbnlib import TrainConfig, convert, run
from ogbnlib.errors import MB
from ogbnlib.forecast.pass_memory import Spooling, Windows
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.memory.limits import Limit
from ogbnlib.sources.synth import synthesize_store
from ogbnlib.windows.hot_rows import HotRows
from ogbnlib.windows.plan import ID_BYTES

N, F = 1000, 4


def chosen(windows: list[Any], rows: float, num_nodes: int = N) -> HotRows:
    room = int(rows * (F * 2 + ID_BYTES)) + num_nodes * 3 // 16
    ids = [np.array(window, np.int32) for window in windows]
    return HotRows.chosen(ids, num_nodes, F, np.dtype(np.float16), room)


def test_the_nodes_that_most_windows_visit_are_chosen() -> None:
    windows = [[1, 2, 3, 9], [1, 2, 8, 9], [2, 4, 9], [1, 9]]  # 9 four times, 1 and 2 three times
    assert chosen(windows, 100).ids.tolist() == [1, 2, 9]  # the others come once
    assert chosen(windows, 2.9).ids.tolist() == [1, 9]
    assert chosen(windows, 1).ids.tolist() == [9]
    assert chosen(windows, 0).ids.tolist() == []
    assert chosen(windows, -100).ids.tolist() == []
    assert chosen([], 10).ids.tolist() == []


def test_visits_are_told_apart_up_to_255() -> None:
    windows = [[5, 6]] * 300 + [[5]] * 100 + [[7]] * 200
    assert chosen(windows, 2).ids.tolist() == [5, 6]
    # more nodes than have room are visited by as many windows as are counted
    assert chosen([[5, 6, 7], [5, 6, 7, 8]] * 300, 1).ids.tolist() == [5]
    assert chosen([[5, 6, 7], [5, 6, 7, 8]] * 300, 0).ids.tolist() == []


def test_rows_are_merged_in_the_order_of_the_ids() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, F)).astype(np.float16)
    windows = [np.sort(rng.choice(N, 300, replace=False)) for _ in range(6)]
    hot = chosen(windows, 150)
    assert len(hot.ids) == 150
    for first in range(0, 150, 40):
        part = hot.ids[first : first + 40]
        hot.put(first, x[part].view(np.uint8))
    for ids in [*windows, hot.ids, np.empty(0, np.int64)]:
        missing = hot.missing(ids)
        assert np.intersect1d(missing, hot.ids).size == 0
        features = np.zeros((len(ids), F), np.float16)
        first = len(ids) - len(missing)
        features[first:] = x[missing]
        hot.insert(ids, features, first)
        np.testing.assert_array_equal(features, x[ids])


@pytest.mark.parametrize("feature_dtype", ["float32", "float16", "int8"])
def test_hot_rows_only_write_less(tmp_path: Path, tiny_dir: Path, feature_dtype: Any) -> None:
    store = convert(tiny_dir, tmp_path / "store", feature_dtype=feature_dtype, progress=False)
    batches = []
    written = []
    for hot_bytes in (0, 4500):
        windows = Windows(3, 0, MB, spooling=Spooling(100, 200, 100, MB, 0, hot_bytes))
        loader = store_loaders.build(store, windows, last_epoch=3, spool_dir=tmp_path)
        batches.append([batch for epoch in (1, 2, 3) for batch in batches_of(loader, epoch)])
        passes = [event for event in loader.seen if "kept_rows" in event]
        written.append(sum(event["bytes_written"] for event in passes))
        assert any(event["kept_rows"] for event in passes) == (hot_bytes > 0)
        loader.close()
    assert_equal(*batches)
    assert 0 < written[1] < 0.7 * written[0]


@pytest.mark.slow
@pytest.mark.parametrize("spool", ["50 MB", "300 MB"])  # several structure files, and one
def test_a_run_with_rows_in_memory_stays_within_its_forecast(
    tmp_path: Path, kernel_limit: Callable[[int], Limit], spool: str
) -> None:
    limit = 560 * MB
    kernel_limit(limit).close()  # skips where the kernel enforces none
    store = synthesize_store(tmp_path / "store", 0.02, feature_dtype="int8", progress=False)
    config = TrainConfig.create(
        dataset=str(store.path), loading="store", spool=spool, epochs=3,
        num_neighbors=[5, 5], batch_size=256, hidden_channels=16, eval_splits=["valid"],
        train_eval="never",
    )  # fmt: skip
    force_windows("100 MB")
    forecast = predict(config, store, memory_limit_bytes=limit)
    assert forecast.windows is not None
    assert forecast.windows.spooling is not None
    assert forecast.windows.spooling.hot_bytes > 20 * MB
    done = run(config, limit, run_dir=tmp_path / "run")
    assert done.exit_code == 0
    assert any(event.get("kept_rows") for event in done.events)
    assert done.peak_bytes <= forecast.peak_bytes
