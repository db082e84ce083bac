"""Which shards to ask for: a pure decision over what is believed of the nodes that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence

SIMILAR_DELAY_S = 0.004
SIMILAR_FACTOR = 3.0
"""Delays below this, or below so many times the median, and delays within a factor of four above
that, count as equal."""


def delay_class(delay_s: float, similar_s: float = SIMILAR_DELAY_S) -> int:
    """0 up to `similar_s`, then one more for each factor of four."""
    if delay_s <= similar_s:
        return 0
    return 1 + int(math.log(delay_s / similar_s, 4))


def choose_shards(delays_s: Sequence[float | None], *, k: int) -> list[int]:
    """The k shards to ask for first, in shard order; fewer if fewer can be had.

    `delays_s[j]` is the expected delay of the node that holds shard j, None if it cannot be asked.
    The slowest are left out; among nodes of similar delay the parity shards are, because data
    shards need no decoding.
    """
    known_s = sorted(delay for delay in delays_s if delay is not None)
    if not known_s:
        return []
    similar_s = max(SIMILAR_DELAY_S, SIMILAR_FACTOR * known_s[len(known_s) // 2])
    askable = [
        (delay_class(delay, similar_s), j) for j, delay in enumerate(delays_s) if delay is not None
    ]
    askable.sort()
    return sorted(j for _, j in askable[:k])
