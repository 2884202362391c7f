"""Promises of `verdicts`: computed from measurements, above noise, and never from the peak of a
killed run."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, write_run

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.planner import plan
from ogbnlib.notebook import verdicts
from ogbnlib.notebook.verdicts import Finding
from ogbnlib.runs.folder import Run

Make = Callable[..., Run]
HOLDS, FAILS, UNKNOWN, UNDECIDED = "true", "false", "not measured", "undecided here (noise)"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a run with a peak of `peak` MB of memory in use."""

    def make(
        name: str,
        peak: float = 500,
        *,
        exit_code: int = 0,
        events: list[dict[str, Any]] | None = None,
    ) -> Run:
        sample = {
            "time_s": 0.5,
            "rss_anon_bytes": peak * MB,
            "rss_shmem_bytes": 0,
            "rss_file_bytes": 0,
        }
        peaks = {"held_bytes": int(peak * MB)}
        how: dict[str, Any] = {"exit_code": exit_code, "events": events, "samples": [sample]}
        return Run.open(write_run(tmp_path / name, **how, sampled_peaks_bytes=peaks))

    return make


def verdict(found: Finding | dict[str, Finding]) -> str:
    (row,) = verdicts.table({"a belief": found}).itertuples()
    return row.verdict


def test_figures_are_compared_with_a_threshold_and_nan_is_not_measured() -> None:
    assert verdict(verdicts.at_least(0.3, 0.3)) == verdict(verdicts.at_most(0.3, 0.3)) == HOLDS
    assert verdict(verdicts.at_least(0.29, 0.3)) == verdict(verdicts.at_most(0.31, 0.3)) == FAILS
    assert verdict(verdicts.close_to(16.4, 15)) == HOLDS
    assert verdict(verdicts.close_to(24.1, 15)) == FAILS
    for comparison in (verdicts.at_least, verdicts.at_most, verdicts.close_to):
        assert verdict(comparison(math.nan, 1.0, "{:.0%}")) == UNKNOWN
        assert "nan" not in comparison(math.nan, 1.0, "{:.0%}").measured


def test_a_figure_says_its_tolerance() -> None:
    share = verdicts.at_least(0.25, 1, "{:.0%} of the time")
    assert share.measured == "25% of the time (true from 100% on)"
    at_most = verdicts.at_most(3.2, 2, "finished in {:.1f} s of 5")
    assert at_most.measured == "finished in 3.2 s of 5 (true up to 2.0)"
    assert verdicts.close_to(24.1, 15, "{:.1f} GB").measured == "24.1 GB (true within 10% of 15.0)"
    assert verdicts.takes_at_most([1.0], [1.0], 1.15).measured.endswith("; true up to 1.15)")


def test_peaks_are_compared_beyond_noise_and_only_of_runs_that_finished(make: Make) -> None:
    before, equal, lower = make("before", 500), make("equal", 492), make("lower", 489)
    assert verdict(verdicts.lower_peak(before, equal)) == FAILS
    assert verdict(verdicts.lower_peak(before, lower)) == HOLDS
    assert verdict(verdicts.higher_peak(before, make("higher", 560), by_bytes=60 * MB)) == HOLDS
    assert verdict(verdicts.higher_peak(before, make("almost", 559), by_bytes=60 * MB)) == FAILS
    assert verdicts.lower_peak(before, lower).measured.endswith("(true from 2% less on)")
    killed = verdicts.lower_peak(before, make("killed", 100, exit_code=137))
    assert killed == Finding("killed exit code 137", None)


def test_times_are_compared_only_beyond_their_noise() -> None:
    assert verdict(verdicts.takes_at_most([1.0, 1.1], [1.0, 1.2], 1.15)) == HOLDS
    assert verdict(verdicts.takes_at_most([2.0, 2.2], [1.0, 1.2], 1.15)) == FAILS
    assert verdict(verdicts.takes_at_most([1.0, 1.4], [1.0, 1.2], 1.15)) == UNDECIDED
    assert verdict(verdicts.takes_at_most([], [1.0], 1.15)) == UNKNOWN


def test_accuracies_are_compared_only_beyond_their_noise() -> None:
    assert verdict(verdicts.as_accurate(0.55, 0.5, 2000)) == HOLDS
    assert verdict(verdicts.as_accurate(0.5, 0.55, 2000)) == FAILS
    assert verdict(verdicts.as_accurate(0.51, 0.52, 2000)) == UNDECIDED


