"""Reads the answers that come over one connection, in order, each into its sink.

A `Sink` says where a payload is to land, so that shards arrive straight in their final place. A
sink that has lost interest is *detached*: from then on its bytes are drained into a waste buffer,
also in the middle of a payload, and never touch the caller's memory again.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .. import wire
from ..errors import NodeError, NodeRefused

SCATTER_VIEWS_MAX = 128
READS_PER_WAKEUP = 8
"""After so many receives the loop turns to the other connections."""
_OK = int(wire.Status.OK)
INBOX_BYTES = 16 * 1024
"""Holds header, body and payload of a small answer, so that one system call takes all of it."""
WASTE_BYTES = 256 * 1024
_WASTE = memoryview(bytearray(WASTE_BYTES))
"""One for all connections: what is in it is never read, and the kernel does not even write it."""


class Sink(Protocol):
    """Where the answer to one request goes. All calls come from the event loop, in this order:
    any number of (`on_frame`, `on_payload`) pairs, then one of `on_end` or `on_failure`."""

    is_detached: bool

    def detach(self) -> None:
        """Nobody wants this answer any more: sets `is_detached` and lets go of everything else."""

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
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


class WaitingRequest(NamedTuple):
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
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self.reset()

    def reset(self) -> None:
        """Ready for a new connection; forgets what has begun."""
        self._start = self._end = 0
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._header: wire.Header | None = None
        self._payload_left_bytes = 0
        self._views: list[memoryview] = []
        self._view_at = 0

    def detach(self, sink: Sink) -> None:
        """What is left of a payload for `sink` goes to waste."""
        if self._payload_left_bytes and self._waiting[0].sink is sink:
            self._views = []

    def receive(self, connection: socket.socket) -> None:
        """Takes what has arrived, within a bound.

        Raises BlockingIOError if there is nothing, wire.FrameError, OSError. A sink may end the
        connection from within; then this receiver was reset and the socket is closed.
        """
        for _ in range(READS_PER_WAKEUP):
            if self._payload_left_bytes:
                is_drained = self._receive_payload(connection)
            else:
                is_drained = self._receive_head(connection)
            if is_drained or connection.fileno() < 0:
                return

    # Headers and bodies, through the inbox --------------------------------------------------------

    def _receive_head(self, connection: socket.socket) -> bool:
        """One receive; True if it took all there was."""
        room = self._room()
        received = connection.recv_into(room)
        if received == 0:
            raise ConnectionResetError("the node closed the connection")
        self._end += received
        self._empty_inbox()
        return received < len(room)

    def _room(self) -> memoryview:
        """Free bytes of the inbox, as many at least as are missing of a header or a body."""
        needed = wire.HEADER_BYTES if self._header is None else self._header.body_bytes
        if self._start + needed > len(self._inbox):
            arrived = bytes(self._inbox[self._start : self._end])
            if needed > len(self._inbox):
                # The header was checked: a body is 1 MiB at most.
                self._inbox = memoryview(bytearray(needed))
            self._inbox[: len(arrived)] = arrived
            self._start, self._end = 0, len(arrived)
        return self._inbox[self._end :]

    def _empty_inbox(self) -> None:
        """Takes whole headers and bodies out of the inbox, and what came of payloads with them."""
        while self._end > self._start and not self._payload_left_bytes:
            header = self._header or self._next_header()
            if header is None or self._end - self._start < header.body_bytes:
                break
            body = bytes(self._inbox[self._start : self._start + header.body_bytes])
            self._start += header.body_bytes
            self._on_body(header, body)
            if self._payload_left_bytes and self._end > self._start:
                self._spill(header)
        if self._start == self._end:
            self._start = self._end = 0

    def _next_header(self) -> wire.Header | None:
        end = self._start + wire.HEADER_BYTES
        if end > self._end:
            return None
        header = wire.parse_header(self._inbox[self._start : end])
        if not self._waiting:
            raise wire.FrameError("an answer to no request")
        expected = self._waiting[0]
        if header.kind != wire.KIND_RESPONSE or header.request_id != expected.request_id:
            raise wire.FrameError(
                f"answer to request {header.request_id}, expected {expected.request_id}"
            )
        if header.op != expected.op:
            raise wire.FrameError(f"answer to operation {header.op}, expected {expected.op}")
        self._start = end
        self._header = header
        return header

    def _on_body(self, header: wire.Header, body: bytes) -> None:
        wire.check_body(header, body)
        sink = self._waiting[0].sink
        if header.status == _OK:
            places = sink.on_frame(header, body)
            self._views = [] if sink.is_detached else list(places)
            if not sink.is_detached and sum(map(len, places)) != header.payload_bytes:
                raise wire.FrameError(f"payload of {header.payload_bytes} bytes was not asked for")
        elif not header.is_last or header.payload_bytes:
            raise wire.FrameError(f"status {header.status} with a payload or more to come")
        self._payload_left_bytes = header.payload_bytes
        if not header.payload_bytes:
            self._end_frame(header)

    # Payloads, into their places ------------------------------------------------------------------

    def _spill(self, header: wire.Header) -> None:
        """Copies to its place what the inbox has of a payload that begins."""
        count = min(self._payload_left_bytes, self._end - self._start)
        arrived = self._inbox[self._start : self._start + count]
        self._start += count
        for view in self._views:
            part = arrived[: len(view)]
            view[: len(part)] = part
            arrived = arrived[len(part) :]
            if not arrived:
                break
        self._on_received(header, count)

    def _receive_payload(self, connection: socket.socket) -> bool:
        """One receive; True if there is nothing more now."""
        header = self._header
        assert header is not None
        if self._views:
            window = self._views[self._view_at : self._view_at + SCATTER_VIEWS_MAX]
            is_all_asked = self._view_at + len(window) == len(self._views)
            received = connection.recvmsg_into(window)[0]
        else:
            # MSG_TRUNC: the kernel throws TCP's bytes away without copying them (tcp(7)).
            asked_bytes = min(self._payload_left_bytes, WASTE_BYTES)
            is_all_asked = asked_bytes == self._payload_left_bytes
            received = connection.recv_into(_WASTE, asked_bytes, socket.MSG_TRUNC)
        if received == 0:
            raise ConnectionResetError("the node closed the connection within a payload")
        self._on_received(header, received)
        return is_all_asked if self._payload_left_bytes else not self._waiting

    def _on_received(self, header: wire.Header, received_bytes: int) -> None:
        self._payload_left_bytes -= received_bytes
        if not self._payload_left_bytes:
            self._end_frame(header)
        elif self._views:
            self._advance(received_bytes)

    def _advance(self, received_bytes: int) -> None:
        while received_bytes >= len(self._views[self._view_at]):
            received_bytes -= len(self._views[self._view_at])
            self._view_at += 1
        if received_bytes:
            self._views[self._view_at] = self._views[self._view_at][received_bytes:]

    def _end_frame(self, header: wire.Header) -> None:
        request = self._waiting[0]
        self._begin_frame()
        if header.status != _OK:
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
