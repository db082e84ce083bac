"""Who looks after a block and what it lacks: decided alike by all, compared with plain loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.drain import count_elsewhere, plan_drain
from gc_worker.orphans import SUSPECTS_MAX, Suspects
from gc_worker.redundancy import (
    QUIET_S,
    RepairRules,
    Sightings,
    choose_responsible,
    count_redundancy,
    find_settled,
    find_unreadable,
    plan_repair,
)

NOW_S = 2_000_000_000
NS = 1_000_000_000


@dataclass(frozen=True)
class Seen:
    """One target's answer about one block; version 0: it has none."""

    version: int
    age_s: int
    written_ago_s: int
    has_answered: bool


seen = st.builds(
    Seen,
    version=st.sampled_from([0, 0, 5, 5, 5, 9]),
    age_s=st.sampled_from([0, 1, 10, 100, 1000]),
    written_ago_s=st.sampled_from([-500, -5, 0, 5, 100, 10_000]),
    has_answered=st.sampled_from([True, True, True, False]),
)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[list[Seen]], int]:
    width = draw(st.integers(1, 7))
    k = draw(st.integers(1, width))
    rows = draw(st.lists(st.lists(seen, min_size=width, max_size=width), min_size=1, max_size=6))
    return rows, k


def sightings_of(rows: list[list[Seen]]) -> Sightings:
    """As they would have been filled in: who did not answer is seen with nothing."""
    found = Sightings.unknown(len(rows), len(rows[0]))
    for i, row in enumerate(rows):
        for j, one in enumerate(row):
            found.has_answered[i, j] = one.has_answered
            if one.has_answered and one.version:
                found.versions[i, j] = one.version
                found.generations[i, j] = (NOW_S - one.written_ago_s) * NS + 7
                found.last_used_s[i, j] = NOW_S - one.age_s
    return found


def rules_of(k: int, hot_within_s: int = 100, settle_s: int = 30) -> RepairRules:
    return RepairRules(k=k, now_s=NOW_S, hot_within_s=hot_within_s, settle_s=settle_s)


def held(row: list[Seen]) -> list[int]:
    """The version at each target that answers, 0 for none."""
    return [one.version if one.has_answered else 0 for one in row]


def best(row: list[Seen]) -> tuple[int, int]:
    """The version most targets hold and how many; of equal ones the larger number."""
    counts = Counter(version for version in held(row) if version)
    return max(
        ((version, n) for version, n in counts.items()), key=lambda p: (p[1], p[0]), default=(0, 0)
    )


@given(clusters())
def test_redundancy_counts_the_shards_of_the_version_that_most_hold(
    cluster: tuple[list[list[Seen]], int],
) -> None:
    rows, _ = cluster
    found = count_redundancy(sightings_of(rows))
    assert list(zip(found.version.tolist(), found.shards.tolist(), strict=True)) == [
        best(row) for row in rows
    ]


@given(clusters())
def test_each_version_has_exactly_one_responsible_holder(
    cluster: tuple[list[list[Seen]], int],
) -> None:
    rows, _ = cluster
    sightings = sightings_of(rows)
    width = len(rows[0])
    claims = np.array(
        [choose_responsible(sightings, np.full(len(rows), shard)) for shard in range(width)]
    )
    for i, row in enumerate(rows):
        claimed = [held(row)[shard] for shard in range(width) if claims[shard, i]]
        assert sorted(claimed) == sorted({version for version in held(row) if version})
        for version in claimed:
            shard = next(j for j in range(width) if claims[j, i] and held(row)[j] == version)
            assert version not in held(row)[:shard]


@given(clusters())
def test_repair_completes_what_is_readable_hot_and_settled_and_nothing_else(
    cluster: tuple[list[list[Seen]], int],
) -> None:
    rows, k = cluster
    sightings = sightings_of(rows)
    redundancy = count_redundancy(sightings)
    is_mine = np.arange(len(rows)) % 3 != 2
    plan = plan_repair(sightings, redundancy, is_mine, rules_of(k))
    planned = {row: np.flatnonzero(plan.missing[row]).tolist() for row in plan.rows.tolist()}
    waiting = 0
    for i, row in enumerate(rows):
        version, count = best(row)
        holders = [one for one in row if one.has_answered and one.version == version]
        is_hot = bool(version) and min(one.age_s for one in holders) <= 100
        is_young = any(
            one.has_answered and one.version and abs(one.written_ago_s) < 30 for one in row
        )
        is_due = bool(is_mine[i]) and k <= count < len(row) and is_hot and not is_young
        missing = [j for j, one in enumerate(row) if one.has_answered and one.version != version]
        assert planned.get(i, []) == (missing if is_due else [])
        waiting += is_due and not missing
    assert plan.waiting == waiting
    ages = [NOW_S - int(plan.last_used_s[row]) for row in plan.rows.tolist()]
    assert ages == sorted(ages)


