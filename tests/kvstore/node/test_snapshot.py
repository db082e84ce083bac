"""The snapshot of a clean stop: it is used once, only if it fits in every way, and never needed."""

import errno
import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from xxhash import xxh3_64_hexdigest

from kvstore.node.segment import TargetIdentity
from kvstore.node.snapshot import (
    METADATA_KEY,
    SnapshotHead,
    SnapshotUnfit,
    find_misfit,
    parse_snapshot,
    take_snapshot,
)
from kvstore.node.target_snapshot import find_snapshot_problem
from kvstore.wire import WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards

SHARD_BYTES = 300
COUNT = 400


def make_node(tmp_path: Path, disk: FaultyDisk | None = None) -> DrivenNode:
    return DrivenNode(tmp_path / "t", disk=disk or FaultyDisk(), snapshot_shards_min=0)


def fill(driven: DrivenNode, rng: random.Random, count: int = COUNT) -> list[Shard]:
    """Write shards of two classes and forget some, so that there are holes."""
    shards = make_shards(rng, count, SHARD_BYTES)
    for at in range(0, count, 50):
        name = b"agent" if at % 100 else b"chat"
        driven.write(shards[at : at + 50], ttl_class=name)
    driven.forget(keys_of(shards[7::11]))
    return [shard for i, shard in enumerate(shards) if i % 11 != 7]


def check_all_here(driven: DrivenNode, shards: list[Shard]) -> None:
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [got and got.payload for got in found] == [shard.payload for shard in shards]
    assert len(driven.target.index) == len(shards)


def snapshots(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "t").glob("index*"))


def was_snapshot_used(disk: FaultyDisk) -> bool:
    """Whether no header table was read, which starts with an `advise`."""
    return "advise" not in disk.calls


class WatchedDisk(FaultyDisk):
    def advise(self, descriptor: int, advice: int) -> None:
        self.calls.append("advise")
        super().advise(descriptor, advice)


def test_clean_stop_leaves_a_snapshot_that_the_next_start_takes(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = WatchedDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng)
    last = int(driven.target.last_generation)
    driven.clock.advance(1000)
    driven.read(keys_of(shards[:10]), SHARD_BYTES)
    driven.close()
    assert len(snapshots(tmp_path)) == 1
    disk.calls.clear()
    driven.open()
    assert was_snapshot_used(disk)
    assert snapshots(tmp_path) == []
    check_all_here(driven, shards)
    assert driven.target.ttl_class_names == ["chat", "agent"]
    assert driven.target.last_generation == last
    driven.close()


