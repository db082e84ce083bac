"""Scrub on real nodes and real files: finds what went bad, harms nothing that is good."""

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker import scrub
from gc_worker.scrub import cut_scan, describe_scrub, scrub_target
from gc_worker.scrub_position import FILE_NAME, ScrubPosition, load_position, save_position
from gc_worker.scrub_reader import SegmentReader, SlotState
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.node.page_probe import PageProbe
from kvstore.node.segment import HEADERS_OFFSET, TargetIdentity
from kvstore.node.slot import HEADER_BYTES
from tests.gc_worker.repair_bench import RepairBench, flip_byte, policy_of
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S, until


async def scrub_node(bench: RepairBench, node: str) -> None:
    context = bench.contexts[node]
    for target in context.own_targets():
        await scrub_target(context, target)


async def test_nothing_is_reported_when_all_shards_are_good(bench: RepairBench) -> None:
    blocks = await bench.save(70, seed=400)
    for node, context in bench.contexts.items():
        await scrub_node(bench, node)
        assert context.counters.scrubbed_slots == 70
        assert context.counters.scrubbed_bytes == 70 * 1024
        assert context.counters.damaged_found == 0
    assert await bench.count_shards(blocks.keys) == [6] * 70
    assert await bench.sum_of("rejected_shards") == 0


async def test_damaged_shard_is_quarantined_and_then_completed(bench: RepairBench) -> None:
    blocks = await bench.save(70, seed=401)
    target = bench.targets_by_shard(blocks)[1]
    node = bench.link.node_of(target)
    await bench.flip_payload(target, blocks.keys[33])
    await scrub_node(bench, node)
    counters = bench.contexts[node].counters
    assert (counters.damaged_found, counters.quarantined) == (1, 1)
    expected = [6] * 70
    expected[33] = 5
    assert await bench.count_shards(blocks.keys) == expected
    stat = await bench.link.statistics(node)
    assert sum(one["quarantined"] for one in stat["targets"]) == 1
    await bench.check()
    assert await bench.count_shards(blocks.keys) == [6] * 70
    for other in bench.targets_by_shard(blocks)[2:4]:
        await bench.forget(other, blocks.keys[:64])
    assert await bench.fetch(blocks)


async def test_slot_is_emptied_when_its_header_is_damaged(bench: RepairBench) -> None:
    blocks = await bench.save(10, seed=402)
    target = bench.targets_by_shard(blocks)[0]
    node = bench.link.node_of(target)
    path, slot, _ = await bench.place_of(target, blocks.keys[4])
    flip_byte(path, HEADERS_OFFSET + slot * HEADER_BYTES + 20)
    await scrub_node(bench, node)
    counters = bench.contexts[node].counters
    assert (counters.damaged_found, counters.quarantined) == (1, 0)
    assert await bench.count_shards(blocks.keys) == [6, 6, 6, 6, 5, 6, 6, 6, 6, 6]
    await bench.check()
    assert await bench.count_shards(blocks.keys) == [6] * 10


async def test_scrub_goes_on_where_it_was_when_the_worker_starts_anew(bench: RepairBench) -> None:
    blocks = await bench.save(64, seed=403, block_bytes=256 << 10)
    target = bench.targets_by_shard(blocks)[0]
    node = bench.link.node_of(target)
    context = bench.contexts[node]
    folder = context.folder(bench.link.map.target_by_name[target])
    _, slot, shape = await bench.place_of(target, blocks.keys[0])
    position = ScrubPosition(segment=shape.number, slot=slot + 10, started_at_s=1, passes=4)
    save_position(folder, position)
    await scrub_node(bench, node)
    assert 0 < context.counters.scrubbed_slots < 64
    ended = load_position(folder)
    assert ended is not None
    assert (ended.segment, ended.slot, ended.passes) == (0, 0, 5)
    assert ended.last_pass_s > 0
    before = context.counters.scrubbed_slots
    await scrub_node(bench, node)
    assert context.counters.scrubbed_slots - before == 64
    report = context.reports["scrub"]
    assert report["at_s"] is not None
    assert report["targets"][target]["passes"] == 6


async def test_scrub_reads_everything_when_the_disk_has_no_room_for_its_position(
    bench: RepairBench,
) -> None:
    blocks = await bench.save(64, seed=406, block_bytes=256 << 10)
    target = bench.targets_by_shard(blocks)[0]
    node = bench.link.node_of(target)
    context = bench.contexts[node]
    folder = context.folder(bench.link.map.target_by_name[target])
    _, slot, shape = await bench.place_of(target, blocks.keys[0])
    save_position(folder, ScrubPosition(segment=shape.number, slot=slot + 10, started_at_s=1))
    full = folder / f"{FILE_NAME}.tmp"
    full.symlink_to("/dev/full")
    try:
        await scrub_node(bench, node)
        before = context.counters.scrubbed_slots
        assert 0 < before < 64
        await scrub_node(bench, node)
        assert context.counters.scrubbed_slots - before == 64
    finally:
        full.unlink(missing_ok=True)


