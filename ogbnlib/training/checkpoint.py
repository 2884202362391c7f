"""Where a run stands, written so that it can go on from any batch boundary: checkpoint.pt and metrics.csv.

Neither random state nor anything of the loaders is in it: the order of the seeds, their neighbors and dropout are
functions of (seed, epoch, batch), so the number of seeds that are done says all.

checkpoint.pt is torch's own format with a CRC-32 of all of it behind (`torch.load` does not mind): a changed byte in a
tensor is none that torch would see. The one before it is kept; a run that goes on from it comes to the same weights.
"""

from __future__ import annotations

import csv
import io
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import TrainConfig
from ..errors import Diverged, InputError
from ..files import StrPath, write_atomically
from ..graph.store import Store
from ..memory.reading import own_disk_bytes
from ..memory.recorder import EventLog
from ..runs.folder import BEST, CHECKPOINT, CONFIG, DAMAGED, METRIC_COLUMNS, METRICS, PREVIOUS, Run, check_changes
from .step import Learner

Row = dict[str, float | None]
_VERSION = 3
_SEAL = b"ogbnlib crc32 %08x\n"
_SAMPLE = 1000  # rows of features in a fingerprint


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


# What it is trained on ------------------------------------------------------------------------------------------------


def fingerprint(store: Store, config: TrainConfig) -> dict[str, Any]:
    """What tells one data set from another, wherever it lies: sizes and the CRC-32s that store.json has of its arrays.

    Features may come from a store of float32 or of float16 and be rounded on reading, so 1,000 rows as they are trained
    on are in it too, which policies share.
    """
    files, half = store.files, not config.on_disk and config.feature_dtype == "float16"
    rows = store.x[:: max(1, store.num_nodes // _SAMPLE)].astype(np.float16 if half else store.feature_dtype)
    return {
        "path": str(store.path),
        "sizes": [store.num_nodes, store.num_edges, store.num_features, store.num_classes],
        "direction (undirected)": store.undirected,
        "edges": [files["colptr"].crc32, files["row"].crc32],
        "labels": files["y"].crc32,
        "splits": [files[name].crc32 for name in store.num_seeds],
        "features": zlib.crc32(rows.astype(np.float32).tobytes()),
        "features in the store": {files["x"].dtype: files["x"].crc32},
        "dtype": str(rows.dtype),
    }


def check_data(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a data set that is not the one that the weights at `path` were trained on.

    Args:
        before: The `fingerprint` beside the weights.
        now: That of the data set to go on with.

    Raises:
        InputError: naming the data set and what differs.
    """
    names = ("sizes", "direction (undirected)", "edges", "labels", "splits", "features")
    other = [name for name in names if before[name] != now[name]]
    then, stored = before["features in the store"], now["features in the store"]
    if then != stored and then.keys() == stored.keys() and "features" not in other:
        other.append("features")
    if "sizes" in other:
        what = f"sizes ({now['sizes']} nodes, edges, features and classes, {before['sizes']} before)"
        other[0] = what.replace("[", "").replace("]", "")
    if other == ["features"] and before["dtype"] != now["dtype"]:
        other = [f"features ({now['dtype']} values, {before['dtype']} before)"]
    if other:
        raise InputError(
            f"{now['path']}: expected the data set that {path} was trained on ({before['path']}), found one with other "
            f"{', '.join(other)}; go on with that one, or train on this one in a new run_dir"
        )


# checkpoint.pt --------------------------------------------------------------------------------------------------------


class _Summed:
    """Passes on what is written, and adds up its CRC-32."""

    def __init__(self, file: io.BufferedWriter):
        self.write_on, self.flush, self.crc32 = file.write, file.flush, 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self.write_on(data)


def save_checkpoint(
    run_dir: Path, state: State, config: TrainConfig, data: Mapping[str, Any], parts: Mapping[str, Any]
) -> None:
    """Write checkpoint.pt, atomically, with the `state_dict` of each of the `parts`; the old one becomes the previous.

    Args:
        data: `fingerprint` of the data set.
        parts: model, optimizer and scaler.
    """
    states = {name: part.state_dict() for name, part in parts.items()}  # the scaler's is empty but for fp16
    about = {"config": config.model_dump(mode="json"), "data": dict(data)}
    _write(run_dir / CHECKPOINT, {**vars(state), **about, **states}, keep=run_dir / PREVIOUS)


def _write(path: Path, content: Mapping[str, Any], keep: Path | None = None) -> None:
    def write(file: io.BufferedWriter) -> None:
        summed: Any = _Summed(file)
        torch.save({"version": _VERSION, **content}, summed)
        file.write(_SEAL % summed.crc32)

    write_atomically(path, write, keep=keep)


def _content(path: Path, device: torch.device) -> dict[str, Any]:
    """What is in a checkpoint.

    Raises:
        InputError: where a byte of it is not as it was written, or another version wrote it.
    """
    data = memoryview(path.read_bytes())
    end = len(data) - len(_SEAL % 0)
    if end < 0 or data[end:] != _SEAL % zlib.crc32(data[:end]):
        raise InputError(
            f"{path}: expected its checksum at its end, found another or none: damaged, or another version's"
        )
    content: dict[str, Any] = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    if content["version"] != _VERSION:
        raise InputError(f"{path}: expected version {_VERSION}, found {content['version']}; use its own ogbnlib")
    return content


def read_model(run_dir: StrPath) -> tuple[TrainConfig, dict[str, Any], dict[str, Any], Path]:
    """The config of a run, the weights in its best.pt, or where it has none in its last checkpoint, the `fingerprint`
    of the data set that they were trained on, and which file it was.

    Raises:
        InputError: where it has neither, or what it has is damaged.
    """
    folder = Run.open(run_dir).run_dir
    path = next((file for name in (BEST, CHECKPOINT) if (file := folder / name).is_file()), None)
    if path is None:
        raise InputError(f"{folder}: expected the weights of a run ({BEST} or {CHECKPOINT}), found neither")
    content = _content(path, torch.device("cpu"))
    # A best.pt of an earlier version has none; the checkpoint beside it is of the same data set.
    data = content["data"] if "data" in content else _content(folder / CHECKPOINT, torch.device("cpu"))["data"]
    return TrainConfig.restore(content["config"]), content["model"], data, path


def load_state(part: Any, state: Mapping[str, Any], path: Path) -> None:
    """Set a model or an optimizer to the state that the file at `path` has of it.

    Raises:
        InputError: where it has other weights, or others of its own, than the state.
    """
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"{path}: expected the weights of this {type(part).__name__}, found others ({' '.join(str(error).split())})"
            "; the code of the model must make the same layers and buffers, in its __init__, as when they were saved"
        ) from None


def load_checkpoint(
    run_dir: Path, config: TrainConfig, data: Mapping[str, Any], parts: Mapping[str, Any]
) -> tuple[State, list[str], bool]:
    """Set the parts to the last sound checkpoint of a run.

    Args:
        config: how the run is to go on.
        data: `fingerprint` of the data set that it is to go on with.

    Returns:
        Its state, a new one where the run has trained nothing yet; what is to be said of it; and whether it is the
        previous one because checkpoint.pt is damaged.

    Raises:
        InputError: where there is no sound one though the run has trained, and where config or data set may not be
            those that it is to go on with. Nothing is written.
    """
    found = [path for path in (run_dir / CHECKPOINT, run_dir / PREVIOUS) if path.is_file()]
    if not found and _has_trained(run_dir):
        raise InputError(
            f"{run_dir / CHECKPOINT}: expected the checkpoint of a run that has trained already, found no such file; "
            "put it back, or begin anew in a new run_dir"
        )
    damages: list[str] = []
    for path in found:
        try:
            content = _content(path, next(parts["model"].parameters()).device)
            break
        except InputError as error:
            damages.append(str(error))
    else:
        if damages:
            raise InputError(
                f"{'; '.join(damages)}; there is no other one: put a copy back, or begin anew in a new run_dir"
            )
        return State(), [f"{run_dir}: no checkpoint to resume from; training starts from the beginning"], False
    notes = check_changes(content["config"], config, run_dir)
    check_data(path, content["data"], data)
    for name, part in parts.items():
        load_state(part, content[name], path)
    for group in parts["optimizer"].param_groups:  # its state has the values that it was saved with
        group.update(lr=config.lr, weight_decay=config.weight_decay)
    state = State(**{item.name: content[item.name] for item in fields(State)})
    if path.name == PREVIOUS:
        why = damages[0] if damages else f"{run_dir / CHECKPOINT}: found no such file"
        where = f"epoch {state.epoch}, and {state.position:,} seeds of the next"
        notes.append(f"{why}; going on from the one before it, {path} ({where})")
    return state, notes, bool(damages)


def _has_trained(run_dir: Path) -> bool:
    run = Run(run_dir)
    saved = ("end", "checkpoint", False)
    return len(run.metrics) > 0 or any(
        (event["event"], event.get("phase"), "failed" in event) == saved for event in run.events
    )


def write_metrics(run_dir: Path, history: list[Row]) -> None:
    """metrics.csv, atomically: one line per finished epoch."""
    text = io.StringIO()
    table = csv.DictWriter(text, METRIC_COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(history)
    write_atomically(run_dir / METRICS, lambda file: file.write(text.getvalue().encode()))


class Keeper:
    """Keeps where a run stands in its folder, where it has one, and never what is not finite.

    All ranks call its methods; the first one writes. `data` is the `fingerprint` of the data set, `num_seeds` those of
    an epoch.
    """

    def __init__(
        self,
        run_dir: Path | None,
        config: TrainConfig,
        data: Mapping[str, Any],
        num_seeds: int,
        learner: Learner,
        log: EventLog,
    ):
        self.run_dir, self.config, self.data, self.num_seeds = run_dir, config, data, num_seeds
        self.learner, self.ranks, self.log = learner, learner.ranks, log
        self._saved: State | None = None
        self._damaged = False

    def save(self, state: State) -> None:
        """Write checkpoint.pt, atomically; all ranks then have the model that is in it, and evaluate that."""
        self.learner.check_layers()
        self.check_finite(state)
        self.learner.share_model()
        state.loss_sum = float(self.ranks.sum(self.learner.loss_sum.clone()))
        if self.run_dir is not None and self.ranks.first:
            with self.log.phase("checkpoint"):
                save_checkpoint(self.run_dir, state, self.config, self.data, self.learner.parts)
        self.ranks.wait()  # nobody ends before it is written
        self._saved = replace(state)

    def save_epoch(self, state: State) -> None:
        """Write what an epoch leaves: metrics.csv, best.pt where its valid accuracy is the best, and checkpoint.pt."""
        row = state.history[-1]
        known = [valid for each in state.history if (valid := each["valid"]) is not None]
        is_best = row["valid"] is not None and row["valid"] > max(known[:-1], default=-1.0)
        if self.run_dir is not None and self.ranks.first:
            write_metrics(self.run_dir, state.history)
            self.log.mark("metrics", **row)
            self.log.mark("disk", epoch=state.epoch, **own_disk_bytes())
            if self.config.keep == "best" and is_best:  # before the checkpoint, after which nobody would come here
                about = {"config": self.config.model_dump(mode="json"), "data": dict(self.data)}
                about["model"] = self.learner.model.state_dict()
                _write(self.run_dir / BEST, {**row, **about})
        self.save(state)

    def restore(self) -> tuple[State, list[str]]:
        """Go back to the last checkpoint, to the start where there is none yet; its state and what is to be said.

        Writes nothing: other ranks may refuse.
        """
        assert self.run_dir is not None
        state, notes, self._damaged = load_checkpoint(self.run_dir, self.config, self.data, self.learner.parts)
        if state.epoch > self.config.epochs:
            raise InputError(f"epochs: the run is already at epoch {state.epoch}, got epochs={self.config.epochs}")
        if state.batches_per_step not in (0, self.learner.batches_per_step):
            text = f"a step has {self.learner.batches_per_step} batches from here on, {state.batches_per_step} before"
            notes.append(f"{text}; set accumulate to keep its size with another number of ranks")
        self._saved = replace(state) if state.batches_per_step else None
        self.learner.loss_sum.fill_(state.loss_sum / self.ranks.num_ranks)
        return state, notes

    def take_over(self, state: State) -> None:
        """Write what a resumption changes in the run's folder, now that all ranks have accepted it."""
        assert self.run_dir is not None
        self.log.mark("resumed", epoch=state.epoch, position=state.position)
        self.config.save(self.run_dir / CONFIG)
        write_metrics(self.run_dir, state.history)
        if self._damaged:  # else it would take the place of the sound one
            os.replace(self.run_dir / CHECKPOINT, self.run_dir / DAMAGED)

    def check_finite(self, state: State) -> None:
        """Raise `diverged` where a rank has what is not finite. On a GPU this waits for all that it has been given."""
        if self.ranks.highest(int(not self.learner.is_finite()))[0]:
            raise self.diverged(state)

    def diverged(self, state: State, what: str = "the loss or a weight is no longer finite") -> Diverged:
        """The end of a run that is no longer finite at `state`: where, and what to go on from."""
        config, saved = self.config, self._saved
        lr, epoch = config.learning_rate(state.epoch + 1), state.epoch + 1
        seeds = f"{state.position:,} of {self.num_seeds:,} seeds trained"
        self.log.mark("diverged", epoch=epoch, position=state.position, lr=lr)
        again = "go on with a smaller lr (--resume --set lr=...)"
        if self.run_dir is None:
            again = "nothing of it is kept without a run_dir; begin anew with a smaller lr"
        elif saved is not None:
            kept = f"{CHECKPOINT} is finite, from epoch {saved.epoch + 1} with {saved.position:,} seeds trained"
            again = f"{kept}; {again}, and where that diverges at once, move it away to go on from {PREVIOUS}"
        return Diverged(
            f"diverged: {what} in epoch {epoch}, {seeds}, with lr={lr:g} and "
            f"precision={config.precision}; {again}; where that is no help, `python -m ogbnlib verify` looks for "
            "features that are not finite"
        )
