"""A server of sessions whose requests mean little, and a client that keeps no rules."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from kvstore import agent_messages as m
from kvstore.agent.replies import Reply, Running
from kvstore.agent.server import UnixServer
from kvstore.agent.session import Session
from kvstore.agent.session_bounds import SessionBounds
from kvstore.errors import StoreError
from kvstore.socket_file import SocketFile
from tests.patience import PATIENCE_S

MATCH = m.Match(namespace=0, keys=b"", deadline_s=1.0)


class ScriptedHandler:
    """Answers AskStatus at once, Match when `gate` is set, LeaseRun with a descriptor, a failing
    Forget; notes which sessions ended and how often work was cancelled."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.ended: list[int] = []
        self.cancelled = 0
        self.status = b"{}"
        self.put_bytes = 0
        self.fault: Exception = StoreError("no")

    def begin(self, session: Session, request: m.Request) -> Reply | Running:
        if isinstance(request, m.Match):
            return Running(self._match())
        if isinstance(request, m.Forget):
            return Running(self._fail())
        if isinstance(request, m.LeaseRun):
            descriptor = os.memfd_create(f"run-{request.blocks}")
            os.write(descriptor, b"%d" % request.blocks)
            # The session's copy, if it needs one, outlives ours.
            asyncio.get_running_loop().call_soon(os.close, descriptor)
            return Reply(m.RunLeased(run=request.blocks, offset=0, blocks=1), descriptor)
        return Reply(m.StatusTold(self.status))

    async def _match(self) -> Reply:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Reply(m.Matched(0))

    async def _fail(self) -> Reply:
        raise self.fault

    def copied_bytes(self, session: Session, request: m.Request) -> int:
        return self.put_bytes if isinstance(request, m.PutWindow) else 0

    def end_session(self, session: Session) -> None:
        self.ended.append(session.number)


class CountingHandler(ScriptedHandler):
    """Counts AskStatus, and notes how many came before each AskNodes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.asked_before_nodes: list[int] = []

    def begin(self, session: Session, request: m.Request) -> Reply | Running:
        if isinstance(request, m.AskNodes):
            self.asked_before_nodes.append(self.asked)
        else:
            self.asked += 1
        return super().begin(session, request)


class TurnHandler(ScriptedHandler):
    """Notes session and run of each PutWindow, and counts rounds of the event loop from the first
    one on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, int]] = []
        self.rounds = 0

    def begin(self, session: Session, request: m.Request) -> Reply | Running:
        if isinstance(request, m.PutWindow):
            if not self.begun:
                self._count_round()
            self.begun.append((session.number, request.run))
        return super().begin(session, request)

    def _count_round(self) -> None:
        self.rounds += 1
        asyncio.get_running_loop().call_soon(self._count_round)


class GivingHandler(ScriptedHandler):
    """Answers LeaseRun with a descriptor that the session is to close, the second time too late."""

    def __init__(self) -> None:
        super().__init__()
        self.gave = 0

    def begin(self, session: Session, request: m.Request) -> Reply | Running:
        if isinstance(request, m.LeaseRun):
            return Running(self._give(session)) if self.gave else self._reply()
        return super().begin(session, request)

    def _reply(self) -> Reply:
        self.gave += 1
        leased = m.RunLeased(run=1, offset=0, blocks=1)
        return Reply(leased, os.memfd_create("given"), is_descriptor_given=True)

    async def _give(self, session: Session) -> Reply:
        # The answer is ready, and the session ends before it is told.
        asyncio.get_running_loop().call_soon(session.close, "at this moment")
        return self._reply()


class Client:
    """A connection without any rules."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.setblocking(False)
        self.socket.connect(os.fspath(path))
        self.received = bytearray()
        self.descriptors: list[int] = []

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def ask(self, request: m.Message, request_id: int = 1) -> m.Answer:
        await self.send(m.pack_message(request_id, request))
        return await self.answer()

    async def answer(self) -> m.Answer:
        while True:
            if len(self.received) >= m.HEAD.size:
                length, _ = m.HEAD.unpack_from(self.received)
                if len(self.received) >= m.HEAD.size + length:
                    body = bytes(self.received[m.HEAD.size : m.HEAD.size + length])
                    del self.received[: m.HEAD.size + length]
                    return m.answer_decoder.decode(body)
            assert await self.receive(), "the session ended"

    async def receive(self) -> bool:
        """Takes what comes; False at the end."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.socket, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), PATIENCE_S)
        finally:
            loop.remove_reader(self.socket)
        try:
            data, beside, _, _ = self.socket.recvmsg(1 << 16, 1024)
        except ConnectionResetError:
            return False
        for _, _, content in beside:
            self.descriptors.extend(array.array("i", content))
        self.received += data
        return bool(data)

    async def wait_until_ended(self) -> None:
        while await self.receive():
            continue

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@asynccontextmanager
async def serving(
    path: Path, handler: ScriptedHandler, *, uid: int | None = None, **bounds: float
) -> AsyncIterator[UnixServer]:
    limits = SessionBounds(**bounds)  # type: ignore[arg-type]
    with SocketFile(path, os.getpid()) as found:
        async with asyncio.TaskGroup() as group:
            server = UnixServer(
                found.listener,
                handler,
                group=group,
                loop=asyncio.get_running_loop(),
                uid=os.geteuid() if uid is None else uid,
                bounds=limits,
            )
            server.start()
            try:
                yield server
            finally:
                server.stop_accepting()
                server.close_sessions("the test ends")


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def send_all(client: Client, pieces: Iterable[bytes], *, pause_s: float = 0.0) -> None:
    for piece in pieces:
        await client.send(piece)
        await asyncio.sleep(pause_s)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
