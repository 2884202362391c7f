"""Promises of `watch`, `phase` and `mark`: any command recorded and limited, moments named, no cost
otherwise."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MB, cli, is_alive, wait_until, write_run

import ogbnlib
from ogbnlib import marks
from ogbnlib.errors import InputError
from ogbnlib.memory.recorder import _TimelineWriter
from ogbnlib.memory.tree import process_tree
from ogbnlib.runs.attempt import lock_of
from ogbnlib.runs.folder import Run
from ogbnlib.runs.sandbox import watch

OGBNLIB = [sys.executable, "-m", "ogbnlib"]
LOADERS = """
import ogbnlib, os, sys, time
kept = []
for split in ("train", "valid", "test"):
    with ogbnlib.phase(f"build {split} loader"):
        kept.append(bytearray(60 * 2**20))
        is_killed = split == "test" and "OGBNLIB_MEMORY_LIMIT_BYTES" in os.environ
        time.sleep(60 if is_killed else 0.15)
print("survived", *sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(code: str) -> str:
    Path("my_train.py").write_text(textwrap.dedent(code))
    return "my_train.py"


def bash(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=180)


def watched(*command: str, **how: Any) -> subprocess.Popen[str]:
    argv = [*OGBNLIB, "watch", "--run-dir", "run", "--", *command]
    return subprocess.Popen(argv, text=True, **how)


def test_watch_passes_arguments_output_input_and_exit_code_on() -> None:
    command = ["sh", "-c", "cat; echo $1; exit 7", "sh", "--lr"]
    done = cli("watch", "--run-dir", "run", "--", *command, input="in ")
    assert (done.returncode, done.stdout) == (7, "in --lr\n")
    assert done.stderr.splitlines()[-1].endswith(" run")
    assert stat.S_IMODE(Path("run").stat().st_mode) == 0o700  # its owner's alone
    assert Run.open("run").diagnosis.facts.sign == "7"


def test_a_watched_command_shows_progress_apart_from_its_output() -> None:
    work = "import time\nprint('mine')\ntime.sleep(1.5)"
    done = cli("watch", "--memory-limit", "1 GB", "--", sys.executable, script(work))
    assert done.stdout == "mine\n"
    first = done.stderr.splitlines()[0]
    assert re.fullmatch(r"my_train: (starting|at work: [\d.]+ s(, \d+ [kM]B of 1.00 GB)?)", first)


@pytest.mark.parametrize("limit_by", ["auto", "watchdog"])
def test_a_script_past_its_limit_is_killed_in_its_named_phase(limit_by: str) -> None:
    how = ["--memory-limit", "150 MB", "--limit-by", limit_by, "--run-dir", "run"]
    done = cli("watch", *how, "--", sys.executable, script(LOADERS), "--lr", "1e-3")
    assert done.returncode == 137
    found = Run.open("run").diagnosis
    assert (found.cause, found.phase) == ("out of memory", "build test loader")
    assert [action.id for action in found.actions] == ["hold less", "raise limit"]
    assert found.actions[0].arguments["phase"] == "build test loader"
    assert str(found) in done.stderr
    assert Run.open("run").state == "out of memory, exit code 137"
    free = cli("watch", "--json", "--", sys.executable, script(LOADERS), "--lr", "1e-3")
    assert json.loads(free.stdout)["diagnosis"]["cause"] == "finished"
    assert Path("runs/my_train/output.log").read_text() == "survived --lr 1e-3\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run-dir", "taken", "--", "true"], "error: taken: expected a new or empty folder"),
        (["--", "./script.py"], "`python` before a script"),
        (["--limit-by", "magic", "--", "true"], "error: limit_by: expected auto or one of"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(arguments: list[str], expected: str) -> None:
    Path("taken").mkdir()
    for name in ("taken/mine", "script.py"):
        Path(name).touch()
    before = sorted(Path().rglob("*"))
    done = cli("watch", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(Path().rglob("*")) == before


def test_a_command_goes_on_where_it_can_not_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: _TimelineWriter, *arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_TimelineWriter, "add", full)
    done = watch(["-c", "import time; time.sleep(0.3); print('survived'); exit(3)"])
    assert (done.exit_code, (done.run_dir / "output.log").read_text()) == (3, "survived\n")
    assert "No space left on device" in done.diagnosis.facts.unwritable


def test_status_and_diagnose_say_where_a_run_is_that_goes_on() -> None:
    code = "import ogbnlib\nwith ogbnlib.phase('epoch', epoch=3):\n    x = bytearray(50 * 2**20)\n    input()"
    argv = [*OGBNLIB, "watch", "--memory-limit", "300 MB", "--run-dir", "run", "--"]
    argv += [sys.executable, script(code)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    run = Path("run")
    wait_until((run / "timeline.csv").exists, "the first sample")
    wait_until(lambda: Run(run).record.phase, "the phase")
    wait_until(lambda: (Run(run).record.held_bytes or 0) > 50 * MB, "its memory")
    at_work = json.loads(cli("diagnose", "run", "--json").stdout)
    stands = json.loads(cli("status", "run", "--json").stdout)
    assert at_work["cause"] == stands["state"] == "at work"
    assert at_work["phase"] == stands["phase"] == "epoch 3"
    assert at_work["facts"]["memory_limit_bytes"] == stands["memory_limit_bytes"] == 300 * MB
    assert stands["held_bytes"] > 50 * MB
    with pytest.raises(InputError, match="trained in by process"), lock_of(run):
        pass
    process.communicate(b"\n")
    assert "finished" in cli("status", "run", "--json").stdout
    assert cli("status", "run").stdout.startswith("run: Finished")


SPEAKING = """
import os, subprocess, sys, time
print("reading edges", flush=True)
print(os.getpid(), file=open("pids", "w"))
worker = "import os, time; x = bytearray(40 * 2**20); print(os.getpid(), file=open('pids', 'a')); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", worker])
while len(open("pids").read().split()) < 2:
    time.sleep(0.02)
time.sleep(0.5)
kept = []
while len(sys.argv) > 1:
    kept.append(bytearray(10 * 2**20))
    time.sleep(0.02)
time.sleep(60)
"""


def test_a_kill_without_a_phase_has_last_words_and_processes() -> None:
    arguments = ["--memory-limit", "200 MB", "--limit-by", "watchdog", "--run-dir", "run", "--"]
    done = cli("watch", *arguments, sys.executable, script(SPEAKING), "grow")
    assert done.returncode == 137
    facts = Run("run").diagnosis.facts
    assert (facts.phase, facts.last_output) == (None, "reading edges")
    pids = Path("pids").read_text().split()
    listed = re.findall(r"python\S* (\d+) with \d+ MB", facts.processes)
    assert {*listed} >= {*pids}
    assert not any(is_alive(int(pid)) for pid in pids)
    listed = [event for event in Run("run").events if event["event"] == "processes"]
    assert 1 < len(listed) < 30


def test_a_run_without_its_watcher_is_not_at_work() -> None:
    watcher = watched("sleep", "60", start_new_session=True)
    wait_until(Path("run/timeline.csv").exists, "the first sample")
    left = wait_until(lambda: process_tree(watcher.pid)[1:], "the command")
    watcher.kill()
    watcher.wait()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    # which holds the run's lock, too
    wait_until(lambda: not any(is_alive(pid) for pid in left), "the end of the command")
    assert Run.open("run").state == "no result"


TALKS = "(while :; do echo x; sleep 0.05; done) & exit 5"
ODD = {  # how a command ends; its cause
    "closes its outputs": ("exec >&- 2>&-; sleep 0.5; exit 6", 6, "error"),
    "leaves one that talks": (TALKS, 5, "error"),
    "leaves a daemon": ("(setsid sleep 5 &); exit 4", 4, "error"),
    "unknown command": ("no_such_command", 127, "never started"),
    "a code of ours": ("exit 75", 75, "error"),
    "signal 6": ("ulimit -c 0; kill -6 $$", 134, "error"),
    "signal 9": ("kill -9 $$", 137, "SIGKILL, cause unknown"),
}


@pytest.mark.parametrize(("script", "code", "cause"), ODD.values(), ids=ODD)
def test_however_a_command_ends_it_is_recorded(script: str, code: int, cause: str) -> None:
    done = watch(["bash", "-c", script], run_dir="ein Lauf ü 名", echo=False)
    found = Run.open(done.run_dir)
    assert (done.exit_code, found.exit_code, found.diagnosis.cause) == (code, code, cause)
    assert found.diagnosis == done.diagnosis
    assert script != TALKS or found.diagnosis.facts.last_output == "x"


def test_a_command_that_can_not_be_executed_is_named() -> None:
    Path("command").write_bytes(b"#!/none/python\n")
    Path("command").chmod(0o755)
    with pytest.raises(InputError, match=r"^\./command: "):
        watch(["./command"], limit_by="watchdog", echo=False)


def test_output_of_any_kind_is_passed_on_byte_by_byte(capfdbinary: Any) -> None:
    written = bytes(range(256)) * 10_000
    Path("output").write_bytes(written)
    done = watch(["cat", "output"])
    assert capfdbinary.readouterr().out == written
    assert (done.exit_code, (done.run_dir / "output.log").read_bytes()) == (0, written)


@pytest.mark.parametrize("damage", ["rm -rf run", "mkdir run/result.json"])
def test_a_result_that_can_not_be_written_changes_no_exit_code(damage: str) -> None:
    done = cli("watch", "--run-dir", "run", "--", "sh", "-c", f"{damage}; exit 8")
    assert done.returncode == 8
    assert "run/result.json: it could not be written" in done.stderr
    assert "Exit code 8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stop", [signal.SIGHUP, signal.SIGUSR2], ids=lambda s: s.name)
def test_what_would_end_the_watcher_alone_reaches_its_command(stop: signal.Signals) -> None:
    watcher = watched("sleep", "60", stderr=subprocess.PIPE)
    # A watcher that is not root's tries systemd-run before its command.
    wait_until(Path("run/timeline.csv").exists, "the first sample")
    (child,) = wait_until(lambda: process_tree(watcher.pid)[1:], "the command")
    watcher.send_signal(stop)
    watcher.communicate(timeout=180)
    assert (watcher.returncode, Run.open("run").exit_code) == (128 + stop, 128 + stop)
    assert not is_alive(child)


@pytest.mark.parametrize("where", [">/dev/full 2>/dev/full", "2>&1 | head -1", ">&- 2>&-"])
def test_a_full_or_closed_output_ends_no_command(where: str) -> None:
    command = "for i in 1 2 3; do echo $i; sleep 0.2; done; exit 3"
    call = f"{' '.join(OGBNLIB)} watch --run-dir run -- sh -c '{command}'"
    done = bash(f"{{ {call}; echo $? >code; }} {where}")
    run = Run.open("run")
    assert (Path("code").read_text(), run.exit_code) == ("3\n", 3)
    assert (run.run_dir / "output.log").read_text() == "1\n2\n3\n"
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [("status run", 2), ("synth data --scale 0.0001", 0)]
)
def test_a_full_output_is_one_sentence(arguments: str, code: int) -> None:
    write_run(Path("run"), exit_code=0)
    call = " ".join([*OGBNLIB, arguments])
    full = bash(f"{call} >/dev/full")
    assert full.returncode == code
    assert "error: standard output: No space left on device" in full.stderr.splitlines()[-1]
    shutil.rmtree("data", ignore_errors=True)
    read = bash(f"{call} | true; exit $PIPESTATUS")
    assert read.returncode == 0
    assert "error" not in read.stderr


