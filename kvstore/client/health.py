"""What the client believes of one node: is it there, and how slow is it.

A circuit breaker and an estimate of latency, fed by the channels, read by `choose_shards`.
Nothing here waits, sends or decides.
"""

from __future__ import annotations

from collections.abc import Callable

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 2.0
"""A node that came back is missed for no longer than this."""
LATENCY_WEIGHT = 0.3
"""Share of the newest answer in the running mean of latency."""
LATENCY_HALF_LIFE_S = 5.0
"""An old estimate fades, so that a node that was slow is tried again."""
FULL_S = 0.5
"""For so long a node that had no room is believed to have none. Then it is asked again."""


class Breaker:
    """The circuit breaker of one node, shared by all connections to it: after a failure the node is
    left alone for a time that doubles, until it does real work again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures_in_a_row = 0
        self._open_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """True while the node is left alone."""
        return self._open_until_s > 0.0 and self._clock() < self._open_until_s

    def on_failed(self) -> None:
        """A connection failed, or what came over it was wrong."""
        backoff_s = min(BACKOFF_FIRST_S * 2**self._failures_in_a_row, BACKOFF_MAX_S)
        self._failures_in_a_row = min(self._failures_in_a_row + 1, 16)
        self._open_until_s = self._clock() + backoff_s

    def on_served(self) -> None:
        """The node did what it was asked to; a greeting or a refusal proves too little."""
        self._failures_in_a_row = 0


class NodeHealth:
    """What one connection has seen of its node. All times are seconds of the clock passed in."""

    def __init__(self, clock: Callable[[], float], breaker: Breaker) -> None:
        self._clock = clock
        self._breaker = breaker
        self._latency_s = 0.0
        self._sampled_at_s = 0.0
        self._oldest_asked_at_s: float | None = None
        self._full_until_s = 0.0

    @property
    def is_full(self) -> bool:
        """True for a while after the node refused a shard for want of room."""
        return self._full_until_s > 0.0 and self._clock() < self._full_until_s

    @property
    def is_available(self) -> bool:
        """False while the circuit breaker is open."""
        return not self._breaker.is_open

    @property
    def waiting_s(self) -> float:
        """Age of the oldest request that has no answer; 0 if there is none."""
        if self._oldest_asked_at_s is None:
            return 0.0
        return self._clock() - self._oldest_asked_at_s

    @property
    def delay_s(self) -> float:
        """How long an answer is expected to take: the faded running mean, or the age of the
        oldest request that waits, whichever is larger."""
        now_s = self._clock()
        fading: float = 0.5 ** ((now_s - self._sampled_at_s) / LATENCY_HALF_LIFE_S)
        delay_s = self._latency_s * fading
        if self._oldest_asked_at_s is None:
            return delay_s
        return max(delay_s, now_s - self._oldest_asked_at_s)

    def expected_delay_s(self) -> float | None:
        """`delay_s`, or None for a node that is left alone."""
        return None if self._breaker.is_open else self.delay_s

    def on_asked(self, oldest_asked_at_s: float) -> None:
        """A request was sent; `oldest_asked_at_s` belongs to the first one that waits."""
        self._oldest_asked_at_s = oldest_asked_at_s

    def on_answered(
        self, latency_s: float, oldest_asked_at_s: float | None, *, is_served: bool
    ) -> None:
        """An answer is complete; `oldest_asked_at_s` belongs to the next one that waits."""
        self._latency_s += LATENCY_WEIGHT * (latency_s - self._latency_s)
        self._sampled_at_s = self._clock()
        self._oldest_asked_at_s = oldest_asked_at_s
        if is_served:
            self._breaker.on_served()

    def on_full(self) -> None:
        """The node refused a shard for want of room."""
        self._full_until_s = self._clock() + FULL_S

    def on_stored(self) -> None:
        """The node had room for all shards that it was sent."""
        self._full_until_s = 0.0

    def on_failed(self) -> None:
        """The connection failed, or what came over it was wrong."""
        self._breaker.on_failed()

    def on_disconnected(self) -> None:
        """Nothing waits any more."""
        self._oldest_asked_at_s = None
