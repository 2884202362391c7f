"""Forecast and measurement of an epoch from disk: `python tests/benchmarks/bench_disk.py [--scale
0.1] [--folder DIR] [--out FILE]`.

Trains one epoch on generated citation graphs in each of 24 configurations: as they cite and with
reverse edges, int8 and float16 features, [3, 2], [15, 10] and [15, 10, 5] neighbors, under two hard
limits. Prints bytes moved, seconds and peak memory beside two forecasts, one from the store, of which
a batch is drawn, and one from the graph's sizes alone; then the largest and smallest ratio of each.
The stores' pages are dropped from the page cache first, so that each run reads the disk.
"""

import argparse
import csv
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from ogbnlib.config import TrainConfig
from ogbnlib.errors import GB
from ogbnlib.forecast.machine import probe
from ogbnlib.forecast.run_forecast import Forecast, predict
from ogbnlib.graph.store import GraphSize, Store
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.sources.convert import FeatureDtype
from ogbnlib.sources.synth import synthesize_store

SHAPES: dict[str, dict[str, Any]] = {
    "3 2": {"batch_size": 128, "hidden_channels": 16},
    "15 10": {"batch_size": 512, "hidden_channels": 64},
    "15 10 5": {"batch_size": 1024, "hidden_channels": 256, "precision": "bf16"},
}
# At full size; what a limit has beyond the least that a run needs is scaled with the graph.
DTYPES: tuple[FeatureDtype, ...] = ("int8", "float16")
SPOOL_BYTES = 24 * GB
LIMITS_BYTES = (8 * GB, 4 * GB)


def configuration(dataset: str, shape: str, scale: float, **graph: Any) -> TrainConfig:
    return TrainConfig.create(
        {
            "dataset": dataset,
            "loading": "store",
            "num_neighbors": shape,
            "epochs": 1,
            "train_eval": "never",
            "eval_splits": "",
            "spool": round(SPOOL_BYTES * scale),
            "device": "cpu",
            **SHAPES[shape],
            **graph,
        }
    )


def drop_pages(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(done: Run) -> dict[str, float]:
    """Bytes moved by the run, seconds of its epoch, and its peak without page cache."""
    disk = [event for event in done.events if event["event"] == "disk"][-1]
    return {
        "moved_gb": (disk["read_bytes"] + disk["write_bytes"]) / GB,
        "seconds": done.metrics["time_s"].sum(),
        "peak_gb": done.held_peak_bytes / GB,
    }


def expected(forecast: Forecast) -> dict[str, float]:
    reading = forecast.reading
    moved_bytes = 0 if reading is None else reading.moved_bytes
    return {
        "moved_gb": moved_bytes / GB,
        "seconds": forecast.epoch_s,
        "peak_gb": forecast.peak_bytes / GB,
    }


def rows(store: Store, label: str, scale: float, folder: Path) -> list[dict[str, Any]]:
    """One row a limit and shape."""
    # As `plan --set num_nodes=...` has it, without a file; with each edge once.
    sizes = GraphSize(
        store.name,
        store.num_nodes,
        store.num_edges // (2 if store.undirected else 1),
        store.num_features,
        store.num_classes,
        store.num_seeds,
    )
    found = []
    for full_limit_bytes, shape in itertools.product(LIMITS_BYTES, SHAPES):
        config = configuration(str(store.path), shape, scale)
        least = predict(config, store)
        least_bytes = least.least_bytes + least.margin_bytes
        limit_bytes = least_bytes + round((full_limit_bytes - least_bytes) * scale)
        graph = {"undirected": store.undirected, "feature_dtype": str(store.feature_dtype)}
        planned = configuration("ogbn-papers100M", shape, scale, **graph)
        machine = probe(store)
        common = {"memory_limit_bytes": limit_bytes, "machine": machine}
        forecasts = {
            "store": expected(predict(config, store, **common)),
            "sizes": expected(predict(planned, sizes, **common)),
        }
        drop_pages(store.path)
        done = run(config, limit_bytes, runs_dir=folder / "runs", name="disk", echo=False)
        row: dict[str, Any] = {"graph": label, "num_neighbors": shape, "limit_bytes": limit_bytes}
        row |= {"machine": str(machine), "exit_code": done.exit_code}
        figures = measured(done) if done.exit_code == 0 else {}
        for name, value in figures.items():
            row[name] = round(value, 2)
            for source, forecast in forecasts.items():
                row[f"{name}_{source}"] = round(forecast[name], 2)
        found.append(row)
        print(row, flush=True)
        shutil.rmtree(folder / "runs")
    return found


def ratios(found: list[dict[str, Any]]) -> None:
    for name, source in itertools.product(("moved_gb", "seconds", "peak_gb"), ("store", "sizes")):
        pairs = [(row[f"{name}_{source}"], row[name]) for row in found if name in row]
        of_each = [forecast / figure for forecast, figure in pairs if figure]
        print(
            f"{name} forecast / measured, from {source}: {min(of_each):.2f} to {max(of_each):.2f}"
            f" in {len(of_each)} runs"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--only", help='one graph, such as "undirected int8"')
    parser.add_argument("--folder", type=Path, help="of stores, made and removed there")
    parser.add_argument("--out", type=Path, help="a CSV file of the rows")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=options.folder) as tmp:
        for undirected, dtype in itertools.product((False, True), DTYPES):
            label = f"{'undirected' if undirected else 'directed'} {dtype}"
            if options.only not in (None, label):
                continue
            path = Path(tmp) / "store"
            store = synthesize_store(
                path, options.scale, feature_dtype=dtype, undirected=undirected, progress=False
            )
            found += rows(store, label, options.scale, Path(tmp))
            del store
            shutil.rmtree(path)
    ratios(found)
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            names = list(dict.fromkeys(name for row in found for name in row))
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(found)
    sys.exit(any(row["exit_code"] for row in found))
