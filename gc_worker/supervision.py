"""Keeps the loops of a worker going: what a node did wrong is tried again, what we did ends all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from kvstore.errors import NodeError

from .context import WorkerContext

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 5.0
HEALTHY_AFTER_S = 60.0
"""A loop that ran for so long starts anew with the first backoff."""

Loop = Callable[[], Awaitable[None]]


class LoopFailed(Exception):
    """A loop ended by an error that is none of a node's; the cause is attached."""


async def run_loops(context: WorkerContext, loops: Mapping[str, Loop], stop: asyncio.Event) -> None:
    """Runs all `loops` until `stop` is set. Raises LoopFailed with the first one's failure."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_keep_running(context, name, loop), name=name)
                for name, loop in loops.items()
            ]
            await stop.wait()
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        # Further ones are consequences, and each of them stands in the log.
        raise errors.exceptions[0] from None


async def _keep_running(context: WorkerContext, name: str, loop: Loop) -> None:
    backoff_s = BACKOFF_FIRST_S
    while True:
        begun_s = context.clock.monotonic_s()
        try:
            await loop()
        except NodeError as error:
            context.counters.node_errors += 1
            if context.clock.monotonic_s() - begun_s > HEALTHY_AFTER_S:
                backoff_s = BACKOFF_FIRST_S
            log.warning("loop=%s goes on in %.0f s: %s", name, backoff_s, error)
            await context.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
        except Exception as error:
            log.exception("loop=%s failed", name)
            raise LoopFailed(f"loop {name}: {error!r}") from error
        else:
            raise LoopFailed(f"loop {name} came to an end, which no loop does")
