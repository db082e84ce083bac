"""Fetches into runs and saves out of them, by real workers from real nodes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.agent.workers import WorkerPool
from kvstore.arena.progress import ProgressReader, begin_table
from kvstore.arena.run_layout import RunLayout
from kvstore.client import StoreClient
from kvstore.errors import InvalidArgument, StoreError
from tests.kvstore.agent.arena_runs import (
    SectionedBlocks,
    new_arena,
    running_pool,
    workers_of,
)
from tests.patience import OPERATION_S

ROOT = Path(__file__).resolve().parents[3]

# Maps the arena like an engine: sleeps on its wake-ups, and copies a section once it is ready.
READER = """
import select, sys
from kvstore.agent.workers import WorkerPool
from kvstore.arena.progress import ProgressReader, begin_table
from kvstore.arena.region import ArenaRegion
from kvstore.arena.run_layout import RunLayout
from kvstore.arena.wakeup import drain
from kvstore.layout import BlockLayout, Section
arena, wakeup, offset, blocks = map(int, sys.argv[1:5])
layout = BlockLayout(tuple(Section(f"s{i}", int(n)) for i, n in enumerate(sys.argv[5:])))
run = ArenaRegion(arena).run(offset, RunLayout(layout, blocks))
sys.stdout.write("listening\\n")
sys.stdout.flush()
waits, reader = 0, None
while reader is None or reader.ready_blocks(3) < blocks:
    assert select.select([wakeup], [], [], 20)[0], "nobody woke me"
    assert drain(wakeup)
    waits += 1
    reader = ProgressReader(run)
    whole = reader.whole_blocks
    assert all(reader.ready_blocks(s) >= whole for s in range(4))
