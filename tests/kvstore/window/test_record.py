"""Window records and their heads: golden bytes, limits, and bytes that changed."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.layout import BlockLayout, Section
from kvstore.window.record import (
    TTL_MS_MAX,
    WINDOW_HEAD_BYTES,
    WindowRecord,
    layout_prefix_of,
    parse_head,
)

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden/window.json").read_text()
)["heads"]


def golden_record(number: int) -> WindowRecord:
    data = sha256(f"record {number}".encode()).digest() * (32 + number)
    return WindowRecord(
        key=bytes.fromhex(GOLDEN[number]["key"]),
        namespace_id=bytes.fromhex(GOLDEN[number]["namespace_id"]),
        layout_prefix=layout_prefix_of(BlockLayout((Section("L0", len(data)),))),
        xxh3=xxh3_64_intdigest(data),
        view=memoryview(bytearray(data)),
        put_at_s=0.0,
    )


@pytest.mark.parametrize("number", range(len(GOLDEN)))
def test_head_is_the_golden_one_and_parses_back(number: int) -> None:
    record = golden_record(number)
    packed = record.pack_head(GOLDEN[number]["ttl_ms"] / 1e3)
    assert packed.hex() == GOLDEN[number]["head"]
    head = parse_head(packed)
    assert head == (
        record.key,
        record.namespace_id,
        record.layout_prefix,
        record.xxh3,
        record.size_bytes,
        GOLDEN[number]["ttl_ms"],
    )


@pytest.mark.parametrize(
    ("left_s", "ttl_ms"), [(-3.0, 0), (0.0004, 0), (1.5, 1500), (1e9, TTL_MS_MAX)]
)
def test_ttl_in_a_head_stays_within_its_field(left_s: float, ttl_ms: int) -> None:
    assert parse_head(golden_record(0).pack_head(left_s)).ttl_ms == ttl_ms


@pytest.mark.parametrize("length", [0, WINDOW_HEAD_BYTES - 1, WINDOW_HEAD_BYTES + 1])
def test_head_is_refused_when_it_has_another_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"window head of {length} bytes"):
        parse_head(bytes(length))


@pytest.mark.parametrize("size_bytes", [0, 1023, (16 << 20) + 1, 2**32 - 1])
def test_head_is_refused_when_no_record_has_that_size(size_bytes: int) -> None:
    packed = bytearray(golden_record(0).pack_head(1.0))
    packed[72:76] = size_bytes.to_bytes(4, "little")
    with pytest.raises(ValueError, match=f"window record of {size_bytes} bytes"):
        parse_head(packed)


def test_record_is_intact_until_a_byte_changes() -> None:
    record = golden_record(1)
    assert record.is_intact()
    for place in (0, record.size_bytes // 2, record.size_bytes - 1):
        record.view[place] ^= 1
        assert not record.is_intact()
        record.view[place] ^= 1
    assert record.is_intact()


def test_record_is_of_its_namespace_layout_and_size_only() -> None:
    record = golden_record(0)
    asked = (record.namespace_id, record.layout_prefix, record.size_bytes)
    assert record.is_of(*asked)
    assert not record.is_of(b"x" * 16, *asked[1:])
    assert not record.is_of(asked[0], b"x" * 16, asked[2])
    assert not record.is_of(*asked[:2], record.size_bytes + 64)
