"""Writes the golden bytes of the node's formats: `python -m tests.kvstore.node.write_golden`.

A change of these files is a change of a format: it needs a new version number there, and a line in
the format's page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore import wire
from kvstore.agent.run_messages import pack_checksum
from kvstore.node.segment import SegmentShape, TargetIdentity, pack_segment_header
from kvstore.node.slot import SLOT_HEADER, SlotGeometry, seal_headers
from kvstore.window.record import WindowRecord

FOLDER = Path(__file__).parent / "golden"
KEY = bytes(range(32))
TICKET = b"a ticket of 16 b"
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
    header["anchor"] = np.frombuffer(KEY[::-1], "V32")
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


def read_heads_request() -> bytes:
    return _request(wire.Op.READ, wire.pack_read_heads([KEY], 11392))


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


def write_request() -> bytes:
    """Without its payload: one shard that a repair brings."""
    batch = np.zeros(1, wire.WRITE_BATCH)
    batch["namespace_id"] = np.frombuffer(b"namespace 16 by.", "V16")
    batch["layout"] = np.frombuffer(b"layout finger 16", "V16")
    batch["ttl_class"], batch["k"], batch["m"], batch["shard"] = b"agent", 10, 2, 11
    batch["shard_bytes"], batch["block_bytes"] = 11392, 113920
    batch["anchor"] = np.frombuffer(KEY[::-1], "V32")
    items = np.zeros(1, wire.WRITE_ITEM)
    items["key"] = np.frombuffer(KEY, "V32")
    items["block_index"], items["last_used_s"] = 77, 1_800_000_000
    items["payload_xxh3"], items["block_xxh3"] = 0x1112131415161718, 0x2122232425262728
    body = batch.tobytes() + items.tobytes()
    return _request(wire.Op.WRITE, body, payload_bytes=11392)


def locate_response() -> bytes:
    records = np.zeros(2, wire.LOCATION)
    records[0] = (1, 11, 0, 11392, 0x0102030405060708, 0x2122232425262728, 1_800_000_000, 77)
    return wire.pack_frame(
        wire.Op.LOCATE,
        wire.KIND_RESPONSE,
        request_id=2,
        body=records.tobytes(),
        count=2,
        epoch=9,
        target=4,
    )


def scan_request() -> bytes:
    return _request(wire.Op.SCAN, wire.pack_scan(3, 1000, 65536), count=0)


def scan_response() -> bytes:
    """With its payload: a slot in use and a free one."""
    rows = np.zeros(2, wire.SCAN_ROW)
    rows[0] = (0x0102030405060708, 1_800_000_000, 77, 1, 5, 11, b"")
    payload = rows.tobytes()
    head = wire.ScanHead(3, 1000, 2, 11392, 4, 0, is_end=False)
    frame = wire.pack_frame(
        wire.Op.SCAN,
        wire.KIND_RESPONSE,
        request_id=2,
        body=wire.pack_scan_head(head),
        count=2,
        payload_bytes=len(payload),
        epoch=9,
        target=4,
    )
    return frame + payload


def evict_request() -> bytes:
    item = ((3 << 24) + 1000, 0x0102030405060708, 1_800_000_000, wire.EvictReason.LEAST_USED, b"")
    return _request(wire.Op.EVICT, np.array([item], wire.EVICT_ITEM).tobytes())


def withdraw_request() -> bytes:
    item = (KEY, 0x2122232425262728, 1_800_000_060, wire.EvictReason.EXPIRED, b"")
    return _request(wire.Op.WITHDRAW, np.array([item], wire.WITHDRAW_ITEM).tobytes())


def touch_request() -> bytes:
    return _request(wire.Op.TOUCH, np.array([(KEY, 1_800_000_000, 0)], wire.TOUCH_ITEM).tobytes())


def lookup_response() -> bytes:
    """Of two keys, one that nobody has."""
    hosts = np.array([b"10.1.2.3:7070", b""], wire.HOST)
    return wire.pack_frame(
        wire.Op.LOOKUP, wire.KIND_RESPONSE, request_id=2, body=hosts.tobytes(), count=2, epoch=9
    )


def announce_request() -> bytes:
    """A record that lives for 180 s more, and one that is gone."""
    head = np.array([(b"[2001:db8::1]:7070", 0x0102030405060708, 361, 0)], wire.ANNOUNCE_HEAD)
    items = np.array([(KEY, 1_415_040, 180_000), (KEY[::-1], 0, 0)], wire.ANNOUNCE_ITEM)
    return _request(wire.Op.ANNOUNCE, head.tobytes() + items.tobytes(), count=2)


def announce_response() -> bytes:
    answer = np.array([(0x1112131415161718, 70_000, 361, 1, 0)], wire.ANNOUNCE_ANSWER)
    return wire.pack_frame(
        wire.Op.ANNOUNCE, wire.KIND_RESPONSE, request_id=2, body=answer.tobytes(), epoch=9
    )


def window_request() -> bytes:
    row = (KEY, b"namespace 16 by.", b"layout finger 16", 1_415_040, 0)
    return _request(wire.Op.WINDOW, np.array([row], wire.WINDOW_REQUEST).tobytes(), count=0)


def window_response() -> bytes:
    """Without its payload."""
    record = WindowRecord(
        key=KEY,
        namespace_id=b"namespace 16 by.",
        layout_prefix=b"layout finger 16",
        xxh3=0x1112131415161718,
        view=memoryview(bytes(4096)),
        put_at_s=0.0,
    )
    return wire.pack_frame(
        wire.Op.WINDOW,
        wire.KIND_RESPONSE,
        request_id=2,
        body=record.pack_head(ttl_left_s=179.5),
        count=1,
        payload_bytes=4096,
    )


def run_request() -> bytes:
    """One mebibyte from the fifth on."""
    row = (TICKET, b"namespace 16 by.", b"layout finger 16", 1_024, 1 << 20, 4 << 20)
    return _request(wire.Op.RUN, np.array([row], wire.RUN_PIECE).tobytes(), count=0)


def run_response() -> bytes:
    """Without its payload."""
    return wire.pack_frame(
        wire.Op.RUN,
        wire.KIND_RESPONSE,
        request_id=2,
        body=pack_checksum(0x1112131415161718),
        count=1,
        payload_bytes=1 << 20,
    )


def take_request() -> bytes:
    row = (TICKET, b"namespace 16 by.", b"layout finger 16", 1_024, 0)
    return _request(wire.Op.TAKE, np.array([row], wire.OFFERED_RUN).tobytes(), count=0)


def _request(op: wire.Op, body: bytes, *, count: int = 1, payload_bytes: int = 0) -> bytes:
    return wire.pack_frame(
        op,
        wire.KIND_REQUEST,
        request_id=2,
        body=body,
        count=count,
        payload_bytes=payload_bytes,
        epoch=9,
        deadline_ms=250,
        target=4,
    )


GOLDEN: dict[str, Callable[[], bytes]] = {
    "slot_header": slot_header,
    "segment_header": segment_header,
    "frame_hello_request": hello_request,
    "frame_read_request": read_request,
    "frame_read_heads_request": read_heads_request,
    "frame_read_response": read_response,
    "frame_refusal": refusal,
    "frame_write_request": write_request,
    "frame_locate_response": locate_response,
    "frame_scan_request": scan_request,
    "frame_scan_response": scan_response,
    "frame_evict_request": evict_request,
    "frame_withdraw_request": withdraw_request,
    "frame_touch_request": touch_request,
    "frame_lookup_response": lookup_response,
    "frame_announce_request": announce_request,
    "frame_announce_response": announce_response,
    "frame_window_request": window_request,
    "frame_window_response": window_response,
    "frame_run_request": run_request,
    "frame_run_response": run_response,
    "frame_take_request": take_request,
}


def to_lines(data: bytes) -> str:
    """Hex, 16 bytes a line."""
    return "".join(f"{data[at : at + 16].hex()}\n" for at in range(0, len(data), 16))


def read_golden(name: str) -> bytes:
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


if __name__ == "__main__":
    for name, make in GOLDEN.items():
        (FOLDER / f"{name}.hex").write_text(to_lines(make()))
