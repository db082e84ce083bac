"""Finds out what a segment holds by reading the headers of its slots, after any kind of end.

Only ranges that were ever written are looked at, so preallocated room costs nothing. Nothing is
written here; docs/formats/slot.md says what a crash leaves and what is made of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .disk import Disk
from .segment import SLOTS_OFFSET, ReadWay, Segment
from .slot import HEADER_BYTES, SLOT_HEADER, find_whole_headers

log = logging.getLogger(__name__)

BATCH_SLOTS = 4096
READERS = 32
"""Reads on their way at once. A device serves many single pages together far faster than one by
one, and headers alone faster than everything: docs/decisions/0005."""


_HeaderPlace: TypeAlias = tuple[int, int, memoryview]
"""A slot, the offset of its header in the file, and where the header goes."""


@dataclass(frozen=True, slots=True)
class FoundSlots:
    """Whole slots of a segment: `slots[i]` has `headers[i]` (dtype SLOT_HEADER)."""

    slots: NDArray[np.int64]
    headers: NDArray[Any]
    unreadable: tuple[int, ...]


def scan_segment(disk: Disk, segment: Segment, readers: Executor) -> Iterator[FoundSlots]:
    """All whole slots, in batches of at most BATCH_SLOTS; blocks.

    What is not in memory is read by `readers`. A slot whose header cannot be read is listed as
    unreadable, and the scan goes on.
    """
    disk.advise(segment.descriptor, os.POSIX_FADV_RANDOM)
    for first, last in _written_slots(disk, segment):
        for start in range(first, last, BATCH_SLOTS):
            slots = range(start, min(start + BATCH_SLOTS, last))
            yield _scan_batch(disk, segment, slots, readers)
    disk.advise(segment.descriptor, os.POSIX_FADV_NORMAL)


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


def _scan_batch(disk: Disk, segment: Segment, slots: range, readers: Executor) -> FoundSlots:
    raw = bytearray(len(slots) * HEADER_BYTES)
    view = memoryview(raw)
    places = [view[at : at + HEADER_BYTES] for at in range(0, len(raw), HEADER_BYTES)]
    geometry = segment.shape.geometry
    first_offset = segment.offset(slots.start) + geometry.header_offset
    offsets = range(
        first_offset, first_offset + len(slots) * geometry.slot_bytes, geometry.slot_bytes
    )
    left = list(zip(slots, offsets, places, strict=True))
    if segment.read_way is ReadWay.PROBE:
        left = [header for header in left if not _probe(disk, segment, header)]
    if segment.read_way is ReadWay.DIRECT:
        unreadable = _read_headers(disk, segment, left)
    else:
        shares = [left[i::READERS] for i in range(min(READERS, len(left)))]
        found = readers.map(partial(_read_headers, disk, segment), shares)
        unreadable = [slot for share in found for slot in share]
    headers = np.frombuffer(raw, SLOT_HEADER)
    is_whole = find_whole_headers(headers) & (headers["payload_bytes"] == geometry.payload_bytes)
    whole = np.flatnonzero(is_whole)
    return FoundSlots(whole + slots.start, headers[whole], tuple(unreadable))


def _probe(disk: Disk, segment: Segment, header: _HeaderPlace) -> bool:
    """Copy a header if it is in memory; whether it is."""
    _, offset, into = header
    try:
        return disk.read_cached(segment.descriptor, into, offset) == HEADER_BYTES
    except OSError:
        return False  # the thread that reads it meets the same error, and says what it is


def _read_headers(disk: Disk, segment: Segment, headers: Iterable[_HeaderPlace]) -> list[int]:
    """Read headers, each into its place; returns the slots of those that could not be read."""
    unreadable = []
    for slot, offset, into in headers:
        try:
            disk.read(segment.descriptor, into, offset)
        except OSError as error:
            into[:] = bytes(HEADER_BYTES)
            unreadable.append(slot)
            log.error("header cannot be read file=%s slot=%d: %s", segment.path, slot, error)
    return unreadable
