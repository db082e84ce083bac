"""The worker's socket: who is connected, which requests run, and that no new ones begin in a drain.

Knows of the engine only what it is asked to do there (`RequestDesk`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Protocol

from .connection import Connection, ConnectionBounds
from .frames import LargeFrames
from .listening import LISTEN_BACKLOG
from .messages import (
    DRAINING,
    Answer,
    AskStatus,
    Refused,
    Request,
    Resume,
    Status,
    Submit,
)
from .outbox import Delivery

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
LARGE_MESSAGES_MAX = 16
"""Read to their ends at one time; more wait."""


class RequestDesk(Protocol):
    """What an engine does for clients. Calls return at once, however long a prompt is; answers come
    as deliveries, unless the request is not taken at all: the call says then why."""

    def submit(self, request_id: str, message: Submit) -> Refused | None:
        """Answer a prompt."""

    def resume(self, request_id: str, ticket: bytes) -> Refused | None:
        """Go on with a sequence from elsewhere."""

    def abort(self, request_id: str) -> None:
        """Nobody waits for the answer any more."""


@dataclass(slots=True, kw_only=True)
class ServerCounts:
    """Connections since the worker was started."""

    accepted: int = 0
    turned_away: int = 0
    """Beyond CONNECTIONS_MAX."""
    abandoned: int = 0
    """Requests whose client went away, or did not read."""


class WorkerServer:
    """Serves the clients of one worker. Belongs to the event loop.

    `describe` gives the worker's part of the status document.
    """

    def __init__(
        self,
        desk: RequestDesk,
        *,
        describe: Callable[[], dict[str, Any]],
        bounds: ConnectionBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_draining = False
        self.counts = ServerCounts()
        self._desk = desk
        self._describe = describe
        self._bounds = bounds or ConnectionBounds()
        self._clock = clock
        self._large = LargeFrames(
            LARGE_MESSAGES_MAX,
            wait_s=self._bounds.large_wait_s,
            stall_s=self._bounds.large_stall_s,
        )
        self._numbers = count(1)
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        """Of connections that are open."""
        self._running: dict[str, Connection] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket) -> None:
        """Accept clients from now on; the listener is the server's."""
        # asyncio accepts as many at a time as it is told may queue, and out of descriptors it tries
        # each of them, again and again. So it is told one, and the queue is set by itself.
        if listener.family == socket.AF_UNIX:
            self._server = await asyncio.start_unix_server(self._welcome, sock=listener, backlog=1)
        else:
            self._server = await asyncio.start_server(self._welcome, sock=listener, backlog=1)
        listener.listen(LISTEN_BACKLOG)

    @property
    def requests(self) -> int:
        """Requests that run."""
        return len(self._running)

    def close(self) -> None:
        """Accept nobody any more."""
        if self._server is not None:
            self._server.close()

    async def wait_until_idle(self, deadline_s: float) -> bool:
        """Whether no request runs any more, at the latest `deadline_s` from now."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def wait_until_read(self, deadline_s: float) -> None:
        """Until all clients have their last answers, at the latest `deadline_s` from now."""
        asking = [task for task, connection in self._tasks.items() if connection.has_asked]
        if asking:
            await asyncio.wait(asking, timeout=deadline_s)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Send answers of the engine to those who wait for them."""
        for request_id, answer in deliveries:
            connection = self._running.get(request_id)
            if connection is not None:
                connection.answer(answer, self)
                if connection.has_ended:
                    self._forget(connection)

    def take(self, request: Request, connection: Connection) -> None:
        """Begin the request of a connection, or answer it at once."""
        answer = self._begin(request, connection)
        if answer is not None:
            connection.answer(answer, self)

    def abandon(self, connection: Connection) -> None:
        """The client of a request is gone: the request ends."""
        self.counts.abandoned += 1
        self._desk.abort(connection.request_id)
        self._forget(connection)

    def status(self) -> dict[str, Any]:
        """The status document."""
        return {
            "is_draining": self.is_draining,
            "requests": len(self._running),
            "connections": {"open": len(self._tasks), **asdict(self.counts)},
            **self._describe(),
        }

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            self.counts.turned_away += 1
            writer.transport.abort()
            return
        self.counts.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        request_id = f"r{next(self._numbers)}"
        connection = Connection(request_id, reader, writer, self._bounds, self._large, self._clock)
        self._tasks[task] = connection
        try:
            await connection.serve(self)
        except asyncio.CancelledError:
            # The worker ends. What waits for this task would take a cancelled one for a fault.
            return
        finally:
            del self._tasks[task]

    def _begin(self, request: Request, connection: Connection) -> Answer | None:
        """Hand the request to the engine; or the answer, if it does not go there."""
        if isinstance(request, AskStatus):
            return Status(document=self.status())
        if self.is_draining:
            return DRAINING
        if isinstance(request, Resume):
            refused = self._desk.resume(connection.request_id, request.ticket)
        else:
            refused = self._desk.submit(connection.request_id, request)
        if refused is None:
            self._note(connection)
        return refused

    def _note(self, connection: Connection) -> None:
        self._running[connection.request_id] = connection
        self._idle.clear()

    def _forget(self, connection: Connection) -> None:
        self._running.pop(connection.request_id, None)
        if not self._running:
            self._idle.set()
