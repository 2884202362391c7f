"""Sizes of graphs for planning: of official data sets, and of a graph of one's own."""

import re
from typing import Any

from ..errors import InputError
from ..graph.store import GraphSize
from ..graph.store_format import SPLITS

# The official data sets that can be converted to a store. Sizes: Open Graph Benchmark (Hu et al.,
# NeurIPS 2020), table 2, and the data sets' web pages. OGB's reader adds the reverse edges of
# ogbn-products.
KNOWN = {
    size.name: size
    for size in (
        GraphSize(
            *("ogbn-arxiv", 169_343, 1_166_243, 128, 40),  # name, nodes, edges, features, classes
            {"train": 90_941, "valid": 29_799, "test": 48_603},
        ),
        GraphSize(
            *("ogbn-products", 2_449_029, 2 * 61_859_140, 100, 47),
            {"train": 196_615, "valid": 39_323, "test": 2_213_091},
            undirected=True,
        ),
        GraphSize(
            *("ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 172),
            {"train": 1_207_179, "valid": 125_265, "test": 214_338},
        ),
    )
}
# names of the sizes among the parameters of `plan`
_NEEDED = ("num_nodes", "num_edges", "num_features", "num_train")
# Defaults of the optional sizes. Classes add little memory. Without valid and test nodes, the plan
# has no evaluation.
_OTHERS = {"num_classes": 100, "num_valid": 0, "num_test": 0}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
# digits with a point or commas, such as 1,000, then a unit
_NUMBER = re.compile(r"(\d[\d_,]*(?:\.\d+)?) ?([kmbg]?)", re.IGNORECASE)


def take_sizes(parameters: dict[str, Any]) -> GraphSize | None:
    """Take sizes of a graph, such as num_nodes=30M, out of a plan's parameters; None without any.

    Raises:
        InputError: a size is missing or is no number such as 30M, or `dataset` is also a parameter.
    """
    values = {name: parameters.pop(name) for name in (*_NEEDED, *_OTHERS) if name in parameters}
    if not values:
        return None
    if "dataset" in parameters:
        raise InputError(
            f"{', '.join(values)}: expected without dataset, which has its own sizes; leave one out"
        )
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise InputError(
            f"{', '.join(missing)}: expected beside {', '.join(values)}, such as {missing[0]}=30M"
        )
    sizes: dict[str, Any] = _OTHERS | {name: _number(name, value) for name, value in values.items()}
    seeds = {split: sizes.pop(f"num_{split}") for split in SPLITS}  # sizes of the splits
    return GraphSize("your graph", num_seeds=seeds, **sizes)


def _number(name: str, value: object) -> int:
    """Parse a whole number such as 30M, 1.6B, 300k or 1,000, from 1 (of valid and test from 0) on."""
    least = min(1, _OTHERS.get(name, 1))  # 0 where the default is 0
    match = _NUMBER.fullmatch(str(value).strip())
    if match is not None:
        digits, unit = match.groups()
        number = float(re.sub("[_,]", "", digits)) * _UNITS[unit.lower()]
        if least <= number <= 2**48 and round(number) == number:  # a float is exact up to 2**53
            return round(number)
    raise InputError(f"{name}: expected a whole number such as 300k, 30M or 1.6B, got {value!r}")
