"""Promises of `files` and `errors`: whole or not at all, one process at a time, and what the disk
refuses is said."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import left_in, python_child, tree

from ogbnlib import TrainConfig, convert, files, list_runs, open_dataset, run
from ogbnlib.errors import InputError, clear_errors, naming
from ogbnlib.files import abandoned, home, locked, new_folder, warn_if_remote, write_json
from ogbnlib.runs.folder import Run


def refuse(number: int) -> Callable[..., Any]:
    """What stands for a system call that fails so, without a file's name as write(2) and fsync(2)
    do."""

    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_what_the_disk_refuses_is_path_cause_and_remedy() -> None:
    for error in (OSError(errno.ENOSPC, "x", "/data/a"), OSError(errno.ENOSPC, "x")):
        with (
            pytest.raises(InputError, match=r"^/data/a: no space left on device"),
            clear_errors(),
            naming("/data/a"),
        ):
            raise error


def test_a_write_that_fails_at_its_end_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "a.json", 1)
    monkeypatch.setattr(files.os, "replace", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left on device: .*a\.json"):
        write_json(tmp_path / "a.json", 2)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "1\n"}


def test_a_lock_keeps_others_out_and_its_file_goes_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    said = f"a: it is made by process {os.getpid()} on "
    with (
        locked(lock, "a: it is made"),
        pytest.raises(InputError, match=said),
        locked(lock, "a: it is made"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.fcntl, "flock", refuse(errno.ENOTSUP))
    with (
        pytest.warns(UserWarning, match=r"lock: no locks on its file system, so a second"),
        new_folder(tmp_path / "a"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_killed_process_leaves_a_lock_that_means_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from ogbnlib.files import locked, new_folder\n"
        "with new_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'half').write_text('x'); print('ready', flush=True); sys.stdin.readline()"
    )
    with python_child(code, str(tmp_path / "new")) as process:
        words = f"it is being written by process {process.pid}"
        with pytest.raises(InputError, match=words), new_folder(tmp_path / "new"):
            pass
        assert abandoned(tmp_path) == []
        process.kill()
        process.wait()
    assert left_in(tmp_path) == [".new.part"]
    assert abandoned(tmp_path) == [tmp_path / ".new.part"]
    with new_folder(tmp_path / "new") as folder:
        (folder / "whole").write_text("x")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "whole"]


def test_a_network_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    with pytest.warns(
        UserWarning, match=r"it lies on a network file system \(nfs4\): locks are loose"
    ):
        warn_if_remote(tmp_path, "locks are loose")


def test_home_is_found_without_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert [home("~/data"), home("data/~")] == [Path("/home/me/data"), Path("data/~")]
    with pytest.raises(InputError, match=r"'data\\r': expected a path of visible characters"):
        home("data\r")


def test_a_missing_path_is_named_with_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for look in (
        open_dataset,
        Run.open,
        list_runs,
        lambda path: run(TrainConfig.create(dataset=path), "1 GB"),
    ):
        with pytest.raises(InputError, match=f"; the working folder is {tmp_path}") as caught:
            look("data/mine")
        # one line in a notebook
        assert caught.value._render_traceback_() == [f"InputError: {caught.value}"]
    assert tree(tmp_path) == {}


def test_an_interrupted_conversion_says_so_in_one_line_and_leaves_nothing(
    tmp_path: Path, tiny_dir: Path
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        convert(tiny_dir, tmp_path / "a.store", check=stop)
    (line,) = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert line == f"KeyboardInterrupt: {tmp_path}/a.store: interrupted"
    assert tree(tmp_path) == {}
