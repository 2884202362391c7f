"""Promises of `budget`: what a loader may take is one rule, for the loaders and for the forecast."""

from __future__ import annotations

import time

import pytest

from ogbnlib.errors import GB, MB
from ogbnlib.forecast.budget import (
    QUEUE_BATCHES,
    QUEUE_BYTES,
    BatchShape,
    Windows,
    choose_windows,
    queue_depth,
    window_budget,
)

PAIR = Windows(10, True, 450 * MB, GB, 5)
ALONE = Windows(50, False, GB, GB, 1)
CACHE = Windows(None, True, 0, GB)


@pytest.mark.parametrize("training", [None, CACHE, ALONE])
def test_an_evaluation_gets_everything_unless_two_windows_are_held(training: Windows | None) -> None:
    assert window_budget("auto", GB, training) == GB


def test_an_evaluation_gets_what_two_windows_leave() -> None:
    assert window_budget("auto", GB, PAIR) == GB - 2 * PAIR.window_bytes
    assert window_budget(GB, None, PAIR) == GB - 2 * PAIR.window_bytes


def test_a_lookahead_of_a_size_is_shared_by_the_ranks_and_off_is_off() -> None:
    assert window_budget(GB, 5 * GB, sharers=4) == GB // 4
    assert window_budget("auto", 5 * GB, sharers=4) == 5 * GB  # what is left is each rank's own already
    assert window_budget("off", GB, PAIR) is None
    assert window_budget("auto", None, PAIR) is None


def test_two_windows_in_training_leave_a_tenth_and_two_in_an_evaluation_leave_nothing() -> None:
    files = {"colptr": 10 * MB, "row": 100 * MB, "x": 400 * MB}
    for training, share in ((True, 0.45), (False, 0.5)):
        chosen = choose_windows(files, 10**6, 256, BatchShape((128, 128), (128,)), 9000, 300 * MB, training=training)
        assert chosen.overlapped
        assert 0.8 * share * 300 * MB < chosen.window_bytes <= share * 300 * MB


def test_a_queue_holds_fewer_items_the_larger_they_are_and_always_one() -> None:
    assert [queue_depth(size) for size in (0, 1, QUEUE_BYTES // 3, QUEUE_BYTES, 2 * QUEUE_BYTES)] == [
        QUEUE_BATCHES, QUEUE_BATCHES, 3, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("epochs", [10_000, 2**31 - 1])
def test_windows_on_disk_are_chosen_at_once_for_any_number_of_epochs(epochs: int) -> None:
    files = {"colptr": 9 * 10**8, "row": 65 * 10**8, "x": 284 * 10**8}
    batch = BatchShape((128, 384, 768), (384, 768))
    begun = time.perf_counter()
    values = {"training": True, "room_bytes": 30 * GB}
    chosen = choose_windows(files, 111_059_956, 256, batch, 9432, 3 * GB, passes=epochs, **values)
    assert time.perf_counter() - begun < 1
    assert chosen.spooling is not None
    assert chosen.spooling.disk_bytes <= 30 * GB
    few = choose_windows(files, 111_059_956, 256, batch, 9432, 3 * GB, passes=20, **values)
    assert 0.8 < chosen.moved_bytes / few.moved_bytes <= 1.02  # an epoch of a long run costs no more
