"""The trainer: steps, evaluations, and the batch boundaries at which a run is saved or stopped."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from ..display import Live
from ..files import open_to_write
from ..io.disk_array import Interrupted
from ..memory.reading import own_memory
from ..memory.record import METRIC_COLUMNS, RunPaths
from ..memory.recorder import EventLog
from ..memory.signals import Stopped, StopRequest
from ..progress import Count, details
from ..sampling.policies import Loaders, set_epoch
from .checkpoint import Checkpointer, Row, State

_SHOWN_EVERY_S = 0.5


class Progress:
    """Progress of a run, shown here and written to progress.json for other processes.

    Args:
        display: As `how` of `display.Live`, or "relayed" if the process that started this one shows
            the progress.
        log: Event log of the run; its innermost open phase is shown as the current step.
        run_dir: Folder for progress.json; None writes no such file.
    """

    def __init__(self, display: str, log: EventLog, run_dir: Path | None = None):
        self._log = log
        self._display = display
        self._count = Count(0)  # shown last
        self._shown_s = 0.0  # time.monotonic() when it was shown
        self._read = Count(0)  # bytes of the array that was read last
        # the descriptor of progress.json; -1: no such file
        self._file = -1 if run_dir is None else open_to_write(RunPaths(run_dir).progress)
        self.live = Live(self._text, display.replace("relayed", "none"))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def say(self, line: str) -> None:
        if self._display != "none":
            self.live.write(f"{line}\n")

    def note(self, *texts: str) -> None:
        """Print notes and record them in the run's events."""
        for text in texts:
            self._log.mark("note", text=text)
            self.say(text)

    @property
    def _phase(self) -> str:
        return ["starting", *self._log.open][-1]  # the innermost open phase

    def _text(self) -> tuple[str, str]:  # the line of `Live`: the step, and its details
        phase = self._phase
        count = self._count if self._count.phase == phase else None  # not an earlier phase's
        return phase, details(count, own_memory()[0])  # [0]: anonymous and shared memory

    def keep(self, count: Count, loss: Callable[[], float] | None = None) -> None:
        """Show the count of the current phase, with the epoch's loss, at most every 0.5 s."""
        now_s = time.monotonic()
        if now_s - self._shown_s < _SHOWN_EVERY_S and count is self._count:  # a new count at once
            return
        count.phase = self._phase
        self._count = count
        self._shown_s = now_s
        if loss is not None:
            count.loss = next(filter(math.isfinite, [loss()]), None)  # JSON has no NaN
        if self._file >= 0:
            with contextlib.suppress(OSError):  # the next checkpoint reports such a folder
                # blanks up to 400 characters overwrite the end of an earlier, longer text
                os.pwrite(self._file, f"{json.dumps(asdict(count)):<400}\n".encode(), 0)

    def reading(self, name: str, done: int, total: int) -> None:
        """Show how many bytes of the array `name`, which the next batch needs, have been read."""
        text = f"reading {name}"
        # another array, or the same one read again: its speed is measured again
        if self._read.what != text or self._read.total != total or self._read.done > done:
            self._read = Count(total, what=text)
        self._read.done = done
        self.keep(self._read)

    def over(
        self, batches: Iterable[Data], total: int, loss: Callable[[], float] | None = None
    ) -> Generator[Data, None, None]:
        """Yield and count the batches; drop each batch before the next one is prepared."""
        count = Count(total, "batches")
        self.keep(count)
        for batch in batches:
            if not count.done:
                # the first batch waits for reading, so its time says nothing about the others
                count.began_s = time.time()
            yield batch
            del batch  # else it would stay in memory while the next one is prepared
            count.done += 1
            self.keep(count, loss)


