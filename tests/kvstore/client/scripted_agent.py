"""An agent that a test plays line by line: a Unix socket, messages by kvstore.agent_messages.

It runs in the test's own event loop, so what happens first is what the test says first. What the
real one does is tested with the real one; here it does what the real one should never do.
"""

from __future__ import annotations

import array
import asyncio
import os
import shutil
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from kvstore.agent_messages import (
    HEAD,
    PROTOCOL_VERSION,
    FetchRun,
    Hello,
    LeaseRun,
    Message,
    NamespaceOpened,
    OpenNamespace,
    Request,
    RunLeased,
    Welcome,
    pack_message,
    request_decoder,
)
from kvstore.arena.region import ArenaRegion, RunMemory
from kvstore.arena.run_layout import RunLayout
from kvstore.arena.wakeup import Waker, make_wakeup
from kvstore.layout import BlockLayout
from tests.patience import PATIENCE_S

ARENA_BYTES = 4 << 20
RequestT = TypeVar("RequestT", bound=Message)


class ScriptedAgent:
    """Listens on a socket of its own; each connection is accepted when the test says so."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
        self.path = self.folder / "a.sock"
        self._connections: list[AgentEnd] = []
        self._listener: socket.socket | None = None
        self.arena_descriptor = ArenaRegion.create(ARENA_BYTES)
        self.region = ArenaRegion(self.arena_descriptor)

    def listen(self, backlog: int = 8) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(os.fspath(self.path))
        self._listener.listen(backlog)

    async def accept(self) -> AgentEnd:
        """The next connection, nothing read from it yet."""
        assert self._listener is not None
        async with asyncio.timeout(PATIENCE_S):
            accepted, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        accepted.setblocking(False)
        self._connections.append(AgentEnd(accepted, self))
        return self._connections[-1]

    async def accept_and_greet(self) -> AgentEnd:
        """The next connection, after its Hello was answered as a good agent does."""
        end = await self.accept()
        await end.greet()
        return end

    def stop_listening(self) -> None:
        assert self._listener is not None
        self._listener.close()

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_listening()
        for end in self._connections:
            end.close()
        self.region.close()
        os.close(self.arena_descriptor)
        shutil.rmtree(self.folder)


class AgentEnd:
    """The agent's end of one connection."""

    def __init__(self, accepted: socket.socket, agent: ScriptedAgent) -> None:
        self._socket = accepted
        self._agent = agent
        self._wakers: list[Waker] = []
        self.client_runs: list[object] = []
        """Held for an engine as long as its connection: a run that is forgotten is released."""

    async def read(self, kind: type[RequestT]) -> tuple[int, RequestT]:
        """The next request, which must be of that kind, and its id."""
        request_id, request = await self.read_any()
        assert isinstance(request, kind), request
        return request_id, request

    async def read_any(self) -> tuple[int, Request]:
        length, request_id = HEAD.unpack(await self._read(HEAD.size))
        return request_id, request_decoder.decode(await self._read(length))

    async def greet(self, *, version: int = PROTOCOL_VERSION, has_arena: bool = True) -> None:
        request_id, _ = await self.read(Hello)
        welcome = Welcome(
            version=version,
            agent="scripted",
            instance=7,
            roles=["check", "fetch", "store"],
            arena_bytes=ARENA_BYTES if has_arena else 0,
            cluster_path="/nowhere/cluster.toml",
        )
        descriptors = [self._agent.arena_descriptor] if has_arena else []
        await self.answer(request_id, welcome, descriptors)

    async def open_namespace(self, number: int = 3) -> OpenNamespace:
        request_id, request = await self.read(OpenNamespace)
        await self.answer(request_id, NamespaceOpened(number))
        return request

    async def lease(self, layout: BlockLayout, *, run: int, offset: int = 0) -> ScriptedRun:
        """Answer the next request, for a run, with as many blocks as it wants."""
        request_id, request = await self.read(LeaseRun)
        waker = await self.answer_with_run(request_id, RunLeased(run, offset, request.blocks))
        memory = self._agent.region.run(offset, RunLayout(layout, request.blocks))
        return ScriptedRun(memory, waker)

    async def answer_with_run(self, request_id: int, leased: RunLeased) -> Waker:
        """The answer that brings a run, and the writing end of the run's wake-ups."""
        waker, reader = make_wakeup()
        self._wakers.append(waker)
        await self.answer(request_id, leased, [reader])
        os.close(reader)
        return waker

    async def begin_fetch(self) -> tuple[int, FetchRun]:
        return await self.read(FetchRun)

    async def answer(
        self, request_id: int, answer: Message, descriptors: list[int] | None = None
    ) -> None:
        await self.send(pack_message(request_id, answer), descriptors)

    async def send(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Bytes as they are, descriptors beside the first of them."""
        rights = array.array("i", descriptors or [])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        sent = self._socket.sendmsg([data], ancillary)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.get_running_loop().sock_sendall(self._socket, data[sent:])

    async def read_to_the_end(self) -> bytes:
        """What comes until the client ends the connection."""
        data = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while part := await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16):
                data += part
        return bytes(data)

    def close(self) -> None:
        """As the kernel does for a process that dies."""
        self._socket.close()
        for waker in self._wakers:
            waker.close()
        self._wakers.clear()

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


class ScriptedRun:
    """A run as the agent and its workers see it."""

    def __init__(self, memory: RunMemory, waker: Waker) -> None:
        self.memory = memory
        self.waker = waker

    def ring(self) -> None:
        self.waker.wake()
