"""Promises of `watch`, `phase` and `mark`: any command recorded and limited, moments named, no cost otherwise."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MB, is_alive, python_child, wait_until

import ogbnlib
from ogbnlib import marks
from ogbnlib.errors import InputError
from ogbnlib.memory.reading import process_tree
from ogbnlib.memory.tally import Growth, Levels
from ogbnlib.runs.folder import Run, locked
from ogbnlib.runs.sandbox import watch

Cli = Callable[..., subprocess.CompletedProcess[str]]
LOADERS = """
import ogbnlib, sys, time
kept = []
for split in ("train", "valid", "test"):
    with ogbnlib.phase(f"build {split} loader"):
        kept.append(bytearray(60 * 2**20))
        time.sleep(0.15)
print("survived", *sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(code: str) -> str:
        (tmp_path / "my_train.py").write_text(textwrap.dedent(code))
        return str(tmp_path / "my_train.py")

    return write


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    def call(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ogbnlib", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, **how)

    return call


# The command line -----------------------------------------------------------------------------------------------------


def test_watch_passes_arguments_output_input_and_exit_code_on(cli: Cli, tmp_path: Path) -> None:
    done = cli("watch", "--run-dir", "run", "--", "sh", "-c", "cat; echo $1; exit 7", "sh", "--lr", input="in ")
    assert (done.returncode, done.stdout) == (7, "in --lr\n")
    assert "ended with exit code 7" in done.stderr
    assert "run" in done.stderr.splitlines()[-1]
    assert Run.open(tmp_path / "run").exit_code == 7


def test_a_watched_command_says_that_it_is_at_work_and_its_output_stays_its_own(
    cli: Cli, script: Callable[[str], str]
) -> None:
    work = "import time, ogbnlib\nprint('mine')\ntime.sleep(1.5)\nwith ogbnlib.phase('load'):\n    time.sleep(1.5)"
    done = cli("watch", "--memory-limit", "1 GB", "--", sys.executable, script(work))
    assert done.stdout == "mine\n"
    first, *_, loading, _, _ = done.stderr.splitlines()
    assert re.fullmatch(r"my_train: (starting|at work: \d s(, \d+ MB of 1.00 GB \[[#.]{10}\])?)", first)
    assert re.fullmatch(r"my_train: load: \d+ MB of 1.00 GB \[[#.]{10}\]", loading)


@pytest.mark.parametrize("limit_by", ["auto", "watchdog"])
def test_a_script_that_passes_its_limit_is_killed_in_the_phase_that_it_named(
    cli: Cli, script: Callable[[str], str], tmp_path: Path, limit_by: str
) -> None:
    arguments = ["--memory-limit", "150 MB", "--limit-by", limit_by, "--run-dir", "run", "--", sys.executable]
    done = cli("watch", *arguments, script(LOADERS), "--lr", "1e-3")
    assert done.returncode == 137
    assert "in phase 'build test loader'" in done.stderr
    assert "one loader at a time" in done.stderr
    for ours in ("loading=", "feature_dtype", "--resume", "resume=True"):
        assert ours not in done.stderr
    assert Run.open(tmp_path / "run").state == "out of memory, exit code 137"
    free = cli("watch", "--json", "--", sys.executable, script(LOADERS), "--lr", "1e-3")
    assert json.loads(free.stdout)["diagnosis"]["cause"] == "finished"
    assert (tmp_path / "runs" / "my_train" / "output.log").read_text() == "survived --lr 1e-3\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "error: watch: expected either a command after -- or --pid, got neither"),
        (["--pid", "1", "--", "true"], "error: watch: expected either a command after -- or --pid, got both"),
        (["--pid", "999999999"], "error: pid: expected the number of another process"),
        (["--pid", "1", "--memory-limit", "1 GB"], "error: memory_limit: expected none for a process"),
        (["--run-dir", "taken", "--", "true"], "error: taken: expected a new or empty folder"),
        (["--", "./script.py"], "put `python` before a script"),
        (["--limit-by", "magic", "--", "true"], "error: limit_by: expected auto or one of"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(
    cli: Cli, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    (tmp_path / "script.py").touch()
    before = sorted(tmp_path.rglob("*"))
    done = cli("watch", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_exit_codes_of_other_commands_are_not_taken_for_ours(tmp_path: Path) -> None:
    for code, word in ((75, "error"), (76, "error"), (77, "error"), (2, "error"), (143, "SIGTERM")):
        done = watch(["sh", "-c", f"exit {code}"], runs_dir=tmp_path)
        assert done.state == f"{word}, exit code {code}"
        for ours in ("checkpoint", "GPU", "lr", "--resume", "resume=True"):
            assert ours not in done.diagnosis.text


def test_a_command_is_seen_with_the_allocator_that_it_has_without_us(tmp_path: Path) -> None:
    done = watch(["-c", "import os; print([n for n in os.environ if n.startswith('MALLOC')])"], runs_dir=tmp_path)
    assert (done.run_dir / "output.log").read_text() == "[]\n"
    assert done.run_dir.name == Path(sys.executable).stem


def test_a_command_goes_on_where_it_can_not_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ogbnlib.memory.recorder import _Rows

    def full(self: _Rows, *arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_Rows, "add", full)
    done = watch(["-c", "import time; time.sleep(0.3); print('survived'); exit(3)"], runs_dir=tmp_path)
    assert (done.exit_code, (done.run_dir / "output.log").read_text()) == (3, "survived\n")
    assert "No space left on device; it was not recorded on" in done.diagnosis.text


def test_a_running_process_is_recorded_until_it_ends(tmp_path: Path) -> None:
    code = "import sys; print('ready', flush=True); x = bytearray(40 * 2**20); sys.stdin.readline()"
    with python_child(code) as child:
        with pytest.raises(InputError, match="is only recorded"):
            watch(child.pid, "1 GB", runs_dir=tmp_path)
        command = [sys.executable, "-m", "ogbnlib", "watch", "--pid", str(child.pid), "--run-dir", str(tmp_path / "r")]
        watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: (tmp_path / "r" / "timeline.csv").exists() and len(Run(tmp_path / "r").samples), "a sample")
        assert Run.open(tmp_path / "r").state == "at work"
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait(30)
        _, said = watcher.communicate(timeout=30)
    assert watcher.returncode == 0
    assert f"Process {child.pid} ended" in said
    run = Run.open(tmp_path / "r")
    assert (run.exit_code, run.state) == (None, "ended")
    assert run.held_peak_bytes > 40 * MB


def test_an_interrupted_watcher_of_a_process_leaves_it_alone(tmp_path: Path) -> None:
    with python_child("import sys; print('ready', flush=True); sys.stdin.readline()") as child:
        command = [sys.executable, "-m", "ogbnlib", "watch", "--pid", str(child.pid), "--run-dir", str(tmp_path / "r")]
        watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: (tmp_path / "r" / "timeline.csv").exists() and len(Run(tmp_path / "r").samples), "a sample")
        watcher.send_signal(signal.SIGINT)
        _, said = watcher.communicate(timeout=30)
        assert (watcher.returncode, child.poll()) == (130, None)
    assert "Traceback" not in said
    assert Run.open(tmp_path / "r").result["interrupted"]


# At work --------------------------------------------------------------------------------------------------------------


def test_status_and_diagnose_say_where_a_run_is_that_goes_on(cli: Cli, script: Callable[[str], str]) -> None:
    code = "import ogbnlib\nwith ogbnlib.phase('epoch', epoch=3):\n    x = bytearray(50 * 2**20)\n    input()"
    arguments = ["watch", "--memory-limit", "300 MB", "--run-dir", "run", "--", sys.executable, script(code)]
    folder = Path(script(code)).parent
    process = subprocess.Popen(
        [sys.executable, "-m", "ogbnlib", *arguments], cwd=folder, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    run = folder / "run"
    wait_until(lambda: run.is_dir() and (run / "result.json").exists() is False and _held(run) > 50 * MB, "the phase")
    said = cli("diagnose", "run").stdout
    assert said.startswith("At work, in phase 'epoch 3' for ")
    assert " MB of 300 MB, " in said
    stands = json.loads(cli("status", "run", "--json").stdout)
    assert (stands["state"], stands["phase"], stands["memory_limit_bytes"]) == ("at work", "epoch 3", 300 * MB)
    assert stands["held_bytes"] > 50 * MB
    with pytest.raises(InputError, match="found process"), locked(run):
        pass
    process.communicate(b"\n")
    assert "finished" in cli("status", "run", "--json").stdout
    assert "Finished without an error" in cli("status", "run").stdout


def _held(run: Path) -> int:
    found = Run(run)
    return found.tally.held_bytes or 0 if (run / "timeline.csv").exists() and found.tally.phase else 0


def test_a_run_whose_watcher_was_killed_is_not_said_to_be_at_work(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ogbnlib", "watch", "--run-dir", str(tmp_path / "run"), "--", "sleep", "60"]
    watcher = subprocess.Popen(command, start_new_session=True)
    wait_until(lambda: (tmp_path / "run" / "timeline.csv").exists(), "the first sample")
    left = wait_until(lambda: process_tree(watcher.pid)[1:], "the command")
    watcher.kill()
    watcher.wait()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in left), "its end, as it holds the run's lock too")
    assert Run.open(tmp_path / "run").state == "no result"
    assert "the watching process was itself killed" in Run.open(tmp_path / "run").diagnosis.text


# phase and mark -------------------------------------------------------------------------------------------------------


def test_marks_cost_nothing_and_import_nothing_where_nobody_watches() -> None:
    def once() -> None:
        with ogbnlib.phase("load"):
            pass
        ogbnlib.mark("epoch", loss=1.0)

    assert min(timeit.repeat(once, number=10_000, repeat=5)) / 10_000 < 2e-6  # 0.4 us on a quiet machine
    code = "import sys, ogbnlib\nwith ogbnlib.phase('a'): ogbnlib.mark('b')\n"
    code += "print(sorted(name for name in sys.modules if name.startswith('ogbnlib')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ogbnlib', 'ogbnlib.marks']"


def test_marks_keep_what_json_can_and_the_text_of_the_rest(tmp_path: Path) -> None:
    import numpy as np
    import torch

    with marks.attached(tmp_path):
        ogbnlib.mark("epoch", loss=torch.tensor(0.5), step=np.int64(3), many=np.arange(2), where=Path("a"), event="x")
    (event,) = Run(tmp_path).events
    assert event["info"] == {"loss": 0.5, "step": 3, "many": "[0 1]", "where": "a", "event": "x"}
    assert event["held_bytes"] > MB


def test_only_the_first_process_marks_and_workers_and_forks_are_quiet(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    code = """
        import multiprocessing, os, subprocess, sys, ogbnlib
        def work(i):
            with ogbnlib.phase("worker"):
                ogbnlib.mark("worker")
        if __name__ == "__main__":
            with ogbnlib.phase("main"):
                for kind in ("fork", "spawn"):
                    with multiprocessing.get_context(kind).Pool(2) as pool:
                        pool.map(work, range(4))
                if os.fork() == 0:
                    work(0)
                    os._exit(0)
                os.wait()
                subprocess.run([sys.executable, "-c", "import ogbnlib; ogbnlib.mark('other')"], check=True)
            ogbnlib.mark("end")
    """
    done = watch([sys.executable, script(code)], runs_dir=tmp_path)
    assert (done.run_dir / "output.log").read_text() == ""
    told = [(event["event"], event.get("phase") or event.get("name")) for event in done.events]
    assert told == [("start", None), ("begin", "main"), ("end", "main"), ("mark", "end")]
    after = watch(["sh", "-c", f"{sys.executable} -c 'import ogbnlib; ogbnlib.mark(str(1))'; " * 2], runs_dir=tmp_path)
    assert len(after.events) == 3  # one after the other, each may


def test_a_script_does_not_end_of_what_can_not_be_written_about_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with marks.attached(tmp_path / "gone"), ogbnlib.phase("load"):
        ogbnlib.mark("epoch")
    assert capsys.readouterr().err.count("\n") == 1
    with marks.attached(tmp_path), pytest.raises(ZeroDivisionError), ogbnlib.phase("fails"):
        raise ZeroDivisionError
    assert Run(tmp_path).events[-1]["failed"] == "ZeroDivisionError"


# Growth ---------------------------------------------------------------------------------------------------------------


def growth(*megabytes: float) -> Growth:
    levels = Levels()
    for size in megabytes:
        levels.add(int(size * MB))
    return Growth.of(levels)


def test_growth_tells_a_leak_from_caches_that_fill() -> None:
    leak = growth(*(500 + 20 * i for i in range(8)))
    assert (leak.verdict, round(leak.slope_bytes / MB), leak.epochs) == ("climbs", 20, 8)
    assert growth(*(500 + 20 * i + (-1) ** i * 15 for i in range(20))).verdict == "climbs"
    assert growth(*(1000 * (1 - 2.7 ** -(i / 2)) for i in range(12))).verdict == "levels off"
    assert growth(*([500] * 5 + [700] * 4)).verdict == "levels off"
    assert growth(*(500 + (i % 3) * 40 for i in range(12))).verdict == "levels off"
    assert growth(*(500 + 0.1 * i for i in range(20))).verdict == "levels off"
    assert growth(500, 600, 700, 800).verdict == "too few epochs"
    long = growth(*(500 + 2 * i for i in range(5000)))
    assert (long.verdict, round(long.slope_bytes / MB, 2), long.epochs) == ("climbs", 2.0, 5000)


@pytest.mark.parametrize("named", ["with ogbnlib.phase('train epoch', epoch=i):", "with ogbnlib.phase(f'Epoch {i}'):"])
def test_a_script_that_keeps_memory_each_epoch_is_told_its_slope(
    script: Callable[[str], str], tmp_path: Path, named: str
) -> None:
    code = f"import ogbnlib\nkept = []\nfor i in range(7):\n    {named}\n        kept.append(bytearray(10 * 2**20))"
    done = watch([sys.executable, script(code)], runs_dir=tmp_path)
    assert done.growth is not None
    assert (done.growth.verdict, round(done.growth.slope_bytes / MB)) == ("climbs", 10)
    assert "memory climbs by 10 MB an epoch" in done.diagnosis.text
    assert Run.open(done.run_dir).growth == done.growth
    level = "import ogbnlib\nfor i in range(7):\n    x = bytearray(10 * 2**20)\n    ogbnlib.mark('epoch', loss=i)"
    flat = watch([sys.executable, script(level)], runs_dir=tmp_path)
    assert flat.growth is not None
    assert flat.growth.verdict == "levels off"
    assert "climbs" not in flat.diagnosis.text
