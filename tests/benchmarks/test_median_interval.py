"""Ratios of times of which some are much too long."""

import numpy as np
import pytest

from benchmarks.median_interval import describe_ratio

ROUNDS, STEPS = 40, 10


@pytest.mark.parametrize("slowed_by", [1.0, 1.02])
def test_ratio_is_of_typical_steps_and_lies_in_its_interval(slowed_by: float) -> None:
    rng = np.random.default_rng(5)
    below = rng.uniform(1.0, 1.01, (ROUNDS, STEPS)) * np.arange(1, STEPS + 1)
    above = slowed_by * rng.uniform(1.0, 1.01, (ROUNDS, STEPS)) * np.arange(1, STEPS + 1)
    # A machine that stands still for a while: in one round of eight, in any step.
    above[::8] += rng.uniform(0, 50, (ROUNDS // 8, STEPS))
    found = describe_ratio("of", above, below)
    assert found["of"] == pytest.approx(slowed_by, abs=0.003)
    assert found["of_low"] <= found["of"] <= found["of_high"]
    assert found["of_high"] - found["of_low"] < 0.01


def test_ratio_of_equal_times_is_one() -> None:
    times = np.random.default_rng(5).uniform(1, 2, (ROUNDS, STEPS))
    assert set(describe_ratio("of", times, times).values()) == {1.0}
