"""Checkpoints of a run: checkpoint.pt and metrics.csv, to resume it at any batch boundary.

They contain no random state and no state of the loaders. The order of the seeds, their neighbors
and dropout are functions of (seed, epoch, batch), so the number of trained seeds says where to
resume, and on the CPU the weights are the same, bit for bit, as without an interruption.
"""

import csv
import io
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import torch

from ..config import TrainConfig
from ..errors import Diverged, InputError, naming
from ..files import StrPath, write_atomically
from ..graph.store import Store
from ..memory.record import METRIC_COLUMNS, RunPaths
from ..runs.attempt import check_changes
from ..runs.codes import DIVERGED, of_code
from ..runs.folder import Run
from .learner import Learner, Stateful

Row = dict[str, float | None]  # one row of metrics.csv, by `METRIC_COLUMNS`
_VERSION = 3  # of the content of checkpoint.pt and best.pt
# Last line of a file in torch's own format, which does not detect a changed byte in a tensor.
_CHECKSUM = b"ogbnlib crc32 %08x\n"
_PIECE_BYTES = 2**20  # read at a time for the checksum


@dataclass
class State:
    """State of a run at a batch boundary."""

    epoch: int = 0  # the last epoch that is finished, with its evaluation
    position: int = 0  # number of trained seeds in the next epoch; all during its evaluation
    loss_sum: float = 0.0  # over these seeds of all ranks
    time_s: float = 0.0  # of training in that epoch so far
    history: list[Row] = field(default_factory=list)  # one row per finished epoch


