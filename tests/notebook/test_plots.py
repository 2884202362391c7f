"""Promises of `plots`: limit, kill and phases at their places; runs in a row on one scale."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import nbclient
import numpy as np
import pytest
from conftest import MB, write_run
from execute_notebooks import is_transparent
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from nbformat import v4

from ogbnlib.config import TrainConfig
from ogbnlib.errors import GB
from ogbnlib.forecast.planner import plan
from ogbnlib.notebook.plots import epoch_times, plot_forecast, plot_parts, plot_runs, plot_timeline
from ogbnlib.runs.folder import Run

KILLED_IN = "build valid loader"  # the phase in which `killed` ended


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    result = {"exit_code": 137, "killed_by": "kernel", "oom_kills": 1, "limit_by": "cgroup v2"}
    return write_run(tmp_path / "killed", memory_limit_bytes=256 * MB, **result)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return constant_run(tmp_path / "finished", [100.5 + i for i in range(4)], 23 * MB)


def constant_run(folder: Path, times: list[float], size: int, **result: Any) -> Path:
    samples = [{"time_s": time_s, "rss_anon_bytes": size, "rss_shmem_bytes": 0} for time_s in times]
    return write_run(folder, exit_code=0, samples=samples, **result)


def lines(ax: Axes, style: str = "", marker: str = "") -> list[Line2D]:
    own = [line for line in ax.lines if style and style == line.get_linestyle()]
    return own + [line for line in ax.lines if marker and marker == line.get_marker()]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def bar_ends(ax: Axes) -> list[float]:
    """Where the last bar ends in each of two rows."""
    ends = [0.0, 0.0]
    for bar in ax.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        ends[row] = max(ends[row], bar.get_x() + bar.get_width())
    return ends


def test_a_killed_run_has_its_limit_phases_and_a_cross(killed: Path) -> None:
    ax = plot_timeline(killed)
    (limit,) = lines(ax, "--")
    assert list(limit.get_ydata()) == [256] * 2
    assert ax.get_ylim()[1] > 256
    (cross,) = lines(ax, marker="X")
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([4.5], [256])
    assert "137" in ax.get_title()
    assert f"'{KILLED_IN}'" in ax.get_title()
    assert {"limit 256 MB", "load", KILLED_IN} <= set(texts(ax))
    shades = [patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches]
    spans = sorted((round(box.x0, 3), round(box.x1, 3)) for box in shades)
    # the kill left the second one open, and it is drawn once more, in red, behind the memory
    assert max(patch.get_zorder() for patch in ax.patches) < ax.collections[0].get_zorder()
    assert spans == [(1.0, 3.0), (4.0, 4.5), (4.0, 4.5)]
    assert len({to_hex(patch.get_facecolor()) for patch in ax.patches}) == 3
    legend = ax.get_legend()
    assert legend is not None
    names = {text.get_text().split()[0] for text in legend.get_texts()}
    # nothing of this run is shared
    assert names == {"anonymous", "file", "killed", "phase", "loading", "building"}
    assert max(ax.collections[0].get_paths()[0].vertices[:, 1]) == 210  # type: ignore[index]


def test_a_phase_that_kills_is_drawn_however_short_it_was(tmp_path: Path) -> None:
    events = [(100.0, "start", {}), (100.0, "begin", {"phase": "load"})]
    events += [(104.495, "end", {"phase": "load"}), (104.499, "begin", {"phase": "build"})]
    result = {"exit_code": 137, "killed_by": "kernel", "oom_kills": 1}
    listed = [{"time_s": time_s, "event": kind, **more} for time_s, kind, more in events]
    run = write_run(tmp_path / "run", events=listed, memory_limit_bytes=256 * MB, **result)
    ax = plot_timeline(run)
    boxes = [patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches]
    late = [box for box in boxes if box.x1 > 4.5]
    assert min(box.x0 for box in late) == pytest.approx(4.499)  # the phase before is not covered
    assert 4.54 < max(box.x1 for box in late) <= ax.get_xlim()[1]
    assert "in phase 'build'" in ax.get_title()


def test_first_and_later_epochs_are_lines_and_a_kill_is_a_cross(
    killed: Path, finished: Path
) -> None:
    columns = "epoch,loss,train,valid,test,time_s,eval_time_s\n"
    rows = "1,1,,,,4.0,0\n2,1,,,,0.5,0\n3,1,,,,1.0,0\n4,1,,,,9.0,0\n"
    runs = {("b", "4 GB"): killed}
    for size, name in ((512, "8 GB"), (256, "4 GB")):
        runs["a", name] = finished.parent / name
        write_run(runs["a", name], exit_code=0, memory_limit_bytes=size * MB)
        (runs["a", name] / "metrics.csv").write_text(columns + rows)
    ax = epoch_times(dict(reversed(runs.items())))
    later, first, *_ = (line.get_ydata() for line in ax.lines)
    assert [*later, *first] == [1.0, 1.0, 4.0, 4.0]
    (cross,) = (line for line in lines(ax, marker="X") if len(line.get_xdata()))
    assert cross.get_ydata() == [0]
    # limits grow to the right
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["4 GB\n(256 MB)", "8 GB\n(512 MB)"]
    assert texts(ax) == ["a finished under 4 GB"]


def test_parts_are_bars_of_the_peak_beside_verdicts(killed: Path, finished: Path) -> None:
    base = TrainConfig.create(dataset="ogbn-papers100M")
    plans = {name: plan(base.replace(loading=name), "128 GB") for name in ("eager", "shared")}
    runs = {"eager": killed, "shared": finished}
    ax = plot_parts(plans, 140 * GB, runs, {"a larger graph": plans})
    expected = [advice.forecast.peak_bytes / GB for advice in plans.values()]
    assert bar_ends(ax) == pytest.approx(expected)
    (cross,) = lines(ax, marker="X")
    assert cross.get_xdata() == pytest.approx([140])
    assert any(KILLED_IN in text.replace("\n", " ") for text in texts(ax))
    assert {"a larger graph", "176 GB\nWILL NOT FIT", "60 GB\nFITS"} <= set(texts(ax))


def test_a_finished_run_has_its_peak_and_neither_limit_nor_cross(finished: Path) -> None:
    _, own = plt.subplots()
    assert plot_timeline(finished, own, title="mine") is own
    assert own.get_title() == "mine, peak 23 MB"
    ax = plot_timeline(finished)
    assert ax.get_title().endswith("finished, peak 23 MB")
    assert not lines(ax, "--", "X")


def test_nothing_is_in_memory_between_a_kill_and_the_next_attempt(tmp_path: Path) -> None:
    events = [(100.0, "start", {}), (101.0, "begin", {"phase": "train"})]
    events += [(106.0, "start", {}), (107.0, "begin", {"phase": "train"})]
    listed = [{"time_s": time_s, "event": kind, **more} for time_s, kind, more in events]
    times = [100.5, 101.5, 102.5, 106.5, 107.5]
    ax = plot_timeline(constant_run(tmp_path / "run", times, 23 * MB, events=listed))
    anonymous = ax.collections[0].get_paths()[0]
    points = {tuple(point) for point in anonymous.vertices.round(3).tolist()}  # type: ignore[union-attr]
    assert {(2.5, 23.0), (2.5, 0.0), (6.0, 0.0), (6.5, 23.0)} <= points
    assert (6.0, 23.0) not in points
    (cross,) = lines(ax, marker="X")
    assert (*cross.get_xdata(), *cross.get_ydata()) == (2.5, 23.0)
    boxes = [patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches]
    spans = sorted((round(box.x0, 3), round(box.x1, 3)) for box in boxes)
    assert spans == [(1.0, 2.5), (7.0, 7.5)]


def test_runs_side_by_side_have_one_scale_and_names(
    killed: Path, finished: Path, tmp_path: Path
) -> None:
    figure = plot_runs({"A": killed, "B": finished, "C": killed}, columns=2)
    first, second, *_ = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > 256
    assert (first.get_title()[:3], second.get_title()[:3]) == ("A: ", "B: ")
    assert [ax.get_visible() for ax in figure.axes] == [True, True, True, False]
    same_name = Run(write_run(tmp_path / "other" / "killed", exit_code=0))
    titles = [ax.get_title() for ax in plot_runs([Run(killed), same_name]).axes]
    assert len(titles) == 2
    assert all("killed" in title for title in titles)


def test_figures_are_readable_on_a_white_and_on_a_dark_page(killed: Path, finished: Path) -> None:
    def luminance(colour: Any) -> float:  # of WCAG 2.1
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722] + 0.05

    figure = plot_runs([killed, finished])
    for ax in figure.axes:
        assert ax.get_facecolor()[3] == 0
        shown = [ax.title, ax.xaxis.label, ax.yaxis.label]
        for text in [*shown, *ax.get_xticklabels(), *ax.get_yticklabels()]:
            own = luminance(text.get_color())
            assert min(luminance("white") / own, own / luminance("#111111")) > 3.5


def test_in_a_notebook_of_ones_own_the_page_shows_through(killed: Path) -> None:
    code = f"from ogbnlib.notebook import plot_timeline\nax = plot_timeline({str(killed)!r})"
    book = v4.new_notebook(cells=[v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=120).execute()
    (picture,) = book.cells[0].outputs
    assert is_transparent(picture)


def test_a_forecast_is_bars_and_a_measured_peak_a_mark(tmp_path: Path) -> None:
    many = {f"part {i}": (i + 1) * MB for i in range(10)}
    phases = {
        "load": {"predicted": 55 * MB, "measured": 50 * MB, "parts": many},
        "train": {"predicted": 40 * MB, "measured": None, "parts": {"part 9": 40 * MB}},
    }
    ax = plot_forecast(write_run(tmp_path / "run", exit_code=0, forecast={"phases": phases}))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["load", "train"]
    assert bar_ends(ax) == pytest.approx([55, 40])
    assert 1 + 2 + 3 in [bar.get_width() for bar in ax.patches]  # beyond the 7 largest
    (marks,) = ax.collections
    places = [path.vertices[0, 0] for path in marks.get_paths()]
    assert places == pytest.approx([50, float("nan")], nan_ok=True)
