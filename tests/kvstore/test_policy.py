"""The hit rule, against a statement of it that shares no arithmetic with the code."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.policy import (
    WINDOW_RING_TOKENS,
    WINDOW_TOKENS,
    HitPlan,
    plan_dense_hit,
    plan_hit,
    window_anchor_after_prefill,
)

MISS = HitPlan(hit_tokens=0, replay_tokens=0, window_anchor=None)


def hit_by_search(prompt_tokens: int, matched_blocks: int, anchors: set[int]) -> HitPlan:
    """The rule as sentences: walk down from the longest border until one is allowed."""
    border = 128 * matched_blocks
    while border > 0 and border + 134 > prompt_tokens:
        border -= 128
    known = [anchor for anchor in anchors if border - 128 < anchor <= border]
    if border >= 128 and known:
        return HitPlan(hit_tokens=border, replay_tokens=0, window_anchor=known[0])
    if border >= 256:
        return HitPlan(hit_tokens=border - 128, replay_tokens=128, window_anchor=None)
    return MISS


def test_ring_is_window_and_draft_positions() -> None:
    assert WINDOW_TOKENS == 128
    assert WINDOW_RING_TOKENS == 134


def test_hit_follows_the_rule_at_every_short_length() -> None:
    borders = (128, 256, 384, 512)
    anchor_sets = [set(c) for n in range(len(borders) + 1) for c in combinations(borders, n)]
    for prompt_tokens in range(700):
        for matched_blocks in range(6):
            for anchors in anchor_sets:
                plan = plan_hit(prompt_tokens, matched_blocks, anchors)
                assert plan == hit_by_search(prompt_tokens, matched_blocks, anchors), (
                    prompt_tokens,
                    matched_blocks,
                    anchors,
                )


@pytest.mark.parametrize("prompt_tokens", [0, 1, 127, 128, 129, 130, 255, 256, 257, 261])
def test_short_prompt_never_hits(prompt_tokens: int) -> None:
    assert plan_hit(prompt_tokens, 2, {128, 256}) == MISS


@pytest.mark.parametrize("prompt_tokens", [262, 263, 389])
def test_first_block_hits_when_its_window_is_known(prompt_tokens: int) -> None:
    plan = plan_hit(prompt_tokens, 2, {128})
    assert plan == HitPlan(hit_tokens=128, replay_tokens=0, window_anchor=128)
    assert plan.stored_blocks == 1


@pytest.mark.parametrize("prompt_tokens", [261, 262, 263, 389])
def test_first_block_misses_when_its_window_is_unknown(prompt_tokens: int) -> None:
    assert plan_hit(prompt_tokens, 3, set()) == MISS


def test_window_is_replayed_when_it_is_unknown() -> None:
    plan = plan_hit(390, 3, {128, 384})
    assert plan == HitPlan(hit_tokens=128, replay_tokens=128, window_anchor=None)
    assert plan.stored_blocks == 2


def test_positions_off_the_grid_are_no_anchors() -> None:
    assert plan_hit(390, 3, {129, 200, 255}).window_anchor is None


@given(st.integers(0, 10**6), st.integers(0, 8000), st.sets(st.integers(0, 8000)))
def test_hit_keeps_its_promises_at_any_length(
    prompt_tokens: int, matched_blocks: int, anchor_blocks: set[int]
) -> None:
    anchors = {128 * block for block in anchor_blocks}
    plan = plan_hit(prompt_tokens, matched_blocks, anchors)
    used = plan.hit_tokens + plan.replay_tokens
    assert plan.hit_tokens % 128 == 0
    assert plan.replay_tokens in (0, 128)
    assert used == 0 or used + 134 <= prompt_tokens
    assert plan.stored_blocks * 128 == used <= 128 * matched_blocks
    assert (plan.window_anchor is None) == (plan.hit_tokens == 0 or plan.replay_tokens == 128)
    assert plan.window_anchor is None or plan.window_anchor in anchors


def test_longer_match_never_gives_a_shorter_hit() -> None:
    hits = [plan_hit(5000, matched, {128 * 7}).hit_tokens for matched in range(60)]
    used = [
        sum((p.hit_tokens, p.replay_tokens)) for p in (plan_hit(5000, m, ()) for m in range(60))
    ]
    assert used == sorted(used)
    assert hits[7] == 128 * 7  # the known window: one block more than the next match gives
    assert hits[8] == 128 * 7


@pytest.mark.parametrize(
    ("prompt_tokens", "hit_tokens"),
    [
        *((0, 0), (1, 0), (127, 0), (128, 0), (129, 128), (130, 128)),
        *((255, 128), (256, 128), (257, 256), (261, 256), (262, 256), (263, 256)),
    ],
)
def test_dense_hit_leaves_one_token_when_everything_is_stored(
    prompt_tokens: int, hit_tokens: int
) -> None:
    plan = plan_dense_hit(prompt_tokens, 9)
    assert plan == HitPlan(hit_tokens=hit_tokens, replay_tokens=0, window_anchor=None)


def test_dense_hit_is_the_longest_allowed_at_every_short_length() -> None:
    for prompt_tokens in range(700):
        for matched_blocks in range(7):
            allowed = [n for n in range(matched_blocks + 1) if n == 0 or 128 * n < prompt_tokens]
            assert plan_dense_hit(prompt_tokens, matched_blocks).stored_blocks == max(allowed)


@pytest.mark.parametrize(
    ("prompt_tokens", "anchor"),
    [
        *((0, None), (1, None), (127, None), (128, None), (129, 128), (130, 128)),
        *((255, 128), (256, 128), (257, 256), (261, 256), (262, 256), (263, 256)),
    ],
)
def test_window_anchor_is_the_last_border_before_the_last_token(
    prompt_tokens: int, anchor: int | None
) -> None:
    assert window_anchor_after_prefill(prompt_tokens) == anchor


def test_next_turn_hits_the_anchor_that_prefill_left() -> None:
    for prompt_tokens in range(129, 2000):
        anchor = window_anchor_after_prefill(prompt_tokens)
        assert anchor is not None
        turn = plan_hit(anchor + WINDOW_RING_TOKENS, prompt_tokens // 128, {anchor})
        assert turn.window_anchor == anchor


def test_negative_counts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="prompt tokens: given -1"):
        plan_hit(-1, 0, ())
    with pytest.raises(InvalidArgument, match="matched blocks: given -2"):
        plan_dense_hit(5, -2)
    with pytest.raises(InvalidArgument, match="prompt tokens: given -3"):
        window_anchor_after_prefill(-3)
