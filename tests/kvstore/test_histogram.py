"""Histograms: every value in one bucket, whichever way it came in."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.histogram import AGE_BOUNDS_S, LATENCY_BOUNDS_S, Histogram, parse_counts

VALUES = st.lists(
    st.one_of(
        st.floats(-1.0, 1e7, allow_nan=False), st.sampled_from([*LATENCY_BOUNDS_S, *AGE_BOUNDS_S])
    ),
    max_size=50,
)
BOUNDS = st.sampled_from([LATENCY_BOUNDS_S, AGE_BOUNDS_S])


def count_by_hand(bounds_s: tuple[float, ...], values_s: list[float]) -> list[int]:
    edges = [-math.inf, *bounds_s, math.inf]
    return [sum(low < value <= high for value in values_s) for low, high in pairwise(edges)]


@given(bounds_s=BOUNDS, values_s=VALUES)
def test_values_are_counted_once_where_they_belong(
    bounds_s: tuple[float, ...], values_s: list[float]
) -> None:
    singly, together = Histogram(bounds_s), Histogram(bounds_s)
    for value in values_s:
        singly.add(value)
    together.add_many(np.array(values_s, np.float64))
    assert singly.counts == together.counts == count_by_hand(bounds_s, values_s)
    expected_s = sum(max(value, 0.0) for value in values_s)
    assert singly.sum_s == pytest.approx(expected_s)
    assert together.sum_s == pytest.approx(expected_s)


@given(first=VALUES, second=VALUES)
def test_merged_histogram_is_that_of_all_values(first: list[float], second: list[float]) -> None:
    one, other, both = Histogram(), Histogram(), Histogram()
    for histogram, values in ((one, first), (other, second), (both, first + second)):
        histogram.add_many(np.array(values, np.float64))
    one.merge(*parse_counts(json.loads(json.dumps(other.to_values())), len(other.counts)))
    assert one.counts == both.counts
    assert one.sum_s == pytest.approx(both.sum_s, abs=1e-5)


def test_bounds_ascend_and_are_what_other_processes_expect() -> None:
    for bounds_s in (LATENCY_BOUNDS_S, AGE_BOUNDS_S):
        assert list(bounds_s) == sorted(set(bounds_s))
        assert len(bounds_s) == 16
    assert (LATENCY_BOUNDS_S[0], LATENCY_BOUNDS_S[-1]) == (50e-6, 5.0)
    assert (AGE_BOUNDS_S[0], AGE_BOUNDS_S[-1]) == (60, 30 * 86400)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"counts": [1]},
        {"counts": [1, 2, 3]},
        {"counts": [1, -1]},
        {"counts": [1, 1.0]},
        {"counts": [True, 1]},
        {"counts": [1, 1 << 54]},
        {"counts": [1, 1], "sum_s": -1},
        {"counts": [1, 1], "sum_s": math.nan},
        {"counts": [1, 1], "sum_s": math.inf},
        {"counts": [1, 1], "sum_s": "1"},
    ],
)
def test_counts_are_refused_when_they_are_none(values: object) -> None:
    with pytest.raises(ValueError, match="histogram"):
        parse_counts(values, 2)
