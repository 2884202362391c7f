"""A run, its folder, and what ended it. Called, this room is the table of all runs below a folder: `runs("runs/")`."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class _Room(types.ModuleType):
    def __call__(self, folder: str | os.PathLike[str] = "runs") -> pd.DataFrame:
        """All runs below `folder`, the oldest first: one row each, by its folder, which `compare_runs` and plots take.

        Columns: `when` it began, `ended` how, `peak GB` of anonymous + shared memory, `run s` in all attempts,
        `epochs`, `valid` and `test` in the epoch of the best valid accuracy, the `command` of a watched one, and each
        value of the config in which the runs differ. What a run has not is NaN; `ended` says so of a damaged one.

        Raises:
            InputError: when there is no such folder.
        """
        import pandas as pd

        from ..errors import InputError
        from ..files import home
        from ..memory.recorder import EVENTS
        from .folder import CONFIG

        root = home(folder)
        if not root.is_dir():
            raise InputError(f"{folder}: expected a folder of runs, found {'a file' if root.exists() else 'none'}")
        rows, configs = {}, {}
        for place, inside, files in os.walk(root):
            if CONFIG in files or EVENTS in files:
                rows[place], configs[place] = _row(place)
                inside.clear()
        columns = ["when", "ended", "peak GB", "run s", "epochs", "valid", "test", "command"]
        table = pd.DataFrame(list(rows.values()), pd.Index(rows, name="run"), columns)
        known = [config for config in configs.values() if config]
        for name in known[0] if known else ():
            if any(config.get(name) != known[0][name] for config in known):
                table[name] = [config.get(name) for config in configs.values()]
        return table.sort_values("when", kind="stable").dropna(axis="columns", how="all")


def _shown(command: list[str]) -> str | None:
    """A command without where its interpreter lies."""
    return " ".join([os.path.basename(command[0]), *command[1:]]) if command else None


def _row(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the table says of one run, and its config as JSON has it, empty where it has none."""
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
        earlier = [before.get("duration_s", 0.0) for e in starts if isinstance(before := e.get("previous"), dict)]
        row |= {
            "ended": run.state,
            "peak GB": round(run.held_peak_bytes / GB, 3),
            "run s": round(sum(earlier) + (run.result or {"duration_s": run.tally.duration_s})["duration_s"], 1),
            "command": _shown(starts[-1].get("command", [])) if starts else None,
        }
        if len(metrics := run.metrics):
            row["epochs"] = len(metrics)
            if metrics["valid"].notna().any():
                row |= metrics.loc[metrics["valid"].idxmax(), ["valid", "test"]].to_dict()
    except InputError as error:
        row["ended"] = f"damaged: {error}"
    return row, config


sys.modules[__name__].__class__ = _Room
