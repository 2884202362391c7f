"""A plan for any graph, by its sizes alone."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ogbnlib.__main__ import app
from ogbnlib.errors import InputError
from ogbnlib.sources.sizes import take_sizes

SIZES = {"num_nodes": "30M", "num_edges": "0.3B", "num_features": "128", "num_train": "300k"}


def plan(*assignments: str) -> dict[str, Any]:
    options = [option for pair in assignments for option in ("--set", pair)]
    result = CliRunner().invoke(app, ["plan", "--json", *options, "--memory-limit", "64 GB"])
    return dict(json.loads(result.output))


def test_sizes_are_numbers_with_units() -> None:
    parameters = {**SIZES, "epochs": "2"}
    size = take_sizes(parameters)
    assert size is not None
    assert parameters == {"epochs": "2"}
    assert (size.num_nodes, size.num_edges, size.num_seeds["train"]) == (3e7, 3e8, 3e5)
    assert take_sizes({"epochs": "2"}) is None


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        *(({"num_nodes": wrong}, "num_nodes: .*whole number") for wrong in ("x", "0", "1.5")),
        ({"num_features": None}, "num_features: .*num_nodes, num_edges, num_train"),
        ({"dataset": "data/papers"}, "dataset"),
    ],
)
def test_sizes_that_are_none_are_refused(changed: dict[str, Any], match: str) -> None:
    sizes = {name: value for name, value in {**SIZES, **changed}.items() if value is not None}
    with pytest.raises(InputError, match=match):
        take_sizes(sizes)


def test_a_plan_follows_the_sizes() -> None:
    assignments = [f"{name}={value}" for name, value in SIZES.items()]
    small = plan(*assignments, "loading=shared")
    assert small["dataset"] == "your graph"
    features = 30 * 10**6 * 128 * 4
    assert features < small["peak_bytes"] < features + 4 * 3 * 10**8 + 2**30
    assert plan(*assignments, "loading=store")["verdict"] == "FITS"
