"""Each remedy that a diagnosis of a kill prints is followed, and the run finishes."""

import os
import random
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bench_planner import configuration

from ogbnlib.config import TrainConfig
from ogbnlib.errors import GB, MB, parse_bytes
from ogbnlib.forecast.audit import memory_remedy
from ogbnlib.forecast.fitting import FITS
from ogbnlib.forecast.memory_parts import RUNTIME_BYTES
from ogbnlib.forecast.planner import plan
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.memory.killed import Action, KilledBy
from ogbnlib.memory.limits import Limit
from ogbnlib.memory.reading import Reading
from ogbnlib.memory.record import Record
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.sources.official import KNOWN

BASE: dict[str, Any] = {"epochs": 1, "train_eval": "never", "eval_splits": "valid"}
WIDE = {"num_neighbors": "15 10 5", "batch_size": 1024, "hidden_channels": 64}
KILLS: list[dict[str, Any]] = [
    {"loading": "eager"},
    {"loading": "lazy", "num_neighbors": "5 5"},
    {"loading": "eager", "undirected": True},
    {"loading": "shared"},
    {"loading": "shared", **WIDE},
    {"loading": "shared", "num_workers": 4, "persistent_workers": True, "batch_size": 1024},
    {"loading": "shared", "eval_num_neighbors": -1, "eval_batch_size": 1024, "undirected": True},
    {"loading": "store", **WIDE},
    {"loading": "store", "num_neighbors": "-1 -1", "batch_size": 1024},
    {"loading": "propagated", "model": "sign", "batch_size": 1024, "hidden_channels": 8192},
]

TIMES = int(os.environ.get("OGBNLIB_KILLS", "1"))  # kills of each; 3 for thirty in all


def remedies(actions: tuple[Action, ...]) -> list[tuple[dict[str, str], str]]:
    """(changes, new limit or "") of each remedy of a kill."""
    ways = []
    for action in actions:
        if action.id == "set":
            words = shlex.split(action.arguments["changes"])
            ways.append((dict(word.split("=", 1) for word in words), ""))
        elif action.id == "raise limit":
            ways.append(({}, action.arguments["limit"]))
    return ways


def ids(actions: tuple[Action, ...]) -> list[str]:
    return [action.id for action in actions]


def follow(killed: Run, folder: Path, limit: int) -> list[str]:
    """Follow each remedy of a killed run; return a sentence for each that did not help."""
    ways, failures = remedies(killed.diagnosis.actions), []
    for number, (changes, size) in enumerate(ways):
        config = TrainConfig.create({**killed.config.model_dump(), **changes})
        done = run(config, size or limit, run_dir=folder / f"way-{number}", echo=False)
        if done.exit_code != 0:
            failures.append(f"{limit // MB}: {changes or size}: {done.diagnosis}")
    return failures if ways else [f"no remedy: {killed.diagnosis}"]


def killed_below(
    settings: dict[str, Any], part: float, data: Path, folder: Path
) -> tuple[Run, int]:
    """A run that was killed under a limit that was lowered until then, and that limit."""
    config = configuration({**BASE, **settings}, data)
    forecast = predict(config)
    limit = RUNTIME_BYTES + int(part * (forecast.least_bytes - RUNTIME_BYTES))
    while True:
        done = run(config, limit, run_dir=folder / f"killed-{limit}", echo=False)
        if done.exit_code == 137:
            return done, limit
        limit = min(limit, done.held_peak_bytes) - 10 * MB


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remedies")


def record_of(phase: str, peak_bytes: int, event: dict[str, Any] | None = None) -> Record:
    """The record of a run that was killed in `phase` with `peak_bytes` in use."""
    record = Record(origin_s=0.0)
    record.event({"event": "start", "time_s": 0.0})
    if event is not None:
        record.event({"event": "dataset", "time_s": 0.1, **event})
    if phase:
        record.event({"event": "begin", "time_s": 0.2, "phase": phase})
        record.sample(0.3, Reading(1, rss_anon_bytes=peak_bytes, rss_shmem_bytes=0))
    return record


LARGE = KNOWN["ogbn-papers100M"]
PAPERS = TrainConfig.create(dataset="ogbn-papers100M", loading="eager")


def test_the_smallest_change_that_the_planner_says_fits_comes_first() -> None:
    killed = KilledBy(60 * GB)
    record = record_of("build test loader", 59 * GB, asdict(LARGE))
    (changes, _), (_, size) = remedies(memory_remedy(PAPERS, record, killed))
    assert changes == {"loading": "store"}
    assert plan(PAPERS.replace(**changes), "60 GB").verdict == FITS
    assert plan(PAPERS, size).verdict == FITS
    assert plan(PAPERS, parse_bytes(size) - 3 * GB).verdict != FITS


