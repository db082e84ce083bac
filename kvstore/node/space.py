"""The room of a target: its segments, which of their slots are free, and when to add a segment.

Each slot size has its own segments. Room that is not yet in a segment goes to whichever size asks
first; a segment whose slots are all free may be given to another size when no other room is left.
Decisions only: files are made and removed by whoever carries a `Growth` out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .free_runs import FreeRuns
from .segment import (
    ABSENT,
    HEADERS_OFFSET,
    LOCATION_BITS,
    SLOT_MASK,
    SLOTS_PER_SEGMENT_MAX,
    Segment,
    SegmentShape,
)
from .slot import SlotGeometry

SEGMENTS_PER_TARGET_MIN = 8
"""A small target gets small segments, so that one slot size cannot take all of it at once."""
SEGMENTS_PER_TARGET_MAX = (1 << 16) - 1
"""The index can tell no more apart (`index.HANDLES_MAX`), and each takes a descriptor. A large
target gets longer segments than wanted, so that half of them are enough."""
REFUSED_SEGMENT_BYTES_MIN = 1 << 20
"""If the disk has no room for a segment of this length, none that is smaller is tried."""


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Neighbouring slots of one segment."""

    segment: Segment
    first_slot: int
    count: int

    @property
    def first_location(self) -> int:
        return self.segment.shape.first_location + self.first_slot

    @property
    def locations(self) -> range:
        return range(self.first_location, self.first_location + self.count)


@dataclass(frozen=True, slots=True)
class Growth:
    """A segment to be made, after `removed` are deleted; those have left the space already."""

    shape: SegmentShape
    removed: tuple[Segment, ...]


