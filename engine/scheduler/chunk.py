"""How many tokens of a prompt a step takes: the largest chunk that its time budget pays for.

    added(q) = a1 q + a2 q c + a3 q^2 <= T  <=>  q <= 2 T / (B + sqrt(B^2 + 4 a3 T)),  B = a1 + a2 c

This form of the root divides by a sum of what is positive, so it loses no digits and holds for
a3 = 0 too. Pure. Not for which prompt comes first: that is the plan of a step.
"""

import math

from kvstore.layout import BLOCK_TOKENS

from .cost import PrefillCost


def choose_chunk_tokens(
    cost: PrefillCost,
    budget_s: float,
    *,
    cached_tokens: int,
    tokens_left: int,
    is_first: bool,
) -> int:
    """Tokens of the next chunk of a prompt: 0 to `tokens_left`.

    `budget_s` is what is left for it of the step: the cost of the pass itself (a0), or of one more
    sequence in it (a4), and of all that was put into it before is taken off; it may be negative.
    `cached_tokens` stand before the chunk, `tokens_left` of the prompt behind it. The chunk takes
    all that is left or ends at a multiple of 128. The first one of a step gets its block whatever
    that costs: else it would starve.
    """
    assert cached_tokens >= 0, cached_tokens
    assert tokens_left > 0, tokens_left
    tokens = affordable_tokens(cost, budget_s, cached_tokens=cached_tokens, tokens_max=tokens_left)
    if tokens == tokens_left:
        return tokens
    begun_tokens = cached_tokens % BLOCK_TOKENS
    whole = (begun_tokens + tokens) // BLOCK_TOKENS * BLOCK_TOKENS - begun_tokens
    if whole <= 0 and is_first:
        return min(BLOCK_TOKENS - begun_tokens, tokens_left)
    return max(whole, 0)


def affordable_tokens(
    cost: PrefillCost, budget_s: float, *, cached_tokens: int, tokens_max: int
) -> int:
    """The largest q up to `tokens_max` with `cost.added_s(q, cached_tokens) <= budget_s`."""
    if cost.added_s(tokens_max, cached_tokens) <= budget_s:
        return tokens_max
    if budget_s <= 0:
        return 0
    linear_s = cost.a1_s + cost.a2_s * cached_tokens
    root = 2 * budget_s / (linear_s + math.sqrt(linear_s * linear_s + 4 * cost.a3_s * budget_s))
    tokens = int(min(root, float(tokens_max)))
    # The root as rounded may be one off either way; the cost as it is charged decides.
    while cost.added_s(tokens, cached_tokens) > budget_s:
        tokens -= 1
    while cost.added_s(tokens + 1, cached_tokens) <= budget_s:
        tokens += 1
    return tokens
