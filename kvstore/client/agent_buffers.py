"""What an `AgentClient` does for callers whose blocks lie in buffers of their own: it copies them
into runs and out of runs, in several rounds if the arena is small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from ..layout import BlockLayout
from .agent_link import AgentConnection
from .agent_results import RunOperation
from .agent_runs import LEASE_SHARE, LEAST_DEADLINE_S, AgentRuns
from .arena_run import ArenaRun
from .results import FetchEnd, FetchResult, SaveResult
from .run_copy import SectionCopy, choose_round_blocks, copy_into_run

ROUNDS_MAX = 64
"""Fetches and saves that have a run at one time; the agent leases 256 to a session."""
LATE_ANSWER_S = 0.5
"""So long after its deadline a round still waits for the agent's word, which says more than the
progress table does."""


class AgentBuffers:
    """The calls of one client that work with buffers; see AgentClient."""

    def __init__(self, runs: AgentRuns, clock: Callable[[], float]) -> None:
        self._runs = runs
        self._clock = clock
        self._rounds = asyncio.Semaphore(ROUNDS_MAX)

    async def fetch(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        *,
        first_block: int,
        deadline_s: float,
    ) -> FetchResult:
        """See AgentClient.fetch."""
        started_at_s = self._clock()
        end_at_s = started_at_s + deadline_s
        arena_bytes = connection.need_region().size_bytes
        results: list[FetchResult] = []
        done = 0
        while done < len(views):
            wanted = choose_round_blocks(layout, len(views) - done, arena_bytes)
            async with self._round_run(connection, namespace, layout, wanted, end_at_s) as run:
                if run is None:
                    break
                end = min(done + run.blocks, len(views))
                result = await self._fetch_round(
                    connection,
                    layout,
                    keys[: first_block + end],
                    run,
                    views[done:end],
                    first_block=first_block + done,
                    deadline_s=end_at_s - self._clock(),
                )
            results.append(result)
            done += result.blocks
            if result.ended is not FetchEnd.COMPLETE:
                break
        return _join_fetches(results, done, len(views), self._clock() - started_at_s)

    async def _fetch_round(
        self,
        connection: AgentConnection,
        layout: BlockLayout,
        keys: Sequence[bytes],
        run: ArenaRun,
        views: Sequence[memoryview],
        *,
        first_block: int,
        deadline_s: float,
    ) -> FetchResult:
        if deadline_s <= 0:
            return FetchResult(blocks=0, ended=FetchEnd.DEADLINE)
        fetch = self._runs.begin_fetch(
            connection,
            layout,
            keys,
            run,
            first_block=first_block,
            is_by_layer=False,
            deadline_s=deadline_s,
        )
        end_at_s = self._clock() + deadline_s + LATE_ANSWER_S
        copy = SectionCopy(run, views)
        while not fetch.is_done and (left_s := end_at_s - self._clock()) > 0:
            copy.copy_ready()
            # The end of the fetch is a change too, and so is that of the agent.
            await run.until_changed(left_s)
        if not fetch.is_done:
            copy.copy_ready()
            return FetchResult(blocks=copy.whole_blocks, ended=FetchEnd.DEADLINE)
        result = await fetch
        copy.copy_rest(result.blocks)
        return result

    async def save(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        *,
        first_block: int,
        ttl_class: str,
        deadline_s: float,
    ) -> SaveResult:
        """See AgentClient.save."""
        started_at_s = self._clock()
        end_at_s = started_at_s + deadline_s
        arena_bytes = connection.need_region().size_bytes
        results: list[SaveResult] = []
        done = 0
        while done < len(views):
            wanted = choose_round_blocks(layout, len(views) - done, arena_bytes)
            async with self._round_run(connection, namespace, layout, wanted, end_at_s) as run:
                if run is None:
                    break
                end = min(done + run.blocks, len(views))
                copy_into_run(views[done:end], run)
                save = self._runs.begin_save(
                    connection,
                    layout,
                    keys[: first_block + end],
                    run,
                    first_block=first_block + done,
                    ttl_class=ttl_class,
                    deadline_s=max(end_at_s - self._clock(), LEAST_DEADLINE_S),
                )
            results.append(await self._end_of_save(save, end - done, end_at_s))
            done = end
        return SaveResult(
            stored=sum(one.stored for one in results),
            known=sum(one.known for one in results),
            failed=sum(one.failed for one in results) + len(views) - done,
            degraded=sum(one.degraded for one in results),
            elapsed_s=self._clock() - started_at_s,
        )

    async def _end_of_save(
        self, save: RunOperation[SaveResult], blocks: int, end_at_s: float
    ) -> SaveResult:
        """What became of a round; without an answer in time its blocks count as failed, although
        some may be stored."""
        left_s = max(end_at_s - self._clock(), 0.0)
        try:
            async with asyncio.timeout(left_s + LATE_ANSWER_S):
                return await save
        except TimeoutError:
            return SaveResult(stored=0, known=0, failed=blocks)

    @asynccontextmanager
    async def _round_run(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        blocks: int,
        end_at_s: float,
    ) -> AsyncIterator[ArenaRun | None]:
        """A run for one round; None if there is none in time."""
        async with AsyncExitStack() as stack:
            run = None
            with suppress(TimeoutError):
                async with asyncio.timeout(max(end_at_s - self._clock(), 0.0)):
                    await stack.enter_async_context(self._rounds)
                left_s = end_at_s - self._clock()
                if left_s > 0:
                    run = await self._runs.lease(
                        connection, namespace, layout, blocks, deadline_s=left_s * LEASE_SHARE
                    )
            if run is not None:
                stack.enter_context(run)
            yield run


def _join_fetches(
    results: Sequence[FetchResult], blocks: int, asked: int, elapsed_s: float
) -> FetchResult:
    """One result of all rounds. A round that was not begun had no time, or no memory in time."""
    ended = FetchEnd.COMPLETE if blocks == asked else FetchEnd.DEADLINE
    if results and results[-1].ended is not FetchEnd.COMPLETE:
        ended = results[-1].ended
    return FetchResult(
        blocks=blocks,
        ended=ended,
        decoded_blocks=sum(one.decoded_blocks for one in results),
        rejected_shards=sum(one.rejected_shards for one in results),
        elapsed_s=elapsed_s,
    )
