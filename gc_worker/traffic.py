"""How busy the own node is, from its STAT: background work yields to traffic.

A hint and no control loop: a node that serves many requests, or whose answers to us are late, gets
half of the background work, and a node that is overloaded a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BUSY_REQUESTS_PER_S = 500
"""A READ of 64 shards takes a node 0.25 ms: so many are an eighth of its time."""
BUSY_DELAY_S = 0.02
"""An answer to STAT later than that waited behind others."""
OVERLOADED_DELAY_S = 0.2
BUSY_FACTOR = 0.5
OVERLOADED_FACTOR = 0.1


@dataclass(slots=True)
class Traffic:
    """What the last STAT said. `delay_s` is how long its answer took."""

    requests_per_s: float = 0.0
    delay_s: float = 0.0

    def note(self, stat: Mapping[str, Any], delay_s: float) -> None:
        """Take over an answer to STAT."""
        self.requests_per_s = float(stat.get("requests_last_s") or 0)
        self.delay_s = delay_s

    @property
    def rate_factor(self) -> float:
        """By what to multiply the rates of background work now, 0 to 1."""
        return choose_rate_factor(self.requests_per_s, self.delay_s)


def choose_rate_factor(requests_per_s: float, delay_s: float) -> float:
    """1 on an idle node, less on one that has something to do."""
    if delay_s > OVERLOADED_DELAY_S:
        return OVERLOADED_FACTOR
    if delay_s > BUSY_DELAY_S or requests_per_s > BUSY_REQUESTS_PER_S:
        return BUSY_FACTOR
    return 1.0
