"""Promises of `sandbox`: `run` comes back with what happened, and nothing that was computed is
lost; in a notebook's job none takes more than the job has, and a requeued job repeats none."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import MB, Config, tree, wait_until, write_run

from ogbnlib.config import TrainConfig
from ogbnlib.environment import AGAIN_VARIABLE
from ogbnlib.errors import GB, InputError
from ogbnlib.forecast.memory_parts import RUNTIME_BYTES
from ogbnlib.memory.cgroup import effective_limit
from ogbnlib.memory.limits import KINDS
from ogbnlib.memory.malloc import trainer_environment
from ogbnlib.memory.reading import read_memory
from ogbnlib.memory.signals import Stopped
from ogbnlib.memory.tree import Tree
from ogbnlib.notebook import compare_runs, forecast_table, loader_costs, plot_runs
from ogbnlib.runs import sandbox
from ogbnlib.runs.attempt import open_run_dir
from ogbnlib.runs.codes import STOPPED
from ogbnlib.runs.folder import Run, RunEnded
from ogbnlib.runs.names import next_run_dir
from ogbnlib.runs.sandbox import run, scaled_limit, watch
from ogbnlib.sources.synth import synthesize_store


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrainConfig]:
    """One epoch on 444,000 nodes and 6.5 M edges, where the policies differ by hundreds of MB."""
    path = tmp_path_factory.mktemp("data") / "large"
    store = synthesize_store(path, scale=0.004, progress=False)
    values = {"dataset": store, "epochs": 1, "device": "cpu", "train_eval": "never"}
    return lambda policy: TrainConfig.create({**values, "loading": policy})


@pytest.fixture(scope="module")
def unlimited(
    large: Callable[[str], TrainConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("unlimited")
    how = {policy: {"run_dir": folder / policy, "echo": False} for policy in ("eager", "shared")}
    return {policy: run(large(policy), **where) for policy, where in how.items()}


def held(result: Run) -> int:
    """The most anonymous and shared memory that was seen at once."""
    return int(result.result["sampled_peaks_bytes"]["held_bytes"])


@pytest.fixture(scope="module")
def limited(
    large: Callable[[str], TrainConfig],
    unlimited: dict[str, Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Run]:
    """Both policies under one limit, halfway between what they need."""
    between = (held(unlimited["eager"]) + held(unlimited["shared"])) // 2
    assert held(unlimited["eager"]) - held(unlimited["shared"]) > 200 * MB
    folder = tmp_path_factory.mktemp("limited")
    how = {policy: {"run_dir": folder / policy, "echo": False} for policy in unlimited}
    return {policy: run(large(policy), between, **where) for policy, where in how.items()}


def test_under_one_limit_eager_is_killed_and_shared_unchanged(
    limited: dict[str, Run], unlimited: dict[str, Run]
) -> None:
    assert (limited["eager"].exit_code, limited["shared"].exit_code) == (137, 0)
    assert limited["shared"].metrics["epoch"].tolist() == [1]
    loss = limited["shared"].metrics["loss"].tolist()
    assert loss == unlimited["shared"].metrics["loss"].tolist()
    assert loss == unlimited["eager"].metrics["loss"].tolist()


def test_a_kill_is_a_result_with_cause_phase_parts_and_remedy(limited: dict[str, Run]) -> None:
    found = limited["eager"].diagnosis
    assert found.cause == "out of memory"
    assert found.phase in [phase.label for phase in Run(limited["eager"].run_dir).phases]
    assert "features" in found.facts.parts
    assert "loading=shared" in found.remedy
    assert limited["eager"].result["diagnosis"]["text"] == str(found)


def test_a_result_states_its_limit_peak_and_time(limited: dict[str, Run]) -> None:
    for result in limited.values():
        stored = json.loads((result.run_dir / "result.json").read_text())
        assert stored == result.result
        assert stored["limit_by"] in KINDS
        assert stored["memory_limit_bytes"] > 0
        assert stored["duration_s"] > 0
        assert result.peak_bytes > 0
        if stored["limit_by"].startswith("cgroup"):
            assert stored["peak_source"] == "kernel counter"
            assert stored["peak_bytes"] <= stored["memory_limit_bytes"]


def test_a_finished_run_goes_on_for_more_epochs_under_its_limit(
    tiny_config: Config, tmp_path: Path
) -> None:
    first = run(tiny_config(epochs=1), "3 GB", run_dir=tmp_path / "run", echo=False)
    before = tree(tmp_path)
    again = run(tiny_config(epochs=1), run_dir=tmp_path / "run", resume=True, echo=False)
    assert tree(tmp_path) == before
    assert (again.result, again.diagnosis) == (first.result, first.diagnosis)
    more = run(tiny_config(), run_dir=tmp_path / "run", resume=True, echo=False)
    assert list(more.metrics["epoch"]) == [1, 2]
    assert more.result["memory_limit_bytes"] == 3 * GB


def test_a_limit_above_the_machines_becomes_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "300")
    source = "Slurm --mem (SLURM_MEM_PER_NODE)"
    code = "import os; print(os.environ['OGBNLIB_MEMORY_LIMIT_BYTES'])"
    result = watch(["-c", code], "4 GB", name="above", runs_dir=tmp_path).result
    said = f"memory_limit: 4.00 GB is above {source}: the limit is 300 MB"
    shown = capsys.readouterr()
    assert (shown.out, shown.err.splitlines()[0]) == (f"{300 * MB}\n", said)
    assert result["memory_limit_bytes"] == 300 * MB
    watch(["-c", code], "200 MB", name="below", runs_dir=tmp_path)
    assert capsys.readouterr().out == f"{200 * MB}\n"


def test_a_scaled_limit_is_the_data_sets_share(synth_dir: Path, tmp_path: Path) -> None:
    """Edges of 16 bytes and features of 4: whatever a notebook's `scale`, and at full size the
    whole, no more."""
    assert scaled_limit("auto", "ogbn-papers100M", "128 GB") == 128 * 2**30
    fixed = RUNTIME_BYTES + 20 * MB
    half = str(synthesize_store(tmp_path / "half.store", scale=0.0005, progress=False).path)
    for gigabytes, limit_bytes in {
        0.128: scaled_limit("auto", str(synth_dir), "128 GB"),
        0.032: scaled_limit("auto", half, "64 GB"),
        32: scaled_limit("auto", half, "64 GB", full=str(synth_dir)),
    }.items():
        assert limit_bytes - fixed == pytest.approx(gigabytes * 2**30, rel=0.02)
    assert scaled_limit("2 GB", "none", "64 GB") == 2**31
    with pytest.raises(InputError, match="nothing-here"):
        scaled_limit("auto", "nothing-here")


def test_what_the_child_refuses_ends_in_2_with_its_message(
    tiny_config: Config, tmp_path: Path
) -> None:
    with open_run_dir(tiny_config(), tmp_path / "run", resume=False):
        pass
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"torn")
    result = run(tiny_config(), run_dir=tmp_path / "run", resume=True, echo=False)
    assert (result.exit_code, result.diagnosis.cause) == (2, "bad input")
    assert "checkpoint.pt: expected its checksum at its end" in result.diagnosis.facts.last_output
    assert result.result["last_output"].startswith("error: ")
    assert "Traceback" not in (result.run_dir / "output.log").read_text()
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == b"torn"


def test_a_limit_below_pythons_own_memory_is_refused(tiny_config: Config, tmp_path: Path) -> None:
    least = f"{RUNTIME_BYTES // MB} MB that Python and torch take"
    words = rf"^memory_limit: expected more than the {least}.*, got 1 MB"
    with pytest.raises(InputError, match=words):
        run(tiny_config(), "1 MB", run_dir=tmp_path / "run")
    assert not [*tmp_path.iterdir()]
    small = watch(["true"], "20 MB", run_dir=tmp_path / "other")  # another command may be small
    assert small.exit_code == 0


def test_a_run_that_must_finish_raises_exit_code_and_diagnosis(tmp_path: Path) -> None:
    done = watch(["-c", ""], name="done", runs_dir=tmp_path)
    assert done.require_finished() is done
    failed = watch(["-c", "exit(7)"], name="failed", runs_dir=tmp_path)
    with pytest.raises(RunEnded) as caught:
        failed.require_finished()
    assert str(caught.value) == f"7: {failed.diagnosis}"


@pytest.mark.slow
def test_the_fixed_cost_of_a_trainer_is_that_of_the_forecasts(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    code = f"import sys, time; sys.path.insert(0, {tests!r}); import warm_up; warm_up.warm_up(); time.sleep(0.3)"
    watch(["-c", code], run_dir=tmp_path / "compiles kernels once", echo=False)
    done = watch(["-c", code], run_dir=tmp_path / "run", echo=False)
    assert done.held_peak_bytes == pytest.approx(RUNTIME_BYTES, rel=0.15)


@pytest.mark.parametrize(
    ("kernel", "asked"),
    [(b"always [madvise] never", True), (b"always madvise [never]", False), (None, False)],
)
def test_a_trainer_asks_for_huge_pages_if_the_kernel_has_them(
    kernel: bytes | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ogbnlib.memory.malloc.read_whole", lambda path: kernel)
    assert (trainer_environment({}).get("THP_MEM_ALLOC_ENABLE") == "1") == asked
    # the user's own value
    assert "THP_MEM_ALLOC_ENABLE" not in trainer_environment({"THP_MEM_ALLOC_ENABLE": "0"})


CUTTING = """import os, sys, torch
class Net(torch.nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.linear = torch.nn.Linear(num_features, num_classes)
    def forward(self, x, edge_index):
        if "--try" not in sys.argv:
            os.truncate({file!r}, 0)
        return self.linear(x)
"""


def test_a_file_that_was_cut_during_a_pass_is_named(
    tiny_config: Config, tiny_store: Path, tmp_path: Path
) -> None:
    store = shutil.copytree(tiny_store, tmp_path / "store")
    Path(tmp_path, "cutting.py").write_text(CUTTING.format(file=f"{store}/x.npy"))
    config = tiny_config(dataset=str(store), loading="store", model=f"{tmp_path}/cutting.py:Net")
    found = run(config, run_dir=tmp_path / "run", echo=False).diagnosis
    assert (found.exit_code, found.facts.damage.partition(":")[0]) == (135, f"{store}/x.npy")
    assert found.facts.damage.rstrip(".") in found.text
    assert [action.id for action in found.actions] == ["check data"]
    assert Run.open(tmp_path / "run").diagnosis == found


def test_a_sweep_of_runs_ends_with_the_first_signal(tiny_config: Config, tmp_path: Path) -> None:
    def sweep() -> None:
        for name in ("first", "second"):
            try:
                run(tiny_config(epochs=10**6), run_dir=tmp_path / name, echo=False)
            except Exception as error:
                print(f"failed: {error}")

    def stop() -> None:
        wait_until((tmp_path / "first" / "checkpoint.pt").exists, "a checkpoint")
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(Stopped, match=f"SIGTERM stopped the run {tmp_path}/first. Exit code 75"):
        sweep()
    stopping.join()
    assert Run(tmp_path / "first").exit_code == STOPPED
    assert not (tmp_path / "second").exists()


class Started(Exception):
    """A child would have been started."""


@pytest.fixture
def config(synth_dir: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A config whose run ends in `Started` instead of a child."""

    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(sandbox, "_carry_out", start)
    return TrainConfig.create(dataset=str(synth_dir), loading="lazy", epochs=1, device="cpu")


def test_a_notebook_does_not_start_a_run_that_exceeds_its_job(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    where: dict[str, Any] = {"runs_dir": tmp_path, "echo": False}
    with pytest.raises(Started):
        run(config, name="fits", **where)
    # less than the run takes, more than its own limit
    own_bytes = RUNTIME_BYTES + 5 * MB
    room_mb = ((read_memory(Tree(os.getpid())).held_bytes or 0) + own_bytes) // MB + 35
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(room_mb))
    assert effective_limit()[0] == room_mb * MB
    with pytest.raises(Started):
        run(config, name="script", **where)
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    with pytest.raises(Started):
        run(config, own_bytes, name="own-limit", **where)  # its kill ends nothing else
    done = run(config, name="large", **where)
    monkeypatch.undo()
    assert (done.state, done.exit_code) == ("not started", None)
    assert Run.open(done.run_dir).state == "not started"
    text = capsys.readouterr().out
    facts = done.diagnosis.facts
    assert facts.limit_by == "Slurm --mem (SLURM_MEM_PER_NODE)"
    assert facts.sizes["room_bytes"] < facts.sizes["forecast_bytes"]
    assert str(done.diagnosis) in text
    assert "<- peak" in text
    table = compare_runs({"large": done})
    assert table.loc["large", "ended"] == "not started"
    assert table["peak GB"].isna().all()
    assert loader_costs(done).empty
    assert forecast_table({"large": done})["measured MB"].isna().all()
    assert done.rss_peak_bytes == 0
    assert "not started" in plot_runs({"large": done}).axes[0].get_title()


def test_a_notebook_executed_again_gets_the_same_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*codes: str) -> list[Run]:
        how: dict[str, Any] = {"name": "a", "runs_dir": tmp_path, "echo": False}
        return [watch(["-c", code], **how) for code in codes]

    assert [done.run_dir.name for done in ends("pass", "exit(1)")] == ["a", "a-2"]
    monkeypatch.setenv(AGAIN_VARIABLE, "1")
    again = ends("pass", "exit(1)", "exit(2)")
    assert [done.run_dir.name for done in again] == ["a", "a-2", "a-3"]
    assert [done.exit_code for done in again] == [0, 1, 2]
    assert [len([e for e in done.events if e["event"] == "start"]) for done in again] == [1, 1, 1]
    assert next_run_dir(tmp_path, "a", again=True).name == "a-4"
    # a caller's own folder is never one that exists
    assert next_run_dir(tmp_path, "a").name == "a-4"


def test_a_notebook_executed_again_continues_a_stopped_run(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AGAIN_VARIABLE, "1")
    values = config.model_dump()
    killed = write_run(tmp_path / "killed", exit_code=137, killed_by="kernel", config=values)
    assert run(config, name="killed", runs_dir=tmp_path).run_dir == killed
    write_run(tmp_path / "other", exit_code=0, config={**values, "seed": 7})
    write_run(tmp_path / "stopped", exit_code=75, config=values)
    write_run(tmp_path / "limits", exit_code=0, config=values, memory_limit_bytes=2**33)
    for name in ("other", "stopped", "limits"):
        with pytest.raises(Started):
            run(config, name=name, runs_dir=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["killed", "limits", "limits-2", "other", "other-2", "stopped"]
