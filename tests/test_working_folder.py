"""A working folder that was deleted is named in one sentence, before torch's MKL ends the process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ogbnlib import open_store, run
from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError

FACTS = "working folder: .*`cd`"


def in_deleted_folder(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and last line of Python with these arguments, where the folder is gone."""
    folder.mkdir()
    argv = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(folder), sys.executable]
    done = subprocess.run([*argv, *arguments], capture_output=True, text=True)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    "command",
    ["doctor", "train --set dataset=STORE", "status .", "diagnose runs", "convert a b", "synth d"],
)
def test_a_command_says_it(tmp_path: Path, tiny_store: Path, command: str) -> None:
    arguments = command.replace("STORE", str(tiny_store)).split()
    code, said = in_deleted_folder(tmp_path / "gone", "-m", "ogbnlib", *arguments)
    (line,) = said.splitlines()
    assert code == 2
    assert re.match(f"error: {FACTS}", line)


def test_a_script_ends_with_it(tmp_path: Path) -> None:
    code, said = in_deleted_folder(tmp_path / "gone", "-c", "from ogbnlib import train")
    assert code == 1
    assert re.search(f"InputError: {FACTS}", said.splitlines()[-1])
    assert "MKL" not in said


def test_a_notebook_whose_folder_goes_is_told(
    tmp_path: Path, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    config = TrainConfig.create(dataset=tiny_store, epochs=1)
    for call in (
        lambda: open_store("data/mine"),
        lambda: run(config, run_dir="a"),
        lambda: run(config, run_dir=tmp_path / "run"),
        lambda: TrainConfig.load("mine.yaml"),
    ):
        with pytest.raises(InputError, match=FACTS):
            call()
    assert not (tmp_path / "run").exists()
    assert open_store(tiny_store).num_nodes == 300  # what needs no working folder goes on
