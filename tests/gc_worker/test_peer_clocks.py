"""One wrong clock must not empty a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.clock_guard import STABLE_AFTER_S
from gc_worker.peer_clocks import CHECK_EVERY_S, find_difference_s
from kvstore.admin.local_cluster import LocalCluster
from tests.gc_worker.worker_bench import WorkerBench

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("clocks") / "cluster"
    with LocalCluster.start(folder, nodes=4, k=2, m=1, target_size_bytes=4 << 20) as it:
        yield it


@pytest.mark.parametrize("ahead_s", [8 * DAY_S, -8 * DAY_S])
async def test_nothing_expires_by_a_clock_that_is_wrong_from_the_start(
    cluster: LocalCluster, ahead_s: float
) -> None:
    async with WorkerBench.open(cluster) as bench:
        eviction, context = bench.evictions["n01"], bench.contexts["n01"]
        eviction.is_clock_compared = True
        bench.clocks["n01"].ahead_s = ahead_s
        blocks = await bench.save(30, seed=int(abs(ahead_s + 1)))
        await eviction.tick()
        assert sum((await eviction.run_now()).values()) == 0
        assert await bench.match(blocks) == 30
        assert [event.kind for event in context.events.events] == ["clock_differs"]


async def test_blocks_expire_again_once_the_clock_is_right(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster) as bench:
        eviction, clock = bench.evictions["n01"], bench.clocks["n01"]
        eviction.is_clock_compared = True
        clock.ahead_s = 8 * DAY_S
        assert sum((await eviction.run_now()).values()) == 0
        clock.ahead_s = 0.0
        clock.ahead_monotonic_s += CHECK_EVERY_S
        await eviction.tick()  # the guard sees a jump, and waits for the clock to be even
        clock.ahead_monotonic_s += STABLE_AFTER_S + CHECK_EVERY_S
        await eviction.run_now()
        assert eviction._peer_clocks.difference_s == pytest.approx(0.0, abs=60.0)


@given(
    st.lists(st.floats(-100.0, 100.0), max_size=5),
    st.lists(st.floats(-1e9, 1e9), max_size=4),
)
def test_fewer_wrong_peers_than_right_ones_do_not_count(
    right: list[float], wrong: list[float]
) -> None:
    wrong = wrong[: max(len(right) - 1, 0)]
    assert abs(find_difference_s(0.0, right + wrong)) <= 100.0


def test_own_clock_is_wrong_when_most_peers_say_so() -> None:
    assert find_difference_s(1000.0, [0.0, 5.0, 1000.0]) == 995.0
    assert find_difference_s(1000.0, [0.0, 1000.0]) == 0.0
    assert find_difference_s(1000.0, []) == 0.0
