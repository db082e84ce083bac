"""Medians of ratios, with how far they can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % of the median, by resampling the values."""
    drawn = np.random.default_rng(1).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


def describe_median(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median and its interval, as fields of a line of figures."""
    low, high = interval_of_median(values)
    return {
        name: round(statistics.median(values), 4),
        f"{name}_low": round(low, 4),
        f"{name}_high": round(high, 4),
    }
