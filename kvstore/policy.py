"""How much of a prompt may be taken from the store: pure decisions, no input or output.

The numbers are part of the hit rule, not configuration. Where window state lies and whether a
fetch is worth its time are decided elsewhere.
"""

from collections.abc import Container
from dataclasses import dataclass

from .errors import InvalidArgument
from .layout import BLOCK_TOKENS

WINDOW_TOKENS = 128
"""Tokens a sliding-window layer looks back, so also the tokens a bounded replay runs through."""

DRAFT_TOKENS = 6
"""Positions that speculative decoding may step back: 5 draft tokens and the one they follow."""

WINDOW_RING_TOKENS = WINDOW_TOKENS + DRAFT_TOKENS
"""Rows of a window ring. This many tokens at the end of a prompt are never taken from the store."""

# A replay runs through exactly one block, so the hit stays on a block border after it is taken off.
assert WINDOW_TOKENS == BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class HitPlan:
    """What to take from the store before prefill starts; all zero and None is a miss.

    `hit_tokens`: leading tokens counted as hit, a multiple of 128.
    `replay_tokens`: tokens after the hit to run again with bounded windows, 0 or 128; their block
    KV is read from the store and not rewritten.
    `window_anchor`: position of the window state to load, None if none is used.
    """

    hit_tokens: int
    replay_tokens: int
    window_anchor: int | None

    @property
    def stored_blocks(self) -> int:
        """Leading blocks whose KV is read from the store, the replayed one included."""
        return (self.hit_tokens + self.replay_tokens) // BLOCK_TOKENS


MISS = HitPlan(hit_tokens=0, replay_tokens=0, window_anchor=None)


def plan_hit(prompt_tokens: int, matched_blocks: int, window_anchors: Container[int]) -> HitPlan:
    """The hit of a model with window state (design rule "at most L - 134").

    L1 is the largest multiple of 128 that is at most min(128 x matched_blocks, L - 134). With a
    window state known at L1 the hit is L1 and nothing is replayed. Without one the hit is
    L1 - 128 and the 128 tokens before L1 are replayed. There is no hit below 128 tokens.

    `window_anchors` holds the positions of this prompt at which a window state is known. They are
    multiples of 128, so the only one in (L1 - 128, L1] is L1 itself; other values are ignored.
    """
    _check_counts(prompt_tokens, matched_blocks)
    reach = min(matched_blocks * BLOCK_TOKENS, prompt_tokens - WINDOW_RING_TOKENS)
    border = reach // BLOCK_TOKENS * BLOCK_TOKENS
    if border < BLOCK_TOKENS:
        return MISS
    if border in window_anchors:
        return HitPlan(hit_tokens=border, replay_tokens=0, window_anchor=border)
    hit_tokens = border - WINDOW_TOKENS
    if hit_tokens < BLOCK_TOKENS:
        return MISS
    return HitPlan(hit_tokens=hit_tokens, replay_tokens=WINDOW_TOKENS, window_anchor=None)


def plan_dense_hit(prompt_tokens: int, matched_blocks: int) -> HitPlan:
    """The hit of a model without window state: 128 x min(matched_blocks, floor((L - 1) / 128)).

    At least one token stays for prefill, because its logits are what the first new token is
    sampled from.
    """
    _check_counts(prompt_tokens, matched_blocks)
    blocks = min(matched_blocks, max(0, prompt_tokens - 1) // BLOCK_TOKENS)
    return HitPlan(hit_tokens=blocks * BLOCK_TOKENS, replay_tokens=0, window_anchor=None)


def window_anchor_after_prefill(prompt_tokens: int) -> int | None:
    """Position of the window state to keep after prefill: floor((L - 1) / 128) x 128, None if 0."""
    _check_counts(prompt_tokens, 0)
    anchor = max(0, prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return anchor or None


def _check_counts(prompt_tokens: int, matched_blocks: int) -> None:
    if prompt_tokens < 0:
        raise InvalidArgument(what="prompt tokens", given=prompt_tokens, expected="0 or more")
    if matched_blocks < 0:
        raise InvalidArgument(what="matched blocks", given=matched_blocks, expected="0 or more")
