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

    `plan` is the prefix that it began with, None if that was in another engine. `is_cold`: nothing
    it was computed from had come from a store, so its bits are known to be those of a cold run.
    """

    replay_first: int | None
    plan: HitPlan | None = None
    is_cold: bool = False


def choose_prefix(prompt_tokens: int, known: KnownPrefix, begun: Begun | None = None) -> HitPlan:
    """The prefix of a model with window state.

    A new request takes the longest hit; of two equally long ones that with window state, which
    gives the bits of a cold run. Blocks in the pool count only with window state: without, the hit
    is what the store alone would give, so that its bits do not hang on the engine's past.

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


def keeps_bits(begun: Begun, plan: HitPlan, *, is_cold: bool) -> bool:
    """Whether an answer that goes on with this prefix is known to have the bits that it began with.
    `is_cold`: of the way that it goes on, as in `Begun`.

    What a store gives may be what a bounded replay led to, which its keys do not tell: then only
    the prefix that an answer began with gives its bits again.
    """
    if begun.replay_first is not None:
        return plan.replay_tokens > 0
    if begun.is_cold or begun.plan is None:
        return is_cold
    return plan == begun.plan


def is_replay_possible(prompt_tokens: int, replay_first: int) -> bool:
    """Whether a request of this length can have begun a bounded replay there."""
    is_border = replay_first > 0 and replay_first % BLOCK_TOKENS == 0
    return is_border and replay_first + WINDOW_TOKENS + WINDOW_RING_TOKENS <= prompt_tokens
