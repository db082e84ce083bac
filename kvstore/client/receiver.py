"""Reads the answers that come over one connection, in order, each into its sink.

A `Sink` says where a payload is to land, so that shards arrive straight in their final place. A
sink that has lost interest is *detached*: from then on its bytes are drained into a waste buffer,
also in the middle of a payload, and never touch the caller's memory again.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .. import wire
from ..errors import NodeError, NodeRefused

SCATTER_VIEWS_MAX = 128
READS_PER_WAKEUP = 8
"""After so many receives the loop turns to the other connections."""
WASTE_BYTES = 256 * 1024


class Sink(Protocol):
    """Where the answer to one request goes. All calls come from the event loop, in this order:
    any number of (`on_frame`, `on_payload`) pairs, then one of `on_end` or `on_failure`."""

    is_detached: bool

    def detach(self) -> None:
        """Nobody wants this answer any more: sets `is_detached` and lets go of everything else."""

    def on_frame(self, header: wire.Header, body: bytearray) -> Sequence[memoryview]:
        """Returns where the payload goes: writable byte views, header.payload_bytes in all.

        Raises wire.FrameError if the frame, or the length of its payload, does not answer the
        request. It is called and checks for a detached sink too, since that bounds how much a node
        may send; the places it returns then do not matter.
        """

    def on_payload(self) -> None:
        """The payload announced by the last `on_frame` is in place. Not called when detached."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_failure(self, error: NodeError) -> None:
        """There will be no (more) answer."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits for its answer."""

    request_id: int
    op: wire.Op
    sink: Sink
    sent_at_s: float


class AnswerReceiver:
    """The receiving half of a connection. `waiting` holds the requests, oldest first; one is taken
    off when its answer is complete, and `on_answered` is told whether its status was OK."""

    def __init__(
        self,
        node: str,
        waiting: deque[WaitingRequest],
        on_answered: Callable[[WaitingRequest, bool], None],
    ) -> None:
        self._node = node
        self._waiting = waiting
        self._on_answered = on_answered
        self._waste = memoryview(bytearray(WASTE_BYTES))
        self._header_view = memoryview(bytearray(wire.HEADER_BYTES))
        self._views: list[memoryview] = []
        self.reset()

    def reset(self) -> None:
        """Ready for the next header; forgets a frame that has begun."""
        self._header: wire.Header | None = None
        self._body = bytearray()
        self._got_bytes = 0
        self._payload_left_bytes = 0
        self._views = []
        self._view_at = 0

    def detach(self, sink: Sink) -> None:
        """What is left of a payload for `sink` goes to waste."""
        if self._payload_left_bytes and self._waiting[0].sink is sink:
            self._views = []

    def receive(self, connection: socket.socket) -> None:
        """Takes what has arrived, within a bound.

        Raises BlockingIOError when there is no more, wire.FrameError, OSError. A sink may end the
        connection from within; then this receiver was reset and the socket is closed.
        """
        for _ in range(READS_PER_WAKEUP):
            if connection.fileno() < 0:
                return
            if self._payload_left_bytes:
                self._receive_payload(connection)
            else:
                self._receive_head(connection)

    def _receive_head(self, connection: socket.socket) -> None:
        into = self._header_view if self._header is None else memoryview(self._body)
        received = connection.recv_into(into[self._got_bytes :])
        if received == 0:
            raise ConnectionResetError("the node closed the connection")
        self._got_bytes += received
        if self._got_bytes < len(into):
            return
        self._got_bytes = 0
        if self._header is None:
            self._on_header()
        else:
            self._on_body(self._header)

    def _on_header(self) -> None:
        header = wire.parse_header(self._header_view)
        if not self._waiting:
            raise wire.FrameError("an answer to no request")
        expected = self._waiting[0]
        if header.kind != wire.KIND_RESPONSE or header.request_id != expected.request_id:
            raise wire.FrameError(
                f"answer to request {header.request_id}, expected {expected.request_id}"
            )
        if header.op != expected.op:
            raise wire.FrameError(f"answer to operation {header.op}, expected {expected.op}")
        self._header = header
        self._body = bytearray(header.body_bytes)
        if not header.body_bytes:
            self._on_body(header)

    def _on_body(self, header: wire.Header) -> None:
        wire.check_body(header, self._body)
        sink = self._waiting[0].sink
        if header.status == wire.Status.OK:
            places = sink.on_frame(header, self._body)
            self._views = [] if sink.is_detached else list(places)
            if not sink.is_detached and sum(map(len, places)) != header.payload_bytes:
                raise wire.FrameError(f"payload of {header.payload_bytes} bytes was not asked for")
        elif not header.is_last or header.payload_bytes:
            raise wire.FrameError(f"status {header.status} with a payload or more to come")
        self._view_at = 0
        self._payload_left_bytes = header.payload_bytes
        if not header.payload_bytes:
            self._end_frame(header)

    def _receive_payload(self, connection: socket.socket) -> None:
        header = self._header
        assert header is not None
        if self._views:
            window = self._views[self._view_at : self._view_at + SCATTER_VIEWS_MAX]
            received = connection.recvmsg_into(window)[0]
        else:
            # MSG_TRUNC: the kernel throws TCP's bytes away without copying them (tcp(7)).
            received = connection.recv_into(
                self._waste, min(self._payload_left_bytes, WASTE_BYTES), socket.MSG_TRUNC
            )
        if received == 0:
            raise ConnectionResetError("the node closed the connection within a payload")
        self._payload_left_bytes -= received
        if not self._payload_left_bytes:
            self._end_frame(header)
        elif self._views:
            self._advance(received)

    def _advance(self, received_bytes: int) -> None:
        while received_bytes >= len(self._views[self._view_at]):
            received_bytes -= len(self._views[self._view_at])
            self._view_at += 1
        if received_bytes:
            self._views[self._view_at] = self._views[self._view_at][received_bytes:]

    def _end_frame(self, header: wire.Header) -> None:
        request = self._waiting[0]
        self.reset()
        if header.status != wire.Status.OK:
            self._end_request(request, is_ok=False)
            request.sink.on_failure(NodeRefused(self._node, _status_name(header.status)))
            return
        if not request.sink.is_detached:
            request.sink.on_payload()
        if header.is_last:
            self._end_request(request, is_ok=True)
            request.sink.on_end()

    def _end_request(self, request: WaitingRequest, *, is_ok: bool) -> None:
        assert self._waiting.popleft() is request, "an answer ended out of order"
        self._on_answered(request, is_ok)


def _status_name(status: int) -> str:
    try:
        return wire.Status(status).name
    except ValueError:
        return f"status {status}"
