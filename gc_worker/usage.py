"""How full a target is: the fraction of the room it can have that its shards take.

There may be several limits: its capacity, the file system, a project
quota, the memory limit of the container where a target lies in memory. Each is read as *used* (what
our shards take) and *room* (what more of them could take: our free slots, which stay preallocated,
and what the limit has left), and the target is as full as the tightest of them says. On a disk of
its own that is the file system's own figure. On a disk that others use too it is not: what they
take makes our room smaller, but does not count as ours, because evicting could not give it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .plan import Room

CAPACITY = "capacity"
FILE_SYSTEM = "file_system"
PROJECT_QUOTA = "project_quota"
CONTAINER = "container"
REFUSED = "refused"
"""The node refuses writes, though the other limits say that there is room: it could not grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit. `used` and `room` in bytes of slots."""

    name: str
    used: int
    room: int

    @property
    def fraction(self) -> float:
        """0 to 1."""
        total = self.used + self.room
        return self.used / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How full a target is. `limits` are all that were read; `decided_by` names the tightest."""

    fraction: float
    decided_by: str
    limits: tuple[Limit, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Limits that could not be read, and why."""

    def to_values(self) -> dict[str, Any]:
        """As JSON will show it."""
        return {
            "fraction": round(self.fraction, 6),
            "decided_by": self.decided_by,
            "limits": {
                limit.name: {"used": limit.used, "room": limit.room} for limit in self.limits
            },
            "unreadable": dict(self.unreadable),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceLeft:
    """What the system says: bytes that may still be written, by the limit's name."""

    left_bytes: Mapping[str, int] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)


def read_slot_limits(stat: Mapping[str, Any], *, is_refusing: bool) -> list[Limit]:
    """The limits in the STAT of one target; `is_refusing`: it answered FULL since the last look.

    In bytes and not in slots: a target may have slots of several sizes.
    """
    used_bytes = int(stat.get("used_bytes", 0))
    left_bytes = int(stat.get("capacity_bytes", 0)) - used_bytes
    limits = [Limit(name=CAPACITY, used=used_bytes, room=max(left_bytes, 0))]
    if is_refusing:
        free_bytes = int(stat.get("slot_bytes_free", 0))
        limits.append(Limit(name=REFUSED, used=used_bytes, room=free_bytes))
    return limits


def choose_usage(stat: Mapping[str, Any], space: SpaceLeft, *, is_refusing: bool = False) -> Usage:
    """How full the target with this STAT is, given what the system says of its folder."""
    limits = read_slot_limits(stat, is_refusing=is_refusing)
    used_bytes = int(stat.get("used_bytes", 0))
    free_bytes = int(stat.get("slot_bytes_free", 0))
    limits += [
        Limit(name=name, used=used_bytes, room=free_bytes + max(left, 0))
        for name, left in sorted(space.left_bytes.items())
    ]
    tightest = max(limits, key=lambda limit: limit.fraction)
    return Usage(
        fraction=tightest.fraction,
        decided_by=tightest.name,
        limits=tuple(limits),
        unreadable=space.unreadable,
    )


def plan_room(limits: Sequence[Limit], *, high: float, low: float) -> Room:
    """What to make free: nothing while no limit is above `high`, else down to `low` for each."""
    if all(limit.fraction <= high for limit in limits):
        return Room()
    # Rounded down, so that a target of a few slots frees one too.
    excess = [limit.used - int(low * (limit.used + limit.room)) for limit in limits]
    return Room(slot_bytes=max(0, *excess))
