"""EVICT and WITHDRAW: what goes, what stays and why, and that nothing else changes."""

import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.node.evict_operation import PIECE_SHARDS
from kvstore.wire import EvictOutcome, EvictReason, Status
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards

SHARD_BYTES = 500
EXPIRED, LEAST_USED, ORPHANED = (int(reason) for reason in EvictReason)
NEVER_USED_LATER = 0xFFFF_FFFF


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t")
    yield node
    node.close()


def now_s(driven: DrivenNode) -> int:
    return int(driven.clock.unix_s)


def place(driven: DrivenNode, shard: Shard) -> tuple[int, int]:
    """Location and generation of a stored shard."""
    location = driven.target.index.get(shard.key)
    return location, driven.target.generation(location)


def test_evict_drops_a_shard_that_was_not_used_since(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    written_s = now_s(driven)
    driven.clock.advance(100)
    location, generation = place(driven, shards[1])
    item = (location, generation, written_s, EXPIRED)
    assert driven.evict([item]) == [EvictOutcome.EVICTED]
    assert driven.match(keys_of(shards)) == [True, False, True]
    assert driven.read([shards[1].key], SHARD_BYTES) == [None]
    # Its slot is the next one that is taken, and is not found again after a crash.
    driven.crash()
    driven.open()
    assert driven.match(keys_of(shards)) == [True, False, True]
    (other,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([other])
    assert driven.target.index.get(other.key) == location


def test_evict_keeps_a_shard_that_was_used_later(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    chosen_s = now_s(driven)
    driven.clock.advance(1)
    driven.read([shard.key], SHARD_BYTES)
    assert driven.evict([(*place(driven, shard), chosen_s, EXPIRED)]) == [EvictOutcome.USED]
    assert driven.match([shard.key]) == [True]
    assert driven.target_stat()["evictions_refused"] == 1


def test_evict_keeps_a_shard_of_another_generation(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    location, generation = place(driven, shard)
    for wrong in (0, generation - 1, generation + 1):
        item = (location, wrong, NEVER_USED_LATER, LEAST_USED)
        assert driven.evict([item]) == [EvictOutcome.OTHER]
    assert driven.match([shard.key]) == [True]


@pytest.mark.parametrize(
    "location", [1, 63, (1 << 24) - 1, 5 << 24, 0xFFFF_FFFF_FFFF_FFFF, 1 << 63, (1 << 63) - 1]
)
def test_evict_finds_nothing_at_a_location_that_holds_nothing(
    driven: DrivenNode, rng: random.Random, location: int
) -> None:
    shards = make_shards(rng, 1, SHARD_BYTES)
    driven.write(shards)
    assert driven.target.index.get(shards[0].key) == 0
    assert driven.evict([(location, 0, NEVER_USED_LATER, EXPIRED)]) == [EvictOutcome.ABSENT]
    assert driven.match(keys_of(shards)) == [True]


def test_shard_goes_once_when_it_stands_twice_in_a_request(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 2, SHARD_BYTES)
    driven.write(shards)
    item = (*place(driven, shards[0]), NEVER_USED_LATER, EXPIRED)
    assert driven.evict([item, item]) == [EvictOutcome.EVICTED, EvictOutcome.ABSENT]
    key = (shards[1].key, 0, NEVER_USED_LATER, EXPIRED)
    assert driven.withdraw([key, key, key]) == [
        EvictOutcome.EVICTED,
        EvictOutcome.ABSENT,
        EvictOutcome.ABSENT,
    ]
    assert driven.target_stat()["evicted"]["expired"] == 2
    assert driven.target_stat()["slots_used"] == 0


def test_evict_of_the_most_items_goes_piece_by_piece(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t", segment_bytes=1 << 20)
    shards = make_shards(rng, 1024, 64)
    driven.write(shards)
    items = [(*place(driven, shard), NEVER_USED_LATER, LEAST_USED) for shard in shards]
    rng.shuffle(items)
    left: list[int] = []
    driven.on_work = lambda: left.append(len(driven.target.index))
    assert driven.evict(items) == [EvictOutcome.EVICTED] * 1024
    assert left == list(range(1024 - PIECE_SHARDS, -1, -PIECE_SHARDS))
    assert driven.target_stat()["slots_free"] == sum(
        segment.shape.slot_count for segment in driven.target.space.segments.values()
    )
    driven.close()


def test_shard_that_is_read_while_others_are_evicted_stays(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", segment_bytes=1 << 20)
    shards = make_shards(rng, 2 * PIECE_SHARDS, 64)
    driven.write(shards)
    chosen_s = now_s(driven)
    driven.clock.advance(5)
    saved = shards[-1]

    def read_once() -> None:
        driven.on_work = lambda: None
        driven.read([saved.key], 64)

    driven.on_work = read_once
    outcomes = driven.evict([(*place(driven, shard), chosen_s, EXPIRED) for shard in shards])
    assert outcomes == [EvictOutcome.EVICTED] * (len(shards) - 1) + [EvictOutcome.USED]
    assert driven.match([saved.key]) == [True]
    driven.close()


def test_withdraw_asks_for_the_version(driven: DrivenNode, rng: random.Random) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES, block_xxh3=77)
    driven.write(shards)
    first, second, third = keys_of(shards)
    late = NEVER_USED_LATER
    assert driven.withdraw(
        [
            (first, 77, late, EXPIRED),
            (second, 78, late, EXPIRED),
            (third, 0, late, ORPHANED),
            (rng.randbytes(32), 0, late, EXPIRED),
        ]
    ) == [EvictOutcome.EVICTED, EvictOutcome.OTHER, EvictOutcome.EVICTED, EvictOutcome.ABSENT]
    assert driven.match([first, second, third]) == [False, True, False]


def test_withdraw_keeps_a_shard_that_was_used_later(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    used_s = now_s(driven)
    assert driven.withdraw([(shard.key, 0, used_s - 1, EXPIRED)]) == [EvictOutcome.USED]
    assert driven.withdraw([(shard.key, 0, used_s, EXPIRED)]) == [EvictOutcome.EVICTED]


@pytest.mark.parametrize("op", [wire.Op.EVICT, wire.Op.WITHDRAW])
@pytest.mark.parametrize("reason", [0, 4, 255])
def test_request_is_refused_whole_when_a_reason_is_unknown(
    driven: DrivenNode, rng: random.Random, op: wire.Op, reason: int
) -> None:
    shards = make_shards(rng, 2, SHARD_BYTES)
    driven.write(shards)
    each = 24 if op is wire.Op.EVICT else 48
    body = bytearray(2 * each)
    for i, shard in enumerate(shards):
        location, generation = place(driven, shard)
        head = location.to_bytes(8, "little") + generation.to_bytes(8, "little")
        if op is wire.Op.WITHDRAW:
            head = shard.key + bytes(8)
        item = head + NEVER_USED_LATER.to_bytes(4, "little") + bytes([(EXPIRED, reason)[i]])
        body[i * each : i * each + len(item)] = item
    answer = driven.ask(op, bytes(body), 2)
    assert answer.status is Status.BAD_REQUEST
    assert "reasons" in answer.body.decode()
    assert driven.match(keys_of(shards)) == [True, True]


def test_empty_requests_are_answered(driven: DrivenNode) -> None:
    assert driven.evict([]) == []
    assert driven.withdraw([]) == []
    assert driven.touch([]) == []


def test_slot_is_taken_out_of_use_when_its_header_cannot_be_cleared(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    shards = make_shards(rng, 2, SHARD_BYTES)
    driven.write(shards)
    location, generation = place(driven, shards[0])
    disk.refuse["write"] = errno.EIO
    item = (location, generation, NEVER_USED_LATER, EXPIRED)
    assert driven.evict([item]) == [EvictOutcome.EVICTED]
    disk.refuse.clear()
    assert driven.match(keys_of(shards)) == [False, True]
    driven.write(make_shards(rng, 20, SHARD_BYTES))
    assert location in driven.target.quarantined
    driven.close()


def test_statistics_say_what_went_why_and_how_old(driven: DrivenNode, rng: random.Random) -> None:
    shards = make_shards(rng, 4, SHARD_BYTES)
    driven.write(shards)
    slot_bytes = driven.target_stat()["used_bytes"] // 4
    driven.clock.advance(7200)
    reasons = (EXPIRED, LEAST_USED, LEAST_USED)
    driven.evict(
        [
            (*place(driven, shard), NEVER_USED_LATER, reason)
            for shard, reason in zip(shards, reasons, strict=False)
        ]
    )
    driven.withdraw([(shards[3].key, 0, NEVER_USED_LATER, ORPHANED)])
    found = driven.target_stat()
    assert found["evicted"] == {"expired": 1, "least_used": 2, "orphaned": 1}
    assert found["evicted_bytes"] == 4 * slot_bytes
    ages = dict(zip(found["evicted_age"]["bounds_s"], found["evicted_age"]["counts"], strict=False))
    assert ages[14400] == 4
    assert sum(found["evicted_age"]["counts"]) == 4
    assert found["evicted_age"]["sum_s"] == 4 * 7200
    # Whoever asks for them now is told apart from whoever asks for what never was here.
    driven.match([*keys_of(shards), rng.randbytes(32)])
    assert found["misses_by_reason"] == dict.fromkeys(found["misses_by_reason"], 0)
    assert driven.target_stat()["misses_by_reason"] == {
        **{"never_stored": 1, "expired": 1, "evicted": 2, "orphaned": 1},
        **{"rejected": 0, "forgotten": 0},
    }
