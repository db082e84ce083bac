"""Jobs that wait for a worker: whose turn it is, and how much of the workers a session may have.

Somebody must always be able to come: a session is given one more of something only while it has
less of it than is left. So one session alone has half at most, two have a third each, and so on; a
job takes up to an hour and cannot be stopped in favour of another, so nothing less would do. Among
the sessions that may, each has its turn. Pure.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

from .worker_task import WorkerTask


def may_have_more(own: int, left: int) -> bool:
    """Whether who has `own` of something may have one more of the `left` ones."""
    return own < left


class JobQueue:
    """Waiting jobs by the session that wants them, each session's in their order."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[int, deque[WorkerTask]] = OrderedDict()
        """First the session whose turn it is."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def has_room(self, owner: int, jobs_max: int) -> bool:
        """Whether one more job of the session may wait, if all of them may be `jobs_max`."""
        return may_have_more(len(self._by_owner.get(owner, ())), jobs_max - self._length)

    def add(self, task: WorkerTask) -> None:
        """Behind the other jobs of its session."""
        self._by_owner.setdefault(task.owner, deque()).append(task)
        self._length += 1

    def remove(self, task: WorkerTask) -> None:
        """The job, which must wait, does so no longer."""
        self._by_owner[task.owner].remove(task)
        self._note_gone(task.owner)

    def take(self, running_by_owner: Mapping[int, int], free_places: int) -> WorkerTask | None:
        """The next job that may have one of the free places; None if there is none."""
        for owner, tasks in self._by_owner.items():
            if may_have_more(running_by_owner.get(owner, 0), free_places):
                task = tasks.popleft()
                self._by_owner.move_to_end(owner)
                self._note_gone(owner)
                return task
        return None

    def take_any(self) -> WorkerTask | None:
        """Some job, to be ended; None if none waits."""
        owner = next(iter(self._by_owner), None)
        if owner is None:
            return None
        task = self._by_owner[owner].popleft()
        self._note_gone(owner)
        return task

    def _note_gone(self, owner: int) -> None:
        self._length -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]
