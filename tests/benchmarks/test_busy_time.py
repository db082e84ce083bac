"""Spans of time: sums count each moment once, overlaps are what both have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.busy_time import merge, overlap_s, total_s

MOMENTS = st.integers(min_value=0, max_value=40)
SPANS = st.lists(
    st.tuples(MOMENTS, MOMENTS).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=6
)


def moments(spans: list[tuple[float, float]]) -> set[int]:
    """The whole seconds that lie in one of the spans."""
    return {at for start_s, end_s in spans for at in range(int(start_s), int(end_s))}


@given(spans=SPANS, others=SPANS)
def test_sums_and_overlaps_count_each_moment_once(
    spans: list[tuple[float, float]], others: list[tuple[float, float]]
) -> None:
    assert total_s(spans) == len(moments(spans))
    assert overlap_s(spans, others) == pytest.approx(len(moments(spans) & moments(others)))


def test_spans_that_touch_become_one() -> None:
    assert merge([(3.0, 4.0), (1.0, 3.0), (6.0, 6.0)]) == [(1.0, 4.0)]
