"""Table of all runs below a folder. Import this module only on use, because it imports pandas."""

import os
import statistics
from pathlib import Path

import pandas as pd

from ..errors import GB, InputError
from ..files import StrPath, home, shown, whereabouts
from .folder import Run, is_run

_COLUMNS = (
    "when",
    "ended",
    "peak GB",
    "run s",
    "epochs",
    "best valid",
    "test at best",
    "command",
    "settings",
)


class _Table(pd.DataFrame):  # type: ignore[misc]
    def _repr_html_(self) -> str | None:
        with pd.option_context("display.max_colwidth", None):  # show settings in full
            return super()._repr_html_()


def list_runs(folder: StrPath = "runs") -> pd.DataFrame:
    """List all runs below `folder`, oldest first, one row per run with its path as the index.

    Columns: `when` the run began; how it `ended`; `peak GB` of anonymous + shared memory; `run s`,
    the seconds of all attempts; `epochs`; `best valid` and `test at best`, the accuracies of the
    epoch with the best valid accuracy; the watched `command`; and `settings`, the config values
    that differ from those of most runs. Missing values are NaN, and columns without any value are
    left out. Paths are relative to the working folder.
    """
    root = home(folder)
    if not root.is_dir():
        raise InputError(f"{folder}: expected a folder of runs, found none{whereabouts()}")
    runs = {}
    for path, inside, _ in os.walk(shown(Path(os.path.abspath(root)))):
        if is_run(path):
            runs[os.path.normpath(path)] = Run(path)
            inside.clear()  # no run lies in another run's folder
    settings = [_settings(run) for run in runs.values()]
    usual = {
        name: statistics.mode(texts[name] for texts in settings if name in texts)
        for name in dict.fromkeys(name for texts in settings for name in texts)
    }
    rows = []
    for run, texts in zip(runs.values(), settings, strict=True):
        row = _row(run)
        if texts:
            special = [f"{name}={text}" for name, text in texts.items() if text != usual[name]]
            row["settings"] = " ".join(special)
        rows.append(row)
    table = pd.DataFrame(rows, pd.Index(runs, name="run"), [*_COLUMNS])

    return _Table(table.sort_values("when", kind="stable").dropna(axis="columns", how="all"))


def _settings(run: Run) -> dict[str, str]:
    """The config's values as texts, the data set by its last part; empty for a watched command."""
    config = run.known_config
    if config is None:
        return {}
    values = config.model_dump(mode="json")
    texts = {name: str(value).replace(" ", "") for name, value in values.items()}
    return texts | {"dataset": os.path.basename(texts["dataset"])}


def _row(run: Run) -> dict[str, object]:
    row: dict[str, object] = {"when": pd.NaT}
    try:
        for event in run.events[:1]:
            row["when"] = pd.Timestamp(event["time_s"], unit="s").round("s")
        starts = [event for event in run.events if event["event"] == "start"]
        attempts = [event.get("previous") or {} for event in starts]
        attempts.append(run.result or {"duration_s": run.record.duration_s})
        row |= {
            "ended": run.state,
            "peak GB": round(run.held_peak_bytes / GB, 3),
            "run s": round(sum(attempt.get("duration_s") or 0.0 for attempt in attempts), 1),
        }
        row["epochs"] = len(run.metrics) or None
        best = run.best_epoch
        if best is not None:
            row["best valid"] = best["valid"]
            row["test at best"] = best["test"]
        command = starts[-1].get("command") if starts else None
        if command:
            row["command"] = " ".join([os.path.basename(command[0]), *command[1:]])
    except InputError as error:
        row["ended"] = f"damaged: {error}"
    return row
