"""A run, its folder, and the cause of its end; `list_runs` is the table of all runs below a
folder."""

from __future__ import annotations

import contextlib
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import GB, InputError
from ..files import home, whereabouts
from ..memory.record import RunPaths

if TYPE_CHECKING:
    import pandas as pd


def list_runs(folder: str | os.PathLike[str] = "runs") -> pd.DataFrame:
    """All runs below `folder`, the oldest first: one row each, named by its path from the working
    folder.

    Columns: `when` it began, how it `ended`, `peak GB` of anonymous + shared memory, `run s` in all
    attempts, `epochs`; `best valid` accuracy and `test at best` in the same epoch; the watched
    `command`; and `settings`: the config values in which it differs from most runs. Missing values
    are NaN.
    """
    import pandas as pd

    root = home(folder)
    if not root.is_dir():
        raise InputError(f"{folder}: expected a folder of runs, found none{whereabouts()}")
    root = Path(os.path.abspath(root))
    root = root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else root
    rows, settings = {}, {}
    for place, inside, _ in os.walk(root):
        paths = RunPaths(place)
        if paths.config.is_file() or paths.events.is_file():
            name = os.path.normpath(place)
            rows[name], settings[name] = _row(place)
            inside.clear()
    columns = [
        "when",
        "ended",
        "peak GB",
        "run s",
        "epochs",
        "best valid",
        "test at best",
        "command",
    ]
    table = pd.DataFrame(list(rows.values()), pd.Index(rows, name="run"), columns)
    names = dict.fromkeys(name for texts in settings.values() for name in texts)
    usual = {
        name: statistics.mode(texts[name] for texts in settings.values() if name in texts)
        for name in names
    }
    table["settings"] = [
        " ".join(f"{name}={text}" for name, text in texts.items() if text != usual[name])
        if texts
        else None
        for texts in settings.values()
    ]

    class Table(pd.DataFrame):  # type: ignore[misc]
        def _repr_html_(self) -> str | None:
            with pd.option_context("display.max_colwidth", None):  # show settings in full
                return super()._repr_html_()

    return Table(table.sort_values("when", kind="stable").dropna(axis="columns", how="all"))


def _row(folder: str) -> tuple[dict[str, Any], dict[str, str]]:
    import pandas as pd

    from .folder import Run

    run, config = Run(folder), dict[str, Any]()
    with contextlib.suppress(InputError):  # of a watched command, or of another version
        config = run.config.model_dump(mode="json")
    for name in {"dataset", "data_dir"} & config.keys():
        config[name] = os.path.basename(str(config[name]))
    row: dict[str, Any] = {}
    try:
        row["when"] = (
            pd.Timestamp(run.events[0]["time_s"], unit="s").round("s") if run.events else pd.NaT
        )
        starts = [event for event in run.events if event["event"] == "start"]
        earlier = [(event.get("previous") or {}).get("duration_s") or 0.0 for event in starts]
        command = starts[-1].get("command", []) if starts else []
        row |= {
            "ended": run.state,
            "peak GB": round(run.held_peak_bytes / GB, 3),
            "run s": round(
                sum(earlier) + (run.result or {"duration_s": run.record.duration_s})["duration_s"],
                1,
            ),
            "epochs": len(run.metrics) or None,
        }
        if run.metrics["valid"].notna().any():
            best = run.metrics.loc[run.metrics["valid"].idxmax()]
            row |= {"best valid": best["valid"], "test at best": best["test"]}
        row["command"] = " ".join([os.path.basename(command[0]), *command[1:]]) if command else None
    except InputError as error:
        row["ended"] = f"damaged: {error}"
    return row, {name: str(value).replace(" ", "") for name, value in config.items()}
