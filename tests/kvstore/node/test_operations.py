"""What a node answers, operation by operation, without sockets and with a clock that is set."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import wire
from kvstore.node.slot import (
    CHECKED_BYTES,
    HEADER_BYTES,
    SLOT_HEADER,
    seal_headers,
)
from kvstore.wire import ReportOutcome, Status, WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import BatchFields, Shard, keys_of, make_shards

SHARD_BYTES = 500


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t")
    yield node
    node.close()


def flip_byte(driven: DrivenNode, key: bytes, at: int, *, is_header: bool = False) -> None:
    """Change one byte of a stored shard, or of its header, behind the node's back."""
    segment, slot = driven.target.index.resolve(driven.target.index.get(key))
    offset = at + (segment.header_offset(slot) if is_header else segment.offset(slot))
    with open(segment.path, "r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_read_gives_back_what_write_stored(driven: DrivenNode, rng: random.Random) -> None:
    shards = make_shards(rng, 30, SHARD_BYTES, block_xxh3=77)
    assert driven.write(shards, shard=5) == [WriteOutcome.STORED] * 30
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [shard.payload for shard in shards] == [got.payload for got in found if got]
    assert {(got.shard, got.block_xxh3) for got in found if got} == {(5, 77)}
    generations = [got.generation for got in found if got]
    assert generations == sorted(set(generations))


def test_read_says_not_here_for_what_was_never_written(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 4, SHARD_BYTES)
    driven.write(shards[:1] + shards[2:3])
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [got is not None for got in found] == [True, False, True, False]
    assert driven.target.statistics.misses == 2


def test_read_says_not_here_when_another_size_is_asked(
    driven: DrivenNode, rng: random.Random
) -> None:
    small, large = make_shards(rng, 1, SHARD_BYTES), make_shards(rng, 1, 2 * SHARD_BYTES)
    driven.write(small)
    driven.write(large)
    found = driven.read(keys_of(small + large), SHARD_BYTES)
    assert [got is not None for got in found] == [True, False]


@pytest.mark.parametrize("shard_bytes", [1, 63, 64, 65, 11392, 3 << 20])
def test_shards_of_any_size_are_stored(
    tmp_path: Path, rng: random.Random, shard_bytes: int
) -> None:
    driven = DrivenNode(tmp_path / "t", capacity_bytes=64 << 20, segment_bytes=1 << 20)
    shards = make_shards(rng, 3, shard_bytes)
    assert driven.write(shards) == [WriteOutcome.STORED] * 3
    found = driven.read(keys_of(shards), shard_bytes)
    assert [got.payload for got in found if got] == [shard.payload for shard in shards]
    driven.close()
    driven.open()
    assert driven.read(keys_of(shards), shard_bytes) == found
    driven.close()


def test_request_of_the_most_keys_is_served(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t", segment_bytes=1 << 20)
    shards = make_shards(rng, 1024, 64)
    assert driven.write(shards) == [WriteOutcome.STORED] * 1024
    assert driven.match(keys_of(shards)) == [True] * 1024
    assert None not in driven.read(keys_of(shards), 64)
    assert driven.forget(keys_of(shards)) == [True] * 1024
    driven.close()


def test_slots_of_a_batch_lie_next_to_each_other(driven: DrivenNode, rng: random.Random) -> None:
    shards = make_shards(rng, 20, SHARD_BYTES)
    driven.write(shards)
    locations = driven.target.index.find(keys_of(shards))
    assert locations == list(range(locations[0], locations[0] + 20))


def test_shards_and_headers_of_a_batch_are_each_one_range_of_the_file(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 5, SHARD_BYTES)
    driven.write(shards)
    segment, slot = driven.target.index.resolve(driven.target.index.get(shards[0].key))
    data = segment.path.read_bytes()
    assert data[segment.offset(slot) :][: 5 * SHARD_BYTES] == b"".join(s.payload for s in shards)
    headers = np.frombuffer(data, SLOT_HEADER, 5, segment.header_offset(slot))
    assert headers["key"].tolist() == keys_of(shards)
    assert segment.payload_offset % 4096 == 0
    assert segment.header_offset(segment.shape.slot_count - 1) + 256 <= segment.payload_offset


def test_match_sees_only_what_is_here_and_renews_nothing(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 10, SHARD_BYTES)
    driven.write(shards[::2])
    segment, slot = driven.target.index.resolve(driven.target.index.get(shards[0].key))
    written_s = int(segment.columns.last_used_s[slot])
    driven.clock.advance(100)
    assert driven.match(keys_of(shards)) == [True, False] * 5
    assert segment.columns.last_used_s[slot] == written_s
    driven.read(keys_of(shards), SHARD_BYTES)
    assert segment.columns.last_used_s[slot] == written_s + 100


def test_locate_describes_what_is_here(driven: DrivenNode, rng: random.Random) -> None:
    shards = make_shards(rng, 2, SHARD_BYTES, block_xxh3=99)
    driven.write(shards[:1], shard=7)
    body = wire.join_keys(keys_of(shards))
    answer = driven.run(driven.begin(wire.Op.LOCATE, body=body, count=2))
    here, absent = wire.parse_records(answer.body, wire.LOCATION, 2)
    assert here["status"] == 1
    assert (here["shard"], here["payload_bytes"], here["block_xxh3"]) == (7, SHARD_BYTES, 99)
    assert here["generation"] == driven.target.generation(driven.target.index.get(shards[0].key))
    assert absent.tobytes() == bytes(32)


def test_forget_frees_the_slot_for_another_shard(driven: DrivenNode, rng: random.Random) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    used_bytes = driven.target.used_bytes
    location = driven.target.index.get(shards[1].key)
    assert driven.forget([shards[1].key, rng.randbytes(32), shards[1].key]) == [True, False, False]
    assert driven.match(keys_of(shards)) == [True, False, True]
    assert driven.target.used_bytes < used_bytes
    other = make_shards(rng, 1, SHARD_BYTES)
    driven.write(other)
    assert driven.target.index.get(other[0].key) == location
    assert driven.read([shards[1].key], SHARD_BYTES) == [None]


# Two versions ---------------------------------------------------------------------------------


def test_write_says_known_when_the_same_version_is_here(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards[:2])
    before = driven.target.index.find(keys_of(shards[:2]))
    assert driven.write(shards) == [WriteOutcome.KNOWN, WriteOutcome.KNOWN, WriteOutcome.STORED]
    assert driven.target.index.find(keys_of(shards[:2])) == before


def test_write_keeps_the_larger_version_when_writers_race(
    driven: DrivenNode, rng: random.Random
) -> None:
    (first,) = make_shards(rng, 1, SHARD_BYTES, block_xxh3=50)
    smaller = Shard(first.key, rng.randbytes(SHARD_BYTES), block_xxh3=40)
    larger = Shard(first.key, rng.randbytes(SHARD_BYTES), block_xxh3=60)
    driven.write([first])
    assert driven.write([smaller]) == [WriteOutcome.KEPT]
    assert driven.write([larger]) == [WriteOutcome.STORED]
    (found,) = driven.read([first.key], SHARD_BYTES)
    assert found is not None
    assert (found.payload, found.block_xxh3) == (larger.payload, 60)
    assert driven.target.statistics.shards_replaced == 1


def test_write_replaces_an_old_version_whatever_it_is(
    driven: DrivenNode, rng: random.Random
) -> None:
    (first,) = make_shards(rng, 1, SHARD_BYTES, block_xxh3=50)
    smaller = Shard(first.key, rng.randbytes(SHARD_BYTES), block_xxh3=40)
    driven.write([first])
    used_bytes = driven.target.used_bytes
    driven.clock.advance(10.0)
    assert driven.write([smaller]) == [WriteOutcome.STORED]
    assert driven.target.used_bytes == used_bytes
    driven.close()
    driven.open()
    (found,) = driven.read([first.key], SHARD_BYTES)
    assert found is not None
    assert found.payload == smaller.payload


def test_replaced_slot_is_freed_only_after_its_header_is_cleared(
    driven: DrivenNode, rng: random.Random
) -> None:
    (first,) = make_shards(rng, 1, SHARD_BYTES, block_xxh3=50)
    driven.write([first])
    location = driven.target.index.get(first.key)
    segment, slot = driven.target.index.resolve(location)
    driven.write([Shard(first.key, rng.randbytes(SHARD_BYTES), block_xxh3=60)])
    header_at = segment.header_offset(slot)
    assert segment.path.read_bytes()[header_at : header_at + 256] == bytes(256)


# What is refused ------------------------------------------------------------------------------


def test_write_rejects_only_the_shards_that_do_not_fit_their_checksum(
    driven: DrivenNode, rng: random.Random
) -> None:
    good, bad, other = make_shards(rng, 3, SHARD_BYTES)
    bad = Shard(bad.key, bad.payload, payload_xxh3=1)
    assert driven.write([good, bad, other]) == [
        WriteOutcome.STORED,
        WriteOutcome.REJECTED,
        WriteOutcome.STORED,
    ]
    assert driven.match([good.key, bad.key, other.key]) == [True, False, True]
    assert driven.target.statistics.bad_payloads == 1


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"shard": 12}, "shard 12 of 10 + 2"),
        ({"k": 0}, "of 0 + 2"),
        ({"k": 31}, "of 31 + 2"),
        ({"shard_bytes": SHARD_BYTES + 1}, "payload of"),
        ({"shard_bytes": 0}, "payload of"),
        ({"shard_bytes": 0xFFFF_FFFF}, "payload of"),
        ({"block_bytes": 10 * SHARD_BYTES + 1}, "blocks of"),
        ({"block_bytes": 0}, "blocks of 0 bytes"),
        ({"ttl_class": b"\xff"}, "TTL class: given"),
        ({"ttl_class": b""}, "TTL class: given"),
        ({"ttl_class": b"a\nb"}, "TTL class: given"),
        ({"ttl_class": b"Chat"}, "1 to 16 of a-z, 0-9"),
    ],
)
def test_write_is_refused_when_its_batch_breaks_a_rule(
    driven: DrivenNode, rng: random.Random, batch: BatchFields, text: str
) -> None:
    answer = driven.ask_write(make_shards(rng, 2, SHARD_BYTES), **batch)
    assert answer.status is Status.BAD_REQUEST
    assert text in answer.body.decode()
    assert len(driven.target.index) == 0


