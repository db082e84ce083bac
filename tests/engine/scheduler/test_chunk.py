"""The chunk of a step is the largest that its budget pays for, in whole blocks, and never starves.

The closed form is held against two other ways to find the same number, and against the figures
that follow from a published prefill curve.
"""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.scheduler.chunk import affordable_tokens, choose_chunk_tokens
from engine.scheduler.cost import PrefillCost

BLOCK = 128
MILLION = 1 << 20

PUBLISHED = PrefillCost(a0_s=23.7e-3, a1_s=10.8e-6, a2_s=2e-11, a3_s=1e-11)
"""Slope and base of the curve 4K tokens -> 68 ms, 64K -> 732 ms; a2 is a guess at what attention
costs on such a machine, a3 = a2 / 2 for causal attention."""

costs = st.builds(
    PrefillCost,
    a0_s=st.floats(0, 1),
    a1_s=st.just(0.0) | st.floats(1e-9, 1e-1),
    a2_s=st.just(0.0) | st.floats(1e-15, 1e-5),
    a3_s=st.just(0.0) | st.floats(1e-15, 1e-5),
)
budgets_s = st.just(0.0) | st.floats(1e-9, 100) | st.floats(-1, 0)


def by_bisection(cost: PrefillCost, budget_s: float, cached: int, tokens_max: int) -> int:
    low, high = 0, tokens_max + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost.added_s(middle, cached) <= budget_s else (low, middle)
    return low


@given(costs, budgets_s, st.integers(0, MILLION), st.integers(1, MILLION))
def test_closed_form_finds_what_bisection_finds(
    cost: PrefillCost, budget_s: float, cached: int, tokens_max: int
) -> None:
    found = affordable_tokens(cost, budget_s, cached_tokens=cached, tokens_max=tokens_max)
    assert found == by_bisection(cost, budget_s, cached, tokens_max)


@given(costs, budgets_s, st.integers(0, 2000), st.integers(1, 300))
def test_closed_form_finds_what_trying_every_number_finds(
    cost: PrefillCost, budget_s: float, cached: int, tokens_max: int
) -> None:
    paid = [q for q in range(1, tokens_max + 1) if cost.added_s(q, cached) <= budget_s]
    found = affordable_tokens(cost, budget_s, cached_tokens=cached, tokens_max=tokens_max)
    assert found == max(paid, default=0)


@given(costs, st.integers(0, MILLION), st.integers(1, MILLION))
def test_budget_that_pays_exactly_for_a_number_gives_that_number(
    cost: PrefillCost, cached: int, tokens: int
) -> None:
    budget_s = cost.added_s(tokens, cached)
    assume(cost.added_s(tokens + 1, cached) > budget_s)
    found = affordable_tokens(cost, budget_s, cached_tokens=cached, tokens_max=2 * MILLION)
    assert found == tokens


@pytest.mark.parametrize(
    ("cached", "tokens"), [(0, 16_085), (65_536, 14_386), (131_072, 13_010), (524_288, 8_251)]
)
def test_chunks_of_a_long_request_get_smaller_as_published(cached: int, tokens: int) -> None:
    budget_s = 0.2 - PUBLISHED.a0_s
    found = affordable_tokens(PUBLISHED, budget_s, cached_tokens=cached, tokens_max=MILLION)
    # The figures are rounded to the nearest, the chunk is what is paid for in full.
    assert tokens - 1 <= found <= tokens
    assert PUBLISHED.cost_s(found, cached) <= 0.2 < PUBLISHED.cost_s(found + 1, cached)


def test_cost_through_the_ends_of_the_published_curve_gives_its_middle() -> None:
    cost = PrefillCost(a0_s=23.73e-3, a1_s=10.807e-6, a2_s=0.0, a3_s=0.0)
    lengths = [4096 * 2**n for n in range(5)]
    rates = [n / cost.cost_s(n, 0) / 1e3 for n in lengths]
    assert rates == pytest.approx([60.2, 73.0, 81.6, 86.7, 89.5], abs=0.06)
    assert rates[4] / rates[3] == pytest.approx(1.032, abs=0.001)
    assert cost.cost_s(lengths[4], 0) / cost.cost_s(lengths[3], 0) == pytest.approx(1.94, abs=0.01)


@given(
    costs,
    budgets_s,
    st.integers(0, MILLION),
    st.integers(1, MILLION),
    st.booleans(),
)
def test_chunk_takes_the_rest_or_ends_at_a_border_of_blocks(
    cost: PrefillCost, budget_s: float, cached: int, left: int, is_first: bool
) -> None:
    tokens = choose_chunk_tokens(
        cost, budget_s, cached_tokens=cached, tokens_left=left, is_first=is_first
    )
    assert 0 <= tokens <= left
    assert tokens in (0, left) or (cached + tokens) % BLOCK == 0
    to_border = BLOCK - cached % BLOCK
    if is_first:
        assert tokens >= min(to_border, left)
    if cost.added_s(tokens, cached) > budget_s and tokens > 0:
        assert is_first
        assert tokens == min(to_border, left)
    if tokens < left:
        step = to_border if tokens == 0 else BLOCK
        assert cost.added_s(min(tokens + step, left), cached) > budget_s


LINEAR = PrefillCost(a0_s=5.0, a1_s=1e-3, a2_s=0.0, a3_s=0.0)


@pytest.mark.parametrize(
    ("budget_s", "cached", "left", "is_first", "tokens"),
    [
        (0.5, 0, 1000, True, 384),
        (0.5, 0, 500, True, 500),
        (0.5, 0, 501, True, 384),
        (0.5, 100, 1000, True, 28 + 384),
        (0.1, 0, 1000, True, 128),
        (0.1, 0, 1000, False, 0),
        (0.1, 0, 100, False, 100),
        (0.1, 100, 1000, False, 28),
        (0.02, 100, 1000, False, 0),
        (0.02, 100, 1000, True, 28),
        (-1.0, 0, 1000, True, 128),
        (-1.0, 0, 5, True, 5),
        (-1.0, 0, 5, False, 0),
    ],
)
def test_chunk_of_a_step(
    budget_s: float, cached: int, left: int, is_first: bool, tokens: int
) -> None:
    chosen = choose_chunk_tokens(
        LINEAR, budget_s, cached_tokens=cached, tokens_left=left, is_first=is_first
    )
    assert chosen == tokens


def test_tokens_that_cost_nothing_are_all_taken() -> None:
    free = PrefillCost(a0_s=1.0, a1_s=0.0, a2_s=0.0, a3_s=0.0)
    assert affordable_tokens(free, 0.0, cached_tokens=0, tokens_max=77) == 77
    assert affordable_tokens(free, -1e-9, cached_tokens=0, tokens_max=77) == 0