@given(clusters())
def test_block_is_unreadable_only_when_every_target_has_said_so(
    cluster: tuple[list[list[Seen]], int],
) -> None:
    rows, k = cluster
    sightings = sightings_of(rows)
    redundancy = count_redundancy(sightings)
    for shard in range(len(rows[0])):
        own = np.full(len(rows), shard)
        unreadable = find_unreadable(sightings, redundancy, own, rules_of(k))
        for i in np.flatnonzero(unreadable).tolist():
            row = rows[i]
            assert all(one.has_answered for one in row)
            assert best(row)[1] < k
            assert row[shard].version
            mine = [one for one in row if one.version == row[shard].version]
            assert min(one.age_s for one in mine) >= QUIET_S
            assert all(abs(one.written_ago_s) >= 30 for one in row if one.version)


def test_block_with_too_few_shards_is_unreadable_when_all_agree() -> None:
    row = [Seen(5, 10, 100, True), Seen(0, 0, 0, True), Seen(5, 10, 100, True), Seen(0, 0, 0, True)]
    sightings = sightings_of([row])
    redundancy = count_redundancy(sightings)
    assert find_unreadable(sightings, redundancy, np.array([0]), rules_of(3)).tolist() == [True]
    assert find_unreadable(sightings, redundancy, np.array([2]), rules_of(3)).tolist() == [False]
    assert find_unreadable(sightings, redundancy, np.array([0]), rules_of(2)).tolist() == [False]


@pytest.mark.parametrize(("written_ago_s", "is_settled"), [(29, False), (30, True), (-29, False)])
def test_block_is_settled_when_its_newest_shard_is_old_enough(
    written_ago_s: int, is_settled: bool
) -> None:
    row = [Seen(5, 10, 1000, True), Seen(5, 10, written_ago_s, True)]
    assert find_settled(sightings_of([row]), rules_of(1)).tolist() == [is_settled]


def test_block_is_repaired_when_a_clock_says_it_was_written_far_in_the_future() -> None:
    row = [Seen(5, 10, -86_400, True), Seen(5, 10, -86_400, True), Seen(0, 0, 0, True)]
    sightings = sightings_of([row])
    plan = plan_repair(sightings, count_redundancy(sightings), np.array([True]), rules_of(2))
    assert plan.rows.tolist() == [0]


@given(clusters(), st.integers(0, 127))
def test_drain_completes_what_could_not_be_read_without_the_nodes_that_leave(
    cluster: tuple[list[list[Seen]], int], leaving_bits: int
) -> None:
    rows, k = cluster
    leaving = [bool(leaving_bits >> j & 1) for j in range(len(rows[0]))]
    sightings = sightings_of(rows)
    redundancy = count_redundancy(sightings)
    is_leaving = np.array([leaving] * len(rows))
    elsewhere = count_elsewhere(sightings, redundancy, is_leaving)
    plan = plan_drain(sightings, redundancy, is_leaving, k)
    planned = {row: np.flatnonzero(plan.missing[row]).tolist() for row in plan.rows.tolist()}
    for i, row in enumerate(rows):
        version, count = best(row)
        stays = [
            j
            for j, one in enumerate(row)
            if not leaving[j] and one.has_answered and version and one.version == version
        ]
        assert elsewhere[i] == len(stays)
        missing = [
            j
            for j, one in enumerate(row)
            if not leaving[j] and one.has_answered and one.version != version
        ]
        is_due = len(stays) < k <= count
        assert planned.get(i, []) == (missing if is_due else [])


# Suspects -----------------------------------------------------------------------------------------


def test_suspect_is_confirmed_by_a_later_pass_when_enough_time_has_gone() -> None:
    suspects = Suspects(confirm_after_s=100.0)

    def confirm(pass_number: int, now_s: float, version: int = 1) -> bool:
        return suspects.confirm([b"k"], [version], pass_number=pass_number, now_s=now_s)[0]

    assert not confirm(1, 0.0)
    assert not confirm(1, 200.0), "the same pass"
    assert not confirm(2, 99.0), "too soon"
    assert confirm(3, 100.0)
    assert not confirm(4, 300.0, version=2), "another version"


def test_suspect_is_forgotten_when_a_pass_does_not_find_it() -> None:
    suspects = Suspects(confirm_after_s=0.0)
    assert suspects.confirm([b"a", b"b"], [1, 1], pass_number=1, now_s=0.0) == [False, False]
    suspects.forget_others(1)
    assert suspects.confirm([b"a"], [1], pass_number=2, now_s=1.0) == [True]
    suspects.forget_others(2)
    assert suspects.confirm([b"a", b"b"], [1, 1], pass_number=3, now_s=2.0) == [True, False]


def test_suspects_stay_bounded_when_everything_is_unreadable() -> None:
    suspects = Suspects(confirm_after_s=0.0)
    keys = [i.to_bytes(32, "little") for i in range(SUSPECTS_MAX + 10)]
    suspects.confirm(keys, [1] * len(keys), pass_number=1, now_s=0.0)
    assert len(suspects) == SUSPECTS_MAX
