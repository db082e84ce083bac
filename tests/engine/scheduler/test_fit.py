"""A fit finds the coefficients that made the times, and says how far off it is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.fit_cost import warn_of_company
from engine.scheduler.cost import PrefillCost
from engine.scheduler.fit import Sample, fit_cost

GRID = [(q, c) for q in (128, 256, 512, 1024, 2048) for c in (0, 1024, 4096, 16_384)]

coefficient = st.just(0.0) | st.floats(1e-3, 1)


def measure(cost: PrefillCost, noise: np.random.Generator | None = None) -> list[Sample]:
    factors = 1 + (noise.uniform(-0.1, 0.1, len(GRID)) if noise else np.zeros(len(GRID)))
    return [
        Sample(q, c, cost.cost_s(q, c) * float(factor))
        for (q, c), factor in zip(GRID, factors, strict=True)
    ]


@given(coefficient, st.floats(1e-3, 1), coefficient, coefficient)
@settings(max_examples=50)
def test_fit_finds_the_cost_that_made_exact_times(
    a0: float, a1: float, a2: float, a3: float
) -> None:
    cost = PrefillCost(a0_s=a0, a1_s=a1 * 1e-3, a2_s=a2 * 1e-7, a3_s=a3 * 1e-7)
    fit = fit_cost(measure(cost))
    assert fit.residual_max < 1e-6
    for q, c in ((300, 70), (10_000, 0), (128, 60_000)):
        assert fit.cost.cost_s(q, c) == pytest.approx(cost.cost_s(q, c), rel=1e-5)


def test_fit_of_noisy_times_has_no_negative_coefficient_and_says_how_far_off_it_is() -> None:
    cost = PrefillCost(a0_s=0.0, a1_s=1e-4, a2_s=0.0, a3_s=0.0)
    for seed in range(20):
        samples = measure(cost, np.random.default_rng(seed))
        fit = fit_cost(samples)
        found = fit.cost
        assert min(found.a0_s, found.a1_s, found.a2_s, found.a3_s) >= 0
        off = [abs(found.cost_s(s.tokens, s.cached_tokens) / s.took_s - 1) for s in samples]
        assert fit.residual_max == pytest.approx(max(off))
        assert fit.residual_median == pytest.approx(np.median(off))
        assert fit.residual_median <= fit.residual_p90 <= fit.residual_max < 0.25


def test_fit_is_the_best_of_all_costs_nearby() -> None:
    samples = measure(PrefillCost(0.01, 1e-4, 1e-9, 5e-9), np.random.default_rng(7))

    def error(cost: PrefillCost) -> float:
        return sum((cost.cost_s(s.tokens, s.cached_tokens) / s.took_s - 1) ** 2 for s in samples)

    best = fit_cost(samples).cost
    values = (best.a0_s, best.a1_s, best.a2_s, best.a3_s)
    for index, scale in enumerate((1e-3, 1e-6, 1e-11, 1e-11)):
        for sign in (-1, 1):
            other = list(values)
            other[index] = max(other[index] + sign * scale, 0.0)
            assert error(PrefillCost(*other)) >= error(best)


def test_relative_errors_make_short_passes_count_as_much_as_long_ones() -> None:
    exact = measure(PrefillCost(0.01, 1e-4, 0.0, 0.0))
    longest = max(exact, key=lambda sample: sample.took_s)
    slowed = [
        s if s is not longest else Sample(s.tokens, s.cached_tokens, 2 * s.took_s) for s in exact
    ]
    fit = fit_cost(slowed)
    assert fit.residual_median < 0.1


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([Sample(128, 0, 0.1)] * 3, "measured passes: given 3, expected 4 or more"),
        ([Sample(128, 0, 0.1)] * 4 + [Sample(128, 0, 0.0)], "measured pass: given 0.0"),
    ],
)
def test_fit_refuses_what_tells_nothing(samples: list[Sample], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fit_cost(samples)


@pytest.mark.parametrize(("median", "lines"), [(0.2, 0), (0.21, 1)])
def test_times_that_fit_badly_are_told(median: float, lines: int) -> None:
    fit = replace(
        fit_cost(measure(PrefillCost(a0_s=0, a1_s=1e-3, a2_s=0, a3_s=0))), residual_median=median
    )
    assert len(warn_of_company(fit)) == lines
