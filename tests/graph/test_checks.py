"""Promises of `checks`: what is not finite is found, whatever it is cast to."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from ogbnlib.errors import InputError
from ogbnlib.graph.checks import finite


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("given", ["float16", "float32"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_found_by_its_row(given: str, dtype: str, bad: float) -> None:
    sound, values = np.ones((3, 2), given), np.ones((3, 2), given)
    values[1, 0] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [chunk.dtype for chunk in finite([sound], dtype, "x")] == [dtype]
        with pytest.raises(InputError, match=r"x: .* found 1 NaN or Inf, the first in row 4"):
            list(finite([sound, values], dtype, "x"))
