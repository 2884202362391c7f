"""Predicted against measured peak: `python tests/benchmarks/bench_planner.py --random 60 [--seed 0]
[--only 3 7]`.

Runs random configurations, each under the limit that its forecast and margin give: none that FITS
may be killed, and at most 3 of 60 may use less than 75 % of their forecast. A third of them are on
synthetic citation graphs, a third propagate wide features, a third have graphs with hubs: nodes
with more in-neighbors than thousands of others together, which few batches meet.

`--times [--threads 1] [--models sage Edge]` compares the time of a training step instead: three
registered models and three of a user's own, at five shapes each, from RAM. Run it on a quiet
machine, where one thread takes no more time than CPU time; the aim is a factor of 1.5.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ogbnlib.config import TrainConfig
from ogbnlib.errors import GB, MB
from ogbnlib.forecast.fitting import FITS
from ogbnlib.forecast.machine import probe
from ogbnlib.forecast.planner import plan
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.graph.store import open_store
from ogbnlib.graph.store_format import SPLITS
from ogbnlib.memory.malloc import trainer_environment
from ogbnlib.memory.recorder import EventLog
from ogbnlib.propagation.plan import propagated_path
from ogbnlib.runs.sandbox import run
from ogbnlib.sampling.policies import set_epoch
from ogbnlib.sources.arrays import from_arrays
from ogbnlib.sources.convert import convert
from ogbnlib.sources.synth import prepare_dataset
from ogbnlib.training.custom_model import make_model
from ogbnlib.training.distributed import Ranks
from ogbnlib.training.learner import Learner
from ogbnlib.training.train import compile_all

OWN = ("Edge", "Gin", "Mlp", "Attention", "Table", "Frozen", "Buffer", "List")
OWN_MODELS = """
import torch
from torch import nn
from torch_geometric.nn import EdgeConv, GATv2Conv, GINConv


class Edge(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__()
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(map(self.conv, widths, widths[1:]))

    def conv(self, a, b):
        return EdgeConv(nn.Sequential(nn.Linear(2 * a, b), nn.ReLU(), nn.Linear(b, b)))

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


class Gin(Edge):
    def conv(self, a, b):
        return GINConv(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b)))


class Attention(Edge):
    def conv(self, a, b):
        return GATv2Conv(a, b, heads=2, concat=False)


class Mlp(nn.Sequential):
    def __init__(self, in_channels, hidden_channels, out_channels):
        layers = nn.Linear(in_channels, hidden_channels), nn.ReLU(), nn.Linear(hidden_channels, out_channels)
        super().__init__(*layers)

    def forward(self, x):
        return super().forward(x)


