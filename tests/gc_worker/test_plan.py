"""Which shards go, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.columns import TargetColumns
from gc_worker.plan import (
    EvictionPlan,
    EvictionRules,
    Room,
    choose_bucket_s,
    find_next_expiry_s,
    plan_eviction,
)
from kvstore.wire import EvictReason

NOW_S = 1_700_000_000
DAY_S = 86_400
CLASSES = ("agent", "chat")
RULES = EvictionRules(ttl_s={"agent": 3 * DAY_S}, ttl_s_else=7 * DAY_S)


@dataclass(frozen=True)
class Shard:
    """A row: age in seconds at NOW_S, depth, class, size."""

    age_s: int
    block_index: int = 0
    ttl_class: int = 1
    slot_bytes: int = 100

    @property
    def last_used_s(self) -> int:
        return NOW_S - self.age_s

    @property
    def bucket(self) -> int:
        return min(self.last_used_s, NOW_S) // RULES.bucket_s

    @property
    def is_expired(self) -> bool:
        ttl_s = (3 if self.ttl_class == 0 else 7) * DAY_S
        return self.bucket < (NOW_S - ttl_s) // RULES.bucket_s


def columns_of(shards: Sequence[Shard]) -> TargetColumns:
    n = len(shards)
    return TargetColumns(
        location=np.arange(n, dtype=np.int64),
        generation=np.arange(n, dtype=np.uint64),
        last_used_s=np.array([s.last_used_s for s in shards], np.uint32),
        block_index=np.array([s.block_index for s in shards], np.uint32),
        slot_bytes=np.array([s.slot_bytes for s in shards], np.uint32),
        ttl_class=np.array([s.ttl_class for s in shards], np.uint8),
        shard=np.zeros(n, np.uint8),
        class_names=CLASSES,
    )


def plan_of(shards: Sequence[Shard], room: Room = Room(), **rules: int) -> EvictionPlan:  # noqa: B008
    changed = EvictionRules(ttl_s=RULES.ttl_s, ttl_s_else=RULES.ttl_s_else, **rules)
    return plan_eviction(columns_of(shards), changed, now_s=NOW_S, room=room)


def oracle(shards: Sequence[Shard], room: Room, victims_max: int) -> list[tuple[int, EvictReason]]:
    """The same decision, one row after the other."""

    def order(row: int) -> tuple[int, int, int]:
        return (shards[row].bucket, -shards[row].block_index, row)

    rows = range(len(shards))
    expired = sorted((row for row in rows if shards[row].is_expired), key=order)
    others = sorted((row for row in rows if not shards[row].is_expired), key=order)
    victims = [(row, EvictReason.EXPIRED) for row in expired][:victims_max]
    for row in others:
        freed = sum(shards[victim].slot_bytes for victim, _ in victims)
        is_enough = len(victims) >= room.slots and freed >= room.slot_bytes
        if is_enough or len(victims) >= victims_max:
            break
        victims.append((row, EvictReason.LEAST_USED))
    return victims


SHARDS = st.lists(
    st.builds(
        Shard,
        age_s=st.one_of(st.integers(-300, 300), st.integers(0, 9 * DAY_S)),
        block_index=st.integers(0, 5),
        ttl_class=st.integers(0, 2),
        slot_bytes=st.sampled_from([100, 250, 4096]),
    ),
    max_size=60,
)


@given(SHARDS, st.integers(0, 80), st.integers(0, 60_000), st.sampled_from([1, 7, 1 << 22]))
def test_plan_is_that_of_the_oracle(
    shards: list[Shard], slots: int, slot_bytes: int, victims_max: int
) -> None:
    room = Room(slots, slot_bytes)
    plan = plan_of(shards, room, victims_max=victims_max)
    found = [(row, EvictReason(r)) for row, r in zip(plan.rows, plan.reasons, strict=True)]
    assert found == oracle(shards, room, victims_max)
    assert plan.freed_bytes == sum(shards[row].slot_bytes for row in plan.rows)


def test_plan_is_empty_when_nothing_expired_and_no_room_is_wanted() -> None:
    assert len(plan_of([Shard(age_s=6 * DAY_S), Shard(age_s=0)])) == 0


def test_plan_is_empty_when_there_are_no_shards() -> None:
    assert len(plan_of([], Room(10, 10))) == 0


def test_plan_takes_the_deepest_first_when_used_in_the_same_minute() -> None:
    start_s = NOW_S % 60
    shards = [Shard(start_s + 30 - depth, depth) for depth in range(10)]
    assert plan_of(shards, Room(4)).rows.tolist() == [9, 8, 7, 6]


def test_plan_counts_a_use_in_the_future_as_now() -> None:
    shards = [Shard(-30 * DAY_S, 1), Shard(0, 2), Shard(60, 0)]
    assert plan_of(shards, Room(3)).rows.tolist() == [2, 1, 0]


def test_plan_keeps_each_class_for_its_own_time() -> None:
    shards = [Shard(4 * DAY_S, ttl_class=0), Shard(4 * DAY_S, ttl_class=1), Shard(8 * DAY_S)]
    plan = plan_of(shards)
    assert sorted(plan.rows.tolist()) == [0, 2]
    assert set(plan.reasons.tolist()) == {EvictReason.EXPIRED}


def test_plan_keeps_a_class_without_a_name_as_long_as_chat() -> None:
    assert len(plan_of([Shard(4 * DAY_S, ttl_class=200)])) == 0
    assert len(plan_of([Shard(8 * DAY_S, ttl_class=200)])) == 1


def test_plan_never_expires_early() -> None:
    ttl_s = 7 * DAY_S
    for age_s in range(ttl_s - 3, ttl_s + 64):
        is_gone = len(plan_of([Shard(age_s)])) == 1
        assert not is_gone or age_s > ttl_s
        assert is_gone or age_s <= ttl_s + RULES.bucket_s


def test_plan_says_so_when_it_is_cut() -> None:
    shards = [Shard(8 * DAY_S + i) for i in range(10)]
    plan = plan_of(shards, victims_max=4)
    assert plan.is_cut
    assert len(plan) == 4
    assert not plan_of(shards).is_cut


# Chains ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetch:
    """A fetch of the first `blocks` blocks of a chain, which takes `takes_s`."""

    chain: int
    blocks: int
    age_s: int
    takes_s: int


def use_chains(fetches: Sequence[Fetch]) -> dict[tuple[int, int], int]:
    """Age of the last use of each (chain, block): a fetch gets to deeper blocks later."""
    ages: dict[tuple[int, int], int] = {}
    for fetch in sorted(fetches, key=lambda one: -one.age_s):
        for block in range(fetch.blocks):
            age_s = fetch.age_s - fetch.takes_s * block // fetch.blocks
            place = (fetch.chain, block)
            ages[place] = min(ages.get(place, age_s), age_s)
    return ages


FETCHES = st.lists(
    st.builds(
        Fetch,
        chain=st.integers(0, 3),
        blocks=st.integers(1, 12),
        age_s=st.integers(120, 900),
        takes_s=st.integers(0, RULES.bucket_s - 1),
    ),
    min_size=1,
    max_size=12,
)


@given(FETCHES)
def test_parent_goes_before_its_child_only_across_one_border_of_buckets(
    fetches: list[Fetch],
) -> None:
    ages = use_chains(fetches)
    places = list(ages)
    shards = [Shard(ages[place], place[1]) for place in places]
    order = plan_of(shards, Room(len(shards))).rows.tolist()
    turn = {places[row]: at for at, row in enumerate(order)}
    for (chain, block), row in zip(places, range(len(places)), strict=True):
        parent = (chain, block - 1)
        if block and turn[parent] < turn[chain, block]:
            above = shards[places.index(parent)]
            assert above.bucket + 1 == shards[row].bucket
            # The child is among the next to go: nothing younger than itself comes between.
            between = order[turn[parent] : turn[chain, block]]
            assert all(shards[other].bucket <= shards[row].bucket for other in between)


@given(FETCHES, st.integers(0, 40))
def test_parent_never_goes_before_its_child_when_no_fetch_crosses_a_border(
    fetches: list[Fetch], slots: int
) -> None:
    def within_a_bucket(fetch: Fetch) -> Fetch:
        begun_s = (NOW_S - fetch.age_s) // RULES.bucket_s * RULES.bucket_s
        return Fetch(fetch.chain, fetch.blocks, NOW_S - begun_s, fetch.takes_s)

    ages = use_chains([within_a_bucket(fetch) for fetch in fetches])
    places = list(ages)
    shards = [Shard(ages[place], place[1]) for place in places]
    plan = plan_of(shards, Room(slots))
    gone: set[tuple[int, int]] = set()
    for row in plan.rows.tolist():
        chain, block = places[row]
        # However early the eviction is cut off, no child is left without its parent.
        assert (chain, block + 1) not in ages or (chain, block + 1) in gone
        gone.add((chain, block))


# The next look ----------------------------------------------------------------------------------


@given(SHARDS)
def test_next_expiry_is_when_the_first_of_the_others_goes(shards: list[Shard]) -> None:
    columns = columns_of(shards)
    expiry_s = find_next_expiry_s(columns, RULES, NOW_S)
    gone = set(plan_eviction(columns, RULES, now_s=NOW_S, room=Room()).rows.tolist())
    if expiry_s is None:
        assert len(gone) == len(shards)
        return
    assert expiry_s > NOW_S - RULES.bucket_s
    # A use that lies in the future at NOW_S is one of then.
    before = plan_eviction(columns, RULES, now_s=max(expiry_s - 1, NOW_S), room=Room())
    after = plan_eviction(columns, RULES, now_s=expiry_s + RULES.bucket_s, room=Room())
    assert set(before.rows.tolist()) == gone
    assert set(after.rows.tolist()) > gone


@pytest.mark.parametrize("bucket_s", [1, 60, 3600])
def test_plan_obeys_the_width_of_a_bucket(bucket_s: int) -> None:
    shards = [Shard(NOW_S % 3600 + 7 - depth, depth) for depth in range(7)]
    rows = plan_of(shards, Room(7), bucket_s=bucket_s).rows.tolist()
    assert rows == (list(range(7)) if bucket_s == 1 else list(range(6, -1, -1)))


@pytest.mark.parametrize(
    ("oldest_s", "ttl_s", "bucket_s"),
    [
        (40, 7 * DAY_S, 1),
        (1_280, 7 * DAY_S, 10),
        (DAY_S, 7 * DAY_S, 60),
        (DAY_S, 30, 1),
        (-5, 30, 1),
    ],
)
def test_buckets_are_as_short_as_the_ages_they_tell_apart(
    oldest_s: int, ttl_s: int, bucket_s: int
) -> None:
    rules = EvictionRules(ttl_s={"chat": ttl_s}, ttl_s_else=7 * DAY_S)
    rows = columns_of([Shard(oldest_s), Shard(min(oldest_s, 3))])
    assert choose_bucket_s(rows, rules, now_s=NOW_S) == bucket_s
    assert choose_bucket_s(columns_of([]), rules, now_s=NOW_S) == 1
