"""The slot: one shard, and behind it a header that says what the shard is.

The byte layout stands in docs/formats/slot.md. This module only turns values into bytes and back;
it opens no file. Headers are handled many at a time, as numpy records that lie in the same buffer
as the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

FORMAT_VERSION = 1
HEADER_BYTES = 256
PAYLOAD_ALIGN = 64

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
        ("zero3", "V104"),
        ("header_xxh3", "<u8"),
    ]
)
MAGIC = np.void(b"CACHSLOT")
CHECKED_BYTES = HEADER_BYTES - 8
"""The header's own checksum covers all bytes before it."""

assert SLOT_HEADER.itemsize == HEADER_BYTES
assert SLOT_HEADER.fields is not None
assert SLOT_HEADER.fields["header_xxh3"][1] == CHECKED_BYTES


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """Where things lie in a slot that has room for a shard of `payload_bytes`.

    `header_offset` is the first byte of the header: the payload's end, aligned up.
    """

    payload_bytes: int
    header_offset: int = field(init=False, compare=False)
    slot_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        header_offset = -(-self.payload_bytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
        object.__setattr__(self, "header_offset", header_offset)
        object.__setattr__(self, "slot_bytes", header_offset + HEADER_BYTES)


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


def find_whole_headers(headers: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of `headers` (dtype SLOT_HEADER, contiguous) are those of written slots, and whole."""
    is_whole: NDArray[np.bool_] = (headers["magic"] == MAGIC) & (
        headers["version"] == FORMAT_VERSION
    )
    candidates = np.flatnonzero(is_whole)
    view = memoryview(headers.tobytes())
    starts = (candidates * HEADER_BYTES).tolist()
    checksums = checksum_headers([view[at : at + CHECKED_BYTES] for at in starts])
    is_whole[candidates] = checksums == headers["header_xxh3"][candidates]
    return is_whole
