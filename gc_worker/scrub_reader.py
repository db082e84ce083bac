"""Reads slots of one segment file and says which of them are bad. Blocks; changes nothing.

The node may write the same slots meanwhile, so a slot that looks bad may only be in between: the
one who asked has the node look again before anything is done about it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvstore.node.page_probe import PageProbe
from kvstore.node.segment import (
    HEADERS_OFFSET,
    SegmentShape,
    TargetIdentity,
    parse_segment_header,
)
from kvstore.node.slot import HEADER_BYTES, SLOT_HEADER, find_whole_headers

_NO_KEY = bytes(32)

Pread = Callable[[int, Sequence[memoryview], int], int]
"""`os.preadv`, or one that fails where a test wants it to."""


class SlotState(enum.Enum):
    """What a slot looks like."""

    GOOD = "good"
    BAD = "bad"
    """The payload does not fit the header's checksum, or cannot be read."""
    BAD_HEADER = "bad header"
    """The header does not fit its own checksum, or cannot be read: nobody knows what this is."""
    OTHER = "other"
    """A whole header of another generation: the slot was written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One slot; `key` is zeros if the header is bad."""

    location: int
    generation: int
    state: SlotState
    key: bytes = _NO_KEY
    problem: str = ""


class SegmentReader:
    """One open segment file. Make it with `open`; `close` it."""

    def __init__(self, descriptor: int, shape: SegmentShape, probe: PageProbe | None) -> None:
        self.pread: Pread = os.preadv
        self._descriptor = descriptor
        self._shape = shape
        self._probe = probe

    @classmethod
    def open(cls, folder: Path, identity: TargetIdentity, number: int) -> SegmentReader:
        """Raises OSError if it cannot be opened, ValueError if it is not that segment."""
        path = folder / f"segment-{number:06d}.seg"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            shape = parse_segment_header(os.pread(descriptor, HEADERS_OFFSET, 0), identity)
            if shape.number != number or os.fstat(descriptor).st_size < shape.file_bytes:
                raise ValueError(f"{path.name} is another segment, or was cut short")
            # What is read here is read once: no reading ahead.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            return cls(descriptor, shape, PageProbe.open(descriptor, shape.file_bytes))
        except (OSError, ValueError):
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Closes the file."""
        if self._probe is not None:
            self._probe.close()
        os.close(self._descriptor)

    def check(self, slots: Sequence[int], generations: NDArray[np.uint64]) -> list[Found]:
        """What is in `slots`, which ascend and hold shards of these generations by the index.

        The slots' payloads are read run by run; memory that was not used for them before is free
        again afterwards.
        """
        inside = [slot for slot in slots if slot < self._shape.slot_count]
        found: list[Found] = []
        at = 0
        for _, run in groupby(enumerate(inside), key=lambda pair: pair[1] - pair[0]):
            count = len(list(run))
            found += self._check_run(inside[at], count, generations[at : at + count])
            at += count
        return found

    def _check_run(self, first: int, count: int, generations: NDArray[np.uint64]) -> list[Found]:
        headers, is_readable = self._read_headers(first, count)
        is_whole = find_whole_headers(headers) & is_readable
        size = self._shape.geometry.payload_bytes
        payloads = np.empty((count, size), np.uint8)
        problems = self._read_payloads(first, payloads)
        found = []
        for i in range(count):
            location, generation = self._shape.first_location + first + i, int(generations[i])
            if not is_whole[i]:
                problem = "its header does not fit its own checksum"
                state, key = SlotState.BAD_HEADER, _NO_KEY
            elif int(headers["generation"][i]) != generation:
                state, key, problem = SlotState.OTHER, _NO_KEY, ""
            else:
                key = headers["key"][i].tobytes()
                problem = problems[i] or _judge(headers[i], payloads[i])
                state = SlotState.BAD if problem else SlotState.GOOD
            found.append(
                Found(
                    location=location,
                    generation=generation,
                    state=state,
                    key=key,
                    problem=problem,
                )
            )
        return found

    def _read_headers(self, first: int, count: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        headers = np.zeros(count, SLOT_HEADER)
        view = headers.view(np.uint8).data
        offset = HEADERS_OFFSET + first * HEADER_BYTES
        return headers, self._read_pieces(view, offset, HEADER_BYTES) == ""

    def _read_payloads(self, first: int, payloads: NDArray[np.uint8]) -> NDArray[np.str_]:
        """Fill `payloads`; for each "" or why it could not be read."""
        size = self._shape.geometry.payload_bytes
        offset = self._shape.payload_offset + first * size
        cold = [not self._is_cached(offset + i * size, size) for i in range(len(payloads))]
        problems = self._read_pieces(payloads.reshape(-1).data, offset, size)
        for is_cold, run in groupby(range(len(payloads)), key=cold.__getitem__):
            if is_cold:
                rows = list(run)
                self._forget_pages(offset + rows[0] * size, len(rows) * size)
        return problems

    def _read_pieces(self, into: memoryview, offset: int, size: int) -> NDArray[np.str_]:
        """Fill `into`, whose pieces have `size` bytes each; one that fails spoils no other."""
        count = len(into) // size
        if not _read_error(self.pread, self._descriptor, into, offset):
            return np.full(count, "", "U64")
        return np.array(
            [
                _read_error(
                    self.pread, self._descriptor, into[i * size : (i + 1) * size], offset + i * size
                )
                for i in range(count)
            ],
            "U64",
        )

    def _is_cached(self, offset: int, size: int) -> bool:
        return self._probe is None or self._probe.is_cached(offset, size)

    def _forget_pages(self, offset: int, size: int) -> None:
        """Give back the pages that lie wholly in these bytes; a neighbour may use the others."""
        start = -(-offset // PAGESIZE) * PAGESIZE
        length = (offset + size) // PAGESIZE * PAGESIZE - start
        if length > 0:
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _read_error(pread: Pread, descriptor: int, into: memoryview, offset: int) -> str:
    """Fill `into`; "" or why that is not possible."""
    done = 0
    try:
        while done < len(into):
            count = pread(descriptor, [into[done:]], offset + done)
            if not count:
                return "the file ends before it"
            done += count
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    return ""


def _judge(header: np.void, payload: NDArray[np.uint8]) -> str:
    """ "" if the payload is the one that the header was written for, or what is wrong."""
    computed, expected = xxh3_64_intdigest(payload.data), int(header["payload_xxh3"])
    if int(header["payload_bytes"]) != len(payload):
        return f"its header speaks of {int(header['payload_bytes'])} bytes"
    return "" if computed == expected else f"checksum {computed:016x}, expected {expected:016x}"
