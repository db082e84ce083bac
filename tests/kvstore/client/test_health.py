"""What a client believes of a node."""

import pytest

from kvstore.client.health import BACKOFF_FIRST_S, BACKOFF_MAX_S, FULL_S, Breaker, NodeHealth


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(clock: ManualClock) -> NodeHealth:
    return NodeHealth(clock, Breaker(clock))


def test_a_new_node_is_available_and_expected_to_be_fast(health: NodeHealth) -> None:
    assert health.is_available
    assert health.delay_s == 0.0


def test_the_breaker_opens_for_twice_as_long_after_each_failure_in_a_row(
    health: NodeHealth, clock: ManualClock
) -> None:
    expected_s = BACKOFF_FIRST_S
    for _ in range(12):
        health.on_failed()
        clock.now_s += expected_s * 0.99
        assert not health.is_available
        clock.now_s += expected_s * 0.02
        assert health.is_available
        expected_s = min(expected_s * 2, BACKOFF_MAX_S)


def test_work_done_makes_the_next_failure_a_first_one(
    health: NodeHealth, clock: ManualClock
) -> None:
    for _ in range(5):
        health.on_failed()
    health.on_answered(0.001, None, is_served=False)
    health.on_failed()
    clock.now_s += BACKOFF_FIRST_S
    assert not health.is_available, "a refusal is no work"
    health.on_answered(0.001, None, is_served=True)
    clock.now_s += BACKOFF_MAX_S
    health.on_failed()
    clock.now_s += BACKOFF_FIRST_S
    assert health.is_available


def test_a_node_that_does_not_answer_looks_slower_and_slower(
    health: NodeHealth, clock: ManualClock
) -> None:
    health.on_asked(clock.now_s)
    clock.now_s += 3.0
    assert health.delay_s == pytest.approx(3.0)


def test_an_old_slow_answer_fades_so_that_the_node_is_tried_again(
    health: NodeHealth, clock: ManualClock
) -> None:
    for _ in range(20):
        health.on_answered(0.1, None, is_served=True)
    assert health.delay_s == pytest.approx(0.1, rel=0.01)
    clock.now_s += 60.0
    assert health.delay_s < 0.001


def test_a_node_that_had_no_room_is_full_for_a_while(
    health: NodeHealth, clock: ManualClock
) -> None:
    assert not health.is_full
    health.on_full()
    clock.now_s += FULL_S * 0.99
    assert health.is_full
    assert health.is_available
    clock.now_s += FULL_S * 0.02
    assert not health.is_full


def test_a_node_is_full_no_more_when_it_has_stored_shards(health: NodeHealth) -> None:
    health.on_full()
    health.on_stored()
    assert not health.is_full
