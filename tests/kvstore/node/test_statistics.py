"""What STAT shows: figures that are kept as things happen are those that counting would give."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import wire
from kvstore.node.statistics import CLASSES_SHOWN_MAX, OTHER_NAME, ClassUsage, RequestMeter
from kvstore.wire import Op
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.raw_client import Shard, keys_of, make_shards
from tests.kvstore.node.served_node import served_node
from tests.patience import wait_until

SHARD_BYTES = 500
SLOT_BYTES = SHARD_BYTES + 256


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[DrivenNode]:
    node = DrivenNode(tmp_path / "t")
    yield node
    node.close()


def test_classes_follow_what_is_written_replaced_and_dropped(
    driven: DrivenNode, rng: random.Random
) -> None:
    chat, agent = make_shards(rng, 3, SHARD_BYTES), make_shards(rng, 2, SHARD_BYTES)
    driven.write(chat, ttl_class=b"chat")
    driven.write(agent, ttl_class=b"agent")
    assert driven.target_stat()["classes"] == {
        "chat": {"blocks": 3, "bytes": 3 * SLOT_BYTES},
        "agent": {"blocks": 2, "bytes": 2 * SLOT_BYTES},
    }
    # Another version of a block may have another class.
    other = Shard(chat[0].key, rng.randbytes(SHARD_BYTES), block_xxh3=9)
    driven.write([other], ttl_class=b"agent")
    driven.forget([agent[0].key])
    expected = {
        "chat": {"blocks": 2, "bytes": 2 * SLOT_BYTES},
        "agent": {"blocks": 2, "bytes": 2 * SLOT_BYTES},
    }
    assert driven.target_stat()["classes"] == expected
    for end in (driven.close, driven.crash):
        end()
        driven.open()
        assert driven.target_stat()["classes"] == expected
    driven.forget(keys_of([*chat, *agent]))
    assert driven.target_stat()["classes"] == {}


def test_reads_are_counted_by_class_also_where_classes_lie_side_by_side(
    driven: DrivenNode, rng: random.Random
) -> None:
    shards = make_shards(rng, 6, SHARD_BYTES)
    for i, shard in enumerate(shards):
        driven.write([shard], ttl_class=(b"chat", b"agent", b"chat")[i % 3])
    locations = driven.target.index.find(keys_of(shards))
    assert locations == list(range(locations[0], locations[0] + 6))
    driven.read(keys_of(shards), SHARD_BYTES)
    assert driven.target_stat()["hits_by_class"] == {"chat": 4, "agent": 2}


def test_slots_of_a_target_are_used_or_free(driven: DrivenNode, rng: random.Random) -> None:
    driven.write(make_shards(rng, 20, SHARD_BYTES))
    found = driven.target_stat()
    slots = sum(one.shape.slot_count for one in driven.target.space.segments.values())
    assert found["slots_used"] == found["blocks"] == 20
    assert found["slots_free"] == slots - 20
    assert found["slot_bytes_free"] == (slots - 20) * SLOT_BYTES
    assert found["slots_total"] >= slots
    assert found["slots_total"] * SLOT_BYTES <= found["capacity_bytes"]


def test_misses_are_counted_by_reason_for_match_and_read(
    driven: DrivenNode, rng: random.Random
) -> None:
    here, gone = make_shards(rng, 3, SHARD_BYTES), make_shards(rng, 2, SHARD_BYTES)
    driven.write([*here, *gone])
    driven.forget(keys_of(gone))
    driven.match([rng.randbytes(32), *keys_of(here), gone[0].key])
    driven.read([*keys_of(here), gone[1].key, rng.randbytes(32)], SHARD_BYTES)
    found = driven.target_stat()["misses_by_reason"]
    assert found["forgotten"] == 2
    assert found["never_stored"] == 2
    # What a worker reads without using it is not a miss of anybody.
    body = wire.pack_read([rng.randbytes(32)], SHARD_BYTES, is_use=False)
    driven.ask(Op.READ, body, 1)
    # A shard of another size is here, though it is not sent.
    driven.read([here[0].key], SHARD_BYTES + 1)
    assert driven.target_stat()["misses_by_reason"] == found


def test_quarantined_shard_is_a_rejected_one_when_it_is_asked_for(
    driven: DrivenNode, rng: random.Random
) -> None:
    (shard,) = make_shards(rng, 1, SHARD_BYTES)
    driven.write([shard])
    location = driven.target.index.get(shard.key)
    driven.target.drop_damaged(shard.key, location, driven.target.generation(location))
    driven.match([shard.key])
    assert driven.target_stat()["misses_by_reason"]["rejected"] == 1


def test_match_of_a_save_is_counted_neither_as_hit_nor_as_miss(
    driven: DrivenNode, rng: random.Random
) -> None:
    here, absent = make_shards(rng, 2, SHARD_BYTES)
    driven.write([here])
    body = here.key + absent.key
    for is_probe, counted in ((True, 0), (False, 1)):
        answer = driven.run(driven.begin(wire.Op.MATCH, body=body, count=2, is_probe=is_probe))
        assert answer.body == b"\x01"
        found = driven.target_stat()
        assert found["misses_by_reason"]["never_stored"] == counted
        assert (found["match_keys"], found["match_hits"]) == (2 * counted, counted)


def test_stat_stays_short_when_there_are_very_many_classes(
    driven: DrivenNode, rng: random.Random
) -> None:
    for i in range(300):
        name = f"a-long-class-{i:03}".encode()
        driven.write(make_shards(rng, 1 + (i == 200), 64), ttl_class=name)
    found = driven.target_stat()
    assert len(found["classes"]) == CLASSES_SHOWN_MAX + 1
    assert sum(one["blocks"] for one in found["classes"].values()) == 301
    assert sum(one["bytes"] for one in found["classes"].values()) == found["used_bytes"]
    assert (
        max(found["classes"].values(), key=lambda one: int(one["blocks"]))
        is (found["classes"][OTHER_NAME])
    )
    assert len(found["ttl_classes"]) <= 256
    # As many as a large node may have targets.
    assert 24 * len(json.dumps(found)) < wire.BODY_BYTES_MAX


def test_class_usage_is_what_counting_gives(rng: random.Random) -> None:
    usage = ClassUsage()
    numbers = np.array([rng.choice([0, 0, 0, 3, 255]) for _ in range(500)], np.uint8)
    for at in range(0, 500, 7):
        usage.enter(numbers[at : at + 7], 10)
    for number in numbers[:100].tolist():
        usage.leave(number, 10)
    expected = np.bincount(numbers[100:], minlength=256).tolist()
    assert usage.blocks == expected
    assert usage.bytes == [10 * count for count in expected]
    described = usage.describe(["a", "b", "c", "d"])["classes"]
    assert {name: one["blocks"] for name, one in described.items()} == {
        **{"a": expected[0], "d": expected[3]},
        OTHER_NAME: expected[255],
    }


# Requests -------------------------------------------------------------------------------------


def test_meter_tells_how_many_requests_of_clients_came_lately() -> None:
    meter = RequestMeter()
    for i in range(100):
        meter.note(Op.READ, 10.0, 10.0 + i / 100)
        meter.note(Op.SCAN, 10.0, 10.0 + i / 100)
    assert meter.requests_last_s(10.99) == 100
    assert meter.requests_last_s(11.25) == 75
    meter.note(Op.MATCH, 11.4, 11.5)
    assert meter.requests_last_s(11.5) == 51
    assert meter.requests_last_s(13.0) == 0


def test_meter_measures_only_what_clients_wait_for() -> None:
    meter = RequestMeter()
    for op in Op:
        meter.note(op, 5.0, 5.003)
    found = meter.describe()
    assert set(found) == {"match", "read", "write", "evict"}
    for one in found.values():
        assert sum(one["counts"]) == 1
        assert one["counts"][one["bounds_s"].index(5e-3)] == 1
        assert one["sum_s"] == pytest.approx(0.003)


def test_served_requests_are_measured_to_the_end_of_their_answer(
    tmp_path: Path, rng: random.Random
) -> None:
    with served_node(tmp_path / "t") as served, served.client() as client:
        shards = make_shards(rng, 4, SHARD_BYTES)
        client.write(shards)
        for _ in range(3):
            client.read(keys_of(shards), SHARD_BYTES)
        begun_s = time.monotonic()
        client.match(keys_of(shards))
        # The answer may be here before the node has noted that it is out.
        wait_until(lambda: sum(client.stat()["latency"]["match"]["counts"]) == 1)
        latency = client.stat()["latency"]
        assert {op: sum(one["counts"]) for op, one in latency.items()} == {
            **{"match": 1, "read": 3, "write": 1, "evict": 0}
        }
        assert 0 < latency["match"]["sum_s"] <= time.monotonic() - begun_s
        assert client.stat()["requests_last_s"] >= 0


def test_node_stays_when_what_it_would_show_is_too_long(driven: DrivenNode) -> None:
    driven.node.targets = dict.fromkeys(range(2000), driven.target)
    assert driven.ask(Op.STAT).status is wire.Status.BUSY
    driven.node.targets = {0: driven.target}
    assert driven.stat()["busy_refusals"] == 1
