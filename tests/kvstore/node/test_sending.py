"""READ over a real socket: sent from the file, and what happens when that cannot be completed."""

import mmap
import os
import random
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.node.disk import OsDisk
from kvstore.node.page_probe import PAGES_PER_CALL, PageProbe
from kvstore.node.segment import ReadWay, choose_read_way
from kvstore.wire import Op
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import keys_of, make_shards
from tests.kvstore.node.served_node import served_node
from tests.patience import wait_until

SHARD_BYTES = 11392


def test_shards_in_memory_are_sent_from_the_file(tmp_path: Path, rng: random.Random) -> None:
    disk = FaultyDisk()
    with served_node(tmp_path, disk=disk) as served, served.client() as client:
        shards = make_shards(rng, 500, SHARD_BYTES)
        client.write(shards)
        disk.calls.clear()
        found = client.read(keys_of(shards), SHARD_BYTES)
        assert [got.payload for got in found if got] == [shard.payload for shard in shards]
        assert set(disk.calls) == {"send_file"}
        assert served.node.pool.used_bytes == 0


def test_connection_is_closed_when_a_file_cannot_be_read_in_the_middle_of_an_answer(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk()
    with served_node(tmp_path, disk=disk) as served, served.client() as other:
        target = served.node.targets[0]
        with served.client() as client:
            shards = make_shards(rng, 20, SHARD_BYTES)
            client.write(shards)
            segment, slot = target.index.resolve(target.index.get(shards[7].key))
            disk.unreadable = [(segment.offset(slot) + 100, segment.offset(slot) + 200)]
            client.send(
                client.frame(Op.READ, body=wire.pack_read(keys_of(shards), SHARD_BYTES), count=20)
            )
            header = wire.parse_header(client.receive(wire.HEADER_BYTES))
            assert header.payload_bytes == 20 * SHARD_BYTES
            client.receive(header.body_bytes)
            sent = client.receive(7 * SHARD_BYTES + 100)
            assert sent == b"".join(shard.payload for shard in shards)[: len(sent)]
            with pytest.raises(ConnectionError):
                client.receive(1)
        wait_until(lambda: served.node.connections == 1)
        assert served.node.counters.cut_answers == 1
        assert segment.pins == 0
        # Once its pages are not in memory a thread meets the same sector, and it costs one shard.
        disk.has_cache = False
        found = other.read(keys_of(shards), SHARD_BYTES)
        assert [got is not None for got in found] == [True] * 7 + [False] + [True] * 12


def test_peer_that_goes_away_in_the_middle_of_an_answer_is_not_the_disks_fault(
    tmp_path: Path, rng: random.Random
) -> None:
    with served_node(tmp_path) as served:
        target = served.node.targets[0]
        with served.client() as client:
            shards = make_shards(rng, 900, SHARD_BYTES)
            client.write(shards)
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            client.send(client.frame(Op.READ, body=body, count=900))
            client.receive(100)
            wait_until(lambda: any(segment.pins for segment in target.space.segments.values()))
        wait_until(lambda: served.node.connections == 0)
        assert served.node.counters.cut_answers == 0
        assert not any(segment.pins for segment in target.space.segments.values())


def test_probe_knows_which_pages_of_a_file_are_in_memory(tmp_path: Path) -> None:
    pages = 3 * PAGES_PER_CALL
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(descriptor, bytes(pages * mmap.PAGESIZE), 0)
        os.fsync(descriptor)
        if OsDisk().is_in_memory(descriptor):
            pytest.skip("the temporary folder is in memory")
        probe = PageProbe.open(descriptor, pages * mmap.PAGESIZE)
        assert probe is not None
        assert probe.is_cached(0, pages * mmap.PAGESIZE)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not probe.is_cached(0, 1)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(descriptor, 1, 2 * mmap.PAGESIZE)
        page = mmap.PAGESIZE
        assert probe.is_cached(2 * page, page)
        assert probe.is_cached(3 * page - 1, 1)
        assert not probe.is_cached(0, 3 * page)
        assert not probe.is_cached((pages - 1) * page, page)
        probe.close()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("disk", "way"),
    [
        (FaultyDisk(has_probe=False), ReadWay.THREAD),
        (FaultyDisk(has_send_file=False), ReadWay.THREAD),
        (FaultyDisk(is_memory=True), ReadWay.DIRECT),
        (FaultyDisk(is_memory=False), ReadWay.PROBE),
    ],
)
def test_way_of_reading_follows_what_the_system_can_do(
    tmp_path: Path, disk: FaultyDisk, way: ReadWay
) -> None:
    descriptor = disk.create(tmp_path / "file")
    disk.allocate(descriptor, 1 << 16)
    found, probe = choose_read_way(disk, descriptor)
    assert found is way
    assert (probe is not None) == (way is ReadWay.PROBE)
    if probe is not None:
        probe.close()
    disk.close(descriptor)
