"""The slot: room for one shard, and a header that says what the shard is.

The byte layout stands in docs/formats/slot.md. This module only turns values into bytes and back;
it opens no file. Headers are handled many at a time, as numpy records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

FORMAT_VERSION = 2
HEADER_BYTES = 256

SLOT_HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u2"),
        ("k", "u1"),
        ("m", "u1"),
        ("shard", "u1"),
        ("zero", "V3"),
        ("key", "V32"),
        ("namespace_id", "V16"),
        ("layout", "V16"),
        ("ttl_class", "S16"),
        ("payload_bytes", "<u4"),
        ("block_bytes", "<u4"),
        ("block_index", "<u4"),
        ("zero2", "<u4"),
        ("generation", "<u8"),
        ("created_ns", "<u8"),
        ("payload_xxh3", "<u8"),
        ("block_xxh3", "<u8"),
        ("anchor", "V32"),
        ("zero3", "V72"),
        ("header_xxh3", "<u8"),
    ]
)
MAGIC = np.void(b"CACHSLOT")
CHECKED_BYTES = HEADER_BYTES - 8
"""The header's own checksum covers all bytes before it."""

assert SLOT_HEADER.itemsize == HEADER_BYTES
assert SLOT_HEADER.fields is not None
assert SLOT_HEADER.fields["header_xxh3"][1] == CHECKED_BYTES
_KEY_OFFSET = SLOT_HEADER.fields["key"][1]


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """The size of a slot that has room for a shard of `payload_bytes`."""

    payload_bytes: int

    @property
    def slot_bytes(self) -> int:
        """What a slot takes in its file: the shard's bytes, and its header in the table."""
        return self.payload_bytes + HEADER_BYTES


class HeaderScratch:
    """Memory for the headers of one write at a time.

    Kept, because cutting it anew takes longer than all checksums.
    """

    def __init__(self, count: int) -> None:
        self.view = memoryview(bytearray(count * HEADER_BYTES))
        self._headers: NDArray[Any] = np.frombuffer(self.view, SLOT_HEADER)
        starts = range(0, len(self.view), HEADER_BYTES)
        self._checked = [self.view[at : at + CHECKED_BYTES] for at in starts]

    def repeat(self, header: NDArray[Any], count: int) -> NDArray[Any]:
        """`count` headers that are equal to the one given; dtype SLOT_HEADER, shape (count,)."""
        # As bytes: numpy would copy records field by field.
        self.view[: count * HEADER_BYTES] = header.tobytes() * count
        return self._headers[:count]

    def seal(self, count: int) -> None:
        """`seal_headers` for the first `count`."""
        seal_headers(self._headers[:count], self._checked[:count])


def seal_headers(headers: NDArray[Any], checked: Sequence[memoryview]) -> None:
    """Write magic, version and checksum into `headers` (dtype SLOT_HEADER).

    `checked[i]` is the memory of the first CHECKED_BYTES of header i. All other fields must have
    their values, the zero fields zeros.
    """
    headers["magic"] = MAGIC
    headers["version"] = FORMAT_VERSION
    headers["header_xxh3"] = checksum_headers(checked)


def checksum_headers(checked: Sequence[memoryview]) -> NDArray[np.uint64]:
    """The checksum that each header should carry, of its first CHECKED_BYTES; dtype uint64."""
    return np.fromiter(map(xxh3_64_intdigest, checked), np.uint64, len(checked))


def find_whole_headers(
    headers: NDArray[Any], checked: Sequence[memoryview] | None = None
) -> NDArray[np.bool_]:
    """Which of `headers` (dtype SLOT_HEADER, contiguous) are those of written slots, and whole.

    `checked[i]` is the memory of the first CHECKED_BYTES of header i, for those who have it cut
    already: cutting takes as long as the checksums.
    """
    is_whole: NDArray[np.bool_] = (headers["magic"] == MAGIC) & (
        headers["version"] == FORMAT_VERSION
    )
    if checked is None:
        view = memoryview(headers.tobytes())
        starts = (np.flatnonzero(is_whole) * HEADER_BYTES).tolist()
        candidates = [view[at : at + CHECKED_BYTES] for at in starts]
    else:
        candidates = list(compress(checked, is_whole.tolist()))
    is_whole[is_whole] = checksum_headers(candidates) == headers["header_xxh3"][is_whole]
    return is_whole


def key_words(headers: NDArray[Any]) -> NDArray[np.uint64]:
    """The keys of `headers` (dtype SLOT_HEADER, contiguous) as words; uint64, shape (n, 4)."""
    words = headers.view(np.uint64).reshape(len(headers), HEADER_BYTES // 8)
    return words[:, _KEY_OFFSET // 8 : _KEY_OFFSET // 8 + 4]
