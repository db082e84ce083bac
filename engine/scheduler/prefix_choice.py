"""Which prefix a sequence begins with, of all that is known: in the pool, in the store, here. Pure.

The rules of a hit are those of `kvstore.policy`. Here they are put together with blocks that are
shared in the pool, and with the promise that an answer that was begun keeps its bits when it is
begun anew (docs/decisions/0032).
"""

from dataclasses import dataclass

from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import (
    MISS,
    WINDOW_RING_TOKENS,
    WINDOW_TOKENS,
    HitPlan,
    plan_dense_hit,
    plan_hit,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrefix:
    """Leading blocks in the pool, leading blocks elsewhere, and where window state can be had."""

    shared_blocks: int = 0
    stored_blocks: int = 0
    anchors: frozenset[int] = frozenset()

    @property
    def blocks(self) -> int:
        return max(self.shared_blocks, self.stored_blocks)


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that was given in part, by a sequence that began a bounded replay at
    `replay_first`; None if there was none.

    `is_cold`: whether its bits are known to be those of a cold run: nothing it was computed from
    may be what a replay led to. None if it began in another engine that does not say.
    """

    replay_first: int | None
    is_cold: bool | None = None


def choose_prefix(prompt_tokens: int, known: KnownPrefix, begun: Begun | None = None) -> HitPlan:
    """The prefix of a model with window state.

    A new request takes the longest hit; of two equally long ones that with window state, which
    gives the bits of a cold run. Blocks in the pool count only with window state: without, the hit
    is as long as the store alone would give it, though such of its blocks as the pool has are
    shared.

    An answer that was begun goes on as it was begun, or cold where that is not to be had. Whether
    it has the same bits then, `keeps_bits` says.
    """
    if begun is None:
        exact = longest_exact_hit(prompt_tokens, known)
        stored = plan_hit(prompt_tokens, known.stored_blocks, known.anchors)
        return exact if exact.hit_tokens >= stored.hit_tokens else stored
    if begun.replay_first is None:
        return longest_exact_hit(prompt_tokens, known)
    again = HitPlan(hit_tokens=begun.replay_first, replay_tokens=WINDOW_TOKENS, window_anchor=None)
    return again if again.stored_blocks <= known.blocks else MISS


def choose_dense_prefix(known_tokens: int, known: KnownPrefix) -> HitPlan:
    """The prefix of a model without window state: every hit gives the bits of a cold run."""
    return plan_dense_hit(known_tokens, known.blocks)


def longest_exact_hit(prompt_tokens: int, known: KnownPrefix) -> HitPlan:
    """The longest hit with window state, MISS if there is none."""
    reach = min(known.blocks * BLOCK_TOKENS, prompt_tokens - WINDOW_RING_TOKENS)
    border = max((anchor for anchor in known.anchors if 0 < anchor <= reach), default=None)
    if border is None:
        return MISS
    return HitPlan(hit_tokens=border, replay_tokens=0, window_anchor=border)


def keeps_bits(begun: Begun, *, is_cold: bool) -> bool:
    """Whether an answer that goes on is known to have the bits that it began with. `is_cold`: of
    the way that it goes on, as in `Begun`.

    What a store gives may be what a bounded replay led to, which its keys do not tell, and the pool
    may have other bytes for the same keys: so only cold runs are known to be one, though the same
    prefix mostly gives the same bits.
    """
    return is_cold and begun.replay_first is None and begun.is_cold is not False


def is_replay_possible(prompt_tokens: int, replay_first: int) -> bool:
    """Whether a request of this length can have begun a bounded replay there."""
    is_border = replay_first > 0 and replay_first % BLOCK_TOKENS == 0
    return is_border and replay_first + WINDOW_TOKENS + WINDOW_RING_TOKENS <= prompt_tokens
