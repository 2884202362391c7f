"""The trainer: steps, evaluations, and the batch boundaries at which a run is saved or stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from ..config import TrainConfig
from ..graph.disk import Interrupted
from ..memory.reading import own_memory
from ..memory.record import RunPaths
from ..memory.recorder import EventLog
from ..memory.signals import Stopped, StopRequest
from ..progress import Count, Live, details
from ..sampling.policies import Loaders, set_epoch
from .checkpoint import Checkpointer, Row, State
from .step import Learner

_KEPT_EVERY_S = 0.5


class Progress:
    """Progress of a run, shown here and written to progress.json for other processes.

    Args:
        how: As `config.progress`, or "relayed": the process that started this one shows it.
    """

    def __init__(self, how: str, log: EventLog, run_dir: Path | None = None):
        self._log, self._count, self._kept_s = log, Count(0), 0.0
        self._read = Count(0)
        self._file = -1 if run_dir is None else os.open(RunPaths(run_dir).progress, os.O_WRONLY | os.O_CREAT, 0o666)
        self._silent = how == "none"
        self.live = Live(self._text, "none" if how == "relayed" else how)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def say(self, line: str) -> None:
        if not self._silent:
            self.live.write(f"{line}\n")

    def _text(self) -> tuple[str, str]:
        phase = self._phase()
        return phase, details(self._count if self._count.phase == phase else None, own_memory()[0])

    def _phase(self) -> str:
        return (self._log.open[-1:] or ["starting"])[0]

    def keep(self, count: Count, info: Callable[[], Mapping[str, float | None]] = dict) -> None:
        """Show the count of the current phase with the values of `info`, at most every 0.5 s."""
        if (now := time.monotonic()) - self._kept_s < _KEPT_EVERY_S and count is self._count:
            return
        self._count, self._kept_s, count.phase = count, now, self._phase()
        vars(count).update(info())
        if self._file >= 0:
            with contextlib.suppress(OSError):  # the next checkpoint reports a folder that can't be written
                os.pwrite(self._file, f"{json.dumps(asdict(count)):<400}\n".encode(), 0)

    def reading(self, name: str, done: int, total: int) -> None:
        """Show the bytes read of the array that the next batch needs."""
        what = f"reading {name}"
        if self._read.what != what or self._read.total != total or self._read.done > done:
            self._read = Count(total, what=what)
        self._read.add(done - self._read.done)
        self.keep(self._read)

    def over(
        self, batches: Iterable[Data], total: int, info: Callable[[], Mapping[str, float | None]] = dict
    ) -> Generator[Data, None, None]:
        """Yield and count the batches without a reference to one while the next is prepared."""
        count = Count(total, "batches")
        self.keep(count)
        for batch in batches:
            if not count.done:
                count.began_s = time.time()  # the first batch waits for reading, which is no measure of the rest
            yield batch
            del batch
            count.add(1)
            self.keep(count, info)


def note(text: str, log: EventLog, progress: Progress) -> None:
    """Print a note and record it in the run's events."""
    log.mark("note", text=text)
    progress.say(text)


