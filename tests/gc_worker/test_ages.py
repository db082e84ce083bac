"""Ages of shards by class, against counting them one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.ages import AGE_BOUNDS_S, DAY_S, GROUPS, HOUR_S, UNNAMED, count_ages, note_ages
from gc_worker.columns import TargetColumns

NOW_S = 1_700_000_000


def columns_of(uses: list[tuple[int, int]], names: tuple[str, ...]) -> TargetColumns:
    """Make columns from pairs of age in seconds and class number."""
    count = len(uses)
    return TargetColumns(
        location=np.arange(count, dtype=np.int64),
        generation=np.ones(count, np.uint64),
        last_used_s=np.array([NOW_S - age for age, _ in uses], np.uint32),
        block_index=np.zeros(count, np.uint32),
        slot_bytes=np.full(count, 4096, np.uint32),
        ttl_class=np.array([number for _, number in uses], np.uint8),
        shard=np.zeros(count, np.uint8),
        class_names=names,
    )


def test_bounds_are_inclusive_and_ascending() -> None:
    assert list(AGE_BOUNDS_S) == sorted(set(AGE_BOUNDS_S))
    first = AGE_BOUNDS_S[0]
    found = count_ages(columns_of([(first, 0), (first + 1, 0)], ("chat",)), now_s=NOW_S)
    assert found["chat"][:3] == [1, 1, 0]


def test_use_in_the_future_counts_as_now() -> None:
    found = count_ages(columns_of([(-5 * DAY_S, 0)], ("chat",)), now_s=NOW_S)
    assert found == {"chat": [1] + [0] * len(AGE_BOUNDS_S)}


def test_same_class_is_summed_up_over_targets_that_number_it_differently() -> None:
    one = columns_of([(HOUR_S, 0)], ("agent", "chat"))
    other = columns_of([(HOUR_S, 1), (30 * DAY_S, 1), (0, 7)], ("chat", "agent"))
    report = note_ages(note_ages(None, "t0", one, now_s=NOW_S), "t1", other, now_s=NOW_S)
    found = report["by_class"]
    assert report["at_s"] == NOW_S
    assert found["agent"][1] == 2
    assert found["agent"][-1] == 1
    assert found[UNNAMED][0] == 1
    assert set(found) == {"agent", UNNAMED}


def test_target_that_is_looked_at_again_is_not_counted_twice() -> None:
    first = note_ages(None, "t0", columns_of([(0, 0), (0, 0)], ("chat",)), now_s=NOW_S)
    other = note_ages(first, "t1", columns_of([(HOUR_S, 0)], ("chat",)), now_s=NOW_S)
    again = note_ages(other, "t0", columns_of([(0, 0)], ("chat",)), now_s=NOW_S + 5)
    assert again["by_class"]["chat"][:2] == [1, 1]
    assert again["at_s"] == NOW_S + 5


def test_nothing_is_counted_when_there_is_nothing() -> None:
    assert count_ages(columns_of([], ("chat",)), now_s=NOW_S) == {}


@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.integers(-100, 20 * DAY_S),
                st.sampled_from(AGE_BOUNDS_S),
                st.sampled_from([bound + 1 for bound in AGE_BOUNDS_S]),
            ),
            st.integers(0, 2),
        ),
        max_size=60,
    )
)
def test_counts_equal_those_made_one_by_one(uses: list[tuple[int, int]]) -> None:
    names = ("agent", "chat", "batch")
    expected: dict[str, list[int]] = {}
    for age, number in uses:
        counts = expected.setdefault(names[number], [0] * GROUPS)
        counts[sum(age > bound for bound in AGE_BOUNDS_S)] += 1
    assert count_ages(columns_of(uses, names), now_s=NOW_S) == expected