class Table(Gin):
    trained = True

    def __init__(self, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__(in_channels, hidden_channels, out_channels, num_layers)
        self.table = nn.Embedding(150_000, in_channels).requires_grad_(self.trained)

    def forward(self, batch):
        rows = self.table(batch.n_id % self.table.num_embeddings)
        return super().forward(batch.x + rows, batch.edge_index)


class Frozen(Table):
    trained = False


class Buffer(Gin):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__(in_channels, hidden_channels, out_channels, num_layers)
        self.register_buffer("shift", torch.zeros(2**18, in_channels))

    def forward(self, x, edge_index):
        return super().forward(x + self.shift[0], edge_index)


class List(Gin):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__(in_channels, hidden_channels, out_channels, num_layers)
        self.shifts = [torch.zeros(2**17, in_channels) for _ in range(2)]

    def forward(self, x, edge_index):
        return super().forward(x + self.shifts[0][0] + self.shifts[1][0], edge_index)
"""


def wide_settings(draw: random.Random) -> dict[str, Any]:
    """A configuration that propagates 100 to 768 features."""
    nodes, features = draw.choice([20_000, 40_000, 80_000]), draw.choice([100, 256, 512, 768])
    return {
        "graph": f"wide-{nodes}-{features}-{draw.choice(['float16', 'float32'])}",
        "loading": "propagated",
        "model": draw.choice(["sgc", "sign", "sagn"]),
        "hops": draw.choice([1, 1, 2, 3]),
        "norm": draw.choice(["sym", "row", "gcn"]),
        "batch_size": draw.choice([64, 256, 1024]),
        "hidden_channels": draw.choice([16, 64]),
        "epochs": 1,
        "train_eval": draw.choice(["never", "final"]),
        # above the smallest limit, for more columns at once
        "room_mb": draw.choice([0, 40, 150, 300]),
    }


def hub_settings(draw: random.Random) -> dict[str, Any]:
    """A configuration on a graph with hubs; mostly with all neighbors of some hop."""
    degree, number = draw.choice([50_000, 150_000, 400_000]), draw.choice([1, 3])
    fan_outs = ["3 2", "10 5", "-1", "5 -1", "-1 -1", "-1 5"]
    return {
        "graph": f"hubs-{number}-{degree}-{draw.choice([16, 64, 128])}",
        "loading": draw.choice(["eager", "lazy", *["shared"] * 3, *["store"] * 2]),
        "num_neighbors": draw.choice(fan_outs),
        "eval_num_neighbors": draw.choice([None, -1, -1]),
        "model": draw.choice(["sage", "sage", "gcn", "gat"]),
        "batch_size": draw.choice([64, 128, 512]),
        "eval_batch_size": draw.choice([None, None, 256]),
        "hidden_channels": draw.choice([16, 64]),
        "num_workers": draw.choice([0, 0, 0, 2]),
        "epochs": 1,
        "train_eval": draw.choice(["never", "final"]),
    }


def large_settings(draw: random.Random) -> dict[str, Any]:
    """A configuration whose model is large: wide, or the user's own with an embedding, frozen
    weights, a buffer or tensors in a list; mostly with persistent workers."""
    model = draw.choice(["sage", "gcn", "gat", "sign", *OWN[3:], *OWN[3:]])
    is_wide = model not in OWN
    values: dict[str, Any] = {
        "graph": "large",
        "loading": "propagated" if model == "sign" else draw.choice(["eager", "shared", "store"]),
        "model": model,
        "batch_size": draw.choice([16, 64, 256]),
        "hidden_channels": draw.choice([2048, 4096] if is_wide else [16, 64, 256]),
        "precision": draw.choice(["fp32", "fp32", "bf16"]),
        "epochs": draw.choice([1, 2]),
        "eval_splits": draw.choice(["valid", "valid test"]),
        "train_eval": draw.choice(["never", "final"]),
    }
    if model == "sign":
        return {**values, "hops": draw.choice([1, 2, 3])}
    workers = draw.choice([0, 2, 2])
    return {
        **values,
        "num_neighbors": draw.choice(["3 2", "10 5", "5 3 2"]),
        "num_workers": workers,
        "persistent_workers": workers > 0,
    }


def write_graph(name: str, path: Path) -> None:
    """Write the store of a `graph` of these settings: `wide-NODES-FEATURES-DTYPE` or
    `hubs-NUMBER-DEGREE-FEATURES`."""
    kind, *words = name.split("-")
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    num_nodes, num_hubs, dtype = 150_000, 0, "float32"
    if kind == "wide":
        num_nodes, num_features, dtype = int(words[0]), int(words[1]), words[2]
    else:
        num_hubs, degree, num_features = map(int, words)
    edges = generator.integers(num_nodes, size=(2, 4 * num_nodes))
    order = generator.permutation(num_nodes)
    sizes = 10_000, 5_000, 5_000
    bounds = np.cumsum(sizes)
    parts = np.split(order[: bounds[-1]], bounds[:-1])
    splits = dict(zip(SPLITS, map(np.sort, parts), strict=True))
    if num_hubs:
        # A hub cites few nodes of each split, so that few batches have it.
        hubs = order[bounds[-1] :][:num_hubs]
        edges = edges[:, ~np.isin(edges[0], hubs)]
        into = generator.integers(num_nodes, size=num_hubs * degree)
        seeds = np.concatenate([generator.choice(part, 2 * num_hubs) for part in parts])
        edges = np.concatenate(
            [edges, [into, np.repeat(hubs, degree)], [np.resize(hubs, len(seeds)), seeds]], 1
        )
    features = generator.standard_normal((num_nodes, num_features), np.float32)
    labels = generator.integers(8, size=num_nodes)
    source = from_arrays(name, edges, features, labels, splits, 8)
    convert(source, path, feature_dtype=dtype, progress=False)


def random_settings(draw: random.Random) -> dict[str, Any]:
    """One configuration, which takes seconds at scale 0.002."""
    values: dict[str, Any] = {
        "loading": draw.choice(["eager", "lazy", *["shared"] * 3, *["store"] * 3, "propagated"]),
        "undirected": draw.random() < 0.5,
        "batch_size": draw.choice([16, 64, 256, 512, 1024]),
        "hidden_channels": draw.choice([16, 64, 256]),
        "epochs": draw.choice([1, 2]),
        "train_eval": draw.choice(["never", "final"]),
        "eval_batch_size": draw.choice([None, None, 128, 512]),
        "dropout": draw.choice([0.0, 0.0, 0.5]),
        "precision": draw.choice(["fp32", "fp32", "bf16"]),
        "feature_dtype": draw.choice(["float32", "float16"]),
    }
    if values["loading"] == "propagated":
        return {
            **values,
            "model": draw.choice(["sgc", "sign", "sagn", "Mlp"]),
            "hops": draw.choice([1, 2, 3]),
        }
    fan_outs = ["3 2", "10 5", "15 10", "15 10 5", "-1", "-1 -1", "25 -1", "5 -1", "-1 -1 -1"]
    values |= {
        "num_neighbors": draw.choice(fan_outs),
        "eval_num_neighbors": draw.choice([None, None, None, -1]),
        "model": draw.choice(["sage", "sage", "sage", "gcn", "gat", "Edge", "Gin"]),
        "num_workers": draw.choice([0, 0, 0, 1, 2, 4]),
    }
    if values["num_workers"]:
        values["persistent_workers"] = draw.random() < 0.5
    if "-1" in values["num_neighbors"] or values["eval_num_neighbors"]:  # else it takes minutes
        values |= {"batch_size": max(256, values["batch_size"]), "epochs": 1}
        values["hidden_channels"] = min(64, values["hidden_channels"])
    return values


@dataclass(frozen=True)
class Outcome:
    """A configuration under the smallest limit at which its forecast says FITS; bytes."""

    limit: int
    forecast: int
    measured: int
    exit_code: int | None
    verdict: str | None
    text: str
    kind: str

    @property
    def is_wrong(self) -> bool:
        return self.exit_code != 0

    @property
    def is_generous(self) -> bool:
        """Whether less than 75 % of the forecast was used."""
        return self.exit_code == 0 and self.measured < 0.75 * self.forecast

    def __str__(self) -> str:
        sizes = f"limit {self.limit / MB:5.0f} forecast {self.forecast / MB:5.0f} measured {self.measured / MB:5.0f} MB"
        mark = "KILLED" if self.is_wrong else "generous" if self.is_generous else ""
        return f"{sizes} {100 * (self.forecast / self.measured - 1):+4.0f} % {self.verdict} {mark} {self.text}"


def configuration(settings: dict[str, Any], folder: Path, scale: float = 0.002) -> TrainConfig:
    """`settings` as a config on a generated data set in `folder`, which is kept between calls."""
    values = {name: value for name, value in settings.items() if value is not None}
    both, code = bool(values.pop("undirected", False)), folder / "own_models.py"
    graph = values.pop("graph", None)
    graph = None if graph == "large" else graph
    values.pop("room_mb", None)
    if values.get("model") in OWN:
        values.pop("dropout", None)
        values["model"] = f"{code}:{values['model']}"
        if not code.exists():
            code.write_text(OWN_MODELS)
    values["dataset"] = str(
        folder / f"synthetic-{scale:g}-seed0{'-undirected' if both else ''}.store"
    )
    if graph is not None:
        values["dataset"] = str(folder / f"{graph}.store")
        if not Path(values["dataset"]).exists():
            write_graph(graph, Path(values["dataset"]))
    elif not Path(values["dataset"]).exists():
        prepare_dataset("", folder, scale, undirected=both)
    return TrainConfig.create({"device": "cpu", **values})


def outcome(settings: dict[str, Any], folder: Path, scale: float = 0.002) -> Outcome:
    """Run `settings` under forecast + margin."""
    config = configuration(settings, folder, scale)
    if config.policy.hops(config):  # each propagates by itself
        propagated = propagated_path(open_store(Path(config.dataset)), config)
        shutil.rmtree(propagated, ignore_errors=True)
    least = plan(config).forecast
    limit = least.least_bytes + least.margin_bytes + settings.get("room_mb", 0) * MB
    # a store's windows, and so its forecast, follow the limit
    while (advice := plan(config, limit)).verdict != FITS:
        limit += MB
    done = run(config, limit, runs_dir=tempfile.mkdtemp(dir=folder), name="verdict", echo=False)
    text = f"scale {scale} {settings}"
    return Outcome(
        limit,
        advice.forecast.peak_bytes,
        done.held_peak_bytes,
        done.exit_code,
        advice.verdict,
        text,
        settings.get("graph", "synthetic").partition("-")[0],
    )


def random_outcomes(count: int, seed: int, folder: Path, only: list[int]) -> None:
    draw = random.Random(seed)
    chosen: list[tuple[int, dict[str, Any]]] = []
    kinds = random_settings, wide_settings, hub_settings, large_settings
    while len(chosen) < count:
        settings = kinds[len(chosen) % len(kinds)](draw)
        # what a small machine runs
        if predict(configuration(settings, folder)).peak_bytes < 2 * GB:
            chosen.append((len(chosen), settings))
    chosen = [(number, settings) for number, settings in chosen if not only or number in only]
    outcomes = []
    for number, settings in chosen:
        outcomes.append(outcome(settings, folder))
        print(f"#{number:<3} {outcomes[-1]}", flush=True)
    killed = sum(one.is_wrong for one in outcomes)
    generous = sum(one.is_generous for one in outcomes)
    errors = sorted(one.forecast / one.measured - 1 for one in outcomes if not one.is_wrong)
    print(
        f"{len(outcomes)} configurations: {killed} killed that were said to fit, {generous} used less than 75 %"
    )
    for kind in ("synthetic", "wide", "hubs", "large"):
        those = [one for one in outcomes if one.kind == kind]
        print(f"{kind}: {len(those)} configurations, {sum(one.is_wrong for one in those)} killed")
    print(
        f"forecast off by {100 * errors[0]:+.0f} to {100 * errors[-1]:+.0f} %, median {100 * median(errors):+.0f} %"
    )


# Of `--times`: num_neighbors, batch_size, hidden_channels.
SHAPES = (
    ((3, 2), 128, 16),
    ((10, 5), 512, 64),
    ((15, 10), 1024, 64),
    ((15, 10, 5), 256, 128),
    ((15, 10, 5), 1024, 64),
)
TIMED = ("sage", "gcn", "gat", "Edge", "Gin", "Attention")


def training_steps(config: TrainConfig) -> Iterator[None]:
    """Train for ever; yield after each step."""
    torch.set_num_threads(int(config.num_threads))
    store = open_store(Path(config.dataset))
    log = EventLog(None)
    compile_all(list(config.num_neighbors))
    loaders = config.policy.load()(store, config, log)
    model = make_model(config, loaders.num_features, loaders.num_classes)
    learner = Learner(config, model, torch.device("cpu"), Ranks(), log)
    loader = loaders.train_loader()
    size = config.batch_size
    for epoch in itertools.count(1):
        set_epoch(loader, epoch)
        learner.begin(epoch)
        batches = iter(loader)
        # without the epoch's last batch, which is smaller
        for begin in range(0, len(loaders.splits["train"]) - size, size):
            learner.step(batches, epoch, begin, begin + size)
            yield


def print_step_s(config: TrainConfig, seconds: float) -> None:
    """Print the mean time and CPU time of training steps, after a few that warm up."""
    steps = training_steps(config)
    for share, least in ((0.25, 2), (1.0, 3)):
        begin_s = time.perf_counter()
        begin_cpu_s = time.process_time()
        count = 0
        while count < least or time.perf_counter() < begin_s + share * seconds:
            next(steps)
            count += 1
    took_s = time.perf_counter() - begin_s
    print(took_s / count, (time.process_time() - begin_cpu_s) / count)


def compare_times(models: list[str], threads: int, seconds: float, folder: Path) -> None:
    """Print forecast and measured time of a training step for each model and shape."""
    machine = probe()
    print(f"{machine}; {threads} thread(s)")
    env = {**os.environ, **trainer_environment(os.environ)}
    ratios = []
    for model, (num_neighbors, batch_size, hidden) in itertools.product(models, SHAPES):
        settings = {
            "loading": "shared",
            "model": model,
            "num_neighbors": num_neighbors,
            "batch_size": batch_size,
            "hidden_channels": hidden,
            "num_threads": threads,
        }
        config = configuration(settings, folder, scale=0.02)
        forecast = plan(config, machine=machine).forecast
        expected_s = forecast.epoch_s / forecast.train.num_batches
        argv = [sys.executable, __file__, "--steps", config.model_dump_json()]
        done = subprocess.run(
            [*argv, "--seconds", str(seconds)], env=env, stdout=subprocess.PIPE, check=True
        )
        measured_s, cpu_s = map(float, done.stdout.splitlines()[-1].split())
        ratios.append(expected_s / measured_s)
        print(
            f"{model:<10} {[*num_neighbors]!s:<12} x {batch_size:4} x {hidden:3}: forecast "
            f"{1e3 * expected_s:7.1f} ms, measured {1e3 * measured_s:7.1f} ms (CPU "
            f"{1e3 * cpu_s:7.1f}), {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"{len(ratios)} rows: forecast / measured {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", default=[])
    parser.add_argument("--random", type=int, default=60, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", action="store_true", help="compare times instead")
    parser.add_argument("--models", nargs="*", default=TIMED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--dir", type=Path, help="keep the generated store here")
    parser.add_argument("--steps", help=argparse.SUPPRESS)  # a config, in a child
    options = parser.parse_args()
    if options.steps:
        print_step_s(TrainConfig.create(json.loads(options.steps)), options.seconds)
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as tmp:
        folder = options.dir or Path(tmp)
        if options.times:
            compare_times(options.models, options.threads, options.seconds, folder)
        else:
            random_outcomes(options.random, options.seed, folder, options.only)
