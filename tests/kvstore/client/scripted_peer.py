"""A node that a test plays line by line: raw sockets on loopback, frames by kvstore.wire.

It runs in the test's own event loop, so what happens first is what the test says first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvstore import wire
from kvstore.client.channel import NodeChannel
from kvstore.errors import NodeError
from tests.kvstore.faults.lying_proxy import Frame
from tests.patience import PATIENCE_S

CLUSTER = bytes(range(16))
TARGET = "t01"

Dial = Callable[..., NodeChannel]
"""Makes a channel to a port; see the fixture `dial`."""


class ScriptedPeer:
    """Listens on loopback; each connection is accepted when the test says so."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self._accepted: list[PeerConnection] = []

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    async def accept(self) -> PeerConnection:
        """The next connection, nothing read from it yet."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            accepted, _ = await loop.sock_accept(self._listener)
        accepted.setblocking(False)
        self._accepted.append(PeerConnection(accepted))
        return self._accepted[-1]

    async def accept_and_greet(self) -> PeerConnection:
        """The next connection, after its HELLO was answered as a good node does."""
        connection = await self.accept()
        hello = await connection.read_request()
        assert hello.header.op == wire.Op.HELLO
        await connection.answer(hello, body=hello.body)
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.close()
        for connection in self._accepted:
            connection.close()


class PeerConnection:
    """The node's end of one connection."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted

    async def read_request(self) -> Frame:
        """The next frame of the client."""
        header = wire.parse_header(await self._read(wire.HEADER_BYTES))
        body = await self._read(header.body_bytes)
        return Frame(header, body, await self._read(header.payload_bytes))

    async def answer(
        self,
        request: Frame,
        *,
        body: bytes = b"",
        payload: bytes = b"",
        count: int = 0,
        status: int = wire.Status.OK,
        is_last: bool = True,
        cut_bytes: int = 0,
    ) -> None:
        """Sends one frame of the answer, all but the last `cut_bytes` of its payload."""
        head = wire.pack_frame(
            wire.Op(request.header.op),
            wire.KIND_RESPONSE,
            request_id=request.header.request_id,
            body=body,
            count=count,
            payload_bytes=len(payload),
            status=status,
            is_last=is_last,
        )
        await self.send(head + payload[: len(payload) - cut_bytes])

    async def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read_to_the_end(self) -> None:
        """Returns when the client has ended the connection."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16):
                    pass

    def reset(self) -> None:
        """Ends the connection at once with a TCP reset: the client's next call will fail."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """Ends the connection in order."""
        self._socket.close()

    async def _read(self, size_bytes: int) -> bytes:
        parts = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while len(parts) < size_bytes:
                loop = asyncio.get_running_loop()
                part = await loop.sock_recv(self._socket, size_bytes - len(parts))
                if not part:
                    raise EOFError(f"{len(parts)} of {size_bytes} bytes")
                parts += part
        return bytes(parts)


class RecordingSink:
    """Takes down what a channel tells it. `place` receives the payload of every frame."""

    def __init__(self, place: memoryview | None = None) -> None:
        self.is_detached = False
        self.calls: list[str] = []
        self.error: NodeError | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.then_on_payload: Callable[[], object] | None = None
        self.then_on_failure: Callable[[], object] | None = None
        self._place = place

    async def end(self) -> None:
        """Returns when the answer has ended, well or not."""
        async with asyncio.timeout(PATIENCE_S):
            await self.ended

    def detach(self) -> None:
        self.is_detached = True
        self._place = None

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        self.calls.append("frame")
        return [] if self._place is None else [self._place[: header.payload_bytes]]

    def on_payload(self) -> None:
        self.calls.append("payload")
        if self.then_on_payload is not None:
            self.then_on_payload()

    def on_end(self) -> None:
        self.calls.append("end")
        self._finish()

    def on_failure(self, error: NodeError) -> None:
        self.calls.append("failure")
        self.error = error
        self._finish()
        if self.then_on_failure is not None:
            self.then_on_failure()

    def _finish(self) -> None:
        assert not self.ended.done(), f"told of its end twice: {self.calls}"
        self.ended.set_result(None)


def ask(channel: NodeChannel, sink: RecordingSink | None = None) -> RecordingSink:
    """Submits a small question."""
    sink = sink or RecordingSink()
    channel.submit(wire.Op.STAT, sink, deadline_s=1.0)
    return sink
