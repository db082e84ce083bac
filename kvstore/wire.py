"""Frames and records of the data plane: bytes in, values out, and back.

The byte layout, the limits and their meaning stand in docs/formats/wire.md. This module knows no
socket: the node and the client each read bytes in their own way and ask here what they say. Nothing
here allocates by a number that a peer sent before that number was checked. The tables of the
records stand in `wire_records`, and are named by way of this module.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from .key import KEY_BYTES
from .wire_records import ANNOUNCE_ANSWER as ANNOUNCE_ANSWER
from .wire_records import ANNOUNCE_HEAD as ANNOUNCE_HEAD
from .wire_records import ANNOUNCE_ITEM as ANNOUNCE_ITEM
from .wire_records import EVICT_ITEM as EVICT_ITEM
from .wire_records import HOST as HOST
from .wire_records import LOCATION as LOCATION
from .wire_records import OFFERED_RUN as OFFERED_RUN
from .wire_records import PART_RECORD as PART_RECORD
from .wire_records import REPORT_ITEM as REPORT_ITEM
from .wire_records import RUN_PIECE as RUN_PIECE
from .wire_records import SCAN_ROW as SCAN_ROW
from .wire_records import TOUCH_ITEM as TOUCH_ITEM
from .wire_records import WINDOW_REQUEST as WINDOW_REQUEST
from .wire_records import WITHDRAW_ITEM as WITHDRAW_ITEM
from .wire_records import WRITE_BATCH as WRITE_BATCH
from .wire_records import WRITE_ITEM as WRITE_ITEM
from .wire_records import EvictOutcome as EvictOutcome
from .wire_records import EvictReason as EvictReason
from .wire_records import ReportOutcome as ReportOutcome
from .wire_records import WriteOutcome as WriteOutcome

MAGIC = b"CHLT"
VERSION = 4
HEADER_BYTES = 64

BODY_BYTES_MAX = 1 << 20
PAYLOAD_BYTES_MAX = 32 << 20
KEYS_PER_REQUEST_MAX = 1024
REPORTS_PER_REQUEST_MAX = 64
"""Each reported shard makes the node read it from the disk and hash it."""
SCAN_SLOTS_MAX = 1 << 16
POLICY_BYTES_MAX = 1 << 16
NOTE_BYTES_MAX = 1 << 14
READ_IS_NO_USE = 1
"""A flag of READ: repair reads shards, which must not make them younger."""
READ_HEADS = 2
"""A flag of READ: only what is known of the shards, no payload; no use either."""
READ_FLAGS = READ_IS_NO_USE | READ_HEADS
"""All flags that READ has; a node refuses others."""
USED_NOW_S = 0xFFFF_FFFF
"""As last_used_s of a TOUCH: now, by the node's own clock."""
PART_BYTES_TARGET = 1 << 20
"""A node cuts a READ response into frames of about this many payload bytes."""

VERSION_RACE_S = 10.0
"""Writers of one key that are closer than this settle on one version; see wire.md."""

assert sys.byteorder == "little", "numbers on the wire are read in place as little-endian"
_HEADER = struct.Struct("<4sBBBBQIIIHHQQQ")
_CHECK = struct.Struct("<Q")
_U32_PAIR = struct.Struct("<II")
_HELLO = struct.Struct("<16s32s")
_SCAN = struct.Struct("<IIII")
_SCAN_HEAD = struct.Struct("<IIIIIIII")
_KEY = np.dtype(f"V{KEY_BYTES}")
assert _HEADER.size == HEADER_BYTES - _CHECK.size

KIND_REQUEST = 0
KIND_RESPONSE = 1
FLAG_LAST = 1
FLAG_PROBE = 2
"""Of a MATCH: asked by a save, which does not want to read what it asks for."""


class Op(IntEnum):
    """What a request asks for."""

    HELLO = 1
    MATCH = 2
    LOCATE = 3
    READ = 4
    WRITE = 5
    FORGET = 6
    REPORT = 7
    STAT = 8
    SCAN = 9
    EVICT = 10
    WITHDRAW = 11
    TOUCH = 12
    POLICY = 13
    NOTE = 14
    LOOKUP = 15
    ANNOUNCE = 16
    WINDOW = 17
    RUN = 18
    TAKE = 19


class Status(IntEnum):
    """How a node answers a request as a whole."""

    OK = 0
    NOT_GREETED = 1
    WRONG_CLUSTER = 2
    WRONG_TARGET = 3
    STALE_EPOCH = 4
    BUSY = 5
    BAD_REQUEST = 6
    DISK_ERROR = 7
    EXPIRED = 8


