"""The shards of one own target in the order of their last use, hottest first, in bounded memory.

The order of all of them would not fit next to 10^7 slots. So the columns are read again and again,
and each time the next band of rows is kept: the coldest of one band bounds the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.node.segment import LOCATION_BITS

from .columns import SLOTS_PER_SCAN, ScanStep

BAND_ROWS_MAX = 1 << 18
"""5 MB. A band is sorted while nothing else runs: a twentieth of a second."""


@dataclass(frozen=True, slots=True)
class Band:
    """Rows by falling `last_used_s` (uint32); where that is equal by `location` (int64), so that
    blocks of one span stay together. `generation` is uint64. All arrays have shape [rows]."""

    location: NDArray[np.int64]
    generation: NDArray[np.uint64]
    last_used_s: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.location)

    def take(self, rows: Any) -> Band:  # noqa: ANN401 (whatever indexes an array)
        """Some of the rows."""
        return Band(self.location[rows], self.generation[rows], self.last_used_s[rows])

    def is_before(self, last_used_s: int, location: int) -> NDArray[np.bool_]:
        """Which rows come before that place in the order."""
        before: NDArray[np.bool_] = (self.last_used_s > last_used_s) | (
            (self.last_used_s == last_used_s) & (self.location < location)
        )
        return before


class HottestRows:
    """Gathers the first `limit` rows behind `after`, the last row of the band before (or None)."""

    def __init__(self, limit: int, after: tuple[int, int] | None) -> None:
        self._limit = limit
        self._after = after
        self._before: tuple[int, int] | None = None
        """The coldest row of a whole band that was seen: nothing colder can belong to it."""
        self._pieces: list[Band] = []
        self._rows = 0
        self.is_cut = False
        """Whether there are rows behind the band."""

    def add(self, band: Band) -> None:
        """Take rows, in any order."""
        if self._after is not None:
            used_s, location = self._after
            band = band.take(~band.is_before(used_s, location) & (band.location != location))
        if self._before is not None:
            band = band.take(band.is_before(*self._before))
        self._pieces.append(band)
        self._rows += len(band)
        if self._rows > 2 * self._limit:
            self._cut()

    def build(self) -> Band:
        """The band."""
        return self._cut()

    def _cut(self) -> Band:
        whole = Band(
            *(
                np.concatenate([getattr(piece, name) for piece in self._pieces] or [empty])
                for name, empty in _EMPTY.items()
            )
        )
        order = np.lexsort((whole.location, -whole.last_used_s.astype(np.int64)))
        if len(order) > self._limit:
            self.is_cut = True
        whole = whole.take(order[: self._limit])
        if self.is_cut:
            self._before = (int(whole.last_used_s[-1]), int(whole.location[-1]))
        self._pieces, self._rows = [whole], len(whole)
        return whole


_EMPTY: dict[str, NDArray[Any]] = {
    "location": np.zeros(0, np.int64),
    "generation": np.zeros(0, np.uint64),
    "last_used_s": np.zeros(0, np.uint32),
}


def rows_of_scan(head: wire.ScanHead, rows: NDArray[Any]) -> Band:
    """The shards in one answer to SCAN (`rows`: dtype SCAN_ROW), in the order of their slots."""
    slots = np.flatnonzero(rows["status"] == 1)
    first = (head.segment << LOCATION_BITS) + head.first_slot
    return Band(slots + first, rows["generation"][slots], rows["last_used_s"][slots])


async def walk_slots(
    scan: ScanStep, *, slots_per_scan: int = SLOTS_PER_SCAN
) -> AsyncIterator[tuple[wire.ScanHead, NDArray[Any]]]:
    """Every answer to SCAN of one target, from its first segment to its last. Raises NodeError."""
    segment, first_slot = 0, 0
    while True:
        head, rows = await scan(segment, first_slot, slots_per_scan)
        yield head, rows
        next_at = (head.next_segment, head.next_slot)
        if head.is_end or next_at <= (segment, first_slot):
            return  # a node that does not get on would keep us here for ever
        segment, first_slot = next_at


async def walk_hottest(
    scan: ScanStep, *, band_rows_max: int = BAND_ROWS_MAX, slots_per_scan: int = SLOTS_PER_SCAN
) -> AsyncIterator[Band]:
    """All shards of one target, band after band. Raises NodeError.

    A shard that is used while this goes on moves to the front and may be passed over.
    """
    after: tuple[int, int] | None = None
    while True:
        hottest = HottestRows(band_rows_max, after)
        async for head, rows in walk_slots(scan, slots_per_scan=slots_per_scan):
            hottest.add(rows_of_scan(head, rows))
        band = hottest.build()
        if len(band):
            yield band
        if not hottest.is_cut:
            return
        after = (int(band.last_used_s[-1]), int(band.location[-1]))
