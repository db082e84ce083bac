"""Frames and records: what is packed is parsed again, and nothing else is."""

import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore import wire
from tests.kvstore.node.write_golden import read_golden

U8, U16 = st.integers(0, 0xFF), st.integers(0, 0xFFFF)
U32, U64 = st.integers(0, 0xFFFF_FFFF), st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=20)

_FIELDS = struct.Struct("<4sBBBBQIIIHHQQQ")


def pack_any_header(**fields: bytes | int) -> bytes:
    """A header with a right checksum and whatever else a hostile peer may put there."""
    values = {
        "magic": wire.MAGIC,
        "version": wire.VERSION,
        "op": 2,
        "kind": 0,
        "flags": 1,
        "request_id": 1,
        "epoch": 1,
        "deadline_ms": 1,
        "count": 0,
        "status": 0,
        "target": 0,
        "body_bytes": 0,
        "payload_bytes": 0,
        "body_xxh3": 0,
    } | fields
    head = _FIELDS.pack(*values.values())
    return head + struct.pack("<Q", xxh3_64_intdigest(head))


@given(
    op=st.sampled_from(wire.Op),
    kind=st.sampled_from([wire.KIND_REQUEST, wire.KIND_RESPONSE]),
    body=st.binary(max_size=200),
    request_id=U64,
    count=U32,
    payload_bytes=st.integers(0, wire.PAYLOAD_BYTES_MAX),
    epoch=U32,
    deadline_ms=U32,
    status=U16,
    target=U16,
    is_last=st.booleans(),
)
def test_frame_is_parsed_into_what_it_was_packed_from(
    op: wire.Op,
    kind: int,
    body: bytes,
    request_id: int,
    count: int,
    payload_bytes: int,
    epoch: int,
    deadline_ms: int,
    status: int,
    target: int,
    is_last: bool,
) -> None:
    frame = wire.pack_frame(
        op,
        kind,
        request_id=request_id,
        body=body,
        count=count,
        payload_bytes=payload_bytes,
        epoch=epoch,
        deadline_ms=deadline_ms,
        status=status,
        target=target,
        is_last=is_last,
    )
    header = wire.parse_header(frame)
    expected = {
        **{"op": op, "kind": kind, "request_id": request_id, "epoch": epoch, "count": count},
        **{"deadline_ms": deadline_ms, "status": status, "target": target, "is_last": is_last},
        **{"body_bytes": len(body), "payload_bytes": payload_bytes},
    }
    assert {name: getattr(header, name) for name in expected} == expected
    wire.check_body(header, frame[wire.HEADER_BYTES :])


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.parse_header(data)


