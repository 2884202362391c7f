"""Promises of `verdicts`: a consequence is drawn only from a measurement that carries it."""

import math

from ogbnlib.notebook import verdicts

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
