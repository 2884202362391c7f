"""W processes make the steps of one that accumulates W batches, and end together."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import force_windows, is_alive, scores, wait_until
from torch import Tensor, nn

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError
from ogbnlib.memory.cgroup import read_whole
from ogbnlib.memory.record import METRIC_COLUMNS
from ogbnlib.memory.recorder import EventLog
from ogbnlib.memory.signals import Stopped
from ogbnlib.memory.tree import process_tree
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.training.checkpoint import Checkpointer, State
from ogbnlib.training.distributed import Ranks
from ogbnlib.training.learner import Learner
from ogbnlib.training.train import train

Config = Callable[..., TrainConfig]

# Trains what each line of standard input asks for, in one launch: starting two processes takes ten
# seconds.
SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch, torch.distributed as dist
from ogbnlib.errors import Diverged, InputError
from ogbnlib.config import TrainConfig
from ogbnlib.training.train import train
dist.init_process_group("gloo")
gc.collect()
gc.freeze()  # as the trainer's own process does
for i, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    out = Path(sys.argv[1]).with_name(f"result-{i}-{dist.get_rank()}.pt")
    try:
        result = train(TrainConfig.create(job["config"]), job.get("run_dir"), resume=job.get("resume", False))
        torch.save({"history": result.history, "model": result.model.state_dict()}, out)
    except (InputError, Diverged) as error:
        torch.save({"error": str(error)}, out)
dist.destroy_process_group()
"""


def torchrun(*arguments: str, ranks: int = 2, **more: Any) -> subprocess.CompletedProcess[str]:
    how = ("--standalone", f"--nproc-per-node={ranks}")
    command = [sys.executable, "-m", "torch.distributed.run", *how, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, **more)


# Adam alone divides a wrong factor of the gradient out again; weight decay shows it.
BASE: dict[str, Any] = {"dropout": 0.5, "train_eval": "every_epoch", "weight_decay": 0.1}
# 120 seeds: 7 batches of 18 leave the second rank without one at the end; 1 of 200 from
# the beginning; 3 batches to a step leave a short last group.
CASES: dict[str, dict[str, Any]] = {
    "odd": {"batch_size": 18},
    "one": {"batch_size": 200, "eval_batch_size": 300},
    "groups": {"accumulate": 3, "batch_size": 9},
    "weights": {"class_weight": "balanced", "batch_size": 18},
    "gat": {"model": "gat", "batch_size": 18, "epochs": 1},
    "workers": {"num_workers": 1},
    "windows": {"loading": "store", "batch_size": 9},
}


