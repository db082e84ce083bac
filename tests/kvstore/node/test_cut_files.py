"""Segment files that somebody cuts short under a serving node: it costs what is gone."""

import errno
import os
import random
from pathlib import Path

import pytest

from kvstore.node.segment import Segment
from kvstore.wire import WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import ReadShard, keys_of, make_shards
from tests.kvstore.node.served_node import ServedNode, served_node
from tests.patience import wait_until

SHARD_BYTES = 500
COUNT = 20


def read_again(served: ServedNode, keys: list[bytes]) -> list[ReadShard | None]:
    """What a peer reads that connects again after its first connection was closed."""
    try:
        with served.client() as client:
            return client.read(keys, SHARD_BYTES)
    except ConnectionError:
        with served.client() as client:
            return client.read(keys, SHARD_BYTES)


def segment_of(served: ServedNode, key: bytes) -> tuple[Segment, int]:
    index = served.node.targets[0].index
    return index.resolve(index.get(key))


@pytest.mark.parametrize("is_memory", [True, False], ids=["direct", "probe"])
def test_cut_file_costs_the_shards_behind_its_end_and_they_can_be_saved_again(
    tmp_path: Path, rng: random.Random, is_memory: bool
) -> None:
    with served_node(tmp_path, disk=FaultyDisk(is_memory=is_memory)) as served:
        shards = make_shards(rng, COUNT, SHARD_BYTES)
        keys = keys_of(shards)
        with served.client() as client:
            client.write(shards)
        # All of them share a page or two with the new end, so that the kernel calls them cached.
        segment, slot = segment_of(served, keys[4])
        os.truncate(segment.path, segment.offset(slot) + 100)
        # The page that holds the end is in memory: the node believes that it can send it.
        is_here = [got is not None for got in read_again(served, keys[:6])]
        assert is_here == [True] * 4 + [False] * 2
        assert [got is not None for got in read_again(served, keys)] == [True] * 4 + [False] * 16
        statistics = served.node.targets[0].statistics
        assert statistics.rejected_shards == 16
        assert statistics.io_errors >= 16
        assert len(served.node.targets[0].quarantined) == 16
        assert served.node.counters.cut_answers <= 1
        with served.client() as client:
            assert client.match(keys) == [True] * 4 + [False] * 16
            assert client.write(shards[4:]) == [WriteOutcome.STORED] * 16
            found = client.read(keys, SHARD_BYTES)
        assert [got and got.payload for got in found] == [shard.payload for shard in shards]


def test_answer_that_was_cut_is_counted_and_its_file_read_by_threads_from_then_on(
    tmp_path: Path, rng: random.Random
) -> None:
    with served_node(tmp_path, disk=FaultyDisk(is_memory=True)) as served:
        shards = make_shards(rng, COUNT, SHARD_BYTES)
        with served.client() as client:
            client.write(shards)
            segment, slot = segment_of(served, shards[4].key)
            os.truncate(segment.path, segment.offset(slot) + 100)
            with pytest.raises(ConnectionError):
                client.read(keys_of(shards), SHARD_BYTES)
        target = served.node.targets[0]
        assert served.node.counters.cut_answers == 1
        wait_until(lambda: target.statistics.io_errors == 1)
        assert segment.is_suspect
        assert segment.pins == 0
        with served.client() as client:
            assert None not in client.read(keys_of(shards[:4]), SHARD_BYTES)
        assert target.statistics.pooled_reads == 1


