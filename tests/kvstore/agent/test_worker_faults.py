"""What becomes of a job whose worker dies, stops, or cannot start; with real processes.

A fetch is held in its middle by nodes that stand still.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.agent import worker_group, worker_slot
from kvstore.agent.workers import WorkerPool
from kvstore.agent_messages import FetchEnded
from kvstore.arena.progress import ProgressReader
from kvstore.client import StoreClient
from tests.kvstore.agent.arena_runs import (
    Arena,
    ArenaRun,
    SectionedBlocks,
    is_running,
    new_arena,
    running_pool,
    workers_of,
)
from tests.patience import OPERATION_S, PATIENCE_S

SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
NO_DEADLINE_S = 600.0
"""Of a job that must end for another reason."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes, code 2+1, that tests stop and let go on."""
    folder = tmp_path_factory.mktemp("worker-faults")
    with LocalCluster.start(
        folder / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20, segment_size_bytes=8 << 20
    ) as it:
        yield it


@pytest.fixture
async def stored(cluster: LocalCluster) -> SectionedBlocks:
    """130 blocks that the nodes have: three spans, the last one begun."""
    blocks = SectionedBlocks(130, sections=(4096, 8192), seed=81)
    async with StoreClient.connect(cluster.cluster_path) as client:
        await blocks.save(client)
    return blocks


@pytest.fixture
def arena() -> Iterator[Arena]:
    with new_arena(16 << 20) as it:
        yield it


@pytest.fixture
async def pool(cluster: LocalCluster, arena: Arena) -> AsyncIterator[WorkerPool]:
    """One fetch worker."""
    async with running_pool(cluster.cluster_path, arena) as it:
        yield it


@pytest.fixture
async def storing_pool(cluster: LocalCluster, arena: Arena) -> AsyncIterator[WorkerPool]:
    """One fetch worker and a store worker."""
    async with running_pool(cluster.cluster_path, arena, has_store=True) as it:
        yield it


@contextmanager
def still_nodes(cluster: LocalCluster) -> Iterator[None]:
    """Two of three nodes answer nothing, so that nothing can be read or written."""
    nodes = cluster.node_names[:2]
    for node in nodes:
        cluster.kill(node, signal.SIGSTOP)
    try:
        yield
    finally:
        for node in nodes:
            cluster.kill(node, signal.SIGCONT)


async def wait_until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.02)


async def begin_fetch(
    pool: WorkerPool, run: ArenaRun, deadline_s: float = NO_DEADLINE_S
) -> asyncio.Task[FetchEnded]:
    """A fetch that a worker has in hand, beside those that it had."""
    before = pool.describe()["fetch"]["running"]
    task = asyncio.ensure_future(pool.fetch(run.fetch_job(deadline_s=deadline_s), run.waker))
    await wait_until(lambda: pool.describe()["fetch"]["running"] > before)
    assert not task.done()
    return task


def lines(pool: WorkerPool) -> tuple[int, int]:
    """Fetches that workers have in hand, and those that wait."""
    described = pool.describe()["fetch"]
    return described["running"], described["queued"]


async def expect_untouched(run: ArenaRun) -> None:
    """Nobody writes into the run any more."""
    run.memory.view[:] = b"\x5a" * len(run.memory.view)
    await asyncio.sleep(0.5)
    assert np.all(np.frombuffer(run.memory.view, np.uint8) == 0x5A)


async def fetch_when_served(pool: WorkerPool, run: ArenaRun) -> None:
    """The whole chain, as soon as there is a worker again."""
    due_s = time.monotonic() + PATIENCE_S
    ended = FetchEnded(blocks=0, ended="")
    while ended.blocks < run.blocks.count and time.monotonic() < due_s:
        ended = await pool.fetch(run.fetch_job(deadline_s=5.0), run.waker)
        await asyncio.sleep(0.1)
    assert ended.blocks == run.blocks.count
    assert run.holds(run.blocks.count)