@pytest.fixture(scope="module")
def jobs(
    tiny_config: Config, tiny_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Every case by two ranks, and runs whose number of ranks changes on the way."""
    folder = tmp_path_factory.mktemp("ddp")

    def config(**changes: Any) -> TrainConfig:
        on_disk = {"dataset": str(tiny_store)} if changes.get("loading") == "store" else {}
        return tiny_config(**{**BASE, **on_disk, **changes})

    train(config(epochs=1, accumulate=2), folder / "grown")
    wanted = [{"config": config(**case)} for case in CASES.values()]
    wanted += [
        {"config": config(epochs=2), "run_dir": str(folder / "grown"), "resume": True},
        {"config": config(epochs=1), "run_dir": str(folder / "shrunk")},
        {"config": config(), "run_dir": str(folder / "grown")},
        {"config": config(lr=1e30), "run_dir": str(folder / "diverged")},
    ]
    path = folder / "jobs.json"
    given = [{**job, "config": job["config"].model_dump(mode="json")} for job in wanted]
    path.write_text(json.dumps(given))
    (folder / "script.py").write_text(SCRIPT)
    force_windows(10_000)
    done = torchrun(str(folder / "script.py"), str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    names = [*CASES, "grown", "shrunk", "refused", "diverged"]
    results = {
        name: [torch.load(folder / f"result-{i}-{rank}.pt", weights_only=True) for rank in range(2)]
        for i, name in enumerate(names)
    }
    return {"results": results, "folder": folder, "config": config}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_steps_of_one_accumulating_two(jobs: dict[str, Any], case: str) -> None:
    changes = CASES[case]
    alone = train(jobs["config"](**{**changes, "accumulate": 2 * changes.get("accumulate", 1)}))
    first, second = jobs["results"][case]
    for row, expected in zip(first["history"], alone.history, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for split in ("train", "valid", "test"):
            assert row[split] == expected[split]
            assert row[f"{split}_macro_f1"] == expected[f"{split}_macro_f1"]
    for name, value in alone.model.state_dict().items():
        assert torch.allclose(first["model"][name], value, atol=1e-4)
        assert torch.equal(first["model"][name], second["model"][name])
    assert scores(first["history"]) == scores(second["history"])


def test_a_run_goes_on_with_another_number_of_ranks(jobs: dict[str, Any]) -> None:
    whole = train(jobs["config"](accumulate=2))
    grown = jobs["results"]["grown"][0]
    shrunk = train(jobs["config"](accumulate=2), jobs["folder"] / "shrunk", resume=True)
    for history in (grown["history"], shrunk.history):
        for one, other in zip(scores(history), scores(whole.history), strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_an_error_of_one_rank_ends_all(jobs: dict[str, Any]) -> None:
    message = f"{jobs['folder']}/grown: expected a new or empty folder, found a run"
    assert [message in result["error"] for result in jobs["results"]["refused"]] == [True, True]


def test_all_ranks_end_where_one_diverges(jobs: dict[str, Any]) -> None:
    assert all("diverged: " in result["error"] for result in jobs["results"]["diverged"])
    assert not (jobs["folder"] / "diverged" / "checkpoint.pt").exists()


def test_a_fork_waits_until_nothing_else_owns_a_collectives_tensor() -> None:
    # gloo's thread may own it for a while; as the last owner it would enter Python during a fork
    graphs: list[Tensor] = []

    def collective(tensor: Tensor, group: object) -> None:
        graphs.append(tensor.requires_grad_() * tensor)  # the graph owns it, as C++ code does
        threading.Timer(0.3, graphs.clear).start()

    Ranks(0, 2)._run(collective, torch.ones(3))
    assert graphs
    multiprocessing.get_context("fork").Process().start()
    assert not graphs


def test_a_full_disk_at_an_epochs_end_is_reported_to_all_ranks(tmp_path: Path) -> None:
    texts: list[str] = []

    class Reporting(Ranks):
        def _gather(self, text: str) -> list[str]:
            texts.append(text)
            return [text]

    config = TrainConfig.create(dataset="none", device="cpu")
    learner = Learner(config, nn.Linear(1, 1), torch.device("cpu"), Reporting(), EventLog(None))
    row = dict.fromkeys(METRIC_COLUMNS, 0.5)
    with pytest.raises(InputError, match=r"metrics\.csv"):
        Checkpointer(tmp_path / "gone", {}, learner).save_epoch(State(epoch=1, history=[row]))
    assert [text.partition(":")[0] for text in texts] == ["InputError"]


def test_only_the_first_rank_writes(jobs: dict[str, Any]) -> None:
    events = Run(jobs["folder"] / "shrunk").events
    starts = [i for i, event in enumerate(events) if event["event"] == "start"]
    first = events[: [*starts, len(events)][1]]  # another test may have resumed it
    begun = [event["phase"] for event in first if event["event"] == "begin"]
    assert begun.count("train epoch") == 1
    assert Run(jobs["folder"] / "grown").metrics["epoch"].tolist() == [1, 2]


class _Sender(threading.Thread):
    """Once there is a checkpoint, sends a signal to this process or to a rank of its child."""

    def __init__(self, folder: Path, number: int, rank: int | None):
        super().__init__(daemon=True)
        self.folder, self.number, self.rank = folder, number, rank
        self.ranks: list[int] = []
        self.sent_s = 0.0
        self.start()

    def run(self) -> None:
        wait_until(lambda: (self.folder / "checkpoint.pt").exists(), "the first checkpoint")
        for pid in process_tree(os.getpid())[1:]:
            variables = (read_whole(f"/proc/{pid}/environ") or b"").split(b"\0")
            command = read_whole(f"/proc/{pid}/cmdline") or b""
            is_rank = any(each.startswith(b"RANK=") for each in variables)
            if is_rank and b"-m\0ogbnlib.training.child" in command:
                self.ranks.append(pid)
                if self.rank is not None and f"RANK={self.rank}".encode() in variables:
                    os.kill(pid, self.number)
        self.sent_s = time.monotonic()
        if self.rank is None:
            os.kill(os.getpid(), self.number)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_its_signal(tiny_config: Config, tmp_path: Path) -> None:
    sender = _Sender(tmp_path / "run", signal.SIGKILL, rank=1)
    how = {"num_ranks": 2, "limit_by": "watchdog", "echo": False}
    result = run(tiny_config(epochs=1000), run_dir=tmp_path / "run", **how)
    ended_s = time.monotonic()
    sender.join()
    assert result.exit_code == 137
    assert result.diagnosis.cause == "SIGKILL, cause unknown"
    facts = result.diagnosis.facts
    assert (facts.rank, facts.rank_exit_code) == (1, 137)
    assert ended_s - sender.sent_s < 60
    assert len(sender.ranks) == 2
    assert not any(is_alive(pid) for pid in sender.ranks)


@pytest.mark.slow
def test_a_signal_stops_all_ranks_at_one_step(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(epochs=1000, batch_size=18, dropout=0.5, eval_every=1000)
    sender = _Sender(tmp_path / "run", signal.SIGUSR1, rank=None)
    with pytest.raises(Stopped) as ended:
        run(config, "4 GB", run_dir=tmp_path / "run", num_ranks=2, echo=False)
    sender.join()
    stopped = ended.value.run
    assert stopped.exit_code == 75, stopped.diagnosis
    assert stopped.diagnosis.cause == "stopped at a checkpoint"
    assert "stopped in epoch" in stopped.result["last_output"]
    assert not any(is_alive(pid) for pid in sender.ranks)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["position"] in (0, 36, 72, 108, 120)
    epochs = state["epoch"] + 1
    resumed = train(config.replace(epochs=epochs, accumulate=2), tmp_path / "run", resume=True)
    assert [row["epoch"] for row in resumed.history] == list(range(1, epochs + 1))
    # later losses drift apart as roundings do
    begun = train(config.replace(epochs=min(epochs, 3), accumulate=2))
    losses = [[row["loss"] for row in result.history[:3]] for result in (resumed, begun)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_the_command_line_trains_as_a_rank_of_torchrun(tiny_store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = [f"dataset={tiny_store}", "batch_size=16", "epochs=1", "device=cpu"]
    sets = [word for value in values for word in ("--set", value)]
    done = torchrun("-m", "ogbnlib", "train", "--run-dir", str(folder), *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^Epoch 001 \| Loss: ", done.stdout, re.MULTILINE)) == 1
    assert done.stdout.count(str(folder)) == 1
    assert json.loads((folder / "result.json").read_text())["exit_code"] == 0
    assert Run(folder).metrics["epoch"].tolist() == [1]