def test_shards_are_not_here_when_the_file_ends_before_all_of_them(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", disk=FaultyDisk(has_cache=False))
    shards = make_shards(rng, 5, SHARD_BYTES)
    driven.write(shards)
    segment, _ = driven.target.index.resolve(driven.target.index.get(shards[0].key))
    os.truncate(segment.path, 0)
    assert driven.read(keys_of(shards), SHARD_BYTES) == [None] * 5
    assert driven.match(keys_of(shards)) == [False] * 5
    assert driven.target.statistics.io_errors == 5
    assert len(driven.target.quarantined) == 5
    driven.close()


def test_shards_are_not_here_when_the_device_reads_the_file_but_none_of_them(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk(has_cache=False)
    driven = DrivenNode(tmp_path / "t", disk=disk)
    shards = make_shards(rng, 5, SHARD_BYTES)
    driven.write(shards)
    segment, _ = driven.target.index.resolve(driven.target.index.get(shards[0].key))
    disk.unreadable = [(segment.payload_offset, 1 << 30)]
    assert driven.read(keys_of(shards), SHARD_BYTES) == [None] * 5
    assert driven.match(keys_of(shards)) == [False] * 5
    assert driven.target.statistics.rejected_shards == 5
    driven.close()


def cut_between_starts(driven: DrivenNode, left: int) -> Segment:
    """Stop the node, leave `left` bytes of its first segment, start it again."""
    segment = driven.target.space.segments[0]
    driven.close()
    os.truncate(segment.path, left)
    driven.open()
    return segment


@pytest.mark.parametrize("whole", [0, 1, 7, 19])
@pytest.mark.parametrize("extra", [0, 1, SHARD_BYTES - 1])
def test_segment_that_was_cut_between_starts_loses_what_is_gone_and_is_whole_again(
    tmp_path: Path, rng: random.Random, whole: int, extra: int
) -> None:
    driven = DrivenNode(tmp_path / "t", snapshot_shards_min=0)
    shards = make_shards(rng, COUNT, SHARD_BYTES)
    keys = keys_of(shards)
    driven.write(shards)
    segment = driven.target.space.segments[0]
    segment = cut_between_starts(driven, segment.offset(whole) + extra)
    expected = [True] * whole + [False] * (COUNT - whole)
    assert driven.match(keys) == expected
    assert [got is not None for got in driven.read(keys, SHARD_BYTES)] == expected
    assert segment.path.stat().st_size == segment.shape.file_bytes
    assert driven.target.statistics.cut_slots == segment.shape.slot_count - whole
    assert not driven.target.quarantined
    assert driven.write(shards[whole:]) == [WriteOutcome.STORED] * (COUNT - whole)
    for _ in range(2):
        found = driven.read(keys, SHARD_BYTES)
        assert [got and got.payload for got in found] == [shard.payload for shard in shards]
        driven.crash()
        driven.open()
    driven.close()


@pytest.mark.parametrize("left", [88, 4096, 4096 + 5 * 256 + 3])
def test_segment_of_which_only_headers_are_left_is_empty(
    tmp_path: Path, rng: random.Random, left: int
) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = make_shards(rng, COUNT, SHARD_BYTES)
    driven.write(shards)
    cut_between_starts(driven, left)
    assert driven.match(keys_of(shards)) == [False] * COUNT
    assert len(driven.target.index) == 0
    assert driven.write(shards) == [WriteOutcome.STORED] * COUNT
    driven.close()


@pytest.mark.parametrize("left", [0, 87])
def test_segment_without_its_own_header_is_removed(
    tmp_path: Path, rng: random.Random, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    driven = DrivenNode(tmp_path / "t")
    first, second = make_shards(rng, 117, SHARD_BYTES), make_shards(rng, 10, SHARD_BYTES)
    driven.write(first)
    driven.write(second)
    lost = driven.target.space.segments[0]
    in_lost = [
        driven.target.index.resolve(driven.target.index.get(shard.key))[0] is lost
        for shard in [*first, *second]
    ]
    cut_between_starts(driven, left)
    assert driven.match(keys_of([*first, *second])) == [not one for one in in_lost]
    assert "nothing is left" in caplog.text
    driven.close()


def test_missing_slots_stay_out_of_use_when_the_disk_has_no_room_for_them(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    shards = make_shards(rng, COUNT, SHARD_BYTES)
    driven.write(shards)
    segment = driven.target.space.segments[0]
    disk.refuse = {"allocate": errno.ENOSPC}
    segment = cut_between_starts(driven, segment.offset(4) + 100)
    slot_count = segment.shape.slot_count
    assert driven.target.quarantined == set(range(4, slot_count))
    assert driven.match(keys_of(shards)) == [True] * 4 + [False] * 16
    # The other segments that it could have are refused as well.
    assert driven.write(shards[4:]) == [WriteOutcome.FULL] * 16
    disk.refuse = {}
    driven.close()
    driven.open()
    assert not driven.target.quarantined
    assert driven.match(keys_of(shards)) == [True] * 4 + [False] * 16
    driven.close()


def test_cut_segment_that_cannot_be_written_keeps_what_it_has(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    shards = make_shards(rng, COUNT, SHARD_BYTES)
    driven.write(shards)
    segment = driven.target.space.segments[0]
    disk.refuse = {"write": errno.EIO}
    cut_between_starts(driven, segment.offset(4))
    assert driven.match(keys_of(shards)) == [True] * 4 + [False] * 16
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [got and got.payload for got in found[:4]] == [shard.payload for shard in shards[:4]]
    disk.refuse = {}
    driven.close()
