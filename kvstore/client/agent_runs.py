"""What an `AgentClient` does with runs: leases them, has them filled and saved.

Everything here is told the connection it works with: runs do not outlive it. Not for blocks in a
caller's buffers (agent_buffers.py), nor for window records (agent_windows.py).
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from ..agent_messages import (
    FetchEnded,
    FetchRun,
    LeaseRun,
    RunLeased,
    StoreEnded,
    StoreRun,
    TakeRun,
)
from ..arena.run_layout import RunLayout
from ..errors import AgentUnreachable, InvalidArgument, StoreError
from ..layout import BlockLayout
from .agent_arguments import check_leased_blocks, check_leased_code, check_run_blocks
from .agent_link import AgentConnection
from .agent_results import RunOperation
from .agent_session import AgentSession, Received
from .arena_run import ArenaRun
from .arguments import Rebuild, check_parity_room, check_rebuild
from .results import ClientCounters, FetchEnd, FetchResult, SaveResult

LEASE_SHARE = 0.5
"""Part of the time left that a call with buffers waits for a run: the rest is for its work."""
WORKER_END_S = 3.0
"""The agent is rid of a worker that stands still so long after a deadline, and answers for it then;
until then silence says nothing about the agent."""
LEAST_DEADLINE_S = 0.001
"""Of a run that is filled and may as well be handed over."""


class AgentRuns:
    """Keeps the counters of one client, and knows which of its saves are under way."""

    def __init__(
        self,
        counters: ClientCounters,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._counters = counters
        self._loop = loop
        self._clock = clock
        self._saves: set[asyncio.Future[Received]] = set()

    async def wait_for_saves(self, deadline_s: float) -> None:
        """Return when what was handed over is saved or given up, or at the deadline."""
        if self._saves:
            await asyncio.wait(set(self._saves), timeout=deadline_s)

    # One run ------------------------------------------------------------------------------------

    async def lease(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        blocks: int,
        *,
        deadline_s: float,
        is_window: bool = False,
        has_parity_room: bool = False,
    ) -> ArenaRun | None:
        """See AgentClient.lease_run."""
        check_run_blocks(blocks)
        request = LeaseRun(
            namespace=namespace,
            blocks=blocks,
            deadline_s=deadline_s,
            is_window=is_window,
            has_parity_room=has_parity_room,
        )
        return await self.receive(connection, request, layout, blocks, deadline_s=deadline_s)

    async def receive(
        self,
        connection: AgentConnection,
        request: LeaseRun | TakeRun,
        layout: BlockLayout,
        blocks: int,
        *,
        deadline_s: float,
    ) -> ArenaRun | None:
        """The run that answers the request, of `blocks` blocks, or fewer of a lease; or None."""
        region = connection.need_region()
        session = connection.session
        received = await session.receive(request, deadline_s)
        leased = session.expect(received, RunLeased)
        if received.descriptor is None:
            return None
        try:
            if session.failure is not None:
                raise AgentUnreachable(session.path, session.failure.detail)
            least = blocks if isinstance(request, TakeRun) else 1
            check_leased_blocks(leased.blocks, least=least, asked=blocks)
            code = check_leased_code(leased.code)
            memory = region.run(leased.offset, RunLayout(layout, leased.blocks, code))
        except InvalidArgument as error:
            os.close(received.descriptor)
            raise session.end_of_nonsense(f"leased no run: {error}") from error
        except AgentUnreachable:
            os.close(received.descriptor)
            raise
        run = ArenaRun(
            memory,
            leased.run,
            received.descriptor,
            give_back=partial(self._give_back, connection),
            loop=self._loop,
            clock=self._clock,
        )
        connection.runs[leased.run] = weakref.ref(run)
        return run

    def begin_fetch(
        self,
        connection: AgentConnection,
        layout: BlockLayout,
        keys: Sequence[bytes],
        run: ArenaRun,
        *,
        first_block: int,
        is_by_layer: bool,
        deadline_s: float,
        rebuild: Rebuild = "agent",
    ) -> RunOperation[FetchResult]:
        """See AgentClient.fetch_run."""
        blocks = len(keys) - first_block
        connection.check_idle_run(run, layout, blocks)
        is_left_to_reader = check_rebuild(rebuild)
        if is_left_to_reader:
            check_parity_room(run.memory, run.layout.code, is_by_layer=is_by_layer)
        outcome: Future[FetchResult] = Future()
        operation = RunOperation(outcome, f"fetch of {blocks} blocks into run {run.number}")
        if blocks == 0:
            outcome.set_result(FetchResult(blocks=0, ended=FetchEnd.COMPLETE))
            return operation
        run.begin_fetch()
        request = FetchRun(
            run=run.number,
            keys=b"".join(keys),
            first_block=first_block,
            is_by_layer=is_by_layer,
            deadline_s=deadline_s,
            is_left_to_reader=is_left_to_reader,
        )
        session = connection.session
        try:
            answer = session.send(request, deadline_s + WORKER_END_S)
        except StoreError:
            run.end_fetch()
            raise

        def settle(received: asyncio.Future[Received]) -> None:
            try:
                outcome.set_result(self._read_fetch(session, received.result(), blocks))
            except StoreError as error:
                outcome.set_exception(error)
            run.end_fetch()

        answer.add_done_callback(settle)
        return operation

    def begin_save(
        self,
        connection: AgentConnection,
        layout: BlockLayout,
        keys: Sequence[bytes],
        run: ArenaRun,
        *,
        first_block: int,
        ttl_class: str,
        deadline_s: float,
    ) -> RunOperation[SaveResult]:
        """See AgentClient.save_run."""
        blocks = len(keys) - first_block
        connection.check_idle_run(run, layout, blocks)
        outcome: Future[SaveResult] = Future()
        operation = RunOperation(outcome, f"save of {blocks} blocks out of run {run.number}")
        if blocks == 0:
            run.release()
            outcome.set_result(SaveResult(stored=0, known=0, failed=0))
            return operation
        run.hand_over()
        connection.runs.pop(run.number, None)
        request = StoreRun(
            run=run.number,
            keys=b"".join(keys),
            first_block=first_block,
            ttl_class=ttl_class,
            deadline_s=deadline_s,
        )
        session = connection.session
        try:
            answer = session.send(request, deadline_s + WORKER_END_S)
        except StoreError:
            session.release_run(run.number)
            raise
        self._saves.add(answer)

        def settle(received: asyncio.Future[Received]) -> None:
            self._saves.discard(received)
            try:
                outcome.set_result(self._read_save(session, received.result(), blocks))
            except StoreError as error:
                # Refused: then it did not take the run either.
                session.release_run(run.number)
                outcome.set_exception(error)

        answer.add_done_callback(settle)
        return operation

    def _give_back(self, connection: AgentConnection, number: int) -> None:
        """Called by whatever thread releases a run."""

        def give_back() -> None:
            if connection.runs.pop(number, None) is not None:
                connection.session.release_run(number)

        try:
            is_in_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_in_loop = False
        if is_in_loop:
            give_back()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(give_back)

    def _read_fetch(self, session: AgentSession, received: Received, asked: int) -> FetchResult:
        ended = session.expect(received, FetchEnded)
        try:
            end = FetchEnd(ended.ended)
        except ValueError:
            raise session.end_of_nonsense(f"a fetch ended by {ended.ended!r}") from None
        if ended.blocks > asked:
            raise session.end_of_nonsense(f"{ended.blocks} blocks of {asked} were fetched")
        self._counters.blocks_fetched += ended.blocks
        self._counters.blocks_decoded += ended.decoded_blocks
        self._counters.blocks_left += ended.left_blocks
        self._counters.shards_rejected += ended.rejected_shards
        return FetchResult(
            blocks=ended.blocks,
            ended=end,
            decoded_blocks=ended.decoded_blocks,
            left_blocks=ended.left_blocks,
            rejected_shards=ended.rejected_shards,
            elapsed_s=ended.elapsed_s,
        )

    def _read_save(self, session: AgentSession, received: Received, asked: int) -> SaveResult:
        ended = session.expect(received, StoreEnded)
        told = ended.stored + ended.known + ended.failed + ended.dropped
        if told != asked:
            raise session.end_of_nonsense(f"told what became of {told} blocks of {asked}")
        self._counters.blocks_saved += ended.stored
        return SaveResult(
            stored=ended.stored,
            known=ended.known,
            failed=ended.failed + ended.dropped,
            degraded=ended.degraded,
            elapsed_s=ended.elapsed_s,
        )