def plan_runs(locations: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut locations into runs of neighbours: (row, first location, slots) of each.

    The slots of a run lie next to each other in one file *and* in the order they were asked for;
    rows without a location (ABSENT) are in none.
    """
    count = len(locations)
    if count and locations[0] != ABSENT:
        first = locations[0]
        if count == 1 or locations == list(range(first, first + count)):
            return [(0, first, count)]
    runs: list[tuple[int, int, int]] = []
    begun, expected = 0, ABSENT
    for row, location in enumerate(locations):
        if location != expected or location == ABSENT:
            if expected != ABSENT:
                runs.append((begun, locations[begun], row - begun))
            begun = row
        expected = ABSENT if location == ABSENT else location + 1
    if expected != ABSENT:
        runs.append((begun, locations[begun], count - begun))
    return runs


class SlotSpace:
    """Segments by number, and the free slots of each slot size."""

    def __init__(self, *, capacity_bytes: int, segment_bytes: int, slots_max: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.segments: dict[int, Segment] = {}
        self.segment_bytes_wanted = segment_bytes
        self._numbers: list[int] = []
        self._slots_max = slots_max
        self._free: dict[SlotGeometry, FreeRuns] = {}
        self._next_number = 0
        self._file_bytes = 0
        self.slot_count = 0

    @property
    def free_slots(self) -> int:
        """Slots of all sizes that can be taken."""
        return sum(free.slot_count for free in self._free.values())

    @property
    def _segment_bytes(self) -> int:
        """How long a new segment should be; its file may be as short as half of that."""
        most = self.capacity_bytes // SEGMENTS_PER_TARGET_MIN
        least = self.capacity_bytes // (SEGMENTS_PER_TARGET_MAX // 2)
        return max(min(self.segment_bytes_wanted, most), least)

    def slots_possible(self) -> int:
        """Slots there can be at most, as long as none is smaller than those of today."""
        slot_bytes = [geometry.slot_bytes for geometry in self._free]
        return min(self._slots_max, self.capacity_bytes // min(slot_bytes)) if slot_bytes else 0

    def slots_to_index(self) -> int:
        """The same, or the slots there are, if those are more: the target may have been larger."""
        return max(self.slots_possible(), self.slot_count)

    def first_from(self, number: int) -> Segment | None:
        """The segment with the lowest number that is at least `number`."""
        at = bisect_left(self._numbers, number)
        return self.segments[self._numbers[at]] if at < len(self._numbers) else None

    def grow(self, capacity_bytes: int) -> None:
        """There is more room from now on."""
        self.capacity_bytes = max(capacity_bytes, self.capacity_bytes)

    def add(self, segment: Segment, free: list[tuple[int, int]]) -> None:
        """Take in a segment; `free` are its free slots as (first slot, count)."""
        shape = segment.shape
        assert shape.number not in self.segments
        self.segments[shape.number] = segment
        insort(self._numbers, shape.number)
        self._next_number = max(self._next_number, shape.number + 1)
        self._file_bytes += shape.file_bytes
        self.slot_count += shape.slot_count
        runs = self._free.setdefault(shape.geometry, FreeRuns())
        for first_slot, count in free:
            runs.give(shape.first_location + first_slot, count)

    def take(self, geometry: SlotGeometry, count: int) -> list[SlotRun]:
        """Up to `count` free slots, as few runs of neighbours as there are; fewer if it is full."""
        runs: list[SlotRun] = []
        free = self._free.get(geometry)
        while free is not None and count:
            taken = free.take(count)
            if taken is None:
                break
            start, length = taken
            runs.append(self.run_at(start, length))
            count -= length
        return runs

    def run_at(self, first_location: int, count: int) -> SlotRun:
        """Neighbouring slots by where they begin."""
        segment = self.segments[first_location >> LOCATION_BITS]
        return SlotRun(segment, first_location & SLOT_MASK, count)

    def give(self, segment: Segment, first_slot: int, count: int = 1) -> None:
        """Make slots free again. Their headers must have been cleared."""
        shape = segment.shape
        self._free[shape.geometry].give(shape.first_location + first_slot, count)

    def plan_growth(self, geometry: SlotGeometry) -> Growth | None:
        """A segment for slots of this size, or None if there is no room for a single one.

        The segments it removes leave the space at once, so that nobody takes slots of them.
        """
        room = self._room(geometry)
        removed: list[Segment] = []
        wanted = plan_slot_count(geometry, self._segment_bytes, self.capacity_bytes)
        candidates = self._wholly_free(geometry)
        if len(self.segments) - len(candidates) >= SEGMENTS_PER_TARGET_MAX:
            return None
        for segment in candidates:
            if room >= wanted and len(self.segments) < SEGMENTS_PER_TARGET_MAX:
                break
            self._drop(segment)
            removed.append(segment)
            room = self._room(geometry)
        slot_count = min(wanted, room)
        if slot_count < 1:
            assert not removed, "the room of a whole segment does not hold one slot"
            return None
        shape = SegmentShape(number=self._next_number, geometry=geometry, slot_count=slot_count)
        self._next_number += 1
        return Growth(shape, tuple(removed))

    def plan_smaller_growth(self, refused: SegmentShape) -> Growth | None:
        """What to try after the disk had no room for that segment, or None to give up.

        The disk may be smaller than the target, or others may use it. First wholly free segments of
        other slot sizes make way, as few as should do; when there are none, the segment is halved.
        Each call removes a segment or halves, so the calls come to an end.
        """
        removed: list[Segment] = []
        freed_bytes = 0
        for segment in self._wholly_free(refused.geometry):
            if freed_bytes >= refused.file_bytes:
                break
            self._drop(segment)
            removed.append(segment)
            freed_bytes += segment.shape.file_bytes
        slot_count = refused.slot_count
        if not removed:
            if slot_count == 1 or refused.file_bytes <= REFUSED_SEGMENT_BYTES_MIN:
                return None
            slot_count //= 2
        shape = SegmentShape(
            number=self._next_number, geometry=refused.geometry, slot_count=slot_count
        )
        self._next_number += 1
        return Growth(shape, tuple(removed))

    def describe(self) -> dict[str, int]:
        """What STAT shows: free slots of all segments, and their bytes, which stay allocated."""
        free = [(runs.slot_count, geometry.slot_bytes) for geometry, runs in self._free.items()]
        return {
            "slots_free": sum(count for count, _ in free),
            "slot_bytes_free": sum(count * slot_bytes for count, slot_bytes in free),
        }

    def _room(self, geometry: SlotGeometry) -> int:
        """Slots of this size that a new segment could have at most."""
        left_bytes = self.capacity_bytes - self._file_bytes
        return min(
            plan_slot_count(geometry, left_bytes, left_bytes), self._slots_max - self.slot_count
        )

    def _wholly_free(self, geometry: SlotGeometry) -> list[Segment]:
        """Segments of other slot sizes that nothing needs and that are worth removing."""
        room_bytes = self.capacity_bytes - self._file_bytes
        candidates = [
            segment
            for segment in self.segments.values()
            if segment.shape.geometry != geometry
            and not segment.pins
            and self._free[segment.shape.geometry].has_run(
                segment.shape.first_location, segment.shape.slot_count
            )
        ]
        reachable = room_bytes + sum(segment.shape.file_bytes for segment in candidates)
        return candidates if plan_slot_count(geometry, reachable, reachable) else []

    def _drop(self, segment: Segment) -> None:
        shape = segment.shape
        self._free[shape.geometry].remove_run(shape.first_location, shape.slot_count)
        del self.segments[shape.number]
        del self._numbers[bisect_left(self._numbers, shape.number)]
        self._file_bytes -= shape.file_bytes
        self.slot_count -= shape.slot_count


def give_slots_without(
    space: SlotSpace,
    segment: Segment,
    is_used: NDArray[np.bool_],
    out_of_use: NDArray[np.int64] | Sequence[int],
) -> None:
    """Make free all slots of a segment that are neither used nor out of use."""
    is_free = np.ones(segment.shape.slot_count + 2, np.bool_)
    is_free[[0, -1]] = False
    is_free[1:-1] = ~is_used
    is_free[1:-1][np.asarray(out_of_use, np.int64)] = False
    edges = np.flatnonzero(np.diff(is_free)).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        space.give(segment, first, end - first)


def plan_slot_count(geometry: SlotGeometry, segment_bytes: int, limit_bytes: int) -> int:
    """Slots of a segment of about `segment_bytes`: at least one if that fits `limit_bytes`."""
    slots = min((segment_bytes - HEADERS_OFFSET) // geometry.slot_bytes, SLOTS_PER_SEGMENT_MAX)
    while slots > 1 and file_bytes(geometry, slots) > segment_bytes:
        # Payloads begin on a page of their own: that costs a few of the smallest slots at most.
        slots -= 1
    slots = max(slots, 1)
    return slots if file_bytes(geometry, slots) <= limit_bytes else 0


def file_bytes(geometry: SlotGeometry, slot_count: int) -> int:
    """Length of a segment file with so many slots."""
    return SegmentShape(number=0, geometry=geometry, slot_count=slot_count).file_bytes