class FrameError(ValueError):
    """Bytes that are not a frame of this protocol, or break one of its limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a frame; field meanings stand in docs/formats/wire.md."""

    op: int
    kind: int
    request_id: int
    epoch: int = 0
    deadline_ms: int = 0
    count: int = 0
    status: int = 0
    target: int = 0
    is_last: bool = True
    is_probe: bool = False
    body_bytes: int = 0
    payload_bytes: int = 0
    body_xxh3: int = 0


def pack_frame(
    op: Op,
    kind: int,
    *,
    request_id: int,
    body: bytes | bytearray | memoryview = b"",
    count: int = 0,
    payload_bytes: int = 0,
    epoch: int = 0,
    deadline_ms: int = 0,
    status: int = 0,
    target: int = 0,
    is_last: bool = True,
    is_probe: bool = False,
) -> bytes:
    """Header and body of a frame, ready to be sent before its payload of `payload_bytes`."""
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        op,
        kind,
        (FLAG_LAST if is_last else 0) | (FLAG_PROBE if is_probe else 0),
        request_id,
        epoch,
        deadline_ms,
        count,
        status,
        target,
        len(body),
        payload_bytes,
        xxh3_64_intdigest(body),
    )
    return b"".join((head, _CHECK.pack(xxh3_64_intdigest(head)), body))


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in the first 64 bytes of `data`.

    Raises FrameError, naming what was found and what was expected, for anything that is not a
    header of this version within the limits.
    """
    fields = _HEADER.unpack_from(data)
    magic, version, op, kind, flags, request_id, epoch, deadline_ms, count = fields[:9]
    status, target, body_bytes, payload_bytes, body_xxh3 = fields[9:]
    if magic != MAGIC:
        raise FrameError(f"magic {bytes(magic)!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"protocol version {version}, expected {VERSION}")
    check = _CHECK.unpack_from(data, _HEADER.size)[0]
    computed = xxh3_64_intdigest(bytes(data[: _HEADER.size]))
    if check != computed:
        raise FrameError(f"header checksum {check:016x}, computed {computed:016x}")
    if op not in _OPS:
        raise FrameError(f"operation {op}, expected one of {sorted(_OPS)}")
    may_probe = op == Op.MATCH and kind == KIND_REQUEST
    flags_max = FLAG_LAST | FLAG_PROBE if may_probe else FLAG_LAST
    if kind not in (KIND_REQUEST, KIND_RESPONSE) or flags > flags_max:
        raise FrameError(
            f"kind {kind} flags {flags}, expected kind 0 or 1 and flags 0 to {flags_max}"
        )
    if body_bytes > BODY_BYTES_MAX:
        raise FrameError(f"body of {body_bytes} bytes, at most {BODY_BYTES_MAX}")
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise FrameError(f"payload of {payload_bytes} bytes, at most {PAYLOAD_BYTES_MAX}")
    return Header(
        op=op,
        kind=kind,
        request_id=request_id,
        epoch=epoch,
        deadline_ms=deadline_ms,
        count=count,
        status=status,
        target=target,
        is_last=bool(flags & FLAG_LAST),
        is_probe=bool(flags & FLAG_PROBE),
        body_bytes=body_bytes,
        payload_bytes=payload_bytes,
        body_xxh3=body_xxh3,
    )


_OPS = frozenset(int(op) for op in Op)
AGENT_OPS = frozenset((Op.LOOKUP, Op.ANNOUNCE, Op.WINDOW, Op.RUN, Op.TAKE))
"""These are asked of agents; a storage node refuses them."""


def check_request(header: Header) -> None:
    """Raises FrameError unless `header` is one that a client may send.

    A node asks this before it allocates room for the body: the count must fit the body's length, so
    none is longer than that of a WRITE of KEYS_PER_REQUEST_MAX items, or the longest document.
    """
    if header.kind != KIND_REQUEST or not header.is_last or header.status:
        raise FrameError(
            f"kind {header.kind} last {header.is_last} status {header.status} in a request"
        )
    fixed, each, count_max = _REQUEST_BODY_BYTES[Op(header.op)]
    if header.count > count_max:
        raise FrameError(f"{Op(header.op).name} of {header.count}, at most {count_max}")
    expected = fixed + header.count * each
    if header.body_bytes != expected:
        raise FrameError(
            f"{Op(header.op).name} of {header.count} with a body of {header.body_bytes} bytes,"
            f" expected {expected}"
        )


_REQUEST_BODY_BYTES = {
    Op.HELLO: (_HELLO.size, 0, 0),
    Op.MATCH: (0, KEY_BYTES, KEYS_PER_REQUEST_MAX),
    Op.LOCATE: (0, KEY_BYTES, KEYS_PER_REQUEST_MAX),
    Op.READ: (_U32_PAIR.size, KEY_BYTES, KEYS_PER_REQUEST_MAX),
    Op.WRITE: (WRITE_BATCH.itemsize, WRITE_ITEM.itemsize, KEYS_PER_REQUEST_MAX),
    Op.FORGET: (0, KEY_BYTES, KEYS_PER_REQUEST_MAX),
    Op.REPORT: (0, REPORT_ITEM.itemsize, KEYS_PER_REQUEST_MAX),
    Op.STAT: (0, 0, 0),
    Op.SCAN: (_SCAN.size, 0, 0),
    Op.EVICT: (0, EVICT_ITEM.itemsize, KEYS_PER_REQUEST_MAX),
    Op.WITHDRAW: (0, WITHDRAW_ITEM.itemsize, KEYS_PER_REQUEST_MAX),
    Op.TOUCH: (0, TOUCH_ITEM.itemsize, KEYS_PER_REQUEST_MAX),
    Op.POLICY: (0, 1, POLICY_BYTES_MAX),
    Op.NOTE: (0, 1, NOTE_BYTES_MAX),
    Op.LOOKUP: (0, KEY_BYTES, KEYS_PER_REQUEST_MAX),
    Op.ANNOUNCE: (ANNOUNCE_HEAD.itemsize, ANNOUNCE_ITEM.itemsize, KEYS_PER_REQUEST_MAX),
    Op.WINDOW: (WINDOW_REQUEST.itemsize, 0, 0),
    Op.RUN: (RUN_PIECE.itemsize, 0, 0),
    Op.TAKE: (OFFERED_RUN.itemsize, 0, 0),
}
"""Of each request: fixed bytes of its body, bytes for each of `count`, and the most it may count.
POLICY and NOTE carry a document, whose bytes are counted."""


def check_body(header: Header, body: bytes | bytearray | memoryview) -> None:
    """Raises FrameError unless `body` is the one that `header` announced."""
    computed = xxh3_64_intdigest(body)
    if computed != header.body_xxh3:
        raise FrameError(f"body checksum {header.body_xxh3:016x}, computed {computed:016x}")


def pack_hello(cluster: bytes, target: str) -> bytes:
    """Body of HELLO: who the sender believes the peer to be."""
    return _HELLO.pack(cluster, target.encode())


def parse_hello(body: bytes | memoryview) -> tuple[bytes, str]:
    """Cluster id (16 bytes) and target name of a HELLO body; FrameError if it is none."""
    if len(body) != _HELLO.size:
        raise FrameError(f"HELLO of {len(body)} bytes, expected {_HELLO.size}")
    cluster, target = _HELLO.unpack(body)
    try:
        return cluster, target.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise FrameError(f"target name {target!r} is not UTF-8") from error


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Body of MATCH, LOCATE and FORGET."""
    return b"".join(keys)


