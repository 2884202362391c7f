"""Promises of `progress`: a sign of life at once, one line for a person, few lines for a log."""

import contextlib
import io
import itertools
import re
import time
from pathlib import Path

import pytest
from conftest import wait_until

from ogbnlib.config import TrainConfig
from ogbnlib.display import Live
from ogbnlib.errors import GB, InputError
from ogbnlib.progress import Count, counted, details, read_count, seconds
from ogbnlib.runs.sandbox import run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def seen(self) -> list[str]:
        """What a terminal shows of it, line by line."""
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for piece in line.split("\r"):
                shown = piece + shown[len(piece) :]
            lines.append(shown.rstrip())
        return lines


def test_a_duration_shows_its_first_two_digits() -> None:
    values = (0, 0.354, 9.96, 47.2, 99.6, 168, 725, 5969, 5970)
    texts = ["0 s", "0.35 s", "10 s", "47 s", "1.7 min", "2.8 min", "12 min", "99 min", "1.7 h"]
    assert [seconds(value) for value in values] == texts


def test_a_line_has_count_speed_loss_time_left_and_memory() -> None:
    count = Count(9432, "batches", done=3100, loss=1.684, began_s=time.time() - 50.2)
    line = details(count, int(1.2 * GB), 4 * GB)
    for words in ("33%", "3100/9432", "<01:4", "it/s", "loss 1.68", "1.20 GB of 4.00 GB"):
        assert words in line
    assert details(None, 3 * GB) == "3.00 GB"
    assert "14.0G/28.0G" in str(Count(28 * GB, done=14 * GB))


def test_a_person_has_one_line_which_is_gone_in_the_end() -> None:
    step = ["load: a long step"]
    screen = Terminal()
    streams = contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen)
    with streams[0], streams[1], Live(lambda: (step[0], "")) as live:
        wait_until(lambda: screen.seen() == step, "the first step")
        step[0] = "train"
        wait_until(lambda: screen.seen() == ["train"], "the next step")
        live.write("Epoch 001\n")
        wait_until(lambda: screen.seen() == ["Epoch 001", "train"], "the line below the epoch")
    assert screen.seen() == ["Epoch 001", ""]


def test_a_line_that_a_restarted_kernel_leaves_has_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Live(lambda: ("train", "1 GB"), "bar"):
        assert re.search(r"\d\d:\d\d:\d\d train: 1 GB", capsys.readouterr().out)


def test_a_log_has_a_line_at_once_and_then_every_30_s(capsys: pytest.CaptureFixture[str]) -> None:
    names = itertools.chain(["load", "load"], itertools.repeat("train epoch 1"))
    with Live(lambda: (next(names), ""), "lines") as live:
        for _ in range(6):
            live._show()
    assert capsys.readouterr().err.splitlines() == ["load"]


def test_nothing_is_shown_where_nothing_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with Live(lambda: ("train", ""), "none") as live, counted("convert", 10, False) as done:
        done(5)
        live.write("Epoch 001\n")
    assert capsys.readouterr() == ("Epoch 001\n", "")


def test_what_is_no_count_is_none(tmp_path: Path) -> None:
    assert read_count(tmp_path / "progress.json") is None
    damages = ["{", "[" * 200_000, '{"total": 1, "other": 2}']
    for name in ("total", "done", "loss", "began_s"):
        numbers = (f"1{'0' * 400}", "Infinity", "NaN", "1e400")
        damages += [f'{{"total": 1, "{name}": {number}}}' for number in numbers]
    for damage in damages:
        (tmp_path / "progress.json").write_text(damage)
        assert read_count(tmp_path / "progress.json") is None


def test_a_picture_that_grows_is_refused_outside_of_a_notebook(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^live: .*notebook"):
        run(TrainConfig.create(dataset="somewhere"), run_dir=tmp_path / "run", live=True)
    assert not (tmp_path / "run").exists()
