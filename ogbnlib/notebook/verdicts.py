"""Verdict table: what is true, the belief that it corrects, the figure, and the verdict.

A missing figure (NaN) and the peak of a killed run count as "not measured"; a difference smaller
than the noise of the runs is "undecided here". The text of each figure states its tolerance.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from ..errors import format_bytes, printable
from ..forecast.fitting import FITS
from ..forecast.planner import Advice
from ..runs.folder import Run

_WORDS = {True: "true", False: "false", None: "not measured"}
# First word of a verdict -> background; the text is dark on each, also in a dark theme.
_COLOURS = {
    "true": "#a9dfb0",
    "half": "#f9dc8c",
    "false": "#f4b0a8",
    "undecided": "#c9d7ef",
    "not": "#d0d0d0",
}


class Finding(NamedTuple):
    """A measurement in words, and whether the belief holds: None if it was not measured, or if
    noise hides the answer."""

    measured: str
    holds: bool | None
    is_noise: bool = False

    @property
    def word(self) -> str:
        """The verdict on this finding, in words."""
        return "undecided here (noise)" if self.is_noise else _WORDS[self.holds]


class _VerdictTable(pd.DataFrame):  # type: ignore[misc]
    """Table with one row per belief, printed with its texts in full."""

    def __repr__(self) -> str:
        return "\n".join(
            printable(f'{row.finding}\n    "{row.belief}": {row.verdict}\n    {row.measured}')
            for row in self.itertuples()
        )

    def _repr_html_(self) -> str:
        align = {"text-align": "left", "vertical-align": "top"}
        styles = [{"selector": "th", "props": list(align.items())}]
        plain = self.map(printable).style.format(escape="html")
        style = plain.hide(axis="index").set_properties(**align).set_table_styles(styles)
        style = style.set_properties(subset=["finding"], **{"font-weight": "bold"})
        style = style.map(
            lambda word: (
                f"background-color: {_COLOURS[word.split()[0].rstrip(':')]}; color: #111111"
            ),
            ["verdict"],
        )
        return str(style.to_html())


def table(
    beliefs: Mapping[str | tuple[str, str], Finding | Mapping[str, Finding]],
) -> _VerdictTable:
    """Return a table with the columns finding, belief, measured and verdict.

    Args:
        beliefs: Maps each belief to its finding. A key may be a pair: the belief, and the sentence
            that is true if the belief is false or only partly true. A belief with several named
            findings is "half true" if only some of them are true. A finding without an answer does
            not hide the answers of the others.
    """
    rows = []
    for key, finding in beliefs.items():
        belief, instead = (key, f"Not so: {key}") if isinstance(key, str) else key
        parts = {"": finding} if isinstance(finding, Finding) else finding
        texts = [": ".join(filter(None, [name, part.measured])) for name, part in parts.items()]
        truth = _truth(belief, instead, parts)
        rows.append((truth, belief, "; ".join(texts), _verdict(parts)))
    return _VerdictTable(rows, columns=["finding", "belief", "measured", "verdict"])


def _verdict(parts: Mapping[str, Finding]) -> str:
    names: dict[str, list[str]] = {}
    for name, part in sorted(parts.items(), key=lambda item: item[1].holds is None):
        names.setdefault(part.word, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    if names.keys() >= {"true", "false"}:
        return f"half true: {', '.join(f'{name} {part.word}' for name, part in parts.items())}"
    return "; ".join(f"{word}: {', '.join(names[word])}" for word in names)


def _truth(belief: str, instead: str, parts: Mapping[str, Finding]) -> str:
    answers = {part.holds for part in parts.values()}
    if False in answers:
        return instead
    if True not in answers:
        is_noise = any(part.is_noise for part in parts.values())
        return "The noise is larger than the difference" if is_noise else "Not measured here"
    true = ", ".join(name for name, part in parts.items() if part.holds)
    scope = f" (as far as measured: {true})" if None in answers else ""
    return belief[0].upper() + belief[1:] + scope


def not_measured(reason: str) -> Finding:
    """Return a finding without a figure, such as `not_measured("needs a GPU")`."""
    return Finding(reason, None)


def at_least(value: float, threshold: float, text: str = "{:.3g}") -> Finding:
    """Check that a figure reaches a threshold; `text` formats the figure, as in "{:.0%} of the
    time"."""
    return _compared(value, value >= threshold, text, "true from {} on", threshold)


def at_most(value: float, threshold: float, text: str = "{:.3g}") -> Finding:
    """Check that a figure does not exceed a threshold."""
    return _compared(value, value <= threshold, text, "true up to {}", threshold)


def close_to(value: float, expected: float, text: str = "{:.3g}", by: float = 0.1) -> Finding:
    """Check that a figure differs from the expected one by at most the share `by`."""
    is_close = abs(value / expected - 1) <= by
    return _compared(value, is_close, text, f"true within {by:.0%} of {{}}", expected)


