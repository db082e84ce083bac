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
    assert struct.unpack_from("<HBBB", data, 8) == (1, 10, 2, 11)
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
    assert data[144:248] == bytes(104)
    assert struct.unpack_from("<Q", data, 248) == (xxh3_64_intdigest(data[:248]),)


def test_segment_header_lies_as_its_page_says() -> None:
    data = read_golden("segment_header")
    assert len(data) == 88
    assert data[:8] == b"CACHSEGM"
    assert struct.unpack_from("<IIIIII", data, 8) == (1, 3, 11392, 256, 23045, 0)
    assert data[32:48] == CLUSTER
    assert data[48:80] == b"n01-d1" + bytes(26)
    assert struct.unpack_from("<Q", data, 80) == (xxh3_64_intdigest(data[:80]),)


def test_frame_header_lies_as_its_page_says() -> None:
    data = read_golden("frame_read_response")
    body = data[64:]
    assert data[:4] == b"CHLT"
    assert data[4:8] == bytes([1, 4, 1, 0])
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