def test_target_is_the_same_from_a_snapshot_as_from_its_headers(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    driven.close()
    driven.open()
    from_snapshot = describe(driven, shards)
    driven.crash()
    driven.open()
    assert describe(driven, shards) == from_snapshot
    # And it works on: what is free can be written, and found.
    more = make_shards(rng, 60, SHARD_BYTES)
    assert driven.write(more) == [WriteOutcome.STORED] * 60
    check_all_here(driven, [*shards, *more])
    driven.close()


def describe(driven: DrivenNode, shards: list[Shard]) -> list[object]:
    target = driven.target
    locations = target.index.find(keys_of(shards))
    rows = []
    for location in locations:
        segment, slot = target.index.resolve(location)
        columns = segment.columns
        name = target.ttl_class_names[columns.ttl_class[slot]]
        numbers = (columns.last_used_s, columns.block_index, columns.created_ds)
        rows.append((columns.parts[slot].tobytes(), name, [int(one[slot]) for one in numbers]))
    free = [free.runs() for free in target.space._free.values()]
    return [locations, rows, free, target.used_bytes, sorted(target.quarantined)]


def test_snapshot_keeps_when_shards_were_used(tmp_path: Path, rng: random.Random) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    driven.clock.advance(1000)
    driven.read(keys_of(shards[:10]), SHARD_BYTES)
    now_s = int(driven.clock.unix_s)
    driven.close()
    (tmp_path / "t" / "segment-000000.used").unlink()
    driven.open()
    for shard, age_s in ((shards[0], 0), (shards[9], 0), (shards[10], 1000)):
        segment, slot = driven.target.index.resolve(driven.target.index.get(shard.key))
        assert segment.columns.last_used_s[slot] == now_s - age_s
    driven.close()


def test_slots_out_of_use_stay_so_over_a_snapshot(tmp_path: Path, rng: random.Random) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    location = driven.target.index.get(shards[3].key)
    driven.target.drop_damaged(shards[3].key, location, driven.target.generation(location))
    driven.close()
    driven.open()
    assert driven.target.quarantined == {location}
    assert driven.read([shards[3].key], SHARD_BYTES) == [None]
    assert driven.write([shards[3]]) == [WriteOutcome.STORED]
    assert driven.target.index.get(shards[3].key) != location
    driven.close()


def test_start_after_a_kill_sees_no_snapshot_of_before(tmp_path: Path, rng: random.Random) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    driven.close()
    driven.open()
    driven.forget(keys_of(shards[:5]))
    driven.crash()
    driven.open()
    assert driven.match(keys_of(shards[:6])) == [False] * 5 + [True]
    driven.close()


def test_snapshot_is_gone_for_good_before_it_is_read(tmp_path: Path, rng: random.Random) -> None:
    driven = make_node(tmp_path)
    fill(driven, rng)
    driven.close()
    disk = FaultyDisk()
    with take_snapshot(disk, tmp_path / "t") as snapshot:
        assert snapshot is not None
        assert snapshots(tmp_path) == []
    with take_snapshot(disk, tmp_path / "t") as snapshot:
        assert snapshot is None


def test_damaged_snapshot_is_not_used_wherever_a_byte_is_wrong(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    disk = WatchedDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng, 100)
    driven.close()
    (path,) = snapshots(tmp_path)
    whole = path.read_bytes()
    edges = [0, 8, len(whole) - 1]
    for at in edges + [rng.randrange(len(whole)) for _ in range(40)]:
        for found in snapshots(tmp_path):
            found.unlink()
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        disk.calls.clear()
        caplog.clear()
        driven.open()
        assert not was_snapshot_used(disk)
        assert "snapshot not used" in caplog.text
        assert driven.match(keys_of(shards)) == [True] * len(shards)
        driven.crash()
    check_reads_of_another_start(driven, shards)


def check_reads_of_another_start(driven: DrivenNode, shards: list[Shard]) -> None:
    driven.open()
    check_all_here(driven, shards)
    driven.close()


@pytest.mark.parametrize("kept", [0, 1, 1000, -1])
def test_snapshot_that_was_cut_is_not_used(tmp_path: Path, rng: random.Random, kept: int) -> None:
    disk = WatchedDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng)
    driven.close()
    (path,) = snapshots(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    disk.calls.clear()
    driven.open()
    assert not was_snapshot_used(disk)
    check_all_here(driven, shards)
    driven.close()


def test_snapshot_that_the_device_cannot_read_is_not_used(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = WatchedDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng)
    driven.close()
    (path,) = snapshots(tmp_path)
    # Behind the headers of segments, which must be readable.
    disk.unreadable = [(path.stat().st_size - 1, path.stat().st_size)]
    disk.calls.clear()
    driven.open()
    disk.unreadable = []
    assert not was_snapshot_used(disk)
    check_all_here(driven, shards)
    driven.close()


def test_snapshot_of_other_segments_is_not_used(tmp_path: Path, rng: random.Random) -> None:
    disk = WatchedDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng)
    lost = driven.target.space.segments[1]
    on_lost = [s for s in shards if driven.target.index.resolve(index_of(driven, s))[0] is lost]
    driven.close()
    (tmp_path / "t" / "segment-000001.seg").unlink()
    disk.calls.clear()
    driven.open()
    assert not was_snapshot_used(disk)
    assert on_lost
    check_all_here(driven, [shard for shard in shards if shard not in on_lost])
    driven.close()


def index_of(driven: DrivenNode, shard: Shard) -> int:
    return driven.target.index.get(shard.key)


def test_snapshot_of_a_segment_that_was_cut_afterwards_is_not_used(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = WatchedDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng)
    driven.close()
    path = tmp_path / "t" / "segment-000000.seg"
    path.write_bytes(path.read_bytes()[: -2 * SHARD_BYTES])
    disk.calls.clear()
    driven.open()
    assert not was_snapshot_used(disk)
    here = driven.match(keys_of(shards))
    assert driven.read(keys_of(shards), SHARD_BYTES).count(None) == here.count(False) > 0
    driven.close()


def head_of(driven: DrivenNode) -> SnapshotHead:
    segments = sorted(driven.target.space.segments.items())
    return SnapshotHead(
        cluster=driven.target.folder.identity.cluster.hex(),
        target="t01",
        segments=[[n, s.payload_bytes, s.shape.slot_count, 1] for n, s in segments],
        shards=1,
        last_generation=1,
        ttl_classes=[],
        table_seed=1,
        table_keys_max=1,
    )


def test_misfit_is_named(tmp_path: Path, rng: random.Random) -> None:
    driven = make_node(tmp_path)
    fill(driven, rng)
    identity = driven.target.folder.identity
    segments = list(driven.target.space.segments.values())
    head = head_of(driven)
    assert find_misfit(head, identity, segments[::-1]) is None
    assert "t02" in str(find_misfit(replace(head, target="t02"), identity, segments))
    other = TargetIdentity(bytes(16), "t01")
    assert "cluster 0001" in str(find_misfit(head, other, segments))
    assert "segments" in str(find_misfit(head, identity, segments[1:]))
    for column in (0, 1, 2):
        changed = [list(one) for one in head.segments]
        changed[-1][column] += 1
        assert "segments" in str(find_misfit(replace(head, segments=changed), identity, segments))
    driven.close()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 2, "slot_format": 2}', b'{"format": 1}']
)
def test_snapshot_with_another_head_is_refused_with_the_reason(content: bytes) -> None:
    sink = pa.BufferOutputStream()
    schema = pa.schema([("key", pa.binary(32))], {METADATA_KEY: content})
    for one in (schema, pa.schema([("word", pa.uint64())])):
        with pa.ipc.new_stream(sink, one):
            pass
    with pytest.raises(SnapshotUnfit):
        parse_snapshot(sink.getvalue().to_pybytes())


