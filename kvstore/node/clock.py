"""The seam between a node and time: code asks a Clock, and tests pass one that they turn."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one to measure with, one to write down."""

    def monotonic_s(self) -> float:
        """Seconds since some fixed instant; never goes back."""

    def unix_ns(self) -> int:
        """Unix time in nanoseconds; may be set by somebody."""


class SystemClock:
    """The clocks of the operating system."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_ns(self) -> int:
        return time.time_ns()
