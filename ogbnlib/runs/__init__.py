"""A run, its folder, and the cause of its end; `list_runs` is the table of all runs below a folder."""

from __future__ import annotations

import collections
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def list_runs(folder: str | os.PathLike[str] = "runs") -> pd.DataFrame:
    """All runs below `folder`, the oldest first: one row each, named by its path from the working folder.

    Columns: `when` it began, how it `ended`, `peak GB` of anonymous + shared memory, `run s` in all attempts, `epochs`,
    `best valid` accuracy and `test at best` in the same epoch, the watched `command`, and `settings`: the config values
    in which it differs from most runs. Missing values are NaN. `compare_runs` and plots take the rows' names.

    Raises:
        InputError: when the folder does not exist.
    """
    import pandas as pd

    from ..errors import InputError
    from ..files import home, whereabouts
    from ..memory.record import RunPaths

    root = home(folder)
    if not root.is_dir():
        found = "a file" if root.exists() else f"none{whereabouts()}"
        raise InputError(f"{folder}: expected a folder of runs, found {found}")
    root = Path(os.path.abspath(root))
    root = root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else root
    rows, configs = {}, {}
    for place, inside, _ in os.walk(root):
        paths = RunPaths(place)
        if paths.config.is_file() or paths.events.is_file():
            name = os.path.normpath(place)
            rows[name], configs[name] = _row(place)
            inside.clear()
    columns = ["when", "ended", "peak GB", "run s", "epochs", "best valid", "test at best", "command"]
    table = pd.DataFrame(list(rows.values()), pd.Index(rows, name="run"), columns)
    table["settings"] = _settings([*configs.values()])

    class Table(pd.DataFrame):  # type: ignore[misc]
        def _repr_html_(self) -> str | None:
            with pd.option_context("display.max_colwidth", None):  # show settings in full
                text: str | None = super()._repr_html_()
            return text

    return Table(table.sort_values("when", kind="stable").dropna(axis="columns", how="all"))


def _settings(configs: list[dict[str, Any]]) -> list[str | None]:
    """The values in which each run differs from most runs: `loading=lazy batch_size=512`."""
    texts = [{name: _short(name, value) for name, value in config.items()} for config in configs]
    names = next((list(text) for text in texts if text), [])
    usual = {
        name: collections.Counter(text[name] for text in texts if name in text).most_common(1)[0] for name in names
    }
    number = sum(map(bool, texts))
    differing = [name for name in names if usual[name][1] < number]
    return [
        " ".join(f"{name}={text[name]}" for name in differing if text.get(name) != usual[name][0]) if text else None
        for text in texts
    ]


def _short(name: str, value: object) -> str:
    return os.path.basename(str(value)) if name in ("dataset", "data_dir") else str(value).replace(" ", "")


def _row(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table's values of one run, and its config in JSON's types (empty without one)."""
    import pandas as pd

    from ..errors import GB, InputError
    from .folder import Run

    run = Run(folder)
    row: dict[str, Any] = {}
    config: dict[str, Any] = {}
    with contextlib.suppress(InputError):  # of a watched command, or of another version
        config = run.config.model_dump(mode="json")
    try:
        row["when"] = pd.Timestamp(run.events[0]["time_s"], unit="s").round("s") if run.events else pd.NaT
        starts = [event for event in run.events if event["event"] == "start"]
        results = [result for event in starts if isinstance(result := event.get("previous"), dict)]
        earlier = [took_s for result in results if isinstance(took_s := result.get("duration_s"), int | float)]
        command = starts[-1].get("command", []) if starts else []
        row |= {
            "ended": run.state,
            "peak GB": round(run.held_peak_bytes / GB, 3),
            "run s": round(sum(earlier) + (run.result or {"duration_s": run.record.duration_s})["duration_s"], 1),
            "command": " ".join([os.path.basename(command[0]), *command[1:]]) if command else None,
        }
        if len(metrics := run.metrics):
            row["epochs"] = len(metrics)
            if metrics["valid"].notna().any():
                best = metrics.loc[metrics["valid"].idxmax()]
                row |= {"best valid": best["valid"], "test at best": best["test"]}
    except InputError as error:
        row["ended"] = f"damaged: {error}"
    return row, config
