"""What a window record is, and the head that goes before its bytes to another host.

A record is the sliding-window (SWA) state of a sequence at one position, an anchor: the bytes of
one layout, named by the key of the block that ends there. Offsets: docs/formats/window.md. Where
records are kept is the business of `pool`, where they are looked for that of `directory`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from ..key import KEY_BYTES, NAMESPACE_ID_BYTES
from ..layout import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BlockLayout

LAYOUT_PREFIX_BYTES = 16
"""So much of a layout's fingerprint tells two layouts apart."""
TTL_MS_MAX = 2**32 - 1
_HEAD = struct.Struct(f"<{KEY_BYTES}s{NAMESPACE_ID_BYTES}s{LAYOUT_PREFIX_BYTES}sQII")
WINDOW_HEAD_BYTES = _HEAD.size
assert WINDOW_HEAD_BYTES == 80


class WindowHead(NamedTuple):
    """What is told of a record before its bytes.

    `layout_prefix`: first 16 bytes of the fingerprint of the layout; `xxh3`: xxh3-64 of the bytes;
    `ttl_ms`: how long the host that sends it will keep it, if it has room so long.
    """

    key: bytes
    namespace_id: bytes
    layout_prefix: bytes
    xxh3: int
    size_bytes: int
    ttl_ms: int


@dataclass(slots=True, eq=False)
class WindowRecord:
    """One record of a pool. Everything but `is_held` stays as it is.

    `view`: the bytes, in the pool's own memory and without a copy. Once the pool has let the record
    go (`is_held` is false) they may be overwritten by another record at any time, also while they
    are being sent: then they do not fit `xxh3` any more, and whoever receives them must find that.
    """

    key: bytes
    namespace_id: bytes
    layout_prefix: bytes
    xxh3: int
    view: memoryview
    put_at_s: float
    is_held: bool = True

    @property
    def size_bytes(self) -> int:
        return len(self.view)

    def is_of(self, namespace_id: bytes, layout_prefix: bytes, size_bytes: int) -> bool:
        """Whether it is what somebody asks for who knows its key and these."""
        return (
            self.namespace_id == namespace_id
            and self.layout_prefix == layout_prefix
            and len(self.view) == size_bytes
        )

    def is_intact(self) -> bool:
        """Whether the bytes fit the checksum now; reads all of them."""
        return xxh3_64_intdigest(self.view) == self.xxh3

    def pack_head(self, ttl_left_s: float) -> bytes:
        """The 80 bytes that are sent before the record's own."""
        ttl_ms = min(max(int(ttl_left_s * 1e3), 0), TTL_MS_MAX)
        size_bytes = len(self.view)
        return _HEAD.pack(
            self.key, self.namespace_id, self.layout_prefix, self.xxh3, size_bytes, ttl_ms
        )


def layout_prefix_of(layout: BlockLayout) -> bytes:
    """What a record keeps of the fingerprint of its layout: 16 bytes."""
    return layout.fingerprint[:LAYOUT_PREFIX_BYTES]


def parse_head(data: bytes | bytearray | memoryview) -> WindowHead:
    """The head that `data` is. Raises ValueError if it is not 80 bytes, or the size is none that a
    record may have."""
    if len(data) != WINDOW_HEAD_BYTES:
        raise ValueError(f"window head of {len(data)} bytes, expected {WINDOW_HEAD_BYTES}")
    head = WindowHead._make(_HEAD.unpack(data))
    if not BLOCK_BYTES_MIN <= head.size_bytes <= BLOCK_BYTES_MAX:
        raise ValueError(
            f"window record of {head.size_bytes} bytes, expected {BLOCK_BYTES_MIN}"
            f" to {BLOCK_BYTES_MAX}"
        )
    return head
