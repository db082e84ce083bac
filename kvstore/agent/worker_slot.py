"""The place of one worker: a process that is watched, and started anew when it ends.

What a worker was doing when it ended is lost, never wrong: its jobs end without a result, after the
kernel has said that the process is gone and so cannot write any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from typing import Any

from .jobs import (
    CancelJob,
    Finish,
    Ping,
    Pong,
    ReportMessage,
    Started,
    StartFailed,
    WorkerUsage,
)
from .worker_process import WorkerCommand, WorkerProcess
from .worker_task import WorkerTask

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""After a job's deadline, until it is cancelled: the worker keeps deadlines by itself."""
CANCEL_ANSWER_S = 1.0
"""A worker that has not given up a job by then is killed."""
TICK_S = 1.0
PING_TICKS = 2
LOST_TICKS = 5
"""A worker that was silent for so many ticks after a ping is killed. Ticks and not seconds, because
an agent that was itself stopped must not find all its workers guilty."""
START_DEADLINE_S = 20.0
STEADY_S = 5.0
"""A worker that has served for so long had a good start."""
RESTART_DELAY_MIN_S = 0.1
RESTART_DELAY_MAX_S = 5.0
KILL_DEADLINE_S = 10.0
JOB_DEADLINE_MIN_S = 0.001


class SlotState(Enum):
    """What is in the place now."""

    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    """Killed, and not gone yet."""
    WAITING = "waiting"
    """For its next start."""
    STOPPED = "stopped"