@given(
    position=st.integers(0, wire.HEADER_BYTES - 1),
    flip=st.integers(1, 255),
    seed=st.integers(0, 1000),
)
def test_header_is_refused_when_any_byte_is_another(position: int, flip: int, seed: int) -> None:
    keys = [random.Random(seed).randbytes(32)]
    frame = bytearray(
        wire.pack_frame(
            wire.Op.MATCH, wire.KIND_REQUEST, request_id=seed, body=wire.join_keys(keys), count=1
        )
    )
    frame[position] ^= flip
    with pytest.raises(wire.FrameError):
        wire.parse_header(frame)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": b"HTTP"}, "magic"),
        ({"version": 3}, "version 3, expected 4"),
        ({"version": 5}, "version 5, expected 4"),
        ({"op": 0}, "operation 0"),
        ({"op": 20}, "operation 20"),
        ({"kind": 2}, "kind 2"),
        ({"flags": 4}, "flags 4"),
        ({"flags": 3, "op": 3}, "flags 3"),
        ({"flags": 3, "kind": 1}, "flags 3"),
        ({"body_bytes": (1 << 20) + 1}, "body of 1048577 bytes"),
        ({"body_bytes": 0xFFFF_FFFF_FFFF_FFFF}, "body of 18446744073709551615 bytes"),
        ({"payload_bytes": (32 << 20) + 1}, "payload of 33554433 bytes"),
        ({"payload_bytes": 0xFFFF_FFFF_FFFF_FFFF}, "payload of 18446744073709551615 bytes"),
    ],
)
def test_header_is_refused_when_a_field_breaks_a_limit(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(wire.FrameError, match=message):
        wire.parse_header(pack_any_header(**fields))


@given(
    op=st.sampled_from(wire.Op),
    kind=U8,
    flags=U8,
    count=st.one_of(st.integers(0, 2048), U32),
    status=U16,
    body_bytes=st.one_of(st.integers(0, 100_000), U64),
    payload_bytes=U64,
)
def test_request_is_only_accepted_when_its_count_fits_its_body(**fields: int) -> None:
    try:
        header = wire.parse_header(pack_any_header(**fields))
        wire.check_request(header)
    except wire.FrameError:
        return
    keyed = {2: 32, 3: 32, 4: 32, 5: 64, 6: 32, 7: 40, 10: 24, 11: 48, 12: 40, 15: 32, 16: 40}
    documents = {13: 65_536, 14: 16_384}
    bytes_fixed = {1: 48, 4: 8, 5: 96, 9: 16, 16: 80, 17: 72}.get(header.op, 0)
    bytes_each = keyed.get(header.op, 1 if header.op in documents else 0)
    assert header.body_bytes == bytes_fixed + header.count * bytes_each
    assert header.count <= documents.get(header.op, 1024 if header.op in keyed else 0)
    assert header.body_bytes <= 96 + 64 * 1024
    assert (header.kind, header.is_last, header.status) == (0, True, 0)


def test_body_is_refused_when_a_bit_is_flipped() -> None:
    frame = bytearray(
        wire.pack_frame(wire.Op.HELLO, 0, request_id=1, body=wire.pack_hello(b"c" * 16, "t01"))
    )
    header = wire.parse_header(frame)
    frame[-1] ^= 1
    with pytest.raises(wire.FrameError, match="body checksum"):
        wire.check_body(header, frame[wire.HEADER_BYTES :])


@given(cluster=st.binary(min_size=16, max_size=16), target=st.text("abc-09é", max_size=16))
def test_hello_is_parsed_into_what_it_was_packed_from(cluster: bytes, target: str) -> None:
    assert wire.parse_hello(wire.pack_hello(cluster, target)) == (cluster, target)


@pytest.mark.parametrize("body", [b"", b"x" * 47, b"x" * 49, b"c" * 16 + b"\xff" * 32])
def test_hello_is_refused_when_it_is_none(body: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.parse_hello(body)


@given(keys=KEYS, shard_bytes=U32, is_use=st.booleans())
def test_keys_are_split_as_they_were_joined(
    keys: list[bytes], shard_bytes: int, is_use: bool
) -> None:
    assert wire.split_keys(wire.join_keys(keys), len(keys)) == keys
    body = wire.pack_read(keys, shard_bytes, is_use=is_use)
    flags = 0 if is_use else wire.READ_IS_NO_USE
    assert wire.parse_read(body, len(keys)) == (shard_bytes, flags, keys)
    assert wire.parse_joined_read(body) == (shard_bytes, flags, wire.join_keys(keys))
    heads = wire.pack_read_heads(keys, shard_bytes)
    assert wire.parse_read(heads, len(keys)) == (shard_bytes, wire.READ_HEADS, keys)


@given(keys=KEYS, count=U32, cut=st.integers(0, 40))
def test_keys_are_refused_when_the_count_does_not_fit(
    keys: list[bytes], count: int, cut: int
) -> None:
    body = wire.join_keys(keys)[cut:]
    if len(body) == 32 * count:
        assert len(wire.split_keys(body, count)) == count
        return
    with pytest.raises(wire.FrameError):
        wire.split_keys(body, count)


def test_keys_are_refused_when_there_are_too_many() -> None:
    with pytest.raises(wire.FrameError, match="1025 keys, at most 1024"):
        wire.split_keys(bytes(32 * 1025), 1025)


@given(first=U32, rows=st.lists(st.tuples(U8, U8, U32, U64, U64, U64), max_size=10))
def test_parts_are_parsed_into_what_they_were_packed_from(
    first: int, rows: list[tuple[int, int, int, int, int, int]]
) -> None:
    records = np.zeros(len(rows), wire.PART_RECORD)
    for record, (status, shard, size, generation, payload, block) in zip(
        records, rows, strict=True
    ):
        record["status"], record["shard"], record["payload_bytes"] = status, shard, size
        record["generation"], record["payload_xxh3"], record["block_xxh3"] = (
            generation,
            payload,
            block,
        )
    found = wire.parse_part_columns(wire.pack_part(first, records), len(rows))
    assert found == (
        first,
        [wire.part_head(status, shard, size) for status, shard, size, *_ in rows],
        *([row[column] for row in rows] for column in (3, 4, 5)),
    )


def test_part_head_is_the_first_8_bytes_of_a_part_record() -> None:
    golden = read_golden("frame_read_response")
    assert golden[72:80].hex() == "010b0000802c0000"
    assert wire.part_head(1, 11, 11_392) == int.from_bytes(golden[72:80], "little")
    # Another status, a byte that must be zero, or another size is another word.
    assert wire.part_head(1, 11, 11_392) != wire.part_head(0, 11, 11_392)
    assert wire.part_head(1, 0, 256) != wire.part_head(1, 1, 0)


def test_part_columns_of_the_golden_frame_are_known() -> None:
    body = read_golden("frame_read_response")[wire.HEADER_BYTES :]
    assert wire.parse_part_columns(body, 2) == wire.PartColumns(
        first=64,
        heads=[0x00002C80_0000_0B_01, 0],
        generations=[0x0102030405060708, 0],
        payload_xxh3=[0x1112131415161718, 0],
        block_xxh3=[0x2122232425262728, 0],
    )


@pytest.mark.parametrize(
    ("size", "count"), [(0, 0), (0, 1), (7, 0), (9, 0), (39, 1), (41, 1), (72, 1), (40, 2)]
)
def test_parts_are_refused_when_the_count_does_not_fit(size: int, count: int) -> None:
    with pytest.raises(wire.FrameError, match=f"body of {size} bytes, expected 8 [+] {count} x 32"):
        wire.parse_part_columns(bytes(size), count)


def test_block_checksum_is_that_of_the_key_and_the_shard_checksums_in_order() -> None:
    keys = [bytes(range(32)), bytes(range(32)), bytes(32)]
    rows = np.array([[1, 2, 3], [3, 2, 1], [1, 2, 3]], np.uint64)
    expected = [
        xxh3_64_intdigest(key + struct.pack("<QQQ", *row))
        for key, row in zip(keys, rows.tolist(), strict=True)
    ]
    assert wire.combine_checksums(keys, rows.T.tolist()) == expected
    assert len(set(expected)) == 3


@given(numbers=st.tuples(U32, U32, U32))
def test_scan_is_parsed_into_what_it_was_packed_from(numbers: tuple[int, int, int]) -> None:
    assert wire.parse_scan(wire.pack_scan(*numbers)) == numbers


@given(head=st.builds(wire.ScanHead, U32, U32, U32, U32, U32, U32, st.booleans()))
def test_scan_head_is_parsed_into_what_it_was_packed_from(head: wire.ScanHead) -> None:
    assert wire.parse_scan_head(wire.pack_scan_head(head)) == head


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_scan_head_is_refused_when_it_is_none(size: int) -> None:
    with pytest.raises(wire.FrameError, match=f"{size} bytes, expected 32"):
        wire.parse_scan_head(bytes(size))
