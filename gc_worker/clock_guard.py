"""Notices that somebody set the wall clock: ages are worth nothing at that moment.

Last uses are Unix times, as they must outlive a restart, and Unix time may be set, by days, in
either direction, by mistake. Against that: the wall clock is compared with the monotonic clock at
every pass. A jump skips the pass, and blocks expire only once the clock has been even for a while;
eviction for want of room goes on, because the order of last uses does not depend on the present.
What was used "later than now" counts as used now.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

JUMP_S = 3600.0
"""A difference between the clocks that no drift explains; smaller ones are the correction of a
clock and move no block by more than they are."""
STABLE_AFTER_S = 60.0


class ClockState(Enum):
    """What a pass may do now."""

    EVEN = "even"
    JUMPED = "jumped"
    """It jumped just now: skip this pass."""
    SETTLING = "settling"
    """It jumped a moment ago: make room, but expire nothing."""


@dataclass(slots=True)
class ClockGuard:
    """Compares two clocks. `offset_s` is wall clock minus monotonic clock when last looked at."""

    offset_s: float | None = None
    jumped_at_s: float | None = None
    """Monotonic time of the last jump, until it is settled."""
    jumps: int = 0
    last_jump_s: float = 0.0
    """By how much the wall clock moved; negative: back."""

    def look(self, *, monotonic_s: float, unix_s: float) -> ClockState:
        """Compare now; both in seconds."""
        before, self.offset_s = self.offset_s, unix_s - monotonic_s
        if before is not None and abs(self.offset_s - before) > JUMP_S:
            self.jumps += 1
            self.last_jump_s = self.offset_s - before
            self.jumped_at_s = monotonic_s
            return ClockState.JUMPED
        if self.jumped_at_s is None:
            return ClockState.EVEN
        if monotonic_s - self.jumped_at_s < STABLE_AFTER_S:
            return ClockState.SETTLING
        self.jumped_at_s = None
        return ClockState.EVEN
