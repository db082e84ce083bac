"""Serves an agent to the agents of other hosts, over TCP, in the frames of the data plane.

HELLO and STAT, WINDOW from this host's pool, and LOOKUP and ANNOUNCE where this agent holds a part
of the directory. A record is sent out of the pool's own memory; if it is overwritten meanwhile, the
reader's checksum says so. One request of a connection is served at a time. A frame that is none
closes its connection, with one line in the log, and nothing else. Engines do not come here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .. import wire
from ..errors import InvalidArgument
from ..node.request_reader import RequestReader
from ..window.directory_host import DirectoryHost
from ..window.messages import (
    WindowRequest,
    pack_answer,
    pack_hosts,
    parse_announcement,
    parse_window_request,
)
from ..window.peers import AGENT_TARGET
from ..window.record import WindowRecord

log = logging.getLogger(__name__)

REQUESTS_PER_VISIT_MAX = 16
"""After so many of one peer the others have their turn."""
ACCEPT_PAUSE_S = 0.25
"""After the system gave no descriptor."""
KEEPALIVE_IDLE_S = 60
KEEPALIVE_PROBE_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerServerSettings:
    """Bounds of what peers may cost."""

    connections_max: int = 1024
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
    windows_sent: int = 0
    windows_absent: int = 0
    sent_bytes: int = 0


class PeerServer:
    """Serves on a listening socket, which becomes its own. Belongs to one event loop.

    `find`: the record of this host that is meant, or None. `status`: the document that STAT
    answers. `directory`: the part that this agent holds, or None.
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
        loop: asyncio.AbstractEventLoop,
        settings: PeerServerSettings | None = None,
    ) -> None:
        self.settings = settings or PeerServerSettings()
        self.counters = PeerServerCounters()
        self._listener = listener
        self._listener.setblocking(False)
        self._connections: set[socket.socket] = set()
        self._cluster = cluster
        self._find = find
        self._ttl_left_s = ttl_left_s
        self._directory = directory
        self._status = status
        self._loop = loop
        self._answer_by_op: dict[int, Callable[[wire.Header, bytes], _Answer]] = {
            wire.Op.STAT: self._stat,
            wire.Op.LOOKUP: self._look_up,
            wire.Op.ANNOUNCE: self._announce,
            wire.Op.WINDOW: self._window,
        }

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
        self._loop.call_later(seconds, ended.set_result, None)
        await ended

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
        served = 0
        while True:
            served += 1
            if served % REQUESTS_PER_VISIT_MAX == 0:
                # Neither receiving nor sending gives way while the peer keeps up with us.
                await self._pause(0)
            request = reader.next_request()
            if request is None:
                request = await self._receive(connection, reader, is_patient=is_greeted)
            header, body = request
            if header.payload_bytes:
                raise wire.FrameError(f"a request with {header.payload_bytes} bytes of payload")
            self.counters.requests += 1
            if header.op == wire.Op.HELLO:
                answer = self._greet(header, body)
                is_greeted |= answer.status is wire.Status.OK
            elif not is_greeted:
                answer = _refusal(wire.Status.NOT_GREETED, "the first request must be HELLO")
            else:
                answer = self._answer(header, body)
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

    async def _send(self, connection: socket.socket, header: wire.Header, answer: _Answer) -> None:
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
        return {"connections": len(self._connections), **asdict(self.counters)}

    # Answers --------------------------------------------------------------------------------------

    def _greet(self, header: wire.Header, body: bytes) -> _Answer:
        cluster, name = wire.parse_hello(body)
        if cluster != self._cluster:
            own = wire.pack_hello(self._cluster, AGENT_TARGET)
            return _Answer(body=own, status=wire.Status.WRONG_CLUSTER)
        if name != AGENT_TARGET:
            text = f"target {name!r} is not here; this is an agent, {AGENT_TARGET!r}"
            return _refusal(wire.Status.WRONG_TARGET, text)
        return _Answer(body=body)

    def _answer(self, header: wire.Header, body: bytes) -> _Answer:
        answer = self._answer_by_op.get(header.op)
        if answer is None:
            text = f"{wire.Op(header.op).name} is for a storage node, and this is an agent"
            return _refusal(wire.Status.BAD_REQUEST, text)
        try:
            return answer(header, body)
        except InvalidArgument as error:
            return _refusal(wire.Status.BAD_REQUEST, str(error))

    def _stat(self, header: wire.Header, body: bytes) -> _Answer:
        document = json.dumps(self._status(), separators=(",", ":")).encode()
        if len(document) > wire.BODY_BYTES_MAX:
            text = f"STAT would be {len(document)} bytes long, at most {wire.BODY_BYTES_MAX}"
            return _refusal(wire.Status.BUSY, text)
        return _Answer(body=document)

    def _look_up(self, header: wire.Header, body: bytes) -> _Answer:
        hosts = self._part().look_up(wire.split_keys(body, header.count))
        return _Answer(body=pack_hosts(hosts), count=header.count)

    def _announce(self, header: wire.Header, body: bytes) -> _Answer:
        part = self._part()
        return _Answer(body=pack_answer(part.announce(parse_announcement(body, header.count))))

    def _part(self) -> DirectoryHost:
        if self._directory is None:
            raise InvalidArgument(
                "LOOKUP or ANNOUNCE",
                given="to an agent without a part of the window directory",
                expected="an entrypoint of the cluster map",
            )
        return self._directory

    def _window(self, header: wire.Header, body: bytes) -> _Answer:
        record = self._find(parse_window_request(body))
        if record is None:
            self.counters.windows_absent += 1
            return _Answer()
        self.counters.windows_sent += 1
        head = record.pack_head(self._ttl_left_s(record))
        return _Answer(body=head, count=1, payload=record.view)


class _TooSlow(Exception):
    """A frame was begun and did not end in time."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What goes into one frame."""

    body: bytes = b""
    count: int = 0
    status: wire.Status = wire.Status.OK
    payload: memoryview | None = None


def _refusal(status: wire.Status, text: str) -> _Answer:
    return _Answer(body=text.encode(errors="backslashreplace"), status=status)
