"""Finds stored shards in the files of a target, and damages them. As an outsider would.

Works from docs/formats/slot.md alone and shares no code with the store, whose reading is what is
put to the test. Nothing here knows a process.
"""

import os
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

SEGMENT_HEADER = struct.Struct("<8sIIIII")
SEGMENT_MAGIC = b"CACHSEGM"
HEADERS_OFFSET = 4096
PAYLOAD_ALIGN = 4096

SLOT_HEADER = struct.Struct("<8sHBBB3x32s")
SLOT_MAGIC = b"CACHSLOT"

FLIPPED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One shard in a segment file; `index` is which of the k + m it is."""

    path: Path
    offset: int
    payload_bytes: int
    key: bytes
    index: int


def find_shards(target_folder: Path, keys: Collection[bytes]) -> list[StoredShard]:
    """The shards of these blocks in a target's folder, in the order of files and slots."""
    return [
        shard
        for path in sorted(target_folder.glob("segment-*.seg"))
        for shard in _read_segment(path)
        if shard.key in keys
    ]


def _read_segment(path: Path) -> Iterator[StoredShard]:
    with path.open("rb") as file:
        fields = SEGMENT_HEADER.unpack(file.read(SEGMENT_HEADER.size))
        magic, _, _, payload_bytes, header_bytes, slot_count = fields
        assert magic == SEGMENT_MAGIC, f"{path} is no segment: {magic!r}"
        headers_end = HEADERS_OFFSET + slot_count * header_bytes
        payload_offset = -(-headers_end // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
        for slot in range(slot_count):
            file.seek(HEADERS_OFFSET + slot * header_bytes)
            head = SLOT_HEADER.unpack(file.read(SLOT_HEADER.size))
            slot_magic, _, _, _, index, key = head
            if slot_magic == SLOT_MAGIC:
                offset = payload_offset + slot * payload_bytes
                yield StoredShard(
                    path=path, offset=offset, payload_bytes=payload_bytes, key=key, index=index
                )


def flip_bytes(shard: StoredShard) -> None:
    """Invert some bytes in the middle of a shard, behind its node's back."""
    count = min(FLIPPED_BYTES, shard.payload_bytes)
    offset = shard.offset + (shard.payload_bytes - count) // 2
    descriptor = os.open(shard.path, os.O_RDWR)
    try:
        flipped = bytes(byte ^ 0xFF for byte in os.pread(descriptor, count, offset))
        written = os.pwrite(descriptor, flipped, offset)
        assert written == count, (written, count)
    finally:
        os.close(descriptor)
