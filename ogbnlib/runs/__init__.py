"""A run, its folder, and what ended it. Called, this room is the table of all runs below a folder: `runs("runs/")`."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class _Room(types.ModuleType):
    def __call__(self, folder: str | os.PathLike[str] = "runs") -> pd.DataFrame:
        """All runs below `folder`, the oldest first: one row each, by its path from the working folder.

        Columns: `when` it began, `ended` how, `peak GB` of anonymous + shared memory, `run s` in all attempts,
        `epochs`, `best valid` accuracy and `test at best`, in the same epoch, the `command` of a watched one, and
        `settings`: the values of its config that not all runs have, without those that most of them have. What a run
        has not is NaN; `ended` says so of a damaged one. `compare_runs` and plots take the rows' names.

        Raises:
            InputError: when there is no such folder.
        """
        import pandas as pd

        from ..errors import InputError
        from ..files import home, whereabouts
        from ..memory.recorder import EVENTS
        from .folder import CONFIG

        root = home(folder)
        if not root.is_dir():
            found = "a file" if root.exists() else f"none{whereabouts(root)}"
            raise InputError(f"{folder}: expected a folder of runs, found {found}")
        root = Path(os.path.abspath(root))
        root = root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else root
        rows, configs = {}, {}
        for place, inside, files in os.walk(root):
            if CONFIG in files or EVENTS in files:
                name = os.path.normpath(place)
                rows[name], configs[name] = _row(place)
                inside.clear()
        columns = ["when", "ended", "peak GB", "run s", "epochs", "best valid", "test at best", "command"]
        table = pd.DataFrame(list(rows.values()), pd.Index(rows, name="run"), columns)
        table["settings"] = _settings([*configs.values()])

        class Table(pd.DataFrame):  # type: ignore[misc]
            def _repr_html_(self) -> str | None:
                with pd.option_context("display.max_colwidth", None):  # settings are read to their end
                    text: str | None = super()._repr_html_()
                return text

        return Table(table.sort_values("when", kind="stable").dropna(axis="columns", how="all"))


def _settings(configs: list[dict[str, Any]]) -> list[str | None]:
    """What sets each run apart from most of them: `loading=lazy batch_size=512`."""
    texts = [{name: _short(name, value) for name, value in config.items()} for config in configs]
    names = next((list(text) for text in texts if text), [])
    usual = {
        name: collections.Counter(text[name] for text in texts if name in text).most_common(1)[0] for name in names
    }
    number = sum(map(bool, texts))
    apart = [name for name in names if usual[name][1] < number]
    return [
        " ".join(f"{name}={text[name]}" for name in apart if text.get(name) != usual[name][0]) if text else None
        for text in texts
    ]


def _short(name: str, value: object) -> str:
    return os.path.basename(str(value)) if name in ("dataset", "data_dir") else str(value).replace(" ", "")


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
        before = [one for event in starts if isinstance(one := event.get("previous"), dict)]
        earlier = [took for one in before if isinstance(took := one.get("duration_s"), int | float)]
        row |= {
            "ended": run.state,
            "peak GB": round(run.held_peak_bytes / GB, 3),
            "run s": round(sum(earlier) + (run.result or {"duration_s": run.tally.duration_s})["duration_s"], 1),
            "command": _shown(starts[-1].get("command", [])) if starts else None,
        }
        if len(metrics := run.metrics):
            row["epochs"] = len(metrics)
            if metrics["valid"].notna().any():
                best = metrics.loc[metrics["valid"].idxmax()]
                row |= {"best valid": best["valid"], "test at best": best["test"]}
    except InputError as error:
        row["ended"] = f"damaged: {error}"
    return row, config


sys.modules[__name__].__class__ = _Room
