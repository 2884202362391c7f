"""What is said to fit under forecast + margin is not killed, and uses most of it.

A sample of `bench_planner.py --random 60`: configurations whose forecasts were furthest off.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bench_planner import outcome

from ogbnlib.errors import GB
from ogbnlib.memory.limits import Limit

ONCE = {"epochs": 1, "train_eval": "never", "eval_splits": "valid"}
OWN = {"loading": "shared", "num_neighbors": "10 5"}
WORKERS = {"num_workers": 2, "persistent_workers": True}
SLOW: list[dict[str, Any]] = [
    {"loading": "shared", "undirected": True, "num_neighbors": "-1 -1 -1", "batch_size": 256},
    {**OWN, "model": "Edge", "batch_size": 512, "hidden_channels": 64},
    *({**OWN, "model": model} for model in ("Frozen", "Buffer", "List")),
    {"loading": "shared", "num_neighbors": "5 3 2", "batch_size": 64, "hidden_channels": 4096},
]
FAST: list[dict[str, Any]] = [
    {"loading": "store", "num_neighbors": "15 10", "batch_size": 1024, "hidden_channels": 64},
    {"loading": "shared", "graph": "hubs-1-400000-64", "eval_num_neighbors": -1},
    {**OWN, "model": "Table"},
    {"loading": "propagated", "model": "sign", "hidden_channels": 512, "precision": "bf16"},
    {"loading": "eager", **WORKERS, "epochs": 2, "train_eval": "final"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verdicts")


@pytest.mark.parametrize(
    "settings",
    [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)],
    ids=lambda given: f"{given['loading']}-{given.get('num_neighbors', '')}",
)
def test_what_fits_uses_three_quarters_of_its_forecast(
    settings: dict[str, Any], folder: Path, kernel_limit: Callable[[int], Limit]
) -> None:
    kernel_limit(GB).close()  # skips where the kernel enforces none
    done = outcome({**ONCE, **settings}, folder)
    assert not done.is_wrong, done
    assert not done.is_generous, done
    print(done)
