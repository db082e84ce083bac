"""When a shard counts as used: TOUCH, and the ways in which READ and WRITE do and do not renew."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards

SHARD_BYTES = 500


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t")
    yield node
    node.close()


def last_used_s(driven: DrivenNode, *shards: Shard) -> list[int]:
    return [row["last_used_s"] for row in driven.locate(keys_of(shards))]


def test_touch_makes_a_shard_younger_and_never_older_or_of_the_future(
    driven: DrivenNode, rng: random.Random
) -> None:
    older, younger, future = make_shards(rng, 3, SHARD_BYTES)
    driven.write([older, younger, future])
    written_s = int(driven.clock.unix_s)
    driven.clock.advance(100)
    assert driven.touch(
        [
            (older.key, written_s - 50),
            (younger.key, written_s + 60),
            (future.key, 0xFFFF_FFFF),
            (rng.randbytes(32), written_s),
        ]
    ) == [True, True, True, False]
    assert last_used_s(driven, older, younger, future) == [
        written_s,
        written_s + 60,
        written_s + 100,
    ]
    assert driven.target_stat()["touched"] == 3


def test_read_renews_unless_it_is_no_use(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard], ttl_class=b"agent")
    written_s = int(driven.clock.unix_s)
    driven.clock.advance(100)
    quiet = wire.pack_read([shard.key], SHARD_BYTES, is_use=False)
    assert driven.ask(wire.Op.READ, quiet, 1).payloads == [shard.payload]
    assert last_used_s(driven, shard) == [written_s]
    assert driven.target_stat()["hits_by_class"] == {}
    driven.read([shard.key], SHARD_BYTES)
    assert last_used_s(driven, shard) == [written_s + 100]
    assert driven.target_stat()["hits_by_class"] == {"agent": 1}


def test_write_of_a_repair_does_not_renew(driven: DrivenNode, rng: random.Random) -> None:
    now_s = int(driven.clock.unix_s)
    ages = (now_s - 5000, 0, now_s + 5000)
    shards = [
        Shard(rng.randbytes(32), rng.randbytes(SHARD_BYTES), last_used_s=used_s) for used_s in ages
    ]
    assert driven.write(shards) == [WriteOutcome.STORED] * 3
    assert last_used_s(driven, *shards) == [now_s - 5000, now_s, now_s]


def test_write_of_a_known_shard_renews_it_as_a_save_does(
    driven: DrivenNode, rng: random.Random
) -> None:
    saved, repaired = make_shards(rng, 2, SHARD_BYTES)
    driven.write([saved, repaired])
    written_s = int(driven.clock.unix_s)
    driven.clock.advance(100)
    again = Shard(repaired.key, repaired.payload, last_used_s=written_s + 7)
    assert driven.write([saved, again]) == [WriteOutcome.KNOWN] * 2
    assert last_used_s(driven, saved, repaired) == [written_s + 100, written_s + 7]


def test_match_and_locate_renew_nothing(driven: DrivenNode, rng: random.Random) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    written_s = int(driven.clock.unix_s)
    driven.clock.advance(100)
    assert driven.match([shard.key]) == [True]
    assert last_used_s(driven, shard) == [written_s]
    assert last_used_s(driven, shard) == [written_s]
