"""The queue of runs to be saved: bounded, oldest dropped, a few at a time, never cut short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.agent.jobs import FetchJob, StoreJob
from kvstore.agent.leases import Lease
from kvstore.agent.store_queue import AT_ONCE, StoreQueue, plan_drops
from kvstore.agent_messages import FetchEnded, StoreEnded
from kvstore.arena.run_layout import RunLayout
from kvstore.arena.wakeup import Waker
from kvstore.layout import BlockLayout, Section

from .arena_runs import SectionedBlocks

BLOCKS = SectionedBlocks(2, sections=(4_096,), seed=1)
LAYOUT = RunLayout(BlockLayout((Section("s0", 4_096),)), 2)


class GatedJobs:
    """Saves end when the test says so, in any order, as those of slow nodes do."""

    def __init__(self) -> None:
        self.begun: list[StoreJob] = []
        self.gates: list[asyncio.Future[StoreEnded]] = []

    async def store(self, job: StoreJob) -> StoreEnded:
        self.begun.append(job)
        self.gates.append(asyncio.get_running_loop().create_future())
        return await self.gates[-1]

    async def fetch(self, job: FetchJob, waker: Waker) -> FetchEnded:
        raise AssertionError("the queue fetches nothing")

    def describe(self) -> dict[str, Any]:
        return {}


class Bench:
    """A queue with gated jobs and a clock that stands still."""

    def __init__(self, **bounds: int) -> None:
        self.jobs = GatedJobs()
        self.done: list[int] = []
        self.now_s = 100.0
        limits = {"bytes_max": 100 * LAYOUT.run_bytes, "runs_max": 100, **bounds}
        self.queue = StoreQueue(
            self.jobs,
            lambda lease: self.done.append(lease.number),
            loop=asyncio.get_running_loop(),
            clock=lambda: self.now_s,
            **limits,
        )
        self.numbers = 0

    def hand_over(self, *, deadline_s: float = 10.0) -> asyncio.Future[StoreEnded]:
        self.numbers += 1
        lease = Lease(self.numbers, 0, LAYOUT, 0, False, None)
        job = StoreJob(
            owner=1,
            namespace=BLOCKS.namespace,
            keys=b"".join(BLOCKS.keys),
            first_block=0,
            run_offset=0,
            run_blocks=2,
            deadline_s=deadline_s,
            ttl_class="chat",
        )
        return self.queue.hand_over(lease, job)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    task = asyncio.create_task(bench.queue.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@given(
    waiting=st.lists(st.integers(1, 50), max_size=12),
    new=st.integers(1, 80),
    bytes_max=st.integers(1, 200),
    runs_max=st.integers(1, 8),
)
def test_drops_are_as_few_as_the_bounds_allow(
    waiting: list[int], new: int, bytes_max: int, runs_max: int
) -> None:
    drops = plan_drops(waiting, new, bytes_max=bytes_max, runs_max=runs_max)
    kept = waiting[drops:]

    def fits(rest: list[int]) -> bool:
        return sum(rest) + new <= bytes_max and len(rest) + 1 <= runs_max

    assert fits(kept) or not kept
    if drops:
        assert not fits(waiting[drops - 1 :])


async def test_few_are_saved_at_one_time_and_the_rest_wait() -> None:
    bench = Bench()
    async with running(bench):
        ended = [bench.hand_over() for _ in range(AT_ONCE + 2)]
        await settle()
        assert len(bench.jobs.begun) == AT_ONCE
        assert bench.queue.describe()["queued"] == 2
        bench.jobs.gates[0].set_result(StoreEnded(stored=2))
        assert (await ended[0]).stored == 2
        assert bench.done == [1]
        await settle()
        assert len(bench.jobs.begun) == AT_ONCE + 1


async def test_oldest_that_waits_is_dropped_and_counted_when_the_queue_is_full() -> None:
    bench = Bench(runs_max=2)
    async with running(bench):
        under_way = [bench.hand_over() for _ in range(AT_ONCE)]
        await settle()
        waiting = [bench.hand_over() for _ in range(3)]
        dropped = await waiting[0]
        assert (dropped.dropped, dropped.stored) == (2, 0)
        assert bench.done == [AT_ONCE + 1], "and its run is free"
        assert not any(one.done() for one in (*under_way, *waiting[1:]))
        assert bench.queue.describe()["dropped"] == 2
        assert bench.queue.describe()["dropped_runs"] == 1


async def test_queue_is_bounded_in_bytes() -> None:
    bench = Bench(bytes_max=2 * LAYOUT.run_bytes)
    ended = [bench.hand_over() for _ in range(5)]
    assert [one.done() for one in ended] == [True, True, True, False, False]
    assert bench.queue.describe()["queued_bytes"] == 2 * LAYOUT.run_bytes


async def test_run_that_waited_past_its_deadline_is_not_sent() -> None:
    bench = Bench()
    ended = bench.hand_over(deadline_s=5.0)
    bench.now_s += 6.0
    async with running(bench):
        assert (await ended).failed == 2
    assert bench.jobs.begun == []
    assert bench.done == [1]


async def test_save_gets_the_time_that_is_left() -> None:
    bench = Bench()
    bench.hand_over(deadline_s=5.0)
    bench.now_s += 2.0
    async with running(bench):
        await settle()
    assert bench.jobs.begun[0].deadline_s == pytest.approx(3.0)


async def test_save_goes_on_when_nobody_waits_for_its_outcome() -> None:
    bench = Bench()
    async with running(bench):
        ended = bench.hand_over()
        await settle()
        ended.cancel()
        bench.jobs.gates[0].set_result(StoreEnded(stored=2))
        await settle()
        assert bench.done == [1]
        assert bench.queue.counters.stored == 2


async def test_finish_waits_for_all_that_was_handed_over() -> None:
    bench = Bench()
    async with running(bench):
        for _ in range(AT_ONCE + 1):
            bench.hand_over()
        finishing = asyncio.create_task(bench.queue.finish(5.0))
        for number in range(AT_ONCE + 1):
            await settle()
            assert not finishing.done()
            bench.jobs.gates[number].set_result(StoreEnded(stored=2))
        await finishing
    assert sorted(bench.done) == [1, 2, 3]


async def test_finish_drops_what_waits_when_its_time_is_up() -> None:
    bench = Bench()
    async with running(bench):
        for _ in range(AT_ONCE):
            bench.hand_over()
        await settle()
        waiting = bench.hand_over()
        await bench.queue.finish(0.01)
        assert waiting.result().dropped == 2


async def test_fault_of_a_save_ends_the_queue_and_frees_the_run() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.queue.run())
    bench.hand_over()
    await settle()
    bench.jobs.gates[0].set_exception(RuntimeError("broken"))
    with pytest.raises(ExceptionGroup) as raised:
        await task
    assert "broken" in repr(raised.value.exceptions)
    assert bench.done == [1]
