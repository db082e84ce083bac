"""Serves an agent to the agents of other hosts, over TCP, in the frames of the data plane.

What is answered is the business of `peer_answers`. A record, or a piece of a run, is sent out of
the memory in which it lies; if it is overwritten meanwhile, its reader finds out. One request of a
connection is served at a time. A frame that is none closes its connection, with one line in the
log, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .. import wire
from ..node.request_reader import RequestReader
from ..window.directory_host import DirectoryHost
from ..window.messages import WindowRequest
from ..window.record import WindowRecord
from .peer_answers import Answer, PeerAnswers, refusal
from .run_sender import RunSender

log = logging.getLogger(__name__)

VISIT_RECORDS_MAX = 1024
"""After so many keys and announced records of one peer the others have their turn."""
REQUEST_RECORDS = 64
"""A request costs about what so many of its records do."""
RECORD_PAYLOAD_BYTES = 1 << 10
"""And a record about what it costs to hash and send so many bytes."""
ACCEPT_PAUSE_S = 0.25
"""After the system gave no descriptor."""
KEEPALIVE_IDLE_S = 60
KEEPALIVE_PROBE_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerServerSettings:
    """Bounds of what peers may cost."""

    connections_max: int = 4096
    """Further ones are closed at once."""
    frame_s: float = 30.0
    """A frame that is begun must be complete after so long, in both directions; so must the
    greeting of a new connection."""


@dataclass(slots=True)
class PeerServerCounters:
    """What happened since the start."""

    connections_accepted: int = 0
    connections_refused: int = 0
    bad_frames: int = 0
    slow_peers: int = 0
    requests: int = 0
    sent_bytes: int = 0


class PeerServer:
    """Serves on a listening socket, which becomes its own. Belongs to one event loop.

    What it is given to answer with is described at `PeerAnswers`.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        cluster: bytes,
        find: Callable[[WindowRequest], WindowRecord | None],
        ttl_left_s: Callable[[WindowRecord], float],
        directory: DirectoryHost | None,
        status: Callable[[], dict[str, Any]],
        offered: RunSender | None = None,
        loop: asyncio.AbstractEventLoop,
        settings: PeerServerSettings | None = None,
    ) -> None:
        self.settings = settings or PeerServerSettings()
        self.counters = PeerServerCounters()
        self._listener = listener
        self._listener.setblocking(False)
        self._connections: set[socket.socket] = set()
        self._loop = loop
        self._answers = PeerAnswers(
            cluster=cluster,
            find=find,
            ttl_left_s=ttl_left_s,
            directory=directory,
            status=status,
            offered=offered,
        )

    async def run(self) -> None:
        """Serves until it is cancelled; then closes every connection and the listener."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    accepted = await self._accept()
                    if accepted is not None:
                        group.create_task(self._serve(*accepted))
        finally:
            self._listener.close()
            # Those of a task that was cancelled before its first step are still open.
            for connection in self._connections:
                connection.close()

    async def _accept(self) -> tuple[socket.socket, str] | None:
        """The next connection that there is room for."""
        try:
            accepted, address = await self._loop.sock_accept(self._listener)
        except ConnectionAbortedError:
            return None
        except OSError as error:
            log.error("cannot accept: %s", error)
            await self._pause(ACCEPT_PAUSE_S)
            return None
        peer = f"{address[0]}:{address[1]}"
        if len(self._connections) >= self.settings.connections_max:
            self.counters.connections_refused += 1
            log.warning("refused peer=%s: %d connections", peer, len(self._connections))
            accepted.close()
            return None
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PROBE_S)
        self._connections.add(accepted)
        self.counters.connections_accepted += 1
        return accepted, peer

    async def _pause(self, seconds: float) -> None:
        ended: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(seconds, ended.set_result, None)
        try:
            await ended
        finally:
            timer.cancel()

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        """One connection, until either side ends it."""
        try:
            await self._serve_requests(connection)
        except wire.FrameError as error:
            self.counters.bad_frames += 1
            log.warning("closed peer=%s: bad frame: %s", peer, error)
        except _TooSlow:
            self.counters.slow_peers += 1
            log.warning("closed peer=%s: a frame took over %s s", peer, self.settings.frame_s)
        except OSError as error:
            log.debug("closed peer=%s: %s", peer, error)
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _serve_requests(self, connection: socket.socket) -> None:
        reader = RequestReader()
        is_greeted = False
        served_records = 0
        while True:
            if served_records >= VISIT_RECORDS_MAX:
                # Neither receiving nor sending gives way while the peer keeps up with us.
                await self._pause(0)
                served_records = 0
            request = reader.next_request()
            if request is None:
                request = await self._receive(connection, reader, is_patient=is_greeted)
            header, body = request
            if header.payload_bytes:
                raise wire.FrameError(f"a request with {header.payload_bytes} bytes of payload")
            self.counters.requests += 1
            served_records += REQUEST_RECORDS + header.count
            if header.op == wire.Op.HELLO:
                answer = self._answers.greet(body)
                is_greeted |= answer.status is wire.Status.OK
            elif not is_greeted:
                answer = refusal(wire.Status.NOT_GREETED, "the first request must be HELLO")
            else:
                answer = self._answers.answer(header, body)
            if answer.payload is not None:
                served_records += len(answer.payload) // RECORD_PAYLOAD_BYTES
            await self._send(connection, header, answer)

    async def _receive(
        self, connection: socket.socket, reader: RequestReader, *, is_patient: bool
    ) -> tuple[wire.Header, bytes]:
        """The next request; _TooSlow if it is begun and does not end. `is_patient`: it may
        begin whenever it likes."""
        if is_patient and not reader.has_begun:
            await self._receive_some(connection, reader)
        async with self._frame_limit():
            while (request := reader.next_request()) is None:
                await self._receive_some(connection, reader)
            return request

    @asynccontextmanager
    async def _frame_limit(self) -> AsyncIterator[None]:
        """Raises _TooSlow if what is inside takes longer than a frame may take."""
        limit = asyncio.timeout(self.settings.frame_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            # The system has time-outs of its own, for a machine that is gone.
            if limit.expired():
                raise _TooSlow from error
            raise

    async def _receive_some(self, connection: socket.socket, reader: RequestReader) -> None:
        count = await self._loop.sock_recv_into(connection, reader.room())
        if not count:
            raise ConnectionResetError("closed by the peer")
        reader.received(count)

    async def _send(self, connection: socket.socket, header: wire.Header, answer: Answer) -> None:
        payload_bytes = 0 if answer.payload is None else len(answer.payload)
        frame = wire.pack_frame(
            wire.Op(header.op),
            wire.KIND_RESPONSE,
            request_id=header.request_id,
            body=answer.body,
            count=answer.count,
            status=answer.status,
            target=header.target,
            payload_bytes=payload_bytes,
        )
        async with self._frame_limit():
            if answer.payload is None:
                await self._loop.sock_sendall(connection, frame)
            else:
                await self._send_with_payload(connection, frame, answer.payload)
        self.counters.sent_bytes += len(frame) + payload_bytes

    async def _send_with_payload(
        self, connection: socket.socket, frame: bytes, payload: memoryview
    ) -> None:
        """Both in one call, as far as the socket takes them; the payload out of its own place."""
        try:
            sent = connection.sendmsg((frame, payload))
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            await self._loop.sock_sendall(connection, frame[sent:])
            sent = len(frame)
        await self._loop.sock_sendall(connection, payload[sent - len(frame) :])

    def describe(self) -> dict[str, int]:
        """For the status document."""
        return {
            "connections": len(self._connections),
            **asdict(self.counters),
            "windows_sent": self._answers.windows_sent,
            "windows_absent": self._answers.windows_absent,
        }


class _TooSlow(Exception):
    """A frame was begun and did not end in time."""
