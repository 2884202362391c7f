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


def test_figures_are_compared_and_nan_is_not_measured() -> None:
    assert verdict(verdicts.at_least(0.3, 0.3)) == verdict(verdicts.at_most(0.3, 0.3)) == HOLDS
    assert verdict(verdicts.at_least(0.29, 0.3)) == verdict(verdicts.at_most(0.31, 0.3)) == FAILS
    assert verdict(verdicts.close_to(16.4, 15)) == HOLDS
    assert verdict(verdicts.close_to(24.1, 15)) == FAILS
    for comparison in (verdicts.at_least, verdicts.at_most, verdicts.close_to):
        assert verdict(comparison(math.nan, 1.0, "{:.0%}")) == UNKNOWN
        assert "nan" not in comparison(math.nan, 1.0, "{:.0%}").measured


def test_a_figure_says_its_tolerance(make: Make) -> None:
    assert_has(verdicts.at_least(0.25, 1, "{:.0%} of the time"), "25%", "100%")
    assert_has(verdicts.at_most(3.2, 2, "finished in {:.1f} s of 5"), "3.2 s of 5", "2.0")
    assert_has(verdicts.close_to(24.1, 15, "{:.1f} GB"), "24.1 GB", "10%", "15.0")
    assert_has(verdicts.takes_at_most([1.0], [1.0], 1.15), "1.15")
    assert_has(verdicts.lower_peak(make("before"), make("lower", 489)), "500 MB", "489 MB", "2%")


def assert_has(found: Finding, *facts: str) -> None:
    assert all(fact in found.measured for fact in facts), found.measured


def test_peaks_of_finished_runs_are_compared_beyond_noise(make: Make) -> None:
    before, equal, lower = make("before", 500), make("equal", 492), make("lower", 489)
    assert verdict(verdicts.lower_peak(before, equal)) == FAILS
    assert verdict(verdicts.lower_peak(before, lower)) == HOLDS
    assert verdict(verdicts.higher_peak(before, make("higher", 560), by_bytes=60 * MB)) == HOLDS
    assert verdict(verdicts.higher_peak(before, make("almost", 559), by_bytes=60 * MB)) == FAILS
    killed = verdicts.lower_peak(before, make("killed", 100, exit_code=137))
    assert (killed.holds, "137" in killed.measured) == (None, True)


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
    for check in (verdicts.finished, verdicts.killed):
        assert check({"c": unborn}).holds is None
    assert verdict(verdicts.killed({"b": dead, "c": unborn})) == HOLDS
    wide, narrow = (
        plan(TrainConfig.create(dataset="ogbn-papers100M"), limit) for limit in ("512 GB", "8 GB")
    )
    assert verdict(verdicts.fits({"wide": wide, "narrow": narrow})) == HOLDS
    assert verdict(verdicts.fits({"narrow": narrow})) == FAILS


def test_a_belief_of_which_only_parts_are_true_is_half_true() -> None:
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
    noise = verdicts.takes_at_most([1.0, 1.4], [1.0, 1.2], 1.15)
    belief, instead = "batches do", "Loaders do"
    pair = belief, instead
    assert finding({pair: no}) == instead
    assert finding({pair: yes}) == "Batches do"
    assert finding({pair: {"here": no, "at scale": yes}}) == instead
    assert finding({pair: {"here": no, "on a GPU": unknown}}) == instead
    assert finding({pair: {"here": yes, "on a GPU": unknown}}).startswith("Batches do (")
    assert finding({belief: no}).endswith(belief)
    for undecided in (unknown, noise):
        assert "do" not in finding({pair: undecided}).split()


def finding(beliefs: dict[Any, Any]) -> str:
    (row,) = verdicts.table(beliefs).itertuples()
    return row.finding
