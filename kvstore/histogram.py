"""Histograms with fixed bounds: how often something took how long. Pure.

For figures that two processes add up, so the bounds never depend on what was measured. It is no
store of samples: a quantile can only be told to the width of a bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# fmt: off
LATENCY_BOUNDS_S = (
    50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3,
    20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1.0, 2.0, 5.0,
)
"""Upper bounds of the buckets of a latency in seconds; one more bucket has what is above."""
AGE_BOUNDS_S = (
    60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 2 * 86400,
    3 * 86400, 4 * 86400, 5 * 86400, 7 * 86400, 10 * 86400, 14 * 86400, 21 * 86400, 30 * 86400,
)
"""The same for the time since a block was last used."""
# fmt: on

COUNT_MAX = 1 << 53
"""No count that comes from outside is larger: JSON has no whole numbers beyond that everywhere."""


class Histogram:
    """Counts by bucket: `counts[i]` values were at most `bounds_s[i]` and above the one before.

    `counts` has one entry more than `bounds_s`. Values below 0 count as 0.
    """

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self.bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds_s, value_s)] += 1
        self.sum_s += max(value_s, 0.0)

    def add_many(self, values_s: NDArray[Any]) -> None:
        """Count each of `values_s`, numbers of any dtype and shape (n,)."""
        buckets = np.searchsorted(self.bounds_s, values_s, side="left")
        added = np.bincount(buckets, minlength=len(self.counts)).tolist()
        self.counts = [a + b for a, b in zip(self.counts, added, strict=True)]
        self.sum_s += float(np.maximum(values_s, 0).sum())

    def merge(self, counts: Sequence[int], sum_s: float) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.sum_s += sum_s

    def to_values(self) -> dict[str, Any]:
        """As STAT shows it: bounds_s, counts and sum_s, for `json`."""
        return {
            "bounds_s": list(self.bounds_s),
            "counts": list(self.counts),
            "sum_s": round(self.sum_s, 6),
        }


def parse_counts(values: object, buckets: int) -> tuple[list[int], float]:
    """The counts and the sum of a histogram that another process sent without its bounds.

    ValueError unless it is a mapping with `counts`, a list of `buckets` whole numbers, and perhaps
    `sum_s`, none of them negative or above COUNT_MAX.
    """
    if not isinstance(values, Mapping):
        raise ValueError("a histogram is not an object")
    counts, sum_s = values.get("counts"), values.get("sum_s", 0.0)
    if not isinstance(counts, list) or len(counts) != buckets:
        raise ValueError(f"counts of a histogram: expected a list of {buckets}")
    if not all(type(count) is int and 0 <= count <= COUNT_MAX for count in counts):
        raise ValueError("counts of a histogram: expected whole numbers that are not negative")
    if type(sum_s) not in (int, float) or not 0 <= sum_s <= COUNT_MAX:
        raise ValueError("sum_s of a histogram: expected a number that is not negative")
    return counts, float(sum_s)
