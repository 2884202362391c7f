"""Table of all runs below a folder. Import this module only on use, because it imports pandas."""

import os
from pathlib import Path

import pandas as pd

from ..errors import GB, InputError
from ..files import StrPath, home, shown, whereabouts
from .folder import Run, is_run


def list_runs(folder: StrPath = "runs") -> pd.DataFrame:
    """List all runs below `folder`, oldest first, one row per run with its path as the index.

    Columns: `when` the run began; how it `ended`; `peak GB` of anonymous + shared memory; `run s`,
    the seconds of the last attempt. Missing values are NaN, and columns without any value are left
    out. Paths are relative to the working folder.
    """
    root = home(folder)
    if not root.is_dir():
        raise InputError(f"{folder}: expected a folder of runs, found none{whereabouts()}")
    rows = {}
    for path, inside, _ in os.walk(shown(Path(os.path.abspath(root)))):
        if is_run(path):
            rows[os.path.normpath(path)] = _row(Run(path))
            inside.clear()  # os.walk then skips subfolders: no run lies in another run's folder
    columns = ["when", "ended", "peak GB", "run s"]
    table = pd.DataFrame(rows.values(), pd.Index(rows, name="run"), columns)
    return table.sort_values("when", kind="stable").dropna(axis="columns", how="all")


def _row(run: Run) -> dict[str, object]:
    row: dict[str, object] = {"when": pd.NaT}  # a value that is missing here becomes NaN
    try:
        for event in run.events[:1]:  # none, if the run was killed at its first line
            row["when"] = pd.Timestamp(event["time_s"], unit="s").round("s")
        row |= {
            "ended": run.state,
            "peak GB": round(run.held_peak_bytes / GB, 3),
            "run s": round(run.result.get("duration_s") or run.record.duration_s, 1),
        }
    except InputError as error:
        row["ended"] = f"damaged: {error}"
    return row
