"""Promises of `plots`: limit, kill and phases are where they were, and runs side by side share one scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from conftest import MB, write_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from ogbnlib.errors import GB, InputError
from ogbnlib.notebook.plots import (
    epoch_times,
    plot_accuracy,
    plot_cuda,
    plot_forecast,
    plot_knobs,
    plot_peaks,
    plot_runs,
    plot_timeline,
)
from ogbnlib.notebook.tables import best_epochs, compare_runs
from ogbnlib.runs.folder import Run

LIMIT = 256 * MB


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "killed", exit_code=137, killed_by="kernel", oom_kills=1, memory_limit_bytes=LIMIT,
        limit_by="cgroup v2",
    )  # fmt: skip


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    samples = [{"time_s": 100.5 + i, "rss_anon_bytes": (20 + i) * MB, "rss_shmem_bytes": 0} for i in range(4)]
    return write_run(tmp_path / "finished", exit_code=0, samples=samples)


def lines(ax: Axes, style: str) -> list[Line2D]:
    return [line for line in ax.lines if line.get_linestyle() == style]


def crosses(ax: Axes) -> list[Line2D]:
    return [line for line in ax.lines if line.get_marker() == "X"]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_the_limit_is_a_line_at_its_height(killed: Path) -> None:
    ax = plot_timeline(killed)
    (line,) = lines(ax, "--")
    assert list(line.get_ydata()) == [256] * 2
    assert "limit 256 MB" in texts(ax)
    assert ax.get_ylim()[1] > 256


def test_without_a_limit_there_is_no_line(finished: Path) -> None:
    assert not lines(plot_timeline(finished), "--")


def test_a_kill_is_a_cross_at_the_last_sample_and_in_the_title(killed: Path) -> None:
    ax = plot_timeline(killed)
    (cross,) = crosses(ax)
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([4.5], [256])
    assert "137" in ax.get_title()


def test_a_finished_run_has_no_cross_but_its_peak(finished: Path) -> None:
    ax = plot_timeline(finished)
    assert not crosses(ax)
    assert "peak 23 MB" in texts(ax)


def test_phases_are_shaded_from_their_begin_to_their_end_and_named(killed: Path) -> None:
    ax = plot_timeline(killed)
    shades = [(patch.get_extents().transformed(ax.transData.inverted()), patch) for patch in ax.patches]
    spans = sorted((round(box.x0, 3), round(box.x1, 3)) for box, _ in shades)
    assert spans == [(1.0, 3.0), (4.0, 4.5)]  # the kill left the second one open
    assert len({to_hex(patch.get_facecolor()) for _, patch in shades}) == 2
    assert {"load", "build valid loader"} <= set(texts(ax))


def test_memory_is_stacked_by_kind_and_named(killed: Path) -> None:
    ax = plot_timeline(killed)
    assert len(ax.collections) == 3
    legend = ax.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert {name.split()[0] for name in names} == {"anonymous", "shared", "file", "killed", "loading", "building"}
    assert len(names) == 6
    anonymous = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert max(anonymous) == 210


def test_it_draws_where_it_is_told_and_as_it_is_told(finished: Path) -> None:
    _, ax = plt.subplots()
    assert plot_timeline(finished, ax, title="mine", top_bytes=2 * GB, legend=False) is ax
    assert (ax.get_title(), ax.get_ylim(), ax.get_legend()) == ("mine", (0.0, 2.0), None)


def test_runs_side_by_side_have_one_scale_that_holds_them_all(killed: Path, finished: Path) -> None:
    figure = plot_runs({"A": killed, "B": finished})
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > LIMIT / MB
    assert first.get_title().startswith("A: ")
    assert second.get_title().startswith("B: ")


def test_panels_without_a_run_are_hidden(killed: Path, finished: Path) -> None:
    figure = plot_runs({"A": killed, "B": finished, "C": killed}, columns=2)
    assert [ax.get_visible() for ax in figure.axes] == [True, True, True, False]


def as_run(folder: Path) -> Run:
    return Run(folder)


def test_runs_in_a_list_are_called_by_their_folders(killed: Path, finished: Path) -> None:
    figure = plot_runs([as_run(killed), as_run(finished)])
    assert [ax.get_title().split(":")[0] for ax in figure.axes] == ["killed", "finished"]


def test_two_runs_whose_folders_share_a_name_both_get_a_panel(tmp_path: Path) -> None:
    runs = [as_run(write_run(tmp_path / parent / "lazy", exit_code=0)) for parent in ("a", "b")]
    assert len(plot_runs(runs).axes) == 2


def test_no_runs_are_refused() -> None:
    with pytest.raises(InputError, match="runs"):
        plot_runs({})


def test_a_folder_without_a_timeline_is_named(finished: Path, tmp_path: Path) -> None:
    (finished / "timeline.csv").unlink()
    with pytest.raises(InputError, match=r"timeline\.csv"):
        plot_timeline(finished)
    with pytest.raises(InputError, match="expected the folder of a run"):
        plot_timeline(tmp_path / "nothing")


def test_a_run_that_died_before_its_first_sample_is_drawn(tmp_path: Path) -> None:
    ax = plot_timeline(write_run(tmp_path / "run", samples=[]))
    assert not crosses(ax)


def test_peaks_are_bars_with_the_limit_and_those_that_reach_it_stand_out() -> None:
    ax = plot_peaks({"eager": 4 * GB, "shared": 1 * GB}, limit_bytes=4 * GB)
    assert [bar.get_width() for bar in ax.patches] == [4.0, 1.0]  # type: ignore[attr-defined]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["eager", "shared"]
    (line,) = lines(ax, "--")
    assert list(line.get_xdata()) == [4.0, 4.0]
    colours = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert colours[0] != colours[1]


@pytest.mark.parametrize(("size", "limit", "words"), [(400 * MB, 400 * MB, "400 MB"), (900 * MB, 2 * GB, "2.00 GB")])
def test_a_picture_has_one_unit(tmp_path: Path, size: int, limit: int, words: str) -> None:
    samples = [{"time_s": 100.5 + i, "rss_anon_bytes": size, "rss_shmem_bytes": 0} for i in range(4)]
    run = write_run(tmp_path / "run", exit_code=0, samples=samples, memory_limit_bytes=limit)
    for ax in (plot_timeline(run), *plot_runs([run]).axes, plot_peaks({"a": size}, limit)):
        shown = [*texts(ax), ax.get_ylabel(), ax.get_xlabel()]
        assert f"limit {words}" in shown
        assert not [text for text in shown if ("MB" if "GB" in words else "GB") in text]


# The forecast beside what was measured --------------------------------------------------------------------------------

FORECAST = {
    "phases": {
        "load": {"predicted": 300 * MB, "measured": 280 * MB, "parts": {"runtime": 200 * MB, "features": 100 * MB}},
        "train": {"predicted": 310 * MB, "measured": None, "parts": {"runtime": 200 * MB, "features": 110 * MB}},
    }
}


def test_a_forecast_is_a_bar_for_each_phase_and_a_mark_for_each_measured_peak(tmp_path: Path) -> None:
    ax = plot_forecast(write_run(tmp_path / "run", exit_code=0, forecast=FORECAST))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["load", "train"]
    ends = [max(bar.get_x() + bar.get_width() for bar in ax.patches if round(bar.get_y() + 0.31) == i) for i in (0, 1)]  # type: ignore[attr-defined]
    assert ends == pytest.approx([300, 310])
    (marks,) = ax.collections
    drawn = [path.vertices[0, 0] for path in marks.get_paths()]  # type: ignore[index]
    assert drawn == pytest.approx([280, float("nan")], nan_ok=True)


def test_parts_beyond_the_seven_largest_are_drawn_as_one(tmp_path: Path) -> None:
    parts = {f"part {i}": (i + 1) * MB for i in range(10)}
    phases = {"load": {"predicted": 55 * MB, "measured": 50 * MB, "parts": parts}}
    ax = plot_forecast(write_run(tmp_path / "run", exit_code=0, forecast={"phases": phases}))
    assert len(ax.patches) == 8
    assert ax.patches[-1].get_width() == 1 + 2 + 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("result", [{}, {"forecast": {"skipped": "the data is gone"}}], ids=["none", "skipped"])
def test_a_result_without_a_forecast_is_refused(tmp_path: Path, result: dict[str, Any]) -> None:
    words = result["forecast"]["skipped"] if result else "none"
    with pytest.raises(InputError, match=f"expected a result with a forecast, found {words}"):
        plot_forecast(write_run(tmp_path / "run", exit_code=0, **result))


def test_every_setting_is_a_bar_with_its_measured_peak_and_its_forecast_at_full_size() -> None:
    columns = {"predicted MB": [500, 600], "measured MB": [510.0, float("nan")], "big GB": [60.41, 33.95]}
    ax = plot_knobs(pd.DataFrame(columns, index=["as given", "float16"]))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["as given", "float16"]
    assert [bar.get_width() for bar in ax.patches] == [500, 600]  # type: ignore[attr-defined]
    assert texts(ax) == ["60.4 GB", "34.0 GB"]
    (marks,) = ax.collections
    assert marks.get_paths()[0].vertices[0, 0] == 510  # type: ignore[index]


def on_a_gpu(folder: Path, exit_code: int = 0, **more: int) -> Path:
    reading = {"event": "cuda", "allocated_bytes": 2 * GB, "reserved_bytes": 3 * GB, **more}
    events = [
        {"time_s": 100.0, "event": "start"},
        {"time_s": 101.0, "event": "begin", "phase": "train epoch", "epoch": 1},
        {"time_s": 101.5, **reading},
        {"time_s": 103.0, **reading, "allocated_bytes": GB},
    ]
    return write_run(folder, exit_code=exit_code, events=events)


def test_the_layers_of_gpu_memory_are_stacked_over_time(tmp_path: Path) -> None:
    ax = plot_cuda(on_a_gpu(tmp_path / "a", free_bytes=5 * GB, largest_free_bytes=GB // 2))
    tops = [layer.get_paths()[0].vertices[:, 1].max() for layer in ax.collections[:3]]  # type: ignore[index]
    assert tops == [2, 3, 8]
    (line,) = [line for line in ax.lines if line.get_label() == "of it the largest free block"]
    assert list(line.get_ydata()) == [2.5, 1.5]
    assert not crosses(ax)


def test_a_failed_allocation_is_a_cross_and_retries_are_ticks(tmp_path: Path) -> None:
    folder = on_a_gpu(tmp_path / "a", exit_code=76, free_bytes=0, alloc_retries=0)
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text("1".join(events.rsplit("0", 1)))  # one retry in the last reading
    ax = plot_cuda(folder)
    assert len(crosses(ax)) == 1
    assert [list(line.get_xdata()) for line in ax.lines if line.get_marker() == "^"] == [[3.0]]
    assert ax.get_title() == "a: out of GPU memory, exit code 76"


def test_a_run_of_an_earlier_version_without_the_newer_readings_is_drawn(tmp_path: Path) -> None:
    assert len(plot_cuda(on_a_gpu(tmp_path / "a")).collections) >= 3


def test_a_run_on_a_cpu_has_no_gpu_memory_to_draw(finished: Path) -> None:
    with pytest.raises(InputError, match="expected a run on a GPU"):
        plot_cuda(finished)


def test_runs_on_a_gpu_are_compared_by_their_peaks_and_epochs(tmp_path: Path, finished: Path) -> None:
    from ogbnlib.notebook.tables import compare_cuda

    folder = on_a_gpu(tmp_path / "a", peak_allocated_bytes=4 * GB, alloc_retries=3)
    (folder / "metrics.csv").write_text("epoch,loss,train,valid,test,time_s,eval_time_s\n1,2,,,,5.0,1\n2,1,,,,7.0,1\n")
    table = compare_cuda({"gpu": as_run(folder), "cpu": as_run(finished)})
    row = table.loc["gpu"]
    assert (row["allocated GB"], row["reserved GB"], row["unallocated GB"]) == (4, 3, 2)
    assert (row["retries"], row["epoch s"], row["ended"]) == (3, 6, "finished")
    assert table.loc["cpu"].isna()["allocated GB"]


def test_the_epoch_of_the_best_valid_accuracy_is_marked(finished: Path) -> None:
    rows = ["1,2.5,,0.3,0.4,1,1", "2,1.5,,0.6,0.5,1,1", "3,1.2,,0.5,0.7,1,1"]
    (finished / "metrics.csv").write_text("\n".join(["epoch,loss,train,valid,test,time_s,eval_time_s", *rows]) + "\n")
    left, right = plot_accuracy({"one": Run(finished)}).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[2.5, 1.5, 1.2]]
    assert [list(line.get_ydata()) for line in right.lines[:2]] == [[0.3, 0.6, 0.5], [0.4, 0.5, 0.7]]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in right.lines[2:3]] == [([2], [0.6])]


def test_a_run_that_was_killed_before_its_first_evaluation_has_a_place_beside_others(finished: Path) -> None:
    (finished / "metrics.csv").unlink(missing_ok=True)
    (finished / "result.json").unlink()
    runs = {"killed": Run(finished)}
    assert plot_accuracy(runs).axes
    assert best_epochs(runs)["valid"].isna().all()
    assert compare_runs(runs)["run s"].notna().all()


def test_nothing_is_drawn_for_the_wait_between_two_attempts(tmp_path: Path) -> None:
    times = [100.5, 101.0, 3000.0, 3000.5]
    samples: list[dict[str, float]] = [
        {"time_s": time_s, "rss_anon_bytes": 50 * MB, "rss_shmem_bytes": 0} for time_s in times
    ]
    ax = plot_timeline(write_run(tmp_path / "run", exit_code=0, samples=samples))
    corners = ax.collections[0].get_paths()[0].vertices[:, 0]
    assert not [x for x in corners if 1.0 < x < 2900.0]
    assert len(ax.collections[0].get_paths()) == 2


def test_epoch_times_fill_their_picture(killed: Path, finished: Path) -> None:
    metrics = "epoch,loss,train,valid,test,time_s,eval_time_s\n1,1.5,,0.5,0.5,2.0,0.5\n"
    (finished / "metrics.csv").write_text(metrics)
    ax = epoch_times({("eager", "8 GB"): killed, ("store", "8 GB"): finished}, ["8 GB"])
    assert [list(line.get_ydata()) for line in ax.lines if line.get_marker() == "o"] == [[], [2.0]]
    (cross,) = [line for line in ax.lines if line.get_marker() == "X"]
    assert list(cross.get_ydata()) == [0]
    box, tight = ax.get_window_extent(), ax.get_tightbbox()
    assert box.x0 - tight.x0 < 80
    assert box.y0 - tight.y0 < 60
