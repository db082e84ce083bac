"""Full and failing disks: not stored is an answer, and every stored shard stays readable."""

import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.node.node import SyncPolicy
from kvstore.wire import Status, WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards

SHARD_BYTES = 500
SLOT_BYTES = 500 + 256


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def driven(tmp_path: Path, disk: FaultyDisk) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t", disk=disk)
    yield node
    disk.refuse.clear()
    node.close()


def readable(driven: DrivenNode, shards: list[Shard]) -> list[bool]:
    found = driven.read(keys_of(shards), SHARD_BYTES)
    for shard, got in zip(shards, found, strict=True):
        assert got is None or got.payload == shard.payload
    return [got is not None for got in found]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_write_says_full_when_there_is_no_room_for_a_segment(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random, number: int
) -> None:
    stored = make_shards(rng, 40, SHARD_BYTES)
    driven.write(stored)
    disk.refuse["allocate"] = number
    outcomes: list[WriteOutcome] = []
    while WriteOutcome.FULL not in outcomes:
        more = make_shards(rng, 40, SHARD_BYTES)
        outcomes = driven.write(more)
        stored += [s for s, got in zip(more, outcomes, strict=True) if got == WriteOutcome.STORED]
    assert all(readable(driven, stored))
    assert not list(driven.folder.glob("segment-*.tmp"))
    assert len(list(driven.folder.glob("*.seg"))) == len(driven.target.space.segments)
    assert driven.target.statistics.full_refusals == outcomes.count(WriteOutcome.FULL)
    assert driven.target.statistics.io_errors == 0


def test_full_disk_is_left_in_peace_for_a_while(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random
) -> None:
    disk.refuse["allocate"] = errno.ENOSPC
    disk.calls.clear()
    for _ in range(10):
        assert driven.write(make_shards(rng, 1, SHARD_BYTES)) == [WriteOutcome.FULL]
    assert disk.calls.count("allocate") == 1
    driven.clock.advance(5.0)
    disk.refuse.clear()
    assert driven.write(make_shards(rng, 1, SHARD_BYTES)) == [WriteOutcome.STORED]


def test_free_slots_are_written_although_the_disk_is_full(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random
) -> None:
    shards = make_shards(rng, 10, SHARD_BYTES)
    driven.write(shards)
    disk.refuse["allocate"] = errno.ENOSPC
    assert driven.write(make_shards(rng, 1, 2 * SHARD_BYTES)) == [WriteOutcome.FULL]
    assert driven.write(make_shards(rng, 10, SHARD_BYTES)) == [WriteOutcome.STORED] * 10


def test_empty_segments_make_way_for_another_size_when_the_disk_is_full(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random
) -> None:
    # The target may take 8 MiB, the disk has room for three of its segments.
    disk.room_bytes = 3 * driven.segment_bytes
    stored: list[Shard] = []
    outcomes: list[WriteOutcome] = []
    while WriteOutcome.FULL not in outcomes:
        shards = make_shards(rng, 40, SHARD_BYTES)
        outcomes = driven.write(shards)
        pairs = zip(shards, outcomes, strict=True)
        stored += [shard for shard, got in pairs if got == WriteOutcome.STORED]
    driven.clock.advance(5.0)
    assert driven.write(make_shards(rng, 1, 4 * SHARD_BYTES)) == [WriteOutcome.FULL]
    per_segment = len(stored) // len(driven.target.space.segments)
    kept = stored[per_segment:]
    driven.forget(keys_of(stored[:per_segment]))
    driven.clock.advance(5.0)
    larger = make_shards(rng, 17, 4 * SHARD_BYTES)
    assert driven.write(larger) == [WriteOutcome.STORED] * 17
    assert all(readable(driven, kept))
    assert all(driven.match(keys_of(larger)))
    driven.crash()
    driven.open()
    assert all(readable(driven, kept))
    assert all(driven.match(keys_of(larger)))


def test_small_disk_is_used_when_it_has_no_room_for_a_segment_of_the_usual_length(
    tmp_path: Path, disk: FaultyDisk, rng: random.Random
) -> None:
    disk.room_bytes = 5 << 20
    driven = DrivenNode(tmp_path / "t", disk=disk, capacity_bytes=1 << 30, segment_bytes=64 << 20)
    stored: list[Shard] = []
    shard_bytes = 60_000
    outcomes: list[WriteOutcome] = []
    while WriteOutcome.FULL not in outcomes:
        shards = make_shards(rng, 20, shard_bytes)
        outcomes = driven.write(shards)
        pairs = zip(shards, outcomes, strict=True)
        stored += [shard for shard, got in pairs if got == WriteOutcome.STORED]
    # All of the disk is used but for less than the smallest segment that is tried.
    assert len(stored) * shard_bytes > 3 << 20
    assert all(driven.match(keys_of(stored)))
    assert not list(driven.folder.glob("segment-*.tmp"))
    tried = disk.calls.count("allocate")
    assert driven.write(make_shards(rng, 1, shard_bytes)) == [WriteOutcome.FULL]
    assert disk.calls.count("allocate") == tried
    driven.close()


