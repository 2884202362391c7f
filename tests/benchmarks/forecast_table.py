"""Forecasts at full size beside the figures measured: `forecast_table.py [--write]`.

Each row was measured on the generated graph of ogbn-papers100M's size, directed, with float16
features and num_threads=auto unless `config` says otherwise, on two cores, under a hard cgroup.
`moved_gb` is of an epoch, read and written; `seconds` and `peak_gb` are of the whole run; a figure
that nobody measured, or that was measured beside other work, is empty. `hot_rows` is `no` for a run
before the most visited rows stayed in memory. `commit` is that of the measurement, or the first
whose guide has it. `--write` replaces the table of forecasts in notebooks/guide/papers100M.md.
"""

import argparse
import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import yaml

from ogbnlib.config import TrainConfig
from ogbnlib.errors import GB, parse_bytes
from ogbnlib.files import write_atomically
from ogbnlib.forecast.machine import REFERENCE, Machine
from ogbnlib.forecast.run_forecast import Forecast, predict
from ogbnlib.parameters import parse_assignments
from ogbnlib.sources.resolve import size_of
from ogbnlib.windows import plan as windows_plan

FIGURES = Path(__file__).with_name("full_size.csv")
GUIDE = Path(__file__).parents[2] / "notebooks" / "guide" / "papers100M.md"
END = "<!-- end of that table -->\n"
EXPECTED_BEGIN = "<!-- forecasts, made by tests/benchmarks/forecast_table.py --write -->\n"
SMALL = Path(__file__).parents[2] / "slurm" / "small.yaml"
# Times are forecast for machines whose speed was measured. That of the Zen 5 was not.
MACHINES = {
    "reference": REFERENCE,
    "Zen 4": Machine(2, 98e9, 1.2e9, 215e9),
    "Xeon": Machine(2, 107e9, 1.7e9, 84e9),
}


SHARED = {"loading": "shared"}
FLOAT32 = {"loading": "shared", "feature_dtype": "float32"}
# What you have, what you run, and its changes of the large training, all with reverse edges.
EXPECTED: list[tuple[str, str, dict[str, object]]] = [
    ("128 GB", "[15, 10, 5] x 1024 x 256, `loading=shared feature_dtype=float32`", FLOAT32),
    ("64 GB", "the same, `loading=shared feature_dtype=float16`, or `large.yaml`", SHARED),
    ("16 GB", "the same, `loading=store`", {}),
    ("4 GB", "the same, `loading=store`", {}),
    ("8 GB", "`small.yaml`, [3, 2] x 128 x 16, which leaves 1 GB to a notebook", {"file": SMALL}),
]


def expected() -> str:
    """The forecasts of `EXPECTED` on the reference machine, as Markdown."""
    lines = [
        "| you have | what you run | precision | threads | peak | an epoch |",
        "|---" * 6 + "|",
    ]
    for have, text, changes in EXPECTED:
        forecast = _expected(have, changes)
        peak_gb = forecast.peak_bytes / GB
        peak = f"{peak_gb:.0f}" if peak_gb > 20 else f"{peak_gb:.1f}"
        minutes = forecast.epoch_s / 60
        epoch = f"{minutes:.0f} min" if minutes >= 1 else f"{forecast.epoch_s:.0f} s"
        speed = f"{forecast.config.precision} | {forecast.num_threads}"
        lines.append(f"| {have} | {text} | {speed} | {peak} GB | {epoch} |")
    return "\n".join(lines) + "\n"


def _expected(have: str, changes: dict[str, object]) -> Forecast:
    large = {"num_neighbors": [15, 10, 5], "batch_size": 1024, "hidden_channels": 256}
    # epochs as in slurm/large.yaml; the first pass over the store serves all
    settings = {"loading": "store", **large, "epochs": 10, **changes}
    limit = have
    if "file" in settings:
        settings = yaml.safe_load(Path(settings.pop("file")).read_text())
        limit = settings.pop("memory_limit")
    of_the_page = {"dataset": "ogbn-papers100M", "undirected": True, "spool": "24 GB"}
    config = TrainConfig.create({"feature_dtype": "float16", **settings, **of_the_page})
    return predict(config, memory_limit_bytes=parse_bytes(limit), machine=REFERENCE)


@dataclass(frozen=True)
class Row:
    """A measurement, None where there is none, and today's forecast of it."""

    figures: dict[str, str]
    forecast: Forecast

    def measured(self, name: str) -> float | None:
        return float(self.figures[name]) if self.figures[name] else None

    @property
    def expected(self) -> dict[str, float | None]:
        """The forecasts of `moved_gb`, `seconds` and `peak_gb`."""
        reading = self.forecast.windows
        assert reading is not None, self.figures["what"]
        has_speed = self.figures["machine"] in MACHINES
        return {
            "moved_gb": reading.moved_bytes / GB,
            "seconds": self.forecast.run_s if has_speed else None,
            "peak_gb": self.forecast.peak_bytes / GB,
        }

    def ratio(self, name: str) -> float | None:
        """Forecast / measured; None where one of them is missing."""
        expected = self.expected[name]
        measured = self.measured(name)
        return None if expected is None or measured is None else expected / measured


def rows() -> list[Row]:
    with FIGURES.open(newline="") as file:
        return [Row(figures, _forecast(figures)) for figures in csv.DictReader(file)]


def _forecast(figures: dict[str, str]) -> Forecast:
    common = {"loading": "store", "feature_dtype": "float16", "train_eval": "never"}
    config = TrainConfig.create(
        {"dataset": "ogbn-papers100M", **common, **parse_assignments(figures["config"].split(";"))}
    )
    shares = windows_plan._HOT_SHARES if figures["hot_rows"] == "yes" else (0.0,)
    # With reverse edges, degrees are spread otherwise in the generated graph than in OGB's.
    size = dataclasses.replace(size_of(config.dataset), name="synthetic")
    with patch.object(windows_plan, "_HOT_SHARES", shares):
        limit_bytes = parse_bytes(figures["limit"])
        machine = MACHINES.get(figures["machine"], REFERENCE)
        return predict(config, size, memory_limit_bytes=limit_bytes, machine=machine)


def written(page: str) -> str:
    """The page with today's forecasts in place of its own."""
    start, _, rest = page.partition(EXPECTED_BEGIN)
    _, _, end = rest.partition(END)
    return f"{start}{EXPECTED_BEGIN}\n{expected()}\n{END}{end}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the guide's table")
    if parser.parse_args().write:
        text = written(GUIDE.read_text())
        write_atomically(GUIDE, lambda file: file.write(text.encode()))
    print(expected())
