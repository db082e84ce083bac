"""Runs batches in order, a few at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

FETCHES_IN_FLIGHT = 1
"""A second batch gains nothing on a quiet machine and fills the sockets on a busy one
(docs/decisions/0013)."""
SAVES_IN_FLIGHT = 2
"""One is encoded while the other is sent."""

ResultT = TypeVar("ResultT")


async def run_in_order(
    run: Callable[[int, int], Awaitable[ResultT]],
    ranges: Iterable[tuple[int, int]],
    *,
    in_flight: int,
    goes_on: Callable[[ResultT], bool],
) -> list[ResultT]:
    """Results of run(start, end) for each range, in order, up to the first that does not go on;
    `in_flight` of them run at a time.

    Later ones that have begun by then are cancelled, and have ended when this returns, also when
    it is cancelled itself.
    """
    if in_flight == 1:
        return await _run_one_by_one(run, ranges, goes_on)
    results: list[ResultT] = []
    running: deque[asyncio.Task[ResultT]] = deque()
    todo = iter(ranges)
    try:
        while True:
            while len(running) < in_flight and (following := next(todo, None)):
                running.append(asyncio.ensure_future(run(*following)))
            if not running:
                return results
            results.append(await running[0])
            running.popleft()
            if not goes_on(results[-1]):
                return results
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run_one_by_one(
    run: Callable[[int, int], Awaitable[ResultT]],
    ranges: Iterable[tuple[int, int]],
    goes_on: Callable[[ResultT], bool],
) -> list[ResultT]:
    """The same without tasks, which cost more than asking for a small batch."""
    results: list[ResultT] = []
    for start, end in ranges:
        results.append(await run(start, end))
        if not goes_on(results[-1]):
            break
    return results