@pytest.mark.parametrize("operation", ["allocate", "write", "sync", "rename"])
def test_unfinished_segment_is_removed_when_making_it_fails(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random, operation: str
) -> None:
    disk.refuse[operation] = errno.EIO
    assert driven.write(make_shards(rng, 1, SHARD_BYTES)) == [WriteOutcome.FAILED]
    assert not list(driven.folder.glob("segment-*"))
    assert driven.target.statistics.io_errors == 1
    disk.refuse.clear()
    driven.clock.advance(5.0)
    assert driven.write(make_shards(rng, 1, SHARD_BYTES)) == [WriteOutcome.STORED]


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.EIO, WriteOutcome.FAILED),
        (errno.ENOSPC, WriteOutcome.FULL),
        (errno.EDQUOT, WriteOutcome.FULL),
    ],
)
def test_shards_are_not_stored_when_the_disk_refuses_the_write(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random, number: int, outcome: WriteOutcome
) -> None:
    stored = make_shards(rng, 5, SHARD_BYTES)
    driven.write(stored)
    replacing = Shard(stored[0].key, rng.randbytes(SHARD_BYTES), block_xxh3=9)
    more = [replacing, *make_shards(rng, 3, SHARD_BYTES)]
    disk.refuse["write"] = number
    assert driven.write(more) == [outcome] * 4
    # The old version of the first one is still what is here.
    assert all(readable(driven, stored))
    assert driven.match(keys_of(more)) == [True, False, False, False]
    # Nothing is tried for a while; then everything works again.
    tried = disk.calls.count("write")
    assert driven.write(more) == [outcome] * 4
    assert disk.calls.count("write") == tried
    disk.refuse.clear()
    driven.clock.advance(5.0)
    assert driven.write(more) == [WriteOutcome.STORED] * 4
    assert all(readable(driven, more))


def test_slots_stay_out_of_use_when_their_headers_cannot_be_cleared(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random
) -> None:
    stored = make_shards(rng, 5, SHARD_BYTES)
    driven.write(stored)
    locations = driven.target.index.find(keys_of(stored))
    disk.refuse["write"] = errno.EIO
    assert driven.forget(keys_of(stored)) == [True] * 5
    disk.refuse.clear()
    assert driven.target.quarantined == set(locations)
    others = make_shards(rng, 10, SHARD_BYTES)
    driven.write(others)
    assert not set(locations) & set(driven.target.index.find(keys_of(others)))


def test_acknowledgement_comes_after_the_sync_when_the_policy_says_batch(
    tmp_path: Path, disk: FaultyDisk, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", disk=disk, sync=SyncPolicy.BATCH)
    driven.write(make_shards(rng, 5, SHARD_BYTES))
    assert disk.calls[-2:] == ["write", "sync"]
    disk.refuse["sync"] = errno.EIO
    shards = make_shards(rng, 5, SHARD_BYTES)
    assert driven.write(shards) == [WriteOutcome.FAILED] * 5
    assert driven.match(keys_of(shards)) == [False] * 5
    disk.refuse.clear()
    driven.close()
    driven.open()
    assert driven.match(keys_of(shards)) == [False] * 5
    driven.close()


def test_one_unreadable_sector_costs_one_shard(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random
) -> None:
    shards = make_shards(rng, 8, SHARD_BYTES)
    driven.write(shards)
    segment, slot = driven.target.index.resolve(driven.target.index.get(shards[5].key))
    disk.unreadable = [(segment.offset(slot) + 10, segment.offset(slot) + 20)]
    # A sector that the device could not deliver is not in memory either.
    disk.has_cache = False
    assert readable(driven, shards) == [True] * 5 + [False] + [True] * 2
    assert driven.match([shards[5].key]) == [False]
    assert driven.target.statistics.io_errors == 1
    assert driven.target.statistics.rejected_shards == 1


def test_read_says_disk_error_when_nothing_can_be_read(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random
) -> None:
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    disk.unreadable = [(0, 1 << 30)]
    disk.has_cache = False
    assert driven.ask_read(keys_of(shards), SHARD_BYTES).status is Status.DISK_ERROR
    # A device that comes back has lost nothing.
    disk.unreadable = []
    assert all(readable(driven, shards))


def test_start_goes_on_when_a_header_cannot_be_read(
    driven: DrivenNode, disk: FaultyDisk, rng: random.Random
) -> None:
    shards = make_shards(rng, 8, SHARD_BYTES)
    driven.write(shards)
    location = driven.target.index.get(shards[5].key)
    segment, slot = driven.target.index.resolve(location)
    driven.close()
    header_at = segment.header_offset(slot)
    disk.unreadable = [(header_at, header_at + 1)]
    driven.open()
    assert driven.match(keys_of(shards)) == [True] * 5 + [False] + [True] * 2
    assert driven.target.quarantined == {location}


def test_target_is_full_when_all_its_slots_are_used(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t", capacity_bytes=256 << 10)
    shards = make_shards(rng, 1024, SHARD_BYTES)
    outcomes = driven.write(shards)
    count = outcomes.count(WriteOutcome.STORED)
    assert (256 << 10) * 0.8 < count * SLOT_BYTES <= 256 << 10
    assert outcomes == [WriteOutcome.STORED] * count + [WriteOutcome.FULL] * (1024 - count)
    assert readable(driven, shards) == [True] * count + [False] * (1024 - count)
    disk_bytes = sum(path.stat().st_size for path in driven.folder.glob("*.seg"))
    assert disk_bytes <= 256 << 10
    # What is forgotten makes room, also for shards of another size.
    driven.forget(keys_of(shards))
    assert driven.write(make_shards(rng, 8, 4096)) == [WriteOutcome.STORED] * 8
    driven.close()
    driven.open()
    assert len(driven.target.index) == 8
    driven.close()