class Trainer:
    """The epochs of one run."""

    def __init__(
        self,
        config: TrainConfig,
        loaders: Loaders,
        learner: Learner,
        checkpointer: Checkpointer,
        log: EventLog,
        progress: Progress,
        stop: StopRequest,
    ):
        self.config, self.loaders, self.learner, self.checkpointer = config, loaders, learner, checkpointer
        self.log, self.progress, self.stop, self.ranks = log, progress, stop, learner.ranks
        self.num_seeds = {split: len(ids) for split, ids in loaders.splits.items()}
        self.state = State()
        self._saved_s = time.monotonic()
        self._first: tuple[float, int] | None = None  # the running epoch's first step here: its end, and the position

    # Checkpoint and resume ------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write checkpoint.pt; all ranks call this."""
        self._saved_s = time.monotonic()
        self.checkpointer.save(self.state)

    def restore(self) -> None:
        """Go back to the last checkpoint, see `Checkpointer.restore`."""
        self.state, notes = self.checkpointer.restore()
        for text in notes:
            note(text, self.log, self.progress)

    def _boundary(self, training: bool = False) -> None:
        """Save or stop between two steps or two batches of an evaluation; a run stops on a signal only here."""
        due = training and 0 < self.config.checkpoint_every_s <= time.monotonic() - self._saved_s
        # Reading the loss of a GPU would wait for it at every step, so there each checkpoint checks it.
        spoiled = training and self.learner.device.type == "cpu" and not self.learner.loss_is_finite()
        number, due_anywhere, diverged = self.ranks.highest(self.stop.number, int(due), int(spoiled))
        if diverged:
            raise self.checkpointer.diverged(self.state)
        if number:
            name, state = signal.Signals(number).name, self.state
            self.log.mark("stop", signal=name, epoch=state.epoch, position=state.position)
            self.save()
            self.ranks.note_memory(self.log)
            where = f"in epoch {state.epoch + 1}, {state.position:,} of {self.num_seeds['train']:,} seeds trained"
            hint = (
                "go on with resume=True (--resume)" if self.checkpointer.run_dir else "nothing is kept without run_dir"
            )
            raise Stopped(f"stopped by {name} {where}; {hint}")
        if due_anywhere:
            self.save()

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Let a stop signal end the wait for a batch inside."""
        try:
            yield
        except Interrupted:
            self._boundary()
            raise

    # One epoch ------------------------------------------------------------------------------------------------------

    def train_epoch(self) -> None:
        """Train on the remaining seeds of the current epoch."""
        config, state = self.config, self.state
        epoch, num_seeds = state.epoch + 1, self.num_seeds["train"]
        loader = self.loaders.train_loader()
        set_epoch(loader, epoch, state.position)
        self.learner.begin_epoch(epoch)
        begin, self._first = time.monotonic() - state.time_s, None
        with (
            self.log.phase("train epoch", epoch=epoch),
            contextlib.closing(self.progress.over(loader, len(loader), self._left)) as batches,
        ):
            self._boundary()
            while state.position < num_seeds:
                end = min(state.position + config.batch_size * self.learner.batches_per_step, num_seeds)
                with self._stoppable():
                    self.learner.step(batches, epoch, state.position, end)
                state.position, state.time_s = end, time.monotonic() - begin
                state.batches_per_step = self.learner.batches_per_step
                self._first = self._first or (state.time_s, end)
                self._boundary(training=True)
            assert next(batches, None) is None, "the loader has more batches than its share"

    def _left(self) -> dict[str, float | None]:
        """The epoch's loss so far and the remaining time of the run; None before the first steps."""
        state, rows = self.state, self.state.history
        left: dict[str, float | None] = {"loss": None, "run_left_s": None}
        if state.position:
            left["loss"] = float(self.learner.loss_sum) * self.ranks.num_ranks / state.position
        # Time until the end of the first step includes the wait for a window or for workers.
        if self._first is not None and state.position > self._first[1]:
            begun_s, begun = self._first
            epochs_left = self.config.epochs - state.epoch - state.position / self.num_seeds["train"]
            epoch_s = (state.time_s - begun_s) * self.num_seeds["train"] / (state.position - begun)
            evaluated = sum(row["eval_time_s"] or 0.0 for row in rows) / max(len(rows), 1)
            left["run_left_s"] = epochs_left * epoch_s + (self.config.epochs - state.epoch) * evaluated
        return left

    def evaluate(self, split: str) -> float:
        """Accuracy on `split` as OGB's own Evaluator computes it."""
        score = evaluator()  # before the phase, whose memory should not include these imports
        self.learner.begin_evaluation()
        num_seeds, ranks = self.num_seeds[split], self.ranks
        size = self.config.eval_batch_size or self.config.batch_size
        predicted = torch.zeros(num_seeds, dtype=torch.int64)
        rounds = range(0, num_seeds, size * ranks.num_ranks)
        shown = self.progress.over(self.loaders.eval_batches(split), len(rounds))
        with self.log.phase(f"eval {split}"), contextlib.closing(shown) as batches:
            for begin in rounds:
                self._boundary()
                if begin + ranks.rank * size < num_seeds:
                    with self._stoppable():
                        batch = next(batches)
                    predicted[batch.input_id] = self.learner.predict(batch)
                    del batch
                    self.learner.after_batch()
            assert next(batches, None) is None, "the loader has more batches than its share"
        ranks.sum(predicted)  # one rank has filled each place, the others have zeros there
        if undefined := int((predicted < 0).sum()):
            what = f"scores of {undefined:,} of {num_seeds:,} {split} nodes are NaN"
            raise self.checkpointer.diverged(self.state, what)
        accuracy = torch.zeros((), dtype=torch.float64)
        if ranks.first:
            accuracy.fill_(score(self.loaders.labels(split), predicted))
        return float(ranks.sum(accuracy))

    def run(self) -> None:
        """Train the remaining epochs, each with its evaluation, its row of metrics.csv and its checkpoint."""
        config, num_seeds = self.config, self.num_seeds["train"]
        while not self._is_over():
            epoch = self.state.epoch + 1
            if self.state.position < num_seeds:  # else it was interrupted in its evaluation
                self.train_epoch()
                self.checkpointer.check_finite(self.state)
            loss = float(self.ranks.sum(self.learner.loss_sum.clone())) / max(num_seeds, 1)
            if epoch == config.epochs:
                # The final evaluation needs no train loader: its CSC and workers make room for the eval loaders.
                self.loaders.drop_train_loader()
            begin = time.monotonic()
            row: Row = {"epoch": epoch, "loss": loss, "train": None, "valid": None, "test": None}
            row |= self._scores(epoch)
            row |= {"time_s": self.state.time_s, "eval_time_s": time.monotonic() - begin}
            steps = self.state.batches_per_step
            self.state = State(epoch=epoch, history=[*self.state.history, row], batches_per_step=steps)
            self.learner.loss_sum.zero_()
            self._saved_s = time.monotonic()
            self.checkpointer.save_epoch(self.state)
            self.progress.say(epoch_line(row))
        if self.state.epoch < config.epochs:
            none = f"no better valid accuracy in {config.early_stopping} evaluations"
            note(f"{none}: epoch {self.state.epoch} was the last", self.log, self.progress)
        # fp16 skips every step whose gradient is not finite; Adam has a state after the first step not skipped.
        if self.state.epoch and self.learner.scaler.is_enabled() and not self.learner.optimizer.state:
            raise self.checkpointer.diverged(self.state, "no step was ever taken, as no gradient was finite,")
        self.ranks.note_memory(self.log)

    def _is_over(self, *more: float | None) -> bool:
        return self.config.is_over([*(row["valid"] for row in self.state.history), *more])

    def _scores(self, epoch: int) -> Row:
        """Evaluate the splits due after `epoch`."""
        splits = self.config.splits_to_evaluate(epoch)
        if splits:
            self.save()  # a kill during the evaluation must not lose the epoch
        scores: Row = {split: self.evaluate(split) for split in splits}
        if epoch < self.config.epochs and self._is_over(scores.get("valid")):  # it is the last one after all
            final = self.config.replace(epochs=epoch).splits_to_evaluate(epoch)
            if more := [split for split in final if split not in scores]:
                self.loaders.drop_train_loader()
                scores |= {split: self.evaluate(split) for split in more}
        return scores