def test_runs_and_forecasts_under_a_limit(make: Make) -> None:
    alive, dead = make("alive"), make("dead", exit_code=137)
    assert verdict(verdicts.finished({"a": alive, "b": dead})) == HOLDS
    assert verdict(verdicts.finished({"b": dead})) == FAILS
    assert verdict(verdicts.killed({"a": alive, "b": dead})) == FAILS
    assert verdicts.killed({"b": dead}) == Finding("b exit code 137", True)
    unborn = make("unborn", exit_code=137, events=[{"time_s": 1.0, "event": "start"}])
    assert verdicts.killed({"c": unborn}) == Finding("c exit code 137 before it loaded data", None)
    assert verdicts.finished({"c": unborn}).holds is None
    assert verdict(verdicts.killed({"b": dead, "c": unborn})) == HOLDS
    wide, narrow = (
        plan(TrainConfig.create(dataset="ogbn-papers100M"), limit) for limit in ("512 GB", "8 GB")
    )
    assert verdict(verdicts.fits({"wide": wide, "narrow": narrow})) == HOLDS
    assert verdict(verdicts.fits({"narrow": narrow})) == FAILS


def test_a_belief_with_parts_is_half_true_where_only_some_are_and_shown_in_full() -> None:
    yes, no = verdicts.at_least(2, 1), verdicts.at_least(0, 1)
    unknown = verdicts.not_measured("needs a GPU")
    noise = verdicts.takes_at_most([1.0, 1.4], [1.0, 1.2], 1.15)
    assert verdict({"memory": yes, "time": no}) == "half true: memory true, time false"
    assert verdict({"memory": yes, "time": yes}) == HOLDS
    assert verdict({"memory": no, "time": no}) == FAILS
    table = verdicts.table({("x" * 200, "y" * 200): {"memory": yes, "time": no}})
    assert repr(table).splitlines() == [
        "y" * 200,
        f'    "{"x" * 200}": half true: memory true, time false',
        "    memory: 2 (true from 1 on); time: 0 (true from 1 on)",
    ]
    assert "x" * 200 in table._repr_html_()
    every = verdicts.table(
        {"a": yes, "b": no, "c": unknown, "d": {"memory": yes, "time": no}, "e": noise}
    )._repr_html_()
    assert len(set(re.findall("background-color: (#[0-9a-f]{6})", every))) == 5


def test_a_missing_part_hides_no_answer_of_another() -> None:
    yes, no = verdicts.at_least(2, 1), verdicts.at_least(0, 1)
    unknown = verdicts.not_measured("needs a GPU")
    on_both = {"on a GPU": unknown, "on the CPU": no}
    assert verdict(on_both) == "false: on the CPU; not measured: on a GPU"
    assert verdict({"memory": yes, "time": unknown}) == "true: memory; not measured: time"
    noise = verdicts.Finding("1.1 times", None, is_noise=True)
    assert verdict({"memory": yes, "time": noise}) == f"true: memory; {UNDECIDED}: time"
    assert verdict({"a": yes, "b": no, "c": unknown}) == (
        "half true: a true, b false, c not measured"
    )
    assert verdict({"a": noise, "b": unknown}) == f"{UNDECIDED}: a; not measured: b"


def test_each_row_begins_with_a_sentence_that_its_findings_carry() -> None:
    yes, no = verdicts.at_least(2, 1), verdicts.at_least(0, 1)
    unknown = verdicts.not_measured("needs a GPU")
    pair = "smaller batches save it", "Loaders, not batches, fill the memory"
    assert finding({pair: no}) == "Loaders, not batches, fill the memory"
    assert finding({pair: yes}) == "Smaller batches save it"
    assert finding({pair: {"here": no, "at full size": yes}}) == pair[1]
    assert finding({pair: {"here": no, "on a GPU": unknown}}) == pair[1]
    assert finding({pair: {"here": yes, "on a GPU": unknown}}) == (
        "Smaller batches save it (as far as measured: here)"
    )
    assert finding({pair: unknown}) == "Not measured here"
    noise = verdicts.takes_at_most([1.0, 1.4], [1.0, 1.2], 1.15)
    assert finding({pair: noise}) == "The noise is larger than the difference"
    assert finding({"smaller batches save it": no}) == "Not so: smaller batches save it"


def finding(beliefs: dict[Any, Any]) -> str:
    (row,) = verdicts.table(beliefs).itertuples()
    return row.finding
