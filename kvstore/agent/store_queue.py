"""Runs that were handed over to be saved: they wait, a few are saved at a time, too many are not.

Bounded in bytes and in runs. When it is full the oldest one that waits is dropped: the newest are
the likeliest to be asked for, and no engine is ever held up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..agent_messages import StoreEnded
from .jobs import StoreJob
from .leases import Lease
from .parts import Jobs

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Saves that run at one time: one waits for acknowledgements while the other encodes."""
RUNS_MAX = 1024


def plan_drops(
    waiting_bytes: Sequence[int], new_bytes: int, *, bytes_max: int, runs_max: int
) -> int:
    """How many of those that wait, oldest first, must go so that a new one may come.

    A new one that is too large alone is let in when nobody else waits: it is in the arena anyway.
    """
    total, runs = sum(waiting_bytes) + new_bytes, len(waiting_bytes) + 1
    drops = 0
    while drops < len(waiting_bytes) and (total > bytes_max or runs > runs_max):
        total -= waiting_bytes[drops]
        runs -= 1
        drops += 1
    return drops


@dataclass(slots=True, eq=False)
class _Item:
    lease: Lease
    job: StoreJob
    handed_over_s: float
    ended: asyncio.Future[StoreEnded]


@dataclass(slots=True)
class StoreCounters:
    """Blocks, since the agent was started."""

    stored: int = 0
    known: int = 0
    failed: int = 0
    dropped: int = 0
    degraded: int = 0
    dropped_runs: int = 0


class StoreQueue:
    """`on_done` is called with each run when nobody reads it any more. Belongs to the event
    loop."""

    def __init__(
        self,
        jobs: Jobs,
        on_done: Callable[[Lease], None],
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        bytes_max: int,
        runs_max: int = RUNS_MAX,
    ) -> None:
        self._jobs = jobs
        self._on_done = on_done
        self._loop = loop
        self._clock = clock
        self._bytes_max = bytes_max
        self._runs_max = runs_max
        self._waiting: deque[_Item] = deque()
        self._running = 0
        self._has_arrived = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.counters = StoreCounters()

    def hand_over(self, lease: Lease, job: StoreJob) -> asyncio.Future[StoreEnded]:
        """Queue a run. The future is only told the outcome: cancelling it changes nothing."""
        sizes = [item.lease.layout.run_bytes for item in self._waiting]
        new_bytes = lease.layout.run_bytes
        bounds = {"bytes_max": self._bytes_max, "runs_max": self._runs_max}
        for _ in range(plan_drops(sizes, new_bytes, **bounds)):
            self._drop(self._waiting.popleft())
        item = _Item(lease, job, self._clock(), self._loop.create_future())
        self._waiting.append(item)
        self._has_arrived.set()
        self._is_idle.clear()
        return item.ended

    async def run(self) -> None:
        """Saves what is handed over, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._save_one_by_one())

    async def finish(self, deadline_s: float) -> None:
        """Returns when everything is saved; what is not within the deadline is dropped or left."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("saves cut short waiting=%d running=%d", len(self._waiting), self._running)
            while self._waiting:
                self._drop(self._waiting.popleft())

    def describe(self) -> dict[str, Any]:
        """For the status document."""
        counters = self.counters
        return {
            "queued": len(self._waiting),
            "queued_bytes": sum(item.lease.layout.run_bytes for item in self._waiting),
            "running": self._running,
            "stored": counters.stored,
            "known": counters.known,
            "failed": counters.failed,
            "dropped": counters.dropped,
            "degraded": counters.degraded,
            "dropped_runs": counters.dropped_runs,
        }

    async def _save_one_by_one(self) -> None:
        while True:
            while not self._waiting:
                self._has_arrived.clear()
                await self._has_arrived.wait()
            item = self._waiting.popleft()
            self._running += 1
            try:
                ended = await self._save(item)
            finally:
                self._running -= 1
                self._on_done(item.lease)
            self._end(item, ended)
            if not self._waiting and not self._running:
                self._is_idle.set()

    async def _save(self, item: _Item) -> StoreEnded:
        left_s = item.handed_over_s + item.job.deadline_s - self._clock()
        if left_s <= 0:
            return StoreEnded(failed=item.job.blocks)
        return await self._jobs.store(replace(item.job, deadline_s=left_s))

    def _drop(self, item: _Item) -> None:
        self.counters.dropped_runs += 1
        self._on_done(item.lease)
        self._end(item, StoreEnded(dropped=item.job.blocks))

    def _end(self, item: _Item, ended: StoreEnded) -> None:
        counters = self.counters
        counters.stored += ended.stored
        counters.known += ended.known
        counters.failed += ended.failed
        counters.dropped += ended.dropped
        counters.degraded += ended.degraded
        if not item.ended.done():
            ended.elapsed_s = self._clock() - item.handed_over_s
            item.ended.set_result(ended)
