"""A proxy in front of a host that lets only a little of an answer through until a test says so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.kvstore.window.hosts import address_of


class Gate:
    """Passes what a peer sends on to one host, and what that answers only a little of, until it is
    opened. So a test can act in the middle of an answer, however much the system buffers."""

    PASSED_AT_ONCE_BYTES = 256 << 10

    def __init__(self, host: str) -> None:
        self._host = host
        self.address = ""
        self.is_begun = asyncio.Event()
        self.is_open = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with socket.socket() as behind:
            behind.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            behind.setblocking(False)
            loop = asyncio.get_running_loop()
            ip, _, port = self._host.rpartition(":")
            await loop.sock_connect(behind, (ip, int(port)))
            forward = asyncio.create_task(self._forward(reader, behind))
            try:
                await self._answer(behind, writer)
            except OSError:
                writer.transport.abort()
            finally:
                forward.cancel()
                writer.close()

    async def _forward(self, reader: asyncio.StreamReader, behind: socket.socket) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.get_running_loop().sock_sendall(behind, data)

    async def _answer(self, behind: socket.socket, writer: asyncio.StreamWriter) -> None:
        passed_bytes = 0
        while data := await asyncio.get_running_loop().sock_recv(behind, 1 << 16):
            writer.write(data)
            await writer.drain()
            passed_bytes += len(data)
            if passed_bytes > self.PASSED_AT_ONCE_BYTES:
                self.is_begun.set()
                await self.is_open.wait()


@asynccontextmanager
async def held_back(host: str) -> AsyncIterator[Gate]:
    """A gate in front of a host."""
    gate = Gate(host)
    tasks: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(gate.serve(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    gate.address = address_of(server.sockets[0])
    try:
        yield gate
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # an aborted transport closes its socket a turn later
