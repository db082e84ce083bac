"""A few threads that take jobs from one line. Not for jobs that must not wait for one another."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")
Job = Callable[[], None]

log = logging.getLogger(__name__)


class WorkThreads:
    """`count` threads that run jobs in the order in which they came. Close them.

    All of them are started at once: a system that has no more threads says so here, and not to the
    engine's thread when it has the first job.

    A job that raises is a mistake in the program: its thread ends, with a traceback on stderr, and
    `submit` says so from then on. What a job of `call` raises goes to its future.
    """

    def __init__(self, name: str, *, count: int, clock: Callable[[], float]) -> None:
        """Raises RuntimeError if the system gives no thread; those begun before it end."""
        assert count > 0, count
        self._clock = clock
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = Lock()
        self._is_closed = False
        # Daemons: a store that never answers must not keep a process from ending.
        self._threads = [
            Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._end_all()
            raise

    def submit(self, job: Job) -> bool:
        """Put a job in line; False after `close`: it will not be run."""
        with self._lock:
            if self._is_closed:
                return False
            assert self.is_whole, "a thread of this group has died; its traceback is on stderr"
            self._jobs.put(job)
        return True

    def call(
        self,
        function: Callable[Arguments, ResultT],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[ResultT]:
        """Put a call in line: its result, or its error. Not after `close`, and the future must not
        be cancelled."""
        future: Future[ResultT] = Future()

        def job() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        is_in_line = self.submit(job)
        assert is_in_line, "the threads are closed"
        return future

    @property
    def is_whole(self) -> bool:
        """Whether no thread has ended."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self, deadline_s: float) -> bool:
        """Run what is in line and end; False if a job took longer: its thread is left behind, which
        the log tells. May be called again."""
        end_s = self._clock() + deadline_s
        with self._lock:
            if not self._is_closed:
                self._end_all()
            self._is_closed = True
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        busy = [thread.name for thread in self._threads if thread.is_alive()]
        if busy:
            log.error(
                "threads left behind, still at work after their deadline: %s", ", ".join(busy)
            )
        return not busy

    def _end_all(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds must not live until the next one comes
