"""Sessions within their bounds: whatever a client does, it costs its own session at most."""

from __future__ import annotations

import array
import asyncio
import logging
import os
import random
import shutil
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore import agent_messages as m
from kvstore.agent.replies import Reply, Running
from kvstore.agent.server import UnixServer
from kvstore.agent.session import Session
from kvstore.agent.session_bounds import SessionBounds
from kvstore.agent.socket_file import SocketFile
from kvstore.errors import StoreError

from .agent_process import short_folder

NOBODY = 65_534
MATCH = m.Match(namespace=0, keys=b"", deadline_s=1.0)


class ScriptedHandler:
    """Answers AskStatus at once, Match when `gate` is set, LeaseRun with a descriptor, a failing
    Forget; notes which sessions ended and how often work was cancelled."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.ended: list[int] = []
        self.cancelled = 0
        self.status = b"{}"
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

    def end_session(self, session: Session) -> None:
        self.ended.append(session.number)


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
            await asyncio.wait_for(readable.wait(), 10)
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


@pytest.fixture
def path() -> Iterator[Path]:
    folder = short_folder()
    yield folder / "a.sock"
    shutil.rmtree(folder)


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
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def send_all(client: Client, pieces: Iterable[bytes], *, pause_s: float = 0.0) -> None:
    for piece in pieces:
        await client.send(piece)
        await asyncio.sleep(pause_s)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Malformed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        m.HEAD.pack(2**32 - 1, 1),
        m.HEAD.pack(0, 1),
        m.HEAD.pack(3, 1) + b"\xc1\xc1\xc1",
        random.Random(1).randbytes(5_000),
    ],
)
async def test_malformed_message_ends_its_session_alone_with_one_line(
    path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    handler = ScriptedHandler()
    async with serving(path, handler) as server:
        other, client = Client(path), Client(path)
        await other.ask(m.AskStatus())
        await client.send(data)
        await client.wait_until_ended()
        lines = [one for one in caplog.records if "malformed message" in one.getMessage()]
        assert len(lines) == 1
        assert "\n" not in lines[0].getMessage()
        assert isinstance(await other.ask(m.AskStatus()), m.StatusTold)
        assert server.describe()["open"] == 1
        client.close()
        other.close()


async def test_messages_before_a_malformed_one_are_answered(path: Path) -> None:
    async with serving(path, ScriptedHandler()):
        client = Client(path)
        await client.send(m.pack_message(1, m.AskStatus()) + m.HEAD.pack(0, 2))
        assert isinstance(await client.answer(), m.StatusTold)
        await client.wait_until_ended()
        client.close()


# Slow ---------------------------------------------------------------------------------------------


async def test_message_that_comes_byte_by_byte_ends_its_session_in_time(path: Path) -> None:
    async with serving(path, ScriptedHandler(), message_s=0.3) as server:
        client = Client(path)
        await client.ask(m.AskStatus())
        pieces = [bytes([byte]) for byte in m.pack_message(1, m.Hello(version=1, client="x" * 128))]
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await send_all(client, pieces, pause_s=0.02)
        assert server.describe()["open"] == 0
        client.close()


async def test_session_that_never_says_anything_is_ended_in_time(path: Path) -> None:
    async with serving(path, ScriptedHandler(), message_s=0.1):
        client = Client(path)
        await client.wait_until_ended()
        client.close()


async def test_session_may_rest_as_long_as_it_likes_between_messages(path: Path) -> None:
    async with serving(path, ScriptedHandler(), message_s=0.1):
        client = Client(path)
        await client.ask(m.AskStatus())
        await asyncio.sleep(0.3)
        assert isinstance(await client.ask(m.AskStatus()), m.StatusTold)
        client.close()


async def test_each_message_has_its_own_time(path: Path) -> None:
    data = m.pack_message(1, m.AskStatus())
    async with serving(path, ScriptedHandler(), message_s=0.4):
        client = Client(path)
        await client.send(data[:-1])
        for _ in range(6):
            await asyncio.sleep(0.1)
            await client.send(data[-1:] + data[:-1])
            assert isinstance(await client.answer(), m.StatusTold)
        client.close()


# Too much -----------------------------------------------------------------------------------------


async def test_session_that_does_not_read_its_answers_is_ended(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(10_000)
    async with serving(path, handler, unsent_bytes_max=100_000) as server:
        client, other = Client(path), Client(path)
        await other.ask(m.AskStatus())
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await send_all(client, [m.pack_message(1, m.AskStatus())] * 10_000)
        await until(lambda: server.describe()["open"] == 1)
        client.close()
        other.close()


async def test_answers_are_kept_for_a_session_that_reads_late(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(50_000)
    async with serving(path, handler):
        client = Client(path)
        for number in range(20):
            await client.send(m.pack_message(number, m.AskStatus()))
        await asyncio.sleep(0.05)
        for _ in range(20):
            assert isinstance(await client.answer(), m.StatusTold)
        client.close()


async def test_request_is_refused_when_too_many_wait_for_an_answer(path: Path) -> None:
    handler = ScriptedHandler()
    async with serving(path, handler, requests_max=3):
        client = Client(path)
        for number in range(3):
            await client.send(m.pack_message(number, MATCH))
        refused = await client.ask(MATCH, 3)
        assert isinstance(refused, m.Refused)
        assert not refused.is_mistake
        handler.gate.set()
        for _ in range(3):
            assert isinstance(await client.answer(), m.Matched)
        assert isinstance(await client.ask(MATCH), m.Matched)
        client.close()


async def test_request_is_refused_when_too_many_bytes_wait_for_an_answer(path: Path) -> None:
    handler = ScriptedHandler()
    large = m.Match(namespace=0, keys=bytes(32 * 1_000), deadline_s=1.0)
    async with serving(path, handler, request_bytes_max=70_000) as server:
        client, other = Client(path), Client(path)
        for number in range(2):
            await client.send(m.pack_message(number, large))
        assert isinstance(await client.ask(large, 2), m.Refused)
        assert isinstance(await other.ask(m.AskStatus()), m.StatusTold)
        handler.gate.set()
        for _ in range(2):
            assert isinstance(await client.answer(), m.Matched)
        assert server.describe()["request_bytes"] == 0
        client.close()
        other.close()


async def test_begun_messages_of_all_sessions_together_are_bounded(path: Path) -> None:
    bounds = {"total_request_bytes_max": 100_000}
    async with serving(path, ScriptedHandler(), **bounds) as server:
        clients = [Client(path) for _ in range(8)]
        for client in clients:
            await client.send(m.HEAD.pack(m.MESSAGE_BYTES_MAX, 1) + bytes(30_000))
        await until(lambda: server.describe()["open"] == 3)
        assert server.describe()["request_bytes"] <= 100_000
        for client in clients:
            client.close()
        await until(lambda: server.describe()["request_bytes"] == 0)


async def test_further_sessions_are_closed_at_once_when_there_are_too_many(path: Path) -> None:
    async with serving(path, ScriptedHandler(), sessions_max=2) as server:
        first, second, third = Client(path), Client(path), Client(path)
        await third.wait_until_ended()
        assert isinstance(await second.ask(m.AskStatus()), m.StatusTold)
        assert server.describe()["refused"] == 1
        first.close()
        await until(lambda: server.describe()["open"] == 1)
        fourth = Client(path)
        assert isinstance(await fourth.ask(m.AskStatus()), m.StatusTold)
        for client in (second, third, fourth):
            client.close()


async def test_answer_that_is_too_long_becomes_a_refusal(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(m.MESSAGE_BYTES_MAX)
    async with serving(path, handler):
        client = Client(path)
        assert isinstance(await client.ask(m.AskStatus()), m.Refused)
        client.close()


# Descriptors --------------------------------------------------------------------------------------


async def test_descriptors_that_a_client_sends_are_not_kept(path: Path) -> None:
    async with serving(path, ScriptedHandler()):
        client = Client(path)
        await client.ask(m.AskStatus())
        before = open_descriptors()
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 50))]
        client.socket.sendmsg([m.pack_message(1, m.AskStatus())], beside)
        assert isinstance(await client.answer(), m.StatusTold)
        assert open_descriptors() == before
        client.close()


async def test_descriptors_come_in_the_order_of_their_messages_when_answers_had_to_wait(
    path: Path,
) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(60_000)
    async with serving(path, handler):
        client = Client(path)
        for number in range(1, 31):
            lease = m.LeaseRun(namespace=0, blocks=number, deadline_s=1.0)
            await client.send(m.pack_message(2 * number, m.AskStatus()))
            await client.send(m.pack_message(2 * number + 1, lease))
        await asyncio.sleep(0.05)
        runs = []
        for _ in range(60):
            answer = await client.answer()
            if isinstance(answer, m.RunLeased):
                runs.append(answer.run)
        assert runs == list(range(1, 31))
        assert [int(os.pread(one, 9, 0)) for one in client.descriptors] == runs
        client.close()


async def test_descriptors_of_unsent_answers_are_closed_with_the_session(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(200_000)
    before = open_descriptors()
    async with serving(path, handler) as server:
        client = Client(path)
        for number in range(1, 11):
            lease = m.LeaseRun(namespace=0, blocks=number, deadline_s=1.0)
            await client.send(m.pack_message(1, m.AskStatus()))
            await client.send(m.pack_message(2, lease))
        await asyncio.sleep(0.05)
        client.close()
        await until(lambda: server.describe()["open"] == 0)
    await asyncio.sleep(0)
    assert open_descriptors() == before


# Work ---------------------------------------------------------------------------------------------


async def test_work_is_cancelled_when_its_session_ends(path: Path) -> None:
    handler = ScriptedHandler()
    async with serving(path, handler) as server:
        client = Client(path)
        for number in range(5):
            await client.send(m.pack_message(number, MATCH))
        await until(lambda: server.describe()["requests"] == 5)
        client.close()
        await until(lambda: handler.cancelled == 5)
        assert handler.ended == [1]
        assert server.describe()["request_bytes"] == 0


async def test_operating_fault_becomes_a_refusal(path: Path) -> None:
    async with serving(path, ScriptedHandler()):
        client = Client(path)
        forget = m.Forget(namespace=0, keys=b"", first_block=0, deadline_s=1.0)
        refused = await client.ask(forget)
        assert isinstance(refused, m.Refused)
        assert (refused.what, refused.is_mistake) == ("no", False)
        client.close()


async def test_fault_of_ours_ends_the_agent(path: Path) -> None:
    handler = ScriptedHandler()
    handler.fault = RuntimeError("an invariant is broken")

    async def provoke() -> None:
        async with serving(path, handler):
            client = Client(path)
            forget = m.Forget(namespace=0, keys=b"", first_block=0, deadline_s=1.0)
            await client.send(m.pack_message(1, forget))
            try:
                await client.wait_until_ended()
            finally:
                client.close()

    with pytest.raises(ExceptionGroup) as raised:
        await provoke()
    assert "an invariant is broken" in repr(raised.value.exceptions)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_process_of_another_user_is_refused(path: Path) -> None:
    async with serving(path, ScriptedHandler()) as server:
        os.chmod(path, 0o666)
        os.chmod(path.parent, 0o755)
        os.seteuid(NOBODY)
        try:
            client = Client(path)
        finally:
            os.seteuid(0)
        await client.wait_until_ended()
        client.close()
        assert server.describe()["refused"] == 1
