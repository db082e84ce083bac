"""uvicorn, held to our bounds: so many connections, one request each, and time limits.

It serves within a loop that it does not own, so it takes no signals and ends when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import create_app
from .gate import REQUEST_DEADLINE_S
from .handle import WorkerHandle

CONNECTIONS_MAX = 64
HEAD_BYTES_MAX = 16 << 10
HEAD_DEADLINE_S = 10.0
"""A connection that has not sent the head of its request by then is closed."""
CONNECTION_DEADLINE_S = REQUEST_DEADLINE_S + 30.0
"""A connection ends then whatever it does, as one that never reads its answer."""


async def start_server(
    listener: socket.socket, handle: WorkerHandle, token: str, *, stop_deadline_s: float
) -> None:
    """Serve until cancelled."""
    server = _QuietServer(
        uvicorn.Config(
            create_app(handle, token),
            http=_BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            # One request a connection: nothing half sent can follow the first one.
            headers=[("connection", "close")],
            limit_concurrency=CONNECTIONS_MAX,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        if not serving.done():
            await asyncio.wait([serving], timeout=stop_deadline_s)
        serving.cancel()


class _QuietServer(uvicorn.Server):
    """Leaves the signals to the process it is a guest in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedConnection(H11Protocol):
    """One connection that cannot wait for ever."""

    _timers: tuple[asyncio.TimerHandle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers = (
            self.loop.call_later(HEAD_DEADLINE_S, self._close_if_silent),
            self.loop.call_later(CONNECTION_DEADLINE_S, transport.abort),
        )

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()
