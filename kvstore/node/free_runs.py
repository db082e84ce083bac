"""Runs of neighbouring free slots: give them back, and take a run of a wanted length.

A *location* is a whole number that names a slot; neighbouring slots have neighbouring locations.
Runs that touch are joined. Nothing here knows files: whoever gives runs back chooses numbers that
do not touch where slots are not neighbours (see `segment.LOCATION_BITS`).
"""

from __future__ import annotations

from ..wire import KEYS_PER_REQUEST_MAX

RUN_MAX = KEYS_PER_REQUEST_MAX
"""No request wants a longer run, so longer ones need no order among themselves."""


class FreeRuns:
    """Free slots as maximal runs. All operations take constant time, whatever is free.

    `_buckets[n]` holds the starts of the runs of n slots, the last one those of RUN_MAX or more;
    bit n of `_filled` says whether `_buckets[n]` has any. Each bucket is a dict used as a set that
    remembers its order, so that the same calls always give the same slots.
    """

    def __init__(self) -> None:
        self.slot_count = 0
        self._end_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._buckets: list[dict[int, None]] = [{} for _ in range(RUN_MAX + 1)]
        self._filled = 0

    def give(self, start: int, count: int) -> None:
        """Add `count` slots from `start` on. None of them may be free already."""
        assert count > 0
        end = start + count
        assert start not in self._end_by_start, f"slot {start} is free already"
        assert end not in self._start_by_end, f"slot {end - 1} is free already"
        self.slot_count += count
        before = self._start_by_end.get(start)
        if before is not None:
            self._remove(before)
            start = before
        after = self._end_by_start.get(end)
        if after is not None:
            self._remove(end)
            end = after
        self._add(start, end)

    def take(self, count: int) -> tuple[int, int] | None:
        """Remove one run and return its start and length.

        Its length is `count` if there is such a run (of those the shortest is cut), else that of
        the longest run there is. None if nothing is free.
        """
        assert 0 < count <= RUN_MAX
        if not self._filled:
            return None
        fitting = self._filled >> count
        if fitting:
            bucket = count + (fitting & -fitting).bit_length() - 1
        else:
            bucket = self._filled.bit_length() - 1
        start = next(iter(self._buckets[bucket]))
        end = self._end_by_start[start]
        taken = min(count, end - start)
        self._remove(start)
        if start + taken < end:
            self._add(start + taken, end)
        self.slot_count -= taken
        return start, taken

    def has_run(self, start: int, count: int) -> bool:
        """Whether exactly these slots are one run."""
        return self._end_by_start.get(start) == start + count

    def remove_run(self, start: int, count: int) -> None:
        """Take exactly this run, which must be there."""
        assert self.has_run(start, count)
        self._remove(start)
        self.slot_count -= count

    def runs(self) -> list[tuple[int, int]]:
        """Start and length of every run, in the order of their starts."""
        return [(start, end - start) for start, end in sorted(self._end_by_start.items())]

    def _add(self, start: int, end: int) -> None:
        self._end_by_start[start] = end
        self._start_by_end[end] = start
        bucket = min(end - start, RUN_MAX)
        self._buckets[bucket][start] = None
        self._filled |= 1 << bucket

    def _remove(self, start: int) -> None:
        end = self._end_by_start.pop(start)
        del self._start_by_end[end]
        bucket = min(end - start, RUN_MAX)
        del self._buckets[bucket][start]
        if not self._buckets[bucket]:
            self._filled &= ~(1 << bucket)
