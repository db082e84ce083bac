"""A few threads that take jobs from one line. Not for jobs that must not wait for one another."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

Job = Callable[[], None]


class WorkThreads:
    """`count` threads that run jobs in the order in which they came. Close them.

    A job that raises is a mistake in the program: its thread ends, with a traceback on stderr, and
    `submit` says so from then on.
    """

    def __init__(self, name: str, *, count: int, clock: Callable[[], float]) -> None:
        assert count > 0, count
        self._clock = clock
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = Lock()
        self._is_closed = False
        # Daemons: a store that never answers must not keep a process from ending.
        self._threads = [
            Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """Put a job in line; False after `close`: it will not be run."""
        with self._lock:
            if self._is_closed:
                return False
            assert self.is_whole, "a thread of this group has died; its traceback is on stderr"
            self._jobs.put(job)
        return True

    @property
    def is_whole(self) -> bool:
        """Whether no thread has ended."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self, deadline_s: float) -> bool:
        """Run what is in line and end; False if a job took longer. May be called again."""
        end_s = self._clock() + deadline_s
        with self._lock:
            if not self._is_closed:
                for _ in self._threads:
                    self._jobs.put(None)
            self._is_closed = True
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds must not live until the next one comes