def test_a_killed_child_is_named_though_its_parent_succeeds() -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'x = bytes(300 * 2**20); x + x'])"
    done = watch(["sh", "-c", f'{sys.executable} -c "{code}"; exit 0'], "150 MB", echo=False)
    if done.result["limit_by"] == "watchdog":
        pytest.skip("no memory cgroup can be made here")
    assert (done.exit_code, done.diagnosis.cause) == (137, "out of memory")
    assert done.diagnosis.facts.killed_by == "kernel"


def test_a_kill_that_an_exit_code_hides_is_a_fact(tmp_path: Path) -> None:
    beside = write_run(tmp_path / "beside", exit_code=0, events=[], kills_around=1)
    found = Run.open(beside).diagnosis
    assert (found.cause, found.facts.kills_around) == ("finished", 1)
    assert "out-of-memory killer struck" in found.text


def test_marks_cost_nothing_where_nobody_watches() -> None:
    def once() -> None:
        with ogbnlib.phase("load"):
            pass
        ogbnlib.mark("epoch")

    def plain() -> None:
        with contextlib.suppress(OSError):
            pass

    # 1.2 us, 3.4 times as long as a context of the standard library, with Python 3.11 and 3.13
    cost_s, plain_s = (min(timeit.repeat(each, number=500, repeat=500)) for each in (once, plain))
    assert cost_s < 6 * plain_s
    code = "import sys, ogbnlib\nwith ogbnlib.phase('a'): ogbnlib.mark('b')\n"
    code += "print(sorted(name for name in sys.modules if name.startswith('ogbnlib')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ogbnlib', 'ogbnlib.environment', 'ogbnlib.marks']"


