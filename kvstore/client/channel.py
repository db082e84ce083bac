"""One connection to one storage node: frames out, frames in, nothing copied.

A channel belongs to the event loop that made it. Requests are pipelined; the node answers them in
order, each into the `Sink` that came with the request (see receiver.py).

    closed --submit--> connecting --HELLO sent--> open --error, close--> closed

The channel knows no blocks, no code and no retry. It fails all its requests at once when the
connection fails, and tells its `NodeHealth` what it saw.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from .. import wire
from ..errors import DeadlineExceeded, NodeError, NodeUnreachable, ProtocolError
from .health import NodeHealth
from .receiver import AnswerReceiver, Sink, WaitingRequest

log = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 1.0
ANSWER_DEADLINE_S = 10.0
"""A request without an answer for so long ends its connection."""
REQUESTS_OUTSTANDING_MAX = 256
UNSENT_BYTES_MAX = 64 << 20
"""A node that does not read gets nothing more once so much waits for it."""
SCATTER_VIEWS_MAX = 128


class _Outgoing:
    """A frame on its way out; `views` shrinks as the kernel takes it."""

    __slots__ = ("request_id", "views")

    def __init__(self, request_id: int, views: list[memoryview]) -> None:
        self.request_id = request_id
        self.views = views


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
        self._socket: socket.socket | None = None
        self._is_open = False
        self._is_closed = False
        self._has_writer = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._connecting: asyncio.TimerHandle | None = None
        self._next_id = 1
        self._waiting: deque[WaitingRequest] = deque()
        self._outgoing: deque[_Outgoing] = deque()
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
    ) -> int:
        """Sends a request; its answer goes to `sink`. Returns the request's id.

        The views of `payload` must stay unchanged until the answer, or until `keep_payload`. A
        fault is reported through `sink.on_failure`, from the event loop, never from this call.
        """
        request_id = self._next_id
        self._next_id += 1
        refusal = self._why_refused(payload_bytes)
        if refusal:
            self._loop.call_soon(sink.on_failure, NodeUnreachable(self.node, refusal))
            return request_id
        if self._socket is None:
            self._connect()
        self._enqueue(request_id, op, sink, body, count, payload, payload_bytes, deadline_s)
        if self._is_open and not self._has_writer:
            self._flush()
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
        )
        self._waiting.append(WaitingRequest(request_id, op, sink, self._clock()))
        self._outgoing.append(_Outgoing(request_id, [memoryview(frame), *payload]))
        self._unsent_bytes += len(frame) + payload_bytes
        self.health.on_asked(self._waiting[0].sent_at_s)
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(ANSWER_DEADLINE_S, self._on_watchdog)

    def keep_payload(self, request_id: int) -> int:
        """Copies what is unsent of a request's payload, so that its owner may change it; bytes."""
        for outgoing in self._outgoing:
            if outgoing.request_id == request_id:
                kept = b"".join(outgoing.views)
                outgoing.views = [memoryview(kept)]
                return len(kept)
        return 0

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be sent or answered."""
        return not self._waiting

    def detach(self, sink: Sink) -> None:
        """From now on nothing of this sink's answer is written to the places it named."""
        sink.is_detached = True
        self._receiver.detach(sink)

    def _flush(self) -> None:
        """Hands the kernel what it takes; waits for writability if something is left."""
        assert self._socket is not None
        try:
            while self._outgoing:
                views = self._outgoing[0].views
                sent = self._socket.sendmsg(views[:SCATTER_VIEWS_MAX])
                self._unsent_bytes -= sent
                while sent:
                    if sent < len(views[0]):
                        views[0] = views[0][sent:]
                        break
                    sent -= len(views.pop(0))
                if not views:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(NodeUnreachable(self.node, f"send: {error}"))
            return
        if bool(self._outgoing) != self._has_writer:
            self._has_writer = bool(self._outgoing)
            if self._has_writer:
                self._loop.add_writer(self._socket, self._flush)
            else:
                self._loop.remove_writer(self._socket)

    # Connecting ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._enqueue(0, wire.Op.HELLO, _HelloSink(self), self._hello, 0, (), 0, CONNECT_DEADLINE_S)
        try:
            self._socket.connect((host, port))
        except BlockingIOError:
            self._connecting = self._loop.call_later(CONNECT_DEADLINE_S, self._on_connect_late)
            self._loop.add_writer(self._socket, self._on_connected)
            self._has_writer = True
        except OSError as error:
            self._loop.call_soon(self._fail, NodeUnreachable(self.node, f"connect: {error}"))
        else:
            self._begin()

    def _on_connected(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket)
        self._has_writer = False
        if self._connecting is not None:
            self._connecting.cancel()
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            host, port = self._address
            reason = f"connect to {host} port {port}: {os.strerror(code)}"
            self._fail(NodeUnreachable(self.node, reason))
        else:
            self._begin()

    def _begin(self) -> None:
        assert self._socket is not None
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
            self._fail(NodeUnreachable(self.node, f"receive: {error}"))

    def _on_answered(self, request: WaitingRequest) -> None:
        oldest_s = self._waiting[0].sent_at_s if self._waiting else None
        self.health.on_answered(self._clock() - request.sent_at_s, oldest_s)
        if request.op != wire.Op.HELLO:
            self.health.on_served()

    # Ending -------------------------------------------------------------------------------------

    def _on_watchdog(self) -> None:
        self._watchdog = None
        if not self._waiting:
            return
        age_s = self._clock() - self._waiting[0].sent_at_s
        if age_s >= ANSWER_DEADLINE_S:
            self._fail(DeadlineExceeded(self.node, f"no answer for {age_s:.1f} s"))
        else:
            self._watchdog = self._loop.call_later(ANSWER_DEADLINE_S - age_s, self._on_watchdog)

    def _fail(self, error: NodeError) -> None:
        """Ends the connection; every request that waits fails with `error`."""
        if self._socket is None:
            return
        log.info("node %s: %s", self.node, error.detail)
        self.health.on_failed()
        self._end(error)

    def _end(self, error: NodeError) -> None:
        waiting = list(self._waiting)
        self._disconnect()
        for request in waiting:
            request.sink.on_failure(error)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        for timer in (self._watchdog, self._connecting):
            if timer is not None:
                timer.cancel()
        self._watchdog = self._connecting = None
        self._socket = None
        self._is_open = self._has_writer = False
        self._waiting.clear()
        self._outgoing.clear()
        self._unsent_bytes = 0
        self._receiver.reset()

    def close(self) -> None:
        """Closes for good; requests that wait fail."""
        self._is_closed = True
        self._end(NodeUnreachable(self.node, "the client was closed"))


class _HelloSink:
    """The answer to HELLO: anything but OK fails the channel, so nobody talks to a stranger."""

    is_detached = False

    def __init__(self, channel: NodeChannel) -> None:
        self._channel = channel

    def on_frame(self, header: wire.Header, body: bytearray) -> Sequence[memoryview]:
        theirs, ours = wire.parse_hello(bytes(body)), wire.parse_hello(self._channel._hello)
        if theirs != ours:
            raise wire.FrameError(f"the node says it is {theirs}, expected {ours}")
        return ()

    def on_payload(self) -> None:
        """HELLO has no payload; `on_frame` refuses one."""

    def on_end(self) -> None:
        log.debug("node %s: connected", self._channel.node)

    def on_failure(self, error: NodeError) -> None:
        self._channel._fail(error)
