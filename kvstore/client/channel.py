"""One connection to one storage node: frames out, frames in, nothing copied.

A channel belongs to the event loop that made it. Requests are pipelined; the node answers them in
order, each into the `Sink` that came with the request (see receiver.py).

    closed --submit--> connecting --HELLO sent--> open --error, close--> closed

The channel knows no blocks, no code and no retry. When the connection fails, all its requests fail
at once; the next request connects anew. A sink is told of a failure from the event loop, never
from within the call that submitted its request.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from .. import wire
from ..errors import DeadlineExceeded, NodeError, NodeUnreachable, ProtocolError
from .health import NodeHealth
from .outgoing import OutgoingFrame
from .receiver import AnswerReceiver, Sink, WaitingRequest

log = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 1.0
ANSWER_DEADLINE_S = 10.0
"""A request without an answer for so long ends its connection."""
REQUESTS_OUTSTANDING_MAX = 256
UNSENT_BYTES_MAX = 64 << 20
"""A node that does not read gets nothing more once so much waits for it."""


class NodeChannel:
    """A pipelined connection to `address` for one target of one node."""

    def __init__(
        self,
        *,
        node: str,
        address: tuple[str, int],
        cluster: bytes,
        target: str,
        target_index: int,
        epoch: int,
        health: NodeHealth,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self.node = node
        self.health = health
        self._address = address
        self._hello = wire.pack_hello(cluster, target)
        self._target_index = target_index
        self._epoch = epoch
        self._loop = loop
        self._clock = clock
        self._is_closed = False
        self._next_id = 1
        self._attempt = 0
        """Grows with every connection that begins or ends: what an old one left is not heard."""
        self._is_begun = False
        self._is_open = False
        self._has_writer = False
        self._socket: socket.socket | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._connect_timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None
        self._waiting: deque[WaitingRequest] = deque()
        self._outgoing: deque[OutgoingFrame] = deque()
        self._unsent_bytes = 0
        self._receiver = AnswerReceiver(node, self._waiting, self._on_answered)

    # Sending ------------------------------------------------------------------------------------

    def submit(
        self,
        op: wire.Op,
        sink: Sink,
        *,
        body: bytes = b"",
        count: int = 0,
        payload: Sequence[memoryview] = (),
        payload_bytes: int = 0,
        deadline_s: float,
        is_probe: bool = False,
    ) -> int:
        """Sends a request; its answer goes to `sink`. Returns the request's id.

        The views of `payload` must stay unchanged until the answer, or until `keep_payload`. A
        fault is reported through `sink.on_failure`, from the event loop, never from this call.
        `is_probe`: of MATCH, see wire.md.
        """
        request_id = self._next_id
        self._next_id += 1
        refusal = self._why_refused(payload_bytes)
        if refusal:
            self._loop.call_soon(sink.on_failure, NodeUnreachable(self.node, refusal))
            return request_id
        if not self._is_begun:
            self._begin()
        self._enqueue(
            request_id, op, sink, body, count, payload, payload_bytes, deadline_s, is_probe
        )
        return request_id

    def _why_refused(self, payload_bytes: int) -> str:
        if self._is_closed:
            return "the client was closed"
        if len(self._waiting) >= REQUESTS_OUTSTANDING_MAX:
            return f"{len(self._waiting)} requests wait for it already"
        if self._outgoing and self._unsent_bytes + payload_bytes > UNSENT_BYTES_MAX:
            return f"{self._unsent_bytes} bytes wait to be sent to it already"
        return ""

    def _enqueue(
        self,
        request_id: int,
        op: wire.Op,
        sink: Sink,
        body: bytes,
        count: int,
        payload: Sequence[memoryview],
        payload_bytes: int,
        deadline_s: float,
        is_probe: bool = False,
    ) -> None:
        frame = wire.pack_frame(
            op,
            wire.KIND_REQUEST,
            request_id=request_id,
            body=body,
            count=count,
            payload_bytes=payload_bytes,
            epoch=self._epoch,
            deadline_ms=max(1, min(int(deadline_s * 1000), 0xFFFFFFFF)),
            target=self._target_index,
            is_probe=is_probe,
        )
        self._waiting.append(WaitingRequest(request_id, op, sink, self._clock()))
        self.health.on_asked(self._waiting[0].sent_at_s)
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(ANSWER_DEADLINE_S, self._on_watchdog)
        sent = 0 if payload else self._send_at_once(frame)
        if sent < len(frame):
            left_bytes = len(frame) - sent + payload_bytes
            views = [memoryview(frame)[sent:], *payload]
            self._outgoing.append(OutgoingFrame(request_id, views, left_bytes))
            self._unsent_bytes += left_bytes
            if self._is_open and not self._has_writer:
                self._flush()

    def keep_payload(self, request_id: int) -> int:
        """Copies what is unsent of a request's payload, so that its owner may change it; bytes."""
        for outgoing in self._outgoing:
            if outgoing.request_id == request_id:
                return outgoing.keep()
        return 0

    def detach(self, sink: Sink) -> None:
        """From now on nothing of this sink's answer is written to the places it named."""
        self._receiver.detach(sink)
        sink.detach()

    def _send_at_once(self, frame: bytes) -> int:
        """Bytes of a frame without payload that the kernel takes now, if nothing is before it."""
        if self._socket is None or not self._is_open or self._outgoing:
            return 0
        try:
            return self._socket.send(frame)
        except OSError:
            return 0  # `_flush` meets it again, and knows what to do

    def _flush(self) -> None:
        """Hands the kernel what it takes; waits for writability if something is left."""
        assert self._socket is not None
        try:
            while self._outgoing:
                self._unsent_bytes -= self._outgoing[0].send_some(self._socket)
                if not self._outgoing[0].left_bytes:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail_soon(f"send: {error.strerror}")
            return
        if bool(self._outgoing) != self._has_writer:
            self._has_writer = bool(self._outgoing)
            if self._has_writer:
                self._loop.add_writer(self._socket, self._flush)
            else:
                self._loop.remove_writer(self._socket)

    # Connecting ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._is_begun = True
        self._attempt += 1
        self._enqueue(0, wire.Op.HELLO, _HelloSink(self), self._hello, 0, (), 0, CONNECT_DEADLINE_S)
        self._connect_timer = self._loop.call_later(CONNECT_DEADLINE_S, self._on_connect_late)
        host, _ = self._address
        if _is_ip_address(host):
            self._connect(host)
        else:
            self._resolving = asyncio.ensure_future(self._resolve(host))

    async def _resolve(self, host: str) -> None:
        try:
            found = await self._loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            self._fail_soon(f"{host}: {error.strerror}")
        else:
            self._connect(str(found[0][4][0]))

    def _connect(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self._socket.connect_ex((host, self._address[1]))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS) or self._socket is None:
            self._fail_soon(f"connect: {os.strerror(code)}")
            return
        self._loop.add_writer(self._socket, self._on_connected)
        self._has_writer = True

    def _on_connected(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket)
        self._has_writer = False
        if self._connect_timer is not None:
            self._connect_timer.cancel()
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            host, port = self._address
            reason = f"connect to {host} port {port}: {os.strerror(code)}"
            self._fail(NodeUnreachable(self.node, reason))
            return
        self._is_open = True
        self._loop.add_reader(self._socket, self._on_readable)
        self._flush()

    def _on_connect_late(self) -> None:
        self._fail(NodeUnreachable(self.node, f"no connection within {CONNECT_DEADLINE_S} s"))

    # Receiving ----------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            self._receiver.receive(self._socket)
        except BlockingIOError:
            return
        except wire.FrameError as error:
            self._fail(ProtocolError(self.node, str(error)))
        except OSError as error:
            self._fail(NodeUnreachable(self.node, f"receive: {error.strerror or error}"))

    def _on_answered(self, request: WaitingRequest, is_ok: bool) -> None:
        oldest_s = self._waiting[0].sent_at_s if self._waiting else None
        self.health.on_answered(
            self._clock() - request.sent_at_s,
            oldest_s,
            is_served=is_ok and request.op != wire.Op.HELLO,
        )
        self._tell_idle()

    # Ending -------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be sent or answered."""
        return not self._waiting

    async def wait_until_idle(self) -> None:
        """Returns when nothing waits to be sent or answered. For one caller at a time."""
        if self._waiting:
            self._idle = self._loop.create_future()
            await self._idle

    def _tell_idle(self) -> None:
        if self._waiting:
            return  # a sink that was told of a failure may have asked again
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        self._idle = None

    def _on_watchdog(self) -> None:
        self._watchdog = None
        if not self._waiting:
            return
        age_s = self._clock() - self._waiting[0].sent_at_s
        if age_s >= ANSWER_DEADLINE_S:
            self._fail(DeadlineExceeded(self.node, f"no answer for {age_s:.1f} s"))
        else:
            self._watchdog = self._loop.call_later(ANSWER_DEADLINE_S - age_s, self._on_watchdog)

    def _fail_soon(self, detail: str) -> None:
        """Fails this connection, unless another has followed it, once the present call is done."""
        attempt = self._attempt

        def fail() -> None:
            if attempt == self._attempt:
                self._fail(NodeUnreachable(self.node, detail))

        self._loop.call_soon(fail)

    def _fail(self, error: NodeError) -> None:
        """Ends the connection; every request that waits fails with `error`."""
        if not self._is_begun:
            return
        log.info("node %s: %s", self.node, error.detail)
        self.health.on_failed()
        self._end(error)

    def _end(self, error: NodeError) -> None:
        waiting = list(self._waiting)
        self._disconnect()
        for request in waiting:
            request.sink.on_failure(error)
        self._tell_idle()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        for handle in (self._watchdog, self._connect_timer, self._resolving):
            if handle is not None:
                handle.cancel()
        self._watchdog = self._connect_timer = self._resolving = None
        self._socket = None
        self._attempt += 1
        self._is_begun = self._is_open = self._has_writer = False
        self._waiting.clear()
        self._outgoing.clear()
        self._unsent_bytes = 0
        self._receiver.reset()
        self.health.on_disconnected()

    def close(self) -> None:
        """Closes for good; requests that wait fail."""
        self._is_closed = True
        self._end(NodeUnreachable(self.node, "the client was closed"))


class _HelloSink:
    """The answer to HELLO: anything but OK fails the channel, so nobody talks to a stranger."""

    is_detached = False

    def __init__(self, channel: NodeChannel) -> None:
        self._channel = channel

    def detach(self) -> None:
        """Nobody gives up a greeting but the channel itself."""

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        theirs, ours = wire.parse_hello(bytes(body)), wire.parse_hello(self._channel._hello)
        if theirs != ours:
            raise wire.FrameError(f"the node says it is {theirs}, expected {ours}")
        return ()

    def on_payload(self) -> None:
        """HELLO has no payload; `on_frame` names no place for one."""

    def on_end(self) -> None:
        log.debug("node %s: connected", self._channel.node)

    def on_failure(self, error: NodeError) -> None:
        self._channel._fail(error)


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
