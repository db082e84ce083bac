"""Freed slots rest while bytes of them are on their way, and no longer than that."""

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvstore.node.resting import RestingSlots
from kvstore.node.segment import ReadWay, Segment, SegmentShape
from kvstore.node.slot import SlotGeometry
from kvstore.node.space import SlotRun
from kvstore.wire import WriteOutcome
from tests.kvstore.node.driven_node import DrivenNode
from tests.kvstore.node.raw_client import keys_of, make_shards

SHARD_BYTES = 500
SHAPE = SegmentShape(number=0, geometry=SlotGeometry(SHARD_BYTES), slot_count=10_000)
SEGMENT = Segment(SHAPE, Path(SHAPE.file_name), -1, ReadWay.DIRECT)


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "free"]), st.integers(0, 100))))
def test_slots_are_awake_only_after_all_sendings_that_were_under_way(
    steps: list[tuple[str, int]],
) -> None:
    resting = RestingSlots()
    under_way: dict[int, int] = {}
    waits_for: dict[int, set[int]] = {}
    woken: list[int] = []
    for i, (step, number) in enumerate(steps):
        awake: list[SlotRun] = []
        if step == "begin":
            under_way[i] = resting.begin_sending()
        elif step == "free":
            waits_for[i] = set(under_way)
            awake = resting.rest([SlotRun(SEGMENT, i, 1)], 1_000)
        elif under_way:
            ended = sorted(under_way)[number % len(under_way)]
            awake = resting.end_sending(under_way.pop(ended))
        for run in awake:
            assert not waits_for[run.first_slot] & set(under_way)
            woken.append(run.first_slot)
    for phase in under_way.values():
        woken += [run.first_slot for run in resting.end_sending(phase)]
    assert sorted(woken) == sorted(waits_for)
    assert resting.slot_count == 0


def test_slots_do_not_rest_when_too_many_would() -> None:
    resting = RestingSlots()
    phase = resting.begin_sending()
    first, second = SlotRun(SEGMENT, 0, 3), SlotRun(SEGMENT, 3, 2)
    assert resting.rest([first], 4) == []
    assert resting.rest([second], 4) == [second]
    assert resting.end_sending(phase) == [first]


def test_slots_wake_although_sendings_never_cease() -> None:
    resting = RestingSlots()
    phase = resting.begin_sending()
    run = SlotRun(SEGMENT, 0, 1)
    assert resting.rest([run], 10) == []
    awake: list[SlotRun] = []
    for _ in range(3):
        following = resting.begin_sending()
        awake += resting.end_sending(phase)
        phase = following
    assert awake == [run]


def test_shard_that_is_being_sent_stays_what_it_is_when_it_is_forgotten(
    tmp_path: Path, rng: random.Random
) -> None:
    driven = DrivenNode(tmp_path / "t")
    shards, others = make_shards(rng, 3, SHARD_BYTES), make_shards(rng, 3, SHARD_BYTES)
    driven.write(shards)
    locations = driven.target.index.find(keys_of(shards))

    def forget() -> None:
        driven.forget(keys_of(shards))
        assert driven.write(others) == [WriteOutcome.STORED] * 3

    driven.on_send = forget
    found = driven.read(keys_of(shards), SHARD_BYTES)
    assert [got.payload for got in found if got] == [shard.payload for shard in shards]
    assert not set(locations) & set(driven.target.index.find(keys_of(others)))
    # Now they can be used.
    driven.on_send = lambda: None
    driven.write(more := make_shards(rng, 3, SHARD_BYTES))
    assert driven.target.index.find(keys_of(more)) == locations
    driven.close()
