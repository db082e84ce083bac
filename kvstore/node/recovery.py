"""Finds out what a segment holds by reading its table of headers, after any kind of end.

Only ranges of the table that were ever written are looked at, so preallocated room costs nothing.
Nothing is written here; docs/formats/slot.md says what a crash leaves and what is made of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .disk import Disk
from .segment import HEADERS_OFFSET, Segment
from .slot import HEADER_BYTES, SLOT_HEADER, find_whole_headers

log = logging.getLogger(__name__)

BATCH_SLOTS = 4096
"""Headers in one read: 1 MiB."""


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
    disk.advise(segment.descriptor, os.POSIX_FADV_SEQUENTIAL)
    for first, last in _written_slots(disk, segment):
        for start in range(first, last, BATCH_SLOTS):
            slots = range(start, min(start + BATCH_SLOTS, last))
            yield _scan_batch(disk, segment, slots)
    disk.advise(segment.descriptor, os.POSIX_FADV_NORMAL)


def _written_slots(disk: Disk, segment: Segment) -> Iterator[tuple[int, int]]:
    """Ranges of slots whose header lies in a part of the file that was ever written."""
    next_slot = 0
    offset = HEADERS_OFFSET
    while next_slot < segment.shape.slot_count:
        found = disk.find_data(segment.descriptor, offset)
        if found is None:
            return
        start, offset = found
        first = max((start - HEADERS_OFFSET) // HEADER_BYTES, next_slot)
        last = -(-(offset - HEADERS_OFFSET) // HEADER_BYTES)
        last = min(last, segment.shape.slot_count)
        if first >= last:
            return
        yield first, last
        next_slot = last


def _scan_batch(disk: Disk, segment: Segment, slots: range) -> FoundSlots:
    raw = bytearray(len(slots) * HEADER_BYTES)
    unreadable: list[int] = []
    try:
        disk.read(segment.descriptor, memoryview(raw), segment.header_offset(slots.start))
    except OSError:
        unreadable = _read_one_by_one(disk, segment, slots, memoryview(raw))
    headers = np.frombuffer(raw, SLOT_HEADER)
    is_whole = find_whole_headers(headers) & (headers["payload_bytes"] == segment.payload_bytes)
    whole = np.flatnonzero(is_whole)
    return FoundSlots(whole + slots.start, headers[whole], tuple(unreadable))


def _read_one_by_one(disk: Disk, segment: Segment, slots: range, into: memoryview) -> list[int]:
    """A bad sector spoils the headers in it and no others; returns the slots of those."""
    unreadable = []
    for i, slot in enumerate(slots):
        header = into[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]
        try:
            disk.read(segment.descriptor, header, segment.header_offset(slot))
        except OSError as error:
            header[:] = bytes(HEADER_BYTES)
            unreadable.append(slot)
            log.error("header cannot be read file=%s slot=%d: %s", segment.path, slot, error)
    return unreadable
