"""A resumption believes no damage and refuses another run before anything is written."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import flip, raw_arrays, same, tree, weights

from ogbnlib.config import TrainConfig
from ogbnlib.errors import Diverged, InputError
from ogbnlib.graph.store import Store
from ogbnlib.runs.attempt import check_content
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import run
from ogbnlib.sources.convert import convert
from ogbnlib.sources.ogb import open_raw
from ogbnlib.training.learner import Learner
from ogbnlib.training.train import TrainResult, train

Config = Callable[..., TrainConfig]
Resume = Callable[..., TrainResult]


def notes(folder: Path) -> list[str]:
    events = [event for event in Run(folder).events if event["event"] == "note"]
    return [event["text"] for event in events if "text" in event]


@pytest.fixture(scope="module")
def straight(tiny_config: Config) -> TrainResult:
    return train(tiny_config(epochs=3, dropout=0.3))


@pytest.fixture(scope="module")
def begun(tiny_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "run"
    train(tiny_config(epochs=2, dropout=0.3), folder)
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    """Two epochs of the three of `straight`, to be resumed or damaged."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


@pytest.fixture
def resume(tiny_config: Config, folder: Path) -> Resume:
    values = {"epochs": 3, "dropout": 0.3}
    return lambda **changes: train(tiny_config(**values, **changes), folder, resume=True)


def refused(folder: Path, resume: Resume, match: str, **changes: Any) -> str:
    """The refusal of a resumption that leaves the run as it was, its result and events too."""
    before = tree(folder)
    with pytest.raises(InputError, match=match) as caught:
        resume(**changes)
    told = dict.fromkeys(("progress.json", ".lock"))
    assert {**tree(folder), **told} == {**before, **told}
    return str(caught.value)


