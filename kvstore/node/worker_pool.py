"""Threads for what would hold up the event loop: a fixed number; their results are polled."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True, slots=True)
class Completion:
    """What a job returned or raised, and who wants to know."""

    deliver: Callable[[Completion], None]
    value: Any = None
    error: BaseException | None = None


class WorkerPool:
    """Runs jobs in threads. `wakeup` is a descriptor that is readable while results wait.

    The queue is as long as there are callers: a connection has at most one job under way, and so
    has each thing that the loop does by the clock.
    """

    def __init__(self, threads: int) -> None:
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Callable[[Completion], None]] | None]
        self._jobs = SimpleQueue()
        self._done: deque[Completion] = deque()
        self._threads = [
            threading.Thread(target=self._run, name=f"disk-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], Any], deliver: Callable[[Completion], None]) -> None:
        """Run `call` in a thread; `take_done` returns its Completion later."""
        self._jobs.put((call, deliver))

    def take_done(self) -> list[Completion]:
        """Everything that finished since the last call."""
        try:
            os.eventfd_read(self.wakeup)
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """End the threads. No job may be under way."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self.wakeup)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, deliver = job
            try:
                completion = Completion(deliver, value=call())
            except BaseException as error:
                # Not handled here: the loop raises what is not an OSError, and the process ends.
                completion = Completion(deliver, error=error)
            self._done.append(completion)
            os.eventfd_write(self.wakeup, 1)
