"""What would go is said by class, reason and age."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.columns import TargetColumns
from gc_worker.filling import Filling, choose_tick_s, note_filling
from gc_worker.plan import EvictionRules, Room, plan_eviction
from gc_worker.plan_summary import summarise_look
from gc_worker.target_look import TargetLook
from gc_worker.usage import SpaceLeft, choose_usage
from kvstore.cluster.entities import Target
from kvstore.retention import DEFAULT_POLICY

NOW_S = 1_700_000_000
DAY_S = 86_400


def look_at(ages_s: list[int], classes: list[int], slots: int) -> TargetLook:
    n = len(ages_s)
    columns = TargetColumns(
        location=np.arange(n, dtype=np.int64),
        generation=np.arange(n, dtype=np.uint64),
        last_used_s=(NOW_S - np.array(ages_s, np.int64)).astype(np.uint32),
        block_index=np.zeros(n, np.uint32),
        slot_bytes=np.full(n, 1000, np.uint32),
        ttl_class=np.array(classes, np.uint8),
        shard=np.zeros(n, np.uint8),
        class_names=("agent", "chat"),
    )
    rules = EvictionRules(ttl_s={"agent": 3 * DAY_S}, ttl_s_else=7 * DAY_S)
    return TargetLook(
        target=Target(name="t1", node="n01", path="t1", size_bytes=1 << 20),
        usage=choose_usage({"used_bytes": n * 1000, "capacity_bytes": n * 1000}, SpaceLeft()),
        columns=columns,
        plan=plan_eviction(columns, rules, now_s=NOW_S, room=Room(slots)),
        now_s=NOW_S,
        rules=rules,
        policy=DEFAULT_POLICY,
    )


def test_summary_names_class_reason_and_age() -> None:
    look = look_at([4 * DAY_S, 4 * DAY_S, 4 * DAY_S, 30 * DAY_S, 60], [0, 0, 1, 9, 1], slots=4)
    summary = summarise_look(look, high=0.9, low=0.85)
    assert summary["fill"] == 1.0
    assert (summary["shards_held"], summary["shards"], summary["bytes"]) == (5, 4, 4000)
    assert sorted(summary["groups"], key=lambda group: str(group["class"])) == [
        _group("(unnamed)", "expired", 14 * DAY_S, None, 1),
        _group("agent", "expired", 3 * DAY_S, 5 * DAY_S, 2),
        _group("chat", "least_used", 3 * DAY_S, 5 * DAY_S, 1),
    ]


def _group(
    name: str, reason: str, age_min_s: int, age_max_s: int | None, shards: int
) -> dict[str, object]:
    return {
        "class": name,
        "reason": reason,
        "age_min_s": age_min_s,
        "age_max_s": age_max_s,
        "shards": shards,
        "bytes": shards * 1000,
    }


@given(
    st.lists(st.tuples(st.integers(-100, 40 * DAY_S), st.integers(0, 3)), max_size=40),
    st.integers(0, 50),
)
def test_groups_add_up_to_the_plan(shards: list[tuple[int, int]], slots: int) -> None:
    look = look_at([age for age, _ in shards], [number for _, number in shards], slots)
    summary = summarise_look(look, high=0.9, low=0.85)
    assert sum(group["shards"] for group in summary["groups"]) == len(look.plan)
    assert sum(group["bytes"] for group in summary["groups"]) == look.plan.freed_bytes


def test_next_look_is_soon_when_the_target_will_soon_be_full() -> None:
    first = note_filling(None, at_s=10.0, used_bytes=1000)
    assert choose_tick_s(first, room_bytes=1) == 1.0
    now = note_filling(first, at_s=11.0, used_bytes=1100)
    assert choose_tick_s(now, room_bytes=100) == 0.25
    assert choose_tick_s(now, room_bytes=0) == 0.1
    assert choose_tick_s(now, room_bytes=10_000) == 1.0


def test_next_look_is_soon_though_an_eviction_has_just_made_room() -> None:
    filling = note_filling(Filling(10.0, 1000), at_s=11.0, used_bytes=1100)
    filling = note_filling(filling, at_s=11.1, used_bytes=900)
    assert choose_tick_s(filling, room_bytes=160) == pytest.approx(0.5)
    for round_ in range(60):
        filling = note_filling(filling, at_s=12.0 + round_, used_bytes=900)
    assert choose_tick_s(filling, room_bytes=160) == 1.0
