"""Promises about a run's report: scikit-learn's figures, of the model that the run kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import classification_report

from ogbnlib import InputError, Run, TrainConfig, open_store, predict
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]
QUIET: dict[str, Any] = {"progress": False, "say": lambda text: None}


def test_a_report_is_that_of_sklearn(tiny_config: Config, tiny_store: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    last = train(tiny_config(), run_dir, progress=False).history[-1]
    store = open_store(tiny_store)
    nodes = store.splits["test"]
    path = predict(run_dir, tmp_path / "out.npy", nodes=nodes, sampled=True, **QUIET)
    how: dict[str, Any] = {"output_dict": True, "zero_division": 0}
    expected = classification_report(store.y[nodes], np.load(path), **how)
    report = Run.open(run_dir).report(**QUIET)
    assert report.accuracy == last["test"] == expected["accuracy"]
    assert report.macro_f1 == pytest.approx(last["test_macro_f1"])
    assert report.macro_f1 == pytest.approx(expected["macro avg"]["f1-score"])
    for name, row in report.classes.iterrows():
        theirs = expected[name]
        ours = [row["precision"], row["recall"], row["f1"], row["count"]]
        assert ours == pytest.approx([theirs[key] for key in theirs])
    assert f"{report.macro_f1:.4f}" in str(report)
    valid = Run.open(run_dir).report("valid", **QUIET)
    assert valid.accuracy == last["valid"]
    with pytest.raises(InputError, match=r"^split: .*train, valid, test"):
        Run.open(run_dir).report("all", **QUIET)