def until_lost_s(number: signal.Signals) -> float:
    """Deadline of a job that is to end because of what befalls its worker, and not before."""
    return NO_DEADLINE_S if number == signal.SIGKILL else 4.0


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
async def test_fetch_ends_with_nothing_when_its_worker_is_lost(
    cluster: LocalCluster,
    stored: SectionedBlocks,
    arena: Arena,
    pool: WorkerPool,
    number: signal.Signals,
) -> None:
    run = arena.run(stored)
    pid = workers_of(pool)[0]["pid"]
    with still_nodes(cluster):
        # A killed worker is noticed at once; a stopped one by deadline, grace, and patience.
        task = await begin_fetch(pool, run, until_lost_s(number))
        os.kill(pid, number)
        ended = await asyncio.wait_for(task, PATIENCE_S)
        assert (ended.blocks, ended.ended) == (0, "deadline")
        assert not is_running(pid)
        assert ProgressReader(run.memory).is_ended
        assert run.wakes() > 0
    await expect_untouched(run)
    assert pool.describe()["fetch"]["lost"] == 1
    await fetch_when_served(pool, run)
    (worker,) = workers_of(pool)
    assert worker["restarts"] == 1
    assert worker["pid"] != pid


async def test_every_piece_ends_when_one_of_two_workers_is_lost(
    cluster: LocalCluster, stored: SectionedBlocks, arena: Arena
) -> None:
    run = arena.run(stored)
    async with running_pool(cluster.cluster_path, arena, workers=2) as pool:
        with still_nodes(cluster):
            task = await begin_fetch(pool, run)
            await wait_until(lambda: pool.describe()["fetch"]["running"] == 2)
            first, second = (worker["pid"] for worker in workers_of(pool))
            os.kill(first, signal.SIGKILL)
            ended = await asyncio.wait_for(task, PATIENCE_S)
        assert (ended.blocks, ended.ended) == (0, "deadline")
        assert ProgressReader(run.memory).is_ended
        await expect_untouched(run)
        # The other one gave up what nobody can use any more, and lives on.
        assert workers_of(pool)[1]["pid"] == second
        await fetch_when_served(pool, run)


async def test_cancelled_fetch_returns_when_nothing_is_written_any_more(
    cluster: LocalCluster, stored: SectionedBlocks, arena: Arena, pool: WorkerPool
) -> None:
    run = arena.run(stored)
    pid = workers_of(pool)[0]["pid"]
    with still_nodes(cluster):
        task = await begin_fetch(pool, run)
        task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert ProgressReader(run.memory).is_ended
    await expect_untouched(run)
    await fetch_when_served(pool, run)
    assert workers_of(pool)[0]["pid"] == pid


@pytest.mark.slow
async def test_cancelled_fetch_kills_the_worker_that_does_not_give_it_up(
    cluster: LocalCluster,
    stored: SectionedBlocks,
    arena: Arena,
    pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_slot, "CANCEL_ANSWER_S", 4.0)
    run, other = arena.run(stored), arena.run(stored)
    pid = workers_of(pool)[0]["pid"]
    with still_nodes(cluster):
        task = await begin_fetch(pool, run)
        beside = await begin_fetch(pool, other)
        os.kill(pid, signal.SIGSTOP)
        task.cancel()
        # Impatience does not make it return while the worker could still write.
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.1)
        assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_S)
        assert not is_running(pid)
        ended = await asyncio.wait_for(beside, PATIENCE_S)
        assert (ended.blocks, ended.ended) == (0, "deadline")
    await expect_untouched(run)
    await fetch_when_served(pool, run)


