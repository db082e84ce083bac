"""Slot headers of the own node, read from its segment files.

Read-only and beside the node: `kvstored` may rewrite a slot at any moment. A header is therefore
believed only if it is whole and of the generation that was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.node.segment import HEADERS_OFFSET, LOCATION_BITS, SLOT_MASK
from kvstore.node.slot import HEADER_BYTES, SLOT_HEADER, find_whole_headers

GAP_SLOTS_MAX = 15
"""Headers of so many slots in between are read along: a page, cheaper than a second call."""
FILES_OPEN_MAX = 64


@dataclass(frozen=True, slots=True)
class Headers:
    """Headers that were found: `rows` says which of the slots asked for, dtype of `headers` is
    SLOT_HEADER."""

    rows: NDArray[np.int64]
    headers: NDArray[Any]


@dataclass(slots=True)
class HeaderReader:
    """Reads headers from one target's folder; blocks. Keeps a few files open until `close`."""

    folder: Path
    _descriptors: dict[int, int] = field(default_factory=dict)

    def read(self, locations: Sequence[int], generations: NDArray[np.uint64]) -> Headers:
        """Headers of the slots at `locations` that still hold the shards of `generations`.

        Slots that were freed or reused, and files that are gone or cannot be read, are left out.
        """
        order = sorted(range(len(locations)), key=locations.__getitem__)
        found = np.zeros(len(locations), SLOT_HEADER)
        for number, rows in groupby(order, key=lambda row: locations[row] >> LOCATION_BITS):
            self._read_segment(number, list(rows), locations, found)
        is_whole = find_whole_headers(found)
        kept = np.flatnonzero(is_whole & (found["generation"] == generations))
        return Headers(kept, found[kept])

    def _read_segment(
        self, number: int, rows: list[int], locations: Sequence[int], found: NDArray[Any]
    ) -> None:
        for run in _split_runs(rows, locations):
            first = locations[run[0]] & SLOT_MASK
            count = (locations[run[-1]] & SLOT_MASK) - first + 1
            headers = self._pread(number, first, count)
            for row in run:
                at = (locations[row] & SLOT_MASK) - first
                if at < len(headers):
                    found[row] = headers[at]

    def _pread(self, number: int, first_slot: int, count: int) -> NDArray[Any]:
        """Up to `count` headers from `first_slot` on; none if the file cannot be read."""
        try:
            descriptor = self._open(number)
            offset = HEADERS_OFFSET + first_slot * HEADER_BYTES
            data = os.pread(descriptor, count * HEADER_BYTES, offset)
        except OSError:
            # The segment was deleted, or a sector is bad: the node reports that itself.
            self._drop(number)
            return np.zeros(0, SLOT_HEADER)
        return np.frombuffer(data, SLOT_HEADER, len(data) // HEADER_BYTES)

    def _open(self, number: int) -> int:
        descriptor = self._descriptors.get(number)
        if descriptor is not None and not os.fstat(descriptor).st_nlink:
            # Deleted; after a restart the node may have given its number to another file.
            self._drop(number)
            descriptor = None
        if descriptor is None:
            while len(self._descriptors) >= FILES_OPEN_MAX:
                self._drop(next(iter(self._descriptors)))
            path = self.folder / f"segment-{number:06d}.seg"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors[number] = descriptor
        return descriptor

    def _drop(self, number: int) -> None:
        descriptor = self._descriptors.pop(number, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Closes all files; `read` opens them again."""
        for number in list(self._descriptors):
            self._drop(number)


def _split_runs(rows: list[int], locations: Sequence[int]) -> list[list[int]]:
    """Cut rows, which ascend by location, where the next one lies too far off to be read along."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and locations[row] - locations[runs[-1][-1]] <= GAP_SLOTS_MAX + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
