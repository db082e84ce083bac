"""The formats on disk and on the wire are what they were, and what their pages say."""

import struct

import pytest
from xxhash import xxh3_64_intdigest

from tests.kvstore.node.write_golden import CLUSTER, GOLDEN, KEY, read_golden


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_those_of_the_golden_file(name: str) -> None:
    assert GOLDEN[name]() == read_golden(name)


def test_slot_header_lies_as_its_page_says() -> None:
    # The offsets of docs/formats/slot.md, read with struct, which shares nothing with numpy's view.
    data = read_golden("slot_header")
    assert len(data) == 256
    assert data[:8] == b"CACHSLOT"
    assert struct.unpack_from("<HBBB", data, 8) == (2, 10, 2, 11)
    assert data[13:16] == bytes(3)
    assert data[16:48] == KEY
    assert data[48:64] == b"namespace 16 by."
    assert data[64:80] == b"layout finger 16"
    assert data[80:96] == b"chat" + bytes(12)
    assert struct.unpack_from("<IIII", data, 96) == (11392, 113920, 77, 0)
    assert struct.unpack_from("<QQQQ", data, 112) == (
        0x0102030405060708,
        1_800_000_000_123_456_789,
        0x1112131415161718,
        0x2122232425262728,
    )
    assert data[144:176] == KEY[::-1]
    assert data[176:248] == bytes(72)
    assert struct.unpack_from("<Q", data, 248) == (xxh3_64_intdigest(data[:248]),)


def test_segment_header_lies_as_its_page_says() -> None:
    data = read_golden("segment_header")
    assert len(data) == 88
    assert data[:8] == b"CACHSEGM"
    assert struct.unpack_from("<IIIIII", data, 8) == (2, 3, 11392, 256, 23045, 0)
    assert data[32:48] == CLUSTER
    assert data[48:80] == b"n01-d1" + bytes(26)
    assert struct.unpack_from("<Q", data, 80) == (xxh3_64_intdigest(data[:80]),)


def test_frame_header_lies_as_its_page_says() -> None:
    data = read_golden("frame_read_response")
    body = data[64:]
    assert data[:4] == b"CHLT"
    assert data[4:8] == bytes([4, 4, 1, 0])
    assert struct.unpack_from("<QIIIHHQQQ", data, 8) == (
        *(2, 9, 0, 2, 0, 4),
        *(len(body), 11392, xxh3_64_intdigest(body)),
    )
    assert struct.unpack_from("<Q", data, 56) == (xxh3_64_intdigest(data[:56]),)
    assert struct.unpack_from("<II", body) == (64, 0)
    assert struct.unpack_from("<BBHIQQQ", body, 8) == (
        *(1, 11, 0, 11392),
        *(0x0102030405060708, 0x1112131415161718, 0x2122232425262728),
    )
    assert body[40:] == bytes(32)


def test_records_of_a_write_lie_as_their_page_says() -> None:
    body = read_golden("frame_write_request")[64:]
    assert len(body) == 96 + 64
    assert body[:48] == b"namespace 16 by." + b"layout finger 16" + b"agent" + bytes(11)
    assert struct.unpack_from("<BBB5sII", body, 48) == (10, 2, 11, bytes(5), 11392, 113920)
    assert body[64:96] == KEY[::-1]
    assert body[96:128] == KEY
    assert struct.unpack_from("<IIQQQ", body, 128) == (
        *(77, 1_800_000_000),
        *(0x1112131415161718, 0x2122232425262728, 0),
    )


def test_location_lies_as_its_page_says() -> None:
    body = read_golden("frame_locate_response")[64:]
    assert struct.unpack_from("<BBHIQQII", body) == (
        *(1, 11, 0, 11392),
        *(0x0102030405060708, 0x2122232425262728, 1_800_000_000, 77),
    )
    assert body[32:] == bytes(32)


def test_scan_lies_as_its_page_says() -> None:
    request = read_golden("frame_scan_request")
    assert struct.unpack("<IIII", request[64:]) == (3, 1000, 65536, 0)
    data = read_golden("frame_scan_response")
    assert struct.unpack_from("<I", data, 24) == (2,)
    assert struct.unpack_from("<QQ", data, 32) == (32, 48)
    assert struct.unpack_from("<IIIIIIII", data, 64) == (3, 1000, 2, 11392, 4, 0, 0, 0)
    assert struct.unpack_from("<QIIBBB5s", data, 96) == (
        *(0x0102030405060708, 1_800_000_000, 77, 1, 5, 11),
        bytes(5),
    )
    assert data[120:] == bytes(24)


def test_flags_of_a_read_lie_as_their_page_says() -> None:
    assert read_golden("frame_read_request")[64:72] == struct.pack("<II", 11392, 0)
    heads = read_golden("frame_read_heads_request")[64:]
    assert struct.unpack("<II32s", heads) == (11392, 2, KEY)


def test_items_of_evictions_lie_as_their_page_says() -> None:
    evict = read_golden("frame_evict_request")[64:]
    assert struct.unpack("<QQIB3s", evict) == (
        *((3 << 24) + 1000, 0x0102030405060708, 1_800_000_000, 2),
        bytes(3),
    )
    withdraw = read_golden("frame_withdraw_request")[64:]
    assert struct.unpack("<32sQIB3s", withdraw) == (
        *(KEY, 0x2122232425262728, 1_800_000_060, 1),
        bytes(3),
    )
    touch = read_golden("frame_touch_request")[64:]
    assert struct.unpack("<32sII", touch) == (KEY, 1_800_000_000, 0)


def test_announcement_lies_as_its_page_says() -> None:
    body = read_golden("frame_announce_request")[64:]
    assert struct.unpack_from("<64sQII", body) == (
        b"[2001:db8::1]:7070" + bytes(46),
        *(0x0102030405060708, 361, 0),
    )
    assert struct.unpack_from("<32sII", body, 80) == (KEY, 1_415_040, 180_000)
    assert struct.unpack_from("<32sII", body, 120) == (KEY[::-1], 0, 0)
    answer = read_golden("frame_announce_response")[64:]
    assert struct.unpack("<QIIII", answer) == (0x1112131415161718, 70_000, 361, 1, 0)


def test_lookup_and_window_lie_as_their_page_says() -> None:
    hosts = read_golden("frame_lookup_response")[64:]
    assert hosts == b"10.1.2.3:7070" + bytes(51) + bytes(64)
    request = read_golden("frame_window_request")[64:]
    assert struct.unpack("<32s16s16sII", request) == (
        *(KEY, b"namespace 16 by.", b"layout finger 16"),
        *(1_415_040, 0),
    )
    head = read_golden("frame_window_response")[64:]
    assert struct.unpack("<32s16s16sQII", head) == (
        *(KEY, b"namespace 16 by.", b"layout finger 16"),
        *(0x1112131415161718, 4096, 179_500),
    )
