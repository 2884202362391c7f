"""Training, evaluation, checkpoints.

`train(config)` runs in this process; `python -m ogbnlib.train RUN_DIR` is the child that `sandbox.run` starts.

On the CPU a run is a pure function of its config: seeds are ordered and neighbors sampled by (seed, epoch), dropout
draws from torch's generator, whose state is in the checkpoint. A resumed run therefore ends with the same weights, bit
for bit, as one that was never interrupted, whatever loading policy either used.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from . import official
from .config import InputError, TrainConfig, write_atomically
from .loaders import Loaders, compile_kernels, make_loaders, set_epoch
from .memory import release_memory
from .models import GNN, parameter_bytes, resolve_device
from .ogb_raw import Dataset, open_raw
from .sandbox import (
    CHECKPOINT,
    CONFIG,
    check_inputs,
    is_interactive,
    prepare_run_dir,
    start_attempt,
    write_result,
)
from .store import is_store, open_store
from .timeline import EventLog, Recorder, read_csv_lines

METRICS = "metrics.csv"
METRIC_COLUMNS = ("epoch", "loss", "train", "valid", "test", "time_s", "eval_time_s")
_LINE_EVERY_S = 30.0


@dataclass
class TrainResult:
    """What `train` returns: one dict per epoch (keys `METRIC_COLUMNS`, None where not evaluated) and the model."""

    history: list[dict[str, float | None]]
    model: GNN
    run_dir: Path | None = None


class Progress:
    """tqdm for a person, else a plain line every 30 s: bars flood the logs of papermill and Slurm."""

    def __init__(self, how: str):
        if how == "auto":
            how = "bar" if is_interactive() else "lines"
        self.how = how

    def say(self, line: str) -> None:
        if self.how != "none":
            print(line, flush=True)

    def over(self, batches: Iterable[Data], total: int, what: str) -> Iterator[Data]:
        """The batches, none of them held here while the next is made: `enumerate` and `tqdm(batches)` hold one."""
        from tqdm import tqdm

        begin = last = time.monotonic()
        done = 0
        hidden = self.how != "bar"
        with tqdm(total=total, desc=what, unit="batch", leave=False, mininterval=0.5, disable=hidden) as bar:
            for batch in batches:
                yield batch
                del batch
                bar.update()
                done, now = done + 1, time.monotonic()
                if self.how == "lines" and now - last >= _LINE_EVERY_S:
                    last, rate = now, done / (now - begin)
                    left_s = (total - done) / rate
                    self.say(f"  {what}: {done}/{total} batches, {rate:.1f} batches/s, {left_s:.0f} s left")


def _forward(model: GNN, batch: Data, device: torch.device) -> Tensor:
    # float16 features are widened after the copy, so that half the bytes cross to the GPU.
    x = batch.x.to(device, non_blocking=True).float()
    edge_index = batch.edge_index.to(device, non_blocking=True)
    scores: Tensor = model(x, edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)
    return scores


def _seed_labels(batch: Data, device: torch.device) -> Tensor:
    return batch.y[: batch.batch_size].to(device, torch.int64)


class Trainer:
    """The state of one run: model, optimizer, loaders, and where its results go."""

    def __init__(self, config: TrainConfig, loaders: Loaders, run_dir: Path | None, log: EventLog, progress: Progress):
        self.config, self.loaders, self.run_dir, self.log, self.progress = config, loaders, run_dir, log, progress
        self.device = resolve_device(config.device)
        torch.manual_seed(config.seed)
        self.model = GNN(
            config.model,
            loaders.num_features,
            config.hidden_channels,
            loaders.num_classes,
            len(config.num_neighbors),
            dropout=config.dropout,
            heads=config.heads,
        ).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        log.part("model, gradients, Adam", 4 * parameter_bytes(self.model))
        self.epoch = 0  # the last finished one
        self.history: list[dict[str, float | None]] = []

    # Checkpoint and resume ------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write checkpoint.pt, atomically."""
        if self.run_dir is None:
            return
        cuda = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        state = {
            "version": 1,
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": cuda,
            "history": self.history,
            "num_seeds": {split: len(ids) for split, ids in self.loaders.splits.items()},
        }
        with self.log.phase("checkpoint"):
            write_atomically(self.run_dir / CHECKPOINT, lambda file: torch.save(state, file))

    def restore(self) -> None:
        """Go back to the last checkpoint, and metrics.csv with it; from the start where there is none yet."""
        assert self.run_dir is not None
        path = self.run_dir / CHECKPOINT
        if path.is_file():
            try:
                state = torch.load(path, map_location=self.device, weights_only=True)
                if state["version"] != 1:
                    raise ValueError(f"version {state['version']}")
                if state["num_seeds"] != (found := {split: len(ids) for split, ids in self.loaders.splits.items()}):
                    raise ValueError(f"its data set has splits of {state['num_seeds']} nodes, this one {found}")
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
                torch.set_rng_state(state["torch_rng"].cpu())
                if state["cuda_rng"] is not None and self.device.type == "cuda":
                    torch.cuda.set_rng_state(state["cuda_rng"].cpu())
                self.epoch, self.history = state["epoch"], state["history"]
            except Exception as error:
                raise InputError(
                    f"{path}: expected a checkpoint of this run, found something else ({error}); "
                    "move it away to begin anew"
                ) from error
        if self.epoch > self.config.epochs:
            raise InputError(f"epochs: the run is already at epoch {self.epoch}, got epochs={self.config.epochs}")
        self._rewrite_metrics()

    def _rewrite_metrics(self) -> None:
        """metrics.csv as of the checkpoint: a kill can leave a torn line, or one whose epoch will be run again."""
        assert self.run_dir is not None
        path = self.run_dir / METRICS
        lines = read_csv_lines(path)[0] if path.is_file() else []
        kept = [line for line in lines[1:] if int(line.split(",", 1)[0]) <= self.epoch]
        text = "".join([",".join(METRIC_COLUMNS) + "\n", *kept])
        write_atomically(path, lambda file: file.write(text.encode()))

    # One epoch ------------------------------------------------------------------------------------------------------

    def train_epoch(self, epoch: int) -> float:
        """One pass over the train split; returns the mean loss over seeds."""
        loader = self.loaders.train_loader()
        set_epoch(loader, epoch)
        self.model.train()
        total, seeds = torch.zeros((), dtype=torch.float64, device=self.device), 0
        with self.log.phase("train epoch", epoch=epoch):
            done = 0  # `enumerate` would hold on to each batch
            for batch in self.progress.over(loader, len(loader), f"epoch {epoch}"):
                labels = _seed_labels(batch, self.device)
                self.optimizer.zero_grad(set_to_none=True)
                loss = F.cross_entropy(_forward(self.model, batch, self.device), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                total += loss.detach() * len(labels)
                seeds += len(labels)
                done += 1  # noqa: SIM113
                del batch, labels, loss  # else they are held, 126 MB for [15, 10, 5] x 1024, while the next is made
                self.log.cuda()
                if self.config.release_every and done % self.config.release_every == 0:
                    self.log.mark("release", after=f"batch {done}", **release_memory())
        return float(total / max(seeds, 1))

    @torch.no_grad()
    def evaluate(self, split: str) -> float:
        """Accuracy on `split` as OGB's own Evaluator computes it."""
        from ogb.nodeproppred import Evaluator

        self.model.eval()
        ids = self.loaders.splits[split]
        predicted, total = [], -(-len(ids) // (self.config.eval_batch_size or self.config.batch_size))
        with self.log.phase(f"eval {split}"):
            for batch in self.progress.over(self.loaders.eval_batches(split), total, f"eval {split}"):
                predicted.append(_forward(self.model, batch, self.device).argmax(dim=-1).cpu())
                del batch
        # Any data set with one label per node is scored by the rule of ogbn-papers100M: the share of right answers.
        name = self.config.dataset if self.config.dataset.startswith("ogbn-") else "ogbn-papers100M"
        y_true = self.loaders.labels(split).numpy().astype(np.int64)
        scores = Evaluator(name).eval({"y_true": y_true[:, None], "y_pred": torch.cat(predicted).numpy()[:, None]})
        return float(scores["acc"])

    def _splits_to_evaluate(self, epoch: int) -> list[str]:
        config, final = self.config, epoch == self.config.epochs
        splits: list[str] = list(config.eval_splits) if final or epoch % config.eval_every == 0 else []
        if (config.train_eval == "every_epoch" and splits) or (config.train_eval == "final" and final):
            splits.insert(0, "train")
        return splits

    def run(self) -> None:
        """All epochs that are left, each with its evaluation, its line, its row and its checkpoint."""
        if self.epoch < self.config.epochs:
            self.loaders.train_loader()
        while self.epoch < self.config.epochs:
            epoch = self.epoch + 1
            begin = time.monotonic()
            loss = self.train_epoch(epoch)
            trained = time.monotonic()
            if epoch == self.config.epochs:
                # The final evaluation needs no train loader: its CSC and workers make room for the eval loaders.
                self.loaders.drop_train_loader()
            scores = {split: self.evaluate(split) for split in self._splits_to_evaluate(epoch)}
            row: dict[str, float | None] = {"epoch": epoch, "loss": loss, "train": None, "valid": None, "test": None}
            row |= {**scores, "time_s": trained - begin, "eval_time_s": time.monotonic() - trained}
            self.history.append(row)
            self.epoch = epoch
            self._append(row)
            self.save()
            self.progress.say(epoch_line(row))

    def _append(self, row: dict[str, float | None]) -> None:
        if self.run_dir is None:
            return
        path = self.run_dir / METRICS
        new = not path.exists()
        with open(path, "a") as file:
            values = ["" if row[name] is None else repr(row[name]) for name in METRIC_COLUMNS]
            file.write((",".join(METRIC_COLUMNS) + "\n" if new else "") + ",".join(values) + "\n")


def epoch_line(row: dict[str, float | None]) -> str:
    """`Epoch 001 | Loss: 1.6800 | Val: 0.5312 | Test: 0.4921 | Time: 186s`; what was not evaluated is left out."""
    parts = [f"Epoch {row['epoch']:03.0f}", f"Loss: {row['loss']:.4f}"]
    for name, split in (("Train", "train"), ("Val", "valid"), ("Test", "test")):
        if row[split] is not None:
            parts.append(f"{name}: {row[split]:.4f}")
    time_s = row["time_s"] or 0.0
    return " | ".join([*parts, f"Time: {time_s:.0f}s" if time_s >= 10 else f"Time: {time_s:.1f}s"])


def warm_up() -> None:
    """Import, compile and allocate what any run needs: kernels, a training step on 1,280 random nodes, the evaluator.

    For measuring the memory that does not shrink with the data.
    """
    compile_kernels([3, 2])
    evaluator = importlib.import_module("ogb.nodeproppred").Evaluator("ogbn-papers100M")
    model = GNN("sage", 128, 16, 172, 2)
    optimizer = torch.optim.Adam(model.parameters())
    edges = torch.stack([torch.arange(1152), torch.arange(512).repeat_interleave(3)[:1152]])
    scores = model(torch.randn(1280, 128), edges, [128, 384, 768], [384, 768])
    F.cross_entropy(scores, torch.zeros(128, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    zeros = np.zeros((128, 1))
    evaluator.eval({"y_true": zeros, "y_pred": zeros})


def open_dataset(config: TrainConfig) -> Dataset:
    """The data set that `config.dataset` names: an official OGB name or a folder in OGB's raw layout."""
    if config.dataset.startswith("ogbn-"):
        return official.read_official(config.dataset, config.root, download=config.download, reader=config.reader)
    if is_store(config.dataset):
        return open_store(config.dataset)
    if config.reader == "ogb":
        return official.read_with_ogb(config.dataset)
    return open_raw(config.dataset)


def train(
    config: TrainConfig,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
) -> TrainResult:
    """Train in this process.

    Args:
        config: What to train.
        run_dir: Where config, timeline, events, metrics and checkpoints go; None keeps nothing on disk.
        resume: Go on from the run's last checkpoint.

    Raises:
        InputError: for bad input, before anything is written.
    """
    check_inputs(config)
    folder = Path(run_dir) if run_dir is not None else None
    if folder is None:
        return _train(config, None, resume=False, how=config.progress)
    dataset = open_dataset(config)
    prepare_run_dir(config, folder, resume=resume)
    earlier, begin = start_attempt(folder), time.monotonic()
    recorder = Recorder(folder, os.getpid()).start()
    code = 1
    try:
        result = _train(config, folder, resume=resume, how=config.progress, dataset=dataset)
        code = 0
        return result
    except InputError:
        code = 2
        raise
    finally:
        recorder.stop()
        write_result(folder, code, time.monotonic() - begin, samples_from=earlier)


def _train(
    config: TrainConfig, run_dir: Path | None, *, resume: bool, how: str, dataset: Dataset | None = None
) -> TrainResult:
    threads = torch.get_num_threads()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    log = EventLog(run_dir)
    try:
        if dataset is None:
            with log.phase("open"):
                dataset = open_dataset(config)
        log.mark("note", reader=type(dataset).__name__, dataset=config.dataset)
        with log.phase("compile kernels"):
            compile_kernels(list(config.num_neighbors))
        loaders = make_loaders(dataset, config, log)
        del dataset
        trainer = Trainer(config, loaders, run_dir, log, Progress(how))
        if resume:
            trainer.restore()
        try:
            trainer.run()
        finally:
            loaders.close()
        return TrainResult(trainer.history, trainer.model, run_dir)
    finally:
        log.close()
        torch.set_num_threads(threads)


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM to this child when the process that watches it dies (Linux, prctl(2))."""
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.environ.get("OGBNLIB_PARENT", str(os.getppid())) != str(os.getppid()):
        sys.exit(143)  # it died before the line above


def main(arguments: list[str]) -> int:
    """The child's side of `sandbox.run`: train in the folder that the parent has prepared."""
    _die_with_parent()
    # The imports leave about a million objects that no collection can free; walking them took 0.26 s of every release.
    gc.freeze()
    folder = Path(arguments[0])
    try:
        config = TrainConfig.load(folder / CONFIG)
        _train(config, folder, resume="--resume" in arguments, how=os.environ.get("OGBNLIB_PROGRESS", "lines"))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