def fingerprint(store: Store, config: TrainConfig) -> dict[str, Any]:
    """Identify a data set independently of its path, by its sizes and the CRC-32s of its arrays
    from store.json."""
    files = store.files  # an entry of store.json for each array
    # The CRC-32 of x misses int8's scale, which is in store.json, and a policy that rounds while
    # reading. So the CRC-32 of about 1,000 rows, as the model sees them, is added.
    rows = store.decode(store.x[:: max(1, store.num_nodes // 1000)])
    rows = rows.astype(np.float16 if config.rounds_in_ram else rows.dtype)
    return {  # the names are in the message of `_check_data`
        "sizes": [store.num_nodes, store.num_edges, store.num_features, store.num_classes],
        "direction (undirected)": store.undirected,
        "edges": [files["colptr"].crc32, files["row"].crc32],
        "labels": files["y"].crc32,
        "splits": [files[name].crc32 for name in store.num_seeds],
        "features": zlib.crc32(rows.astype(np.float32).tobytes()),
        "features in the store": {files["x"].dtype: files["x"].crc32},  # on disk
    }


def _check_data(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], dataset: str) -> None:
    """Refuse `dataset`, with fingerprint `now`, if the weights at `path` have another, `saved`."""
    changed = [name for name in now if saved[name] != now[name]]
    if changed:
        raise InputError(
            f"{dataset}: expected the data set that {path} was trained on, found other "
            f"{', '.join(changed)}; use that data set, or train on this one in a new run_dir"
        )


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Return the line `_CHECKSUM` of `file`'s first `size` bytes, and leave it at their end."""
    file.seek(0)
    crc32 = 0
    for begin in range(0, size, _PIECE_BYTES):
        crc32 = zlib.crc32(file.read(min(_PIECE_BYTES, size - begin)), crc32)
    return _CHECKSUM % crc32


def _write(path: Path, content: Mapping[str, object]) -> None:  # a checkpoint, for `_read`
    def write(file: BinaryIO) -> None:
        try:
            torch.save({"version": _VERSION, **content}, file)  # makes no copy of a CPU tensor
        except RuntimeError as error:
            # torch then closes its archive, which fails, too; the first error names the cause
            raise error.__context__ or error from None
        file.write(_checksum(file, file.tell()))

    write_atomically(path, write)


def _read(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint, whose tensors are mapped until they are used; `InputError` if a byte has
    changed or another version wrote it."""
    with open(path, "rb") as file:
        size = max(0, os.fstat(file.fileno()).st_size - len(_CHECKSUM % 0))  # without that line
        expected = _checksum(file, size)
        if file.read() != expected:
            raise InputError(
                f"{path}: expected its checksum at its end, found another or none; the file is "
                "damaged, or an early ogbnlib 0.1.0 wrote it: put a copy back, or begin again in a "
                "new run_dir"
            )
    content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, mmap=True)
    if content["version"] != _VERSION:
        raise InputError(
            f"{path}: expected version {_VERSION} of ogbnlib 0.2.0, found {content['version']}; go on "
            "with the ogbnlib that wrote it"
        )
    return content


class SavedModel(NamedTuple):
    """A run's parameters, its weights by name, and the fingerprint of its data set."""

    config: TrainConfig
    weights: dict[str, torch.Tensor]
    data: Mapping[str, Any]
    path: Path  # of the weights

    @classmethod
    def open(cls, run_dir: StrPath) -> Self:
        """Read config.json of a run, and best.pt if it exists, else checkpoint.pt."""
        run = Run.open(run_dir)
        paths = RunPaths(run.run_dir)
        path = paths.best if paths.best.is_file() else paths.checkpoint
        if not path.is_file():
            raise InputError(
                f"{run_dir}: expected the weights of a run (best.pt or checkpoint.pt), found neither"
            )
        content = _read(path)
        return cls(run.config, content["model"], content["data"], path)

    def check_data(self, store: Store) -> None:
        """Refuse a data set other than the one that the weights were trained on."""
        _check_data(self.path, self.data, fingerprint(store, self.config), self.config.dataset)


def load_state(part: Stateful, state: dict[str, object], path: Path) -> None:
    """Load a state, read from the file at `path`, into a model or an optimizer; `InputError` if it
    does not fit."""
    with naming(
        path,
        f"the weights of this {type(part).__name__}",
        "its __init__ must make the same layers and buffers as when they were saved",
    ):
        part.load_state_dict(state)


def _write_metrics(run_dir: Path, history: list[Row]) -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, METRIC_COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(history)
    write_atomically(RunPaths(run_dir).metrics, lambda file: file.write(text.getvalue().encode()))


class Checkpointer:
    """Saves and restores a run's state in its folder; never saves a value that is not finite.

    All ranks call its methods; the first rank writes.

    Args:
        run_dir: The run's folder; None saves nothing.
        data: The data set's `fingerprint`, kept in each checkpoint.
        learner: Owner of the model, the optimizer and the gradient scaler to save.
    """

    def __init__(self, run_dir: Path | None, data: Mapping[str, object], learner: Learner):
        self.run_dir = run_dir
        self.learner = learner
        self.saved_s = time.monotonic()  # time of the last save, or of the start
        self._data = dict(data)

    def save(self, state: State) -> None:
        """Write checkpoint.pt atomically. Afterwards all ranks have the saved model, which
        evaluations use."""
        self.saved_s = time.monotonic()
        self.check_finite(state)
        self.learner.share_model()  # weights are equal, buffers differ by each rank's batches
        # `sum` is in place, and each rank goes on with its own part
        state.loss_sum = float(self.learner.ranks.sum(self.learner.loss_sum.clone()))
        with self.learner.ranks.together(), naming(self.run_dir):  # all wait for it
            if self.run_dir is not None and self.learner.ranks.first:
                with self.learner.log.phase("checkpoint"):
                    parts = {name: part.state_dict() for name, part in self.learner.parts.items()}
                    content = {
                        **vars(state),
                        # A resumption compares both: the number of ranks may change, and the user
                        # may edit config.json.
                        "batches_per_step": self.learner.batches_per_step,
                        "config": self.learner.config.model_dump(mode="json"),
                        "data": self._data,
                        **parts,
                    }
                    _write(RunPaths(self.run_dir).checkpoint, content)

    def save_epoch(self, state: State) -> None:
        """Write metrics.csv, checkpoint.pt, and best.pt if the model is the best on valid yet."""
        *earlier, last = (row["valid"] for row in state.history)  # None in epochs not evaluated
        is_best = last is not None and not any(old >= last for old in earlier if old is not None)
        with self.learner.ranks.together():  # a full disk ends all ranks
            if self.run_dir is not None and self.learner.ranks.first:
                _write_metrics(self.run_dir, state.history)
                # before the checkpoint, because a run resumed from it would not write best.pt again
                if self.learner.config.keep == "best" and is_best:
                    saved = {"data": self._data, "model": self.learner.model.state_dict()}
                    _write(RunPaths(self.run_dir).best, {**state.history[-1], **saved})
        self.save(state)

    def restore(self) -> tuple[State, list[str]]:
        """Load the checkpoint; return its state, else a new one, and notes for the user."""
        # nothing is written to the folder here, because another rank may refuse to resume
        assert self.run_dir is not None
        path = RunPaths(self.run_dir).checkpoint
        if not path.is_file():
            if len(Run(self.run_dir).metrics):  # after an epoch there must be one
                raise InputError(
                    f"{path}: expected a checkpoint, found none; put a copy back, or begin again in "
                    "a new run_dir"
                )
            note = "no checkpoint to resume from; training starts from the beginning"
            return State(), [f"{self.run_dir}: {note}"]
        content = _read(path, self.learner.device)
        notes = check_changes(content["config"], self.learner.config, self.run_dir)
        _check_data(path, content["data"], self._data, self.learner.config.dataset)
        self._load(content, path)
        state = State(**{item.name: content[item.name] for item in fields(State)})
        # version 0.2.0 saved fewer columns
        state.history = [dict.fromkeys(METRIC_COLUMNS) | row for row in state.history]
        if state.epoch > self.learner.config.epochs:
            raise InputError(
                f"epochs: the run is already at epoch {state.epoch}, got epochs={self.learner.config.epochs}"
            )
        earlier = content["batches_per_step"]
        if earlier not in (0, self.learner.batches_per_step):  # 0.2.0 saved 0 before a step
            notes.append(
                f"a step has {self.learner.batches_per_step} batches from here on, {earlier} before; "
                "set accumulate to keep its size with another number of ranks"
            )
        # the file has the sum over all ranks, and each rank goes on from an equal part of it
        self.learner.loss_sum.fill_(state.loss_sum / self.learner.ranks.num_ranks)
        return state, notes

    def _load(self, content: Mapping[str, Any], path: Path) -> None:  # of checkpoint.pt, in place
        for name, part in self.learner.parts.items():
            load_state(part, content[name], path)
        # Adam would go on with moments mapped from the file, whose disk space would then not be
        # freed when the next checkpoint replaces it.
        for moments in self.learner.optimizer.state.values():
            moments.update({name: value.clone() for name, value in moments.items()})
        # the optimizer's saved state has the lr and weight_decay of the earlier config
        for group in self.learner.optimizer.param_groups:
            group.update(lr=self.learner.config.lr, weight_decay=self.learner.config.weight_decay)

    def take_over(self, state: State, asked: TrainConfig) -> None:
        """Write a resumed run's changes, and the config as the user asked for it, to its folder."""
        assert self.run_dir is not None
        self.learner.log.mark("resumed", epoch=state.epoch, position=state.position)
        asked.save(RunPaths(self.run_dir).config)
        _write_metrics(self.run_dir, state.history)  # drops a row newer than the checkpoint

    def check_finite(self, state: State) -> None:
        """Raise `Diverged` if a rank has a value that is not finite. On a GPU this waits for the
        GPU's pending work."""
        if self.learner.ranks.highest(int(not self.learner.is_finite()))[0]:
            raise self.diverged(state)

    def diverged(
        self, state: State, problem: str = "the loss or a weight is no longer finite"
    ) -> Diverged:
        """Return the error that says where the run diverged, with a note on how to go on."""
        config = self.learner.config
        error = Diverged(
            f"diverged: {problem} in epoch {state.epoch + 1}, after {state.position:,} seeds, with "
            f"lr={config.lr:g} and precision={config.precision}"
        )
        error.add_note(of_code(DIVERGED).remedy)
        return error