import hashlib
sys.stdout.write(hashlib.sha256(run.section(3)).hexdigest() + f" {waits}\\n")
"""


@pytest.fixture
async def stored(cluster_path: str) -> SectionedBlocks:
    """200 blocks that the nodes have: four spans, the last one begun."""
    blocks = SectionedBlocks(200, seed=71)
    async with StoreClient.connect(cluster_path) as client:
        await blocks.save(client)
    return blocks


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("is_by_layer", [False, True])
async def test_fetch_equals_what_was_saved_byte_by_byte(
    cluster_path: str, stored: SectionedBlocks, workers: int, *, is_by_layer: bool
) -> None:
    with new_arena() as arena:
        run = arena.run(stored)
        async with running_pool(cluster_path, arena, workers=workers) as pool:
            ended = await pool.fetch(run.fetch_job(is_by_layer=is_by_layer), run.waker)
        assert (ended.blocks, ended.ended) == (200, "complete")
        assert run.holds(200)
        progress = ProgressReader(run.memory)
        assert progress.is_ended
        assert progress.whole_blocks == 200
        assert run.wakes() > 0


async def test_fetch_puts_a_later_part_of_the_chain_at_the_start_of_the_run(
    cluster_path: str, stored: SectionedBlocks
) -> None:
    with new_arena() as arena:
        run = arena.run(stored, 130)
        async with running_pool(cluster_path, arena, workers=2) as pool:
            ended = await pool.fetch(run.fetch_job(first_block=75), run.waker)
        assert (ended.blocks, ended.ended) == (125, "complete")
        assert run.holds(125, first=75)


async def test_job_of_no_blocks_needs_no_worker(stored: SectionedBlocks, tmp_path: Path) -> None:
    with new_arena() as arena:
        run = arena.run(stored)
        begin_table(run.memory, [(0, 200)])
        async with running_pool(tmp_path / "none", arena) as pool:
            fetched = await pool.fetch(run.fetch_job(first_block=200), run.waker)
            saved = await pool.store(run.store_job(first_block=200))
        assert (fetched.blocks, fetched.ended) == (0, "complete")
        assert (saved.stored, saved.failed) == (0, 0)
        with pytest.raises(StoreError, match="no progress table"):
            ProgressReader(run.memory)


async def test_fetch_ends_at_the_first_block_that_nobody_has(
    cluster_path: str, stored: SectionedBlocks
) -> None:
    async with StoreClient.connect(cluster_path) as client:
        keys = stored.keys[:71]
        assert await client.forget(stored.namespace, keys, first_block=70) == 1
    with new_arena() as arena:
        run = arena.run(stored)
        async with running_pool(cluster_path, arena, workers=2) as pool:
            ended = await pool.fetch(run.fetch_job(deadline_s=OPERATION_S), run.waker)
        assert (ended.blocks, ended.ended) == (70, "too few shards")
        assert run.holds(70)
        assert ProgressReader(run.memory).is_ended


async def test_long_fetch_is_shared_by_two_workers(
    cluster_path: str, stored: SectionedBlocks
) -> None:
    with new_arena() as arena:
        run = arena.run(stored)
        async with running_pool(cluster_path, arena, workers=2) as pool:
            await pool.fetch(run.fetch_job(), run.waker)
            shares = [worker["blocks_fetched"] for worker in workers_of(pool)]
        assert sorted(shares) == [72, 128]


async def test_another_process_sees_sections_become_ready(
    cluster_path: str, stored: SectionedBlocks
) -> None:
    with new_arena() as arena:
        run = arena.run(stored)
        sizes = [str(one.bytes) for one in stored.namespace.layout.sections]
        words = [arena.descriptor, run.wakeup, run.offset, 200]
        with subprocess.Popen(
            [sys.executable, "-c", READER, *map(str, words), *sizes],
            stdout=subprocess.PIPE,
            pass_fds=[arena.descriptor, run.wakeup],
            cwd=ROOT,
            text=True,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "listening\n"
            async with running_pool(cluster_path, arena, workers=2) as pool:
                await pool.fetch(run.fetch_job(), run.waker)
            assert select.select([reader.stdout], [], [], 20)[0], "the reader saw nothing"
            digest, waits = reader.stdout.readline().split()
        assert digest == _sha256(bytes(stored.section(3, 0, 200)))
        # It did not sleep until everything was there.
        assert int(waits) > 1


async def test_save_out_of_a_run_can_be_fetched(cluster_path: str) -> None:
    blocks = SectionedBlocks(70, seed=72)
    with new_arena() as arena:
        source, target = arena.run(blocks), arena.run(blocks)
        source.fill()
        async with running_pool(cluster_path, arena, has_store=True) as pool:
            ended = await pool.store(source.store_job(deadline_s=OPERATION_S))
            assert (ended.stored, ended.known, ended.failed) == (70, 0, 0)
            again = await pool.store(source.store_job(deadline_s=OPERATION_S))
            assert (again.stored, again.known, again.failed) == (0, 70, 0)
            fetched = await pool.fetch(target.fetch_job(deadline_s=OPERATION_S), target.waker)
            described = pool.describe()
        assert fetched.blocks == 70
        assert target.holds(70)
        assert described["store"]["stored"] == 70
        assert described["store"]["bytes"] == described["fetch"]["bytes"] == 70 * 113_920
        assert workers_of(pool, "store")[0]["saved_bytes"] == 70 * 113_920


async def test_many_short_jobs_leave_no_descriptors(
    cluster_path: str, stored: SectionedBlocks
) -> None:
    with new_arena() as arena:
        runs = [arena.run(stored, 2) for _ in range(20)]
        async with running_pool(cluster_path, arena, workers=2) as pool:

            async def fetch_ten_times(number: int) -> None:
                run = runs[number]
                for first in range(0, 100, 10):
                    job = run.fetch_job(keys=_keys(stored, first + 2), first_block=first)
                    ended = await pool.fetch(job, run.waker)
                    assert ended.blocks == 2, ended
                    assert run.holds(2, first=first)

            async def fetch_all() -> None:
                await asyncio.gather(*(fetch_ten_times(number) for number in range(20)))

            await fetch_all()
            before = _descriptors(pool)
            ours = len(os.listdir("/proc/self/fd"))
            await fetch_all()
            assert _descriptors(pool) == before
            assert len(os.listdir("/proc/self/fd")) == ours
            assert pool.describe()["fetch"]["done"] == 400


async def test_workers_report_their_cost(cluster_path: str, stored: SectionedBlocks) -> None:
    with new_arena() as arena:
        run = arena.run(stored)
        async with running_pool(cluster_path, arena) as pool:
            await pool.fetch(run.fetch_job(), run.waker)
            (worker,) = workers_of(pool)
            assert pool.describe()["fetch"]["bytes"] == 200 * 113_920
        assert worker["state"] == "ready"
        assert worker["jobs"] == 1
        assert worker["fetched_bytes"] == 200 * 113_920
        assert worker["blocks_fetched"] == 200
        assert 0 < worker["cpu_s"] < 60
        assert worker["cpu_s_per_gb"] == pytest.approx(worker["cpu_s"] / 0.022784, rel=0.01)


async def test_run_outside_the_arena_is_refused(cluster_path: str, stored: SectionedBlocks) -> None:
    with new_arena(RunLayout(stored.namespace.layout, 200).run_bytes) as arena:
        run = arena.run(stored)
        async with running_pool(cluster_path, arena, has_store=True) as pool:
            for offset in (4096, -4096, 1 << 40, 100):
                with pytest.raises(InvalidArgument):
                    await pool.fetch(run.fetch_job(run_offset=offset), run.waker)
                with pytest.raises(InvalidArgument):
                    await pool.store(run.store_job(run_offset=offset))


def test_job_of_more_blocks_than_its_run_is_refused() -> None:
    blocks = SectionedBlocks(8, seed=73)
    with new_arena() as arena:
        run = arena.run(blocks, 4)
        assert run.fetch_job(first_block=4).blocks == 4
        for first_block in (-1, 3, 9):
            with pytest.raises(InvalidArgument):
                run.fetch_job(first_block=first_block)
        with pytest.raises(InvalidArgument, match="whole keys"):
            run.fetch_job(keys=bytes(33))


def _keys(blocks: SectionedBlocks, count: int) -> bytes:
    return b"".join(blocks.keys[:count])


def _descriptors(pool: WorkerPool) -> list[int]:
    return [len(os.listdir(f"/proc/{worker['pid']}/fd")) for worker in workers_of(pool)]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
