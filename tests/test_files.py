"""Promises of `files` and `errors`: whole or not at all, one at a time, refusals are told."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import files_of, left_in, python_child, tree, write_run

from ogbnlib import TrainConfig, convert, files, open_store, run
from ogbnlib.errors import InputError, clear_errors, naming
from ogbnlib.files import home, is_held, locked, new_folder, open_to_write, parse_json, write_json
from ogbnlib.memory.recorder import Recorder
from ogbnlib.progress import Count
from ogbnlib.runs.attempt import open_run_dir
from ogbnlib.runs.folder import Run
from ogbnlib.sources.resolve import made_once


def test_what_the_disk_refuses_is_path_cause_and_remedy() -> None:
    words = f"^/data/a: {os.strerror(errno.ENOSPC).lower()}; "
    for error in (OSError(errno.ENOSPC, "x", "/data/a"), OSError(errno.ENOSPC, "x")):
        with pytest.raises(InputError, match=words), clear_errors(), naming("/data/a"):
            raise error


def test_a_failed_write_names_its_cause_and_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", 1)
    with files_of(1000), pytest.raises(OSError, match=r"a\.json") as caught:
        write_json(tmp_path / "a.json", list(range(1000)))
    assert caught.value.errno == errno.EFBIG
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "1\n"}


@pytest.mark.parametrize("offset", [None, 4])
def test_a_partial_write_goes_on_until_its_cause_shows(tmp_path: Path, offset: int | None) -> None:
    refused = pytest.raises(OSError, match=os.strerror(errno.EFBIG))
    with open(tmp_path / "a", "wb") as file, files_of(7), refused:
        files.write_all(file.fileno(), b"abcdefgh", offset)
    assert (tmp_path / "a").read_bytes() == (b"abcdefg" if offset is None else bytes(4) + b"abc")


def test_a_lock_keeps_others_out_and_its_file_goes_with_it(tmp_path: Path) -> None:
    lock = (tmp_path / "lock", "a: it is made")
    refused = pytest.raises(InputError, match=f"a: it is made by process {os.getpid()} on ")
    with locked(*lock), refused, locked(*lock):
        pass
    with files_of(0), locked(*lock):  # the owner's name in it can't be written
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"\.a\.lock: "), new_folder(tmp_path / "a"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_killed_process_leaves_a_lock_that_means_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from ogbnlib.files import locked, new_folder\n"
        "with new_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'half').write_text('x'); print('ready', flush=True); sys.stdin.readline()"
    )
    with python_child(code, str(tmp_path / "new")) as process:
        refused = pytest.raises(InputError, match=f"process {process.pid} ")
        with refused, new_folder(tmp_path / "new"):
            pass
        process.kill()
        process.wait()
    assert left_in(tmp_path) == [".new.part"]
    with new_folder(tmp_path / "new") as folder:
        (folder / "whole").write_text("x")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "whole"]


def test_the_next_write_under_a_lock_replaces_what_a_killed_one_left(tmp_path: Path) -> None:
    code = (
        "import os, sys; from ogbnlib.files import write_atomically\n"
        "write_atomically(sys.argv[1], lambda file: os.kill(os.getpid(), 9), alone=True)"
    )
    path = tmp_path / "a.csv"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    assert left_in(tmp_path) == [".a.csv.part"]
    files.write_atomically(path, lambda file: file.write(b"x"), alone=True)
    assert tree(tmp_path) == {"a.csv": b"x"}


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, thesis: path.symlink_to(thesis),
    "link to nothing": lambda path, thesis: path.symlink_to(thesis.with_name("other.tex")),
    "hard link": lambda path, thesis: path.hardlink_to(thesis),
    "pipe": lambda path, thesis: os.mkfifo(path),
    "another user's": lambda path, thesis: (path.write_text("x"), os.chown(path, 65534, 65534)),  # type: ignore[dict-item]
}


def _convert(folder: Path) -> None:
    with new_folder(folder / "papers"):
        pass


def _make_once(folder: Path) -> None:
    with made_once(folder / "papers", lambda: None):
        pass


def _train(folder: Path) -> None:
    with open_run_dir(None, folder, resume=True):
        Recorder(folder).stop()


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize(
    ("name", "write"),
    [
        (".papers.lock", _convert),
        (".papers.part", _convert),
        (".papers.once", _make_once),
        (".lock", _train),
        ("events.jsonl", _train),
        ("timeline.csv", _train),
        ("output.log", _train),
        ("progress.json", _train),
    ],
)
def test_what_another_user_planted_is_refused_and_not_followed(
    tmp_path: Path, name: str, write: Callable[[Path], None], planted: str
) -> None:
    if planted == "another user's" and os.geteuid():
        pytest.skip("only root can make another user's file")
    folder, thesis = tmp_path / "lab", tmp_path / "home" / "thesis.tex"
    for place in (folder, thesis.parent):
        place.mkdir()
    thesis.write_text("ten years")
    if write is _train:
        write_json(folder / "config.json", {})  # a run to resume
    PLANTED[planted](folder / name, thesis)
    with pytest.raises(InputError) as caught:
        write(folder)
    objection = planted if "user" in planted else "a link" if "link to" in planted else ""
    assert str(caught.value).startswith(f"{folder / name}: expected nothing")
    assert objection in str(caught.value)
    assert "\n" not in str(caught.value)
    assert tree(thesis.parent) == {"thesis.tex": b"ten years"}
    assert os.path.lexists(folder / name)


def test_remains_are_not_cleared_through_a_link(tmp_path: Path) -> None:
    thesis = tmp_path / "home" / "1" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("ten years")
    for name in (".papers.part", ".papers.blocks"):
        (tmp_path / name).symlink_to(tmp_path / "home")
    with pytest.raises(InputError, match="found a link"), new_folder(tmp_path / "papers"):
        pass
    assert thesis.read_text() == "ten years"


def test_a_file_is_emptied_only_after_it_was_checked(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with open(file, "w", opener=open_to_write) as stream:
        stream.write("n")
    assert file.read_text() == "n"
    (tmp_path / "b").hardlink_to(file)
    with pytest.raises(InputError, match="hard link"):
        open_to_write(file, os.O_WRONLY | os.O_TRUNC)
    assert file.read_text() == "n"


def test_asking_for_a_lock_writes_nothing_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to("thesis.tex")
    with pytest.raises(OSError, match="symbolic links"):
        is_held(tmp_path / ".lock")
    assert not is_held(tmp_path / "missing")
    assert tree(tmp_path) == {}


# Written to a pipe by every Python process of a command: what it opens for writing, makes, moves or deletes.
TRACE = """
import os, sys
CHANGES = {f"os.{name}" for name in "mkdir rename remove rmdir link symlink truncate chmod utime".split()}
def trace(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if isinstance(path, int) or not flags & writes:
            return  # 1 and 2 are the outputs
    elif event not in CHANGES:
        return
    os.write(int(os.environ["TRACE"]), f"{event} {os.fsdecode(arguments[0])}\\n".encode())
sys.addaudithook(trace)
"""
ONE_BY_ONE = """
import sys
from ogbnlib.__main__ import main
commands = sys.argv[1:]
for command in commands:
    sys.argv = ["ogbnlib", *command.split()]
    main()
print(len(commands), "commands")
"""
# Python's and numba's caches of compiled code hold nothing of a user; and `doctor` tries a cgroup.
NOT_DATA = re.compile(
    r"/dev/null|__pycache__|/sys/fs/cgroup/|/proc/self/|\.nb[ci]|/[a-z0-9_]{8}$|/ogbnlib-kernels-"
)


def test_commands_that_answer_write_nothing_anywhere(tmp_path: Path, tiny_store: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_store, data)
    (data / ".papers.part").mkdir()
    (data / ".papers.lock").symlink_to(tmp_path / "thesis.tex")
    (tmp_path / "thesis.tex").write_text("ten years")
    (tmp_path / "sitecustomize.py").write_text(TRACE)
    write_run(tmp_path / "run")
    commands = ["doctor", "status run", "diagnose run", "diagnose --exit-code 137"]
    commands += ["plan", "plan --ladder", "plan --set dataset=data --memory-limit 1GB"]
    commands += ["verify data"]
    before = tree(tmp_path)
    reader, writer = os.pipe()
    argv = [sys.executable, "-c", ONE_BY_ONE, *commands]
    how = {"cwd": tmp_path, "pass_fds": [writer], "capture_output": True, "text": True}
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "TRACE": str(writer)}
    done = subprocess.run(argv, env=env, **how)
    os.close(writer)
    with open(reader) as lines:
        written = [line for line in lines if not NOT_DATA.search(line)]
    assert written == []
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(commands)} commands"
    assert "Traceback" not in done.stderr
    after = {name: content for name, content in tree(tmp_path).items() if "__pycache__" not in name}
    assert after == before


def test_home_is_found_without_a_shell_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert [home("~/data"), home("data/~")] == [Path("/home/me/data"), Path("data/~")]
    with pytest.raises(InputError, match=r"'data\\r'"):
        home("data\r")
    with pytest.raises(InputError, match=r"~nobody-here/data: .*HOME"):  # as of docker run -u 12345
        home("~nobody-here/data")
    assert home("./~/data") == Path("./~/data")


def test_names_with_other_letters_work_in_the_c_locale(tmp_path: Path) -> None:
    keep = {name: value for name, value in os.environ.items() if name[:3] not in ("LC_", "LAN")}
    commands = [
        "synth dät/ü --scale 0.0001",
        "plan --set dataset=dät/ü",
        "watch --run-dir rün -- echo grün",
        "status rün",
        "status fehlt-ö",
    ]
    for command in commands:
        argv = [sys.executable, "-m", "ogbnlib", *command.split()]
        done = subprocess.run(argv, cwd=tmp_path, env={**keep, "LC_ALL": "C"}, capture_output=True)
        output = (done.stdout + done.stderr).decode()
        assert "Traceback" not in output, output
        assert "Error" not in output, output
        assert done.returncode == (2 if "fehlt-ö" in command else 0), output
    assert (tmp_path / "dät" / "ü" / "store.json").is_file()
    assert (tmp_path / "rün" / "output.log").read_text() == "grün\n"


def test_a_limit_on_the_size_of_files_is_no_full_disk(tmp_path: Path) -> None:
    call = f"ulimit -f 200; exec {sys.executable} -m ogbnlib synth data --scale 0.001"
    done = subprocess.run(["bash", "-c", call], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "`ulimit -f`" in done.stderr.splitlines()[-1]
    call = f"ulimit -f 0; exec {sys.executable} -m ogbnlib watch --run-dir none -- true"
    assert subprocess.run(["bash", "-c", call], cwd=tmp_path).returncode == 2
    assert tree(tmp_path / "none") == {".lock": b""}  # so that the same command can be tried again
    call = f"ulimit -f 20; exec {sys.executable} -m ogbnlib watch --run-dir"
    for command, code, word in (
        ("head -c 100000 /dev/zero; exit 3", 3, "File too large; the record has gaps"),
        ("kill -XFSZ $$", 153, "the limit of `ulimit -f`"),
    ):
        argv = ["bash", "-c", f"{call} run-{code} -- sh -c '{command}'"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code
        assert "No space" not in done.stderr
        assert word in done.stderr


def test_a_missing_path_is_named_with_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    looks: list[Callable[[str], object]] = [open_store, Run.open]
    looks.append(lambda path: run(TrainConfig.create(dataset=path), "1 GB"))
    for look in looks:
        with pytest.raises(InputError, match=f" {tmp_path}$") as caught:
            look("data/mine")
        # one line in a notebook
        assert caught.value._render_traceback_() == [f"InputError: {caught.value}"]
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "null", "", '{"a', '{"a":' * 101 + "1" + "}" * 101),
        *(f'{{"a": [{number}]}}' for number in ("NaN", "-1e400", "1e39", 2**63 + 1, -(10**400))),
    ],
    ids=lambda content: content[:20],
)
def test_json_of_a_run_or_a_store_is_one_finite_object(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=r"^x\.json: expected a run, found damage .*; delete it$"):
        parse_json(content.encode(), "x.json", "a run", "delete it")
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(InputError, match=r"store\.json: expected a JSON object"):
        open_store(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=f"^{tmp_path}/config.json: expected a JSON object"):
        TrainConfig.load(tmp_path / "config.json")
    assert set(tree(tmp_path).values()) == {content.encode()}  # left alone


def test_a_file_above_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "store.json").touch()
    os.truncate(tmp_path / "store.json", 2**30 + 1)
    with pytest.raises(InputError, match=r"store\.json: expected a file of at most 1 GB"):
        open_store(tmp_path)


def test_an_interrupted_conversion_leaves_no_file(tmp_path: Path, tiny_dir: Path) -> None:
    def stop(count: Count) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny_dir, tmp_path / "a.store", progress=stop)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_stop_signal_ends_a_command_in_order(tmp_path: Path, name: str, is_ignored: bool) -> None:
    number = signal.Signals[name]
    code = (
        "import os, signal; from pathlib import Path; from ogbnlib.sources import synth\n"
        "def write(path, **options):\n"
        "    with synth.new_folder(path):\n"
        f"        [os.kill(os.getpid(), signal.{name}) for _ in range(2)]\n"
        "synth.synthesize_store = write; synth.synthesize = write\n"
        f"signal.signal(signal.{name}, signal.SIG_{'IGN' if is_ignored else 'DFL'})\n"
        "from ogbnlib.__main__ import main; raise SystemExit(main(['synth', 'a']))"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    if is_ignored:
        assert (tmp_path / "a").is_dir()
    else:
        assert (done.returncode, done.stderr) == (128 + number, f"ended by {name}\n")
        assert tree(tmp_path) == {}