def test_the_limit_that_killed_is_the_one_that_changes_fit_and_the_one_to_raise() -> None:
    record = record_of("build test loader", 30 * GB)
    *_, outer = memory_remedy(PAPERS, record, KilledBy(62 * GB, "/sys/fs/cgroup/job_7", 8 * GB))
    assert (outer.id, outer.arguments["cgroup"]) == ("raise limit", "/sys/fs/cgroup/job_7")
    need_bytes = parse_bytes(outer.arguments["limit"])
    assert plan(PAPERS, need_bytes - 8 * GB).verdict == FITS
    assert ids(memory_remedy(PAPERS, record, KilledBy()))[-1] == "raise limit"


def test_memory_beyond_the_forecast_counts_for_each_suggestion() -> None:
    limit = 80 * GB
    config = PAPERS.replace(loading="shared")
    expected = predict(config, memory_limit_bytes=limit).least_bytes
    assert plan(config, limit).verdict == FITS
    found = remedies(memory_remedy(config, record_of("load", limit), KilledBy(limit)))
    ways = [changes for changes, size in found if not size]
    for changes in ways:
        forecast = predict(config.replace(**changes), memory_limit_bytes=limit)
        beyond = limit - expected  # which the run took, and a changed one may take again
        assert forecast.least_bytes + forecast.margin_bytes + beyond <= limit
    assert ways
    assert parse_bytes(found[-1][1]) >= limit + 0.08 * expected


def test_a_run_whose_memory_climbs_is_told_to_find_the_leak_and_no_parameter() -> None:
    record = record_of("train epoch", GB)
    for epoch in range(1, 9):
        record.event({"event": "begin", "time_s": epoch, "phase": "train epoch"})
        held = {"held_bytes": (400 + 50 * epoch) * MB}
        record.event({"event": "end", "time_s": epoch + 0.5, "phase": "train epoch", **held})
    (action,) = memory_remedy(PAPERS, record, KilledBy(GB))
    assert (action.id, action.arguments) == ("find leak", {"slope_bytes": 50.0 * MB})


def test_what_the_planner_can_not_know_is_said(tmp_path: Path) -> None:
    gone = PAPERS.replace(dataset=str(tmp_path / "nowhere"))
    record = record_of("load", GB)
    assert ids(memory_remedy(gone, record, KilledBy(GB))) == ["name data"]
    known = record_of("load", 30 * GB, asdict(LARGE))  # its size is in the run's record
    ways = remedies(memory_remedy(gone, known, KilledBy(60 * GB)))
    assert {"loading": "store"} in [changes for changes, _ in ways]
    own = PAPERS.replace(model=f"{tmp_path}/net.py:Net")
    assert ids(memory_remedy(own, record, KilledBy(GB))) == ["try model"]


@pytest.mark.parametrize("phase", ["", "open", "train epoch"])
def test_with_no_change_that_fits_the_smallest_limit_is_named(phase: str) -> None:
    config = PAPERS.replace(loading="store", batch_size=16, num_neighbors=[2], num_workers=0)
    actions = memory_remedy(config, record_of(phase, 300 * MB), KilledBy(300 * MB))
    assert ids(actions) == ["nothing fits", "raise limit"]
    assert plan(config, actions[-1].arguments["limit"]).verdict == FITS


SLOW = range(len(KILLS)) if TIMES > 1 else (1, 4, 6, 7)


@pytest.mark.parametrize(
    ("number", "part"),
    [(0, 0.5), (9, 0.3), *(pytest.param(kill, None, marks=pytest.mark.slow) for kill in SLOW)],
)
def test_each_remedy_of_a_killed_run_is_followed_and_finishes(
    number: int,
    part: float | None,
    data: Path,
    tmp_path: Path,
    kernel_limit: Callable[[int], Limit],
) -> None:
    kernel_limit(GB).close()  # skips where the kernel enforces none
    draw = random.Random(number)
    failures = []
    for time in range(1 if part else TIMES):
        folder = tmp_path / str(time)
        killed, limit = killed_below(KILLS[number], part or draw.uniform(0.2, 0.97), data, folder)
        print(limit // MB, killed.diagnosis)
        failures += follow(killed, folder, limit)
    assert failures == []
