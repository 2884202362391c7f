"""Names that another person wrote into a run's folder are shown as text."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MB, write_run

from ogbnlib.notebook import compare_runs, plot_runs, plot_timeline, verdicts
from ogbnlib.runs.folder import Run


def test_names_in_a_foreign_folder_are_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command_line: Callable[..., int]
) -> None:
    name = "<script>x</script>\x1b]0;title\x07\u202eevil $a_b$ $\nForged line"
    part = {"time_s": 102.0, "event": "part", "name": name, "bytes": 160 * MB}
    begin = {"time_s": 101.0, "event": "begin", "phase": name}
    events = [{"time_s": 100.0, "event": "start"}, begin, part]
    folder = write_run(tmp_path / "a$b$<i>", events=events, last_output=name)
    for command in ("status", "diagnose"):
        command_line(command, str(folder))
        text, errors = capsys.readouterr()
        assert not errors
        assert "<script>x</script>]0;titleevil $a_b$ $ Forged line" in text
        assert len(text.splitlines()) == 1
        assert not {*text} & {"\x1b", "\x07", "\u202e"}
    done = Run.open(folder)
    finding = verdicts.finding(name, True, name)
    pages = [done._repr_html_(), done.diagnosis._repr_html_(), compare_runs([done])._repr_html_()]
    pages.append(verdicts.table({name: finding})._repr_html_())
    for page in pages:
        assert page is not None
        assert "<script>" not in page
        assert "<i>" not in page
    for page in pages[:2] + pages[3:4]:
        assert "\x1b" not in page
    for axes in (plot_timeline(done), *plot_runs([done]).axes):
        axes.figure.canvas.draw()  # matplotlib would read $a_b$ as a formula
        assert "\x1b" not in axes.get_title()
