"""A forecast's phases are those of a run and hold what it holds, for any config and size."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from all_policies import IN_MEMORY, SAMPLED, settings

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.audit import _kind_of
from ogbnlib.forecast.memory_parts import RUNTIME_BYTES
from ogbnlib.forecast.run_forecast import Forecast, predict
from ogbnlib.graph.store import GraphSize
from ogbnlib.registry import POLICIES
from ogbnlib.runs.folder import Run
from ogbnlib.sources.official import KNOWN
from ogbnlib.training.train import train

MB, GB = 2**20, 10**9
NODES, EDGES = 111_059_956, 1_615_685_872
PAPERS = KNOWN["ogbn-papers100M"]


def config(**values: Any) -> TrainConfig:
    return TrainConfig.create({"dataset": "ogbn-papers100M", **values})


def forecast(size: GraphSize = PAPERS, limit: int | None = None, **values: Any) -> Forecast:
    return predict(config(**values), size, memory_limit_bytes=limit)


FEATURES, COO, CSC = 128 * 4 * NODES, 16 * EDGES, 8 * (NODES + 1) + 16 * EDGES
SORT = 32 * EDGES - CSC
SHARED = 8 * (NODES + 1) + 4 * EDGES
TABLE = [
    ({"loading": "eager"}, 188, FEATURES + COO + 3 * CSC + SORT),
    ({"loading": "lazy", "train_eval": "never"}, 161, FEATURES + COO + 2 * CSC + SORT),
    ({"loading": "shared", "feature_dtype": "float16"}, 36, FEATURES // 2 + SHARED),
]


@pytest.mark.parametrize(
    ("values", "decimal_gb", "graph_bytes"), TABLE, ids=lambda part: str(part)[:40]
)
def test_papers100m_as_measured(values: dict[str, Any], decimal_gb: int, graph_bytes: int) -> None:
    plan = forecast(**values)
    assert plan.peak_bytes / GB == pytest.approx(decimal_gb, abs=1)
    rest = plan.peak_bytes - graph_bytes - RUNTIME_BYTES - 2 * NODES
    assert 0 <= rest < 10 * MB  # the batch, its step and the model


@pytest.mark.parametrize("spool", ["off", "60 GB"])
def test_papers100m_from_disk_holds_under_2_gb_beside_its_windows(spool: str) -> None:
    plan = forecast(limit=4 * 2**30, loading="store", epochs=20, spool=spool)
    passing = ("windows", "pass for the spool", "next pass for the spool")
    for phase in plan.phases:
        assert phase.held_bytes - sum(phase.parts.get(name, 0) for name in passing) < 2 * GB
    assert plan.windows is not None
    assert plan.windows.window_batches
    assert plan.peak_bytes < 4 * 2**30
    assert plan.least_bytes < 2 * GB
    assert (plan.windows.spooling is not None) == (spool != "off")


def resident(run_dir: Path, epochs: int) -> dict[str, set[str]]:
    """The CSCs that a run held in each kind of phase, from its events."""
    held: dict[str, set[str]] = {}
    parts: set[str] = set()
    open_: list[str] = []
    epoch = 0
    for event in Run(run_dir).events:
        if event["event"] == "begin":
            epoch = event.get("epoch", epoch)
            name = "train" if event["phase"] == "train epoch" else event["phase"]
            open_.append(name.replace("eval", "final") if epoch == epochs else name)
        elif event["event"] == "end":
            held.setdefault(open_.pop(), set()).update(parts)
        elif event["event"] == "part" and event["name"].endswith("CSC"):
            parts = parts | {event["name"]} if event["bytes"] else parts - {event["name"]}
        for phase in open_:
            held.setdefault(phase, set()).update(parts)
    return {name: held[name] for name in held if name.startswith(("train", "eval", "final"))}


EVALUATIONS = [
    {"train_eval": "every_epoch", "epochs": 2},
    {"train_eval": "final", "epochs": 2, "eval_splits": "valid"},
    {"train_eval": "never", "epochs": 2, "eval_every": 2},
    {"epochs": 0},
]


@pytest.mark.parametrize("values", EVALUATIONS, ids=str)
@pytest.mark.parametrize("policy", IN_MEMORY)
def test_each_phase_of_a_run_is_foreseen_with_the_loaders_that_are_resident_in_it(
    tiny_config: Callable[..., TrainConfig], tmp_path: Path, policy: str, values: dict[str, Any]
) -> None:
    run = tiny_config(loading=policy, **values)
    train(run, tmp_path / "run")
    plan = predict(run)
    phases = [one for one in plan.phases if one.name.startswith(("train", "eval", "final"))]
    foreseen = {one.name: {part for part in one.parts if part.endswith("CSC")} for one in phases}
    assert resident(tmp_path / "run", run.epochs) == foreseen
    begun = {event["phase"] for event in Run(tmp_path / "run").events if event["event"] == "begin"}
    # What takes no memory worth a forecast; under `shared` a loader is a view.
    own = {"checkpoint", "release", "compile kernels", "open"}
    if policy == "shared":
        own |= {f"build {split} loader" for split in ("train", "valid", "test")}
    kinds = {_kind_of(phase) for phase in begun} - own
    assert {_kind_of(phase.name) for phase in plan.phases} == kinds


EMPTY = replace(PAPERS, num_seeds={"train": 10, "valid": 0, "test": 0})
VALUES: list[dict[str, Any]] = [
    {},
    {"epochs": 0},
    {"eval_splits": "", "train_eval": "never"},
    {"num_neighbors": [-1, -1]},
    {"num_workers": 4, "persistent_workers": True},
    {"model": "gat", "undirected": True},
]


@pytest.mark.parametrize("values", VALUES, ids=str)
@pytest.mark.parametrize("size", [PAPERS, KNOWN["ogbn-arxiv"], EMPTY], ids=lambda size: size.name)
def test_any_config_has_a_forecast_under_any_limit(size: GraphSize, values: dict[str, Any]) -> None:
    for policy, limit in itertools.product(POLICIES, (None, MB, 400 * MB, 2**36)):
        model = {} if policy in SAMPLED else settings(policy)
        plan = forecast(size, limit, **(settings(policy) | values | model))
        assert 0 < plan.least_bytes <= plan.peak_bytes
        assert min(min(phase.parts.values()) for phase in plan.phases) >= 0
        assert plan.epoch_s > 0


def test_the_window_that_waits_for_the_next_epoch_is_held_during_evaluations_between() -> None:
    values = {"num_neighbors": [15, 10, 5], "batch_size": 1024, "feature_dtype": "float16"}
    plan = forecast(limit=8 * 2**30, loading="store", epochs=2, **values)
    assert plan.windows is not None
    for phase in plan.phases:
        assert ("next window to train on" in phase.parts) == phase.name.startswith("eval")
