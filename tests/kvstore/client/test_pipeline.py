"""Batches run in order, a few at a time."""

import asyncio

import pytest

from kvstore.client.pipeline import run_in_order


async def test_results_come_in_order_with_a_bounded_number_in_flight() -> None:
    running = highest = 0

    async def run(start: int, end: int) -> tuple[int, int]:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0.001 * (end % 3))
        running -= 1
        return start, end

    ranges = [(i, i + 1) for i in range(20)]
    assert await run_in_order(run, ranges, in_flight=2, goes_on=lambda _: True) == ranges
    assert highest == 2


async def test_nothing_runs_on_after_the_first_result_that_does_not_go_on() -> None:
    ended: list[int] = []

    async def run(start: int, _end: int) -> int:
        try:
            await asyncio.sleep(0 if start < 3 else 60)
        finally:
            ended.append(start)
        return start

    results = await run_in_order(
        run, [(i, i + 1) for i in range(10)], in_flight=2, goes_on=lambda start: start < 2
    )
    assert results == [0, 1, 2]
    assert sorted(ended) == [0, 1, 2, 3]
    assert len(asyncio.all_tasks()) == 1


async def test_everything_has_ended_when_the_caller_is_cancelled() -> None:
    started = asyncio.Event()

    async def run(_start: int, _end: int) -> int:
        started.set()
        await asyncio.sleep(60)
        return 0

    whole = asyncio.create_task(
        run_in_order(run, [(0, 1), (1, 2)], in_flight=2, goes_on=lambda _: True)
    )
    await started.wait()
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    assert len(asyncio.all_tasks()) == 1


async def test_an_error_of_one_batch_ends_the_others() -> None:
    async def run(start: int, _end: int) -> int:
        if start == 0:
            raise OSError("broken")
        await asyncio.sleep(60)
        return start

    with pytest.raises(OSError, match="broken"):
        await run_in_order(run, [(0, 1), (1, 2)], in_flight=2, goes_on=lambda _: True)
    assert len(asyncio.all_tasks()) == 1
