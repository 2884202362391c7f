"""A belief, what was measured of it, and whether it holds: the rows of a ledger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, ParamSpec, TypeAlias

import pandas as pd

from ..runs.folder import Run

HOLDS, DOES_NOT_HOLD, NOT_MEASURED = "holds", "does not hold", "not measured"
Given = ParamSpec("Given")
Judged: TypeAlias = tuple[str, bool | str]  # what was measured, and whether the belief holds


class Belief(NamedTuple):
    """`verdict` begins with "holds", "does not hold", "half true" or "not measured"."""

    belief: str
    measured: str
    verdict: str


class Ledger(pd.DataFrame):  # type: ignore[misc]
    """Beliefs beside measurements and verdicts, a row each; shown with their whole texts."""

    def __repr__(self) -> str:
        return "\n".join(f"{row.believed}: {row.verdict}\n    {row.measured}" for row in self.itertuples())

    def _repr_html_(self) -> str:
        left = {"text-align": "left", "vertical-align": "top"}
        styles = [{"selector": "th", "props": list(left.items())}]
        return str(self.style.hide(axis="index").set_properties(**left).set_table_styles(styles).to_html())


def ledger(*beliefs: Belief) -> Ledger:
    return Ledger(beliefs, columns=["believed", "measured", "verdict"])


def judged(text: str, *, of_killed: bool = False) -> Callable[[Callable[Given, Judged]], Callable[Given, Belief]]:
    """Turns (measured, whether it holds) into a `Belief`; a run that did not finish measures nothing.

    Args:
        of_killed: The function is about runs that may have been killed, and sees them.
    """

    def decorate(judge: Callable[Given, Judged]) -> Callable[Given, Belief]:
        @functools.wraps(judge)
        def belief(*args: Given.args, **kwargs: Given.kwargs) -> Belief:
            runs = [value for value in (*args, *kwargs.values()) if isinstance(value, Run)]
            if not of_killed and (ended := {run.run_dir.name: run for run in runs if run.exit_code != 0}):
                return Belief(text, ends(ended), NOT_MEASURED)
            measured, holds = judge(*args, **kwargs)
            return Belief(text, measured, holds if isinstance(holds, str) else HOLDS if holds else DOES_NOT_HOLD)

        return belief

    return decorate


def ends(runs: Mapping[str, Run]) -> str:
    fates = {name: "finished" if run.exit_code == 0 else f"exit code {run.exit_code}" for name, run in runs.items()}
    return ", ".join(f"{name}: {fate}" for name, fate in fates.items())
