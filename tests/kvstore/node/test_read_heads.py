"""READ with READ_HEADS: what a READ would send, told without sending it, and without a trace."""

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Status
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Answer, keys_of, make_shards

SHARD_BYTES = 500


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t", disk=FaultyDisk())
    yield node
    node.close()


def ask_heads(driven: DrivenNode, keys: list[bytes], shard_bytes: int = SHARD_BYTES) -> Answer:
    return driven.ask(wire.Op.READ, wire.pack_read_heads(keys, shard_bytes), len(keys))


def ask_with_flags(driven: DrivenNode, keys: list[bytes], flags: int) -> Answer:
    body = struct.pack("<II", SHARD_BYTES, flags) + wire.join_keys(keys)
    return driven.ask(wire.Op.READ, body, len(keys))


def test_heads_are_the_records_of_a_read_without_its_payload(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 40, SHARD_BYTES, block_xxh3=77)
    driven.write(shards[:15], shard=3)
    driven.write(shards[20:], shard=3)
    keys = keys_of(shards)
    rng.shuffle(keys)
    heads = ask_heads(driven, keys)
    read = driven.ask_read(keys, SHARD_BYTES)
    assert heads.bodies == read.bodies
    assert heads.payloads == [b""]
    assert [header.is_last for header in heads.headers] == [True]
    statuses = [head & 0xFF for head in wire.parse_part_columns(heads.body, 40).heads]
    assert statuses.count(1) == 35


def test_heads_say_not_here_when_another_size_is_asked(
    driven: DrivenNode, rng: random.Random
) -> None:
    small, large = make_shards(rng, 2, SHARD_BYTES), make_shards(rng, 2, 2 * SHARD_BYTES)
    driven.write(small)
    driven.write(large)
    heads = wire.parse_part_columns(ask_heads(driven, keys_of(small + large)).body, 4).heads
    assert [head & 0xFF for head in heads] == [1, 1, 0, 0]


@pytest.mark.parametrize("flags", [wire.READ_HEADS, wire.READ_HEADS | wire.READ_IS_NO_USE])
def test_heads_are_no_use_no_read_and_no_miss(
    driven: DrivenNode, rng: random.Random, flags: int
) -> None:
    shards = make_shards(rng, 6, SHARD_BYTES)
    driven.write(shards[:4])
    before = driven.target_stat()
    used_s = [found["last_used_s"] for found in driven.locate(keys_of(shards))]
    driven.clock.advance(100)
    assert ask_with_flags(driven, keys_of(shards), flags).status is Status.OK
    assert [found["last_used_s"] for found in driven.locate(keys_of(shards))] == used_s
    after = driven.target_stat()
    assert after.pop("heads_told") == before.pop("heads_told") + 4
    assert after == before


def test_heads_are_told_when_nothing_can_be_read(driven: DrivenNode, rng: random.Random) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    assert isinstance(driven.disk, FaultyDisk)
    driven.disk.has_cache = False
    heads = wire.parse_part_columns(ask_heads(driven, keys_of(shards)).body, 3).heads
    assert [head & 0xFF for head in heads] == [1, 1, 1]


def test_heads_of_the_most_keys_come_in_one_frame(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t", segment_bytes=1 << 20)
    shards = make_shards(rng, 1024, 64)
    driven.write(shards)
    answer = ask_heads(driven, keys_of(shards), 64)
    assert len(answer.headers) == 1
    assert 0 not in wire.parse_part_columns(answer.body, 1024).heads
    driven.close()


def test_heads_of_no_keys_are_an_empty_frame(driven: DrivenNode) -> None:
    answer = ask_heads(driven, [])
    assert (answer.status, answer.headers[-1].count, len(answer.body)) == (Status.OK, 0, 8)


@pytest.mark.parametrize("flags", [4, 5, 6, 1 << 31, 0xFFFF_FFFF])
def test_read_is_refused_when_it_has_a_flag_that_does_not_exist(
    driven: DrivenNode, rng: random.Random, flags: int
) -> None:
    shards = make_shards(rng, 2, SHARD_BYTES)
    driven.write(shards)
    answer = ask_with_flags(driven, keys_of(shards), flags)
    assert answer.status is Status.BAD_REQUEST
    assert f"flags {flags:#x}" in answer.body.decode()
    assert driven.target.statistics.reads == 0


@pytest.mark.parametrize("shard_bytes", [0, (32 << 20) + 1, 0xFFFF_FFFF])
def test_heads_are_refused_when_no_shard_can_have_that_size(
    driven: DrivenNode, shard_bytes: int
) -> None:
    assert ask_heads(driven, [bytes(32)], shard_bytes).status is Status.BAD_REQUEST
