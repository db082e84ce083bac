"""How READ cuts its answer into frames, from files and through a buffer."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards

SHARD_BYTES = 500


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t")
    yield node
    node.close()


def test_read_is_cut_into_frames_of_about_a_mebibyte_when_a_buffer_is_needed(
    tmp_path: Path, rng: random.Random
) -> None:
    shard_bytes = 100 << 10
    disk = FaultyDisk(has_cache=False)
    driven = DrivenNode(tmp_path / "t", disk=disk, capacity_bytes=64 << 20, segment_bytes=4 << 20)
    shards = make_shards(rng, 25, shard_bytes)
    driven.write(shards)
    asked = [rng.randbytes(32), *keys_of(shards[:13]), rng.randbytes(32), *keys_of(shards[13:])]
    answer = driven.ask_read(asked, shard_bytes)
    # Ten keys a frame; one key of the first and one of the second are not here.
    assert [header.payload_bytes for header in answer.headers] == [
        *(9 * shard_bytes, 9 * shard_bytes, 7 * shard_bytes)
    ]
    assert [header.is_last for header in answer.headers] == [False, False, True]
    found = driven.read(asked, shard_bytes)
    assert [got.payload for got in found if got] == [shard.payload for shard in shards]
    # In memory it is one frame, and no buffer is used.
    disk.has_cache = True
    pooled_reads = driven.target.statistics.pooled_reads
    answer = driven.ask_read(asked, shard_bytes)
    assert [header.payload_bytes for header in answer.headers] == [25 * shard_bytes]
    assert driven.read(asked, shard_bytes) == found
    assert driven.target.statistics.pooled_reads == pooled_reads
    driven.close()


def test_read_is_cut_into_frames_of_the_longest_payload(tmp_path: Path, rng: random.Random) -> None:
    shard_bytes = 12 << 20
    driven = DrivenNode(tmp_path / "t", capacity_bytes=64 << 20, memory_bytes=64 << 20)
    shards = make_shards(rng, 3, shard_bytes)
    for shard in shards:
        driven.write([shard])
    answer = driven.ask_read(keys_of(shards), shard_bytes)
    assert [header.payload_bytes for header in answer.headers] == [2 * shard_bytes, shard_bytes]
    found = driven.read(keys_of(shards), shard_bytes)
    assert [got.payload for got in found if got] == [shard.payload for shard in shards]
    driven.close()


def test_read_answers_shards_that_lie_apart_and_keys_that_are_not_here_in_order(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 40, SHARD_BYTES)
    driven.write(shards)
    asked = [*shards, *make_shards(rng, 20, SHARD_BYTES)]
    for _ in range(20):
        rng.shuffle(asked)
        some = asked[: rng.randrange(len(asked) + 1)]
        found = driven.read(keys_of(some), SHARD_BYTES)
        assert [got and got.payload for got in found] == [
            shard.payload if shard in shards else None for shard in some
        ]


def test_read_takes_a_shard_that_was_replaced_meanwhile_for_a_miss(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", disk=FaultyDisk(has_cache=False))
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    location = driven.target.index.get(shards[1].key)
    other = make_shards(rng, 1, SHARD_BYTES)[0]

    def replace() -> None:
        """Runs after the look-up and before a thread reads the slots."""
        driven.on_work = lambda: None
        driven.forget([shards[1].key])
        driven.write([other])

    driven.on_work = replace
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [got is not None for got in found] == [True, False, True]
    assert driven.target.index.get(other.key) == location
    assert driven.target.statistics.read_races == 1
    assert driven.target.statistics.rejected_shards == 0
    assert driven.read([other.key], SHARD_BYTES) != [None]
    driven.close()


def test_read_sends_the_rest_from_a_thread_when_it_is_not_in_memory(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", disk=FaultyDisk(has_cache=False))
    shards = make_shards(rng, 10, SHARD_BYTES)
    driven.write(shards)
    works: list[int] = []
    driven.on_work = lambda: works.append(1)
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [got.payload for got in found if got] == [shard.payload for shard in shards]
    assert works == [1]
    assert driven.target.statistics.pooled_reads == 1
    assert all(not segment.pins for segment in driven.target.space.segments.values())
    driven.close()


@pytest.mark.parametrize("disk", [FaultyDisk(has_probe=False), FaultyDisk(has_send_file=False)])
def test_read_goes_through_a_thread_when_the_system_cannot_do_otherwise(
    tmp_path: Path, rng: random.Random, disk: FaultyDisk
) -> None:
    driven = DrivenNode(tmp_path / "t", disk=disk)
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    assert None not in driven.read(keys_of(shards), SHARD_BYTES)
    assert driven.target.statistics.pooled_reads == 1
    driven.close()


def test_read_takes_a_shard_that_was_written_anew_meanwhile_for_a_miss(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", disk=FaultyDisk(has_cache=False))
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    location = driven.target.index.get(shard.key)
    other = Shard(shard.key, rng.randbytes(SHARD_BYTES), block_xxh3=2)

    def write_anew() -> None:
        """The same key in the same slot, but another generation than the one looked up."""
        driven.on_work = lambda: None
        driven.forget([shard.key])
        driven.write([other])
        assert driven.target.index.get(shard.key) == location

    driven.on_work = write_anew
    assert driven.read([shard.key], SHARD_BYTES) == [None]
    assert driven.target.statistics.rejected_shards == 0
    (found,) = driven.read([shard.key], SHARD_BYTES)
    assert found is not None
    assert found.payload == other.payload
    driven.close()
