"""Counters of a target and of a node, since the process started. STAT shows them.

All of it is counted as things happen, so that an answer to STAT never looks at slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..histogram import AGE_BOUNDS_S, Histogram
from ..wire import EvictReason, Op

TTL_CLASS_NUMBERS = 256
CLASSES_SHOWN_MAX = 32
OTHER_NAME = "(other)"
"""Stands for what is left when only the largest are shown."""


@dataclass(slots=True)
class TargetStatistics:
    """What a target did. Every number only grows."""

    match_keys: int = 0
    """Keys asked for by MATCH."""
    match_hits: int = 0
    """Of those, keys that were here."""
    reads: int = 0
    """READ requests begun."""
    shards_read: int = 0
    """Shards sent."""
    read_bytes: int = 0
    """Bytes of those shards."""
    misses: int = 0
    """Keys of READ requests that were answered "not here"."""
    heads_told: int = 0
    """Shards described to a READ that asked for their heads only, which is counted nowhere else."""
    pooled_reads: int = 0
    """Runs of slots that were not in memory and were read by a thread."""
    read_races: int = 0
    """Shards that were replaced or forgotten while they were being read; also counted as misses."""
    writes: int = 0
    """WRITE requests begun."""
    shards_written: int = 0
    """Shards stored."""
    written_bytes: int = 0
    """Bytes of those shards."""
    shards_known: int = 0
    """Shards of a WRITE that were here already."""
    shards_kept: int = 0
    """Shards of a WRITE that lost to the version that is here."""
    shards_replaced: int = 0
    """Shards that made way for another version."""
    bad_payloads: int = 0
    """Shards of a WRITE whose bytes did not fit their checksum."""
    full_refusals: int = 0
    """Shards not stored because there was no room."""
    io_errors: int = 0
    """System calls on stored bytes that failed for another reason than want of room."""
    forgotten: int = 0
    """Shards dropped by FORGET."""
    rejected_shards: int = 0
    """Stored shards found damaged, by a read or a report; each was taken out of use."""
    false_reports: int = 0
    """Reported shards that were good."""
    evicted_bytes: int = 0
    """Bytes of slots freed by EVICT and WITHDRAW."""
    evictions_refused: int = 0
    """Shards of EVICT and WITHDRAW that were kept: used meanwhile, or another one is here."""
    touched: int = 0
    """Shards that TOUCH made younger."""
    scanned_slots: int = 0
    """Slots described by SCAN."""
    cut_slots: int = 0
    """Slots of which bytes were gone at the start, because their file had been cut short."""


class ClassUsage:
    """What the shards of each TTL class take, and how many of them were read, by class number.

    `bytes` are those of whole slots, so that over all classes they are the target's used_bytes.
    """

    __slots__ = ("blocks", "bytes", "shards_read")

    def __init__(self) -> None:
        self.blocks = [0] * TTL_CLASS_NUMBERS
        self.bytes = [0] * TTL_CLASS_NUMBERS
        self.shards_read = [0] * TTL_CLASS_NUMBERS

    def enter(self, numbers: NDArray[np.uint8], slot_bytes: int) -> None:
        """Shards of these classes have come; each takes `slot_bytes`."""
        for number, count in _count_each(numbers):
            self.blocks[number] += count
            self.bytes[number] += count * slot_bytes

    def leave(self, number: int, slot_bytes: int) -> None:
        """A shard of this class has gone."""
        self.blocks[number] -= 1
        self.bytes[number] -= slot_bytes

    def note_reads(self, numbers: NDArray[np.uint8]) -> None:
        """Shards of these classes are being sent to somebody who uses them."""
        for number, count in _count_each(numbers):
            self.shards_read[number] += count

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """What STAT shows: `classes` and `hits_by_class`; `names` by class number."""
        blocks = _by_name(self.blocks, self.blocks, names)
        sizes = _by_name(self.bytes, self.blocks, names)
        return {
            "classes": {
                name: {"blocks": blocks[name], "bytes": sizes.get(name, 0)} for name in blocks
            },
            "hits_by_class": _by_name(self.shards_read, self.shards_read, names),
        }


def _count_each(numbers: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """How often each number is there. As a rule all are alike, and then numpy is not asked."""
    data = numbers.tobytes()
    if data.count(data[0]) == len(data):
        return [(data[0], len(data))]
    counts = np.bincount(numbers)
    return [(number, int(counts[number])) for number in np.flatnonzero(counts).tolist()]


def _by_name(counts: Sequence[int], ranks: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """`counts` by name of those with the highest `ranks`, and the sum of the others.

    None whose rank is 0. A number without a name, or that is named OTHER_NAME, is among the others.
    """
    is_shown = [rank > 0 and name != OTHER_NAME for rank, name in zip(ranks, names, strict=False)]
    ranked = [number for number, may_be in enumerate(is_shown) if may_be]
    shown = sorted(ranked, key=lambda number: (-ranks[number], number))[:CLASSES_SHOWN_MAX]
    by_name = {names[number]: counts[number] for number in shown}
    rest = sum(counts) - sum(by_name.values())
    return {**by_name, OTHER_NAME: rest} if rest else by_name


class Evictions:
    """Shards that EVICT and WITHDRAW took, by reason, and how long they had not been used."""

    __slots__ = ("age", "count_by_reason")

    def __init__(self) -> None:
        self.count_by_reason = dict.fromkeys(EvictReason, 0)
        self.age = Histogram(AGE_BOUNDS_S)

    def note(self, reasons: NDArray[np.uint8], ages_s: NDArray[Any]) -> None:
        """Shards went; for each of them an EvictReason and the seconds since its last use."""
        counts = np.bincount(reasons, minlength=max(EvictReason) + 1).tolist()
        for reason in EvictReason:
            self.count_by_reason[reason] += counts[reason]
        self.age.add_many(ages_s)

    def describe(self) -> dict[str, Any]:
        """What STAT shows: `evicted` and `evicted_age`."""
        by_reason = {reason.name.lower(): count for reason, count in self.count_by_reason.items()}
        return {"evicted": by_reason, "evicted_age": self.age.to_values()}


_MEASURED = (Op.MATCH, Op.READ, Op.WRITE, Op.EVICT)
_TRAFFIC = frozenset({Op.MATCH, Op.READ, Op.WRITE})
"""What clients ask for; the questions of workers are not traffic that a worker has to yield to."""


class RequestMeter:
    """How long requests took, from the request's arrival to its answer's last byte, and how many
    came from clients lately."""

    __slots__ = ("_before", "_current", "_latencies", "_second")

    def __init__(self) -> None:
        self._latencies: dict[int, Histogram] = {op: Histogram() for op in _MEASURED}
        self._second = 0
        self._current = 0
        self._before = 0

    def note(self, op: int, begun_s: float, ended_s: float) -> None:
        """A request was answered; times on the node's monotonic clock."""
        latency = self._latencies.get(op)
        if latency is not None:
            latency.add(ended_s - begun_s)
        if op in _TRAFFIC:
            if int(ended_s) != self._second:
                self._turn_to(int(ended_s))
            self._current += 1

    def requests_last_s(self, now_s: float) -> float:
        """Requests of clients in the last second, as far as two counts of whole seconds tell."""
        self._turn_to(int(now_s))
        return round(self._current + self._before * (1.0 - now_s % 1.0), 1)

    def describe(self) -> Mapping[str, Any]:
        """The latencies by the name of the operation."""
        return {Op(op).name.lower(): one.to_values() for op, one in self._latencies.items()}

    def _turn_to(self, second: int) -> None:
        if second != self._second:
            self._before = self._current if second == self._second + 1 else 0
            self._current = 0
            self._second = second
