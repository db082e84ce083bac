"""When shards were used survives a kill, for those that are still the same shards."""

import errno
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvstore.node.disk import OsDisk
from kvstore.node.server import ServerSettings
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards
from tests.kvstore.node.served_node import served_node
from tests.patience import wait_until

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


@pytest.mark.parametrize("is_killed", [True, False])
def test_repaired_shard_is_not_made_younger_by_a_start(
    tmp_path: Path, rng: random.Random, is_killed: bool
) -> None:
    driven = DrivenNode(tmp_path / "t")
    used_s = int(driven.clock.unix_s) - 80_000
    shards = [replace(shard, last_used_s=used_s) for shard in make_shards(rng, 5, SHARD_BYTES)]
    driven.write(shards)
    assert ages_s(driven, shards) == [80_000] * 5
    if is_killed:
        note(driven)
        driven.crash()
    else:
        driven.close()
    driven.open()
    assert ages_s(driven, shards) == [80_000] * 5
    driven.close()


class RacedColumn(np.ndarray[tuple[int], np.dtype[np.uint32]]):
    """A column in which something happens while it is copied."""

    meanwhile: Callable[[], object]

    def tobytes(self, order: Literal["A", "C", "F", "K"] | None = "C") -> bytes:
        copied = super().tobytes(order)
        self.meanwhile()
        return copied


def test_shard_that_is_written_during_a_round_is_not_older_than_it_is(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = write_and_use(driven, rng)
    others = make_shards(rng, 5, SHARD_BYTES)

    def replace_first_shards() -> None:
        driven.forget(keys_of(shards[:5]))
        driven.clock.advance(10_000)
        driven.write(others)

    columns = driven.target.space.segments[0].columns
    plain = columns.last_used_s
    raced = plain.view(RacedColumn)
    raced.meanwhile = replace_first_shards
    columns.last_used_s = raced
    note(driven)
    columns.last_used_s = plain
    assert driven.target.index.find(keys_of(others)) == [0, 1, 2, 3, 4]
    driven.crash()
    driven.open()
    assert ages_s(driven, others) == [0] * 5
    assert ages_s(driven, shards[5:20]) == [10_000] * 5 + [11_000] * 10
    driven.close()


class KeepingDisk(OsDisk):
    """A disk that removes nothing."""

    def remove(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file")
        raise OSError(errno.EROFS, "read-only file system")


def test_file_that_cannot_be_removed_ends_neither_the_node_nor_its_start(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    driven = DrivenNode(tmp_path / "t")
    write_and_use(driven, rng)
    note(driven)
    segments = list(driven.target.space.segments.values())
    # As if one of them had gone.
    driven.target.access_times.write(KeepingDisk(), segments[1:])
    assert "access times not written" in caplog.text
    (driven.folder / "segment-000099.used").write_bytes(b"x")
    driven.target.access_times.read(KeepingDisk(), segments)
    assert "access times not used" in caplog.text
    # What could not be removed is tried again.
    driven.target.access_times.write(driven.disk, segments[1:])
    assert driven.folder / "segment-000000.used" not in used_files(driven)
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
