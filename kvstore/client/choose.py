"""Which shards to ask for: a pure decision over what is believed of the nodes that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence

SIMILAR_DELAY_S = 0.004
"""Delays below this, and delays within a factor of four above it, count as equal."""


def delay_class(delay_s: float) -> int:
    """0 up to `SIMILAR_DELAY_S`, then one more for each factor of four."""
    if delay_s <= SIMILAR_DELAY_S:
        return 0
    return 1 + int(math.log(delay_s / SIMILAR_DELAY_S, 4))


def choose_shards(delays_s: Sequence[float | None], *, k: int, spare: int = 1) -> list[int]:
    """The k + spare shards to ask for first, in shard order; fewer if fewer can be had.

    `delays_s[j]` is the expected delay of the node that holds shard j, None if it cannot be asked.
    The slowest are left out; among nodes of similar delay the last parity shards are, because data
    shards need no decoding.
    """
    askable = [(delay_class(delay), j) for j, delay in enumerate(delays_s) if delay is not None]
    askable.sort()
    return sorted(j for _, j in askable[: k + spare])
