"""Records of the data plane: their fields as numpy dtypes, and the numbers that outcomes have.

Tables only, after docs/formats/wire.md; everybody names them by way of `wire`, which cuts frames
into them.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class WriteOutcome(IntEnum):
    """What became of one shard of a WRITE."""

    STORED = 1
    KNOWN = 2
    KEPT = 3
    FULL = 4
    REJECTED = 5
    FAILED = 6


class ReportOutcome(IntEnum):
    """What a node found when a client said that a shard is bad."""

    GOOD = 0
    QUARANTINED = 1
    ABSENT = 2


class EvictReason(IntEnum):
    """Why a shard goes."""

    EXPIRED = 1
    """Its class's TTL has passed since it was last used."""
    LEAST_USED = 2
    """The target passed its high watermark."""
    ORPHANED = 3
    """Too few shards of its block are left to read it."""


class EvictOutcome(IntEnum):
    """What became of one shard of an EVICT or WITHDRAW."""

    ABSENT = 0
    EVICTED = 1
    USED = 2
    """Used later than the request says; kept."""
    OTHER = 3
    """Another version or generation is here; kept."""


LOCATION = np.dtype(
    [
        ("status", "u1"),
        ("shard", "u1"),
        ("zero", "<u2"),
        ("payload_bytes", "<u4"),
        ("generation", "<u8"),
        ("block_xxh3", "<u8"),
        ("last_used_s", "<u4"),
        ("block_index", "<u4"),
    ]
)
PART_RECORD = np.dtype(
    [
        ("status", "u1"),
        ("shard", "u1"),
        ("zero", "<u2"),
        ("payload_bytes", "<u4"),
        ("generation", "<u8"),
        ("payload_xxh3", "<u8"),
        ("block_xxh3", "<u8"),
    ]
)
WRITE_BATCH = np.dtype(
    [
        ("namespace_id", "V16"),
        ("layout", "V16"),
        ("ttl_class", "S16"),
        ("k", "u1"),
        ("m", "u1"),
        ("shard", "u1"),
        ("zero", "V5"),
        ("shard_bytes", "<u4"),
        ("block_bytes", "<u4"),
        ("anchor", "V32"),
    ]
)
WRITE_ITEM = np.dtype(
    [
        ("key", "V32"),
        ("block_index", "<u4"),
        ("last_used_s", "<u4"),
        ("payload_xxh3", "<u8"),
        ("block_xxh3", "<u8"),
        ("zero2", "<u8"),
    ]
)
REPORT_ITEM = np.dtype([("key", "V32"), ("generation", "<u8")])
SCAN_ROW = np.dtype(
    [
        ("generation", "<u8"),
        ("last_used_s", "<u4"),
        ("block_index", "<u4"),
        ("status", "u1"),
        ("ttl_class", "u1"),
        ("shard", "u1"),
        ("zero", "V5"),
    ]
)
EVICT_ITEM = np.dtype(
    [
        ("location", "<u8"),
        ("generation", "<u8"),
        ("used_until_s", "<u4"),
        ("reason", "u1"),
        ("zero", "V3"),
    ]
)
WITHDRAW_ITEM = np.dtype(
    [
        ("key", "V32"),
        ("block_xxh3", "<u8"),
        ("used_until_s", "<u4"),
        ("reason", "u1"),
        ("zero", "V3"),
    ]
)
TOUCH_ITEM = np.dtype([("key", "V32"), ("last_used_s", "<u4"), ("zero", "<u4")])
HOST = np.dtype("S64")
"""Address of an agent, "ip:port" in ASCII, NUL padded; empty for nobody."""
ANNOUNCE_HEAD = np.dtype(
    [("host", HOST), ("instance", "<u8"), ("records", "<u4"), ("flags", "<u4")]
)
ANNOUNCE_ITEM = np.dtype([("key", "V32"), ("bytes", "<u4"), ("ttl_ms", "<u4")])
ANNOUNCE_ANSWER = np.dtype(
    [
        ("instance", "<u8"),
        ("entries", "<u4"),
        ("host_entries", "<u4"),
        ("flags", "<u4"),
        ("zero", "<u4"),
    ]
)
WINDOW_REQUEST = np.dtype(
    [
        ("key", "V32"),
        ("namespace_id", "V16"),
        ("layout", "V16"),
        ("bytes", "<u4"),
        ("zero", "<u4"),
    ]
)
OFFERED_RUN = np.dtype(
    [
        ("ticket", "V16"),
        ("namespace_id", "V16"),
        ("layout", "V16"),
        ("blocks", "<u4"),
        ("zero", "<u4"),
    ]
)
RUN_PIECE = np.dtype(
    [
        ("ticket", "V16"),
        ("namespace_id", "V16"),
        ("layout", "V16"),
        ("blocks", "<u4"),
        ("bytes", "<u4"),
        ("start", "<u8"),
    ]
)
assert (LOCATION.itemsize, PART_RECORD.itemsize) == (32, 32)
assert (WRITE_BATCH.itemsize, WRITE_ITEM.itemsize, REPORT_ITEM.itemsize) == (96, 64, 40)
assert (SCAN_ROW.itemsize, EVICT_ITEM.itemsize) == (24, 24)
assert (WITHDRAW_ITEM.itemsize, TOUCH_ITEM.itemsize) == (48, 40)
assert (ANNOUNCE_HEAD.itemsize, ANNOUNCE_ITEM.itemsize) == (80, 40)
assert (ANNOUNCE_ANSWER.itemsize, WINDOW_REQUEST.itemsize) == (24, 72)
assert (OFFERED_RUN.itemsize, RUN_PIECE.itemsize) == (56, 64)
