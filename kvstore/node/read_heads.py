"""READ with READ_HEADS: what is known of shards, without their bytes.

A client that wants the layers of its blocks one after the other asks for the checksums of all
shards first, and then can check each by itself. All of it stands in the segments' columns, so the
disk is not asked; whether a shard can be read at all shows when it is read. Such a question is no
use of the shards, and counts neither as a read nor as a miss.
"""

from __future__ import annotations

from .. import wire
from .answers import Request, answer
from .node import Node
from .target import Target

_RECORD_BYTES = wire.PART_RECORD.itemsize


def find_read_mistake(shard_bytes: int, flags: int) -> str:
    """Why a READ with these fields is a BAD_REQUEST; empty if it is none."""
    if not 0 < shard_bytes <= wire.PAYLOAD_BYTES_MAX:
        return f"shards of {shard_bytes} bytes, expected 1 to {wire.PAYLOAD_BYTES_MAX}"
    if flags & ~wire.READ_FLAGS:
        return f"flags {flags:#x} of a READ, expected some of {wire.READ_FLAGS:#x}"
    return ""


def describe_heads(
    node: Node, target: Target, request: Request, shard_bytes: int, keys: bytes
) -> memoryview:
    """The one frame that answers: a PART_RECORD for each of `keys`, which stand one after the
    other. Status 1 has what a READ would send, as far as is known without reading it."""
    count = request.header.count
    records = bytearray(count * _RECORD_BYTES)
    told = 0
    for row, location, length in target.index.find_runs(keys):
        segment, slot = target.index.resolve(location)
        if segment.payload_bytes == shard_bytes:
            first, end = slot * _RECORD_BYTES, (slot + length) * _RECORD_BYTES
            at = row * _RECORD_BYTES
            records[at : at + end - first] = segment.columns.part_bytes[first:end]
            told += length
    target.statistics.heads_told += told
    return answer(node, request, body=wire.pack_part(0, memoryview(records)), count=count)
