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

GRID = [(q, c, 1) for q in (128, 256, 512, 1024, 2048) for c in (0, 1024, 4096, 16_384)]
GRID += [(1, 130, sequences) for sequences in (1, 2, 4, 8)]

coefficient = st.just(0.0) | st.floats(1e-3, 1)


def measure(cost: PrefillCost, noise: np.random.Generator | None = None) -> list[Sample]:
    factors = 1 + (noise.uniform(-0.1, 0.1, len(GRID)) if noise else np.zeros(len(GRID)))
    return [
        Sample(q, c, cost_of(cost, q, c, n) * float(factor), n)
        for (q, c, n), factor in zip(GRID, factors, strict=True)
    ]


def cost_of(cost: PrefillCost, tokens: int, cached_tokens: int, sequences: int) -> float:
    """Of a pass of several sequences, written out."""
    further_s = sum(cost.a4_s + cost.added_s(tokens, cached_tokens) for _ in range(sequences - 1))
    return cost.cost_s(tokens, cached_tokens) + further_s


@given(coefficient, st.floats(1e-3, 1), coefficient, coefficient, coefficient)
@settings(max_examples=50)
def test_fit_finds_the_cost_that_made_exact_times(
    a0: float, a1: float, a2: float, a3: float, a4: float
) -> None:
    cost = PrefillCost(a0_s=a0, a1_s=a1 * 1e-3, a2_s=a2 * 1e-7, a3_s=a3 * 1e-7, a4_s=a4)
    fit = fit_cost(measure(cost))
    assert fit.residual_max < 1e-6
    for q, c in ((300, 70), (10_000, 0), (128, 60_000)):
        assert fit.cost.cost_s(q, c) == pytest.approx(cost.cost_s(q, c), rel=1e-5)
    assert fit.cost.a4_s == pytest.approx(cost.a4_s, rel=1e-5, abs=1e-9)


def test_sequences_that_run_one_by_one_cost_as_much_each_as_a_pass() -> None:
    cost = PrefillCost(a0_s=0.02, a1_s=1e-4, a2_s=1e-9, a3_s=5e-10, a4_s=0.02)
    fit = fit_cost(measure(cost, np.random.default_rng(3)))
    assert fit.cost.a4_s == pytest.approx(0.02, rel=0.2)


def test_term_for_further_sequences_is_0_where_no_pass_had_several() -> None:
    samples = measure(PrefillCost(0.02, 1e-4, 0.0, 0.0, 0.02))
    fit = fit_cost([sample for sample in samples if sample.sequences == 1])
    assert fit.cost.a4_s == 0
    assert fit.cost.a0_s == pytest.approx(0.02)


def test_fit_of_noisy_times_has_no_negative_coefficient_and_says_how_far_off_it_is() -> None:
    cost = PrefillCost(a0_s=0.0, a1_s=1e-4, a2_s=0.0, a3_s=0.0)
    for seed in range(20):
        samples = measure(cost, np.random.default_rng(seed))
        fit = fit_cost(samples)
        found = fit.cost
        assert min(found.a0_s, found.a1_s, found.a2_s, found.a3_s, found.a4_s) >= 0
        off = [abs(costs_now(found, sample) / sample.took_s - 1) for sample in samples]
        assert fit.residual_max == pytest.approx(max(off))
        assert fit.residual_median == pytest.approx(np.median(off))
        assert fit.residual_median <= fit.residual_p90 <= fit.residual_max < 0.25


def costs_now(cost: PrefillCost, sample: Sample) -> float:
    return cost_of(cost, sample.tokens, sample.cached_tokens, sample.sequences)


def test_fit_is_the_best_of_all_costs_nearby() -> None:
    samples = measure(PrefillCost(0.01, 1e-4, 1e-9, 5e-9, 5e-3), np.random.default_rng(7))

    def error(cost: PrefillCost) -> float:
        return sum((costs_now(cost, sample) / sample.took_s - 1) ** 2 for sample in samples)

    best = fit_cost(samples).cost
    values = (best.a0_s, best.a1_s, best.a2_s, best.a3_s, best.a4_s)
    for index, scale in enumerate((1e-3, 1e-6, 1e-11, 1e-11, 1e-4)):
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
        ([Sample(128, 0, 0.1)] * 4, "measured passes: given 4, expected 5 or more"),
        ([Sample(128, 0, 0.1)] * 5 + [Sample(128, 0, 0.0)], "measured pass: given 0.0"),
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
