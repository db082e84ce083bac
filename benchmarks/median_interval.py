"""Medians and ratios, with how far they can be trusted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
TABLE_RESAMPLES = 1_000

FloatTable = NDArray[np.float64]


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


def describe_ratio(name: str, above: FloatTable, below: FloatTable) -> dict[str, float]:
    """The ratio of two sums of medians over rounds, [rounds, steps] each, and its interval of 95 %.

    Rounds are resampled in pairs: what a round of one is beside the same round of the other.
    """
    rounds = len(above)
    rng = np.random.default_rng(1)
    drawn = [rng.integers(rounds, size=rounds) for _ in range(TABLE_RESAMPLES)]
    low, high = np.percentile([_ratio(above[some], below[some]) for some in drawn], (2.5, 97.5))
    return {
        name: round(_ratio(above, below), 4),
        f"{name}_low": round(float(low), 4),
        f"{name}_high": round(float(high), 4),
    }


def _ratio(above: FloatTable, below: FloatTable) -> float:
    return float(np.median(above, axis=0).sum() / np.median(below, axis=0).sum())
