"""Key -> location, and back. It has at most one entry a slot, so the target's size bounds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from .segment import ABSENT, LOCATION_BITS, SLOT_MASK, Segment


class SlotIndex:
    """Where the shard of each key is. `segments` is the target's, by number, and may grow."""

    def __init__(self, segments: Mapping[int, Segment]) -> None:
        self._segments = segments
        self._locations: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, key: bytes) -> bool:
        return key in self._locations

    def get(self, key: bytes) -> int:
        """The key's location, or ABSENT."""
        return self._locations.get(key, ABSENT)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The location of each key, ABSENT where there is none."""
        return list(map(self._locations.get, keys, repeat(ABSENT)))

    def has_none(self, keys: Sequence[bytes]) -> bool:
        """Whether none of the keys is here."""
        return self._locations.keys().isdisjoint(keys)

    def contains_each(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Whether each key is here; shape (len(keys),)."""
        return np.fromiter(map(self._locations.__contains__, keys), np.bool_, len(keys))

    def put(self, keys: Sequence[bytes], segment: Segment, first_slot: int) -> list[int]:
        """Point `keys` to neighbouring slots. Returns the locations that some pointed to before."""
        before: list[int] = []
        if not self.has_none(keys):
            before = [location for location in self.find(keys) if location != ABSENT]
            for location in before:
                self._forget_slot(location)
        slots = slice(first_slot, first_slot + len(keys))
        assert segment.columns.keys[slots].count(None) == len(keys)
        segment.columns.keys[slots] = keys
        first = segment.shape.first_location + first_slot
        self._locations.update(zip(keys, range(first, first + len(keys)), strict=True))
        return before

    def drop(self, key: bytes) -> int:
        """Remove the key's entry. Returns the location it pointed to, or ABSENT."""
        location = self._locations.pop(key, ABSENT)
        if location != ABSENT:
            self._forget_slot(location)
        return location

    def resolve(self, location: int) -> tuple[Segment, int]:
        """Segment and slot of a location."""
        return self._segments[location >> LOCATION_BITS], location & SLOT_MASK

    def _forget_slot(self, location: int) -> None:
        segment, slot = self.resolve(location)
        segment.columns.keys[slot] = None
