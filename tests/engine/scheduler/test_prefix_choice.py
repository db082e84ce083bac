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


NEARER = HitPlan(hit_tokens=128, replay_tokens=0, window_anchor=128)


@pytest.mark.parametrize(
    ("begun", "plan", "is_cold", "is_kept"),
    [
        # A cold run, and what cold runs have left, are one.
        (Begun(None, MISS, is_cold=True), MISS, True, True),
        (Begun(None, EXACT, is_cold=True), NEARER, True, True),
        # What came from a store gives its bits to those alone that begin with it.
        (Begun(None, EXACT), EXACT, False, True),
        (Begun(None, EXACT), NEARER, False, False),
        (Begun(None, EXACT), MISS, True, False),
        # Of an answer begun elsewhere nothing is known but its replay.
        (Begun(None), MISS, True, True),
        (Begun(None), EXACT, False, False),
        (Begun(256), REPLAY, False, True),
        (Begun(256), MISS, True, False),
    ],
)
def test_answer_keeps_its_bits_where_that_is_known(
    begun: Begun, plan: HitPlan, is_cold: bool, is_kept: bool
) -> None:
    assert keeps_bits(begun, plan, is_cold=is_cold) == is_kept