def _compared(figure: float, holds: bool, text: str, tolerance: str, bound: float) -> Finding:
    if math.isnan(figure):
        return not_measured("no figure here")
    bare = re.sub(r".*?({[^}]*}).*", r"\1", text)
    return Finding(f"{text.format(figure)} ({tolerance.format(bare.format(bound))})", bool(holds))


def lower_peak(baseline: Run, changed: Run, by: float = 0.02) -> Finding:
    """Check that the peak memory fell by the share `by` or more; the peaks of equal runs differ by
    less than 2 %."""
    is_lower = changed.held_peak_bytes <= (1 - by) * baseline.held_peak_bytes
    return _peaks(baseline, changed, is_lower, f"true from {by:.0%} less on")


def higher_peak(baseline: Run, changed: Run, by_bytes: float) -> Finding:
    """Check that the peak memory rose by `by_bytes` or more."""
    is_higher = changed.held_peak_bytes - baseline.held_peak_bytes >= by_bytes
    return _peaks(baseline, changed, is_higher, f"true from {format_bytes(int(by_bytes))} more on")


def _peaks(baseline: Run, changed: Run, holds: bool, tolerance: str) -> Finding:
    unfinished = {run.run_dir.name: run for run in (baseline, changed) if run.exit_code != 0}
    if unfinished:
        return not_measured(finished(unfinished).measured)
    peaks = (
        f"from {format_bytes(baseline.held_peak_bytes)} to {format_bytes(changed.held_peak_bytes)}"
    )
    return Finding(f"{peaks} ({tolerance})", holds)


def finished(runs: Mapping[str, Run]) -> Finding:
    """Check that at least one of the runs finished; not measured if no run got as far as its
    data."""
    ends = {name: _end(run) for name, run in runs.items()}
    measured = ", ".join(f"{name} {end}" for name, end in ends.items())
    if "finished" in ends.values():
        return Finding(measured, True)
    if any(run.has_loaded for run in runs.values()):
        return Finding(measured, False)
    return not_measured(measured)


def _end(run: Run) -> str:
    if not run.exit_code:
        return run.state
    if run.has_loaded:
        return f"exit code {run.exit_code}"
    return f"exit code {run.exit_code} before it loaded data"


def killed(runs: Mapping[str, Run]) -> Finding:
    """Check that none of the runs finished; not measured if no run got as far as its data."""
    finding = finished(runs)
    return finding._replace(holds=None if finding.holds is None else not finding.holds)


def fits(plans: Mapping[str, Advice]) -> Finding:
    """Check that at least one of the forecasts fits its limit."""
    needs = [
        f"{name} needs {format_bytes(plan.forecast.peak_bytes)}" for name, plan in plans.items()
    ]
    limits = {format_bytes(plan.limit_bytes) for plan in plans.values()}
    return Finding(
        f"by forecast {', '.join(needs)}; limit {', '.join(limits)}",
        FITS in [plan.verdict for plan in plans.values()],
    )


def losses_differ(runs: Mapping[str, Run]) -> Finding:
    """Check that the losses of the finished runs differ in any digit."""
    losses = {name: tuple(run.metrics["loss"]) for name, run in runs.items() if run.exit_code == 0}
    texts = [f"{name} {series[-1]:.6f}" for name, series in losses.items()]
    measured = f"last loss {', '.join(texts)}"
    if len(losses) < 2:
        return not_measured(measured)
    return Finding(measured, len(set(losses.values())) > 1)


def takes_at_most(epochs_s: Sequence[float], baseline_s: Sequence[float], factor: float) -> Finding:
    """Check that epochs of `epochs_s` seconds take at most `factor` times as long as epochs of
    `baseline_s` seconds.

    The figure is the ratio of the medians. Each epoch is also compared with each epoch of the
    baseline. If fewer than 9 of 10 pairs give the same answer, the noise is larger than the
    difference.
    """
    ratios = sorted(
        epoch_s / baseline_epoch_s for epoch_s in epochs_s for baseline_epoch_s in baseline_s
    )
    if not ratios:
        return not_measured("no figure here")
    share = sum(ratio <= factor for ratio in ratios) / len(ratios)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f} by pairs of epochs; true up to {factor:g}"
    ratio = statistics.median(epochs_s) / statistics.median(baseline_s)
    measured = f"{ratio:.2f} times as long ({spread})"
    if 0.1 < share < 0.9:
        return Finding(measured, None, is_noise=True)
    return Finding(measured, share >= 0.9)


def as_accurate(accuracy: float, baseline: float, num_nodes: int) -> Finding:
    """Check that `accuracy` is not below `baseline`; undecided within two standard errors of
    the difference."""
    # the standard error of the difference of two binomial shares
    error = math.sqrt((accuracy * (1 - accuracy) + baseline * (1 - baseline)) / num_nodes)
    measured = f"{accuracy:.3f} against {baseline:.3f}, one run each; decided from {2 * error:.3f} apart on"
    if abs(accuracy - baseline) <= 2 * error:
        return Finding(measured, None, is_noise=True)
    return Finding(measured, accuracy > baseline)
