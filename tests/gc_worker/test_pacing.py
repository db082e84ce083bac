"""Background work keeps to its rates, and yields to traffic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.pacing import BURST_S, WAIT_MIN_S, TokenBucket
from gc_worker.traffic import Traffic, choose_rate_factor
from tests.gc_worker.virtual_time import VirtualTime


def bucket_of(time: VirtualTime, rates: dict[str, float]) -> TokenBucket:
    return TokenBucket(lambda: rates["now"], clock=time.monotonic_s, sleep=time.sleep)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.floats(10, 100_000))
async def test_bucket_keeps_the_mean_rate_for_items_of_any_size(
    items: list[int], rate_per_s: float
) -> None:
    time = VirtualTime()
    bucket = bucket_of(time, {"now": rate_per_s})
    for item in items:
        await bucket.take(item)
    # All but the last are paid for, less one burst.
    assert time.slept_s >= (sum(items[:-1]) / rate_per_s) - BURST_S - 1e-6
    assert time.slept_s <= sum(items) / rate_per_s + WAIT_MIN_S * len(items)


async def test_bucket_lets_a_short_burst_through_after_a_rest() -> None:
    time = VirtualTime()
    bucket = bucket_of(time, {"now": 1000.0})
    await time.sleep(3600.0)
    time.slept_s = 0.0
    for _ in range(int(1000 * BURST_S)):
        await bucket.take(1)
    assert time.slept_s == 0.0
    await bucket.take(1000)
    await bucket.take(1)
    assert 0.9 < time.slept_s < 1.1


async def test_bucket_obeys_a_rate_that_is_changed_while_it_waits() -> None:
    time = VirtualTime()
    rates = {"now": 1.0}
    bucket = bucket_of(time, rates)
    await bucket.take(10_000)

    async def sleep(delay_s: float) -> None:
        rates["now"] = 1e6
        await VirtualTime.sleep(time, delay_s)

    bucket._sleep = sleep
    await bucket.take(1)
    assert time.slept_s < 2.0


@pytest.mark.parametrize(
    ("requests_per_s", "delay_s", "factor"),
    [(0, 0.001, 1.0), (5000, 0.001, 0.5), (0, 0.05, 0.5), (5000, 1.0, 0.1)],
)
def test_work_yields_when_the_node_is_busy(
    requests_per_s: float, delay_s: float, factor: float
) -> None:
    assert choose_rate_factor(requests_per_s, delay_s) == factor


def test_traffic_is_none_when_the_node_does_not_count_requests() -> None:
    traffic = Traffic()
    traffic.note({"requests_last_s": 9000}, 0.001)
    assert traffic.rate_factor == 0.5
    traffic.note({}, 0.001)
    assert traffic.rate_factor == 1.0
