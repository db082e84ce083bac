"""What the agents say of themselves, for whoever can reach only one worker: the page, and a tunnel.

They are asked over the data plane, at the addresses in the map and those that their directories
know. Nothing is changed.
"""

from __future__ import annotations

import asyncio

from ..agent_inquiry import ask_agents
from ..agent_status import AgentsStatus, describe_agents
from .handle import WorkerHandle

ASK_DEADLINE_S = 1.0
"""For the entrypoints, and once more for the agents that they know."""
FRESH_S = 2.0
"""So old an answer is given again: many pages ask the agents no more often than one."""


class AgentGatherer:
    """Asks all agents of the cluster that are known. Belongs to the worker's event loop."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self._turn = asyncio.Lock()
        self._last: tuple[float, AgentsStatus] | None = None

    async def gather(self) -> AgentsStatus:
        """The state of each, at most FRESH_S old. One that is late counts as one that is down."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._last is None or loop.time() - self._last[0] > FRESH_S:
                reports = await ask_agents(
                    self._handle.map, deadline_s=ASK_DEADLINE_S, loop=loop, clock=loop.time
                )
                self._last = (loop.time(), describe_agents(reports))
            return self._last[1]
