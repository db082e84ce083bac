"""What a process that is killed in a write leaves behind, and what the next one makes of it.

The table "what a crash leaves" of docs/formats/slot.md, played through.
"""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.wire import WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.faulty_disk import FaultyDisk, Killed
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards

SHARD_BYTES = 300
HEADER_BYTES = 256
SLOT_BYTES = SHARD_BYTES + HEADER_BYTES


def check_held(driven: DrivenNode, shards: list[Shard]) -> list[bool]:
    """Which shards are here; asserts that those are bit-exact, and that MATCH says the same."""
    found = driven.read(keys_of(shards), SHARD_BYTES)
    for shard, got in zip(shards, found, strict=True):
        assert got is None or got.payload == shard.payload
    here = [got is not None for got in found]
    assert driven.match(keys_of(shards)) == here
    return here


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_killed_write_leaves_whole_shards_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rng = random.Random(data.draw(st.integers(0, 1000), "seed"))
    folder = tmp_path_factory.mktemp("crash") / "t"
    disk = FaultyDisk()
    driven = DrivenNode(folder, disk=disk)
    before = make_shards(rng, data.draw(st.integers(0, 12), "shards before"), SHARD_BYTES)
    if before:
        driven.write(before)
    forgotten = before[:: data.draw(st.integers(1, 3), "every nth is forgotten")]
    driven.forget(keys_of(forgotten))
    shards = make_shards(rng, data.draw(st.integers(1, 12), "shards"), SHARD_BYTES)
    driven.write(make_shards(rng, 1, SHARD_BYTES))
    written_bytes = data.draw(st.integers(1, len(shards) * SLOT_BYTES), "bytes written")
    disk.write_left = written_bytes
    try:
        driven.write(shards)
    except Killed:
        driven.crash()
    else:
        disk.write_left = None
        driven.close()
    disk.write_left = None
    driven.open()
    held = check_held(driven, shards)
    # No shard is here unless all its bytes and its header were written. A run is written payloads
    # first, so how many are here depends on how the free slots lie.
    assert held.count(True) <= written_bytes // SLOT_BYTES
    assert all(held) == (written_bytes == len(shards) * SLOT_BYTES)
    assert check_held(driven, before) == [shard not in forgotten for shard in before]
    # And the target is as good as new.
    missing = [shard for shard, here in zip(shards, held, strict=True) if not here]
    if missing:
        assert driven.write(missing) == [WriteOutcome.STORED] * len(missing)
    assert all(check_held(driven, shards))
    driven.close()


@pytest.mark.parametrize("headers_bytes", [-5 * SHARD_BYTES + 1, -1, 0, 255, 256, 257, 3 * 256])
def test_killed_write_of_neighbours_leaves_the_shards_that_were_written_whole(
    tmp_path: Path, rng: random.Random, headers_bytes: int
) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    driven.write(make_shards(rng, 1, SHARD_BYTES))
    shards = make_shards(rng, 5, SHARD_BYTES)
    disk.write_left = 5 * SHARD_BYTES + headers_bytes
    with pytest.raises(Killed):
        driven.write(shards)
    driven.crash()
    disk.write_left = None
    driven.open()
    # After all payloads come the headers, and with each of them its shard is here.
    whole = max(headers_bytes, 0) // HEADER_BYTES
    assert check_held(driven, shards) == [True] * whole + [False] * (5 - whole)
    driven.close()


def test_newer_version_counts_when_a_crash_left_both(tmp_path: Path, rng: random.Random) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk)
    (old,) = make_shards(rng, 1, SHARD_BYTES, block_xxh3=1)
    new = Shard(old.key, rng.randbytes(SHARD_BYTES), block_xxh3=2)
    driven.write([old])
    # The new version is on the disk; the old one's header is not cleared any more.
    disk.write_left = SLOT_BYTES
    with pytest.raises(Killed):
        driven.write([new])
    driven.crash()
    disk.write_left = None
    for _ in range(2):
        driven.open()
        (found,) = driven.read([old.key], SHARD_BYTES)
        assert found is not None
        assert found.payload == new.payload
        assert len(driven.target.index) == 1
        assert driven.target.used_bytes == SLOT_BYTES
        driven.close()
    # The slot of the old one can be used, and the old bytes never come back.
    driven.open()
    driven.forget([old.key])
    driven.close()
    driven.open()
    assert driven.read([old.key], SHARD_BYTES) == [None]
    driven.close()


def test_unfinished_segment_is_removed_at_the_start(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    driven.close()
    (tmp_path / "t" / "segment-000001.seg.tmp").write_bytes(b"half")
    driven.open()
    assert all(check_held(driven, shards))
    assert not list((tmp_path / "t").glob("segment-*.tmp"))
    driven.close()


def test_generations_grow_over_restarts_even_when_shards_were_forgotten(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t")
    seen: list[int] = []
    for _ in range(4):
        (shard,) = make_shards(rng, 1, SHARD_BYTES)
        driven.write([shard])
        seen.append(driven.target.generation(driven.target.index.get(shard.key)))
        driven.forget([shard.key])
        driven.close()
        driven.clock.advance(0.001)
        driven.open()
    assert seen == sorted(set(seen))
    driven.close()


def test_start_looks_only_at_slots_that_were_ever_written(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk()
    driven = DrivenNode(tmp_path / "t", disk=disk, capacity_bytes=512 << 20, segment_bytes=32 << 20)
    shards = make_shards(rng, 100, 11392)
    driven.write(shards)
    driven.close()
    disk.calls.clear()
    disk.has_cache = False
    driven.open()
    assert len(driven.target.index) == 100
    # The segment's own header, all slot headers that were ever written, and the times of use.
    assert disk.calls.count("read") == 3
    driven.close()