def split_keys(body: bytes, count: int, offset: int = 0) -> list[bytes]:
    """The `count` keys that begin at `offset` of a body; FrameError unless they fill it exactly."""
    if count > KEYS_PER_REQUEST_MAX:
        raise FrameError(f"{count} keys, at most {KEYS_PER_REQUEST_MAX}")
    if len(body) != offset + count * KEY_BYTES:
        raise FrameError(f"body of {len(body)} bytes for {count} keys behind {offset} bytes")
    # numpy cuts bytes into bytes about six times faster than slicing them one by one.
    keys: list[bytes] = np.frombuffer(body, _KEY, count, offset).tolist()
    return keys


def pack_read(keys: Sequence[bytes], shard_bytes: int, *, is_use: bool = True) -> bytes:
    """Body of a READ request; with `is_use` the shards count as used now."""
    flags = 0 if is_use else READ_IS_NO_USE
    return _U32_PAIR.pack(shard_bytes, flags) + join_keys(keys)


def pack_read_heads(keys: Sequence[bytes], shard_bytes: int) -> bytes:
    """Body of a READ request that asks for part records only."""
    return _U32_PAIR.pack(shard_bytes, READ_HEADS) + join_keys(keys)


def parse_read(body: bytes, count: int) -> tuple[int, int, list[bytes]]:
    """shard_bytes, flags and keys of a READ request; the flags may be unknown ones."""
    keys = split_keys(body, count, _U32_PAIR.size)
    shard_bytes, flags = _U32_PAIR.unpack_from(body)
    return shard_bytes, flags, keys


