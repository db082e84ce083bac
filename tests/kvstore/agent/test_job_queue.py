"""Whose job is next, and how much of the workers one session may have."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.agent.job_queue import JobQueue, may_have_more
from kvstore.agent.jobs import NamespaceSpec, SavePiece
from kvstore.agent.worker_task import WorkerTask

from .arena_runs import SectionedBlocks

PLACES = 16


def task_of(owner: int, loop: asyncio.AbstractEventLoop) -> WorkerTask:
    order = SavePiece(
        namespace=NamespaceSpec.of(BLOCKS.namespace),
        keys=b"",
        first_block=0,
        run_offset=0,
        run_blocks=1,
        ttl_class="chat",
        deadline_s=1.0,
    )
    return WorkerTask(order, owner=owner, blocks=1, due_s=1.0, descriptor=None, loop=loop)


BLOCKS = SectionedBlocks(1, sections=(2_048,), seed=1)


def take_all(queue: JobQueue, running: Counter[int], places: int = PLACES) -> list[WorkerTask]:
    """Hands out as a group does, until nobody may have more."""
    taken = []
    while (task := queue.take(running, places - running.total())) is not None:
        running[task.owner] += 1
        taken.append(task)
    return taken


async def test_session_alone_has_half_of_the_places() -> None:
    loop, queue, running = asyncio.get_running_loop(), JobQueue(), Counter[int]()
    tasks = [task_of(1, loop) for _ in range(20)]
    for task in tasks:
        queue.add(task)
    assert take_all(queue, running) == tasks[:8]
    assert len(queue) == 12
    running[1] -= 1
    assert take_all(queue, running) == [tasks[8]]


async def test_session_that_comes_when_another_one_floods_has_a_place_at_once() -> None:
    loop, queue, running = asyncio.get_running_loop(), JobQueue(), Counter[int]()
    for _ in range(100):
        queue.add(task_of(1, loop))
    take_all(queue, running)
    for owner in (2, 3, 4):
        queue.add(task_of(owner, loop))
        assert [task.owner for task in take_all(queue, running)] == [owner]


async def test_sessions_have_their_turn_whatever_the_number_of_their_jobs() -> None:
    loop, queue = asyncio.get_running_loop(), JobQueue()
    for owner in (1, 1, 1, 1, 2, 2, 3):
        queue.add(task_of(owner, loop))
    owners = [queue.take({}, 1) for _ in range(7)]
    assert [task.owner for task in owners if task] == [1, 2, 3, 1, 2, 1, 1]
    assert queue.take({}, 1) is None


async def test_session_fills_half_of_what_may_wait() -> None:
    loop, queue = asyncio.get_running_loop(), JobQueue()
    while queue.has_room(1, 100):
        queue.add(task_of(1, loop))
    assert len(queue) == 50
    assert queue.has_room(2, 100)


async def test_job_that_is_not_wanted_any_more_leaves() -> None:
    loop, queue = asyncio.get_running_loop(), JobQueue()
    first, second, third = (task_of(owner, loop) for owner in (1, 1, 2))
    for task in (first, second, third):
        queue.add(task)
    queue.remove(first)
    queue.remove(third)
    assert (len(queue), queue.take_any(), queue.take_any()) == (1, second, None)


@settings(deadline=None)
@given(
    asked=st.lists(st.integers(1, 4), max_size=60),
    ends=st.lists(st.integers(1, 4), max_size=60),
    places=st.integers(1, PLACES),
)
def test_nobody_is_kept_from_an_empty_pool_and_none_has_more_than_is_fair(
    asked: list[int], ends: list[int], places: int
) -> None:
    loop = asyncio.new_event_loop()
    queue, running, waiting = JobQueue(), Counter[int](), Counter(asked)

    def hand_out() -> None:
        waiting.subtract(task.owner for task in take_all(queue, running, places))
        free = places - running.total()
        assert all(running[owner] >= free for owner in waiting if waiting[owner])
        assert max(running.values(), default=0) <= (places + 1) // 2

    for owner in asked:
        queue.add(task_of(owner, loop))
    hand_out()
    for owner in ends:
        running[owner] = max(running[owner] - 1, 0)
        hand_out()
    assert len(queue) == waiting.total()
    loop.close()


def test_one_more_is_given_only_while_more_is_left_than_one_has() -> None:
    assert [may_have_more(own, 3) for own in range(5)] == [True, True, True, False, False]
    assert not may_have_more(0, 0)
