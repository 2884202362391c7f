"""Features that tell the labels or the splits, in every kind of source."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ogbnlib.errors import InputError
from ogbnlib.sources.arrays import from_arrays
from ogbnlib.sources.leaks import refuse_leaks
from ogbnlib.sources.source import Source

NODES = 900
SPLITS = {"train": np.arange(0, NODES, 3), "valid": np.arange(1, NODES, 3)}
SPLITS["test"] = np.arange(2, NODES - 90, 3)


def source(x: Any = None, **changed: Any) -> Source:
    rng = np.random.default_rng(0)
    if x is None:
        x = rng.normal(size=(NODES, 3))
    y = rng.integers(0, 5, NODES)
    arrays = {"y": y, "splits": SPLITS, **changed}
    return from_arrays("own", rng.integers(0, NODES, (2, 4000)), x, arrays["y"], arrays["splits"])


def member(split: str) -> np.ndarray[Any, Any]:
    """Ones at the nodes of a split."""
    return np.isin(np.arange(NODES), SPLITS[split]).astype(np.float32)


def with_column(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.insert(np.random.default_rng(1).normal(size=(NODES, 3)), 1, column, axis=1)


def leaks(source: Source) -> str:
    """The refusal of a source, "" for none."""
    try:
        refuse_leaks(source)
    except InputError as error:
        return str(error)
    return ""


def test_the_comparison_with_the_labels_reads_no_more_than_it_needs() -> None:
    y = np.random.default_rng(0).integers(0, 5, NODES)
    read = []

    def of(x: np.ndarray[Any, Any]) -> str:
        def chunks() -> Iterator[np.ndarray[Any, Any]]:
            for begin in range(0, NODES, 70):  # labels come in other pieces
                read.append(begin)
                yield x[begin : begin + 70]

        labels = [y[:100], y[100:110], y[110:]]
        return leaks(replace(source(x, y=y), x_chunks=chunks, label_chunks=lambda: iter(labels)))

    x = np.random.default_rng(1).normal(size=(NODES, 3))
    assert of(x) == ""
    assert read == [0, 0]  # labels, then splits
    x[:, 1] = y
    assert "x, column 1: " in of(x)
    x[NODES - 1, 1] = 0.5  # the last node differs
    assert of(x) == ""


def test_masks_folds_and_numbers_of_splits_are_no_features() -> None:
    fold = 3 * member("valid") + 7 * member("test")
    for column in (member("train"), 1 - member("valid"), member("test"), fold):
        assert "x, column 1: " in leaks(source(with_column(column)))
    several = np.stack([member(split) for split in SPLITS], axis=1)
    assert "column 0, 1, 2: " in leaks(source(several))
    year = np.where(member("train") > 0, np.arange(NODES) % 7, 9)  # 7 years are trained on
    changed = member("train")
    changed[0] = 0  # one node differs
    for column in (year, changed, np.ones(NODES)):
        assert leaks(source(with_column(column))) == ""
    x = np.zeros((NODES, 200))  # a word of the only node of a small split may be chance
    x[5, 17] = 1
    splits = {"train": np.arange(5), "valid": [7], "test": [5]}
    assert leaks(source(x, splits=splits)) == ""
