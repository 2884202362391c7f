"""Promises of `report`: a run's forecast stands beside its measurement, and beside that of the full data set."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from conftest import MB, write_run

from ogbnlib.config import TrainConfig
from ogbnlib.forecast.phases import predict
from ogbnlib.forecast.sizes import size_of
from ogbnlib.notebook.tables import forecast_table
from ogbnlib.runs.folder import Run


def finished(folder: Path, dataset: Path, exit_code: int = 0, **config: object) -> Run:
    values = {"dataset": str(dataset), "loading": "shared", **config}
    peaks = {"anon_shmem_bytes": 400 * MB}
    write_run(folder, exit_code=exit_code, config=values, sampled_peaks_bytes=peaks)
    return Run(folder)


def test_a_forecast_stands_beside_its_measurement_and_the_full_size(tmp_path: Path, tiny_dir: Path) -> None:
    run = finished(tmp_path / "run", tiny_dir)
    row = forecast_table({"32": run}, "ogbn-papers100M").loc["32"]
    config = TrainConfig.load(run.run_dir / "config.json")
    here, there = predict(config), predict(config, size_of("ogbn-papers100M"))
    assert row["predicted MB"] == round(here.peak_bytes / MB)
    assert row["measured MB"] == 400
    assert row["error %"] == pytest.approx(100 * (here.peak_bytes / (400 * MB) - 1), abs=0.1)
    assert row["ogbn-papers100M GB"] == pytest.approx(there.peak_bytes / 2**30, abs=0.01)
    assert row["its peak in"] == there.peak.name


def test_a_killed_run_has_no_measured_peak_but_its_forecast(tmp_path: Path, tiny_dir: Path) -> None:
    row = forecast_table({"eager": finished(tmp_path / "run", tiny_dir, exit_code=137, loading="eager")}).loc["eager"]
    assert math.isnan(row["measured MB"])
    assert math.isnan(row["error %"])
    assert row["predicted MB"] > 0


def test_a_forecast_starts_from_the_runtime_it_is_given(tmp_path: Path, tiny_dir: Path) -> None:
    run = {"a": finished(tmp_path / "run", tiny_dir)}
    less, more = (forecast_table(run, runtime_bytes=size * MB)["predicted MB"].iloc[0] for size in (200, 300))
    assert more - less == pytest.approx(100, abs=1)
