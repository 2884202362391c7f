"""The table that ends a notebook: what people say, what was measured here, and what follows."""

import re
from collections.abc import Mapping

import pandas as pd

from ..errors import printable


def finding(measured: str, carries: bool | None, so: str) -> tuple[str, str]:
    """Return a measurement and what follows from it, a sentence each.

    A measurement with a NaN in it is "not measured here".

    Args:
        carries: Whether the measurement carries the consequence; None if noise hides the answer.
        so: The consequence.
    """
    if re.search(r"\bnan\b", measured):  # such as the figures of a GPU without one
        return "No figure here.", "Not measured here."
    if carries is None:
        return measured, "Undecided here."
    return measured, so if carries else "Not so here."


def table(findings: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """Return the table of claims; `findings` maps each claim to its `finding`."""
    rows = [(claim, *texts) for claim, texts in findings.items()]
    return _Table(rows, columns=["You may have heard", "Measured here", "So"])


class _Table(pd.DataFrame):  # type: ignore[misc]
    """Table that prints and shows its texts in full."""

    def __repr__(self) -> str:
        # three lines for each row: the claim, then indented the measurement and the verdict
        return "\n".join(printable("\n    ".join(texts)) for texts in self.to_numpy())

    def _repr_html_(self) -> str:
        align = {"text-align": "left", "vertical-align": "top"}
        styles = [{"selector": "th", "props": list(align.items())}]  # also for the head
        style = self.map(printable).style.format(escape="html").hide(axis="index")
        style = style.set_properties(**align).set_table_styles(styles)
        return str(style.set_table_attributes('class="verdicts"').to_html())