async def test_cancelled_fetch_that_waits_leaves_the_queue(
    cluster: LocalCluster, stored: SectionedBlocks, arena: Arena, pool: WorkerPool
) -> None:
    runs = [arena.run(stored, 2) for _ in range(9)]
    with still_nodes(cluster):
        jobs = [run.fetch_job(keys=b"".join(stored.keys[:2])) for run in runs]
        tasks = [
            asyncio.ensure_future(pool.fetch(job, run.waker))
            for job, run in zip(jobs, runs, strict=True)
        ]
        await wait_until(lambda: pool.describe()["fetch"]["queued"] == 1)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.cancelled() for task in tasks)
    described = pool.describe()["fetch"]
    assert (described["queued"], described["running"], described["cancelled"]) == (0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
async def test_save_counts_as_failed_when_its_worker_is_lost(
    cluster: LocalCluster, arena: Arena, storing_pool: WorkerPool, number: signal.Signals
) -> None:
    blocks = SectionedBlocks(70, sections=(4096, 8192), seed=int(number) + 82)
    run = arena.run(blocks)
    run.fill()
    pid = workers_of(storing_pool, "store")[0]["pid"]
    with still_nodes(cluster):
        task = asyncio.ensure_future(
            storing_pool.store(run.store_job(deadline_s=until_lost_s(number)))
        )
        await wait_until(lambda: storing_pool.describe()["store"]["running"] == 1)
        os.kill(pid, number)
        ended = await asyncio.wait_for(task, PATIENCE_S)
    assert (ended.stored, ended.known, ended.failed) == (0, 0, 70)
    assert not is_running(pid)
    # Fetches were not disturbed, and the next save finds a new worker.
    assert workers_of(storing_pool)[0]["restarts"] == 0
    again = await storing_pool.store(run.store_job(deadline_s=OPERATION_S))
    assert again.failed == 0


async def test_stopped_worker_is_replaced_also_when_it_has_no_job(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_slot, "TICK_S", 0.1)
    pid = workers_of(pool)[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    await wait_until(lambda: workers_of(pool)[0]["pid"] not in (pid, None))
    (worker,) = workers_of(pool)
    assert worker["pid"] != pid
    assert worker["restarts"] == 1
    assert not is_running(pid)


class AtKill(logging.Handler):
    """Calls something at the moment in which a worker is killed."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        if "it is killed" in record.getMessage():
            self._call()


async def test_job_that_comes_while_its_worker_is_being_killed_waits_for_the_next_one(
    stored: SectionedBlocks, arena: Arena, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_slot, "TICK_S", 0.1)
    run = arena.run(stored)
    tasks: list[asyncio.Task[FetchEnded]] = []
    at_kill = AtKill(
        lambda: tasks.append(asyncio.create_task(pool.fetch(run.fetch_job(), run.waker)))
    )
    worker_slot.log.addHandler(at_kill)
    try:
        os.kill(workers_of(pool)[0]["pid"], signal.SIGSTOP)
        await wait_until(lambda: tasks)
        async with asyncio.timeout(PATIENCE_S):
            assert (await tasks[0]).blocks == stored.count
    finally:
        worker_slot.log.removeHandler(at_kill)
    assert pool.describe()["fetch"]["lost"] == 0


async def test_agent_that_was_stopped_itself_does_not_replace_its_workers(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_slot, "TICK_S", 0.3)
    pid = workers_of(pool)[0]["pid"]
    # The first ping is on its way, or will be; then this process does nothing for longer than a
    # worker may be silent.
    await asyncio.sleep(1.0 + 0.3 + 0.1)
    time.sleep(0.3 * worker_slot.LOST_TICKS + 0.3)
    await asyncio.sleep(0.5)
    (worker,) = workers_of(pool)
    assert (worker["pid"], worker["restarts"]) == (pid, 0)


@pytest.mark.slow
async def test_full_queue_refuses_at_once(
    cluster: LocalCluster,
    stored: SectionedBlocks,
    arena: Arena,
    pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_group, "WAITING_JOBS_MAX", 40)  # of one session 20
    runs = [arena.run(stored, 2) for _ in range(8 + 20 + 3)]
    with still_nodes(cluster):
        keys = b"".join(stored.keys[:2])
        tasks = [
            asyncio.ensure_future(
                pool.fetch(
                    run.fetch_job(keys=keys, deadline_s=NO_DEADLINE_S if number < 8 else 4.0),
                    run.waker,
                )
            )
            for number, run in enumerate(runs)
        ]
        refused = await asyncio.gather(*tasks[-3:])
        assert {(one.blocks, one.ended) for one in refused} == {(0, "deadline")}
        assert lines(pool) == (8, 20)
        waited = await asyncio.gather(*tasks[8:-3])
        assert {(one.blocks, one.ended) for one in waited} == {(0, "deadline")}
        for task in tasks[:8]:
            task.cancel()
        await asyncio.wait(tasks[:8])
    described = pool.describe()["fetch"]
    assert described["refused"] == 3
    assert described["overdue"] == 20
    assert all(ProgressReader(run.memory).is_ended for run in runs)


async def test_session_with_long_fetches_leaves_places_to_others(
    cluster: LocalCluster, stored: SectionedBlocks, arena: Arena, pool: WorkerPool
) -> None:
    """One engine took all places of the worker, for as long as its deadlines."""
    runs = [arena.run(stored, 2) for _ in range(40)]
    keys = b"".join(stored.keys[:2])
    with still_nodes(cluster):
        hog = [
            asyncio.ensure_future(pool.fetch(run.fetch_job(keys=keys, owner=1), run.waker))
            for run in runs[:30]
        ]
        await wait_until(lambda: lines(pool) == (8, 22))
        others = [
            asyncio.ensure_future(pool.fetch(run.fetch_job(keys=keys, owner=owner), run.waker))
            for owner, run in enumerate(runs[30:33], 2)
        ]
        await wait_until(lambda: lines(pool) == (11, 22))
        for task in hog:
            task.cancel()
        await asyncio.wait(hog)
    assert [(await task).blocks for task in others] == [2, 2, 2]


async def test_pool_without_a_map_answers_at_once_and_serves_when_there_is_one(
    cluster: LocalCluster, stored: SectionedBlocks, arena: Arena, tmp_path: Path
) -> None:
    run = arena.run(stored)
    late_path = tmp_path / "late.toml"
    async with running_pool(late_path, arena, has_store=True) as pool:
        async with asyncio.timeout(PATIENCE_S):
            ended = await pool.fetch(run.fetch_job(deadline_s=NO_DEADLINE_S), run.waker)
            saved = await pool.store(run.store_job(deadline_s=NO_DEADLINE_S))
        assert (ended.blocks, ended.ended) == (0, "deadline")
        assert saved.failed == 130
        assert "no cluster map" in workers_of(pool)[0]["problem"]
        shutil.copy(cluster.cluster_path, late_path)
        await fetch_when_served(pool, run)
        assert workers_of(pool)[0]["problem"] == ""


async def test_job_that_the_client_refuses_leaves_its_worker_alone(
    stored: SectionedBlocks, arena: Arena, storing_pool: WorkerPool
) -> None:
    run = arena.run(stored)
    run.fill()
    pid = workers_of(storing_pool, "store")[0]["pid"]
    ended = await storing_pool.store(run.store_job(ttl_class="No Such Class"))
    assert ended.failed == 130
    assert (await storing_pool.store(run.store_job(deadline_s=OPERATION_S))).known == 130
    assert workers_of(storing_pool, "store")[0]["pid"] == pid


async def test_stopping_pool_lets_a_save_end_and_leaves_no_process(
    cluster: LocalCluster, arena: Arena
) -> None:
    blocks = SectionedBlocks(100, sections=(4096, 8192), seed=83)
    source = arena.run(blocks)
    source.fill()
    async with running_pool(cluster.cluster_path, arena, workers=2, has_store=True) as pool:
        pids = [worker["pid"] for kind in ("fetch", "store") for worker in workers_of(pool, kind)]
        task = asyncio.ensure_future(pool.store(source.store_job()))
        await asyncio.sleep(0)
    assert (await task).stored == 100
    assert [pid for pid in pids if is_running(pid)] == []
    ended = await pool.fetch(source.fetch_job(first_block=100), source.waker)
    assert ended.blocks == 0


async def test_stopping_pool_kills_what_does_not_end(
    cluster: LocalCluster, stored: SectionedBlocks, arena: Arena
) -> None:
    run = arena.run(stored)
    async with running_pool(cluster.cluster_path, arena) as pool:
        pid = workers_of(pool)[0]["pid"]
        task = asyncio.ensure_future(pool.fetch(run.fetch_job(deadline_s=60.0), run.waker))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            await pool.stop(0.5)
        assert (await task).ended in ("deadline", "complete")
    assert not is_running(pid)


def test_restart_delay_doubles_up_to_five_seconds() -> None:
    delays = [worker_slot.plan_restart_delay_s(failures) for failures in range(9)]
    assert delays == [0.1, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert worker_slot.plan_restart_delay_s(10**6) == 5.0