@dataclass
class Trainer:
    """Training of a learner on the batches of its loaders, from `state` on.

    All ranks of a run call the same methods in the same order; the first rank writes and prints.
    """

    loaders: Loaders
    checkpointer: Checkpointer
    progress: Progress
    stop: StopRequest
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        self.learner = self.checkpointer.learner
        self.config = self.learner.config
        self.log = self.learner.log
        self.ranks = self.learner.ranks
        self.num_seeds = {split: len(ids) for split, ids in self.loaders.splits.items()}
        self._eval_time_s = 0.0  # of the current epoch

    def _boundary(self, training: bool = False) -> None:
        """Save or stop the run between two steps, or between two batches of an evaluation.

        A signal stops a run only here. `training` is set after a step.
        """
        age_s = time.monotonic() - self.checkpointer.saved_s
        due = training and 0 < self.config.checkpoint_every_s <= age_s
        # Reading the loss from a GPU would wait for the GPU at every step. So on a GPU only
        # checkpoints check the loss.
        on_cpu = self.learner.device.type == "cpu"
        # What one rank has met, all ranks act on: else others would wait for it in a collective.
        number, due_anywhere, diverged = self.ranks.highest(
            self.stop.number,
            int(due),
            int(training and on_cpu and not math.isfinite(self.learner.loss_sum)),
        )
        state = self.state
        if diverged:
            raise self.checkpointer.diverged(state)
        if number:  # of a signal
            self.checkpointer.save(state)
            hint = "go on with resume=True (--resume)"
            if self.checkpointer.run_dir is None:
                hint = "nothing is kept without run_dir"
            raise Stopped(
                f"stopped in epoch {state.epoch + 1}, {state.position:,} of "
                f"{self.num_seeds['train']:,} seeds trained; {hint}"
            )
        if due_anywhere:
            self.checkpointer.save(state)

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        try:
            yield
        except Interrupted:  # a signal ended the wait for a batch from disk, see `train._wait`
            self._boundary()  # raises `Stopped`
            raise

    def _train_epoch(self) -> None:
        state = self.state
        epoch = state.epoch + 1
        loader = self.loaders.train_loader()
        set_epoch(loader, epoch, state.position)
        self.learner.begin(epoch)
        begin_s = time.monotonic() - state.time_s  # as if the epoch had not been interrupted
        step_seeds = self.config.batch_size * self.learner.batches_per_step  # of all ranks
        shown = self.progress.over(loader, len(loader), self._mean_loss)
        with self.log.phase("train epoch", epoch=epoch), contextlib.closing(shown) as batches:
            self._boundary()  # a signal may have come before the first step
            while state.position < self.num_seeds["train"]:
                end = min(state.position + step_seeds, self.num_seeds["train"])
                with self._stoppable():
                    self.learner.step(batches, epoch, state.position, end)
                state.position = end
                state.time_s = time.monotonic() - begin_s
                self._boundary(training=True)
            assert next(batches, None) is None, "the loader has more batches than its share"

    def _mean_loss(self) -> float:  # of a seed, as if all ranks had this rank's sum
        num_seeds = max(1, self.state.position)
        return float(self.learner.loss_sum) * self.ranks.num_ranks / num_seeds

    def evaluate(self, split: str) -> Row:
        """Return the accuracy and the macro-F1 on `split`, by their column names in metrics.csv."""
        begin_s = time.monotonic()
        self.learner.begin()
        num_seeds = self.num_seeds[split]
        size = self.config.seeds_per_batch(training=False)
        predicted = torch.zeros(num_seeds, dtype=torch.int64)  # class of each seed of the split
        rounds = range(0, num_seeds, size * self.ranks.num_ranks)  # each with a batch for each rank
        shown = self.progress.over(self.loaders.eval_batches(split), len(rounds))
        with self.log.phase(f"eval {split}"), contextlib.closing(shown) as batches:
            for begin in rounds:
                self._boundary()
                if begin + self.ranks.rank * size < num_seeds:  # the last round may have fewer
                    with self._stoppable():
                        batch = next(batches)
                    predicted[batch.input_id] = self.learner.predict(batch)
                    del batch
                    self.learner.after_batch()
            assert next(batches, None) is None, "the loader has more batches than its share"
        # One rank has filled each position, the others have zeros there. After the sum all ranks
        # have all predictions, and compute the same measures.
        self.ranks.sum(predicted)
        undefined = int((predicted < 0).sum())  # -1: see `Learner.predict`
        if undefined:
            raise self.checkpointer.diverged(
                self.state, f"scores of {undefined:,} of {num_seeds:,} {split} nodes are NaN"
            )
        labels = self.loaders.labels[split]
        measures: Row = {
            split: accuracy(labels, predicted),
            f"{split}_macro_f1": macro_f1(labels, predicted, self.loaders.num_classes),
        }
        self._eval_time_s += time.monotonic() - begin_s
        return measures

    def run(self) -> None:
        """Train the remaining epochs, each with evaluation, row of metrics.csv and checkpoint."""
        while not self._is_over():
            self._run_epoch()
        epoch = self.state.epoch
        if epoch < self.config.epochs:
            self.progress.note(
                f"no better valid accuracy in {self.config.early_stopping} evaluations: "
                f"epoch {epoch} was the last"
            )

    def _is_over(self, *rows: Row) -> bool:
        # with `rows` of an epoch that is not in the history yet
        return self.config.is_over(row.get("valid") for row in [*self.state.history, *rows])

    def _run_epoch(self) -> None:
        epoch = self.state.epoch + 1
        num_seeds = self.num_seeds["train"]
        if self.state.position < num_seeds:  # else interrupted during its evaluation
            self._train_epoch()
            self.checkpointer.check_finite(self.state)
        # `sum` is in place, and the checkpoint before the evaluation needs each rank's own part
        loss = float(self.ranks.sum(self.learner.loss_sum.clone())) / max(num_seeds, 1)
        self._eval_time_s = 0.0
        row: Row = {
            **dict.fromkeys(METRIC_COLUMNS),  # None for a split that is not evaluated
            "epoch": epoch,
            "loss": loss,
            **self._evaluate_epoch(epoch),
            "time_s": self.state.time_s,
            "eval_time_s": self._eval_time_s,
        }
        self.state = State(epoch=epoch, history=[*self.state.history, row])
        self.learner.loss_sum.zero_()
        self.checkpointer.save_epoch(self.state)
        self.progress.say(_epoch_line(row))

    def _evaluate_epoch(self, epoch: int) -> Row:  # of the splits that are due, see `evaluate`
        if epoch == self.config.epochs:
            # The final evaluation needs no train loader. Dropping its CSC and workers makes room
            # for the eval loaders.
            self.loaders.drop_train_loader()
        splits = self.config.splits_to_evaluate(epoch)
        if splits or not self.state.history:
            # A kill during the evaluation must not lose the epoch. The first row of metrics.csv
            # must not be written before there is a checkpoint.
            self.checkpointer.save(self.state)
        measures: Row = {}
        for split in splits:
            measures |= self.evaluate(split)
        # early stopping makes this epoch the last one, which `splits_to_evaluate` could not know
        is_stopped = epoch < self.config.epochs and self._is_over(measures)
        if is_stopped and self.config.train_eval == "final":
            self.loaders.drop_train_loader()
            measures |= self.evaluate("train")
        return measures


