"""What a worker has done since it started, as growing numbers, and what it did last, as events.

Names are stable: metrics and the web page show them. Units stand last in each name.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.wire import EvictReason

EVENTS_KEPT_MAX = 256
"""Older events are in the log."""


@dataclass(slots=True)
class WorkerCounters:
    """Numbers of one worker process. Every number only grows."""

    scans: int = 0
    """Targets whose slots were all looked at."""
    scanned_slots: int = 0
    """Slots of those that held a shard."""
    evicted: Counter[str] = field(default_factory=Counter)
    """Shards of the own node that went, by reason: expired, least_used, orphaned."""
    evicted_bytes: int = 0
    """Bytes of their slots."""
    spared: int = 0
    """Victims that stayed because a peer, or the own node, had seen a later use."""
    gone_before: int = 0
    """Victims that were gone, or replaced, when their turn came."""
    withdrawn: int = 0
    """Shards of peers that went because ours did."""
    withdrawals_refused: int = 0
    """Shards of peers that stayed because of a later use or another version."""
    withdrawals_failed: int = 0
    """Shards of peers that did not answer for long; the redundancy check finds what is left."""
    passes_skipped: int = 0
    """Passes left out because the clock had jumped."""
    clock_jumps: int = 0
    node_errors: int = 0
    """Questions to nodes that failed and were, or will be, asked again."""
    scrubbed_slots: int = 0
    scrubbed_bytes: int = 0
    scrub_passes: int = 0
    damaged_found: int = 0
    """Shards that scrub found damaged or unreadable and reported to the own node."""
    quarantined: int = 0
    """Of those, shards that the node took out of use."""
    redundancy_passes: int = 0
    repaired_shards: int = 0
    repaired_bytes: int = 0
    repairs_failed: int = 0
    repairs_refused: int = 0
    """Repairs given up because what peers sent did not fit its checksums."""
    orphaned_blocks: int = 0
    """Blocks with too few shards to read, of which this worker removed the rest."""
    policy_changes: int = 0
    """Newer policies taken over."""

    def to_values(self) -> dict[str, Any]:
        """As JSON will show it."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["evicted"] = {
            reason.name.lower(): self.evicted[reason.name.lower()] for reason in EvictReason
        }
        return values


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the worker did, for people: `at_s` is Unix time."""

    at_s: int
    kind: str
    values: dict[str, object]

    def to_values(self) -> dict[str, Any]:
        return {"at_s": self.at_s, "kind": self.kind, **self.values}


@dataclass(slots=True)
class EventRing:
    """The last EVENTS_KEPT_MAX events, oldest first."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT_MAX))

    def add(self, at_s: int, kind: str, **values: object) -> None:
        """Note an event; `values` must be such that JSON can show them."""
        self.events.append(Event(at_s, kind, values))

    def to_values(self) -> list[dict[str, Any]]:
        return [event.to_values() for event in self.events]