async def test_scrub_keeps_to_its_rate_and_stops_when_it_is_switched_off(
    bench: RepairBench,
) -> None:
    await bench.save(64, seed=404, block_bytes=256 << 10)
    node = bench.cluster.node_names[0]
    context = bench.contexts[node]
    context.policy = policy_of({"scrub_bytes_per_s": 1 << 20})
    begun_s = time.monotonic()
    task = asyncio.ensure_future(
        scrub.run(context, scrub.ScrubOptions(pass_min_s=0.0, idle_s=0.05))
    )
    try:
        await until(lambda: context.counters.scrubbed_bytes)
        await asyncio.sleep(1.5)
        # 1 MiB a second, a first chunk that is paid for afterwards, and the burst.
        paid_bytes = (time.monotonic() - begun_s) * (1 << 20)
        assert context.counters.scrubbed_bytes <= paid_bytes + (5 << 19)
        context.policy = policy_of({"scrub_is_on": False})
        async with asyncio.timeout(PATIENCE_S):
            before = -1
            while context.counters.scrubbed_bytes != before:
                before = context.counters.scrubbed_bytes
                await asyncio.sleep(1.2)
        context.policy = policy_of({"scrub_bytes_per_s": 1 << 30})
        async with asyncio.timeout(PATIENCE_S):
            while context.counters.scrub_passes < 2:
                await asyncio.sleep(0.02)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_written_where_the_folder_of_a_target_was(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    await bench.save(4, seed=409)
    node = bench.cluster.node_names[0]
    folder = cluster.target_folder(node)
    aside = folder.with_name("aside")
    shutil.move(folder, aside)
    folder.mkdir()
    try:
        await bench.wait_until_lost(node, is_lost=True)
        with pytest.raises(FileNotFoundError):
            await scrub_node(bench, node)
        assert list(folder.iterdir()) == []
        assert "scrub" not in bench.contexts[node].reports
    finally:
        folder.rmdir()
        shutil.move(aside, folder)
        await bench.wait_until_lost(node, is_lost=False)


# The reader --------------------------------------------------------------------------------------


async def reader_of(
    bench: RepairBench, blocks: RandomBlocks, target: str
) -> tuple[SegmentReader, list[int], np.ndarray]:
    """A reader of the segment with a target's shards, their slots and their generations."""
    places = [await bench.place_of(target, key) for key in blocks.keys]
    path, _, shape = places[0]
    assert {place[0] for place in places} == {path}
    order = np.argsort([place[1] for place in places])
    generations = (await bench.locate(target, blocks.keys))["generation"][order]
    identity = TargetIdentity(bench.link.map.cluster_id, target)
    reader = SegmentReader.open(Path(path).parent, identity, shape.number)
    return reader, sorted(place[1] for place in places), generations


async def test_unreadable_sector_is_found_bad_and_spoils_no_neighbour(bench: RepairBench) -> None:
    blocks = await bench.save(8, seed=405)
    target = bench.targets_by_shard(blocks)[0]
    _, slot, shape = await bench.place_of(target, blocks.keys[3])
    bad = range(*(shape.payload_offset + (slot + i) * 1024 for i in (0, 1)))

    def pread(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        if offset < bad.stop and bad.start < offset + len(into[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, into, offset)

    reader, slots, generations = await reader_of(bench, blocks, target)
    reader.pread = pread
    try:
        found = reader.check(slots, generations)
    finally:
        reader.close()
    states = {one.location & 0xFFFFFF: one.state for one in found}
    assert states.pop(slot) is SlotState.BAD
    assert set(states.values()) == {SlotState.GOOD}
    assert [one.key for one in found if one.state is SlotState.BAD] == [blocks.keys[3]]


async def test_unreadable_header_is_found_bad(bench: RepairBench) -> None:
    blocks = await bench.save(4, seed=406)
    target = bench.targets_by_shard(blocks)[0]

    def pread(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        if offset < HEADERS_OFFSET + 2048 and len(into[0]) == HEADER_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if len(into[0]) == 4 * HEADER_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, into, offset)

    reader, slots, generations = await reader_of(bench, blocks, target)
    reader.pread = pread
    try:
        states = [one.state for one in reader.check(slots, generations)]
    finally:
        reader.close()
    assert states == [SlotState.BAD_HEADER] * 4


async def test_slot_that_was_written_again_is_neither_good_nor_bad(bench: RepairBench) -> None:
    blocks = await bench.save(4, seed=407)
    target = bench.targets_by_shard(blocks)[0]
    reader, slots, generations = await reader_of(bench, blocks, target)
    try:
        found = reader.check(slots, generations + np.uint64(1))
    finally:
        reader.close()
    assert [one.state for one in found] == [SlotState.OTHER] * 4


async def test_memory_is_given_back_unless_somebody_else_used_it(
    bench: RepairBench, cluster: LocalCluster
) -> None:
    # Whole pages, so that no page holds bytes of two shards.
    blocks = await bench.save(8, seed=408, block_bytes=256 << 10)
    target = bench.targets_by_shard(blocks)[0]
    path, first, shape = await bench.place_of(target, blocks.keys[0])
    size = shape.geometry.payload_bytes
    reader, slots, generations = await reader_of(bench, blocks, target)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        probe = PageProbe.open(descriptor, shape.file_bytes)
        offsets = [shape.payload_offset + slot * size for slot in slots]
        if probe is None or any(probe.is_cached(offset, size) for offset in offsets):
            pytest.skip("this file system keeps all files in memory")
        os.pread(descriptor, size, offsets[2])
        assert probe.is_cached(offsets[2], size)
        states = [one.state for one in reader.check(slots, generations)]
        assert states == [SlotState.GOOD] * 8
        cached = [probe.is_cached(offset, size) for offset in offsets]
        assert cached == [i == 2 for i in range(8)]
        probe.close()
    finally:
        os.close(descriptor)
        reader.close()
    assert first in slots


# Small parts --------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 5000), st.integers(1, 10_000))
def test_cut_scan_keeps_within_its_bytes_and_loses_no_slot(
    count: int, payload_bytes: int, bytes_max: int
) -> None:
    head = wire.ScanHead(7, 100, count, payload_bytes, 8, 0, is_end=True)
    rows = np.zeros(count, wire.SCAN_ROW)
    cut, kept = cut_scan(head, rows, bytes_max)
    assert len(kept) == cut.slots
    assert len(kept) * payload_bytes <= max(bytes_max, payload_bytes)
    if len(kept) == count:
        assert cut == head
    else:
        assert kept.size
        assert (cut.next_segment, cut.next_slot, cut.is_end) == (7, 100 + len(kept), False)


positions = st.builds(
    ScrubPosition,
    segment=st.integers(0, 2**24),
    slot=st.integers(0, 2**24),
    started_at_s=st.integers(0, 2**40),
    passes=st.integers(0, 2**31),
    last_pass_s=st.integers(0, 2**31),
    finished_at_s=st.integers(0, 2**40),
)


@given(positions)
def test_position_is_read_back_as_it_was_kept(
    tmp_path_factory: pytest.TempPathFactory, position: ScrubPosition
) -> None:
    folder = tmp_path_factory.mktemp("position")
    save_position(folder, position)
    assert load_position(folder) == position
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"segment": 1}', "\0" * 100, "[" * 4000, '{"segment": "x"}'],
)
def test_scrub_begins_anew_when_its_position_makes_no_sense(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    assert load_position(tmp_path) is None


def test_scrub_begins_anew_when_a_number_is_negative_or_no_number(tmp_path: Path) -> None:
    good = '{"segment":1,"slot":2,"started_at_s":3,"passes":4,"last_pass_s":5,"finished_at_s":6}'
    (tmp_path / FILE_NAME).write_text(good)
    assert load_position(tmp_path) == ScrubPosition(
        segment=1, slot=2, started_at_s=3, passes=4, last_pass_s=5, finished_at_s=6
    )
    for bad in (good.replace("2", "-2"), good.replace("2", "true"), good.replace("2", "2.5")):
        (tmp_path / FILE_NAME).write_text(bad)
        assert load_position(tmp_path) is None


def test_pass_takes_no_negative_time_when_the_clock_was_set_back() -> None:
    ended = replace(ScrubPosition(), started_at_s=1000).ended(400)
    assert (ended.last_pass_s, ended.started_at_s, ended.passes) == (0, 400, 1)


def test_rest_between_two_passes_is_no_part_of_the_second() -> None:
    first = ScrubPosition().begun(1000).ended(1050)
    assert (first.last_pass_s, first.finished_at_s) == (50, 1050)
    second = first.begun(2000)
    assert second.moved_to(1, 5).begun(2500).ended(2600).last_pass_s == 600


@pytest.mark.parametrize(
    ("finished", "at_s"), [([], None), ([None], None), ([5, None], None), ([5, 9], 5)]
)
def test_scrub_was_complete_when_its_last_target_was(
    finished: list[int | None], at_s: int | None
) -> None:
    targets = {f"t{i}": {"finished_at_s": one} for i, one in enumerate(finished)}
    assert describe_scrub(targets) == {"at_s": at_s, "targets": targets}
