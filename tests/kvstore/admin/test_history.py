"""The ring behind the page's charts: what it adds up, what it keeps, and for how long."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.admin.control.history import COLUMNS, TIERS, ClusterSample, History, Tier

SMALL = (Tier(10, 6), Tier(60, 6))


def stat(
    *,
    pid: int = 1,
    hit: int = 0,
    miss: int = 0,
    evicted: int = 0,
    used: tuple[int, int] = (0, 10),
    target: str = "t0",
) -> dict[str, Any]:
    """Make the part of a STAT answer that history reads."""
    return {
        "pid": pid,
        "namespaces": {"m": {"hit_tokens": hit, "miss_tokens": {"not_stored": miss}}},
        "targets": [
            {
                "name": target,
                "used_bytes": used[0],
                "capacity_bytes": used[1],
                "evicted": {"expired": evicted, "least_used": 2 * evicted},
                "evicted_bytes": 100 * evicted,
            }
        ],
    }


def rows_of(history: History, *, at_s: float, tier: int = 0) -> list[dict[str, Any]]:
    """Give a tier's rows by column name."""
    values = history.to_values(monotonic_s=at_s)
    return [dict(zip(values["columns"], row, strict=True)) for row in values["tiers"][tier]["rows"]]


def test_counters_become_what_was_added_in_a_step_over_all_nodes() -> None:
    history = History(SMALL)
    history.add(0, ClusterSample(stats={"a": stat(hit=100, evicted=5), "b": stat(hit=1)}))
    history.add(10, ClusterSample(stats={"a": stat(hit=150, miss=8, evicted=6), "b": stat(hit=2)}))
    first, second = rows_of(history, at_s=12)
    assert (first["hit_tokens"], first["evicted_bytes"]) == (0, 0)
    assert second["age_s"] == 2
    assert (second["hit_tokens"], second["miss_tokens"]) == (51, 8)
    assert (second["evicted_expired"], second["evicted_least_used"]) == (1, 2)
    assert second["evicted_bytes"] == 100


def test_node_that_was_started_again_counts_from_zero() -> None:
    history = History(SMALL)
    history.add(0, ClusterSample(stats={"a": stat(pid=1, hit=1000)}))
    history.add(10, ClusterSample(stats={"a": stat(pid=2, hit=1500)}))
    assert rows_of(history, at_s=10)[-1]["hit_tokens"] == 1500


def test_silent_node_adds_nothing_and_is_made_up_for_when_it_is_back() -> None:
    history = History(SMALL)
    history.add(0, ClusterSample(stats={"a": stat(hit=100)}))
    history.add(10, ClusterSample(stats={"a": None}))
    history.add(20, ClusterSample(stats={"a": stat(hit=130)}))
    rows = rows_of(history, at_s=20)
    assert [row["hit_tokens"] for row in rows] == [0, 0, 30]
    assert [row["nodes_alive"] for row in rows] == [1, 0, 1]
    assert [row["nodes_total"] for row in rows] == [1, 1, 1]


def test_counter_that_falls_adds_nothing() -> None:
    history = History(SMALL)
    history.add(0, ClusterSample(stats={"a": stat(hit=100)}))
    history.add(10, ClusterSample(stats={"a": stat(hit=40)}))
    assert rows_of(history, at_s=10)[-1]["hit_tokens"] == 0


def test_samples_of_one_step_become_one_point() -> None:
    history = History(SMALL)
    for at_s, hit in ((0, 0), (61, 5), (70, 9), (119, 20)):
        history.add(at_s, ClusterSample(stats={"a": stat(hit=hit, used=(hit, 100))}))
    coarse = rows_of(history, at_s=119, tier=1)
    assert [row["hit_tokens"] for row in coarse] == [0, 20]
    assert coarse[-1]["fill"] == 0.2  # the state at the end of the step, not its mean
    assert coarse[-1]["age_s"] == 59