def test_any_flipped_byte_of_a_checkpoint_is_seen(folder: Path) -> None:
    from ogbnlib.training.checkpoint import _read

    path = folder / "checkpoint.pt"
    sound = path.read_bytes()
    _read(path)
    for at in [*range(0, len(sound), max(1, len(sound) // 200)), len(sound) - 1]:
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(InputError, match=r"checkpoint\.pt: .*checksum"):
            _read(path)


@pytest.mark.parametrize("content", [b"PK\x03\x04 torn", "flipped", None], ids=str)
def test_a_damaged_checkpoint_does_not_start_over(
    folder: Path, resume: Resume, content: Any
) -> None:
    path = folder / "checkpoint.pt"
    if content == "flipped":
        flip(path, path.stat().st_size // 3)
    elif content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    refused(folder, resume, rf"{path}: expected .*put a copy back")


def test_a_folder_to_read_only_is_refused_at_once(folder: Path) -> None:
    def resumed_by_another_user() -> None:
        os.chdir(folder)
        if os.geteuid() == 0:
            os.setuid(12345)
        with pytest.raises(InputError, match=r"^\.: .*copy it"):
            check_content(Path(), resume=True)

    folder.chmod(0o555)
    child = multiprocessing.get_context("fork").Process(target=resumed_by_another_user)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_checkpoints_have_the_epochs(folder: Path, resume: Resume, straight: TrainResult) -> None:
    (folder / "metrics.csv").write_text("epoch;loss\x00")
    resume()
    assert Run(folder).metrics["loss"].tolist() == [row["loss"] for row in straight.history]


@pytest.fixture(scope="session")
def others(
    tiny_dir: Path, tiny_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Data sets with the same splits as `tiny_dir`; float16 can't hold its features exactly."""
    root = tmp_path_factory.mktemp("others")
    given = {**raw_arrays(tiny_dir), "splits": open_raw(tiny_dir).read_splits(), "num_classes": 4}
    x = given["x"]

    def make(name: str, **changes: Any) -> None:
        Store.from_arrays(root / name, **{**given, **changes}, progress=False)

    make("edges", edge_index=given["edge_index"][::-1].copy())
    make("labels", y=np.where(given["y"] >= 0, (given["y"] + 1) % 4, -1))
    make("splits", splits={name: ids[::-1].copy() for name, ids in given["splits"].items()})
    convert(tiny_dir, root / "direction", undirected=True, progress=False)
    convert(tiny_dir, root / "half", feature_dtype="float16", progress=False)
    make("one", x=x + np.float32(1) * (np.arange(len(x)) == 7)[:, None])
    shutil.copytree(tiny_store, root / "moved")
    return {path.name: str(path) for path in root.iterdir()}


@pytest.mark.parametrize("other", ["one", "half", "edges", "labels", "splits", "direction"])
def test_other_data_of_the_same_sizes_are_refused(
    folder: Path, resume: Resume, straight: TrainResult, others: dict[str, str], other: str
) -> None:
    named = {"one": "features", "half": "features"}.get(other, other)
    words = rf"{others[other]}: .*trained on.* other .*{named}"
    refused(folder, resume, words, dataset=others[other])
    assert same(resume().model.state_dict(), straight.model.state_dict())


def test_a_child_that_refuses_other_data_leaves_the_run(
    folder: Path, tiny_config: Config, others: dict[str, str], straight: TrainResult
) -> None:
    names = ("config.json", "result.json", "events.jsonl", "timeline.csv", "metrics.csv")
    before = {name: (folder / name).read_bytes() for name in names}
    changed = tiny_config(epochs=3, dropout=0.3, dataset=others["edges"])
    ended = run(changed, run_dir=folder, resume=True, echo=False)
    assert ended.exit_code == 2
    assert "other edges" in ended.diagnosis.text
    assert {name: (folder / name).read_bytes() for name in names} == before
    train(changed.replace(dataset=others["moved"]), folder, resume=True)
    assert TrainConfig.load(folder / "config.json").dataset == others["moved"]
    assert same(weights(folder), straight.model.state_dict())


def test_a_dtype_that_a_store_on_disk_does_not_have_is_noted(
    tiny_config: Config, tmp_path: Path, others: dict[str, str]
) -> None:
    config = tiny_config(loading="store", dataset=others["moved"], epochs=1)
    for dtype, is_noted in (("float16", True), ("int8", True), ("float32", False)):
        train(config.replace(feature_dtype=dtype), tmp_path / dtype)
        notes = [event.get("text", "") for event in Run(tmp_path / dtype).events]
        assert any("feature_dtype: " in note for note in notes) == is_noted


def test_an_edited_config_is_held_against_the_checkpoint(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "hidden_channels": 16, "seed": 5}))
    edited = Run(folder).config
    words = "can't resume with other values .*hidden_channels was 8, now 16; seed was 0, now 5"
    refused(folder, lambda: train(edited, folder, resume=True), words)


def test_another_lr_counts_and_is_said(folder: Path, resume: Resume, straight: TrainResult) -> None:
    changed = resume(lr=0.5, weight_decay=0.1, num_threads=2)
    kept = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizer"]["param_groups"][0]
    assert (kept["lr"], kept["weight_decay"]) == (0.5, 0.1)
    losses, first = ([row["loss"] for row in run.history[:2]] for run in (changed, straight))
    assert losses == first
    assert not same(changed.model.state_dict(), straight.model.state_dict())
    lr = "lr is 0.5 from here on, 0.01 before"
    for said in (lr, "weight_decay is 0.1", "num_threads is 2 from here on, 1 before"):
        assert any(note.startswith(said) for note in notes(folder))


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_auto_threads_stay_on_a_machine_with_other_cores(
    first: int, then: int, tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    threads = torch.get_num_threads()
    # from 0.5 GFLOP a step on, auto takes all cores
    sizes = {"num_neighbors": [2, 2, 2], "batch_size": 60, "hidden_channels": 1024}
    large = tiny_config(**sizes, eval_splits=())
    assert large.num_threads == "auto"
    results = []
    for name, cores in (("straight", (first,)), ("resumed", (first, then))):
        for attempt, number in enumerate(cores):
            monkeypatch.setenv("SLURM_CPUS_PER_TASK", str(number))
            epochs = 2 if number == cores[-1] else 1
            config = large.replace(epochs=epochs)
            results.append(train(config, tmp_path / name, resume=attempt > 0))
            assert Run(tmp_path / name).config == config.replace(num_threads=first)
        assert not notes(tmp_path / name)
    assert same(results[0].model.state_dict(), results[-1].model.state_dict())
    assert torch.get_num_threads() == threads
    done = run(large, run_dir=tmp_path / "resumed", resume=True, echo=False)
    assert done.config.num_threads == first
    assert len(done.phases) == len(Run(tmp_path / "resumed").phases)


def test_a_run_that_diverges_ends_at_once_and_says_so(tiny_config: Config, tmp_path: Path) -> None:
    ended = run(tiny_config(lr=1e30), run_dir=tmp_path / "run", echo=False)
    assert (ended.exit_code, ended.diagnosis.cause) == (77, "diverged")
    assert "lr=1e+30" in ended.diagnosis.text
    assert [action.id for action in ended.diagnosis.actions] == ["check data", "resume"]
    assert "Traceback" not in (tmp_path / "run" / "output.log").read_text()
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    assert not len(Run(tmp_path / "run").metrics)
    assert len(train(tiny_config(), tmp_path / "run", resume=True).history) == 2


def test_a_smaller_lr_mends_divergence(folder: Path, resume: Resume, straight: TrainResult) -> None:
    with pytest.raises(Diverged, match="in epoch 3, "):
        resume(lr=1e30)
    assert all(bool(torch.isfinite(value).all()) for value in weights(folder).values())
    assert Run.open(folder).diagnosis.exit_code == 77
    assert Run(folder).metrics["epoch"].tolist() == [1, 2]
    assert len(resume(lr=0.001).history) == 3


def test_weights_that_are_not_finite_are_never_saved(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Learner.step

    def spoil(self: Learner, *given: Any) -> None:
        step(self, *given)
        if given[-1] == 120:  # the epoch's last step, after whose loss none comes
            next(self.model.parameters()).data[0] = float("inf")

    monkeypatch.setattr(Learner, "step", spoil)
    with pytest.raises(Diverged, match="in epoch 1, after 120 seeds"):
        train(tiny_config(eval_splits="", train_eval="never"), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


# Saves, checks and reads 48 MB of state; prints the growth of anonymous memory in each, in bytes.
GROWTH = """
import re, sys, threading
from pathlib import Path
import torch
from torch import nn
from ogbnlib.config import TrainConfig
from ogbnlib.memory.recorder import EventLog
from ogbnlib.training import checkpoint
from ogbnlib.training.distributed import Ranks
from ogbnlib.training.learner import Learner


def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])


def growth(work):
    samples, ended = [anonymous()], threading.Event()

    def watch():
        while not ended.wait(0.0005):
            samples.append(anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    result = work()
    ended.set()
    watching.join()
    print(max(samples) - samples[0], flush=True)
    return result


config = TrainConfig.create({"dataset": "none", "device": "cpu"})
model = nn.Linear(2048, 2048)  # as one tensor of 16 MB
learner = Learner(config, model, torch.device("cpu"), Ranks(), EventLog(None))
model(torch.ones(1, 2048)).sum().backward()
learner.optimizer.step()
folder = Path(sys.argv[1])
saver = checkpoint.Checkpointer(folder, {}, learner)
small = folder / "small.pt"
checkpoint._write(small, {"weights": torch.ones(2)})  # loads code
checkpoint._read(small)
learner.loss_sum.isfinite().all()
growth(lambda: saver.save(checkpoint.State(epoch=1, position=1)))
content = growth(lambda: checkpoint._read(folder / "checkpoint.pt"))
checkpoint.load_state(model, content["model"], folder)
model.weight.data[-1, -1] = float("nan")
assert not learner.is_finite()
"""


def test_a_checkpoint_is_saved_and_read_without_a_copy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, tmp_path], capture_output=True, text=True, check=True
    )
    state_bytes = (tmp_path / "checkpoint.pt").stat().st_size
    assert state_bytes > 48 * 2**20
    saved_bytes, read_bytes = map(int, done.stdout.split())
    assert saved_bytes < 0.1 * state_bytes
    assert read_bytes < 0.1 * state_bytes
