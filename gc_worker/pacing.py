"""Bounds how fast background work goes: a bucket of tokens, and how busy the node is.

The bucket lets a burst through and makes what comes behind wait; the clock and the waiting are
passed in, so the same code runs in virtual time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

BURST_S = 0.25
"""A bucket that was not used for a while holds so many seconds' worth of tokens, and no more."""
WAIT_MIN_S = 0.001
"""No loop wakes up more often; less might even be too little for the clock to move."""
WAIT_MAX_S = 1.0
"""A rate that is changed takes effect within so long."""


class TokenBucket:
    """`rate_per_s` tokens a second; `rate_per_s` may be changed at any time, also while one waits.

    A request larger than the bucket goes through in one piece and is paid for afterwards, so that
    the mean rate holds for items of any size.
    """

    def __init__(
        self,
        rate_per_s: Callable[[], float],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._sleep = sleep
        self._tokens = 0.0
        self._filled_at_s = clock()

    def _fill(self) -> float:
        """Add what has come since the last call; the rate as it is now."""
        rate_per_s = max(self._rate_per_s(), 1e-9)
        now_s = self._clock()
        earned = max(now_s - self._filled_at_s, 0.0) * rate_per_s
        self._tokens = min(self._tokens + earned, rate_per_s * BURST_S)
        self._filled_at_s = now_s
        return rate_per_s

    async def take(self, count: float) -> None:
        """Waits until the bucket is not overdrawn, then takes `count` tokens out of it."""
        rate_per_s = self._fill()
        while self._tokens < 0:
            wait_s = min(max(-self._tokens / rate_per_s, WAIT_MIN_S), WAIT_MAX_S)
            await self._sleep(wait_s)
            rate_per_s = self._fill()
        self._tokens -= count
