"""SIGUSR1 and SIGTERM end a run at a batch boundary with a checkpoint, and nowhere else."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Config, is_alive, same, scores, wait_until, weights
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ogbnlib.memory.signals import STOP_SIGNALS, Stopped, block_stop_signals
from ogbnlib.memory.tree import process_tree
from ogbnlib.runs.codes import STOPPED
from ogbnlib.runs.folder import Run
from ogbnlib.training.network import GNN
from ogbnlib.training.train import train

BATCHES = 8  # of an epoch of 120 seeds in batches of 16


@pytest.fixture
def in_batch() -> Iterator[Callable[..., None]]:
    """Calls a function within the n-th batch, training and evaluation counted together."""
    hooks: list[RemovableHandle] = []

    def within(count: int, act: Callable[[], None]) -> None:
        left = iter(range(count - 1, -1, -1))

        def train_batch(*_: Any) -> None:
            if next(left, -1) == 0:
                act()

        def eval_batch(module: Module, _: Any) -> None:
            if isinstance(module, GNN) and not module.training:
                train_batch()

        hooks.append(register_optimizer_step_pre_hook(train_batch))
        hooks.append(register_module_forward_pre_hook(eval_batch))

    yield within
    for hook in hooks:
        hook.remove()


@pytest.fixture
def signal_at(in_batch: Callable[..., None]) -> Callable[..., None]:
    """Sends this process a signal from within its n-th batch."""
    return lambda count, number=signal.SIGUSR1: in_batch(count, lambda: signal.raise_signal(number))


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Signals that a shell's `nohup` had set to be ignored end a process again."""
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def position(folder: Path) -> tuple[int, int]:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    return state["epoch"], state["position"]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_stops_after_the_running_batch(
    tiny_config: Config, tmp_path: Path, signal_at: Callable[..., None], number: signal.Signals
) -> None:
    before = [signal.getsignal(n) for n in STOP_SIGNALS]
    signal_at(3, number)
    words = "stopped in epoch 1, 48 of 120 seeds trained; go on with"
    with pytest.raises(Stopped, match=words):
        train(tiny_config(), tmp_path / "run")
    assert position(tmp_path / "run") == (0, 48)
    assert [signal.getsignal(n) for n in STOP_SIGNALS] == before
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["exit_code"] == STOPPED
    assert result["diagnosis"]["cause"] == "stopped at a checkpoint"
    assert "--resume" in Run.open(tmp_path / "run").diagnosis.remedy
    assert not issubclass(Stopped, Exception)  # so that `except Exception` of a sweep lets it pass


def test_a_signal_in_an_evaluation_costs_no_training(
    tiny_config: Config, tmp_path: Path, signal_at: Callable[..., None]
) -> None:
    config = tiny_config(dropout=0.5, epochs=1, train_eval="never")
    straight = train(config)
    signal_at(BATCHES + 2)
    with pytest.raises(Stopped, match="120 of 120 seeds trained"):
        train(config, tmp_path / "run")
    assert position(tmp_path / "run") == (0, 120)
    assert not len(Run(tmp_path / "run").metrics)
    assert scores(train(config, tmp_path / "run", resume=True).history) == scores(straight.history)
    again = [phase.name for phase in Run(tmp_path / "run").phases if phase.attempt == 2]
    assert "eval valid" in again
    assert not {"train epoch", "build train loader"} & set(again)


def test_a_run_stopped_again_and_again_ends_with_equal_weights(
    tiny_config: Config, tmp_path: Path, tiny_store: Path, signal_at: Callable[..., None]
) -> None:
    on_disk = {"dataset": str(tiny_store), "loading": "store"}
    policies: list[dict[str, Any]] = [{"loading": policy} for policy in ("shared", "lazy", "eager")]
    policies += [{**on_disk, "lookahead": lookahead} for lookahead in ("off", "9 kB", 5000)]
    common: dict[str, Any] = {"dropout": 0.5, "epochs": 2, "eval_splits": "", "train_eval": "never"}
    straight = train(tiny_config(**common), tmp_path / "straight")
    for attempt in range(20):
        config = tiny_config(**{**common, **policies[attempt % len(policies)]})
        signal_at(5)
        try:
            resumed = train(config, tmp_path / "run", resume=attempt > 0)
            break
        except Stopped:
            continue
    assert attempt == 3
    assert scores(resumed.history) == scores(straight.history)
    assert Run(tmp_path / "run").metrics["epoch"].tolist() == [1, 2]
    assert same(weights(tmp_path / "run"), weights(tmp_path / "straight"))


def test_workers_outlive_a_signal_until_the_trainer_stops(
    tiny_config: Config, tmp_path: Path, in_batch: Callable[..., None]
) -> None:
    seen: list[int] = []

    def signal_all() -> None:
        seen.extend(process_tree(os.getpid()))
        for pid in seen:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGUSR1)

    in_batch(2, signal_all)  # the workers begin with the first batch
    with pytest.raises(Stopped, match="32 of 120 seeds"):
        train(tiny_config(num_workers=2, persistent_workers=True), tmp_path / "run")
    assert len(seen) >= 3
    wait_until(lambda: not any(is_alive(pid) for pid in seen[1:]), "the workers' end")


@pytest.mark.parametrize(
    ("splits", "every_s", "expected"),
    [("valid", 0.0, 2), ("valid", 1e-9, BATCHES + 2), ("valid", 600.0, 2), ("", 0.0, 2)],
)
def test_a_checkpoint_is_written_whenever_one_is_due(
    tiny_config: Config, tmp_path: Path, splits: str, every_s: float, expected: int
) -> None:
    train(tiny_config(epochs=1, eval_splits=splits, checkpoint_every_s=every_s), tmp_path / "run")
    begun = [event for event in Run(tmp_path / "run").events if event["event"] == "begin"]
    # one before the evaluation, or before the first row of metrics.csv, and one at the epoch's end
    assert sum(event["phase"] == "checkpoint" for event in begun) == expected


def test_a_signal_held_back_ends_no_process_before_it_takes_over() -> None:
    code = (
        "import signal, sys, time\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "from ogbnlib.memory.signals import StopRequest, take_over\n"
        "stop = StopRequest()\ntake_over(stop)\nprint(stop.number)"
    )
    with block_stop_signals():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        child = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGUSR1)
    said, _ = child.communicate("\n", timeout=180)
    assert (child.returncode, said) == (0, f"{int(signal.SIGUSR1)}\n")
