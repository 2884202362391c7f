"""Promises of `checks`: what is not finite is found, whatever it is cast to."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from ogbnlib.graph.checks import FiniteCheck


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("given", ["float16", "float32"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_found_by_its_row(given: str, dtype: str, bad: float) -> None:
    check, values = FiniteCheck(dtype), np.ones((3, 2), given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(values, 0)
        assert check.problem() is None
        values[1, 0] = bad
        check(values, 3)
    assert "found 1 NaN or Inf, the first in row 4" in str(check.problem())
