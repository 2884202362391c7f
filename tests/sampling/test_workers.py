"""A worker that dies ends the run in seconds with a sentence; none outlives its trainer."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import is_alive, wait_until

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.memory.tree import process_tree
from ogbnlib.sampling.sampler import CSCSampler
from ogbnlib.sampling.workers import WorkerDied, worker_arguments, workers_ended
from ogbnlib.training.learner import Learner
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]


def children_of(pid: int) -> list[int]:
    """The processes that `pid` has started itself."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("policy", "number"), [("store", signal.SIGKILL), ("shared", signal.SIGBUS)]
)
def test_the_death_of_a_worker_is_raised_and_ends_the_others(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, policy: str
) -> None:
    step, before, seen = Learner.step, set(children_of(os.getpid())), list[int]()

    def killing(self: Learner, batches: Any, epoch: int, begin: int, end: int) -> None:
        if begin and not seen:  # the workers begin with the first batch
            seen.extend(set(children_of(os.getpid())) - before)
            os.kill(seen[0], number)
            wait_until(lambda: not is_alive(seen[0]), "its end")
        step(self, batches, epoch, begin, end)

    monkeypatch.setattr(Learner, "step", killing)
    with pytest.raises(WorkerDied, match=number.name) as caught:
        train(tiny_config(num_workers=3, loading=policy, lookahead="off", batch_size=4))
    assert caught.value.exit_code == 128 + number
    assert len(seen) == 3
    assert not any(is_alive(pid) for pid in seen)
    assert callable(signal.getsignal(signal.SIGCHLD))  # torch's own, which it sets once for all


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (InputError("row.npy: damaged"), InputError, "^row.npy: damaged$"),
        (KeyError("a bug"), KeyError, "Original Traceback"),
    ],
    ids=str,
)
def test_an_error_in_a_worker_is_raised_and_ends_the_others(
    tiny_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    expected: type[Exception],
    said: str,
) -> None:
    def failing(self: CSCSampler, inputs: Any) -> Any:
        raise raised

    before = set(children_of(os.getpid()))
    monkeypatch.setattr(CSCSampler, "sample_from_nodes", failing)
    with pytest.raises(expected, match=said):
        train(tiny_config(num_workers=2))
    assert set(children_of(os.getpid())) <= before


@contextlib.contextmanager
def running(config: TrainConfig, folder: Path, *more: str) -> Iterator[Any]:
    """The command line, training with workers: its process, and those of its trainers."""
    how: Any = {"exclude_none": True, "exclude": {"num_neighbors", "eval_splits"}}
    values = config.model_dump(mode="json", **how)
    sets = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "ogbnlib", "train", "--run-dir", str(folder), *sets, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def trainers() -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [pid for pid in process_tree(process.pid) if len(children_of(pid)) == 2]
        return []

    try:
        wait_until(lambda: process.poll() is not None or trainers(), "workers")
        yield process, trainers()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def endless(tiny_config: Config) -> TrainConfig:
    """Two workers that live as long as their trainer."""
    workers = {"num_workers": 2, "persistent_workers": True}
    return tiny_config(epochs=10**6, eval_splits=[], train_eval="never", **workers)


@pytest.mark.parametrize(
    "whom", ["the one that watches", pytest.param("the trainer", marks=pytest.mark.slow)]
)
def test_nothing_outlives_a_kill(endless: TrainConfig, tmp_path: Path, whom: str) -> None:
    with running(endless, tmp_path / "run") as (process, (trainer,)):
        tree = process_tree(process.pid)
        os.kill(process.pid if whom == "the one that watches" else trainer, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in tree[1:]), "the end of all")
        process.wait(180)
    with running(endless, tmp_path / "run", "--resume") as (process, trainers):
        assert len(trainers) == 1
        process.terminate()
        assert "stopped in epoch" in process.communicate(timeout=180)[0]


SPAWNED = """
import multiprocessing, sys
import ogbnlib
kept = []
def work(store, persistent):
    loader = ogbnlib.open_store(store).loader(
        num_neighbors=[2], batch_size=16, num_workers=2, persistent_workers=persistent
    )
    kept.append(loader)  # to the end of the process
    if not persistent:
        kept.append(iter(loader))
        next(kept[-1])
    else:
        print(sum(batch.batch_size for batch in loader), flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(
        target=work, args=(sys.argv[2], sys.argv[3] == "True")
    )
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    ("method", "persistent"), [("spawn", True), ("spawn", False), ("fork", True)]
)
def test_a_process_of_multiprocessing_ends_well_with_workers(
    tiny_store: Path, tmp_path: Path, method: str, persistent: bool
) -> None:
    (tmp_path / "script.py").write_text(SPAWNED)
    argv = [sys.executable, str(tmp_path / "script.py"), method, str(tiny_store), str(persistent)]
    # torch 2.15 warns of torch.jit.script, which PyG calls when it is imported
    env = {**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_earlier_runs_dead_worker_is_not_blamed() -> None:
    worker = worker_arguments(1)["multiprocessing_context"].Process(target=time.sleep, args=(60,))
    worker.start()
    worker.kill()
    worker.join()
    with pytest.raises(InputError, match=r"^no such file$"), workers_ended():
        raise InputError("no such file")
