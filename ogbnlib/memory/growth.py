"""Whether the memory in use climbs from epoch to epoch."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ..errors import MB


@dataclass(frozen=True)
class Growth:
    """Whether the memory in use climbs from epoch to epoch."""

    # "climbs" (steadily, as a leak does), "no steady climb", or "too few epochs" (below 5)
    verdict: str
    slope_bytes: float  # per epoch, over the last two thirds: the first third fills caches
    epochs: int
    first_bytes: int  # after the first epoch
    last_bytes: int  # after the last epoch

    @classmethod
    def of(cls, levels: Sequence[int]) -> Self:
        """Judge by the memory in use after each epoch, in bytes.

        From 200 epochs on, slope and verdict use only evenly spaced ones.
        """
        stride = len(levels) // 200 + 1  # at most 200 sizes, because `_climb` takes all pairs
        sizes = levels[::stride]
        slope, climbs = _climb(sizes[len(sizes) // 3 :])  # without the first third
        verdict = "climbs" if climbs else "no steady climb"
        if len(levels) < 5:
            verdict = "too few epochs"
        # the slope is in bytes per used epoch: divide it by the epochs from one to the next
        return cls(verdict, slope / stride, len(levels), levels[0], levels[-1])


def _climb(sizes: Sequence[int]) -> tuple[float, bool]:
    """Return the slope of sizes (bytes per step from one to the next), and whether it is a leak's."""

    def pair_slopes(part: Sequence[int]) -> list[float]:
        pairs = itertools.combinations(enumerate(part), 2)
        return [(late - early) / (j - i) for (i, early), (j, late) in pairs] or [0.0]  # one size

    # In a leak, at least 85 % of all pairs rise, the total rise is more than 8 MB and 1 %, and the
    # second half is hardly slower than the first. A leak keeps its slope, while a warm-up such as
    # 1 - exp(-t) or log(t) has at most 0.6 of it in the second half.
    half = len(sizes) // 2
    slopes = pair_slopes(sizes)
    # the median slope of all pairs (Theil-Sen estimator): one spike must not change the verdict
    slope = statistics.median(slopes)
    first = statistics.median(pair_slopes(sizes[: half + 1]))
    second = statistics.median(pair_slopes(sizes[half:]))
    most_rise = sum(each > 0 for each in slopes) >= 0.85 * len(slopes)
    is_large = slope * (len(sizes) - 1) > max(8 * MB, 0.01 * sizes[0])
    return slope, most_rise and is_large and second >= 0.7 * first
