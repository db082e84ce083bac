"""Which shards are asked for first."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.choose import (
    SIMILAR_DELAY_S,
    SIMILAR_FACTOR,
    choose_shards,
    delay_class,
)


def test_choose_takes_the_data_shards_when_all_are_alike() -> None:
    assert choose_shards([0.001] * 12, k=10) == list(range(10))


def test_choose_leaves_out_the_slowest_node() -> None:
    delays: list[float | None] = [0.001] * 12
    delays[3] = 0.5
    assert choose_shards(delays, k=10) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_choose_prefers_data_when_delays_differ_by_noise_only() -> None:
    delays = [SIMILAR_DELAY_S * 0.9] * 10 + [0.0, 0.0]
    assert choose_shards(delays, k=10) == list(range(10))


def test_choose_prefers_data_when_all_nodes_are_slow_alike() -> None:
    """On a loaded machine, or with large batches, many times the usual delay is nothing odd."""
    delays = [0.1] * 12
    delays[4] = 0.1 * SIMILAR_FACTOR * 0.9
    assert choose_shards(delays, k=10) == list(range(10))
    delays[4] = 0.1 * SIMILAR_FACTOR * 1.1
    assert choose_shards(delays, k=10) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_choose_leaves_out_nodes_that_cannot_be_asked() -> None:
    delays: list[float | None] = [None, 0.001, None, *[0.001] * 9]
    assert choose_shards(delays, k=10) == [1, *range(3, 12)]
    assert choose_shards([None] * 12, k=10) == []


def test_choose_asks_for_all_when_there_is_no_parity() -> None:
    assert choose_shards([0.1], k=1) == [0]


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=32),
    st.integers(1, 32),
)
def test_no_shard_that_was_left_out_is_in_a_faster_class_than_one_that_was_chosen(
    delays: list[float | None], k: int
) -> None:
    chosen = choose_shards(delays, k=k)
    askable = [j for j, delay in enumerate(delays) if delay is not None]
    assert len(chosen) == min(k, len(askable))
    known_s = sorted(delays[j] or 0.0 for j in askable)
    median_s = known_s[len(known_s) // 2] if known_s else 0.0
    similar_s = max(SIMILAR_DELAY_S, SIMILAR_FACTOR * median_s)
    classes = {j: delay_class(delays[j] or 0.0, similar_s) for j in askable}
    slowest = max((classes[j] for j in chosen), default=0)
    assert all(classes[j] >= slowest for j in set(askable) - set(chosen))
