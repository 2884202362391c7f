"""Promises of `child`: the first rank to end is the one that failed by itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ogbnlib.runs.codes import UNFINISHED
from ogbnlib.training.child import _first_end


@pytest.mark.parametrize(
    ("exit_codes", "code"),
    [
        ([-15, 1, 143], 1),
        ([143, -9, 1], 137),
        ([-15, -15], 143),  # terminated from outside
        ([143, -15], UNFINISHED),  # one hangs, and the other waited for it
    ],
)
def test_the_first_end_is_that_of_the_rank_that_failed(
    tmp_path: Path, exit_codes: list[int], code: int
) -> None:
    failures = {
        rank: SimpleNamespace(exitcode=exitcode, timestamp=100, pid=7)
        for rank, exitcode in enumerate(exit_codes)
    }
    failures[len(failures)] = SimpleNamespace(exitcode=-9, timestamp=130, pid=8)  # by the launcher
    assert _first_end(failures, str(tmp_path)) == code
    assert (tmp_path / "events.jsonl").exists() == (code != UNFINISHED)
