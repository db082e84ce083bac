"""Which prefix a sequence begins with: the longest hit, and the same bits for an answer begun."""

import pytest

from engine.scheduler.prefix_choice import Begun, KnownPrefix, choose_prefix, keeps_bits
from kvstore.policy import MISS, HitPlan

PROMPT = 530
EXACT = HitPlan(hit_tokens=256, replay_tokens=0, window_anchor=256)
REPLAY = HitPlan(hit_tokens=256, replay_tokens=128, window_anchor=None)


def stored(blocks: int, *anchors: int) -> KnownPrefix:
    return KnownPrefix(stored_blocks=blocks, anchors=frozenset(anchors))


def shared(blocks: int, *anchors: int) -> KnownPrefix:
    return KnownPrefix(shared_blocks=blocks, anchors=frozenset(anchors))


@pytest.mark.parametrize(
    ("known", "plan"),
    [
        (KnownPrefix(), MISS),
        (stored(3), REPLAY),
        (stored(2, 256), EXACT),
        # The longer hit, though it is a replay's; of equal ones the exact one.
        (stored(3, 128), REPLAY),
        (stored(3, 256), EXACT),
        # In the pool alone a block is worth nothing without window state.
        (shared(3), MISS),
        (shared(3, 256), EXACT),
        # Nor is window state without its blocks, or behind where a hit may end.
        (stored(1, 256), MISS),
        (stored(4, 512), REPLAY),
    ],
)
def test_new_request_takes_the_longest_hit(known: KnownPrefix, plan: HitPlan) -> None:
    assert choose_prefix(PROMPT, known) == plan


@pytest.mark.parametrize(
    ("known", "plan"), [(stored(3), MISS), (stored(3, 256), EXACT), (shared(3, 256), EXACT)]
)
def test_answer_begun_without_a_replay_goes_on_without_one(
    known: KnownPrefix, plan: HitPlan
) -> None:
    assert choose_prefix(PROMPT, known, Begun(None)) == plan


@pytest.mark.parametrize(
    ("known", "plan"),
    [
        (stored(3), REPLAY),
        # Where another hit would be had: other bits.
        (stored(3, 256), REPLAY),
        (stored(3, 384), REPLAY),
        (shared(3), REPLAY),
        (stored(2), MISS),
    ],
)
def test_answer_begun_with_a_replay_repeats_it(known: KnownPrefix, plan: HitPlan) -> None:
    assert choose_prefix(PROMPT, known, Begun(256)) == plan


@pytest.mark.parametrize(
    ("begun", "is_cold", "is_kept"),
    [
        # A cold run, and what cold runs have left, are one.
        (Begun(None, is_cold=True), True, True),
        # What came from a store may be what a replay led to, now or then.
        (Begun(None, is_cold=True), False, False),
        (Begun(None, is_cold=False), False, False),
        (Begun(None, is_cold=False), True, False),
        # Of an answer begun elsewhere nothing is known but its replay.
        (Begun(None), True, True),
        (Begun(None), False, False),
        (Begun(256), False, False),
        (Begun(256), True, False),
    ],
)
def test_answer_keeps_its_bits_where_that_is_known(
    begun: Begun, is_cold: bool, is_kept: bool
) -> None:
    assert keeps_bits(begun, is_cold=is_cold) == is_kept
