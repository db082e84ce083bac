"""Runs batches in order, a few at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

BATCHES_IN_FLIGHT = 2
"""Two keep the wire busy while one is decoded; more only cost cache."""

ResultT = TypeVar("ResultT")


async def run_in_order(
    run: Callable[[int, int], Awaitable[ResultT]],
    ranges: Iterable[tuple[int, int]],
    *,
    goes_on: Callable[[ResultT], bool],
) -> list[ResultT]:
    """Results of run(start, end) for each range, in order, up to the first that does not go on.

    Later ones that have begun by then are cancelled, and have ended when this returns, also when
    it is cancelled itself.
    """
    results: list[ResultT] = []
    running: deque[asyncio.Task[ResultT]] = deque()
    todo = iter(ranges)
    try:
        while True:
            while len(running) < BATCHES_IN_FLIGHT and (following := next(todo, None)):
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
