"""Runs the jobs of one worker: from an order to what is reported when nothing more is written.

The agent bounds how many there are. A job that is cancelled is reported like one that got nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from ..arena.progress import ProgressWriter
from ..arena.region import ArenaRegion
from ..arena.run_layout import RunLayout
from ..arena.wakeup import Waker
from ..client.results import FetchEnd, FetchResult, SaveResult
from ..client.store_client import StoreClient
from ..errors import StoreError
from ..key import KEY_BYTES, Namespace
from .jobs import (
    CancelJob,
    FetchDone,
    FetchPiece,
    NamespaceSpec,
    Order,
    Pong,
    Report,
    SaveDone,
    SavePiece,
    WorkerUsage,
    split_keys,
)

log = logging.getLogger(__name__)

NAMESPACES_KEPT_MAX = 256

ResultT = TypeVar("ResultT", FetchResult, SaveResult)


class RunningFetch:
    """A piece of a fetch. Owns `waker` until `end`."""

    def __init__(self, order: FetchPiece, namespace: Namespace, waker: Waker) -> None:
        self._order = order
        self._namespace = namespace
        self._waker = waker
        self._progress: ProgressWriter | None = None

    async def run(self, client: StoreClient, region: ArenaRegion) -> FetchResult:
        order = self._order
        layout = RunLayout(self._namespace.layout, order.run_blocks, order.code)
        run = region.run(order.run_offset, layout)
        self._progress = ProgressWriter(run, order.piece)
        return await client.fetch_run(
            self._namespace,
            split_keys(order.keys),
            run,
            first_block=order.first_block,
            place=order.place,
            is_by_layer=order.is_by_layer,
            is_left_to_reader=order.is_left_to_reader,
            on_ready=self._note_ready,
            deadline_s=order.deadline_s,
        )

    def end(self, result: FetchResult | None, usage: WorkerUsage) -> FetchDone:
        """To be called once, when `run` has ended; None if it was cancelled or refused."""
        if result is None:
            result = FetchResult(blocks=0, ended=FetchEnd.DEADLINE)
        if self._progress is not None:
            self._progress.end(result.blocks)
            self._waker.wake()
        self._waker.close()
        usage.fetched_bytes += result.blocks * self._namespace.layout.block_bytes
        return FetchDone(
            blocks=result.blocks,
            ended=result.ended.value,
            decoded_blocks=result.decoded_blocks,
            left_blocks=result.left_blocks,
            rejected_shards=result.rejected_shards,
            usage=usage,
        )

    def _note_ready(self, section: int, blocks: int) -> None:
        assert self._progress is not None
        self._progress.set_ready(section, blocks)
        self._waker.wake()


class RunningSave:
    """A save out of a run."""

    def __init__(self, order: SavePiece, namespace: Namespace) -> None:
        self._order = order
        self._namespace = namespace

    async def run(self, client: StoreClient, region: ArenaRegion) -> SaveResult:
        order = self._order
        layout = RunLayout(self._namespace.layout, order.run_blocks)
        return await client.save_run(
            self._namespace,
            split_keys(order.keys),
            region.run(order.run_offset, layout),
            first_block=order.first_block,
            ttl_class=order.ttl_class,
            deadline_s=order.deadline_s,
        )

    def end(self, result: SaveResult | None, usage: WorkerUsage) -> SaveDone:
        """As for a fetch. Blocks of a save that was cancelled count as failed, stored or not."""
        if result is None:
            blocks = len(self._order.keys) // KEY_BYTES - self._order.first_block
            result = SaveResult(stored=0, known=0, failed=blocks)
        usage.saved_bytes += result.stored * self._namespace.layout.block_bytes
        return SaveDone(
            stored=result.stored,
            known=result.known,
            failed=result.failed,
            degraded=result.degraded,
            usage=usage,
        )


class JobRunner:
    """The jobs of one worker. Belongs to one event loop."""

    def __init__(
        self,
        client: StoreClient,
        region: ArenaRegion,
        *,
        cpu_clock: Callable[[], float],
        report: Callable[[int, Report], None],
        take_descriptor: Callable[[], int],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """`on_fault` is told of what no job may raise: the worker cannot be trusted any more."""
        self._client = client
        self._region = region
        self._cpu_clock = cpu_clock
        self._report = report
        self._take_descriptor = take_descriptor
        self._on_fault = on_fault
        self._usage = WorkerUsage()
        self._tasks: dict[int, asyncio.Task[FetchResult] | asyncio.Task[SaveResult]] = {}
        self._namespace_of = lru_cache(NAMESPACES_KEPT_MAX)(NamespaceSpec.build)

    def take(self, number: int, order: Order) -> None:
        """Begin what is ordered."""
        if isinstance(order, FetchPiece):
            namespace = self._namespace_of(order.namespace)
            waker = Waker(self._take_descriptor())
            self._begin_fetch(number, RunningFetch(order, namespace, waker))
        elif isinstance(order, SavePiece):
            self._begin_save(number, RunningSave(order, self._namespace_of(order.namespace)))
        elif isinstance(order, CancelJob):
            if number in self._tasks:
                self._tasks[number].cancel()
        else:
            self._report(number, Pong(usage=self._current_usage()))

    async def end(self) -> None:
        """Cancel what runs; returns when nothing does."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin_fetch(self, number: int, job: RunningFetch) -> None:
        task = asyncio.ensure_future(job.run(self._client, self._region))
        self._tasks[number] = task

        # The end is told by a callback, because a task that is cancelled before its first step
        # never runs a line of its own.
        def end(ended: asyncio.Task[FetchResult]) -> None:
            self._report(number, job.end(self._result(number, ended), self._current_usage()))

        task.add_done_callback(end)

    def _begin_save(self, number: int, job: RunningSave) -> None:
        task = asyncio.ensure_future(job.run(self._client, self._region))
        self._tasks[number] = task

        def end(ended: asyncio.Task[SaveResult]) -> None:
            self._report(number, job.end(self._result(number, ended), self._current_usage()))

        task.add_done_callback(end)

    def _result(self, number: int, task: asyncio.Task[ResultT]) -> ResultT | None:
        del self._tasks[number]
        self._usage.jobs += 1
        if task.cancelled():
            return None
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, StoreError):
            log.warning("a job is refused: %s", error)
        else:
            self._on_fault(error)
        return None

    def _current_usage(self) -> WorkerUsage:
        self._usage.cpu_s = self._cpu_clock()
        self._usage.counters = self._client.counters
        return self._usage