def test_marks_and_phases_with_any_value_are_strict_json(tmp_path: Path) -> None:
    def marked() -> None:
        ogbnlib.mark("epoch")
        with ogbnlib.phase("train", epoch=np.int64(3)), ogbnlib.phase("train", epoch=float("nan")):
            pass

    marked()
    with marks.attached(tmp_path):
        marked()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    mark, *begun = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert mark["held_bytes"] > MB
    assert [event.get("epoch") for event in begun] == ["3", "nan", None, None]
    assert [phase.label for phase in Run(tmp_path).phases] == ["train 3", "train nan"]


def test_a_decorated_function_is_a_phase_at_each_call(tmp_path: Path) -> None:
    @ogbnlib.phase("load")
    def load(times: int) -> int:
        return times and 1 + load(times - 1)

    assert load(1) == 1
    with marks.attached(tmp_path):
        assert (load(1), load(0)) == (1, 0)
    phases = Run(tmp_path).phases
    assert [(phase.label, phase.depth) for phase in phases] == [("load", i) for i in (0, 1, 0)]
    assert all(phase.end_s is not None for phase in phases)


def test_only_the_first_process_marks() -> None:
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
    done = watch([sys.executable, script(code)])
    assert (done.run_dir / "output.log").read_text() == ""

    def told(run: Run) -> list[tuple[str, str | None]]:
        events = [event for event in run.events if event["event"] != "processes"]
        return [(event["event"], event.get("phase") or event.get("name")) for event in events]

    assert told(done) == [("start", None), ("begin", "main"), ("end", "main"), ("mark", "end")]
    after = watch(["sh", "-c", f"{sys.executable} -c 'import ogbnlib; ogbnlib.mark(str(1))'; " * 2])
    assert len(told(after)) == 3  # one after the other, each may


