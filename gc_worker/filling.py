"""How fast a target fills up, and so how soon to look at it again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

TICK_S = 1.0
TICK_MIN_S = 0.1
"""How soon the next round is when writers are refused, or soon will be."""
LOOKS_BEFORE_FULL = 4
RATE_KEPT = 0.8
"""A rate that was seen is believed for some rounds after an eviction, while `used` only falls."""


@dataclass(frozen=True, slots=True)
class Filling:
    """What a target's shards took at some moment of the monotonic clock, and how fast it grew."""

    at_s: float
    used_bytes: int
    bytes_per_s: float = 0.0


def note_filling(before: Filling | None, *, at_s: float, used_bytes: int) -> Filling:
    """The filling of now, after that of the round `before`."""
    if before is None:
        return Filling(at_s, used_bytes)
    grown = used_bytes - before.used_bytes
    if grown <= 0:
        return Filling(at_s, used_bytes, before.bytes_per_s * RATE_KEPT)
    return Filling(at_s, used_bytes, grown / max(at_s - before.at_s, TICK_MIN_S))


def choose_tick_s(filling: Filling, *, room_bytes: int) -> float:
    """When to look at a target's STAT again: four times before it is full at the rate of now."""
    if filling.bytes_per_s <= 0:
        return TICK_S
    full_in_s = room_bytes / filling.bytes_per_s
    return min(max(full_in_s / LOOKS_BEFORE_FULL, TICK_MIN_S), TICK_S)