def parse_joined_read(body: bytes) -> tuple[int, int, bytes]:
    """The same with the keys one after the other, for a body whose length was checked."""
    shard_bytes, flags = _U32_PAIR.unpack_from(body)
    return shard_bytes, flags, body[_U32_PAIR.size :]


def pack_scan(segment: int, first_slot: int, slots_max: int) -> bytes:
    """Body of a SCAN request: where to begin, and how many slots to describe at most."""
    return _SCAN.pack(segment, first_slot, slots_max, 0)


def parse_scan(body: bytes) -> tuple[int, int, int]:
    """Segment, first slot and slots_max of a SCAN request."""
    segment, first_slot, slots_max, _ = _SCAN.unpack(body)
    return segment, first_slot, slots_max


class ScanHead(NamedTuple):
    """What a SCAN response says of its rows; `is_end`: no segment has anything further."""

    segment: int
    first_slot: int
    slots: int
    payload_bytes: int
    next_segment: int
    next_slot: int
    is_end: bool


def pack_scan_head(head: ScanHead) -> bytes:
    """Body of a SCAN response."""
    return _SCAN_HEAD.pack(*head[:6], head.is_end, 0)


def parse_scan_head(body: bytes | bytearray) -> ScanHead:
    """Body of a SCAN response; FrameError if it is none."""
    if len(body) != _SCAN_HEAD.size:
        raise FrameError(f"SCAN answer of {len(body)} bytes, expected {_SCAN_HEAD.size}")
    *numbers, is_end, _ = _SCAN_HEAD.unpack(body)
    return ScanHead._make((*numbers, bool(is_end)))


def pack_part(first: int, records: NDArray[Any] | bytes | memoryview) -> bytes:
    """Body of one frame of a READ response; `records` has dtype PART_RECORD, or is such bytes."""
    data = records.tobytes() if isinstance(records, np.ndarray) else records
    return b"".join((_U32_PAIR.pack(first, 0), data))


class PartColumns(NamedTuple):
    """The records of a READ frame as columns of ints: for the client, which looks at 11 frames for
    every block it fetches, half the time of four numpy columns."""

    first: int
    heads: list[int]
    """Status, shard and payload_bytes in one word, as `part_head` makes it."""
    generations: list[int]
    payload_xxh3: list[int]
    block_xxh3: list[int]


def part_head(status: int, shard: int, payload_bytes: int) -> int:
    """The first 8 bytes of a part record as a little-endian word."""
    return status | shard << 8 | payload_bytes << 32


def parse_part_columns(body: bytes | bytearray, count: int) -> PartColumns:
    """One frame of a READ response; FrameError unless `count` records fill the body exactly."""
    if len(body) != _U32_PAIR.size + count * PART_RECORD.itemsize:
        raise FrameError(f"body of {len(body)} bytes, expected 8 + {count} x 32")
    words = memoryview(body).cast("Q").tolist()
    return PartColumns(words[0] & 0xFFFFFFFF, words[1::4], words[2::4], words[3::4], words[4::4])


def parse_records(
    body: bytes | bytearray, dtype: np.dtype[Any], count: int, offset: int = 0
) -> NDArray[Any]:
    """`count` records of `dtype` behind `offset`; FrameError unless they fill the body exactly."""
    if len(body) != offset + count * dtype.itemsize:
        raise FrameError(
            f"body of {len(body)} bytes, expected {offset} + {count} x {dtype.itemsize}"
        )
    return np.frombuffer(body, dtype, count, offset)


def combine_checksums(keys: Sequence[bytes], columns: Sequence[Sequence[int]]) -> list[int]:
    """block_xxh3 of each block, from its key and the payload_xxh3 of its k data shards.

    `columns`: for each of the k data shards a payload_xxh3 for each block.
    """
    pack = struct.Struct(f"<{len(columns)}Q").pack
    return [
        xxh3_64_intdigest(key + pack(*sums))
        for key, sums in zip(keys, zip(*columns, strict=True), strict=True)
    ]
