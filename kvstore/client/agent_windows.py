"""What an `AgentClient` does with window records: bytes go by way of a run of one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..agent_messages import (
    Done,
    FetchWindow,
    LookUpWindows,
    PutWindow,
    WindowFetched,
    WindowsFound,
)
from ..errors import AgentRefused
from ..layout import BlockLayout
from .agent_arguments import check_record_place
from .agent_link import AgentConnection
from .agent_results import WindowFetch
from .agent_runs import LEASE_SHARE, LEAST_DEADLINE_S, AgentRuns
from .arena_run import ArenaRun
from .arguments import hold_record
from .run_copy import copy_into_run, copy_out_of_run

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class AgentWindows:
    """The window calls of one client; see AgentClient."""

    def __init__(self, runs: AgentRuns, clock: Callable[[], float]) -> None:
        self._runs = runs
        self._clock = clock

    async def lease(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        *,
        deadline_s: float,
    ) -> ArenaRun | None:
        return await self._runs.lease(
            connection, namespace, layout, 1, deadline_s=deadline_s, is_window=True
        )

    async def put(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        key: bytes,
        record: ReadableBuffer | ArenaRun,
        *,
        deadline_s: float,
    ) -> bool:
        check_record_place(record, "record")
        if isinstance(record, ArenaRun):
            connection.check_idle_run(record, layout, 1)
            request = PutWindow(namespace=namespace, key=key, run=record.number)
            return (await connection.session.ask(request, Done, deadline_s)).is_kept
        end_at_s = self._clock() + deadline_s
        views, held = hold_record(record, layout.block_bytes, "record", writable=False)
        with held:
            run = await self.lease(
                connection, namespace, layout, deadline_s=deadline_s * LEASE_SHARE
            )
            if run is None:
                return False
            with run:
                copy_into_run(views, run)
                left_s = self._left_s(end_at_s)
                return await self.put(connection, namespace, layout, key, run, deadline_s=left_s)

    async def look_up(
        self,
        connection: AgentConnection,
        namespace: int,
        keys: Sequence[bytes],
        *,
        deadline_s: float,
    ) -> list[str | None]:
        if not keys:
            return []
        request = LookUpWindows(namespace=namespace, keys=b"".join(keys), deadline_s=deadline_s)
        found = await connection.session.ask(request, WindowsFound, deadline_s)
        if len(found.hosts) != len(keys):
            raise AgentRefused(
                connection.session.path, f"{len(found.hosts)} answers to {len(keys)} keys"
            )
        return found.hosts

    async def fetch(
        self,
        connection: AgentConnection,
        namespace: int,
        layout: BlockLayout,
        key: bytes,
        into: WriteableBuffer | ArenaRun,
        *,
        deadline_s: float,
    ) -> WindowFetch:
        check_record_place(into, "into")
        if isinstance(into, ArenaRun):
            connection.check_idle_run(into, layout, 1)
            request = FetchWindow(
                namespace=namespace, key=key, run=into.number, deadline_s=deadline_s
            )
            found = await connection.session.ask(request, WindowFetched, deadline_s)
            return WindowFetch(is_found=found.is_found, host=found.host, elapsed_s=found.elapsed_s)
        started_at_s = self._clock()
        views, held = hold_record(into, layout.block_bytes, "into", writable=True)
        with held:
            run = await self.lease(
                connection, namespace, layout, deadline_s=deadline_s * LEASE_SHARE
            )
            if run is None:
                return WindowFetch(is_found=False, host="", elapsed_s=self._clock() - started_at_s)
            with run:
                left_s = self._left_s(started_at_s + deadline_s)
                found_here = await self.fetch(
                    connection, namespace, layout, key, run, deadline_s=left_s
                )
                if found_here.is_found:
                    copy_out_of_run(run, views[0])
        return found_here

    def _left_s(self, end_at_s: float) -> float:
        return max(end_at_s - self._clock(), LEAST_DEADLINE_S)
