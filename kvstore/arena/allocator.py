"""Which parts of the arena are free: pure bookkeeping, best fit, neighbours joined."""

from __future__ import annotations

from bisect import bisect_left, insort

from .run_layout import RUN_ALIGN_BYTES


class RangeAllocator:
    """Hands out ranges of [0, size_bytes) in whole pages."""

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes > 0, size_bytes
        assert size_bytes % RUN_ALIGN_BYTES == 0, size_bytes
        self.size_bytes = size_bytes
        self._free: list[tuple[int, int]] = [(0, size_bytes)]
        """(offset, bytes), by offset; no two are neighbours."""
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.size_bytes - sum(self._taken.values())

    @property
    def largest_free_bytes(self) -> int:
        """The longest range that could be handed out now."""
        return max((length for _, length in self._free), default=0)

    def allocate(self, length_bytes: int) -> int | None:
        """Offset of a range of at least `length_bytes`, or None if there is no such range free."""
        assert length_bytes > 0, length_bytes
        length = -(-length_bytes // RUN_ALIGN_BYTES) * RUN_ALIGN_BYTES
        fitting = [one for one in self._free if one[1] >= length]
        if not fitting:
            return None
        offset, found = min(fitting, key=lambda one: (one[1], one[0]))
        self._free.remove((offset, found))
        if found > length:
            insort(self._free, (offset + length, found - length))
        self._taken[offset] = length
        return offset

    def release(self, offset: int) -> None:
        """The range that begins at `offset` is free again. It must have been handed out."""
        length = self._taken.pop(offset)
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + length:
            length += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            length += before
        insort(self._free, (offset, length))