def accuracy(labels: Tensor, predicted: Tensor) -> float:
    """Return the share of `predicted`, int64 [n], that equals `labels` [n], as OGB's Evaluator does,
    whose import takes 45 MB of memory (pandas and scikit-learn)."""
    return int((labels == predicted).sum()) / len(labels)


def macro_f1(labels: Tensor, predicted: Tensor, num_classes: int) -> float:
    """Return the mean F1 of the classes that occur in the labels or the predictions, both [n]:
    scikit-learn's `f1_score(average="macro", zero_division=0)`."""
    hits_per_class, labels_per_class, guesses_per_class = (  # each float64 [num_classes]
        torch.bincount(values, minlength=num_classes).double()
        for values in (labels[labels == predicted], labels, predicted)
    )
    total = labels_per_class + guesses_per_class
    # F1 is 2 * hits / (labels + guesses); a class in neither has none
    return float((2 * hits_per_class / total)[total > 0].mean())


def _epoch_line(row: Row) -> str:
    labels = {"loss": "Loss", "train": "Train", "valid": "Val", "test": "Test"}
    # without the splits that were not evaluated
    values = [f"{labels[name]}: {row[name]:.4f}" for name in labels if row[name] is not None]
    times = f"Time: {row['time_s']:.1f}s + {row['eval_time_s']:.1f}s eval"
    return " | ".join([f"Epoch {row['epoch']:03.0f}", *values, times])
