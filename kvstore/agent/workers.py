"""The agent's workers: fetches into runs of the arena and saves out of them, by other processes.

The agent itself moves no blocks. It believes only what workers report over their channels, never
what stands in the arena, where any engine may scribble.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..agent_messages import FetchEnded, StoreEnded
from ..arena.progress import ProgressWriter, begin_table, clear_table
from ..arena.region import ArenaRegion, RunMemory
from ..arena.wakeup import Waker
from ..client.results import FetchEnd
from ..cluster.placement import SPAN_BLOCKS
from ..key import KEY_BYTES
from .jobs import (
    FetchDone,
    FetchJob,
    FetchPiece,
    NamespaceSpec,
    SaveDone,
    SavePiece,
    StoreJob,
    WorkerKind,
)
from .piece_plan import PieceResult, PlannedPiece, combine_pieces, plan_pieces
from .worker_group import WorkerGroup
from .worker_process import WorkerCommand
from .worker_task import WorkerTask

FETCHES_PER_WORKER = 16
"""Of which one session has 8 at most (job_queue.py); more at a time bring no more."""
SAVES_PER_WORKER = 4
"""So that one session may have two: one is encoded while another waits for its nodes."""
STORE_NICENESS = 5
"""Somebody waits for a fetch, nobody for a save (docs/decisions/0025)."""


class WorkerPool:
    """Belongs to one event loop, in a thread that lives as long as the agent."""

    def __init__(
        self,
        *,
        cluster_path: Path,
        arena: int,
        fetch_workers: int,
        has_store_worker: bool,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        store_niceness: int = STORE_NICENESS,
        is_log_json: bool = False,
    ) -> None:
        """`arena` is the descriptor of an ArenaRegion, and stays the caller's. Both kinds of worker
        may be left out; a job for a kind that is not there ends at once, with nothing done."""
        self._loop = loop
        self._clock = clock
        self._region = ArenaRegion(arena)

        def make_group(kind: WorkerKind, workers: int, jobs: int, niceness: int) -> WorkerGroup:
            command = WorkerCommand(
                kind=kind,
                cluster_path=cluster_path.absolute(),
                arena=arena,
                niceness=niceness,
                is_log_json=is_log_json,
            )
            return WorkerGroup(
                command, workers=workers, jobs_per_worker=jobs, loop=loop, clock=clock
            )

        self._fetch = make_group(WorkerKind.FETCH, fetch_workers, FETCHES_PER_WORKER, 0)
        self._store = make_group(
            WorkerKind.STORE, int(has_store_worker), SAVES_PER_WORKER, store_niceness
        )
        self._is_stopped = False
        self._fetched = dict.fromkeys(
            ("blocks", "bytes", "decoded_blocks", "left_blocks", "rejected_shards"), 0
        )
        self._saved = {"stored": 0, "known": 0, "failed": 0, "degraded": 0, "bytes": 0}

    async def start(self) -> None:
        """Start all workers. One that cannot start, as for want of a cluster map, is no error: it
        is tried again, and until then its jobs end at once."""
        await asyncio.gather(self._fetch.start(), self._store.start())

    async def stop(self, deadline_s: float) -> None:
        """Let the jobs that run end, within `deadline_s`, and then all workers. Jobs that wait, and
        those that come later, end with nothing done."""
        await asyncio.gather(self._fetch.stop(deadline_s), self._store.stop(deadline_s))
        self._is_stopped = True
        self._region.close()

    async def fetch(self, job: FetchJob, waker: Waker) -> FetchEnded:
        """Fill a run; its progress table begins anew in this call's first step, before anything is
        waited for. A fetch of no blocks has none.

        Returns, also when it is cancelled, only when nothing of the run is written any more. Blocks
        that no worker could bring (queue full, worker lost) end the fetch as DEADLINE: they may
        well be stored, unlike those of TOO_FEW_SHARDS. `waker` stays the caller's and must be
        open until the return. Raises InvalidArgument if the run does not lie in the arena.
        """
        started_at_s = self._clock()
        if self._is_stopped:
            return FetchEnded(blocks=0, ended=FetchEnd.DEADLINE.value)
        run = self._run_memory(job)
        if job.blocks == 0:
            clear_table(run)
            return FetchEnded(blocks=0, ended=FetchEnd.COMPLETE.value)
        workers = max(self._fetch.ready_workers, 1)
        pieces = plan_pieces(
            job.first_block, job.end_block, workers=workers, span_blocks=SPAN_BLOCKS
        )
        first = job.first_block
        begin_table(run, [(piece.first - first, piece.end - first) for piece in pieces])
        tasks = self._fetch_tasks(job, pieces, waker, started_at_s + job.deadline_s)
        try:
            await _end_all(self._fetch, tasks)
        finally:
            for number, task in enumerate(tasks):
                if task.ended.result() is None:
                    # Its worker is gone, so that this process is the row's one writer now.
                    _end_row(run, number, waker)
        result = combine_pieces(pieces, [_piece_result(task) for task in tasks])
        self._fetched["blocks"] += result.blocks
        self._fetched["bytes"] += result.blocks * job.namespace.layout.block_bytes
        for name in ("decoded_blocks", "left_blocks", "rejected_shards"):
            self._fetched[name] += getattr(result, name)
        return FetchEnded(
            blocks=result.blocks,
            ended=result.ended.value,
            decoded_blocks=result.decoded_blocks,
            left_blocks=result.left_blocks,
            rejected_shards=result.rejected_shards,
            elapsed_s=self._clock() - started_at_s,
        )

    async def store(self, job: StoreJob) -> StoreEnded:
        """Save blocks out of a run. Returns, also when it is cancelled, only when nothing of the
        run is read any more. Blocks of a save that was lost count as failed, although some may be
        stored. Raises InvalidArgument if the run does not lie in the arena."""
        started_at_s = self._clock()
        if self._is_stopped:
            return StoreEnded(failed=job.blocks)
        self._run_memory(job)
        if job.blocks == 0:
            return StoreEnded()
        task = WorkerTask(
            _save_order(job),
            owner=job.owner,
            blocks=job.blocks,
            due_s=started_at_s + job.deadline_s,
            descriptor=None,
            loop=self._loop,
        )
        self._store.submit(task)
        await _end_all(self._store, [task])
        ended = _store_result(task)
        ended.elapsed_s = self._clock() - started_at_s
        for name in ("stored", "known", "failed", "degraded"):
            self._saved[name] += getattr(ended, name)
        self._saved["bytes"] += ended.stored * job.namespace.layout.block_bytes
        return ended

    def describe(self) -> dict[str, Any]:
        """For `cachalot status`: JSON, in `fetch` and `store`."""
        return {
            "fetch": {**self._fetch.describe(), **self._fetched},
            "store": {**self._store.describe(), **self._saved},
        }

    def _run_memory(self, job: FetchJob | StoreJob) -> RunMemory:
        return self._region.run(job.run_offset, job.run_layout)

    def _fetch_tasks(
        self, job: FetchJob, pieces: Sequence[PlannedPiece], waker: Waker, due_s: float
    ) -> list[WorkerTask]:
        """One task for each piece, handed to the workers."""
        namespace = NamespaceSpec.of(job.namespace)
        tasks = [
            WorkerTask(
                _fetch_order(job, namespace, number, piece),
                owner=job.owner,
                blocks=piece.blocks,
                due_s=due_s,
                descriptor=waker.fileno(),
                loop=self._loop,
            )
            for number, piece in enumerate(pieces)
        ]

        def give_up_behind(number: int, _: object) -> None:
            # Nobody can use what comes behind a gap.
            if _piece_result(tasks[number]).blocks < pieces[number].blocks:
                for later in tasks[number + 1 :]:
                    self._fetch.give_up(later)

        for number, task in enumerate(tasks):
            self._fetch.submit(task)
            task.ended.add_done_callback(partial(give_up_behind, number))
        return tasks


async def _end_all(group: WorkerGroup, tasks: Sequence[WorkerTask]) -> None:
    """Wait until all tasks have ended. Cancelled, it gives them up and waits on: the workers'
    supervision bounds that."""
    is_cancelled = False
    while pending := [task.ended for task in tasks if not task.ended.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            is_cancelled = True
            for task in tasks:
                group.give_up(task)
    if is_cancelled:
        raise asyncio.CancelledError


def _fetch_order(
    job: FetchJob, namespace: NamespaceSpec, number: int, piece: PlannedPiece
) -> FetchPiece:
    # From the border of its span on: what lies before says nothing about where its blocks are.
    start = piece.first - piece.first % SPAN_BLOCKS
    return FetchPiece(
        namespace=namespace,
        keys=job.keys[start * KEY_BYTES : piece.end * KEY_BYTES],
        first_block=piece.first - start,
        run_offset=job.run_offset,
        run_blocks=job.run_blocks,
        place=piece.first - job.first_block,
        piece=number,
        is_by_layer=job.is_by_layer,
        is_left_to_reader=job.is_left_to_reader,
        code=job.code,
        deadline_s=job.deadline_s,
    )


def _save_order(job: StoreJob) -> SavePiece:
    return SavePiece(
        namespace=NamespaceSpec.of(job.namespace),
        keys=job.keys,
        first_block=job.first_block,
        run_offset=job.run_offset,
        run_blocks=job.run_blocks,
        ttl_class=job.ttl_class,
        deadline_s=job.deadline_s,
    )


def _piece_result(task: WorkerTask) -> PieceResult:
    report = task.ended.result()
    if report is None:
        return PieceResult(0, FetchEnd.DEADLINE)
    assert isinstance(report, FetchDone), report
    ended = FetchEnd(report.ended)
    return PieceResult(
        report.blocks, ended, report.decoded_blocks, report.left_blocks, report.rejected_shards
    )


def _store_result(task: WorkerTask) -> StoreEnded:
    report = task.ended.result()
    if report is None:
        return StoreEnded(failed=task.blocks)
    assert isinstance(report, SaveDone), report
    return StoreEnded(
        stored=report.stored, known=report.known, failed=report.failed, degraded=report.degraded
    )


def _end_row(run: RunMemory, piece: int, waker: Waker) -> None:
    ProgressWriter(run, piece).end(0)
    waker.wake()
