"""Promises of `tables` and `verdicts`: a forecast beside its measurement, the runs of a folder as a
table, a consequence only from a measurement that carries it, and foreign names as text."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MB, write_run

import ogbnlib
from ogbnlib.config import TrainConfig
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.notebook import verdicts
from ogbnlib.notebook.plots import plot_accuracy, plot_runs, plot_timeline
from ogbnlib.notebook.tables import best_epochs, compare_runs, compare_steps, forecast_table
from ogbnlib.runs.folder import Run
from ogbnlib.sources.resolve import size_of


def finished(folder: Path, dataset: Path, **result: object) -> Run:
    values = {"dataset": str(dataset), "loading": "shared"}
    peaks = {"held_bytes": 400 * MB}
    write_run(folder, exit_code=0, config=values, sampled_peaks_bytes=peaks, **result)
    return Run(folder)


def test_a_forecast_is_shown_with_its_measurement(tmp_path: Path, tiny_store: Path) -> None:
    run = finished(tmp_path / "run", tiny_store)
    row = forecast_table({"32": run}, "ogbn-papers100M").loc["32"]
    config = TrainConfig.load(run.run_dir / "config.json")
    here, there = predict(config), predict(config, size_of("ogbn-papers100M"))
    assert (row["predicted MB"], row["measured MB"]) == (round(here.peak_bytes / MB), 400)
    assert row["error %"] == pytest.approx(100 * (here.peak_bytes / (400 * MB) - 1), abs=0.1)
    assert row["ogbn-papers100M GB"] == pytest.approx(there.peak_bytes / 2**30, abs=0.01)
    assert row.iloc[-1] == there.peak.name


METRICS = "epoch,loss,train,valid,test,time_s,eval_time_s\n1,2.0,,0.6,0.5,1.0,0.1\n2,1.0,,0.4,0.3,1.0,0.1\n"


def test_runs_of_all_kinds_are_one_table(tmp_path: Path) -> None:
    peaks = {"held_bytes": 512 * MB}
    write_run(tmp_path / "a", config={"lr": 0.1}, killed_by="kernel", sampled_peaks_bytes=peaks)
    write_run(tmp_path / "deep" / "a", exit_code=0, config={"lr": 0.2})
    (tmp_path / "deep" / "a" / "metrics.csv").write_text(METRICS)
    write_run(tmp_path / "b", exit_code=None)
    code = "import ogbnlib, time\nfor name in ('read', 'think'):\n    with ogbnlib.phase(name): time.sleep(0.3)"
    watched = ogbnlib.watch(["-c", code], runs_dir=tmp_path, name="watched")
    assert {"read", "think"} <= {text.get_text() for text in plot_timeline(watched).texts}
    runs = [tmp_path / "a", tmp_path / "b", watched]
    table = compare_runs(runs)
    assert table.index.tolist() == ["a", "b", "watched"]
    assert ("137" in table["ended"]["a"], table["peak GB"]["a"]) == (True, 0.5)
    assert table["ended"]["b"] == "no result"
    (row,) = compare_runs([tmp_path / "deep" / "a"]).to_dict("records")
    assert (row["last valid"], row["last test"]) == (0.4, 0.3)
    assert compare_runs([tmp_path / "b", Run(tmp_path / "a")]).index.tolist() == ["b", "a"]
    assert len(plot_runs(runs).axes) >= len(runs)


F1_METRICS = (
    "epoch,loss,train,valid,test,time_s,eval_time_s,train_macro_f1,valid_macro_f1,test_macro_f1\n"
    "1,2.0,,0.6,0.5,1.0,0.1,,0.1,0.1\n2,1.0,,0.4,0.3,1.0,0.1,,0.3,0.2\n3,0.9,,,,1.0,0.1,,,\n"
)


def test_tables_and_plots_name_the_epoch_that_the_run_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", exit_code=0, config={})
    assert best_epochs(folder)["best epoch"].isna().all()  # without an evaluation
    assert Run.open(folder).best_epoch is None
    plot_accuracy(folder)
    (folder / "metrics.csv").write_text(F1_METRICS)
    row = best_epochs(folder).loc["a"]
    assert row[["best epoch", "valid", "test", "epochs trained"]].tolist() == [1, 0.6, 0.5, 3]
    lines = plot_accuracy(folder).axes[1].get_lines()
    marks = [line.get_data() for line in lines if line.get_marker() == "o"]
    assert [mark for mark in marks if len(mark[0])] == [([1], [0.6])]


def epochs(rises_mb: list[int]) -> list[dict[str, object]]:
    """Events of a run whose epochs rose by so many MB in between."""
    events: list[dict[str, object]] = [{"time_s": 100.0, "event": "start"}]
    for i, rise in enumerate(rises_mb):
        both = {"phase": "train epoch", "held_bytes": 400 * MB, "rss_bytes": 500 * MB}
        events += [{"time_s": 101.0 + i, "event": "begin", "epoch": i + 1, **both}]
        end = {"event": "end", "peak_rss_bytes": (500 + rise) * MB, **both}
        events += [{"time_s": 101.5 + i, **end}]
    return events


def test_steps_are_compared_without_the_first_epoch_of_several(
    tmp_path: Path, tiny_store: Path
) -> None:
    header = METRICS.partition("\n")[0]
    for name, rises in {"warm": [170, 150, 149], "once": [170]}.items():
        finished(tmp_path / name, tiny_store, events=epochs(rises))
        times = [3.0, 1.0, 2.0][: len(rises)]
        rows = [f"{i + 1},2.0,,0.6,0.5,{time_s},0.1" for i, time_s in enumerate(times)]
        (tmp_path / name / "metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    steps = compare_steps({name: Run(tmp_path / name) for name in ("warm", "once")})
    assert steps["step MB"].tolist() == [150, 170]
    assert steps["epoch s"].tolist() == [1.5, 3.0]
    assert steps["relative memory"].tolist() == pytest.approx([1, 170 / 150], abs=0.001)
    config = TrainConfig.load(tmp_path / "warm" / "config.json")
    train = next(phase for phase in predict(config).phases if phase.name == "train")
    step = train.parts["batch in use"] + train.parts["step: activations and sampling"]
    assert steps["forecast MB"].tolist() == pytest.approx([step / MB] * 2, abs=0.1)


SO = "Share one graph."


def test_a_measurement_decides_what_follows() -> None:
    for figure, carries, answer in (
        *((0.3, True, SO), (0.3, False, "Not so"), (0.3, None, "Undecided")),
        (math.nan, False, "Not"),
    ):
        measured, so = verdicts.finding(f"{figure:.0%} less, and nanoseconds", carries, SO)
        assert so.startswith(answer)
        assert ("nan%" in measured, "30%" in measured) == (False, not math.isnan(figure))


def test_a_table_shows_each_text_in_full() -> None:
    claim, measured = "x" * 200, "<b> & " + "y" * 200
    table = verdicts.table({claim: verdicts.finding(measured, True, SO)})
    assert repr(table).splitlines() == [claim, f"    {measured}", f"    {SO}"]
    html = table._repr_html_()
    assert claim in html
    assert "&lt;b&gt; &amp; yyy" in html
    assert html.count("<tr") == 2


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
    pages += [
        verdicts.table({name: finding})._repr_html_(),
    ]
    for page in pages:
        assert page is not None
        assert "<script>" not in page
        assert "<i>" not in page
    for page in pages[:2] + pages[3:4]:
        assert "\x1b" not in page
    for axes in (plot_timeline(done), *plot_runs([done]).axes):
        axes.figure.canvas.draw()  # matplotlib would read $a_b$ as a formula
        assert "\x1b" not in axes.get_title()
