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
from .slot import CHECKED_BYTES, HEADER_BYTES, SLOT_HEADER, find_whole_headers

log = logging.getLogger(__name__)

BATCH_SLOTS = 4096
"""Headers in one read: 1 MiB."""


@dataclass(frozen=True, slots=True)
class FoundSlots:
    """Whole slots of a segment: `slots[i]` has `headers[i]` (dtype SLOT_HEADER).

    The headers are good until the next ones are asked for.
    """

    slots: NDArray[np.int64]
    headers: NDArray[Any]
    unreadable: tuple[int, ...]


class HeaderScanner:
    """Reads header tables. Its memory is cut once, which would else take as long as the reading."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._raw = memoryview(bytearray(BATCH_SLOTS * HEADER_BYTES))
        self._headers: NDArray[Any] = np.frombuffer(self._raw, SLOT_HEADER)
        starts = range(0, len(self._raw), HEADER_BYTES)
        self._checked = [self._raw[at : at + CHECKED_BYTES] for at in starts]

    def scan(self, segment: Segment) -> Iterator[FoundSlots]:
        """All whole slots of a segment, in batches of at most BATCH_SLOTS; blocks.

        A slot whose header cannot be read is listed as unreadable, and the scan goes on.
        """
        disk = self._disk
        disk.advise(segment.descriptor, os.POSIX_FADV_SEQUENTIAL)
        for first, last in _written_slots(disk, segment):
            for start in range(first, last, BATCH_SLOTS):
                yield self._scan_batch(segment, range(start, min(start + BATCH_SLOTS, last)))
        disk.advise(segment.descriptor, os.POSIX_FADV_NORMAL)

    def _scan_batch(self, segment: Segment, slots: range) -> FoundSlots:
        count = len(slots)
        raw = self._raw[: count * HEADER_BYTES]
        unreadable: list[int] = []
        try:
            self._disk.read(segment.descriptor, raw, segment.header_offset(slots.start))
        except OSError:
            unreadable = _read_one_by_one(self._disk, segment, slots, raw)
        headers = self._headers[:count]
        is_whole = find_whole_headers(headers, self._checked[:count])
        is_whole &= headers["payload_bytes"] == segment.payload_bytes
        whole = np.flatnonzero(is_whole)
        if len(whole) < count:
            headers = headers[whole]
        return FoundSlots(whole + slots.start, headers, tuple(unreadable))


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
