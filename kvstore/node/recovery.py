"""Finds out what a segment holds by reading the headers of its slots, after any kind of end.

Only ranges that were ever written are looked at, so preallocated room costs nothing. Nothing is
written here; docs/formats/slot.md says what a crash leaves and what is made of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .disk import Disk
from .segment import SLOTS_OFFSET, Segment
from .slot import HEADER_BYTES, SLOT_HEADER, find_whole_headers

log = logging.getLogger(__name__)

BATCH_SLOTS = 4096
PREFETCH_BELOW_SLOT_BYTES = 64 << 10
"""Slots smaller than this are brought into memory whole: a device delivers long ranges faster than
many single pages. For larger ones the pages of the headers alone are less work."""


@dataclass(frozen=True, slots=True)
class FoundSlots:
    """Whole slots of a segment: `slots[i]` has `headers[i]` (dtype SLOT_HEADER)."""

    slots: NDArray[np.int64]
    headers: NDArray[Any]
    unreadable: tuple[int, ...]


def scan_segment(disk: Disk, segment: Segment) -> Iterator[FoundSlots]:
    """All whole slots, in batches of at most BATCH_SLOTS; blocks.

    A slot whose header cannot be read is listed as unreadable, and the scan goes on.
    """
    for first, last in _written_slots(disk, segment):
        for start in range(first, last, BATCH_SLOTS):
            yield _scan_batch(disk, segment, start, min(start + BATCH_SLOTS, last))


def _written_slots(disk: Disk, segment: Segment) -> Iterator[tuple[int, int]]:
    """Ranges of slots whose header lies in a part of the file that was ever written."""
    geometry = segment.shape.geometry
    next_slot = 0
    offset = SLOTS_OFFSET
    while next_slot < segment.shape.slot_count:
        found = disk.find_data(segment.descriptor, offset)
        if found is None:
            return
        start, end = found
        # The header of slot i ends at SLOTS_OFFSET + (i + 1) * slot_bytes.
        first = max((start - SLOTS_OFFSET) // geometry.slot_bytes, next_slot)
        last = -(-(end - SLOTS_OFFSET - geometry.header_offset) // geometry.slot_bytes)
        last = min(last, segment.shape.slot_count)
        if first < last:
            yield first, last
            next_slot = last
        offset = end


def _scan_batch(disk: Disk, segment: Segment, first: int, last: int) -> FoundSlots:
    geometry = segment.shape.geometry
    if geometry.slot_bytes < PREFETCH_BELOW_SLOT_BYTES:
        size_bytes = (last - first) * geometry.slot_bytes
        disk.prefetch(segment.descriptor, segment.offset(first), size_bytes)
    raw = bytearray((last - first) * HEADER_BYTES)
    view = memoryview(raw)
    unreadable = []
    for i, slot in enumerate(range(first, last)):
        into = view[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]
        try:
            disk.read(segment.descriptor, into, segment.offset(slot) + geometry.header_offset)
        except OSError as error:
            into[:] = bytes(HEADER_BYTES)
            unreadable.append(slot)
            log.error("header cannot be read file=%s slot=%d: %s", segment.path, slot, error)
    headers = np.frombuffer(raw, SLOT_HEADER)
    is_whole = find_whole_headers(headers) & (headers["payload_bytes"] == geometry.payload_bytes)
    whole = np.flatnonzero(is_whole)
    return FoundSlots(whole + first, headers[whole], tuple(unreadable))