def test_bytes_that_are_no_snapshot_are_refused_even_with_the_right_checksum(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = WatchedDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng, 100)
    driven.close()
    (path,) = snapshots(tmp_path)
    whole = path.read_bytes()
    tables = whole.replace(b'"table_keys_max": ', b'"table_keys_max": 1', 1)
    for content in (b"", b"x", rng.randbytes(5000), whole[: len(whole) // 2], tables):
        for found in snapshots(tmp_path):
            found.unlink()
        (tmp_path / "t" / f"index-{xxh3_64_hexdigest(content)}.arrow").write_bytes(content)
        disk.calls.clear()
        driven.open()
        assert not was_snapshot_used(disk)
        assert driven.match(keys_of(shards)) == [True] * len(shards)
        driven.crash()
    check_reads_of_another_start(driven, shards)


def test_snapshot_can_be_read_by_any_arrow_program(tmp_path: Path, rng: random.Random) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    driven.close()
    (path,) = snapshots(tmp_path)
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as slots:
        head = json.loads(slots.schema.metadata[METADATA_KEY])
        table = slots.read_all()
    assert head["shards"] == len(shards)
    is_here = np.array([part[0] for part in table["part"].to_pylist()]) == 1
    keys = [key for key, here in zip(table["key"].to_pylist(), is_here, strict=True) if here]
    assert sorted(keys) == sorted(keys_of(shards))


@pytest.mark.parametrize("operation", ["rename", "write"])
def test_stop_on_a_full_disk_leaves_no_half_snapshot(
    tmp_path: Path, rng: random.Random, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng)
    disk.refuse = {operation: errno.ENOSPC}
    driven.close()
    assert "no snapshot target=t01" in caplog.text
    left = {path.suffix for path in (tmp_path / "t").iterdir() if path.name != "policy.tmp"}
    assert left == {"", ".json", ".seg"}
    disk.refuse = {}
    driven.open()
    check_all_here(driven, shards)
    driven.close()


def test_no_snapshot_is_written_while_a_slot_is_on_its_way(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    assert find_snapshot_problem(driven.target) is None
    # A thread that hangs has taken these and not given them back.
    segment = next(iter(driven.target.space.segments.values()))
    driven.target.space.take(segment.shape.geometry, 3)
    assert find_snapshot_problem(driven.target) == "3 slots are still being written or cleared"
    driven.close()
    assert snapshots(tmp_path) == []
    assert "no snapshot" in caplog.text
    check_reads_of_another_start(driven, shards)


def test_resting_and_quarantined_slots_are_accounted_for(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    phase = driven.target.resting.begin_sending()
    driven.forget(keys_of(shards[:5]))
    location = index_of(driven, shards[5])
    target = driven.target
    target.drop_damaged(shards[5].key, location, target.generation(location))
    target.release_runs([target.space.run_at(location, 1)], [])
    assert target.resting.slot_count == 6
    assert find_snapshot_problem(target) is None
    target.end_sending(phase)
    assert find_snapshot_problem(target) is None
    driven.close()


def test_lost_folder_gets_no_snapshot(tmp_path: Path, rng: random.Random) -> None:
    driven = make_node(tmp_path)
    fill(driven, rng)
    driven.target.note_place("it is gone")
    driven.close()
    assert snapshots(tmp_path) == []


def test_few_shards_get_no_snapshot(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t", snapshot_shards_min=5)
    shards = make_shards(rng, 5, SHARD_BYTES)
    driven.write(shards[:4])
    driven.close()
    assert snapshots(tmp_path) == []
    driven.open()
    driven.write(shards)
    driven.close()
    assert len(snapshots(tmp_path)) == 1
    check_reads_of_another_start(driven, shards)


def test_unfinished_snapshot_is_removed_at_the_start(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    driven = make_node(tmp_path)
    shards = fill(driven, rng)
    driven.close()
    for path in snapshots(tmp_path):
        path.rename(tmp_path / "t" / "index.arrow.tmp")
    with caplog.at_level(logging.ERROR):
        check_reads_of_another_start(driven, shards)
    assert not caplog.records
    assert len(snapshots(tmp_path)) == 1


def test_stop_on_a_disk_that_does_not_sync_leaves_no_snapshot(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    driven = make_node(tmp_path, disk)
    shards = fill(driven, rng)
    disk.refuse = {"sync": errno.EIO}
    driven.close()
    assert "sync failed" in caplog.text
    assert snapshots(tmp_path) == []
    disk.refuse = {}
    driven.open()
    check_all_here(driven, shards)
    driven.close()
