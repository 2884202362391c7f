"""Features that are the labels, in every kind of source."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ogbnlib import convert
from ogbnlib.errors import InputError
from ogbnlib.sources.arrays import from_arrays
from ogbnlib.sources.leaks import refuse_leaks
from ogbnlib.sources.source import Source

NODES = 900
SPLITS = {
    "train": np.arange(0, NODES, 3),
    "valid": np.arange(1, NODES, 3),
    "test": np.arange(2, NODES - 90, 3),
}


def source(x: Any = None, **changed: Any) -> Source:
    rng = np.random.default_rng(0)
    if x is None:
        x = rng.normal(size=(NODES, 3))
    y = rng.integers(0, 5, NODES)
    arrays = {"y": y, "splits": SPLITS, **changed}
    return from_arrays("own", rng.integers(0, NODES, (2, 4000)), x, arrays["y"], arrays["splits"])


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
    assert read == [0]
    x[:, 1] = y
    assert "x, column 1: " in of(x)
    x[NODES - 1, 1] = 0.5  # the last node differs
    assert of(x) == ""


def test_a_column_of_the_labels_is_refused_by_its_name(tmp_path: Path) -> None:
    g = source()
    edges = np.concatenate([np.stack(pair) for pair in g.edge_chunks(10_000)], axis=1)
    labels = np.concatenate([*g.label_chunks()])
    folder = tmp_path / "own"
    folder.mkdir()
    for role, values in {"edges": edges, "labels": labels, **SPLITS}.items():
        np.save(folder / f"{role}.npy", values)
    features = pd.DataFrame(next(g.x_chunks()), columns=["a", "b", "c"])
    features.insert(1, "topic", labels)
    features.to_csv(folder / "features.csv", index=False)
    with pytest.raises(InputError, match=r"features.csv, column 'topic': .*`left out`"):
        convert(folder, tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()
