"""The workers of one kind, and the jobs that wait for them (whose turn it is: job_queue).

A job that cannot be done ends at once without a result: an engine computes what it does not get.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .job_queue import JobQueue
from .worker_process import WorkerCommand
from .worker_slot import START_DEADLINE_S, WorkerSlot
from .worker_task import WorkerTask

WAITING_JOBS_MAX = 1024
"""Of one session half at most."""


@dataclass(slots=True)
class GroupCounters:
    """What became of the jobs (pieces of fetches, or saves) since the agent was started."""

    done: int = 0
    lost: int = 0
    """Their worker ended under them."""
    refused: int = 0
    """There was no worker, or the queue was full, or held enough of the session's."""
    overdue: int = 0
    """Their deadline passed in the queue."""
    cancelled: int = 0
    """Given up while they waited."""


class WorkerGroup:
    """Belongs to one event loop."""

    def __init__(
        self,
        command: WorkerCommand,
        *,
        workers: int,
        jobs_per_worker: int,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting = JobQueue()
        self._is_stopping = False
        self.counters = GroupCounters()
        self._slots = [
            WorkerSlot(
                command,
                jobs_max=jobs_per_worker,
                loop=loop,
                clock=clock,
                on_change=self._hand_out,
            )
            for _ in range(workers)
        ]

    @property
    def ready_workers(self) -> int:
        """Workers that could do a job now."""
        return sum(slot.is_ready for slot in self._slots)

    async def start(self) -> None:
        """Start the workers; returns when each has started or could not."""
        for slot in self._slots:
            slot.start()
        settled = [slot.is_settled for slot in self._slots]
        if settled:
            await asyncio.wait(settled, timeout=START_DEADLINE_S)

    def submit(self, task: WorkerTask) -> None:
        """Have a job done; `task.ended` says when it is."""
        is_possible = any(slot.is_hopeful for slot in self._slots) and not self._is_stopping
        if not is_possible or not self._waiting.has_room(task.owner, WAITING_JOBS_MAX):
            self.counters.refused += 1
            task.end(None)
            return
        task.ended.add_done_callback(lambda _: self._count(task))
        self._waiting.add(task)
        delay_s = max(task.due_s - self._clock(), 0.0)
        task.set_timer(self._loop.call_later(delay_s, self._drop_overdue, task))
        self._hand_out()

    def give_up(self, task: WorkerTask) -> None:
        """The job is not wanted any more; `task.ended` says when nobody works at it. May be called
        again, and for one that has ended."""
        if task.slot is not None:
            task.slot.give_up(task)
        elif not task.ended.done():
            self._waiting.remove(task)
            self.counters.cancelled += 1
            task.end(None)

    async def stop(self, deadline_s: float) -> None:
        """End the waiting jobs now, wait for those that run, and end the workers, all at the latest
        `deadline_s` from now."""
        self._is_stopping = True
        due_s = self._clock() + deadline_s
        while (task := self._waiting.take_any()) is not None:
            self.counters.cancelled += 1
            task.end(None)
        running = [task.ended for slot in self._slots for task in slot.tasks]
        if running:
            await asyncio.wait(running, timeout=deadline_s)
        left_s = max(due_s - self._clock(), 0.0)
        await asyncio.gather(*(slot.stop(left_s) for slot in self._slots))

    def describe(self) -> dict[str, Any]:
        """For `cachalot status`: JSON."""
        counters = self.counters
        return {
            "queued": len(self._waiting),
            "running": sum(len(slot.tasks) for slot in self._slots),
            "done": counters.done,
            "lost": counters.lost,
            "refused": counters.refused,
            "overdue": counters.overdue,
            "cancelled": counters.cancelled,
            "workers": [slot.describe() for slot in self._slots],
        }

    def _hand_out(self) -> None:
        """Give waiting jobs to the workers that have the least to do."""
        running = Counter(task.owner for slot in self._slots for task in slot.tasks)
        while self._waiting:
            free = [slot for slot in self._slots if slot.has_room]
            task = self._waiting.take(running, sum(slot.free_places for slot in free))
            if task is None:
                break
            running[task.owner] += 1
            min(free, key=lambda slot: slot.load_blocks).give(task)
        if not any(slot.is_hopeful for slot in self._slots):
            while (task := self._waiting.take_any()) is not None:
                self.counters.refused += 1
                task.end(None)

    def _drop_overdue(self, task: WorkerTask) -> None:
        self._waiting.remove(task)
        self.counters.overdue += 1
        task.end(None)

    def _count(self, task: WorkerTask) -> None:
        if task.ended.result() is not None:
            self.counters.done += 1
        elif task.slot is not None:
            self.counters.lost += 1
