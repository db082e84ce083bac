"""The index against a dict: what it finds, key by key and in runs, and what it reports replaced."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.node import index as index_module
from kvstore.node.index import SlotIndex
from kvstore.node.segment import ABSENT, ReadWay, Segment, SegmentShape
from kvstore.node.slot import SlotGeometry
from kvstore.node.space import plan_runs

SLOTS = 64


def make_segment(number: int, slot_count: int = SLOTS) -> Segment:
    shape = SegmentShape(number=number, geometry=SlotGeometry(100), slot_count=slot_count)
    return Segment(shape, Path("none"), -1, ReadWay.DIRECT)


def make_keys(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(32) for _ in range(count)]


def make_index(segment_count: int, slot_count: int = SLOTS) -> tuple[SlotIndex, list[Segment]]:
    segments = {n * 1000 + 3: make_segment(n * 1000 + 3, slot_count) for n in range(segment_count)}
    index = SlotIndex(segments, slots_max=lambda: segment_count * slot_count, seed=11)
    return index, list(segments.values())


ALL_KEYS = [bytes([i]) * 32 for i in range(60)] + [bytes(32)]
key_lists = st.lists(st.sampled_from(ALL_KEYS), min_size=1, max_size=40, unique=True)


class IndexMachine(RuleBasedStateMachine):
    """Any puts and drops; slots are taken anywhere, so that runs are cut in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.segments = make_index(3)
        self.here: dict[bytes, int] = {}

    def free_run(self, segment: Segment, count: int, data: st.DataObject) -> int | None:
        used = set(self.here.values())
        first = segment.shape.first_location
        starts = [
            slot
            for slot in range(SLOTS - count + 1)
            if used.isdisjoint(range(first + slot, first + slot + count))
        ]
        return data.draw(st.sampled_from(starts)) if starts else None

    @rule(keys=key_lists, data=st.data())
    def put(self, keys: list[bytes], data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(self.segments))
        slot = self.free_run(segment, len(keys), data)
        if slot is None:
            return
        before = self.index.put(keys, segment, slot)
        assert sorted(before) == sorted(self.here[key] for key in keys if key in self.here)
        for i, key in enumerate(keys):
            self.here[key] = segment.shape.first_location + slot + i

    @rule(keys=st.lists(st.sampled_from(ALL_KEYS), min_size=1, max_size=30))
    def drop_each(self, keys: list[bytes]) -> None:
        expected = [self.here.pop(key, ABSENT) for key in keys]
        assert self.index.drop_each(keys) == expected

    @rule(key=st.sampled_from(ALL_KEYS))
    def drop(self, key: bytes) -> None:
        assert self.index.drop(key) == self.here.pop(key, ABSENT)

    @rule()
    def rebuild(self) -> None:
        assert self.index.rebuild() == []

    @rule(keys=st.permutations(ALL_KEYS))
    def find(self, keys: list[bytes]) -> None:
        expected = [self.here.get(key, ABSENT) for key in keys]
        assert self.index.find(keys) == expected
        assert self.index.contains_each(keys).tolist() == [key in self.here for key in keys]
        missing = [key for key in keys if key not in self.here]
        assert self.index.has_none(missing)
        assert self.index.has_none(keys) == (not self.here)

    @rule()
    def find_in_the_order_of_slots(self) -> None:
        keys = sorted(self.here, key=self.here.__getitem__)
        runs = self.index.find_runs(b"".join(keys))
        assert runs == plan_runs([self.here[key] for key in keys])

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        assert len(self.index) == len(self.here)
        for key in ALL_KEYS:
            assert self.index.get(key) == self.here.get(key, ABSENT)
        for segment in self.segments:
            first = segment.shape.first_location
            used = set(np.flatnonzero(segment.columns.status == 1) + first)
            assert used == {at for at in self.here.values() if first <= at < first + SLOTS}


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("count", [1, 2, 23, 64, 1000])
def test_index_finds_runs_wherever_they_are_cut(rng: random.Random, count: int) -> None:
    index, (segment,) = make_index(1, slot_count=1024)
    keys = make_keys(rng, count)
    index.put(keys, segment, 5)
    for cut in {0, min(1, count - 1), count // 3, count - 1}:
        index.drop(keys[cut])
        expected = plan_runs(index.find(keys))
        assert index.find_runs(b"".join(keys)) == expected
        assert sum(length for _, _, length in expected) == count - 1
        index.put([keys[cut]], segment, 5 + cut)
        assert index.find_runs(b"".join(keys)) == [(0, segment.shape.first_location + 5, count)]


def test_index_finds_many_short_runs(rng: random.Random) -> None:
    index, segments = make_index(4, slot_count=1024)
    keys = make_keys(rng, 900)
    for at in range(0, 900, 3):
        index.put(keys[at : at + 3], segments[at % 4], at)
    mixed = [key for pair in zip(keys, make_keys(rng, 900), strict=True) for key in pair]
    runs = index.find_runs(b"".join(mixed))
    assert [row for row, _, _ in runs] == list(range(0, 1800, 2))
    runs = index.find_runs(b"".join(keys))
    assert [(row, length) for row, _, length in runs] == [(at, 3) for at in range(0, 900, 3)]


def test_index_does_not_find_the_keys_of_slots_that_were_freed(rng: random.Random) -> None:
    index, (segment,) = make_index(1)
    keys = make_keys(rng, 30)
    index.put(keys, segment, 0)
    index.drop_each(keys[10:20])
    # The columns still have their keys.
    assert segment.columns.key_at(10) == keys[10]
    assert [(row, count) for row, _, count in index.find_runs(b"".join(keys))] == [
        (0, 10),
        (20, 10),
    ]


def test_index_grows_when_it_holds_more_than_its_first_table(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "SMALL_TABLE_KEYS", 64)
    index, (segment,) = make_index(1, slot_count=4096)
    keys = make_keys(rng, 4096)
    for at in range(0, 4096, 32):
        assert index.put(keys[at : at + 32], segment, at) == []
    assert index.find(keys) == list(
        range(segment.shape.first_location, segment.shape.first_location + 4096)
    )


def test_index_gives_the_small_numbers_of_removed_segments_to_others(rng: random.Random) -> None:
    segments: dict[int, Segment] = {}
    index = SlotIndex(segments, slots_max=lambda: SLOTS, seed=1)
    for number in range(1000):
        segment = segments[number] = make_segment(number)
        keys = make_keys(rng, 3)
        index.put(keys, segment, 0)
        assert index.find(keys) == [segment.shape.first_location + i for i in range(3)]
        index.drop_each(keys)
        del segments[number]
    assert len(index) == 0


def test_rebuild_keeps_the_newer_of_two_slots_with_one_key(rng: random.Random) -> None:
    index, (one, other) = make_index(2)
    keys = make_keys(rng, 10)
    for segment, generations in ((one, range(10, 20)), (other, range(19, 9, -1))):
        words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
        segment.columns.key_words[:10] = words
        segment.columns.status[:10] = 1
        segment.columns.generation[:10] = list(generations)
    losers = index.rebuild()
    first, second = one.shape.first_location, other.shape.first_location
    assert sorted(losers) == [*range(first, first + 5), *range(second + 5, second + 10)]
    assert index.find(keys) == [*range(second, second + 5), *range(first + 5, first + 10)]
    assert len(index) == 10
