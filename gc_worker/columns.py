"""The shards of one own target as columns, fetched from the node by SCAN.

A copy, and soft at that: a shard may be used, replaced or gone by the time somebody looks at it.
Whoever acts on a row says which generation is meant, and up to which last use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.node.segment import LOCATION_BITS
from kvstore.node.slot import SlotGeometry

SLOTS_PER_SCAN = 1 << 15
"""Describing so many slots holds up a node for about a millisecond."""

ScanStep = Callable[[int, int, int], Awaitable[tuple[wire.ScanHead, NDArray[Any]]]]
"""Answers SCAN for (segment, first slot, slots_max): `ClusterLink.scan` with its target bound."""


@dataclass(frozen=True, slots=True)
class TargetColumns:
    """Shards in the index of one target, row by row; all arrays have shape [rows].

    30 bytes a row. `class_names[ttl_class[row]]` is the name of a row's TTL class; a number behind
    the end of `class_names` is one that the node had no name for.
    """

    location: NDArray[np.int64]
    generation: NDArray[np.uint64]
    last_used_s: NDArray[np.uint32]
    block_index: NDArray[np.uint32]
    slot_bytes: NDArray[np.uint32]
    ttl_class: NDArray[np.uint8]
    shard: NDArray[np.uint8]
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.location)

    def take(self, rows: NDArray[np.int64]) -> TargetColumns:
        """Some of the rows, in the order of `rows`."""
        columns = {name: getattr(self, name)[rows] for name in _DTYPES}
        return TargetColumns(**columns, class_names=self.class_names)


_DTYPES: dict[str, type[np.generic]] = {
    "location": np.int64,
    "generation": np.uint64,
    "last_used_s": np.uint32,
    "block_index": np.uint32,
    "slot_bytes": np.uint32,
    "ttl_class": np.uint8,
    "shard": np.uint8,
}


class ColumnsBuilder:
    """Gathers the rows of SCAN answers."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in _DTYPES}

    def add(self, head: wire.ScanHead, rows: NDArray[Any]) -> int:
        """Take the shards among `rows` (dtype SCAN_ROW); how many there were."""
        slots = np.flatnonzero(rows["status"] == 1)
        if not len(slots):
            return 0
        first = (head.segment << LOCATION_BITS) + head.first_slot
        slot_bytes = SlotGeometry(head.payload_bytes).slot_bytes
        self._pieces["location"].append(slots + first)
        self._pieces["slot_bytes"].append(np.full(len(slots), slot_bytes, np.uint32))
        for name in ("generation", "last_used_s", "block_index", "ttl_class", "shard"):
            self._pieces[name].append(rows[name][slots])
        return len(slots)

    def build(self, class_names: tuple[str, ...]) -> TargetColumns:
        """The columns; the builder is empty afterwards."""
        # One column after the other, so that only one of them is in memory twice.
        columns: dict[str, NDArray[Any]] = {}
        for name, dtype in _DTYPES.items():
            pieces = self._pieces[name]
            whole = np.concatenate(pieces) if pieces else np.zeros(0, dtype)
            columns[name] = whole.astype(dtype, copy=False)
            pieces.clear()
        return TargetColumns(**columns, class_names=class_names)


async def scan_columns(
    scan: ScanStep, class_names: tuple[str, ...], *, slots_per_scan: int = SLOTS_PER_SCAN
) -> TargetColumns:
    """All shards of a target. Raises NodeError.

    A segment that is added or removed meanwhile is seen or not; each slot is seen at most once.
    """
    builder = ColumnsBuilder()
    segment, first_slot = 0, 0
    while True:
        head, rows = await scan(segment, first_slot, slots_per_scan)
        builder.add(head, rows)
        next_at = (head.next_segment, head.next_slot)
        if head.is_end or next_at <= (segment, first_slot):
            # A node that does not get on would keep us here for ever.
            return builder.build(class_names)
        segment, first_slot = next_at
