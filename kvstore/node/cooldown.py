"""Leaves something in peace for a while after it failed, and limits how often something is done."""

from __future__ import annotations

from typing import Generic, TypeVar

from .clock import Clock

T = TypeVar("T")


class Cooldown(Generic[T]):
    """Remembers why something failed, for `length_s`."""

    def __init__(self, clock: Clock, length_s: float) -> None:
        self._clock = clock
        self._length_s = length_s
        self._reason: T | None = None
        self._until_s = 0.0

    def begin(self, reason: T) -> None:
        """It failed just now."""
        self._reason = reason
        self._until_s = self._clock.monotonic_s() + self._length_s

    def current(self) -> T | None:
        """Why it failed, or None if it did not fail lately."""
        if self._reason is not None and self._clock.monotonic_s() >= self._until_s:
            self._reason = None
        return self._reason


class RateLimit:
    """At most `per_s` units a second on average, and at most that many at once."""

    def __init__(self, clock: Clock, per_s: int) -> None:
        self._clock = clock
        self._per_s = per_s
        self._left = float(per_s)
        self._at_s = clock.monotonic_s()

    def take(self, units: int) -> bool:
        """Whether `units` may be used now; they are used up then."""
        now_s = self._clock.monotonic_s()
        self._left = min(self._left + (now_s - self._at_s) * self._per_s, self._per_s)
        self._at_s = now_s
        if units > self._left:
            return False
        self._left -= units
        return True
