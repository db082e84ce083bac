"""How full a target is, and what must go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.plan import Room
from gc_worker.usage import Limit, SpaceLeft, choose_usage, plan_room

GIB = 1 << 30


def stat(**changes: int) -> dict[str, Any]:
    """A target of 1,000 slots of 1 MiB, half of them made, 300 used."""
    values = {
        "used_bytes": 300 << 20,
        "capacity_bytes": 1000 << 20,
        "slots_total": 1000,
        "slots_used": 300,
        "slots_free": 200,
        "slot_bytes_free": 200 << 20,
    }
    return values | changes


def test_usage_is_that_of_the_capacity_when_the_disk_is_large() -> None:
    usage = choose_usage(stat(), SpaceLeft(left_bytes={"file_system": 100 * GIB}))
    assert (usage.decided_by, usage.fraction) == ("capacity", 0.3)


def test_usage_counts_free_slots_as_room_when_the_disk_is_full() -> None:
    usage = choose_usage(stat(), SpaceLeft(left_bytes={"file_system": 0}))
    assert (usage.decided_by, usage.fraction) == ("file_system", 300 / 500)


def test_usage_is_that_of_the_tightest_limit() -> None:
    left = {"file_system": 900 << 20, "project_quota": 10 << 20, "container": 400 << 20}
    usage = choose_usage(stat(), SpaceLeft(left_bytes=left))
    assert usage.decided_by == "project_quota"
    assert usage.fraction == 300 / 510


def test_usage_does_not_count_what_others_keep_on_the_disk() -> None:
    # The disk of 10 GiB is full to 95 %, and nearly nothing of that is ours.
    left = {"file_system": GIB // 2}
    usage = choose_usage(
        stat(slots_used=1, used_bytes=1 << 20, slots_free=0, slot_bytes_free=0),
        SpaceLeft(left_bytes=left),
    )
    assert usage.fraction < 0.01


def test_usage_is_that_of_the_slots_that_are_there_when_writers_are_refused() -> None:
    usage = choose_usage(
        stat(slots_free=0, slot_bytes_free=0),
        SpaceLeft(left_bytes={"file_system": 100 * GIB}),
        is_refusing=True,
    )
    assert (usage.decided_by, usage.fraction) == ("refused", 1.0)


def test_usage_goes_by_bytes_when_slots_have_several_sizes() -> None:
    # 200 slots of 1 MiB are full; thousands of tiny ones are free.
    usage = choose_usage(
        stat(used_bytes=200 << 20, capacity_bytes=220 << 20, slots_used=200)
        | {"slots_total": 700_000, "slots_free": 10_000, "slot_bytes_free": 3 << 20},
        SpaceLeft(),
        is_refusing=True,
    )
    assert (usage.decided_by, usage.fraction) == ("refused", 200 / 203)


def test_usage_of_an_empty_target_is_nothing() -> None:
    usage = choose_usage({"blocks": 0, "used_bytes": 0, "capacity_bytes": GIB}, SpaceLeft())
    assert usage.fraction == 0.0


def test_usage_names_what_could_not_be_read() -> None:
    space = SpaceLeft(unreadable={"project_quota": "Operation not permitted"})
    usage = choose_usage(stat(), space)
    assert usage.to_values()["unreadable"] == {"project_quota": "Operation not permitted"}


LIMITS = st.lists(
    st.builds(
        Limit,
        name=st.sampled_from(["capacity", "file_system", "container"]),
        used=st.integers(0, 10_000),
        room=st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=4,
)


@given(LIMITS, st.floats(0.01, 0.98), st.floats(0.001, 0.01))
def test_room_brings_every_limit_below_the_low_watermark(
    limits: list[Limit], low: float, gap: float
) -> None:
    high = low + gap
    room = plan_room(limits, high=high, low=low)
    if not room:
        assert all(limit.fraction <= high for limit in limits)
        return
    assert any(limit.fraction > high for limit in limits)
    for limit in limits:
        freed = room.slot_bytes
        total = limit.used + limit.room
        assert not total or (limit.used - freed) / total <= low + 1e-12
    # And not a byte more than that.
    assert any(
        limit.used - room.slot_bytes + 1 > low * (limit.used + limit.room) for limit in limits
    )


@pytest.mark.parametrize(("used", "expected"), [(90, Room()), (91, Room(slot_bytes=6))])
def test_room_is_wanted_only_above_the_high_watermark(used: int, expected: Room) -> None:
    limits = [Limit(name="capacity", used=used, room=100 - used)]
    assert plan_room(limits, high=0.9, low=0.85) == expected


def test_room_is_wanted_when_a_tiny_target_is_full() -> None:
    limits = [Limit(name="refused", used=3, room=0)]
    assert plan_room(limits, high=0.9, low=0.85).slot_bytes == 1
