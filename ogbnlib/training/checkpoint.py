"""Where a run stands, written so that it can go on from any batch boundary: checkpoint.pt and metrics.csv.

Neither random state nor anything of the loaders is in it: the order of the seeds, their neighbors and dropout are
functions of (seed, epoch, batch), so the number of seeds that are done says all.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..files import write_atomically
from ..runs.folder import CHECKPOINT, METRICS
from ..runs.timeline import whole_lines

METRIC_COLUMNS = ("epoch", "loss", "train", "valid", "test", "time_s", "eval_time_s")
Row = dict[str, float | None]
_VERSION = 2


@dataclass
class State:
    """A batch boundary of a run.

    Attributes:
        epoch: The last finished one, its evaluation included.
        position: Seeds of the next epoch's order that are trained already; all of them while it is evaluated.
        loss_sum: Over these seeds.
        time_s: Spent on training these seeds.
        history: One row per finished epoch.
        batches_per_step: Over all ranks; 0 before the first step.
    """

    epoch: int = 0
    position: int = 0
    loss_sum: float = 0.0
    time_s: float = 0.0
    history: list[Row] = field(default_factory=list)
    batches_per_step: int = 0


def save_checkpoint(run_dir: Path, state: State, num_seeds: dict[str, int], parts: Mapping[str, Any]) -> None:
    """Write checkpoint.pt, atomically, with the `state_dict` of each of the `parts`: model, optimizer and scaler."""
    states = {name: part.state_dict() for name, part in parts.items()}  # the scaler's is empty but for fp16
    content = {"version": _VERSION, **vars(state), "num_seeds": num_seeds, **states}
    write_atomically(run_dir / CHECKPOINT, lambda file: torch.save(content, file))


def load_checkpoint(run_dir: Path, num_seeds: dict[str, int], parts: Mapping[str, Any]) -> State:
    """Set the parts to the last checkpoint and return its state; a new one without a file.

    Args:
        num_seeds: Size of each split; a checkpoint of a data set with others is refused.

    Raises:
        InputError: for a file that is no checkpoint of this run and version.
    """
    path = run_dir / CHECKPOINT
    if not path.is_file():
        return State()
    try:
        content = torch.load(path, map_location=next(parts["model"].parameters()).device, weights_only=True)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, this library writes and reads {_VERSION}")
        if content["num_seeds"] != num_seeds:
            raise ValueError(f"its data set has splits of {content['num_seeds']} nodes, this one {num_seeds}")
        for name, part in parts.items():
            part.load_state_dict(content.get(name, {}))  # the scaler is missing in older ones
        return State(**{item.name: content[item.name] for item in fields(State)})
    except Exception as error:
        raise InputError(
            f"{path}: expected a checkpoint of this run, found something else ({error}); move it away to begin anew"
        ) from error


def append_metrics(run_dir: Path, row: Row) -> None:
    """Add one line to metrics.csv."""
    with open(run_dir / METRICS, "a", newline="") as file:
        table = csv.DictWriter(file, METRIC_COLUMNS, lineterminator="\n")
        if not file.tell():
            table.writeheader()
        table.writerow(row)


def cut_metrics(run_dir: Path, epoch: int) -> None:
    """metrics.csv as it was after `epoch`: a kill can leave a torn line, or one whose epoch will be finished again."""
    path = run_dir / METRICS
    lines = whole_lines(path.read_bytes())[0] if path.is_file() else []
    kept = [line for line in lines[1:] if int(line.split(",", 1)[0]) <= epoch]
    text = "".join([",".join(METRIC_COLUMNS) + "\n", *kept])
    write_atomically(path, lambda file: file.write(text.encode()))
