"""Where a run stands, written so that it can go on from any batch boundary: checkpoint.pt and metrics.csv.

Neither random state nor anything of the loaders is in it: the order of the seeds, their neighbors and dropout are
functions of (seed, epoch, batch), so the number of seeds that are done says all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import nn

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


def save_checkpoint(
    run_dir: Path,
    state: State,
    num_seeds: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Write checkpoint.pt, atomically."""
    content = {
        "version": _VERSION,
        **{item.name: getattr(state, item.name) for item in fields(State)},
        "num_seeds": num_seeds,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),  # empty but for fp16
    }
    write_atomically(run_dir / CHECKPOINT, lambda file: torch.save(content, file))


def load_checkpoint(
    run_dir: Path,
    num_seeds: dict[str, int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> State:
    """Set model, optimizer and gradient scaler to the last checkpoint and return its state; a new one without a file.

    Args:
        num_seeds: Size of each split; a checkpoint of a data set with others is refused.

    Raises:
        InputError: for a file that is no checkpoint of this run and version.
    """
    path = run_dir / CHECKPOINT
    if not path.is_file():
        return State()
    try:
        content = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, this library writes and reads {_VERSION}")
        if content["num_seeds"] != num_seeds:
            raise ValueError(f"its data set has splits of {content['num_seeds']} nodes, this one {num_seeds}")
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        scaler.load_state_dict(content.get("scaler", {}))
        return State(**{item.name: content[item.name] for item in fields(State)})
    except Exception as error:
        raise InputError(
            f"{path}: expected a checkpoint of this run, found something else ({error}); move it away to begin anew"
        ) from error


def append_metrics(run_dir: Path, row: Row) -> None:
    """Add one line to metrics.csv."""
    path = run_dir / METRICS
    new = not path.exists()
    with open(path, "a") as file:
        values = ["" if row[name] is None else repr(row[name]) for name in METRIC_COLUMNS]
        file.write((",".join(METRIC_COLUMNS) + "\n" if new else "") + ",".join(values) + "\n")


def cut_metrics(run_dir: Path, epoch: int) -> None:
    """metrics.csv as it was after `epoch`: a kill can leave a torn line, or one whose epoch will be finished again."""
    path = run_dir / METRICS
    lines = whole_lines(path.read_bytes())[0] if path.is_file() else []
    kept = [line for line in lines[1:] if int(line.split(",", 1)[0]) <= epoch]
    text = "".join([",".join(METRIC_COLUMNS) + "\n", *kept])
    write_atomically(path, lambda file: file.write(text.encode()))
