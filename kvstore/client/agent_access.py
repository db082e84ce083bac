"""What every call of an `AgentClient` stands on: its connection, and what it remembers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from ..cluster.entities import ClusterMap
from ..errors import ClientClosed
from ..key import Namespace
from ..layout import BlockLayout
from .agent_arguments import bound_deadline, check_client_name
from .agent_buffers import AgentBuffers
from .agent_link import AgentConnection, AgentLink, check_socket_path
from .agent_map import AgentMap
from .agent_offers import AgentOffers
from .agent_runs import AgentRuns
from .agent_windows import AgentWindows
from .prompt_keys import PromptKeys
from .results import ClientCounters


class AgentAccess:
    """The connection of an `AgentClient`, from its beginning to its end."""

    def __init__(
        self,
        socket_path: str | Path,
        *,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: what the agent's log and status call this client. Raises InvalidArgument."""
        loop = asyncio.get_running_loop()
        self._link = AgentLink(
            check_socket_path(socket_path),
            name=check_client_name(name) or f"pid {os.getpid()}",
            loop=loop,
            clock=clock,
        )
        self._loop = loop
        self._clock = clock
        self._keys = PromptKeys()
        self._map = AgentMap(clock)
        self._counters = ClientCounters()
        self._window_layouts: dict[bytes, BlockLayout] = {}
        self._runs = AgentRuns(self._counters, loop, clock)
        self._buffers = AgentBuffers(self._runs, clock)
        self._windows = AgentWindows(self._runs, clock)
        self._offers = AgentOffers(self._runs, loop)
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now. It may be gone a moment later."""
        return self._link.is_connected

    @property
    def map(self) -> ClusterMap:
        """The cluster map that the agent follows. Raises ClusterMapError, or AgentError if the
        client has never been connected."""
        if self._link.is_connected or self._map.current is None:
            self._map.look(self._link.connection.welcome.cluster_path)
        assert self._map.current is not None
        return self._map.current

    @property
    def counters(self) -> ClientCounters:
        """What the agent has done for this client since it was opened. What it met on its way,
        `hedges` and shards missing or failed, is in its status."""
        return self._counters

    @property
    def arena(self) -> memoryview | None:
        """The whole arena as it is mapped here, for an engine that pins it; None if there is none.
        Another one after the client has connected anew. The view is the caller's own: what it
        shows stays mapped as long as it is held."""
        region = self._link.connection.region if self.is_connected else None
        return None if region is None else region.view[:]

    async def wait_for_first_attempt(self) -> None:
        """Return when it has been tried once to connect."""
        await self._link.wait_for_first_attempt()

    async def finish_writes(self, *, deadline_s: float = 1.0) -> None:
        """Waits until the runs that were handed over are saved, or given up."""
        await self._runs.wait_for_saves(bound_deadline(deadline_s))

    @property
    def background_tasks(self) -> frozenset[asyncio.Task[None]]:
        """Tasks that are no operation of a caller's."""
        return frozenset({self._link.task})

    async def end_background(self) -> None:
        """Ends the connection; returns when nothing runs in the background."""
        self._link.close()
        await asyncio.wait({self._link.task})

    def close(self) -> None:
        """Ends the connection. Operations that run end with AgentUnreachable; runs that were
        handed over are saved all the same."""
        self._is_closed = True
        self._link.close()

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise ClientClosed(operation)

    async def _namespace(
        self, namespace: Namespace, deadline_s: float
    ) -> tuple[AgentConnection, int]:
        """The connection, and its number for a namespace. Raises AgentError."""
        connection = self._link.connection
        window_layout = self._window_layouts.get(namespace.namespace_id)
        return connection, await connection.open_namespace(
            namespace, window_layout, deadline_s=deadline_s
        )