class WorkerSlot:
    """Belongs to one event loop. `on_change` is called when a worker is ready, has ended, or has
    done a job."""

    def __init__(
        self,
        command: WorkerCommand,
        *,
        jobs_max: int,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._command = command
        self._jobs_max = jobs_max
        self._loop = loop
        self._clock = clock
        self._on_change = on_change
        self.state = SlotState.STOPPED
        self.is_settled: asyncio.Future[None] = loop.create_future()
        """The first start has come to something, good or bad."""
        self.restarts = 0
        self._process: WorkerProcess | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[int, WorkerTask] = {}
        self._next_number = 1
        self._is_stopping = False
        self._could_start = True
        self._failures = 0
        self._ready_at_s: float | None = None
        """None until the worker of now is ready."""
        self._tick = 0
        self._silent_ticks: int | None = None
        """Since a ping that nothing has followed; None if there is none."""
        self._problem = ""
        """What was wrong with the last worker that ended, until another one is ready."""
        self._reason = ""
        """Why the worker of now is to end, where somebody knows better than its exit code."""
        self._usage = WorkerUsage()
        self._past_usage = WorkerUsage()

    @property
    def is_hopeful(self) -> bool:
        """There is a worker, or there will soon be: its last start was good."""
        return self.is_ready or (self._could_start and self.state is not SlotState.STOPPED)

    @property
    def has_room(self) -> bool:
        return self.free_places > 0

    @property
    def free_places(self) -> int:
        """Jobs that its worker could be given now."""
        return self._jobs_max - len(self._tasks) if self.is_ready else 0

    @property
    def is_ready(self) -> bool:
        return self.state is SlotState.READY

    @property
    def tasks(self) -> list[WorkerTask]:
        """The jobs that its worker has."""
        return list(self._tasks.values())

    @property
    def load_blocks(self) -> int:
        """Blocks of the jobs that its worker has."""
        return sum(task.blocks for task in self._tasks.values())

    def start(self) -> None:
        """Start a worker; from now on there is one, or there will be."""
        self.state = SlotState.STARTING
        self._ready_at_s = None
        self._reason = ""
        try:
            self._process = WorkerProcess(
                self._command, loop=self._loop, on_message=self._take, on_end=self._note_end
            )
        except OSError as error:
            self._note_end(f"no process: {error.strerror or error}")
            return
        self._set_timer(START_DEADLINE_S, self._kill, "did not start in time")

    def give(self, task: WorkerTask) -> None:
        """Let the worker do a job. There must be room."""
        assert self.has_room, self.state
        assert self._process is not None
        number = self._next_number
        self._next_number = number % 0xFFFF_FFFF + 1
        now_s = self._clock()
        task.slot = self
        task.order.deadline_s = max(task.due_s - now_s, JOB_DEADLINE_MIN_S)
        self._tasks[number] = task
        late_s = task.order.deadline_s + GRACE_S
        task.set_timer(self._loop.call_later(late_s, self.give_up, task))
        self._process.send(number, task.order, task.descriptor)

    def give_up(self, task: WorkerTask) -> None:
        """Cancel a job that the worker has; a worker that does not obey is killed."""
        if task.is_given_up or task.ended.done():
            return
        assert self._process is not None
        task.is_given_up = True
        number = next(number for number, one in self._tasks.items() if one is task)
        task.set_timer(self._loop.call_later(CANCEL_ANSWER_S, self._kill, "did not give up a job"))
        self._process.send(number, CancelJob())

    async def stop(self, deadline_s: float) -> None:
        """End the worker, once the nodes have what it sent; kill it after `deadline_s`. Its jobs
        end. May be called again."""
        self._is_stopping = True
        if self._process is None:
            self._set_timer(None)
            self.state = SlotState.STOPPED
            return
        process = self._process
        process.send(0, Finish())
        for patience_s in (deadline_s, KILL_DEADLINE_S):
            try:
                async with asyncio.timeout(patience_s):
                    await process.wait()
                return
            except TimeoutError:
                process.kill()
        log.error("worker pid=%d: the kernel does not end it", process.pid)

    def describe(self) -> dict[str, Any]:
        """For `cachalot status`: JSON. Figures are of all workers that were in this place."""
        usage = self._past_usage.plus(self._usage)
        moved_gb = (usage.fetched_bytes + usage.saved_bytes) / 1e9
        return {
            "pid": None if self._process is None else self._process.pid,
            "state": self.state.value,
            "running": len(self._tasks),
            "restarts": self.restarts,
            "problem": self._problem,
            "cpu_s": round(usage.cpu_s, 3),
            "cpu_s_per_gb": round(usage.cpu_s / moved_gb, 3) if moved_gb else None,
            "jobs": usage.jobs,
            "fetched_bytes": usage.fetched_bytes,
            "saved_bytes": usage.saved_bytes,
            **asdict(usage.counters),
        }

    def _take(self, number: int, report: ReportMessage) -> None:
        self._silent_ticks = None
        if isinstance(report, Started):
            self._note_start()
        elif isinstance(report, StartFailed):
            self._reason = report.problem
        elif isinstance(report, Pong):
            self._usage = report.usage
        else:
            self._usage = report.usage
            self._tasks.pop(number).end(report)
            self._on_change()

    def _note_start(self) -> None:
        if self.state is not SlotState.STARTING:
            return  # it was killed for having been too slow
        self.state = SlotState.READY
        self._could_start = True
        self._problem = ""
        self._ready_at_s = self._clock()
        self._tick = 0
        self._set_timer(TICK_S, self._beat)
        self._settle()
        self._on_change()

    def _beat(self) -> None:
        """Is the worker still there? Once a tick."""
        assert self._process is not None
        self._tick += 1
        if self._silent_ticks is not None:
            self._silent_ticks += 1
            if self._silent_ticks >= LOST_TICKS:
                self._kill("does not answer")
                return
        elif self._tick % PING_TICKS == 0:
            self._silent_ticks = 0
            self._process.send(0, Ping())
        self._set_timer(TICK_S, self._beat)

    def _kill(self, reason: str) -> None:
        assert self._process is not None
        log.warning("worker pid=%d %s: it is killed", self._process.pid, reason)
        self.state = SlotState.ENDING
        self._reason = reason
        self._process.kill()

    def _note_end(self, how: str) -> None:
        pid = None if self._process is None else self._process.pid
        self._process = None
        self._silent_ticks = None
        self._past_usage = self._past_usage.plus(self._usage)
        self._usage = WorkerUsage()
        lost = list(self._tasks.values())
        self._tasks.clear()
        if self._is_stopping:
            self._set_timer(None)
            self.state = SlotState.STOPPED
        else:
            self._plan_restart(pid, how, len(lost))
        for task in lost:
            task.end(None)
        self._settle()
        self._on_change()

    def _plan_restart(self, pid: int | None, how: str, lost: int) -> None:
        ready_at_s = self._ready_at_s
        is_steady = ready_at_s is not None and self._clock() - ready_at_s >= STEADY_S
        self._could_start = ready_at_s is not None
        self._failures = 0 if is_steady else self._failures + 1
        delay_s = plan_restart_delay_s(self._failures)
        self.restarts += 1
        self._problem = self._reason or how
        self.state = SlotState.WAITING
        self._set_timer(delay_s, self.start)
        log.warning(
            "%s worker pid=%s ended (%s), jobs lost=%d: another one in %.1f s",
            self._command.kind.value,
            pid,
            self._problem,
            lost,
            delay_s,
        )

    def _settle(self) -> None:
        if not self.is_settled.done():
            self.is_settled.set_result(None)

    def _set_timer(
        self, delay_s: float | None, callback: Callable[..., None] | None = None, *given: object
    ) -> None:
        """The one timer of the slot: for the start, for the next tick, or for the next start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None and callback is not None:
            self._timer = self._loop.call_later(delay_s, callback, *given)


def plan_restart_delay_s(failures: int) -> float:
    """How long to wait after so many lives in a row that were short; doubles with each."""
    return min(RESTART_DELAY_MIN_S * (1 << min(max(failures - 1, 0), 16)), RESTART_DELAY_MAX_S)
