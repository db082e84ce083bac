"""When shards were used survives a kill, for those that are still the same shards."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.node.server import ServerSettings
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards
from tests.kvstore.node.served_node import served_node, wait_until

SHARD_BYTES = 300


def note(driven: DrivenNode) -> int:
    target = driven.target
    return target.access_times.write(driven.disk, target.space.segments.values())


def ages_s(driven: DrivenNode, shards: list[Shard]) -> list[int]:
    ages = []
    for location in driven.target.index.find(keys_of(shards)):
        segment, slot = driven.target.index.resolve(location)
        ages.append(int(driven.clock.unix_s) - int(segment.columns.last_used_s[slot]))
    return ages


def write_and_use(driven: DrivenNode, rng: random.Random) -> list[Shard]:
    """300 shards of three segments, of which the first ten are used 1,000 s later."""
    shards = make_shards(rng, 300, SHARD_BYTES)
    driven.write(shards)
    driven.clock.advance(1000)
    driven.read(keys_of(shards[:10]), SHARD_BYTES)
    return shards


def used_files(driven: DrivenNode) -> list[Path]:
    return sorted(driven.folder.glob("*.used*"))


def test_times_of_use_survive_a_kill(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = write_and_use(driven, rng)
    assert note(driven) == 3
    driven.crash()
    driven.open()
    assert ages_s(driven, shards) == [0] * 10 + [1000] * 290
    driven.close()


def test_only_segments_that_were_used_are_written_again(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = write_and_use(driven, rng)
    assert [note(driven), note(driven)] == [3, 0]
    driven.clock.advance(5)
    driven.read(keys_of(shards[200:201]), SHARD_BYTES)
    assert note(driven) == 1
    driven.crash()
    driven.open()
    # What is on the disk already is known after a start.
    assert note(driven) == 0
    driven.close()


def test_time_of_another_shard_is_not_believed(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = write_and_use(driven, rng)
    note(driven)
    driven.forget(keys_of(shards[:5]))
    driven.clock.advance(-500)
    others = make_shards(rng, 5, SHARD_BYTES)
    driven.write(others)
    assert driven.target.index.find(keys_of(others)) == [0, 1, 2, 3, 4]
    driven.crash()
    driven.open()
    assert ages_s(driven, others) == [0] * 5
    driven.close()


def test_no_shard_counts_as_older_than_it_is(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = write_and_use(driven, rng)
    segment, slot = driven.target.index.resolve(driven.target.index.get(shards[0].key))
    segment.columns.last_used_s[slot] = 5
    note(driven)
    driven.crash()
    driven.open()
    assert ages_s(driven, shards[:1]) == [1000]
    driven.close()


def test_damaged_times_are_not_used_wherever_a_byte_is_wrong(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = write_and_use(driven, rng)
    note(driven)
    path = used_files(driven)[0]
    whole = path.read_bytes()
    places = [0, 8, 12, 16, 24, len(whole) - 1, *(rng.randrange(32, 64) for _ in range(3))]
    for at in places + [rng.randrange(64, len(whole)) for _ in range(20)]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        caplog.clear()
        driven.crash()
        driven.open()
        # Behind the fields are zeros that nobody looks at.
        is_used = 32 <= at < 64
        assert ("access times not used" in caplog.text) != is_used
        assert ages_s(driven, shards[:10]) == [0 if is_used else 1000] * 10
    driven.close()


@pytest.mark.parametrize("kept", [0, 63, 64, -1])
def test_times_that_were_cut_are_not_used(tmp_path: Path, rng: random.Random, kept: int) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = write_and_use(driven, rng)
    note(driven)
    path = used_files(driven)[0]
    path.write_bytes(path.read_bytes()[:kept])
    driven.crash()
    driven.open()
    assert ages_s(driven, shards[:10]) == [1000] * 10
    assert all(driven.match(keys_of(shards)))
    driven.close()


def test_files_of_segments_that_are_gone_are_removed(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t", capacity_bytes=200 << 10)
    shards = make_shards(rng, 300, SHARD_BYTES)
    driven.write(shards)
    note(driven)
    before = used_files(driven)
    driven.forget(keys_of(shards))
    # Shards of another size need the room.
    driven.write(make_shards(rng, 60, 3000))
    note(driven)
    segments = {path.stem for path in driven.folder.glob("*.seg")}
    assert {path.stem for path in used_files(driven)} == segments
    assert before[0].stem not in segments
    (driven.folder / "segment-000099.used").write_bytes(b"x")
    (driven.folder / "segment-000000.used.tmp").write_bytes(b"x")
    driven.crash()
    driven.open()
    assert {path.stem for path in used_files(driven)} == segments
    driven.close()


@pytest.mark.parametrize("operation", ["write", "rename"])
def test_full_disk_costs_the_times_and_nothing_else(
    tmp_path: Path, rng: random.Random, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    shards = write_and_use(driven, rng)
    disk.refuse = {operation: errno.ENOSPC}
    assert note(driven) == 0
    assert "access times not written" in caplog.text
    assert used_files(driven) == []
    disk.refuse = {}
    assert note(driven) == 3
    assert all(driven.match(keys_of(shards)))
    driven.close()


def test_serving_node_notes_the_times_by_itself(tmp_path: Path, rng: random.Random) -> None:
    settings = ServerSettings(access_times_interval_s=0.05)
    with served_node(tmp_path, settings=settings) as served:
        shards = make_shards(rng, 5, SHARD_BYTES)
        with served.client() as client:
            client.write(shards)
            path = served.node.targets[0].folder.path / "segment-000000.used"
            wait_until(path.exists)
            first = path.read_bytes()
            segment = served.node.targets[0].space.segments[0]
            segment.columns.last_used_s[:5] = 77
            wait_until(lambda: path.read_bytes() != first)
    times_s = np.frombuffer(path.read_bytes(), np.uint32, 5, 64)
    assert times_s.tolist() == [77] * 5
    assert not os.path.exists(f"{path}.tmp")
