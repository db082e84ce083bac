"""Writes the golden bytes of the node's formats: `python -m tests.kvstore.node.write_golden`.

A change of these files is a change of a format: it needs a new version number there, and a line in
the format's page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore import wire
from kvstore.node.segment import SegmentShape, TargetIdentity, pack_segment_header
from kvstore.node.slot import SLOT_HEADER, SlotGeometry, seal_headers

FOLDER = Path(__file__).parent / "golden"
KEY = bytes(range(32))
CLUSTER = bytes(range(0xA0, 0xB0))


def slot_header() -> bytes:
    header = np.zeros(1, SLOT_HEADER)
    header["k"], header["m"], header["shard"] = 10, 2, 11
    header["key"] = np.frombuffer(KEY, "V32")
    header["namespace_id"] = np.frombuffer(b"namespace 16 by.", "V16")
    header["layout"] = np.frombuffer(b"layout finger 16", "V16")
    header["ttl_class"] = b"chat"
    header["payload_bytes"], header["block_bytes"] = 11392, 113920
    header["block_index"] = 77
    header["generation"] = 0x0102030405060708
    header["created_ns"] = 1_800_000_000_123_456_789
    header["payload_xxh3"] = 0x1112131415161718
    header["block_xxh3"] = 0x2122232425262728
    data = bytearray(header.tobytes())
    header = np.frombuffer(data, SLOT_HEADER)
    seal_headers(header, [memoryview(data)[:248]])
    return bytes(data)


def segment_header() -> bytes:
    shape = SegmentShape(number=3, geometry=SlotGeometry(11392), slot_count=23045)
    return pack_segment_header(shape, TargetIdentity(CLUSTER, "n01-d1"))


def hello_request() -> bytes:
    return wire.pack_frame(
        wire.Op.HELLO,
        wire.KIND_REQUEST,
        request_id=0x0102030405060708,
        body=wire.pack_hello(CLUSTER, "n01-d1"),
        epoch=9,
        deadline_ms=1500,
        target=4,
    )


def read_request() -> bytes:
    keys = [KEY, KEY[::-1]]
    return wire.pack_frame(
        wire.Op.READ,
        wire.KIND_REQUEST,
        request_id=2,
        body=wire.pack_read(keys, 11392),
        count=2,
        epoch=9,
        deadline_ms=250,
        target=4,
    )


def read_response() -> bytes:
    """One frame of a response, without its payload: a shard that is here and one that is not."""
    records = np.zeros(2, wire.PART_RECORD)
    records[0] = (1, 11, 0, 11392, 0x0102030405060708, 0x1112131415161718, 0x2122232425262728)
    return wire.pack_frame(
        wire.Op.READ,
        wire.KIND_RESPONSE,
        request_id=2,
        body=wire.pack_part(64, records),
        count=2,
        payload_bytes=11392,
        epoch=9,
        target=4,
        is_last=False,
    )


def refusal() -> bytes:
    return wire.pack_frame(
        wire.Op.MATCH,
        wire.KIND_RESPONSE,
        request_id=3,
        body=b"epoch 8, expected 9",
        epoch=9,
        status=wire.Status.STALE_EPOCH,
        target=4,
    )


GOLDEN: dict[str, Callable[[], bytes]] = {
    "slot_header": slot_header,
    "segment_header": segment_header,
    "frame_hello_request": hello_request,
    "frame_read_request": read_request,
    "frame_read_response": read_response,
    "frame_refusal": refusal,
}


def to_lines(data: bytes) -> str:
    """Hex, 16 bytes a line."""
    return "".join(f"{data[at : at + 16].hex()}\n" for at in range(0, len(data), 16))


def read_golden(name: str) -> bytes:
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


if __name__ == "__main__":
    for name, make in GOLDEN.items():
        (FOLDER / f"{name}.hex").write_text(to_lines(make()))
