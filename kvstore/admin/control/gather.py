"""What the workers of all nodes say, for whoever can reach only one: the page, and a tunnel.

Each worker counts only the blocks that it is responsible for, so only the sum over all of them says
something about the cluster. They are asked over HTTP, at the addresses in the map and with the
token of this one, which is the same for all. Nothing is changed, and nobody is asked on behalf of
somebody else: what a worker relays is what it would say to the caller itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ...errors import StoreError
from ..control_client import ControlPlane, find_endpoints
from ..worker_status import WorkersStatus, describe_workers
from .handle import Values, WorkerHandle

ASK_DEADLINE_S = 1.0
"""To connect, and once more for the answer."""
GATHER_DEADLINE_S = 2.0
FRESH_S = 2.0
"""So old an answer is given again: many pages ask the workers no more often than one."""


class WorkerGatherer:
    """Asks all workers of the cluster. Belongs to the worker's event loop."""

    def __init__(
        self, handle: WorkerHandle, token: str, own: Callable[[], Awaitable[Values]]
    ) -> None:
        self._handle = handle
        self._token = token
        self._own = own
        self._turn = asyncio.Lock()
        self._last: tuple[float, WorkersStatus] | None = None

    async def gather(self) -> WorkersStatus:
        """The state of each, at most FRESH_S old. One that is late counts as one that is silent."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._last is None or loop.time() - self._last[0] > FRESH_S:
                found = await self._ask_all()
                self._last = (loop.time(), found)
            return self._last[1]

    async def _ask_all(self) -> WorkersStatus:
        handle = self._handle
        others = [one for one in find_endpoints(handle.map) if one.node != handle.node]
        plane = ControlPlane(others, self._token)
        alarm = asyncio.get_running_loop().call_later(GATHER_DEADLINE_S, plane.abort)
        try:
            said = await asyncio.to_thread(
                plane.ask_each, "GET", "/api/worker", deadline_s=ASK_DEADLINE_S
            )
        except asyncio.CancelledError:
            plane.abort()
            raise
        finally:
            alarm.cancel()
        # Of ourselves we know without asking, also where the map has no address for us.
        answers: dict[str, dict[str, Any] | StoreError] = {
            **said,
            handle.node: {**await self._own()},
        }
        return describe_workers(handle.map, answers)