def test_a_script_goes_on_where_its_marks_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with marks.attached(tmp_path / "gone"), ogbnlib.phase("load"):
        ogbnlib.mark("epoch")
    assert capsys.readouterr().err.count("\n") == 1
    with marks.attached(tmp_path), pytest.raises(ZeroDivisionError), ogbnlib.phase("fails"):
        raise ZeroDivisionError
    assert Run(tmp_path).events[-1]["failed"] == "ZeroDivisionError"


def test_a_script_that_keeps_memory_each_epoch_is_told_its_slope() -> None:
    named = "with ogbnlib.phase('train epoch', epoch=i):"
    code = f"import ogbnlib\nkept = []\nfor i in range(7):\n    {named}\n        kept.append(bytearray(10 * 2**20))"
    done = watch([sys.executable, script(code)])
    assert done.record.growth is not None
    assert done.record.growth.verdict == "climbs"
    assert round(done.record.growth.slope_bytes / MB) == 10
    assert done.diagnosis.facts.growth == done.record.growth
    assert Run.open(done.run_dir).record.growth == done.record.growth
    level = "import ogbnlib\nfor i in range(7):\n    x = bytearray(10 * 2**20)\n    ogbnlib.mark('epoch')"
    flat = watch([sys.executable, script(level)])
    assert flat.record.growth is not None
    assert flat.record.growth.verdict == "no steady climb"
    assert "epochs" not in flat.diagnosis.text
