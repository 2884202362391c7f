"""Training, evaluation, checkpoints.

`train(config)` runs in this process; `python -m ogbnlib.train RUN_DIR` is the child that `sandbox.run` starts.

On the CPU a run is a pure function of its config: the order of the seeds, their neighbors and dropout are functions of
(seed, epoch, batch). A run that was interrupted at any moment and resumed therefore ends with the same weights, bit for
bit, as one that never was, whatever loading policy either used.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from . import cuda, official
from .checkpoint import Row, State, append_metrics, cut_metrics, load_checkpoint, save_checkpoint
from .config import InputError, TrainConfig
from .cuda import OUT_OF_CUDA_MEMORY
from .diagnosis import STOPPED
from .loaders import Loaders, compile_kernels, make_loaders, set_epoch
from .memory import release_memory
from .models import GNN, parameter_bytes, resolve_device
from .ogb_raw import Dataset, open_raw
from .run_dir import CONFIG, locked, own_run_dir
from .sampler import batch_key
from .sandbox import check_inputs, is_interactive, start_attempt, write_result
from .signals import Stopped, StopRequest, handled, ignore, take_over
from .store import is_store, open_store
from .timeline import EventLog, Recorder

_LINE_EVERY_S = 30.0


@dataclass
class TrainResult:
    """What `train` returns: one dict per epoch (keys `METRIC_COLUMNS`, None where not evaluated) and the model."""

    history: list[Row]
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

    def over(self, batches: Iterable[Data], total: int, what: str) -> Generator[Data, None, None]:
        """The batches, none of them held here while the next is made: `enumerate` and `tqdm(batches)` hold one."""
        from tqdm import tqdm

        shown = self.how == "bar"
        bar = tqdm(total=total, desc=what, unit="batch", leave=False, mininterval=0.5) if shown else None
        begin = last = time.monotonic()
        done = 0
        try:
            for batch in batches:
                yield batch
                del batch
                done, now = done + 1, time.monotonic()
                if bar is not None:
                    bar.update()
                elif self.how == "lines" and now - last >= _LINE_EVERY_S:
                    last, rate = now, done / (now - begin)
                    left_s = (total - done) / rate
                    self.say(f"  {what}: {done}/{total} batches, {rate:.1f} batches/s, {left_s:.0f} s left")
        finally:
            if bar is not None:
                bar.close()


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

    def __init__(
        self,
        config: TrainConfig,
        loaders: Loaders,
        run_dir: Path | None,
        log: EventLog,
        progress: Progress,
        stop: StopRequest,
    ):
        self.config, self.loaders, self.run_dir, self.log, self.progress = config, loaders, run_dir, log, progress
        self.stop = stop
        self.device = resolve_device(config.device)
        for note in cuda.begin(config, self.device.type):
            log.mark("note", text=note)
            progress.say(note)
        torch.manual_seed(config.seed)
        self.model = GNN(
            config.model,
            loaders.num_features,
            config.hidden_channels,
            loaders.num_classes,
            len(config.num_neighbors),
            dropout=config.dropout,
            heads=config.heads,
            precision=config.precision,
            checkpointing=config.activation_checkpointing,
        ).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.scaler = torch.amp.GradScaler(enabled=config.precision == "fp16")
        log.part("model, gradients, Adam", 4 * parameter_bytes(self.model))
        self.num_seeds = {split: len(ids) for split, ids in loaders.splits.items()}
        self.state = State()
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)  # the state's loss_sum, where it is made
        self._saved_s = time.monotonic()
        self._batches = 0  # of the running epoch, for release_every

    # Checkpoint and resume ------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write checkpoint.pt, atomically."""
        self._saved_s = time.monotonic()
        if self.run_dir is None:
            return
        self.state.loss_sum = float(self._loss)
        with self.log.phase("checkpoint"):
            save_checkpoint(self.run_dir, self.state, self.num_seeds, self.model, self.optimizer, self.scaler)

    def restore(self) -> None:
        """Go back to the last checkpoint, and metrics.csv with it; to the start where there is none yet."""
        assert self.run_dir is not None
        self.state = load_checkpoint(self.run_dir, self.num_seeds, self.model, self.optimizer, self.scaler)
        self._loss.fill_(self.state.loss_sum)
        if self.state.epoch > self.config.epochs:
            raise InputError(f"epochs: the run is already at epoch {self.state.epoch}, got epochs={self.config.epochs}")
        cut_metrics(self.run_dir, self.state.epoch)

    def _boundary(self) -> None:
        """Between two batches: the one place where a run stops on a signal."""
        if number := self.stop.number:
            name, state = signal.Signals(number).name, self.state
            self.log.mark("stop", signal=name, epoch=state.epoch, position=state.position)
            self.save()
            where = f"in epoch {state.epoch + 1}, {state.position:,} of {self.num_seeds['train']:,} seeds trained"
            how = "go on with resume=True (--resume)" if self.run_dir else "without a run_dir nothing of it is kept"
            raise Stopped(f"stopped by {name} {where}; {how}")

    # One epoch ------------------------------------------------------------------------------------------------------

    def train_epoch(self) -> None:
        """The rest of the running epoch's pass over the train split."""
        config, state = self.config, self.state
        epoch, num_seeds = state.epoch + 1, self.num_seeds["train"]
        loader = self.loaders.train_loader()
        set_epoch(loader, epoch, state.position)
        self.model.train()
        self._batches = 0
        begin = time.monotonic() - state.time_s
        with (
            self.log.phase("train epoch", epoch=epoch),
            contextlib.closing(self.progress.over(loader, len(loader), f"epoch {epoch}")) as batches,
        ):
            self._boundary()
            while state.position < num_seeds:
                end = min(state.position + config.batch_size * config.accumulate, num_seeds)
                self._step(batches, epoch, end)
                state.position, state.time_s = end, time.monotonic() - begin
                self._boundary()
                if 0 < config.checkpoint_every_s <= time.monotonic() - self._saved_s:
                    self.save()
            assert next(batches, None) is None, "the loader has more batches than its split"

    def _step(self, batches: Iterator[Data], epoch: int, end: int) -> None:
        """One optimizer step with the mean gradient over all seeds from the state's position to `end` of the order."""
        config, begin = self.config, self.state.position
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(begin, end, config.batch_size):
            batch = next(batches)
            self._seed_dropout(epoch, int(batch.input_id[0]))
            labels = _seed_labels(batch, self.device)
            loss = F.cross_entropy(_forward(self.model, batch, self.device), labels, reduction="sum")
            self.scaler.scale(loss / (end - begin)).backward()  # type: ignore[no-untyped-call]
            self._loss += loss.detach()
            del batch, labels, loss  # else they are held, 126 MB for [15, 10, 5] x 1024, while the next is made
            self.log.cuda()
            self._batches += 1
            if config.release_every and self._batches % config.release_every == 0:
                self.log.mark("release", after=f"batch {self._batches}", **release_memory())
            if config.empty_cache_every and self._batches % config.empty_cache_every == 0:
                cuda.empty_cache(self.log.mark, self._batches)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _seed_dropout(self, epoch: int, first: int) -> None:
        """Have dropout depend on (seed, epoch, batch) alone, as the choice of neighbors does."""
        key = int(batch_key(np.uint64(self.config.seed), epoch, first))
        torch.default_generator.manual_seed(key)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key)

    @torch.no_grad()
    def evaluate(self, split: str) -> float:
        """Accuracy on `split` as OGB's own Evaluator computes it."""
        from ogb.nodeproppred import Evaluator

        self.model.eval()
        predicted = []
        total = -(-self.num_seeds[split] // (self.config.eval_batch_size or self.config.batch_size))
        with (
            self.log.phase(f"eval {split}"),
            contextlib.closing(self.progress.over(self.loaders.eval_batches(split), total, f"eval {split}")) as batches,
        ):
            self._boundary()
            for batch in batches:
                predicted.append(_forward(self.model, batch, self.device).argmax(dim=-1).cpu())
                del batch
                self._boundary()
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
        config, num_seeds = self.config, self.num_seeds["train"]
        while self.state.epoch < config.epochs:
            epoch = self.state.epoch + 1
            if self.state.position < num_seeds:  # else it was interrupted in its evaluation
                self.train_epoch()
            loss = float(self._loss) / max(num_seeds, 1)
            if epoch == config.epochs:
                # The final evaluation needs no train loader: its CSC and workers make room for the eval loaders.
                self.loaders.drop_train_loader()
            begin = time.monotonic()
            splits = self._splits_to_evaluate(epoch)
            if splits:
                self.save()  # a kill in an evaluation must not cost the epoch
            scores = {split: self.evaluate(split) for split in splits}
            row: Row = {"epoch": epoch, "loss": loss, "train": None, "valid": None, "test": None}
            row |= {**scores, "time_s": self.state.time_s, "eval_time_s": time.monotonic() - begin}
            self.state = State(epoch=epoch, history=[*self.state.history, row])
            self._loss.zero_()
            if self.run_dir is not None:
                append_metrics(self.run_dir, row)
            self.save()
            self.progress.say(epoch_line(row))


def epoch_line(row: Row) -> str:
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
        InputError: for bad input, before anything is written; for a folder in which another process trains; for
            `expandable_segments` in a process that has used CUDA already.
        torch.OutOfMemoryError: when the GPU's memory ran out; the event `cuda_oom` is in the run's folder then.
        Stopped: when SIGUSR1 or SIGTERM came, from the next batch boundary, after the checkpoint was written. Both
            signals are handled here meanwhile, if this is the main thread.
    """
    check_inputs(config)
    cuda.prepare_allocator(config)
    stop = StopRequest()
    with handled(stop):
        if run_dir is None:
            return _train(config, None, stop, resume=False, how=config.progress)
        folder, dataset = Path(run_dir), open_dataset(config)
        with own_run_dir(config, folder, resume=resume):
            return _train_recorded(config, folder, stop, resume=resume, dataset=dataset)


def _train_recorded(
    config: TrainConfig, folder: Path, stop: StopRequest, *, resume: bool, dataset: Dataset
) -> TrainResult:
    earlier, begin = start_attempt(folder), time.monotonic()
    recorder = Recorder(folder, os.getpid()).start()
    code = 1
    try:
        result = _train(config, folder, stop, resume=resume, how=config.progress, dataset=dataset)
        code = 0
        return result
    except BaseException as error:
        codes = {InputError: 2, Stopped: STOPPED, KeyboardInterrupt: 130, torch.OutOfMemoryError: OUT_OF_CUDA_MEMORY}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), 1)
        raise
    finally:
        recorder.stop()
        write_result(folder, code, time.monotonic() - begin, samples_from=earlier)


def _train(
    config: TrainConfig,
    run_dir: Path | None,
    stop: StopRequest,
    *,
    resume: bool,
    how: str,
    dataset: Dataset | None = None,
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
        trainer = Trainer(config, loaders, run_dir, log, Progress(how), stop)
        if resume:
            trainer.restore()
        try:
            trainer.run()
        finally:
            loaders.close()
        return TrainResult(trainer.state.history, trainer.model, run_dir)
    except torch.OutOfMemoryError as error:
        cuda.record_oom(error, config, run_dir, log.mark)
        raise
    finally:
        cuda.end(config)
        log.close()
        torch.set_num_threads(threads)


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM to this child when the process that watches it dies (Linux, prctl(2))."""
    import ctypes

    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.environ.get("OGBNLIB_PARENT", str(os.getppid())) != str(os.getppid()):
        sys.exit(143)  # it died before the line above


def main(arguments: list[str]) -> int:
    """The child's side of `sandbox.run`: train in the folder that the parent has prepared and locked."""
    stop = StopRequest()
    take_over(stop)
    _die_with_parent()
    # The imports leave about a million objects that no collection can free; walking them took 0.26 s of every release.
    gc.freeze()
    folder = Path(arguments[0])
    try:
        config = TrainConfig.load(folder / CONFIG)
        cuda.prepare_allocator(config)
        with contextlib.nullcontext() if "OGBNLIB_PARENT" in os.environ else locked(folder):
            how = os.environ.get("OGBNLIB_PROGRESS", "lines")
            _train(config, folder, stop, resume="--resume" in arguments, how=how)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(stopped, flush=True)
        return STOPPED
    except torch.OutOfMemoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return OUT_OF_CUDA_MEMORY
    finally:
        ignore()  # Python's end would have them end the process, whose work is done
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