def evaluator() -> Callable[[Tensor, Tensor], float]:
    """Return OGB's own accuracy of (labels, predicted); every supported data set has the rule of ogbn-papers100M."""
    from ogb.nodeproppred import Evaluator

    rule = Evaluator("ogbn-papers100M")

    def score(labels: Tensor, predicted: Tensor) -> float:
        y_true = labels.numpy().astype(np.int64)
        return float(rule.eval({"y_true": y_true[:, None], "y_pred": predicted.numpy()[:, None]})["acc"])

    return score


def epoch_line(row: Row) -> str:
    """Format a row as `Epoch 001 | Loss: 1.6800 | Val: 0.5312 | Test: 0.4921 | Time: 186s + 80s eval`."""
    parts = [f"Epoch {row['epoch']:03.0f}", f"Loss: {row['loss']:.4f}"]
    for name, split in (("Train", "train"), ("Val", "valid"), ("Test", "test")):
        if row[split] is not None:
            parts.append(f"{name}: {row[split]:.4f}")
    times = [row["time_s"] or 0.0, row["eval_time_s"] or 0.0]
    trained, evaluated = (f"{time_s:.0f}s" if time_s >= 10 else f"{time_s:.1f}s" for time_s in times)
    evaluates = any(row[split] is not None for split in ("train", "valid", "test"))
    return " | ".join([*parts, f"Time: {trained}" + (f" + {evaluated} eval" if evaluates else "")])
