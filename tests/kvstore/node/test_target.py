"""What a target tells those who choose shards by its columns."""

import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.node.segment import ABSENT, LOCATION_BITS
from kvstore.node.slot import SlotGeometry
from kvstore.retention import DEFAULT_POLICY
from kvstore.wire import Op, Status, WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.raw_client import keys_of, make_shards

SHARD_BYTES = 300


def test_target_names_the_key_of_each_slot_in_the_index(tmp_path: Path, rng: random.Random) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards = make_shards(rng, 150, SHARD_BYTES)
    driven.write(shards)
    target = driven.target
    locations = target.index.find(keys_of(shards))
    assert [target.key_at(location) for location in locations] == keys_of(shards)
    driven.forget(keys_of(shards[:1]))
    nowhere = [locations[0], locations[-1] + 1, (1 << LOCATION_BITS) - 1, 99 << LOCATION_BITS]
    assert [target.key_at(location) for location in [*nowhere, ABSENT]] == [None] * 5
    driven.close()


def test_target_may_have_as_many_slots_as_its_capacity_holds_of_the_smallest(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", capacity_bytes=1 << 20, slots_max=2000)
    target = driven.target
    assert target.slots_possible() == 0
    driven.write(make_shards(rng, 1, 3000))
    assert target.slots_possible() == (1 << 20) // SlotGeometry(3000).slot_bytes
    driven.write(make_shards(rng, 1, SHARD_BYTES))
    assert target.slots_possible() == (1 << 20) // SlotGeometry(SHARD_BYTES).slot_bytes
    driven.write(make_shards(rng, 1, 50))
    assert target.slots_possible() == 2000
    # It is never less than what can be stored.
    while driven.write(make_shards(rng, 64, 50))[-1] == 1:
        assert len(target.index) <= target.slots_possible()
    driven.close()


def test_ttl_classes_keep_their_numbers_and_share_the_last(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t", snapshot_shards_min=0)
    shards = make_shards(rng, 300, 50)
    for i, shard in enumerate(shards):
        driven.write([shard], ttl_class=f"class-{i}".encode())
    expected = [f"class-{min(i, 255)}" for i in range(255)] + ["(other)"]
    for _ in range(2):
        target = driven.target
        assert target.ttl_class_names == expected
        locations = np.array(target.index.find(keys_of(shards)))
        numbers = []
        for location in locations.tolist():
            segment, slot = target.index.resolve(location)
            numbers.append(int(segment.columns.ttl_class[slot]))
        assert numbers == [min(i, 255) for i in range(300)]
        driven.close()
        driven.open()
    driven.close()


def test_class_of_the_policy_is_never_kept_under_the_ttl_of_another(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    """When no number is left, only classes that the policy does not list share the last one."""
    driven = DrivenNode(tmp_path / "t")
    listed = DEFAULT_POLICY.with_ttl(
        "brief", 60, who="a test", why="", at_s=1, is_new=True
    ).to_json()
    for i in range(255):
        driven.write(make_shards(rng, 1, 50), ttl_class=f"class-{i}".encode())
    assert not caplog.records
    assert driven.ask(Op.POLICY, listed, len(listed)).status is Status.OK
    shards = make_shards(rng, 1, 50)
    answer = driven.ask_write(shards, ttl_class=b"brief")
    assert answer.status is Status.BAD_REQUEST
    assert b"brief" in answer.body
    for name in (b"chat", b"class-7", b"not-listed", b"not-listed-too"):
        assert driven.write(make_shards(rng, 1, 50), ttl_class=name) == [WriteOutcome.STORED]
    told = [record for record in caplog.records if "TTL classes" in record.getMessage()]
    assert len(told) == 1
    driven.close()


def test_target_that_became_smaller_does_not_rebuild_its_index_with_each_write(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t")
    driven.write(make_shards(rng, 500, SHARD_BYTES))
    driven.close()
    driven.capacity_bytes = 64 << 10
    driven.open()
    assert driven.target.slots_possible() < 500 < driven.target.space.slot_count
    words = driven.target.index.export_table().words
    driven.write(make_shards(rng, 3, SHARD_BYTES))
    assert len(driven.target.index) == 503
    assert driven.target.index.export_table().words is words
    driven.close()