def test_fill_is_that_of_the_fullest_target_by_the_tightest_limit() -> None:
    history = History(SMALL)
    stats = {"a": stat(used=(3, 10)), "b": stat(used=(5, 10), target="t1"), "c": None}
    history.add(0, ClusterSample(stats=stats, usage={"t0": {"fraction": 0.4}}))
    history.add(10, ClusterSample(stats=stats, usage={"t0": {"fraction": 0.9}}))
    assert [row["fill"] for row in rows_of(history, at_s=10)] == [0.5, 0.9]


def test_redundancy_is_counted_by_health_and_unknown_until_it_is_counted() -> None:
    history = History(SMALL)
    history.add(0, ClusterSample(stats={}))
    report = {"blocks_by_shards": [9, 1, 0, 4, 2, 50, 100], "k": 4, "width": 6}
    history.add(10, ClusterSample(stats={}, redundancy=report))
    before, after = rows_of(history, at_s=10)
    assert before["blocks_whole"] is None
    assert before["fill"] is None
    assert after["blocks_whole"] == 100
    assert after["blocks_reduced"] == 52
    assert after["blocks_unreadable"] == 5


def test_figures_of_a_strange_node_are_left_out() -> None:
    history = History(SMALL)
    strange: dict[str, Any] = {
        "pid": None,
        "namespaces": {"m": {"hit_tokens": "many", "miss_tokens": [1]}, "n": 7},
        "targets": [{"name": "t0", "evicted": 3, "used_bytes": -1, "capacity_bytes": 0}, None],
    }
    history.add(0, ClusterSample(stats={"a": strange}))
    history.add(10, ClusterSample(stats={"a": strange}, redundancy={"k": 4, "width": None}))
    last = rows_of(history, at_s=10)[-1]
    assert last["hit_tokens"] == 0
    assert last["fill"] is None


def test_default_tiers_reach_back_a_day_and_stay_small() -> None:
    assert [tier.window_s for tier in TIERS] == [3600, 6 * 3600, 24 * 3600]
    history = History()
    for step in range(2 * 24 * 360):
        history.add(step * 10.0, ClusterSample(stats={"a": stat(hit=step)}))
    values = history.to_values(monotonic_s=2 * 24 * 3600.0)
    assert values["columns"] == ["age_s", *COLUMNS]
    for tier, kept in zip(TIERS, values["tiers"], strict=True):
        assert len(kept["rows"]) == tier.points_max
        assert kept["rows"][0][0] <= tier.window_s
        # Every full step of a tier holds what its samples added.
        assert kept["rows"][5][1] == tier.step_s / 10


def test_points_that_are_too_old_are_not_shown_after_a_pause() -> None:
    history = History(SMALL)
    history.add(0, ClusterSample(stats={"a": stat()}))
    history.add(1000, ClusterSample(stats={"a": stat()}))
    assert len(rows_of(history, at_s=1000)) == 1


@given(
    st.lists(st.tuples(st.floats(0.1, 40), st.integers(0, 50), st.booleans()), max_size=60),
    st.sampled_from([0, 1]),
)
def test_what_was_added_is_neither_lost_nor_doubled(
    steps: list[tuple[float, int, bool]], tier: int
) -> None:
    history = History((Tier(10, 10_000), Tier(60, 10_000)))
    at_s, hit = 0.0, 0
    history.add(at_s, ClusterSample(stats={"a": stat(hit=0)}))
    for wait_s, added, is_silent in [*steps, (1.0, 0, False)]:
        at_s += wait_s
        hit += added
        history.add(at_s, ClusterSample(stats={"a": None if is_silent else stat(hit=hit)}))
    rows = rows_of(history, at_s=at_s, tier=tier)
    assert sum(row["hit_tokens"] for row in rows) == pytest.approx(hit)
    ages = [row["age_s"] for row in rows]
    assert ages == sorted(ages, reverse=True)
    assert len(set(ages)) == len(ages)
