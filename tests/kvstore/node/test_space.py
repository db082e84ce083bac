"""Which slots a target gives out, and when it grows or hands a segment to another slot size."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.node import space as space_module
from kvstore.node.index import HANDLES_MAX
from kvstore.node.segment import SLOTS_PER_SEGMENT_MAX, ReadWay, Segment, SegmentShape
from kvstore.node.slot import SlotGeometry
from kvstore.node.space import (
    REFUSED_SEGMENT_BYTES_MIN,
    SEGMENTS_PER_TARGET_MAX,
    Growth,
    SlotSpace,
    file_bytes,
    plan_slot_count,
)

SMALL, LARGE = SlotGeometry(768), SlotGeometry(7936)
MIB = 1 << 20


def make_segment(shape: SegmentShape) -> Segment:
    """A segment as far as space is concerned: its file is never touched here."""
    return Segment(shape, Path(shape.file_name), -1, ReadWay.DIRECT)


def grow(space: SlotSpace, geometry: SlotGeometry) -> Segment | None:
    growth = space.plan_growth(geometry)
    if growth is None:
        return None
    segment = make_segment(growth.shape)
    space.add(segment, [(0, growth.shape.slot_count)])
    return segment


def make_space(capacity_bytes: int = MIB, segment_bytes: int = MIB // 8) -> SlotSpace:
    return SlotSpace(
        capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, slots_max=10_000_000
    )


def test_space_gives_neighbouring_slots_when_a_run_is_free() -> None:
    space = make_space()
    segment = grow(space, SMALL)
    assert segment is not None
    (first,) = space.take(SMALL, 10)
    (second,) = space.take(SMALL, 20)
    assert (first.segment, first.first_slot, first.count) == (segment, 0, 10)
    assert (second.first_slot, second.count) == (10, 20)


def test_space_gives_less_when_it_is_full() -> None:
    space = make_space()
    segment = grow(space, SMALL)
    assert segment is not None
    taken = space.take(SMALL, 1000)
    assert sum(run.count for run in taken) == segment.shape.slot_count
    assert space.take(SMALL, 1) == []


def test_space_keeps_slot_sizes_apart() -> None:
    space = make_space()
    grow(space, SMALL)
    assert space.take(LARGE, 1) == []


def test_space_stays_within_its_capacity() -> None:
    space = make_space()
    segments: list[Segment] = []
    while segment := grow(space, SMALL if len(segments) % 2 else LARGE):
        segments.append(segment)
        space.take(segment.shape.geometry, segment.shape.slot_count)
    used_bytes = sum(segment.shape.file_bytes for segment in segments)
    assert MIB - MIB // 8 < used_bytes <= MIB


def test_space_stays_within_its_slots_when_they_are_small() -> None:
    space = SlotSpace(capacity_bytes=64 * MIB, segment_bytes=8 * MIB, slots_max=20_000)
    counts = []
    while segment := grow(space, SlotGeometry(64)):
        counts.append(segment.shape.slot_count)
    assert sum(counts) == 20_000


def fill(space: SlotSpace, geometry: SlotGeometry) -> list[Segment]:
    segments = []
    while segment := grow(space, geometry):
        segments.append(segment)
        space.take(geometry, segment.shape.slot_count)
    return segments


def test_large_space_has_longer_segments_than_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "SEGMENTS_PER_TARGET_MAX", 64)
    space = make_space(capacity_bytes=64 * MIB, segment_bytes=MIB // 8)
    segments = fill(space, LARGE)
    assert len(segments) <= 40
    assert sum(segment.shape.file_bytes for segment in segments) > 63 * MIB
    assert SEGMENTS_PER_TARGET_MAX < HANDLES_MAX


def test_space_has_a_bounded_number_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "SEGMENTS_PER_TARGET_MAX", 16)
    space = make_space(capacity_bytes=64 * MIB, segment_bytes=MIB)
    while growth := space.plan_growth(SMALL):
        # The disk is nearly full, so segments are short.
        while (smaller := space.plan_smaller_growth(growth.shape)) is not None:
            growth = smaller
        segment = make_segment(growth.shape)
        space.add(segment, [])
    assert len(space.segments) == 16
    space.give(segment, 0, segment.shape.slot_count)
    growth = space.plan_growth(LARGE)
    assert growth is not None
    assert growth.removed == (segment,)


def test_space_finds_segments_in_the_order_of_their_numbers() -> None:
    space = make_space()
    segments = fill(space, SMALL)
    space.give(segments[2], 0, segments[2].shape.slot_count)
    grow(space, LARGE)
    numbers = sorted(space.segments)
    assert segments[2].shape.number not in numbers
    for number in range(-1, max(numbers) + 3):
        expected = next((one for one in numbers if one >= number), None)
        found = space.first_from(number)
        assert (None if found is None else found.shape.number) == expected


def test_space_gives_a_wholly_free_segment_to_another_size_when_full() -> None:
    space = make_space()
    segments = fill(space, SMALL)
    assert space.plan_growth(LARGE) is None
    space.give(segments[2], 0, segments[2].shape.slot_count)
    growth = space.plan_growth(LARGE)
    assert isinstance(growth, Growth)
    assert growth.removed == (segments[2],)
    assert segments[2].shape.number not in space.segments
    assert growth.shape.number not in space.segments
    assert growth.shape.file_bytes <= segments[2].shape.file_bytes + LARGE.slot_bytes


def test_space_keeps_a_free_segment_when_a_thread_reads_it() -> None:
    space = make_space()
    segments = fill(space, SMALL)
    space.give(segments[2], 0, segments[2].shape.slot_count)
    segments[2].pins = 1
    assert space.plan_growth(LARGE) is None
    segments[2].pins = 0
    assert space.plan_growth(LARGE) is not None


def test_space_keeps_its_segments_when_all_of_them_would_not_hold_one_slot() -> None:
    space = make_space()
    segments = fill(space, SMALL)
    for segment in segments:
        space.give(segment, 0, segment.shape.slot_count)
    assert space.plan_growth(SlotGeometry(2 * MIB)) is None
    assert len(space.segments) == len(segments)


def test_refused_segment_is_halved_down_to_a_bound_when_nothing_is_wholly_free() -> None:
    space = make_space(capacity_bytes=4096 * MIB, segment_bytes=256 * MIB)
    growth = space.plan_growth(LARGE)
    sizes_bytes, numbers = [], set()
    while growth is not None:
        assert growth.removed == ()
        sizes_bytes.append(growth.shape.file_bytes)
        numbers.add(growth.shape.number)
        growth = space.plan_smaller_growth(growth.shape)
    assert len(sizes_bytes) == len(numbers) == 9
    assert 255 * MIB < sizes_bytes[0] <= 256 * MIB
    assert sizes_bytes[-1] <= REFUSED_SEGMENT_BYTES_MIN < sizes_bytes[-2]


def test_refused_segment_of_one_slot_is_given_up() -> None:
    space = make_space(capacity_bytes=64 * MIB)
    growth = space.plan_growth(SlotGeometry(2 * MIB))
    assert growth is not None
    assert space.plan_smaller_growth(growth.shape) is None


def test_wholly_free_segments_make_way_for_a_refused_one_and_used_and_read_ones_stay() -> None:
    space = make_space(capacity_bytes=4096 * MIB, segment_bytes=MIB)
    segments = [segment for _ in range(3) if (segment := grow(space, SMALL))]
    for segment in segments:
        space.take(SMALL, segment.shape.slot_count)
    for segment in segments[:2]:
        space.give(segment, 0, segment.shape.slot_count)
    segments[0].pins = 1
    growth = space.plan_growth(LARGE)
    assert growth is not None
    assert growth.removed == ()
    retried = space.plan_smaller_growth(growth.shape)
    assert retried is not None
    assert retried.removed == (segments[1],)
    assert retried.shape.slot_count == growth.shape.slot_count
    assert list(space.segments.values()) == [segments[0], segments[2]]


def test_space_makes_one_segment_for_a_slot_that_is_larger_than_a_segment() -> None:
    space = make_space()
    segment = grow(space, SlotGeometry(MIB // 2))
    assert segment is not None
    assert segment.shape.slot_count == 1
    assert grow(space, SlotGeometry(MIB // 2)) is None


@given(
    payload_bytes=st.integers(1, 1 << 22),
    segment_bytes=st.integers(0, 1 << 24),
    limit_bytes=st.integers(0, 1 << 24),
)
def test_planned_segment_fits_its_limit_and_has_a_slot_if_one_fits(
    payload_bytes: int, segment_bytes: int, limit_bytes: int
) -> None:
    geometry = SlotGeometry(payload_bytes)
    slots = plan_slot_count(geometry, segment_bytes, limit_bytes)
    if slots:
        assert file_bytes(geometry, slots) <= limit_bytes
        assert slots == 1 or file_bytes(geometry, slots) <= segment_bytes
        is_longest = slots == SLOTS_PER_SEGMENT_MAX
        assert is_longest or file_bytes(geometry, slots + 1) > min(segment_bytes, limit_bytes)
    elif segment_bytes <= limit_bytes:
        assert file_bytes(geometry, 1) > limit_bytes
