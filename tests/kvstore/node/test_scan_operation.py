"""SCAN: every slot once, as it is, in pieces of any length."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Status
from tests.kvstore.node.driven_node import DrivenNode, ScannedSlot
from tests.kvstore.node.raw_client import keys_of, make_shards

SHARD_BYTES = 500


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t", segment_bytes=16 << 10)
    yield node
    node.close()


def test_scan_of_an_empty_target_ends_at_once(driven: DrivenNode) -> None:
    assert driven.scan() == []


def test_scan_describes_what_is_here(driven: DrivenNode, rng: random.Random) -> None:
    first, second = make_shards(rng, 2, SHARD_BYTES)
    driven.write([first], shard=7, ttl_class=b"agent")
    driven.clock.advance(10)
    driven.write([second], shard=8, ttl_class=b"chat")
    names = driven.target_stat()["ttl_classes"]
    here = {slot.location: slot for slot in driven.scan() if slot.status}
    assert len(here) == 2
    for shard, used_s, ttl_class, number in (
        (first, 1_800_000_000, "agent", 7),
        (second, 1_800_000_010, "chat", 8),
    ):
        location = driven.target.index.get(shard.key)
        assert here[location] == ScannedSlot(
            location=location,
            generation=driven.target.generation(location),
            last_used_s=used_s,
            block_index=shard.block_index,
            status=1,
            ttl_class=names.index(ttl_class),
            shard=number,
        )


@pytest.mark.parametrize("slots_max", [1, 3, 7, 1000, wire.SCAN_SLOTS_MAX])
def test_scan_goes_through_every_slot_once(
    driven: DrivenNode, rng: random.Random, slots_max: int
) -> None:
    small, large = make_shards(rng, 50, SHARD_BYTES), make_shards(rng, 9, 3000)
    driven.write(small)
    driven.write(large)
    driven.forget(keys_of(small[10:20]))
    found = driven.scan(slots_max)
    segments = driven.target.space.segments
    assert len(segments) > 3
    assert [slot.location for slot in found] == [
        (number << 24) + slot
        for number, segment in sorted(segments.items())
        for slot in range(segment.shape.slot_count)
    ]
    kept = keys_of(small[:10] + small[20:] + large)
    assert sorted(slot.location for slot in found if slot.status) == sorted(
        driven.target.index.find(kept)
    )
    free = [slot for slot in found if not slot.status]
    assert {replace(slot, location=0) for slot in free} == {ScannedSlot(*[0] * 7)}
    assert driven.target_stat()["scanned_slots"] == len(found)


def test_scan_goes_on_behind_a_segment_that_is_gone(driven: DrivenNode, rng: random.Random) -> None:
    driven.write(make_shards(rng, 60, SHARD_BYTES))
    numbers = sorted(driven.target.space.segments)
    last = numbers[-1]
    for segment, slot in ((last - 1, 1 << 20), (last, 0), (last - 1, 0xFFFF_FFFF)):
        answer = driven.ask(wire.Op.SCAN, wire.pack_scan(segment, slot, 5))
        head = wire.parse_scan_head(answer.body)
        assert (head.segment, head.first_slot, head.slots) == (last, 0, 5)
        assert head.payload_bytes == SHARD_BYTES
    answer = driven.ask(wire.Op.SCAN, wire.pack_scan(last + 1, 0, 5))
    assert wire.parse_scan_head(answer.body) == wire.ScanHead(0, 0, 0, 0, 0, 0, is_end=True)
    assert answer.payloads == [b""]


@pytest.mark.parametrize("slots_max", [0, wire.SCAN_SLOTS_MAX + 1, 0xFFFF_FFFF])
def test_scan_is_refused_when_its_length_is_out_of_bounds(
    driven: DrivenNode, slots_max: int
) -> None:
    answer = driven.ask(wire.Op.SCAN, wire.pack_scan(0, 0, slots_max))
    assert answer.status is Status.BAD_REQUEST


def test_scan_is_shorter_when_memory_is_short(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t", memory_bytes=1 << 20, segment_bytes=1 << 20)
    driven.write(make_shards(rng, 100, 64))
    operation = driven.begin(wire.Op.SCAN, body=wire.pack_scan(0, 0, wire.SCAN_SLOTS_MAX))
    answer = driven.run(operation)
    assert answer.status is Status.OK
    assert len(answer.payloads[-1]) <= 1 << 19
    assert len([slot for slot in driven.scan() if slot.status]) == 100
    driven.close()