def test_write_is_refused_when_a_key_stands_twice(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    assert driven.ask_write([shard, shard]).status is Status.BAD_REQUEST


def test_empty_requests_are_answered(driven: DrivenNode) -> None:
    assert driven.match([]) == []
    assert driven.forget([]) == []
    assert driven.read([], SHARD_BYTES) == []
    assert driven.ask_write([]).status is Status.BAD_REQUEST
    assert driven.run(driven.begin(wire.Op.REPORT)).status is Status.OK


@pytest.mark.parametrize("shard_bytes", [0, (32 << 20) + 1, 0xFFFF_FFFF])
def test_read_is_refused_when_no_shard_can_have_that_size(
    driven: DrivenNode, shard_bytes: int
) -> None:
    assert driven.ask_read([bytes(32)], shard_bytes).status is Status.BAD_REQUEST


def test_read_of_a_huge_absent_shard_takes_no_memory(driven: DrivenNode) -> None:
    assert driven.read([bytes(32)], 32 << 20) == [None]


def test_requests_are_refused_busy_when_they_exceed_all_memory(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk(has_cache=False)
    driven = DrivenNode(tmp_path / "t", disk=disk, memory_bytes=96 << 10)
    shards = make_shards(rng, 200, SHARD_BYTES)
    assert driven.ask_write(shards).status is Status.BUSY
    for first in range(0, 200, 50):
        driven.write(shards[first : first + 50])
    assert driven.ask_read(keys_of(shards), SHARD_BYTES).status is Status.BUSY
    assert driven.node.counters.busy_refusals == 2
    driven.close()


# Damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 20, 115, 200, 250])
def test_start_leaves_out_a_shard_when_its_header_is_damaged(
    driven: DrivenNode, rng: random.Random, at: int
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    flip_byte(driven, shards[1].key, at, is_header=True)
    # Until then the node goes by what it knows, and the shard itself is good.
    assert None not in driven.read(keys_of(shards), SHARD_BYTES)
    driven.close()
    driven.open()
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [got is not None for got in found] == [True, False, True]
    assert driven.match(keys_of(shards)) == [True, False, True]


def test_report_quarantines_a_shard_when_its_payload_is_damaged(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 2, SHARD_BYTES)
    driven.write(shards)
    location = driven.target.index.get(shards[0].key)
    generation = driven.target.generation(location)
    flip_byte(driven, shards[0].key, 3)
    assert driven.report(shards[0].key, generation + 1) is ReportOutcome.ABSENT
    assert driven.report(shards[0].key, generation) is ReportOutcome.QUARANTINED
    assert driven.report(shards[0].key, generation) is ReportOutcome.ABSENT
    assert driven.match(keys_of(shards)) == [False, True]
    assert driven.target.statistics.rejected_shards == 1
    # The slot is used for nothing else, although it would be the first to be chosen.
    others = make_shards(rng, 20, SHARD_BYTES)
    driven.write(others)
    assert location not in driven.target.index.find(keys_of(others))
    # It can be written again, elsewhere, and is not found again after a restart.
    assert driven.write(shards[:1]) == [WriteOutcome.STORED]
    driven.close()
    driven.open()
    (found,) = driven.read([shards[0].key], SHARD_BYTES)
    assert found is not None
    assert found.payload == shards[0].payload


def test_report_of_a_good_shard_changes_nothing(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    generation = driven.target.generation(driven.target.index.get(shard.key))
    assert driven.report(shard.key, generation) is ReportOutcome.GOOD
    assert driven.match([shard.key]) == [True]
    assert driven.target.statistics.false_reports == 1


def test_reports_are_limited_in_number_and_rate(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    generation = driven.target.generation(driven.target.index.get(shard.key))
    item = shard.key + generation.to_bytes(8, "little")
    too_many = driven.run(driven.begin(wire.Op.REPORT, body=item * 65, count=65))
    assert too_many.status is Status.BAD_REQUEST
    statuses = [
        driven.run(driven.begin(wire.Op.REPORT, body=item * 64, count=64)).status for _ in range(5)
    ]
    assert statuses == [Status.OK] * 4 + [Status.BUSY]
    driven.clock.advance(1.0)
    assert driven.report(shard.key, generation) is ReportOutcome.GOOD


def forge_header(driven: DrivenNode, key: bytes, field: str, value: object) -> None:
    """Change one field of a stored header and seal it again, as a write to a wrong place would."""
    segment, slot = driven.target.index.resolve(driven.target.index.get(key))
    offset = segment.header_offset(slot)
    with open(segment.path, "r+b", buffering=0) as file:
        file.seek(offset)
        data = bytearray(file.read(HEADER_BYTES))
        header = np.frombuffer(data, SLOT_HEADER)
        header[field] = value
        seal_headers(header, [memoryview(data)[:CHECKED_BYTES]])
        file.seek(offset)
        file.write(data)


def test_start_leaves_out_a_shard_whose_header_does_not_fit_its_slot(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 2, SHARD_BYTES)
    driven.write(shards)
    forge_header(driven, shards[0].key, "payload_bytes", SHARD_BYTES - 1)
    driven.close()
    driven.open()
    assert driven.match(keys_of(shards)) == [False, True]
